"""`House`: the one base that is served, its memory, and what a batch of it computes in.

What all rows share, base and buffers, is held from the start; what one row needs, its plan and its
keys and values, is lent to it. The buffers grow with the widest plan that comes.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial

from expertctl.engine.accelerator import told_when_full
from expertctl.engine.admission import Admission, Seat
from expertctl.engine.backend import Model
from expertctl.engine.budget import PURPOSES, Budget, kept_kv_limit
from expertctl.engine.compose import BASE_ALONE
from expertctl.engine.experts import local_expert
from expertctl.engine.kv_loan import KVLoan, KVWanted
from expertctl.engine.kv_room import KVRoom
from expertctl.engine.loaded_base import OpenBase
from expertctl.engine.memory import budget_limit, resident, usual_budget
from expertctl.engine.message import UserMessage
from expertctl.engine.moe.guide import Guide
from expertctl.engine.moe.habit_keeper import learnt_guide
from expertctl.engine.preparation import (
    Files,
    Prepared,
    check_fits,
    needs,
    opened,
    paths_of,
    prepare_fewer,
    prepare_on,
)
from expertctl.engine.presence import Presence
from expertctl.engine.prompt_scores import PromptScores, score_bytes
from expertctl.engine.request import RunRequest
from expertctl.engine.residents import Ready, Residents, kv_wanted
from expertctl.engine.run_result import MemoryUse
from expertctl.engine.serving.batch_settings import BatchSettings
from expertctl.engine.serving.expert_here import ExpertHere
from expertctl.engine.serving.room_for_experts import RoomForExperts
from expertctl.engine.serving.room_for_texts import told_of_room
from expertctl.engine.serving.stated_memory import ProcessMemory, describe_memory
from expertctl.engine.serving.ticket import InMemory
from expertctl.engine.threads import choose_threads
from expertctl.engine.tiers import Tier
from expertctl.errors import (
    BaseMismatchError,
    BudgetError,
    CancelledError,
    DeviceError,
    IncompatibleError,
    InvalidPackageError,
    NotFoundError,
    StoreError,
    UsageError,
)
from expertctl.package.experts_config import ExpertsConfig
from expertctl.routing.candidate import Installed, misfit
from expertctl.routing.planner import Planned, Planner
from expertctl.routing.request import RouteRequest
from expertctl.routing.session import PlanningSession
from expertctl.settings import human_size
from expertctl.store.base_habits import HabitsFile
from expertctl.telling import WARNING, Tell

_ANY_PROMPT = "?"
"""The base alone does not depend on the prompt."""
_WHAT = "the buffers of the batch"
_SCORES = "the log-probabilities of a prompt"
AT_ONCE = 64
"""How many tokens of an answer have memory when it begins; it gets more as it grows."""


class House:
    """The owner of the memory of a server; docstrings name the threads that use its parts."""

    def __init__(
        self, planner: Planner, settings: BatchSettings, *, tell: Tell, torch_below: int
    ) -> None:
        """Hold nothing yet."""
        self.settings = settings
        self.budget = Budget(budget_limit(settings.budget, settings.device))
        self.kept_kv_limit = kept_kv_limit(settings.kept_kv, self.budget.limit)
        """The most bytes of keys and values that are kept for later requests."""
        ram = None if settings.device == "cpu" else Budget(usual_budget())
        self.residents = Residents(
            planner,
            self.budget,
            ram=ram,
            progress=lambda _: self._check_stopped(),
            tell=tell,
            moe=settings.moe,
            kept_kv=self.kept_kv_limit,
            check=self._check_stopped,
        )
        self._planner, self._torch_below, self._tell = planner, torch_below, tell
        self._presence = Presence(planner.home.engines, self.budget)
        self._admission = Admission(planner.store.paths.running)
        self._stack = ExitStack()
        self._files: Files = {}
        self._files_stack = ExitStack()
        self._files_bytes = 0
        self._is_stopped = False
        self._seat: Seat | None = None
        self._buffers = 0
        self._widest = 1, 0
        """The most tokens, and the widest plan, that the buffers are for."""
        self._model: Model | None = None

    def open(self, session: PlanningSession) -> None:
        """Find the base, read it, and compile what it is run with.

        Raises:
            NotFoundError: when there is no such base.
            BudgetError: when it does not fit.
        """
        try:
            self._open(session)
        finally:
            self.tell_notes()

    def _open(self, session: PlanningSession) -> None:
        route = RouteRequest(prompt=_ANY_PROMPT, base_alone=True)
        first = RunRequest(
            message=UserMessage(prompt=_ANY_PROMPT), route=route, base=self.settings.base
        )
        request = self._as_held(first)
        planned = session.plan(request.route, base=request.base)
        open_beside = partial(self._opened, request, planned)
        room = RoomForExperts(session, request, self.budget.limit, self.settings.rows, self._tell)
        self._read_files()
        self.base = base = room.leave(open_beside(0), open_beside)
        self.threads = choose_threads(base.weight_bytes)
        before = self._resident()
        self._hold_first_buffers()
        self._tell(f"loading {base.stored.name}, {human_size(base.weight_bytes)} in memory")
        self._model = model = self.residents.hold_base(base, threads=self.threads)
        if (routed := model.routed) is not None and not routed.residence.is_whole:
            held = routed.residence
            self._tell(f"there is room for {held.blocks} of {held.all} routed experts")
        if told := told_of_room(base, limit=self.budget.limit, rows=self.settings.rows):
            self._tell(f"{WARNING}{told}")
        self._seat = self._stack.enter_context(self._admission.seat(self.budget.limit))
        with ThreadPoolExecutor(1, thread_name_prefix="warming") as thread:
            thread.submit(self._warm, planned).result()
        if self.settings.tell_memory:
            self._tell(self._described_memory(before))

    def stop(self) -> None:
        """Have loading and compiling end with `CancelledError`, soon, in whatever thread."""
        self._is_stopped = True

    def _check_stopped(self) -> None:
        if self._is_stopped:
            raise CancelledError("the engine ends")

    def _read_files(self) -> None:
        """Read the files that jobs may name; they stay in memory until `close`."""
        trust, tiers, enter = self._planner.trust, self.residents.tiers, self._files_stack
        paths = self.settings.files
        self._files = {
            path: enter.enter_context(local_expert(path, trust=trust, tiers=tiers))
            for path in paths
        }
        self._files_bytes = self.budget.held("experts")

    def files_for(self, request: RunRequest) -> Files:
        """Return the files that a request names, which were read at the start."""
        return {path: self._files[path] for path in paths_of(request)}

    def _described_memory(self, before: int | None) -> str:
        now, process = self._resident(), None
        if before is not None and now is not None:
            process = ProcessMemory(before, now, entered=self.budget.used)
        return describe_memory(
            process,
            budget=self.budget.limit,
            kept_kv=self.kept_kv_limit,
            weights=self.base.weight_bytes,
        )

    def _resident(self) -> int | None:
        """Return the resident set of this process where it holds the budget, and is known."""
        return resident() if self.settings.device == "cpu" else None

    def _opened(self, request: RunRequest, planned: Planned, beside: int) -> OpenBase:
        base = opened(
            self._planner,
            request,
            planned,
            torch_below=self._torch_below,
            room=self.budget.limit,
            rows=self.settings.rows,
            beside=beside,
            habits=self.residents.habits,
        )
        assert isinstance(base, OpenBase), "only our own engine serves"
        return base

    def tell_notes(self) -> None:
        """Tell only the operator of the server what could not be kept on the disk."""
        for told in self.residents.take_notes():
            self._tell(f"{WARNING}{told}")

    @property
    def model(self) -> Model:
        """The base in memory."""
        assert self._model is not None, "open comes first"
        return self._model

    def bound(self, request: RunRequest) -> RunRequest:
        """Return a request as it is answered here: on this base, in the form it is held in.

        Raises:
            UsageError: when it asks for something that this server does not do.
        """
        if request.base not in {None, self.base.stored.name}:
            raise UsageError(
                f"this server answers on {self.base.stored.name}, not on {request.base}",
                hint="leave out the base, or ask a server of that base",
            )
        if unknown := [path for path in paths_of(request) if path not in self._files]:
            raise UsageError(
                f"{unknown[0]} was not read when this server started",
                hint="install the expert and name it by its reference",
            )
        return self._as_held(replace(request, base=self.base.stored.name))

    def prepared(self, request: RunRequest, planned: Planned) -> Prepared:
        """Fit a prompt into the context; for the desk.

        Raises:
            UsageError: when it does not fit.
            BudgetError: when the job could not have its memory even alone.
            BaseMismatchError: when the base was changed behind the server.
        """
        if planned.base.identity != self.base.stored.identity:
            raise BaseMismatchError(
                f"{planned.base.name} is another base now than the one that is served",
                hint="start the server again",
            )
        base, rows, limit = self.base, self.settings.rows, self.budget.limit - self._files_bytes
        files = self.files_for(request)
        if self.settings.on_budget == "fewer":
            prepared = prepare_fewer(
                base, self._planner, request, planned, files, limit=limit, rows=rows
            )
        else:
            prepared = prepare_on(base, self._planner, request, planned, files)
        check_fits(needs(self._planner, prepared, files, rows=rows), limit)
        return prepared

    @told_when_full()
    def in_memory(self, prepared: Prepared, *, again: bool = False) -> InMemory:
        """Load the experts of a plan and pin what they are compiled to; for the loader.

        Trying ``again`` is no new request: nothing grows older by it.

        Raises:
            BudgetError: when they do not fit beside what is in use now.
            DeviceError: when the device failed.
            ExpertError: whatever is wrong with the experts.
        """
        tiers = self.residents.tiers
        if not again:
            tiers.begin_request()
        loads, moved = tiers.traffic[Tier.RAM].loads, self.residents.moved
        with ExitStack() as pins:
            planned = prepared.planned
            plan = pins.enter_context(
                self.residents.plan(self.base, self.model, planned, self._files)
            )
            loads = tiers.traffic[Tier.RAM].loads - loads
            return InMemory(
                self.model, plan, pins.pop_all(), loads, self.residents.moved.since(moved)
            )

    @contextmanager
    def lent(
        self,
        prepared: Prepared,
        memory: InMemory,
        *,
        cache_key: str | None,
        written: Sequence[int] = (),
        scores: PromptScores | None = None,
    ) -> Iterator[Ready]:
        """Lend keys and values to one text, and prepare the base to read it; for the writer.

        ``written`` are tokens of its answer that exist already and are read again. With ``scores``
        the whole prompt is read, even where an earlier text began in the same way.

        Raises:
            BudgetError: when they do not fit beside what is in use now.
        """
        wanted = kv_wanted(self.base, prepared, cache_key)
        ids = (*wanted.ids, *written)
        at_once = min(wanted.capacity, wanted.virtual + len(ids) + AT_ONCE)
        wanted = replace(wanted, ids=ids, at_once=at_once, reuse=scores is None)
        with self._scoring(scores), self._widened_for(wanted, width=memory.plan.width) as kv:
            tokens = wanted.virtual + len(wanted.ids) - kv.cache.length
            self.model.prepare(kv.cache, memory.plan, tokens=tokens, rows=self.settings.rows)
            refs = (expert.ref for expert in prepared.planned.result.plan.experts)
            self._presence.holds(base=self.base.stored.name, experts=tuple(refs))
            yield Ready(self.base, self.model, kv, memory.plan)

    def expert_here(self, expert: Installed) -> ExpertHere:
        """Return what an installed expert is to this server now."""
        unfit = misfit(expert, self.base.stored.identity, allow_mismatch=False)
        in_memory = self.residents.tiers.holds((Tier.RAM, expert.digest))
        return ExpertHere(expert=expert, fits=not unfit, in_memory=in_memory)

    def rest(self) -> bool:
        """Give back the buffers of wide plans, while nothing runs; False if there are none."""
        least = self._least
        if self._buffers <= least:
            return False
        self.model.rest()
        self._narrow(least, (1, 0))
        return True

    def learnt(self, routed: ExpertsConfig) -> Guide:
        """Return what was learnt of the base until now, as it is kept on the disk.

        Raises:
            NotFoundError: when nothing was.
            IncompatibleError: when it cannot be read; only the operator is told the path.
        """
        name = self.base.stored.name
        file = HabitsFile(self._planner.bases, self.base.stored)
        try:
            guide = learnt_guide(file, routed)
        except (InvalidPackageError, StoreError) as error:
            self._tell(f"{WARNING}{file.path}: {error.message}")
            raise IncompatibleError(
                f"what was learnt of {name} cannot be read",
                hint="give a profile as a document, or have the server's machine forget that one",
            ) from error
        if guide is None:
            raise NotFoundError(
                f"nothing was learnt of {name}", hint="give a profile as a document"
            )
        return guide

    @property
    def _least(self) -> int:
        """The bytes of buffers that are held in any case."""
        return self.base.buffer_bytes(1, rows=self.settings.rows)

    @property
    def memory(self) -> MemoryUse:
        """How much is held for each purpose now."""
        held = {purpose: self.budget.held(purpose) for purpose in PURPOSES}
        return MemoryUse(self.budget.limit, self.budget.peak, held)

    @property
    def kv_in_use(self) -> int:
        """Bytes of keys and values of texts that run, without those that are only kept."""
        keeper = self.residents.keeper(self.base.backend)
        return max(0, self.budget.held("kv") - keeper.kept_bytes)  # both move meanwhile

    def close(self) -> None:
        """Let go of everything; nothing runs any more."""
        if self._model is not None:
            with suppress(DeviceError):  # what it held ends with the process
                self._model.rest()
        if self._buffers:
            self.residents.tiers.release(Tier.DEVICE, "buffers", self._buffers)
            self._buffers = 0
        self._files_stack.close()
        self.residents.close()
        self.tell_notes()
        self._presence.close()
        self._stack.close()
        self._is_stopped = False  # kernels that others compile are not checked against it

    def check_integrity(self) -> None:
        """Assert what always holds."""
        self.residents.tiers.check_integrity()
        assert self.budget.held("buffers") >= self._buffers

    def _as_held(self, request: RunRequest) -> RunRequest:
        settings = self.settings
        route = replace(
            request.route,
            dtype=settings.dtype,
            adapter_dtype=settings.adapter_dtype,
            deterministic=settings.deterministic,
            moe_miss=settings.moe_miss,
            moe_skip_cap=settings.moe_skip_cap,
            moe_cold=settings.moe_cold,
            device=settings.device,
            memory_budget=self.budget.limit,
        )
        return replace(request, route=route)

    def _scoring(self, scores: PromptScores | None) -> AbstractContextManager[None]:
        """Hold the memory that scoring a prompt takes, for as long as its text is written."""
        if scores is None:
            return nullcontext()
        size = score_bytes(len(scores.ids), top=scores.top, vocabulary=self.base.config.vocab_size)
        return self.residents.tiers.holding(Tier.DEVICE, "buffers", size, what=_SCORES)

    @contextmanager
    def _widened_for(self, wanted: KVWanted, *, width: int) -> Iterator[KVLoan[KVRoom]]:
        """Lend keys and values, with buffers that are wide enough; both or neither."""
        before = self._buffers, self._widest
        self._widen(tokens=wanted.capacity, width=width)
        with ExitStack() as stack:
            try:
                kv = stack.enter_context(self.residents.keeper(self.base.backend).borrow(wanted))
            except BudgetError:
                self._narrow(*before)
                raise
            yield kv

    def _widen(self, *, tokens: int, width: int) -> None:
        """Hold buffers for so many tokens and so wide a plan, and for all earlier ones."""
        widest = max(tokens, self._widest[0]), max(width, self._widest[1])
        wanted = self.base.buffer_bytes(widest[0], width=widest[1], rows=self.settings.rows)
        extra = wanted - self._buffers
        if extra > 0:
            tiers = self.residents.tiers
            tiers.reserve(Tier.DEVICE, "buffers", extra, what=_WHAT)
            self._buffers = wanted
        self._widest = widest

    def _hold_first_buffers(self) -> None:
        """Hold what the shortest texts need, in all rows; no prompt could be shorter."""
        try:
            self._widen(tokens=1, width=0)
        except BudgetError as error:
            hint = "raise --memory-budget, or lower --rows"
            raise BudgetError(error.message, hint=hint) from error

    def _narrow(self, buffers: int, widest: tuple[int, int]) -> None:
        """Hold no more than these buffers, which were held before."""
        self.residents.tiers.release(Tier.DEVICE, "buffers", self._buffers - buffers)
        self._buffers, self._widest = buffers, widest

    def _warm(self, planned: Planned) -> None:
        """Compile what the base is run with, and read a token with it.

        This is done in a thread that ends: libraries of a device keep memory for each thread that
        computes, and the next thread takes over that of one that ended.
        """
        base, ids = self.base, self.base.tokenizer.encode(_ANY_PROMPT)
        identity = planned.result.plan.identity
        wanted = KVWanted(
            cache_key=None,
            identity=identity,
            config=base.config,
            ids=ids,
            virtual=0,
            capacity=len(ids) + 1,
        )
        with self.residents.keeper(base.backend).borrow(wanted) as kv:
            self.model.prepare(kv.cache, BASE_ALONE, tokens=len(ids), rows=self.settings.rows)
            reading = self.model.reading(kv.cache, BASE_ALONE)
            reading.prefill(ids)
            self.model.step([(reading, ids[-1])])
