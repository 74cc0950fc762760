"""The CUDA backend: a base in the memory of a device, run with captured steps.

Weights are float32 or bfloat16, keys and values the same, activations and adapters float32. Routed
experts are in a stack, all of them or as many as fit. Nothing else here depends on the device, so
tests run the same classes on a processor.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from expertctl.digest import Progress, ignore_progress
from expertctl.engine.adapters.compile import CompiledPlan, CompileSpec, TorchPlacement
from expertctl.engine.arrays import AnyArray, FloatArray
from expertctl.engine.backend import BackendName, LoadConfig, LoadContext
from expertctl.engine.base_files import is_routed_expert
from expertctl.engine.decoding import LayerTimer, PrefillResult
from expertctl.engine.generation import DecoderSession, DecodeSession
from expertctl.engine.kv.kv_cache import KVCacheBase, KVRequest
from expertctl.engine.memory.adapter_cache import AdapterCache
from expertctl.engine.moe.cache_plan import (
    TYPICAL_SEQUENCE_TOKENS,
    CachePlan,
    estimate_cache_metadata_bytes,
    estimate_resident_bookkeeping_bytes,
    fits_in_memory,
    plan_cache,
)
from expertctl.engine.moe.counters import Counters, RoutedExpertStats
from expertctl.engine.moe.expert_cache import ExpertCache
from expertctl.engine.moe.warmup import PlanWarmup, WarmupPlan, warm_up_cache
from expertctl.engine.text.prompt import RecordLogits
from expertctl.engine.torch import devices
from expertctl.engine.torch.cuda_graph_decoder import (
    CudaGraphDecoder,
    GraphStepRow,
    estimate_buffer_bytes,
    estimate_step_buffer_bytes,
)
from expertctl.engine.torch.cuda_graph_step import (
    StaticKVCache,
    StaticKVRow,
    estimate_static_kv_bytes,
)
from expertctl.engine.torch.cuda_graphs import estimate_graph_memory, estimate_permanent_bytes
from expertctl.engine.torch.devices import translate_device_errors, use_torch_threads
from expertctl.engine.torch.expert_stack import (
    StackShape,
    estimate_stack_bytes,
    estimate_staging_bytes,
)
from expertctl.engine.torch.plan import to_array
from expertctl.engine.torch.sequence_cache import KVCacheFactory, SequenceKVCache
from expertctl.engine.torch.stacked_experts import (
    DeviceExpertCounts,
    StackedExperts,
    estimate_bias_bytes,
    estimate_counter_bytes,
    estimate_lookup_bytes,
    open_stacked_experts,
)
from expertctl.engine.torch.stacked_mlp import estimate_host_selection_bytes
from expertctl.engine.torch.static_kv_store import (
    ArenaPlan,
    StaticKVStore,
    estimate_batch_bytes,
    plan_arena,
)
from expertctl.engine.torch.weights import BaseWeights, load_base_weights, parse_torch_dtype
from expertctl.package.base_tensors import read_base_tensors
from expertctl.package.model_config import ModelConfig

_FLOAT_BYTES = 4
_BATCH_DIVISOR = 3
"""Slots of routed experts leave at most this fraction (1 / n) of the memory for a batch."""
_CAPTURE_STREAMS, _PIECEWISE_STREAMS = 2, 3
"""Products run on the default stream and on one stream for each owner of graphs."""


@dataclass(frozen=True, slots=True)
class CudaBackend:
    """A base that `CudaGraphDecoder` runs, in the memory of the device."""

    config: ModelConfig
    dtype: str
    cache: CachePlan | None = None
    """The cache of routed experts, where not all of them are on the device."""
    start: WarmupPlan = field(default=WarmupPlan(), compare=False)
    """The routed experts to start with."""
    rows: int = 1
    """Maximum number of sequences in a batch."""
    arena: ArenaPlan | None = None
    """Shapes of the static cache of a batch; None: each sequence has one of its own."""

    @classmethod
    def choose(cls, config: ModelConfig, load_config: LoadConfig) -> "CudaBackend":
        """Return the backend for a base within the memory limit of the device.

        The headroom is left for the needs of a run besides the base. A batch gets a static cache in
        what is left of the memory.
        """
        rows, limit = load_config.rows, load_config.memory_limit
        found = cls(config, load_config.dtype, rows=rows)
        if config.experts is not None and limit is not None:
            found = found._choose_cache(load_config, limit)
        if rows == 1:
            return found
        arena = plan_arena(
            rows=rows,
            context=config.max_positions,
            memory=None if limit is None else max(limit - found.weight_bytes, 0),
            kv_bytes=found.kv_bytes,
            buffer_bytes=partial(found.buffer_bytes, rows=rows),
        )
        return replace(found, arena=arena)

    def _choose_cache(self, load_config: LoadConfig, limit: int) -> "CudaBackend":
        """Return a copy that holds as many routed experts as fit into the memory."""
        sequence_bytes = load_config.headroom
        if self.rows > 1:
            batch = estimate_batch_bytes(
                self.rows,
                min(TYPICAL_SEQUENCE_TOKENS // 2, self.config.max_positions),
                kv_bytes=self.kv_bytes,
                buffer_bytes=partial(self.buffer_bytes, rows=self.rows),
            )
            sequence_bytes = max(sequence_bytes, min(batch, limit // _BATCH_DIVISOR))
        if fits_in_memory(self.weight_bytes, limit, sequence_bytes=sequence_bytes):
            return self
        assert self.config.experts is not None
        workspaces = _PIECEWISE_STREAMS * devices.get_workspace_bytes()
        plan = plan_cache(
            layers=len(self.config.experts.layers),
            experts=self.config.experts.count,
            block_bytes=self.stack_shape.nbytes,
            other_bytes=self.min_weight_bytes + self.piecewise_bytes + workspaces,
            limit=limit,
            miss=load_config.engine.moe_miss,
            cap=load_config.engine.moe_skip_cap,
            sequence_bytes=sequence_bytes,
        )
        return replace(self, cache=plan)

    def with_warmup(self, start: PlanWarmup) -> "CudaBackend":
        """Return a copy whose slots and pins follow a profile, where not all experts fit.

        Raises:
            ExpertError: when a profile belongs to another base, or cannot be used.
        """
        routed = self.config.experts
        if self.cache is None or routed is None:
            return self
        begins = start(routed)
        return replace(self, cache=begins.adapt_cache_plan(self.cache, routed.layers), start=begins)

    @property
    def name(self) -> BackendName:
        """Name of the backend."""
        return "cuda"

    @property
    def weight_bytes(self) -> int:
        """Bytes of its weights and workspaces, with as many routed experts as fit."""
        routed, workspaces = self.config.experts, self.workspace_bytes
        if routed is None:
            itemsize = parse_torch_dtype(self.dtype).itemsize
            return self.config.count_weight_bytes(itemsize=itemsize) + workspaces
        each, rest = self.stack_shape.nbytes, self.min_weight_bytes + workspaces
        if self.cache is None:
            blocks = len(routed.layers) * routed.count
            return rest + estimate_counter_bytes(routed) + blocks * each
        return rest + self.piecewise_bytes + self.cache.blocks * each

    @property
    def workspace_bytes(self) -> int:
        """Bytes that libraries keep for its compute streams, in one thread."""
        streams = _CAPTURE_STREAMS if self.cache is None else _PIECEWISE_STREAMS
        return streams * devices.get_workspace_bytes()

    @property
    def piecewise_bytes(self) -> int:
        """Bytes that piecewise steps keep between sequences: workspace and graph pool."""
        graphs = estimate_graph_memory(self.config, self.stack_shape, rows=self.rows)
        return estimate_permanent_bytes(self.config, rows=self.rows) + graphs

    @property
    def min_weight_bytes(self) -> int:
        """Bytes without routed experts, but with the dummy and the lookup table; see `Backend`."""
        routed, itemsize = self.config.experts, parse_torch_dtype(self.dtype).itemsize
        if routed is None:
            return self.weight_bytes
        total = estimate_lookup_bytes(routed) + estimate_stack_bytes(self.stack_shape, blocks=0)
        total += estimate_bias_bytes(self.config)
        for name, shape in self.config.tensor_shapes().items():
            if not is_routed_expert(name):
                total += torch.Size(shape).numel() * (itemsize if len(shape) == 2 else _FLOAT_BYTES)
        return total

    @property
    def stack_shape(self) -> StackShape:
        """Shape of a routed expert."""
        return StackShape.from_config(self.config, parse_torch_dtype(self.dtype))

    @property
    def host_bytes(self) -> int:
        """Bytes of the staging buffers of routed experts and of their metadata."""
        if self.config.experts is None:
            return 0
        buffers = estimate_staging_bytes(self.stack_shape)
        if self.cache is None:
            return buffers + estimate_resident_bookkeeping_bytes(self.config.experts)
        return (
            estimate_cache_metadata_bytes(self.config.experts)
            + buffers
            + estimate_host_selection_bytes(self.config, rows=self.rows)
        )

    @property
    def loading_bytes(self) -> int:
        """0: the weights are converted before they are copied to the device."""
        return 0

    @property
    def compile_spec(self) -> CompileSpec:
        """Target for which plans are compiled."""
        places = self.config.stored_places
        return CompileSpec(
            self.config.linear_shapes(),
            self.config.hidden_size,
            TorchPlacement(devices.CUDA.type),
            places=None if places.are_usual else places,
        )

    def kv_bytes(self, tokens: int) -> int:
        """Bytes of the keys and values of so many tokens."""
        return estimate_static_kv_bytes(
            self.config, capacity=tokens, dtype=parse_torch_dtype(self.dtype)
        )

    def buffer_bytes(
        self, tokens: int, *, width: int = 0, rows: int = 1, plans: int | None = None
    ) -> int:
        """Estimate the maximum bytes of a pass over so many tokens, besides weights and cache.

        A batch has one slot for each of its ``plans``; None: one. Steps depend on the capacity of
        the static cache. A step may run while graphs of another kind hold as much; piecewise graphs
        count as `piecewise_bytes`.
        """
        capacity, slots = tokens, plans or 1
        if self.arena is not None:
            capacity = self.arena.choose_capacity(tokens)
        experts = None if self.config.experts is None else self.stack_shape
        captured = experts if self.cache is None else None
        graphs = estimate_step_buffer_bytes(
            self.config, capacity=capacity, rows=rows, plans=slots, width=width, experts=captured
        )
        return graphs + estimate_buffer_bytes(
            self.config, capacity=capacity, rows=rows, plans=slots, width=width, experts=experts
        )

    @property
    def kv_layout(self) -> str:
        """Equal for backends that can share one KV store."""
        return f"cuda, {self.dtype}"

    def use_threads(self, count: int) -> AbstractContextManager[None]:
        """Set torch's thread count inside a ``with`` block."""
        return use_torch_threads(count)

    def create_kv_store(
        self, tiers: AdapterCache, *, kept_limit: int | None = None
    ) -> SequenceKVCache | StaticKVStore:
        """Return the store of a batch, or of sequences with a one-row static cache each."""
        if self.arena is None:
            factory = KVCacheFactory(self._create_row, self._estimate_row_bytes)
            return SequenceKVCache(tiers, factory, cached_limit=kept_limit)
        return StaticKVStore(
            tiers,
            self.config,
            self.arena,
            dtype=parse_torch_dtype(self.dtype),
            device=devices.CUDA,
            cached_limit=kept_limit,
        )

    @translate_device_errors()
    def load(self, context: LoadContext, *, progress: Progress = ignore_progress) -> "CudaModel":
        """Read the weights onto the device.

        Raises:
            InvalidPackageError: when its tensors do not match its configuration.
            BudgetError: when the device is full.
        """
        weights = load_base_weights(
            context.directory,
            self.config,
            dtype=parse_torch_dtype(self.dtype),
            device=devices.CUDA,
            experts=False,
            progress=progress,
        )
        workspaces = self.workspace_bytes
        if self.config.experts is None:
            decoder = CudaGraphDecoder(self.config, weights, rows=self.rows)
            return CudaModel(decoder, weights, weights.nbytes, workspaces)
        experts = open_stacked_experts(
            self.config,
            read_base_tensors(context.directory, self.config),
            self.stack_shape,
            plan=self.cache,
            device=devices.CUDA,
        )
        try:
            read = self._load_experts(experts, progress)
        except BaseException:
            experts.close()
            raise
        decoder = CudaGraphDecoder(self.config, weights, experts=experts, rows=self.rows)
        return CudaModel(decoder, weights, weights.nbytes + read, workspaces, experts)

    def _load_experts(self, experts: StackedExperts, progress: Progress) -> int:
        """Load all experts, or the initial ones of a cache; return the bytes read.

        A cache counts its own reads.
        """
        if experts.cache is None:
            return experts.load_all(progress)
        warm_up_cache(experts.cache, self.start)
        return 0

    @translate_device_errors()
    def _create_row(self, request: KVRequest) -> StaticKVRow:
        """Return a static cache for a sequence; bases of one data type share the store."""
        arena = StaticKVCache(
            request.config,
            rows=1,
            capacity=request.capacity,
            dtype=parse_torch_dtype(self.dtype),
            device=devices.CUDA,
        )
        return arena.get_row(0)

    def _estimate_row_bytes(self, request: KVRequest) -> int:
        return estimate_static_kv_bytes(
            request.config, capacity=request.capacity, dtype=parse_torch_dtype(self.dtype)
        )


@dataclass(frozen=True, slots=True)
class CudaModel:
    """A base in the memory of the device; steps decode the rows of a batch together."""

    decoder: CudaGraphDecoder
    weights: BaseWeights
    read_bytes: int
    """Bytes of files read for the weights."""
    workspace_bytes: int
    """Bytes that libraries keep for the streams that it runs on."""
    stacked_experts: StackedExperts | None = None
    """Its routed experts, if it has any."""

    @property
    def nbytes(self) -> int:
        """Bytes of its weights and of everything that stays with them."""
        held = self.weights.nbytes + self.workspace_bytes
        if self.stacked_experts is None:
            return held
        graphs = 0
        if not self.stacked_experts.is_whole:
            graphs = estimate_graph_memory(
                self.decoder.config, self.stacked_experts.stack.shape, rows=self.decoder.rows
            )
        return held + self.stacked_experts.nbytes + self.decoder.permanent_bytes + graphs

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings for the user about the weights."""
        return self.weights.warnings

    @property
    def quality(self) -> None:
        """None: nothing is quantised."""

    @property
    def routed(self) -> RoutedExpertStats | None:
        """Routed-expert statistics so far, fetched from the device; None without such experts."""
        self.decoder.fetch_routed_counts()
        experts = self._expert_counter
        return None if experts is None else experts.report()

    @property
    def counters(self) -> Counters | None:
        """Counters of routed experts; where all are resident, current only after an answer."""
        return None if self._expert_counter is None else self._expert_counter.counters

    @property
    def experts(self) -> ExpertCache | None:
        """The owner of expert slots, which applies profiles; None where all are resident."""
        return None if self.stacked_experts is None else self.stacked_experts.cache

    @property
    def _expert_counter(self) -> ExpertCache | DeviceExpertCounts | None:
        experts = self.stacked_experts
        return None if experts is None else experts.cache or experts.device_counts

    def prepare(
        self, cache: KVCacheBase, plan: CompiledPlan, *, tokens: int, rows: int = 1
    ) -> None:
        """Allocate the memory of steps and put the plan into its slot; graphs come later."""
        assert isinstance(cache, StaticKVRow)
        self.decoder.prepare(cache, plan.torch_deltas, rows=rows)

    def start_session(
        self,
        cache: KVCacheBase,
        plan: CompiledPlan,
        *,
        progress: Progress = ignore_progress,
        scores: RecordLogits | None = None,
    ) -> DecodeSession:
        """Start or continue a sequence."""
        assert isinstance(cache, StaticKVRow)
        deltas, before = plan.torch_deltas, plan.soft_prompt
        return DecoderSession(self.decoder, cache, deltas, before, progress, scores)

    @property
    def prefill_parts(self) -> int:
        """1: a pass is not split."""
        return 1

    def prefill(
        self,
        reading: DecodeSession,
        ids: Sequence[int],
        *,
        between_layers: Callable[[], None] | None = None,
    ) -> PrefillResult:
        """Read a part of a prompt at once."""
        return reading.prefill(ids)

    def step(self, texts: Sequence[tuple[DecodeSession, int]]) -> AnyArray:
        """Read one more token of each sequence, in one pass over the weights."""
        return self.decoder.step([_make_step_row(session, token) for session, token in texts])

    def time_layers(self, times: LayerTimer) -> AbstractContextManager[None]:
        """Add the time of each part to ``times`` inside a ``with`` block."""
        return self.decoder.time_layers(times)

    def matrix(self, module: str) -> FloatArray:
        """Return the weights [out, in] of a linear layer, in host memory, to compile plans."""
        return to_array(self.decoder.matrix(module))

    def free_buffers(self) -> None:
        """Free all buffers of a generation."""
        self.decoder.free_buffers()

    @property
    def holds_only_weights(self) -> bool:
        """Whether it holds nothing but its weights."""
        return self.decoder.holds_only_weights

    def check_integrity(self) -> None:
        """Assert the invariants that hold between two passes."""
        if self.stacked_experts is not None:
            self.stacked_experts.check_integrity()

    def close(self) -> None:
        """End pending reads, and free all graphs."""
        if self.stacked_experts is not None:
            self.stacked_experts.close()
        self.decoder.close()


def _make_step_row(session: DecodeSession, token: int) -> GraphStepRow:
    assert isinstance(session, DecoderSession), "a session of another backend"
    return GraphStepRow(token, session.cache, session.deltas)
