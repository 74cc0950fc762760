"""The interface of backends: how a base is loaded, the model in memory, and its keys and values.

A backend knows the memory of everything before loading, to the byte. A KV cache, a model and a plan
that are used together come from the same backend. `load_plan.choose_backend` chooses one. This
module imports neither numba nor torch.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from expertctl.digest import Progress, ignore_progress
from expertctl.engine.adapters.compile import CompiledPlan, CompileSpec
from expertctl.engine.arrays import FloatArray
from expertctl.engine.generation import DecodeSession, SteppedModel
from expertctl.engine.kv.kv_cache import KVAllocation, KVCacheBase, KVRequest
from expertctl.engine.memory.adapter_cache import AdapterCache
from expertctl.engine.moe.cache_plan import CachePlan
from expertctl.engine.moe.counters import Counters, RoutedExpertStats
from expertctl.engine.moe.warmup import PlanWarmup, plan_cold_start
from expertctl.engine.text.prompt import RecordLogits
from expertctl.engine_config import (
    DEFAULT_CONFIG,
    QUANTISED_DTYPES,
    DeviceName,
    Dtype,
    EngineConfig,
)
from expertctl.errors import CountProgress, Notify, ignore_count, ignore_notification
from expertctl.package.model_config import ModelConfig
from expertctl.settings import Home
from expertctl.store.quantised_cache import QuantisationQuality, QuantisedCache

if TYPE_CHECKING:
    from expertctl.engine.moe.expert_cache import ExpertCache

BackendName = Literal["numpy", "packed", "cuda"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadContext:
    """What a base is loaded with: its files, folders for caches, compute threads."""

    directory: Path
    home: Home
    copies: QuantisedCache | None = None
    threads: int = 1
    tell: Notify = ignore_notification
    kernel_progress: CountProgress = ignore_count
    """Gets the numbers of kernels compiled and to compile; its exceptions end the compilation."""


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
    home: Home | None = None
    """Where compiled kernels are cached, to tell whether numba is needed."""
    storages: Mapping[str, str] | None = None
    """What each matrix is stored as, for ``gguf``."""
    choose_warmup: PlanWarmup = plan_cold_start
    """Chooses the initial routed experts where not all of them fit into memory."""

    @property
    def needs_kernels(self) -> bool:
        """Whether only kernels can do this, whatever the base."""
        return (
            self.dtype in {*QUANTISED_DTYPES, "gguf"}
            or self.engine.adapter_dtype != "published"
            or self.engine.deterministic
        )


class RunnableModel(SteppedModel, Protocol):
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

    def matrix(self, module: str) -> FloatArray:
        """Return the weights [out, in] of a linear layer, by its module name."""

    @property
    def read_bytes(self) -> int:
        """Bytes of files read for the weights."""

    @property
    def quality(self) -> QuantisationQuality | None:
        """What the base loses in int8 or int4; None where it is not measured."""

    @property
    def routed(self) -> RoutedExpertStats | None:
        """Routed-expert statistics since loading; None where it has no such experts."""

    @property
    def counters(self) -> Counters | None:
        """Counters of its routed experts, layer by layer; None where nothing is counted."""

    @property
    def experts(self) -> "ExpertCache | None":
        """The owner of expert slots, which applies profiles; None where all are in memory."""

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

    def check_free_row(self, request: KVRequest) -> None:
        """Check that a request need not wait for running sequences, without allocating anything.

        Raises:
            BudgetError: when it has to, however much memory there is.
        """

    @property
    def free_rows(self) -> int | None:
        """Number of sequences that can start beside those that run; None: as many as fit."""

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

    def buffer_bytes(
        self, tokens: int, *, width: int = 0, rows: int = 1, plans: int | None = None
    ) -> int:
        """Bytes of a pass over so many tokens, or one token of ``rows`` sequences, without weights.

        ``width`` is that of the widest compiled plan. ``plans`` is the number of different plans
        in a batch, for backends whose buffers grow with it; None: as few as possible.
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

    def use_threads(self, count: int) -> AbstractContextManager[None]:
        """Make what computes use at most ``count`` threads inside a ``with`` block.

        A backend that gets its threads from the load context limits only its libraries.
        """

    def load(self, context: LoadContext, *, progress: Progress) -> RunnableModel:
        """Read the weights.

        Raises:
            InvalidPackageError: when its tensors do not match its configuration.
        """


def translate_errors(device: DeviceName) -> AbstractContextManager[None]:
    """Translate errors about a full or failed device inside a ``with`` block.

    On a processor nothing is translated. See `devices.translate_device_errors`.
    """
    if device == "cpu":
        return nullcontext()
    from expertctl.engine.torch.devices import translate_device_errors

    return translate_device_errors()
