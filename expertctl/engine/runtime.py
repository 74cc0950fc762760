"""`Engine`: from a request to its text, with one budget over all memory that it takes.

Route, load what is absent, compile, prefill, decode. Every step is timed, whatever a person should
know becomes a warning, and the result is the document of ``run --json``.
"""

import time
import uuid
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from expertctl.digest import Digest, Progress, no_progress
from expertctl.engine.admission import Admission, Seat, pause
from expertctl.engine.budget import PURPOSES, Budget, Purpose
from expertctl.engine.compat import CompatReady, compat_reading
from expertctl.engine.compat_base import CompatBase
from expertctl.engine.compose import CompiledPlan
from expertctl.engine.context import FittedPrompt
from expertctl.engine.experts import ExpertSource, Target, compiled, local_expert, stored_source
from expertctl.engine.gains import GainSource
from expertctl.engine.generate import Cancelled, Generated, generate, never
from expertctl.engine.kept_kv import KVLoan, KVSlot, KVWanted
from expertctl.engine.loaded_base import BaseSlot, LoadedBase, OpenBase
from expertctl.engine.memory import available
from expertctl.engine.outline import local_outline
from expertctl.engine.preparation import (
    Files,
    Prepared,
    certain_needs,
    check_fits,
    needs,
    paths_of,
    plan_request,
    prepare,
    prepare_fewer,
)
from expertctl.engine.recording import check_answer, failures_of, record
from expertctl.engine.request import RunRequest
from expertctl.engine.run_result import MemoryUse, RunResult
from expertctl.engine.threads import choose_threads, threads
from expertctl.engine.tiers import Tier, Tiers
from expertctl.errors import DigestError
from expertctl.routing.plan import Plan
from expertctl.routing.planner import Planned, Planner
from expertctl.routing.session import PlanningSession
from expertctl.store.derived import Derived
from expertctl.telling import Tell, tell_nobody

CPU = torch.device("cpu")
MACHINE_SHARE = 0.8
"""How much of the machine's memory is the budget when nobody set one."""


@dataclass(frozen=True, slots=True)
class _Ready:
    """All that a generation needs, in memory."""

    base: LoadedBase
    kv: KVLoan
    plan: CompiledPlan

    @property
    def reused(self) -> int:
        """How many tokens of the prompt were read before."""
        return self.kv.reused

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a person should know of the base."""
        return self.base.warnings

    def generate(
        self, prompt: FittedPrompt, plan: Plan, cancelled: Cancelled
    ) -> Generator[str, None, Generated]:
        """Yield pieces of text as they become certain; return the whole at the end."""
        generated = yield from generate(
            self.base.model,
            prompt.ids[self.kv.reused :],
            cache=self.kv.cache,
            deltas=self.plan.deltas,
            soft_prompt=self.plan.soft_prompt,
            params=plan.params,
            seed=plan.seed,
            max_tokens=prompt.max_tokens,
            cancelled=cancelled,
        )
        if generated.finish_reason != "cancelled":
            self.kv.complete((*prompt.ids, *generated.tokens))
        return generated


class Engine:
    """The one owner of what is in memory: one base, the tiers of experts, the last turn's KV."""

    def __init__(
        self,
        planner: Planner,
        *,
        budget: int | None = None,
        progress: Progress = no_progress,
        tell: Tell = tell_nobody,
    ) -> None:
        """Begin with nothing loaded.

        ``progress`` counts bytes of experts and bases, none while a run is queued; what it raises
        ends the run. ``tell`` gets what a person should know while a run is queued.
        """
        self.budget = Budget(int(available() * MACHINE_SHARE) if budget is None else budget)
        self.tiers = Tiers(ram=self.budget, device=self.budget)
        self._base = BaseSlot(self.tiers, device=CPU)
        self._kv = KVSlot(self.tiers)
        self._derived = Derived(planner.store.paths.derived)
        self._admission = Admission(planner.store.paths.running, pause=self._pause)
        self._planner, self._progress, self._tell = planner, progress, tell
        self._session = PlanningSession(planner)

    def run(
        self, request: RunRequest, *, cancelled: Cancelled = never
    ) -> Generator[str, None, RunResult]:
        """Answer one prompt: yield pieces of text as they become certain, return the result.

        An answer that is ``cancelled`` ends where it is. What it needed is not kept then.

        Raises:
            ExpertError: whatever is wrong with the request, the experts, the base or the budget.
        """
        clock = _Clock()
        self.tiers.begin_request()
        loads = self.tiers.traffic[Tier.RAM].loads
        with ExitStack() as stack:
            files = self._files(request, stack)
            planned = plan_request(self._session, request, files)
            clock.lap("route")
            stack.enter_context(failures_of(planned, self._planner.catalogue))
            prepared = self._prepared(request, planned, files)
            planned = prepared.planned
            seat = stack.enter_context(self._seat(request, prepared, files))
            if seat.queued:
                clock.lap("queue")
            files = self._in_memory(request, planned, files, stack)
            count = choose_threads(prepared.base.weight_bytes)
            stack.enter_context(threads(count))
            ready = self._ready(prepared, files, request.cache_key, stack)
            seat.resize(self.budget.used)
            clock.lap("load")
            plan = planned.result.plan
            generated = yield from ready.generate(prepared.prompt, plan, cancelled)
            memory = self._memory()
        loads = self.tiers.traffic[Tier.RAM].loads - loads
        made = _Made(prepared, generated, ready, clock.timings(generated), memory, loads, count)
        return self._result(request, made)

    def plan(self, request: RunRequest) -> Planned:
        """Return the plan that a request would have; nothing but its files is read.

        Raises:
            ExpertError: whatever is wrong with the request or the experts.
        """
        return plan_request(self._session, request, self._outlines(request))

    def forget(self, cache_key: str) -> None:
        """Drop what was kept for the next request of this key."""
        self._kv.forget(cache_key)

    def check_integrity(self) -> None:
        """Assert what holds between runs."""
        self.tiers.check_integrity()
        self._base.check_integrity()
        self._kv.check_integrity()
        assert self.budget.held("kv") == self._kv.nbytes
        assert self.budget.held("buffers") == 0

    def _files(self, request: RunRequest, stack: ExitStack) -> Files:
        """Read the files that a request names, or outlines where loading may have to wait."""
        if request.on_budget == "refuse":
            return self._read(paths_of(request), stack)
        return self._outlines(request)

    def _outlines(self, request: RunRequest) -> Files:
        trust = self._planner.trust
        return {path: local_outline(path, trust=trust) for path in paths_of(request)}

    def _read(self, paths: Iterable[Path], stack: ExitStack) -> Files:
        trust, progress = self._planner.trust, self._progress
        return {
            path: stack.enter_context(
                local_expert(path, trust=trust, tiers=self.tiers, progress=progress)
            )
            for path in paths
        }

    def _prepared(self, request: RunRequest, planned: Planned, files: Files) -> Prepared:
        if request.on_budget == "fewer":
            limit = self.budget.limit
            return prepare_fewer(self._planner, request, planned, files, limit=limit)
        return prepare(self._planner, request, planned, files)

    def _seat(
        self, request: RunRequest, prepared: Prepared, files: Files
    ) -> AbstractContextManager[Seat]:
        """Take a place among the runs of this home, waiting for it when that is asked for."""
        if request.on_budget != "queue":
            return self._admission.seat(sum(need.size for need in certain_needs(prepared)))
        limit = self.budget.limit
        size = check_fits(needs(self._planner, prepared, files), limit)
        return self._admission.queue(size, limit=limit, tell=self._tell)

    def _pause(self) -> None:
        """Let some time pass in the queue, unless the answer is not wanted any more."""
        self._progress(0)
        pause()

    def _in_memory(
        self, request: RunRequest, planned: Planned, files: Files, stack: ExitStack
    ) -> Files:
        """Bring the files of which there are outlines into memory, as far as they are needed."""
        if request.on_budget == "refuse":
            return files
        used = {expert.digest for expert in planned.experts}
        digests = {path: file.source.content_digest for path, file in files.items()}
        now = self._read([path for path, digest in digests.items() if digest in used], stack)
        for path, file in now.items():
            if file.source.content_digest != digests[path]:
                raise DigestError(f"{path} changed while it was read", hint="run it again")
        return now

    def _ready(
        self, prepared: Prepared, files: Files, cache_key: str | None, stack: ExitStack
    ) -> _Ready | CompatReady:
        """Bring everything into memory; what is certain to be needed is reserved first."""
        tokens, base = prepared.prompt.capacity, prepared.base
        if isinstance(base, CompatBase):
            return self._through_transformers(base, prepared, files, stack)
        self._base.reserve(base)
        kv = stack.enter_context(self._kv.borrow(_kv_wanted(base, prepared, cache_key)))
        self._hold("buffers", prepared.buffer_bytes, f"the buffers of {tokens} tokens", stack)
        loaded = self._base.load(progress=self._progress)
        stack.callback(loaded.model.decoder.rest)  # before the bytes of the buffers are given back
        target = _target(prepared, loaded, self._derived)
        return _Ready(loaded, kv, self._compiled(target, prepared.planned, files, stack))

    def _hold(self, purpose: Purpose, size: int, what: str, stack: ExitStack) -> None:
        stack.enter_context(self.tiers.holding(Tier.DEVICE, purpose, size, what=what))

    def _compiled(
        self, target: Target, planned: Planned, files: Files, stack: ExitStack
    ) -> CompiledPlan:
        identity = planned.result.plan.identity
        with self._chain(planned, files) as chain:
            return stack.enter_context(
                compiled(self.tiers, chain, identity=identity, target=target)
            )

    def _through_transformers(
        self, base: CompatBase, prepared: Prepared, files: Files, stack: ExitStack
    ) -> CompatReady:
        """Let go of the base of our own engine, then bring this one and its expert, if any."""
        self._base.drop()
        tokens = prepared.prompt.capacity
        with self._chain(prepared.planned, files) as chain:
            expert = chain[0] if chain else None
            borrowed = compat_reading(base, expert, tokens=tokens, tiers=self.tiers)
            return CompatReady(base, stack.enter_context(borrowed))

    @contextmanager
    def _chain(self, planned: Planned, files: Files) -> Iterator[list[tuple[ExpertSource, float]]]:
        """Offer the experts of a plan with their weights; what is installed stays meanwhile."""
        plan, store = planned.result.plan, self._planner.store
        from_files = {file.source.content_digest: file.source for file in files.values()}
        sources = [
            from_files.get(expert.digest)
            or stored_source(store, expert.stored, expert.manifest, progress=self._progress)
            for expert in planned.experts
        ]
        with store.lease(e.stored for e in planned.experts if e.digest not in from_files):
            yield [(s, e.weight) for s, e in zip(sources, plan.experts, strict=True)]

    def _result(self, request: RunRequest, made: "_Made") -> RunResult:
        """Remember a run and return what it came to, with all that a person should know."""
        prepared, generated, count = made.prepared, made.generated, made.threads
        planned, prompt_tokens = prepared.planned, len(prepared.prompt.ids)
        form, job_id = check_answer(generated, planned, request.route.prompt), uuid.uuid4().hex
        unsaved = record(
            self._planner.catalogue,
            planned,
            generated,
            job_id=job_id,
            form=form,
            prompt_tokens=prompt_tokens,
            timings_ms=made.timings_ms,
        )
        told = (*planned.warnings, *(one.warning for one in prepared.dropped))
        told = (*told, *_alone(planned, request), *_threads_differ(request, count))
        told = (*told, *request.message.warnings, *prepared.template.warnings, *form.warnings)
        unsaved = (*unsaved, *self._derived.take_notes())
        told = (*told, *made.ready.warnings, *_of_the_context(prepared, generated), *unsaved)
        return RunResult(
            job_id=job_id,
            planned=planned,
            dropped=prepared.dropped,
            generated=generated,
            validation_passed=form.passed,
            prompt_tokens=prompt_tokens,
            timings_ms=made.timings_ms,
            memory=made.memory,
            experts_loaded=made.loads,
            kv_reused_tokens=made.ready.reused,
            threads=count,
            warnings=told,
        )

    def _memory(self) -> MemoryUse:
        held = {purpose: self.budget.held(purpose) for purpose in PURPOSES}
        return MemoryUse(self.budget.limit, self.budget.peak, held)


@dataclass(frozen=True, slots=True)
class _Made:
    """What a run was made from, and what it took."""

    prepared: Prepared
    generated: Generated
    ready: _Ready | CompatReady
    timings_ms: Mapping[str, float]
    memory: MemoryUse
    loads: int
    threads: int


class _Clock:
    """Milliseconds since the request came, and of its steps."""

    def __init__(self) -> None:
        self._begun = self._last = time.perf_counter()
        self._laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """End a step."""
        now = time.perf_counter()
        self._laps[name], self._last = (now - self._last) * 1e3, now

    def timings(self, generated: Generated) -> dict[str, float]:
        """Return ``timings_ms``; ``ttft`` is from the request to the first token."""
        return {
            **self._laps,
            "prefill": generated.prefill_ms,
            "ttft": sum(self._laps.values()) + generated.first_token_ms,
            "decode": generated.decode_ms,
            "total": (time.perf_counter() - self._begun) * 1e3,
        }


def _target(prepared: Prepared, loaded: LoadedBase, derived: Derived) -> Target:
    base = prepared.base
    identity = base.stored.identity
    content = Digest.of(f"{identity.arch} {identity.weights} {base.dtype}".encode())
    return Target(prepared.form, GainSource(content, loaded.model.decoder.matrix, derived))


def _kv_wanted(base: OpenBase, prepared: Prepared, cache_key: str | None) -> KVWanted:
    prompt = prepared.prompt
    return KVWanted(
        cache_key=cache_key,
        identity=prepared.planned.result.plan.identity,
        config=base.config,
        ids=prompt.ids,
        virtual=prompt.virtual,
        capacity=prompt.capacity,
    )


def _threads_differ(request: RunRequest, count: int) -> tuple[str, ...]:
    saved = request.saved.threads if request.saved else None
    if saved is None or saved == count:
        return ()
    told = f"the plan was saved by a run with {saved} threads, this one has {count}"
    return (f"{told}: the last bits of the numbers may differ",)


def _of_the_context(prepared: Prepared, generated: Generated) -> tuple[str, ...]:
    """What of the prompt was not read, and whether the answer ended for want of room."""
    prompt, wanted = prepared.prompt, prepared.planned.result.plan.params.max_tokens
    if generated.finish_reason != "length" or prompt.max_tokens == wanted:
        return prompt.warnings
    full = f"the answer ended where the context of {prompt.capacity} tokens is full"
    return (*prompt.warnings, full)


def _alone(planned: Planned, request: RunRequest) -> tuple[str, ...]:
    """Why the base answers alone although nobody asked for that."""
    asked = request.route.base_alone or request.saved is not None
    return () if asked or planned.result.plan.experts else planned.result.notes
