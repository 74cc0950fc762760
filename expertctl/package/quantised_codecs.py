"""Codecs of quantised weights: rows of the matrix that the library which quantised it would give.

Every codec multiplies and rounds as its library does, so the numbers are the same bit for bit:

========================  =========================================================================
bitsandbytes NF4, FP4     ``functional.dequantize_4bit``: table * absmax in float32, then rounded to
                          the dtype of the weights before they were quantised. With double
                          quantisation, absmax = table * outer absmax + offset, in float32
bitsandbytes INT8         ``functional.int8_vectorwise_dequant``: (code * scale) * 1/127 in float32
GPTQ                      GPTQModel ``dequantize_weight``: (code - zero) * scale, in scales' dtype
AWQ                       AutoAWQ ``dequantize_gemm``: (code - zero) * scale, in the scales' dtype
compressed-tensors        ``lifecycle.forward.dequantize``: (code - zero) * scale, likewise
FP8 of transformers       ``Fp8Dequantize`` for float32: code * scale in float32
========================  =========================================================================

The product of two 16-bit floats is exact in float32, so one rounding gives the library's result.
All codes are little-endian streams of bits. Files are read, not mapped; what a codec reads at once
is bounded by the rows that it is asked for, and by `ColumnReader`.
"""

import os
from collections import OrderedDict
from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import Any, Literal

import numpy as np

from expertctl.errors import InvalidPackageError
from expertctl.package.stored_tensor import StoredTensor

Numbers = np.ndarray[Any, Any]
FloatName = Literal["F32", "F16", "BF16"]

_DTYPES: dict[str, "np.dtype[Any]"] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "I32": np.dtype("<i4"),
    "I8": np.dtype("i1"),
}
_BYTE = np.dtype(np.uint8)
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The nibble of a 32-bit word that holds each of eight consecutive outputs."""
_AWQ_COUNT = len(_AWQ_ORDER)
_WORD_BITS = 32
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_FP4_TWELFTHS = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
_INT8_STEP = np.float32(7.874015718698502e-3)
"""1/127 as bitsandbytes writes it."""


@dataclass(frozen=True, slots=True)
class OuterAbsmax:
    """How the absmax of blocks is quantised itself (double quantisation)."""

    absmax: StoredTensor
    table: StoredTensor
    blocksize: int
    offset: float


@dataclass(frozen=True, slots=True)
class BlockFloatCodec:
    """4-bit codes of bitsandbytes in blocks of the flattened matrix, the high nibble first."""

    kind: Literal["nf4", "fp4"]
    codes: StoredTensor
    absmax: StoredTensor
    state: StoredTensor
    columns: int
    blocksize: int
    dtype: FloatName
    outer: OuterAbsmax | None

    @property
    def storage(self) -> str:
        """The name of the storage."""
        return f"{self.kind.upper()} (bitsandbytes)"

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        """The stored tensors that determine the numbers."""
        outer = () if self.outer is None else (self.outer.absmax, self.outer.table)
        return (self.codes, self.absmax, *outer, self.state)

    def read_rows(self, first: int, count: int) -> Numbers:
        """Return rows of the matrix, float32 [count, columns]; raises as `TensorCodec`."""
        begin, end = first * self.columns, (first + count) * self.columns
        codes = read_bytes(self.codes, begin // 2, (end + 1) // 2)
        numbers = _list_pairs(self.kind).take(codes).view(np.float32)
        numbers = numbers[begin % 2 : begin % 2 + end - begin]
        block = begin // self.blocksize
        absmax = self._read_absmax(block, (end - 1) // self.blocksize + 1)
        skipped = begin - block * self.blocksize
        with np.errstate(all="ignore"):
            numbers *= absmax.repeat(self.blocksize)[skipped : skipped + len(numbers)]
        return _round_to(numbers, self.dtype).reshape(count, self.columns)

    def _read_absmax(self, first: int, end: int) -> Numbers:
        if self.outer is None:
            return _read_floats(self.absmax, first, end)
        outer = self.outer
        block = first // outer.blocksize
        absmax = _read_floats(outer.absmax, block, (end - 1) // outer.blocksize + 1)
        table = _read_floats(outer.table, 0, 256)
        numbers = table[read_bytes(self.absmax, first, end)]
        skipped = first - block * outer.blocksize
        with np.errstate(all="ignore"):
            numbers *= absmax.repeat(outer.blocksize)[skipped : skipped + len(numbers)]
            numbers += np.float32(outer.offset)
        return numbers


@dataclass(frozen=True, slots=True)
class ScaledRowsCodec:
    """Codes stored by rows, as the matrix, with a grid of scales: one for each block."""

    storage: str
    codes: StoredTensor
    coding: Literal["int8", "fp8", "packed"]
    bits: int
    shape: tuple[int, int]
    block: tuple[int, int]
    """The rows and the columns that share a scale."""
    scales: StoredTensor
    dtype: FloatName
    """What the product is rounded to."""
    zeros: StoredTensor | None = None
    groups: StoredTensor | None = None
    """The scale of each column; None: the columns of a block follow each other."""
    step: bool = False
    """Whether scales are those of bitsandbytes, 127 times too large."""
    shape_entry: StoredTensor | None = None

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        """The stored tensors that determine the numbers."""
        rest = (self.zeros, self.groups, self.shape_entry)
        return (self.codes, self.scales, *(part for part in rest if part is not None))

    def read_rows(self, first: int, count: int) -> Numbers:
        """Return rows of the matrix, float32 [count, columns]; raises as `TensorCodec`."""
        (_, columns), (height, width) = self.shape, self.block
        numbers = self._read_codes(first, count)
        across = -(-columns // width)
        low, high = first // height, (first + count - 1) // height + 1
        scales = _read_floats(self.scales, low * across, high * across).reshape(-1, across)
        zeros = None if self.zeros is None else self._read_zeros(self.zeros, low, high, across)
        if height > 1:
            rows = np.arange(first, first + count) // height - low
            scales, zeros = scales[rows], None if zeros is None else zeros[rows]
        groups = _read_groups(self.groups, across)
        index = width if groups is None else groups
        return _scale(numbers, scales, zeros, index, self.dtype, self.step)

    def _read_codes(self, first: int, count: int) -> Numbers:
        columns = self.shape[1]
        row_bytes = self.codes.size // self.shape[0]
        raw = read_bytes(self.codes, first * row_bytes, (first + count) * row_bytes)
        raw = raw.reshape(count, row_bytes)
        if self.coding == "fp8":
            return _list_fp8()[raw]
        if self.coding == "int8":
            return raw.view(np.int8).astype(np.float32)
        numbers = _unpack(raw, self.bits, columns).astype(np.float32)
        numbers -= np.float32(1 << (self.bits - 1))
        return numbers

    def _read_zeros(self, zeros: StoredTensor, low: int, high: int, across: int) -> Numbers:
        """Return zero points, [rows of the grid, columns of the grid]; packed ones along rows."""
        if zeros.info.dtype == "I8":
            raw = read_bytes(zeros, low * across, high * across)
            return raw.view(np.int8).astype(np.float32).reshape(-1, across)
        start = low // _WORD_BITS * _WORD_BITS
        word, last = start * self.bits // _WORD_BITS, -(-high * self.bits // _WORD_BITS)
        raw = read_bytes(zeros, word * across * 4, last * across * 4)
        words = np.ascontiguousarray(raw.view("<u4").reshape(-1, across).T)
        found = _unpack(words.view(np.uint8), self.bits, high - start)[:, low - start :].T
        return found.astype(np.float32) - np.float32(1 << (self.bits - 1))


_STRIP_BYTES = 1 << 20
MAX_STRIPS = 4
"""The most strips that a `ColumnReader` keeps."""


class ColumnReader:
    """Reads columns of stored matrices; keeps the last strips, as the next columns follow soon.

    Shared by the codecs of a base. A file is read in as many pieces as the matrix has rows, so a
    strip is made as wide as its bytes allow. Its methods may be called from any thread.
    """

    def __init__(self, strip_bytes: int = _STRIP_BYTES) -> None:
        """Start without strips."""
        self._strip_bytes = strip_bytes
        self._strips: OrderedDict[StoredTensor, tuple[int, Numbers]] = OrderedDict()
        self._lock = Lock()

    def read(self, part: StoredTensor, first: int, end: int) -> Numbers:
        """Return columns of a matrix of 32-bit words or 16- or 32-bit floats, as stored.

        Raises:
            OSError: when the file ends early.
            InvalidPackageError: when it changed.
        """
        with self._lock:
            begin, strip = self._strips.get(part, (0, None))
        if strip is None or first < begin or end > begin + strip.shape[1]:
            rows, columns = part.info.shape
            width = max(end - first, self._strip_bytes // (rows * _get_dtype(part).itemsize))
            begin, strip = first, _read_columns(part, first, min(first + width, columns))
            with self._lock:
                self._strips[part] = begin, strip
                self._strips.move_to_end(part)
                while len(self._strips) > MAX_STRIPS:
                    self._strips.popitem(last=False)
        return strip[:, first - begin : end - begin]


@dataclass(frozen=True, slots=True)
class ScaledColumnsCodec:
    """Codes of GPTQ or AWQ: stored transposed, [inputs, outputs], with scales [groups, outputs].

    GPTQ packs codes along the input and zero points along the output, AWQ both along the output.
    """

    storage: str
    layout: Literal["gptq", "awq"]
    codes: StoredTensor
    zeros: StoredTensor
    scales: StoredTensor
    groups: StoredTensor | None
    """The group of each input; None: the inputs of a group follow each other."""
    columns: int
    bits: int
    group: int
    adds_one: bool
    reader: ColumnReader

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        """The stored tensors that determine the numbers."""
        rest = () if self.groups is None else (self.groups,)
        return (self.codes, self.zeros, self.scales, *rest)

    @property
    def dtype(self) -> FloatName:
        """What the product is rounded to."""
        return _float_name(self.scales)

    def read_rows(self, first: int, count: int) -> Numbers:
        """Return rows of the matrix, float32 [count, columns]; raises as `TensorCodec`."""
        end = first + count
        if self.layout == "awq":
            low, high = first // _AWQ_COUNT, -(-end // _AWQ_COUNT)
            codes = self._unpack_interleaved(self.reader.read(self.codes, low, high), first, end)
            zeros = self._unpack_interleaved(_read_columns(self.zeros, low, high), first, end)
        else:
            words = np.ascontiguousarray(self.reader.read(self.codes, first, end).T)
            codes, zeros = self._unpack(words, self.columns), self._read_zeros(first, end)
        scales = widen_floats(_read_columns(self.scales, first, end), self.scales.info.dtype)
        groups = _read_groups(self.groups, len(scales))
        index = self.group if groups is None else groups
        numbers = codes.astype(np.float32)
        return _scale(numbers, scales.T, zeros.astype(np.float32), index, self.dtype, step=False)

    def _unpack_interleaved(self, words: Numbers, first: int, end: int) -> Numbers:
        """Return codes [outputs, rows] of words that begin with the one of the first output."""
        codes = self._unpack(np.ascontiguousarray(words), words.shape[1] * _AWQ_COUNT)
        ordered = codes.reshape(-1, _AWQ_COUNT)[:, _AWQ_ORDER].reshape(len(words), -1)
        return ordered[:, first % _AWQ_COUNT : first % _AWQ_COUNT + end - first].T

    def _read_zeros(self, first: int, end: int) -> Numbers:
        start = first // _WORD_BITS * _WORD_BITS
        low, high = start * self.bits // _WORD_BITS, -(-end * self.bits // _WORD_BITS)
        words = _read_columns(self.zeros, low, high)
        found = self._unpack(words, end - start)[:, first - start :].T
        return (found + 1) & ((1 << self.bits) - 1) if self.adds_one else found

    def _unpack(self, words: Numbers, count: int) -> Numbers:
        return _unpack(words.view(np.uint8), self.bits, count)


def _scale(
    numbers: Numbers,
    scales: Numbers,
    zeros: Numbers | None,
    index: Numbers | int,
    dtype: FloatName,
    step: bool,
) -> Numbers:
    """Return (numbers - zeros) * scales; see `_spread` for ``index``."""
    columns = numbers.shape[1]
    with np.errstate(all="ignore"):
        if zeros is not None:
            numbers -= _spread(zeros, index, columns)
        numbers *= _spread(scales, index, columns)
        if step:
            numbers *= _INT8_STEP
    return _round_to(numbers, dtype)


def _spread(grid: Numbers, index: Numbers | int, columns: int) -> Numbers:
    """Return the value for each column, of the group ``index`` says, or of groups of that width."""
    if not isinstance(index, int):
        return grid.take(index, axis=1)
    if grid.shape[1] == 1:
        return grid  # broadcast
    return grid.repeat(index, axis=1)[:, :columns]


def _read_groups(groups: StoredTensor | None, count: int) -> Numbers | None:
    """Return the group of each column, below ``count``; None: they follow each other.

    Raises:
        InvalidPackageError: when a stored one is not.
    """
    if groups is None:
        return None
    index = read_bytes(groups, 0, groups.size).view(_DTYPES["I32"]).astype(np.int64)
    if (index == -1).all():  # compressed-tensors: not reordered
        return None
    if index.min() < 0 or index.max() >= count:
        wrong = f"{groups.stored} has groups from {index.min()} to {index.max()}, there are {count}"
        raise InvalidPackageError(str(groups.path), [wrong])
    found: Numbers = index
    return found


def _float_name(part: StoredTensor) -> FloatName:
    match part.info.dtype:
        case "F16":
            return "F16"
        case "BF16":
            return "BF16"
        case _:
            return "F32"


def _get_dtype(part: StoredTensor) -> "np.dtype[Any]":
    return _DTYPES.get(part.info.dtype, _BYTE)


def _read_floats(part: StoredTensor, first: int, end: int) -> Numbers:
    """Return the numbers of a stored tensor of floats, as float32."""
    dtype = _get_dtype(part)
    raw = read_bytes(part, first * dtype.itemsize, end * dtype.itemsize)
    return widen_floats(raw.view(dtype), part.info.dtype)


def widen_floats(numbers: Numbers, name: str) -> Numbers:
    """Return stored floats of the dtype ``name``, bfloat16 as uint16, as float32."""
    if name == "BF16":
        return (numbers.astype(np.uint32) << 16).view(np.float32)
    return numbers.astype(np.float32)


def _round_to(numbers: Numbers, name: FloatName) -> Numbers:
    """Round float32 to a float type, ties to even, and return float32."""
    if name == "F16":
        with np.errstate(over="ignore"):
            return numbers.astype(np.float16).astype(np.float32)
    if name == "F32":
        return numbers
    bits = numbers.view(np.uint32)
    rounded = bits >> 16
    rounded &= 1
    rounded += bits
    rounded += np.uint32(0x7FFF)
    rounded &= np.uint32(0xFFFF0000)
    found, absent = rounded.view(np.float32), np.isnan(numbers)
    if absent.any():
        found[absent] = np.nan
    return found


def _unpack(raw: Numbers, bits: int, count: int) -> Numbers:
    """Return codes [rows, count] of streams of bits, uint8 [rows, bytes]."""
    if bits == 8:
        return raw[:, :count]
    if bits == 4:
        pairs = np.stack((raw & 15, raw >> 4), axis=-1)
        return pairs.reshape(len(raw), -1)[:, :count]
    single = np.unpackbits(raw, axis=1, count=count * bits, bitorder="little")
    weights = (1 << np.arange(bits)).astype(np.uint8)
    return single.reshape(len(raw), count, bits) @ weights


def read_bytes(part: StoredTensor, begin: int, end: int) -> Numbers:
    """Return bytes of a stored tensor, uint8, whatever the order of its rows.

    Raises:
        OSError: when the file ends early.
        InvalidPackageError: when it changed.
    """
    raw = np.empty(end - begin, np.uint8)
    with part.open() as stream:
        _read_into(stream.fileno(), raw, part.offset + begin)
    return raw


def _read_columns(part: StoredTensor, first: int, end: int) -> Numbers:
    """Return columns of a stored matrix, [rows, end - first]."""
    dtype, (rows, columns) = _get_dtype(part), part.info.shape
    found = np.empty((rows, end - first), dtype)
    raw, stride = found.view(np.uint8), columns * dtype.itemsize
    begin = part.offset + first * dtype.itemsize
    with part.open() as stream:
        number = stream.fileno()
        for row in range(rows):
            _read_into(number, raw[row], begin + row * stride)
    return found


def _read_into(number: int, raw: Numbers, offset: int) -> None:
    left = raw.data
    while left:
        count = os.preadv(number, [left], offset)
        if not count:
            raise OSError("it is cut short")
        left, offset = left[count:], offset + count


@cache
def _list_pairs(kind: Literal["nf4", "fp4"]) -> Numbers:
    """Return the two float32 numbers of each byte, as one word; the high nibble is the first."""
    positive = np.array(_FP4_TWELFTHS, np.float32) / np.float32(12)
    table = (
        np.array(_NF4, np.float32) if kind == "nf4" else np.concatenate((positive, 0 - positive))
    )
    codes = np.arange(256)
    pairs: Numbers = np.stack((table[codes >> 4], table[codes & 15]), axis=1)
    return pairs.view(np.uint64).reshape(-1)


@cache
def _list_fp8() -> Numbers:
    """Return the number of each E4M3 code (without infinities, as in torch), float32 [256]."""
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    normal = (8 + mantissa) * 2.0 ** (exponent - 10)
    numbers = np.where(exponent == 0, mantissa * 2.0**-9, normal)
    numbers = np.where(codes & 0x7F == 0x7F, np.nan, numbers) * np.where(codes > 127, -1, 1)
    return numbers.astype(np.float32)
