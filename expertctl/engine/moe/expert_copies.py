"""Routed experts in the copy of a base: each is one read, or lies in the system's file cache.

Damage is reported; damaged experts are read from the files of the base, and the copy is made again
the next time.
"""

from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np

from expertctl.engine.compact_expert import can_be_compact, compacted, is_compact
from expertctl.engine.kernels.scheme import Scheme
from expertctl.engine.mapped_file import MappedFile
from expertctl.engine.memory import unused
from expertctl.engine.moe.expert_files import IsWanted, StoredExperts
from expertctl.engine.moe.expert_stream import copy_shape, experts_of
from expertctl.package.model_config import ModelConfig
from expertctl.routing.request import MoeCold, MoeColdWish
from expertctl.store.copy_file import CopyFile, CopyShape, Edition, always
from expertctl.store.quantised_copies import QuantisedCopies

Numbers = np.ndarray[Any, Any]
GiveUp = Callable[[str], None]
"""Called once with the reason why a copy must be made again."""
_CACHED_SHARE = 0.5
"""The share of experts not in memory that the system's cache must have room for to be of use."""
_NOT = {"map": "mapped", "direct": "read past the cache"}


def copied_experts(
    copies: QuantisedCopies,
    config: ModelConfig,
    stored: StoredExperts,
    *,
    cold: MoeColdWish,
    blocks: int,
) -> "CopiedExperts | None":
    """Open the copy of a base to read its experts; None where none can be trusted.

    ``blocks`` is how many experts will be in memory. Where the others cannot come from the disk in
    the way that is wished, that is reported, and they are read.
    """
    name = stored.scheme.value
    copy = copies.open(name, copy_shape(config, stored.scheme))
    if copy is None:
        return None

    def give_up(why: str) -> None:
        copies.give_up(name, copy, why=why)

    way = _usual(copy.shape, _most_bytes(copy), blocks) if cold == "auto" else cold
    mapping = None
    try:
        if way == "direct":
            copy.bypass_cache(copies.path(name))
        mapping = MappedFile.of(copy.handle) if way == "map" else None
    except OSError as error:
        if cold != "auto":
            why = f"{_NOT[way]} ({error.strerror or error}): read instead"
            copies.note(name, f"{copies.path(name)} is not {why}")
        way = "read"
    found = CopiedExperts(copy, config, stored, give_up=give_up, cold=way, mapped=mapping)
    if not found.is_of_use:
        why = "an expert is longer there than unpacked"
        copies.note(name, f"{copies.path(name)} is not used: {why}")
    return found


def compact_bytes(
    copies: QuantisedCopies | None, config: ModelConfig, scheme: Scheme
) -> int | None:
    """Return the bytes of a block for an expert of a base's copy; 0 where experts are not compact.

    None where they will be, in a copy that is still to be written: before the first run in less
    memory, or after a copy was damaged, which a note of the copies tells.
    """
    if copies is None or not can_be_compact(scheme):
        return 0
    copy = copies.open(scheme.value, copy_shape(config, scheme))
    if copy is None:
        return None
    with closing(copy):
        return _fitting(copy)


def _fitting(copy: CopyFile) -> int:
    """Return the bytes of the largest expert, where none takes more than unpacked; else 0."""
    most = _most_bytes(copy)
    return most if most <= copy.shape.block else 0


def _usual(shape: CopyShape, each: int, blocks: int) -> MoeCold:
    """Return how to read experts of so many bytes where the user did not say.

    Where the system's cache has a piece, it is several times as fast as a disk; where it has not,
    reading through it is slower, and takes the processor's time.
    """
    free, room = unused(), blocks * shape.block
    others = max(shape.blocks * each - room, 0)
    if free is None or free - room >= _CACHED_SHARE * others:
        return "read"
    return "direct"


def _most_bytes(copy: CopyFile) -> int:
    """Return the bytes of the largest expert."""
    return max(map(copy.size_of, range(copy.shape.rest_pieces, copy.shape.pieces)))


class CopiedExperts:
    """Reads experts as they were packed, or lends them where the copy is mapped.

    The one owner of the open copy. Several threads may use it at a time.
    """

    def __init__(
        self,
        copy: CopyFile,
        config: ModelConfig,
        stored: StoredExperts,
        *,
        give_up: GiveUp,
        cold: MoeCold = "read",
        mapped: MappedFile | None = None,
    ) -> None:
        """Read from a copy, and from the files of the base what is damaged in it."""
        self._copy, self._stored, self._give_up = copy, stored, give_up
        first = copy.shape.rest_pieces
        self.compact = _fitting(copy) if stored.is_compact else 0
        """Bytes of a block for a compact expert; 0: experts are kept as they are computed."""
        self.is_of_use = _most_bytes(copy) == copy.shape.block or bool(self.compact)
        """False: a compact expert is longer than unpacked, so blocks are for unpacked ones."""
        self._pieces = {expert: first + n for n, expert in enumerate(experts_of(config))}
        self._cold, self._mapped = cold, mapped
        self._sound: set[tuple[Edition, int]] = set()
        """Pieces whose bytes were checked in the mapping, in an edition of the file."""
        self._damaged: set[int] = set()

    @property
    def cold(self) -> MoeCold:
        """How experts come from the disk."""
        return "read" if self._cold == "map" and self._mapped is None else self._cold

    def read(self, layer: int, expert: int, block: Numbers, *, is_wanted: IsWanted = always) -> int:
        """Fill a block with an expert; return how many bytes of files that took."""
        piece = self._pieces[layer, expert]
        size = self._copy.size_of(piece)
        is_there = self.is_of_use and piece not in self._damaged
        if is_there and self._filled(piece, block[:size], is_wanted):
            return size
        if not self.compact:
            return self._stored.read(layer, expert, block, is_wanted=is_wanted)
        whole = np.empty(self._copy.shape.block, np.uint8)
        read = self._stored.read(layer, expert, whole, is_wanted=is_wanted)
        packed = compacted(whole, self._stored.shape)
        np.copyto(block[: len(packed)], packed)
        return read

    def read_whole(self, layer: int, expert: int, block: Numbers) -> int:
        """Fill memory with an expert as it is computed, wherever it is; return the bytes read."""
        reader = self._stored if self.compact else self
        return reader.read(layer, expert, block)

    def lend(self, layer: int, expert: int) -> int | None:
        """Return the address of an expert in the mapped copy, if the system holds all of it."""
        piece = self._pieces[layer, expert]
        if self._mapped is None or not self.is_of_use or piece in self._damaged:
            return None
        begin, size = self._copy.begin_of(piece), self._copy.size_of(piece)
        if not self._mapped.is_cached(begin, size) or not self._is_sound(piece, self._mapped):
            return None
        return self._mapped.address(begin)

    def close(self) -> None:
        """Let go of the copy; what was lent of it may not be used any more."""
        if self._mapped is not None:
            self._mapped.close()
            self._mapped = None
        self._copy.close()

    def _filled(self, piece: int, block: Numbers, is_wanted: IsWanted) -> bool:
        try:
            if self._copy.fill(piece, block.data, is_wanted=is_wanted) and (
                not self.compact or is_compact(block, self._stored.shape)
            ):
                return True
            self._refuse(piece, "it is damaged")
        except OSError as error:
            self._refuse(piece, error.strerror or str(error))
        return False

    def _is_sound(self, piece: int, mapped: MappedFile) -> bool:
        """Tell whether a piece is what was written; it is checked once in each edition."""
        known = self._copy.edition, piece
        if known in self._sound:
            return True
        with mapped.part(self._copy.begin_of(piece), self._copy.size_of(piece)) as octets:
            if self._copy.is_sound(piece, octets):
                self._sound.add(known)
                return True
        self._refuse(piece, "it is damaged")
        return False

    def _refuse(self, piece: int, why: str) -> None:
        is_first = not self._damaged
        self._damaged.add(piece)
        if is_first:
            self._give_up(why)
