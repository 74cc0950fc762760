"""Where experts come from that are not on the device: from memory beside it, or from the disk."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from expertctl.engine.kernels.scheme import Scheme
from expertctl.engine.moe.expert_copies import CopiedExperts, copied_experts
from expertctl.engine.moe.expert_files import IsWanted, StoredExperts
from expertctl.engine.packed_base import EXPERTS
from expertctl.engine.packed_load import load_packed_base
from expertctl.package.base_tensors import StoredTensor, base_tensors
from expertctl.package.model_config import ModelConfig, read_config
from expertctl.store.bases import BaseStore
from expertctl.store.copy_file import always
from expertctl.store.quantised_copies import QuantisedCopies

Numbers = np.ndarray[Any, Any]
_PARTS = ("gate_proj", "up_proj", "down_proj")


class LentExperts:
    """Blocks in memory that stands for what lies outside the device's budget.

    They are computed where they lie until they get a slot; then they are copied.
    """

    def __init__(self, blocks: Mapping[tuple[int, int], Numbers]) -> None:
        """Lend these, by layer and number."""
        self._blocks = blocks
        self._addresses = {expert: block.ctypes.data for expert, block in blocks.items()}

    def read(self, layer: int, expert: int, block: Numbers, *, is_wanted: IsWanted = always) -> int:
        """Fill a block with an expert; return its bytes."""
        np.copyto(block, self._blocks[layer, expert])
        return block.nbytes

    def lend(self, layer: int, expert: int) -> int | None:
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
            _forget(path, 0, 0)

    def read(self, layer: int, expert: int, block: Numbers, *, is_wanted: IsWanted = always) -> int:
        """Fill a block with an expert; return how many bytes of files that took."""
        read = self._reader.read(layer, expert, block, is_wanted=is_wanted)
        for part in _PARTS:
            tensor = self._stored[f"model.layers.{layer}.{EXPERTS}{expert}.{part}.weight"]
            _forget(tensor.path, tensor.offset, tensor.size)
        return read

    def lend(self, layer: int, expert: int) -> int | None:
        """Return None: it is on the disk."""
        return None


def read_directly(directory: Path, home: Path, scheme: Scheme) -> CopiedExperts:
    """Return what reads the copy that `keep_copy` made, past the system's file cache."""
    config = read_config(directory)
    stored = StoredExperts(base_tensors(directory, config), config, scheme)
    copies = _copies(directory, home)
    reader = copied_experts(copies, config, stored, cold="direct", blocks=0)
    assert reader is not None, "it was made before"
    assert reader.cold == "direct", copies.take_notes()
    _forget(copies.path(scheme.value), 0, 0)
    return reader


def keep_copy(directory: Path, home: Path, scheme: Scheme) -> None:
    """Have a machine with this home keep a copy of a base, as its first run would."""
    copies, config = _copies(directory, home), read_config(directory)
    load_packed_base(directory, config, scheme, experts=False, copies=copies, cold="direct")


def _copies(directory: Path, home: Path) -> QuantisedCopies:
    bases = BaseStore(home)
    known = next((base for base in bases.bases() if base.path == directory.resolve()), None)
    return QuantisedCopies(bases, known or bases.add(directory))


def _forget(path: os.PathLike[str], offset: int, size: int) -> None:
    """Let go of the cached pages of a part of a file that was written long ago; 0: to its end."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, offset, size, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
