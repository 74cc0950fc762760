"""Whether others can reach the server, and what that demands."""

from urllib.parse import urlsplit

from expertctl.errors import UsageError
from expertctl.http.listening import is_loopback
from expertctl.server.settings import ServeSettings


def is_exposed(settings: ServeSettings) -> bool:
    """Whether others can reach the server, by its own address or that of a proxy before it."""
    return not (is_loopback(settings.host) and is_loopback(_public_host(settings)))


def demand_secure(settings: ServeSettings, *, keyed: bool, insecure: bool) -> None:
    """Refuse to serve a network without API keys, or with keys sent in clear text.

    Raises:
        UsageError: when others can reach the server, and keys or encryption are missing.
    """
    if not is_exposed(settings):
        return
    host = _public_host(settings)
    if not keyed:
        hint = "make a key with `expertctl serve key new NAME`, or listen on 127.0.0.1 alone"
        raise UsageError(f"others can reach {host}, and there are no API keys", hint=hint)
    if not (_is_encrypted(settings) or insecure):
        raise UsageError(
            f"others can reach {host}, and keys would travel in clear text",
            hint="give --tls-cert and --tls-key; or --insecure-http, behind what encrypts",
        )


def _is_encrypted(settings: ServeSettings) -> bool:
    """Whether the connection is encrypted: by TLS here, or by a proxy on this machine."""
    proxied = settings.public_url.startswith("https:") and is_loopback(settings.host)
    return settings.certificate is not None or proxied


def _public_host(settings: ServeSettings) -> str:
    return (settings.url and urlsplit(settings.url).hostname) or settings.host
