"""A base that compiled kernels hold and run: what is large, in int8 or int4, or deterministic.

Importing this imports numba. Compiled code is kept below the home, and `tell` gets a sentence
when some has to be made.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from expertctl.digest import Progress, ignore_progress
from expertctl.engine.adapters.compile import CompiledPlan, CompileSpec
from expertctl.engine.cpu.base_loader import (
    load_packed_base,
    packing_scratch_bytes,
    uses_quantised_copy,
)
from expertctl.engine.cpu.decoder import DecodeRow, PackedDecoder
from expertctl.engine.cpu.packed_base import (
    PackedBase,
    make_expert_shape,
    packed_base_bytes,
    parse_routed_expert,
)
from expertctl.engine.cpu.program_cache import ADAPTER_SCHEMES, ThreadTuner, estimate_buffer_bytes
from expertctl.engine.generation import DecoderSession, DecodeSession
from expertctl.engine.kernels.jit import use_kernel_cache
from expertctl.engine.kernels.packed_format import PlanPacking, Scheme
from expertctl.engine.kernels.thread_pool import ThreadPool
from expertctl.engine.kv.block_pool import BlockPool, PagedKVCache, estimate_pages_bytes
from expertctl.engine.kv.sequence_cache import KVCacheBase
from expertctl.engine.memory.adapter_cache import AdapterCache
from expertctl.engine.memory.host import allocate
from expertctl.engine.model.backends import BackendName, LoadContext
from expertctl.engine.model.decoder import LayerTimer, PrefillResult
from expertctl.engine.moe.cache_plan import (
    TYPICAL_SEQUENCE_TOKENS,
    CachePlan,
    estimate_bookkeeping_bytes,
    estimate_cache_metadata_bytes,
    estimate_resident_bookkeeping_bytes,
    fits_in_memory,
    plan_cache,
)
from expertctl.engine.moe.counters import Counters
from expertctl.engine.moe.expert_cache import ExpertCache
from expertctl.engine.moe.expert_files import CopiedExperts, StoredExperts, open_copied_experts
from expertctl.engine.moe.expert_memory import ExpertMemory, HostBlockStorage
from expertctl.engine.moe.layer_slots import LayerSlots
from expertctl.engine.moe.resident_experts import ResidentExperts, make_resident_experts
from expertctl.engine.moe.routed_experts import MissPolicy
from expertctl.engine.moe.stats import RoutedExpertStats
from expertctl.engine.moe.warmup import PlanWarmup, WarmupPlan, warm_up_cache
from expertctl.engine.sampling import estimate_sample_bytes
from expertctl.engine.text.prompt import RecordLogits
from expertctl.package.base_tensors import read_base_tensors
from expertctl.package.model_config import ModelConfig
from expertctl.routing.request import AdapterDtype, Dtype, MoeColdOption, MoeMiss

_FLOAT_BYTES = 4
SCHEMES: dict[Dtype, Scheme] = {
    "float32": Scheme.FLOAT32,
    "bf16": Scheme.BFLOAT16,
    "int8": Scheme.INT8,
    "int4": Scheme.INT4,
}


@dataclass(frozen=True, slots=True)
class PackedBackend:
    """A base that `PackedDecoder` runs."""

    config: ModelConfig
    dtype: Dtype
    adapter_dtype: AdapterDtype
    weight_bytes: int
    cache: CachePlan | None = None
    """How its routed experts are held where not all are in memory, or some may be left out."""
    start: WarmupPlan = field(default=WarmupPlan(), compare=False)
    """Which of them it begins with."""

    @property
    def kv_scheme(self) -> Scheme:
        """What keys and values are kept in: half the bytes beside weights that are rounded."""
        return Scheme.FLOAT32 if self.scheme is Scheme.FLOAT32 else Scheme.FLOAT16

    @classmethod
    def choose(
        cls,
        config: ModelConfig,
        dtype: Dtype,
        adapter_dtype: AdapterDtype = "published",
        *,
        memory_limit: int | None = None,
        miss: MoeMiss = "exact",
        cap: float = 1.0,
        cold: MoeColdOption = "auto",
        rows: int = 1,
        headroom: int = 0,
    ) -> "PackedBackend":
        """Return what runs a base in ``room`` bytes of memory; None: unlimited.

        Of these, enough is left for a text that is asked for without further wishes, in a batch of
        ``rows``, and for a run that takes ``beside`` bytes besides the base.

        Raises:
            IncompatibleError: when its sizes are not those that kernels support.
        """
        scheme = SCHEMES[dtype]
        whole = packed_base_bytes(config, scheme)
        if config.experts is not None:
            whole += estimate_resident_bookkeeping_bytes(config.experts)
        held = cls(config, dtype, adapter_dtype, whole)
        if config.experts is None or memory_limit is None:
            return held
        texts = max(held.sequence_bytes(rows=rows), headroom)
        if fits_in_memory(whole, memory_limit, sequence_bytes=texts):
            return held
        rest, block = held.min_weight_bytes, make_expert_shape(config, scheme)
        layers, experts = len(config.experts.layers), config.experts.count
        plan = plan_cache(
            layers=layers,
            experts=experts,
            block_bytes=block.nbytes,
            other_bytes=rest,
            limit=memory_limit,
            miss=miss,
            cap=cap,
            sequence_bytes=texts,
        )
        weight_bytes = rest + plan.blocks * block.nbytes
        return cls(config, dtype, adapter_dtype, weight_bytes, replace(plan, cold=cold))

    def with_warmup(self, start: PlanWarmup) -> "PackedBackend":
        """Return the same with slots and pins by what is known, where not all experts fit.

        Raises:
            ExpertError: when a profile is of another base, or cannot be used.
        """
        config, routed = self.config, self.config.experts
        if self.cache is None or routed is None:
            return self
        begins, before = start(routed), self.cache
        plan = begins.adapt_cache_plan(before, routed.layers)
        fewer = (before.blocks - plan.blocks) * make_expert_shape(config, self.scheme).nbytes
        return replace(self, weight_bytes=self.weight_bytes - fewer, cache=plan, start=begins)

    @property
    def name(self) -> BackendName:
        """Which of the two it is."""
        return "packed"

    @property
    def scheme(self) -> Scheme:
        """How its matrices are stored."""
        return SCHEMES[self.dtype]

    @property
    def loading_bytes(self) -> int:
        """What reading its weights takes besides, at most."""
        return packing_scratch_bytes(self.config)

    @property
    def min_weight_bytes(self) -> int:
        """What all but routed experts takes where not all fit; a run needs some of them, too."""
        if self.config.experts is None:
            return self.weight_bytes
        rest = packed_base_bytes(self.config, self.scheme, experts=False)
        return rest + estimate_cache_metadata_bytes(self.config.experts)

    @property
    def host_bytes(self) -> int:
        """0: they are in no other memory."""
        return 0

    @property
    def compile_spec(self) -> CompileSpec:
        """What plans are compiled for."""
        config, packing = self.config, PlanPacking(self.scheme, self.adapter_dtype)
        shapes, cpu = config.linear_shapes(), torch.device("cpu")
        read = 0 if self.cache is None else make_expert_shape(config, self.scheme).nbytes
        return CompileSpec(
            shapes, config.hidden_size, torch.float32, cpu, packing, routed_bytes=read
        )

    def kv_bytes(self, tokens: int) -> int:
        """What the keys and values of so many tokens take, by whole pages."""
        return estimate_pages_bytes(self.config, tokens, self.kv_scheme)

    def buffer_bytes(self, tokens: int, *, width: int = 0, rows: int = 1) -> int:
        """What a pass over so many tokens, or rows, needs besides weights and cache.

        Plans that meet in a batch may be in any scheme. The scores of a step are copied out.
        """
        mixed = ADAPTER_SCHEMES if width and rows > 1 else None
        passing = estimate_buffer_bytes(
            self.config, self.scheme, tokens=tokens, rows=rows, width=width, adapters=mixed
        )
        scores = rows * self.config.vocab_size * _FLOAT_BYTES
        return passing + scores + estimate_sample_bytes(self.config.vocab_size)

    def sequence_bytes(self, *, rows: int = 1) -> int:
        """What a text takes besides weights: of `TYPICAL_SEQUENCE_TOKENS`, or as many as the base reads."""
        tokens = min(TYPICAL_SEQUENCE_TOKENS, self.config.max_positions)
        passing = max(self.buffer_bytes(tokens, rows=rows), self.loading_bytes)
        return passing + self.kv_bytes(tokens)

    @property
    def kv_layout(self) -> str:
        """Equal where one keeper serves: pages of the same numbers."""
        return f"pages of {self.kv_scheme.value}"

    def create_kv_store(self, tiers: AdapterCache, *, kept_limit: int | None = None) -> BlockPool:
        """Return an owner of pages."""
        return BlockPool(tiers, numbers=self.kv_scheme, cached_limit=kept_limit)

    def load(self, context: LoadContext, *, progress: Progress = ignore_progress) -> "PackedModel":
        """Read and pack the weights, or read them as they were packed before.

        Raises:
            InvalidPackageError: when its tensors are not those of its configuration.
        """
        use_kernel_cache(context.home, notify=context.tell, check=context.check)
        base = load_packed_base(
            context.directory,
            self.config,
            self.scheme,
            experts=self.cache is None,
            copies=context.copies,
            cold="auto" if self.cache is None else self.cache.cold,
            progress=progress,
        )
        if self.cache is None:
            return self._wrap_resident_base(base, context)
        reader = self._open_expert_reader(self.cache, context)
        try:
            experts = self._create_expert_cache(self.cache, reader)
        except BaseException:
            reader.close()
            raise
        assert self.config.experts is not None
        context.watch(self.config.experts, experts)
        return PackedModel(base, threads=context.threads, experts=experts, reader=reader)

    def _wrap_resident_base(self, base: PackedBase, context: LoadContext) -> "PackedModel":
        """Return what runs a base that is all in memory."""
        experts, routed = make_resident_experts(base), self.config.experts
        if experts is not None and routed is not None:
            context.watch(routed, experts)
        return PackedModel(base, threads=context.threads, resident_experts=experts)

    def _open_expert_reader(
        self, plan: CachePlan, context: LoadContext
    ) -> StoredExperts | CopiedExperts:
        """Return the reader of experts: that of the base's copy, where there is one."""
        stored = StoredExperts(
            read_base_tensors(context.directory, self.config), self.config, self.scheme
        )
        if context.copies is None or not uses_quantised_copy(self.scheme, cold=plan.cold):
            return stored
        found = open_copied_experts(
            context.copies, self.config, stored, cold=plan.cold, blocks=plan.blocks
        )
        return found or stored

    def _create_expert_cache(
        self, plan: CachePlan, reader: StoredExperts | CopiedExperts
    ) -> ExpertCache:
        """Make room for some of the routed experts, and begin with those that are known."""
        config, scheme, routed = self.config, self.scheme, self.config.experts
        assert routed is not None
        shape = replace(make_expert_shape(config, scheme), compact_bytes=reader.compact)
        total, most = plan.blocks * shape.nbytes, plan.layers * plan.experts
        blocks = HostBlockStorage.from_budget(total, shape, max_count=most)
        memory = ExpertMemory(shape, layers=plan.layers, experts=plan.experts, blocks=blocks)
        slots = [
            LayerSlots(experts=plan.experts, capacity=capacity, pinned=pins)
            for capacity, pins in zip(plan.capacities, plan.pinned_by_layer, strict=True)
        ]
        policy = MissPolicy(skips=plan.miss == "skip", cap=plan.cap)
        numbers = routed.layers
        cache = ExpertCache(memory, reader, layer_numbers=numbers, slots=slots, policy=policy)
        try:
            warm_up_cache(cache, self.start, dict(zip(numbers, slots, strict=True)))
        except BaseException:
            cache.close()  # first: its threads read
            raise
        return cache


class PackedModel:
    """A base in packed memory, and the crew that computes with it."""

    def __init__(
        self,
        base: PackedBase,
        *,
        threads: int,
        experts: ExpertCache | None = None,
        reader: StoredExperts | CopiedExperts | None = None,
        resident_experts: ResidentExperts | None = None,
    ) -> None:
        """Use at most so many threads; others than the caller's start with the first pass.

        ``experts`` owns routed experts that the base does not have; ``reader`` is what they are
        read by, and closed with this. ``whole`` stands for routed experts that the base has.
        """
        self.base, self.experts, self._pool = base, experts, ThreadPool(threads)
        self._reader, self._resident_experts = reader, resident_experts
        self.decoder = PackedDecoder(
            base, self._pool, tuner=ThreadTuner(threads), experts=experts or resident_experts
        )

    @property
    def nbytes(self) -> int:
        """Bytes of its weights, and of what is known of routed experts."""
        routed = self.base.config.experts
        if routed is None:
            return self.base.nbytes
        if self.experts is None:
            return self.base.nbytes + estimate_resident_bookkeeping_bytes(routed)
        return self.base.nbytes + self.experts.nbytes + estimate_bookkeeping_bytes(routed)

    @property
    def routed(self) -> RoutedExpertStats | None:
        """What became of routed experts so far; None where there are none."""
        if self.experts is None:
            return None if self._resident_experts is None else self._resident_experts.report()
        report, reader = self.experts.report(), self._reader
        cold = "read" if reader is None else reader.cold
        return replace(report, residence=replace(report.residence, cold=cold))

    @property
    def counters(self) -> Counters | None:
        """What is counted of routed experts; None where there are none."""
        experts = self.experts or self._resident_experts
        return None if experts is None else experts.counters

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a person should know of them."""
        return self.base.warnings

    def prepare(
        self, cache: KVCacheBase, plan: CompiledPlan, *, tokens: int, rows: int = 1
    ) -> None:
        """Make what reads so many tokens, compiling what is not compiled yet."""
        assert isinstance(cache, PagedKVCache)
        self.decoder.prepare(cache, plan.packed, tokens=tokens, rows=rows)

    @property
    def prefill_parts(self) -> int:
        """The number of layers; 1 with routed experts, which are brought for one pass at a time."""
        return 1 if self.base.config.experts is not None else self.base.config.layers

    def prefill(
        self, reading: DecodeSession, ids: Sequence[int], *, between_layers: Callable[[], None]
    ) -> PrefillResult:
        """Read a part of a prompt; ``between_layers`` may call `step` with other texts."""
        assert isinstance(reading, DecoderSession), "a text of a base that kernels hold"
        if self.prefill_parts == 1:
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

    def step(self, texts: Sequence[tuple[DecodeSession, int]]) -> Tensor:
        """Read one more token of each of several texts, in one pass over the weights."""
        return self.decoder.step([_make_decode_row(reading, token) for reading, token in texts])

    def start_session(
        self,
        cache: KVCacheBase,
        plan: CompiledPlan,
        *,
        progress: Progress = ignore_progress,
        scores: RecordLogits | None = None,
    ) -> DecodeSession:
        """Begin or go on with a text."""
        assert isinstance(cache, PagedKVCache)
        return DecoderSession(self.decoder, cache, plan.packed, plan.soft_prompt, progress, scores)

    @property
    def read_bytes(self) -> int:
        """How many bytes of files were read for them."""
        return self.base.read_bytes

    def time_layers(self, times: LayerTimer) -> AbstractContextManager[None]:
        """Add to ``times`` how long each part of what is read meanwhile takes."""
        return self.decoder.time_layers(times)

    def matrix(self, module: str) -> Tensor:
        """Return the weights of a linear layer as they are used, as a new float32 [out, in].

        A routed expert that may be absent is read for it, even if it is in memory now.

        Raises:
            InvalidPackageError: when a file of the base cannot be read.
        """
        routed = parse_routed_expert(module)
        if self._reader is None or routed is None:
            return self.base.unpack_weights(module)
        shape = make_expert_shape(self.base.config, self.base.scheme)
        block = np.frombuffer(allocate(shape.nbytes), np.uint8)
        self._reader.read_whole(*routed, block)
        return replace(self.base, experts={routed: block}).unpack_weights(module)

    def free_buffers(self) -> None:
        """Let go of what the passes of a plan share."""
        self.decoder.free_buffers()

    @property
    def holds_only_weights(self) -> bool:
        """Whether it holds nothing but its weights."""
        return self.decoder.has_no_buffers

    def check_integrity(self) -> None:
        """Assert what always holds between two passes."""
        if self.experts is not None:
            self.experts.check_integrity()

    def close(self) -> None:
        """End the threads."""
        self._pool.close()
        if self.experts is not None:
            self.experts.close()
        if self._reader is not None:
            self._reader.close()


def _make_decode_row(reading: DecodeSession, token: int) -> DecodeRow:
    assert isinstance(reading, DecoderSession), "a text of a base that kernels hold"
    return DecodeRow(token, reading.cache, reading.deltas)
