"""The settings of a registry: ``registry.toml`` in its data folder, and the lock of that folder.

::

    DATA/registry.toml           these settings
    DATA/registry.db             users, rights and packages: SQLite
    DATA/blobs/<algorithm>/ab/<hex>
    DATA/uploads/<id>            blob uploads in progress
    DATA/keys/index.pem          signs index documents; mode 0600

``registry.toml`` is read strictly, so that a mistake in it cannot grant access. Every key has one
type and one range; all problems are reported at once. A missing key has the default of
`ServerSettings`; relative paths are relative to the data folder.

The lock admits one server at a time. The operating system releases it with the process that holds
it, so a killed server leaves nothing to repair. Worker processes share the lock of their server.
"""

import ipaddress
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from filelock import FileLock, Timeout

from expertctl.errors import InvalidPackageError, NotFoundError, StoreError
from expertctl.files import write_atomic

DAY = 86400.0
DEFAULT_INTERVAL_DAYS = 7
DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class RegistryLimits:
    """Limits of use; sizes in bytes, times in seconds."""

    manifest_bytes: int = 4 << 20
    blob_bytes: int = 16 << 30
    body_bytes: int = 1 << 20
    """Maximum size of a body sent to ``/api/v1``."""
    quota_bytes: int = 50_000_000_000
    """Default quota of a namespace, in unique bytes."""
    free_bytes: int = 256 << 20
    """Uploads are refused if less space than this would be free."""
    upload_seconds: float = DAY
    grace_seconds: float = DAY
    """How long a blob is kept that no manifest references."""
    requests_per_minute: int = 6000
    """Maximum requests of an address or a token."""
    failures_per_minute: int = 20
    """Maximum failed logins of an address with one token; five times as many in total."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """The settings of a registry."""

    data: Path
    name: str | None = None
    """The display name on the pages; by default the host of the public URL."""
    host: str = "127.0.0.1"
    port: int = 8080
    url: str | None = None
    """The public URL; by default made from host and port, never from a header."""
    read: str = "token"
    """The default read access of namespaces: ``public`` or ``token``."""
    certificate: Path | None = None
    private_key: Path | None = None
    index_interval_days: int = DEFAULT_INTERVAL_DAYS
    """The maximum interval between index documents, which the documents state."""
    trusted_proxies: tuple[str, ...] = ()
    """Networks whose ``X-Forwarded-For`` is trusted."""
    limits: RegistryLimits = field(default_factory=RegistryLimits)

    @property
    def public_url(self) -> str:
        """The scheme, host and port that clients use, as a browser writes them in ``Origin``.

        The host is in lower case, and the default port of the scheme is left out.
        """
        scheme = "https" if self.certificate else "http"
        host = f"[{self.host}]" if ":" in self.host else self.host
        url = urlsplit(self.url or f"{scheme}://{host}:{self.port}")
        name = f"[{url.hostname}]" if ":" in (url.hostname or "") else url.hostname
        port = "" if url.port in {None, DEFAULT_PORTS[url.scheme]} else f":{url.port}"
        return f"{url.scheme}://{name}{port}"

    @property
    def is_encrypted(self) -> bool:
        """Whether clients use https, here or at a proxy."""
        return self.public_url.startswith("https://")

    @property
    def display_name(self) -> str:
        """The name that pages show."""
        return self.name or urlsplit(self.public_url).netloc

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
        """The folder of blob uploads in progress."""
        return self.data / "uploads"

    @property
    def index_key(self) -> Path:
        """The private key that signs index documents."""
        return self.data / "keys" / "index.pem"


SETTINGS_NAME = "registry.toml"
READ_ACCESS_VALUES = ("public", "token")
_MAX_BYTES = 64 << 10
MAX_DISPLAY_NAME = 60
_SETTING_KEYS = (
    "name",
    "host",
    "port",
    "url",
    "read",
    "certificate",
    "private_key",
    "index_interval_days",
    "trusted_proxies",
    "limits",
)
MAX_INTERVAL_DAYS = 3650
"""The maximum that the schema of index documents allows."""
_Value = TypeVar("_Value")


def settings_path(data: Path) -> Path:
    """Return the settings file of a data folder."""
    return data / SETTINGS_NAME


def read_settings(data: Path) -> ServerSettings:
    """Read the settings of a registry.

    Raises:
        NotFoundError: when there is no registry in this folder.
        InvalidPackageError: when the file has unknown or invalid settings.
    """
    path = settings_path(data)
    try:
        with path.open("rb") as stream:
            text = stream.read(_MAX_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError) as error:
        hint = f"make one with `expertctl registry init {data}`"
        raise NotFoundError(f"{data}: there is no registry here", hint=hint) from error
    return _parse(data.absolute(), path, text)


def write_settings(settings: ServerSettings) -> None:
    """Write the settings that differ from the defaults, atomically."""
    text = "\n".join([*_format_lines(settings), ""])
    write_atomic(settings_path(settings.data), text.encode("utf-8"), mode=0o600)


def override_settings(
    settings: ServerSettings,
    *,
    host: str | None = None,
    port: int | None = None,
    certificate: Path | None = None,
    private_key: Path | None = None,
) -> ServerSettings:
    """Return the settings with values replaced by those of the command line.

    Raises:
        InvalidPackageError: when a value is invalid.
    """
    changed = replace(
        settings,
        host=settings.host if host is None else host,
        port=settings.port if port is None else port,
        certificate=settings.certificate if certificate is None else certificate.absolute(),
        private_key=settings.private_key if private_key is None else private_key.absolute(),
    )
    return check_settings(changed)


def check_settings(settings: ServerSettings) -> ServerSettings:
    """Check settings that were not read from a file, and return them.

    Raises:
        InvalidPackageError: when a value is invalid.
    """
    text = "\n".join(_format_lines(settings))
    return _parse(settings.data, settings_path(settings.data), text.encode("utf-8"))


def _format_lines(settings: ServerSettings) -> list[str]:
    lines = [f"read = {_quote(settings.read)}", f"host = {_quote(settings.host)}"]
    lines += [f"port = {settings.port}"]
    paths = {"certificate": settings.certificate, "private_key": settings.private_key}
    texts = {"name": settings.name, "url": settings.url}
    texts |= {k: str(v) for k, v in paths.items() if v is not None}
    lines += [f"{key} = {_quote(text)}" for key, text in texts.items() if text is not None]
    if settings.index_interval_days != DEFAULT_INTERVAL_DAYS:
        lines += [f"index_interval_days = {settings.index_interval_days}"]
    if settings.trusted_proxies:
        lines += [f"trusted_proxies = [{', '.join(map(_quote, settings.trusted_proxies))}]"]
    names = [f.name for f in fields(RegistryLimits)]
    defaults = RegistryLimits()
    changed = [n for n in names if getattr(settings.limits, n) != getattr(defaults, n)]
    if changed:
        lines += ["", "[limits]", *(f"{n} = {getattr(settings.limits, n)}" for n in changed)]
    return lines


def _quote(text: str) -> str:
    shown = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in shown) + '"'


def _parse(data: Path, path: Path, text: bytes) -> ServerSettings:
    if len(text) > _MAX_BYTES:
        raise InvalidPackageError(str(path), [f"more than {_MAX_BYTES} bytes are too many"])
    try:
        document = tomllib.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise InvalidPackageError(str(path), [f"not valid TOML: {error}"]) from error
    unknown = [f"unknown setting {k[:80]!r}" for k in document if k not in _SETTING_KEYS]
    hint = f"known: {', '.join(_SETTING_KEYS)}" if unknown else ""
    reader = _SettingsReader(document, unknown)
    settings = _read_table(data, reader)
    if reader.problems:
        raise InvalidPackageError(str(path), reader.problems, hint=hint)
    return settings


@dataclass(frozen=True, slots=True)
class _SettingsReader:
    """Reads typed values from a table, and collects the problems."""

    table: Mapping[str, object]
    problems: list[str]

    def read_value(self, key: str, kind: type[_Value], default: _Value) -> _Value:
        found = self.table.get(key, default)
        if isinstance(found, kind) and not (isinstance(found, bool) and kind is not bool):
            return found
        self.problems.append(f"{key} must be of the kind {kind.__name__}")
        return default

    def check(self, valid: bool, problem: str) -> None:
        if not valid:
            self.problems.append(problem)


def _read_table(data: Path, reader: _SettingsReader) -> ServerSettings:
    defaults = ServerSettings(data=data)
    host = reader.read_value("host", str, defaults.host)
    reader.check(_is_host(host), f"host {host[:80]!r} is not an address to listen on")
    port = reader.read_value("port", int, defaults.port)
    reader.check(0 <= port <= 65535, f"port {port} is not a port")
    read = reader.read_value("read", str, defaults.read)
    reader.check(read in READ_ACCESS_VALUES, f"read {read[:80]!r} is neither 'public' nor 'token'")
    certificate, private_key = (_read_path(data, reader, k) for k in ("certificate", "private_key"))
    days = reader.read_value("index_interval_days", int, defaults.index_interval_days)
    problem = f"index_interval_days {days} is not between 1 and {MAX_INTERVAL_DAYS}"
    reader.check(1 <= days <= MAX_INTERVAL_DAYS, problem)
    both = (certificate is None) == (private_key is None)
    reader.check(both, "certificate and private_key belong together")
    return replace(
        defaults,
        name=_read_display_name(reader),
        host=host,
        port=port,
        url=_read_url(reader),
        read=read,
        certificate=certificate,
        private_key=private_key,
        index_interval_days=days,
        trusted_proxies=_read_proxies(reader),
        limits=_read_limits(reader),
    )


def _read_display_name(reader: _SettingsReader) -> str | None:
    text = reader.read_value("name", str, "").strip()
    problem = f"name must be one printable line of at most {MAX_DISPLAY_NAME} characters"
    reader.check(text.isprintable() and len(text) <= MAX_DISPLAY_NAME, problem)
    return text or None


def _read_url(reader: _SettingsReader) -> str | None:
    text = reader.read_value("url", str, "")
    if text:
        problem = f"url {text[:200]!r} is not https://host[:port] or http://host[:port]"
        reader.check(_is_origin(text), problem)
    return text.rstrip("/") or None


def _is_origin(text: str) -> bool:
    """Return whether a text is a scheme, a host and optionally a port, and nothing else."""
    try:
        parts = urlsplit(text)
        port, host = parts.port, parts.hostname
    except ValueError:
        return False
    plain = text.isascii() and text.isprintable() and " " not in text
    rest = parts.path in {"", "/"} and not (parts.query or parts.fragment or "@" in parts.netloc)
    return plain and rest and parts.scheme in {"http", "https"} and bool(host) and port != 0


def _is_host(text: str) -> bool:
    return bool(text) and text.isascii() and text.isprintable() and not set(text) & set(" /@?#")


def _read_path(data: Path, reader: _SettingsReader, key: str) -> Path | None:
    text = reader.read_value(key, str, "")
    return data / text if text else None


def _read_proxies(reader: _SettingsReader) -> tuple[str, ...]:
    networks = reader.read_value("trusted_proxies", list, [])
    for network in networks:
        try:
            ipaddress.ip_network(network if isinstance(network, str) else "")
        except ValueError:
            reader.problems.append(f"trusted_proxies: {str(network)[:80]!r} is not a network")
    return tuple(network for network in networks if isinstance(network, str))


def _read_limits(reader: _SettingsReader) -> RegistryLimits:
    table = reader.read_value("limits", dict, {})
    defaults = RegistryLimits()
    known = {f.name: getattr(defaults, f.name) for f in fields(RegistryLimits)}
    unknown = [f"unknown setting 'limits.{str(k)[:80]}'" for k in table if k not in known]
    inner = _SettingsReader(table, unknown)
    values: dict[str, Any] = {
        name: _read_number(inner, name, default) for name, default in known.items()
    }
    reader.problems.extend(inner.problems)
    return replace(defaults, **values)


def _read_number(reader: _SettingsReader, name: str, default: float) -> float:
    """Read a limit: not negative, finite, and an integer if the default is one."""
    value = reader.table.get(name, default)
    kinds = (int,) if isinstance(default, int) else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not 0 <= value < 2**53:
        expected = "an integer" if isinstance(default, int) else "a number"
        reader.problems.append(f"limits.{name} must be {expected} of at least 0")
        return default
    return value if isinstance(default, int) else float(value)


SERVE_LOCK_NAME = "serve.lock"
LOCK_WAIT_SECONDS = 3.0
"""How long workers of a killed server may take to end, in seconds."""


@contextmanager
def lock_data_folder(data: Path, *, wait_seconds: float = LOCK_WAIT_SECONDS) -> Iterator[None]:
    """Lock the data folder for a server, or for work during which no server may run.

    Raises:
        StoreError: when a server uses it, or this user may not write to it.
    """
    try:
        with FileLock(data / SERVE_LOCK_NAME, timeout=wait_seconds, mode=0o600, thread_local=False):
            yield
    except Timeout as error:
        message = f"{data}: a server runs on this registry already"
        raise StoreError(message, hint="end it, or serve another data folder") from error
    except PermissionError as error:
        raise StoreError(
            f"{data}: {error.strerror}", hint="run it as the folder's owner"
        ) from error
