"""Where the server listens: who can reach it there, and which port it really is."""

import ipaddress
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from expertctl.errors import RegistryError, UsageError
from registry_server.settings import ServerSettings


@dataclass(frozen=True, slots=True)
class Listening:
    """An address that is held for the server: ``host`` is an IP address, ``port`` the real one."""

    host: str
    port: int
    secure: bool

    @property
    def url(self) -> str:
        """The address as a URL."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.secure else 'http'}://{host}:{self.port}"


def demand_secure(settings: ServerSettings) -> None:
    """Refuse to send tokens over a network in clear text.

    Raises:
        UsageError: when others can reach the server and nothing encrypts.
    """
    proxied = bool(settings.trusted_proxies) or (settings.url or "").startswith("https://")
    if is_loopback(settings.host) or settings.certificate or proxied:
        return
    hint = (
        "give --tls-cert and --tls-key, or `url` (https://…) and `trusted_proxies` of the proxy "
        "that encrypts; --insecure-http serves in clear text all the same"
    )
    message = f"others can reach {settings.host}, and tokens would travel in clear text"
    raise UsageError(message, hint=hint)


def is_loopback(host: str) -> bool:
    """Tell whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@contextmanager
def held_address(settings: ServerSettings) -> Iterator[Listening]:
    """Find a free port, or check the wanted one, and hold it; the server binds it beside.

    Workers share a port by ``SO_REUSEPORT``, which would also let two servers share one in
    silence; so the first look is without it.

    Raises:
        RegistryError: when the address cannot be used.
    """
    try:
        family, address = _resolve(settings.host, settings.port)
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            address = (address[0], probe.getsockname()[1])
        holder = socket.socket(family)
    except OSError as error:
        where = f"{settings.host}:{settings.port}"
        message = f"cannot listen on {where}: {error.strerror or error}"
        raise RegistryError(message, hint="choose another with --host and --port") from error
    with holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(address)
        yield Listening(address[0], address[1], settings.certificate is not None)


def is_answering(address: Listening) -> bool:
    """Tell whether something accepts connections there."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.settimeout(1)
        return probe.connect_ex((address.host, address.port)) == 0


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, tuple[str, int]]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = found[0]
    return family, (str(address[0]), int(address[1]))
