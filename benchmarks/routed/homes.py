"""Decoders of one base that keep its routed experts in different ways.

``share`` of all experts may be in memory, the pool among them: it has room for what two layers ask
for one token, and the layers share the rest as slots. The naive rival has slots alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.harness import Seconds, timed
from benchmarks.routed.foresight import MisledCache
from benchmarks.routed.load_on_miss import LoadOnMiss
from benchmarks.routed.readers import LentExperts, UncachedExperts, read_directly
from benchmarks.routed.tasks import Keeping
from expertctl.engine.kernels.crew import Crew
from expertctl.engine.kernels.scheme import Scheme
from expertctl.engine.kv_pages import KVPages
from expertctl.engine.moe.expert_cache import ExpertCache
from expertctl.engine.moe.expert_copies import CopiedExperts
from expertctl.engine.moe.expert_files import ExpertReader
from expertctl.engine.moe.expert_memory import ExpertMemory, HostBlocks
from expertctl.engine.moe.layer_slots import LayerSlots
from expertctl.engine.packed_base import PackedBase, expert_shape
from expertctl.engine.packed_decoder import PackedDecoder
from expertctl.engine.packed_load import load_packed_base, packing_scratch
from expertctl.package.base_tensors import base_tensors
from expertctl.package.experts_config import ExpertsConfig
from expertctl.package.model_config import read_config

CONTEXT = 1024
"""Room for tokens in every decoder."""
_NEED_ALL = (Keeping.WHOLE, Keeping.CACHED, Keeping.LENT)
_THREADS = 3
"""Threads that read experts for a cache, as many as runs have."""


@dataclass(frozen=True, slots=True)
class Split:
    """How many slots a layer has, and how many blocks have no slot."""

    slots: int
    pool: int


def split(routed: ExpertsConfig, share: float) -> Split:
    """Share the blocks out that so many of all experts take."""
    layers = len(routed.layers)
    blocks = int(share * layers * routed.count)
    slots = max(blocks - 2 * routed.used, 0) // layers
    return Split(slots, blocks - layers * slots)


def open_homes(
    directory: Path,
    keepings: Sequence[Keeping],
    crew: Crew,
    *,
    scheme: Scheme,
    share: float,
    tokens: int,
    copies: Path | None = None,
) -> dict[Keeping, "Home"]:
    """Read a base, and fill what each way of keeping its experts has room for.

    ``copies`` is where `keep_copy` put the copies of bases, for decoders that read those.
    """
    config = read_config(directory)
    all_there = bool(set(keepings).intersection(_NEED_ALL))
    base = load_packed_base(directory, config, scheme, experts=all_there)
    homes = {}
    for keeping in keepings:
        files: ExpertReader = UncachedExperts(base_tensors(directory, config), config, scheme)
        if keeping is Keeping.PREPACKED:
            assert copies is not None
            files = read_directly(directory, copies, scheme)
        experts = _experts(keeping, base, files, share)
        seen = base if experts is None else replace(base, experts={})
        homes[keeping] = Home(seen, crew, experts, tokens=tokens)
    return homes


def _experts(
    keeping: Keeping, base: PackedBase, files: ExpertReader, share: float
) -> ExpertCache | LoadOnMiss | None:
    routed = base.config.experts
    assert routed is not None
    match keeping:
        case Keeping.WHOLE:
            return None
        case Keeping.CACHED:
            return _cache(base, LentExperts(base.experts), Split(routed.count, 0))
        case Keeping.LENT:
            return _cache(base, LentExperts(base.experts), split(routed, share))
        case Keeping.PREPACKED:
            return _cache(base, files, split(routed, share))
        case Keeping.ON_MISS:
            return LoadOnMiss(
                expert_shape(base.config, base.scheme),
                files,
                numbers=routed.layers,
                experts=routed.count,
                slots=int(share * routed.count),
            )


def _cache(base: PackedBase, reader: ExpertReader, found: Split) -> ExpertCache:
    """Return our own cache, all its slots filled."""
    routed = base.config.experts
    assert routed is not None
    layers, shape = len(routed.layers), expert_shape(base.config, base.scheme)
    size = (layers * found.slots + found.pool) * shape.nbytes
    if isinstance(reader, CopiedExperts):
        shape = replace(shape, compact=reader.compact)
    memory = ExpertMemory(
        shape,
        layers=layers,
        experts=routed.count,
        blocks=HostBlocks.within(size, shape, most=layers * routed.count),
    )
    slots = [LayerSlots(experts=routed.count, capacity=found.slots) for _ in range(layers)]
    some_go = found.slots < routed.count  # else there is nothing to guess at
    kind = MisledCache if some_go else ExpertCache
    cache = kind(memory, reader, numbers=routed.layers, slots=slots, threads=_THREADS)
    cache.fill([[]] * layers)
    return cache


class Home:
    """A decoder and the text that it reads; tokens follow each other in the vocabulary."""

    def __init__(
        self,
        base: PackedBase,
        crew: Crew,
        experts: ExpertCache | LoadOnMiss | None,
        *,
        tokens: int,
    ) -> None:
        """Read the first ``tokens`` of the vocabulary again and again."""
        self.experts = experts
        self.decoder = PackedDecoder(base, crew, experts=experts)
        exact = base.scheme is Scheme.FLOAT32
        numbers = Scheme.FLOAT32 if exact else Scheme.FLOAT16  # those of `run`
        self._cache = KVPages(base.config, CONTEXT, numbers=numbers)
        self._base, self._next, self._tokens = base, 0, tokens

    @property
    def nbytes(self) -> int:
        """Bytes that its parts report as held."""
        scratch = 0 if self.experts is None else packing_scratch(self._base.config)
        experts = 0 if self.experts is None else self.experts.nbytes
        return self._base.nbytes + experts + self.decoder.nbytes + self._cache.nbytes + scratch

    @property
    def read_bytes(self) -> int:
        """Bytes of files, or of memory beside the device's, that experts were read from."""
        match self.experts:
            case None:
                return 0
            case LoadOnMiss() as rival:
                return rival.read_bytes
            case ExpertCache() as cache:
                return cache.activity().read_bytes

    @property
    def misses(self) -> float:
        """The share of requests whose expert was not in memory."""
        match self.experts:
            case None:
                return 0.0
            case LoadOnMiss() as rival:
                return rival.misses / rival.requests
            case ExpertCache() as cache:
                activity = cache.activity()
                return activity.misses / activity.requests

    def follow(self, count: int) -> Seconds:
        """Read so many tokens one after the other, at most `CONTEXT`."""
        ids = [(self._next + number) % self._tokens for number in range(count)]
        self._next += count
        if self._cache.length + count > CONTEXT:
            self._cache.reset()
        return timed(lambda: self._decode(ids))()

    def read(self, count: int) -> Seconds:
        """Read a prompt of so many tokens."""
        self._cache.reset()
        return timed(lambda: self.decoder.prefill(list(range(count)), self._cache))()

    def _decode(self, ids: Sequence[int]) -> None:
        for token in ids:
            self.decoder.decode(token, self._cache)
