"""The model runner: the one base that is served, its memory, and the buffers of a batch.

What all rows share, base and buffers, is held from the start; what one row needs, its plan and its
KV, is allocated for it. The buffers grow with the widest plan and the number of different plans.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial

from expertctl.engine.adapters.compile import BASE_ONLY, CompiledPlan
from expertctl.engine.adapters.experts import open_local_expert
from expertctl.engine.backend import RunnableModel, translate_errors
from expertctl.engine.kv.kv_cache import KVAllocation, KVCacheBase, KVRequest
from expertctl.engine.load_plan import OpenBase
from expertctl.engine.loaded_model import LoadedModel
from expertctl.engine.memory.adapter_cache import Tier
from expertctl.engine.memory.budget import MemoryBudget, choose_kv_cache_limit, find_budget_limit
from expertctl.engine.memory.host import (
    choose_thread_count,
    find_resident_bytes,
)
from expertctl.engine.memory.process_registry import (
    MemoryLease,
)
from expertctl.engine.moe.usage_profile import UsageProfile
from expertctl.engine.moe.usage_store import load_learnt_profile
from expertctl.engine.preparation import (
    Files,
    PreparedRequest,
    check_budget,
    list_expert_files,
    list_needs,
    open_planned_base,
    prepare_for_base,
    prepare_with_fewer_experts,
)
from expertctl.engine.request import RunRequest
from expertctl.engine.resources import ResourceManager, build_kv_request
from expertctl.engine.result import MemoryUsage
from expertctl.engine.serving.memory_report import (
    AdapterHeadroom,
    ProcessMemory,
    describe_context_limit,
    describe_memory,
)
from expertctl.engine.serving.request import AdapterStatus, LoadedPlan
from expertctl.engine.text.prompt import PromptLogprobs, prompt_logprob_bytes
from expertctl.engine_config import EngineConfig
from expertctl.errors import (
    WARNING_PREFIX,
    BaseMismatchError,
    BudgetError,
    CancelledError,
    DeviceError,
    IncompatibleError,
    InvalidPackageError,
    NotFoundError,
    Notify,
    StoreError,
    UsageError,
)
from expertctl.package.architectures import ExpertsConfig
from expertctl.routing.candidate import InstalledExpert, explain_misfit
from expertctl.routing.planner import PlannedPrompt, Planner
from expertctl.routing.request import RouteRequest
from expertctl.routing.session import PlanningSession
from expertctl.settings import format_size
from expertctl.store.quantised_cache import UsageProfileFile
from expertctl.user_request import UserMessage

_ANY_PROMPT = "?"
"""The base alone does not depend on the prompt."""
_BUFFERS = "the buffers of the batch"
_SCORES = "the log-probabilities of a prompt"
INITIAL_ANSWER_TOKENS = 64
"""Answer tokens whose memory is allocated at the start; the answer gets more as it grows."""


class ModelRunner:
    """The owner of a server's memory; docstrings name the threads that use its parts."""

    def __init__(
        self, planner: Planner, config: EngineConfig, *, tell: Notify, numpy_below: int
    ) -> None:
        """Start without a base in memory."""
        self.config, self.rows = config, config.batching.rows
        limit = find_budget_limit(config.memory_budget, config.device)
        self.cached_kv_limit = choose_kv_cache_limit(config.batching.kept_kv, limit)
        """Maximum bytes of KV kept for later requests."""
        self.resources = ResourceManager(
            planner,
            MemoryBudget(limit),
            device=config.device,
            progress=lambda _: self._check_stopped(),
            tell=tell,
            warmup=config.moe,
            cached_kv_limit=self.cached_kv_limit,
            kernel_progress=lambda *_: self._check_stopped(),
        )
        self._planner, self._numpy_below, self._tell = planner, numpy_below, tell
        self.budget = self.resources.budget
        self._stack = ExitStack()
        self._files: Files = {}
        self._files_stack = ExitStack()
        self._files_bytes = 0
        self._is_stopped = False
        self._seat: MemoryLease | None = None
        self._buffers = 0
        self._widest_request = 1, 0, 1
        """Most tokens, widest plan and most plans that the buffers are allocated for."""
        self._running_plans = Counter[int]()
        """Running sequences by the plan that changes them."""
        self._model: RunnableModel | None = None

    def open(self, session: PlanningSession) -> None:
        """Find the base, load it, and compile its kernels; raises as `ServingEngine.start` does."""
        try:
            self._open(session)
        finally:
            self.report_notes()

    def _open(self, session: PlanningSession) -> None:
        route = RouteRequest(prompt=_ANY_PROMPT, base_alone=True)
        first = RunRequest(
            message=UserMessage(prompt=_ANY_PROMPT), route=route, base=self.config.base
        )
        request = self._apply_config(first)
        planned = session.plan(request.route, base=request.base)
        open_beside = partial(self._open_base, request, planned)
        room = AdapterHeadroom(session, request, self.budget.limit, self.rows, self._tell)
        self._read_files()
        self.base = base = room.reserve(open_beside(0), open_beside)
        self.threads = choose_thread_count(base.weight_bytes)
        before = self._find_resident_bytes()
        self._reserve_first_buffers()
        self._tell(f"loading {base.stored.name}, {format_size(base.weight_bytes)} in memory")
        self._model = model = self.resources.load_base(base, threads=self.threads)
        if (routed := model.routed) is not None and not routed.residence.is_whole:
            held = routed.residence
            self._tell(f"{held.blocks} of {held.total} routed experts fit into memory")
        if note := describe_context_limit(base, limit=self.budget.limit, rows=self.rows):
            self._tell(f"{WARNING_PREFIX}{note}")
        self._seat = self._stack.enter_context(self.resources.admission.acquire(self.budget.limit))
        with ThreadPoolExecutor(1, thread_name_prefix="warming") as thread:
            thread.submit(self._warm_up, planned).result()
        if self.config.batching.tell_memory:
            self._tell(self._describe_memory(before))

    def stop(self) -> None:
        """Make loading and compiling end with `CancelledError`, soon; thread-safe."""
        self._is_stopped = True

    def _check_stopped(self) -> None:
        if self._is_stopped:
            raise CancelledError("the engine ends")

    def _read_files(self) -> None:
        """Read the files that jobs may name; they stay in memory until `close`."""
        trust, tiers, enter = self._planner.trust, self.resources.tiers, self._files_stack
        self._files = {
            path: enter.enter_context(open_local_expert(path, trust=trust, tiers=tiers))
            for path in self.config.batching.files
        }
        self._files_bytes = self.budget.reserved_bytes("experts")

    def get_files(self, request: RunRequest) -> Files:
        """Return the files that a request names, which were read at the start."""
        return {path: self._files[path] for path in list_expert_files(request)}

    def _describe_memory(self, before: int | None) -> str:
        now, process = self._find_resident_bytes(), None
        if before is not None and now is not None:
            process = ProcessMemory(before, now, entered=self.budget.used)
        return describe_memory(
            process,
            budget=self.budget.limit,
            kept_kv=self.cached_kv_limit,
            weights=self.base.weight_bytes,
        )

    def _find_resident_bytes(self) -> int | None:
        """Return the resident set of this process, if known and if it holds the budget."""
        return find_resident_bytes() if self.config.device == "cpu" else None

    def _open_base(self, request: RunRequest, planned: PlannedPrompt, headroom: int) -> OpenBase:
        base = open_planned_base(
            self._planner,
            request,
            planned,
            numpy_below=self._numpy_below,
            memory_limit=self.budget.limit,
            rows=self.rows,
            headroom=headroom,
            usage_store=self.resources.usage_store,
        )
        assert isinstance(base, OpenBase), "only our own engine serves"
        return base

    def report_notes(self) -> None:
        """Report to the operator only which data could not be saved."""
        for note in self.resources.take_notes():
            self._tell(f"{WARNING_PREFIX}{note}")

    @property
    def model(self) -> RunnableModel:
        """The base in memory."""
        assert self._model is not None, "open comes first"
        return self._model

    def bind_request(self, request: RunRequest) -> RunRequest:
        """Return the request with the base and the options of this server.

        Raises:
            UsageError: when it asks for something that this server does not support.
        """
        if request.base not in {None, self.base.stored.name}:
            raise UsageError(
                f"this server serves {self.base.stored.name}, not {request.base}",
                hint="leave out the base, or ask a server of that base",
            )
        if unknown := [path for path in list_expert_files(request) if path not in self._files]:
            raise UsageError(
                f"{unknown[0]} was not read when this server started",
                hint="install the expert and name it by its reference",
            )
        return self._apply_config(replace(request, base=self.base.stored.name))

    def prepare(self, request: RunRequest, planned: PlannedPrompt) -> PreparedRequest:
        """Fit a prompt into the context; called by the processor.

        Raises:
            UsageError: when it does not fit.
            BudgetError: when the job could not have its memory even alone.
            BaseMismatchError: when the base was replaced while it is served.
        """
        if planned.base.identity != self.base.stored.identity:
            raise BaseMismatchError(
                f"{planned.base.name} was replaced by another base while it is served",
                hint="restart the server",
            )
        base, rows, limit = self.base, self.rows, self.budget.limit - self._files_bytes
        files = self.get_files(request)
        if self.config.batching.on_budget == "fewer":
            prepared = prepare_with_fewer_experts(
                base, self._planner, request, planned, files, limit=limit, rows=rows
            )
        else:
            prepared = prepare_for_base(base, self._planner, request, planned, files)
        check_budget(list_needs(self._planner, prepared, files, rows=rows), limit)
        return prepared

    def load_plan(self, prepared: PreparedRequest, *, again: bool = False) -> LoadedPlan:
        """Load the experts of a plan and pin its compiled form; called by the loader thread.

        Trying ``again`` is not a new request: no entry ages by it.

        Raises:
            BudgetError: when they do not fit beside what is in use now.
            DeviceError: when the device failed.
            ExpertError: for any problem with the experts.
        """
        tiers = self.resources.tiers
        if not again:
            tiers.begin_request()
        loads, moved = tiers.traffic[Tier.RAM].loads, self.resources.bytes_moved
        with translate_errors(self.config.device), ExitStack() as pins:
            planned = prepared.planned
            plan = pins.enter_context(
                self.resources.load_plan(self.base, self.model, planned, self._files)
            )
            loads = tiers.traffic[Tier.RAM].loads - loads
            moved = self.resources.bytes_moved.subtract(moved)
            return LoadedPlan(plan, pins.pop_all(), loads, moved)

    @contextmanager
    def open_sequence(
        self,
        prepared: PreparedRequest,
        memory: LoadedPlan,
        *,
        cache_key: str | None,
        generated: Sequence[int] = (),
        scores: PromptLogprobs | None = None,
    ) -> Iterator[LoadedModel]:
        """Allocate KV for a sequence, and prepare the model to read it; called by the engine loop.

        ``generated`` are tokens of its answer that exist already and are read again. With
        ``scores`` the whole prompt is read, even where its KV could be reused.

        Raises:
            BudgetError: when they do not fit beside what is in use now.
        """
        wanted = build_kv_request(self.base, prepared, cache_key)
        ids = (*wanted.ids, *generated)
        at_once = min(wanted.capacity, wanted.virtual_tokens + len(ids) + INITIAL_ANSWER_TOKENS)
        wanted = replace(wanted, ids=ids, initial_tokens=at_once, reuse=scores is None)
        before = self._buffers, self._widest_request
        with (
            self._reserve_scoring(scores),
            self._allocate_widened(wanted, memory.plan) as kv,
            self._count_plan(memory.plan),
        ):
            tokens = wanted.virtual_tokens + len(wanted.ids) - kv.cache.length
            try:
                self.model.prepare(kv.cache, memory.plan, tokens=tokens, rows=self.rows)
            except BudgetError:  # a device is full: freeing wide buffers would not help again
                self._narrow_buffers(*before)
                raise
            refs = (expert.ref for expert in prepared.planned.result.plan.experts)
            self.resources.registration.publish(base=self.base.stored.name, experts=tuple(refs))
            yield LoadedModel(self.base, self.model, kv, memory.plan)

    def get_adapter_status(self, expert: InstalledExpert) -> AdapterStatus:
        """Return the status of an installed expert on this server."""
        unfit = explain_misfit(expert, self.base.stored.identity, allow_mismatch=False)
        in_memory = self.resources.tiers.contains((Tier.RAM, expert.digest))
        return AdapterStatus(expert=expert, fits=not unfit, in_memory=in_memory)

    def free_wide_buffers(self) -> bool:
        """Free the buffers of wide plans while nothing runs; return False if there are none."""
        least = self.base.buffer_bytes(1, rows=self.rows)
        if self._buffers <= least:
            return False
        self.model.free_buffers()
        self._narrow_buffers(least, (1, 0, 1))
        return True

    def read_usage_profile(self, routed: ExpertsConfig) -> UsageProfile:
        """Return the usage profile learned so far, from the disk.

        Raises:
            NotFoundError: when there is none.
            IncompatibleError: when it cannot be read; only the operator gets the path.
        """
        name = self.base.stored.name
        file = UsageProfileFile(self._planner.bases, self.base.stored)
        try:
            profile = load_learnt_profile(file, routed)
        except (InvalidPackageError, StoreError) as error:
            self._tell(f"{WARNING_PREFIX}{file.path}: {error.message}")
            raise IncompatibleError(
                f"the learned usage profile of {name} cannot be read",
                hint="send a profile in the request, or delete the learned one on the server",
            ) from error
        if profile is None:
            raise NotFoundError(
                f"no usage profile was learned for {name}", hint="send a profile in the request"
            )
        return profile

    @property
    def memory(self) -> MemoryUsage:
        """Reserved bytes for each purpose now."""
        return MemoryUsage.from_budget(self.budget)

    @property
    def kv_in_use(self) -> int:
        """Bytes of KV of running sequences, without kept KV."""
        kv_store = self.resources.get_kv_store(self.base.backend)
        return max(0, self.budget.reserved_bytes("kv") - kv_store.cached_bytes)  # both change

    @property
    def free_kv_rows(self) -> int | None:
        """Number of sequences that the KV store has a free row for now; None: as many as fit."""
        return self.resources.get_kv_store(self.base.backend).free_rows

    def close(self) -> None:
        """Free everything; nothing runs any more."""
        if self._model is not None:
            with suppress(DeviceError):  # its memory ends with the process
                self._model.free_buffers()
        if self._buffers:
            self.resources.tiers.release(Tier.DEVICE, "buffers", self._buffers)
            self._buffers = 0
        self._files_stack.close()
        self.resources.close()
        self.report_notes()
        self._stack.close()
        self._is_stopped = False  # kernels that others compile do not check it

    def check_integrity(self) -> None:
        """Assert the invariants."""
        self.resources.tiers.check_integrity()
        assert self.budget.reserved_bytes("buffers") >= self._buffers

    def _apply_config(self, request: RunRequest) -> RunRequest:
        return replace(request, route=replace(request.route, config=self.config))

    def _reserve_scoring(self, scores: PromptLogprobs | None) -> AbstractContextManager[None]:
        """Reserve the memory for scoring a prompt, while its sequence runs."""
        if scores is None:
            return nullcontext()
        size = prompt_logprob_bytes(
            len(scores.ids), top=scores.top, vocabulary=self.base.config.vocab_size
        )
        return self.resources.tiers.reserve_during(Tier.DEVICE, "buffers", size, what=_SCORES)

    @contextmanager
    def _allocate_widened(
        self, request: KVRequest, plan: CompiledPlan
    ) -> Iterator[KVAllocation[KVCacheBase]]:
        """Allocate KV, with buffers that are wide enough; both or neither."""
        before = self._buffers, self._widest_request
        store = self.resources.get_kv_store(self.base.backend)
        store.check_free_row(request)  # first, since buffers may be widened in place of plans
        different = {*self._running_plans, *_list_plans(plan)}
        self._widen_buffers(tokens=request.capacity, width=plan.width, plans=len(different))
        with ExitStack() as stack:
            try:
                kv = stack.enter_context(store.allocate(request))
            except BudgetError:
                self._narrow_buffers(*before)
                raise
            yield kv

    @contextmanager
    def _count_plan(self, plan: CompiledPlan) -> Iterator[None]:
        """Count a plan as running."""
        keys = _list_plans(plan)
        self._running_plans.update(keys)
        try:
            yield
        finally:
            self._running_plans -= Counter(keys)

    def _widen_buffers(self, *, tokens: int, width: int, plans: int) -> None:
        """Hold buffers for so many tokens, so wide a plan and so many, and for all earlier ones."""
        most_tokens, widest_plan, most_plans = self._widest_request
        widest = max(tokens, most_tokens), max(width, widest_plan), max(plans, most_plans)
        wanted = self.base.buffer_bytes(widest[0], width=widest[1], rows=self.rows, plans=widest[2])
        extra = wanted - self._buffers
        if extra > 0:
            tiers = self.resources.tiers
            tiers.reserve(Tier.DEVICE, "buffers", extra, what=_BUFFERS)
            self._buffers = wanted
        self._widest_request = widest

    def _reserve_first_buffers(self) -> None:
        """Hold what the shortest sequences need, in all rows; no prompt could be shorter."""
        try:
            self._widen_buffers(tokens=1, width=0, plans=0)
        except BudgetError as error:
            hint = "raise --memory-budget, or lower --rows"
            raise BudgetError(error.message, hint=hint) from error

    def _narrow_buffers(self, buffers: int, widest: tuple[int, int, int]) -> None:
        """Shrink the buffers to an earlier size."""
        self.resources.tiers.release(Tier.DEVICE, "buffers", self._buffers - buffers)
        self._buffers, self._widest_request = buffers, widest

    def _warm_up(self, planned: PlannedPrompt) -> None:
        """Compile the kernels of the base, and read a token.

        This runs in a thread that ends: device libraries keep memory for each thread that computes,
        and the next thread takes over that of one that ended.
        """
        base, ids = self.base, self.base.tokenizer.encode(_ANY_PROMPT)
        identity = planned.result.plan.identity
        wanted = KVRequest(
            cache_key=None,
            identity=identity,
            config=base.config,
            ids=ids,
            virtual_tokens=0,
            capacity=len(ids) + 1,
        )
        with self.resources.get_kv_store(base.backend).allocate(wanted) as kv:
            self.model.prepare(kv.cache, BASE_ONLY, tokens=len(ids), rows=self.rows)
            reading = self.model.start_session(kv.cache, BASE_ONLY)
            reading.prefill(ids)
            self.model.step([(reading, ids[-1])])


def _list_plans(plan: CompiledPlan) -> list[int]:
    """Return the identity of a plan that changes the base; nothing for another one."""
    return [id(plan)] if plan.width else []
