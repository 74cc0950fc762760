"""Loading a base into packed matrices from its files or its quantised copy, or with random weights.

Tensors are packed into their final memory as they are read, so the base is in memory only once. If
some routed experts stay on disk, they are still packed for the copy, one after another.

A random base takes as long to run as a trained base of its shape; its output means nothing.
"""

import hashlib
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from expertctl.digest import Digest, Progress, ignore_progress
from expertctl.engine.arrays import AnyArray
from expertctl.engine.base_files import check_tied_head, list_block_warnings, list_rounding_warnings
from expertctl.engine.cpu.packed_base import (
    PackedBase,
    Schemes,
    allocate_base,
    make_expert_shape,
    packed_base_bytes,
)
from expertctl.engine.cpu.tensor_packing import (
    pack_slices,
    packing_thread_bytes,
    packing_thread_count,
    slice_tensor,
)
from expertctl.engine.kernels.packed_format import Scheme
from expertctl.engine.kernels.packed_matrix import PackedMatrix
from expertctl.engine.kernels.quantisation import encode_scale
from expertctl.engine.memory.host import allocate
from expertctl.engine.moe.expert_files import ExpertStream, compute_copy_shape
from expertctl.engine_config import MoeColdOption
from expertctl.package.base_model import compute_weights_digest, hash_tensor
from expertctl.package.base_tensors import read_base_tensors
from expertctl.package.model_config import HEAD_TENSOR, ModelConfig
from expertctl.package.stored_tensor import StoredTensor
from expertctl.store.quantised_cache import QuantisedCache
from expertctl.store.quantised_file import QuantisedPiece, iterate_pieces

WEIGHT_STD = 0.02
"""Approximate standard deviation of random weights."""

_RANDOM_NUMBERS = 1 << 20


def create_random_base(
    config: ModelConfig, scheme: Scheme, *, seed: int = 0, progress: Progress = ignore_progress
) -> PackedBase:
    """Return a random base; norms are ones, biases zeros. ``progress`` counts its bytes."""
    base, rng = allocate_base(config, scheme), np.random.default_rng(seed)
    schemes = dict.fromkeys((scheme, scheme.embedding, Scheme.FLOAT32))
    drawn = {each: _draw_bytes(each, rng) for each in schemes}
    for name, place in base.tensor_places().items():
        if isinstance(place, PackedMatrix):
            _fill_repeatedly(drawn[place.scheme], place, progress)
        else:
            place[...] = 0 if name.endswith(".bias") else 1
            progress(place.nbytes)
    return base


def decode_bytes_per_token(base: PackedBase) -> int:
    """Return the bytes read to decode a token, with as many routed experts as a token uses."""
    routed, size = base.config.experts, sum(matrix.nbytes for matrix in list_matrices(base))
    if routed is not None:
        shape = make_expert_shape(base.config, base.scheme)
        size += len(routed.layers) * routed.used * shape.nbytes
    return size


def list_matrices(base: PackedBase) -> tuple[PackedMatrix, ...]:
    """Return the matrices of a base in execution order; the head comes last.

    Routed experts are not included, because each token reads others.
    """
    parts = (
        part
        for layer in base.layers
        for part in (*layer.inputs.parts, layer.output, *layer.mlp.arrays)
    )
    return (*(part for part in parts if isinstance(part, PackedMatrix)), base.head)


def draw_random_floats(scheme: Scheme, count: int, rng: np.random.Generator) -> AnyArray:
    """Return random weights of a float scheme, as bytes."""
    numbers = (rng.standard_normal(count) * WEIGHT_STD).astype(np.float32)
    if scheme is Scheme.BFLOAT16:
        return (numbers.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return numbers.astype(scheme.value).view(np.uint8)


def _fill_repeatedly(drawn: AnyArray, matrix: PackedMatrix, progress: Progress) -> None:
    """Fill a matrix with the same random bytes repeatedly; each repetition has its own memory."""
    for begin in range(0, len(matrix.data), len(drawn)):
        part = matrix.data[begin : begin + len(drawn)]
        part[...] = drawn[: len(part)]
        progress(len(part))
    progress(matrix.scales.nbytes)
    if matrix.scheme.layout.is_grouped:
        steps = (1 << matrix.scheme.layout.bits) - 1
        matrix.scales[...] = encode_scale(matrix.scheme, WEIGHT_STD * 12**0.5 / steps)


def _draw_bytes(scheme: Scheme, rng: np.random.Generator) -> AnyArray:
    if not scheme.layout.is_grouped:
        return draw_random_floats(scheme, _RANDOM_NUMBERS, rng)
    octets: AnyArray = rng.integers(0, 256, _RANDOM_NUMBERS, np.uint8)
    return octets


def uses_quantised_copy(scheme: Scheme, *, cold: MoeColdOption = "auto") -> bool:
    """Return whether a copy is kept of a base in a scheme if not all its experts fit into memory.

    A copy of float32 or float16 experts is no smaller: it is kept only if ``cold`` needs it.
    """
    return scheme not in (Scheme.FLOAT32, Scheme.FLOAT16) or cold in ("map", "direct")


def load_packed_base(
    directory: Path,
    config: ModelConfig,
    scheme: Scheme,
    *,
    schemes: Schemes | None = None,
    experts: bool = True,
    copies: QuantisedCache | None = None,
    cold: MoeColdOption = "auto",
    progress: Progress = ignore_progress,
) -> PackedBase:
    """Read a base, or its quantised copy; ``progress`` counts packed bytes.

    With ``schemes``, those of blocks are filled from the same blocks of a GGUF file, and there is
    no copy. Without ``experts`` no routed expert is read into the base, but all are in the copy,
    which is then made for float schemes too, if it is smaller or ``cold`` needs it.

    Raises:
        NotFoundError: if a file is missing.
        InvalidPackageError: for missing or unexpected tensors, or wrong shapes.
        IncompatibleError: for a dtype that is not a float, a tied head that differs from the
            embedding, or sizes that do not fill blocks.
        BaseMismatchError: if the source of a copy is not what was added.
    """
    stored = read_base_tensors(directory, config)
    own = schemes or {}
    memory = allocate(packed_base_bytes(config, scheme, schemes=own, experts=experts))
    base = allocate_base(config, scheme, memory, schemes=own, experts=experts)
    if config.tied and HEAD_TENSOR in stored:
        check_tied_head(directory, stored)
    used = [] if schemes is not None else [stored[name] for name in config.tensor_shapes()]
    warnings = _rounding_warnings(used, scheme)
    is_kept = scheme.layout.is_grouped if experts else uses_quantised_copy(scheme, cold=cold)
    kept = copies if is_kept and schemes is None else None
    once, shape, read = _OnceProgress(progress), compute_copy_shape(config, scheme), len(memory)
    if kept is None or not kept.read(scheme.value, shape, memory, progress=once.count):
        read = _read_files(base, stored, memory, kept, once.restart().count)
    _finish_norms(base)
    return replace(base, warnings=warnings, read_bytes=read)


def _finish_norms(base: PackedBase) -> None:
    """Add one to the weights of norms that multiply by one more than their weights."""
    config, layers = base.config, base.layers
    norms: list[AnyArray | None] = []
    if config.block.norm == "rms_plus_one":
        norms.append(base.norm)
        for layer in layers:
            norms += [layer.input_norm, layer.output_norm, layer.mlp_norm, layer.mlp_output_norm]
    if config.block.head_norm == "rms_plus_one":
        norms += [norm for layer in layers for norm in (layer.query_norm, layer.key_norm)]
    for norm in norms:
        if norm is not None:
            norm += np.float32(1)


def packing_scratch_bytes(config: ModelConfig) -> int:
    """Return the maximum bytes that `load_packed_base` needs on top of the base."""
    widths = {shape[1] for shape in config.linear_shapes().values()}
    return packing_thread_count() * max(map(packing_thread_bytes, widths))


class _OnceProgress:
    """Counts bytes for a progress callback that must not count any of them twice."""

    def __init__(self, progress: Progress, reported: int = 0) -> None:
        self._progress, self._already, self._counted = progress, reported, 0

    def count(self, size: int) -> None:
        before, self._counted = max(self._counted, self._already), self._counted + size
        if self._counted > before:
            self._progress(self._counted - before)

    def restart(self) -> "_OnceProgress":
        return _OnceProgress(self._progress, max(self._counted, self._already))


def _rounding_warnings(stored: Sequence[StoredTensor], scheme: Scheme) -> tuple[str, ...]:
    """Warn about rounding that was not requested by name, and about blocks held in another form."""
    if scheme.layout.is_grouped:
        return list_block_warnings(stored, scheme.value)
    return list_rounding_warnings(stored, scheme.value)


def _read_files(
    base: PackedBase,
    stored: Mapping[str, StoredTensor],
    memory: memoryview,
    kept: QuantisedCache | None,
    progress: Progress,
) -> int:
    """Pack a base from its files and keep a copy; return how many bytes were read."""
    digests = _pack_tensors(base, stored, progress, hashed=kept is not None)
    read = sum(stored[name].size for name in base.tensor_places())
    if kept is None:
        return read
    name, shape = base.scheme.value, compute_copy_shape(base.config, base.scheme)
    if shape.count_pieces_in(memory) == shape.pieces:
        kept.write(name, shape, memory, weights=compute_weights_digest(stored, digests))
        return read
    stream = ExpertStream(stored, base.config, base.scheme, progress=progress)

    def pieces() -> Generator[QuantisedPiece]:
        yield from iterate_pieces(memory, shape)
        yield from stream.pieces()

    def weights() -> Digest:
        return compute_weights_digest(stored, digests | stream.digests)

    kept.stream(name, shape, pieces(), weights=weights, min_bytes=len(memory) + stream.min_bytes)
    return read + stream.read_bytes


def _pack_tensors(
    base: PackedBase, stored: Mapping[str, StoredTensor], progress: Progress, *, hashed: bool
) -> dict[str, str]:
    """Pack every tensor; return the sha256 of the packed bytes if ``hashed``."""
    places = base.tensor_places()
    progress(base.nbytes - sum(place.nbytes for place in places.values()))  # of alignment
    if not hashed:
        parts = (part for n, p in places.items() for part in slice_tensor(stored[n], p))
        pack_slices(([part] for part in parts), progress)
        return {}
    hashers = {name: hashlib.sha256() for name in places}
    pack_slices((slice_tensor(stored[n], p, hashers[n]) for n, p in places.items()), progress)
    return {
        name: hasher.hexdigest() if stored[name].has_whole_rows else hash_tensor(stored[name])
        for name, hasher in hashers.items()
    }
