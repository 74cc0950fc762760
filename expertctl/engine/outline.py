"""Outlines of experts: shapes without weights, so that what a plan costs is known before it loads.

Of every file only the beginning is read: what describes the tensors. The rest of its buffer stays
untouched zeros, which take no memory. An outline is loaded like the expert itself, so both cost the
same; its numbers are never used.
"""

import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from expertctl.digest import Digest, FileDigest
from expertctl.engine.adapter_load import SLACK, LoadedAdapter, adapter_bytes, load_adapter
from expertctl.engine.compose import Form, Weighted, compose
from expertctl.engine.experts import ExpertSource, LocalExpert, MemoryFiles
from expertctl.engine.fit import named_for
from expertctl.engine.gains import gains_bytes, gains_scratch, outlined_gains
from expertctl.package.read import read_package
from expertctl.package.tensor_file import ADAPTER_LIMITS, LENGTH_BYTES
from expertctl.package.verify import accept_unsigned, verify_contents
from expertctl.schema.manifest import Manifest
from expertctl.store.ref import StoredExpert
from expertctl.store.store import Store
from expertctl.trust.policy import TrustStore

_SMALL = 1 << 20
"""A file of at most so many bytes is kept whole: no text that a run reads is larger."""


def stored_outline(store: Store, expert: StoredExpert, manifest: Manifest) -> ExpertSource:
    """Offer the outline of an installed expert."""
    paths = {file.path: (store.paths.blob(file.digest), file) for file in expert.files}
    cost = adapter_bytes(manifest, {file.path: file.size for file in expert.files})
    files = _StoredHeads(paths)
    return ExpertSource(
        manifest, expert.content_digest, cost, lambda: load_adapter(manifest, files)
    )


def local_outline(path: Path, *, trust: TrustStore) -> LocalExpert:
    """Read a ``.expert`` file, verify it, and keep its outline; its cost is that of all its files.

    Raises:
        InvalidPackageError: when the file is malformed.
        TrustError: when it is signed, but not with a key that is trusted for it.
    """
    sink = _HeadSink()
    contents = read_package(path, sink=sink)
    signed = contents.signature is not None
    package = verify_contents(contents, trust) if signed else accept_unsigned(contents)
    files = MemoryFiles({file.path: file for file in contents.files}, sink.buffers)
    outline = load_adapter(contents.manifest, files)  # once: reading tensors may move their bytes
    source = ExpertSource(contents.manifest, contents.content_digest, sink.nbytes, lambda: outline)
    return LocalExpert(package, source, files)


@dataclass(frozen=True, slots=True)
class Foretold:
    """What a plan will take besides its experts' own bytes, at most, and how wide it will be."""

    nbytes: int = 0
    width: int = 0


def foretell(chain: Sequence[tuple[ExpertSource, float]], form: Form) -> Foretold:
    """Return what `compiled` will take for a chain of outlines.

    Raises:
        InvalidPackageError: when the beginning of a file is malformed.
        IncompatibleError: when an expert does not fit the base.
    """
    if not chain:
        return Foretold()
    adapters = [(named_for(source.load(), form.shapes), weight) for source, weight in chain]
    used = [adapter for adapter, weight in adapters if weight != 0.0]
    links = [Weighted(adapter, weight, outlined_gains(adapter)) for adapter, weight in adapters]
    composition = compose(links, form)
    gains = [gains_bytes(adapter) for adapter in used]
    multiplying = composition.nbytes + composition.scratch_bytes + sum(gains)
    return Foretold(max(multiplying, _while_computing(used, form)), composition.width)


def _while_computing(adapters: Sequence[LoadedAdapter], form: Form) -> int:
    """Return the most that the gains take while one of them is being computed."""
    most = done = 0
    for adapter in adapters:
        done += gains_bytes(adapter)
        most = max(most, done + gains_scratch(adapter, form))
    return most


@dataclass(frozen=True, slots=True)
class _StoredHeads:
    """The beginnings of the files of an installed expert; digests are checked when it is loaded."""

    paths: Mapping[str, tuple[Path, FileDigest]]

    def read(self, path: str) -> memoryview:
        blob, expected = self.paths[path]
        buffer = _zeros(expected.size)
        with blob.open("rb") as stream:
            stream.readinto(buffer[: min(LENGTH_BYTES, expected.size)])
            stream.readinto(buffer[LENGTH_BYTES : _head(buffer, expected.size)])
        return buffer


class _HeadSink:
    """Keeps the beginnings of the files of one package while the reader hashes all of them."""

    def __init__(self) -> None:
        self.buffers: dict[Digest, memoryview] = {}
        self.nbytes = 0

    @contextmanager
    def open(self, digest: Digest, size: int) -> Iterator[Callable[[memoryview], None]]:
        buffer, filled = _zeros(size), 0
        self.nbytes += len(buffer)

        def write(chunk: memoryview) -> None:
            nonlocal filled
            begin, filled = filled, filled + len(chunk)
            if begin == 0:
                buffer[: min(len(chunk), LENGTH_BYTES)] = chunk[:LENGTH_BYTES]
            kept = chunk[: max(0, _head(buffer, size) - begin)]
            buffer[begin : begin + len(kept)] = kept

        yield write
        self.buffers[digest] = buffer


def _head(buffer: memoryview, size: int) -> int:
    """Return how many bytes describe the rest; a small file may be a text, so all of it does."""
    if size <= _SMALL:
        return size
    length = int.from_bytes(buffer[:LENGTH_BYTES], "little")
    return min(size, LENGTH_BYTES + min(length, ADAPTER_LIMITS.header_bytes))


def _zeros(size: int) -> memoryview:
    return memoryview(mmap.mmap(-1, size + SLACK))
