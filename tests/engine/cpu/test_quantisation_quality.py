"""What a base loses in integers: measured as by the formula, once, and held against its limit."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from expertctl.engine.arrays import AnyArray
from expertctl.engine.backend import LoadConfig, LoadContext
from expertctl.engine.cpu import quantisation_quality
from expertctl.engine.cpu.backend import (
    MEASURED_TOKENS,
    PackedBackend,
    PackedModel,
    quality_scratch_bytes,
)
from expertctl.engine.cpu.plain_decoder import PlainDecoder
from expertctl.engine.cpu.plain_weights import load_plain_weights, open_stored_weights
from expertctl.engine.cpu.quantisation_quality import (
    TEXT,
    compute_kl,
    measure_quality,
)
from expertctl.engine.kv.block_pool import ROW_PAGES, PagedKVCache
from expertctl.engine.local_engine import LocalEngine
from expertctl.engine.request import RunRequest
from expertctl.engine_config import KL_LIMITS, Dtype
from expertctl.errors import BaseMismatchError, IncompatibleError
from expertctl.package.model_config import read_model_config
from expertctl.settings import Home
from tests.engine.conftest import MakeReferenceModel
from tests.engine.reference_models import ROUTED_CLASSES
from tests.engine.test_local_engine import planner, request, run
from tests.factories import write_base
from tests.store.fixtures import HomeFixture, user_home

__all__ = ["user_home"]

IDS = list(TEXT.encode())[:MEASURED_TOKENS]
SIZES: dict[str, Any] = {"hidden": 64, "intermediate": 96, "head_dim": 16}
OBJECTS = 64 << 10


def load_in(dtype: Dtype, directory: Path, home: Path) -> tuple[PackedBackend, PackedModel, Any]:
    config = read_model_config(directory)
    backend = PackedBackend.choose(config, LoadConfig(dtype))
    context = LoadContext(directory=directory, home=Home(home), threads=2)
    return backend, backend.load(context), context


def softmax_kl(expected: AnyArray, logits: AnyArray) -> float:
    p, q = (
        torch.from_numpy(np.array(rows)).double().log_softmax(-1) for rows in (expected, logits)
    )
    return float(torch.nn.functional.kl_div(q, p, log_target=True, reduction="batchmean"))


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_it_is_the_divergence_of_what_is_computed_from_float32(
    dtype: Dtype, tie: bool, tmp_path: Path
) -> None:
    directory = write_base(tmp_path / "base", tie=tie, dtype="bfloat16", **SIZES)
    backend, model, context = load_in(dtype, directory, tmp_path)
    found = measure_quality(backend, model, IDS, context)
    assert model.holds_only_weights
    reference = PlainDecoder(backend.config, load_plain_weights(directory, backend.config))
    before = PagedKVCache(backend.config, MEASURED_TOKENS, layout=ROW_PAGES)
    exact, packed = np.empty((2, MEASURED_TOKENS, backend.config.vocab_size), np.float32)
    for place, token in enumerate(IDS):
        exact[place] = reference.decode(token, before).logits
    cache = PagedKVCache(backend.config, MEASURED_TOKENS, layout=backend.page_layout)
    for place, token in enumerate(IDS):
        packed[place] = model.decoder.decode(token, cache).logits
    assert found.predictions == MEASURED_TOKENS
    assert found.kl == pytest.approx(softmax_kl(exact, packed), rel=1e-2)
    model.close()


def test_the_divergence_is_that_of_the_formula() -> None:
    expected, logits = np.random.default_rng(0).normal(0, 8, (2, 20, 300)).astype(np.float32)
    found = compute_kl(expected, logits)
    assert found.mean() == pytest.approx(softmax_kl(expected, logits), rel=1e-6)
    assert np.all(compute_kl(expected, expected + 3) < 1e-6)


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("arch", ["qwen2", "qwen3", *ROUTED_CLASSES])
def test_weights_in_files_compute_as_those_in_memory(
    arch: str, stored: str, oracle: MakeReferenceModel
) -> None:
    model = oracle(arch)
    model.model.to(getattr(torch, stored)).save_pretrained(model.directory)
    config = read_model_config(model.directory)
    weights = load_plain_weights(model.directory, config)
    tokens, hidden = [token % config.vocab_size for token in IDS[:40]], list[AnyArray]()
    for source in (weights, open_stored_weights(model.directory, config)):
        decoder = PlainDecoder(config, source)
        hidden.append(decoder.read_hidden(tokens, PagedKVCache(config, 40, layout=ROW_PAGES)))
        hidden.append(decoder.score(hidden[-1]))
    np.testing.assert_allclose(hidden[2], hidden[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(hidden[3], hidden[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "sizes",
    [
        SIZES,
        {**SIZES, "vocab": 20_000},
        {**SIZES, "hidden": 256, "intermediate": 2048},
        {**SIZES, "arch": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 96},
    ],
    ids=["small", "large vocabulary", "wide", "routed"],
)
def test_measuring_needs_no_more_memory_than_it_says(sizes: Any, tmp_path: Path) -> None:
    directory = write_base(tmp_path / "base", **sizes)
    backend, model, context = load_in("int8", directory, tmp_path)
    packed = backend.buffer_bytes(MEASURED_TOKENS) + backend.kv_bytes(MEASURED_TOKENS)
    measure_quality(backend, model, IDS, context)  # imports, compiles
    tracemalloc.start()
    try:
        measure_quality(backend, model, IDS, context)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        model.close()
    assert peak <= quality_scratch_bytes(backend.config, packed=packed) + OBJECTS


def ask(dtype: Dtype) -> RunRequest:
    return request(route={"base_alone": True, "dtype": dtype})


def add_outliers(directory: Path, outlier: float) -> None:
    """Put a number into every group that leaves no steps for others; its activation is zero."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if name == "model.norm.weight":
            tensor *= 20
        elif name.endswith("layernorm.weight"):
            tensor[::32] = 0
        elif name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight")):
            tensor[:, ::32] = outlier
    save_file(tensors, path)


def count_measurements(monkeypatch: pytest.MonkeyPatch) -> list[Dtype]:
    """Return the data types of all that is measured from now on."""
    measured, measure = list[Dtype](), measure_quality

    def count(backend: PackedBackend, *args: Any, **options: Any) -> Any:
        measured.append(backend.dtype)
        return measure(backend, *args, **options)

    monkeypatch.setattr(quantisation_quality, "measure_quality", count)
    return measured


def test_it_is_measured_once_and_again_if_what_was_kept_cannot_be_used(
    user_home: HomeFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user_home.bases.add(write_base(tmp_path / "base", **SIZES))
    measured = count_measurements(monkeypatch)

    def answer(dtype: Dtype) -> float:
        engine = LocalEngine(planner(user_home), numpy_below=0)
        try:
            told = run(engine, ask(dtype)).to_json()["numerics"]
            assert isinstance(told, dict)
            found = told["kl_divergence"]
            assert isinstance(found, float)
            return found
        finally:
            engine.close()

    first = answer("int8")
    assert 0 < first < KL_LIMITS["int8"]
    assert first == answer("int8")
    assert measured == ["int8"]
    assert first < answer("int4")
    assert measured == ["int8", "int4"]
    [base] = user_home.bases.list_bases()
    path = user_home.bases.quality_path(base, "int8")
    kept = json.loads(path.read_bytes())
    other = json.dumps({**kept, "source": "another base"}).encode()
    for damage in (b"", b"{}", b"[" * 5000, other):
        path.write_bytes(damage)
        assert answer("int8") == pytest.approx(first, rel=1e-3)
    path.chmod(0o666)
    answer("int8")
    assert measured == ["int8", "int4"] + 5 * ["int8"]
    user_home.bases.remove(base)
    assert not path.exists()


def test_a_base_that_loses_too_much_does_not_answer(
    user_home: HomeFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_base(tmp_path / "base", **SIZES)
    add_outliers(directory, 1e4)
    user_home.bases.add(directory)
    measured = count_measurements(monkeypatch)
    engine = LocalEngine(planner(user_home), numpy_below=0)
    hints = list[str]()
    refused: tuple[tuple[Dtype, float], ...] = (("int4", 0.25), ("int8", 0.05), ("int4", 0.25))
    for dtype, limit in refused:
        expected = f"base loses too much in {dtype}: .* allows {limit}"
        with pytest.raises(IncompatibleError, match=expected) as said:
            run(engine, ask(dtype))
        hints.append(said.value.hint)
        assert engine.budget.used == 0
    assert hints == ["use --dtype int8 or bf16", "use --dtype bf16", "use --dtype bf16"]
    assert measured == ["int4", "int8"]
    assert run(engine, ask("bf16")).generated.tokens
    held = engine.budget.used
    with pytest.raises(IncompatibleError):
        run(engine, ask("int8"))
    assert engine.budget.used == held, "the base in memory is kept"
    engine.close()


@pytest.mark.parametrize("calls", [1, 2, 3, 4, 8])
def test_what_progress_raises_ends_the_measurement_and_keeps_nothing(
    calls: int, user_home: HomeFixture, tmp_path: Path
) -> None:
    class GivenUpError(Exception):
        pass

    left = calls

    def progress(size: int) -> None:
        nonlocal left
        left -= size == 0
        if size == left == 0:
            raise GivenUpError

    user_home.bases.add(write_base(tmp_path / "base", **SIZES))
    [base] = user_home.bases.list_bases()
    engine = LocalEngine(planner(user_home), numpy_below=0, progress=progress)
    with pytest.raises(GivenUpError):
        run(engine, ask("int8"))
    assert engine.budget.used == 0
    assert not user_home.bases.quality_path(base, "int8").exists()
    assert run(engine, ask("int8")).numerics.kl_divergence
    engine.close()


def test_files_that_change_meanwhile_are_not_taken_for_the_base(
    user_home: HomeFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_base(tmp_path / "base", **SIZES)
    user_home.bases.add(directory)
    [base] = user_home.bases.list_bases()

    def change(*args: Any, **options: Any) -> Any:
        found = measure_quality(*args, **options)
        add_outliers(directory, 1.0)
        return found

    monkeypatch.setattr(quantisation_quality, "measure_quality", change)
    engine = LocalEngine(planner(user_home), numpy_below=0)
    with pytest.raises(BaseMismatchError):
        run(engine, ask("int8"))
    assert not user_home.bases.quality_path(base, "int8").exists()
    assert engine.budget.used == 0
    engine.close()


def test_where_it_cannot_be_kept_it_is_measured_again_and_the_user_is_told(
    user_home: HomeFixture, tmp_path: Path
) -> None:
    user_home.bases.add(write_base(tmp_path / "base", **SIZES))
    [base] = user_home.bases.list_bases()
    path = user_home.bases.quality_path(base, "int8")
    path.mkdir()
    engine = LocalEngine(planner(user_home), numpy_below=0)
    result = run(engine, ask("int8"))
    engine.close()
    assert result.numerics.kl_divergence is not None
    assert any(f"{path} cannot be written" in warning for warning in result.warnings)
