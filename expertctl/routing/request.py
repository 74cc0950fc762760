"""`RouteRequest`: a prompt and its options, and how sampling settings are resolved.

The first source that sets a value wins: the user, then the experts' ``decoding`` in plan order,
then the ``generation_config.json`` of the base, then the preset of the task, which is complete. The
task is that of the first expert that names a preset, otherwise the one detected in the prompt.

From ``generation_config.json`` come ``temperature``, ``top_p``, ``top_k``, ``min_p`` and
``repetition_penalty``; ``do_sample: false`` means temperature 0. Null and missing keys leave a
setting open. An unusable value is a warning, because the base runs without it; an unreadable file
is an error. The answer length is not read: that file limits it for other programs.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from expertctl.digest import Digest
from expertctl.engine_config import DEFAULT_CONFIG, EngineConfig, check_engine_config
from expertctl.errors import InvalidPackageError, UsageError
from expertctl.reference import Reference, Target
from expertctl.routing.plan import SamplingParams
from expertctl.schema.manifest import Decoding, Manifest
from expertctl.schema.strict_json import read_bounded
from expertctl.user_request import (
    LIMITS,
    NO_OVERRIDES,
    SamplingOverrides,
    check_limit,
    check_overrides,
    check_prompt,
    is_within,
)

DEFAULT_MAX_EXPERTS = 10
PRESETS: Mapping[str, SamplingParams] = {
    "json_parsing": SamplingParams(temperature=0.2, max_tokens=2048),
    "creative_writing": SamplingParams(temperature=0.8, max_tokens=4096),
    "code_generation": SamplingParams(temperature=0.4, max_tokens=8192),
    "default": SamplingParams(temperature=0.6, max_tokens=2048),
}
NO_SETTINGS: Mapping[str, float] = {}
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")


@dataclass(frozen=True, slots=True)
class ForcedExpert:
    """An expert named by the user, and its weight."""

    target: Target
    weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteRequest:
    """One prompt to plan, and the engine to plan it for."""

    prompt: str
    force: tuple[ForcedExpert, ...] = ()
    exclude: tuple[Target, ...] = ()
    max_experts: int = DEFAULT_MAX_EXPERTS
    base_alone: bool = False
    seed: int | None = None
    sampling: SamplingOverrides = NO_OVERRIDES
    allow_base_mismatch: bool = False
    config: EngineConfig = DEFAULT_CONFIG
    """The options of the engine; a server replaces them by its own."""


def check_request(request: RouteRequest) -> None:
    """Validate a request before anything is looked up.

    Raises:
        UsageError: naming the problem.
    """
    check_prompt(request.prompt)
    check_limit("max_experts", request.max_experts)
    check_limit("seed", request.seed)
    check_overrides(request.sampling)
    check_engine_config(request.config)
    for forced in request.force:
        check_limit("weight", forced.weight)
    if request.base_alone and request.force:
        raise UsageError(
            "experts are both forced and forbidden", hint="leave out the one or the other"
        )
    if len(request.force) > request.max_experts:
        raise UsageError(
            f"{len(request.force)} experts are forced, at most {request.max_experts} are allowed",
            hint="raise the limit, which goes up to 10, or name fewer",
        )


def parse_forced(text: str) -> ForcedExpert:
    """Parse ``REF[:weight]`` or ``sha256:<hex>[:weight]``.

    Raises:
        UsageError: when it is neither, or the weight is not a number within its limits.
    """
    algorithm, _, rest = text.partition(":")
    if algorithm == "sha256":
        digest, _, weight = rest.partition(":")
        return ForcedExpert(
            Digest.parse_input(f"sha256:{digest}"), _parse_weight_number(weight, text)
        )
    reference, weight = text, ""
    if _is_weight_separator(text):
        reference, _, weight = text.rpartition(":")
    return ForcedExpert(Reference.parse(reference), _parse_weight_number(weight, text))


def _is_weight_separator(text: str) -> bool:
    """Tell whether the last colon introduces a weight rather than the port of a registry."""
    return ":" in text and "/" not in text.rpartition(":")[2]


def parse_weight(text: str, whole: str) -> float:
    """Parse the weight in ``whole``, the option as the user wrote it.

    Raises:
        UsageError: when it is not a number within its limits.
    """
    try:
        weight = float(text)
    except ValueError as error:
        raise UsageError(
            f"{text[:40]!r} in {whole[:80]!r} is not a weight", hint="write acme/sql:0.5"
        ) from error
    check_limit("weight", weight)
    return weight


def _parse_weight_number(text: str, whole: str) -> float:
    return parse_weight(text, whole) if text or whole.endswith(":") else 1.0


def resolve_sampling(
    overrides: SamplingOverrides,
    experts: Sequence[Manifest],
    *,
    prompt_task: str,
    base: Mapping[str, float] = NO_SETTINGS,
) -> SamplingParams:
    """Return the complete settings of a plan; the module says which source wins.

    ``base`` holds the base's own settings. Greedy decoding keeps only the penalties that the user
    gave, since those of experts and bases are meant for sampling. Raises as `check_overrides`.
    """
    check_overrides(overrides)
    preset: Any = {**asdict(PRESETS[_choose_preset(experts, prompt_task)]), **base}
    params = SamplingParams(**preset)
    for manifest in reversed(experts):
        params = replace(params, **_recommended_settings(manifest.decoding))
    given = overrides.given
    params = replace(params, **given)
    if not (overrides.greedy or params.is_greedy):
        return params
    penalties = {name: given[name] for name in _PENALTIES if name in given}
    return replace(params.to_greedy(), **penalties)


def complete_overrides(overrides: SamplingOverrides, saved: SamplingParams) -> SamplingOverrides:
    """Fill in overrides from the settings of a saved plan."""
    params = saved.to_greedy() if overrides.greedy or overrides.temperature == 0.0 else saved
    kept = {name: getattr(params, name) for name in SamplingParams.__dataclass_fields__}
    return replace(overrides, **{**kept, **overrides.given})


def list_unapplied(decoding: Decoding) -> list[str]:
    """Return the recommended settings that no run applies."""
    return [] if decoding.grammar is None else ["grammar"]


def _choose_preset(experts: Iterable[Manifest], prompt_task: str) -> str:
    named = (m.routing.task for m in experts if m.routing.task in PRESETS)
    return next(named, prompt_task if prompt_task in PRESETS else "default")


def _recommended_settings(decoding: Decoding) -> dict[str, Any]:
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens")
    values = {name: getattr(decoding, name) for name in names}
    stops = {"stop": decoding.stop} if decoding.stop else {}
    return {**{n: v for n, v in values.items() if v is not None}, **stops}


GENERATION_CONFIG = "generation_config.json"
_MAX_BYTES = 1 << 20
_MAX_SHOWN_CHARACTERS = 40
_FLOAT_SETTINGS = ("temperature", "top_p", "min_p", "repetition_penalty")
_INTEGER_SETTINGS = ("top_k",)


@dataclass(frozen=True, slots=True)
class BaseSampling:
    """The sampling settings of a base, and warnings about the unusable ones."""

    settings: Mapping[str, float]
    warnings: tuple[str, ...] = ()


def read_base_sampling(directory: Path) -> BaseSampling:
    """Read the sampling settings of the base in a directory; none without the file.

    Raises:
        InvalidPackageError: when the file is too large or not a JSON object.
    """
    document = _read_settings(directory / GENERATION_CONFIG)
    given: dict[str, float] = {}
    warnings: list[str] = []
    for name in (*_FLOAT_SETTINGS, *_INTEGER_SETTINGS):
        value = document.get(name)
        if value is None:
            continue
        if _is_usable(name, value):
            given[name] = value if name in _INTEGER_SETTINGS else float(value)
        else:
            warnings.append(f"{_describe_bad_value(name, value)}; the setting is not used")
    if document.get("do_sample") is False:
        given["temperature"] = 0.0
    return BaseSampling(given, tuple(warnings))


def _read_settings(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    data = read_bounded(path, max_bytes=_MAX_BYTES)
    if len(data) > _MAX_BYTES:
        raise InvalidPackageError(str(path), [f"more than {_MAX_BYTES} bytes"])
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidPackageError(str(path), [f"not JSON: {error}"]) from error
    if not isinstance(document, dict):
        raise InvalidPackageError(str(path), ["the document is not a JSON object"])
    return document


def _is_usable(name: str, value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if name in _INTEGER_SETTINGS:
        return isinstance(value, int) and is_within(name, value)
    return is_within(name, value) and math.isfinite(value)


def _describe_bad_value(name: str, value: object) -> str:
    low, high = LIMITS[name]
    kind = "a whole number" if name in _INTEGER_SETTINGS else "a number"
    text = ascii(value)
    shown = text if len(text) <= _MAX_SHOWN_CHARACTERS else f"{text[:_MAX_SHOWN_CHARACTERS]}…"
    allowed = f"{kind} from {low:g} to {high:g}"
    return f"{GENERATION_CONFIG} of the base: {name} ({shown}) is not {allowed}"
