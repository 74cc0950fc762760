"""Borrowing adapters through the adapter cache: sources, DoRA scales and compiled plans.

An expert's bytes come from the store, where every file is hashed again while it is read into
memory, or from a ``.expert`` file that was verified while it was read into memory.

DoRA magnitude scales belong to (package, base, dtype of the base). They are computed at first use,
kept in memory and cached on disk. Their bytes count towards the budget like an expert's, and so
does the scratch memory while they are computed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np

from expertctl.digest import Digest, FileDigest, Progress, ignore_progress
from expertctl.engine.adapters.compile import (
    BASE_ONLY,
    CompiledPlan,
    CompileSpec,
    DoraScales,
    TorchPlacement,
    WeightedAdapter,
    check_adapter_fits,
    fold_plan,
)
from expertctl.engine.adapters.load import (
    READ_SLACK_BYTES,
    LoadedAdapter,
    StoredFiles,
    estimate_adapter_bytes,
    load_adapter,
)
from expertctl.engine.adapters.steps import (
    DoraTensors,
    compute_dora_scales,
    dora_scale_scratch_bytes,
)
from expertctl.engine.arrays import AnyArray, FloatArray, split_rows
from expertctl.engine.kernels.packed_format import PlanPacking, is_routed_module
from expertctl.engine.memory.adapter_cache import AdapterCache, CacheKey, CacheRequest, Tier
from expertctl.engine.memory.budget import BUDGET_HINTS
from expertctl.engine.memory.host import allocate
from expertctl.errors import BudgetError
from expertctl.package.read import (
    PackageContents,
    VerifiedPackage,
    accept_unsigned,
    read_package,
    verify_contents,
)
from expertctl.routing.plan import NUMERIC_VERSION
from expertctl.schema.manifest import Manifest
from expertctl.store.disk import DerivedData
from expertctl.store.refs import StoredExpert
from expertctl.store.store import Store
from expertctl.trust.trust_store import TrustStore

_FLOAT_BYTES = 4
_COPIES = 2
"""Copies of their bytes on the way to or from the disk."""
_UNPACKING = 16
"""Maximum additional bytes per number that is being unpacked."""
_UNPACKED_AT_ONCE = 1 << 17
_PACKED_BLOCK_ROWS = 16
"""Minimum rows unpacked together, however wide, as in `kernels.packed_matrix`."""
_Place = tuple[str, DoraTensors]


@dataclass(frozen=True, slots=True)
class DoraScaleSource:
    """Computes and caches DoRA scales for one base in memory, identified by content and dtype."""

    base: Digest
    matrix: Callable[[str], FloatArray]
    """Returns the weights [out, in] of a linear layer by its module name."""
    derived: DerivedData

    def make_request(self, adapter: LoadedAdapter, package: Digest) -> CacheRequest[DoraScales]:
        """Return the cache request for one expert's scales in memory."""
        key = Digest.compute(f"dora gains {NUMERIC_VERSION} {package} {self.base}".encode())
        return CacheRequest(
            key=(Tier.RAM, key),
            nbytes=dora_scale_bytes(adapter),
            description=f"the DoRA scales of {adapter.ref}",
            load=lambda: self._load_scales(adapter, package, key),
            traffic=False,
        )

    def _load_scales(self, adapter: LoadedAdapter, package: Digest, key: Digest) -> DoraScales:
        sizes = _scale_sizes(adapter)
        kept = self.derived.read(package, key, size=_FLOAT_BYTES * sum(sizes))
        if kept is not None:
            values = np.frombuffer(bytearray(kept), np.float32)
            return _group_by_module(adapter, split_rows(values, sizes))
        values = np.empty(sum(sizes), np.float32)
        parts = split_rows(values, sizes)
        for (module, dora), part in zip(_iter_dora_modules(adapter), parts, strict=True):
            what = f"{adapter.ref}: {module}"
            part[...] = compute_dora_scales(self.matrix(module), dora, what=what)
        self.derived.write(package, key, values.tobytes())
        return _group_by_module(adapter, parts)


def has_dora(adapter: LoadedAdapter) -> bool:
    """Return whether an expert needs DoRA scales."""
    return any(True for _ in _iter_dora_modules(adapter))


def dora_scale_bytes(adapter: LoadedAdapter) -> int:
    """Return the bytes of the scales of one expert."""
    return _FLOAT_BYTES * sum(_scale_sizes(adapter))


def placeholder_dora_scales(adapter: LoadedAdapter) -> DoraScales:
    """Return uninitialised scales of the right shapes, for memory estimates."""
    sizes = _scale_sizes(adapter)
    return _group_by_module(adapter, split_rows(np.empty(sum(sizes), np.float32), sizes))


def estimate_dora_scratch(adapter: LoadedAdapter, form: CompileSpec | None = None) -> int:
    """Return the maximum additional bytes for bringing the scales of one expert into memory."""
    each = (_layer_scratch_bytes(*place, form) for place in _iter_dora_modules(adapter))
    return max(each, default=0) + _COPIES * dora_scale_bytes(adapter)


def _layer_scratch_bytes(module: str, dora: DoraTensors, form: CompileSpec | None) -> int:
    """Return the bytes for one layer; packed weights are unpacked, those on a device copied."""
    merging = dora_scale_scratch_bytes(dora)
    if form is None or module not in form.shapes:
        return merging
    out, inputs = form.shapes[module]
    match form.target:
        case None | TorchPlacement("cpu"):
            return merging
        case TorchPlacement():
            return merging + _FLOAT_BYTES * out * inputs
        case PlanPacking():
            at_once = max(_UNPACKED_AT_ONCE, _PACKED_BLOCK_ROWS * inputs)
            at_once = min(at_once, (out + _PACKED_BLOCK_ROWS) * inputs)
            read = form.routed_bytes if is_routed_module(module) else 0
            return read + _FLOAT_BYTES * out * inputs + max(merging, _UNPACKING * at_once)


def _iter_dora_modules(adapter: LoadedAdapter) -> Iterator[_Place]:
    for module, steps in adapter.modules.items():
        yield from ((module, step) for step in steps if isinstance(step, DoraTensors))


def _scale_sizes(adapter: LoadedAdapter) -> list[int]:
    return [len(dora.b) for _, dora in _iter_dora_modules(adapter)]


def _group_by_module(adapter: LoadedAdapter, parts: Sequence[AnyArray]) -> DoraScales:
    found: dict[str, tuple[AnyArray, ...]] = {}
    for (module, _), part in zip(_iter_dora_modules(adapter), parts, strict=True):
        found[module] = (*found.get(module, ()), part)
    return found


@dataclass(frozen=True, slots=True)
class ExpertSource:
    """An expert that may be used: its manifest, how to load it, and its bytes in memory."""

    manifest: Manifest
    content_digest: Digest
    nbytes: int
    load: Callable[[], LoadedAdapter]

    @property
    def cache_request(self) -> CacheRequest[LoadedAdapter]:
        """The cache request for its weights in memory."""
        return CacheRequest(
            key=(Tier.RAM, self.content_digest),
            nbytes=self.nbytes,
            description=self.manifest.ref,
            load=self.load,
        )


@dataclass(frozen=True, slots=True)
class CompileTarget:
    """What a plan is compiled for: the compile spec, and the source of DoRA scales."""

    form: CompileSpec
    dora_scales: DoraScaleSource


def make_stored_source(
    store: Store, expert: StoredExpert, manifest: Manifest, *, progress: Progress = ignore_progress
) -> ExpertSource:
    """Return the source of an installed expert."""
    paths = {file.path: (store.paths.blob(file.digest), file) for file in expert.files}
    sizes = {file.path: file.size for file in expert.files}
    files = StoredFiles(expert.ref, paths, progress)
    nbytes, digest = estimate_adapter_bytes(manifest, sizes), expert.content_digest
    return ExpertSource(manifest, digest, nbytes, lambda: load_adapter(manifest, files))


class MemorySink:
    """Receives the files of one package into memory while they are hashed, within a budget."""

    def __init__(self, tiers: AdapterCache, *, what: str) -> None:
        """Start with no files."""
        self.buffers: dict[Digest, memoryview] = {}
        self._tiers, self._what, self._reserved_bytes = tiers, what, 0

    @contextmanager
    def open(self, digest: Digest, size: int) -> Iterator[Callable[[memoryview], None]]:
        """Start a file.

        Raises:
            BudgetError: if it does not fit.
        """
        self._tiers.reserve(Tier.RAM, "experts", size + READ_SLACK_BYTES, what=self._what)
        self._reserved_bytes += size + READ_SLACK_BYTES
        buffer, filled = allocate(size + READ_SLACK_BYTES), 0

        def write(chunk: memoryview) -> None:
            nonlocal filled
            buffer[filled : filled + len(chunk)] = chunk
            filled += len(chunk)

        yield write
        self.buffers[digest] = buffer

    def close(self) -> None:
        """Free all files."""
        self.buffers = {}
        self._tiers.release(Tier.RAM, "experts", self._reserved_bytes)
        self._reserved_bytes = 0


@dataclass(frozen=True, slots=True)
class MemoryFiles:
    """The files of one package that were hashed while they were read into memory."""

    digests: Mapping[str, FileDigest]
    buffers: Mapping[Digest, memoryview]

    def read_file(self, path: str) -> memoryview:
        """Return one file of the package, with spare bytes after it.

        Reading its tensors may move its bytes, so they are read only once.
        """
        return self.buffers[self.digests[path].digest]

    def copy_file(self, path: str) -> bytes:
        """Return a copy of one small file."""
        return bytes(self.read_file(path)[: self.digests[path].size])


@dataclass(frozen=True, slots=True)
class LocalExpert:
    """A package that is used from its file, not from the store."""

    package: VerifiedPackage
    source: ExpertSource
    files: MemoryFiles


@contextmanager
def open_local_expert(
    path: Path, *, trust: TrustStore, tiers: AdapterCache, progress: Progress = ignore_progress
) -> Iterator[LocalExpert]:
    """Read a ``.expert`` file into memory; it may be unsigned, but a signature must be trusted.

    Raises:
        InvalidPackageError: if the file is malformed.
        TrustError: if it is signed with a key that is not trusted for it.
        BudgetError: if it does not fit.
    """
    with ExitStack() as stack:
        sink = MemorySink(tiers, what=path.name)
        stack.callback(sink.close)
        contents = read_package(path, sink=sink, progress=progress)
        signed = contents.signature is not None
        package = verify_contents(contents, trust) if signed else accept_unsigned(contents)
        files = MemoryFiles({file.path: file for file in contents.files}, sink.buffers)
        source = _memory_source(contents, files)
        stack.callback(tiers.forget, source.cache_request.key)
        yield LocalExpert(package, source, files)


def _memory_source(contents: PackageContents, files: MemoryFiles) -> ExpertSource:
    """Return the source of a package that is already in memory: loading it costs nothing."""
    adapter = load_adapter(contents.manifest, files)
    return ExpertSource(contents.manifest, contents.content_digest, 0, lambda: adapter)


@contextmanager
def borrow_compiled_plan(
    tiers: AdapterCache,
    chain: Sequence[tuple[ExpertSource, float]],
    *,
    identity: Digest,
    target: CompileTarget,
) -> Iterator[CompiledPlan]:
    """Borrow the compiled plan of an ordered chain of weighted experts, loading missing ones.

    Experts whose bytes the plan does not use in place may be evicted as soon as it is compiled.

    Raises:
        DigestError: if bytes are not those that were verified.
        IncompatibleError: if an expert does not fit the base.
        BudgetError: if the experts do not fit into memory.
    """
    if not chain:
        yield BASE_ONLY
        return
    key = (Tier.DEVICE, identity)
    with ExitStack() as pins:
        found = cast(CompiledPlan | None, pins.enter_context(tiers.pin_if_present(key)))
        yield found or _compile_plan(tiers, chain, key, target, pins)


def _compile_plan(
    tiers: AdapterCache,
    chain: Sequence[tuple[ExpertSource, float]],
    key: CacheKey,
    target: CompileTarget,
    pins: ExitStack,
) -> CompiledPlan:
    """Compile with the experts pinned; afterwards only the plan stays pinned."""
    with ExitStack() as others:
        loaded = others.enter_context(tiers.pin([source.cache_request for source, _ in chain]))
        adapters = [target.form.adapt(adapter) for adapter in loaded]
        links = [
            WeightedAdapter(
                adapter, weight, _borrow_dora_scales(tiers, source, adapter, weight, target, others)
            )
            for adapter, (source, weight) in zip(adapters, chain, strict=True)
        ]
        folded = fold_plan(links, target.form)
        experts = [source.cache_request.key for source, _ in chain]
        request = CacheRequest(
            key=key,
            nbytes=folded.nbytes,
            description=f"the plan of {', '.join(link.adapter.ref for link in links)}",
            load=folded.compile,
            depends_on=tuple(experts) if folded.shares_adapter_memory else (),
        )
        with _reserve_scratch(tiers, folded.scratch_bytes, what=request.description):
            [plan] = pins.enter_context(tiers.pin([request]))
    return plan


@contextmanager
def _reserve_scratch(tiers: AdapterCache, size: int, *, what: str) -> Iterator[None]:
    """Reserve scratch memory; the hint names experts, because a shorter prompt would not help."""
    try:
        with tiers.reserve_during(Tier.RAM, "buffers", size, what=what):
            yield
    except BudgetError as error:
        error.hint = BUDGET_HINTS["experts"]
        raise


def _borrow_dora_scales(
    tiers: AdapterCache,
    source: ExpertSource,
    adapter: LoadedAdapter,
    weight: float,
    target: CompileTarget,
    pins: ExitStack,
) -> DoraScales:
    """Borrow the DoRA scales of one expert on this base, computing them if they are absent."""
    if weight == 0.0 or not has_dora(adapter):
        return {}
    check_adapter_fits(adapter, target.form.shapes, width=target.form.width)
    wanted = target.dora_scales.make_request(adapter, source.content_digest)
    there = cast(DoraScales | None, pins.enter_context(tiers.pin_if_present(wanted.key)))
    if there is not None:
        return there
    scratch = estimate_dora_scratch(adapter, target.form)
    with _reserve_scratch(tiers, scratch, what=wanted.description):
        [found] = pins.enter_context(tiers.pin([wanted]))
    return found
