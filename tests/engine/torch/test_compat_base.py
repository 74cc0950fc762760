"""Bases through transformers: only from the files that were checked, and never from the network."""

import json
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from expertctl.engine.torch.compat_base import CompatBase, load_model, open_compat_base
from expertctl.engine.torch.compat_engine import TransformersSession
from expertctl.errors import (
    BaseMismatchError,
    IncompatibleError,
    InvalidPackageError,
    NotFoundError,
    UsageError,
    format_install_command,
)
from expertctl.store.bases import BaseStore
from tests.engine.compat_models import CONFIGS, CompatModel, write_model
from tests.gpt2_base import edit_config, write_gpt2

IDS = list(b"Hello, you there")
TOLERANCE = 1e-5


@pytest.fixture(scope="session")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> CompatModel:
    return write_model(tmp_path_factory.mktemp("base"), "gpt2")


@pytest.fixture
def copy(gpt2: CompatModel, tmp_path: Path) -> Path:
    return Path(shutil.copytree(gpt2.directory, tmp_path / "gpt2"))


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def opened(directory: Path, *, dtype: str = "float32", rehash: bool = False) -> CompatBase:
    bases = BaseStore(directory.parent / "bases")
    stored = bases.add(directory)
    return open_compat_base(bases, stored, dtype=dtype, rehash=rehash)


def scores(loaded: Any) -> torch.Tensor:
    return torch.from_numpy(TransformersSession(loaded).prefill(IDS).logits)


def expected(model: CompatModel) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model.model(torch.tensor([IDS])).logits[0, -1]
    return logits


def assert_same(loaded: Any, model: CompatModel) -> None:
    assert float((scores(loaded) - expected(model)).abs().max()) <= TOLERANCE


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("arch", CONFIGS)
def test_a_base_computes_what_it_computes_in_transformers_and_costs_what_was_estimated(
    arch: str, tmp_path: Path
) -> None:
    model = write_model(tmp_path, arch)
    base = opened(model.directory)
    loaded = load_model(base)
    assert base.weight_bytes == sum(p.nbytes for p in loaded.parameters())
    assert base.context == (2048 if arch == "bloom" else 96)
    assert ("states no context length" in "".join(base.warnings)) == (arch == "bloom")
    with torch.inference_mode():
        past = loaded(torch.tensor([IDS]), use_cache=True).past_key_values
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in past.layers)
    assert base.kv_bytes(len(IDS)) == held
    assert base.buffer_bytes(2 * len(IDS)) > base.buffer_bytes(len(IDS)) > 0
    assert scores(loaded).shape == (base.dimensions.vocab,)
    assert_same(loaded, model)


def test_a_base_in_bf16_takes_half(gpt2: CompatModel, copy: Path) -> None:
    base = opened(copy, dtype="bf16")
    loaded = load_model(base)
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    assert base.weight_bytes == sum(p.nbytes for p in loaded.parameters())
    found = scores(loaded)
    assert found.dtype == torch.float32
    assert 0 < float((found - expected(gpt2)).abs().max()) < 0.1


def test_a_dtype_that_nobody_supports_is_refused(copy: Path) -> None:
    with pytest.raises(UsageError, match="int8"):
        opened(copy, dtype="int8")


def test_a_checkpoint_without_its_head_and_with_old_masks_is_loaded(
    gpt2: CompatModel, copy: Path
) -> None:
    path = copy / "model.safetensors"
    tensors = {n.removeprefix("transformer."): t for n, t in load_file(path).items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 8, 8, dtype=torch.bool)
    save_file(tensors, path)
    assert_same(load_model(opened(copy)), gpt2)


def test_other_files_of_the_folder_are_never_read(gpt2: CompatModel, copy: Path) -> None:
    """transformers would take an adapter that lies beside, and single weights before an index."""
    tensors = load_file(copy / "model.safetensors")
    shard = "model-00001-of-00001.safetensors"
    save_file(tensors, copy / shard)
    weight_map = dict.fromkeys(tensors, shard)
    (copy / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    save_file({n: torch.zeros_like(t) for n, t in tensors.items()}, copy / "model.safetensors")
    adapter = gpt2.get_adapter("lora")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(adapter / name, copy / name)
    (copy / "modeling_gpt2.py").write_text("raise SystemExit('code of the base was run')")
    (copy / "pytorch_model.bin").write_bytes(b"\x80\x04\x95")
    base = opened(copy)
    assert [file.path for file in base.stored.files if "model" in file.path] == [
        shard,
        "model.safetensors.index.json",
    ]
    assert_same(load_model(base), gpt2)


@pytest.mark.parametrize("rehash", [False, True])
def test_a_base_changed_on_disk_is_refused(rehash: bool, copy: Path) -> None:
    bases = BaseStore(copy.parent / "bases")
    stored = bases.add(copy)
    weights = copy / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(BaseMismatchError, match=r"model\.safetensors"):
        open_compat_base(bases, stored, dtype="float32", rehash=rehash)


def test_a_base_that_names_code_of_its_own_is_refused_whenever_it_does(copy: Path) -> None:
    bases = BaseStore(copy.parent / "bases")
    stored = bases.add(copy)
    edit_config(copy, auto_map={"AutoModelForCausalLM": "modeling_gpt2.Model"})
    with pytest.raises(BaseMismatchError, match=r"config\.json"):
        open_compat_base(bases, stored, dtype="float32", rehash=False)


@pytest.mark.usefixtures("no_network")
def test_what_a_configuration_wants_to_be_run_with_is_not_heard(
    gpt2: CompatModel, copy: Path
) -> None:
    edit_config(
        copy,
        attn_implementation="somebody/kernel",
        _attn_implementation="somebody/kernel",
        _name_or_path="somebody/model",
        tokenizer_name_or_path="somebody/tokenizer",
        tokenizer_class="SomebodysTokenizer",
    )
    loaded = load_model(opened(copy))
    assert loaded.config._attn_implementation == "sdpa"
    assert_same(loaded, gpt2)


@pytest.mark.parametrize(
    ("remove", "add", "words"),
    [
        ("transformer.h.0.ln_1.weight", None, "missing tensor transformer.h.0.ln_1.weight"),
        (None, "transformer.h.9.ln_1.weight", "unexpected tensor transformer.h.9.ln_1.weight"),
    ],
)
def test_weights_that_are_not_those_of_the_configuration_are_refused(
    remove: str | None, add: str | None, words: str, copy: Path
) -> None:
    path = copy / "model.safetensors"
    tensors = load_file(path)
    tensors = {name: tensor for name, tensor in tensors.items() if name != remove}
    if add:
        tensors[add] = torch.ones(3)
    save_file(tensors, path)
    with pytest.raises(InvalidPackageError) as caught:
        load_model(opened(copy))
    assert words in caught.value.message


@pytest.mark.parametrize("change", [{"n_embd": 48}, {"n_inner": 7}, {"vocab_size": 300}], ids=str)
def test_a_configuration_of_other_sizes_is_refused(change: dict[str, Any], copy: Path) -> None:
    edit_config(copy, **change)
    with pytest.raises(InvalidPackageError):
        load_model(opened(copy))


@pytest.mark.parametrize(
    "change",
    [{"activation_function": "no such thing"}, {"n_head": 5}, {"layer_norm_epsilon": "x"}],
    ids=str,
)
def test_a_configuration_that_transformers_cannot_use_is_malformed(
    change: dict[str, Any], copy: Path
) -> None:
    edit_config(copy, **change)
    with pytest.raises(InvalidPackageError, match="transformers cannot"):
        load_model(opened(copy))


@pytest.mark.parametrize("kind", ["no-such-model", "bert", "sam", "distilbert"])
def test_an_architecture_that_transformers_does_not_know_is_refused(
    kind: str, tmp_path: Path
) -> None:
    directory = write_gpt2(tmp_path / "odd", model_type=kind, architectures=["OddForCausalLM"])
    with pytest.raises((IncompatibleError, InvalidPackageError)):
        load_model(opened(directory))


def test_more_layers_than_tensors_are_refused_before_any_is_made(copy: Path) -> None:
    edit_config(copy, n_layer=10**9)
    with pytest.raises(InvalidPackageError, match="1000000000 layers, but 28 tensors"):
        opened(copy)


@pytest.mark.parametrize("name", ["n_head", "n_layer", "vocab_size", "n_embd"])
def test_a_size_of_nothing_is_refused(name: str, copy: Path) -> None:
    edit_config(copy, **{name: 0})
    with pytest.raises((IncompatibleError, InvalidPackageError)):
        opened(copy)


def test_a_base_without_keys_and_values_is_refused(tmp_path: Path) -> None:
    directory = write_gpt2(tmp_path / "odd", model_type="mamba", architectures=["MambaForCausalLM"])
    with pytest.raises(IncompatibleError, match="mamba"):
        opened(directory)


def test_a_missing_library_is_named_with_the_extra(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setitem(sys.modules, "transformers.utils", None)
    with pytest.raises(NotFoundError, match="transformers") as caught:
        opened(copy)
    assert caught.value.hint == format_install_command("compat")
