"""`ServeSettings`: where the server listens, what it accepts, and the engine behind it.

Also decides whether others can reach the server and what that requires (API keys, encryption), and
where traces go: an option, or OpenTelemetry's standard variables. All other ``OTEL_*`` variables,
such as headers, sampler and service name, are read by OpenTelemetry itself.

The ``model`` of a request is the served base, ``auto``, a plan of installed experts, or an alias.
Parsing loads and looks up nothing: a name that is neither the base nor ``auto`` nor a list of
package names is not found. It cannot contain paths, URLs or registries.

Aliases are further model names, such as ``gpt-4o-mini`` for ``auto``, for clients whose model name
cannot be changed. An alias never replaces a name that already means something: names of bases,
``auto``, and anything of the form of an expert's name are refused, so an expert installed later
cannot be shadowed either. An alias stands for a model, not for another alias. A server does not
start with an alias it cannot serve; if an expert is removed later, requests that need it fail.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar
from urllib.parse import SplitResult, urlsplit

from expertctl.engine_config import DEFAULT_CONFIG, EngineConfig
from expertctl.errors import NotFoundError, UsageError
from expertctl.http.server import build_url, is_loopback
from expertctl.reference import NAME_PATTERN
from expertctl.routing.request import ForcedExpert, parse_forced
from expertctl.server.validator import ValidatorCommand
from expertctl.settings import MAX_PORT, MAX_QUEUE, MAX_ROWS, MAX_SECONDS
from expertctl.store.store import Store, find_similar_names
from expertctl.user_request import LIMITS

AUTO = "auto"
MAX_MODEL_LENGTH = 2000
_EXPERT = re.compile(rf"{NAME_PATTERN}/{NAME_PATTERN}(@[0-9A-Za-z.^~<>=,*-]+)?(:[0-9.eE+-]+)?")
_SEPARATOR = re.compile(r"\+(?=[a-z0-9-]+/)")
"""A plus sign that separates two experts; any other is part of a number."""


class ModelNotFoundError(NotFoundError):
    """The name is neither the base, nor ``auto``, nor a list of experts."""

    code: ClassVar[str] = "model_not_found"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSelection:
    """What answers: named experts, the base alone, or experts chosen by the router."""

    force: tuple[ForcedExpert, ...] = ()
    base_alone: bool = False
    auto: bool = False


def is_expert_list(model: str) -> bool:
    """Tell whether a name has the form of one or more experts, installed or not."""
    parts = _SEPARATOR.split(model) if len(model) <= MAX_MODEL_LENGTH else []
    return bool(parts) and all(_EXPERT.fullmatch(part) for part in parts)


def parse_model(
    model: str, *, base_name: str, aliases: Mapping[str, str] = MappingProxyType({})
) -> ModelSelection:
    """Parse the ``model`` of a request to a server of one base.

    Raises:
        ModelNotFoundError: when the name is not a model.
        UsageError: when there are too many experts, or a weight is out of range.
    """
    model = aliases.get(model, model)
    if model == base_name:
        return ModelSelection(base_alone=True)
    if model == AUTO:
        return ModelSelection(auto=True)
    if not is_expert_list(model):
        hint = f"{base_name}, auto, or experts such as acme/sql or acme/sql:0.5+acme/json"
        raise ModelNotFoundError(f"there is no model {model[:80]!r} here", hint=hint)
    parts = _SEPARATOR.split(model)
    _, most = LIMITS["max_experts"]
    if len(parts) > most:
        raise UsageError(f"{len(parts)} experts in one model, at most {most:g} are allowed")
    return ModelSelection(force=tuple(parse_forced(part) for part in parts))


MAX_ALIASES = 100
_ALIAS = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@\[\]-]{0,199}")
_HINT = "write --alias gpt-4o-mini=auto"


def parse_aliases(texts: Iterable[str]) -> Mapping[str, str]:
    """Parse ``ALIAS=MODEL`` options.

    Raises:
        UsageError: when one is malformed, or an alias is given twice.
    """
    aliases: dict[str, str] = {}
    for text in texts:
        alias, equals, model = (part.strip() for part in text.partition("="))
        if not (alias and equals and model):
            raise UsageError(f"the alias {text[:80]!r} is not ALIAS=MODEL", hint=_HINT)
        if alias in aliases:
            raise UsageError(f"the alias {alias[:80]!r} is given twice", hint="leave one out")
        aliases[alias] = model
    return aliases


def check_alias_names(aliases: Mapping[str, str]) -> None:
    """Check the form of aliases and of the models they stand for.

    Raises:
        UsageError: names the alias and what it would shadow.
    """
    if len(aliases) > MAX_ALIASES:
        raise UsageError(f"{len(aliases)} aliases, at most {MAX_ALIASES} are allowed")
    for alias, model in aliases.items():
        if alias == AUTO:
            raise UsageError(f"the alias {AUTO} would hide the model {AUTO}", hint=_HINT)
        if is_expert_list(alias):
            raise UsageError(
                f"the alias {alias} has the form of an expert's name and would hide that expert",
                hint="choose a name without a slash",
            )
        if not _ALIAS.fullmatch(alias):
            raise UsageError(f"the alias {alias[:80]!r} is not a valid model name", hint=_HINT)
        if model in aliases:
            raise UsageError(
                f"the alias {alias} stands for {model}, which is an alias itself",
                hint="give the model that it stands for",
            )
        parse_alias_experts(alias, model)


def parse_alias_experts(alias: str, model: str) -> ModelSelection | None:
    """Return the experts an alias stands for; None for a base or ``auto``.

    Raises:
        UsageError: when a version or a weight is malformed, or there are too many experts.
    """
    if not is_expert_list(model):
        return None
    try:
        return parse_model(model, base_name="")
    except UsageError as error:
        raise UsageError(f"the alias {alias}: {error.message}", hint=error.hint) from error


def check_alias_bases(aliases: Mapping[str, str], bases: Collection[str]) -> None:
    """Check aliases against the registered bases.

    Raises:
        UsageError: when an alias is the name of a base.
        NotFoundError: when it stands for no model; the hint suggests similar names.
    """
    for alias, model in aliases.items():
        if alias in bases:
            raise UsageError(
                f"the alias {alias} would hide the base {alias}", hint="choose another name"
            )
        if model != AUTO and model not in bases and not is_expert_list(model):
            near = find_similar_names(model, [AUTO, *bases])
            meant = f"did you mean {' or '.join(near)}? Else " if near else ""
            raise NotFoundError(
                f"the alias {alias} stands for {model[:80]!r}, which is no model",
                hint=f"{meant}give {AUTO}, a base, or experts such as acme/sql",
            )


def check_alias_experts(aliases: Mapping[str, str], store: Store) -> None:
    """Check that the experts named by aliases are installed.

    Raises:
        NotFoundError: names the alias and the expert; the hint suggests similar names.
    """
    for alias, model in aliases.items():
        choice = parse_alias_experts(alias, model)
        for forced in choice.force if choice else ():
            try:
                store.find(forced.target)
            except NotFoundError as error:
                hint = f"{error.hint}; or `expertctl install {forced.target}`"
                raise NotFoundError(f"the alias {alias}: {error.message}", hint=hint) from error


def check_alias_base(aliases: Mapping[str, str], *, base: str, bases: Collection[str]) -> None:
    """Check that aliases stand for no base other than the served one.

    Raises:
        UsageError: names the alias and both bases.
    """
    for alias, model in aliases.items():
        if model in bases and model != base:
            raise UsageError(
                f"the alias {alias} stands for the base {model}, but {base} is served",
                hint=f"give {base}, or serve {model} with --base {model}",
            )


DEFAULT_PORT = 8000
BODY_BYTES = 4 << 20
"""More than the longest prompt takes in JSON; a parsed body can take fifty times as much."""
MAX_BODY_BYTES = 1 << 30
MAX_READER_DELAY = 60.0
_HOST = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]{0,31}://[a-z0-9.-]{1,253}(?::[0-9]{1,5})?")
"""As browsers send it: lower case, nothing after the port."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """All settings of one server."""

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    url: str | None = None
    """The public URL; by default built from host and port, never from a header."""
    allowed_hosts: tuple[str, ...] = ()
    """Further accepted ``Host`` names, in lower case, such as ``host.docker.internal``."""
    allowed_origins: tuple[str, ...] = ()
    """Origins of other web pages that may send requests and read responses."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Further model names: ``gpt-4o-mini`` → ``auto``."""
    strict_fields: bool = False
    """Whether unsupported fields are refused instead of ignored."""
    json_instruction: bool = True
    """Whether prompts describe the JSON of a requested schema to the model."""
    certificate: Path | None = None
    private_key: Path | None = None
    body_bytes: int = BODY_BYTES
    timeout: float | None = None
    """Default deadline in seconds, after which an answer ends as it is."""
    behind_seconds: float = MAX_READER_DELAY
    """Seconds that a streaming client may leave an event unread before it is dropped."""
    log_prompts: bool = False
    completions_special_tokens: bool = True
    """Whether completion prompts may spell control tokens; chat messages never can.

    ``parse_special`` overrides it per request.
    """
    traces: str | None = None
    """The URL spans are sent to, from `resolve_trace_address`; None disables tracing."""
    validators: Mapping[str, ValidatorCommand] = field(default_factory=dict)
    """Programs that requests can name to check answers."""
    engine: EngineConfig = DEFAULT_CONFIG
    secret: str | None = field(default=None, repr=False)
    """What only this process and the readers of its record know."""

    @property
    def public_url(self) -> str:
        """The scheme, host and port that clients use, without a trailing slash."""
        if self.url:
            return self.url.rstrip("/")
        return build_url(self.host, self.port, secure=self.certificate is not None)


def check_settings(settings: ServeSettings) -> None:
    """Check the settings before anything is opened.

    Raises:
        UsageError: names the invalid setting.
    """
    _check_ranges(settings)
    if (settings.certificate is None) != (settings.private_key is None):
        raise UsageError(
            "a certificate and its key go together", hint="give both --tls-cert and --tls-key"
        )
    parts = None if settings.url is None else _split_base_url(settings.url)
    if settings.url is not None and (parts is None or parts.path not in {"", "/"}):
        raise UsageError(
            f"the url {settings.url[:80]!r} is not the URL of a server",
            hint="write https://experts.example.org",
        )
    _check_allowed_names(settings)
    check_alias_names(settings.aliases)


def _check_ranges(settings: ServeSettings) -> None:
    batching = settings.engine.batching
    for name, value, low, high in (
        ("port", settings.port, 0, MAX_PORT),
        ("rows", batching.rows, 1, MAX_ROWS),
        ("queue", batching.queue, 1, MAX_QUEUE),
        ("body_bytes", settings.body_bytes, 1, MAX_BODY_BYTES),
    ):
        if not low <= value <= high:
            raise UsageError(f"{name} {value} is outside {low} to {high}")
    for name, seconds in (("timeout", settings.timeout), ("behind", settings.behind_seconds)):
        if seconds is not None and not 0 < seconds <= MAX_SECONDS:
            raise UsageError(f"{name} {seconds:g} must be above 0, up to {MAX_SECONDS}")


def _check_allowed_names(settings: ServeSettings) -> None:
    for host in settings.allowed_hosts:
        if not _HOST.fullmatch(host):
            raise UsageError(
                f"the allowed host {host[:80]!r} is not a host name",
                hint="write only the name, without scheme and port: host.docker.internal",
            )
    for origin in settings.allowed_origins:
        if not _ORIGIN.fullmatch(origin):
            raise UsageError(
                f"the allowed origin {origin[:80]!r} is not the origin of a page",
                hint="write scheme, host and port without a path: http://localhost:3000",
            )


def _split_base_url(url: str) -> SplitResult | None:
    """Split an HTTP URL without query and fragment; None for anything else."""
    try:
        parts = urlsplit(url)
        names_port = parts.port is None or parts.port > 0
    except ValueError:
        return None
    is_http = parts.scheme in {"http", "https"} and bool(parts.hostname)
    return parts if is_http and names_port and not parts.query and not parts.fragment else None


def is_exposed(settings: ServeSettings) -> bool:
    """Tell whether other machines can reach the server, directly or through a proxy."""
    return not (is_loopback(settings.host) and is_loopback(_public_host(settings)))


def require_secure(settings: ServeSettings, *, keyed: bool, insecure: bool) -> None:
    """Refuse to serve a network without API keys, or with keys in clear text.

    Raises:
        UsageError: when others can reach the server and keys or encryption are missing.
    """
    if not is_exposed(settings):
        return
    host = _public_host(settings)
    if not keyed:
        hint = "create a key with `expertctl serve key new NAME`, or listen on 127.0.0.1 only"
        raise UsageError(f"others can reach {host}, and there are no API keys", hint=hint)
    if not (_is_encrypted(settings) or insecure):
        raise UsageError(
            f"others can reach {host}, and keys would travel in clear text",
            hint="give --tls-cert and --tls-key; or --insecure-http, behind an encrypting proxy",
        )


def _is_encrypted(settings: ServeSettings) -> bool:
    """Tell whether connections are encrypted, by TLS here or by a proxy on this machine."""
    proxied = settings.public_url.startswith("https:") and is_loopback(settings.host)
    return settings.certificate is not None or proxied


def _public_host(settings: ServeSettings) -> str:
    return (settings.url and urlsplit(settings.url).hostname) or settings.host


TRACES_PATH = "/v1/traces"
"""The path of traces below the URL of a collector (OTLP over HTTP)."""
TRACES_PROTOCOL = "http/protobuf"
_DISABLING_VALUES = {"OTEL_SDK_DISABLED": "true", "OTEL_TRACES_EXPORTER": "none"}
_PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


def resolve_trace_address(option: str | None, environment: Mapping[str, str]) -> str | None:
    """Return the URL that traces are sent to; None if tracing is not requested.

    Raises:
        UsageError: when the URL is malformed, or another protocol is requested.
    """
    given = {name: value.strip() for name, value in environment.items() if value.strip()}
    off = next(
        (name for name, off in _DISABLING_VALUES.items() if given.get(name, "").lower() == off),
        None,
    )
    if off is not None and option is not None:
        raise UsageError(f"--traces: {off} disables traces", hint=f"unset {off}")
    if off is not None:
        return None
    address = _find_trace_address(option, given)
    if address is not None:
        _check_protocol(given)
    return address


def _find_trace_address(option: str | None, given: Mapping[str, str]) -> str | None:
    if option is not None:
        return _with_traces_path(_check_collector_url(option, "--traces"))
    if whole := given.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        return _check_collector_url(whole, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    if base := given.get("OTEL_EXPORTER_OTLP_ENDPOINT"):
        return _with_traces_path(_check_collector_url(base, "OTEL_EXPORTER_OTLP_ENDPOINT"))
    return None


def _with_traces_path(base: str) -> str:
    bare = base.rstrip("/")
    return bare if bare.endswith(TRACES_PATH) else f"{bare}{TRACES_PATH}"


def _check_collector_url(address: str, source: str) -> str:
    """Return a valid URL; credentials in it are refused, since they would appear in the log."""
    parts = _split_base_url(address)
    if parts is None or parts.username is not None:
        raise UsageError(
            f"{source}: not the URL of a collector",
            hint="write http://127.0.0.1:4318; credentials belong in OTEL_EXPORTER_OTLP_HEADERS",
        )
    return address


def _check_protocol(given: Mapping[str, str]) -> None:
    name = next((name for name in _PROTOCOL_VARIABLES if name in given), None)
    if name is not None and given[name] != TRACES_PROTOCOL:
        raise UsageError(
            f"{name}: traces are sent as {TRACES_PROTOCOL} only",
            hint=f"set it to {TRACES_PROTOCOL}; collectors accept that on port 4318",
        )
