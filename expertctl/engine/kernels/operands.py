"""Where a tile of a product reads and writes."""

from dataclasses import dataclass, replace

from expertctl.engine.kernels.lanes import VECTOR_BYTES, Lanes, Value


@dataclass(frozen=True, slots=True)
class Operands:
    """Where a tile reads and writes; addresses and strides in bytes, all int64 values.

    Weights ``[blocks][vectors]``, scales ``[blocks][groups][16]`` float32, rows ``[tokens]``, what
    the groups of rows need ``[tokens][groups]``, out ``[tokens][blocks][16]`` float32.
    """

    weights: Value
    weights_stride: Value
    scales: Value
    scales_stride: Value
    rows: Value
    rows_stride: Value
    row_scales: Value
    """float32: what one step of a row's int8 is worth."""
    row_sums: Value
    """int32: the sum of a row's int8 in a group."""
    groups_stride: Value
    out: Value
    out_stride: Value
    vectors: Value
    tokens: Value
    adds: Value
    """Not 0: add to what is in ``out``."""

    def from_block(self, lanes: Lanes, block: Value) -> "Operands":
        """Return the same from a later block on."""
        return replace(
            self,
            weights=lanes.at(self.weights, block, self.weights_stride),
            scales=lanes.at(self.scales, block, self.scales_stride),
            out=lanes.at(self.out, block, VECTOR_BYTES),
        )

    def from_token(self, lanes: Lanes, token: Value) -> "Operands":
        """Return the same from a later token on."""
        return replace(
            self,
            rows=lanes.at(self.rows, token, self.rows_stride),
            row_scales=lanes.at(self.row_scales, token, self.groups_stride),
            row_sums=lanes.at(self.row_sums, token, self.groups_stride),
            out=lanes.at(self.out, token, self.out_stride),
        )
