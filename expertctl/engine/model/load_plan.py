"""Outlines of experts: shapes without weights, so that what a plan costs is known before it loads.

Of every file only the beginning is read: what describes the tensors. The rest of its buffer stays
untouched zeros, which take no memory. An outline is loaded like the expert itself, so both cost the
same; its numbers are never used.

A base on its way into memory: its configuration and tokenizer first, its weights when needed.

What a prompt costs is known before the weights are read, so what cannot fit is refused at once.
Only `choose_backend` decides what runs a base.
"""

import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from expertctl.digest import Digest, FileDigest, Progress, ignore_progress
from expertctl.engine.adapters.compile import (
    CompileSpec,
    WeightedAdapter,
    fold_plan,
    rename_modules,
)
from expertctl.engine.adapters.experts import (
    ExpertSource,
    LocalExpert,
    MemoryFiles,
    dora_scale_bytes,
    estimate_dora_scratch,
    placeholder_dora_scales,
)
from expertctl.engine.adapters.load import (
    READ_SLACK_BYTES,
    LoadedAdapter,
    estimate_adapter_bytes,
    load_adapter,
)
from expertctl.engine.memory.adapter_cache import AdapterCache, Tier
from expertctl.engine.model.backends import Backend, LoadContext, RunnableModel, TorchBackend
from expertctl.engine.moe.cache_plan import fits_in_memory
from expertctl.engine.moe.warmup import PlanWarmup, plan_cold_start
from expertctl.engine.text.tokenizer import Tokenizer
from expertctl.errors import IncompatibleError
from expertctl.package.model_config import ModelConfig, read_model_config
from expertctl.package.read import read_package
from expertctl.package.tensor_file import ADAPTER_LIMITS, LENGTH_BYTES
from expertctl.package.verify import accept_unsigned, verify_contents
from expertctl.routing.numerics import SMALL_BASE
from expertctl.routing.request import (
    QUANTISED_DTYPES,
    AdapterDtype,
    DeviceName,
    Dtype,
    MoeColdOption,
    MoeMiss,
)
from expertctl.schema.manifest import Manifest
from expertctl.store.base_record import StoredBase
from expertctl.store.bases import BaseStore
from expertctl.store.refs import StoredExpert
from expertctl.store.store import Store
from expertctl.trust.trust_store import TrustStore

if TYPE_CHECKING:
    from expertctl.engine.cpu.backend import PackedBackend


_WHOLE_FILE_BYTES = 1 << 20
"""A file of at most so many bytes is kept whole: no text that a run reads is larger."""


def read_stored_outline(store: Store, expert: StoredExpert, manifest: Manifest) -> ExpertSource:
    """Offer the outline of an installed expert."""
    paths = {file.path: (store.paths.blob(file.digest), file) for file in expert.files}
    cost = estimate_adapter_bytes(manifest, {file.path: file.size for file in expert.files})
    files = _StoredHeaders(paths)
    return ExpertSource(
        manifest, expert.content_digest, cost, lambda: load_adapter(manifest, files)
    )


def read_local_outline(path: Path, *, trust: TrustStore) -> LocalExpert:
    """Read a ``.expert`` file, verify it, and keep its outline; its cost is that of all its files.

    Raises:
        InvalidPackageError: when the file is malformed.
        TrustError: when it is signed, but not with a key that is trusted for it.
    """
    sink = _HeaderSink()
    contents = read_package(path, sink=sink)
    signed = contents.signature is not None
    package = verify_contents(contents, trust) if signed else accept_unsigned(contents)
    files = MemoryFiles({file.path: file for file in contents.files}, sink.buffers)
    outline = load_adapter(contents.manifest, files)  # once: reading tensors may move their bytes
    source = ExpertSource(contents.manifest, contents.content_digest, sink.nbytes, lambda: outline)
    return LocalExpert(package, source, files)


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """What a plan will take besides its experts' own bytes, at most, and how wide it will be."""

    nbytes: int = 0
    width: int = 0


def estimate_plan_memory(
    chain: Sequence[tuple[ExpertSource, float]], spec: CompileSpec
) -> MemoryEstimate:
    """Return what `compiled` will take for a chain of outlines.

    Raises:
        InvalidPackageError: when the beginning of a file is malformed.
        IncompatibleError: when an expert does not fit the base.
    """
    if not chain:
        return MemoryEstimate()
    adapters = [(rename_modules(source.load(), spec.shapes), weight) for source, weight in chain]
    used = [adapter for adapter, weight in adapters if weight != 0.0]
    links = [
        WeightedAdapter(adapter, weight, placeholder_dora_scales(adapter))
        for adapter, weight in adapters
    ]
    composition = fold_plan(links, spec)
    gains = [dora_scale_bytes(adapter) for adapter in used]
    multiplying = composition.nbytes + composition.scratch_bytes + sum(gains)
    return MemoryEstimate(max(multiplying, _estimate_scale_peak(used, spec)), composition.width)


def _estimate_scale_peak(adapters: Sequence[LoadedAdapter], spec: CompileSpec) -> int:
    """Return the most that the gains take while one of them is being computed."""
    most = done = 0
    for adapter in adapters:
        done += dora_scale_bytes(adapter)
        most = max(most, done + estimate_dora_scratch(adapter, spec))
    return most


@dataclass(frozen=True, slots=True)
class _StoredHeaders:
    """The beginnings of the files of an installed expert; digests are checked when it is loaded."""

    paths: Mapping[str, tuple[Path, FileDigest]]

    def read_file(self, path: str) -> memoryview:
        blob, expected = self.paths[path]
        buffer = _allocate_zeros(expected.size)
        with blob.open("rb") as stream:
            stream.readinto(buffer[: min(LENGTH_BYTES, expected.size)])
            stream.readinto(buffer[LENGTH_BYTES : _compute_header_size(buffer, expected.size)])
        return buffer


class _HeaderSink:
    """Keeps the beginnings of the files of one package while the reader hashes all of them."""

    def __init__(self) -> None:
        self.buffers: dict[Digest, memoryview] = {}
        self.nbytes = 0

    @contextmanager
    def open(self, digest: Digest, size: int) -> Iterator[Callable[[memoryview], None]]:
        buffer, filled = _allocate_zeros(size), 0
        self.nbytes += len(buffer)

        def write(chunk: memoryview) -> None:
            nonlocal filled
            begin, filled = filled, filled + len(chunk)
            if begin == 0:
                buffer[: min(len(chunk), LENGTH_BYTES)] = chunk[:LENGTH_BYTES]
            kept = chunk[: max(0, _compute_header_size(buffer, size) - begin)]
            buffer[begin : begin + len(kept)] = kept

        yield write
        self.buffers[digest] = buffer


def _compute_header_size(buffer: memoryview, size: int) -> int:
    """Return how many bytes describe the rest; a small file may be a text, so all of it does."""
    if size <= _WHOLE_FILE_BYTES:
        return size
    length = int.from_bytes(buffer[:LENGTH_BYTES], "little")
    return min(size, LENGTH_BYTES + min(length, ADAPTER_LIMITS.header_bytes))


def _allocate_zeros(size: int) -> memoryview:
    return memoryview(mmap.mmap(-1, size + READ_SLACK_BYTES))


TORCH_MAX_BYTES = SMALL_BASE
"""A base of fewer bytes is run by torch, if it has no routed experts and torch can do it."""


@dataclass(frozen=True, slots=True)
class LoadConfig:
    """How a run wants its base and experts held, and whether it wants the same bits always."""

    dtype: Dtype = "float32"
    adapter_dtype: AdapterDtype = "published"
    deterministic: bool = False
    device: DeviceName = "cpu"
    moe_miss: MoeMiss = "exact"
    moe_skip_cap: float = 1.0
    moe_cold: MoeColdOption = "auto"
    memory_limit: int | None = None
    """Bytes of memory for all; routed experts that do not fit stay on the disk."""
    headroom: int = 0
    """Bytes that a run is known to take besides the base; slots of routed experts leave them."""
    rows: int = 1
    """How many texts are read at once."""
    choose_warmup: PlanWarmup = plan_cold_start
    """How routed experts begin where not all of them fit into memory."""

    @property
    def needs_kernels(self) -> bool:
        """Whether torch cannot do that, whatever the base is."""
        return (
            self.dtype in QUANTISED_DTYPES
            or self.adapter_dtype != "published"
            or self.deterministic
        )


@dataclass(frozen=True, slots=True)
class OpenBase:
    """A base whose files are those that were added; no weights are in memory."""

    stored: StoredBase
    tokenizer: Tokenizer
    backend: Backend
    warnings: tuple[str, ...] = ()

    @property
    def config(self) -> ModelConfig:
        """What its configuration says."""
        return self.backend.config

    @property
    def weight_bytes(self) -> int:
        """What its weights take in memory."""
        return self.backend.weight_bytes

    @property
    def context(self) -> int:
        """How many tokens it reads, with the answer."""
        return self.config.max_positions

    def kv_bytes(self, tokens: int) -> int:
        """What the keys and values of so many tokens take."""
        return self.backend.kv_bytes(tokens)

    def buffer_bytes(self, tokens: int, *, width: int = 0, rows: int = 1) -> int:
        """What reading the weights, and then a pass over so many tokens, needs besides."""
        passing = self.backend.buffer_bytes(tokens, width=width, rows=rows)
        return max(passing, self.backend.loading_bytes)

    def has_same_weights(self, other: "OpenBase") -> bool:
        """Tell whether the weights of another base are these, held in the same way."""
        return self._weights_key == other._weights_key

    @property
    def _weights_key(self) -> tuple[object, ...]:
        backend = self.backend
        held = backend.name, backend.dtype, backend.cache
        return self.stored.path, self.stored.identity, *held


def open_base(
    bases: BaseStore,
    stored: StoredBase,
    config: LoadConfig,
    *,
    rehash: bool,
    torch_below: int = TORCH_MAX_BYTES,
) -> OpenBase:
    """Check the files of a base, by every byte with ``rehash``, and read the small ones.

    Raises:
        BaseMismatchError: when they are not those that were added.
        IncompatibleError: when no decoder of ours supports such a model in such a dtype.
    """
    if rehash:
        bases.rehash(stored)
    else:
        bases.check(stored)
    backend, warnings = choose_backend(
        read_model_config(stored.path), config, torch_below=torch_below
    )
    return OpenBase(stored, Tokenizer.open(stored.path), backend, warnings)


def choose_backend(
    config: ModelConfig, load_config: LoadConfig, *, torch_below: int = TORCH_MAX_BYTES
) -> tuple[Backend, tuple[str, ...]]:
    """Return what runs a base, and what a person should know of that.

    On a CUDA device there is one way. On a processor torch runs small bases. Kernels run large
    ones, those of routed experts, which are to answer with the same bits in any memory, and what
    torch cannot do. Where kernels do not support the sizes of a base, torch runs it; a warning says
    so if it is large, or if part of it would have to stay on the disk.

    Raises:
        IncompatibleError: when kernels do not support the sizes, nor torch what is wished.
    """
    if load_config.device == "cuda":
        return _choose_cuda_backend(config, load_config), ()
    if load_config.needs_kernels:
        return _choose_packed_backend(config, load_config).with_warmup(
            load_config.choose_warmup
        ), ()
    plain = TorchBackend(config, load_config.dtype)
    is_small = plain.weight_bytes < torch_below
    if is_small and config.experts is None:
        return plain, ()
    try:
        packed = _choose_packed_backend(config, load_config)
    except IncompatibleError as error:
        if is_small and fits_in_memory(plain.weight_bytes, load_config.memory_limit):
            return plain, ()
        return plain, (f"torch runs the base, which takes longer: {error.message}",)
    return packed.with_warmup(load_config.choose_warmup), ()


def _choose_cuda_backend(config: ModelConfig, load_config: LoadConfig) -> Backend:
    """Return the backend of captured steps; a wish that it cannot meet was refused before."""
    from expertctl.engine.model.cuda_backend import CudaBackend

    assert not load_config.needs_kernels, (
        "a CUDA device holds float32 and bf16, experts as published"
    )
    return CudaBackend.choose(
        config,
        load_config.dtype,
        memory_limit=load_config.memory_limit,
        miss=load_config.moe_miss,
        cap=load_config.moe_skip_cap,
        headroom=load_config.headroom,
    ).with_warmup(load_config.choose_warmup)


def _choose_packed_backend(config: ModelConfig, load_config: LoadConfig) -> "PackedBackend":
    """Return the kernels; only now numba is imported, which takes a third of a second."""
    from expertctl.engine.cpu.backend import PackedBackend

    return PackedBackend.choose(
        config,
        load_config.dtype,
        load_config.adapter_dtype,
        memory_limit=load_config.memory_limit,
        miss=load_config.moe_miss,
        cap=load_config.moe_skip_cap,
        cold=load_config.moe_cold,
        rows=load_config.rows,
        headroom=load_config.headroom,
    )


class BaseSlot:
    """The owner of the one base in memory; another one takes its place."""

    def __init__(self, tiers: AdapterCache, *, on_drop: Callable[[], None] = lambda: None) -> None:
        """Begin without a base; ``dropping`` is called before one that is in memory goes."""
        self._tiers, self._dropping = tiers, on_drop
        self._base: OpenBase | None = None
        self._model: RunnableModel | None = None
        self.read_bytes = 0
        """How many bytes of files were read for bases so far."""

    def reserve(self, base: OpenBase) -> None:
        """Make room for a base, unless it is there.

        Raises:
            BudgetError: when it does not fit.
        """
        if self._base is not None and self._base.has_same_weights(base):
            return
        self.unload()
        what = f"the base {base.stored.name}"
        self._tiers.reserve(Tier.DEVICE, "base", base.weight_bytes, what=what)
        try:
            self._tiers.reserve(Tier.RAM, "base", base.backend.host_bytes, what=what)
        except BaseException:
            self._tiers.release(Tier.DEVICE, "base", base.weight_bytes)
            raise
        self._base = base

    @property
    def nbytes(self) -> int:
        """Bytes that are reserved."""
        return 0 if self._base is None else self._base.weight_bytes

    @property
    def is_loaded(self) -> bool:
        """Whether the weights of the base that room was made for are there."""
        return self._model is not None

    def load(self, context: LoadContext, *, progress: Progress = ignore_progress) -> RunnableModel:
        """Return the base that room was made for, reading its weights if they are absent.

        Raises:
            InvalidPackageError: when its tensors are not those of its configuration.
        """
        assert self._base is not None, "reserve comes first"
        if self._model is None:
            self._model = self._base.backend.load(context, progress=progress)
            self.read_bytes += self._model.read_bytes
        return self._model

    def unload(self) -> None:
        """Let go of the base."""
        model, self._model = self._model, None  # what is closed is not run again
        if model is not None:
            self._dropping()  # a watcher would keep its memory
            model.close()
        del model
        if self._base is not None:
            base, self._base = self._base, None
            self._tiers.release(Tier.DEVICE, "base", base.weight_bytes)
            self._tiers.release(Tier.RAM, "base", base.backend.host_bytes)

    def check_integrity(self) -> None:
        """Assert that between runs a loaded base takes exactly what was reserved for it."""
        assert self._model is None or self._base is not None
        if self._model is not None and self._base is not None:
            assert self._model.nbytes == self._base.weight_bytes
            assert self._model.holds_only_weights
            self._model.check_integrity()
