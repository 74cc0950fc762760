"""The routed experts of a base on a device: which row of the stack each is in.

`lookup` is on the device and leads from an expert to its row, and from one that is missing to the
dummy. Steps ask nothing else, and it changes only between two of their stages: an expert that is
still on its way is in no row. `ExpertCache` decides which experts come and go, as on a processor.
Where all experts are there, nothing has to be decided or asked, and choices are only counted.
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from expertctl.digest import Progress, no_progress
from expertctl.engine.kernels.expert_block import ExpertShape
from expertctl.engine.kernels.scheme import Scheme
from expertctl.engine.moe.asked_experts import AskedExperts
from expertctl.engine.moe.cache_plan import CachePlan
from expertctl.engine.moe.choices import HostChoices, end_asking
from expertctl.engine.moe.copy_order import is_queued
from expertctl.engine.moe.expert_cache import ExpertCache
from expertctl.engine.moe.expert_memory import ExpertMemory
from expertctl.engine.moe.expert_rows import ExpertRows
from expertctl.engine.moe.expert_stack import BUFFERS, DUMMY, ExpertStack, StackShape
from expertctl.engine.moe.layer_slots import LayerSlots
from expertctl.engine.moe.miss_policy import MissPolicy
from expertctl.engine.moe.phase import Phase
from expertctl.engine.moe.routing import Routed
from expertctl.engine.moe.skipping import skipped_share
from expertctl.package.base_tensors import StoredTensor
from expertctl.package.experts_config import ExpertsConfig
from expertctl.package.model_config import ModelConfig

Numbers = np.ndarray[Any, Any]
_LONG_BYTES = 8
_SCHEMES = {torch.float32: Scheme.FLOAT32, torch.bfloat16: Scheme.BFLOAT16}


class StackedExperts:
    """The owner of a stack and of the lookup; one pass at a time asks it.

    Routed layers are counted from 0, whatever their numbers in the base.
    """

    def __init__(
        self,
        config: ExpertsConfig,
        stack: ExpertStack,
        reader: ExpertRows,
        *,
        cache: ExpertCache | None = None,
    ) -> None:
        """Have a cache decide about the blocks of the stack; without one each expert has its own.

        Without a cache, `fill_all` brings the experts.
        """
        self.config, self.stack, self.cache, self._reader = config, stack, cache, reader
        self.asked = AskedExperts(config, stack.device) if cache is None else None
        """Counts what is asked for where there is no cache."""
        shape = len(config.layers), config.count
        with torch.inference_mode(False):
            self._sending = torch.full(
                shape, DUMMY, dtype=torch.long, pin_memory=is_queued(stack.device)
            )
            self._sent: Numbers = self._sending.numpy()
            if cache is None:
                rows = [stack.place(number) for number in range(len(stack))]
                self._sent[...] = np.array(rows, np.int64).reshape(shape)
            self.lookup = self._sending.to(stack.device, copy=True)
        self.choices = HostChoices(layers=shape[0], tokens=1, used=config.used)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        counts = 0 if self.asked is None else self.asked.nbytes
        return self.stack.nbytes + self.lookup.nbytes + counts

    @property
    def is_whole(self) -> bool:
        """Whether no expert is ever missing."""
        return self.cache is None

    @property
    def skips(self) -> bool:
        """Whether what is missing may be left out."""
        return self.cache is not None and self.cache.skips

    def fill_all(self, progress: Progress = no_progress) -> int:
        """Bring each expert into the row that is its own; return how many bytes were read.

        Raises:
            InvalidPackageError: when a file of the base cannot be read.
        """
        assert self.is_whole, "the cache decides what is brought"
        read, names = 0, product(self.config.layers, range(self.config.count))
        pool = ThreadPoolExecutor(BUFFERS)
        try:
            reads = (partial(self._reader.read, *name) for name in names)
            for size in pool.map(self.stack.fill, range(len(self.stack)), reads):
                read += size
                progress(self.stack.shape.nbytes)
        finally:
            pool.shutdown(cancel_futures=True)
        return read

    def rows(self, place: int) -> Numbers:
        """Return the row of each expert of a layer, int64 [experts]; the dummy's where missing."""
        found: Numbers = self._sent[place]
        return found

    def find(self, place: int, selected: Tensor) -> Tensor:
        """Return the rows of experts of a layer, on the device; both int64 [tokens, used]."""
        return _looked_up(self.lookup[place], selected)

    def find_in(self, place: Tensor, selected: Tensor) -> Tensor:
        """Return the same for a layer whose place only the device knows, int64 [1]."""
        return _looked_up(self.lookup.index_select(0, place)[0], selected)

    def ask(
        self, place: int, selected: Numbers, weights: Numbers, likely: Numbers | None = None
    ) -> bool:
        """Ask for what tokens chose in a layer, [tokens, used]; tell whether to `wait`.

        Meanwhile experts that are there may be computed. ``likely`` is what the next layer will be
        asked for. The last layer may be asked for fewer tokens than others.

        Raises:
            InvalidPackageError: when a file of the base cannot be read.
        """
        tokens, choices = len(selected), self._room_for(len(selected))
        choices.selected[place, :tokens] = selected
        if place == len(self.config.layers) - 1:
            end_asking(choices, tokens, choices.tokens)
        if self.cache is None:
            return False
        choices.weights[place, :tokens] = weights
        if likely is not None:
            choices.likely[place + 1, :tokens] = likely
        waits = self.cache.ask(place, choices, tokens, foresees=likely is not None)
        self._send(place)
        if not waits:
            self._note_skipped(place, tokens)
        return waits

    def computed(self, place: int) -> None:
        """Learn that the device was asked to compute the experts of a layer that are there.

        Until it has, no other expert is copied into their rows.
        """
        if self.cache is not None:
            rows = self._sent[place]
            self.stack.note_read(rows[rows != DUMMY])

    def wait(self, place: int, tokens: int) -> None:
        """Wait for experts that so many tokens asked for in a layer and that may not be skipped.

        The work that `computed` reported is waited for first: time in which the device computes is
        not counted as waiting for experts.

        Raises:
            InvalidPackageError: when a file of the base cannot be read.
        """
        if self.cache is not None:
            self.stack.wait_for_reads()
            self.cache.wait()
            self._send(place)
            self._note_skipped(place, tokens)

    def passed(self, tokens: int, *, phase: Phase) -> None:
        """Learn that a pass over so many tokens is over; now experts may come and go."""
        if self.cache is not None:
            self.cache.passed(self.choices, tokens, phase=phase)
        elif self.asked is not None:
            self.asked.count_pass(self.choices.selected[:, :tokens])

    def weights(self, routed: Routed, rows: Tensor) -> Tensor:
        """Return the weights of experts in rows; where they may be skipped, the dummy gets 0."""
        return kept_weights(routed.weights, rows != DUMMY) if self.skips else routed.weights

    def matrix(self, module: str) -> Tensor:
        """Return the weights [out, in] of a linear layer of an expert, read from its file.

        Raises:
            InvalidPackageError: when the file cannot be read to its end.
        """
        return self._reader.matrix(module)

    def close(self) -> None:
        """Stop reading experts."""
        if self.cache is not None:
            self.cache.close()

    def check_integrity(self) -> None:
        """Assert what always holds between two passes."""
        assert np.array_equal(self.lookup.cpu().numpy(), self._sent)
        assert not self.stack.gate_up[DUMMY].any()
        assert not self.stack.down[DUMMY].any()
        if self.cache is not None:
            self.cache.check_integrity()

    def _room_for(self, tokens: int) -> HostChoices:
        if self.choices.tokens < tokens:
            layers, used = len(self.config.layers), self.config.used
            self.choices = HostChoices(layers=layers, tokens=tokens, used=used)
        return self.choices

    def _send(self, place: int) -> None:
        """Tell the device where the experts of a layer are now, if that changed.

        What was sent before has arrived: the caller of `ask` waited for a choice that was queued
        after it, and `wait` waits for what was computed by it.
        """
        assert self.cache is not None
        now = self.cache.places(place)
        if not np.array_equal(now, self._sent[place]):
            self._sent[place] = now
            self.lookup[place].copy_(self._sending[place], non_blocking=True)

    def _note_skipped(self, place: int, tokens: int) -> None:
        if not self.skips:
            return
        weights = self.choices.weights[place, :tokens]
        hits = self._sent[place][self.choices.selected[place, :tokens]] != DUMMY
        self.choices.skipped[place, :tokens] = skipped_share(weights, hits) * weights.sum(-1)


def open_experts(
    config: ModelConfig,
    stored: Mapping[str, StoredTensor],
    shape: StackShape,
    *,
    plan: CachePlan | None,
    device: torch.device,
) -> StackedExperts:
    """Make room for the routed experts of a base, for all of them without a plan; none is read.

    ``stored`` says where the tensors of the base lie.
    """
    routed, reader = config.experts, ExpertRows(stored, shape)
    assert routed is not None, "a base with routed experts"
    if plan is None:
        stack = ExpertStack(shape, blocks=len(routed.layers) * routed.count, device=device)
        return StackedExperts(routed, stack, reader)
    stack = ExpertStack(shape, blocks=plan.blocks, device=device)
    cache = ExpertCache(
        ExpertMemory(
            ExpertShape(_SCHEMES[shape.dtype], shape.hidden, shape.intermediate),
            layers=plan.layers,
            experts=plan.experts,
            blocks=stack,
        ),
        reader,
        numbers=routed.layers,
        slots=[
            LayerSlots(experts=plan.experts, capacity=capacity, pinned=pins)
            for capacity, pins in zip(plan.capacities, plan.pins, strict=True)
        ],
        policy=MissPolicy(skips=plan.miss == "skip", cap=plan.cap),
        threads=BUFFERS - 1,
    )
    return StackedExperts(routed, stack, reader, cache=cache)


def kept_weights(weights: Tensor, hits: Tensor) -> Tensor:
    """Return `skipping.effective_weights` of tensors: what is hit takes over all the mass."""
    given = weights.double()
    kept = given * hits
    mass, left = given.sum(-1, keepdim=True), kept.sum(-1, keepdim=True)
    share = torch.where(left == 0, 0.0, mass / torch.where(left == 0, 1.0, left))
    return (kept * share).to(weights.dtype)


def _looked_up(rows: Tensor, selected: Tensor) -> Tensor:
    return rows.index_select(0, selected.flatten()).view_as(selected)


def lookup_bytes(config: ExpertsConfig) -> int:
    """Return what the lookup takes on the device."""
    return _LONG_BYTES * len(config.layers) * config.count
