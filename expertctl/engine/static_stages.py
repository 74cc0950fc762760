"""A step of a base whose routed experts may be missing: stages, with a border behind each router.

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

import torch
from torch import Tensor

from expertctl.engine.moe.expert_stack import DUMMY, StackShape
from expertctl.engine.moe.phase import Phase
from expertctl.engine.moe.stacked_mlp import StackedLayers, StackedMlp, merge, step_bytes
from expertctl.engine.moe.stacked_room import StackedRoom, stacked_room_bytes
from expertctl.engine.static_graphs import Graphs
from expertctl.engine.static_plans import PlanSlots
from expertctl.engine.static_step import StaticStep, StepRoom
from expertctl.package.model_config import ModelConfig

Run = Callable[[Hashable, Callable[[], None]], None]
"""Does what a function does, as `Graphs.run`."""
ROWS = 1
"""For so many rows there is always room; texts of a base are read one after the other."""


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


class StagedStep:
    """The step of one base, in stages; the owner of what stays between texts."""

    def __init__(
        self, config: ModelConfig, step: StaticStep, layers: StackedLayers, *, captures: bool = True
    ) -> None:
        """Cut a step behind the routers of these layers, and take the memory of `ROWS`."""
        self._config, self._step, self._layers = config, step, layers
        device = layers.experts.stack.device
        self.graphs = Graphs(device, captures=captures)
        """The graphs that stay."""
        self.room = StackedRoom(config, rows=ROWS, device=device)

    def __call__(self, bucket: Bucket, texts: Sequence[int], *, run: Run) -> None:
        """Read a token in each of the first rows; texts stand in some of them.

        ``run`` runs the stages that go with the text.

        Raises:
            InvalidPackageError: when a file of the base cannot be read.
        """
        self._make_room(bucket.rows)
        key, here, begin = (len(self.room), *bucket.key), torch.tensor(texts), 0
        for number, mlp in self._layers.mlps.items():
            run((*key, number, "choose"), partial(self._choose, bucket, begin, mlp))
            self._cross(bucket, here, mlp, run)
            begin = number + 1
        run((*key, "score"), partial(self._score, bucket, begin))
        self._layers.experts.passed(len(texts), phase=Phase.DECODE)

    @property
    def nbytes(self) -> int:
        """Bytes on the device, without those of graphs."""
        return self.room.nbytes

    def rest(self) -> None:
        """Let go of what is larger than what always stays."""
        if len(self.room) > ROWS:
            self._renew(ROWS)

    def close(self) -> None:
        """Let go of the graphs."""
        self.graphs.clear()

    def _make_room(self, rows: int) -> None:
        if len(self.room) < rows:
            self._renew(rows)

    def _renew(self, rows: int) -> None:
        """Have another room, with graphs of its own."""
        self.graphs.clear()
        device = self.room.made.device
        self.room = StackedRoom(self._config, rows=rows, device=device)

    def _cross(self, bucket: Bucket, texts: Tensor, mlp: StackedMlp, run: Run) -> None:
        """Ask for the chosen experts; compute them, those that are there first."""
        experts, chosen, rows = self._layers.experts, self.room.receive(texts), bucket.rows
        stay: Run = self.graphs.run if self._step.times is None else run
        likely = None if mlp.foresee is None else chosen.likely
        waits = experts.ask(mlp.place, chosen.selected, chosen.weights, likely)
        if mlp.shared is not None:
            any_text = stay if bucket.plans is None else run
            key = len(self.room), rows, mlp.layer, "beside"
            any_text(key, partial(self._compute_beside, bucket, mlp))
        stay((rows, "there"), partial(self._compute, rows, mlp.layer))
        experts.computed(mlp.place)
        if waits:
            experts.wait(mlp.place, len(texts))
            stay((rows, "rest"), partial(self._compute_rest, rows, mlp.layer))
            experts.computed(mlp.place)

    @torch.inference_mode()
    def _choose(self, bucket: Bucket, begin: int, mlp: StackedMlp) -> None:
        """Read all layers up to the router of a routed one."""
        step, rows, room = self._step, bucket.rows, self.room
        shared = step.share(bucket.room, rows=rows, length=bucket.length, plans=bucket.plans)
        x = step.embed(bucket.room, rows) if begin == 0 else room.after[:rows]
        x = step.attend(step.pass_layers(x, range(begin, mlp.layer), shared), mlp.layer, shared)
        with step.spent(f"layers.{mlp.layer}.mlp"):
            normed = step.norm_for_mlp(x, mlp.layer)
            routed = mlp.route(normed)
            room.place.fill_(mlp.place)
            (room.beside if mlp.shared is None else room.hidden)[:rows].copy_(x)
            room.normed[:rows].copy_(normed)
            room.weights[:rows].copy_(routed.weights)
            room.chosen[0, :rows].copy_(routed.selected)
            if mlp.foresee is not None:
                room.chosen[1, :rows].copy_(mlp.foresee(normed))

    @torch.inference_mode()
    def _compute_beside(self, bucket: Bucket, mlp: StackedMlp) -> None:
        """Compute the shared expert, which reads every token."""
        assert mlp.shared is not None
        rows, room = bucket.rows, self.room
        with self._step.spent(f"layers.{mlp.layer}.mlp"):
            shared = self._step.share_plans(bucket.room, rows=rows, plans=bucket.plans)
            made = self._step.apply_shared(room.normed[:rows], mlp.shared, shared)
            room.beside[:rows].copy_(room.hidden[:rows] + made)

    @torch.inference_mode()
    def _compute(self, rows: int, layer: int) -> None:
        """Compute the experts that are there; ``layer`` only says where the time goes."""
        room, experts = self.room, self._layers.experts
        with self._step.spent(f"layers.{layer}.mlp"):
            normed, routed = room.normed[:rows], room.routed(rows)
            found = experts.find_in(room.place, routed.selected)
            room.rows[:rows].copy_(found)
            made = experts.stack.apply(normed, found)
            room.made[:rows].copy_(made)
            merged = merge(made, experts.weights(routed, found))
            room.after[:rows].copy_(room.beside[:rows] + merged)

    @torch.inference_mode()
    def _compute_rest(self, rows: int, layer: int) -> None:
        """Add the experts that came meanwhile; the dummy stands for those there before."""
        room, experts = self.room, self._layers.experts
        with self._step.spent(f"layers.{layer}.mlp"):
            routed = room.routed(rows)
            found = experts.find_in(room.place, routed.selected)
            came = found.masked_fill(room.rows[:rows] != DUMMY, DUMMY)
            made = room.made[:rows] + experts.stack.apply(room.normed[:rows], came)
            weights = experts.weights(routed, found)
            room.after[:rows].copy_(room.beside[:rows] + merge(made, weights))

    @torch.inference_mode()
    def _score(self, bucket: Bucket, begin: int) -> None:
        """Read the layers behind the last border, and score."""
        step, rows = self._step, bucket.rows
        shared = step.share(bucket.room, rows=rows, length=bucket.length, plans=bucket.plans)
        x = step.pass_layers(self.room.after[:rows], range(begin, step.layers), shared)
        step.score(x, bucket.room, shared)


def staying_bytes(config: ModelConfig) -> int:
    """Return what a `StagedStep` holds on the device between texts, without its graphs."""
    return stacked_room_bytes(config, rows=ROWS)


def staying_graphs_bytes(config: ModelConfig, shape: StackShape) -> int:
    """Return what the graphs that stay hold of the device beside that, about.

    They share one pool, of what the largest of them makes and forgets: copies of the experts that
    a token uses.
    """
    assert config.experts is not None, "a base with routed experts"
    return ROWS * step_bytes(config.experts, shape)
