"""What a plan changes in one linear layer, as the kernels read it; see `linear.LinearDelta`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from expertctl.engine.kernels.packed import PackedMatrix, pack
from expertctl.engine.kernels.scheme import Scheme
from expertctl.engine.linear import LinearDelta

Numbers = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True, eq=False)
class PackedDelta:
    """``y = d * (W (u * x)) + B (A x) + e * b``; a part that is None is neutral."""

    a: PackedMatrix | None = None
    b: PackedMatrix | None = None
    input_scale: Numbers | None = None
    output_scale: Numbers | None = None
    bias_scale: Numbers | None = None

    @property
    def has_vectors(self) -> bool:
        """Whether it multiplies what goes into the layer, comes out, or its bias."""
        vectors = (self.input_scale, self.output_scale, self.bias_scale)
        return any(vector is not None for vector in vectors)


NO_DELTA = PackedDelta()
PackedDeltas = Mapping[str, PackedDelta]
"""By module name."""


def pack_delta(delta: LinearDelta) -> PackedDelta:
    """Pack the blocks of a compiled plan."""
    return PackedDelta(
        a=_matrix(delta.a),
        b=_matrix(delta.b),
        input_scale=_vector(delta.input_scale),
        output_scale=_vector(delta.output_scale),
        bias_scale=_vector(delta.bias_scale),
    )


def _matrix(block: Tensor | None) -> PackedMatrix | None:
    return None if block is None else pack(block.float().numpy(), Scheme.FLOAT32)


def _vector(vector: Tensor | None) -> Numbers | None:
    return None if vector is None else np.ascontiguousarray(vector.float().numpy())
