"""How a registry is run: ``registry.toml`` in its data folder, as a value.

::

    DATA/registry.toml           these settings
    DATA/registry.db             users, rights and packages: SQLite
    DATA/blobs/<algorithm>/ab/<hex>
    DATA/uploads/<id>            blob uploads that go on
    DATA/keys/index.pem          signs index documents; mode 0600
"""

from dataclasses import dataclass, field
from pathlib import Path

DAY = 86400.0
DEFAULT_INTERVAL_DAYS = 7


@dataclass(frozen=True, slots=True)
class Limits:
    """What one may use; sizes in bytes, times in seconds."""

    manifest_bytes: int = 4 << 20
    blob_bytes: int = 16 << 30
    body_bytes: int = 1 << 20
    """Of requests to ``/api/v1``."""
    quota_bytes: int = 50_000_000_000
    """Unique bytes of one namespace, unless it has its own."""
    free_bytes: int = 256 << 20
    """Nothing is accepted below this much free space."""
    upload_seconds: float = DAY
    grace_seconds: float = DAY
    """How long a blob that no manifest names is kept."""
    requests_per_minute: int = 6000
    """Of one address or token."""
    failures_per_minute: int = 20
    """Failed logins of one address with one token; five times as many of the address in all."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """All settings of one registry."""

    data: Path
    host: str = "127.0.0.1"
    port: int = 8080
    url: str | None = None
    """The address that users see; by default made from host and port. Never from a header."""
    read: str = "token"
    """Who may read namespaces that do not say so themselves: ``public`` or ``token``."""
    certificate: Path | None = None
    private_key: Path | None = None
    index_interval_days: int = DEFAULT_INTERVAL_DAYS
    """Index documents say that a newer one is made at least so often, and the server keeps that."""
    trusted_proxies: tuple[str, ...] = ()
    """Networks whose ``X-Forwarded-For`` is believed."""
    limits: Limits = field(default_factory=Limits)

    @property
    def public_url(self) -> str:
        """The scheme, host and port that clients use, without a slash at the end."""
        if self.url:
            return self.url.rstrip("/")
        scheme = "https" if self.certificate else "http"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{scheme}://{host}:{self.port}"

    @property
    def database(self) -> Path:
        """The SQLite file."""
        return self.data / "registry.db"

    @property
    def blobs(self) -> Path:
        """The blob storage."""
        return self.data / "blobs"

    @property
    def uploads(self) -> Path:
        """Blob uploads that go on."""
        return self.data / "uploads"

    @property
    def index_key(self) -> Path:
        """The private key that signs index documents."""
        return self.data / "keys" / "index.pem"
