"""Tensor files compared: against the plain formula on whole arrays, in every mix of types."""

import math
import struct
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from expertctl.package import diff
from expertctl.package.diff import (
    TensorChange,
    TensorForm,
    TensorSource,
    diff_tensors,
    find_module_kind,
    list_tensors,
    summarise_changes,
)
from expertctl.package.tensor_file import read_table
from tests.factories import to_bytes, write_safetensors

Array = np.ndarray[Any, Any]
DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def random(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def stored(array: Array, dtype: str) -> list[float]:
    """What a file of that type really holds, number by number."""
    data = to_bytes(array, dtype)
    if dtype == "bfloat16":
        data = b"".join(b"\0\0" + data[i : i + 2] for i in range(0, len(data), 2))
    code = "e" if dtype == "float16" else "f"
    return list(struct.unpack(f"<{array.size}{code}", data))


@contextmanager
def sources(
    tmp_path: Path, *files: tuple[Mapping[str, Array], str]
) -> Iterator[list[TensorSource]]:
    with ExitStack() as stack:
        opened = []
        for number, (arrays, dtype) in enumerate(files):
            path = tmp_path / f"{number}.safetensors"
            write_safetensors(path, arrays, dtype=dtype)
            stream = stack.enter_context(path.open("rb"))
            opened.append(TensorSource(read_table(path), stream))
        yield opened


def compare(
    tmp_path: Path, old: Mapping[str, Array], new: Mapping[str, Array], *dtypes: str
) -> dict[str, TensorChange]:
    first, second = dtypes or ("float32", "float32")
    with sources(tmp_path, (old, first), (new, second)) as (a, b):
        return {change.name: change for change in diff_tensors(a, b)}


@pytest.mark.parametrize("after", DTYPES)
@pytest.mark.parametrize("before", DTYPES)
@pytest.mark.parametrize("piece", [1 << 16, 7])
def test_the_distance_is_that_of_the_formula(
    before: str, after: str, piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diff, "_PIECE_NUMBERS", piece)
    old, new = random(1, 5, 9), random(2, 5, 9)
    change = compare(tmp_path, {"x": old}, {"x": new}, before, after)["x"]
    pairs = list(zip(stored(old, before), stored(new, after), strict=True))
    squares = math.fsum((b - a) ** 2 for a, b in pairs)
    norm = math.fsum(a * a for a, _ in pairs)
    assert change.change == "changed"
    assert change.old == TensorForm(DTYPES[before], (5, 9))
    assert change.new == TensorForm(DTYPES[after], (5, 9))
    assert change.distance is not None
    assert change.distance.max_abs == max(abs(b - a) for a, b in pairs)
    assert change.distance.squares == pytest.approx(squares, rel=1e-12)
    assert change.distance.relative == pytest.approx(math.sqrt(squares / norm), rel=1e-12)


def test_tensors_are_added_removed_and_equal_by_name(tmp_path: Path) -> None:
    old = {"a": random(1, 3), "b": random(2, 3)}
    new = {"b": random(2, 3), "c": random(3, 2, 2)}
    found = compare(tmp_path, old, new)
    assert {name: change.change for name, change in found.items()} == {
        "a": "removed",
        "b": "equal",
        "c": "added",
    }
    assert (found["a"].old, found["a"].new) == (TensorForm("F32", (3,)), None)
    assert (found["c"].old, found["c"].new) == (None, TensorForm("F32", (2, 2)))
    same = found["b"].distance
    assert same is not None
    assert (same.max_abs, same.squares, same.relative) == (0.0, 0.0, 0.0)
    assert same.old_squares == pytest.approx(float((old["b"] ** 2).sum()))
    assert found["a"].distance is found["c"].distance is None


def test_another_shape_is_a_change_without_a_distance(tmp_path: Path) -> None:
    change = compare(tmp_path, {"x": random(1, 4, 2)}, {"x": random(1, 2, 4)})["x"]
    assert (change.change, change.distance) == ("changed", None)
    assert change.old
    assert change.new
    assert (change.old.shape, change.new.shape) == ((4, 2), (2, 4))


def test_the_same_numbers_in_another_type_are_a_change_of_distance_zero(tmp_path: Path) -> None:
    whole = np.arange(8, dtype=np.float32)
    change = compare(tmp_path, {"x": whole}, {"x": whole}, "bfloat16", "float32")["x"]
    assert change.change == "changed"
    assert change.distance is not None
    assert (change.distance.max_abs, change.distance.relative) == (0.0, 0.0)


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_has_no_distance(odd: float, tmp_path: Path) -> None:
    finite, broken = random(1, 3), random(1, 3)
    broken[1] = odd
    for old, new in ((finite, broken), (broken, finite)):
        change = compare(tmp_path, {"x": old}, {"x": new})["x"]
        assert (change.change, change.distance) == ("changed", None)
    same = compare(tmp_path, {"x": broken}, {"x": broken})["x"]
    assert (same.change, same.distance) == ("equal", None)


def test_a_difference_of_zeros_has_no_relative_norm(tmp_path: Path) -> None:
    zeros = np.zeros(3, dtype=np.float32)
    change = compare(tmp_path, {"x": zeros}, {"x": random(1, 3)})["x"]
    assert change.distance is not None
    assert change.distance.relative is None


def test_a_table_alone_says_what_a_whole_file_would(tmp_path: Path) -> None:
    arrays = {"b": random(1, 3), "a": random(2, 2)}
    with sources(tmp_path, (arrays, "float32")) as (source,):
        changes = diff_tensors(source, source)
        table = source.table
    assert [(c.name, c.change) for c in list_tensors(table, "equal")] == [
        (c.name, c.change) for c in changes
    ]
    added, removed = (list_tensors(table, change) for change in ("added", "removed"))
    assert {c.change for c in added} == {"added"}
    assert [c.old for c in removed] == [c.new for c in added]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", "q_proj"),
        ("base_model.model.model.layers.11.mlp.up_proj.lora_B.weight", "up_proj"),
        ("base_model.model.model.layers.1.self_attn.v_proj.lora_magnitude_vector", "v_proj"),
        ("base_model.model.model.layers.1.self_attn.v_proj.lora_magnitude_vector.weight", "v_proj"),
        ("base_model.model.model.layers.2.mlp.down_proj.ia3_l", "down_proj"),
        ("prompt_embeddings", "prompt_embeddings"),
    ],
)
def test_the_kind_is_the_last_part_of_the_module(name: str, kind: str) -> None:
    assert find_module_kind(name) == kind


def test_a_summary_takes_the_pairs_of_a_kind_together(tmp_path: Path) -> None:
    names = [f"base_model.model.model.layers.{i}.mlp.up_proj.lora_A.weight" for i in range(3)]
    old = {names[0]: random(1, 4), names[1]: random(2, 4)}
    new = {names[0]: random(3, 4), names[1]: random(2, 4), names[2]: random(4, 4)}
    (kind,) = summarise_changes(compare(tmp_path, old, new).values())
    assert (kind.kind, dict(kind.counts)) == ("up_proj", {"changed": 1, "equal": 1, "added": 1})
    before = np.concatenate([old[n] for n in names[:2]]).astype(np.float64)
    after = np.concatenate([new[n] for n in names[:2]]).astype(np.float64)
    assert kind.distance is not None
    assert kind.distance.max_abs == np.abs(after - before).max()
    expected = np.linalg.norm(after - before) / np.linalg.norm(before)
    assert kind.distance.relative == pytest.approx(expected, rel=1e-12)


def test_kinds_without_a_pair_have_no_distance(tmp_path: Path) -> None:
    (kind,) = summarise_changes(
        compare(tmp_path, {"y": random(1, 2)}, {"y": random(1, 3)}).values()
    )
    assert (dict(kind.counts), kind.distance) == ({"changed": 1}, None)


@pytest.mark.parametrize(("dtype", "pattern"), [("float16", 0x7C01), ("bfloat16", 0x7F81)])
def test_signalling_nans_are_compared_without_a_warning(
    dtype: str, pattern: int, tmp_path: Path
) -> None:
    with sources(tmp_path, ({"x": random(1, 4)}, dtype), ({"x": random(2, 4)}, dtype)) as pair:
        for number in (0, 1):
            path = tmp_path / f"{number}.safetensors"
            data = path.read_bytes()
            path.write_bytes(data[:-2] + struct.pack("<H", pattern))
        [change] = diff_tensors(*pair)
    assert (change.change, change.distance) == ("changed", None)
