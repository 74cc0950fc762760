"""What a bench measures: an installed base with experts, or random weights of a known shape."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from expertctl.digest import Progress, no_progress
from expertctl.engine.bench import Subject, Wanted, kv_bytes, passing_bytes
from expertctl.engine.budget import Budget
from expertctl.engine.kernels.compiled import compiled_cache
from expertctl.engine.lent import Lent
from expertctl.engine.memory import unused, usual_budget
from expertctl.engine.message import UserMessage
from expertctl.engine.moe.start import UNKNOWN
from expertctl.engine.packed_backend import PackedBackend, PackedModel
from expertctl.engine.packed_base import EVERY_SIZE
from expertctl.engine.random_base import random_base
from expertctl.engine.request import NamedExpert, RunRequest
from expertctl.engine.residents import Ready
from expertctl.engine.runtime import Engine
from expertctl.engine.tiers import Tier
from expertctl.errors import BudgetError, IncompatibleError, UsageError
from expertctl.package.model_config import ModelConfig, parse_config, read_config
from expertctl.routing.plan import PlannedExpert
from expertctl.routing.planner import Planner
from expertctl.routing.request import AdapterDtype, Dtype, RouteRequest
from expertctl.schema.strict_json import JsonObject
from expertctl.settings import Home, human_size
from expertctl.telling import Tell, tell_nobody

USUAL_SHAPE = "qwen3-0.6b"
_OTHER_BASE = "choose another --base, or a --shape"
_PROMPT = "Hello"
"""What experts are planned for; no model reads it."""


@dataclass(frozen=True, slots=True)
class _Shape:
    """The sizes of a published base: hidden, middle, layers, heads, kv heads, head, vocabulary."""

    architecture: str
    sizes: tuple[int, int, int, int, int, int, int]
    tied: bool = True


SHAPES = {
    "qwen3-0.6b": _Shape("qwen3", (1024, 3072, 28, 16, 8, 128, 151936)),
    "qwen3-1.7b": _Shape("qwen3", (2048, 6144, 28, 16, 8, 128, 151936)),
    "qwen3-4b": _Shape("qwen3", (2560, 9728, 36, 32, 8, 128, 151936)),
    "llama-3.2-1b": _Shape("llama", (2048, 8192, 16, 32, 8, 64, 128256)),
    "llama-3.1-8b": _Shape("llama", (4096, 14336, 32, 32, 8, 128, 128256), tied=False),
}
_CLASSES = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}
_POSITIONS = 131072


def config_of(shape: str) -> ModelConfig:
    """Return the configuration of a shape: one of `SHAPES`, or of a folder with ``config.json``.

    Raises:
        UsageError: when it is neither.
        IncompatibleError: when the decoder does not support such a base.
    """
    if shape in SHAPES:
        return parse_config(_document(SHAPES[shape]))
    folder = Path(shape)
    if (folder / "config.json").is_file():
        return read_config(folder)
    raise UsageError(
        f"{shape!r} is neither a known shape nor a folder with a config.json",
        hint=f"known are {', '.join(SHAPES)}",
    )


def _document(shape: _Shape) -> JsonObject:
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


def drawn_bytes(shape: str, dtype: Dtype) -> int:
    """Return what a base of a shape takes, which is how many bytes are drawn for it.

    Raises:
        UsageError: when the shape is not known.
        IncompatibleError: when the kernels do not support its sizes.
    """
    return _backend(shape, dtype).weight_bytes


def _backend(shape: str, dtype: Dtype) -> PackedBackend:
    with _way_out(f"choose another --shape: {', '.join(SHAPES)}"):
        return PackedBackend.of(config_of(shape), dtype)


@contextmanager
def random_subject(
    shape: str,
    dtype: Dtype,
    wanted: Wanted,
    *,
    home: Home,
    budget: int | None = None,
    progress: Progress = no_progress,
    tell: Tell = tell_nobody,
) -> Iterator[Subject]:
    """Draw a base of a shape; nothing is read from the home but compiled kernels.

    ``progress`` counts the bytes that are drawn.

    Raises:
        UsageError: when the shape is not known, or texts are longer than it reads.
        IncompatibleError: when the kernels do not support its sizes.
        BudgetError: when it does not fit.
    """
    backend, limit = _backend(shape, dtype), Budget(usual_budget() if budget is None else budget)
    config = backend.config
    numbers, passing = backend.kv_numbers, passing_bytes(config, backend.scheme, wanted)
    _check_length(config, wanted)
    kv, what = kv_bytes(config, wanted, numbers=numbers), f"a base like {shape} in {dtype}"
    with (
        limit.holding("base", backend.weight_bytes, what=what),
        limit.holding("kv", kv, what="keys and values"),
        limit.holding("buffers", passing, what="buffers"),
    ):
        _check_unused(limit.used, what=what)
        compiled_cache(home, tell=tell)
        base = random_base(config, backend.scheme, progress=progress)
        what = f"random weights in the shape of {shape}"
        yield Subject(what=what, base=base, kv_numbers=numbers)


def _check_unused(size: int, *, what: str) -> None:
    """Refuse what the machine could not hold now, whatever the budget: it would only swap.

    Raises:
        BudgetError: when less memory is unused.
    """
    left = unused()
    if left is not None and size > left:
        raise BudgetError(
            f"{what}: {human_size(size)} needed with its texts, but only {human_size(left)} of "
            "this machine's memory are unused",
            hint="end other programs, or choose a smaller --shape, or --dtype int8 or int4",
        )


@contextmanager
def installed_subject(
    planner: Planner,
    wanted: Wanted,
    *,
    base: str | None,
    experts: Sequence[NamedExpert] = (),
    dtype: Dtype | None = None,
    adapter_dtype: AdapterDtype = "published",
    budget: int | None = None,
    progress: Progress = no_progress,
    tell: Tell = tell_nobody,
) -> Iterator[Subject]:
    """Load an installed base, and compile experts on it, as a run does.

    Raises:
        ExpertError: whatever is wrong with the experts, the base or the budget.
    """
    engine = Engine(
        planner, budget=budget, progress=progress, tell=tell, torch_below=0, moe=UNKNOWN
    )
    route = RouteRequest(
        prompt=_PROMPT, base_alone=not experts, dtype=dtype, adapter_dtype=adapter_dtype
    )
    request = RunRequest(
        message=UserMessage(prompt=_PROMPT), route=route, experts=tuple(experts), base=base
    )
    with ExitStack() as stack:
        with _way_out(_OTHER_BASE):
            lent = stack.enter_context(engine.lend(request))
        subject, backend = _lent_subject(lent)
        config, virtual, plan = backend.config, subject.virtual, subject.plan
        _check_length(config, wanted, virtual=virtual)
        kv = kv_bytes(config, wanted, numbers=backend.kv_numbers, virtual=virtual)
        passing = passing_bytes(config, backend.scheme, wanted, plan=plan)
        with (
            engine.tiers.holding(Tier.DEVICE, "kv", kv, what="keys and values"),
            engine.tiers.holding(Tier.DEVICE, "buffers", passing, what="buffers"),
        ):
            yield replace(subject, warnings=(*subject.warnings, *engine.take_notes()))


def _lent_subject(lent: Lent) -> tuple[Subject, PackedBackend]:
    """Return the part to measure of what a run would answer with, and its backend.

    Raises:
        IncompatibleError: when torch would run it.
    """
    ready, planned = lent.ready, lent.prepared.planned
    assert isinstance(ready, Ready), "no other engine is asked for"
    if not isinstance(ready.model, PackedModel):
        why = "; ".join(ready.warnings)
        raise IncompatibleError(f"bench measures what kernels do: {why}", hint=_OTHER_BASE)
    backend = ready.base.backend
    assert isinstance(backend, PackedBackend)
    subject = Subject(
        what=_told(planned.base.name, planned.result.plan.experts),
        base=ready.model.base,
        kv_numbers=backend.kv_numbers,
        plan=ready.plan.packed,
        soft_prompt=ready.plan.soft_prompt,
        warnings=(*planned.warnings, *ready.warnings),
    )
    return subject, backend


@contextmanager
def _way_out(hint: str) -> Iterator[None]:
    """Hint at a way out of sizes that kernels do not support: a bench has no other engine."""
    try:
        yield
    except IncompatibleError as error:
        if error.hint != EVERY_SIZE:
            raise
        raise IncompatibleError(error.message, hint=hint) from error


def _check_length(config: ModelConfig, wanted: Wanted, *, virtual: int = 0) -> None:
    longest = virtual + wanted.longest
    if longest > config.max_positions:
        raise UsageError(
            f"texts of {longest} tokens are longer than the {config.max_positions} that the base "
            "reads",
            hint="lower --prompt-tokens, --context or --tokens",
        )


def _told(base: str, experts: Sequence[PlannedExpert]) -> str:
    names = " + ".join(expert.ref for expert in experts)
    return f"base {base} with {names}" if names else f"base {base} alone"
