"""Who can reach the server, and what that demands."""

from expertctl.errors import UsageError
from expertctl.http.listening import is_loopback
from expertctl.server.settings import ServeSettings


def demand_secure(settings: ServeSettings, *, keyed: bool, insecure: bool) -> None:
    """Refuse to answer a network without keys, or to have keys cross it in clear text.

    Raises:
        UsageError: when others can reach the server and one of these is missing.
    """
    if is_loopback(settings.host):
        return
    if not keyed:
        hint = "make a key with `expertctl serve key new NAME`, or listen on 127.0.0.1"
        raise UsageError(f"others can reach {settings.host}, and there are no API keys", hint=hint)
    if settings.certificate is None and not insecure:
        raise UsageError(
            f"others can reach {settings.host}, and keys would travel in clear text",
            hint="give --tls-cert and --tls-key; or --insecure-http, behind what encrypts",
        )
