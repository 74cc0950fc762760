"""Tasks and queries of the processes of the benchmark of routed experts, and their decoders.

The decoders of one base keep its routed experts in different ways. ``share`` of all experts may be
in memory, including the pool: it has room for the experts that two layers request for one token,
and the layers share the rest as slots. The naive rival has slots only.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from benchmarks.engine_process import ReadPrompt
from benchmarks.harness import Seconds, time_action
from benchmarks.routed.expert_sources import (
    ImperfectPrefetchCache,
    LoadOnMissCache,
    MemoryExperts,
    UncachedExperts,
    open_uncached_reader,
)
from expertctl.engine.cpu.base_loader import load_packed_base, packing_scratch_bytes
from expertctl.engine.cpu.decoder import PackedDecoder
from expertctl.engine.cpu.packed_base import PackedBase, make_expert_shape
from expertctl.engine.kernels.packed_format import Scheme
from expertctl.engine.kernels.thread_pool import ThreadPool
from expertctl.engine.kv.block_pool import InterleavedPages, PagedKVCache
from expertctl.engine.moe.expert_cache import ExpertCache
from expertctl.engine.moe.expert_files import CopiedExperts, ExpertReader
from expertctl.engine.moe.expert_memory import ExpertMemory, HostBlockStorage
from expertctl.engine.moe.layer_slots import LayerSlots
from expertctl.package.architectures import ExpertsConfig
from expertctl.package.base_tensors import read_base_tensors
from expertctl.package.model_config import read_model_config


class ExpertPlacement(Enum):
    """The place of the routed experts of a decoder."""

    WHOLE = "all in memory, no cache"
    CACHED = "all in memory, through the cache"
    LENT = "some resident, the others computed in memory beside the device's"
    PREPACKED = "some resident, the others read from a copy of the base as it was packed"
    ON_MISS = "some resident, the others read from the disk when they are asked for, LRU"


class ProcessFigure(Enum):
    """A figure that a process reports."""

    HELD = "bytes that its parts say they hold, buffers of readers among them"
    GROWN = "bytes by which its own memory grew at most since before the base was read"
    DISK = "bytes that it had the disk read"
    READ = "bytes of files that experts were read from"
    MISSES = "requests that found no resident, of 1"
    HUGE = "its own memory that lies in huge pages, of 1"


@dataclass(frozen=True, slots=True)
class FollowTask:
    """Decode so many tokens, one after the other, from the end of the last task."""

    keeping: ExpertPlacement
    tokens: int


@dataclass(frozen=True, slots=True)
class ReportTask:
    """Report a figure."""

    keeping: ExpertPlacement
    figure: ProcessFigure


RoutedTask = FollowTask | ReadPrompt | ReportTask


CONTEXT = 1024
"""KV cache capacity of every decoder, in tokens."""
_NEED_ALL = (ExpertPlacement.WHOLE, ExpertPlacement.CACHED, ExpertPlacement.LENT)
_THREADS = 3
"""Threads that read experts for a cache, as many as in runs."""


@dataclass(frozen=True, slots=True)
class BlockSplit:
    """The number of slots of a layer, and of blocks without a slot."""

    slots: int
    pool: int


def split_blocks(routed: ExpertsConfig, share: float) -> BlockSplit:
    """Divide the blocks for that many experts between slots and pool."""
    layers = len(routed.layers)
    blocks = int(share * layers * routed.count)
    slots = max(blocks - 2 * routed.used, 0) // layers
    return BlockSplit(slots, blocks - layers * slots)


def open_decoders(
    directory: Path,
    placements: Sequence[ExpertPlacement],
    crew: ThreadPool,
    *,
    scheme: Scheme,
    share: float,
    tokens: int,
    copies: Path | None = None,
) -> dict[ExpertPlacement, "RoutedDecoder"]:
    """Read a base, and fill the memory of each way of keeping its experts.

    ``copies`` is where `make_packed_copy` put the copies of bases, for decoders that read those.
    """
    config = read_model_config(directory)
    all_there = bool(set(placements).intersection(_NEED_ALL))
    base = load_packed_base(directory, config, scheme, experts=all_there)
    homes = {}
    for keeping in placements:
        files: ExpertReader = UncachedExperts(read_base_tensors(directory, config), config, scheme)
        if keeping is ExpertPlacement.PREPACKED:
            assert copies is not None
            files = open_uncached_reader(directory, copies, scheme)
        experts = _make_expert_source(keeping, base, files, share)
        seen = base if experts is None else replace(base, experts={})
        homes[keeping] = RoutedDecoder(seen, crew, experts, tokens=tokens)
    return homes


def _make_expert_source(
    keeping: ExpertPlacement, base: PackedBase, files: ExpertReader, share: float
) -> ExpertCache | LoadOnMissCache | None:
    routed = base.config.experts
    assert routed is not None
    match keeping:
        case ExpertPlacement.WHOLE:
            return None
        case ExpertPlacement.CACHED:
            return _make_cache(base, MemoryExperts(base.experts), BlockSplit(routed.count, 0))
        case ExpertPlacement.LENT:
            return _make_cache(base, MemoryExperts(base.experts), split_blocks(routed, share))
        case ExpertPlacement.PREPACKED:
            return _make_cache(base, files, split_blocks(routed, share))
        case ExpertPlacement.ON_MISS:
            return LoadOnMissCache(
                make_expert_shape(base.config, base.scheme),
                files,
                numbers=routed.layers,
                experts=routed.count,
                slots=int(share * routed.count),
            )


def _make_cache(base: PackedBase, reader: ExpertReader, found: BlockSplit) -> ExpertCache:
    """Return our own cache with all slots filled."""
    routed = base.config.experts
    assert routed is not None
    layers, shape = len(routed.layers), make_expert_shape(base.config, base.scheme)
    size = (layers * found.slots + found.pool) * shape.nbytes
    if isinstance(reader, CopiedExperts):
        shape = replace(shape, compact_bytes=reader.compact)
    memory = ExpertMemory(
        shape,
        layers=layers,
        experts=routed.count,
        blocks=HostBlockStorage.from_budget(size, shape, max_count=layers * routed.count),
    )
    slots = [LayerSlots(experts=routed.count, capacity=found.slots) for _ in range(layers)]
    some_go = found.slots < routed.count  # else there is nothing to guess at
    kind = ImperfectPrefetchCache if some_go else ExpertCache
    cache = kind(memory, reader, layer_numbers=routed.layers, slots=slots, threads=_THREADS)
    cache.fill_slots([[]] * layers)
    return cache


class RoutedDecoder:
    """A decoder and its sequence; tokens follow each other in the vocabulary."""

    def __init__(
        self,
        base: PackedBase,
        crew: ThreadPool,
        experts: ExpertCache | LoadOnMissCache | None,
        *,
        tokens: int,
    ) -> None:
        """Read the first ``tokens`` of the vocabulary repeatedly."""
        self.experts = experts
        self.decoder = PackedDecoder(base, crew, experts=experts)
        exact = base.scheme is Scheme.FLOAT32
        numbers = Scheme.FLOAT32 if exact else Scheme.FLOAT16  # those of `run`
        self._cache = PagedKVCache(base.config, CONTEXT, layout=InterleavedPages(numbers))
        self._base, self._next, self._tokens = base, 0, tokens

    @property
    def nbytes(self) -> int:
        """Bytes that its parts report."""
        scratch = 0 if self.experts is None else packing_scratch_bytes(self._base.config)
        experts = 0 if self.experts is None else self.experts.nbytes
        return self._base.nbytes + experts + self.decoder.nbytes + self._cache.nbytes + scratch

    @property
    def read_bytes(self) -> int:
        """Bytes of files, or of memory outside the device's, from which experts were read."""
        match self.experts:
            case None:
                return 0
            case LoadOnMissCache() as rival:
                return rival.read_bytes
            case ExpertCache() as cache:
                return cache.activity().read_bytes

    @property
    def miss_rate(self) -> float:
        """The share of requests whose expert was not in memory."""
        match self.experts:
            case None:
                return 0.0
            case LoadOnMissCache() as rival:
                return rival.misses / rival.requests
            case ExpertCache() as cache:
                activity = cache.activity()
                return activity.misses / activity.requests

    def decode(self, count: int) -> Seconds:
        """Decode so many tokens one after the other, at most `CONTEXT`."""
        ids = [(self._next + number) % self._tokens for number in range(count)]
        self._next += count
        if self._cache.length + count > CONTEXT:
            self._cache.reset()
        return time_action(lambda: self._decode(ids))()

    def read_prompt(self, count: int) -> Seconds:
        """Process a prompt of so many tokens."""
        self._cache.reset()
        return time_action(lambda: self.decoder.prefill(list(range(count)), self._cache))()

    def _decode(self, ids: Sequence[int]) -> None:
        for token in ids:
            self.decoder.decode(token, self._cache)
