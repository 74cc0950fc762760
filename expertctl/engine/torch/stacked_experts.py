"""The routed experts of a base on a device: which row of the stack each is in.

`StackedExperts.lookup` is on the device and maps an expert to its row, and a missing one to the
dummy. Steps use nothing else, and it changes only between two of their stages: an expert that is
still being read is in no row. `ExpertCache` decides which experts are loaded and evicted, as on a
CPU.

If all experts are on the device, choices are only counted, by `DeviceExpertCounts`: a step does not
stop to report its choices to the host. It adds them up on the device, and they are fetched at the
end of a request; those of prompts are known to the host. A run in less memory starts with these
counts, as with those of `ResidentExperts`.
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from expertctl.digest import Progress, ignore_progress
from expertctl.engine.kernels.packed_format import Scheme
from expertctl.engine.kernels.packed_matrix import ExpertShape
from expertctl.engine.moe.cache_plan import CachePlan
from expertctl.engine.moe.counters import (
    Counters,
    ExpertActivity,
    ExpertResidency,
    Phase,
    RoutedExpertStats,
    count_requests_by_layer,
)
from expertctl.engine.moe.expert_cache import ExpertCache
from expertctl.engine.moe.expert_memory import ExpertMemory
from expertctl.engine.moe.routed_experts import RoutingChoices, compute_skipped_share
from expertctl.engine.torch.expert_stack import (
    DUMMY_ROW,
    STAGING_BUFFERS,
    ExpertStack,
    StackRowReader,
    StackShape,
    expert_module_name,
    is_queued,
    read_stored_tensor,
)
from expertctl.engine.torch.functional import FeedForward
from expertctl.engine.torch.routed_mlp import RouterOutput
from expertctl.package.architectures import ExpertsConfig
from expertctl.package.model_config import ModelConfig
from expertctl.package.stored_tensor import StoredTensor

Numbers = np.ndarray[Any, Any]
_LONG_BYTES, _FLOAT_BYTES = 8, 4


class DeviceExpertCounts:
    """Counts choices on the device. One thread adds and fetches; any thread reads the counters."""

    def __init__(self, config: ExpertsConfig, device: torch.device) -> None:
        """Start at zero."""
        self._config, layers = config, len(config.layers)
        self.counters = Counters(config.layers, experts=config.count)
        """The counts until the last `fetch_counts`."""
        with torch.inference_mode(False):  # steps run in inference mode; `fetch` may not
            self._counts = torch.zeros(layers * config.count, dtype=torch.long, device=device)
            self._unique_counts = torch.zeros(layers, dtype=torch.long, device=device)
            self._layer_offsets = torch.arange(layers, device=device)[:, None] * config.count
            self._one = torch.ones(1, dtype=torch.long, device=device)
        self._steps = self._requests = 0

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(
            each.nbytes
            for each in (self._counts, self._unique_counts, self._layer_offsets, self._one)
        )

    def count_step(self, selected: Tensor) -> None:
        """Add the choices of a step, int64 [layers, tokens, used], on the device, without waiting.

        A token chooses each expert once.
        """
        layers, tokens, used = selected.shape
        places = (selected.reshape(layers, -1) + self._layer_offsets).flatten()
        ones = self._one.expand(len(places))
        self._counts.scatter_add_(0, places, ones)
        self._steps += 1
        if tokens == 1:
            self._requests += used
            return
        seen = torch.zeros_like(self._counts).scatter_(0, places, ones)
        self._unique_counts += seen.view(layers, -1).sum(-1)

    def count_pass(self, selected: Numbers) -> None:
        """Count the choices of a pass, int64 [layers, tokens, used] in host memory."""
        chosen = count_requests_by_layer(selected, self._config.count)
        self.counters.count_hits(chosen, calls=1, requests=np.count_nonzero(chosen, axis=-1))

    def fetch_counts(self) -> None:
        """Count the choices of steps since the last call; this waits for the device, once."""
        if not self._steps:
            return
        chosen = self._counts.cpu().numpy().reshape(-1, self._config.count)
        different = self._unique_counts.cpu().numpy() + self._requests
        self.counters.count_hits(chosen, calls=self._steps, requests=different)
        self._counts.zero_()
        self._unique_counts.zero_()
        self._steps = self._requests = 0

    def report(self) -> RoutedExpertStats:
        """Return the requests until the last `fetch_counts`."""
        residency = ExpertResidency.whole(len(self._config.layers), self._config.count)
        requests = self.counters.cumulative_snapshot().summary.requests
        return RoutedExpertStats(residency, ExpertActivity(requests=requests))


def estimate_counter_bytes(config: ExpertsConfig) -> int:
    """Return the bytes of counters on the device: of experts, and of layers."""
    layers = len(config.layers)
    return _LONG_BYTES * (layers * config.count + 2 * layers + 1)


@dataclass(frozen=True, slots=True, eq=False)
class ExpertBiases:
    """The biases of all routed experts, float32, on the device whether an expert is there or not.

    Layers are counted as in `StackedExperts`.
    """

    gate_up: Tensor  # [layers, experts, 2 * intermediate]
    down: Tensor  # [layers, experts, hidden]

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self.gate_up.nbytes + self.down.nbytes

    def select(self, layer_index: int | Tensor, selected: Tensor) -> tuple[Tensor, Tensor]:
        """Return those of experts of a layer, int64 [tokens, used] -> [tokens, used, …]."""
        gate_up, down = (
            part[layer_index]
            if isinstance(layer_index, int)
            else part.index_select(0, layer_index)[0]
            for part in (self.gate_up, self.down)
        )
        chosen = selected.flatten()
        return (
            gate_up.index_select(0, chosen).view(*selected.shape, -1),
            down.index_select(0, chosen).view(*selected.shape, -1),
        )


def estimate_bias_bytes(config: ModelConfig) -> int:
    """Return the bytes of the biases of all routed experts on the device."""
    routed = config.experts
    if routed is None or not config.mlp_bias:
        return 0
    each = 2 * routed.intermediate_size + config.hidden_size
    return _FLOAT_BYTES * len(routed.layers) * routed.count * each


def _read_biases(
    config: ModelConfig, stored: Mapping[str, StoredTensor], device: torch.device
) -> ExpertBiases | None:
    routed = config.experts
    if routed is None or not config.mlp_bias:
        return None
    shape, inner = (len(routed.layers), routed.count), routed.intermediate_size
    both = torch.empty(*shape, 2 * inner), torch.empty(*shape, config.hidden_size)
    places = product(enumerate(routed.layers), range(routed.count))
    for (place, layer), expert in places:
        name = expert_module_name(layer, expert)
        rows = (*both[0][place, expert].tensor_split(2), both[1][place, expert])
        for module, row in zip(("gate_proj", "up_proj", "down_proj"), rows, strict=True):
            read_stored_tensor(stored[f"{name}.{module}.bias"], row)
    return ExpertBiases(both[0].to(device), both[1].to(device))


_SCHEMES = {torch.float32: Scheme.FLOAT32, torch.bfloat16: Scheme.BFLOAT16}


class StackedExperts:
    """Owner of a stack and of the lookup; one pass at a time uses it.

    Routed layers are counted from 0, whatever their numbers in the base.
    """

    def __init__(
        self,
        config: ExpertsConfig,
        stack: ExpertStack,
        reader: StackRowReader,
        *,
        cache: ExpertCache | None = None,
        biases: ExpertBiases | None = None,
    ) -> None:
        """Let a cache manage the blocks of the stack; without one each expert has its own block.

        Without a cache, `load_all` reads the experts.
        """
        self.config, self.stack, self.cache, self._reader = config, stack, cache, reader
        self._biases = biases
        self.device_counts = DeviceExpertCounts(config, stack.device) if cache is None else None
        """Counts choices if there is no cache."""
        shape = len(config.layers), config.count
        with torch.inference_mode(False):
            self._pinned_lookup = torch.full(
                shape, DUMMY_ROW, dtype=torch.long, pin_memory=is_queued(stack.device)
            )
            self._host_lookup: Numbers = self._pinned_lookup.numpy()
            if cache is None:
                rows = [stack.locate(number) for number in range(len(stack))]
                self._host_lookup[...] = np.array(rows, np.int64).reshape(shape)
            self.lookup = self._pinned_lookup.to(stack.device, copy=True)
        self.choices = RoutingChoices(config, tokens=1)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        held = (self.device_counts, self._biases)
        rest = sum(part.nbytes for part in held if part is not None)
        return self.stack.nbytes + self.lookup.nbytes + rest

    @property
    def is_whole(self) -> bool:
        """Whether no expert is ever missing."""
        return self.cache is None

    @property
    def skips(self) -> bool:
        """Whether missing experts may be skipped."""
        return self.cache is not None and self.cache.skips

    def load_all(self, progress: Progress = ignore_progress) -> int:
        """Read each expert into its own row; return how many bytes were read.

        Raises:
            InvalidPackageError: when a file of the base cannot be read.
        """
        assert self.is_whole, "the cache decides what is brought"
        read, names = 0, product(self.config.layers, range(self.config.count))
        pool = ThreadPoolExecutor(STAGING_BUFFERS)
        try:
            reads = (partial(self._reader.read, *name) for name in names)
            for size in pool.map(self.stack.fill, range(len(self.stack)), reads):
                read += size
                progress(self.stack.shape.nbytes)
        finally:
            pool.shutdown(cancel_futures=True)
        return read

    def apply(self, x: Tensor, layer_index: int | Tensor, selected: Tensor, rows: Tensor) -> Tensor:
        """Apply to each token its experts in rows of the stack: [tokens, hidden] -> [.., hidden].

        The dummy yields zeros. A layer's index may be on the device, int64 [1].
        """
        if self._biases is None:
            return self.stack.apply(x, rows)
        gate_up, down = self._biases.select(layer_index, selected)
        down = down.masked_fill(rows[..., None] == DUMMY_ROW, 0.0)
        return self.stack.apply(x, rows, (gate_up, down))

    def build_expert(self, row: int, module: str, layer_index: int, expert: int) -> FeedForward:
        """Return the expert in a row of the stack, as the module of that name."""
        if self._biases is None:
            return self.stack.expert(row, module)
        biases = self._biases.gate_up[layer_index, expert], self._biases.down[layer_index, expert]
        return self.stack.expert(row, module, biases)

    def layer_rows(self, layer_index: int) -> Numbers:
        """Return the row of each expert of a layer, int64 [experts]; the dummy's if missing."""
        found: Numbers = self._host_lookup[layer_index]
        return found

    def look_up(self, layer_index: int, selected: Tensor) -> Tensor:
        """Return the rows of experts of a layer, on the device; both int64 [tokens, used]."""
        return _gather_rows(self.lookup[layer_index], selected)

    def look_up_on_device(self, layer_index: Tensor, selected: Tensor) -> Tensor:
        """Return the same for a layer whose index is on the device, int64 [1]."""
        return _gather_rows(self.lookup.index_select(0, layer_index)[0], selected)

    def request(
        self, layer_index: int, selected: Numbers, weights: Numbers, likely: Numbers | None = None
    ) -> bool:
        """Request the choices in a layer, [tokens, used]; return whether to `wait`.

        Meanwhile resident experts may be computed. ``likely`` holds the predicted choices of the
        next layer. The last layer may be requested for fewer tokens than others.

        Raises:
            InvalidPackageError: when a file of the base cannot be read.
        """
        tokens, choices = len(selected), self._reserve_choices(len(selected))
        choices.selected[layer_index, :tokens] = selected
        if layer_index == len(self.config.layers) - 1:
            choices.mask_last_layer(tokens, choices.tokens)
        if self.cache is None:
            return False
        choices.weights[layer_index, :tokens] = weights
        if likely is not None:
            choices.likely[layer_index + 1, :tokens] = likely
        waits = self.cache.request(layer_index, choices, tokens, predicts_next=likely is not None)
        self._update_lookup(layer_index)
        if not waits:
            self._record_skipped(layer_index, tokens)
        return waits

    def record_computed(self, layer_index: int) -> None:
        """Record that the computation of a layer's resident experts was queued.

        Until it is done, no other expert is copied into their rows.
        """
        if self.cache is not None:
            rows = self._host_lookup[layer_index]
            self.stack.record_reads(rows[rows != DUMMY_ROW])

    def wait(self, layer_index: int, tokens: int) -> None:
        """Wait for the experts that some tokens chose in a layer and that may not be skipped.

        The work of `record_computed` is waited for first: time in which the device computes does
        not count as waiting for experts.

        Raises:
            InvalidPackageError: when a file of the base cannot be read.
        """
        if self.cache is not None:
            self.stack.wait_for_reads()
            self.cache.wait()
            self._update_lookup(layer_index)
            self._record_skipped(layer_index, tokens)

    def end_pass(self, tokens: int, *, phase: Phase) -> None:
        """End a pass over ``tokens`` tokens; after it, experts may be swapped."""
        if self.cache is not None:
            self.cache.end_pass(self.choices, tokens, phase=phase)
        elif self.device_counts is not None:
            self.device_counts.count_pass(self.choices.selected[:, :tokens])

    def mask_weights(self, routed: RouterOutput, rows: Tensor) -> Tensor:
        """Return the weights of experts in rows; if they may be skipped, the dummy gets 0."""
        return (
            redistribute_tensor_weights(routed.weights, rows != DUMMY_ROW)
            if self.skips
            else routed.weights
        )

    def read_matrix(self, module: str) -> Tensor:
        """Return the weights [out, in] of a linear layer of an expert, read from its file.

        Raises:
            InvalidPackageError: when the file cannot be read to its end.
        """
        return self._reader.read_matrix(module)

    def close(self) -> None:
        """Stop reading experts."""
        if self.cache is not None:
            self.cache.close()

    def check_integrity(self) -> None:
        """Assert the invariants between two passes."""
        assert np.array_equal(self.lookup.cpu().numpy(), self._host_lookup)
        assert not self.stack.gate_up[DUMMY_ROW].any()
        assert not self.stack.down[DUMMY_ROW].any()
        if self.cache is not None:
            self.cache.check_integrity()

    def _reserve_choices(self, tokens: int) -> RoutingChoices:
        if self.choices.tokens < tokens:
            self.choices = RoutingChoices(self.config, tokens=tokens)
        return self.choices

    def _update_lookup(self, layer_index: int) -> None:
        """Copy the rows of a layer's experts to the device if they changed.

        The previous copy has arrived: the caller of `request` waited for a choice that was queued
        after it, and `wait` waits for the work that used it.
        """
        assert self.cache is not None
        now = self.cache.places(layer_index)
        if not np.array_equal(now, self._host_lookup[layer_index]):
            self._host_lookup[layer_index] = now
            self.lookup[layer_index].copy_(self._pinned_lookup[layer_index], non_blocking=True)

    def _record_skipped(self, layer_index: int, tokens: int) -> None:
        if not self.skips:
            return
        weights = self.choices.weights[layer_index, :tokens]
        hits = (
            self._host_lookup[layer_index][self.choices.selected[layer_index, :tokens]] != DUMMY_ROW
        )
        self.choices.skipped[layer_index, :tokens] = compute_skipped_share(
            weights, hits
        ) * weights.sum(-1)


def open_stacked_experts(
    config: ModelConfig,
    stored: Mapping[str, StoredTensor],
    shape: StackShape,
    *,
    plan: CachePlan | None,
    device: torch.device,
) -> StackedExperts:
    """Allocate the routed experts of a base, all of them if there is no plan; none is read.

    ``stored`` says where the tensors of the base are stored.
    """
    routed, reader = config.experts, StackRowReader(stored, shape)
    assert routed is not None, "a base with routed experts"
    if plan is None:
        stack = ExpertStack(shape, blocks=len(routed.layers) * routed.count, device=device)
        return StackedExperts(routed, stack, reader, biases=_read_biases(config, stored, device))
    stack = ExpertStack(shape, blocks=plan.blocks, device=device)
    memory = ExpertMemory(
        ExpertShape(_SCHEMES[shape.dtype], shape.hidden, shape.intermediate),
        layers=plan.layers,
        experts=plan.experts,
        blocks=stack,
    )
    threads = STAGING_BUFFERS - 1
    cache = ExpertCache.from_plan(
        plan, memory, reader, layer_numbers=routed.layers, threads=threads
    )
    biases = _read_biases(config, stored, device)
    return StackedExperts(routed, stack, reader, cache=cache, biases=biases)


def redistribute_tensor_weights(weights: Tensor, hits: Tensor) -> Tensor:
    """Return `redistribute_weights` of tensors: hits take over the whole weight."""
    given = weights.double()
    kept = given * hits
    total, left = given.sum(-1, keepdim=True), kept.sum(-1, keepdim=True)
    share = torch.where(left == 0, 0.0, total / torch.where(left == 0, 1.0, left))
    return (kept * share).to(weights.dtype)


def _gather_rows(rows: Tensor, selected: Tensor) -> Tensor:
    return rows.index_select(0, selected.flatten()).view_as(selected)


def estimate_lookup_bytes(config: ExpertsConfig) -> int:
    """Return the bytes of the lookup on the device."""
    return _LONG_BYTES * len(config.layers) * config.count
