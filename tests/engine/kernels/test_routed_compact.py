"""Compact experts are the numbers that were packed, bit by bit, and make the same products."""

import itertools
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertctl.engine.arrays import aligned_zeros
from expertctl.engine.cpu.tensor_packing import compact_expert, is_compact
from expertctl.engine.kernels.moe_layer import (
    CompactMatrix,
    moe_gemm_compact_arguments,
    moe_gemm_compact_kernel,
    moe_gemm_items,
)
from expertctl.engine.kernels.packed_format import LANES, Scheme
from expertctl.engine.kernels.packed_matrix import ExpertShape
from tests.engine.kernels.reference_gemm import make_random_numbers, quantise_rows
from tests.engine.kernels.reference_moe import (
    FOREIGN_VALUE,
    ExpertBlocks,
    RoutedProduct,
    gather_rows,
    make_random_choices,
    make_random_experts,
    run_routed_gemm,
    sort_choices,
)

Array = np.ndarray[Any, Any]
BF16, ROOT = Scheme.BFLOAT16, Path(__file__).parents[3]
SIZES = [(16, 16), (80, 32), (128, 48), (160, 272), (1408, 160), (512, 128)]
"""Hidden and intermediate: whole chunks, parts of one, and less than a group of numbers."""


def unpacked(packed: Array, shape: ExpertShape) -> Array:
    """The numbers of an expert by the description of the format, one after the other."""
    sizes = [
        (min(4, part.blocks - block), -(-part.columns // 2))
        for part in (shape.gate_up_matrix, shape.down_matrix)
        for block in range(0, part.blocks, 4)
    ]
    begins = packed[: 4 * (len(sizes) + 1)].view("<u4")
    found = []
    for (blocks, vectors), begin, end in zip(sizes, begins[:-1], begins[1:], strict=True):
        at, stretch = int(begin), np.zeros((blocks, vectors, 32), np.uint16)
        for first in range(0, vectors, 64):
            part = stretch[:, first : first + 64]
            numbers, at = chunk(packed, at, part.size)
            part[...] = numbers.reshape(part.shape)
        assert at == end
        found.append(stretch.ravel())
    return np.concatenate(found)


def chunk(packed: Array, at: int, size: int) -> tuple[Array, int]:
    """So many numbers of the chunk that begins there, and where it ends."""
    beyond, window = int(packed[at : at + 2].view("<u2")[0]), int(packed[at + 2])
    at += 64
    if beyond == 0xFFFF:
        return packed[at : at + 2 * size].view("<u2"), at + -(-2 * size // 64) * 64
    groups = packed[at : at + size * 11 // 8].reshape(-1, 11, 64)
    bits = np.unpackbits(groups[:, :3], axis=2, bitorder="little").reshape(-1, 3, 64, 8)
    codes = bits[:, 0] | bits[:, 1] << 1 | bits[:, 2] << 2
    exponents = codes.astype(np.int64).transpose(0, 2, 1).reshape(-1) + window
    fractions = groups[:, 3:].reshape(-1).astype(np.uint16)
    numbers = (fractions & 0x80) << 8 | exponents.astype(np.uint16) << 7 | fractions & 0x7F
    at += size * 11 // 8
    for which, number in packed[at : at + 4 * beyond].view("<u2").reshape(-1, 2):
        numbers[which] = number
    return numbers, at + -(-4 * beyond // 64) * 64


def weights(kind: str, count: int, seed: int = 0) -> Array:
    """bfloat16 of a kind, as uint16."""
    random = np.random.default_rng(seed)
    if kind == "bits":
        return random.integers(0, 1 << 16, count, np.uint16)
    floats = {
        "normal": random.standard_normal(count) * 0.02,
        "heavy": random.standard_t(2, count) * 0.02,
        "zeros": np.zeros(count),
        "one scale a row": random.standard_normal(count) * np.exp2(np.arange(count) % 9),
    }[kind]
    return (floats.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


@pytest.mark.parametrize(("hidden", "intermediate"), SIZES)
@pytest.mark.parametrize("kind", ["normal", "heavy", "zeros", "one scale a row", "bits"])
def test_what_is_packed_holds_every_number(kind: str, hidden: int, intermediate: int) -> None:
    """Infinities, numbers that are none, signs of zeros and all."""
    shape = ExpertShape(BF16, hidden, intermediate)
    numbers = weights(kind, shape.nbytes // 2)
    packed = compact_expert(numbers.view(np.uint8), shape)
    np.testing.assert_array_equal(unpacked(packed, shape), numbers, strict=True)


def test_weights_take_eleven_bits_and_what_is_beyond_the_window() -> None:
    shape = ExpertShape(BF16, 2048, 1024)
    for kind, least, most in (("normal", 11.3, 11.5), ("heavy", 12, 12.5), ("zeros", 11, 11.1)):
        packed = compact_expert(weights(kind, shape.nbytes // 2).view(np.uint8), shape)
        assert least < 16 * packed.nbytes / shape.nbytes < most


def test_what_cannot_be_shorter_takes_little_more() -> None:
    shape = ExpertShape(BF16, 2048, 1024)
    packed = compact_expert(weights("bits", shape.nbytes // 2).view(np.uint8), shape)
    assert 1 < packed.nbytes / shape.nbytes < 1.005


@settings(max_examples=60, deadline=None)
@given(
    numbers=st.lists(st.integers(0, 0xFFFF), min_size=1, max_size=40),
    repeats=st.integers(1, 300),
    seed=st.integers(0, 99),
)
def test_any_numbers_are_held(numbers: list[int], repeats: int, seed: int) -> None:
    shape = ExpertShape(BF16, 144, 48)
    found = np.resize(np.repeat(np.array(numbers, np.uint16), repeats), shape.nbytes // 2)
    np.random.default_rng(seed).shuffle(found)
    packed = compact_expert(found.view(np.uint8), shape)
    np.testing.assert_array_equal(unpacked(packed, shape), found, strict=True)


def compact_experts(experts: ExpertBlocks) -> ExpertBlocks:
    """The same experts, each in a compact block."""
    packed = [compact_expert(block, experts.shape) for block in experts.blocks]
    shape = replace(experts.shape, compact_bytes=max(map(len, packed)))
    blocks = [aligned_zeros(shape.block_bytes, np.uint8) for _ in packed]
    for block, octets in zip(blocks, packed, strict=True):
        block[: len(octets)] = octets
    return ExpertBlocks(shape, blocks, np.array([block.ctypes.data for block in blocks], np.int64))


def multiply_compact(
    experts: ExpertBlocks,
    selected: Array,
    rows: Any,
    *,
    down: bool = False,
    plain: bool = False,
    cuts: Sequence[int] = (),
) -> RoutedProduct:
    """Products of rows with their experts, as `multiply_routed` makes them."""
    order = sort_choices(selected, len(experts.blocks))
    compact = CompactMatrix.create(experts.shape, down=down)
    out = aligned_zeros((len(order.sources), compact.matrix.blocks * LANES), np.float32)
    out[...] = FOREIGN_VALUE
    items = np.array([moe_gemm_items(compact.matrix, active=order.expert_count)], np.int64)
    absent = np.zeros(1, np.int64)
    arguments = moe_gemm_compact_arguments(
        compact=compact,
        block_addresses=experts.places,
        order=order,
        rows=rows,
        out=out,
        items=items,
        absent=absent,
    )
    ends = [0, *cuts, int(items[0])]
    for first, last in reversed(list(itertools.pairwise(ends))):
        moe_gemm_compact_kernel(portable=plain)(first, last, arguments.ctypes.data)
    return RoutedProduct(out, int(absent[0]))


@pytest.mark.parametrize("plain", [False, True], ids=["usual", "plainly"])
@pytest.mark.parametrize("tokens", [1, 3, 17])
@pytest.mark.parametrize(("hidden", "intermediate"), SIZES)
def test_products_have_the_bits_of_experts_that_are_not_compact(
    hidden: int, intermediate: int, tokens: int, plain: bool
) -> None:
    experts = make_random_experts(BF16, 5, hidden=hidden, intermediate=intermediate)
    compact = compact_experts(experts)
    selected = make_random_choices(1, tokens, 2, 5)
    order = sort_choices(selected, 5)
    for down in (False, True):
        part = experts.shape.down_matrix if down else experts.shape.gate_up_matrix
        each = quantise_rows(make_random_numbers(2, tokens, part.columns), BF16)
        rows = gather_rows(order, each, scheme=BF16, used=2)
        expected = run_routed_gemm(part, experts.places, order, rows, plain=plain)
        items = moe_gemm_items(part, active=5)
        for cuts in ((), (items // 2,)):
            found = multiply_compact(compact, selected, rows, down=down, plain=plain, cuts=cuts)
            np.testing.assert_array_equal(found.rows, expected.rows, strict=True)
            assert found.absent == 0


def test_who_has_no_place_makes_zeros_and_is_told() -> None:
    compact = compact_experts(make_random_experts(BF16, 3, hidden=80, intermediate=32))
    compact.places[1] = 0
    selected = np.array([[0, 1]], np.int64)
    rows = gather_rows(
        sort_choices(selected, 3),
        quantise_rows(make_random_numbers(0, 1, 80), BF16),
        scheme=BF16,
        used=2,
    )
    found = multiply_compact(compact, selected, rows)
    assert found.absent == 2
    assert (found.rows[1] == 0).all()
    assert found.rows[0].any()


GUARDED = """
import ctypes
import mmap
import numpy as np
from tests.engine.kernels import test_routed_compact as compact

def guarded(size):
    pages = -(-size // 4096)
    memory = mmap.mmap(-1, (pages + 1) * 4096)
    octets = np.frombuffer(memory, np.uint8)
    behind = ctypes.c_void_p(octets.ctypes.data + pages * 4096)
    assert ctypes.CDLL(None).mprotect(behind, 4096, 0) == 0
    return octets[pages * 4096 - size : pages * 4096]

random, told, checked = np.random.default_rng(0), 0, 0
for hidden, intermediate in ((80, 32), (160, 272), (512, 128)):
    sound = compact.compact_experts(
        compact.make_random_experts(compact.BF16, 1, hidden=hidden, intermediate=intermediate)
    )
    block = guarded(sound.shape.block_bytes)
    experts = compact.ExpertBlocks(sound.shape, [block], np.array([block.ctypes.data], np.int64))
    for _ in range(300):
        block[:] = sound.blocks[0]
        for _ in range(random.integers(1, 6)):
            most = min(random.choice([64, 600, len(block)]), len(block))
            block[random.integers(0, most)] = random.integers(0, 256)
        before, can = block.copy(), compact.is_compact(block, sound.shape)
        missed = [compact.product_of_one(experts, down=down).absent for down in (False, True)]
        assert (block == before).all()
        assert can == (missed == [0, 0])
        told, checked = told + (not can), checked + 1
print(checked, 0 < told < checked)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is guarded as Linux does it")
def test_bytes_of_no_expert_are_told_and_nothing_behind_them_is_read() -> None:
    """A disk may give other bytes than it gave when they were checked."""
    done = subprocess.run(
        [sys.executable, "-c", GUARDED], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "900 True\n"), done.stderr


def product_of_one(experts: ExpertBlocks, *, down: bool) -> RoutedProduct:
    """What one token makes of the only expert."""
    part = experts.shape.down_matrix if down else experts.shape.gate_up_matrix
    selected, token = np.zeros((1, 1), np.int64), make_random_numbers(0, 1, part.columns)
    rows = gather_rows(sort_choices(selected, 1), quantise_rows(token, BF16), scheme=BF16, used=1)
    return multiply_compact(experts, selected, rows, down=down)


def test_an_expert_whose_last_chunk_is_none_makes_zeros() -> None:
    compact = compact_experts(make_random_experts(BF16, 1, hidden=512, intermediate=16))
    ends = compact.blocks[0][:8].view(np.uint32)
    ends[1] -= 64
    found = product_of_one(compact, down=False)
    assert found.absent == 1
    assert (found.rows == 0).all()
    assert not is_compact(compact.blocks[0], compact.shape)
    assert not is_compact(compact.blocks[0][:4], compact.shape)
