"""The interface of backends (torch, packed kernels, CUDA), and the torch backend.

A backend knows the memory of everything before loading, to the byte. A KV cache, a model and a plan
that are used together come from the same backend. The torch backend runs bases of every size; small
ones start faster in it than kernels are compiled.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor

from expertctl.digest import Progress, ignore_progress
from expertctl.engine.adapters.compile import CompiledPlan, CompileSpec
from expertctl.engine.generation import DecoderSession, DecodeSession, step_sequentially
from expertctl.engine.kv.sequence_cache import (
    KVAllocation,
    KVCache,
    KVCacheBase,
    KVRequest,
    SequenceKVCache,
)
from expertctl.engine.memory.adapter_cache import AdapterCache
from expertctl.engine.model.decoder import Decoder, LayerTimer, PrefillResult, estimate_pass_bytes
from expertctl.engine.model.weights import BaseWeights, load_base_weights
from expertctl.engine.moe.cache_plan import CachePlan
from expertctl.engine.moe.counters import Counters, RoutedExpertStats, make_resident_stats
from expertctl.engine.moe.warmup import PlanWarmup, plan_cold_start
from expertctl.engine.sampling import estimate_sample_bytes
from expertctl.engine.text.prompt import RecordLogits
from expertctl.engine_config import DEFAULT_CONFIG, QUANTISED_DTYPES, Dtype, EngineConfig
from expertctl.errors import UsageError
from expertctl.messages import Notify, ignore_notification
from expertctl.package.model_config import ModelConfig
from expertctl.settings import Home
from expertctl.store.quantised_cache import QuantisedCache

if TYPE_CHECKING:
    from expertctl.engine.model.cuda_graph_decoder import CudaGraphDecoder
    from expertctl.engine.moe.expert_cache import ExpertCache

BackendName = Literal["torch", "packed", "cuda"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadContext:
    """What a base is loaded with: its files, folders for caches, compute threads."""

    directory: Path
    home: Home
    copies: QuantisedCache | None = None
    threads: int = 1
    tell: Notify = ignore_notification
    check: Callable[[], None] | None = None
    """Called before each kernel is compiled; an exception that it raises ends the compilation."""


@dataclass(frozen=True, slots=True)
class LoadConfig:
    """How a base is loaded: the options of the engine, and what depends on base and memory."""

    dtype: Dtype = "float32"
    """Data type of the base weights, chosen for this base."""
    engine: EngineConfig = DEFAULT_CONFIG
    memory_limit: int | None = None
    """Bytes of memory in total; routed experts that do not fit stay on the disk."""
    headroom: int = 0
    """Bytes that a run needs besides the base; routed-expert slots leave them free."""
    rows: int = 1
    """Number of sequences decoded at once."""
    choose_warmup: PlanWarmup = plan_cold_start
    """Chooses the initial routed experts where not all of them fit into memory."""

    @property
    def needs_kernels(self) -> bool:
        """Whether torch cannot do this, whatever the base."""
        return (
            self.dtype in QUANTISED_DTYPES
            or self.engine.adapter_dtype != "published"
            or self.engine.deterministic
        )


class RunnableModel(Protocol):
    """A base in memory that can be run; its weights are read-only."""

    @property
    def nbytes(self) -> int:
        """Bytes of its weights."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings for the user about the weights."""

    def prepare(
        self, cache: KVCacheBase, plan: CompiledPlan, *, tokens: int, rows: int = 1
    ) -> None:
        """Prepare to read ``tokens`` tokens of a prompt and to decode ``rows`` sequences."""

    def start_session(
        self,
        cache: KVCacheBase,
        plan: CompiledPlan,
        *,
        progress: Progress = ignore_progress,
        scores: RecordLogits | None = None,
    ) -> DecodeSession:
        """Start or continue a sequence; ``progress`` counts tokens of its prompt and may raise.

        ``scores`` gets the logits of every prompt position that is read.
        """

    @property
    def prefill_parts(self) -> int:
        """Number of parts into which `prefill` splits a pass; 1 where it cannot be split."""

    def prefill(
        self, reading: DecodeSession, ids: Sequence[int], *, between_layers: Callable[[], None]
    ) -> PrefillResult:
        """Read a part of a prompt; call ``between_layers`` between the parts of a pass.

        The callback may call `step` with other sequences; neither result changes by a bit.
        """

    def step(self, texts: Sequence[tuple[DecodeSession, int]]) -> Tensor:
        """Read one more token of each sequence; return logits, float32 [sequences, vocab].

        The logits of a sequence are the same as when it runs alone.
        """

    def matrix(self, module: str) -> Tensor:
        """Return the weights [out, in] of a linear layer, by its module name."""

    @property
    def read_bytes(self) -> int:
        """Bytes of files read for the weights."""

    @property
    def routed(self) -> RoutedExpertStats | None:
        """Routed-expert statistics since loading; None where it has no such experts."""

    @property
    def counters(self) -> Counters | None:
        """Counters of its routed experts, layer by layer; None where nothing is counted."""

    @property
    def experts(self) -> "ExpertCache | None":
        """The owner of expert slots, which applies profiles; None where all are in memory."""

    def time_layers(self, times: LayerTimer) -> AbstractContextManager[None]:
        """Add the time of each part to ``times`` inside a ``with`` block."""

    def free_buffers(self) -> None:
        """Free the tensors shared by all steps of one generation; they count as `buffer_bytes`."""

    @property
    def holds_only_weights(self) -> bool:
        """Whether it holds nothing but its weights."""

    def check_integrity(self) -> None:
        """Assert the invariants that hold between two passes."""

    def close(self) -> None:
        """End its background work; it must not be run afterwards."""


class KVCacheStore(Protocol):
    """The owner of all keys and values, both kept and in use."""

    def allocate(self, request: KVRequest) -> AbstractContextManager[KVAllocation[KVCacheBase]]:
        """Lend a KV cache for one generation, with the rows already computed.

        Raises:
            BudgetError: when it cannot fit.
        """

    def forget(self, cache_key: str) -> None:
        """Drop what is kept for a key."""

    def clear(self) -> None:
        """Drop all that is kept; nothing of it may be in use."""

    @property
    def nbytes(self) -> int:
        """Bytes of all its keys and values."""

    @property
    def cached_bytes(self) -> int:
        """Bytes of the keys and values that are kept and not in use."""

    def check_integrity(self) -> None:
        """Assert the invariants."""

    def check_idle(self) -> None:
        """Assert that nothing is in use."""


class Backend(Protocol):
    """One base in one data type, before it is loaded."""

    @property
    def name(self) -> BackendName:
        """Name of the backend."""

    @property
    def config(self) -> ModelConfig:
        """The base's configuration."""

    @property
    def dtype(self) -> str:
        """Data type of its matrices."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of its weights in memory."""

    @property
    def min_weight_bytes(self) -> int:
        """Bytes without any routed expert in memory; a run needs some of them in addition."""

    @property
    def cache(self) -> CachePlan | None:
        """The cache of routed experts, where not all of them are in memory."""

    @property
    def loading_bytes(self) -> int:
        """Maximum additional bytes while the weights are read."""

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory used by a base on a device."""

    def kv_bytes(self, tokens: int) -> int:
        """Bytes of the keys and values of so many tokens."""

    def buffer_bytes(self, tokens: int, *, width: int = 0, rows: int = 1) -> int:
        """Bytes of a pass over so many tokens, or one token of ``rows`` sequences, without weights.

        ``width`` is that of the widest compiled plan.
        """

    @property
    def compile_spec(self) -> CompileSpec:
        """Target for which plans are compiled."""

    @property
    def kv_layout(self) -> str:
        """Equal for backends that can share one KV store."""

    def create_kv_store(
        self, tiers: AdapterCache, *, kept_limit: int | None = None
    ) -> KVCacheStore:
        """Return a KV store of the layout that its models read.

        ``kept_limit`` limits the bytes kept while no sequence uses them; None: all free memory.
        """

    def load(self, context: LoadContext, *, progress: Progress) -> RunnableModel:
        """Read the weights.

        Raises:
            InvalidPackageError: when its tensors do not match its configuration.
        """


TORCH_DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}
_FLOAT_BYTES = 4
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class TorchBackend:
    """A base that `Decoder` runs."""

    config: ModelConfig
    dtype: str
    device: torch.device = _CPU

    @property
    def name(self) -> BackendName:
        """Name of the backend."""
        return "torch"

    @property
    def weight_bytes(self) -> int:
        """Bytes of its weights in memory; norms and biases stay float32."""
        total, itemsize = 0, parse_torch_dtype(self.dtype).itemsize
        for shape in self.config.tensor_shapes().values():
            total += torch.Size(shape).numel() * (itemsize if len(shape) == 2 else _FLOAT_BYTES)
        return total

    @property
    def min_weight_bytes(self) -> int:
        """Equal to `weight_bytes`: all routed experts are in memory."""
        return self.weight_bytes

    @property
    def cache(self) -> None:
        """None: all routed experts are in memory."""

    @property
    def loading_bytes(self) -> int:
        """0: the files are mapped into memory."""
        return 0

    @property
    def host_bytes(self) -> int:
        """0: no other memory is used."""
        return 0

    @property
    def compile_spec(self) -> CompileSpec:
        """Target for which plans are compiled."""
        config = self.config
        return CompileSpec(config.linear_shapes(), config.hidden_size, torch.float32, self.device)

    def kv_bytes(self, tokens: int) -> int:
        """Bytes of the keys and values of so many tokens."""
        return self.config.count_kv_bytes(tokens, itemsize=_FLOAT_BYTES)

    def buffer_bytes(self, tokens: int, *, width: int = 0, rows: int = 1) -> int:
        """Estimate the maximum bytes of a pass over so many tokens, besides weights and cache.

        Sequences of a batch run one after the other; then all their logits are stacked.
        """
        vocabulary = self.config.vocab_size
        scores = 2 * (rows - 1) * vocabulary * _FLOAT_BYTES
        return estimate_pass_bytes(self.config, tokens) + scores + estimate_sample_bytes(vocabulary)

    @property
    def kv_layout(self) -> str:
        """Equal for backends that can share one KV store."""
        return "torch"

    def create_kv_store(
        self, tiers: AdapterCache, *, kept_limit: int | None = None
    ) -> SequenceKVCache:
        """Return a store of contiguous KV caches."""
        return SequenceKVCache(tiers, cached_limit=kept_limit)

    def load(self, context: LoadContext, *, progress: Progress = ignore_progress) -> "TorchModel":
        """Read the weights."""
        read: list[int] = []

        def count(size: int) -> None:
            read.append(size)
            progress(size)

        weights = load_base_weights(
            context.directory,
            self.config,
            dtype=parse_torch_dtype(self.dtype),
            device=self.device,
            progress=count,
        )
        return TorchModel(Decoder(self.config, weights), weights, sum(read))


@dataclass(frozen=True, slots=True)
class TorchModel:
    """A base that torch runs, one sequence after the other."""

    decoder: "Decoder | CudaGraphDecoder"
    weights: BaseWeights
    read_bytes: int
    """Bytes of files read for the weights."""

    @property
    def nbytes(self) -> int:
        """Bytes of its weights."""
        return self.weights.nbytes

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings for the user about the weights."""
        return self.weights.warnings

    @property
    def routed(self) -> RoutedExpertStats | None:
        """Statistics of resident experts; None where it has no routed experts."""
        return make_resident_stats(self.decoder.config)

    @property
    def counters(self) -> Counters | None:
        """None: torch does not count routed experts."""
        return None

    @property
    def experts(self) -> "ExpertCache | None":
        """None: where all experts are in memory, a profile changes nothing."""
        return None

    def prepare(
        self, cache: KVCacheBase, plan: CompiledPlan, *, tokens: int, rows: int = 1
    ) -> None:
        """Do nothing: torch prepares nothing."""

    def start_session(
        self,
        cache: KVCacheBase,
        plan: CompiledPlan,
        *,
        progress: Progress = ignore_progress,
        scores: RecordLogits | None = None,
    ) -> DecodeSession:
        """Start or continue a sequence."""
        assert isinstance(self.decoder, Decoder)
        assert isinstance(cache, KVCache)
        return DecoderSession(self.decoder, cache, plan.deltas, plan.soft_prompt, progress, scores)

    @property
    def prefill_parts(self) -> int:
        """1: a pass is not split."""
        return 1

    def prefill(
        self, reading: DecodeSession, ids: Sequence[int], *, between_layers: Callable[[], None]
    ) -> PrefillResult:
        """Read a part of a prompt at once."""
        return reading.prefill(ids)

    def step(self, texts: Sequence[tuple[DecodeSession, int]]) -> Tensor:
        """Read one more token of each sequence, one after the other."""
        return step_sequentially(texts)

    def time_layers(self, times: LayerTimer) -> AbstractContextManager[None]:
        """Add the time of each part to ``times`` inside a ``with`` block."""
        return self.decoder.time_layers(times)

    def matrix(self, module: str) -> Tensor:
        """Return the weights [out, in] of a linear layer, in host memory, to compile plans."""
        return self.decoder.matrix(module).cpu()

    def free_buffers(self) -> None:
        """Free all buffers of a generation."""
        self.decoder.free_buffers()

    @property
    def holds_only_weights(self) -> bool:
        """Whether it holds nothing but its weights."""
        return self.decoder.holds_only_weights

    def check_integrity(self) -> None:
        """Do nothing: its weights are read-only."""

    def close(self) -> None:
        """Do nothing: torch's threads belong to the whole process."""


def parse_torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a base's matrices.

    Raises:
        UsageError: for a name without such a dtype.
    """
    if name not in TORCH_DTYPES:
        raise UsageError(
            f"torch does not hold a base in {name[:40]!r}, only in {' or '.join(TORCH_DTYPES)}",
            hint="--dtype float32 is always possible",
        )
    return TORCH_DTYPES[name]
