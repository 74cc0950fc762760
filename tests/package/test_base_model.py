"""Naming a base: the definition recomputed by hand, and what must not change a digest."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from expertctl.errors import InvalidPackageError, NotFoundError
from expertctl.package.base_model import BaseIdentity, read_base
from expertctl.package.model_config import read_model_config
from expertctl.schema.strict_json import encode_canonical
from tests.factories import write_base


@pytest.fixture
def base(tmp_path: Path, base_dir: Path) -> Path:
    """A base of the test's own."""
    return Path(shutil.copytree(base_dir, tmp_path / "copy"))


def identify(directory: Path, **options: Any) -> BaseIdentity:
    return read_base(directory, **options).identity


def digests(identity: BaseIdentity) -> tuple[str, str, str]:
    return str(identity.arch), str(identity.weights), str(identity.tokenizer)


def test_the_digests_are_those_of_the_definition(base_dir: Path) -> None:
    identity = identify(base_dir)
    tensors = load_file(base_dir / "model.safetensors")
    rows = [
        [name, "F32", hashlib.sha256(tensors[name].tobytes()).hexdigest()]
        for name in sorted(tensors)
    ]
    assert identity.weights is not None
    assert identity.weights.hex == hashlib.sha256(encode_canonical(rows)).hexdigest()
    config = read_model_config(base_dir).to_json()
    shapes = [[name, list(tensors[name].shape)] for name in sorted(tensors)]
    arch = encode_canonical({"config": config, "tensors": shapes})
    assert identity.arch.hex == hashlib.sha256(arch).hexdigest()
    tokenizer = (base_dir / "tokenizer.json").read_bytes()
    assert identity.tokenizer.hex == hashlib.sha256(tokenizer).hexdigest()


@pytest.mark.parametrize("arch", ["llama", "mistral", "qwen2", "qwen3"])
def test_shards_do_not_change_the_digests(arch: str, tmp_path: Path) -> None:
    one = write_base(tmp_path / "one", arch=arch, tie=False)
    many = write_base(tmp_path / "many", arch=arch, tie=False, shards=3)
    assert digests(identify(one)) == digests(identify(many))


def test_a_head_that_is_stored_though_tied_counts_once(base: Path) -> None:
    before = digests(identify(base))
    tensors = load_file(base / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    save_file(tensors, base / "model.safetensors")
    assert digests(identify(base)) == before


def test_one_changed_weight_changes_only_the_weights(base: Path) -> None:
    before = identify(base)
    tensors = load_file(base / "model.safetensors")
    tensors["model.norm.weight"][3] += 1
    save_file(tensors, base / "model.safetensors")
    after = identify(base)
    assert (after.arch, after.tokenizer) == (before.arch, before.tokenizer)
    assert after.weights != before.weights


def test_another_type_changes_the_weights_and_not_the_architecture(tmp_path: Path) -> None:
    full = identify(write_base(tmp_path / "f"))
    half = identify(write_base(tmp_path / "h", dtype="bfloat16"))
    assert full.arch == half.arch
    assert full.weights != half.weights


def test_another_configuration_changes_the_architecture(base: Path) -> None:
    before = identify(base)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "rope_theta": 5e5}))
    after = identify(base)
    assert after.arch != before.arch
    assert after.weights == before.weights


def test_the_spelling_of_the_configuration_does_not_change_the_architecture(base: Path) -> None:
    before = identify(base)
    config = json.loads((base / "config.json").read_text())
    theta = config.pop("rope_theta")
    del config["hidden_act"], config["rms_norm_eps"], config["tie_word_embeddings"]
    new = {"rope_type": "default", "rope_theta": theta}
    config |= {"rope_parameters": new, "tie_word_embeddings": read_model_config(base).tied}
    (base / "config.json").write_text(json.dumps({**config, "layer_types": None, "dtype": "auto"}))
    assert identify(base) == before


def test_the_name_is_what_was_asked_for_or_the_directory(base_dir: Path) -> None:
    assert identify(base_dir).name == "base"
    identity = identify(base_dir, name="Qwen/Qwen3-0.6B", revision="c1899de")
    assert (identity.name, identity.revision) == ("Qwen/Qwen3-0.6B", "c1899de")


def test_progress_counts_every_byte(base_dir: Path) -> None:
    counted: list[int] = []
    identify(base_dir, progress=counted.append)
    tensors = load_file(base_dir / "model.safetensors")
    size = sum(array.nbytes for array in tensors.values())
    assert sum(counted) == size + (base_dir / "tokenizer.json").stat().st_size


def test_linear_layers_have_out_and_in(base_dir: Path) -> None:
    shapes = read_base(base_dir).shapes
    assert shapes["model.layers.0.self_attn.q_proj"] == (32, 32)
    assert shapes["model.layers.1.self_attn.k_proj"] == (16, 32)
    assert shapes["model.layers.1.mlp.down_proj"] == (32, 48)
    assert shapes["lm_head"] == (259, 32)
    assert len(shapes) == 15


def test_an_untied_head_has_its_own_shape(tmp_path: Path) -> None:
    assert read_base(write_base(tmp_path / "b", tie=False)).shapes["lm_head"] == (259, 32)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(name: str, base: Path) -> None:
    (base / name).unlink()
    with pytest.raises(NotFoundError, match=name):
        identify(base)


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no such directory"):
        identify(tmp_path / "none")


def test_pickled_weights_are_never_opened(base: Path) -> None:
    (base / "model.safetensors").rename(base / "pytorch_model.bin")
    with pytest.raises(NotFoundError) as caught:
        identify(base)
    assert "pickles are never opened" in caught.value.hint


def test_weights_that_are_no_safetensors_are_refused(base: Path) -> None:
    (base / "model.safetensors").write_bytes(b"\x80\x04\x95" + bytes(100))
    with pytest.raises(InvalidPackageError):
        identify(base)


@pytest.mark.parametrize(
    "file",
    ["../other/model.safetensors", "/etc/passwd", "sub/model.safetensors", "model.bin", ".."],
)
def test_an_index_that_names_a_file_elsewhere_is_refused(file: str, tmp_path: Path) -> None:
    base = write_base(tmp_path / "b", shards=2)
    index = base / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    document["weight_map"]["model.norm.weight"] = file
    index.write_text(json.dumps(document))
    with pytest.raises(InvalidPackageError, match="not the name of a safetensors file"):
        identify(base)


@pytest.mark.parametrize("document", [{}, {"weight_map": {}}, {"weight_map": {"a": 1}}, []])
def test_an_index_that_is_none_is_refused(document: object, tmp_path: Path) -> None:
    base = write_base(tmp_path / "b", shards=2)
    (base / "model.safetensors.index.json").write_text(json.dumps(document))
    with pytest.raises(InvalidPackageError):
        identify(base)


def test_an_index_that_disagrees_with_its_files_is_refused(tmp_path: Path) -> None:
    base = write_base(tmp_path / "b", shards=2)
    index = base / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    files = sorted(set(document["weight_map"].values()))
    document["weight_map"]["model.norm.weight"] = next(
        file for file in files if file != document["weight_map"]["model.norm.weight"]
    )
    del document["weight_map"]["model.embed_tokens.weight"]
    index.write_text(json.dumps(document))
    with pytest.raises(InvalidPackageError) as caught:
        identify(base)
    assert "model.norm.weight" in caught.value.message
    assert "the index says nothing" in caught.value.message


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    base = write_base(tmp_path / "b", shards=2)
    first, second = sorted(base.glob("model-*.safetensors"))
    tensors = load_file(first)
    tensors["model.norm.weight"] = np.ones(32, np.float32)
    save_file(tensors, first)
    tensors = load_file(second)
    tensors["model.norm.weight"] = np.ones(32, np.float32)
    save_file(tensors, second)
    with pytest.raises(InvalidPackageError, match=r"model\.norm\.weight: in"):
        identify(base)
