"""Where traces go, by an option or by the standard variables of OpenTelemetry.

All other variables, such as headers, the sampler and the name of the service, are read by
OpenTelemetry itself.
"""

from collections.abc import Mapping
from urllib.parse import urlsplit

from expertctl.errors import UsageError

PATH = "/v1/traces"
"""The path for traces below the address of a collector (OTLP over HTTP)."""
PROTOCOL = "http/protobuf"
_OFF = {"OTEL_SDK_DISABLED": "true", "OTEL_TRACES_EXPORTER": "none"}
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


def trace_address(option: str | None, environment: Mapping[str, str]) -> str | None:
    """Return the address that traces are sent to; None if no traces are asked for.

    Raises:
        UsageError: when the address is malformed, or another protocol is asked for.
    """
    given = {name: value.strip() for name, value in environment.items() if value.strip()}
    off = next((name for name, off in _OFF.items() if given.get(name, "").lower() == off), None)
    if off is not None and option is not None:
        raise UsageError(f"--traces: {off} says that there are none", hint=f"unset {off}")
    if off is not None:
        return None
    address = _address(option, given)
    if address is not None:
        _check_protocol(given)
    return address


def _address(option: str | None, given: Mapping[str, str]) -> str | None:
    if option is not None:
        return _below(_checked(option, "--traces"))
    if whole := given.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        return _checked(whole, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    if base := given.get("OTEL_EXPORTER_OTLP_ENDPOINT"):
        return _below(_checked(base, "OTEL_EXPORTER_OTLP_ENDPOINT"))
    return None


def _below(base: str) -> str:
    bare = base.rstrip("/")
    return bare if bare.endswith(PATH) else f"{bare}{PATH}"


def _checked(address: str, source: str) -> str:
    """Return a valid address; a login in it, which would appear in the log, is refused."""
    if not _is_address(address):
        raise UsageError(
            f"{source}: that is no address of a collector",
            hint="write http://127.0.0.1:4318; a login belongs in OTEL_EXPORTER_OTLP_HEADERS",
        )
    return address


def _is_address(address: str) -> bool:
    try:
        parts = urlsplit(address)
        names_port = parts.port is None or parts.port > 0
    except ValueError:
        return False
    bare = parts.username is None and not parts.query and not parts.fragment
    return bare and names_port and parts.scheme in {"http", "https"} and bool(parts.hostname)


def _check_protocol(given: Mapping[str, str]) -> None:
    name = next((name for name in _PROTOCOLS if name in given), None)
    if name is not None and given[name] != PROTOCOL:
        raise UsageError(
            f"{name}: traces are sent as {PROTOCOL} only",
            hint=f"set it to {PROTOCOL}; collectors take that on port 4318",
        )
