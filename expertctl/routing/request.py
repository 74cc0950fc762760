"""`RouteRequest`: the prompt and the options of a routing request, and how they are parsed."""

from dataclasses import dataclass
from typing import Literal

from expertctl.digest import Digest
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

Dtype = Literal["float32", "bf16", "int8", "int4"]
"""The data type of the base weights in memory."""
QUANTISED_DTYPES = frozenset[Dtype]({"int8", "int4"})
"""The dtypes with one scale per group of weights."""
AdapterDtype = Literal["published", "fp16", "int8"]
"""The data type of the expert weights in memory."""

DeviceName = Literal["cpu", "cuda"]
"""The device that computes."""
MoeMiss = Literal["exact", "skip"]
"""What happens when a routed expert is not in memory: it is loaded, or skipped."""
MoeCold = Literal["read", "map", "direct"]
"""How a routed expert is read from disk: copied, mapped in the page cache, or by direct I/O."""
MoeColdOption = Literal["auto", "read", "map", "direct"]
"""The user's choice; ``auto`` uses direct I/O if the page cache could hold little of the model."""
DEFAULT_SKIP_CAP = 0.25
"""The default share of a token's router weights that may be skipped in a layer."""
EngineName = Literal["native", "transformers"]
"""Our own decoder, or transformers: slower, for models that our decoder does not support."""

Target = Reference | Digest
"""The name of an expert: a reference, or its content or package digest."""


@dataclass(frozen=True, slots=True)
class ForcedExpert:
    """An expert named by the user, and its weight."""

    target: Target
    weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteRequest:
    """One prompt to plan; ``memory_budget`` is in bytes."""

    prompt: str
    force: tuple[ForcedExpert, ...] = ()
    exclude: tuple[Target, ...] = ()
    max_experts: int = DEFAULT_MAX_EXPERTS
    base_alone: bool = False
    seed: int | None = None
    sampling: SamplingOverrides = NO_OVERRIDES
    dtype: Dtype | None = None
    """The dtype of the base weights in memory; None: `numerics.choose_dtype` decides."""
    adapter_dtype: AdapterDtype = "published"
    deterministic: bool = False
    moe_miss: MoeMiss = "exact"
    moe_skip_cap: float = DEFAULT_SKIP_CAP
    moe_cold: MoeColdOption = "auto"
    device: DeviceName = "cpu"
    memory_budget: int | None = None
    allow_base_mismatch: bool = False
    engine: EngineName = "native"


def check_request(request: RouteRequest) -> None:
    """Validate a request before anything is looked up.

    Raises:
        UsageError: naming the problem.
    """
    check_prompt(request.prompt)
    check_limit("max_experts", request.max_experts)
    check_limit("seed", request.seed)
    check_overrides(request.sampling)
    if request.memory_budget is not None and request.memory_budget <= 0:
        raise UsageError(
            f"a memory budget of {request.memory_budget} bytes is too small",
            hint="write for example 4GB, or leave it out",
        )
    _check_engine(request)
    _check_device(request)
    _check_moe_misses(request)
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


def _check_engine(request: RouteRequest) -> None:
    """Reject options that only our own kernels support for another engine."""
    refused = _list_kernel_options(request)
    if request.moe_miss == "skip":
        refused |= {"--moe-miss skip": "--moe-miss exact"}
    if refused and request.engine == "transformers":
        raise UsageError(
            f"--engine transformers does not support {', '.join(refused)}",
            hint=f"leave out --engine transformers, or give {' '.join(refused.values())}",
        )


def _check_device(request: RouteRequest) -> None:
    """Reject options that only the CPU supports for a CUDA device."""
    refused = _list_kernel_options(request)
    if request.moe_cold in {"map", "direct"}:
        refused |= {f"--moe-cold {request.moe_cold}": "--moe-cold auto"}
    if request.engine != "native":
        refused |= {f"--engine {request.engine}": "--engine native"}
    if refused and request.device == "cuda":
        raise UsageError(
            f"--device cuda does not support {', '.join(refused)}",
            hint=f"give {' '.join(refused.values())}, or compute with --device cpu",
        )


def _check_moe_misses(request: RouteRequest) -> None:
    """Reject a cap outside 0 to 1, and skipping experts together with ``deterministic``."""
    if not 0.0 <= request.moe_skip_cap <= 1.0:
        raise UsageError(
            f"--moe-skip-cap {request.moe_skip_cap} is not a share of the weights of a token",
            hint="the range is 0 (nothing is skipped) to 1",
        )
    if request.moe_miss == "skip" and request.deterministic:
        raise UsageError(
            "--deterministic excludes --moe-miss skip, whose results depend on what is in memory",
            hint="leave out the one or the other",
        )


def _list_kernel_options(request: RouteRequest) -> dict[str, str]:
    """Return the options that need the CPU kernels, each with the option that disables it.

    The value may come from a setting, which cannot be left out on the command line.
    """
    dtype, adapters = f"--dtype {request.dtype}", f"--adapter-dtype {request.adapter_dtype}"
    options = (
        (dtype, "--dtype float32", request.dtype in QUANTISED_DTYPES),
        (adapters, "--adapter-dtype published", request.adapter_dtype != "published"),
        ("--deterministic", "--no-deterministic", request.deterministic),
    )
    return {option: other for option, other, given in options if given}


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
