"""Captured steps: on a CUDA device a step is recorded once and replayed; elsewhere it is called.

A captured step reads and writes tensors that stay where they are; its temporary ones come from one
pool. All graphs share it: one runs at a time, and nothing in it outlives a run. The caller says how
many there are at most; beyond that all go, never one alone. They were captured on one stream, which
no other owner has, and torch, letting go of one, lets go of the workspace that its libraries have
for that stream, whose address the others hold (pytorch#193402).

A step of a base whose routed experts may be missing: stages, with a border behind each router.

Up to a border one function chooses the experts of a layer; at the border the host learns which, and
asks for those that are missing. While they come, a second one computes those that are there, and in
place of the others the dummy, which makes zeros; a third one adds those that came. Which expert is
in which row of the stack changes only between two stages. Each stage is captured and replayed by
itself.

The stages that compute experts read nothing of a text and ask the device which layer they are for:
two graphs for each bucket of rows serve all layers and texts, and stay with the base, as their room
does. A stage that reads keys and values, or a plan, is captured for one text and goes with it.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from expertctl.engine.devices import StreamHandle, acquire_stream
from expertctl.engine.model.cuda_graph_step import GraphedStep, StaticInputs
from expertctl.engine.model.lora_slots import LoRASlots
from expertctl.engine.moe.expert_stack import DUMMY_ROW, StackShape
from expertctl.engine.moe.phase import Phase
from expertctl.engine.moe.routed_mlp import (
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
    """The owner of the graphs of one device, by what they were captured for."""

    def __init__(
        self, device: torch.device, *, captures: bool = True, max_graphs: int | None = None
    ) -> None:
        """Begin with none; without ``captures`` every function is called as it is.

        There are no more than ``most``, which is more than one run over all stages needs.
        """
        self._device, self._most = device, max_graphs
        self._captures = captures and device.type == "cuda"
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool: _POOL_HANDLE | None = None
        self._side: StreamHandle | None = None  # after the graphs, which go before it is given back
        self.captured = 0
        """How many were captured so far."""

    def run(self, key: Hashable, function: GraphFunction) -> None:
        """Do what ``function`` does; calls with one key must do the same with the same tensors.

        It may be called twice the first time, so doing it again must change nothing.
        """
        if not self._captures:
            function()
            return
        graph = self._graphs.get(key)
        if graph is None:
            self._evict_oldest()
            graph = self._graphs[key] = self._capture_graph(function)
        graph.replay()

    def __len__(self) -> int:
        """How many there are."""
        return len(self._graphs)

    def clear(self) -> None:
        """Let go of all, and of the pool."""
        self._graphs, self._pool = {}, None

    def _evict_oldest(self) -> None:
        if self._most is not None and len(self._graphs) >= self._most:
            torch.cuda.current_stream(self._device).synchronize()  # the last one may be under way
            self.clear()

    def _capture_graph(self, function: GraphFunction) -> torch.cuda.CUDAGraph:
        """Call once so that libraries have what they need, then record.

        Other threads may use the device meanwhile. A pool without graphs is gone, so after a first
        capture that failed the next one begins with another pool.
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
        finally:  # what was called before an error is under way, and writes what the next one reads
            here.wait_stream(side)
        self.captured += 1
        return graph


StepRunner = Callable[[Hashable, Callable[[], None]], None]
"""Does what a function does, as `Graphs.run`."""
PERMANENT_ROWS = 1
"""For so many rows there is always room; texts of a base are read one after the other."""


@dataclass(frozen=True, slots=True, eq=False)
class StepBucket:
    """What a step is done over: the first rows of a room, so many positions, and plans in slots."""

    inputs: StaticInputs
    rows: int
    length: int
    plans: LoRASlots | None

    @property
    def key(self) -> tuple[Hashable, ...]:
        """What its stages are captured for."""
        return self.rows, self.length, self.plans is not None


class PiecewiseStep:
    """The step of one base, in stages; the owner of what stays between texts."""

    def __init__(
        self,
        config: ModelConfig,
        step: GraphedStep,
        layers: StackedLayers,
        *,
        captures: bool = True,
    ) -> None:
        """Cut a step behind the routers of these layers, and take the memory of `ROWS`."""
        self._config, self._step, self._layers = config, step, layers
        device = layers.experts.stack.device
        self.graphs = CUDAGraphPool(device, captures=captures)
        """The graphs that stay."""
        self.room = StackedWorkspace(config, rows=PERMANENT_ROWS, device=device)

    def __call__(self, bucket: StepBucket, texts: Sequence[int], *, run: StepRunner) -> None:
        """Read a token in each of the first rows; texts stand in some of them.

        ``run`` runs the stages that go with the text.

        Raises:
            InvalidPackageError: when a file of the base cannot be read.
        """
        self._ensure_rows(bucket.rows)
        key, here, begin = (len(self.room), *bucket.key), torch.tensor(texts), 0
        for number, mlp in self._layers.mlps.items():
            run((*key, number, "choose"), partial(self._run_to_router, bucket, begin, mlp))
            self._run_experts(bucket, here, mlp, run)
            begin = number + 1
        run((*key, "score"), partial(self._finish_step, bucket, begin))
        self._layers.experts.end_pass(len(texts), phase=Phase.DECODE)

    @property
    def nbytes(self) -> int:
        """Bytes on the device, without those of graphs."""
        return self.room.nbytes

    def free_extra_buffers(self) -> None:
        """Let go of what is larger than what always stays."""
        if len(self.room) > PERMANENT_ROWS:
            self._replace_buffers(PERMANENT_ROWS)

    def close(self) -> None:
        """Let go of the graphs."""
        self.graphs.clear()

    def _ensure_rows(self, rows: int) -> None:
        if len(self.room) < rows:
            self._replace_buffers(rows)

    def _replace_buffers(self, rows: int) -> None:
        """Have another room, with graphs of its own."""
        self.graphs.clear()
        device = self.room.made.device
        self.room = StackedWorkspace(self._config, rows=rows, device=device)

    def _run_experts(
        self, bucket: StepBucket, texts: Tensor, mlp: StackedMlp, run: StepRunner
    ) -> None:
        """Ask for the chosen experts; compute them, those that are there first."""
        experts, chosen, rows = self._layers.experts, self.room.fetch_selection(texts), bucket.rows
        stay: StepRunner = self.graphs.run if self._step.times is None else run
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
        """Read all layers up to the router of a routed one."""
        step, rows, room = self._step, bucket.rows, self.room
        shared = step.build_step_tensors(
            bucket.inputs, rows=rows, length=bucket.length, plans=bucket.plans
        )
        x = step.embed(bucket.inputs, rows) if begin == 0 else room.after[:rows]
        x = step.run_attention(
            step.run_layers(x, range(begin, mlp.layer), shared), mlp.layer, shared
        )
        with step.time_place(f"layers.{mlp.layer}.mlp"):
            normed = step.norm_for_mlp(x, mlp.layer)
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
        """Compute the shared expert, which reads every token."""
        assert mlp.shared is not None
        rows, room = bucket.rows, self.room
        with self._step.time_place(f"layers.{mlp.layer}.mlp"):
            shared = self._step.build_step_plans(bucket.inputs, rows=rows, plans=bucket.plans)
            made = self._step.apply_shared(room.normed[:rows], mlp.shared, shared)
            room.scratch[:rows].copy_(room.hidden[:rows] + made)

    @torch.inference_mode()
    def _compute_loaded(self, rows: int, layer: int) -> None:
        """Compute the experts that are there; ``layer`` only says where the time goes."""
        room, experts = self.room, self._layers.experts
        with self._step.time_place(f"layers.{layer}.mlp"):
            normed, routed = room.normed[:rows], room.read_selection(rows)
            found = experts.look_up_on_device(room.layer_index, routed.selected)
            room.rows[:rows].copy_(found)
            made = experts.stack.apply(normed, found)
            room.made[:rows].copy_(made)
            merged = merge_rows(made, experts.mask_weights(routed, found))
            room.after[:rows].copy_(room.scratch[:rows] + merged)

    @torch.inference_mode()
    def _compute_arrived(self, rows: int, layer: int) -> None:
        """Add the experts that came meanwhile; the dummy stands for those there before."""
        room, experts = self.room, self._layers.experts
        with self._step.time_place(f"layers.{layer}.mlp"):
            routed = room.read_selection(rows)
            found = experts.look_up_on_device(room.layer_index, routed.selected)
            came = found.masked_fill(room.rows[:rows] != DUMMY_ROW, DUMMY_ROW)
            made = room.made[:rows] + experts.stack.apply(room.normed[:rows], came)
            weights = experts.mask_weights(routed, found)
            room.after[:rows].copy_(room.scratch[:rows] + merge_rows(made, weights))

    @torch.inference_mode()
    def _finish_step(self, bucket: StepBucket, begin: int) -> None:
        """Read the layers behind the last border, and score."""
        step, rows = self._step, bucket.rows
        shared = step.build_step_tensors(
            bucket.inputs, rows=rows, length=bucket.length, plans=bucket.plans
        )
        x = step.run_layers(self.room.after[:rows], range(begin, step.layer_count), shared)
        step.score(x, bucket.inputs, shared)


def estimate_permanent_bytes(config: ModelConfig) -> int:
    """Return what a `PiecewiseStep` holds on the device between texts, without its graphs."""
    return estimate_stacked_workspace_bytes(config, rows=PERMANENT_ROWS)


def estimate_graph_memory(config: ModelConfig, shape: StackShape) -> int:
    """Return what the graphs that stay hold of the device beside that, about.

    They share one pool, of what the largest of them makes and forgets: copies of the experts that
    a token uses.
    """
    assert config.experts is not None, "a base with routed experts"
    return PERMANENT_ROWS * estimate_stacked_step_bytes(config.experts, shape)
