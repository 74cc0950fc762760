"""The torch backend: bases of every size."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from expertctl.digest import Progress, ignore_progress
from expertctl.engine.adapters.compile import CompiledPlan, CompileSpec, TorchPlacement
from expertctl.engine.arrays import AnyArray, FloatArray
from expertctl.engine.backend import BackendName, LoadContext
from expertctl.engine.decoding import LayerTimer, PrefillResult
from expertctl.engine.generation import DecoderSession, DecodeSession, step_sequentially
from expertctl.engine.kv.kv_cache import KVCacheBase
from expertctl.engine.memory.adapter_cache import AdapterCache
from expertctl.engine.moe.counters import Counters, RoutedExpertStats, make_resident_stats
from expertctl.engine.sampling import estimate_sample_bytes
from expertctl.engine.text.prompt import RecordLogits
from expertctl.engine.torch.decoder import Decoder, estimate_pass_bytes
from expertctl.engine.torch.devices import use_torch_threads
from expertctl.engine.torch.plan import to_array
from expertctl.engine.torch.sequence_cache import KVCache, SequenceKVCache
from expertctl.engine.torch.weights import BaseWeights, load_base_weights
from expertctl.errors import UsageError
from expertctl.package.model_config import ModelConfig

if TYPE_CHECKING:
    from expertctl.engine.moe.expert_cache import ExpertCache
    from expertctl.engine.torch.cuda_graph_decoder import CudaGraphDecoder

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
        return self.config.count_weight_bytes(itemsize=parse_torch_dtype(self.dtype).itemsize)

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
        config, placement = self.config, TorchPlacement(self.device.type)
        return CompileSpec(config.linear_shapes(), config.hidden_size, placement)

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

    def use_threads(self, count: int) -> AbstractContextManager[None]:
        """Set torch's thread count inside a ``with`` block."""
        return use_torch_threads(count)

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
