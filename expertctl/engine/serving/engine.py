"""The serving engine: jobs of many callers, answered together on one resident base.

::

    submit -> queue -> processor: plan, tokenise -> load experts -> loop: batch -> processor

Three threads: the next jobs are planned and loaded while others are decoded. A few more jobs are
prepared than rows are free; all others stay in the queue, so that their order is decided late.

A job waits for missing memory as long as another job may release some. A job that does not fit even
alone is refused.
"""

import uuid
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from queue import SimpleQueue

from expertctl.engine.load_plan import NUMPY_MAX_BYTES
from expertctl.engine.moe.counters import CounterMode, Counters, CounterSnapshot
from expertctl.engine.moe.profile_codecs import parse_profile
from expertctl.engine.moe.usage_store import Observation, make_observation
from expertctl.engine.moe.warmup import ProfileOptions
from expertctl.engine.request import RunRequest
from expertctl.engine.serving.loop import EngineLoop, FailureCallback
from expertctl.engine.serving.model_runner import ModelRunner
from expertctl.engine.serving.processor import RequestProcessor
from expertctl.engine.serving.request import (
    KV_BLOCK_TOKENS,
    AdapterStatus,
    EngineSnapshot,
    GenerationJob,
    JobEvent,
    JobFailed,
    JobFinished,
    RequestState,
    TokenSink,
)
from expertctl.engine.serving.scheduler import POLL_SECONDS, Scheduler
from expertctl.engine.text.tokenizer import Tokenizer
from expertctl.engine_config import EngineConfig
from expertctl.errors import (
    WARNING_PREFIX,
    DeviceError,
    IncompatibleError,
    Notify,
    RateLimitError,
    UsageError,
    ignore_notification,
)
from expertctl.routing.candidate import InstalledExpert, explain_misfit
from expertctl.routing.planner import PlannedPrompt, Planner
from expertctl.routing.request import ForcedExpert, RouteRequest
from expertctl.schema.strict_json import JsonObject
from expertctl.user_request import SamplingOverrides, UserMessage

WARMUP_TOKENS = 24
"""Maximum tokens of the answer to a warm-up prompt."""


class ServingEngine:
    """The engine of a server; thread-safe once it is started."""

    def __init__(
        self,
        planner: Planner,
        config: EngineConfig,
        *,
        tell: Notify = ignore_notification,
        numpy_below: int = NUMPY_MAX_BYTES,
        on_failure: FailureCallback = lambda: None,
    ) -> None:
        """Start without a base in memory; ``tell`` gets messages for the operator.

        ``on_failure`` is called if the engine ends by itself, after a bug or a device failure.
        Bases of fewer bytes than ``numpy_below`` run in numpy, row after row.
        """
        self.config, batching = config, config.batching
        self._runner = ModelRunner(planner, config, tell=tell, numpy_below=numpy_below)
        self._scheduler = Scheduler(queue=batching.queue, rows=batching.rows)
        self._processor = RequestProcessor(planner, self._runner, self._scheduler, tell=tell)
        self._tell, self._on_failure = tell, on_failure
        self._loop: EngineLoop | None = None

    def start(self) -> None:
        """Load the base and warm up, then accept jobs.

        Raises:
            NotFoundError: when there is no such base.
            BudgetError: when it does not fit.
            DeviceError: when the device failed.
        """
        self._processor.open_model()
        self._loop = EngineLoop(
            self._runner,
            self._scheduler,
            self._processor,
            tell=self._tell,
            on_failure=self._on_failure,
        )
        self._loop.start()
        for expert in self._list_warmup_experts():
            forced = (ForcedExpert(expert.digest),)
            self._answer_warmup(_build_request("?", force=forced, max_tokens=2))
        for prompt in self.config.batching.warm:
            self._answer_warmup(_build_request(prompt, max_tokens=WARMUP_TOKENS))
        if (counters := self._collect_counters()) is not None:
            counters.reset()  # only requests of callers are observed

    @property
    def is_working(self) -> bool:
        """Whether jobs are answered: from the end of `start` until `close`."""
        return self._loop is not None and self._loop.is_working

    @property
    def base_name(self) -> str:
        """Name of the served base."""
        return self._runner.base.stored.name

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the base, with its chat template."""
        return self._runner.base.tokenizer

    @property
    def context(self) -> int:
        """Context length of the base in tokens, answer included."""
        return self._runner.base.context

    def submit(self, job: GenerationJob, sink: TokenSink) -> None:
        """Add a job to the queue; its events go to the sink from now on.

        Raises:
            RateLimitError: when the queue is full, or the server is ending.
            UsageError: when it asks for something that this server does not support.
        """
        rows = self.config.batching.rows
        if job.answers > rows:
            raise UsageError(f"{job.answers} answers requested, at most {rows} are possible")
        request = self._runner.bind_request(job.request)
        self._scheduler.enqueue(RequestState(replace(job, request=request), sink))
        self._processor.prepare_next()

    def cancel(self, job_id: str) -> None:
        """Cancel a job; unknown and ended ones are ignored."""
        self._scheduler.cancel(job_id)

    def plan(self, request: RunRequest) -> Future[PlannedPrompt]:
        """Return a future of the plan for a request, or of its error.

        Raises:
            UsageError: when it asks for something that this server does not support.
        """
        return self._processor.plan(self._runner.bind_request(request))

    def choose_base(self, request: RunRequest) -> Future[str]:
        """Return the base that a run without a server would choose, after planning already queued.

        It differs from the served one only where the home has several bases.
        """
        return self._processor.choose_base(request)

    def list_experts(self) -> Future[tuple[AdapterStatus, ...]]:
        """Return the installed experts that can be read, after planning already queued."""
        return self._processor.list_experts()

    def estimate_wait(self, job_id: str | None = None) -> float:
        """Estimate the wait of a job in seconds; without an id, of a new job."""
        return self._scheduler.estimate_wait(job_id)

    def forget(self, cache_key: str) -> None:
        """Drop what is kept for the next request with a key, soon."""
        with self._scheduler.lock:
            self._scheduler.control_queue.append(partial(self._runner.resources.forget, cache_key))
            self._scheduler.condition.notify_all()

    def take_snapshot(self) -> EngineSnapshot:
        """Return the current state of the engine."""
        assert self._loop is not None, "start comes first"
        scheduler, runner, batch = self._scheduler, self._runner, self._loop.batch
        # before the lock, which submitting takes: reading a device can take long
        routed, counters = runner.model.routed, runner.model.counters
        observed = None if counters is None else counters.observed_snapshot()
        with scheduler.lock:
            memory, sequences = runner.memory, batch.sequences
            prepared = [
                t for t in scheduler.requests if t.stage in {"preparing", "loading", "ready"}
            ]
            other_bytes = sum(size for purpose, size in memory.held.items() if purpose != "kv")
            return EngineSnapshot(
                waiting=len(scheduler.queue),
                preparing=len(prepared),
                running=len(sequences),
                rows=batch.rows,
                totals=scheduler.totals.copy(),
                counts=replace(batch.counts),
                held=memory.held,
                limit=memory.budget,
                peak=memory.peak,
                kv_limit=memory.budget - other_bytes,
                kv_in_use=runner.kv_in_use,
                kv_kept_limit=runner.cached_kv_limit,
                kv_block=runner.base.kv_bytes(KV_BLOCK_TOKENS),
                traffic={t.value: replace(n) for t, n in runner.resources.tiers.traffic.items()},
                running_plans=tuple(one.consumer.refs for one in sequences),
                waiting_plans=tuple(state.refs for state in (*prepared, *scheduler.queue)),
                routed=routed,
                observed=observed,
                resident_experts=self._count_resident_experts(),
            )

    def get_observation(self) -> Observation:
        """Return the counts of routed experts, all from one moment."""
        counters = self._collect_counters()
        return self._build_observation(None if counters is None else counters.observed_snapshot())

    def observe(self, *, mode: CounterMode | None = None, reset: bool = False) -> Observation:
        """Count routed experts in another mode, or from zero; return the counts.

        Raises:
            IncompatibleError: when the base has none, or they are not counted.
        """
        counters = self._collect_counters()
        if counters is None:
            raise IncompatibleError(
                f"no counts for {self.base_name}: it has no routed experts, or numpy runs it",
                hint="serve a base with routed experts whose heads and widths are multiples of 16",
            )
        return self._build_observation(counters.configure(mode=mode, reset=reset))

    def apply_profile(self, profile: JsonObject | None, wishes: ProfileOptions) -> Observation:
        """Apply a profile, or the learned one, to the choice of resident routed experts.

        It takes effect between two passes; this returns afterwards.

        Raises:
            IncompatibleError: when it belongs to another base, or all experts are resident.
            InvalidPackageError: when it is malformed.
            NotFoundError: when nothing was learned.
            UsageError: when nothing would change, or pinned experts have no slots.
            RateLimitError: when the server is ending.
        """
        cache, routed = self._runner.model.experts, self._runner.base.config.experts
        if cache is None or routed is None:
            raise IncompatibleError(
                f"a profile has no effect on {self.base_name}: it has no routed experts, "
                "or all of them are in memory",
                hint="serve a base with routed experts and a smaller --memory-budget",
            )
        found = (
            self._runner.read_usage_profile(routed)
            if profile is None
            else parse_profile(profile, routed, what="the profile")
        )
        update = wishes.make_update(found, cache, warmup=self.config.moe)
        self._run_between_passes(self._scheduler.run_between_passes(partial(update.apply, cache)))
        return self.get_observation()

    def close(self, *, seconds: float = 0.0) -> None:
        """Accept no more jobs, and give current ones so many seconds to end.

        An interrupted `start` ends, too, before the next kernel is compiled.
        """
        self._scheduler.close(seconds=seconds)
        self._runner.stop()
        if self._loop is not None:
            self._loop.join()
        self._processor.close()
        self._runner.close()

    @property
    def job_count(self) -> int:
        """The number of current jobs, waiting ones included."""
        return len(self._scheduler.requests)

    def cancel_all(self) -> None:
        """Cancel all current jobs: what they have written is their answer."""
        self._scheduler.cancel_all()

    def _collect_counters(self) -> Counters | None:
        """Return the counters, including counts still on a device, so that a reset covers them."""
        model = self._runner.model
        return None if model.routed is None else model.counters

    def _build_observation(self, observed: CounterSnapshot | None) -> Observation:
        base, model = self._runner.base, self._runner.model
        return make_observation(
            observed,
            base=base.stored.name,
            routed=base.config.experts,
            model=model,
        )

    def _count_resident_experts(self) -> dict[int, int]:
        cache = self._runner.model.experts
        if cache is None:
            return {}
        return {n: int(slots.hit_mask.sum()) for n, slots in cache.slots_by_layer.items()}

    def _run_between_passes(self, call: Future[None]) -> None:
        """Wait for a call between two passes; once the engine has ended, none is made."""
        while True:
            try:
                return call.result(timeout=POLL_SECONDS)
            except TimeoutError as error:
                if not self.is_working:
                    raise RateLimitError("the server is ending") from error

    def _list_warmup_experts(self) -> list[InstalledExpert]:
        """Return an expert for each set of adapter kinds that needs its own kernels."""
        base = self._runner.base
        if base.backend.name != "packed" or not self.config.batching.warm_experts:
            return []
        kinds: dict[frozenset[tuple[str, str]], InstalledExpert] = {}
        for expert in self._processor.get_inventory().result().experts:
            if not explain_misfit(expert, base.stored.identity, allow_mismatch=False):
                adapters = expert.manifest.adapters
                kinds.setdefault(frozenset((one.kind, one.dtype) for one in adapters), expert)
        return list(kinds.values())

    def _answer_warmup(self, request: RunRequest) -> None:
        """Answer a request of the server itself, to load its experts and compile kernels."""
        events = SimpleQueue[JobEvent]()
        self.submit(GenerationJob(id=uuid.uuid4().hex, request=request, remember=False), events.put)
        while not isinstance(event := events.get(), JobFinished | JobFailed):
            pass
        if isinstance(event, JobFailed):
            if isinstance(event.error, DeviceError):
                raise event.error
            prompt = request.route.prompt[:60]
            self._tell(f"{WARNING_PREFIX}warming up with {prompt!r}: {event.error.message}")

    def check_integrity(self) -> None:
        """Assert the invariants."""
        self._scheduler.check_integrity()
        self._runner.check_integrity()


def _build_request(
    prompt: str, *, force: tuple[ForcedExpert, ...] = (), max_tokens: int
) -> RunRequest:
    wishes = SamplingOverrides(greedy=True, max_tokens=max_tokens)
    route = RouteRequest(prompt=prompt, sampling=wishes)
    return RunRequest(message=UserMessage(prompt=prompt), route=route, experts=force)
