"""Two packages compared: what they say, their files, and adapters of every kind."""

import tracemalloc
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from expertctl.package.base_model import BaseFacts
from expertctl.package.diff import DiffSide, FieldChange, FileChange, PackageDiff, diff_packages
from expertctl.package.read import PackageContents
from expertctl.package.write import BlobSpool, sign_package, spool_package
from expertctl.schema.strict_json import JsonValue
from expertctl.trust.keys import PrivateKey
from tests.factories import make_package, write_base

Adapters = Sequence[tuple[Any, dict[str, Any]]]


class Maker:
    """Builds small packages of one name; each from a folder of its own."""

    def __init__(self, folder: Path, base_dir: Path, facts: BaseFacts) -> None:
        self._folder, self._base_dir, self._facts = folder, base_dir, facts
        self._count = 0

    def __call__(self, adapters: Adapters = (("lora", {}),), **options: Any) -> Path:
        self._count += 1
        folder = self._folder / str(self._count)
        folder.mkdir()
        for name, text in options.pop("docs", {}).items():
            (folder / "acme-sql-1.0.0.files").mkdir(exist_ok=True)
            (folder / "acme-sql-1.0.0.files" / name).write_text(text)
        return make_package(
            folder, base_dir=self._base_dir, base=self._facts, adapters=adapters, **options
        )


@pytest.fixture
def make(tmp_path: Path, base_dir: Path, facts: BaseFacts) -> Maker:
    return Maker(tmp_path, base_dir, facts)


def compared(old: Path, new: Path) -> PackageDiff:
    with ExitStack() as stack:
        sides: list[tuple[PackageContents, BlobSpool]] = [
            stack.enter_context(spool_package(path, target=path)) for path in (old, new)
        ]
        return diff_packages(*(DiffSide(contents, spool.blob) for contents, spool in sides))


def counts(found: PackageDiff) -> dict[str, int]:
    changes = [change.change for adapter in found.adapters for change in adapter.tensors]
    return {change: changes.count(change) for change in sorted(set(changes))}


def test_a_package_equals_itself_and_itself_signed_anew(make: Maker) -> None:
    old, new = make(), make()
    sign_package(new, PrivateKey.generate("ed25519"))
    for other in (old, new):
        found = compared(old, other)
        assert (found.equal, found.fields, found.files) == (True, (), ())
        assert counts(found) == {"equal": 28}


def test_changes_of_the_manifest_are_named_by_path(make: Maker) -> None:
    old = make(
        tags=["a"], training={"steps": 10, "x/y": {"lr": 0.5}}, homepage="https://example.com"
    )
    new = make(tags=["a", "b"], training={"steps": 20, "x/y": {"lr": 0.5}, "seed": None})
    found = compared(old, new)
    assert found.fields == (
        FieldChange("homepage", "removed", old="https://example.com"),
        FieldChange("tags", "changed", ["a"], ["a", "b"]),
        FieldChange("training/seed", "added"),
        FieldChange("training/steps", "changed", 10, 20),
    )
    assert [(f.path, f.change) for f in found.files] == [("expert.json", "changed")]
    assert counts(found) == {"equal": 28}
    assert not found.equal


def test_lists_of_objects_are_looked_into_while_they_are_as_long(make: Maker) -> None:
    row = {"pattern": "x", "description": "fails"}
    old, new = make(limitations=[row]), make(limitations=[{**row, "description": "works"}])
    assert compared(old, new).fields == (
        FieldChange("limitations/0/description", "changed", "fails", "works"),
    )
    (change,) = compared(old, make(limitations=[row, row])).fields
    assert (change.path, change.change) == ("limitations", "changed")


def test_an_object_is_never_compared_with_a_list(make: Maker) -> None:
    """Its keys may be the numbers of the list: then nothing else would differ."""
    rows: JsonValue = [{"loss": 1}]
    table: JsonValue = {"0": {"loss": 1}}
    found = compared(make(training={"log": rows}), make(training={"log": table}))
    assert found.fields == (FieldChange("training/log", "changed", rows, table),)


def test_files_are_added_removed_and_changed(make: Maker) -> None:
    old = make(docs={"LICENSE": "MIT", "README.md": "one"})
    new = make(docs={"NOTICE": "seven", "README.md": "three"})
    assert compared(old, new).files == (
        FileChange("LICENSE", "removed", 3, None),
        FileChange("NOTICE", "added", None, 5),
        FileChange("README.md", "changed", 3, 5),
    )


def test_other_numbers_are_told_tensor_by_tensor(make: Maker) -> None:
    found = compared(make([("lora", {"seed": 1})]), make([("lora", {"seed": 2})]))
    assert counts(found) == {"changed": 28}
    changes = [change for adapter in found.adapters for change in adapter.tensors]
    assert all(c.distance and c.distance.max_abs > 0 and c.distance.relative for c in changes)


def test_another_rank_changes_the_shape(make: Maker) -> None:
    found = compared(make([("lora", {"rank": 4})]), make([("lora", {"rank": 2})]))
    shapes = {(c.old.shape, c.new.shape) for c in found.adapters[0].tensors if c.old and c.new}
    assert ((4, 32), (2, 32)) in shapes
    assert counts(found) == {"changed": 28}


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("lora", "dora", {"added": 14, "changed": 28}),
        ("dora", "lora", {"changed": 28, "removed": 14}),
        ("lora", "ia3", {"added": 6, "removed": 28}),
        ("soft_prompt", "ia3", {"added": 6, "removed": 1}),
        ("soft_prompt", "soft_prompt", {"changed": 1}),
    ],
)
def test_kinds_are_compared_with_each_other(
    old: str, new: str, expected: dict[str, int], make: Maker
) -> None:
    found = compared(make([(old, {"seed": 1})]), make([(new, {"seed": 2})]))
    (adapter,) = found.adapters
    assert adapter.old
    assert adapter.new
    assert (adapter.old.kind, adapter.new.kind) == (old, new)
    assert counts(found) == expected


def test_several_adapters_are_paired_by_their_files(make: Maker) -> None:
    old = make([("lora", {}), ("soft_prompt", {})])
    new = make([("lora", {}), ("ia3", {}), ("soft_prompt", {"seed": 1})])
    found = compared(old, new)
    pairs = [(a.old and a.old.kind, a.new and a.new.kind) for a in found.adapters]
    assert pairs == [("lora", "lora"), ("soft_prompt", None), (None, "ia3"), (None, "soft_prompt")]
    assert counts(found) == {"added": 7, "equal": 28, "removed": 1}


def test_large_tensors_are_compared_in_little_memory(tmp_path: Path) -> None:
    base_dir = write_base(tmp_path / "base", layers=1, hidden=1024, intermediate=2048)
    files = [
        make_package(
            tmp_path,
            f"acme/x{seed}",
            base_dir=base_dir,
            lora={"rank": 256, "seed": seed, "targets": ["down_proj"]},
        )
        for seed in (1, 2)
    ]
    with ExitStack() as stack:
        opened = [stack.enter_context(spool_package(path, target=path)) for path in files]
        sides = [DiffSide(contents, spool.blob) for contents, spool in opened]
        tracemalloc.start()
        found = diff_packages(sides[0], sides[1])
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    size = 256 * (1024 + 2048) * np.dtype("f4").itemsize
    assert counts(found) == {"changed": 2}
    assert peak < 3_000_000 < size
