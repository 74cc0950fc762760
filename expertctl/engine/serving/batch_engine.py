"""`BatchEngine`: jobs of many callers, answered together on one base that stays in memory.

::

    submit -> line -> desk: plan, tokenise -> loader: experts into memory -> press: batch -> desk

Three threads: the next jobs are planned and loaded while others are written. A few more jobs are
prepared than rows are free; all others wait in the line, where order is decided late.

A job waits for missing memory as long as another job may give some back. A job that could not have
it even alone is refused.
"""

import uuid
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from queue import SimpleQueue

from expertctl.engine.loaded_base import TORCH_BELOW
from expertctl.engine.message import UserMessage
from expertctl.engine.moe.adoption import ProfileWishes
from expertctl.engine.moe.counters import Counters, Mode, Observed
from expertctl.engine.moe.guide import guide_in
from expertctl.engine.moe.observation import Observation, observation_of
from expertctl.engine.request import RunRequest
from expertctl.engine.serving.batch_settings import BatchSettings
from expertctl.engine.serving.board import LOOK_SECONDS, Board
from expertctl.engine.serving.desk import Desk
from expertctl.engine.serving.expert_here import ExpertHere
from expertctl.engine.serving.house import House
from expertctl.engine.serving.job import Event, Failed, Finished, Job, Sink
from expertctl.engine.serving.press import Broke, Press
from expertctl.engine.serving.snapshot import BLOCK, Snapshot
from expertctl.engine.serving.ticket import Ticket
from expertctl.engine.tokenizer import Tokenizer
from expertctl.errors import DeviceError, IncompatibleError, RateLimitError, UsageError
from expertctl.routing.candidate import Installed, misfit
from expertctl.routing.planner import Planned, Planner
from expertctl.routing.presets import SamplingWishes
from expertctl.routing.request import Forced, RouteRequest
from expertctl.schema.strict_json import JsonObject
from expertctl.telling import WARNING, Tell, tell_nobody

WARM_TOKENS = 24
"""The most tokens of an answer to a warm-up prompt."""


class BatchEngine:
    """The engine of a server; once it is started any thread may call it."""

    def __init__(
        self,
        planner: Planner,
        settings: BatchSettings,
        *,
        tell: Tell = tell_nobody,
        torch_below: int = TORCH_BELOW,
        broke: Broke = lambda: None,
    ) -> None:
        """Hold nothing yet; ``tell`` gets what the operator of the server should know.

        ``broke`` is called if the engine ends by itself: by a bug, or a device that failed.

        Bases of fewer bytes than ``torch_below`` are run by torch, row after row.
        """
        if settings.device == "cuda":
            settings = replace(settings, rows=1)  # its steps are captured for one text
        self.settings = settings
        self._house = House(planner, settings, tell=tell, torch_below=torch_below)
        self._board = Board(queue=settings.queue, rows=settings.rows)
        self._desk = Desk(planner, self._house, self._board, tell=tell)
        self._tell, self._broke = tell, broke
        self._press: Press | None = None

    def start(self) -> None:
        """Read the base and warm up; only then jobs are taken.

        Raises:
            NotFoundError: when there is no such base.
            BudgetError: when it does not fit.
            DeviceError: when the device failed.
        """
        self._desk.open_house()
        self._press = Press(
            self._house, self._board, self._desk, tell=self._tell, broke=self._broke
        )
        self._press.start()
        for expert in self._to_compile_for():
            self._answer_first(_request("?", force=(Forced(expert.digest),), max_tokens=2))
        for prompt in self.settings.warm:
            self._answer_first(_request(prompt, max_tokens=WARM_TOKENS))
        if (counters := self._counters()) is not None:
            counters.reset()  # only what callers ask for is observed

    @property
    def is_working(self) -> bool:
        """Whether jobs are answered: from the end of `start` on, until `close`."""
        return self._press is not None and self._press.is_working

    @property
    def base_name(self) -> str:
        """Which base is served."""
        return self._house.base.stored.name

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the base, with its chat template."""
        return self._house.base.tokenizer

    @property
    def context(self) -> int:
        """How many tokens the base reads, including the answer."""
        return self._house.base.context

    def submit(self, job: Job, sink: Sink) -> None:
        """Take a job into the queue; its events go to the sink from now on.

        Raises:
            RateLimitError: when the queue is full, or the server ends.
            UsageError: when it asks for something that this server does not do.
        """
        rows = self.settings.rows
        if job.texts > rows:
            raise UsageError(f"{job.texts} answers are asked for, {rows} are written at a time")
        request = self._house.bound(job.request)
        self._board.enter(Ticket(replace(job, request=request), sink))
        self._desk.prepare_next()

    def cancel(self, job_id: str) -> None:
        """End a job where it is; one that is unknown or has ended stays as it is."""
        self._board.call_off(job_id)

    def plan(self, request: RunRequest) -> Future[Planned]:
        """Return a future of the plan that a request would have, or of what is wrong with it.

        Raises:
            UsageError: when it asks for something that this server does not do.
        """
        return self._desk.plan(self._house.bound(request))

    def experts(self) -> Future[tuple[ExpertHere, ...]]:
        """Return the installed experts that can be read, once earlier planning is done."""
        return self._desk.experts()

    def expected_wait(self, job_id: str | None = None) -> float:
        """Return about how many seconds a job has to wait; without an id, one that came now."""
        return self._board.expected_wait(job_id)

    def forget(self, cache_key: str) -> None:
        """Drop what is kept for the next request of a key, soon."""
        with self._board.lock:
            self._board.errands.append(partial(self._house.residents.forget, cache_key))
            self._board.changed.notify_all()

    def snapshot(self) -> Snapshot:
        """Return what goes on now."""
        assert self._press is not None, "start comes first"
        board, house, batch = self._board, self._house, self._press.batch
        # before the lock, which submitting takes: a device may be asked, which can last
        routed, counters = house.model.routed, house.model.counters
        observed = None if counters is None else counters.observed()
        with board.lock:
            memory, texts = house.memory, batch.texts
            prepared = [t for t in board.tickets if t.stage in {"preparing", "loading", "ready"}]
            beside = sum(size for purpose, size in memory.held.items() if purpose != "kv")
            return Snapshot(
                waiting=len(board.line),
                preparing=len(prepared),
                running=len(texts),
                rows=batch.rows,
                totals=board.totals.copy(),
                counts=replace(batch.counts),
                held=memory.held,
                limit=memory.budget,
                peak=memory.peak,
                kv_limit=memory.budget - beside,
                kv_in_use=house.kv_in_use,
                kv_kept_limit=house.kept_kv_limit,
                kv_block=house.base.kv_bytes(BLOCK),
                traffic={t.value: replace(n) for t, n in house.residents.tiers.traffic.items()},
                running_plans=tuple(text.ticket.refs for text in texts),
                waiting_plans=tuple(ticket.refs for ticket in (*prepared, *board.line)),
                routed=routed,
                observed=observed,
                residents=self._residents(),
            )

    def observation(self) -> Observation:
        """Return what was counted of routed experts, all of it at one moment."""
        counters = self._counters()
        return self._observation(None if counters is None else counters.observed())

    def observe(self, *, mode: Mode | None = None, reset: bool = False) -> Observation:
        """Count routed experts in another mode, or from zero; return what is counted then.

        Raises:
            IncompatibleError: when the base has none, or they are not counted.
        """
        counters = self._counters()
        if counters is None:
            raise IncompatibleError(
                f"nothing is counted of {self.base_name}: it has no routed experts, or torch runs "
                "it",
                hint="serve a base of routed experts whose heads and widths are multiples of 16",
            )
        return self._observation(counters.change(mode=mode, reset=reset))

    def adopt(self, profile: JsonObject | None, wishes: ProfileWishes) -> Observation:
        """Let a profile, or what was learnt of the base, decide which routed experts stay.

        It takes effect between two passes; this returns once it has.

        Raises:
            IncompatibleError: when it is of another base, or no expert could be missing here.
            InvalidPackageError: when it is malformed.
            NotFoundError: when nothing was learnt.
            UsageError: when nothing would change, or experts are pinned that have no slots.
            RateLimitError: when the server ends.
        """
        cache, routed = self._house.model.experts, self._house.base.config.experts
        if cache is None or routed is None:
            raise IncompatibleError(
                f"no profile changes what stays of {self.base_name}: it has no routed experts, "
                "or all of them are in memory",
                hint="serve a base of routed experts within a --memory-budget that is smaller",
            )
        guide = (
            self._house.learnt(routed)
            if profile is None
            else guide_in(profile, routed, what="the profile")
        )
        adoption = wishes.adoption(guide, cache, routed, started=self.settings.moe)
        self._await(self._board.have_done(partial(adoption.apply, cache)))
        return self.observation()

    def close(self, *, seconds: float = 0.0) -> None:
        """Take no more jobs; those that are here have so many seconds to end.

        A `start` that was interrupted ends, too: before the next kernel is compiled.
        """
        self._board.close(seconds=seconds)
        self._house.stop()
        if self._press is not None:
            self._press.join()
        self._desk.close()
        self._house.close()

    def _counters(self) -> Counters | None:
        """Return what is counted, with what is still on a device: a reset covers that, too."""
        model = self._house.model
        return None if model.routed is None else model.counters

    def _observation(self, seen: Observed | None) -> Observation:
        base, model = self._house.base, self._house.model
        return observation_of(
            seen,
            base=base.stored.name,
            config=base.config,
            report=model.routed,
            cache=model.experts,
        )

    def _residents(self) -> dict[int, int]:
        cache, routed = self._house.model.experts, self._house.base.config.experts
        if cache is None or routed is None:
            return {}
        counts = (int(slots.hit_mask.sum()) for slots in cache.slots)
        return dict(zip(routed.layers, counts, strict=True))

    def _await(self, errand: Future[None]) -> None:
        """Wait for an errand between two passes; once the engine has ended, none is done."""
        while True:
            try:
                return errand.result(timeout=LOOK_SECONDS)
            except TimeoutError as error:
                if not self.is_working:
                    raise RateLimitError("the server is ending") from error

    def _to_compile_for(self) -> list[Installed]:
        """Return an expert for each set of adapter kinds that needs kernels of its own."""
        base = self._house.base
        if base.backend.name != "packed" or not self.settings.warm_experts:
            return []
        kinds: dict[frozenset[tuple[str, str]], Installed] = {}
        for expert in self._desk.inventory().result().experts:
            if not misfit(expert, base.stored.identity, allow_mismatch=False):
                adapters = expert.manifest.adapters
                kinds.setdefault(frozenset((one.kind, one.dtype) for one in adapters), expert)
        return list(kinds.values())

    def _answer_first(self, request: RunRequest) -> None:
        """Answer a request of the server's own, to bring its experts and kernels into memory."""
        events = SimpleQueue[Event]()
        self.submit(Job(id=uuid.uuid4().hex, request=request, remember=False), events.put)
        while not isinstance(event := events.get(), Finished | Failed):
            pass
        if isinstance(event, Failed):
            if isinstance(event.error, DeviceError):
                raise event.error
            prompt = request.route.prompt[:60]
            self._tell(f"{WARNING}warming up with {prompt!r}: {event.error.message}")

    def check_integrity(self) -> None:
        """Assert what always holds."""
        self._board.check_integrity()
        self._house.check_integrity()


def _request(prompt: str, *, force: tuple[Forced, ...] = (), max_tokens: int) -> RunRequest:
    wishes = SamplingWishes(greedy=True, max_tokens=max_tokens)
    route = RouteRequest(prompt=prompt, wishes=wishes)
    return RunRequest(message=UserMessage(prompt=prompt), route=route, experts=force)
