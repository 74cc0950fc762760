"""`LocalEngine`: from a request to its text, within one memory budget.

The stages are routing, loading, compiling, prefill and decoding. Each is timed, warnings are
collected for the user, and the result is the document of ``run --json``.
"""

import threading
from collections.abc import Generator, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Self

from expertctl.digest import Progress, ignore_progress
from expertctl.engine.adapters.experts import open_local_expert
from expertctl.engine.backend import translate_errors
from expertctl.engine.generation import CancelCheck, never_cancelled
from expertctl.engine.load_plan import NUMPY_MAX_BYTES, read_local_outline
from expertctl.engine.memory.adapter_cache import AdapterCache, Tier
from expertctl.engine.memory.budget import MemoryBudget, find_budget_limit
from expertctl.engine.memory.host import choose_thread_count
from expertctl.engine.memory.process_registry import (
    MemoryLease,
    sleep_before_retry,
)
from expertctl.engine.moe.usage_store import SAVE_INTERVAL
from expertctl.engine.preparation import (
    Files,
    PreparedRequest,
    estimate_most_bytes,
    find_missing_headroom,
    hint_minimum_memory,
    list_base_needs,
    list_expert_files,
    open_planned_base,
    plan_request,
    prepare_for_base,
    prepare_with_fewer_experts,
)
from expertctl.engine.request import RunRequest
from expertctl.engine.resources import ResourceManager
from expertctl.engine.result import GenerationTrace, MemoryUsage, RunResult
from expertctl.engine.result_builder import (
    GenerationContext,
    StageTimer,
    build_result,
    check_answer,
    record_failures,
    record_result,
)
from expertctl.engine_config import DEFAULT_WARMUP, DeviceName, EngineConfig, WarmupConfig
from expertctl.errors import (
    WARNING_PREFIX,
    CountProgress,
    DigestError,
    Notify,
    UsageError,
    ignore_count,
    ignore_notification,
)
from expertctl.routing.planner import PlannedPrompt, Planner
from expertctl.routing.session import PlanningSession


class LocalEngine:
    """The one owner of what is in memory: one base, the adapter cache, and kept KV.

    To stop an answer, return True from ``cancelled``: what is in memory stays. An exception raised
    by a signal may arrive in the middle of bookkeeping; the next run checks consistency and, if it
    fails, starts with nothing loaded. While the traceback of such an exception is kept, its
    references may be kept too: the engine stays busy if it was raised as a ``with`` block ended.
    """

    def __init__(
        self,
        planner: Planner,
        *,
        budget: int | None = None,
        progress: Progress = ignore_progress,
        kernel_progress: CountProgress = ignore_count,
        reading: CountProgress = ignore_count,
        tell: Notify = ignore_notification,
        numpy_below: int = NUMPY_MAX_BYTES,
        device: DeviceName = "cpu",
        moe: WarmupConfig = DEFAULT_WARMUP,
    ) -> None:
        """Start with nothing loaded; ``budget`` applies to the memory of ``device``.

        ``progress`` counts bytes of experts and bases, none while a run is queued; an exception
        that it raises ends the run. ``kernel_progress`` counts compiled kernels, and ``reading``
        tokens of the prompt. ``tell`` gets messages for the user during a run. Bases of fewer bytes
        than ``numpy_below`` run in numpy.
        ``moe`` configures the warm-up of routed experts. The budget and the warm-up in the
        ``config`` of a request are not read.

        Raises:
            NotFoundError: when there is no such device.
        """
        self._device = device
        self._numpy_below, self._warmup = numpy_below, moe
        self._turn = threading.Lock()
        self._current_answer: object | None = None
        """The answer in progress, if any."""
        self._needs_check = False
        self._headroom = 0
        """Bytes that a run needed besides its base, when routed-expert slots left too little."""
        self._planner, self._progress, self._tell = planner, progress, tell
        self._kernel_progress, self._reading = kernel_progress, reading
        self._session = PlanningSession(planner)
        self._resources = self._create_resources(find_budget_limit(budget, device))

    @classmethod
    def from_config(
        cls,
        planner: Planner,
        config: EngineConfig,
        *,
        progress: Progress = ignore_progress,
        kernel_progress: CountProgress = ignore_count,
        reading: CountProgress = ignore_count,
        tell: Notify = ignore_notification,
        numpy_below: int = NUMPY_MAX_BYTES,
    ) -> Self:
        """Start with nothing loaded, for requests with this configuration; raises as above."""
        return cls(
            planner,
            budget=config.memory_budget,
            progress=progress,
            kernel_progress=kernel_progress,
            reading=reading,
            tell=tell,
            numpy_below=numpy_below,
            device=config.device,
            moe=config.moe,
        )

    def run(
        self, request: RunRequest, *, cancelled: CancelCheck = never_cancelled
    ) -> Generator[str, None, RunResult]:
        """Answer one prompt: yield text as it becomes final, return the result.

        A cancelled answer ends at once, and its KV is not kept.

        Raises:
            ExpertError: for any problem with the request, the experts, the base or the budget.
        """
        with self.open_context(request) as context:
            plan, prompt = context.prepared.planned.result.plan, context.prepared.prompt
            trace = GenerationTrace() if request.trace else None
            generated = yield from context.loaded.generate(
                prompt, plan, cancelled, trace=trace, reading=self._reading
            )
            memory = MemoryUsage.from_budget(self.budget)
        form = check_answer(generated, context.prepared.planned, request.route.prompt)
        result = build_result(request, context, generated, form, memory, trace=trace)
        return record_result(result, self._planner.catalogue, notes=self.take_notes)

    @contextmanager
    def open_context(self, request: RunRequest) -> Iterator[GenerationContext]:
        """Load all that the answer to a request needs; `run` adds only the generation.

        Raises:
            UsageError: while another answer is in progress.
            ExpertError: for any problem with the request, the experts, the base or the budget.
        """
        clock = StageTimer()
        with ExitStack() as stack:
            self._check_device(request)
            stack.enter_context(self._claim_turn())
            stack.enter_context(self._resources.registration.mark_answering())
            stack.enter_context(self._report_notes_on_error())
            stack.enter_context(translate_errors(self._device))
            self.tiers.begin_request()
            loads, moved = self.tiers.traffic[Tier.RAM].loads, self._resources.bytes_moved
            files = self._open_files(request, stack)
            planned = plan_request(self._session, request, files)
            clock.end_stage("route")
            stack.enter_context(record_failures(planned, self._planner.catalogue))
            prepared = self._prepare(request, planned, files)
            stack.enter_context(hint_minimum_memory(prepared))
            lease = stack.enter_context(self._acquire_lease(request, prepared, files))
            if lease.queued:
                clock.end_stage("queue")
            files = self._load_files(request, prepared.planned, files, stack)
            count = choose_thread_count(prepared.base.weight_bytes)
            stack.enter_context(prepared.base.use_threads(count))
            borrowed = self._resources.load_for(
                prepared, files, cache_key=request.cache_key, threads=count
            )
            stack.callback(
                self._resources.usage_store.save, interval=SAVE_INTERVAL
            )  # runs when everything else is released
            ready = stack.enter_context(borrowed)
            lease.resize(self.budget.used)
            refs = tuple(expert.ref for expert in prepared.planned.result.plan.experts)
            self._resources.registration.publish(base=prepared.base.stored.name, experts=refs)
            clock.end_stage("load")
            routed = ready.routed
            loads = self.tiers.traffic[Tier.RAM].loads - loads
            moved = self._resources.bytes_moved.subtract(moved)
            moved = moved.add_file_bytes(_count_file_bytes(files))
            yield GenerationContext(prepared, ready, loads, moved, count, clock, routed)

    def plan(self, request: RunRequest) -> PlannedPrompt:
        """Return the plan for a request; only files that it names are read.

        Raises:
            ExpertError: for any problem with the request or the experts.
        """
        return plan_request(self._session, request, self._read_outlines(request))

    def forget(self, cache_key: str) -> None:
        """Drop what was kept for the next request with this key."""
        doubtful, self._needs_check = self._needs_check, True
        self._resources.forget(cache_key)
        self._needs_check = doubtful

    def close(self) -> None:
        """Free everything in memory; the engine can be used again.

        Raises:
            UsageError: while an answer is in progress; nothing is freed then.
        """
        with self._claim_turn():
            self._resources.close()

    def take_notes(self) -> tuple[str, ...]:
        """Return, once, warnings about data that could not be saved; a result includes them."""
        return self._resources.take_notes()

    @property
    def budget(self) -> MemoryBudget:
        """The memory limit, and what is reserved."""
        return self._resources.budget

    @property
    def tiers(self) -> AdapterCache:
        """The experts and plans in memory."""
        return self._resources.tiers

    def check_integrity(self) -> None:
        """Assert the invariants that hold between runs."""
        self._resources.check_integrity()

    @contextmanager
    def _claim_turn(self) -> Iterator[None]:
        """Allow one answer at a time, from any thread."""
        answer = object()
        try:
            with self._turn:
                if self._current_answer is not None:
                    raise UsageError(
                        "this engine is generating another answer",
                        hint="finish or close that answer, or use one engine for each thread",
                    )
                self._current_answer = answer
            if self._needs_check and not self._resources.is_consistent:
                self._reset()
            self._needs_check = True
            yield
            self._needs_check = False
        finally:
            if self._current_answer is answer:
                self._current_answer = None

    @contextmanager
    def _report_notes_on_error(self) -> Iterator[None]:
        """If the run fails, report data that could not be saved, since no result does."""
        try:
            yield
        except Exception:
            for note in self.take_notes():
                self._tell(f"{WARNING_PREFIX}{note}")
            raise

    def _create_resources(self, limit: int) -> ResourceManager:
        return ResourceManager(
            self._planner,
            MemoryBudget(limit),
            device=self._device,
            progress=self._progress,
            tell=self._tell,
            pause=self._pause,
            warmup=self._warmup,
            kernel_progress=self._report_kernels,
        )

    def _report_kernels(self, done: int, total: int) -> None:
        self._progress(0)  # which may end the run
        self._kernel_progress(done, total)

    def _check_device(self, request: RunRequest) -> None:
        wanted = request.route.config.device
        if wanted != self._device:
            raise UsageError(
                f"this engine computes on {self._device}, not on {wanted}",
                hint="create an engine for that device",
            )

    def _reset(self) -> None:
        """Free what can be found; start again with new, empty owners."""
        with suppress(AssertionError, KeyError, ValueError, RuntimeError):  # of a device, too
            self._resources.close()
        self._resources = self._create_resources(self.budget.limit)

    def _open_files(self, request: RunRequest, stack: ExitStack) -> Files:
        """Read the files that a request names, or only outlines where loading may have to wait."""
        if request.on_budget == "refuse":
            return self._read_files(list_expert_files(request), stack)
        return self._read_outlines(request)

    def _read_outlines(self, request: RunRequest) -> Files:
        trust = self._planner.trust
        return {path: read_local_outline(path, trust=trust) for path in list_expert_files(request)}

    def _read_files(self, paths: Iterable[Path], stack: ExitStack) -> Files:
        trust, progress = self._planner.trust, self._progress
        return {
            path: stack.enter_context(
                open_local_expert(path, trust=trust, tiers=self.tiers, progress=progress)
            )
            for path in paths
        }

    def _prepare(
        self, request: RunRequest, planned: PlannedPrompt, files: Files
    ) -> PreparedRequest:
        """Prepare a run; use fewer routed-expert slots where they leave too little memory for it.

        Later runs keep the reduced number, otherwise each would reload the base. Where even the
        fewest slots leave too little, the number does not change.
        """
        planner, limit = self._planner, self.budget.limit
        prepared = self._prepare_with_headroom(request, planned, files, headroom=self._headroom)
        missing = find_missing_headroom(planner, prepared, files, limit=limit)
        if missing > self._headroom:
            fewer = self._prepare_with_headroom(request, planned, files, headroom=missing)
            if not find_missing_headroom(planner, fewer, files, limit=limit):
                self._headroom, prepared = missing, fewer
        if request.on_budget == "fewer":
            return prepare_with_fewer_experts(
                prepared.base, planner, request, planned, files, limit=limit
            )
        return prepared

    def _prepare_with_headroom(
        self, request: RunRequest, planned: PlannedPrompt, files: Files, *, headroom: int
    ) -> PreparedRequest:
        base = open_planned_base(
            self._planner,
            request,
            planned,
            numpy_below=self._numpy_below,
            memory_limit=self.budget.limit,
            headroom=headroom,
            usage_store=self._resources.usage_store,
        )
        return prepare_for_base(base, self._planner, request, planned, files)

    def _acquire_lease(
        self, request: RunRequest, prepared: PreparedRequest, files: Files
    ) -> AbstractContextManager[MemoryLease]:
        """Reserve memory among the runs of this home; wait for it if the request says so."""
        admission, limit = self._resources.admission, self.budget.limit
        if request.on_budget != "queue":
            return admission.acquire(sum(need.size for need in list_base_needs(prepared)))
        size = estimate_most_bytes(self._planner, prepared, files, limit=limit)
        return admission.wait_in_queue(size, limit=limit, tell=self._tell)

    def _pause(self) -> None:
        """Wait for a moment in the queue, unless the answer was cancelled."""
        self._progress(0)
        sleep_before_retry()

    def _load_files(
        self, request: RunRequest, planned: PlannedPrompt, files: Files, stack: ExitStack
    ) -> Files:
        """Load those outlined files into memory that the plan uses."""
        if request.on_budget == "refuse":
            return files
        used = {expert.digest for expert in planned.experts}
        digests = {path: file.source.content_digest for path, file in files.items()}
        now = self._read_files([path for path, digest in digests.items() if digest in used], stack)
        for path, file in now.items():
            if file.source.content_digest != digests[path]:
                raise DigestError(f"{path} changed while it was read", hint="run it again")
        return now


def _count_file_bytes(files: Files) -> int:
    """Return the bytes read from packages that are used as files."""
    experts = files.values()
    return sum(file.size for expert in experts for file in expert.files.digests.values())
