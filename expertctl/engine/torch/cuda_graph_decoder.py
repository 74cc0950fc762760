"""A decoder whose steps are captured as CUDA graphs: padded batches at fixed addresses.

Prompts are read by the same `Decoder` as on a processor, in chunks, into a row of a
`StaticKVCache`. A step decodes one token of each sequence: a bucket of rows, a bucket of visible
positions, and plans in slots. There is one graph per combination, captured at its first use; on a
processor the same function is called. Up to `MAX_GRAPH_KEYS` combinations are kept, in a batch up
to `MAX_BATCH_GRAPH_KEYS`.
Where routed experts may be missing, a step is piecewise, and some of its graphs are permanent. A
sequence whose plan changes routed experts is decoded by the prompt decoder, token by token, since
its plan has no slots.

Slots are as many as one step needed different plans at most, so no step reads more of them. A plan
that comes when all are filled takes the slot of the least recently used one; if that is still in
the batch, the next step enlarges the slots.
"""

import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from expertctl.digest import Progress, ignore_progress
from expertctl.engine.adapters.steps import EMPTY_DELTAS
from expertctl.engine.arrays import AnyArray
from expertctl.engine.base_files import is_routed_expert
from expertctl.engine.decoding import (
    PREFILL_CHUNK,
    DecodeResult,
    LayerTimer,
    PrefillResult,
    check_modules,
    check_tokens,
)
from expertctl.engine.kv.kv_cache import rewind_on_error
from expertctl.engine.text.prompt import RecordLogits
from expertctl.engine.torch.cuda_graph_step import (
    GraphedStep,
    StaticInputs,
    StaticKVCache,
    StaticKVRow,
    estimate_input_bytes,
    estimate_step_bytes,
)
from expertctl.engine.torch.cuda_graphs import CUDAGraphPool, PiecewiseStep, StepBucket
from expertctl.engine.torch.decoder import Decoder, estimate_pass_bytes
from expertctl.engine.torch.devices import translate_device_errors
from expertctl.engine.torch.expert_stack import StackShape
from expertctl.engine.torch.functional import TorchDeltas
from expertctl.engine.torch.lora_slots import (
    NO_SLOT,
    LoRASlots,
    estimate_slots_bytes,
    find_shape,
    merge_shapes,
    round_up_rank,
)
from expertctl.engine.torch.stacked_experts import StackedExperts
from expertctl.engine.torch.stacked_mlp import (
    build_stacked_layers,
    estimate_prompt_floats,
    estimate_stacked_step_bytes,
)
from expertctl.engine.torch.weights import BaseWeights
from expertctl.package.model_config import ModelConfig

MAX_GRAPH_KEYS = 8
"""Maximum number of step kinds with graphs: a growing answer leaves its shorter ones behind."""
MAX_BATCH_GRAPH_KEYS = 24
"""The same for a batch, whose number of rows changes as well."""
MIN_CAPACITY = 256
"""Minimum number of visible positions of a step, if the cache has as many."""
_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True, eq=False)
class GraphStepRow:
    """One more token of one sequence, with its plan."""

    token: int
    cache: StaticKVRow
    deltas: TorchDeltas = field(default_factory=dict)


class CudaGraphDecoder:
    """A base that runs in captured steps; its weights are read-only."""

    def __init__(
        self,
        config: ModelConfig,
        weights: BaseWeights,
        *,
        experts: StackedExperts | None = None,
        rows: int = 1,
        captures: bool = True,
        min_capacity: int = MIN_CAPACITY,
    ) -> None:
        """Run a base where its weights are; without ``captures`` steps are called directly.

        ``experts`` holds the routed experts, which are not part of the weights. Steps are expected
        to have at most ``rows`` rows; larger ones take more memory than what is permanent.
        """
        self.config, self.device, self.rows = config, weights.device, rows
        self.modules = frozenset(config.linear_shapes())
        stacked = (
            None if experts is None else build_stacked_layers(config, weights.tensors, experts)
        )
        self._prompts = Decoder(config, weights, stacked=stacked)
        counts = None if experts is None else experts.device_counts
        self._one_more = GraphedStep(self._prompts.transformer, counts=counts)
        self._staged: PiecewiseStep | None = None
        if stacked is not None and not stacked.experts.is_whole:
            self._staged = PiecewiseStep(
                config, self._one_more, stacked, rows=rows, captures=captures
            )
        stages = 1 if self._staged is None else 2 * config.layers + 1  # upper bound
        keys = MAX_GRAPH_KEYS if rows == 1 else MAX_BATCH_GRAPH_KEYS
        self.graphs = CUDAGraphPool(weights.device, captures=captures, max_graphs=keys * stages)
        self._of_experts = frozenset(filter(is_routed_expert, self.modules))
        self._shortest = min_capacity
        self._lock = threading.Lock()
        self._room: StaticInputs | None = None
        self._plans: LoRASlots | None = None

    @translate_device_errors()
    def prefill(
        self,
        ids: Sequence[int],
        cache: StaticKVRow,
        deltas: TorchDeltas = EMPTY_DELTAS,
        *,
        soft_prompt: AnyArray | None = None,
        chunk: int = PREFILL_CHUNK,
        progress: Progress = ignore_progress,
        scores: RecordLogits | None = None,
    ) -> PrefillResult:
        """Read a prompt, as `Decoder.prefill` does and with its errors."""
        with self._lock:
            return self._prompts.prefill(
                ids,
                cache,
                deltas,
                soft_prompt=soft_prompt,
                chunk=chunk,
                progress=progress,
                scores=scores,
            )

    def decode(
        self, token: int, cache: StaticKVRow, deltas: TorchDeltas = EMPTY_DELTAS
    ) -> DecodeResult:
        """Read one more token; raises as `step` does."""
        position, started = cache.length, time.perf_counter()
        logits = self.step([GraphStepRow(token, cache, deltas)])[0]
        return DecodeResult(logits, position, (time.perf_counter() - started) * 1e3)

    @translate_device_errors()
    def step(self, rows: Sequence[GraphStepRow], *, out: AnyArray | None = None) -> AnyArray:
        """Read one more token of each sequence; return logits, float32 [rows, vocab].

        The logits are in host memory, in ``out`` where it is given. All sequences are rows of one
        static cache; the batch covers the rows up to the last of them, and unused rows between stay
        unchanged. If the step fails, no sequence has read a token.

        Raises:
            BudgetError: when a cache is full.
            IncompatibleError: for a token or a plan that this base does not have.
        """
        for plan in {id(row.deltas): row.deltas for row in rows}.values():
            check_modules(plan, self.modules)
        tokens = check_tokens([row.token for row in rows], self.config.vocab_size).tolist()
        arena = rows[0].cache.arena
        assert all(row.cache.arena is arena for row in rows), "texts of a batch share an arena"
        assert len({row.cache.number for row in rows}) == len(rows), "each text has its own row"
        shape = (len(rows), self.config.vocab_size)
        assert out is None or out.shape == shape, f"scores are {shape}"
        for row in rows:
            row.cache.ensure_capacity(1)
        logits = np.empty(shape, np.float32) if out is None else out
        with self._lock, rewind_on_error([row.cache for row in rows]):
            rest = []
            for row, token, scores in zip(rows, tokens, logits, strict=True):
                if self._has_expert_deltas(row.deltas):
                    scores[...] = self._prompts.decode(token, row.cache, row.deltas).logits
                else:
                    rest.append((row, token, scores))
            if rest:
                self._step(rest, arena)
        return logits

    @contextmanager
    def time_layers(self, times: LayerTimer) -> Iterator[None]:
        """Add the time of each part to ``times``; steps are not captured or replayed meanwhile."""
        with self._prompts.time_layers(times):
            yield

    @translate_device_errors()
    def prepare(
        self, cache: StaticKVRow, deltas: TorchDeltas = EMPTY_DELTAS, *, rows: int = 1
    ) -> None:
        """Prepare the steps of one sequence, in a batch of up to ``rows`` rows.

        Raises:
            BudgetError: when the device is full.
            IncompatibleError: when numbers of the plan are not finite.
        """
        with self._lock:
            self._prepare_inputs(cache.arena, rows=min(rows, cache.arena.rows))
            if not self._has_expert_deltas(deltas):
                self._assign_slots([deltas])

    def matrix(self, module: str) -> Tensor:
        """Return the weights [out, in] of a linear layer, by its module name."""
        return self._prompts.matrix(module)

    @translate_device_errors()
    def free_buffers(self) -> None:
        """Free everything but the weights."""
        with self._lock:
            self.graphs.clear()
            self._room = self._plans = None
            self._prompts.free_buffers()
            if self._staged is not None:
                self._staged.free_extra_buffers()
            self._one_more.fetch_routed_counts()

    @translate_device_errors()
    def fetch_routed_counts(self) -> None:
        """Fetch the counts of requested experts from the device; call it between two steps."""
        with self._lock:
            self._one_more.fetch_routed_counts()

    @property
    def holds_only_weights(self) -> bool:
        """Whether it holds nothing but its weights."""
        return self._room is None and self._plans is None and self._prompts.holds_only_weights

    def close(self) -> None:
        """Free all graphs; the decoder must not be used afterwards."""
        self.graphs.close()
        if self._staged is not None:
            self._staged.close()

    @property
    def permanent_bytes(self) -> int:
        """Device bytes that stay between sequences, without graphs."""
        return 0 if self._staged is None else self._staged.nbytes

    @property
    def nbytes(self) -> int:
        """Device bytes besides `permanent_bytes`, weights, static caches, graphs and passes."""
        held = (self._room, self._plans)
        return sum(each.nbytes for each in held if each is not None)

    def _has_expert_deltas(self, deltas: TorchDeltas) -> bool:
        return not self._of_experts.isdisjoint(deltas)

    @torch.inference_mode()
    def _step(
        self, texts: Sequence[tuple[GraphStepRow, int, AnyArray]], arena: StaticKVCache
    ) -> None:
        """Read one token of each sequence in one step, and write the logits."""
        rows = [row for row, _, _ in texts]
        count = round_up_to_bucket(1 + max(row.cache.number for row in rows), maximum=arena.rows)
        longest = 1 + max(row.cache.length for row in rows)
        length = round_up_to_bucket(longest, minimum=self._shortest, maximum=arena.capacity)
        room = self._prepare_inputs(arena, rows=count)
        slots = self._assign_slots([row.deltas for row in rows])
        room.clear_rows()
        for (row, token, _), slot in zip(texts, slots, strict=True):
            room.set_row(row.cache.number, token=token, position=row.cache.length, slot=slot)
        room.copy_to_device()
        plans = self._plans if any(slots) else None
        self._run_step(StepBucket(room, count, length, plans), [row.cache.number for row in rows])
        scores = room.wait_for_scores(count).numpy()
        for row, _, out in texts:
            out[...] = scores[row.cache.number]
        for row in rows:
            row.cache.advance(1)

    def _run_step(self, step: StepBucket, texts: Sequence[int]) -> None:
        """Run a step, whole or piecewise, captured unless it is timed."""
        run = self.graphs.run if self._prompts.transformer.times is None else _call_directly
        if self._staged is not None:
            self._staged(step, texts, run=run)
            return
        read = partial(
            self._one_more, step.inputs, rows=step.rows, length=step.length, plans=step.plans
        )
        run(step.key, read)
        self._one_more.count_routed(step.inputs, texts)

    def _prepare_inputs(self, arena: StaticKVCache, *, rows: int) -> StaticInputs:
        """Return inputs with enough rows over a static cache; graphs of other inputs are freed."""
        room = self._room
        if room is None or room.arena is not arena or room.rows < rows:
            self.graphs.clear()
            self._room = None
            self._room = room = StaticInputs(self.config, arena, rows=rows)
        return room

    @torch.inference_mode()
    def _assign_slots(self, plans: Sequence[TorchDeltas]) -> list[int]:
        """Return the slot of each plan, enlarging the slots where plans do not fit."""
        different = {id(plan): plan for plan in plans if plan}
        held = self._plans
        if different and (held is None or not held.contains(different.values())):
            shape, count = find_shape(different.values()), round_up_to_bucket(len(different))
            if held is not None:
                shape, count = merge_shapes(held.shape, shape), max(held.slots, count)
            if held is None or (held.shape, held.slots) != (shape, count):
                self.graphs.clear()
                self._plans = held = None
                self._plans = LoRASlots(self.config, shape, slots=count, device=self.device)
        return [NO_SLOT] * len(plans) if self._plans is None else self._plans.assign_slots(plans)


def estimate_buffer_bytes(
    config: ModelConfig,
    *,
    capacity: int,
    rows: int = 1,
    plans: int = 1,
    width: int = 0,
    chunk: int = PREFILL_CHUNK,
    experts: StackShape | None = None,
) -> int:
    """Estimate the maximum device bytes of a decoder besides weights and static cache.

    Sequences have up to ``capacity`` tokens; a step decodes ``rows`` of them with up to ``plans``
    plans of up to ``width``; 0 is the base alone. A prompt and a step never run at once.
    ``experts`` is the shape of routed experts in the stack.
    """
    count, slots = round_up_to_bucket(rows), round_up_to_bucket(plans) if width else 0
    held = estimate_input_bytes(config, capacity=capacity, rows=count)
    held += estimate_slots_bytes(config, slots=slots, rank=width) if slots else 0
    step = estimate_step_buffer_bytes(
        config, capacity=capacity, rows=rows, plans=plans, width=width, experts=experts
    )
    return held + step + estimate_prompt_bytes(config, capacity, chunk=chunk)


def estimate_step_buffer_bytes(
    config: ModelConfig,
    *,
    capacity: int,
    rows: int = 1,
    plans: int = 1,
    width: int = 0,
    experts: StackShape | None = None,
) -> int:
    """Estimate the temporary bytes of a step; the graph pool holds as much."""
    columns = round_up_to_bucket(plans) * round_up_rank(width) if width else 0
    made = 0
    if experts is not None and config.experts is not None:
        made = estimate_stacked_step_bytes(config.experts, experts)
    return estimate_step_bytes(
        config, capacity=capacity, rows=round_up_to_bucket(rows), columns=columns, experts=made
    )


def estimate_prompt_bytes(config: ModelConfig, capacity: int, *, chunk: int = PREFILL_CHUNK) -> int:
    """Estimate the maximum bytes of reading a prompt; masks are expanded for shared KV heads."""
    tokens, shares = min(chunk, capacity), config.heads // config.kv_heads
    masks = shares * tokens * capacity * (1 + _FLOAT_BYTES)
    narrowed = tokens * (config.hidden_size + 2 * config.intermediate_size)  # for products in bf16
    routed = 0
    if config.experts is not None:
        routed = tokens * estimate_prompt_floats(config.experts, hidden=config.hidden_size)
    return (
        estimate_pass_bytes(config, capacity, chunk=chunk)
        + masks
        + _FLOAT_BYTES * (narrowed + routed)
    )


def _call_directly(_: Hashable, function: Callable[[], None]) -> None:
    function()


def round_up_to_bucket(count: int, *, minimum: int = 1, maximum: int | None = None) -> int:
    """Return the power of two that is at least ``count``, within ``minimum`` and ``maximum``."""
    size = max(minimum, 1 << (count - 1).bit_length())
    return size if maximum is None else min(size, maximum)
