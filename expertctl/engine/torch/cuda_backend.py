"""The CUDA backend: a base in the memory of a device, run with captured steps.

Weights are float32 or bfloat16, keys and values the same, activations and adapters float32. Routed
experts are in a stack, all of them or as many as fit. Nothing else here depends on the device, so
tests run the same classes on a processor.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

import torch

from expertctl.engine.adapters.compile import CompiledPlan, CompileSpec, TorchPlacement
from expertctl.engine.arrays import AnyArray, FloatArray
from expertctl.engine.backend import BackendName, LoadConfig, LoadContext
from expertctl.engine.base_files import is_routed_expert
from expertctl.engine.decoding import LayerTimer, PrefillResult
from expertctl.engine.generation import DecoderSession, DecodeSession, step_sequentially
from expertctl.engine.kv.kv_cache import KVCacheBase, KVRequest
from expertctl.engine.memory.adapter_cache import AdapterCache
from expertctl.engine.moe.cache_plan import (
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
    estimate_buffer_bytes,
    estimate_step_buffer_bytes,
)
from expertctl.engine.torch.cuda_graph_step import (
    StaticKVCache,
    StaticKVRow,
    estimate_static_kv_bytes,
)
from expertctl.engine.torch.cuda_graphs import (
    PERMANENT_ROWS,
    estimate_graph_memory,
    estimate_permanent_bytes,
)
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
    estimate_counter_bytes,
    estimate_lookup_bytes,
    open_stacked_experts,
)
from expertctl.engine.torch.stacked_mlp import estimate_host_selection_bytes
from expertctl.engine.torch.weights import BaseWeights, load_base_weights, parse_torch_dtype
from expertctl.package.base_tensors import read_base_tensors
from expertctl.package.model_config import ModelConfig
from expertctl.reference import Progress, ignore_progress

_FLOAT_BYTES = 4
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

    @classmethod
    def choose(cls, config: ModelConfig, load_config: LoadConfig) -> "CudaBackend":
        """Return the backend for a base within the memory limit of the device.

        The headroom is left for the needs of a run besides the base.
        """
        whole, limit = cls(config, load_config.dtype), load_config.memory_limit
        if config.experts is None or limit is None:
            return whole
        if fits_in_memory(whole.weight_bytes, limit, sequence_bytes=load_config.headroom):
            return whole
        workspaces = _PIECEWISE_STREAMS * devices.get_workspace_bytes()
        plan = plan_cache(
            layers=len(config.experts.layers),
            experts=config.experts.count,
            block_bytes=whole.stack_shape.nbytes,
            other_bytes=whole.min_weight_bytes + whole.piecewise_bytes + workspaces,
            limit=limit,
            miss=load_config.engine.moe_miss,
            cap=load_config.engine.moe_skip_cap,
            sequence_bytes=load_config.headroom,
        )
        return replace(whole, cache=plan)

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
        graphs = estimate_graph_memory(self.config, self.stack_shape)
        return estimate_permanent_bytes(self.config) + graphs

    @property
    def min_weight_bytes(self) -> int:
        """Bytes without routed experts, but with the dummy and the lookup table; see `Backend`."""
        routed, itemsize = self.config.experts, parse_torch_dtype(self.dtype).itemsize
        if routed is None:
            return self.weight_bytes
        total = estimate_lookup_bytes(routed) + estimate_stack_bytes(self.stack_shape, blocks=0)
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
            + estimate_host_selection_bytes(self.config, rows=PERMANENT_ROWS)
        )

    @property
    def loading_bytes(self) -> int:
        """0: the weights are converted before they are copied to the device."""
        return 0

    @property
    def compile_spec(self) -> CompileSpec:
        """Target for which plans are compiled."""
        placement = TorchPlacement(devices.CUDA.type)
        return CompileSpec(self.config.linear_shapes(), self.config.hidden_size, placement)

    def kv_bytes(self, tokens: int) -> int:
        """Bytes of the keys and values of so many tokens."""
        return estimate_static_kv_bytes(
            self.config, capacity=tokens, dtype=parse_torch_dtype(self.dtype)
        )

    def buffer_bytes(self, tokens: int, *, width: int = 0, rows: int = 1) -> int:
        """Estimate the maximum bytes of a pass over so many tokens, besides weights and cache.

        Sequences of a batch run one after the other. A step may run while graphs of another kind
        hold as much; piecewise graphs count as `piecewise_bytes`.
        """
        experts = None if self.config.experts is None else self.stack_shape
        captured = experts if self.cache is None else None
        graphs = estimate_step_buffer_bytes(
            self.config, capacity=tokens, width=width, experts=captured
        )
        return graphs + estimate_buffer_bytes(
            self.config, capacity=tokens, width=width, experts=experts
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
    ) -> SequenceKVCache:
        """Return a store of one-row static KV caches."""
        kind = KVCacheFactory(self._create_row, lambda wanted: self.kv_bytes(wanted.capacity))
        return SequenceKVCache(tiers, kind, cached_limit=kept_limit)

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
            decoder = CudaGraphDecoder(self.config, weights)
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
        decoder = CudaGraphDecoder(self.config, weights, experts=experts)
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
        arena = StaticKVCache(
            self.config,
            rows=1,
            capacity=request.capacity,
            dtype=parse_torch_dtype(self.dtype),
            device=devices.CUDA,
        )
        return arena.get_row(0)


@dataclass(frozen=True, slots=True)
class CudaModel:
    """A base in the memory of the device, which runs one sequence after the other."""

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
            graphs = estimate_graph_memory(self.decoder.config, self.stacked_experts.stack.shape)
        return held + self.stacked_experts.nbytes + self.decoder.permanent_bytes + graphs

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings for the user about the weights."""
        return self.weights.warnings

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
        self.decoder.prepare(cache, plan.torch_deltas)

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
        self, reading: DecodeSession, ids: Sequence[int], *, between_layers: Callable[[], None]
    ) -> PrefillResult:
        """Read a part of a prompt at once."""
        return reading.prefill(ids)

    def step(self, texts: Sequence[tuple[DecodeSession, int]]) -> AnyArray:
        """Read one more token of each sequence, one after the other."""
        return step_sequentially(texts)

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
