"""What holds a base and runs it: torch, packed kernels, or CUDA. The runtime sees only these.

A backend knows before anything is loaded what all of it will take, to the byte. A cache, a model
and a plan that are used together come from the same backend.

A base that torch holds and runs: every size, tiny ones in less time than numba's import.
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
from expertctl.engine.moe.counters import Counters
from expertctl.engine.moe.stats import RoutedExpertStats, make_resident_stats
from expertctl.engine.moe.usage_store import ObservableCache
from expertctl.engine.sampling import estimate_sample_bytes
from expertctl.engine.text.prompt import RecordLogits
from expertctl.errors import UsageError
from expertctl.messages import Notify, ignore_notification
from expertctl.package.architectures import ExpertsConfig
from expertctl.package.model_config import ModelConfig
from expertctl.settings import Home
from expertctl.store.quantised_cache import QuantisedCache

if TYPE_CHECKING:
    from expertctl.engine.moe.expert_cache import ExpertCache

BackendName = Literal["torch", "packed", "cuda"]
ExpertWatcher = Callable[[ExpertsConfig, ObservableCache], None]


def ignore_experts(_: ExpertsConfig, __: ObservableCache) -> None:
    """Learn nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadContext:
    """What a base is loaded with: its files, where things may be kept, threads to compute."""

    directory: Path
    home: Home
    copies: QuantisedCache | None = None
    threads: int = 1
    tell: Notify = ignore_notification
    check: Callable[[], None] | None = None
    """Called before each kernel is compiled; what it raises ends that."""
    watch: ExpertWatcher = ignore_experts
    """Gets the owner of routed experts, to learn which are asked for."""


class RunnableModel(Protocol):
    """A base in memory that can be run; its weights are only read."""

    @property
    def nbytes(self) -> int:
        """Bytes of its weights."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a person should know of them."""

    def prepare(
        self, cache: KVCacheBase, plan: CompiledPlan, *, tokens: int, rows: int = 1
    ) -> None:
        """Make beforehand what reading so many tokens of a prompt, and ``rows`` answers, needs."""

    def start_session(
        self,
        cache: KVCacheBase,
        plan: CompiledPlan,
        *,
        progress: Progress = ignore_progress,
        scores: RecordLogits | None = None,
    ) -> DecodeSession:
        """Begin or go on with a text; ``progress`` counts tokens of its prompt and may raise.

        ``scores`` gets the logits of every position of the prompt that is read.
        """

    @property
    def prefill_parts(self) -> int:
        """Into how many parts `prefill` cuts a pass over a prompt; 1 where it cannot be cut."""

    def prefill(
        self, reading: DecodeSession, ids: Sequence[int], *, between_layers: Callable[[], None]
    ) -> PrefillResult:
        """Read a part of a prompt, and call ``between_layers`` between the parts of a pass.

        That may call `step` with other texts; it changes no bit of either.
        """

    def step(self, texts: Sequence[tuple[DecodeSession, int]]) -> Tensor:
        """Read one more token of each of several texts; return scores, float32 [texts, vocab].

        What a text gets is what it would get alone.
        """

    def matrix(self, module: str) -> Tensor:
        """Return the weights [out, in] of a linear layer, by its module name."""

    @property
    def read_bytes(self) -> int:
        """How many bytes of files were read for them."""

    @property
    def routed(self) -> RoutedExpertStats | None:
        """What became of routed experts since it was loaded; None where it has none."""

    @property
    def counters(self) -> Counters | None:
        """What is counted of them, layer by layer; None where nothing is counted."""

    @property
    def experts(self) -> "ExpertCache | None":
        """The owner of their slots, which applies profiles; None where all are in memory."""

    def time_layers(self, times: LayerTimer) -> AbstractContextManager[None]:
        """Add to ``times`` how long each part of what is read meanwhile takes."""

    def free_buffers(self) -> None:
        """Let go of what the passes of a generation share; it was part of their buffers."""

    @property
    def holds_only_weights(self) -> bool:
        """Whether it holds nothing but its weights."""

    def check_integrity(self) -> None:
        """Assert what always holds between two passes."""

    def close(self) -> None:
        """End what it does in the background; it is not run after that."""


class KVCacheStore(Protocol):
    """The owner of keys and values: of those that are kept, and of those that are lent."""

    def allocate(self, request: KVRequest) -> AbstractContextManager[KVAllocation[KVCacheBase]]:
        """Lend room for one generation, with the rows of it that were computed before.

        Raises:
            BudgetError: when it cannot fit.
        """

    def forget(self, cache_key: str) -> None:
        """Drop what is kept for a key."""

    def clear(self) -> None:
        """Drop all that is kept; nothing of it may be lent."""

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values that it holds."""

    @property
    def cached_bytes(self) -> int:
        """Bytes of those that are kept and not lent."""

    def check_integrity(self) -> None:
        """Assert what always holds."""

    def check_idle(self) -> None:
        """Assert that nothing is lent."""


class Backend(Protocol):
    """One base in one dtype, before it is loaded."""

    @property
    def name(self) -> BackendName:
        """Which of them it is."""

    @property
    def config(self) -> ModelConfig:
        """The base's configuration."""

    @property
    def dtype(self) -> str:
        """What its matrices are held in."""

    @property
    def weight_bytes(self) -> int:
        """What its weights take in memory."""

    @property
    def min_weight_bytes(self) -> int:
        """The same where no routed expert is in memory; a run needs some of them besides."""

    @property
    def cache(self) -> CachePlan | None:
        """How its routed experts are held, where not all of them are in memory."""

    @property
    def loading_bytes(self) -> int:
        """What reading them takes besides, at most."""

    @property
    def host_bytes(self) -> int:
        """What they take of the machine's memory where they are in that of a device."""

    def kv_bytes(self, tokens: int) -> int:
        """What the keys and values of so many tokens take."""

    def buffer_bytes(self, tokens: int, *, width: int = 0, rows: int = 1) -> int:
        """What a pass over so many tokens, or one token of ``rows`` texts, needs besides.

        ``width`` is that of the widest compiled plan.
        """

    @property
    def compile_spec(self) -> CompileSpec:
        """What plans are compiled for."""

    @property
    def kv_layout(self) -> str:
        """Equal for backends that can share one keeper of keys and values."""

    def create_kv_store(
        self, tiers: AdapterCache, *, kept_limit: int | None = None
    ) -> KVCacheStore:
        """Return an owner of keys and values of the kind that its models read.

        ``kept_limit``: the most bytes that it keeps when no text has them; None: what is free.
        """

    def load(self, context: LoadContext, *, progress: Progress) -> RunnableModel:
        """Read the weights.

        Raises:
            InvalidPackageError: when its tensors are not those of its configuration.
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
        """Which of the two it is."""
        return "torch"

    @property
    def weight_bytes(self) -> int:
        """What its weights take in memory: norms and biases stay float32."""
        total, itemsize = 0, parse_torch_dtype(self.dtype).itemsize
        for shape in self.config.tensor_shapes().values():
            total += torch.Size(shape).numel() * (itemsize if len(shape) == 2 else _FLOAT_BYTES)
        return total

    @property
    def min_weight_bytes(self) -> int:
        """The same: all of its experts are in memory."""
        return self.weight_bytes

    @property
    def cache(self) -> None:
        """None: all of them are in memory."""

    @property
    def loading_bytes(self) -> int:
        """What reading them takes besides: nothing, as files are mapped into memory."""
        return 0

    @property
    def host_bytes(self) -> int:
        """0: they are in no other memory."""
        return 0

    @property
    def compile_spec(self) -> CompileSpec:
        """What plans are compiled for."""
        config = self.config
        return CompileSpec(config.linear_shapes(), config.hidden_size, torch.float32, self.device)

    def kv_bytes(self, tokens: int) -> int:
        """What the keys and values of so many tokens take."""
        return self.config.count_kv_bytes(tokens, itemsize=_FLOAT_BYTES)

    def buffer_bytes(self, tokens: int, *, width: int = 0, rows: int = 1) -> int:
        """What a pass over so many tokens needs besides weights and cache, at most about.

        Texts of a batch are read one after the other; then the scores of all are put together.
        """
        vocabulary = self.config.vocab_size
        scores = 2 * (rows - 1) * vocabulary * _FLOAT_BYTES
        return estimate_pass_bytes(self.config, tokens) + scores + estimate_sample_bytes(vocabulary)

    @property
    def kv_layout(self) -> str:
        """Equal where one keeper serves."""
        return "torch"

    def create_kv_store(
        self, tiers: AdapterCache, *, kept_limit: int | None = None
    ) -> SequenceKVCache:
        """Return an owner of caches."""
        return SequenceKVCache(tiers, cached_limit=kept_limit)

    def load(self, context: LoadContext, *, progress: Progress = ignore_progress) -> "TorchModel":
        """Read the weights.

        Raises:
            InvalidPackageError: when its tensors are not those of its configuration.
        """
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
    """A base in torch's memory."""

    decoder: Decoder
    weights: BaseWeights
    read_bytes: int
    """How many bytes of files were read for them."""

    @property
    def nbytes(self) -> int:
        """Bytes of its weights."""
        return self.weights.nbytes

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a person should know of them."""
        return self.weights.warnings

    @property
    def routed(self) -> RoutedExpertStats | None:
        """All experts are there; None where it has none."""
        return make_resident_stats(self.decoder.config)

    @property
    def counters(self) -> None:
        """None: where all experts are there, nothing is counted."""

    @property
    def experts(self) -> None:
        """None: where all experts are there, a profile changes nothing."""

    def prepare(
        self, cache: KVCacheBase, plan: CompiledPlan, *, tokens: int, rows: int = 1
    ) -> None:
        """Do nothing: torch makes nothing beforehand."""

    def start_session(
        self,
        cache: KVCacheBase,
        plan: CompiledPlan,
        *,
        progress: Progress = ignore_progress,
        scores: RecordLogits | None = None,
    ) -> DecodeSession:
        """Begin or go on with a text."""
        assert isinstance(cache, KVCache)
        return DecoderSession(self.decoder, cache, plan.deltas, plan.soft_prompt, progress, scores)

    @property
    def prefill_parts(self) -> int:
        """1: a pass is not cut."""
        return 1

    def prefill(
        self, reading: DecodeSession, ids: Sequence[int], *, between_layers: Callable[[], None]
    ) -> PrefillResult:
        """Read a part of a prompt at once."""
        return reading.prefill(ids)

    def step(self, texts: Sequence[tuple[DecodeSession, int]]) -> Tensor:
        """Read one more token of each of several texts, one after the other."""
        return step_sequentially(texts)

    def time_layers(self, times: LayerTimer) -> AbstractContextManager[None]:
        """Add to ``times`` how long each part of what is read meanwhile takes."""
        return self.decoder.time_layers(times)

    def matrix(self, module: str) -> Tensor:
        """Return the weights [out, in] of a linear layer, by its module name."""
        return self.decoder.matrix(module)

    def free_buffers(self) -> None:
        """Let go of what the passes of a generation share."""
        self.decoder.free_shared_tensors()

    @property
    def holds_only_weights(self) -> bool:
        """Whether it holds nothing but its weights."""
        return self.decoder.holds_only_weights

    def check_integrity(self) -> None:
        """Do nothing: its weights are only read."""

    def close(self) -> None:
        """Do nothing: torch's threads are those of the whole process."""


def parse_torch_dtype(name: str) -> torch.dtype:
    """Return the dtype that torch holds matrices in.

    Raises:
        UsageError: for a name that torch has no such dtype for.
    """
    if name not in TORCH_DTYPES:
        raise UsageError(
            f"torch does not hold a base in {name[:40]!r}, only in {' or '.join(TORCH_DTYPES)}",
            hint="--dtype float32 is always possible",
        )
    return TORCH_DTYPES[name]
