"""`RegistryAddress`, scheme, host and port of a registry; and the scopes of IP addresses.

Two addresses are the same registry when all three parts are equal; credentials, pins and the last
index belong to exactly one of them.

A registry must not lead a client into its own network. A redirect and the realm of a login may lead
to any public address, and beyond that only to where the registry is itself: from this machine to
this machine, from a private network into one.
"""

import ipaddress
import re
import socket
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, Self

from expertctl.errors import UsageError
from expertctl.reference import is_loopback

MAX_LENGTH = 256
_PORTS = {"https": 443, "http": 80}
_ADDRESS = re.compile(
    r"(?:(?P<scheme>[a-zA-Z][a-zA-Z0-9+.-]*)://)?"
    r"(?P<host>[a-zA-Z0-9-]{1,63}(?:\.[a-zA-Z0-9-]{1,63})*|\[[0-9a-fA-F:.]{2,45}\])"
    r"(?::(?P<port>[0-9]{1,5}))?/?"
)
_HINT = "write it as registry.example.com, registry.example.com:8443 or https://…"


@dataclass(frozen=True, slots=True, order=True)
class RegistryAddress:
    """One registry, made by `parse`."""

    hostname: str
    """Lower case; an IPv6 address without its brackets."""
    port: int
    scheme: str

    @classmethod
    def parse(cls, text: str, *, allow_http: bool = False) -> Self:
        """Parse ``host[:port]`` or a URL without path, user name or query.

        Without a scheme it is https, except for loopback addresses: http.

        Raises:
            UsageError: for anything else, and for http to another machine unless it is allowed.
        """
        if "@" in text:  # not shown: it may hold a password
            hint = "`expertctl login HOST` takes the token, and keeps it from messages and logs"
            raise UsageError("the address of a registry contains no login", hint=hint)
        match = _ADDRESS.fullmatch(text) if len(text) <= MAX_LENGTH else None
        if match is None:
            raise UsageError(f"{text[:80]!r} is not the address of a registry", hint=_HINT)
        hostname = _check_hostname(match["host"], text)
        local = is_loopback(hostname)
        scheme = (match["scheme"] or ("http" if local else "https")).lower()
        if scheme not in _PORTS:
            raise UsageError(f"{text[:80]!r} is neither https nor http", hint=_HINT)
        if scheme == "http" and not (local or allow_http):
            hint = "use https, or `expertctl config set allow_http true` on a network you trust"
            raise UsageError(f"{text[:80]} would send tokens and packages unencrypted", hint=hint)
        port = int(match["port"]) if match["port"] else _PORTS[scheme]
        if not 0 < port < 65536:
            raise UsageError(f"{text[:80]!r} has an invalid port", hint=_HINT)
        return cls(hostname, port, scheme)

    @property
    def host(self) -> str:
        """``host``, or ``host:port`` where the port is not 443 or the host is this machine.

        The name of the registry in messages and in `Reference`.
        """
        name = f"[{self.hostname}]" if ":" in self.hostname else self.hostname
        is_default = self.port == _PORTS["https"] and not self.is_loopback
        return name if is_default else f"{name}:{self.port}"

    @property
    def url(self) -> str:
        """``scheme://host[:port]``, without a trailing slash."""
        name = f"[{self.hostname}]" if ":" in self.hostname else self.hostname
        port = "" if self.port == _PORTS[self.scheme] else f":{self.port}"
        return f"{self.scheme}://{name}{port}"

    @property
    def folder(self) -> str:
        """The host as a folder name valid on any system."""
        return self.host.replace(":", "+").replace("[", "").replace("]", "")

    @property
    def is_loopback(self) -> bool:
        """Whether its very name says that it is on this machine."""
        return is_loopback(self.hostname)

    def __str__(self) -> str:
        """Return the host."""
        return self.host


def looks_numeric(hostname: str) -> bool:
    """Tell whether a host is an IP address in any notation that systems accept: 1.2.3.4, 0x7f.1."""
    if ":" in hostname:
        return True
    last = hostname.rstrip(".").rpartition(".")[2].lower()
    return re.fullmatch(r"[0-9]+|0x[0-9a-f]*", last) is not None


def _check_hostname(text: str, whole: str) -> str:
    name = text.lower()
    if name.startswith("["):
        try:
            return ipaddress.IPv6Address(name[1:-1]).compressed
        except ValueError as error:
            raise UsageError(f"{whole[:80]!r} has no valid address", hint=_HINT) from error
    if any(label.startswith("-") or label.endswith("-") for label in name.split(".")):
        raise UsageError(f"{whole[:80]!r} has no valid host name", hint=_HINT)
    return name


NetworkScope = Literal["global", "private", "link-local", "loopback"]
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")
"""The assigned part of the public network (RFC 4291 and IANA); `is_global` allows more."""
IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


def classify_address(text: str) -> NetworkScope:
    """Return the scope of an IP address; one that is neither public nor known counts as private."""
    try:
        address = _embedded_ipv4(ipaddress.ip_address(text.partition("%")[0]))
    except ValueError:
        return "private"
    if address.is_loopback or address.is_unspecified:
        return "loopback"
    if address.is_link_local:
        return "link-local"
    return "global" if _is_public(address) else "private"


def classify_host(hostname: str) -> NetworkScope | None:
    """Return the scope of a host that is an address in any notation; None for other names."""
    name = hostname.rstrip(".").lower()
    if is_loopback(name):
        return "loopback"
    if not looks_numeric(name):
        return None
    if ":" not in name:
        try:
            name = socket.inet_ntoa(socket.inet_aton(name))  # 2130706433, 0x7f.1, 0177.1
        except OSError:
            return "private"
    return classify_address(name)


def find_forbidden_address(
    addresses: Collection[str], allowed: Collection[NetworkScope]
) -> str | None:
    """Return the first address outside the allowed scopes; None when all are allowed."""
    return next((a for a in addresses if classify_address(a) not in allowed), None)


def _is_public(address: IpAddress) -> bool:
    if isinstance(address, ipaddress.IPv6Address):
        return address.is_global and address in _GLOBAL_UNICAST
    return address.is_global and not address.is_multicast


def _embedded_ipv4(address: IpAddress) -> IpAddress:
    """Return the IPv4 address that an IPv6 address maps to, or else the address itself."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or address
