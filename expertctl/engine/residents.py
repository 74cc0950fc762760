"""What is in memory for runs: one base, the tiers of experts, the keys and values of texts.

What a run is certain to need is reserved before anything is read. Its experts are read while the
base is, into what room is left, and its plan comes last.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

from expertctl.digest import Digest, Progress
from expertctl.engine.adapter_load import LoadedAdapter
from expertctl.engine.backend import Backend, KVKeeper, Model, Surroundings
from expertctl.engine.budget import Budget
from expertctl.engine.compat import CompatReady, compat_reading
from expertctl.engine.compat_base import CompatBase
from expertctl.engine.compose import CompiledPlan
from expertctl.engine.context import FittedPrompt
from expertctl.engine.experts import ExpertSource, Target, compiled, stored_source
from expertctl.engine.gains import GainSource
from expertctl.engine.generate import Cancelled, Generated, Writer, generate, stopping
from expertctl.engine.kv_loan import KVLoan, KVWanted
from expertctl.engine.kv_room import KVRoom
from expertctl.engine.loaded_base import BaseSlot, OpenBase
from expertctl.engine.moe.habit_keeper import HabitKeeper
from expertctl.engine.moe.report import RoutedReport
from expertctl.engine.moe.start import USUAL, StartWishes
from expertctl.engine.prefetch import Prefetch
from expertctl.engine.preparation import Files, Prepared
from expertctl.engine.run_result import BytesRead
from expertctl.engine.tiers import Tier, Tiers
from expertctl.engine.trace import Trace, TracedReading
from expertctl.routing.plan import Plan
from expertctl.routing.planner import Planned, Planner
from expertctl.store.derived import Derived
from expertctl.store.quantised_copies import QuantisedCopies, copies_of
from expertctl.telling import Tell


@dataclass(frozen=True, slots=True)
class Ready:
    """All that a generation needs, in memory."""

    base: OpenBase
    model: Model
    kv: KVLoan[KVRoom]
    plan: CompiledPlan

    @property
    def reused(self) -> int:
        """How many tokens of the prompt were read before."""
        return self.kv.reused

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a person should know of the base."""
        return (*self.base.warnings, *self.model.warnings)

    @property
    def routed(self) -> RoutedReport | None:
        """What became of its routed experts so far; None where it has none."""
        return self.model.routed

    def generate(
        self,
        prompt: FittedPrompt,
        plan: Plan,
        cancelled: Cancelled,
        *,
        trace: Trace | None = None,
    ) -> Generator[str, None, Generated]:
        """Yield pieces of text as they become certain; return the whole at the end."""
        tokenizer, most = self.base.tokenizer, prompt.max_tokens
        reading = self.model.reading(self.kv.cache, self.plan, progress=stopping(cancelled))
        if trace is not None:
            reading = TracedReading(reading, self.model.timed, trace)
        writer = Writer(
            tokenizer, plan.params, seed=plan.seed, max_tokens=most, end_ids=prompt.end_ids
        )
        generated = yield from generate(reading, prompt.ids[self.reused :], writer, cancelled)
        if generated.finish_reason != "cancelled":
            self.kv.complete((*prompt.ids, *generated.tokens))
        return generated


class Residents:
    """The one owner of what runs leave in memory; used by one run at a time."""

    def __init__(
        self,
        planner: Planner,
        budget: Budget,
        *,
        ram: Budget | None = None,
        progress: Progress,
        tell: Tell,
        moe: StartWishes = USUAL,
        kept_kv: int | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        """Begin with nothing in memory; ``ram`` is the budget of experts where it is another one.

        ``check`` is called before each kernel is compiled; what it raises ends that.

        ``moe`` says how routed experts begin where not all of them fit. ``kept_kv`` is the most
        bytes that keys and values take between requests; None: what nothing else needs.
        """
        self.habits = HabitKeeper(planner.bases, moe)
        self.tiers = Tiers(ram=ram or budget, device=budget)
        self._budget, self._base = budget, BaseSlot(self.tiers, dropping=self.habits.forget)
        self._prefetch = Prefetch[LoadedAdapter](self.tiers)
        self._kv: dict[str, KVKeeper] = {}
        self._kept_kv, self._check = kept_kv, check
        self._derived = Derived(planner.store.paths.derived)
        self._copies: QuantisedCopies | None = None
        self._planner, self._progress, self._tell = planner, progress, tell

    @contextmanager
    def ready(
        self, prepared: Prepared, files: Files, *, cache_key: str | None, threads: int
    ) -> Iterator[Ready | CompatReady]:
        """Borrow all that a generation needs, bringing what is absent.

        Raises:
            ExpertError: whatever is wrong with the experts, the base or the budget.
        """
        with ExitStack() as stack:
            if isinstance(prepared.base, CompatBase):
                yield self._through_transformers(prepared.base, prepared, files, stack)
            else:
                base = prepared.base
                yield self._natively(base, prepared, files, cache_key, threads, stack)

    def forget(self, cache_key: str) -> None:
        """Drop what was kept for the next request of this key."""
        for keeper in self._kv.values():
            keeper.forget(cache_key)

    def close(self) -> None:
        """Let go of everything: of what others may need again, last."""
        self.habits.forget()
        self._base.drop()
        self.tiers.clear()
        for keeper in self._kv.values():
            keeper.clear()

    @property
    def moved(self) -> BytesRead:
        """What came from files so far, and what was made of it to compute with."""
        traffic = self.tiers.traffic
        ssd = traffic[Tier.RAM].nbytes + self._base.read_bytes
        return BytesRead(ssd=ssd, ram=traffic[Tier.DEVICE].nbytes)

    def take_notes(self) -> tuple[str, ...]:
        """Return, once, what could not be kept on the disk."""
        copies = self._copies.take_notes() if self._copies else ()
        return (*self._derived.take_notes(), *copies, *self.habits.take_notes())

    def check_integrity(self) -> None:
        """Assert what holds between runs: what the ledger says is there, and nothing is lent."""
        self.tiers.check_integrity()
        self.tiers.check_idle()
        self._base.check_integrity()
        self._prefetch.check_integrity()
        for keeper in self._kv.values():
            keeper.check_integrity()
            keeper.check_idle()
        assert self._budget.held("kv") == sum(keeper.nbytes for keeper in self._kv.values())
        assert self._budget.held("base") == self._base.nbytes

    @property
    def is_in_order(self) -> bool:
        """Whether the next run may build on this; False where nothing is asserted."""
        try:
            self.check_integrity()
        except (AssertionError, KeyError, RuntimeError):  # of a device, too
            return False
        return __debug__

    def _natively(
        self,
        base: OpenBase,
        prepared: Prepared,
        files: Files,
        cache_key: str | None,
        threads: int,
        stack: ExitStack,
    ) -> Ready:
        """Bring everything into memory; what is certain to be needed is reserved first."""
        self._base.reserve(base)
        wanted = kv_wanted(base, prepared, cache_key)
        kv = stack.enter_context(self.keeper(base.backend).borrow(wanted))
        certain = prepared.buffer_bytes()
        self._hold_buffers(certain, prepared, stack)
        model, plan = self._loaded(base, prepared.planned, files, threads, stack)
        self._hold_buffers(prepared.buffer_bytes(width=plan.width) - certain, prepared, stack)
        stack.callback(model.rest)  # before the bytes of the buffers are given back
        model.prepare(kv.cache, plan, tokens=wanted.virtual + len(wanted.ids) - kv.cache.length)
        return Ready(base, model, kv, plan)

    def _hold_buffers(self, size: int, prepared: Prepared, stack: ExitStack) -> None:
        what = f"the buffers of {prepared.prompt.capacity} tokens"
        stack.enter_context(self.tiers.holding(Tier.DEVICE, "buffers", size, what=what))

    def keeper(self, backend: Backend) -> KVKeeper:
        """Return the owner of keys and values of the kind that the models of a backend read."""
        if backend.kv_kind not in self._kv:
            self._kv[backend.kv_kind] = backend.new_keeper(self.tiers, kept_limit=self._kept_kv)
        return self._kv[backend.kv_kind]

    def _around(self, base: OpenBase, threads: int) -> Surroundings:
        if not self._base.is_loaded:  # a loaded base reads its own; `take_notes` asks them, too
            self._copies = copies_of(self._planner.bases, base.stored, tell=self._tell)
        return Surroundings(
            directory=base.stored.path,
            copies=self._copies,
            home=self._planner.home,
            threads=threads,
            tell=self._tell,
            check=self._check,
            watch=partial(self.habits.watch, base.stored),
        )

    def hold_base(self, base: OpenBase, *, threads: int) -> Model:
        """Have a base in memory, in the place of any other, and return it.

        Raises:
            BudgetError: when it does not fit.
            InvalidPackageError: when its tensors are not those of its configuration.
        """
        self._base.reserve(base)
        return self._base.load(self._around(base, threads), progress=self._progress)

    @contextmanager
    def plan(
        self, base: OpenBase, model: Model, planned: Planned, files: Files
    ) -> Iterator[CompiledPlan]:
        """Borrow what the experts of a plan are compiled to, bringing what is absent.

        Raises:
            ExpertError: whatever is wrong with the experts or the budget.
        """
        with ExitStack() as stack:
            with self._chain(planned, files) as chain:
                plan = stack.enter_context(self._compiled(base, model, planned, chain))
            yield plan

    def _loaded(
        self, base: OpenBase, planned: Planned, files: Files, threads: int, stack: ExitStack
    ) -> tuple[Model, CompiledPlan]:
        """Bring the base, its experts meanwhile, and what is compiled of both."""
        identity = planned.result.plan.identity
        with self._chain(planned, files) as chain, self._expected(chain, identity):
            model = self._base.load(self._around(base, threads), progress=self._progress)
            plan = self._compiled(base, model, planned, chain)
            return model, stack.enter_context(plan)

    def _compiled(
        self,
        base: OpenBase,
        model: Model,
        planned: Planned,
        chain: Sequence[tuple[ExpertSource, float]],
    ) -> AbstractContextManager[CompiledPlan]:
        target = _target(base, model, self._derived)
        return compiled(self.tiers, chain, identity=planned.result.plan.identity, target=target)

    @contextmanager
    def _expected(
        self, chain: Sequence[tuple[ExpertSource, float]], identity: Digest
    ) -> Iterator[None]:
        """Have experts read while the base is read, until they are pinned or it all failed.

        Reading them ends before their files are given back.
        """
        if self._base.is_loaded:
            yield
            return
        wanted = [source.wanted for source, _ in chain if source.nbytes]  # else it is here
        try:
            with self._prefetch.expect(wanted, plan=(Tier.DEVICE, identity)):
                yield
        finally:
            self._prefetch.wait()

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


def _target(base: OpenBase, model: Model, derived: Derived) -> Target:
    identity, backend = base.stored.identity, base.backend
    content = Digest.of(f"{identity.arch} {identity.weights} {backend.dtype}".encode())
    return Target(backend.form, GainSource(content, model.matrix, derived))


def kv_wanted(base: OpenBase, prepared: Prepared, cache_key: str | None) -> KVWanted:
    """Return the room that an answer needs, with the key of earlier texts that may begin it."""
    prompt = prepared.prompt
    return KVWanted(
        cache_key=cache_key,
        identity=prepared.planned.result.plan.identity,
        config=base.config,
        ids=prompt.ids,
        virtual=prompt.virtual,
        capacity=prompt.capacity,
    )
