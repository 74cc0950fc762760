"""The packed CPU backend: large bases, int8 and int4, and deterministic results.

Compiled code is cached below the home; the load context is notified when kernels must be compiled,
and only then numba is imported.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import numpy as np

from expertctl.digest import Progress, ignore_progress
from expertctl.engine.adapters.compile import CompiledPlan, CompileSpec
from expertctl.engine.arrays import AnyArray, FloatArray
from expertctl.engine.backend import BackendName, LoadConfig, LoadContext
from expertctl.engine.cpu.base_loader import (
    load_packed_base,
    packing_scratch_bytes,
    uses_quantised_copy,
)
from expertctl.engine.cpu.decoder import DecodeRow, PackedDecoder
from expertctl.engine.cpu.decoder_program import list_common_sources
from expertctl.engine.cpu.packed_base import (
    PackedBase,
    make_expert_shape,
    packed_base_bytes,
    parse_routed_expert,
)
from expertctl.engine.cpu.program_cache import ADAPTER_SCHEMES, ThreadTuner, estimate_buffer_bytes
from expertctl.engine.cpu.schemes import BlockChoice, choose_block_schemes, choose_scheme
from expertctl.engine.decoding import LayerTimer, PrefillResult
from expertctl.engine.generation import DecoderSession, DecodeSession
from expertctl.engine.kernels.jit import compile_missing, use_kernel_cache
from expertctl.engine.kernels.packed_format import PlanPacking, Scheme
from expertctl.engine.kernels.thread_pool import ThreadPool
from expertctl.engine.kv.block_pool import (
    ROW_PAGES,
    BlockPool,
    InterleavedPages,
    PagedKVCache,
    estimate_pages_bytes,
)
from expertctl.engine.kv.kv_cache import KVCacheBase
from expertctl.engine.memory.adapter_cache import AdapterCache
from expertctl.engine.memory.host import allocate
from expertctl.engine.moe.cache_plan import (
    TYPICAL_SEQUENCE_TOKENS,
    CachePlan,
    estimate_bookkeeping_bytes,
    estimate_cache_metadata_bytes,
    estimate_resident_bookkeeping_bytes,
    fits_in_memory,
    plan_cache,
)
from expertctl.engine.moe.counters import Counters, RoutedExpertStats
from expertctl.engine.moe.expert_cache import ExpertCache
from expertctl.engine.moe.expert_files import CopiedExperts, StoredExperts, open_copied_experts
from expertctl.engine.moe.expert_memory import ExpertMemory, HostBlockStorage
from expertctl.engine.moe.routed_experts import make_resident_experts
from expertctl.engine.moe.warmup import PlanWarmup, WarmupPlan, warm_up_cache
from expertctl.engine.sampling import estimate_sample_bytes
from expertctl.engine.text.prompt import RecordLogits
from expertctl.engine_config import AdapterDtype, Dtype
from expertctl.package.base_tensors import read_base_tensors
from expertctl.package.model_config import ModelConfig
from expertctl.store.quantised_cache import QuantisationQuality

_FLOAT_BYTES = 4
MEASURED_TOKENS, SCORED_ROWS, _SCORED_COPIES = 256, 16, 5
"""Tokens on which a base is compared, rows of logits at once, and copies of them meanwhile."""


def count_measured_tokens(config: ModelConfig) -> int:
    """Return the maximum number of tokens on which a base is compared with its own weights."""
    return min(MEASURED_TOKENS, config.max_positions)


def quality_scratch_bytes(config: ModelConfig, *, packed: int) -> int:
    """Return the maximum bytes that `measure_quality` needs besides the base.

    ``packed`` are those that the packed base needs to read a text of so many tokens.
    """
    from expertctl.engine.cpu.plain_layers import estimate_plain_pass_bytes
    from expertctl.engine.cpu.plain_weights import loading_scratch_bytes

    tokens = count_measured_tokens(config)
    reading = estimate_plain_pass_bytes(config, tokens, chunk=tokens)
    reading += estimate_pages_bytes(config, tokens, ROW_PAGES)
    scored = _SCORED_COPIES * min(SCORED_ROWS, tokens) * config.vocab_size * _FLOAT_BYTES
    kept = _FLOAT_BYTES * tokens * config.hidden_size + config.count_weight_bytes(itemsize=0)
    return kept + loading_scratch_bytes(config, "bf16") + max(reading, packed + scored)


@dataclass(frozen=True, slots=True)
class PackedBackend:
    """The settings of a base that `PackedDecoder` runs."""

    config: ModelConfig
    dtype: Dtype
    adapter_dtype: AdapterDtype
    weight_bytes: int
    cache: CachePlan | None = None
    """The expert cache plan if not all routed experts are in memory, or some may be dropped."""
    start: WarmupPlan = field(default=WarmupPlan(), compare=False)
    """The experts that the cache is warmed up with."""
    blocks: BlockChoice | None = None
    """Which matrices stay in the blocks of a GGUF file."""

    @property
    def kv_scheme(self) -> Scheme:
        """Scheme of keys and values: float16 unless the weights are float32."""
        return Scheme.FLOAT32 if self.scheme is Scheme.FLOAT32 else Scheme.FLOAT16

    @property
    def page_layout(self) -> InterleavedPages:
        """Layout of its KV pages."""
        return InterleavedPages(self.kv_scheme)

    @classmethod
    def choose(cls, config: ModelConfig, load_config: LoadConfig) -> "PackedBackend":
        """Return the backend for a base within its memory limit.

        The limit leaves enough for a sequence with default settings in a batch, and for the
        headroom of a run on top of the base.

        Raises:
            IncompatibleError: for layers or sizes that the kernels do not support.
        """
        config.require_kernels()
        engine, limit = load_config.engine, load_config.memory_limit
        scheme = choose_scheme(config, load_config.dtype)
        blocks: BlockChoice | None = None
        if load_config.dtype == "gguf":
            blocks = choose_block_schemes(config, load_config.storages or {})
        whole = packed_base_bytes(config, scheme, schemes=blocks.schemes if blocks else {})
        if config.experts is not None:
            whole += estimate_resident_bookkeeping_bytes(config.experts)
        held = cls(config, load_config.dtype, engine.adapter_dtype, whole, blocks=blocks)
        if config.experts is None or limit is None:
            return held
        sequence_bytes = max(held.sequence_bytes(rows=load_config.rows), load_config.headroom)
        if fits_in_memory(whole, limit, sequence_bytes=sequence_bytes):
            return held
        rest, block = held.min_weight_bytes, make_expert_shape(config, scheme)
        plan = plan_cache(
            layers=len(config.experts.layers),
            experts=config.experts.count,
            block_bytes=block.nbytes,
            other_bytes=rest,
            limit=limit,
            miss=engine.moe_miss,
            cap=engine.moe_skip_cap,
            sequence_bytes=sequence_bytes,
        )
        weight_bytes = rest + plan.blocks * block.nbytes
        return replace(held, weight_bytes=weight_bytes, cache=replace(plan, cold=engine.moe_cold))

    def with_warmup(self, start: PlanWarmup) -> "PackedBackend":
        """Return the same backend with slots and pins from usage data, if not all experts fit.

        Raises:
            ExpertError: for a profile of another base, or one that cannot be used.
        """
        config, routed = self.config, self.config.experts
        if self.cache is None or routed is None:
            return self
        warmup = start(routed)
        plan = warmup.adapt_cache_plan(self.cache, routed.layers)
        fewer = (self.cache.blocks - plan.blocks) * make_expert_shape(config, self.scheme).nbytes
        return replace(self, weight_bytes=self.weight_bytes - fewer, cache=plan, start=warmup)

    @property
    def exact(self) -> "PackedBackend":
        """The same without a warm-up, and with missing experts read, never skipped."""
        plan = None if self.cache is None else replace(self.cache, miss="exact")
        return replace(self, cache=plan, start=WarmupPlan())

    @property
    def name(self) -> BackendName:
        """The name of this backend."""
        return "packed"

    @property
    def scheme(self) -> Scheme:
        """Storage scheme of its matrices."""
        return choose_scheme(self.config, self.dtype)

    @property
    def loading_bytes(self) -> int:
        """Maximum additional bytes needed while the weights are loaded and compared."""
        packing = packing_scratch_bytes(self.config)
        if self.blocks is not None or not self.scheme.layout.is_grouped:
            return packing
        tokens = count_measured_tokens(self.config)
        reading = self.buffer_bytes(tokens) + self.kv_bytes(tokens)
        return max(packing, quality_scratch_bytes(self.config, packed=reading))

    @property
    def min_weight_bytes(self) -> int:
        """Bytes of all weights except routed experts; a run also needs some of those.

        If all experts fit, this is `weight_bytes`.
        """
        if self.config.experts is None:
            return self.weight_bytes
        rest = packed_base_bytes(self.config, self.scheme, experts=False)
        return rest + estimate_cache_metadata_bytes(self.config.experts)

    @property
    def host_bytes(self) -> int:
        """Always 0: the weights are in no other memory."""
        return 0

    @property
    def compile_spec(self) -> CompileSpec:
        """What adapter plans are compiled for."""
        config, packing = self.config, PlanPacking(self.scheme, self.adapter_dtype)
        read = 0 if self.cache is None else make_expert_shape(config, self.scheme).nbytes
        shapes, width, places = config.linear_shapes(), config.hidden_size, config.stored_places
        others = None if places.are_usual else places
        return CompileSpec(shapes, width, packing, routed_bytes=read, places=others)

    def kv_bytes(self, tokens: int) -> int:
        """Return the bytes of the keys and values of this many tokens, in whole pages."""
        return estimate_pages_bytes(self.config, tokens, self.page_layout)

    def buffer_bytes(
        self, tokens: int, *, width: int = 0, rows: int = 1, plans: int | None = None
    ) -> int:
        """Return the bytes that a pass needs on top of weights and KV cache.

        It processes ``tokens``, or ``rows`` sequences. Plans in one batch may have different
        schemes, however many ``plans`` there are. The logits of a step are copied out.
        """
        mixed = ADAPTER_SCHEMES if width and rows > 1 else None
        passing = estimate_buffer_bytes(
            self.config, self.scheme, tokens=tokens, rows=rows, width=width, adapters=mixed
        )
        scores = rows * self.config.vocab_size * _FLOAT_BYTES
        return passing + scores + estimate_sample_bytes(self.config.vocab_size)

    def sequence_bytes(self, *, rows: int = 1) -> int:
        """Return the bytes that a sequence needs on top of the weights.

        Its length is `TYPICAL_SEQUENCE_TOKENS`, or the maximum of the base if that is less.
        """
        tokens = min(TYPICAL_SEQUENCE_TOKENS, self.config.max_positions)
        passing = max(self.buffer_bytes(tokens, rows=rows), self.loading_bytes)
        return passing + self.kv_bytes(tokens)

    @property
    def kv_layout(self) -> str:
        """Equal for backends that can share a KV store: pages of the same scheme."""
        return self.page_layout.name

    def use_threads(self, count: int) -> AbstractContextManager[None]:
        """Do nothing: kernels have a thread pool of their own."""
        return nullcontext()

    def create_kv_store(self, tiers: AdapterCache, *, kept_limit: int | None = None) -> BlockPool:
        """Return the owner of KV pages."""
        return BlockPool(tiers, layout=self.page_layout, cached_limit=kept_limit)

    def load(self, context: LoadContext, *, progress: Progress = ignore_progress) -> "PackedModel":
        """Read and pack the weights, or read their quantised copy.

        Raises:
            InvalidPackageError: if the tensors do not match the configuration.
        """
        use_kernel_cache(context.home, notify=context.tell, progress=context.kernel_progress)
        schemes = None if self.blocks is None else self.blocks.schemes
        others = () if schemes is None else schemes.values()
        sources = list_common_sources(self.config, self.scheme, self.kv_scheme, others=others)
        compile_missing(sources)
        base = load_packed_base(
            context.directory,
            self.config,
            self.scheme,
            schemes=schemes,
            experts=self.cache is None,
            copies=context.copies,
            cold="auto" if self.cache is None else self.cache.cold,
            progress=progress,
        )
        if self.blocks is not None:
            base = replace(base, warnings=(*base.warnings, *self.blocks.warnings))
        if self.cache is None:
            return PackedModel(base, threads=context.threads)
        reader = self._open_expert_reader(self.cache, context)
        try:
            experts = self._create_expert_cache(self.cache, reader)
        except BaseException:
            reader.close()
            raise
        return PackedModel(base, threads=context.threads, experts=experts, reader=reader)

    def _open_expert_reader(
        self, plan: CachePlan, context: LoadContext
    ) -> StoredExperts | CopiedExperts:
        """Return the reader of routed experts: that of the quantised copy, if there is one."""
        tensors = read_base_tensors(context.directory, self.config)
        stored = StoredExperts(tensors, self.config, self.scheme)
        if context.copies is None or not uses_quantised_copy(self.scheme, cold=plan.cold):
            return stored
        found = open_copied_experts(
            context.copies, self.config, stored, cold=plan.cold, blocks=plan.blocks
        )
        return found or stored

    def _create_expert_cache(
        self, plan: CachePlan, reader: StoredExperts | CopiedExperts
    ) -> ExpertCache:
        """Allocate the cache of routed experts and warm it up."""
        routed = self.config.experts
        assert routed is not None
        shape = make_expert_shape(self.config, self.scheme)
        shape = replace(shape, compact_bytes=reader.compact)
        total, most = plan.blocks * shape.nbytes, plan.layers * plan.experts
        blocks = HostBlockStorage.from_budget(total, shape, max_count=most)
        memory = ExpertMemory(shape, layers=plan.layers, experts=plan.experts, blocks=blocks)
        cache = ExpertCache.from_plan(plan, memory, reader, layer_numbers=routed.layers)
        try:
            warm_up_cache(cache, self.start)
        except BaseException:
            cache.close()  # before the reader, which its threads use
            raise
        return cache


class PackedModel:
    """A base in packed memory, and the thread pool that computes with it."""

    def __init__(
        self,
        base: PackedBase,
        *,
        threads: int,
        experts: ExpertCache | None = None,
        reader: StoredExperts | CopiedExperts | None = None,
    ) -> None:
        """Use at most ``threads`` threads; all except the caller's start with the first pass.

        ``experts`` owns the routed experts that are not in the base; ``reader`` reads them and is
        closed with this object. Without it the base must have all of them.
        """
        self.base, self.experts, self._pool = base, experts, ThreadPool(threads)
        self._reader, self._routed = reader, experts or make_resident_experts(base)
        self.quality: QuantisationQuality | None = None
        """What it loses by its data type, where that was measured."""
        self.decoder = PackedDecoder(
            base, self._pool, tuner=ThreadTuner(threads), experts=self._routed
        )

    @property
    def nbytes(self) -> int:
        """Bytes of its weights and of the bookkeeping of routed experts."""
        routed = self.base.config.experts
        if routed is None:
            return self.base.nbytes
        if self.experts is None:
            return self.base.nbytes + estimate_resident_bookkeeping_bytes(routed)
        return self.base.nbytes + self.experts.nbytes + estimate_bookkeeping_bytes(routed)

    @property
    def routed(self) -> RoutedExpertStats | None:
        """Statistics of routed experts so far; None if there are none."""
        if self._routed is None:
            return None
        report, reader = self._routed.report(), self._reader
        if reader is None:
            return report
        return replace(report, residence=replace(report.residence, cold=reader.cold))

    @property
    def counters(self) -> Counters | None:
        """Counters of routed experts; None if there are none."""
        return None if self._routed is None else self._routed.counters

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about the weights, for the user."""
        return self.base.warnings

    def prepare(
        self, cache: KVCacheBase, plan: CompiledPlan, *, tokens: int, rows: int = 1
    ) -> None:
        """Allocate buffers and programs for this many tokens, compiling kernels if necessary."""
        assert isinstance(cache, PagedKVCache)
        self.decoder.prepare(cache, plan.packed, tokens=tokens, rows=rows)

    @property
    def prefill_parts(self) -> int:
        """The number of layers; 1 with routed experts, which are loaded for one pass at a time."""
        return 1 if self.base.config.experts is not None else self.base.config.layers

    def prefill(
        self,
        reading: DecodeSession,
        ids: Sequence[int],
        *,
        between_layers: Callable[[], None] | None = None,
    ) -> PrefillResult:
        """Process part of a prompt; ``between_layers`` may call `step` with other sequences."""
        assert isinstance(reading, DecoderSession), "a session of another backend"
        if between_layers is None or self.prefill_parts == 1:
            return reading.prefill(ids)
        assert isinstance(reading.cache, PagedKVCache)
        soft_prompt = reading.soft_prompt if reading.cache.length == 0 else None
        return self.decoder.prefill(
            ids,
            reading.cache,
            reading.deltas,
            soft_prompt=soft_prompt,
            progress=reading.progress,
            scores=reading.scores,
            between_layers=between_layers,
        )

    def step(self, texts: Sequence[tuple[DecodeSession, int]]) -> AnyArray:
        """Process one more token of each sequence, in one pass over the weights."""
        return self.decoder.step([_make_decode_row(reading, token) for reading, token in texts])

    def start_session(
        self,
        cache: KVCacheBase,
        plan: CompiledPlan,
        *,
        progress: Progress = ignore_progress,
        scores: RecordLogits | None = None,
    ) -> DecodeSession:
        """Start or continue a sequence."""
        assert isinstance(cache, PagedKVCache)
        return DecoderSession(self.decoder, cache, plan.packed, plan.soft_prompt, progress, scores)

    @property
    def read_bytes(self) -> int:
        """Bytes of files read to load the base."""
        return self.base.read_bytes

    def time_layers(self, times: LayerTimer) -> AbstractContextManager[None]:
        """Add the duration of each part of all passes within the context to ``times``."""
        return self.decoder.time_layers(times)

    def matrix(self, module: str) -> FloatArray:
        """Return the effective weights of a linear layer, as a new float32 [out, in].

        A routed expert that may be absent is read from its file, even if it is in memory now.

        Raises:
            InvalidPackageError: if a file of the base cannot be read.
        """
        routed = parse_routed_expert(module)
        if self._reader is None or routed is None:
            return self.base.unpack_weights(module)
        shape = make_expert_shape(self.base.config, self.base.scheme)
        block = np.frombuffer(allocate(shape.nbytes), np.uint8)
        self._reader.read_whole(*routed, block)
        return replace(self.base, experts={routed: block}).unpack_weights(module)

    def free_buffers(self) -> None:
        """Free the buffers and programs of the decoder."""
        self.decoder.free_buffers()

    @property
    def holds_only_weights(self) -> bool:
        """Whether nothing but weights is allocated."""
        return self.decoder.has_no_buffers

    def check_integrity(self) -> None:
        """Assert the invariants between two passes."""
        if self.experts is not None:
            self.experts.check_integrity()

    def close(self) -> None:
        """End the threads and close the expert cache and reader."""
        self._pool.close()
        if self.experts is not None:
            self.experts.close()
        if self._reader is not None:
            self._reader.close()


def _make_decode_row(reading: DecodeSession, token: int) -> DecodeRow:
    assert isinstance(reading, DecoderSession), "a session of another backend"
    return DecodeRow(token, reading.cache, reading.deltas)
