"""A base that compiled kernels hold and run: what is large, in int8 or int4, or deterministic.

Importing this imports numba. Compiled code is kept below the home, and `tell` gets a sentence
when some has to be made.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from expertctl.digest import Progress, no_progress
from expertctl.engine.backend import BackendName, Surroundings
from expertctl.engine.compose import CompiledPlan, Form
from expertctl.engine.decoder import PrefillResult
from expertctl.engine.decoder_programs import ADAPTERS, buffer_bytes
from expertctl.engine.generate import NativeReading, Reading
from expertctl.engine.kernels.compiled import compiled_cache
from expertctl.engine.kernels.crew import Crew
from expertctl.engine.kernels.scheme import Scheme
from expertctl.engine.kv_pages import KVPages, pages_bytes
from expertctl.engine.kv_pool import KVPool
from expertctl.engine.kv_room import KVRoom
from expertctl.engine.layer_times import LayerTimes
from expertctl.engine.memory import allocate
from expertctl.engine.moe.bookkeeping import (
    bookkeeping_bytes,
    known_bytes,
    whole_bookkeeping_bytes,
)
from expertctl.engine.moe.cache_plan import USUAL_TOKENS, CachePlan, cache_plan, fits_whole
from expertctl.engine.moe.counters import Counters
from expertctl.engine.moe.expert_cache import ExpertCache
from expertctl.engine.moe.expert_copies import CopiedExperts, copied_experts
from expertctl.engine.moe.expert_files import StoredExperts
from expertctl.engine.moe.expert_memory import ExpertMemory, HostBlocks
from expertctl.engine.moe.layer_slots import LayerSlots
from expertctl.engine.moe.miss_policy import MissPolicy
from expertctl.engine.moe.report import RoutedReport
from expertctl.engine.moe.start import Start, StartOf, begin
from expertctl.engine.moe.whole_experts import WholeExperts, whole_experts
from expertctl.engine.pace import Pace
from expertctl.engine.packed_base import PackedBase, expert_shape, packed_bytes, routed_expert
from expertctl.engine.packed_decoder import PackedDecoder, StepRow
from expertctl.engine.packed_delta import Packing
from expertctl.engine.packed_load import keeps_copy, load_packed_base, packing_scratch
from expertctl.engine.prompt_scores import ScoreRows
from expertctl.engine.sampling import sample_bytes
from expertctl.engine.tiers import Tiers
from expertctl.package.base_tensors import base_tensors
from expertctl.package.model_config import ModelConfig
from expertctl.routing.request import AdapterDtype, Dtype, MoeColdWish, MoeMiss

_FLOAT_BYTES = 4
SCHEMES: dict[Dtype, Scheme] = {
    "float32": Scheme.FLOAT32,
    "bf16": Scheme.BFLOAT16,
    "int8": Scheme.INT8,
    "int4": Scheme.INT4,
}


@dataclass(frozen=True, slots=True)
class PackedBackend:
    """A base that `PackedDecoder` runs."""

    config: ModelConfig
    dtype: Dtype
    adapter_dtype: AdapterDtype
    weight_bytes: int
    cache: CachePlan | None = None
    """How its routed experts are held where not all are in memory, or some may be left out."""
    start: Start = field(default=Start(), compare=False)
    """Which of them it begins with."""

    @property
    def kv_numbers(self) -> Scheme:
        """What keys and values are kept in: half the bytes beside weights that are rounded."""
        return Scheme.FLOAT32 if self.scheme is Scheme.FLOAT32 else Scheme.FLOAT16

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        dtype: Dtype,
        adapter_dtype: AdapterDtype = "published",
        *,
        room: int | None = None,
        miss: MoeMiss = "exact",
        cap: float = 1.0,
        cold: MoeColdWish = "auto",
        rows: int = 1,
        beside: int = 0,
    ) -> "PackedBackend":
        """Return what runs a base in ``room`` bytes of memory; None: unlimited.

        Of these, enough is left for a text that is asked for without further wishes, in a batch of
        ``rows``, and for a run that takes ``beside`` bytes besides the base.

        Raises:
            IncompatibleError: when its sizes are not those that kernels support.
        """
        scheme = SCHEMES[dtype]
        whole = packed_bytes(config, scheme)
        if config.experts is not None:
            whole += whole_bookkeeping_bytes(config.experts)
        held = cls(config, dtype, adapter_dtype, whole)
        if config.experts is None or room is None:
            return held
        texts = max(held.text_bytes(rows=rows), beside)
        if fits_whole(whole, room, texts=texts):
            return held
        rest, block = held.least_bytes, expert_shape(config, scheme)
        layers, experts = len(config.experts.layers), config.experts.count
        plan = cache_plan(
            layers=layers,
            experts=experts,
            block=block.nbytes,
            rest=rest,
            limit=room,
            miss=miss,
            cap=cap,
            texts=texts,
        )
        weight_bytes = rest + plan.blocks * block.nbytes
        return cls(config, dtype, adapter_dtype, weight_bytes, replace(plan, cold=cold))

    def begun(self, start: StartOf) -> "PackedBackend":
        """Return the same with slots and pins by what is known, where not all experts fit.

        Raises:
            ExpertError: when a profile is of another base, or cannot be used.
        """
        config, routed = self.config, self.config.experts
        if self.cache is None or routed is None:
            return self
        begins, before = start(routed), self.cache
        plan = begins.planned(before, routed.layers)
        fewer = (before.blocks - plan.blocks) * expert_shape(config, self.scheme).nbytes
        return replace(self, weight_bytes=self.weight_bytes - fewer, cache=plan, start=begins)

    @property
    def name(self) -> BackendName:
        """Which of the two it is."""
        return "packed"

    @property
    def scheme(self) -> Scheme:
        """How its matrices are stored."""
        return SCHEMES[self.dtype]

    @property
    def loading_bytes(self) -> int:
        """What reading its weights takes besides, at most."""
        return packing_scratch(self.config)

    @property
    def least_bytes(self) -> int:
        """What all but routed experts takes where not all fit; a run needs some of them, too."""
        if self.config.experts is None:
            return self.weight_bytes
        rest = packed_bytes(self.config, self.scheme, experts=False)
        return rest + known_bytes(self.config.experts)

    @property
    def host_bytes(self) -> int:
        """0: they are in no other memory."""
        return 0

    @property
    def form(self) -> Form:
        """What plans are compiled for."""
        config, packing = self.config, Packing(self.scheme, self.adapter_dtype)
        shapes, cpu = config.linear_shapes(), torch.device("cpu")
        read = 0 if self.cache is None else expert_shape(config, self.scheme).nbytes
        return Form(shapes, config.hidden_size, torch.float32, cpu, packing, routed_bytes=read)

    def kv_bytes(self, tokens: int) -> int:
        """What the keys and values of so many tokens take, by whole pages."""
        return pages_bytes(self.config, tokens, self.kv_numbers)

    def buffer_bytes(self, tokens: int, *, width: int = 0, rows: int = 1) -> int:
        """What a pass over so many tokens, or rows, needs besides weights and cache.

        Plans that meet in a batch may be in any scheme. The scores of a step are copied out.
        """
        mixed = ADAPTERS if width and rows > 1 else None
        passing = buffer_bytes(
            self.config, self.scheme, tokens=tokens, rows=rows, width=width, adapters=mixed
        )
        scores = rows * self.config.vocab_size * _FLOAT_BYTES
        return passing + scores + sample_bytes(self.config.vocab_size)

    def text_bytes(self, *, rows: int = 1) -> int:
        """What a text takes besides weights: of `USUAL_TOKENS`, or as many as the base reads."""
        tokens = min(USUAL_TOKENS, self.config.max_positions)
        passing = max(self.buffer_bytes(tokens, rows=rows), self.loading_bytes)
        return passing + self.kv_bytes(tokens)

    @property
    def kv_kind(self) -> str:
        """Equal where one keeper serves: pages of the same numbers."""
        return f"pages of {self.kv_numbers.value}"

    def new_keeper(self, tiers: Tiers, *, kept_limit: int | None = None) -> KVPool:
        """Return an owner of pages."""
        return KVPool(tiers, numbers=self.kv_numbers, kept_limit=kept_limit)

    def load(self, around: Surroundings, *, progress: Progress = no_progress) -> "PackedModel":
        """Read and pack the weights, or read them as they were packed before.

        Raises:
            InvalidPackageError: when its tensors are not those of its configuration.
        """
        compiled_cache(around.home, tell=around.tell, check=around.check)
        base = load_packed_base(
            around.directory,
            self.config,
            self.scheme,
            experts=self.cache is None,
            copies=around.copies,
            cold="auto" if self.cache is None else self.cache.cold,
            progress=progress,
        )
        if self.cache is None:
            return self._whole(base, around)
        reader = self._reader(self.cache, around)
        try:
            experts = self._experts(self.cache, reader)
        except BaseException:
            reader.close()
            raise
        assert self.config.experts is not None
        around.watch(self.config.experts, experts)
        return PackedModel(base, threads=around.threads, experts=experts, reader=reader)

    def _whole(self, base: PackedBase, around: Surroundings) -> "PackedModel":
        """Return what runs a base that is all in memory."""
        experts, routed = whole_experts(base), self.config.experts
        if experts is not None and routed is not None:
            around.watch(routed, experts)
        return PackedModel(base, threads=around.threads, whole=experts)

    def _reader(self, plan: CachePlan, around: Surroundings) -> StoredExperts | CopiedExperts:
        """Return the reader of experts: that of the base's copy, where there is one."""
        stored = StoredExperts(
            base_tensors(around.directory, self.config), self.config, self.scheme
        )
        if around.copies is None or not keeps_copy(self.scheme, cold=plan.cold):
            return stored
        found = copied_experts(
            around.copies, self.config, stored, cold=plan.cold, blocks=plan.blocks
        )
        return found or stored

    def _experts(self, plan: CachePlan, reader: StoredExperts | CopiedExperts) -> ExpertCache:
        """Make room for some of the routed experts, and begin with those that are known."""
        config, scheme, routed = self.config, self.scheme, self.config.experts
        assert routed is not None
        shape = replace(expert_shape(config, scheme), compact=reader.compact)
        total, most = plan.blocks * shape.nbytes, plan.layers * plan.experts
        blocks = HostBlocks.within(total, shape, most=most)
        memory = ExpertMemory(shape, layers=plan.layers, experts=plan.experts, blocks=blocks)
        slots = [
            LayerSlots(experts=plan.experts, capacity=capacity, pinned=pins)
            for capacity, pins in zip(plan.capacities, plan.pins, strict=True)
        ]
        policy = MissPolicy(skips=plan.miss == "skip", cap=plan.cap)
        numbers = routed.layers
        cache = ExpertCache(memory, reader, numbers=numbers, slots=slots, policy=policy)
        try:
            begin(cache, self.start, dict(zip(numbers, slots, strict=True)))
        except BaseException:
            cache.close()  # first: its threads read
            raise
        return cache


class PackedModel:
    """A base in packed memory, and the crew that computes with it."""

    def __init__(
        self,
        base: PackedBase,
        *,
        threads: int,
        experts: ExpertCache | None = None,
        reader: StoredExperts | CopiedExperts | None = None,
        whole: WholeExperts | None = None,
    ) -> None:
        """Use at most so many threads; others than the caller's start with the first pass.

        ``experts`` owns routed experts that the base does not have; ``reader`` is what they are
        read by, and closed with this. ``whole`` stands for routed experts that the base has.
        """
        self.base, self.experts, self._crew = base, experts, Crew(threads)
        self._reader, self._whole = reader, whole
        self.decoder = PackedDecoder(base, self._crew, pace=Pace(threads), experts=experts or whole)

    @property
    def nbytes(self) -> int:
        """Bytes of its weights, and of what is known of routed experts."""
        routed = self.base.config.experts
        if routed is None:
            return self.base.nbytes
        if self.experts is None:
            return self.base.nbytes + whole_bookkeeping_bytes(routed)
        return self.base.nbytes + self.experts.nbytes + bookkeeping_bytes(routed)

    @property
    def routed(self) -> RoutedReport | None:
        """What became of routed experts so far; None where there are none."""
        if self.experts is None:
            return None if self._whole is None else self._whole.report()
        report, reader = self.experts.report(), self._reader
        cold = "read" if reader is None else reader.cold
        return replace(report, residence=replace(report.residence, cold=cold))

    @property
    def counters(self) -> Counters | None:
        """What is counted of routed experts; None where there are none."""
        experts = self.experts or self._whole
        return None if experts is None else experts.counters

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a person should know of them."""
        return self.base.warnings

    def prepare(self, cache: KVRoom, plan: CompiledPlan, *, tokens: int, rows: int = 1) -> None:
        """Make what reads so many tokens, compiling what is not compiled yet."""
        assert isinstance(cache, KVPages)
        self.decoder.prepare(cache, plan.packed, tokens=tokens, rows=rows)

    @property
    def prefill_parts(self) -> int:
        """The number of layers; 1 with routed experts, which are brought for one pass at a time."""
        return 1 if self.base.config.experts is not None else self.base.config.layers

    def prefill(
        self, reading: Reading, ids: Sequence[int], *, between_layers: Callable[[], None]
    ) -> PrefillResult:
        """Read a part of a prompt; ``between_layers`` may call `step` with other texts."""
        assert isinstance(reading, NativeReading), "a text of a base that kernels hold"
        if self.prefill_parts == 1:
            return reading.prefill(ids)
        assert isinstance(reading.cache, KVPages)
        soft_prompt = reading.soft_prompt if reading.cache.length == 0 else None
        return self.decoder.prefill(
            ids,
            reading.cache,
            reading.deltas,
            soft_prompt=soft_prompt,
            progress=reading.progress,
            scores=reading.scores,
            between_layers=between_layers,
        )

    def step(self, texts: Sequence[tuple[Reading, int]]) -> Tensor:
        """Read one more token of each of several texts, in one pass over the weights."""
        return self.decoder.step([_row(reading, token) for reading, token in texts])

    def reading(
        self,
        cache: KVRoom,
        plan: CompiledPlan,
        *,
        progress: Progress = no_progress,
        scores: ScoreRows | None = None,
    ) -> Reading:
        """Begin or go on with a text."""
        assert isinstance(cache, KVPages)
        return NativeReading(self.decoder, cache, plan.packed, plan.soft_prompt, progress, scores)

    @property
    def read_bytes(self) -> int:
        """How many bytes of files were read for them."""
        return self.base.read_bytes

    def timed(self, times: LayerTimes) -> AbstractContextManager[None]:
        """Add to ``times`` how long each part of what is read meanwhile takes."""
        return self.decoder.timed(times)

    def matrix(self, module: str) -> Tensor:
        """Return the weights of a linear layer as they are used, as a new float32 [out, in].

        A routed expert that may be absent is read for it, even if it is in memory now.

        Raises:
            InvalidPackageError: when a file of the base cannot be read.
        """
        routed = routed_expert(module)
        if self._reader is None or routed is None:
            return self.base.matrix(module)
        shape = expert_shape(self.base.config, self.base.scheme)
        block = np.frombuffer(allocate(shape.nbytes), np.uint8)
        self._reader.read_whole(*routed, block)
        return replace(self.base, experts={routed: block}).matrix(module)

    def rest(self) -> None:
        """Let go of what the passes of a plan share."""
        self.decoder.rest()

    @property
    def is_at_rest(self) -> bool:
        """Whether it holds nothing but its weights."""
        return self.decoder.is_at_rest

    def check_integrity(self) -> None:
        """Assert what always holds between two passes."""
        if self.experts is not None:
            self.experts.check_integrity()

    def close(self) -> None:
        """End the threads."""
        self._crew.close()
        if self.experts is not None:
            self.experts.close()
        if self._reader is not None:
            self._reader.close()


def _row(reading: Reading, token: int) -> StepRow:
    assert isinstance(reading, NativeReading), "a text of a base that kernels hold"
    return StepRow(token, reading.cache, reading.deltas)
