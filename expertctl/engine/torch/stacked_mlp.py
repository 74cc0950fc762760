"""Layers of routed experts in torch whose experts are rows of an `ExpertStack`.

A prompt is computed expert after expert, each reading all of its tokens at once: first those that
are resident, while the others are read. A step computes all choices of its tokens in two products.
Either way each token's experts are added in the order in which it chose them, so the result does
not depend on where an expert was or when it arrived.

`StackedWorkspace` holds the results of the stages of a step, at fixed addresses. A stage reads what
another one wrote and never what it writes itself, so it can be repeated. The index of the layer is
stored there too, so that the same stage serves all layers. Choices are copied to where the host
reads them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from expertctl.engine.torch.expert_stack import (
    DUMMY_ROW,
    StackShape,
    expert_module_name,
    round_pinned_bytes,
)
from expertctl.engine.torch.functional import TorchDeltas
from expertctl.engine.torch.routed_mlp import (
    Router,
    RouterOutput,
    SharedExpert,
    build_router,
    build_shared_expert,
)
from expertctl.engine.torch.stacked_experts import StackedExperts
from expertctl.package.architectures import ExpertsConfig
from expertctl.package.model_config import ModelConfig

HostArray = np.ndarray[Any, Any]
_HIDDEN_BUFFERS, _ID_BUFFERS = 4, 3
_LONG_BYTES, _FLOAT_BYTES = 8, 4


@dataclass(frozen=True, slots=True, eq=False)
class HostSelection:
    """The choices of some rows in a layer, in host memory; all [rows, used]."""

    selected: HostArray
    weights: HostArray
    likely: HostArray
    """Predicted choices of the next layer."""


class StackedWorkspace:
    """Memory for the routed layers of a step over up to ``rows`` rows, one layer at a time."""

    def __init__(self, config: ModelConfig, *, rows: int, device: torch.device) -> None:
        """Allocate it."""
        routed, wide = config.experts, config.hidden_size
        assert routed is not None, "a base with routed experts"
        pinned, each = device.type == "cuda", (rows, routed.used)
        self._size = rows
        self.hidden, self.normed, self.scratch, self.after = torch.zeros(
            _HIDDEN_BUFFERS, rows, wide, device=device
        )
        self.made = torch.zeros(*each, wide, device=device)
        self.weights = torch.zeros(each, device=device)
        self.chosen = torch.zeros(2, *each, dtype=torch.long, device=device)
        self.rows = torch.zeros(each, dtype=torch.long, device=device)
        self.layer_index = torch.zeros(1, dtype=torch.long, device=device)
        self._host_chosen = torch.zeros(2, *each, dtype=torch.long, pin_memory=pinned)
        self._host_weights = torch.zeros(each, pin_memory=pinned)

    def __len__(self) -> int:
        """Return the largest number of rows."""
        return self._size

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        wide = (self.hidden, self.normed, self.scratch, self.after)
        parts = (*wide, self.made, self.weights, self.chosen, self.rows, self.layer_index)
        return sum(part.nbytes for part in parts)

    def read_selection(self, rows: int) -> RouterOutput:
        """Return the choices of the first rows, on the device."""
        return RouterOutput(self.chosen[0, :rows], self.weights[:rows])

    def fetch_selection(self, sequences: Tensor) -> HostSelection:
        """Wait until the rows of ``sequences`` have chosen; return their choices."""
        self._host_chosen.copy_(self.chosen, non_blocking=True)
        self._host_weights.copy_(self.weights, non_blocking=True)
        if self.chosen.is_cuda:
            torch.cuda.current_stream(self.chosen.device).synchronize()
        selected, likely = (ids[sequences].numpy() for ids in self._host_chosen)
        return HostSelection(selected, self._host_weights[sequences].numpy(), likely)


def estimate_stacked_workspace_bytes(config: ModelConfig, *, rows: int) -> int:
    """Return the bytes of a `StackedWorkspace` on the device."""
    assert config.experts is not None
    used, wide = config.experts.used, config.hidden_size
    numbers = _HIDDEN_BUFFERS * wide + used * wide + used
    return rows * (_FLOAT_BYTES * numbers + _LONG_BYTES * _ID_BUFFERS * used) + _LONG_BYTES


def estimate_host_selection_bytes(config: ModelConfig, *, rows: int) -> int:
    """Return the bytes of a `StackedWorkspace` in host memory, pinned in powers of two."""
    assert config.experts is not None
    chosen = rows * config.experts.used
    return round_pinned_bytes(2 * _LONG_BYTES * chosen) + round_pinned_bytes(_FLOAT_BYTES * chosen)


_FLOATS_PER_CHOICE = 8
"""Float32 values per token and expert of choosing: scores, their order, ids."""


@dataclass(frozen=True, slots=True, eq=False)
class NextLayerPredictor:
    """Predicts the choices of the next routed layer: applies its router to the input of this layer.

    Little is added to that in between. It is normed for this layer, and rescaled for the next.
    """

    scale: Tensor  # the norm of the next layer divided by that of this one, [hidden]
    route: Router
    is_last: bool
    """Whether the next layer is the last of the base, which a prompt runs for one token only."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return experts of tokens, [tokens, hidden] -> int64 [tokens, used]."""
        return self.route(x * self.scale).selected


@dataclass(frozen=True, slots=True, eq=False)
class StackedMlp:
    """The router of a layer, the owner of its experts, and its shared expert if it has one."""

    layer: int
    """Its number in the base."""
    layer_index: int
    """Its index among routed layers."""
    route: Router
    experts: StackedExperts
    shared: SharedExpert | None
    predictor: NextLayerPredictor | None

    def __call__(self, x: Tensor, deltas: TorchDeltas) -> Tensor:
        """Apply it expert after expert, with the deltas of a plan: [tokens, hidden].

        Raises:
            InvalidPackageError: when a file of the base cannot be read.
        """
        routed = self.route(x)
        selected, weights = routed.selected.cpu().numpy(), routed.weights.cpu().numpy()
        likely = self._predict_next(x)
        waits = self.experts.request(self.layer_index, selected, weights, likely)
        resident, missing = split_by_residency(selected, self.experts.layer_rows(self.layer_index))
        out = x.new_zeros(selected.size, x.shape[1])
        self._run_experts(x, selected, resident, out, deltas)
        if waits:
            self.experts.wait(self.layer_index, len(selected))
            self._run_experts(x, selected, missing, out, deltas)
        found = torch.from_numpy(self.experts.layer_rows(self.layer_index)[selected]).to(x.device)
        weighed = self.experts.mask_weights(routed, found)
        merged = merge_rows(out.view(*selected.shape, -1), weighed)
        return merged if self.shared is None else merged + self.shared(x, deltas)

    def _predict_next(self, x: Tensor) -> HostArray | None:
        """Return the predicted choices of all tokens in the next layer."""
        if (
            self.predictor is None
            or self.experts.is_whole
            or (self.predictor.is_last and len(x) > 1)
        ):
            return None
        found: HostArray = self.predictor(x).cpu().numpy()
        return found

    def _run_experts(
        self, x: Tensor, selected: HostArray, sources: HostArray, out: Tensor, deltas: TorchDeltas
    ) -> None:
        """Write the outputs of the experts of some sources; those without a row write nothing."""
        experts = selected.ravel()[sources]
        places = torch.from_numpy(sources).to(x.device)
        tokens = torch.from_numpy(sources // selected.shape[1]).to(x.device)
        for begin, end in pairwise(_find_run_bounds(experts)):
            number = int(experts[begin])
            row = int(self.experts.layer_rows(self.layer_index)[number])
            if row != DUMMY_ROW:
                module = expert_module_name(self.layer, number)
                expert = self.experts.build_expert(row, module, self.layer_index, number)
                made = expert(x.index_select(0, tokens[begin:end]), deltas)
                out.index_copy_(0, places[begin:end], made)
        self.experts.record_computed(self.layer_index)


def split_by_residency(selected: HostArray, rows: HostArray) -> tuple[HostArray, HostArray]:
    """Return the sources whose expert has a row, ordered by row, and the others, by expert.

    A source is ``token * used + choice``, an index into ``selected`` [tokens, used]; those of one
    expert ascend. ``rows`` [experts] is 0 for an expert that is not resident.
    """
    experts = selected.ravel()
    found = rows[experts]
    resident, missing = np.flatnonzero(found), np.flatnonzero(found == 0)
    return (
        resident[found[resident].argsort(kind="stable")],
        missing[experts[missing].argsort(kind="stable")],
    )


def merge_rows(rows: Tensor, weights: Tensor) -> Tensor:
    """Add the weighted rows of each token: [tokens, used, hidden] -> [tokens, hidden]."""
    return torch.bmm(weights[:, None], rows)[:, 0]


@dataclass(frozen=True, slots=True, eq=False)
class StackedLayers:
    """The routed layers of a base whose experts are in a stack."""

    experts: StackedExperts
    mlps: Mapping[int, StackedMlp]
    """By their numbers in the base."""


def build_stacked_layers(
    config: ModelConfig, tensors: Mapping[str, Tensor], experts: StackedExperts
) -> StackedLayers:
    """Return the routed layers of a base, given its other tensors."""
    routed = config.experts
    assert routed is not None, "a base with routed experts"
    routers = [
        build_router(tensors, routed, layer=_layer_prefix(number)) for number in routed.layers
    ]
    norms = [tensors[f"{_layer_prefix(n)}.post_attention_layernorm.weight"] for n in routed.layers]
    scales = [_safe_divide(after, norm) for norm, after in pairwise(norms)]
    nexts = zip(scales, routers[1:], routed.layers[1:], strict=True)
    predictors = [NextLayerPredictor(scale, to, n == config.layers - 1) for scale, to, n in nexts]
    mlps = {
        number: StackedMlp(
            layer=number,
            layer_index=place,
            route=routers[place],
            experts=experts,
            shared=build_shared_expert(tensors, routed, layer=_layer_prefix(number)),
            predictor=predictor,
        )
        for place, (number, predictor) in enumerate(
            zip(routed.layers, [*predictors, None], strict=True)
        )
    }
    return StackedLayers(experts, mlps)


def estimate_prompt_floats(config: ExpertsConfig, *, hidden: int) -> int:
    """Return how many float32 values a token of a prompt needs in a layer of experts, at most."""
    inner = max(config.intermediate_size, config.shared_size)
    rows = config.used * (2 * hidden + 4)  # all outputs, those of one expert, and sources
    return rows + 6 * hidden + 4 * inner + _FLOATS_PER_CHOICE * (config.count + config.used)


def estimate_stacked_step_bytes(config: ExpertsConfig, shape: StackShape) -> int:
    """Return the bytes a token of a step needs in a layer, with copies of its experts."""
    numbers = config.used * (4 * config.intermediate_size + 2 * shape.hidden + _FLOATS_PER_CHOICE)
    numbers += 4 * config.shared_size + _FLOATS_PER_CHOICE * config.count
    if shape.clamped is not None:  # limited numbers and biases
        numbers += config.used * (7 * config.intermediate_size + 3 * shape.hidden)
    return config.used * shape.nbytes + 4 * numbers


def _find_run_bounds(experts: HostArray) -> Sequence[int]:
    """Return where each run of one expert begins, and where the last ends."""
    if not len(experts):
        return (0,)
    changes = (np.flatnonzero(np.diff(experts)) + 1).tolist()
    return (0, *changes, len(experts))


def _safe_divide(part: Tensor, whole: Tensor) -> Tensor:
    return torch.where(whole == 0, 0.0, part / whole)


def _layer_prefix(number: int) -> str:
    return f"model.layers.{number}"
