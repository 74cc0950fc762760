"""Sources of experts that are not on the device, and two caches for comparison.

*Sources*: experts come from memory outside the device's budget, or from the disk.

*A cache that predicts no better than trained models allow*: in a base whose tokens encode the
experts that they request, every layer's requests are known from the first; in trained ones the next
layer's router is sometimes wrong when it is evaluated early.

*The naive rival*: a missing expert is read when it is requested. Each layer has slots; the least
recently used expert is evicted. Nothing is prefetched, and experts are read one after the other.
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
from expertctl.package.base_tensors import read_base_tensors
from expertctl.package.model_config import ModelConfig, read_model_config
from expertctl.package.stored_tensor import StoredTensor
from expertctl.store.bases import BaseStore
from expertctl.store.quantised_cache import QuantisedCache
from expertctl.store.quantised_file import always_wanted

RIGHT_SHARE = 0.8
"""The share of predictions that are left unchanged."""
_DRAWS, _PER_DRAW = 4096, 4096
"""So many are drawn in advance and reused, because drawing would be timed; a pass takes at most so
many, in one piece.
"""


class ImperfectPrefetchCache(ExpertCache):
    """A cache in which some predictions are replaced by other experts, drawn uniformly."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        """Take the same arguments as the base class."""
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
        """Read the chosen experts, and prefetch those that are predicted."""
        if predicts_next and layer + 1 < len(self.slots):
            likely = choices.likely[layer + 1, :tokens]
            begin, end = self._next, self._next + likely.size
            self._next = end % _DRAWS
            wrong = self._wrong[begin:end].reshape(likely.shape)
            np.copyto(likely, self._others[begin:end].reshape(likely.shape), where=wrong)
        return super().request(layer, choices, tokens, predicts_next=predicts_next)


Numbers = np.ndarray[Any, Any]


class LoadOnMissCache(RoutedExperts):
    """Routed experts that are read when they are requested."""

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
        """Read the missing experts that tokens chose; afterwards all are in memory."""
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
    """Blocks in memory that stands for storage outside the device's budget.

    They are computed in place until they get a slot; then they are copied.
    """

    def __init__(self, blocks: Mapping[tuple[int, int], Numbers]) -> None:
        """Offer these experts for computing in place, by layer and number."""
        self._blocks = blocks
        self._addresses = {expert: block.ctypes.data for expert, block in blocks.items()}

    def read(
        self, layer: int, expert: int, block: Numbers, *, is_wanted: IsWanted = always_wanted
    ) -> int:
        """Fill a block with an expert; return its bytes."""
        np.copyto(block, self._blocks[layer, expert])
        return block.nbytes

    def find_cached_address(self, layer: int, expert: int) -> int | None:
        """Return the address of an expert."""
        return self._addresses[layer, expert]


class UncachedExperts:
    """Reads files, and has the system drop what was read from the page cache.

    So every expert comes from the disk, as on a machine without free memory for the page cache.
    """

    def __init__(
        self, stored: Mapping[str, StoredTensor], config: ModelConfig, scheme: Scheme
    ) -> None:
        """Read from the files of a base; no page of those files stays cached."""
        self._stored, self._reader = stored, StoredExperts(stored, config, scheme)
        for path in {tensor.path for tensor in stored.values()}:
            _drop_cached_pages(path, 0, 0)

    def read(
        self, layer: int, expert: int, block: Numbers, *, is_wanted: IsWanted = always_wanted
    ) -> int:
        """Fill a block with an expert; return the number of bytes read from files."""
        read = self._reader.read(layer, expert, block, is_wanted=is_wanted)
        for part in _PARTS:
            tensor = self._stored[f"model.layers.{layer}.{EXPERTS}{expert}.{part}.weight"]
            _drop_cached_pages(tensor.path, tensor.offset, tensor.size)
        return read

    def find_cached_address(self, layer: int, expert: int) -> int | None:
        """Return None: the expert is on the disk."""
        return None


def open_uncached_reader(directory: Path, home: Path, scheme: Scheme) -> CopiedExperts:
    """Return a reader of the copy that `make_packed_copy` made, bypassing the page cache."""
    config = read_model_config(directory)
    stored = StoredExperts(read_base_tensors(directory, config), config, scheme)
    copies = _open_copies(directory, home)
    reader = open_copied_experts(copies, config, stored, cold="direct", blocks=0)
    assert reader is not None, "it was made before"
    assert reader.cold == "direct", copies.take_notes()
    _drop_cached_pages(copies.path(scheme.value), 0, 0)
    return reader


def make_packed_copy(directory: Path, home: Path, scheme: Scheme) -> None:
    """Have a machine with this home store a copy of a base, as its first run would."""
    copies, config = _open_copies(directory, home), read_model_config(directory)
    load_packed_base(directory, config, scheme, experts=False, copies=copies, cold="direct")


def _open_copies(directory: Path, home: Path) -> QuantisedCache:
    bases = BaseStore(home)
    known = next((base for base in bases.list_bases() if base.path == directory.resolve()), None)
    return QuantisedCache(bases, known or bases.add(directory))


def _drop_cached_pages(path: os.PathLike[str], offset: int, size: int) -> None:
    """Drop the cached pages of a part of a file that was written long ago; 0: to its end."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, offset, size, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
