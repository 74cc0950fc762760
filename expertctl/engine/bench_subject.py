"""What a bench measures: an installed base with experts, or random weights of a known shape."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from expertctl.digest import Progress, ignore_progress
from expertctl.engine.backend import LoadConfig
from expertctl.engine.bench import BenchSettings, BenchSubject, bench_buffer_bytes, bench_kv_bytes
from expertctl.engine.cpu.backend import PackedBackend, PackedModel
from expertctl.engine.cpu.base_loader import create_random_base
from expertctl.engine.cpu.packed_base import TRY_TRANSFORMERS
from expertctl.engine.kernels.jit import use_kernel_cache
from expertctl.engine.loaded_model import LoadedModel
from expertctl.engine.local_engine import LocalEngine
from expertctl.engine.memory.adapter_cache import Tier
from expertctl.engine.memory.budget import MemoryBudget
from expertctl.engine.memory.host import find_default_budget, find_unused_bytes
from expertctl.engine.request import NamedExpert, RunRequest
from expertctl.engine.result_builder import GenerationContext
from expertctl.engine_config import COLD_START, Dtype, EngineConfig
from expertctl.errors import BudgetError, IncompatibleError, Notify, UsageError, ignore_notification
from expertctl.package.model_config import ModelConfig, parse_model_config, read_model_config
from expertctl.routing.plan import PlannedExpert
from expertctl.routing.planner import Planner
from expertctl.routing.request import RouteRequest
from expertctl.schema.strict_json import JsonObject
from expertctl.settings import Home, format_size
from expertctl.user_request import UserMessage

DEFAULT_SHAPE = "qwen3-0.6b"
_OTHER_BASE = "choose another --base, or a --shape"
_PROMPT = "Hello"
"""The prompt that experts are planned for; no model reads it."""


@dataclass(frozen=True, slots=True)
class _ModelShape:
    """Sizes of a published base: hidden, MLP, layers, heads, KV heads, head dim, vocabulary."""

    architecture: str
    sizes: tuple[int, int, int, int, int, int, int]
    tied: bool = True


SHAPES = {
    "qwen3-0.6b": _ModelShape("qwen3", (1024, 3072, 28, 16, 8, 128, 151936)),
    "qwen3-1.7b": _ModelShape("qwen3", (2048, 6144, 28, 16, 8, 128, 151936)),
    "qwen3-4b": _ModelShape("qwen3", (2560, 9728, 36, 32, 8, 128, 151936)),
    "llama-3.2-1b": _ModelShape("llama", (2048, 8192, 16, 32, 8, 64, 128256)),
    "llama-3.1-8b": _ModelShape("llama", (4096, 14336, 32, 32, 8, 128, 128256), tied=False),
}
_CLASSES = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}
_POSITIONS = 131072


def load_shape_config(shape: str) -> ModelConfig:
    """Return the configuration of a shape: a name in `SHAPES`, or a folder with ``config.json``.

    Raises:
        UsageError: when it is neither.
        IncompatibleError: when the decoder does not support such a base.
    """
    if shape in SHAPES:
        return parse_model_config(_shape_document(SHAPES[shape]))
    folder = Path(shape)
    if (folder / "config.json").is_file():
        return read_model_config(folder)
    raise UsageError(
        f"{shape!r} is neither a known shape nor a folder with a config.json",
        hint=f"known shapes: {', '.join(SHAPES)}",
    )


def _shape_document(shape: _ModelShape) -> JsonObject:
    hidden, middle, layers, heads, kv_heads, head_dim, vocabulary = shape.sizes
    return {
        "architectures": [_CLASSES[shape.architecture]],
        "model_type": shape.architecture,
        "hidden_size": hidden,
        "intermediate_size": middle,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocabulary,
        "max_position_embeddings": _POSITIONS,
        "hidden_act": "silu",
        "tie_word_embeddings": shape.tied,
    }


def random_base_bytes(shape: str, dtype: Dtype) -> int:
    """Return the weight bytes of a base of this shape, all of which are generated.

    Raises:
        UsageError: when the shape is unknown.
        IncompatibleError: when the kernels do not support its sizes.
    """
    return _choose_backend(shape, dtype).weight_bytes


def _choose_backend(shape: str, dtype: Dtype) -> PackedBackend:
    with _hint_at_other_base(f"choose another --shape: {', '.join(SHAPES)}"):
        return PackedBackend.choose(load_shape_config(shape), LoadConfig(dtype))


@contextmanager
def open_random_subject(
    shape: str,
    dtype: Dtype,
    settings: BenchSettings,
    *,
    home: Home,
    budget: int | None = None,
    progress: Progress = ignore_progress,
    notify: Notify = ignore_notification,
) -> Iterator[BenchSubject]:
    """Create a base of a shape with random weights; only compiled kernels are read from the home.

    ``progress`` counts the bytes that are generated.

    Raises:
        UsageError: when the shape is unknown, or a sequence exceeds its context length.
        IncompatibleError: when the kernels do not support its sizes.
        BudgetError: when it does not fit.
    """
    backend, limit = (
        _choose_backend(shape, dtype),
        MemoryBudget(find_default_budget() if budget is None else budget),
    )
    config = backend.config
    passing = bench_buffer_bytes(config, backend.scheme, settings)
    _check_context_length(config, settings)
    kv = bench_kv_bytes(config, settings, layout=backend.page_layout)
    what = f"a base like {shape} in {dtype}"
    with (
        limit.reserve_during("base", backend.weight_bytes, what=what),
        limit.reserve_during("kv", kv, what="keys and values"),
        limit.reserve_during("buffers", passing, what="buffers"),
    ):
        _check_unused(limit.used, what=what)
        use_kernel_cache(home, notify=notify)
        base = create_random_base(config, backend.scheme, progress=progress)
        what = f"random weights in the shape of {shape}"
        yield BenchSubject(description=what, base=base, kv_scheme=backend.kv_scheme)


def _check_unused(size: int, *, what: str) -> None:
    """Refuse what exceeds the unused memory now, whatever the budget: it would only swap.

    Raises:
        BudgetError: when less memory is unused.
    """
    left = find_unused_bytes()
    if left is not None and size > left:
        raise BudgetError(
            f"{what}: {format_size(size)} needed with KV and buffers, but only "
            f"{format_size(left)} of this machine's memory is unused",
            hint="end other programs, or choose a smaller --shape, or --dtype int8 or int4",
        )


@contextmanager
def open_installed_subject(
    planner: Planner,
    settings: BenchSettings,
    *,
    config: EngineConfig,
    experts: Sequence[NamedExpert] = (),
    progress: Progress = ignore_progress,
    notify: Notify = ignore_notification,
) -> Iterator[BenchSubject]:
    """Load an installed base and compile experts on it, as a run does.

    Raises:
        ExpertError: for any problem with the experts, the base or the budget.
    """
    config = replace(config, moe=COLD_START)
    engine = LocalEngine.from_config(planner, config, progress=progress, tell=notify, numpy_below=0)
    request = RunRequest(
        message=UserMessage(prompt=_PROMPT),
        route=RouteRequest(prompt=_PROMPT, base_alone=not experts, config=config),
        experts=tuple(experts),
        base=config.base,
    )
    with ExitStack() as stack:
        with _hint_at_other_base(_OTHER_BASE):
            context = stack.enter_context(engine.open_context(request))
        subject, backend = _extract_subject(context)
        model, virtual, plan = backend.config, subject.virtual_tokens, subject.plan
        _check_context_length(model, settings, virtual=virtual)
        kv = bench_kv_bytes(model, settings, layout=backend.page_layout, virtual=virtual)
        passing = bench_buffer_bytes(model, backend.scheme, settings, plan=plan)
        with (
            engine.tiers.reserve_during(Tier.DEVICE, "kv", kv, what="keys and values"),
            engine.tiers.reserve_during(Tier.DEVICE, "buffers", passing, what="buffers"),
        ):
            yield replace(subject, warnings=(*subject.warnings, *engine.take_notes()))


def _extract_subject(context: GenerationContext) -> tuple[BenchSubject, PackedBackend]:
    """Return the measurable part of a generation context, and its backend.

    Raises:
        IncompatibleError: when numpy would run it.
    """
    ready, planned = context.loaded, context.prepared.planned
    assert isinstance(ready, LoadedModel), "no other engine is asked for"
    if not isinstance(ready.model, PackedModel):
        why = "; ".join(ready.warnings)
        raise IncompatibleError(f"bench needs a base that kernels run: {why}", hint=_OTHER_BASE)
    backend = ready.base.backend
    assert isinstance(backend, PackedBackend)
    subject = BenchSubject(
        description=_describe_subject(planned.base.name, planned.result.plan.experts),
        base=ready.model.base,
        kv_scheme=backend.kv_scheme,
        plan=ready.plan.packed,
        soft_prompt=ready.plan.soft_prompt,
        warnings=(*planned.warnings, *ready.warnings),
    )
    return subject, backend


@contextmanager
def _hint_at_other_base(hint: str) -> Iterator[None]:
    """Replace the hint of errors about unsupported sizes: a bench has no other engine."""
    try:
        yield
    except IncompatibleError as error:
        if error.hint != TRY_TRANSFORMERS:
            raise
        raise IncompatibleError(error.message, hint=hint) from error


def _check_context_length(
    config: ModelConfig, settings: BenchSettings, *, virtual: int = 0
) -> None:
    longest = virtual + settings.longest_text
    if longest > config.max_positions:
        raise UsageError(
            f"a sequence of {longest} tokens exceeds the context of the base, "
            f"{config.max_positions} tokens",
            hint="lower --prompt-tokens, --context or --tokens",
        )


def _describe_subject(base: str, experts: Sequence[PlannedExpert]) -> str:
    names = " + ".join(expert.ref for expert in experts)
    return f"base {base} with {names}" if names else f"base {base} alone"
