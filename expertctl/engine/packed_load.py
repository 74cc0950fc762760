"""A base from its files, or from its copy, into packed matrices.

What was read is packed into its place and let go of, so the base is in memory once. Where some of
its routed experts stay on the disk, they are packed for a copy all the same, one after another.
"""

import hashlib
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from expertctl.digest import Digest, Progress, no_progress
from expertctl.engine.base_weights import other_head, rounding_warnings
from expertctl.engine.kernels.packed import widened
from expertctl.engine.kernels.scheme import Scheme
from expertctl.engine.memory import allocate
from expertctl.engine.moe.expert_stream import ExpertStream, copy_shape
from expertctl.engine.packed_base import PackedBase, empty_base, packed_bytes
from expertctl.engine.tensor_packing import (
    pack_all,
    packing_threads,
    parted,
    portions,
    thread_bytes,
)
from expertctl.package.base_model import weights_digest
from expertctl.package.base_tensors import StoredTensor, base_tensors
from expertctl.package.model_config import EMBEDDING, HEAD, ModelConfig
from expertctl.routing.request import MoeColdWish
from expertctl.store.copy_file import Piece, pieces_in
from expertctl.store.quantised_copies import QuantisedCopies


def keeps_copy(scheme: Scheme, *, cold: MoeColdWish = "auto") -> bool:
    """Tell whether a copy is kept of a base in a scheme, if not all its experts fit into memory.

    Experts in float32 or float16 are no shorter in a copy: it is kept only where ``cold`` needs it.
    """
    return scheme not in (Scheme.FLOAT32, Scheme.FLOAT16) or cold in ("map", "direct")


def load_packed_base(
    directory: Path,
    config: ModelConfig,
    scheme: Scheme,
    *,
    experts: bool = True,
    copies: QuantisedCopies | None = None,
    cold: MoeColdWish = "auto",
    progress: Progress = no_progress,
) -> PackedBase:
    """Read a base, or its copy; ``progress`` counts packed bytes.

    Without ``experts`` no routed expert is read into the base, but all will be in the copy, which
    is then made of floats, too, where it is shorter or ``cold`` needs it.

    Raises:
        NotFoundError: when a file is missing.
        InvalidPackageError: when tensors are missing, unexpected or of another shape.
        IncompatibleError: for a dtype that is not a float, a tied head that is another matrix, or
            sizes that fill no blocks.
        BaseMismatchError: when what a copy would be made of is not what was added.
    """
    stored = base_tensors(directory, config)
    memory = allocate(packed_bytes(config, scheme, experts=experts))
    base = empty_base(config, scheme, memory, experts=experts)
    if config.tied and HEAD in stored:
        _check_tied_head(directory, stored)
    warnings = _warnings([stored[name] for name in config.tensor_shapes()], scheme)
    is_kept = scheme.layout.is_grouped if experts else keeps_copy(scheme, cold=cold)
    kept = copies if is_kept else None
    told, shape, read = _Told(progress), copy_shape(config, scheme), len(memory)
    if kept is None or not kept.read(scheme.value, shape, memory, progress=told.count):
        read = _read(base, stored, memory, kept, told.again().count)
    return replace(base, warnings=warnings, read_bytes=read)


def packing_scratch(config: ModelConfig) -> int:
    """Return what `load_packed_base` takes besides the base, at most."""
    widths = {shape[1] for shape in config.linear_shapes().values()}
    return packing_threads() * max(map(thread_bytes, widths))


class _Told:
    """Counts bytes for a callback that must not be told of any of them twice."""

    def __init__(self, progress: Progress, already: int = 0) -> None:
        self._progress, self._already, self._counted = progress, already, 0

    def count(self, size: int) -> None:
        before, self._counted = max(self._counted, self._already), self._counted + size
        if self._counted > before:
            self._progress(self._counted - before)

    def again(self) -> "_Told":
        """Begin again."""
        return _Told(self._progress, max(self._counted, self._already))


def _warnings(stored: Sequence[StoredTensor], scheme: Scheme) -> tuple[str, ...]:
    """Warn of rounding that nobody asked for by name; of int8 and int4 the numerics tell."""
    if scheme.layout.is_grouped:
        return ()
    return rounding_warnings(stored, scheme.value)


def _check_tied_head(directory: Path, stored: Mapping[str, StoredTensor]) -> None:
    """Some files hold a tied head as well; it must be the same matrix."""
    pairs = zip(portions(stored[EMBEDDING]), portions(stored[HEAD]), strict=True)
    if not all(np.array_equal(widened(ours), widened(other)) for ours, other in pairs):
        raise other_head(directory)


def _read(
    base: PackedBase,
    stored: Mapping[str, StoredTensor],
    memory: memoryview,
    kept: QuantisedCopies | None,
    progress: Progress,
) -> int:
    """Pack a base from its files, and keep a copy; return how many bytes were read."""
    digests = _pack(base, stored, progress, hashed=kept is not None)
    read = sum(stored[name].size for name in base.places())
    if kept is None:
        return read
    name, shape = base.scheme.value, copy_shape(base.config, base.scheme)
    if shape.pieces_of(memory) == shape.pieces:
        kept.write(name, shape, memory, weights=weights_digest(stored, digests))
        return read
    stream = ExpertStream(stored, base.config, base.scheme, progress=progress)

    def pieces() -> Generator[Piece]:
        yield from pieces_in(memory, shape)
        yield from stream.pieces()

    def weights() -> Digest:
        return weights_digest(stored, digests | stream.digests)

    kept.stream(name, shape, pieces(), weights=weights, least=len(memory) + stream.least_bytes)
    return read + stream.read_bytes


def _pack(
    base: PackedBase, stored: Mapping[str, StoredTensor], progress: Progress, *, hashed: bool
) -> dict[str, str]:
    """Pack every tensor; return the sha256 of their bytes as they were packed, if asked for."""
    places = base.places()
    if not hashed:
        parts = (part for n, p in places.items() for part in parted(stored[n], p))
        pack_all(([part] for part in parts), progress)
        return {}
    hashers = {name: hashlib.sha256() for name in places}
    pack_all((parted(stored[n], p, hashers[n]) for n, p in places.items()), progress)
    return {name: hasher.hexdigest() for name, hasher in hashers.items()}
