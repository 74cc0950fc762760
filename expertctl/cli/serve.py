"""``expertctl serve``: the OpenAI- and Anthropic-compatible server, and its API keys.

The server is an optional extra, imported only by the commands that need it.
"""

import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import typer

from expertctl.cli.engine import build_missing_engine_error, open_planner, resolve_base
from expertctl.cli.help import CommandGroup, expand_flags
from expertctl.cli.output import JsonFlag, emit, format_table, note, print_message, warn
from expertctl.cli.run_options import ADVANCED, PLACEMENT, Base, EngineFlags, MoeLearn, WarmupFlags
from expertctl.engine_config import DEFAULT_QUEUE, DEFAULT_ROWS, BatchingConfig
from expertctl.errors import UsageError, format_install_command
from expertctl.settings import load_settings, parse_age, parse_size

if TYPE_CHECKING:
    from expertctl.server.api_keys import ApiKey

app = CommandGroup(no_args_is_help=False)
key_app = CommandGroup("Manage the API keys of the server's users.")
app.add_typer(key_app, name="key")

_Value = TypeVar("_Value")
ACCESS, SCHEDULING, LOGGING = "Access", "Scheduling", "Logging"
KeyName = Annotated[str, typer.Argument(metavar="NAME", help="Such as alice-laptop.")]


@app.callback(invoke_without_command=True)
@expand_flags
def serve(
    context: typer.Context,
    *,
    host: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Address to listen on.", show_default="127.0.0.1"),
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Port to listen on; 0 picks a free one.", show_default="8000")
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(help="Public address, if it is another one; API keys are then required."),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Accept this name in the Host header, such as host.docker.internal; repeatable.",
            rich_help_panel=ACCESS,
        ),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN",
            help="Allow web pages of this origin; repeatable.",
            rich_help_panel=ACCESS,
        ),
    ] = None,
    base: Base = None,
    alias: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ALIAS=MODEL",
            help="Serve a model under another name, such as gpt-4o-mini=auto; repeatable.",
        ),
    ] = None,
    strict_fields: Annotated[
        bool | None,
        typer.Option(
            "--strict-fields",
            help="Refuse request fields that are not implemented instead of ignoring them.",
        ),
    ] = None,
    json_instruction: Annotated[
        bool | None,
        typer.Option(
            "--json-instruction/--no-json-instruction",
            help="Tell the model about the JSON schema that a request asks for.",
            show_default="--json-instruction",
        ),
    ] = None,
    rows: Annotated[
        int | None,
        typer.Option(
            help="Maximum number of sequences in a batch.",
            show_default="16",
            rich_help_panel=SCHEDULING,
        ),
    ] = None,
    queue: Annotated[
        int | None,
        typer.Option(
            help="Maximum number of waiting requests.",
            show_default="128",
            rich_help_panel=SCHEDULING,
        ),
    ] = None,
    flags: EngineFlags,
    prefix_cache_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Maximum memory for the KV cache of finished requests.",
            show_default="a quarter of the budget",
            rich_help_panel=PLACEMENT,
        ),
    ] = None,
    on_budget: Annotated[
        Literal["queue", "fewer"],
        typer.Option(
            "--on-budget",
            help="When experts do not fit: wait, or use fewer.",
            rich_help_panel=PLACEMENT,
        ),
    ] = "queue",
    warmup: WarmupFlags,
    moe_learn: MoeLearn = None,
    warm: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PROMPT",
            help="Answer this prompt before the first request; repeatable.",
            rich_help_panel=ADVANCED,
        ),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Time limit for requests without one of their own.",
            rich_help_panel=SCHEDULING,
        ),
    ] = None,
    behind: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Seconds before a slow streaming client is dropped.",
            show_default="60",
            rich_help_panel=SCHEDULING,
        ),
    ] = None,
    validator: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=COMMAND", help="Program that checks answers.", rich_help_panel=ADVANCED
        ),
    ] = None,
    completions_special_tokens: Annotated[
        bool | None,
        typer.Option(
            "--completions-special-tokens/--no-completions-special-tokens",
            help="Read control tokens in prompts of /v1/completions as control tokens, or as text.",
            show_default="--completions-special-tokens",
            rich_help_panel=ADVANCED,
        ),
    ] = None,
    log_prompts: Annotated[
        bool,
        typer.Option("--log-prompts", help="Write prompts to the log.", rich_help_panel=LOGGING),
    ] = False,
    traces: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Send traces to this OpenTelemetry collector (OTLP).",
            rich_help_panel=LOGGING,
        ),
    ] = None,
    tls_cert: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Certificate chain, PEM.", rich_help_panel=ACCESS),
    ] = None,
    tls_key: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Private key of the certificate, PEM.", rich_help_panel=ACCESS
        ),
    ] = None,
    insecure_http: Annotated[
        bool,
        typer.Option(
            "--insecure-http", help="Allow API keys over unencrypted HTTP.", rich_help_panel=ACCESS
        ),
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Run an OpenAI- and Anthropic-compatible server. It stops at SIGTERM or Ctrl-C.

    Its address and its log go to stderr.

    Example: expertctl serve --port 8000
    """
    if context.invoked_subcommand is not None:
        return
    with _guard_server_import():
        from expertctl.http.server import ListenAddress
        from expertctl.server.serve import serve as serve_generation
        from expertctl.server.settings import ServeSettings, parse_aliases, resolve_trace_address
        from expertctl.server.validator import parse_validators
    traced_to = resolve_trace_address(traces, os.environ)
    if traced_to is not None:
        _check_tracing_extra()
    settings = load_settings()
    config = flags.resolve(settings, warmup=warmup, learn=moe_learn)
    configured, defaults = settings.serve, ServeSettings()
    wanted = ServeSettings(
        host=_choose_value(host, configured.host, defaults.host),
        port=_choose_value(port, configured.port, defaults.port),
        url=url or configured.url,
        allowed_hosts=_normalise_names(allow_host or configured.allowed_hosts),
        allowed_origins=_normalise_names(allow_origin or configured.allowed_origins),
        aliases=parse_aliases(alias or configured.aliases),
        strict_fields=configured.strict_fields if strict_fields is None else strict_fields,
        json_instruction=_choose_value(
            json_instruction, configured.json_instruction, defaults.json_instruction
        ),
        certificate=tls_cert or configured.tls_cert,
        private_key=tls_key or configured.tls_key,
        timeout=_choose_value(timeout, configured.timeout, defaults.timeout),
        behind_seconds=_choose_value(behind, configured.behind, defaults.behind_seconds),
        completions_special_tokens=_choose_value(
            completions_special_tokens,
            configured.completions_special_tokens,
            defaults.completions_special_tokens,
        ),
        log_prompts=log_prompts,
        traces=traced_to,
        validators=parse_validators(validator or ()),
        engine=replace(
            config,
            base=resolve_base(base or configured.base, settings, as_json=as_json),
            batching=BatchingConfig(
                kept_kv=_choose_value(
                    _parse_optional_size(prefix_cache_memory), configured.prefix_cache_memory, None
                ),
                rows=_choose_value(rows, configured.rows, DEFAULT_ROWS),
                queue=_choose_value(queue, configured.queue, DEFAULT_QUEUE),
                on_budget=on_budget,
                warm=tuple(warm or ()),
            ),
        ),
    )

    def prepare() -> None:
        open_planner(settings, as_json=as_json)

    def report(address: ListenAddress) -> None:
        document = {"url": address.url, "host": address.host, "port": address.port}
        emit(document, "", as_json=as_json)
        sys.stdout.flush()
        print_message(f"ready on {address.url}")
        if sys.stderr.isatty():
            print_message(_list_addresses(address.url))

    serve_generation(wanted, settings, insecure=insecure_http, prepare=prepare, report=report)


@key_app.command("new")
def new_key(
    name: KeyName,
    per_minute: Annotated[
        int | None, typer.Option("--per-minute", help="Maximum number of requests per minute.")
    ] = None,
    max_tokens_per_minute: Annotated[
        int | None,
        typer.Option("--max-tokens-per-minute", help="Maximum number of tokens per minute."),
    ] = None,
    expires: Annotated[
        str | None,
        typer.Option(metavar="AGE", help="When the key expires, such as 12h, 30d or 52w."),
    ] = None,
    manages: Annotated[
        bool,
        typer.Option("--manage", help="Also allow the key to change server settings (POST /moe)."),
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Create a key. It is shown once, on stdout; from now on every request needs one.

    Example: expertctl serve key new alice-laptop --per-minute 60
    """
    from expertctl.server.api_keys import ApiKeyStore

    now, settings = time.time(), load_settings()
    made = ApiKeyStore(settings.home.api_keys).create(
        name,
        now=now,
        expires=now + _parse_expiry(expires) if expires else None,
        requests_per_minute=per_minute,
        tokens_per_minute=max_tokens_per_minute,
        manages=manages,
    )
    emit({**_build_key_document(made.key), "secret": made.secret}, made.secret, as_json=as_json)
    print_message(
        "this key is not shown again; send it as `Authorization: Bearer`, or as `x-api-key`"
    )


@key_app.command("list")
def list_keys(as_json: JsonFlag = False) -> None:
    """List the keys. Secrets are not stored.

    Example: expertctl serve key list
    """
    from expertctl.server.api_keys import ApiKeyStore

    keys = ApiKeyStore(load_settings().home.api_keys).list_keys()
    if not keys:
        note("no keys; `expertctl serve key new NAME` makes one")
    rows = [
        [
            each.name,
            each.id,
            *_format_dates(each),
            *_format_limits(each),
            "yes" if each.manages else "",
        ]
        for each in keys
    ]
    head = ["NAME", "ID", "SINCE", "UNTIL", "REQUESTS/MIN", "TOKENS/MIN", "MANAGES"]
    text = format_table(head, rows) if rows else ""
    emit({"keys": [_build_key_document(each) for each in keys]}, text, as_json=as_json)


@key_app.command("revoke")
def revoke_key(
    name: Annotated[str, typer.Argument(metavar="NAME|ID", help="As `key list` shows it.")],
    as_json: JsonFlag = False,
) -> None:
    """Revoke a key, on running servers too.

    Example: expertctl serve key revoke alice-laptop
    """
    from expertctl.server.api_keys import ApiKeyStore

    keys = ApiKeyStore(load_settings().home.api_keys)
    gone = keys.revoke(name)
    emit({"revoked": _build_key_document(gone)}, f"revoked {gone.name}", as_json=as_json)
    if not keys.list_keys():
        warn(
            [f"no key is left: all requests are refused; remove {keys.path} to serve without keys"]
        )


def _list_addresses(url: str) -> str:
    """Return where programs and people find what, one address a line."""
    places = {"API": "/v1", "API in words": "/docs", "chat": "/chat", "status": "/status"}
    width = max(map(len, places)) + 2
    return "\n".join(f"  {name:<{width}}{url}{path}" for name, path in places.items())


def _build_key_document(one: "ApiKey") -> dict[str, object]:
    return {
        "name": one.name,
        "id": one.id,
        "created": _format_date(one.created),
        "expires": _format_date(one.expires) or None,
        "requests_per_minute": one.requests_per_minute,
        "tokens_per_minute": one.tokens_per_minute,
        "manages": one.manages,
    }


def _format_limits(one: "ApiKey") -> list[str]:
    limits = (one.requests_per_minute, one.tokens_per_minute)
    return ["" if limit is None else str(limit) for limit in limits]


def _format_dates(one: "ApiKey") -> list[str]:
    return [_format_date(one.created), _format_date(one.expires)]


def _format_date(moment: float | None) -> str:
    return "" if moment is None else time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(moment))


def _parse_expiry(text: str) -> float:
    seconds = parse_age(text).total_seconds()
    if seconds <= 0:
        raise UsageError(
            f"--expires {text}: the key would be expired already", hint="write 12h or 30d"
        )
    return seconds


def _normalise_names(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(name.lower().rstrip("/") for name in names)


def _parse_optional_size(text: str | None) -> int | None:
    return None if text is None else parse_size(text)


def _choose_value(option: _Value | None, setting: _Value | None, default: _Value) -> _Value:
    """Return the option, else the setting, else the default."""
    chosen = setting if option is None else option
    return default if chosen is None else chosen


def _check_tracing_extra() -> None:
    """Raise `UsageError` if the extra for traces is not installed."""
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter  # noqa: F401  # only a check
    except ModuleNotFoundError as error:
        raise UsageError(
            f"traces need {error.name}, which is not installed",
            hint=f"{format_install_command('otel')}; or unset OTEL_EXPORTER_OTLP_ENDPOINT",
        ) from error


@contextmanager
def _guard_server_import() -> Iterator[None]:
    """Translate a failed import of the server into an error that names the missing library."""
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in {"granian", "starlette", "prometheus_client"}:
            raise build_missing_engine_error(error) from error
        raise UsageError(
            f"serving needs {missing}, which is not installed",
            hint=format_install_command("engine", "server"),
        ) from error
