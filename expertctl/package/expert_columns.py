"""Routed experts whose stacks hold matrices as columns: those of gpt-oss, as floats or as MXFP4.

A stack of floats is [experts, in, out]. Rows of the decoder's matrices are columns there, and those
of gate and up take turns: column 0 is gate's first row, column 1 is up's. MXFP4 is stored by rows
(``…_blocks`` uint8 [experts, out, in / 32, 16] and ``…_scales`` uint8 [experts, out, in / 32]),
with the same turns. Biases ([experts, out]) are floats in both.

Every matrix and every bias of an expert becomes a tensor of its own, as from any other layout.
Floats are hashed as what they mean, so the digest of a base does not depend on their order.

MXFP4 (OCP Microscaling Formats 1.0): 32 numbers of 4 bits (E2M1), the low half of a byte first,
share a scale of 8 bits, a power of two (E8M0). The numbers are those of transformers'
``convert_moe_packed_tensors``, bit for bit: bfloat16 holds all of them.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from expertctl.package.architectures import ExpertsConfig
from expertctl.package.quantised_codecs import (
    MAX_STRIPS,
    ColumnReader,
    Numbers,
    read_bytes,
    widen_floats,
)
from expertctl.package.stored_layout import RowLayout
from expertctl.package.stored_tensor import StoredTensor
from expertctl.package.tensor_file import TensorInfo

BLOCK = 32
"""The numbers that share a scale."""
_BLOCK_BYTES = BLOCK // 2
_DOUBLED = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)
"""Twice the magnitudes of E2M1, so that half of the largest scale, 2^128, is a float32."""
_FLOATS = {"F32": 4, "F16": 2, "BF16": 2}
_STRIP_BYTES = 8 << 20
"""Bytes of a stack that are read at once: its matrices are large."""
MAX_CACHED_BYTES = MAX_STRIPS * _STRIP_BYTES
"""Bytes of stacks that are kept while their experts are read."""
_PORTION = 1 << 18
"""Numbers that are hashed at once."""
_STACK = re.compile(
    r"(?P<experts>model\.layers\.(?P<layer>0|[1-9][0-9]{0,3})\.mlp\.experts)"
    r"\.(?P<kind>gate_up|down)_proj(?P<part>|_bias|_blocks|_scales)"
)
_MODULES = {"gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",)}


@dataclass(frozen=True, slots=True)
class StoredColumnsCodec:
    """An `ExactCodec` of floats whose rows are every n-th column of a stored matrix."""

    whole: StoredTensor
    """The matrix of one expert [in, columns], or its bias [1, columns]."""
    first: int
    """The column of the first row."""
    stride: int
    rows: int
    reader: ColumnReader

    @property
    def storage(self) -> str:
        """The dtype in the file."""
        return self.whole.info.dtype

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        """Its share of the stored matrix."""
        info = self.whole.info
        size = self.rows * info.shape[0] * _FLOATS[info.dtype]
        shape = (self.rows, info.shape[0])
        return (
            replace(self.whole, info=TensorInfo(info.dtype, shape, info.begin, info.begin + size)),
        )

    def read_rows(self, first: int, count: int) -> Numbers:
        """Return rows as float32 [count, in], or [count] of a bias; raises as `TensorCodec`."""
        numbers = widen_floats(self._read_stored(first, count), self.storage)
        return numbers if self.whole.info.shape[0] > 1 else numbers.reshape(count)

    def iter_plain_bytes(self) -> Iterator[bytes]:
        """Yield the bytes of all rows in the stored dtype; raises as `TensorCodec`."""
        height = max(1, _PORTION // self.whole.info.shape[0])
        for first in range(0, self.rows, height):
            yield self._read_stored(first, min(height, self.rows - first)).tobytes()

    def _read_stored(self, first: int, count: int) -> Numbers:
        begin = self.first + first * self.stride
        end = begin + (count - 1) * self.stride + 1
        columns = self.reader.read(self.whole, begin, end)[:, :: self.stride]
        return np.ascontiguousarray(columns.T)


@dataclass(frozen=True, slots=True)
class Mxfp4Codec:
    """Numbers of 4 bits in blocks of 32 along the input, each with a power of two."""

    blocks: StoredTensor
    """Rows of codes, uint8 [out, in / 2]."""
    scales: StoredTensor
    """Rows of scales, uint8 [out, in / 32]."""

    @property
    def storage(self) -> str:
        """The name of the storage."""
        return "MXFP4"

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        """The stored tensors that determine the numbers."""
        return (self.blocks, self.scales)

    def read_rows(self, first: int, count: int) -> Numbers:
        """Return rows of the matrix, float32 [count, in]; raises as `TensorCodec`."""
        numbers = _list_pairs().take(_read_rows(self.blocks, first, count)).view(np.float32)
        scales = _list_scales().take(_read_rows(self.scales, first, count))
        grouped = numbers.reshape(count, -1, BLOCK)
        with np.errstate(over="ignore"):  # the largest numbers become infinite
            grouped *= scales[:, :, None]
        return grouped.reshape(count, -1)


def slice_column_stacks(
    found: Mapping[str, StoredTensor],
    experts: ExpertsConfig,
    *,
    hidden: int,
    is_mxfp4: bool,
    rename: Callable[[str], str],
    problems: list[str],
) -> dict[str, StoredTensor]:
    """Return the tensors of a base by canonical name, those of its experts cut out of stacks.

    ``is_mxfp4`` says whether stacks may be stored as MXFP4, ``rename`` returns canonical names.
    What is wrong with stacks is added to ``problems``.
    """
    cutter = _StackCutter(found, experts, hidden, problems, ColumnReader(_STRIP_BYTES))
    sliced: dict[str, StoredTensor] = {}
    has_blocks = False
    for stored, tensor in found.items():
        match = _STACK.fullmatch(stored)
        is_stack = match is not None and int(match["layer"]) in experts.layers
        if match is None or not is_stack or (match["part"] in _MXFP4_PARTS and not is_mxfp4):
            pairs = [(rename(stored), tensor)]
        elif match["part"] == "_scales" and f"{stored.removesuffix('_scales')}_blocks" in found:
            continue  # read with the blocks
        else:
            has_blocks |= match["part"] in _MXFP4_PARTS
            pairs = list(cutter.cut(match, tensor))
        for name, part in pairs:
            if name in sliced:
                problems.append(f"{name}: stored both as {sliced[name].stored} and as {stored}")
            sliced[name] = part
    if is_mxfp4 and not has_blocks:
        problems.append("config.json says that the weights are quantised, but none is")
    return sliced


_MXFP4_PARTS = ("_blocks", "_scales")


@dataclass(frozen=True, slots=True)
class _StackCutter:
    """Cuts stacks of one base into the tensors of single experts."""

    found: Mapping[str, StoredTensor]
    experts: ExpertsConfig
    hidden: int
    problems: list[str]
    reader: ColumnReader

    def cut(
        self, match: "re.Match[str]", tensor: StoredTensor
    ) -> Iterator[tuple[str, StoredTensor]]:
        """Yield the tensors of a stack with their canonical names, unless it is malformed."""
        inner = self.experts.intermediate_size
        modules, into = _MODULES[match["kind"]], self.hidden
        rows = inner
        if match["kind"] == "down":
            rows, into = self.hidden, inner
        out, count = rows * len(modules), self.experts.count
        scales: StoredTensor | None = None
        if match["part"] in _MXFP4_PARTS:
            scales = self._take_scales(match, (count, out, into))
            if scales is None or not self._fits(
                tensor, ("U8",), (count, out, into // BLOCK, _BLOCK_BYTES)
            ):
                return
        elif not self._fits(
            tensor, tuple(_FLOATS), (count, out) if match["part"] else (count, into, out)
        ):
            return
        for number in range(count):
            for place, module in enumerate(modules):
                name = f"{match['experts']}.{number}.{module}"
                turn = _Turn(number, place, len(modules), rows)
                if scales is not None:
                    yield f"{name}.weight", _cut_blocks(tensor, scales, turn, into)
                elif match["part"]:
                    yield f"{name}.bias", self._cut_columns(tensor, turn, None)
                else:
                    yield f"{name}.weight", self._cut_columns(tensor, turn, into)

    def _take_scales(
        self, match: "re.Match[str]", shape: tuple[int, int, int]
    ) -> StoredTensor | None:
        count, out, into = shape
        name = f"{match['experts']}.{match['kind']}_proj"
        absent = [n for n in (f"{name}_blocks", f"{name}_scales") if n not in self.found]
        self.problems.extend(f"missing tensor {n}" for n in absent)
        if into % BLOCK:
            self.problems.append(f"{name}: {into} inputs are not blocks of {BLOCK}")
        if absent or into % BLOCK:
            return None
        scales = self.found[f"{name}_scales"]
        return scales if self._fits(scales, ("U8",), (count, out, into // BLOCK)) else None

    def _fits(self, tensor: StoredTensor, dtypes: tuple[str, ...], wanted: tuple[int, ...]) -> bool:
        info = tensor.info
        if info.dtype in dtypes and info.shape == wanted:
            return True
        self.problems.append(
            f"tensor {tensor.stored} is {info.dtype} {list(info.shape)}, by config.json "
            f"{' or '.join(dtypes)} {list(wanted)}"
        )
        return False

    def _cut_columns(self, stack: StoredTensor, turn: "_Turn", columns: int | None) -> StoredTensor:
        """Return a matrix of one expert, or its bias if there are no ``columns``."""
        info, into = stack.info, columns or 1
        width, itemsize = turn.turns * turn.rows, _FLOATS[info.dtype]
        size = into * width * itemsize
        begin = turn.expert * size
        shape = (turn.rows,) if columns is None else (turn.rows, columns)
        one = TensorInfo(info.dtype, (into, width), info.begin + begin, info.begin + begin + size)
        whole = replace(stack, info=one, offset=stack.offset + begin)
        if columns is None and turn.turns == 1:
            own = TensorInfo(info.dtype, shape, one.begin, one.end)
            return replace(whole, info=own, row=turn.expert)
        codec = StoredColumnsCodec(whole, turn.place, turn.turns, turn.rows, self.reader)
        return _make_decoded(stack, shape, codec, info.dtype)


@dataclass(frozen=True, slots=True)
class _Turn:
    """Which rows of a stack are those of one matrix: every ``turns``-th one of its expert's."""

    expert: int
    place: int
    turns: int
    rows: int


def _cut_blocks(
    blocks: StoredTensor, scales: StoredTensor, turn: _Turn, columns: int
) -> StoredTensor:
    parts = (
        _cut_rows(blocks, turn, columns // BLOCK * _BLOCK_BYTES),
        _cut_rows(scales, turn, columns // BLOCK),
    )
    return _make_decoded(blocks, (turn.rows, columns), Mxfp4Codec(*parts), "BF16")


def _cut_rows(stack: StoredTensor, turn: _Turn, width: int) -> StoredTensor:
    """Return rows of bytes of a stack, each of ``width`` bytes."""
    first = turn.expert * turn.turns * turn.rows + turn.place
    begin = stack.info.begin + first * width
    return replace(
        stack,
        info=TensorInfo("U8", (turn.rows, width), begin, begin + turn.rows * width),
        offset=stack.offset + first * width,
        row=first,
        layout=None if turn.turns == 1 else RowLayout(width, stride=turn.turns),
    )


def _make_decoded(
    stack: StoredTensor,
    shape: tuple[int, ...],
    codec: StoredColumnsCodec | Mxfp4Codec,
    dtype: str,
) -> StoredTensor:
    return StoredTensor(
        stack.path,
        TensorInfo("F32", shape, 0, 0),
        0,
        stack.stored,
        file=stack.file,
        codec=codec,
        decoded=None if dtype == "F32" else dtype,
    )


def _read_rows(part: StoredTensor, first: int, count: int) -> Numbers:
    """Return rows of bytes, uint8 [count, width]; those between them are read as well."""
    width = part.info.shape[1]
    stride = 1 if part.layout is None else part.layout.stride
    end = (first + count - 1) * stride + 1
    raw = read_bytes(part, first * stride * width, end * width)
    return raw.reshape(-1, width)[::stride]


@cache
def _list_pairs() -> Numbers:
    """Return twice the two numbers of each byte as float32, one word; the low half comes first."""
    table = np.array((*_DOUBLED, *(-each for each in _DOUBLED)), np.float32)
    codes = np.arange(256)
    pairs: Numbers = np.stack((table[codes & 15], table[codes >> 4]), axis=1)
    return pairs.view(np.uint64).reshape(-1)


@cache
def _list_scales() -> Numbers:
    """Return half the power of two of each E8M0 code, float32 [256]."""
    powers: Numbers = np.ldexp(np.float32(1), np.arange(256) - 128)
    return powers.astype(np.float32)
