"""From a request to its plan, its tokens and their memory: everything before loading.

A request may ask to drop experts that do not fit into memory, or to wait for other runs. Both are
decided here, from the outlines of the experts, before any weight is read.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from expertctl.engine.adapters.compile import CompileSpec
from expertctl.engine.adapters.experts import ExpertSource, LocalExpert
from expertctl.engine.backend import LoadConfig
from expertctl.engine.context_window import FittedPrompt, fit_to_context, insert_samples
from expertctl.engine.load_plan import (
    NUMPY_MAX_BYTES,
    MemoryEstimate,
    OpenBase,
    estimate_plan_memory,
    open_base,
    read_stored_outline,
)
from expertctl.engine.memory.budget import MemoryBudget, Purpose
from expertctl.engine.moe.usage_store import ExpertUsageStore
from expertctl.engine.moe.warmup import describe_unused_option
from expertctl.engine.request import FileExpert, NamedExpert, RunRequest
from expertctl.engine.result import Numerics
from expertctl.engine.text.chat_template import (
    EncodedPrompt,
    TemplateChoice,
    choose_template,
    encode_chat,
    encode_raw_prompt,
)
from expertctl.engine.text.prompt import ConversationMessage
from expertctl.errors import (
    BudgetError,
    InvalidPackageError,
    NotFoundError,
    UsageError,
    format_install_command,
)
from expertctl.routing.base_dtype import choose_dtype
from expertctl.routing.candidate import InstalledExpert
from expertctl.routing.planner import DroppedExpert, PlannedPrompt, Planner, drop_lowest_scoring
from expertctl.routing.request import ForcedExpert, RouteRequest
from expertctl.routing.session import PlanningSession, plan_follow_up
from expertctl.store.base_record import StoredBase
from expertctl.store.transaction import make_stored_expert

if TYPE_CHECKING:
    from expertctl.engine.torch.compat_base import CompatBase

Files = Mapping[Path, LocalExpert]
"""The experts that a request names by their files, or outlines of them."""


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request ready to be loaded: its plan, its base, and its prompt as tokens."""

    planned: PlannedPrompt
    base: "OpenBase | CompatBase"
    template: TemplateChoice
    prompt: FittedPrompt
    load_config: LoadConfig
    dropped: tuple[DroppedExpert, ...] = ()

    @property
    def numerics(self) -> Numerics:
        """The backend and data types that compute it."""
        engine, dtype = self.load_config.engine, self.load_config.dtype
        backend = self.base.backend.name if isinstance(self.base, OpenBase) else "transformers"
        return Numerics(backend, dtype, engine.adapter_dtype, engine.deterministic)

    def buffer_bytes(self, *, width: int = 0, rows: int = 1) -> int:
        """Bytes of a pass besides weights and cache, for a compiled plan of this width."""
        if isinstance(self.base, OpenBase):
            return self.base.buffer_bytes(self.prompt.capacity, width=width, rows=rows)
        return self.base.buffer_bytes(self.prompt.capacity)

    @property
    def compile_spec(self) -> CompileSpec:
        """Target for which our own engine compiles the plan."""
        assert isinstance(self.base, OpenBase), "transformers compiles no plan"
        return self.base.backend.compile_spec


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes that a run needs for one purpose."""

    purpose: Purpose
    size: int
    what: str


def list_expert_files(request: RunRequest) -> list[Path]:
    """Return the files that a request names, without duplicates."""
    return list(dict.fromkeys(e.path for e in request.experts if isinstance(e, FileExpert)))


def plan_request(session: PlanningSession, request: RunRequest, files: Files) -> PlannedPrompt:
    """Plan a request.

    Raises:
        NotFoundError: when a library of the engine is not installed.
        ExpertError: for any problem with the request or the experts.
    """
    force = tuple(_force_expert(expert, files) for expert in request.experts)
    offered = [
        InstalledExpert(make_stored_expert(file.package, ()), file.source.manifest)
        for file in files.values()
    ]
    routed = replace(request.route, force=force)
    if routed.config.engine == "native":
        return _plan(session, request, routed, offered)
    if request.on_budget != "refuse":
        raise UsageError(
            f"--engine transformers does not support --on-budget {request.on_budget}",
            hint="leave out --on-budget",
        )
    try:
        from expertctl.engine.torch.compat_engine import plan_single_expert
    except ModuleNotFoundError as error:
        raise NotFoundError(
            f"--engine transformers needs {error.name}, which is not installed",
            hint=format_install_command("compat"),
        ) from error
    chosen = bool(force) or request.saved is not None
    return plan_single_expert(
        lambda one: _plan(session, request, one, offered), routed, chosen=chosen
    )


def _plan(
    session: PlanningSession,
    request: RunRequest,
    routed: RouteRequest,
    offered: Sequence[InstalledExpert],
) -> PlannedPrompt:
    if request.saved is not None:
        if request.on_budget == "fewer":
            raise UsageError(
                "a saved plan always runs with all its experts",
                hint="leave out --on-budget fewer, or --plan",
            )
        return session.planner.replay(request.saved.plan, routed, base=request.base)
    if request.before is not None and not routed.force:
        return plan_follow_up(session, routed, request.before, base=request.base, files=offered)
    return session.plan_cached(routed, base=request.base, files=offered)


def prepare_with_fewer_experts(
    base: "OpenBase | CompatBase",
    planner: Planner,
    request: RunRequest,
    planned: PlannedPrompt,
    files: Files,
    *,
    limit: int,
    rows: int = 1,
) -> PreparedRequest:
    """Prepare a plan without the experts that do not fit, in a batch of ``rows`` rows.

    Raises as `prepare_for_base` does.
    """
    dropped: tuple[DroppedExpert, ...] = ()
    while True:
        prepared = prepare_for_base(base, planner, request, planned, files)
        prepared = replace(prepared, dropped=dropped)
        try:
            check_budget(list_needs(planner, prepared, files, rows=rows), limit)
        except BudgetError as error:
            why = error.message
        else:
            return prepared
        if not planned.experts:
            return prepared  # the base alone is too large: loading it raises the usual error
        planned, gone = drop_lowest_scoring(planned, request.route, reason=why)
        dropped += gone


def list_base_needs(prepared: PreparedRequest, *, rows: int = 1) -> list[MemoryNeed]:
    """Return the certain needs of a run, which do not depend on its experts."""
    base, tokens = prepared.base, prepared.prompt.capacity
    return [
        MemoryNeed("base", base.weight_bytes, f"the base {base.stored.name}"),
        MemoryNeed("kv", base.kv_bytes(tokens), f"the KV cache of {tokens} tokens"),
        MemoryNeed("buffers", prepared.buffer_bytes(rows=rows), f"the buffers of {tokens} tokens"),
    ]


def list_needs(
    planner: Planner, prepared: PreparedRequest, files: Files, *, rows: int = 1
) -> list[MemoryNeed]:
    """Return the least memory of a run, alone in a batch of ``rows`` rows, in order of need.

    Raises:
        IncompatibleError: when an expert does not fit the base.
    """
    return _list_needs(planner, prepared, files, rows)[0]


def estimate_most_bytes(
    planner: Planner, prepared: PreparedRequest, files: Files, *, limit: int
) -> int:
    """Return the bytes of a run that evicts nothing, at most ``limit``.

    Raises:
        BudgetError: when even the least memory does not fit.
        IncompatibleError: when an expert does not fit the base.
    """
    needs, evictable = _list_needs(planner, prepared, files, 1)
    return min(limit, check_budget(needs, limit) + evictable)


def _list_needs(
    planner: Planner, prepared: PreparedRequest, files: Files, rows: int
) -> tuple[list[MemoryNeed], int]:
    """Return the least memory of a run, and the bytes that it may take besides.

    The buffers widen for the plan once it is compiled; installed experts that it does not use in
    place can be evicted for that, and are where memory is short.
    """
    experts = prepared.planned.result.plan.experts
    outlines = _read_outlines(planner, prepared, files)
    chain = [(o, expert.weight) for o, expert in zip(outlines, experts, strict=True)]
    try:
        plan = estimate_plan_memory(chain, prepared.compile_spec)
    except (InvalidPackageError, OSError):
        plan = MemoryEstimate()  # a file is damaged or missing; loading it reports that
    names, tokens = ", ".join(expert.ref for expert in experts), prepared.prompt.capacity
    # on CUDA the experts are in another memory
    here = [] if prepared.load_config.engine.device == "cuda" else outlines
    in_files = {file.source.content_digest for file in files.values()}
    evictable = [] if plan.uses_experts else [s for s in here if s.content_digest not in in_files]
    least = prepared.buffer_bytes(rows=rows)
    widening = prepared.buffer_bytes(width=plan.width, rows=rows) - least
    evicted = min(widening, sum(source.nbytes for source in evictable))
    needs = [
        *list_base_needs(prepared, rows=rows),
        *(MemoryNeed("experts", source.nbytes, source.manifest.ref) for source in here),
        MemoryNeed("experts", plan.nbytes, f"the plan of {names}"),
        MemoryNeed("buffers", widening - evicted, f"the buffers of {tokens} tokens"),
    ]
    return needs, evicted


def find_missing_headroom(
    planner: Planner, prepared: PreparedRequest, files: Files, *, limit: int
) -> int:
    """Return the bytes of a run without its base if routed-expert slots leave less; else 0."""
    base = prepared.base
    if not (prepared.planned.experts and isinstance(base, OpenBase) and base.config.experts):
        return 0
    other_bytes = count_bytes_without_base(planner, prepared, files)
    return other_bytes if base.weight_bytes + other_bytes > limit else 0


def count_bytes_without_base(
    planner: Planner, prepared: PreparedRequest, files: Files, *, rows: int = 1
) -> int:
    """Return the bytes of a run without its base; arguments and errors as `list_needs`."""
    wanted = list_needs(planner, prepared, files, rows=rows)
    return sum(need.size for need in wanted if need.purpose != "base")


def check_budget(required: Iterable[MemoryNeed], limit: int) -> int:
    """Return the sum of the needs, which fits into the limit.

    Raises:
        BudgetError: naming the first need that does not fit.
    """
    ledger = MemoryBudget(limit)
    for need in required:
        ledger.reserve(need.purpose, need.size, what=need.what)
    return ledger.used


@contextmanager
def hint_minimum_memory(prepared: PreparedRequest) -> Iterator[None]:
    """Add to a budget error of a base with routed experts the command that shows its needs."""
    try:
        yield
    except BudgetError as error:
        base = prepared.base
        if (
            isinstance(base, OpenBase)
            and base.config.experts
            and prepared.load_config.engine.device == "cpu"
        ):
            name = base.stored.name
            error.hint += f"; `expertctl base plan {name}` shows the memory of a typical request"
        raise


def _build_load_config(request: RunRequest, base: StoredBase) -> LoadConfig:
    config = request.route.config
    dtype = choose_dtype(base, config.dtype, engine=config.engine, device=config.device)
    return LoadConfig(dtype, config)


def open_planned_base(
    planner: Planner,
    request: RunRequest,
    planned: PlannedPrompt,
    *,
    numpy_below: int = NUMPY_MAX_BYTES,
    memory_limit: int | None = None,
    headroom: int = 0,
    rows: int = 1,
    usage_store: ExpertUsageStore | None = None,
) -> "OpenBase | CompatBase":
    """Check the files of the base, every byte of them if the request says so, and open it.

    Routed experts stay on the disk if they do not fit into ``memory_limit`` bytes together with a
    batch of ``rows`` sequences, or with ``headroom`` bytes for a run; ``usage_store`` says which
    experts are loaded first.

    Raises:
        BaseMismatchError: when the base differs from the registered one.
    """
    bases, rehash = planner.bases, request.verify_base
    load_config = _build_load_config(request, planned.base)
    if request.route.config.engine == "transformers":
        from expertctl.engine.torch.compat_base import open_compat_base

        return open_compat_base(bases, planned.base, dtype=load_config.dtype, rehash=rehash)
    load_config = replace(
        load_config, memory_limit=memory_limit, headroom=headroom, rows=rows, home=planner.home
    )
    if usage_store is not None:
        choose = partial(usage_store.plan_warmup, planned.base)
        load_config = replace(load_config, choose_warmup=choose)
    base = open_base(bases, planned.base, load_config, rehash=rehash, numpy_below=numpy_below)
    if usage_store is not None and base.config.experts is None:
        usage_store.note_dense_base(planned.base)
    return base


def prepare_for_base(
    base: "OpenBase | CompatBase",
    planner: Planner,
    request: RunRequest,
    planned: PlannedPrompt,
    files: Files,
) -> PreparedRequest:
    """Fit the conversation into the context of an open base.

    Raises:
        UsageError: when the conversation does not fit.
    """
    template = choose_template(planned, _make_reader(planner, files))
    prompt = _fit_prompt(request, base, planned, template)
    load_config = _build_load_config(request, planned.base)
    warnings = (*planned.warnings, *_warn_moe_miss(base, load_config))
    planned = replace(planned, result=replace(planned.result, warnings=warnings))
    return PreparedRequest(planned, base, template, prompt, load_config)


def _warn_moe_miss(base: "OpenBase | CompatBase", load_config: LoadConfig) -> tuple[str, ...]:
    """Warn where ``--moe-miss`` has no effect; with transformers it is an error instead."""
    if (
        load_config.engine.moe_miss == "exact"
        or not isinstance(base, OpenBase)
        or base.config.experts
    ):
        return ()
    return (describe_unused_option(base.stored.name, "--moe-miss"),)


def _read_outlines(planner: Planner, prepared: PreparedRequest, files: Files) -> list[ExpertSource]:
    from_files = {file.source.content_digest: file.source for file in files.values()}
    return [
        from_files.get(expert.digest)
        or read_stored_outline(planner.store, expert.stored, expert.manifest)
        for expert in prepared.planned.experts
    ]


def _force_expert(expert: NamedExpert, files: Files) -> ForcedExpert:
    if isinstance(expert, ForcedExpert):
        return expert
    return ForcedExpert(files[expert.path].source.content_digest, expert.weight)


def _make_reader(planner: Planner, files: Files) -> Callable[[InstalledExpert, str], bytes]:
    """Return a reader of small expert files, from memory or from the store."""
    in_memory = {file.source.content_digest: file.files for file in files.values()}

    def read(expert: InstalledExpert, path: str) -> bytes:
        memory = in_memory.get(expert.digest)
        return memory.copy_file(path) if memory else planner.store.read(expert.stored, path)

    return read


def _fit_prompt(
    request: RunRequest,
    base: "OpenBase | CompatBase",
    planned: PlannedPrompt,
    template: TemplateChoice,
) -> FittedPrompt:
    raw, params = request.raw, planned.result.plan.params

    def encode(messages: Sequence[ConversationMessage]) -> EncodedPrompt:
        if raw is not None:
            return encode_raw_prompt(base.tokenizer, raw)
        return encode_chat(
            base.tokenizer,
            messages,
            template=template.source,
            variables=request.variables,
            end=request.chat_end,
        )

    context = min(base.context, request.context_size or base.context)
    max_tokens = params.max_tokens if raw is None or raw.is_continued else 0
    virtual = _count_virtual_tokens(planned)
    messages = insert_samples(
        request.messages, request.samples, encode, room=context - virtual, max_tokens=max_tokens
    )
    return fit_to_context(
        messages,
        encode,
        context=context,
        max_tokens=max_tokens,
        truncate=request.truncate and raw is None,
        virtual=virtual,
    )


def _count_virtual_tokens(planned: PlannedPrompt) -> int:
    """Count the rows of soft prompts; experts of weight 0 are not used."""
    pairs = zip(planned.experts, planned.result.plan.experts, strict=True)
    return sum(
        e.manifest.virtual_tokens for e, planned_expert in pairs if planned_expert.weight != 0.0
    )
