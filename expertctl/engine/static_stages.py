"""A step of a base whose routed experts may be missing: stages, and a border behind each router.

Up to a border one function chooses the experts of a layer; there the host is told whom, and asks
for those who are missing. While they come, another one computes those who are there, and for all
others the dummy, which makes nothing; a third one adds those who came. Who is in which row of the
stack changes only at a border. Each stage is captured and replayed by itself.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from expertctl.engine.moe.expert_stack import DUMMY
from expertctl.engine.moe.phase import Phase
from expertctl.engine.moe.stacked_mlp import StackedLayers, StackedMlp, merge
from expertctl.engine.moe.stacked_room import StackedRoom
from expertctl.engine.static_plans import PlanSlots
from expertctl.engine.static_step import StaticStep, StepRoom

Run = Callable[[Hashable, Callable[[], None]], None]
"""Does what a function does, as `Graphs.run`."""


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """What a step is done over: the first rows of a room, so many positions, and plans in slots."""

    room: StepRoom
    rows: int
    length: int
    plans: PlanSlots | None

    @property
    def key(self) -> tuple[Hashable, ...]:
        """What its stages are captured for."""
        return self.rows, self.length, self.plans is not None

    @property
    def stacked(self) -> StackedRoom:
        """The room of routed layers."""
        assert self.room.stacked is not None
        return self.room.stacked


class StagedStep:
    """The step of one base, in stages."""

    def __init__(self, step: StaticStep, layers: StackedLayers) -> None:
        """Cut a step behind the routers of these layers."""
        self._step, self._layers = step, layers

    def __call__(self, bucket: Bucket, texts: Sequence[int], *, run: Run) -> None:
        """Read a token in each of the first rows; texts stand in some of them.

        Raises:
            InvalidPackageError: when a file of the base cannot be read.
        """
        here, begin = torch.tensor(texts), 0
        for number, mlp in self._layers.mlps.items():
            run((*bucket.key, number, "choose"), partial(self._choose, bucket, begin, mlp))
            self._cross(bucket, here, mlp, run)
            begin = number + 1
        run((*bucket.key, "score"), partial(self._score, bucket, begin))
        self._layers.experts.passed(len(texts), phase=Phase.DECODE)

    def _cross(self, bucket: Bucket, texts: Tensor, mlp: StackedMlp, run: Run) -> None:
        """Ask for those who were chosen; compute them, who is there first."""
        experts, chosen = self._layers.experts, bucket.stacked.receive(texts)
        likely = None if mlp.foresee is None else chosen.likely
        waits = experts.ask(mlp.place, chosen.selected, chosen.weights, likely)
        run((*bucket.key, mlp.layer, "there"), partial(self._compute, bucket, mlp))
        experts.computed(mlp.place)
        if waits:
            experts.wait(mlp.place, len(texts))
            run((*bucket.key, mlp.layer, "rest"), partial(self._compute_rest, bucket, mlp))
            experts.computed(mlp.place)

    @torch.inference_mode()
    def _choose(self, bucket: Bucket, begin: int, mlp: StackedMlp) -> None:
        """Read all layers up to the router of a routed one."""
        step, rows, room = self._step, bucket.rows, bucket.stacked
        shared = step.share(bucket.room, rows=rows, length=bucket.length, plans=bucket.plans)
        x = step.embed(bucket.room, rows) if begin == 0 else room.after[:rows]
        x = step.attend(step.pass_layers(x, range(begin, mlp.layer), shared), mlp.layer, shared)
        with step.spent(f"layers.{mlp.layer}.mlp"):
            normed = step.norm_for_mlp(x, mlp.layer)
            routed = mlp.route(normed)
            room.hidden[:rows].copy_(x)
            room.normed[:rows].copy_(normed)
            room.weights[:rows].copy_(routed.weights)
            room.chosen[0, :rows].copy_(routed.selected)
            if mlp.foresee is not None:
                room.chosen[1, :rows].copy_(mlp.foresee(normed))

    @torch.inference_mode()
    def _compute(self, bucket: Bucket, mlp: StackedMlp) -> None:
        """Compute who is there, and what reads every token."""
        rows, room, experts = bucket.rows, bucket.stacked, self._layers.experts
        with self._step.spent(f"layers.{mlp.layer}.mlp"):
            x, normed, routed = room.hidden[:rows], room.normed[:rows], room.routed(rows)
            found = experts.find(mlp.place, routed.selected)
            room.rows[:rows].copy_(found)
            made = experts.stack.apply(normed, found)
            room.made[:rows].copy_(made)
            beside = x
            if mlp.shared is not None:
                shared = self._step.share_plans(bucket.room, rows=rows, plans=bucket.plans)
                beside = x + self._step.apply_shared(normed, mlp.shared, shared)
            room.beside[:rows].copy_(beside)
            room.after[:rows].copy_(beside + merge(made, experts.weights(routed, found)))

    @torch.inference_mode()
    def _compute_rest(self, bucket: Bucket, mlp: StackedMlp) -> None:
        """Add who came meanwhile; for who was there before the dummy is computed."""
        rows, room, experts = bucket.rows, bucket.stacked, self._layers.experts
        with self._step.spent(f"layers.{mlp.layer}.mlp"):
            routed = room.routed(rows)
            found = experts.find(mlp.place, routed.selected)
            came = found.masked_fill(room.rows[:rows] != DUMMY, DUMMY)
            made = room.made[:rows] + experts.stack.apply(room.normed[:rows], came)
            weights = experts.weights(routed, found)
            room.after[:rows].copy_(room.beside[:rows] + merge(made, weights))

    @torch.inference_mode()
    def _score(self, bucket: Bucket, begin: int) -> None:
        """Read the layers behind the last border, and score."""
        step, rows = self._step, bucket.rows
        shared = step.share(bucket.room, rows=rows, length=bucket.length, plans=bucket.plans)
        x = step.pass_layers(bucket.stacked.after[:rows], range(begin, step.layers), shared)
        step.score(x, bucket.room, shared)
