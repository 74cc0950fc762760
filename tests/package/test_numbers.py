"""Finite or not: numpy's own answer as oracle, for float32 and float16; bits for bfloat16."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from expertctl.digest import CHUNK
from expertctl.package.numbers import not_finite
from expertctl.package.tensor_file import read_table
from tests.factories import write_safetensors
from tests.package.forge import table


def found(path: Path) -> list[str]:
    return not_finite(path, read_table(path))


@given(
    bits=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=8),
    dtype=st.sampled_from(["F32", "F16"]),
)
@settings(
    deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_bits_are_judged_as_numpy_judges_them(
    bits: list[int], dtype: str, tmp_path: Path
) -> None:
    kind, mask = {"F32": ("<u4", 0xFFFFFFFF), "F16": ("<u2", 0xFFFF)}[dtype]
    data = np.array([b & mask for b in bits], dtype=kind).tobytes()
    entry = {"dtype": dtype, "shape": [len(bits)], "data_offsets": [0, len(data)]}
    path = tmp_path / "x.safetensors"
    path.write_bytes(table({"t": entry}, data))
    values = np.frombuffer(data, dtype={"F32": "<f4", "F16": "<f2"}[dtype])
    assert found(path) == ([] if np.isfinite(values).all() else ["t"])


@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x7F81])
def test_bfloat16_is_judged_by_its_bits(bits: int, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    entry = {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}
    path.write_bytes(table({"t": entry}, b"\x80\x3f" + bits.to_bytes(2, "little")))
    assert found(path) == ["t"]


def test_the_largest_bfloat16_is_finite(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    entry = {"dtype": "BF16", "shape": [1], "data_offsets": [0, 2]}
    path.write_bytes(table({"t": entry}, b"\x7f\x7f"))
    assert found(path) == []


@pytest.mark.parametrize("at", [0, CHUNK // 4 - 1, CHUNK // 4, -1])
def test_a_bad_number_is_found_in_any_piece(at: int, tmp_path: Path) -> None:
    values = np.ones(CHUNK // 4 + 1000, np.float32)
    values[at] = np.nan
    path = tmp_path / "x.safetensors"
    write_safetensors(path, {"a": np.ones(3, np.float32), "b": values})
    counted: list[int] = []
    assert not_finite(path, read_table(path), progress=counted.append) == ["b"]
    assert sum(counted) == 12 + values.nbytes
