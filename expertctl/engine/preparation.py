"""From a request to its plan, its tokens and what they cost: all that precedes loading.

A request may ask for fewer experts where not all fit into memory, or to be queued behind other
runs. Both are decided here, from the outlines of the experts, before a weight is read.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from expertctl.engine.budget import Budget, Purpose
from expertctl.engine.chat_template import Prompt, encode_chat
from expertctl.engine.compat import plan_one
from expertctl.engine.compat_base import CompatBase, open_compat
from expertctl.engine.compose import Form
from expertctl.engine.context import FittedPrompt, fit_context
from expertctl.engine.expert_template import TemplateChoice, choose_template
from expertctl.engine.experts import ExpertSource, LocalExpert
from expertctl.engine.loaded_base import TORCH_BELOW, OpenBase, Wish, open_base
from expertctl.engine.message import Message
from expertctl.engine.moe.habit_keeper import HabitKeeper
from expertctl.engine.moe.start import without_effect
from expertctl.engine.outline import Foretold, foretell, stored_outline
from expertctl.engine.raw_prompt import encode_raw
from expertctl.engine.request import FileExpert, NamedExpert, RunRequest
from expertctl.engine.run_result import Numerics
from expertctl.errors import BudgetError, InvalidPackageError, UsageError
from expertctl.routing.candidate import Installed
from expertctl.routing.fewer import Dropped, without_least
from expertctl.routing.follow_up import plan_follow_up
from expertctl.routing.numerics import dtype_of
from expertctl.routing.planner import Planned, Planner
from expertctl.routing.request import Forced, RouteRequest
from expertctl.routing.session import PlanningSession
from expertctl.store.base_record import StoredBase
from expertctl.store.transaction import expert_of

Files = Mapping[Path, LocalExpert]
"""The experts that a request names by their files, or outlines of them."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that may be loaded: what answers it, on which base, and what is to be read."""

    planned: Planned
    base: OpenBase | CompatBase
    template: TemplateChoice
    prompt: FittedPrompt
    wish: Wish
    dropped: tuple[Dropped, ...] = ()

    @property
    def numerics(self) -> Numerics:
        """What computes it, and in what."""
        wish = self.wish
        backend = self.base.backend.name if isinstance(self.base, OpenBase) else "transformers"
        return Numerics(backend, wish.dtype, wish.adapter_dtype, wish.deterministic)

    def buffer_bytes(self, *, width: int = 0, rows: int = 1) -> int:
        """What a pass needs besides weights and cache, with a compiled plan so wide."""
        if isinstance(self.base, OpenBase):
            return self.base.buffer_bytes(self.prompt.capacity, width=width, rows=rows)
        return self.base.buffer_bytes(self.prompt.capacity)

    @property
    def form(self) -> Form:
        """What its plan is compiled for by our own engine."""
        assert isinstance(self.base, OpenBase), "transformers compiles no plan"
        return self.base.backend.form


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes that a run takes."""

    purpose: Purpose
    size: int
    what: str


def paths_of(request: RunRequest) -> list[Path]:
    """Return the files that a request names, each once."""
    return list(dict.fromkeys(e.path for e in request.experts if isinstance(e, FileExpert)))


def plan_request(session: PlanningSession, request: RunRequest, files: Files) -> Planned:
    """Plan a request.

    Raises:
        ExpertError: whatever is wrong with the request or the experts.
    """
    force = tuple(_forced(expert, files) for expert in request.experts)
    offered = [
        Installed(expert_of(file.package, ()), file.source.manifest) for file in files.values()
    ]
    routed = replace(request.route, force=force)
    if routed.engine == "native":
        return _planned(session, request, routed, offered)
    if request.on_budget != "refuse":
        raise UsageError(
            f"--engine transformers does not know --on-budget {request.on_budget}",
            hint="leave out --on-budget",
        )
    chosen = bool(force) or request.saved is not None
    return plan_one(lambda one: _planned(session, request, one, offered), routed, chosen=chosen)


def _planned(
    session: PlanningSession,
    request: RunRequest,
    routed: RouteRequest,
    offered: Sequence[Installed],
) -> Planned:
    if request.saved is not None:
        if request.on_budget == "fewer":
            raise UsageError(
                "a saved plan is repeated with all its experts, never with fewer",
                hint="leave out --on-budget fewer, or --plan",
            )
        return session.planner.replay(request.saved.plan, routed, base=request.base)
    if request.before is not None and not routed.force:
        return plan_follow_up(session, routed, request.before, base=request.base, files=offered)
    return session.recall(routed, base=request.base, files=offered)


def prepare(
    planner: Planner,
    request: RunRequest,
    planned: Planned,
    files: Files,
    *,
    torch_below: int = TORCH_BELOW,
    room: int | None = None,
    beside: int = 0,
    habits: HabitKeeper | None = None,
) -> Prepared:
    """Open the base of a plan and fit the conversation into its context.

    Raises:
        BaseMismatchError: when the base is not what was added.
        UsageError: when the conversation does not fit.
    """
    base = opened(
        planner,
        request,
        planned,
        torch_below=torch_below,
        room=room,
        beside=beside,
        habits=habits,
    )
    return prepare_on(base, planner, request, planned, files)


def prepare_fewer(
    base: OpenBase | CompatBase,
    planner: Planner,
    request: RunRequest,
    planned: Planned,
    files: Files,
    *,
    limit: int,
    rows: int = 1,
) -> Prepared:
    """Prepare a plan without the experts that do not fit, in a batch of so many rows.

    Raises as `prepare_on` does.
    """
    dropped: tuple[Dropped, ...] = ()
    while True:
        prepared = prepare_on(base, planner, request, planned, files)
        prepared = replace(prepared, dropped=dropped)
        try:
            check_fits(needs(planner, prepared, files, rows=rows), limit)
        except BudgetError as error:
            why = error.message
        else:
            return prepared
        if not planned.experts:
            return prepared  # the base alone is too much: loading it is refused in the usual words
        planned, gone = without_least(planned, request.route, why=why)
        dropped += gone


def certain_needs(prepared: Prepared, *, width: int = 0, rows: int = 1) -> list[Need]:
    """Return what a run takes for certain; of its experts only how wide their plan is counts."""
    base, tokens = prepared.base, prepared.prompt.capacity
    buffers = prepared.buffer_bytes(width=width, rows=rows)
    return [
        Need("base", base.weight_bytes, f"the base {base.stored.name}"),
        Need("kv", base.kv_bytes(tokens), f"the KV cache of {tokens} tokens"),
        Need("buffers", buffers, f"the buffers of {tokens} tokens"),
    ]


def needs(planner: Planner, prepared: Prepared, files: Files, *, rows: int = 1) -> list[Need]:
    """Return all that a run takes at most, to the byte, alone in a batch of so many rows.

    Raises:
        IncompatibleError: when an expert does not fit the base.
    """
    experts, outlines = prepared.planned.result.plan.experts, _outlines(planner, prepared, files)
    chain = [(o, expert.weight) for o, expert in zip(outlines, experts, strict=True)]
    try:
        plan = foretell(chain, prepared.form)
    except (InvalidPackageError, OSError):
        plan = Foretold()  # a file is damaged or gone: loading it, by its digest, says so
    names = ", ".join(expert.ref for expert in experts)
    here = [] if prepared.wish.device == "cuda" else outlines  # else they lie in another memory
    return [
        *certain_needs(prepared, width=plan.width, rows=rows),
        *(Need("experts", source.nbytes, source.manifest.ref) for source in here),
        Need("experts", plan.nbytes, f"the plan of {names}"),
    ]


def lacking(planner: Planner, prepared: Prepared, files: Files, *, limit: int) -> int:
    """Return what a run takes besides its base, if slots of routed experts leave less; else 0.

    Raises:
        IncompatibleError: when an expert does not fit the base.
    """
    base = prepared.base
    if not (prepared.planned.experts and isinstance(base, OpenBase) and base.config.experts):
        return 0
    beside = beside_base(planner, prepared, files)
    return beside if base.weight_bytes + beside > limit else 0


def beside_base(planner: Planner, prepared: Prepared, files: Files, *, rows: int = 1) -> int:
    """Return what a run takes besides its base, alone in a batch of so many rows.

    Raises:
        IncompatibleError: when an expert does not fit the base.
    """
    wanted = needs(planner, prepared, files, rows=rows)
    return sum(need.size for need in wanted if need.purpose != "base")


def check_fits(wanted: Iterable[Need], limit: int) -> int:
    """Return the sum of what is needed, which fits into a limit.

    Raises:
        BudgetError: naming the first thing that does not.
    """
    ledger = Budget(limit)
    for need in wanted:
        ledger.reserve(need.purpose, need.size, what=need.what)
    return ledger.used


@contextmanager
def naming_the_least(prepared: Prepared) -> Iterator[None]:
    """Add to the way out of a refusal which command says what a base of routed experts needs."""
    try:
        yield
    except BudgetError as error:
        base = prepared.base
        if isinstance(base, OpenBase) and base.config.experts and prepared.wish.device == "cpu":
            name = base.stored.name
            error.hint += f"; `expertctl base plan {name}` says what a usual text takes"
        raise


def _wish(request: RunRequest, base: StoredBase) -> Wish:
    route = request.route
    dtype = dtype_of(base, route.dtype, engine=route.engine)
    return Wish(
        dtype,
        route.adapter_dtype,
        route.deterministic,
        route.device,
        moe_miss=route.moe_miss,
        moe_skip_cap=route.moe_skip_cap,
        moe_cold=route.moe_cold,
    )


def opened(
    planner: Planner,
    request: RunRequest,
    planned: Planned,
    *,
    torch_below: int = TORCH_BELOW,
    room: int | None = None,
    beside: int = 0,
    rows: int = 1,
    habits: HabitKeeper | None = None,
) -> OpenBase | CompatBase:
    """Check the files of the base, every byte of them when that was asked for.

    Routed experts that do not fit into ``room`` bytes, where a batch of ``rows`` texts or a run of
    ``beside`` bytes has room, too, stay on the disk; its ``habits`` say which come first.

    Raises:
        BaseMismatchError: when the base is not what was added.
    """
    bases, rehash, wish = planner.bases, request.verify_base, _wish(request, planned.base)
    if request.route.engine == "transformers":
        return open_compat(bases, planned.base, dtype=wish.dtype, rehash=rehash)
    wish = replace(wish, room=room, beside=beside, rows=rows)
    if habits is not None:
        wish = replace(wish, start=partial(habits.start, planned.base))
    base = open_base(bases, planned.base, wish, rehash=rehash, torch_below=torch_below)
    if habits is not None and base.config.experts is None:
        habits.pass_over(planned.base)
    return base


def prepare_on(
    base: OpenBase | CompatBase,
    planner: Planner,
    request: RunRequest,
    planned: Planned,
    files: Files,
) -> Prepared:
    """Fit the conversation into the context of an open base.

    Raises:
        UsageError: when the conversation does not fit.
    """
    template = choose_template(planned, _reader(planner, files))
    prompt = _fitted(request, base, planned, template)
    wish = _wish(request, planned.base)
    told = (*planned.warnings, *_of_misses(base, wish))
    planned = replace(planned, result=replace(planned.result, warnings=told))
    return Prepared(planned, base, template, prompt, wish)


def _of_misses(base: OpenBase | CompatBase, wish: Wish) -> tuple[str, ...]:
    """Say where there is nothing to leave out; transformers refuses to be asked for that."""
    if wish.moe_miss == "exact" or not isinstance(base, OpenBase) or base.config.experts:
        return ()
    return (without_effect(base.stored.name, "--moe-miss"),)


def _outlines(planner: Planner, prepared: Prepared, files: Files) -> list[ExpertSource]:
    from_files = {file.source.content_digest: file.source for file in files.values()}
    return [
        from_files.get(expert.digest)
        or stored_outline(planner.store, expert.stored, expert.manifest)
        for expert in prepared.planned.experts
    ]


def _forced(expert: NamedExpert, files: Files) -> Forced:
    if isinstance(expert, Forced):
        return expert
    return Forced(files[expert.path].source.content_digest, expert.weight)


def _reader(planner: Planner, files: Files) -> Callable[[Installed, str], bytes]:
    """Read small files of experts, from memory or from the store."""
    in_memory = {file.source.content_digest: file.files for file in files.values()}

    def read(expert: Installed, path: str) -> bytes:
        memory = in_memory.get(expert.digest)
        return memory.data(path) if memory else planner.store.read(expert.stored, path)

    return read


def _fitted(
    request: RunRequest, base: OpenBase | CompatBase, planned: Planned, template: TemplateChoice
) -> FittedPrompt:
    raw, params = request.raw, planned.result.plan.params

    def encode(messages: Sequence[Message]) -> Prompt:
        if raw is not None:
            return encode_raw(base.tokenizer, raw)
        return encode_chat(
            base.tokenizer,
            messages,
            template=template.source,
            variables=request.variables,
            end=request.chat_end,
        )

    return fit_context(
        request.messages,
        encode,
        context=min(base.context, request.context_size or base.context),
        max_tokens=params.max_tokens if raw is None or raw.is_continued else 0,
        truncate=request.truncate and raw is None,
        virtual=_virtual_tokens(planned),
    )


def _virtual_tokens(planned: Planned) -> int:
    """Count the rows of soft prompts; an expert of weight 0 is left out."""
    pairs = zip(planned.experts, planned.result.plan.experts, strict=True)
    return sum(e.manifest.virtual_tokens for e, told in pairs if told.weight != 0.0)
