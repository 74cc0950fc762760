"""`RouteRequest`: the prompt and the options of a routing request, and how they are parsed."""

from dataclasses import dataclass

from expertctl.digest import Digest
from expertctl.engine_config import DEFAULT_CONFIG, EngineConfig, check_engine_config
from expertctl.errors import UsageError
from expertctl.reference import Reference
from expertctl.routing.sampling_presets import (
    DEFAULT_MAX_EXPERTS,
    NO_OVERRIDES,
    SamplingOverrides,
    check_limit,
    check_overrides,
    check_prompt,
)

Target = Reference | Digest
"""The name of an expert: a reference, or its content or package digest."""


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


def parse_target(text: str) -> Target:
    """Parse a reference or a digest.

    Raises:
        UsageError: for any other text.
    """
    return Digest.parse_input(text) if text.startswith("sha256:") else Reference.parse(text)


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
