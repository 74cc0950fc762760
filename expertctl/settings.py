"""The paths of the home, and the user's settings: environment first, then ``config.toml``.

`Home` names every path below ``EXPERT_HOME``; `Settings` holds the settings. Options of a command
take precedence, in `expertctl.cli`. Nothing here creates or writes a file.
"""

import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from expertctl.errors import InvalidPackageError, StoreError, UsageError
from expertctl.reference import PackageName

_SIZE = re.compile(r"([0-9]{1,15})\s*([kKMGT]i?)?B?")
_UNITS: dict[str | None, int] = {
    None: 1,
    **{u: int(1000 ** (i + 1)) for i, u in enumerate("KMGT")},
    **{f"{u}i": int(1024 ** (i + 1)) for i, u in enumerate("KMGT")},
}
_LIMIT_UNITS = {
    **{f"{u}B": 1000 ** (4 - i) for i, u in enumerate("TGMk")},
    **{f"{u}iB": 1024 ** (4 - i) for i, u in enumerate("TGMK")},
}
_MAX_WHOLE_UNITS = 10_000
"""A larger number of units is whole only by chance: no user types it."""
_AGE = re.compile(r"([0-9]{1,5})\s*([mhdw])|(0)")
_MINUTES = {"m": 1, "h": 60, "d": 1440, "w": 10080}
_TRUE, _FALSE = {"1", "true", "yes"}, {"0", "false", "no"}
CONFIG_KEYS = {
    "registry": "EXPERT_REGISTRY",
    "offline": "EXPERT_OFFLINE",
    "base": "EXPERT_BASE",
    "ca_file": "EXPERT_CA_FILE",
    "allow_http": "EXPERT_ALLOW_HTTP",
    "minimum_release_age": "EXPERT_MINIMUM_RELEASE_AGE",
    "minimum_release_age_exclude": "EXPERT_MINIMUM_RELEASE_AGE_EXCLUDE",
    "device": "EXPERT_DEVICE",
    "memory_budget": "EXPERT_MEMORY_BUDGET",
    "dtype": "EXPERT_DTYPE",
    "adapter_dtype": "EXPERT_ADAPTER_DTYPE",
    "deterministic": "EXPERT_DETERMINISTIC",
    "moe_cold": "EXPERT_MOE_COLD",
    "moe_warmup": "EXPERT_MOE_WARMUP",
    "moe_learn": "EXPERT_MOE_LEARN",
    "encoder": "EXPERT_ENCODER",
    "history": "EXPERT_HISTORY",
    "logs": "EXPERT_LOGS",
    "server": "EXPERT_SERVER",
    "serve_base": "EXPERT_SERVE_BASE",
    "serve_host": "EXPERT_SERVE_HOST",
    "serve_port": "EXPERT_SERVE_PORT",
    "serve_url": "EXPERT_SERVE_URL",
    "serve_rows": "EXPERT_SERVE_ROWS",
    "serve_queue": "EXPERT_SERVE_QUEUE",
    "serve_prefix_cache_memory": "EXPERT_SERVE_PREFIX_CACHE_MEMORY",
    "serve_timeout": "EXPERT_SERVE_TIMEOUT",
    "serve_behind": "EXPERT_SERVE_BEHIND",
    "serve_completions_special_tokens": "EXPERT_SERVE_COMPLETIONS_SPECIAL_TOKENS",
    "serve_aliases": "EXPERT_SERVE_ALIASES",
    "serve_allowed_hosts": "EXPERT_SERVE_ALLOWED_HOSTS",
    "serve_allowed_origins": "EXPERT_SERVE_ALLOWED_ORIGINS",
    "serve_strict_fields": "EXPERT_SERVE_STRICT_FIELDS",
    "serve_json_instruction": "EXPERT_SERVE_JSON_INSTRUCTION",
    "serve_tls_cert": "EXPERT_SERVE_TLS_CERT",
    "serve_tls_key": "EXPERT_SERVE_TLS_KEY",
}
"""Config key → environment variable of the same meaning."""

MAX_PORT, MAX_ROWS, MAX_QUEUE, MAX_SECONDS = 65_535, 1024, 100_000, 86_400
_COUNTS = {"serve_port": (0, MAX_PORT), "serve_rows": (1, MAX_ROWS), "serve_queue": (1, MAX_QUEUE)}
_COUNT = re.compile(r"[0-9]{1,9}")
_SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")

ENCODERS = ("minilm", "static", "lexical")
"""The encoders that have names; any other value is a directory."""


def parse_size(text: str) -> int:
    """Parse a size in bytes: ``MB`` is 10⁶, ``MiB`` is 2²⁰, a bare number is bytes.

    Raises:
        UsageError: for anything else.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{text[:40]!r} is not a size", hint="write 512MiB, 2GB or bytes")
    number, unit = match.groups()
    return int(number) * _UNITS[unit.upper().replace("I", "i") if unit else None]


def format_size(size: int) -> str:
    """Format bytes for people, in powers of 1000: ``12.3 MB``."""
    if size < 1000:
        return f"{size} B"
    value = size / 1000
    for unit in ("kB", "MB", "GB"):
        if round(value, 1) < 1000:
            return f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def format_limit(size: int) -> str:
    """Format a limit as the user typed it: ``2 GB``, ``512 MiB (536.9 MB)``; else `format_size`."""
    for unit, factor in _LIMIT_UNITS.items():
        if size % factor == 0 and 0 < size // factor < _MAX_WHOLE_UNITS:
            shown = f"{size // factor} {unit}"
            return f"{shown} ({format_size(size)})" if "i" in unit else shown
    return format_size(size)


def parse_age(text: str) -> timedelta:
    """Parse a time span: ``90m``, ``12h``, ``3d``, ``2w``; ``0`` is none.

    Raises:
        UsageError: for anything else.
    """
    match = _AGE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{text[:40]!r} is not a span of time", hint="write 12h, 3d or 2w")
    return timedelta(minutes=int(match[1] or 0) * _MINUTES[match[2] or "m"])


def parse_switch(key: str, text: str) -> bool:
    """Parse a boolean setting.

    Raises:
        UsageError: for anything else, which would otherwise silently count as false.
    """
    if text.lower() not in _TRUE | _FALSE:
        hint = f"{key} is true or false; {CONFIG_KEYS[key]} is 1 or 0"
        raise UsageError(f"{key}: {text[:40]!r} is not true or false", hint=hint)
    return text.lower() in _TRUE


def parse_count(key: str, text: str) -> int:
    """Parse a whole number.

    Raises:
        UsageError: for anything else, or one beyond its limits.
    """
    low, high = _COUNTS[key]
    if not _COUNT.fullmatch(text) or not low <= int(text) <= high:
        raise UsageError(f"{key}: {text[:40]!r} is not a whole number from {low} to {high}")
    return int(text)


def parse_seconds(key: str, text: str) -> float:
    """Parse a number of seconds.

    Raises:
        UsageError: for anything else, or one beyond its limits.
    """
    if not _SECONDS.fullmatch(text) or not 0 < float(text) <= MAX_SECONDS:
        message = f"{key}: {text[:40]!r} is not a number of seconds above 0, up to {MAX_SECONDS}"
        raise UsageError(message)
    return float(text)


def parse_names(text: str) -> tuple[str, ...]:
    """Parse namespaces and package names, separated by commas.

    Raises:
        UsageError: when one of them is neither.
    """
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    for name in names:
        PackageName.parse(name if "/" in name else f"{name}/any")
    return names


def parse_list(text: str) -> tuple[str, ...]:
    """Split a text at commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def parse_encoder(text: str) -> str:
    """Parse the name of an encoder, or a directory, which becomes absolute.

    Raises:
        UsageError: when it is neither.
    """
    path = Path(text).expanduser()
    if text in ENCODERS:
        return text
    if not path.is_dir():
        hint = f"{', '.join(ENCODERS)}, or a directory with a BERT"
        raise UsageError(f"{text[:200]!r} is neither an encoder nor a directory", hint=hint)
    return str(path.absolute())


@dataclass(frozen=True, slots=True)
class Home:
    """The paths below ``EXPERT_HOME``."""

    root: Path

    @property
    def store(self) -> Path:
        """Blobs, references and staging."""
        return self.root / "store"

    @property
    def index(self) -> Path:
        """The catalogue and usage history, an SQLite database."""
        return self.root / "index.db"

    @property
    def suspicions(self) -> Path:
        """Findings about installed packages, and which came first, an SQLite database."""
        return self.root / "suspicions.db"

    @property
    def flagged(self) -> Path:
        """Which installed packages look suspicious, for code that only reads."""
        return self.root / "flagged.json"

    @property
    def yanked(self) -> Path:
        """Which installed versions were yanked, for code that only reads."""
        return self.root / "yanked.json"

    @property
    def kernels(self) -> Path:
        """Compiled code of the engine, mode 0700; recreated where it is missing."""
        return self.root / "kernels"

    @property
    def engines(self) -> Path:
        """One folder per engine that holds memory."""
        return self.root / "engines"

    @property
    def servers(self) -> Path:
        """Where the running servers of this home listen, mode 0700."""
        return self.root / "servers"

    @property
    def chat_history(self) -> Path:
        """The lines that were typed in chats, mode 0600."""
        return self.root / "chat-history"

    @property
    def last_conversation(self) -> Path:
        """The last conversation, which ``run --continue`` continues, mode 0600."""
        return self.root / "last-conversation.json"

    @property
    def logs(self) -> Path:
        """Prompts and answers, if ``logs`` is on, mode 0600."""
        return self.root / "logs.jsonl"

    @property
    def static_encoder(self) -> Path:
        """The token vectors of the encoder ``static``."""
        return self.root / "static-encoder"

    @property
    def bases(self) -> Path:
        """One folder per known base model."""
        return self.root / "bases"

    @property
    def keys(self) -> Path:
        """Private keys, mode 0600."""
        return self.root / "keys"

    @property
    def trust(self) -> Path:
        """Which key may sign what."""
        return self.root / "trust.json"

    @property
    def registries(self) -> Path:
        """The last state of registries, and partly downloaded blobs: see `expertctl.registry`."""
        return self.root / "registries"

    @property
    def credentials(self) -> Path:
        """Tokens for registries, mode 0600."""
        return self.root / "credentials.json"

    @property
    def api_keys(self) -> Path:
        """The API keys of the generation server, as hashes, mode 0600."""
        return self.root / "api-keys.json"

    @property
    def config(self) -> Path:
        """The user's settings."""
        return self.root / "config.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeDefaults:
    """Defaults of the options of ``expertctl serve``; ``None``: the built-in default."""

    base: str | None = None
    host: str | None = None
    port: int | None = None
    url: str | None = None
    rows: int | None = None
    queue: int | None = None
    prefix_cache_memory: int | None = None
    timeout: float | None = None
    behind: float | None = None
    completions_special_tokens: bool | None = None
    aliases: tuple[str, ...] = ()
    """``ALIAS=MODEL`` each."""
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    strict_fields: bool = False
    json_instruction: bool | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None


@dataclass(frozen=True, slots=True)
class Settings:
    """The user's settings; ``None`` means not set."""

    home: Home
    registry: str | None = None
    offline: bool = False
    base: str | None = None
    """The base that answers if neither an option nor an expert decides."""
    ca_file: Path | None = None
    """Certificates that are trusted in addition to those of the system."""
    allow_http: bool = False
    """Whether registries beyond this machine may be reached without encryption."""
    minimum_release_age: timedelta | None = None
    minimum_release_age_exclude: tuple[str, ...] = ()
    device: str | None = None
    memory_budget: int | None = None
    dtype: str | None = None
    adapter_dtype: str | None = None
    deterministic: bool = False
    moe_cold: str | None = None
    moe_warmup: str | None = None
    moe_learn: bool = True
    encoder: str | None = None
    history: bool = True
    """Whether the lines typed in chats and the last conversation are kept."""
    logs: bool = False
    """Whether prompts and answers are kept for ``expertctl logs``."""
    server: str | None = None
    """The URL of the generation server that answers `run` and `chat`."""
    serve: ServeDefaults = ServeDefaults()

    @property
    def may_have_server(self) -> bool:
        """Whether a server is named, or one of this home may be running."""
        return self.server is not None or any(self.home.servers.glob("*.json"))


def find_home(environment: Mapping[str, str] = os.environ) -> Home:
    """Return the home, whatever its settings are.

    Raises:
        StoreError: when it can never be a folder.
        UsageError: when there is no home directory.
    """
    return Home(_resolve_root(environment.get("EXPERT_HOME")))


def load_settings(environment: Mapping[str, str] = os.environ) -> Settings:
    """Read ``config.toml`` and the environment, which takes precedence.

    Raises:
        InvalidPackageError: when ``config.toml`` cannot be read as settings.
        UsageError: when a value is invalid, or there is no home directory.
    """
    home = find_home(environment)
    values = {**read_config(home.config), **_read_environment(environment)}
    budget, age = values.get("memory_budget"), values.get("minimum_release_age")
    return Settings(
        home=home,
        registry=values.get("registry"),
        offline=parse_switch("offline", values.get("offline", "no")),
        base=values.get("base"),
        ca_file=_parse_path(values["ca_file"]) if "ca_file" in values else None,
        allow_http=parse_switch("allow_http", values.get("allow_http", "no")),
        minimum_release_age=parse_age(age) if age else None,
        minimum_release_age_exclude=parse_names(values.get("minimum_release_age_exclude", "")),
        device=values.get("device"),
        memory_budget=parse_size(budget) if budget else None,
        dtype=values.get("dtype"),
        adapter_dtype=values.get("adapter_dtype"),
        deterministic=parse_switch("deterministic", values.get("deterministic", "no")),
        moe_cold=values.get("moe_cold"),
        moe_warmup=values.get("moe_warmup"),
        moe_learn=parse_switch("moe_learn", values.get("moe_learn", "yes")),
        encoder=values.get("encoder"),
        history=parse_switch("history", values.get("history", "yes")),
        logs=parse_switch("logs", values.get("logs", "no")),
        server=values.get("server"),
        serve=_read_serve_defaults(values),
    )


def _parse_path(text: str) -> Path:
    return Path(text).expanduser()


_SERVE_PARSERS: dict[str, Callable[[str], Any]] = {
    "base": str,
    "host": str,
    "url": str,
    "port": partial(parse_count, "serve_port"),
    "rows": partial(parse_count, "serve_rows"),
    "queue": partial(parse_count, "serve_queue"),
    "prefix_cache_memory": parse_size,
    "timeout": partial(parse_seconds, "serve_timeout"),
    "behind": partial(parse_seconds, "serve_behind"),
    "completions_special_tokens": partial(parse_switch, "serve_completions_special_tokens"),
    "aliases": parse_list,
    "allowed_hosts": parse_list,
    "allowed_origins": parse_list,
    "strict_fields": partial(parse_switch, "serve_strict_fields"),
    "json_instruction": partial(parse_switch, "serve_json_instruction"),
    "tls_cert": _parse_path,
    "tls_key": _parse_path,
}
"""Field of `ServeDefaults` → parser of the setting ``serve_…``."""


def _read_serve_defaults(values: Mapping[str, str]) -> ServeDefaults:
    given = {name: values.get(f"serve_{name}") for name in _SERVE_PARSERS}
    return ServeDefaults(
        **{name: _SERVE_PARSERS[name](text) for name, text in given.items() if text is not None}
    )


def read_config(path: Path) -> dict[str, str]:
    """Return the known keys of ``config.toml`` as text; a missing file is empty.

    Raises:
        InvalidPackageError: for broken TOML.
    """
    return {key: text for key, text in read_config_file(path).items() if key in CONFIG_KEYS}


def find_unknown_settings(path: Path) -> list[str]:
    """Return the keys of ``config.toml`` that are ignored, such as those of later versions.

    Raises:
        InvalidPackageError: for broken TOML.
    """
    return [key for key in read_config_file(path) if key not in CONFIG_KEYS]


def read_config_file(path: Path) -> dict[str, str]:
    """Return all keys of ``config.toml`` as text; a missing file is empty.

    Raises:
        InvalidPackageError: for broken TOML.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:  # tomllib's own is a ValueError, among others
        raise InvalidPackageError(str(path), [f"not valid TOML: {error}"]) from error
    return {key: str(value) for key, value in document.items()}


def _resolve_root(text: str | None) -> Path:
    try:
        root = Path(text or "~/.expert").expanduser().absolute()
    except RuntimeError as error:
        message = f"{text or '~/.expert'}: there is no such home directory"
        raise UsageError(message, hint="set EXPERT_HOME to a folder") from error
    _check_root(root)
    return root


def _check_root(root: Path) -> None:
    """Raise for a home that can never be a folder: below a file, or with too long a name."""
    try:
        there = next(place for place in (root, *root.parents) if place.exists())
    except OSError as error:
        problem = error.strerror or "it cannot be looked at"
    else:
        if there.is_dir():
            return
        problem = "that is a file" if there == root else f"{there} is not a folder"
    shown = f"{str(root)[:200]}…" if len(str(root)) > 200 else str(root)
    hint = f"EXPERT_HOME is {shown}: set it to a writable folder"
    raise StoreError(f"{shown} cannot be a folder: {problem}", hint=hint)


def _read_environment(environment: Mapping[str, str]) -> dict[str, str]:
    pairs = ((key, environment.get(name)) for key, name in CONFIG_KEYS.items())
    return {key: value for key, value in pairs if value}
