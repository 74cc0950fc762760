"""Listening addresses: who can reach them, and which port they use."""

import ipaddress
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from expertctl.errors import RegistryError


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """A reserved address: ``host`` is an IP address, ``port`` the actual port."""

    host: str
    port: int
    secure: bool

    @property
    def url(self) -> str:
        """The address as a URL."""
        return build_url(self.host, self.port, secure=self.secure)


def build_url(host: str, port: int, *, secure: bool) -> str:
    """Return the scheme, host and port that clients use, without a trailing slash."""
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if secure else 'http'}://{shown}:{port}"


def is_loopback(host: str) -> bool:
    """Return whether an address can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@contextmanager
def reserve_address(host: str, port: int, *, secure: bool) -> Iterator[ListenAddress]:
    """Find a free port, or check the given one, and hold it until the server has bound it as well.

    Workers share a port by ``SO_REUSEPORT``, with which two servers could share one unnoticed; so
    the port is first bound without it.

    Raises:
        RegistryError: when the address cannot be used.
    """
    try:
        family, address = _resolve_address(host, port)
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            address = (address[0], probe.getsockname()[1])
        holder = socket.socket(family)
    except OSError as error:
        message = f"cannot listen on {host}:{port}: {error.strerror or error}"
        raise RegistryError(message, hint="choose another with --host and --port") from error
    with holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(address)
        yield ListenAddress(address[0], address[1], secure)


def is_answering(address: ListenAddress) -> bool:
    """Return whether something accepts connections there."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.settimeout(1)
        return probe.connect_ex((address.host, address.port)) == 0


def _resolve_address(host: str, port: int) -> tuple[socket.AddressFamily, tuple[str, int]]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = found[0]
    return family, (str(address[0]), int(address[1]))
