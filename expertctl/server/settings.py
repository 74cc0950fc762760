"""How the generation server is run: where it listens, what it takes, and the batch behind it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from expertctl.engine.serving.batch_settings import BatchSettings
from expertctl.errors import UsageError
from expertctl.http.listening import url_of
from expertctl.server.aliases import check_names
from expertctl.server.post_processing.command import Command
from expertctl.settings import MAX_PORT, MAX_QUEUE, MAX_ROWS, MAX_SECONDS

DEFAULT_PORT = 8000
BODY_BYTES = 4 << 20
"""More than the longest prompt takes in JSON; once read, a body can take fifty times as much."""
MAX_BODY_BYTES = 1 << 30
BEHIND_SECONDS = 60.0
_HOST = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]{0,31}://[a-z0-9.-]{1,253}(?::[0-9]{1,5})?")
"""As browsers send it: lower case, and nothing after the port."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """All settings of one server."""

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    url: str | None = None
    """The address that users see; by default from host and port, never from a header."""
    allowed_hosts: tuple[str, ...] = ()
    """Further names that ``Host`` may be, in lower case, such as ``host.docker.internal``."""
    allowed_origins: tuple[str, ...] = ()
    """Web pages of other sites that may send requests and read answers."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Further names of models: ``gpt-4o-mini`` → ``auto``."""
    strict_fields: bool = False
    """Whether a field that is not implemented here is refused instead of ignored."""
    json_instruction: bool = True
    """Whether a model is told the form of JSON that a request asks for by a schema."""
    certificate: Path | None = None
    private_key: Path | None = None
    body_bytes: int = BODY_BYTES
    timeout: float | None = None
    """Seconds after which an answer ends as it is, if the request names no time."""
    behind_seconds: float = BEHIND_SECONDS
    """How long the reader of a stream may leave an event unread."""
    log_prompts: bool = False
    completions_special_tokens: bool = True
    """Whether control tokens in prompts of completions are control tokens; in chats they never are.

    A request decides for itself with ``parse_special``.
    """
    traces: str | None = None
    """Address that spans are sent to, from `trace_address`; None: no spans are made."""
    validators: Mapping[str, Command] = field(default_factory=dict)
    """Programs that requests can name to have answers checked."""
    batch: BatchSettings = field(default_factory=BatchSettings)

    @property
    def public_url(self) -> str:
        """The scheme, host and port that clients use, without a slash at the end."""
        if self.url:
            return self.url.rstrip("/")
        return url_of(self.host, self.port, secure=self.certificate is not None)


def check_settings(settings: ServeSettings) -> None:
    """Check settings before anything is opened.

    Raises:
        UsageError: naming what is wrong.
    """
    _check_numbers(settings)
    if (settings.certificate is None) != (settings.private_key is None):
        raise UsageError("a certificate and its key go together", hint="--tls-cert and --tls-key")
    if settings.url is not None and not _is_address(settings.url):
        raise UsageError(
            f"the url {settings.url[:80]!r} is no address of a server",
            hint="write https://experts.example.org",
        )
    _check_allowed(settings)
    check_names(settings.aliases)


def _check_numbers(settings: ServeSettings) -> None:
    batch = settings.batch
    for name, value, low, high in (
        ("port", settings.port, 0, MAX_PORT),
        ("rows", batch.rows, 1, MAX_ROWS),
        ("queue", batch.queue, 1, MAX_QUEUE),
        ("body_bytes", settings.body_bytes, 1, MAX_BODY_BYTES),
    ):
        if not low <= value <= high:
            raise UsageError(f"{name} {value} is outside {low} to {high}")
    for name, seconds in (("timeout", settings.timeout), ("behind", settings.behind_seconds)):
        if seconds is not None and not 0 < seconds <= MAX_SECONDS:
            raise UsageError(f"{name} {seconds:g} must be above 0, up to {MAX_SECONDS}")


def _check_allowed(settings: ServeSettings) -> None:
    for host in settings.allowed_hosts:
        if not _HOST.fullmatch(host):
            raise UsageError(
                f"the allowed host {host[:80]!r} is not the name of a host",
                hint="write the name alone, without scheme and port: host.docker.internal",
            )
    for origin in settings.allowed_origins:
        if not _ORIGIN.fullmatch(origin):
            raise UsageError(
                f"the allowed origin {origin[:80]!r} is not the origin of a page",
                hint="write its scheme, host and port, and no path: http://localhost:3000",
            )


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        names_port = parts.port is None or parts.port > 0
    except ValueError:
        return False
    bare = parts.path in {"", "/"} and not parts.query and not parts.fragment
    return bare and names_port and parts.scheme in {"http", "https"} and bool(parts.hostname)
