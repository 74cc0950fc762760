"""Blocks of GGUF files in packed matrices: the numbers of the gguf package, and their products."""

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from expertctl.engine.arrays import AnyArray
from expertctl.engine.kernels.gguf_blocks import BLOCK_BYTES, BLOCK_COLUMNS, pack_blocks
from expertctl.engine.kernels.packed_format import BLOCK_SCHEMES, LANES, Scheme
from expertctl.engine.kernels.packed_matrix import (
    PackedMatrix,
    allocate_matrix,
    embedding_arguments,
    embedding_kernel,
    unpack_matrix,
)
from expertctl.engine.kernels.quantisation import MINIMA
from tests.engine.kernels.reference_gemm import make_random_numbers, multiply_exactly, run_gemm

EVERY = pytest.mark.parametrize("scheme", BLOCK_SCHEMES, ids=lambda scheme: scheme.value)
SHAPES = ((1, 256), (16, 512), (37, 768), (150, 1024))


def kind(scheme: Scheme) -> GGMLQuantizationType:
    return GGMLQuantizationType[scheme.value.upper()]


def draw_blocks(scheme: Scheme, rows: int, columns: int, *, seed: int = 0) -> AnyArray:
    """Rows of blocks as a file has them, uint8 [rows, bytes]: any integers, scales of any size."""
    rng = np.random.default_rng(seed)
    count = columns // BLOCK_COLUMNS[scheme]
    blocks = rng.integers(0, 256, (rows, count, BLOCK_BYTES[scheme]), np.uint8)
    halves = 2 if scheme in MINIMA else 1
    shared = (rng.standard_normal((rows, count, halves)) * 0.02).astype(np.float16)
    first = 208 if scheme is Scheme.Q6_K else 0
    blocks[:, :, first : first + 2 * halves] = shared.view(np.uint8)
    return blocks.reshape(rows, -1)


def pack(scheme: Scheme, blocks: AnyArray, columns: int) -> PackedMatrix:
    matrix = allocate_matrix(scheme, len(blocks), columns)
    pack_blocks(matrix, blocks)
    return matrix


@EVERY
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_the_numbers_are_those_of_the_gguf_package(scheme: Scheme, rows: int, columns: int) -> None:
    blocks = draw_blocks(scheme, rows, columns)
    found = unpack_matrix(pack(scheme, blocks, columns))
    np.testing.assert_array_equal(found, dequantize(blocks, kind(scheme)))


@pytest.mark.parametrize(
    "scheme", [Scheme.Q8_0, Scheme.Q4_0, Scheme.Q4_1, Scheme.Q5_0, Scheme.Q5_1], ids=str
)
def test_what_the_gguf_package_quantised_comes_back(scheme: Scheme) -> None:
    blocks = quantize(make_random_numbers(0, 40, 256), kind(scheme))
    found = unpack_matrix(pack(scheme, blocks, 256))
    np.testing.assert_array_equal(found, dequantize(blocks, kind(scheme)))


@EVERY
def test_a_slice_of_rows_is_packed_into_its_place(scheme: Scheme) -> None:
    blocks = draw_blocks(scheme, 70, 512)
    matrix = allocate_matrix(scheme, 70, 512)
    for first in range(0, 70, 2 * LANES):
        some = blocks[first : first + 2 * LANES]
        pack_blocks(matrix.row_slice(first, len(some)), some)
    np.testing.assert_array_equal(unpack_matrix(matrix), dequantize(blocks, kind(scheme)))


@EVERY
@pytest.mark.parametrize("plain", [False, True], ids=["this processor", "every processor"])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_a_product_is_the_formula_in_float64(
    scheme: Scheme, plain: bool, rows: int, columns: int
) -> None:
    matrix = pack(scheme, draw_blocks(scheme, rows, columns, seed=1), columns)
    tokens = make_random_numbers(2, 9, columns)
    expected, reach = multiply_exactly(matrix, tokens)
    # scaled integers and minima are added, each as large as the largest weight of a group
    spread = 16 if scheme in MINIMA else 1
    assert (np.abs(run_gemm(matrix, tokens, plain=plain) - expected) <= spread * reach).all()


@EVERY
def test_the_instruction_for_bytes_and_its_substitute_have_the_same_bits(scheme: Scheme) -> None:
    matrix = pack(scheme, draw_blocks(scheme, 70, 512, seed=3), 512)
    tokens = make_random_numbers(4, 7, 512)
    together = run_gemm(matrix, tokens)
    np.testing.assert_array_equal(together, run_gemm(matrix, tokens, plain=True), strict=True)
    alone = np.concatenate([run_gemm(matrix, each[None]) for each in tokens])
    np.testing.assert_array_equal(alone, together, strict=True)


@EVERY
def test_rows_of_an_embedding_are_those_of_the_matrix(scheme: Scheme) -> None:
    matrix = pack(scheme, draw_blocks(scheme, 61, 512, seed=5), 512)
    tokens = np.array([60, 0, 30, 0])
    out = np.full((4, 517), np.nan, np.float32)
    arguments = embedding_arguments(matrix=matrix, tokens=tokens, out=out)
    embedding_kernel(scheme)(1, 4, arguments.ctypes.data)
    found = unpack_matrix(matrix)[tokens[1:]]
    np.testing.assert_allclose(out[1:, :512], found, rtol=1e-6, atol=1e-7)
    assert np.isnan(out[0]).all()
    assert np.isnan(out[:, 512:]).all()
