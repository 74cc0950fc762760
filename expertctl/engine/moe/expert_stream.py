"""`ExpertStream`: the routed experts of a base packed one after another, for a copy of them.

Where not all of them fit into memory, only some are in it at a time: as many as threads pack, and
one that is being written. Those in bfloat16 are compact in a copy.
"""

import hashlib
from collections import deque
from collections.abc import Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from expertctl.digest import Progress
from expertctl.engine.compact_expert import can_be_compact, compacted
from expertctl.engine.kernels.compact import LEAST_BITS
from expertctl.engine.kernels.scheme import Scheme
from expertctl.engine.memory import allocate
from expertctl.engine.packed_base import EXPERTS, expert_places, expert_shape, packed_bytes
from expertctl.engine.tensor_packing import pack_tensor, packing_threads
from expertctl.package.base_tensors import StoredTensor
from expertctl.package.model_config import ModelConfig
from expertctl.store.copy_file import CopyShape, Piece, digest_of

Numbers = np.ndarray[Any, Any]
Expert = tuple[int, int]
"""A layer of the base, and the number of an expert there."""
_Coming = tuple[Numbers, Future[tuple[Piece, dict[str, str]]]]
"""A block, and what will be in it."""


def experts_of(config: ModelConfig) -> list[Expert]:
    """Return all routed experts, in the order in which they lie in memory and in a copy."""
    routed = config.experts
    if routed is None:
        return []
    return [(layer, expert) for layer in routed.layers for expert in range(routed.count)]


def copy_shape(config: ModelConfig, scheme: Scheme) -> CopyShape:
    """Return what a copy of a base holds, whether it is run whole or not.

    Raises:
        IncompatibleError: for heads or a middle of an MLP that do not fill blocks.
    """
    rest, experts = packed_bytes(config, scheme, experts=False), experts_of(config)
    block = expert_shape(config, scheme).nbytes if experts else 0
    return CopyShape(rest=rest, blocks=len(experts), block=block)


class ExpertStream:
    """Packs all experts once; knows then the digests of their tensors, and how much was read."""

    def __init__(
        self,
        stored: Mapping[str, StoredTensor],
        config: ModelConfig,
        scheme: Scheme,
        *,
        progress: Progress,
    ) -> None:
        """Read from where the tensors of a base lie; ``progress`` counts packed bytes."""
        self._stored, self._shape = stored, expert_shape(config, scheme)
        self._experts, self._progress = experts_of(config), progress
        self._is_compact = can_be_compact(scheme)
        assert config.experts is not None
        room = config.experts.count // 2 if self._is_compact else config.experts.count
        self._most = max(min(packing_threads() + 1, room), 1)
        """Experts at a time. The memory for those of one layer is not filled yet; one that is made
        compact takes that of two."""
        whole = len(self._experts) * self._shape.nbytes
        self.least_bytes = whole * LEAST_BITS // 16 if self._is_compact else whole
        """What all pieces take at least."""
        self.digests: dict[str, str] = {}
        """The sha256 of each tensor that was read, by its name."""
        self.read_bytes = 0

    def pieces(self) -> Generator[Piece]:
        """Yield each expert in its block, which is reused after the next one was asked for.

        Raises:
            InvalidPackageError: when a file of the base cannot be read to its end.
        """
        size = self._shape.nbytes
        memory = np.frombuffer(allocate(self._most * size), np.uint8).reshape(self._most, size)
        free, coming = list(memory), deque[_Coming]()
        pool = ThreadPoolExecutor(packing_threads())
        try:
            for expert in self._experts:
                if not free:
                    yield from self._first(coming, free)
                block = free.pop()
                coming.append((block, pool.submit(self._packed, expert, block)))
            while coming:
                yield from self._first(coming, free)
        finally:
            pool.shutdown(cancel_futures=True)

    def _first(self, coming: deque[_Coming], free: list[Numbers]) -> Generator[Piece]:
        """Yield what was begun first; its block is free after that."""
        block, packing = coming.popleft()
        piece, digests = packing.result()
        self.digests |= digests
        self.read_bytes += sum(self._stored[name].size for name in digests)
        yield piece
        self._progress(block.nbytes)
        free.append(block)

    def _packed(self, expert: Expert, block: Numbers) -> tuple[Piece, dict[str, str]]:
        """Fill a block with an expert; return it with the digests of what was read."""
        at, digests = f"model.layers.{expert[0]}.{EXPERTS}{expert[1]}", {}
        for name, place in expert_places(at, self._shape, block).items():
            hasher = hashlib.sha256()
            pack_tensor(self._stored[name], place, hasher=hasher)
            digests[name] = hasher.hexdigest()
        found = compacted(block, self._shape) if self._is_compact else block
        return Piece(found.data, digest_of(found.data)), digests
