"""The base in memory: exactly as large as was reserved, there once, gone when another comes."""

from pathlib import Path

import pytest
import torch

from expertctl.engine.budget import Budget
from expertctl.engine.loaded_base import BaseSlot, OpenBase, open_base
from expertctl.engine.tiers import Tiers
from expertctl.errors import BaseMismatchError, BudgetError, InvalidPackageError, UsageError
from expertctl.store.bases import BaseStore
from tests.factories import write_base

CPU = torch.device("cpu")


@pytest.fixture
def bases(tmp_path: Path) -> BaseStore:
    return BaseStore(tmp_path / "bases")


def added(bases: BaseStore, directory: Path, *, dtype: str = "float32") -> OpenBase:
    return open_base(bases, bases.add(directory), dtype=dtype, rehash=False)


def slot(limit: int) -> tuple[Budget, BaseSlot]:
    budget = Budget(limit)
    return budget, BaseSlot(Tiers(ram=budget, device=budget), device=CPU)


@pytest.mark.parametrize("dtype", ["float32", "bf16"])
@pytest.mark.parametrize("arch", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("tie", [True, False])
def test_a_base_takes_what_was_announced(
    arch: str, dtype: str, tie: bool, tmp_path: Path, bases: BaseStore
) -> None:
    base = added(bases, write_base(tmp_path / "b", arch=arch, tie=tie), dtype=dtype)
    budget, place = slot(base.weight_bytes)
    place.reserve(base)
    loaded = place.load()
    place.check_integrity()
    assert loaded.nbytes == base.weight_bytes == budget.held("base")


def test_one_base_is_loaded_once(tmp_path: Path, bases: BaseStore) -> None:
    directory = write_base(tmp_path / "b")
    base = added(bases, directory)
    _, place = slot(1 << 20)
    place.reserve(base)
    loaded = place.load()
    place.reserve(added(bases, directory))
    assert place.load() is loaded
    place.reserve(added(bases, directory, dtype="bf16"))
    assert place.load().model.decoder is not loaded.model.decoder


def test_another_base_takes_the_place_of_the_first(tmp_path: Path, bases: BaseStore) -> None:
    small, large = write_base(tmp_path / "small"), write_base(tmp_path / "large", layers=3)
    first, second = added(bases, small), added(bases, large)
    budget, place = slot(second.weight_bytes)
    place.reserve(first)
    place.load()
    place.reserve(second)
    assert budget.held("base") == second.weight_bytes
    assert place.load().model.decoder.config.layers == 3
    place.drop()
    assert budget.used == 0


def test_a_base_beyond_the_budget_is_refused(tmp_path: Path, bases: BaseStore) -> None:
    base = added(bases, write_base(tmp_path / "b"))
    budget, place = slot(base.weight_bytes - 1)
    with pytest.raises(BudgetError, match=r"the base b: .* needed"):
        place.reserve(base)
    assert budget.used == 0


def test_a_base_that_cannot_be_read_can_be_tried_again(tmp_path: Path, bases: BaseStore) -> None:
    directory = write_base(tmp_path / "b")
    base = added(bases, directory)
    _, place = slot(1 << 20)
    place.reserve(base)
    weights = directory / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-1])
    with pytest.raises(InvalidPackageError):
        place.load()
    weights.write_bytes(data)
    assert place.load().nbytes == base.weight_bytes


def test_changed_files_are_refused(tmp_path: Path, bases: BaseStore) -> None:
    directory = write_base(tmp_path / "b")
    stored = bases.add(directory)
    path = directory / "tokenizer.json"
    path.write_text(path.read_text() + " ")
    for rehash in (False, True):
        with pytest.raises(BaseMismatchError, match=r"tokenizer\.json"):
            open_base(bases, stored, dtype="float32", rehash=rehash)


def test_an_unknown_dtype_is_refused(tmp_path: Path, bases: BaseStore) -> None:
    stored = bases.add(write_base(tmp_path / "b"))
    with pytest.raises(UsageError, match="int3"):
        open_base(bases, stored, dtype="int3", rehash=False)


def test_the_kv_cache_is_counted_in_float32(tmp_path: Path, bases: BaseStore) -> None:
    base = added(bases, write_base(tmp_path / "b"), dtype="bf16")
    assert base.kv_bytes(3) == 2 * 2 * 2 * 8 * 4 * 3
