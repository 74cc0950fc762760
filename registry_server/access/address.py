"""Where a request comes from, as far as that can be believed.

``X-Forwarded-For`` counts only when the peer itself is a trusted proxy; it is read from its end,
where proxies append, to the first address that is no trusted proxy. Everything before that was
written by the client.
"""

import ipaddress
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import Scope

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

UNKNOWN = "unknown"
MAX_HOPS = 20


def client_address(scope: Scope, proxies: Sequence[Network]) -> str:
    """Return the client's address; ``unknown`` when the server was not told one."""
    client = scope.get("client")
    peer = _parsed(client[0]) if client else None
    if peer is None:
        return UNKNOWN
    if not _trusted(peer, proxies):
        return str(peer)
    hops = ",".join(Headers(scope=scope).getlist("x-forwarded-for")).split(",")[-MAX_HOPS:]
    for hop in reversed(hops):
        found = _parsed(hop.strip())
        if found is None:
            break
        peer = found
        if not _trusted(peer, proxies):
            break
    return str(peer)


def limit_key(address: str) -> str:
    """Return what is limited together: one IPv4 address, or the /64 network of an IPv6 one."""
    parsed = _parsed(address)
    if isinstance(parsed, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((parsed, 64), strict=False))
    return address


def networks(texts: Sequence[str]) -> tuple[Network, ...]:
    """Read the networks of the settings."""
    return tuple(ipaddress.ip_network(text, strict=False) for text in texts)


def _trusted(address: Address, proxies: Sequence[Network]) -> bool:
    return any(address in network for network in proxies)


def _parsed(text: str) -> Address | None:
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    mapped = getattr(address, "ipv4_mapped", None)
    return mapped or address
