"""The plain CPU backend: numpy, without compiled kernels.

It runs bases of every size: small ones faster than kernels are compiled, others where kernels do
not support their sizes or numba is missing. All routed experts are in memory. Keys and values are
in pages of rows, which a `BlockPool` allocates.

OpenBLAS, in numpy's own wheels, computes with as many threads as there are cores, or as
``OPENBLAS_NUM_THREADS`` or ``OMP_NUM_THREADS`` say; `use_blas_threads` sets the number for the
whole process, so only a local run or the loop of a server calls it. Other libraries keep their own.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from expertctl.digest import Progress, ignore_progress
from expertctl.engine.adapters.compile import CompiledPlan, CompileSpec
from expertctl.engine.arrays import AnyArray, FloatArray
from expertctl.engine.backend import BackendName, LoadContext
from expertctl.engine.cpu.plain_decoder import PlainDecoder
from expertctl.engine.cpu.plain_layers import estimate_plain_pass_bytes
from expertctl.engine.cpu.plain_weights import (
    PlainWeights,
    check_plain_dtype,
    load_plain_weights,
    loading_scratch_bytes,
    plain_weight_bytes,
)
from expertctl.engine.decoding import LayerTimer, PrefillResult
from expertctl.engine.generation import DecoderSession, DecodeSession, step_sequentially
from expertctl.engine.kv.block_pool import ROW_PAGES, BlockPool, PagedKVCache, estimate_pages_bytes
from expertctl.engine.kv.kv_cache import KVCacheBase
from expertctl.engine.memory.adapter_cache import AdapterCache
from expertctl.engine.moe.counters import Counters, RoutedExpertStats, make_resident_stats
from expertctl.engine.sampling import estimate_sample_bytes
from expertctl.engine.text.prompt import RecordLogits
from expertctl.package.model_config import ModelConfig

if TYPE_CHECKING:
    from expertctl.engine.moe.expert_cache import ExpertCache


_FOLDERS = ("../numpy.libs", ".dylibs", ".libs")
"""Where wheels for Linux and Windows, macOS, and old ones have their libraries."""
_NAMES = tuple(f"{prefix}openblas_{{}}_num_threads{suffix}"
               for prefix in ("scipy_", "") for suffix in ("64_", ""))  # fmt: skip


def get_blas_threads() -> int | None:
    """Return the number of threads of a matrix product; None where it is not known."""
    functions = _find_thread_functions()
    return None if functions is None else functions.get()


@contextmanager
def use_blas_threads(count: int) -> Iterator[None]:
    """Set the number of threads of matrix products for the length of a ``with`` block."""
    functions = _find_thread_functions()
    if functions is None:
        yield
        return
    before = functions.get()
    functions.set(count)
    try:
        yield
    finally:
        functions.set(before)


@dataclass(frozen=True, slots=True)
class _ThreadFunctions:
    """The functions of OpenBLAS that return and set the number of threads."""

    get: Callable[[], int]
    set: Callable[[int], object]


@cache
def _find_thread_functions() -> _ThreadFunctions | None:
    """Return the functions of the library that numpy has loaded; None if it is not OpenBLAS."""
    package = Path(np.__file__).parent
    paths = [path for folder in _FOLDERS for path in (package / folder).glob("*openblas*")]
    for path in paths:
        try:
            library = ctypes.CDLL(str(path.resolve()))
        except OSError:  # it is not one for this machine
            continue
        for name in _NAMES:
            get, change = (getattr(library, name.format(word), None) for word in ("get", "set"))
            if get is not None and change is not None:
                return _ThreadFunctions(get, change)
    return None


_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class PlainBackend:
    """A base that `PlainDecoder` runs."""

    config: ModelConfig
    dtype: str

    @property
    def name(self) -> BackendName:
        """Name of the backend."""
        return "numpy"

    @property
    def weight_bytes(self) -> int:
        """Bytes of its weights in memory; norms and biases stay float32.

        Raises:
            UsageError: for a data type that numpy does not hold a base in.
        """
        check_plain_dtype(self.dtype)
        return plain_weight_bytes(self.config, self.dtype)

    @property
    def min_weight_bytes(self) -> int:
        """Equal to `weight_bytes`: all routed experts are in memory."""
        return self.weight_bytes

    @property
    def cache(self) -> None:
        """None: all routed experts are in memory."""

    @property
    def loading_bytes(self) -> int:
        """Maximum additional bytes while the weights are read."""
        return loading_scratch_bytes(self.config, self.dtype)

    @property
    def host_bytes(self) -> int:
        """0: no other memory is used."""
        return 0

    @property
    def compile_spec(self) -> CompileSpec:
        """Target for which plans are compiled."""
        places = self.config.stored_places
        return CompileSpec(
            self.config.linear_shapes(),
            self.config.hidden_size,
            places=None if places.are_usual else places,
        )

    def kv_bytes(self, tokens: int) -> int:
        """Bytes of the keys and values of so many tokens, in whole pages."""
        return estimate_pages_bytes(self.config, tokens, ROW_PAGES)

    def buffer_bytes(
        self, tokens: int, *, width: int = 0, rows: int = 1, plans: int | None = None
    ) -> int:
        """Estimate the maximum bytes of a pass over so many tokens, besides weights and pages.

        Sequences of a batch run one after the other, whatever the number of ``plans``; then all
        their logits are stacked. A failed step restores the states of all.
        """
        vocabulary = self.config.vocab_size
        scores = 2 * (rows - 1) * vocabulary * _FLOAT_BYTES
        passing = estimate_plain_pass_bytes(self.config, tokens, dtype=self.dtype, width=width)
        states = (rows - 1) * self.config.state_bytes
        return passing + scores + states + estimate_sample_bytes(vocabulary)

    @property
    def kv_layout(self) -> str:
        """Equal for backends that can share one KV store."""
        return ROW_PAGES.name

    def create_kv_store(self, tiers: AdapterCache, *, kept_limit: int | None = None) -> BlockPool:
        """Return the owner of KV pages."""
        return BlockPool(tiers, layout=ROW_PAGES, cached_limit=kept_limit)

    def use_threads(self, count: int) -> AbstractContextManager[None]:
        """Make numpy's matrix products use at most ``count`` threads inside a ``with`` block."""
        return use_blas_threads(count)

    def load(self, context: LoadContext, *, progress: Progress = ignore_progress) -> "PlainModel":
        """Read the weights.

        Raises:
            InvalidPackageError: when its tensors do not match its configuration.
            UsageError: for a data type that numpy does not hold a base in.
        """
        check_plain_dtype(self.dtype)
        weights = load_plain_weights(
            context.directory, self.config, dtype=self.dtype, progress=progress
        )
        return PlainModel(PlainDecoder(self.config, weights), weights)


@dataclass(frozen=True, slots=True)
class PlainModel:
    """A base that numpy runs, one sequence after the other."""

    decoder: PlainDecoder
    weights: PlainWeights

    @property
    def nbytes(self) -> int:
        """Bytes of its weights."""
        return self.weights.nbytes

    @property
    def read_bytes(self) -> int:
        """Bytes of files read for the weights."""
        return self.weights.read_bytes

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings for the user about the weights."""
        return self.weights.warnings

    @property
    def quality(self) -> None:
        """None: nothing is quantised."""

    @property
    def routed(self) -> RoutedExpertStats | None:
        """Statistics of resident experts; None where it has no routed experts."""
        return make_resident_stats(self.decoder.config)

    @property
    def counters(self) -> Counters | None:
        """None: routed experts are not counted."""
        return None

    @property
    def experts(self) -> "ExpertCache | None":
        """None: where all experts are in memory, a profile changes nothing."""
        return None

    def prepare(
        self, cache: KVCacheBase, plan: CompiledPlan, *, tokens: int, rows: int = 1
    ) -> None:
        """Do nothing: there is nothing to prepare."""

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
        return DecoderSession(self.decoder, cache, plan.deltas, plan.soft_prompt, progress, scores)

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
        """Read one more token of each sequence, one after the other."""
        return step_sequentially(texts)

    def time_layers(self, times: LayerTimer) -> AbstractContextManager[None]:
        """Add the time of each part to ``times`` inside a ``with`` block."""
        return self.decoder.time_layers(times)

    def matrix(self, module: str) -> FloatArray:
        """Return the weights [out, in] of a linear layer, as a read-only view."""
        return self.decoder.matrix(module)

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
        """Do nothing: it has no background work."""
