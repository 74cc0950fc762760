"""Which clients the registry serves without encryption."""

from expertctl.errors import UsageError
from expertctl.http.listening import is_loopback
from registry_server.settings import ServerSettings


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
