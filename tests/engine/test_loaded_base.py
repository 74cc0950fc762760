"""The base in memory: exactly as large as was reserved, there once, gone when another comes."""

import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file

from expertctl.engine.arrays import widen
from expertctl.engine.backend import LoadConfig, LoadContext, RunnableModel
from expertctl.engine.cpu.plain_backend import PlainBackend
from expertctl.engine.load_plan import (
    NUMPY_MAX_BYTES,
    BaseSlot,
    OpenBase,
    choose_backend,
    open_base,
)
from expertctl.engine.memory.adapter_cache import AdapterCache
from expertctl.engine.memory.budget import MemoryBudget
from expertctl.engine_config import Dtype, EngineConfig
from expertctl.errors import (
    BaseMismatchError,
    BudgetError,
    IncompatibleError,
    InvalidPackageError,
    NotFoundError,
    format_install_command,
)
from expertctl.package.model_config import read_model_config
from expertctl.settings import Home
from expertctl.store.bases import BaseStore
from tests import tensor_shapes
from tests.factories import write_base


@pytest.fixture
def bases(tmp_path: Path) -> BaseStore:
    return BaseStore(tmp_path / "bases")


def added(
    bases: BaseStore,
    directory: Path,
    *,
    dtype: Dtype = "float32",
    numpy_below: int = NUMPY_MAX_BYTES,
) -> OpenBase:
    stored = bases.add(directory)
    return open_base(bases, stored, LoadConfig(dtype), rehash=False, numpy_below=numpy_below)


def loaded(place: BaseSlot, base: OpenBase) -> RunnableModel:
    home = Home(base.stored.path.parent / "home")
    return place.load(LoadContext(directory=base.stored.path, home=home))


def slot(limit: int) -> tuple[MemoryBudget, BaseSlot]:
    budget = MemoryBudget(limit)
    return budget, BaseSlot(AdapterCache(ram=budget, device=budget))


SIZES: dict[str, Any] = {"head_dim": 16, "intermediate": 48}
"""Sizes that fill the blocks of kernels; those of `write_base` otherwise do not."""


@pytest.mark.parametrize("dtype", ["float32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("arch", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("tie", [True, False])
def test_a_base_takes_what_was_announced(
    arch: str, dtype: Dtype, tie: bool, tmp_path: Path, bases: BaseStore
) -> None:
    directory = write_base(tmp_path / "b", arch=arch, tie=tie, **SIZES)
    for numpy_below in (0, 1 << 30):
        base = added(bases, directory, dtype=dtype, numpy_below=numpy_below)
        packed = numpy_below == 0 or dtype in {"int8", "int4"}
        assert base.backend.name == ("packed" if packed else "numpy")
        budget, place = slot(base.weight_bytes)
        place.reserve(base)
        model = loaded(place, base)
        place.check_integrity()
        assert model.nbytes == base.weight_bytes == budget.reserved_bytes("base")
        place.unload()
        assert budget.used == 0


@pytest.mark.parametrize("dtype", ["float32", "bf16"])
@pytest.mark.parametrize("arch", sorted(tensor_shapes.CLASSES))
def test_a_base_of_routed_experts_takes_what_was_announced_in_numpy(
    arch: str, dtype: Dtype, tmp_path: Path, bases: BaseStore
) -> None:
    base = added(bases, write_base(tmp_path / "b", arch=arch), dtype=dtype)
    assert (base.backend.name, base.warnings) == ("numpy", ())
    budget, place = slot(base.weight_bytes)
    place.reserve(base)
    assert loaded(place, base).nbytes == base.weight_bytes == budget.reserved_bytes("base")
    place.check_integrity()


def test_what_of_routed_experts_fits_is_held_by_a_cuda_device(tmp_path: Path) -> None:
    config = read_model_config(write_base(tmp_path / "b", arch="olmoe"))
    whole, warnings = choose_backend(config, LoadConfig(engine=EngineConfig(device="cuda")))
    assert (whole.name, whole.cache, warnings) == ("cuda", None, ())
    wish = LoadConfig(
        engine=EngineConfig(device="cuda", moe_miss="skip", moe_skip_cap=0.5),
        memory_limit=whole.weight_bytes,
    )
    partly, _ = choose_backend(config, wish)
    assert partly.cache is not None
    assert (partly.cache.miss, partly.cache.cap) == ("skip", 0.5)
    assert partly.weight_bytes < whole.weight_bytes


@pytest.mark.parametrize(
    "wish",
    [
        LoadConfig("int8"),
        LoadConfig("int4"),
        LoadConfig(engine=EngineConfig(adapter_dtype="fp16")),
        LoadConfig(engine=EngineConfig(deterministic=True)),
    ],
    ids=["int8", "int4", "fp16 adapters", "deterministic"],
)
def test_kernels_run_what_numpy_cannot_however_small_the_base(
    wish: LoadConfig, tmp_path: Path
) -> None:
    fits = read_model_config(write_base(tmp_path / "fits", head_dim=16))
    odd = read_model_config(write_base(tmp_path / "odd", head_dim=8))
    backend, warnings = choose_backend(fits, wish)
    assert (backend.name, backend.dtype, warnings) == ("packed", wish.dtype, ())
    with pytest.raises(IncompatibleError, match="head_dim is 8") as error:
        choose_backend(odd, wish)
    assert error.value.hint


def test_numpy_runs_a_large_base_whose_sizes_are_none_for_kernels_and_says_so(
    tmp_path: Path,
) -> None:
    odd = read_model_config(write_base(tmp_path / "b", head_dim=8))
    size = PlainBackend(odd, "bf16").weight_bytes
    backend, warnings = choose_backend(odd, LoadConfig("bf16"), numpy_below=size)
    assert backend == PlainBackend(odd, "bf16")
    assert "numpy runs the base, which is slower" in "".join(warnings)
    assert "head_dim is 8" in "".join(warnings)
    assert choose_backend(odd, LoadConfig("bf16"), numpy_below=size + 1) == (backend, ())


def test_numpy_runs_a_large_base_where_numba_is_missing_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    dense, routed = (
        read_model_config(write_base(tmp_path / arch, arch=arch, **SIZES))
        for arch in ("qwen3", "qwen3_moe")
    )
    for config in (dense, routed):
        backend, warnings = choose_backend(config, LoadConfig(), numpy_below=0)
        assert backend == PlainBackend(config, "float32")
        assert "slower: the kernels of the processor need numba" in "".join(warnings)
        assert choose_backend(config, LoadConfig()) == (backend, ())
    with pytest.raises(NotFoundError, match="need numba") as error:
        choose_backend(dense, LoadConfig("int8"))
    assert error.value.hint == format_install_command("engine")


def test_numpy_runs_a_large_base_where_numba_cannot_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library for another numpy is found, and fails."""
    (tmp_path / "numba").mkdir()
    (tmp_path / "numba" / "__init__.py").write_text("raise ImportError('needs another numpy')")
    for name in [name for name in sys.modules if name.split(".")[0] == "numba"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    config, home = (
        read_model_config(write_base(tmp_path / "base", **SIZES)),
        Home(tmp_path / "home"),
    )
    backend, warnings = choose_backend(config, LoadConfig(home=home), numpy_below=0)
    assert backend == PlainBackend(config, "float32")
    assert "cannot be imported: needs another numpy" in "".join(warnings)
    stored = home.kernels / "a" / "norm.code"
    stored.parent.mkdir(parents=True)
    stored.touch()
    assert choose_backend(config, LoadConfig(home=home), numpy_below=0)[0].name == "packed"


def test_one_base_is_loaded_once(tmp_path: Path, bases: BaseStore) -> None:
    directory = write_base(tmp_path / "b")
    base = added(bases, directory)
    _, place = slot(1 << 20)
    place.reserve(base)
    model = loaded(place, base)
    place.reserve(added(bases, directory))
    assert loaded(place, base) is model
    place.reserve(added(bases, directory, dtype="bf16"))
    assert loaded(place, base) is not model


@pytest.mark.parametrize("numpy_below", [0, 1 << 30])
def test_a_matrix_is_what_is_computed_with(
    numpy_below: int, tmp_path: Path, bases: BaseStore
) -> None:
    directory = write_base(tmp_path / "b", **SIZES)
    written = load_file(directory / "model.safetensors")
    for dtype, lost in (("float32", 0.0), ("bf16", 2.0**-8)):
        base = added(bases, directory, dtype=cast(Dtype, dtype), numpy_below=numpy_below)
        _, place = slot(1 << 20)
        place.reserve(base)
        model = loaded(place, base)
        for module in base.config.linear_shapes():
            name = "model.embed_tokens" if module == "lm_head" else module
            numbers = written[f"{name}.weight"]
            found = torch.from_numpy(widen(model.matrix(module)).copy())
            assert torch.allclose(found, numbers, rtol=lost, atol=0)


def test_another_base_takes_the_place_of_the_first(tmp_path: Path, bases: BaseStore) -> None:
    small, large = write_base(tmp_path / "small"), write_base(tmp_path / "large", layers=3)
    first, second = added(bases, small), added(bases, large)
    budget, place = slot(second.weight_bytes)
    place.reserve(first)
    loaded(place, first)
    place.reserve(second)
    assert budget.reserved_bytes("base") == second.weight_bytes
    assert loaded(place, second).matrix("model.layers.2.mlp.down_proj").shape == (32, 48)
    place.unload()
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
        loaded(place, base)
    weights.write_bytes(data)
    assert loaded(place, base).nbytes == base.weight_bytes


def test_changed_files_are_refused(tmp_path: Path, bases: BaseStore) -> None:
    directory = write_base(tmp_path / "b")
    stored = bases.add(directory)
    path = directory / "tokenizer.json"
    path.write_text(path.read_text() + " ")
    for rehash in (False, True):
        with pytest.raises(BaseMismatchError, match=r"tokenizer\.json"):
            open_base(bases, stored, LoadConfig(), rehash=rehash)


@pytest.mark.parametrize(
    ("numpy_below", "dtype", "tokens", "itemsize"),
    [(1 << 30, "bf16", 48, 4), (0, "float32", 48, 4), (0, "bf16", 48, 2), (0, "int4", 48, 2)],
)
def test_keys_and_values_are_counted_as_they_are_kept_by_whole_pages(
    numpy_below: int, dtype: Dtype, tokens: int, itemsize: int, tmp_path: Path, bases: BaseStore
) -> None:
    directory = write_base(tmp_path / "b", **SIZES)
    base = added(bases, directory, dtype=dtype, numpy_below=numpy_below)
    assert base.kv_bytes(35) == 2 * 2 * 2 * 16 * itemsize * tokens
