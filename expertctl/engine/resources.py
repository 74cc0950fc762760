"""What is in memory for runs: one base, the adapter cache, and the KV of sequences.

The certain needs of a run are reserved before anything is read. Its experts are prefetched into the
remaining memory while the base is read, and its plan comes last.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from typing import TYPE_CHECKING

from expertctl.digest import Digest, Progress, ignore_progress
from expertctl.engine.adapters.compile import CompiledPlan
from expertctl.engine.adapters.experts import (
    CompileTarget,
    DoraScaleSource,
    ExpertSource,
    borrow_compiled_plan,
    make_stored_source,
)
from expertctl.engine.adapters.load import LoadedAdapter
from expertctl.engine.backend import Backend, KVCacheStore, LoadContext, RunnableModel
from expertctl.engine.kv.kv_cache import KVRequest
from expertctl.engine.load_plan import BaseSlot, OpenBase
from expertctl.engine.loaded_model import LoadedModel
from expertctl.engine.memory.adapter_cache import AdapterCache, AdapterPrefetcher, Tier
from expertctl.engine.memory.budget import MemoryBudget
from expertctl.engine.memory.host import find_default_budget
from expertctl.engine.memory.process_registry import (
    EngineRegistration,
    MemoryAdmission,
    sleep_before_retry,
)
from expertctl.engine.moe.usage_store import ExpertUsageStore
from expertctl.engine.preparation import Files, PreparedRequest
from expertctl.engine.result import BytesRead
from expertctl.engine_config import DEFAULT_WARMUP, QUANTISED_DTYPES, DeviceName, WarmupConfig
from expertctl.errors import CountProgress, Notify, ignore_count, ignore_notification
from expertctl.routing.planner import PlannedPrompt, Planner
from expertctl.store.disk import DerivedData
from expertctl.store.quantised_cache import QuantisedCache, open_quantised_cache

if TYPE_CHECKING:
    from expertctl.engine.torch.compat_base import CompatBase
    from expertctl.engine.torch.compat_engine import CompatLoadedModel


class ResourceManager:
    """The one owner of what an engine holds in memory, and of what other processes see of it.

    A local run uses it from one thread. A server calls `load_plan` from its loader, and what
    concerns KV, buffers and registration from its engine loop.
    """

    def __init__(
        self,
        planner: Planner,
        budget: MemoryBudget,
        *,
        device: DeviceName = "cpu",
        progress: Progress = ignore_progress,
        tell: Notify = ignore_notification,
        pause: Callable[[], None] = sleep_before_retry,
        warmup: WarmupConfig = DEFAULT_WARMUP,
        cached_kv_limit: int | None = None,
        kernel_progress: CountProgress = ignore_count,
    ) -> None:
        """Start with nothing in memory; ``budget`` is in the memory of ``device``.

        On CUDA experts have a budget of their own, in the memory of the host. ``pause`` is called
        between two attempts to get a lease; an exception that it raises ends the waiting.
        ``kernel_progress`` gets the numbers of kernels compiled and to compile; its exceptions end
        the compilation. ``warmup`` configures routed experts where not all of them fit.
        ``cached_kv_limit`` limits the bytes of KV kept between requests; None: all memory that
        nothing else needs.
        """
        self.usage_store = ExpertUsageStore(planner.bases, warmup)
        self.budget = budget
        ram = budget if device == "cpu" else MemoryBudget(find_default_budget())
        self.tiers = AdapterCache(ram=ram, device=budget)
        self.registration = EngineRegistration(planner.home.engines, budget)
        self.admission = MemoryAdmission(planner.store.paths.running, pause=pause)
        self._base_slot = BaseSlot(self.tiers, on_drop=self.usage_store.stop_observing)
        self._prefetch = AdapterPrefetcher[LoadedAdapter](self.tiers)
        self._kv_stores: dict[str, KVCacheStore] = {}
        self._cached_kv_limit, self._kernel_progress = cached_kv_limit, kernel_progress
        self._derived = DerivedData(planner.store.paths.derived)
        self._copies: QuantisedCache | None = None
        self._planner, self._progress, self._tell = planner, progress, tell

    @contextmanager
    def load_for(
        self, prepared: PreparedRequest, files: Files, *, cache_key: str | None, threads: int
    ) -> "Iterator[LoadedModel | CompatLoadedModel]":
        """Borrow all that a generation needs, loading what is missing.

        Raises:
            ExpertError: for any problem with the experts, the base or the budget.
        """
        with ExitStack() as stack:
            if isinstance(prepared.base, OpenBase):
                base = prepared.base
                yield self._load_native(base, prepared, files, cache_key, threads, stack)
            else:
                yield self._load_compat(prepared.base, prepared, files, stack)

    def forget(self, cache_key: str) -> None:
        """Drop what was kept for the next request with this key."""
        for kv_store in self._kv_stores.values():
            kv_store.forget(cache_key)

    def close(self) -> None:
        """Free everything; what others may depend on is freed last."""
        try:
            self.usage_store.stop_observing()
            self._base_slot.unload()
            self.tiers.clear()
            for kv_store in self._kv_stores.values():
                kv_store.clear()
        finally:
            self.registration.close()

    @property
    def bytes_moved(self) -> BytesRead:
        """Bytes read from files so far, and bytes moved from RAM to the compute tier."""
        traffic = self.tiers.traffic
        ssd = traffic[Tier.RAM].nbytes + self._base_slot.read_bytes
        return BytesRead(ssd=ssd, ram=traffic[Tier.DEVICE].nbytes)

    def take_notes(self) -> tuple[str, ...]:
        """Return, once, warnings about data that could not be saved."""
        copies = self._copies.take_notes() if self._copies else ()
        return (*self._derived.take_notes(), *copies, *self.usage_store.take_notes())

    def check_integrity(self) -> None:
        """Assert that the budget matches what is in memory, and that nothing is in use."""
        self.tiers.check_integrity()
        self.tiers.check_idle()
        self._base_slot.check_integrity()
        self._prefetch.check_integrity()
        for kv_store in self._kv_stores.values():
            kv_store.check_integrity()
            kv_store.check_idle()
        assert self.budget.reserved_bytes("kv") == sum(
            kv_store.nbytes for kv_store in self._kv_stores.values()
        )
        assert self.budget.reserved_bytes("base") == self._base_slot.nbytes

    @property
    def is_consistent(self) -> bool:
        """Whether the next run may reuse this state; False where assertions are disabled."""
        try:
            self.check_integrity()
        except (AssertionError, KeyError, RuntimeError):  # RuntimeError: of a device
            return False
        return __debug__

    def _load_native(
        self,
        base: OpenBase,
        prepared: PreparedRequest,
        files: Files,
        cache_key: str | None,
        threads: int,
        stack: ExitStack,
    ) -> LoadedModel:
        """Load everything into memory; the certain needs are reserved first."""
        self._reserve_base(base)
        wanted = build_kv_request(base, prepared, cache_key)
        kv = stack.enter_context(self.get_kv_store(base.backend).allocate(wanted))
        certain = prepared.buffer_bytes()
        self._reserve_buffers(certain, prepared, stack)
        model, plan = self._load_base_and_plan(base, prepared.planned, files, threads, stack)
        self._reserve_buffers(prepared.buffer_bytes(width=plan.width) - certain, prepared, stack)
        stack.callback(model.free_buffers)  # before the reservation of the buffers is released
        model.prepare(
            kv.cache, plan, tokens=wanted.virtual_tokens + len(wanted.ids) - kv.cache.length
        )
        return LoadedModel(base, model, kv, plan)

    def _reserve_buffers(self, size: int, prepared: PreparedRequest, stack: ExitStack) -> None:
        what = f"the buffers of {prepared.prompt.capacity} tokens"
        stack.enter_context(self.tiers.reserve_during(Tier.DEVICE, "buffers", size, what=what))

    def get_kv_store(self, backend: Backend) -> KVCacheStore:
        """Return the KV store for the layout that the models of a backend read."""
        if backend.kv_layout not in self._kv_stores:
            self._kv_stores[backend.kv_layout] = backend.create_kv_store(
                self.tiers, kept_limit=self._cached_kv_limit
            )
        return self._kv_stores[backend.kv_layout]

    def _build_load_context(self, base: OpenBase, threads: int) -> LoadContext:
        if not self._base_slot.is_loaded:  # a loaded base keeps its copies for `take_notes`
            self._copies = open_quantised_cache(self._planner.bases, base.stored, notify=self._tell)
        return LoadContext(
            directory=base.stored.path,
            copies=self._copies,
            home=self._planner.home,
            threads=threads,
            tell=self._tell,
            kernel_progress=self._kernel_progress,
        )

    def load_base(self, base: OpenBase, *, threads: int) -> RunnableModel:
        """Load a base in place of any other, and return its model.

        Raises:
            BudgetError: when it does not fit.
            InvalidPackageError: when its tensors do not match its configuration.
        """
        self._reserve_base(base)
        return self._load_base(base, threads)

    @contextmanager
    def load_plan(
        self, base: OpenBase, model: RunnableModel, planned: PlannedPrompt, files: Files
    ) -> Iterator[CompiledPlan]:
        """Borrow the compiled plan of some experts, loading what is missing.

        Raises:
            ExpertError: for any problem with the experts or the budget.
        """
        with ExitStack() as stack:
            with self._open_chain(planned, files) as chain:
                plan = stack.enter_context(self._compile_plan(base, model, planned, chain))
            yield plan

    def _load_base_and_plan(
        self, base: OpenBase, planned: PlannedPrompt, files: Files, threads: int, stack: ExitStack
    ) -> tuple[RunnableModel, CompiledPlan]:
        """Load the base, prefetch its experts meanwhile, and compile their plan."""
        identity = planned.result.plan.identity
        with self._open_chain(planned, files) as chain, self._prefetch_experts(chain, identity):
            model = self._load_base(base, threads)
            plan = self._compile_plan(base, model, planned, chain)
            return model, stack.enter_context(plan)

    def _load_base(self, base: OpenBase, threads: int) -> RunnableModel:
        context = self._build_load_context(base, threads)
        if self._base_slot.is_loaded or base.backend.dtype not in QUANTISED_DTYPES:
            model = self._base_slot.load(context, progress=self._progress)
        else:
            model = self._load_quantised(base, context)
        if base.config.experts is not None:
            self.usage_store.observe(base.stored, base.config.experts, model)
        return model

    def _reserve_base(self, base: OpenBase) -> None:
        """Reserve memory for a base in place of any other, unless it is known to be refused."""
        if base.backend.dtype in QUANTISED_DTYPES and not self._base_slot.has(base):
            from expertctl.engine.cpu.quantisation_quality import refuse_known_loss

            refuse_known_loss(base, open_quantised_cache(self._planner.bases, base.stored))
        self._base_slot.reserve(base)

    def _load_quantised(self, base: OpenBase, context: LoadContext) -> RunnableModel:
        """Load a base in integers and check what it loses, or drop it.

        With routed experts that is measured first, on a model of its own that is exact: those of a
        model that generates may be skipped, and are counted. The copy of that model is then read.
        """
        from expertctl.engine.cpu.backend import PackedBackend, PackedModel
        from expertctl.engine.cpu.quantisation_quality import needs_measuring, require_quality

        backend, counts = base.backend, self._progress
        assert isinstance(backend, PackedBackend), "only its kernels compute with integers"
        is_apart = base.config.experts is not None and needs_measuring(base, context.copies)
        try:
            if is_apart:
                with closing(backend.exact.load(context, progress=self._progress)) as measured:
                    self._base_slot.read_bytes += measured.read_bytes
                    quality = require_quality(base, measured, context, progress=self._progress)
                counts = self._count_nothing
            model = self._base_slot.load(context, progress=counts)
            assert isinstance(model, PackedModel)
            if not is_apart:
                quality = require_quality(base, model, context, progress=self._progress)
            model.quality = quality
        except BaseException:
            self._base_slot.unload()
            raise
        return model

    def _count_nothing(self, _: int) -> None:
        """Report that something was loaded whose bytes are counted already."""
        self._progress(0)

    def _compile_plan(
        self,
        base: OpenBase,
        model: RunnableModel,
        planned: PlannedPrompt,
        chain: Sequence[tuple[ExpertSource, float]],
    ) -> AbstractContextManager[CompiledPlan]:
        target = _build_target(base, model, self._derived)
        return borrow_compiled_plan(
            self.tiers, chain, identity=planned.result.plan.identity, target=target
        )

    @contextmanager
    def _prefetch_experts(
        self, chain: Sequence[tuple[ExpertSource, float]], identity: Digest
    ) -> Iterator[None]:
        """Read experts while the base is read, until they are pinned or loading failed.

        Reading ends before the files of the experts are released.
        """
        if self._base_slot.is_loaded:
            yield
            return
        wanted = [source.cache_request for source, _ in chain if source.nbytes]  # else it is here
        try:
            with self._prefetch.expect(wanted, plan=(Tier.DEVICE, identity)):
                yield
        finally:
            self._prefetch.wait_until_idle()

    def _load_compat(
        self, base: "CompatBase", prepared: PreparedRequest, files: Files, stack: ExitStack
    ) -> "CompatLoadedModel":
        """Free the base of our own engine, then load this one and its expert, if any."""
        from expertctl.engine.torch.compat_engine import CompatLoadedModel, open_compat_session

        self._base_slot.unload()
        tokens = prepared.prompt.capacity
        with self._open_chain(prepared.planned, files) as chain:
            expert = chain[0] if chain else None
            borrowed = open_compat_session(base, expert, tokens=tokens, tiers=self.tiers)
            return CompatLoadedModel(base, stack.enter_context(borrowed))

    @contextmanager
    def _open_chain(
        self, planned: PlannedPrompt, files: Files
    ) -> Iterator[list[tuple[ExpertSource, float]]]:
        """Yield the experts of a plan with their weights; installed ones are leased meanwhile."""
        plan, store = planned.result.plan, self._planner.store
        from_files = {file.source.content_digest: file.source for file in files.values()}
        sources = [
            from_files.get(expert.digest)
            or make_stored_source(store, expert.stored, expert.manifest, progress=self._progress)
            for expert in planned.experts
        ]
        with store.lease_experts(e.stored for e in planned.experts if e.digest not in from_files):
            yield [(s, e.weight) for s, e in zip(sources, plan.experts, strict=True)]


def _build_target(base: OpenBase, model: RunnableModel, derived: DerivedData) -> CompileTarget:
    identity, backend = base.stored.identity, base.backend
    content = Digest.compute(f"{identity.arch} {identity.weights} {backend.dtype}".encode())
    return CompileTarget(backend.compile_spec, DoraScaleSource(content, model.matrix, derived))


def build_kv_request(base: OpenBase, prepared: PreparedRequest, cache_key: str | None) -> KVRequest:
    """Return the KV request of an answer, with the key of sequences that may share its prefix."""
    prompt = prepared.prompt
    return KVRequest(
        cache_key=cache_key,
        identity=prepared.planned.result.plan.identity,
        config=base.config,
        ids=prompt.ids,
        virtual_tokens=prompt.virtual,
        capacity=prompt.capacity,
    )
