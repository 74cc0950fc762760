"""``registry.toml``: read strictly, so that a slip in it cannot open what should be closed.

Every key has one type and one range; all problems are told at once. A missing key keeps the value
of `ServerSettings`, a relative path counts from the data folder.
"""

import ipaddress
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from expertctl.durable import write_atomic
from expertctl.errors import InvalidPackageError, NotFoundError
from registry_server.settings import DEFAULT_INTERVAL_DAYS, Limits, ServerSettings

SETTINGS_NAME = "registry.toml"
READERS = ("public", "token")
_MAX_BYTES = 64 << 10
_KEYS = (
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
"""What the schema of index documents allows."""
_Value = TypeVar("_Value")


def settings_path(data: Path) -> Path:
    """Return the settings file of a data folder."""
    return data / SETTINGS_NAME


def read_settings(data: Path) -> ServerSettings:
    """Read the settings of a registry.

    Raises:
        NotFoundError: when there is no registry in this folder.
        InvalidPackageError: when the file says something unknown or impossible.
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
    """Write what differs from the defaults; the file appears at once and whole."""
    text = "\n".join([*_lines(settings), ""])
    write_atomic(settings_path(settings.data), text.encode("utf-8"), mode=0o600)


def overridden(
    settings: ServerSettings,
    *,
    host: str | None = None,
    port: int | None = None,
    certificate: Path | None = None,
    private_key: Path | None = None,
) -> ServerSettings:
    """Return the settings with what was given on the command line instead.

    Raises:
        InvalidPackageError: when a value is impossible.
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
    """Return settings that were not read from a file, when a file could say them.

    Raises:
        InvalidPackageError: when a value is impossible.
    """
    text = "\n".join(_lines(settings))
    return _parse(settings.data, settings_path(settings.data), text.encode("utf-8"))


def _lines(settings: ServerSettings) -> list[str]:
    lines = [f"read = {_quoted(settings.read)}", f"host = {_quoted(settings.host)}"]
    lines += [f"port = {settings.port}"]
    paths = {"certificate": settings.certificate, "private_key": settings.private_key}
    texts = {"url": settings.url, **{k: str(v) for k, v in paths.items() if v is not None}}
    lines += [f"{key} = {_quoted(text)}" for key, text in texts.items() if text is not None]
    if settings.index_interval_days != DEFAULT_INTERVAL_DAYS:
        lines += [f"index_interval_days = {settings.index_interval_days}"]
    if settings.trusted_proxies:
        lines += [f"trusted_proxies = [{', '.join(map(_quoted, settings.trusted_proxies))}]"]
    names = [f.name for f in fields(Limits)]
    usual = Limits()
    changed = [n for n in names if getattr(settings.limits, n) != getattr(usual, n)]
    if changed:
        lines += ["", "[limits]", *(f"{n} = {getattr(settings.limits, n)}" for n in changed)]
    return lines


def _quoted(text: str) -> str:
    shown = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in shown) + '"'


def _parse(data: Path, path: Path, text: bytes) -> ServerSettings:
    if len(text) > _MAX_BYTES:
        raise InvalidPackageError(str(path), [f"more than {_MAX_BYTES} bytes are too many"])
    try:
        document = tomllib.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise InvalidPackageError(str(path), [f"not valid TOML: {error}"]) from error
    unknown = [f"unknown setting {k[:80]!r}" for k in document if k not in _KEYS]
    hint = f"known: {', '.join(_KEYS)}" if unknown else ""
    reader = _Reader(document, unknown)
    settings = _settings(data, reader)
    if reader.problems:
        raise InvalidPackageError(str(path), reader.problems, hint=hint)
    return settings


@dataclass(frozen=True, slots=True)
class _Reader:
    """Takes values of one type out of a table and collects what is wrong with them."""

    table: Mapping[str, object]
    problems: list[str]

    def value(self, key: str, kind: type[_Value], default: _Value) -> _Value:
        found = self.table.get(key, default)
        if isinstance(found, kind) and not (isinstance(found, bool) and kind is not bool):
            return found
        self.problems.append(f"{key} must be of the kind {kind.__name__}")
        return default

    def demand(self, held: bool, problem: str) -> None:
        if not held:
            self.problems.append(problem)


def _settings(data: Path, reader: _Reader) -> ServerSettings:
    usual = ServerSettings(data=data)
    host = reader.value("host", str, usual.host)
    reader.demand(_is_host(host), f"host {host[:80]!r} is not an address to listen on")
    port = reader.value("port", int, usual.port)
    reader.demand(0 <= port <= 65535, f"port {port} is not a port")
    read = reader.value("read", str, usual.read)
    reader.demand(read in READERS, f"read {read[:80]!r} is neither 'public' nor 'token'")
    certificate, private_key = (_path(data, reader, k) for k in ("certificate", "private_key"))
    days = reader.value("index_interval_days", int, usual.index_interval_days)
    problem = f"index_interval_days {days} is not between 1 and {MAX_INTERVAL_DAYS}"
    reader.demand(1 <= days <= MAX_INTERVAL_DAYS, problem)
    both = (certificate is None) == (private_key is None)
    reader.demand(both, "certificate and private_key belong together")
    return replace(
        usual,
        host=host,
        port=port,
        url=_url(reader),
        read=read,
        certificate=certificate,
        private_key=private_key,
        index_interval_days=days,
        trusted_proxies=_proxies(reader),
        limits=_limits(reader),
    )


def _url(reader: _Reader) -> str | None:
    text = reader.value("url", str, "")
    if text:
        problem = f"url {text[:200]!r} is not https://host[:port] or http://host[:port]"
        reader.demand(_is_origin(text), problem)
    return text.rstrip("/") or None


def _is_origin(text: str) -> bool:
    """Tell whether a text is a scheme, a host and perhaps a port, and nothing else."""
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


def _path(data: Path, reader: _Reader, key: str) -> Path | None:
    text = reader.value(key, str, "")
    return data / text if text else None


def _proxies(reader: _Reader) -> tuple[str, ...]:
    networks = reader.value("trusted_proxies", list, [])
    for network in networks:
        try:
            ipaddress.ip_network(network if isinstance(network, str) else "")
        except ValueError:
            reader.problems.append(f"trusted_proxies: {str(network)[:80]!r} is not a network")
    return tuple(network for network in networks if isinstance(network, str))


def _limits(reader: _Reader) -> Limits:
    table = reader.value("limits", dict, {})
    usual = Limits()
    known = {f.name: getattr(usual, f.name) for f in fields(Limits)}
    unknown = [f"unknown setting 'limits.{str(k)[:80]}'" for k in table if k not in known]
    inner = _Reader(table, unknown)
    values: dict[str, Any] = {
        name: _number(inner, name, default) for name, default in known.items()
    }
    reader.problems.extend(inner.problems)
    return replace(usual, **values)


def _number(reader: _Reader, name: str, default: float) -> float:
    """Read a limit: an integer where the default is one; never negative, never endless."""
    value = reader.table.get(name, default)
    kinds = (int,) if isinstance(default, int) else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not 0 <= value < 2**53:
        expected = "an integer" if isinstance(default, int) else "a number"
        reader.problems.append(f"limits.{name} must be {expected} from 0 on")
        return default
    return value if isinstance(default, int) else float(value)
