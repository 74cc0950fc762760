"""How far an IP address reaches, so that a registry cannot lead a client into its own network.

A redirect and the realm of a login may lead to any public address, and beyond that only to where
the registry is itself: from this machine to this machine, from a private network into one.
"""

import ipaddress
import socket
from collections.abc import Collection
from typing import Literal

from expertctl.reference import is_loopback
from expertctl.registry.address import looks_numeric

Scope = Literal["global", "private", "link-local", "loopback"]
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")
"""All that is assigned for the public network (RFC 4291 and IANA); `is_global` allows more."""
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def scope_of_address(text: str) -> Scope:
    """Return the scope of an IP address; what is neither public nor known counts as private."""
    try:
        address = _embedded(ipaddress.ip_address(text.partition("%")[0]))
    except ValueError:
        return "private"
    if address.is_loopback or address.is_unspecified:
        return "loopback"
    if address.is_link_local:
        return "link-local"
    return "global" if _is_public(address) else "private"


def scope_of_host(hostname: str) -> Scope | None:
    """Return the scope of a host that is an address in any spelling; None for other names."""
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
    return scope_of_address(name)


def forbidden_address(addresses: Collection[str], allowed: Collection[Scope]) -> str | None:
    """Return the first address that may not be connected to; None when all may."""
    return next((a for a in addresses if scope_of_address(a) not in allowed), None)


def _is_public(address: Address) -> bool:
    if isinstance(address, ipaddress.IPv6Address):
        return address.is_global and address in _GLOBAL_UNICAST
    return address.is_global and not address.is_multicast


def _embedded(address: Address) -> Address:
    """Return the IPv4 address that an IPv6 one leads to."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or address
