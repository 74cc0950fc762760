"""Routed experts in files: in those of a base, and in its quantised copy.

`StoredExperts` reads one expert from the safetensors files of the base and packs it. `ExpertStream`
packs all experts one after another to write a copy; if they do not all fit into memory, only as
many are in it as threads pack, and one that is being written. Experts in bfloat16 are compact in a
copy. `CopiedExperts` reads an expert from the copy in one piece, or maps it in the page cache.
Damage is reported; damaged experts are read from the files of the base, and the copy is made again
the next time.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import Any, Protocol

import numpy as np

from expertctl.digest import Progress
from expertctl.engine.cpu.packed_base import (
    EXPERTS,
    expert_tensor_places,
    make_expert_shape,
    packed_base_bytes,
)
from expertctl.engine.cpu.tensor_packing import (
    compact_expert,
    is_compact,
    pack_tensor,
    packing_thread_count,
    supports_compact,
)
from expertctl.engine.kernels.packed_format import Scheme
from expertctl.engine.kernels.packed_matrix import MIN_COMPACT_BITS
from expertctl.engine.memory.host import MappedFile, allocate, find_unused_bytes
from expertctl.engine.moe.placement import LayerExpert
from expertctl.engine_config import MoeCold, MoeColdOption
from expertctl.package.base_model import hash_tensor
from expertctl.package.model_config import ModelConfig
from expertctl.package.stored_tensor import StoredTensor
from expertctl.store.quantised_cache import QuantisedCache
from expertctl.store.quantised_file import (
    FileEdition,
    QuantisedFile,
    QuantisedLayout,
    QuantisedPiece,
    ReadCancelled,
    always_wanted,
    hash_piece,
)

Array = np.ndarray[Any, Any]
IsWanted = Callable[[], bool]
"""Called repeatedly during a read: returns whether it is still wanted."""


class ExpertReader(Protocol):
    """Reads experts; several threads may use it at a time."""

    def read(
        self, layer: int, expert: int, block: Array, *, is_wanted: IsWanted = always_wanted
    ) -> int:
        """Fill a block with an expert; return how many bytes of files that took.

        Raises:
            InvalidPackageError: when a file cannot be read to its end.
            ReadCancelled: when it is no longer wanted; the block then has undefined contents.
        """

    def find_cached_address(self, layer: int, expert: int) -> int | None:
        """Return the address of an expert in the page cache; None if it has to be read.

        Its bytes stay the same as long as this reader lives, though the operating system may have
        to load them again.
        """


class StoredExperts:
    """Reads the rows of an expert from safetensors files, and packs them.

    If the files hold the experts of a layer as one tensor, these are some of its rows.
    """

    def __init__(
        self, stored: Mapping[str, StoredTensor], config: ModelConfig, scheme: Scheme
    ) -> None:
        """Read the tensors of a base from where they are stored."""
        self._stored, self.shape = stored, make_expert_shape(config, scheme)
        self.scheme = scheme
        self.is_compact = supports_compact(scheme)
        """Whether experts are compact in a copy of the base."""

    @property
    def cold(self) -> MoeCold:
        """How experts are read from disk."""
        return "read"

    @property
    def compact(self) -> int:
        """Bytes of a compact expert; 0: experts are not compact."""
        return 0

    def read(
        self, layer: int, expert: int, block: Array, *, is_wanted: IsWanted = always_wanted
    ) -> int:
        """Fill a block with an expert; return how many bytes of files that took."""
        at, read = f"model.layers.{layer}.{EXPERTS}{expert}", 0
        for name, place in expert_tensor_places(at, self.shape, block).items():
            if not is_wanted():
                raise ReadCancelled(read)
            tensor = self._stored[name]
            pack_tensor(tensor, place)
            read += tensor.size
        return read

    def read_whole(self, layer: int, expert: int, block: Array) -> int:
        """Do the same as `read`, which always unpacks."""
        return self.read(layer, expert, block)

    def find_cached_address(self, layer: int, expert: int) -> int | None:
        """Return None: the contents of the files have to be packed."""
        return None

    def close(self) -> None:
        """Do nothing: files are open only while they are read."""


_PendingPack = tuple[Array, Future[tuple[QuantisedPiece, dict[str, str]]]]
"""A block, and its future contents."""


def list_experts(config: ModelConfig) -> list[LayerExpert]:
    """Return all routed experts, in their order in memory and in a copy."""
    routed = config.experts
    if routed is None:
        return []
    return [(layer, expert) for layer in routed.layers for expert in range(routed.count)]


def compute_copy_shape(config: ModelConfig, scheme: Scheme) -> QuantisedLayout:
    """Return the layout of a copy of a base, whether or not all of it is loaded.

    Raises:
        IncompatibleError: for heads or a middle of an MLP that do not fill blocks.
    """
    rest, experts = packed_base_bytes(config, scheme, experts=False), list_experts(config)
    block = make_expert_shape(config, scheme).nbytes if experts else 0
    return QuantisedLayout(rest_bytes=rest, blocks=len(experts), block_bytes=block)


class ExpertStream:
    """Packs all experts once, and hashes their tensors."""

    def __init__(
        self,
        stored: Mapping[str, StoredTensor],
        config: ModelConfig,
        scheme: Scheme,
        *,
        progress: Progress,
    ) -> None:
        """Read tensors of a base from where they are stored; ``progress`` counts packed bytes."""
        self._stored, self._shape = stored, make_expert_shape(config, scheme)
        self._experts, self._progress = list_experts(config), progress
        self._is_compact = supports_compact(scheme)
        assert config.experts is not None
        room = config.experts.count // 2 if self._is_compact else config.experts.count
        self._max_experts = max(min(packing_thread_count() + 1, room), 1)
        """Experts at a time.

        The memory for those of one layer is not filled yet; compacting one takes that of two.
        """
        whole = len(self._experts) * self._shape.nbytes
        self.min_bytes = whole * MIN_COMPACT_BITS // 16 if self._is_compact else whole
        """Lower bound of the bytes of all pieces."""
        self.digests: dict[str, str] = {}
        """The SHA-256 of each tensor that was read, by its name."""
        self.read_bytes = 0

    def pieces(self) -> Generator[QuantisedPiece]:
        """Yield each expert in its block, which is reused after the next one was requested.

        Raises:
            InvalidPackageError: when a file of the base cannot be read to its end.
        """
        size = self._shape.nbytes
        memory = np.frombuffer(allocate(self._max_experts * size), np.uint8).reshape(
            self._max_experts, size
        )
        free, coming = list(memory), deque[_PendingPack]()
        pool = ThreadPoolExecutor(packing_thread_count())
        try:
            for expert in self._experts:
                if not free:
                    yield from self._finish_first(coming, free)
                block = free.pop()
                coming.append((block, pool.submit(self._pack, expert, block)))
            while coming:
                yield from self._finish_first(coming, free)
        finally:
            pool.shutdown(cancel_futures=True)

    def _finish_first(
        self, coming: deque[_PendingPack], free: list[Array]
    ) -> Generator[QuantisedPiece]:
        """Yield the expert that was started first; its block is free after that."""
        block, packing = coming.popleft()
        piece, digests = packing.result()
        self.digests |= digests
        self.read_bytes += sum(self._stored[name].size for name in digests)
        yield piece
        self._progress(block.nbytes)
        free.append(block)

    def _pack(self, expert: LayerExpert, block: Array) -> tuple[QuantisedPiece, dict[str, str]]:
        """Fill a block with an expert; return it with the digests of what was read."""
        at, digests = f"model.layers.{expert[0]}.{EXPERTS}{expert[1]}", {}
        for name, place in expert_tensor_places(at, self._shape, block).items():
            hasher = hashlib.sha256()
            pack_tensor(self._stored[name], place, hasher=hasher)
            stored = self._stored[name]
            digests[name] = hasher.hexdigest() if stored.codec is None else hash_tensor(stored)
        found = compact_expert(block, self._shape) if self._is_compact else block
        return QuantisedPiece(found.data, hash_piece(found.data)), digests


RejectCopy = Callable[[str], None]
"""Called once with the reason why a copy must be made again."""
_CACHED_SHARE = 0.5
"""Share of the experts not in memory that the page cache must have room for to be useful."""
_MODE_NAMES = {"map": "mapped", "direct": "read with direct I/O"}


def open_copied_experts(
    copies: QuantisedCache,
    config: ModelConfig,
    stored: StoredExperts,
    *,
    cold: MoeColdOption,
    blocks: int,
) -> "CopiedExperts | None":
    """Open the copy of a base to read its experts; None if no copy can be trusted.

    ``blocks`` is how many experts will be in memory. If the others cannot be read in the requested
    mode, that is noted, and they are read through the page cache.
    """
    name = stored.scheme.value
    copy = copies.open(name, compute_copy_shape(config, stored.scheme))
    if copy is None:
        return None

    def give_up(why: str) -> None:
        copies.discard_copy(name, copy, why=why)

    way = (
        _choose_cold_mode(copy.shape, _find_largest_bytes(copy), blocks) if cold == "auto" else cold
    )
    mapping = None
    try:
        if way == "direct":
            copy.bypass_cache(copies.path(name))
        mapping = MappedFile.map_file(copy.handle) if way == "map" else None
    except OSError as error:
        if cold != "auto":
            why = f"{_MODE_NAMES[way]} ({error.strerror or error}): read through the page cache"
            copies.note(name, f"{copies.path(name)} is not {why}")
        way = "read"
    found = CopiedExperts(copy, config, stored, give_up=give_up, cold=way, mapped=mapping)
    if not found.is_useful:
        why = "an expert is longer in it than unpacked"
        copies.note(name, f"{copies.path(name)} is not used: {why}")
    return found


def find_compact_bytes(
    copies: QuantisedCache | None, config: ModelConfig, scheme: Scheme
) -> int | None:
    """Return the bytes of an expert's block in the copy of a base; 0 if experts are not compact.

    None if they will be, in a copy that is still to be written: before the first run in less
    memory, or after a copy was damaged, which the notes of the copies say.
    """
    if copies is None or not supports_compact(scheme):
        return 0
    copy = copies.open(scheme.value, compute_copy_shape(config, scheme))
    if copy is None:
        return None
    with closing(copy):
        return _find_fitting_bytes(copy)


def _find_fitting_bytes(copy: QuantisedFile) -> int:
    """Return the bytes of the largest expert if none takes more than unpacked; else 0."""
    most = _find_largest_bytes(copy)
    return most if most <= copy.shape.block_bytes else 0


def _choose_cold_mode(shape: QuantisedLayout, each: int, blocks: int) -> MoeCold:
    """Return how to read experts of ``each`` bytes if the user did not say.

    A piece in the page cache is several times as fast as a disk; reading others through it is
    slower, and takes processor time.
    """
    free, room = find_unused_bytes(), blocks * shape.block_bytes
    others = max(shape.blocks * each - room, 0)
    if free is None or free - room >= _CACHED_SHARE * others:
        return "read"
    return "direct"


def _find_largest_bytes(copy: QuantisedFile) -> int:
    """Return the bytes of the largest expert."""
    return max(map(copy.piece_size, range(copy.shape.rest_pieces, copy.shape.pieces)))


class CopiedExperts:
    """Reads experts as they were packed, or maps them.

    Owner of the open copy. Several threads may use it at a time.
    """

    def __init__(
        self,
        copy: QuantisedFile,
        config: ModelConfig,
        stored: StoredExperts,
        *,
        give_up: RejectCopy,
        cold: MoeCold = "read",
        mapped: MappedFile | None = None,
    ) -> None:
        """Read from a copy, and from the files of the base what is damaged in it."""
        self._copy, self._stored, self._give_up = copy, stored, give_up
        first = copy.shape.rest_pieces
        self.compact = _find_fitting_bytes(copy) if stored.is_compact else 0
        """Bytes of a block for a compact expert; 0: experts are kept unpacked."""
        self.is_useful = _find_largest_bytes(copy) == copy.shape.block_bytes or bool(self.compact)
        """False: a compact expert is longer than unpacked, so blocks are for unpacked ones."""
        self._pieces = {expert: first + n for n, expert in enumerate(list_experts(config))}
        self._cold, self._mapped = cold, mapped
        self._verified: set[tuple[FileEdition, int]] = set()
        """Pieces of the mapping that were verified, with the edition of the file."""
        self._damaged: set[int] = set()

    @property
    def cold(self) -> MoeCold:
        """How experts are read from disk."""
        return "read" if self._cold == "map" and self._mapped is None else self._cold

    def read(
        self, layer: int, expert: int, block: Array, *, is_wanted: IsWanted = always_wanted
    ) -> int:
        """Fill a block with an expert; return how many bytes of files that took."""
        piece = self._pieces[layer, expert]
        size = self._copy.piece_size(piece)
        is_there = self.is_useful and piece not in self._damaged
        if is_there and self._fill(piece, block[:size], is_wanted):
            return size
        if not self.compact:
            return self._stored.read(layer, expert, block, is_wanted=is_wanted)
        whole = np.empty(self._copy.shape.block_bytes, np.uint8)
        read = self._stored.read(layer, expert, whole, is_wanted=is_wanted)
        packed = compact_expert(whole, self._stored.shape)
        np.copyto(block[: len(packed)], packed)
        return read

    def read_whole(self, layer: int, expert: int, block: Array) -> int:
        """Fill memory of any owner with an unpacked expert; return the bytes read."""
        reader = self._stored if self.compact else self
        return reader.read(layer, expert, block)

    def find_cached_address(self, layer: int, expert: int) -> int | None:
        """Return the address of an expert in the mapped copy if the page cache holds all of it."""
        piece = self._pieces[layer, expert]
        if self._mapped is None or not self.is_useful or piece in self._damaged:
            return None
        begin, size = self._copy.piece_begin(piece), self._copy.piece_size(piece)
        if not self._mapped.is_cached(begin, size) or not self._verify_piece(piece, self._mapped):
            return None
        return self._mapped.address_at(begin)

    def close(self) -> None:
        """Close the copy; its mapped experts may not be used any more."""
        if self._mapped is not None:
            self._mapped.close()
            self._mapped = None
        self._copy.close()

    def _fill(self, piece: int, block: Array, is_wanted: IsWanted) -> bool:
        try:
            if self._copy.read_piece(piece, block.data, is_wanted=is_wanted) and (
                not self.compact or is_compact(block, self._stored.shape)
            ):
                return True
            self._reject(piece, "it is damaged")
        except OSError as error:
            self._reject(piece, error.strerror or str(error))
        return False

    def _verify_piece(self, piece: int, mapped: MappedFile) -> bool:
        """Tell whether a piece is what was written; it is checked once per edition of the file."""
        known = self._copy.edition, piece
        if known in self._verified:
            return True
        with mapped.view(self._copy.piece_begin(piece), self._copy.piece_size(piece)) as octets:
            if self._copy.is_sound(piece, octets):
                self._verified.add(known)
                return True
        self._reject(piece, "it is damaged")
        return False

    def _reject(self, piece: int, why: str) -> None:
        is_first = not self._damaged
        self._damaged.add(piece)
        if is_first:
            self._give_up(why)
