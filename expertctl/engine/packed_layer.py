"""The layers of a packed base: which matrices and vectors there are, and which rows lie where."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any

import numpy as np

from expertctl.engine.kernels.packed import PackedMatrix
from expertctl.engine.packed_delta import (
    ATTENTION_INPUTS,
    MLP_INPUTS,
    SHARED_INPUTS,
    SHARED_OUTPUT,
)

Numbers = np.ndarray[Any, Any]
Place = PackedMatrix | Numbers
"""Where a tensor lies: rows of a matrix that begin a block, or float32 of a vector."""
ATTENTION_OUTPUT = ("self_attn.o_proj",)
MLP_OUTPUT = ("mlp.down_proj",)
ROUTER, CHOICE_BIAS = "mlp.gate.weight", "mlp.gate.e_score_correction_bias"
SHARED_GATE = "mlp.shared_expert_gate.weight"


@dataclass(frozen=True, slots=True, eq=False)
class PackedMlp:
    """An MLP that every token passes; biases are float32, or None."""

    gate_up: PackedMatrix
    gate_up_bias: Numbers | None
    down: PackedMatrix
    down_bias: Numbers | None

    @property
    def parts(self) -> tuple[Place | None, ...]:
        """Its matrices and vectors."""
        return self.gate_up, self.gate_up_bias, self.down, self.down_bias


@dataclass(frozen=True, slots=True, eq=False)
class PackedRouting:
    """What chooses the experts of a token, and the expert that all tokens share, if there is one.

    ``router`` and ``shared_gate`` are float32 in every base, for the choice hangs on their last
    bits.
    """

    router: PackedMatrix
    choice_bias: Numbers | None
    shared: PackedMlp | None
    shared_gate: PackedMatrix | None

    @property
    def parts(self) -> tuple[Place | None, ...]:
        """Its matrices and vectors."""
        shared = () if self.shared is None else self.shared.parts
        return self.router, self.choice_bias, self.shared_gate, *shared


@dataclass(frozen=True, slots=True, eq=False)
class PackedLayer:
    """One layer; biases and norms are float32, or None."""

    input_norm: Numbers
    inputs: PackedMatrix
    input_bias: Numbers | None
    query_norm: Numbers | None
    key_norm: Numbers | None
    output: PackedMatrix
    output_bias: Numbers | None
    mlp_norm: Numbers
    mlp: PackedMlp | PackedRouting
    window: int | None

    @property
    def parts(self) -> tuple[Place, ...]:
        """Its matrices and vectors, without those of routed experts."""
        own = (getattr(self, each.name) for each in fields(self) if each.name != "mlp")
        parts = (*own, *self.mlp.parts)
        return tuple(part for part in parts if isinstance(part, PackedMatrix | np.ndarray))

    def places(self, rows: Mapping[str, int]) -> dict[str, Place]:
        """Return where each of its tensors lies, by its name; ``rows`` are those of modules."""
        vectors = {
            "input_layernorm.weight": self.input_norm,
            "post_attention_layernorm.weight": self.mlp_norm,
            "self_attn.q_norm.weight": self.query_norm,
            "self_attn.k_norm.weight": self.key_norm,
        }
        found: dict[str, Place] = {n: v for n, v in vectors.items() if v is not None}
        found |= _apart(ATTENTION_INPUTS, self.inputs, self.input_bias, rows)
        found |= _apart(ATTENTION_OUTPUT, self.output, self.output_bias, rows)
        if isinstance(self.mlp, PackedMlp):
            return found | _mlp_places(MLP_INPUTS, MLP_OUTPUT, self.mlp, rows)
        return found | _routing_places(self.mlp, rows)


def _apart(
    modules: Sequence[str], matrix: PackedMatrix, bias: Numbers | None, rows: Mapping[str, int]
) -> dict[str, Place]:
    """Return the places of modules that lie in one matrix, one after another."""
    found: dict[str, Place] = {}
    ends = list(accumulate(rows[module] for module in modules))
    for module, end in zip(modules, ends, strict=True):
        first = end - rows[module]
        found[f"{module}.weight"] = matrix.part(first, rows[module])
        if bias is not None:
            found[f"{module}.bias"] = bias[first:end]
    return found


def _mlp_places(
    inputs: Sequence[str], output: Sequence[str], mlp: PackedMlp, rows: Mapping[str, int]
) -> dict[str, Place]:
    found = _apart(inputs, mlp.gate_up, mlp.gate_up_bias, rows)
    return found | _apart(output, mlp.down, mlp.down_bias, rows)


def _routing_places(mlp: PackedRouting, rows: Mapping[str, int]) -> dict[str, Place]:
    found: dict[str, Place] = {ROUTER: mlp.router}
    if mlp.choice_bias is not None:
        found[CHOICE_BIAS] = mlp.choice_bias
    if mlp.shared_gate is not None:
        found[SHARED_GATE] = mlp.shared_gate
    if mlp.shared is not None:
        found |= _mlp_places(SHARED_INPUTS, (SHARED_OUTPUT,), mlp.shared, rows)
    return found
