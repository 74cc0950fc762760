"""CUDA graphs: steps that are recorded once and replayed, whole or piecewise.

A captured step reads and writes tensors at fixed addresses; its temporaries come from one pool. All
graphs share the pool: one runs at a time, and nothing in it outlives a run. Beyond the limit that
the caller sets all graphs are freed, never one alone: they were captured on one stream without
another owner, and when torch frees one graph it frees the workspace of its libraries for that
stream, whose address the other graphs hold (pytorch#193402).

Where routed experts may be missing, a step is piecewise, with a graph break behind each router. Up
to the break one function chooses the experts of a layer; at the break the host reads the choice and
requests missing experts. Meanwhile a second function computes the experts that are present, and for
the others a dummy that yields zeros; a third one adds those that arrived. The mapping of experts to
stack rows changes only between two pieces. Each piece is captured and replayed separately.

The pieces that compute experts read nothing of a sequence and read their layer number from the
device: two graphs per bucket of rows serve all layers and sequences, and stay with the base, as
does their workspace. A piece that reads keys and values, or a plan, is captured for one sequence
and freed with it.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from expertctl.engine.moe.counters import Phase
from expertctl.engine.torch.cuda_graph_step import GraphedStep, StaticInputs, StepPlans
from expertctl.engine.torch.devices import StreamHandle, acquire_stream
from expertctl.engine.torch.expert_stack import DUMMY_ROW, StackShape
from expertctl.engine.torch.lora_slots import LoRASlots
from expertctl.engine.torch.stacked_mlp import (
    StackedLayers,
    StackedMlp,
    StackedWorkspace,
    estimate_stacked_step_bytes,
    estimate_stacked_workspace_bytes,
    merge_rows,
)
from expertctl.package.model_config import ModelConfig

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE


GraphFunction = Callable[[], None]


class CUDAGraphPool:
    """The owner of the graphs of one device, keyed by what they were captured for."""

    def __init__(
        self, device: torch.device, *, captures: bool = True, max_graphs: int | None = None
    ) -> None:
        """Start without graphs; without ``captures`` every function is called directly.

        ``max_graphs`` must exceed the number of pieces of one step.
        """
        self._device, self._most = device, max_graphs
        self._captures = captures and device.type == "cuda"
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool: _POOL_HANDLE | None = None
        self._side: StreamHandle | None = None  # declared after the graphs, so they are freed first
        self.captured = 0
        """Number of graphs captured so far."""

    def run(self, key: Hashable, function: GraphFunction) -> None:
        """Run ``function``; calls with one key must do the same with the same tensors.

        It may be called twice the first time, so repeating it must change nothing.
        """
        if not self._captures:
            function()
            return
        graph = self._graphs.get(key)
        if graph is None:
            self._clear_if_full()
            graph = self._graphs[key] = self._capture_graph(function)
        graph.replay()

    def __len__(self) -> int:
        """Number of graphs."""
        return len(self._graphs)

    def clear(self) -> None:
        """Wait for the last graph, then free all of them and the pool."""
        if self._graphs:
            torch.cuda.current_stream(self._device).synchronize()  # it may still run
        self.close()

    def close(self) -> None:
        """Free all graphs and the pool when none runs any more, or the device failed."""
        self._graphs, self._pool = {}, None

    def _clear_if_full(self) -> None:
        if self._most is not None and len(self._graphs) >= self._most:
            self.clear()

    def _capture_graph(self, function: GraphFunction) -> torch.cuda.CUDAGraph:
        """Call the function once so that libraries initialise, then capture it.

        Other threads may use the device meanwhile. A pool without graphs is freed, so after a
        failed first capture the next one starts with another pool.
        """
        if not self._graphs:
            self._pool = torch.cuda.graph_pool_handle()
        here = torch.cuda.current_stream(self._device)
        self._side = self._side or acquire_stream(self._device, computes=True)
        side, graph = self._side.stream, torch.cuda.CUDAGraph()
        side.wait_stream(here)
        try:
            with torch.cuda.stream(side):  # torch does not leave the stream if a capture fails
                function()
                with torch.cuda.graph(
                    graph, pool=self._pool, stream=side, capture_error_mode="thread_local"
                ):
                    function()
        finally:  # a call before an error may still be running, and writes what the next one reads
            here.wait_stream(side)
        self.captured += 1
        return graph


StepRunner = Callable[[Hashable, Callable[[], None]], None]
"""Runs a function under a key, like `CUDAGraphPool.run`."""


@dataclass(frozen=True, slots=True, eq=False)
class StepBucket:
    """Shape of a step: the first rows of its inputs, visible positions, and plans in slots."""

    inputs: StaticInputs
    rows: int
    length: int
    plans: LoRASlots | None

    @property
    def key(self) -> tuple[Hashable, ...]:
        """The part of a graph's key that depends on the bucket."""
        return self.rows, self.length, self.plans is not None


class PiecewiseStep:
    """The piecewise step of one base; owns what stays between sequences."""

    def __init__(
        self,
        config: ModelConfig,
        step: GraphedStep,
        layers: StackedLayers,
        *,
        rows: int = 1,
        captures: bool = True,
    ) -> None:
        """Split a step behind the routers of these layers; ``rows`` rows of workspace stay."""
        self._config, self._step, self._layers, self._rows = config, step, layers, rows
        self._model = step.transformer
        device = layers.experts.stack.device
        self.graphs = CUDAGraphPool(device, captures=captures)
        """The permanent graphs."""
        self.room = StackedWorkspace(config, rows=rows, device=device)

    def __call__(self, bucket: StepBucket, texts: Sequence[int], *, run: StepRunner) -> None:
        """Read a token in each of the first rows; ``texts`` are the rows in use.

        ``run`` runs the pieces that belong to one sequence.

        Raises:
            InvalidPackageError: when a file of the base cannot be read.
        """
        if len(self.room) < bucket.rows:
            self._replace_buffers(bucket.rows)
        key, here, begin = (len(self.room), *bucket.key), torch.tensor(texts), 0
        for number, mlp in self._layers.mlps.items():
            run((*key, number, "choose"), partial(self._run_to_router, bucket, begin, mlp))
            self._run_experts(bucket, here, mlp, run)
            begin = number + 1
        run((*key, "score"), partial(self._finish_step, bucket, begin))
        self._layers.experts.end_pass(len(texts), phase=Phase.DECODE)

    @property
    def nbytes(self) -> int:
        """Bytes on the device, without graphs."""
        return self.room.nbytes

    def free_extra_buffers(self) -> None:
        """Free the part of the workspace that is not permanent."""
        if len(self.room) > self._rows:
            self._replace_buffers(self._rows)

    def close(self) -> None:
        """Free the graphs."""
        self.graphs.close()

    def _replace_buffers(self, rows: int) -> None:
        """Allocate another workspace; the graphs of the old one are freed."""
        self.graphs.clear()
        device = self.room.made.device
        self.room = StackedWorkspace(self._config, rows=rows, device=device)

    def _run_experts(
        self, bucket: StepBucket, texts: Tensor, mlp: StackedMlp, run: StepRunner
    ) -> None:
        """Request the chosen experts and compute them, those that are present first."""
        experts, chosen, rows = self._layers.experts, self.room.fetch_selection(texts), bucket.rows
        stay: StepRunner = self.graphs.run if self._model.times is None else run
        likely = None if mlp.predictor is None else chosen.likely
        waits = experts.request(mlp.layer_index, chosen.selected, chosen.weights, likely)
        if mlp.shared is not None:
            any_text = stay if bucket.plans is None else run
            key = len(self.room), rows, mlp.layer, "beside"
            any_text(key, partial(self._compute_shared_expert, bucket, mlp))
        stay((rows, "there"), partial(self._compute_loaded, rows, mlp.layer))
        experts.record_computed(mlp.layer_index)
        if waits:
            experts.wait(mlp.layer_index, len(texts))
            stay((rows, "rest"), partial(self._compute_arrived, rows, mlp.layer))
            experts.record_computed(mlp.layer_index)

    @torch.inference_mode()
    def _run_to_router(self, bucket: StepBucket, begin: int, mlp: StackedMlp) -> None:
        """Run all layers up to the router of a routed one."""
        step, rows, room = self._step, bucket.rows, self.room
        shared = step.build_step_tensors(
            bucket.inputs, rows=rows, length=bucket.length, plans=bucket.plans
        )
        x = step.embed(bucket.inputs, rows) if begin == 0 else room.after[:rows]
        x = step.run_layers(x, range(begin, mlp.layer), shared)
        x = self._model.run_attention(x, mlp.layer, shared)
        with self._model.time_place(f"layers.{mlp.layer}.mlp"):
            normed = self._model.norm_for_mlp(x, mlp.layer)
            routed = mlp.route(normed)
            room.layer_index.fill_(mlp.layer_index)
            (room.scratch if mlp.shared is None else room.hidden)[:rows].copy_(x)
            room.normed[:rows].copy_(normed)
            room.weights[:rows].copy_(routed.weights)
            room.chosen[0, :rows].copy_(routed.selected)
            if mlp.predictor is not None:
                room.chosen[1, :rows].copy_(mlp.predictor(normed))

    @torch.inference_mode()
    def _compute_shared_expert(self, bucket: StepBucket, mlp: StackedMlp) -> None:
        """Compute the shared expert, which processes every token."""
        assert mlp.shared is not None
        rows, room = bucket.rows, self.room
        with self._model.time_place(f"layers.{mlp.layer}.mlp"):
            plans = StepPlans.build(bucket.inputs, rows=rows, plans=bucket.plans)
            made = mlp.shared(room.normed[:rows], plans)
            room.scratch[:rows].copy_(room.hidden[:rows] + made)

    @torch.inference_mode()
    def _compute_loaded(self, rows: int, layer: int) -> None:
        """Compute the experts that are present; ``layer`` only labels the time."""
        room, experts = self.room, self._layers.experts
        with self._model.time_place(f"layers.{layer}.mlp"):
            normed, routed = room.normed[:rows], room.read_selection(rows)
            found = experts.look_up_on_device(room.layer_index, routed.selected)
            room.rows[:rows].copy_(found)
            made = experts.apply(normed, room.layer_index, routed.selected, found)
            room.made[:rows].copy_(made)
            merged = merge_rows(made, experts.mask_weights(routed, found))
            room.after[:rows].copy_(room.scratch[:rows] + merged)

    @torch.inference_mode()
    def _compute_arrived(self, rows: int, layer: int) -> None:
        """Add the experts that arrived meanwhile; the dummy replaces those already computed."""
        room, experts = self.room, self._layers.experts
        with self._model.time_place(f"layers.{layer}.mlp"):
            routed = room.read_selection(rows)
            found = experts.look_up_on_device(room.layer_index, routed.selected)
            arrived = found.masked_fill(room.rows[:rows] != DUMMY_ROW, DUMMY_ROW)
            made = experts.apply(room.normed[:rows], room.layer_index, routed.selected, arrived)
            outputs = room.made[:rows] + made
            weights = experts.mask_weights(routed, found)
            room.after[:rows].copy_(room.scratch[:rows] + merge_rows(outputs, weights))

    @torch.inference_mode()
    def _finish_step(self, bucket: StepBucket, begin: int) -> None:
        """Run the layers behind the last break, and compute the logits."""
        step, rows = self._step, bucket.rows
        shared = step.build_step_tensors(
            bucket.inputs, rows=rows, length=bucket.length, plans=bucket.plans
        )
        x = step.run_layers(self.room.after[:rows], range(begin, self._config.layers), shared)
        step.score(x, bucket.inputs, shared)


def estimate_permanent_bytes(config: ModelConfig, *, rows: int = 1) -> int:
    """Return the device bytes that a `PiecewiseStep` keeps between sequences, without graphs."""
    return estimate_stacked_workspace_bytes(config, rows=rows)


def estimate_graph_memory(config: ModelConfig, shape: StackShape, *, rows: int = 1) -> int:
    """Estimate the device memory that the permanent graphs keep, in bytes.

    They share one pool, as large as the temporaries of the largest: copies of the experts that the
    tokens of ``rows`` rows use.
    """
    assert config.experts is not None, "a base with routed experts"
    return rows * estimate_stacked_step_bytes(config.experts, shape)
