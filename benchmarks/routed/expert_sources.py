"""A cache that foresees no better than trained models let it.

In a base whose tokens say which experts they ask for, every layer's requests are known from the
first; in trained ones the next layer's router is sometimes wrong when it is asked early.

The naive rival: an expert that is missing is read when it is asked for.

Each layer has slots; the least recently used expert is evicted. Nothing is read ahead, and experts
are read one after the other.

Where experts come from that are not on the device: from memory beside it, or from the disk.
"""

import os
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from expertctl.engine.cpu.base_loader import load_packed_base
from expertctl.engine.cpu.packed_base import EXPERTS
from expertctl.engine.kernels.packed_format import Scheme
from expertctl.engine.kernels.packed_matrix import ExpertShape
from expertctl.engine.memory.host import allocate
from expertctl.engine.moe.expert_cache import ExpertCache
from expertctl.engine.moe.expert_files import (
    CopiedExperts,
    ExpertReader,
    IsWanted,
    StoredExperts,
    open_copied_experts,
)
from expertctl.engine.moe.routed_experts import RoutedExperts, RoutingChoices
from expertctl.package.base_tensors import StoredTensor, read_base_tensors
from expertctl.package.model_config import ModelConfig, read_model_config
from expertctl.store.bases import BaseStore
from expertctl.store.quantised_cache import QuantisedCache
from expertctl.store.quantised_file import always_wanted

RIGHT_SHARE = 0.8
"""The share of guesses that are left as they are."""
_DRAWS, _PER_DRAW = 4096, 4096
"""So many are drawn beforehand and reused, since drawing would be timed; a pass takes at most so
many, in one piece."""


class ImperfectPrefetchCache(ExpertCache):
    """A cache some of whose guesses are replaced by other experts, drawn evenly."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        """Take what its base takes."""
        super().__init__(*arguments, **named)
        chance = np.random.default_rng(0)
        wrong = chance.random(_DRAWS) >= RIGHT_SHARE
        others = chance.integers(len(self.places(0)), size=_DRAWS)
        self._wrong, self._others = (
            np.resize(each, _DRAWS + _PER_DRAW) for each in (wrong, others)
        )
        self._next = 0

    def request(
        self, layer: int, choices: RoutingChoices, tokens: int, *, predicts_next: bool = True
    ) -> bool:
        """Have the chosen experts read, and ahead those that are said to be likely."""
        if predicts_next and layer + 1 < len(self.slots):
            likely = choices.likely[layer + 1, :tokens]
            begin, end = self._next, self._next + likely.size
            self._next = end % _DRAWS
            wrong = self._wrong[begin:end].reshape(likely.shape)
            np.copyto(likely, self._others[begin:end].reshape(likely.shape), where=wrong)
        return super().request(layer, choices, tokens, predicts_next=predicts_next)


Numbers = np.ndarray[Any, Any]


class LoadOnMissCache(RoutedExperts):
    """Routed experts that are read when they are asked for."""

    is_whole = False

    def __init__(
        self,
        shape: ExpertShape,
        reader: ExpertReader,
        *,
        numbers: tuple[int, ...],
        experts: int,
        slots: int,
    ) -> None:
        """Begin with no expert in memory, and so many slots in each of the layers ``numbers``."""
        layers = len(numbers)
        places = np.zeros((layers, experts), np.int64)
        super().__init__(shape, places, np.zeros((layers, experts), np.float32))
        self._reader, self._numbers = reader, numbers
        memory = np.frombuffer(allocate(layers * slots * shape.nbytes), np.uint8)
        self._blocks = memory.reshape(layers, slots, shape.nbytes)
        self._held = [OrderedDict[int, int]() for _ in numbers]
        self.requests = self.misses = self.read_bytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return self._blocks.nbytes

    def request(
        self, layer: int, choices: RoutingChoices, tokens: int, *, predicts_next: bool = True
    ) -> bool:
        """Read the experts that tokens chose and that are missing; then none is waited for."""
        wanted = np.unique(choices.selected[layer, :tokens]).tolist()
        held = self._held[layer]
        self.requests += len(wanted)
        missing = [expert for expert in wanted if expert not in held]
        self.misses += len(missing)
        for expert in set(wanted).difference(missing):
            held.move_to_end(expert)
        for expert in missing:
            self._load_expert(layer, expert)
        return False

    def _load_expert(self, layer: int, expert: int) -> None:
        held = self._held[layer]
        slot = len(held)
        if slot == len(self._blocks[layer]):
            gone, slot = held.popitem(last=False)
            self._places[layer, gone], self._hits[layer, gone] = 0, 0
        block = self._blocks[layer, slot]
        self.read_bytes += self._reader.read(self._numbers[layer], expert, block)
        held[expert] = slot
        self._places[layer, expert], self._hits[layer, expert] = block.ctypes.data, 1


_PARTS = ("gate_proj", "up_proj", "down_proj")


class MemoryExperts:
    """Blocks in memory that stands for what lies outside the device's budget.

    They are computed where they lie until they get a slot; then they are copied.
    """

    def __init__(self, blocks: Mapping[tuple[int, int], Numbers]) -> None:
        """Lend these, by layer and number."""
        self._blocks = blocks
        self._addresses = {expert: block.ctypes.data for expert, block in blocks.items()}

    def read(
        self, layer: int, expert: int, block: Numbers, *, is_wanted: IsWanted = always_wanted
    ) -> int:
        """Fill a block with an expert; return its bytes."""
        np.copyto(block, self._blocks[layer, expert])
        return block.nbytes

    def find_cached_address(self, layer: int, expert: int) -> int | None:
        """Return where an expert lies."""
        return self._addresses[layer, expert]


class UncachedExperts:
    """Reads files, and has the system forget what was read.

    So every expert comes from the disk, as on a machine that has no memory left to keep files in.
    """

    def __init__(
        self, stored: Mapping[str, StoredTensor], config: ModelConfig, scheme: Scheme
    ) -> None:
        """Read from where the tensors of a base lie; nothing of those files is kept any more."""
        self._stored, self._reader = stored, StoredExperts(stored, config, scheme)
        for path in {tensor.path for tensor in stored.values()}:
            _drop_cached_pages(path, 0, 0)

    def read(
        self, layer: int, expert: int, block: Numbers, *, is_wanted: IsWanted = always_wanted
    ) -> int:
        """Fill a block with an expert; return how many bytes of files that took."""
        read = self._reader.read(layer, expert, block, is_wanted=is_wanted)
        for part in _PARTS:
            tensor = self._stored[f"model.layers.{layer}.{EXPERTS}{expert}.{part}.weight"]
            _drop_cached_pages(tensor.path, tensor.offset, tensor.size)
        return read

    def find_cached_address(self, layer: int, expert: int) -> int | None:
        """Return None: it is on the disk."""
        return None


def open_uncached_reader(directory: Path, home: Path, scheme: Scheme) -> CopiedExperts:
    """Return what reads the copy that `make_packed_copy` made, past the system's file cache."""
    config = read_model_config(directory)
    stored = StoredExperts(read_base_tensors(directory, config), config, scheme)
    copies = _open_copies(directory, home)
    reader = open_copied_experts(copies, config, stored, cold="direct", blocks=0)
    assert reader is not None, "it was made before"
    assert reader.cold == "direct", copies.take_notes()
    _drop_cached_pages(copies.path(scheme.value), 0, 0)
    return reader


def make_packed_copy(directory: Path, home: Path, scheme: Scheme) -> None:
    """Have a machine with this home keep a copy of a base, as its first run would."""
    copies, config = _open_copies(directory, home), read_model_config(directory)
    load_packed_base(directory, config, scheme, experts=False, copies=copies, cold="direct")


def _open_copies(directory: Path, home: Path) -> QuantisedCache:
    bases = BaseStore(home)
    known = next((base for base in bases.list_bases() if base.path == directory.resolve()), None)
    return QuantisedCache(bases, known or bases.add(directory))


def _drop_cached_pages(path: os.PathLike[str], offset: int, size: int) -> None:
    """Let go of the cached pages of a part of a file that was written long ago; 0: to its end."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, offset, size, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
