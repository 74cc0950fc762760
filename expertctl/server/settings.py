"""How the generation server is run: where it listens, what it takes, and the batch behind it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from expertctl.engine.serving.batch_settings import BatchSettings
from expertctl.server.post_processing.command import Command

DEFAULT_PORT = 8000
BODY_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """All settings of one server."""

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    url: str | None = None
    """The address that users see; by default made from host and port. Never from a header."""
    certificate: Path | None = None
    private_key: Path | None = None
    body_bytes: int = BODY_BYTES
    timeout: float | None = None
    """Seconds after which an answer ends with what is there, where a request names no time."""
    log_prompts: bool = False
    validators: Mapping[str, Command] = field(default_factory=dict)
    """Programs that requests can name to have answers checked."""
    batch: BatchSettings = field(default_factory=BatchSettings)

    @property
    def public_url(self) -> str:
        """The scheme, host and port that clients use, without a slash at the end."""
        if self.url:
            return self.url.rstrip("/")
        scheme = "https" if self.certificate else "http"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{scheme}://{host}:{self.port}"
