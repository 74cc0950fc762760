import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from expertctl.digest import Digest
from expertctl.routing.vector_table import VectorTable, read_table, write_table

ENCODER = Digest.of(b"encoder")
ONE, TWO, THREE = (Digest.of(name.encode()) for name in ("one", "two", "three"))


def table(**counts: int) -> VectorTable:
    empty = VectorTable.empty(encoder=ENCODER, stamp="s", dimensions=4)
    rng = np.random.default_rng(0)
    rows = {
        Digest.of(name.encode()): rng.uniform(-0.4, 0.4, (count, 4)).astype(np.float32)
        for name, count in counts.items()
    }
    return empty.with_entries(rows)


def same(one: VectorTable, two: VectorTable) -> bool:
    return (
        replace(one, rows=two.rows) == two
        and list(one.entries) == list(two.entries)
        and np.array_equal(one.rows, two.rows)
    )


@settings(deadline=None, max_examples=30)
@given(st.dictionaries(st.sampled_from("abcdefgh"), st.integers(1, 4)))
def test_a_table_survives_its_file(tmp_path_factory: Any, counts: dict[str, int]) -> None:
    path = tmp_path_factory.mktemp("t") / "v.safetensors"
    written = table(**counts)
    write_table(path, written)
    read = read_table(path, dimensions=4)
    assert read is not None
    assert same(read, written)


def test_entries_are_added_once_and_removed_with_their_rows() -> None:
    three = table(one=1, two=2, three=1)
    assert three.starts == [0, 1, 3]
    assert three.rows_of([THREE, ONE]).tolist() == [0, 3]
    assert same(three.with_entries({TWO: np.zeros((9, 4), np.float32)}), three)
    rest = three.only([THREE, ONE, Digest.of(b"unknown")])
    assert rest.entries == {ONE: 1, THREE: 1}
    assert np.array_equal(rest.rows, three.rows[[0, 3]])


def test_contents_name_encoder_entries_and_order() -> None:
    tables = [table(one=1, two=1), table(two=1, one=1), table(one=1), table(one=2)]
    tables.append(replace(tables[0], encoder=ONE))
    assert len({each.contents for each in tables}) == len(tables)
    assert replace(tables[0], stamp="another path").contents == tables[0].contents


def tampered(path: Path, rows: Any, **changed: str | None) -> None:
    write_table(path, table(one=1, two=2))
    with safe_open(path, framework="numpy") as file:
        metadata = {**file.metadata(), **changed}
    kept = {name: value for name, value in metadata.items() if value is not None}
    save_file({"rows": rows}, path, metadata=kept)


SOUND = np.full((3, 4), 0.5, np.float32)


@pytest.mark.parametrize(
    ("rows", "changed"),
    [
        (SOUND.astype(np.float64), {}),
        (SOUND[:, :3].copy(), {}),
        (SOUND[:2].copy(), {}),
        (SOUND.reshape(12), {}),
        (SOUND * np.float32("nan"), {}),
        (SOUND * 3, {}),
        (SOUND, {"format": "2"}),
        (SOUND, {"format": None}),
        (SOUND, {"extra": "x"}),
        (SOUND, {"encoder": "md5:0"}),
        (SOUND, {"entries": "[]"}),
        (SOUND, {"entries": "{"}),
        (SOUND, {"entries": json.dumps([["sha256:x", 3]])}),
        (SOUND, {"entries": json.dumps([[str(ONE), 4], [str(TWO), -1]])}),
        (SOUND, {"entries": json.dumps([[str(ONE), 1], [str(ONE), 2]])}),
        (SOUND, {"entries": json.dumps([[str(ONE), "3"]])}),
    ],
    ids=str,
)
def test_a_file_that_is_not_sound_is_worthless(
    tmp_path: Path, rows: Any, changed: dict[str, str | None]
) -> None:
    path = tmp_path / "v.safetensors"
    tampered(path, rows, **changed)
    assert read_table(path, dimensions=4) is None


def test_the_untampered_file_of_that_test_is_sound(tmp_path: Path) -> None:
    path = tmp_path / "v.safetensors"
    tampered(path, SOUND)
    assert read_table(path, dimensions=4) is not None
    assert read_table(tmp_path / "absent", dimensions=4) is None
