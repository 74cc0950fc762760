"""From verified packages to what a plan computes with, through the tiers.

An expert's bytes come from the store, where every file is hashed again on its way into memory, or
from a ``.expert`` file that was verified while it was read into memory.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from expertctl.digest import Digest, FileDigest, Progress, no_progress
from expertctl.engine.adapter_load import (
    SLACK,
    LoadedAdapter,
    StoredFiles,
    adapter_bytes,
    load_adapter,
)
from expertctl.engine.budget import WAYS_OUT
from expertctl.engine.compose import (
    BASE_ALONE,
    CompiledPlan,
    Composition,
    Form,
    Gains,
    Weighted,
    compose,
)
from expertctl.engine.fit import check_fit, named_for
from expertctl.engine.gains import GainSource, gains_scratch, has_dora
from expertctl.engine.memory import allocate
from expertctl.engine.tiers import Key, Tier, Tiers, Wanted
from expertctl.errors import BudgetError
from expertctl.package.read import PackageContents, read_package
from expertctl.package.verify import VerifiedPackage, accept_unsigned, verify_contents
from expertctl.schema.manifest import Manifest
from expertctl.store.ref import StoredExpert
from expertctl.store.store import Store
from expertctl.trust.policy import TrustStore


@dataclass(frozen=True, slots=True)
class ExpertSource:
    """One expert that may be used: what it is, how to load it, what that costs in memory."""

    manifest: Manifest
    content_digest: Digest
    nbytes: int
    load: Callable[[], LoadedAdapter]

    @property
    def wanted(self) -> Wanted[LoadedAdapter]:
        """The request for its weights in memory."""
        return Wanted(
            key=(Tier.RAM, self.content_digest),
            nbytes=self.nbytes,
            what=self.manifest.ref,
            load=self.load,
        )


@dataclass(frozen=True, slots=True)
class Target:
    """What a plan is compiled for: the base's form, and where the gains of DoRA come from."""

    form: Form
    gains: GainSource


def stored_source(
    store: Store, expert: StoredExpert, manifest: Manifest, *, progress: Progress = no_progress
) -> ExpertSource:
    """Offer an installed expert."""
    paths = {file.path: (store.paths.blob(file.digest), file) for file in expert.files}
    sizes = {file.path: file.size for file in expert.files}
    files = StoredFiles(expert.ref, paths, progress)
    cost = adapter_bytes(manifest, sizes)
    return ExpertSource(
        manifest, expert.content_digest, cost, lambda: load_adapter(manifest, files)
    )


class MemorySink:
    """Takes the files of one package into memory while the reader hashes them, within a budget."""

    def __init__(self, tiers: Tiers, *, what: str) -> None:
        """Start with no file."""
        self.buffers: dict[Digest, memoryview] = {}
        self._tiers, self._what, self._held = tiers, what, 0

    @contextmanager
    def open(self, digest: Digest, size: int) -> Iterator[Callable[[memoryview], None]]:
        """Begin a file.

        Raises:
            BudgetError: when it does not fit.
        """
        self._tiers.reserve(Tier.RAM, "experts", size + SLACK, what=self._what)
        self._held += size + SLACK
        buffer, filled = allocate(size + SLACK), 0

        def write(chunk: memoryview) -> None:
            nonlocal filled
            buffer[filled : filled + len(chunk)] = chunk
            filled += len(chunk)

        yield write
        self.buffers[digest] = buffer

    def close(self) -> None:
        """Let go of all files."""
        self.buffers = {}
        self._tiers.release(Tier.RAM, "experts", self._held)
        self._held = 0


@dataclass(frozen=True, slots=True)
class MemoryFiles:
    """The files of one package that were hashed on their way into memory."""

    digests: Mapping[str, FileDigest]
    buffers: Mapping[Digest, memoryview]

    def read(self, path: str) -> memoryview:
        """Return one file of the package and what follows it in memory.

        Reading its tensors may move its bytes, so they are read once only.
        """
        return self.buffers[self.digests[path].digest]

    def data(self, path: str) -> bytes:
        """Return a copy of one small file."""
        return bytes(self.read(path)[: self.digests[path].size])


@dataclass(frozen=True, slots=True)
class LocalExpert:
    """A package that is used from its file, not from the store."""

    package: VerifiedPackage
    source: ExpertSource
    files: MemoryFiles


@contextmanager
def local_expert(
    path: Path, *, trust: TrustStore, tiers: Tiers, progress: Progress = no_progress
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
        stack.callback(tiers.forget, source.wanted.key)
        yield LocalExpert(package, source, files)


def _memory_source(contents: PackageContents, files: MemoryFiles) -> ExpertSource:
    """Offer a package that lies in memory already: loading it costs nothing more."""
    adapter = load_adapter(contents.manifest, files)
    return ExpertSource(contents.manifest, contents.content_digest, 0, lambda: adapter)


@contextmanager
def compiled(
    tiers: Tiers,
    chain: Sequence[tuple[ExpertSource, float]],
    *,
    identity: Digest,
    target: Target,
) -> Iterator[CompiledPlan]:
    """Borrow the compiled plan of an ordered chain of weighted experts, loading what is absent.

    Experts whose bytes the plan does not use in place may be evicted as soon as it is compiled.

    Raises:
        DigestError: when bytes are not those that were verified.
        IncompatibleError: when an expert does not fit the base.
        BudgetError: when the experts cannot fit into memory.
    """
    if not chain:
        yield BASE_ALONE
        return
    key = (Tier.DEVICE, identity)
    with ExitStack() as pins:
        found = cast(CompiledPlan | None, pins.enter_context(tiers.resident(key)))
        yield found or _compile(tiers, chain, key, target, pins)


def _compile(
    tiers: Tiers,
    chain: Sequence[tuple[ExpertSource, float]],
    key: Key,
    target: Target,
    pins: ExitStack,
) -> CompiledPlan:
    """Compile with the experts pinned; only the plan stays so. All other references end here."""
    with ExitStack() as others:
        loaded = others.enter_context(tiers.pin([source.wanted for source, _ in chain]))
        adapters = [named_for(adapter, target.form.shapes) for adapter in loaded]
        links = [
            Weighted(adapter, weight, _gains(tiers, source, adapter, weight, target, others))
            for adapter, (source, weight) in zip(adapters, chain, strict=True)
        ]
        composition = compose(links, target.form)
        wanted = _wanted_plan(key, links, [source.wanted.key for source, _ in chain], composition)
        scratch = composition.scratch_bytes
        with _scratch(tiers, scratch, what=wanted.what):
            [plan] = pins.enter_context(tiers.pin([wanted]))
    return plan


@contextmanager
def _scratch(tiers: Tiers, size: int, *, what: str) -> Iterator[None]:
    """Hold what compiling takes besides; as experts cause it, a shorter prompt is no way out."""
    try:
        with tiers.holding(Tier.RAM, "buffers", size, what=what):
            yield
    except BudgetError as error:
        error.hint = WAYS_OUT["experts"]
        raise


def _gains(
    tiers: Tiers,
    source: ExpertSource,
    adapter: LoadedAdapter,
    weight: float,
    target: Target,
    pins: ExitStack,
) -> Gains:
    """Borrow what one expert's DoRA needs on this base, bringing it if it is absent."""
    if weight == 0.0 or not has_dora(adapter):
        return {}
    check_fit(adapter, target.form.shapes, width=target.form.width)
    wanted = target.gains.wanted(adapter, source.content_digest)
    there = cast(Gains | None, pins.enter_context(tiers.resident(wanted.key)))
    if there is not None:
        return there
    scratch = gains_scratch(adapter, target.form)
    with _scratch(tiers, scratch, what=wanted.what):
        [found] = pins.enter_context(tiers.pin([wanted]))
    return found


def _wanted_plan(
    key: Key, links: Sequence[Weighted], experts: Sequence[Key], composition: Composition
) -> Wanted[CompiledPlan]:
    return Wanted(
        key=key,
        nbytes=composition.nbytes,
        what=f"the plan of {', '.join(link.adapter.ref for link in links)}",
        load=composition.compile,
        uses=tuple(experts) if composition.uses_in_place else (),
    )
