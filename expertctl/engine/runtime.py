"""`Engine`: from a request to its text, with one budget over all memory that it takes.

Route, load what is absent, compile, prefill, decode. Every step is timed, whatever a person should
know becomes a warning, and the result is the document of ``run --json``.
"""

import time
import uuid
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from expertctl.digest import Digest, Progress, no_progress
from expertctl.engine.budget import PURPOSES, Budget, Purpose
from expertctl.engine.chat_template import Prompt, encode_chat
from expertctl.engine.compose import CompiledPlan, Form
from expertctl.engine.context import FittedPrompt, fit_context
from expertctl.engine.expert_template import TemplateChoice, choose_template
from expertctl.engine.experts import (
    LocalExpert,
    Target,
    compiled,
    local_expert,
    stored_source,
)
from expertctl.engine.gains import GainSource
from expertctl.engine.generate import Cancelled, Generated, generate, never
from expertctl.engine.kept_kv import KVLoan, KVSlot, KVWanted
from expertctl.engine.loaded_base import BaseSlot, LoadedBase, OpenBase, open_base
from expertctl.engine.memory import available
from expertctl.engine.message import Message
from expertctl.engine.request import FileExpert, NamedExpert, RunRequest
from expertctl.engine.run_result import MemoryUse, RunResult
from expertctl.engine.sampling import sample_bytes
from expertctl.engine.threads import choose_threads, threads
from expertctl.engine.tiers import Tier, Tiers
from expertctl.routing.candidate import Installed
from expertctl.routing.follow_up import plan_follow_up
from expertctl.routing.planner import Planned, Planner
from expertctl.routing.request import Forced
from expertctl.store.catalogue import Catalogue
from expertctl.store.derived import Derived
from expertctl.store.transaction import expert_of

CPU = torch.device("cpu")
MACHINE_SHARE = 0.8
"""How much of the machine's memory is the budget when nobody set one."""


@dataclass(frozen=True, slots=True)
class _Ready:
    """All that a generation needs, in memory."""

    base: LoadedBase
    kv: KVLoan
    plan: CompiledPlan


Files = dict[Path, LocalExpert]


class Engine:
    """The one owner of what is in memory: one base, the tiers of experts, the last turn's KV."""

    def __init__(
        self, planner: Planner, *, budget: int | None = None, progress: Progress = no_progress
    ) -> None:
        """Begin with nothing loaded.

        ``progress`` counts bytes of experts and bases; what it raises ends the run.
        """
        self.budget = Budget(int(available() * MACHINE_SHARE) if budget is None else budget)
        self.tiers = Tiers(ram=self.budget, device=self.budget)
        self._base = BaseSlot(self.tiers, device=CPU)
        self._kv = KVSlot(self.tiers)
        self._derived = Derived(planner.store.paths.derived)
        self._planner, self._progress = planner, progress

    def run(
        self, request: RunRequest, *, cancelled: Cancelled = never
    ) -> Generator[str, None, RunResult]:
        """Answer one prompt: yield pieces of text as they become certain, return the result.

        An answer that is ``cancelled`` ends where it is. What it needed is not kept then.

        Raises:
            ExpertError: whatever is wrong with the request, the experts, the base or the budget.
        """
        clock, messages = _Clock(), request.messages
        self.tiers.begin_request()
        loads = self.tiers.traffic[Tier.RAM].loads
        with ExitStack() as stack:
            files = self._read_files(request, stack)
            planned = self._plan(request, files)
            clock.lap("route")
            base = self._open(planned, request)
            template = self._template(planned, files)
            prompt = _fitted(messages, base, planned, template, truncate=request.truncate)
            count = choose_threads(base.weight_bytes)
            stack.enter_context(threads(count))
            ready = self._ready(base, prompt, planned, files, request.cache_key, stack)
            clock.lap("load")
            recording = self._recording(planned, files, stack)
            generated = yield from _generate(ready, prompt, planned, cancelled)
            memory = self._memory()
        unsaved = (*recording.result(), *self._derived.take_notes())
        told = (*planned.warnings, *_alone(planned, request), *_threads_differ(request, count))
        told = (*told, *request.message.warnings, *template.warnings)
        return RunResult(
            job_id=uuid.uuid4().hex,
            planned=planned,
            generated=generated,
            prompt_tokens=len(prompt.ids),
            timings_ms=clock.timings(generated),
            memory=memory,
            experts_loaded=self.tiers.traffic[Tier.RAM].loads - loads,
            kv_reused_tokens=ready.kv.reused,
            threads=count,
            warnings=(*told, *ready.base.warnings, *prompt.warnings, *unsaved),
        )

    def plan(self, request: RunRequest) -> Planned:
        """Return the plan that a request would have; nothing but its files is read.

        Raises:
            ExpertError: whatever is wrong with the request or the experts.
        """
        with ExitStack() as stack:
            return self._plan(request, self._read_files(request, stack))

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

    def _read_files(self, request: RunRequest, stack: ExitStack) -> Files:
        trust = self._planner.trust
        paths = dict.fromkeys(e.path for e in request.experts if isinstance(e, FileExpert))
        return {
            path: stack.enter_context(
                local_expert(path, trust=trust, tiers=self.tiers, progress=self._progress)
            )
            for path in paths
        }

    def _plan(self, request: RunRequest, files: Files) -> Planned:
        force = tuple(_forced(expert, files) for expert in request.experts)
        offered = [
            Installed(expert_of(file.package, ()), file.source.manifest) for file in files.values()
        ]
        routed = replace(request.route, force=force)
        if request.saved is not None:
            return self._planner.replay(request.saved.plan, routed, base=request.base)
        if request.before is not None and not force:
            return plan_follow_up(
                self._planner, routed, request.before, base=request.base, files=offered
            )
        return self._planner.plan(routed, base=request.base, files=offered)

    def _template(self, planned: Planned, files: Files) -> TemplateChoice:
        in_memory = {file.source.content_digest: file.files for file in files.values()}

        def read(expert: Installed, path: str) -> bytes:
            memory = in_memory.get(expert.digest)
            return memory.data(path) if memory else self._planner.store.read(expert.stored, path)

        return choose_template(planned, read)

    def _open(self, planned: Planned, request: RunRequest) -> OpenBase:
        bases, dtype = self._planner.bases, request.route.dtype
        return open_base(bases, planned.base, dtype=dtype, rehash=request.verify_base)

    def _ready(
        self,
        base: OpenBase,
        prompt: FittedPrompt,
        planned: Planned,
        files: Files,
        cache_key: str | None,
        stack: ExitStack,
    ) -> _Ready:
        """Bring everything into memory; what is certain to be needed is reserved first."""
        tokens = prompt.capacity
        self._base.reserve(base)
        kv = stack.enter_context(self._kv.borrow(_kv_wanted(base, prompt, planned, cache_key)))
        loaded = self._base.load(progress=self._progress)
        buffers = loaded.model.decoder.buffer_bytes(tokens) + sample_bytes(base.config.vocab_size)
        self._hold("buffers", buffers, f"the buffers of {tokens} tokens", stack)
        plan = self._compiled(_target(base, loaded, self._derived), planned, files, stack)
        return _Ready(loaded, kv, plan)

    def _hold(self, purpose: Purpose, size: int, what: str, stack: ExitStack) -> None:
        stack.enter_context(self.tiers.holding(Tier.DEVICE, purpose, size, what=what))

    def _compiled(
        self, target: Target, planned: Planned, files: Files, stack: ExitStack
    ) -> CompiledPlan:
        plan, store = planned.result.plan, self._planner.store
        from_files = {file.source.content_digest: file.source for file in files.values()}
        sources = [
            from_files.get(expert.digest)
            or stored_source(store, expert.stored, expert.manifest, progress=self._progress)
            for expert in planned.experts
        ]
        chain = [(s, e.weight) for s, e in zip(sources, plan.experts, strict=True)]
        with store.lease(e.stored for e in planned.experts if e.digest not in from_files):
            return stack.enter_context(
                compiled(self.tiers, chain, identity=plan.identity, target=target)
            )

    def _recording(
        self, planned: Planned, files: Files, stack: ExitStack
    ) -> Future[tuple[str, ...]]:
        """Count the use of installed experts while the text is made: flushing it takes a while."""
        from_files = {file.source.content_digest for file in files.values()}
        digests = [e.digest for e in planned.experts if e.digest not in from_files]
        thread = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="usage"))
        return thread.submit(_record, self._planner.catalogue, digests)

    def _memory(self) -> MemoryUse:
        held = {purpose: self.budget.held(purpose) for purpose in PURPOSES}
        return MemoryUse(self.budget.limit, self.budget.peak, held)


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


def _record(catalogue: Catalogue, digests: Sequence[Digest]) -> tuple[str, ...]:
    """Return what could not be written, as notes; that is never fatal."""
    known = len(catalogue.notes)
    for digest in digests:
        catalogue.record_use(digest)
    return tuple(catalogue.notes[known:])


def _target(base: OpenBase, loaded: LoadedBase, derived: Derived) -> Target:
    config, identity = base.config, base.stored.identity
    content = Digest.of(f"{identity.arch} {identity.weights} {base.dtype}".encode())
    form = Form(config.linear_shapes(), config.hidden_size, torch.float32, CPU)
    return Target(form, GainSource(content, loaded.model.decoder.matrix, derived))


def _virtual_tokens(planned: Planned) -> int:
    """Count the rows of soft prompts; an expert of weight 0 is left out."""
    pairs = zip(planned.experts, planned.result.plan.experts, strict=True)
    return sum(e.manifest.virtual_tokens for e, told in pairs if told.weight != 0.0)


def _forced(expert: NamedExpert, files: Files) -> Forced:
    if isinstance(expert, Forced):
        return expert
    return Forced(files[expert.path].source.content_digest, expert.weight)


def _fitted(
    messages: Sequence[Message],
    base: OpenBase,
    planned: Planned,
    template: TemplateChoice,
    *,
    truncate: bool,
) -> FittedPrompt:
    def encode(messages: Sequence[Message]) -> Prompt:
        return encode_chat(base.tokenizer, messages, template=template.source)

    return fit_context(
        messages,
        encode,
        context=base.config.max_positions,
        max_tokens=planned.result.plan.params.max_tokens,
        truncate=truncate,
        virtual=_virtual_tokens(planned),
    )


def _kv_wanted(
    base: OpenBase, prompt: FittedPrompt, planned: Planned, cache_key: str | None
) -> KVWanted:
    return KVWanted(
        cache_key=cache_key,
        identity=planned.result.plan.identity,
        config=base.config,
        ids=prompt.ids,
        virtual=prompt.virtual,
        capacity=prompt.capacity,
    )


def _generate(
    ready: _Ready, prompt: FittedPrompt, planned: Planned, cancelled: Cancelled
) -> Generator[str, None, Generated]:
    plan = planned.result.plan
    generated = yield from generate(
        ready.base.model,
        prompt.ids[ready.kv.reused :],
        cache=ready.kv.cache,
        deltas=ready.plan.deltas,
        soft_prompt=ready.plan.soft_prompt,
        params=plan.params,
        seed=plan.seed,
        max_tokens=prompt.max_tokens,
        cancelled=cancelled,
    )
    if generated.finish_reason != "cancelled":
        ready.kv.complete((*prompt.ids, *generated.tokens))
    return generated


def _threads_differ(request: RunRequest, count: int) -> tuple[str, ...]:
    saved = request.saved.threads if request.saved else None
    if saved is None or saved == count:
        return ()
    told = f"the plan was saved by a run with {saved} threads, this one has {count}"
    return (f"{told}: the last bits of the numbers may differ",)


def _alone(planned: Planned, request: RunRequest) -> tuple[str, ...]:
    """Why the base answers alone although nobody asked for that."""
    asked = request.route.base_alone or request.saved is not None
    return () if asked or planned.result.plan.experts else planned.result.notes
