"""From files to memory: outlines of experts, the choice of a backend, and the loaded base.

An outline has the shapes of an expert without its weights, so the memory of a plan is known before
loading. Only the header of each file is read; the rest of its buffer is untouched zero pages, which
take no memory. An outline is loaded like the expert itself, so both cost the same; its numbers are
never used.

Of a base, the configuration and tokenizer are read first, the weights when needed. The memory of a
prompt is known before the weights are read, so a request that cannot fit is refused at once. Only
`choose_backend` decides which backend runs a base.
"""

import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from expertctl.digest import Digest, FileDigest, Progress, ignore_progress
from expertctl.engine.adapters.compile import (
    CompileSpec,
    WeightedAdapter,
    fold_plan,
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
from expertctl.engine.backend import Backend, LoadConfig, LoadContext, RunnableModel
from expertctl.engine.cpu.plain_backend import PlainBackend
from expertctl.engine.memory.adapter_cache import AdapterCache, Tier
from expertctl.engine.moe.cache_plan import fits_in_memory
from expertctl.engine.text.tokenizer import Tokenizer
from expertctl.engine_config import Dtype
from expertctl.errors import ExpertError, IncompatibleError, NotFoundError, format_install_command
from expertctl.package.base_tensors import read_storages
from expertctl.package.model_config import ModelConfig, read_model_config
from expertctl.package.read import accept_unsigned, read_package, verify_contents
from expertctl.package.tensor_file import ADAPTER_LIMITS, LENGTH_BYTES
from expertctl.routing.base_dtype import SMALL_BASE, choose_dtype
from expertctl.schema.manifest import Manifest
from expertctl.settings import Home
from expertctl.store.base_record import StoredBase
from expertctl.store.bases import BaseStore
from expertctl.store.refs import StoredExpert
from expertctl.store.store import Store
from expertctl.trust.trust_store import TrustStore

if TYPE_CHECKING:
    from expertctl.engine.cpu.backend import PackedBackend


_WHOLE_FILE_BYTES = 1 << 20
"""Files up to this size are kept complete: every text file that a run reads is smaller."""


def read_stored_outline(store: Store, expert: StoredExpert, manifest: Manifest) -> ExpertSource:
    """Return a source of the outline of an installed expert."""
    paths = {file.path: (store.paths.blob(file.digest), file) for file in expert.files}
    cost = estimate_adapter_bytes(manifest, {file.path: file.size for file in expert.files})
    files = _StoredHeaders(paths)
    return ExpertSource(
        manifest, expert.content_digest, cost, lambda: load_adapter(manifest, files)
    )


def read_local_outline(path: Path, *, trust: TrustStore) -> LocalExpert:
    """Read and verify a ``.expert`` file, and keep its outline; its cost is that of all its files.

    Raises:
        InvalidPackageError: when the file is malformed.
        TrustError: when it is signed with a key that is not trusted for it.
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
    """Maximum bytes of a plan besides its experts' own, and its width."""

    nbytes: int = 0
    width: int = 0
    uses_experts: bool = False
    """Whether the plan uses bytes of an expert in place; then none of them is evicted."""


def estimate_plan_memory(
    chain: Sequence[tuple[ExpertSource, float]], spec: CompileSpec
) -> MemoryEstimate:
    """Estimate the memory of the compiled plan of a chain of outlines.

    Raises:
        InvalidPackageError: when the header of a file is malformed.
        IncompatibleError: when an expert does not fit the base.
    """
    if not chain:
        return MemoryEstimate()
    adapters = [(spec.adapt(source.load()), weight) for source, weight in chain]
    used = [adapter for adapter, weight in adapters if weight != 0.0]
    links = [
        WeightedAdapter(adapter, weight, placeholder_dora_scales(adapter))
        for adapter, weight in adapters
    ]
    composition = fold_plan(links, spec)
    gains = [dora_scale_bytes(adapter) for adapter in used]
    multiplying = composition.nbytes + composition.scratch_bytes + sum(gains)
    most = max(multiplying, _estimate_scale_peak(used, spec))
    return MemoryEstimate(most, composition.width, composition.shares_adapter_memory)


def _estimate_scale_peak(adapters: Sequence[LoadedAdapter], spec: CompileSpec) -> int:
    """Return the peak bytes of DoRA magnitude scales while they are computed."""
    most = done = 0
    for adapter in adapters:
        done += dora_scale_bytes(adapter)
        most = max(most, done + estimate_dora_scratch(adapter, spec))
    return most


@dataclass(frozen=True, slots=True)
class _StoredHeaders:
    """File headers of an installed expert; digests are checked when the expert is loaded."""

    paths: Mapping[str, tuple[Path, FileDigest]]

    def read_file(self, path: str) -> memoryview:
        blob, expected = self.paths[path]
        buffer = _allocate_zeros(expected.size)
        with blob.open("rb") as stream:
            stream.readinto(buffer[: min(LENGTH_BYTES, expected.size)])
            stream.readinto(buffer[LENGTH_BYTES : _compute_header_size(buffer, expected.size)])
        return buffer


class _HeaderSink:
    """Keeps the file headers of one package while the reader hashes all of it."""

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
    """Return the size of the header; a small file may be a text and is kept complete."""
    if size <= _WHOLE_FILE_BYTES:
        return size
    length = int.from_bytes(buffer[:LENGTH_BYTES], "little")
    return min(size, LENGTH_BYTES + min(length, ADAPTER_LIMITS.header_bytes))


def _allocate_zeros(size: int) -> memoryview:
    return memoryview(mmap.mmap(-1, size + READ_SLACK_BYTES))


_MANY_TOKENS = 1 << 16
"""So many that states of a sequence, if it has any, count by the token."""
NUMPY_MAX_BYTES = SMALL_BASE
"""Bases of fewer bytes run in numpy, if they have no routed experts and need no kernels."""


@dataclass(frozen=True, slots=True)
class OpenBase:
    """A base whose files were checked against the store; no weights are in memory."""

    stored: StoredBase
    tokenizer: Tokenizer
    backend: Backend
    warnings: tuple[str, ...] = ()

    @property
    def config(self) -> ModelConfig:
        """The base's configuration."""
        return self.backend.config

    @property
    def weight_bytes(self) -> int:
        """Bytes of its weights in memory."""
        return self.backend.weight_bytes

    @property
    def context(self) -> int:
        """Context length in tokens, answer included."""
        return self.config.max_positions

    def kv_bytes(self, tokens: int) -> int:
        """Bytes of the keys and values of so many tokens."""
        return self.backend.kv_bytes(tokens)

    def buffer_bytes(
        self, tokens: int, *, width: int = 0, rows: int = 1, plans: int | None = None
    ) -> int:
        """Bytes needed to read the weights and then to run a pass over so many tokens."""
        passing = self.backend.buffer_bytes(tokens, width=width, rows=rows, plans=plans)
        return max(passing, self.backend.loading_bytes)

    def use_threads(self, count: int) -> AbstractContextManager[None]:
        """Make what computes use at most ``count`` threads inside a ``with`` block."""
        return self.backend.use_threads(count)

    def has_same_weights(self, other: "OpenBase") -> bool:
        """Return whether another base has the same weights in the same data types."""
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
    numpy_below: int = NUMPY_MAX_BYTES,
) -> OpenBase:
    """Check the files of a base, by every byte with ``rehash``, and read the small ones.

    Raises:
        BaseMismatchError: when they differ from those that were registered.
        IncompatibleError: when none of our decoders supports such a model in such a dtype.
    """
    if rehash:
        bases.rehash(stored)
    else:
        bases.check(stored)
    model = read_model_config(stored.path)
    backend, warnings = choose_backend(
        model, add_storages(config, stored.path, model), numpy_below=numpy_below
    )
    return OpenBase(stored, Tokenizer.open(stored.path), backend, warnings)


def add_storages(load_config: LoadConfig, directory: Path, config: ModelConfig) -> LoadConfig:
    """Return the configuration with what the matrices of a base are stored as, if it depends on it.

    Raises as `read_base_tensors`.
    """
    if load_config.dtype != "gguf":
        return load_config
    return replace(load_config, storages=read_storages(directory, config))


def choose_backend(
    config: ModelConfig, load_config: LoadConfig, *, numpy_below: int = NUMPY_MAX_BYTES
) -> tuple[Backend, tuple[str, ...]]:
    """Return the backend of a base, and warnings for the user.

    A CUDA device has one backend. On a processor numpy runs small bases. Kernels run large ones,
    bases with routed experts, which must give the same bits with any amount of memory, and options
    that numpy does not support. Where there are no kernels, or none for the sizes of a base, numpy
    runs it, with a warning if it is large or if part of it would have to stay on the disk.

    Raises:
        IncompatibleError: when neither kernels nor numpy support the base with these options.
        NotFoundError: when options need kernels, and numba is not installed.
    """
    if load_config.engine.device == "cuda":
        return _choose_cuda_backend(config, load_config), ()
    if load_config.needs_kernels:
        packed = _choose_packed_backend(config, load_config)
        return packed.with_warmup(load_config.choose_warmup), ()
    plain = PlainBackend(config, load_config.dtype)
    is_small = plain.weight_bytes < numpy_below
    if is_small and config.experts is None:
        return plain, ()
    try:
        packed = _choose_packed_backend(config, load_config)
    except (IncompatibleError, NotFoundError) as error:
        if is_small and fits_in_memory(plain.weight_bytes, load_config.memory_limit):
            return plain, ()
        return plain, (f"numpy runs the base, which is slower: {error.message}",)
    return packed.with_warmup(load_config.choose_warmup), ()


def _choose_cuda_backend(config: ModelConfig, load_config: LoadConfig) -> Backend:
    """Return the CUDA backend; options that it does not support were refused before."""
    from expertctl.engine.torch.cuda_backend import CudaBackend

    if config.experts is not None and config.delta_net is not None:
        raise IncompatibleError(
            f"a CUDA device cannot run the architecture {config.architecture}: it has routed "
            "experts and layers with a gated DeltaNet",
            hint="on a processor numpy runs it in float32 or bf16: --device cpu",
        )
    assert not load_config.needs_kernels, (
        "a CUDA device holds float32 and bf16, experts as published"
    )
    return CudaBackend.choose(config, load_config).with_warmup(load_config.choose_warmup)


def _choose_packed_backend(config: ModelConfig, load_config: LoadConfig) -> "PackedBackend":
    """Return the packed backend; numba is only imported to compile kernels.

    Raises:
        IncompatibleError: for layers or sizes that the kernels do not support.
        NotFoundError: when numba is missing or cannot be imported.
    """
    config.require_kernels()
    if (problem := _find_numba_problem(load_config.home)) is not None:
        raise NotFoundError(
            f"the kernels of the processor need numba, which {problem}",
            hint=format_install_command("engine"),
        )
    from expertctl.engine.cpu.backend import PackedBackend

    return PackedBackend.choose(config, load_config)


def _find_numba_problem(home: Home | None) -> str | None:
    """Return why numba cannot compile kernels, as far as it has to.

    Where kernels are stored it may not have to, so that its import is not tried.
    """
    from expertctl.engine.kernels.jit import has_stored_code  # hashes the sources of kernels

    if find_spec("numba") is None:
        return "is not installed"
    if home is None or has_stored_code(home):
        return None
    try:
        import_module("numba")
    except (ImportError, OSError) as error:  # OSError: a library cannot be loaded
        return f"cannot be imported: {error}"
    return None


class BaseSlot:
    """The owner of the one base in memory; loading another one replaces it."""

    def __init__(self, tiers: AdapterCache, *, on_drop: Callable[[], None] = lambda: None) -> None:
        """Start without a base; ``on_drop`` is called before a base in memory is dropped."""
        self._tiers, self._dropping = tiers, on_drop
        self._base: OpenBase | None = None
        self._model: RunnableModel | None = None
        self.read_bytes = 0
        """Total bytes of files read for bases."""

    def reserve(self, base: OpenBase) -> None:
        """Reserve memory for a base, unless it is the current one.

        Raises:
            BudgetError: when it does not fit.
        """
        if self.has(base):
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

    def has(self, base: OpenBase) -> bool:
        """Return whether a base is the current one."""
        return self._base is not None and self._base.has_same_weights(base)

    @property
    def nbytes(self) -> int:
        """Reserved bytes."""
        return 0 if self._base is None else self._base.weight_bytes

    @property
    def is_loaded(self) -> bool:
        """Whether the weights of the reserved base are loaded."""
        return self._model is not None

    def load(self, context: LoadContext, *, progress: Progress = ignore_progress) -> RunnableModel:
        """Return the reserved base, reading its weights if they are not loaded.

        Raises:
            InvalidPackageError: when its tensors do not match its configuration.
        """
        assert self._base is not None, "reserve comes first"
        if self._model is None:
            self._model = self._base.backend.load(context, progress=progress)
            self.read_bytes += self._model.read_bytes
        return self._model

    def unload(self) -> None:
        """Drop the base."""
        model, self._model = self._model, None  # a closed model is not run again
        if model is not None:
            self._dropping()  # a watcher would keep its memory
            model.close()
        del model
        if self._base is not None:
            base, self._base = self._base, None
            self._tiers.release(Tier.DEVICE, "base", base.weight_bytes)
            self._tiers.release(Tier.RAM, "base", base.backend.host_bytes)

    def check_integrity(self) -> None:
        """Assert that between runs a loaded base uses exactly its reserved bytes."""
        assert self._model is None or self._base is not None
        if self._model is not None and self._base is not None:
            assert self._model.nbytes == self._base.weight_bytes
            assert self._model.holds_only_weights
            self._model.check_integrity()


def estimate_base_sizes(base: StoredBase) -> tuple[Mapping[Dtype, int], int | None]:
    """Return the weight bytes of a base in each supported dtype, and the KV bytes of a token.

    The KV bytes are those of a run without ``--dtype``. Both are missing for a base that only
    ``--engine transformers`` runs, or whose files are gone.
    """
    try:
        config = read_model_config(base.path)
        chosen = add_storages(LoadConfig(choose_dtype(base, None)), base.path, config)
        backend, _ = choose_backend(config, chosen)
    except (ExpertError, OSError):
        return {}, None
    weights: dict[Dtype, int] = {}
    for dtype in get_args(Dtype):
        with suppress(ExpertError, OSError):
            wanted = add_storages(LoadConfig(dtype), base.path, config)
            weights[dtype] = choose_backend(config, wanted)[0].weight_bytes
    grown = backend.kv_bytes(2 * _MANY_TOKENS) - backend.kv_bytes(_MANY_TOKENS)
    return weights, grown // _MANY_TOKENS


def estimate_expert_size(store: Store, expert: StoredExpert) -> int | None:
    """Return the weight bytes of an installed expert; None where its files are damaged."""
    sizes = {file.path: file.size for file in expert.files}
    try:
        return estimate_adapter_bytes(store.read_manifest(expert), sizes)
    except (ExpertError, OSError, KeyError):
        return None
