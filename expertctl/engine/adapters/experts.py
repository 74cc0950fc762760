"""DoRA's gains on one base: computed at first use, then resident, and kept on the disk.

They belong to (package, base, dtype of the base): another base gets others. Their bytes are part of
the budget like an expert's, and so is the scratch memory while they are computed.

From verified packages to what a plan computes with, through the tiers.

An expert's bytes come from the store, where every file is hashed again on its way into memory, or
from a ``.expert`` file that was verified while it was read into memory.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from expertctl.digest import Digest, FileDigest, Progress, ignore_progress
from expertctl.engine.adapters.compile import (
    BASE_ONLY,
    CompiledPlan,
    CompileSpec,
    DoraScales,
    FoldedPlan,
    WeightedAdapter,
    check_adapter_fits,
    fold_plan,
    rename_modules,
)
from expertctl.engine.adapters.load import (
    READ_SLACK_BYTES,
    LoadedAdapter,
    StoredFiles,
    estimate_adapter_bytes,
    load_adapter,
)
from expertctl.engine.kernels.packed_format import is_routed_module
from expertctl.engine.memory.adapter_cache import AdapterCache, CacheKey, CacheRequest, Tier
from expertctl.engine.memory.budget import BUDGET_HINTS
from expertctl.engine.memory.host import allocate
from expertctl.engine.model.functional import (
    DoraTensors,
    compute_dora_scales,
    dora_scale_scratch_bytes,
)
from expertctl.errors import BudgetError
from expertctl.package.read import PackageContents, read_package
from expertctl.package.verify import VerifiedPackage, accept_unsigned, verify_contents
from expertctl.routing.plan import NUMERIC_VERSION
from expertctl.schema.manifest import Manifest
from expertctl.store.disk import DerivedData
from expertctl.store.refs import StoredExpert
from expertctl.store.store import Store
from expertctl.trust.trust_store import TrustStore

_FLOAT_BYTES = 4
_COPIES = 2
"""Their bytes on the way to the disk or from there."""
_UNPACKING = 16
"""Bytes for each number that is being unpacked, at most, besides the number itself."""
_UNPACKED_AT_ONCE = 1 << 17
_PACKED_BLOCK_ROWS = 16
"""Rows that are unpacked together, however wide they are; as `kernels.packed` does it."""
_Place = tuple[str, DoraTensors]


@dataclass(frozen=True, slots=True)
class DoraScaleSource:
    """What gains are computed from and kept in: one base in memory, by content and dtype."""

    base: Digest
    matrix: Callable[[str], Tensor]
    """The weights [out, in] of a linear layer by its module name."""
    derived: DerivedData

    def make_request(self, adapter: LoadedAdapter, package: Digest) -> CacheRequest[DoraScales]:
        """The request for one expert's gains in memory."""
        key = Digest.compute(f"dora gains {NUMERIC_VERSION} {package} {self.base}".encode())
        return CacheRequest(
            key=(Tier.RAM, key),
            nbytes=dora_scale_bytes(adapter),
            description=f"the gains of {adapter.ref}",
            load=lambda: self._load_scales(adapter, package, key),
            traffic=False,
        )

    def _load_scales(self, adapter: LoadedAdapter, package: Digest, key: Digest) -> DoraScales:
        sizes = _scale_sizes(adapter)
        kept = self.derived.read(package, key, size=_FLOAT_BYTES * sum(sizes))
        if kept is not None:
            values = torch.frombuffer(bytearray(kept), dtype=torch.float32)
            return _group_by_module(adapter, values.split_with_sizes(sizes))
        values = torch.empty(sum(sizes))
        for (module, dora), part in zip(
            _iter_dora_modules(adapter), values.split_with_sizes(sizes), strict=True
        ):
            what = f"{adapter.ref}: {module}"
            part.copy_(compute_dora_scales(self.matrix(module), dora, what=what))
        self.derived.write(package, key, values.numpy().tobytes())
        return _group_by_module(adapter, values.split_with_sizes(sizes))


def has_dora(adapter: LoadedAdapter) -> bool:
    """Tell whether an expert needs gains."""
    return any(True for _ in _iter_dora_modules(adapter))


def dora_scale_bytes(adapter: LoadedAdapter) -> int:
    """Return what the gains of one expert take."""
    return _FLOAT_BYTES * sum(_scale_sizes(adapter))


def placeholder_dora_scales(adapter: LoadedAdapter) -> DoraScales:
    """Return gains of the right shapes that were never computed."""
    sizes = _scale_sizes(adapter)
    return _group_by_module(adapter, torch.empty(sum(sizes)).split_with_sizes(sizes))


def estimate_dora_scratch(adapter: LoadedAdapter, form: CompileSpec | None = None) -> int:
    """Return what bringing the gains of one expert into memory needs besides them, at most."""
    each = (
        _layer_scratch_bytes(module, dora, form) for module, dora in _iter_dora_modules(adapter)
    )
    return max(each, default=0) + _COPIES * dora_scale_bytes(adapter)


def _layer_scratch_bytes(module: str, dora: DoraTensors, form: CompileSpec | None) -> int:
    """Return what one layer takes; packed weights are unpacked before they are looked at."""
    merging = dora_scale_scratch_bytes(dora)
    if form is None or form.packing is None or module not in form.shapes:
        return merging + _device_copy_bytes(module, form)
    out, inputs = form.shapes[module]
    at_once = min(
        max(_UNPACKED_AT_ONCE, _PACKED_BLOCK_ROWS * inputs), (out + _PACKED_BLOCK_ROWS) * inputs
    )
    read = form.routed_bytes if is_routed_module(module) else 0
    return read + _FLOAT_BYTES * out * inputs + max(merging, _UNPACKING * at_once)


def _device_copy_bytes(module: str, form: CompileSpec | None) -> int:
    """Return what a layer takes that is copied from a device to be read."""
    if form is None or form.device.type == "cpu" or module not in form.shapes:
        return 0
    out, inputs = form.shapes[module]
    return _FLOAT_BYTES * out * inputs


def _iter_dora_modules(adapter: LoadedAdapter) -> Iterator[_Place]:
    for module, steps in adapter.modules.items():
        yield from ((module, step) for step in steps if isinstance(step, DoraTensors))


def _scale_sizes(adapter: LoadedAdapter) -> list[int]:
    return [len(dora.b) for _, dora in _iter_dora_modules(adapter)]


def _group_by_module(adapter: LoadedAdapter, parts: tuple[Tensor, ...]) -> DoraScales:
    found: dict[str, tuple[Tensor, ...]] = {}
    for (module, _), part in zip(_iter_dora_modules(adapter), parts, strict=True):
        found[module] = (*found.get(module, ()), part)
    return found


@dataclass(frozen=True, slots=True)
class ExpertSource:
    """One expert that may be used: what it is, how to load it, what that costs in memory."""

    manifest: Manifest
    content_digest: Digest
    nbytes: int
    load: Callable[[], LoadedAdapter]

    @property
    def cache_request(self) -> CacheRequest[LoadedAdapter]:
        """The request for its weights in memory."""
        return CacheRequest(
            key=(Tier.RAM, self.content_digest),
            nbytes=self.nbytes,
            description=self.manifest.ref,
            load=self.load,
        )


@dataclass(frozen=True, slots=True)
class CompileTarget:
    """What a plan is compiled for: the base's form, and where the gains of DoRA come from."""

    form: CompileSpec
    dora_scales: DoraScaleSource


def make_stored_source(
    store: Store, expert: StoredExpert, manifest: Manifest, *, progress: Progress = ignore_progress
) -> ExpertSource:
    """Offer an installed expert."""
    paths = {file.path: (store.paths.blob(file.digest), file) for file in expert.files}
    sizes = {file.path: file.size for file in expert.files}
    files = StoredFiles(expert.ref, paths, progress)
    cost = estimate_adapter_bytes(manifest, sizes)
    return ExpertSource(
        manifest, expert.content_digest, cost, lambda: load_adapter(manifest, files)
    )


class MemorySink:
    """Takes the files of one package into memory while the reader hashes them, within a budget."""

    def __init__(self, tiers: AdapterCache, *, what: str) -> None:
        """Start with no file."""
        self.buffers: dict[Digest, memoryview] = {}
        self._tiers, self._what, self._reserved_bytes = tiers, what, 0

    @contextmanager
    def open(self, digest: Digest, size: int) -> Iterator[Callable[[memoryview], None]]:
        """Begin a file.

        Raises:
            BudgetError: when it does not fit.
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
        """Let go of all files."""
        self.buffers = {}
        self._tiers.release(Tier.RAM, "experts", self._reserved_bytes)
        self._reserved_bytes = 0


@dataclass(frozen=True, slots=True)
class MemoryFiles:
    """The files of one package that were hashed on their way into memory."""

    digests: Mapping[str, FileDigest]
    buffers: Mapping[Digest, memoryview]

    def load_variable(self, path: str) -> memoryview:
        """Return one file of the package and what follows it in memory.

        Reading its tensors may move its bytes, so they are read once only.
        """
        return self.buffers[self.digests[path].digest]

    def copy_file(self, path: str) -> bytes:
        """Return a copy of one small file."""
        return bytes(self.load_variable(path)[: self.digests[path].size])


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
    """Read a ``.expert`` file into memory; an unsigned one will do, a signature counts.

    Raises:
        InvalidPackageError: when the file is malformed.
        TrustError: when it is signed, but not with a key that is trusted for it.
        BudgetError: when it does not fit.
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
    """Offer a package that lies in memory already: loading it costs nothing more."""
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
    """Borrow the compiled plan of an ordered chain of weighted experts, loading what is absent.

    Experts whose bytes the plan does not use in place may be evicted as soon as it is compiled.

    Raises:
        DigestError: when bytes are not those that were verified.
        IncompatibleError: when an expert does not fit the base.
        BudgetError: when the experts cannot fit into memory.
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
    """Compile with the experts pinned; only the plan stays so. All other references end here."""
    with ExitStack() as others:
        loaded = others.enter_context(tiers.pin([source.cache_request for source, _ in chain]))
        adapters = [rename_modules(adapter, target.form.shapes) for adapter in loaded]
        links = [
            WeightedAdapter(
                adapter, weight, _borrow_dora_scales(tiers, source, adapter, weight, target, others)
            )
            for adapter, (source, weight) in zip(adapters, chain, strict=True)
        ]
        composition = fold_plan(links, target.form)
        wanted = _make_plan_request(
            key, links, [source.cache_request.key for source, _ in chain], composition
        )
        scratch = composition.scratch_bytes
        with _reserve_scratch(tiers, scratch, what=wanted.description):
            [plan] = pins.enter_context(tiers.pin([wanted]))
    return plan


@contextmanager
def _reserve_scratch(tiers: AdapterCache, size: int, *, what: str) -> Iterator[None]:
    """Hold what compiling takes besides; as experts cause it, a shorter prompt is no way out."""
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
    """Borrow what one expert's DoRA needs on this base, bringing it if it is absent."""
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


def _make_plan_request(
    key: CacheKey,
    links: Sequence[WeightedAdapter],
    experts: Sequence[CacheKey],
    composition: FoldedPlan,
) -> CacheRequest[CompiledPlan]:
    return CacheRequest(
        key=key,
        nbytes=composition.nbytes,
        description=f"the plan of {', '.join(link.adapter.ref for link in links)}",
        load=composition.compile,
        depends_on=tuple(experts) if composition.shares_adapter_memory else (),
    )
