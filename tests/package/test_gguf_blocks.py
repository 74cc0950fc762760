"""Blocks of GGUF tensors, against the package of llama.cpp's authors."""

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from expertctl.package.gguf_blocks import (
    decode_blocks,
    is_exact_in,
    narrow_floats,
    restore_row_order,
)
from expertctl.package.gguf_file import BLOCK_KINDS, BlockKind

_PLAIN = {"F32": np.float32, "F16": np.float16}


@pytest.mark.parametrize("kind", BLOCK_KINDS.values(), ids=lambda kind: kind.name)
def test_blocks_have_the_numbers_that_llama_cpp_reads(kind: BlockKind) -> None:
    """Any bytes are blocks; scales that are no numbers are left out, as their bits may differ."""
    generator = np.random.default_rng(0)
    data = generator.integers(0, 256, (512, kind.size), dtype=np.uint8)
    with np.errstate(all="ignore"):
        found = decode_blocks(kind, data.tobytes()).reshape(len(data), kind.numbers)
        wanted = gguf.quants.dequantize(data.view(_PLAIN.get(kind.name, np.uint8)), Kind[kind.name])
    wanted = wanted.reshape(found.shape)
    numbers = np.isfinite(wanted).all(axis=1)
    assert numbers.mean() > 0.8
    assert np.array_equal(found[numbers].view(np.uint32), wanted[numbers].view(np.uint32))


def test_sizes_are_those_of_llama_cpp() -> None:
    sizes = {Kind[k.name]: (k.numbers, k.size) for k in BLOCK_KINDS.values()}
    assert sizes == {kind: gguf.GGML_QUANT_SIZES[kind] for kind in sizes}
    assert {kind.value: kind.name for kind in sizes} == {n: k.name for n, k in BLOCK_KINDS.items()}


def test_rows_of_heads_get_their_order_back() -> None:
    rows = np.arange(2 * 6 * 3, dtype=np.uint8).reshape(12, 3)
    stored = rows.reshape(2, 2, 3, 3).swapaxes(1, 2).reshape(12, 3)
    assert restore_row_order(stored.tobytes(), row_bytes=3, head_dim=6) == rows.tobytes()


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_numbers_that_were_only_widened_are_narrowed_exactly(dtype: str) -> None:
    numbers = np.array([1.0, -0.5, 0.0, 3.140625], np.float32)
    assert is_exact_in(numbers, dtype)
    kind = next(kind for kind in BLOCK_KINDS.values() if kind.name == dtype)
    assert np.array_equal(decode_blocks(kind, narrow_floats(numbers, dtype)), numbers)
    assert not is_exact_in(np.array([0.1], np.float32), dtype)
    assert not is_exact_in(np.array([1e38 if dtype == "F16" else 1 + 2**-20], np.float32), dtype)
