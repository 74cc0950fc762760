"""How large numbers are: numpy as oracle, bits for bfloat16; what is beyond all training."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from expertctl.package.adapter import AdapterSpec, Dora, Ia3, Lora, Part, SoftPrompt
from expertctl.package.adapter_weights import find_extremes, find_not_finite, find_peaks
from expertctl.package.tensor_file import read_table
from expertctl.reference import READ_CHUNK, Progress, ignore_progress
from tests.factories import write_safetensors
from tests.package.forged_packages import make_tensor_file


def found(path: Path, progress: Progress = ignore_progress) -> dict[str, float]:
    with path.open("rb") as stream:
        return find_peaks(stream, read_table(path), progress=progress)


def written(path: Path, dtype: str, data: bytes) -> Path:
    count = len(data) // (4 if dtype == "F32" else 2)
    entry = {"dtype": dtype, "shape": [count], "data_offsets": [0, len(data)]}
    path.write_bytes(make_tensor_file({"t": entry}, data))
    return path


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
    path = written(tmp_path / "x.safetensors", dtype, data)
    values = np.frombuffer(data, dtype={"F32": "<f4", "F16": "<f2"}[dtype])
    finite = bool(np.isfinite(values).all())
    assert found(path) == {"t": float(np.abs(values).max()) if finite else math.inf}


@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x7F81])
def test_bfloat16_is_judged_by_its_bits(bits: int, tmp_path: Path) -> None:
    path = written(tmp_path / "x.safetensors", "BF16", b"\x80\x3f" + bits.to_bytes(2, "little"))
    assert find_not_finite(found(path)) == ["t holds NaN or infinity"]


@pytest.mark.parametrize(
    ("data", "value"),
    [(b"\x7f\x7f", 3.3895313892515355e38), (b"\x80\xbf", 1.0), (b"\x00\x80", 0.0)],
)
def test_a_bfloat16_has_its_value(data: bytes, value: float, tmp_path: Path) -> None:
    peak = found(written(tmp_path / "x.safetensors", "BF16", data))
    assert peak == {"t": value}
    assert find_not_finite(peak) == []


@pytest.mark.parametrize("at", [0, READ_CHUNK // 4 - 1, READ_CHUNK // 4, -1])
@pytest.mark.parametrize("value", [math.nan, -7.5])
def test_a_number_is_found_in_any_piece(at: int, value: float, tmp_path: Path) -> None:
    values = np.ones(READ_CHUNK // 4 + 1000, np.float32)
    values[at] = value
    path = tmp_path / "x.safetensors"
    write_safetensors(path, {"a": np.ones(3, np.float32), "b": values})
    counted: list[int] = []
    peak = math.inf if math.isnan(value) else 7.5
    assert found(path, counted.append) == {"a": 1.0, "b": peak}
    assert sum(counted) == 12 + values.nbytes


def test_a_file_that_is_cut_short_meanwhile_is_not_finite(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_safetensors(path, {"t": np.ones(1000, np.float32)})
    tensors = read_table(path)
    with path.open("r+b") as stream:
        stream.truncate(2000)
        assert find_peaks(stream, tensors) == {"t": math.inf}


SHAPES: dict[str, Any] = {"rank": 4, "scale": 2.0, "a_shape": (4, 8), "b_shape": (8, 4)}
LORA = Lora("m", "a", "b", **SHAPES)
DORA = Dora("m", "a", "b", "c", **SHAPES)


@pytest.mark.parametrize(
    ("part", "peak", "reach"),
    [
        (LORA, {"a": 10.0, "b": 12.4}, None),
        (LORA, {"a": 10.0, "b": 12.6}, "1e+03"),
        (LORA, {"a": 3e38, "b": 3e38}, "7.2e+77"),
        (DORA, {"a": 1.0, "b": 1.0, "c": 999.0}, None),
        (DORA, {"a": 1.0, "b": 1.0, "c": 2e4}, "2e+04"),
        (DORA, {"a": 100.0, "b": 100.0, "c": 1.0}, "8e+04"),
        (Ia3("m", "v", on_input=True, size=4), {"v": 30.0}, None),
        (Ia3("m", "v", on_input=False, size=4), {"v": 1e9}, "1e+09"),
        (SoftPrompt("m", 4, 8), {"m": 90.0}, None),
        (SoftPrompt("m", 4, 8), {"m": 2000.0}, "2e+03"),
    ],
)
def test_what_no_training_gives_is_worth_a_warning(
    part: Part, peak: dict[str, float], reach: str | None
) -> None:
    spec = AdapterSpec("lora", (part,), "float32", 4, None, len(peak))
    said = f"m: numbers up to {reach}; trained adapters stay below 1000"
    assert find_extremes(spec, peak) == ([] if reach is None else [said])
