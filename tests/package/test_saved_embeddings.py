"""Whole embeddings and heads beside a LoRA, as PEFT saves them, and tensors of several types."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from expertctl.errors import DigestError, InvalidPackageError
from expertctl.package.base_model import BaseFacts, read_base
from expertctl.package.build import build_package, plan_build
from expertctl.package.draft import ManifestOverrides
from expertctl.package.write import unpack_package
from tests.factories import to_bytes, write_base, write_safetensors

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
WEIGHTS = "adapter_model.safetensors"
HEAD, EMBEDDING = "base_model.model.lm_head", "base_model.model.model.embed_tokens"
CHANGED = "the embeddings were trained or the vocabulary was resized: not supported yet"
Save = Callable[..., Path]


@pytest.fixture
def save(tmp_path: Path, base_dir: Path) -> Save:
    """Save an adapter with random numbers on a base, as PEFT does it."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    def save(*, base: Path = base_dir, rows: int | None = None, **config: Any) -> Path:
        torch.manual_seed(1)
        settings = LoraConfig(
            r=4, lora_alpha=6, init_lora_weights=False, task_type="CAUSAL_LM", **config
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
            if rows is not None:
                model.resize_token_embeddings(rows)
            get_peft_model(model, settings).save_pretrained(str(tmp_path / "saved"))
        (tmp_path / "saved" / "README.md").unlink(missing_ok=True)
        return tmp_path / "saved"

    return save


def packed(directory: Path, facts: BaseFacts) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The tensors of the package, as safetensors reads them, and what was said."""
    plan = plan_build(directory, ManifestOverrides(), base=facts)
    result = build_package(plan, directory.parent / "x.expert")
    unpack_package(result.path, directory.parent / "unpacked")
    return load_file(directory.parent / "unpacked" / WEIGHTS), result.notes


def refused(directory: Path, facts: BaseFacts | None) -> str:
    with pytest.raises(InvalidPackageError) as caught:
        plan_build(directory, ManifestOverrides(), base=facts)
    return caught.value.message


def change(directory: Path, name: str) -> None:
    arrays = load_file(directory / WEIGHTS)
    arrays[name] = arrays[name].copy()
    arrays[name][-1, -1] = np.nextafter(arrays[name][-1, -1], np.float32(9))
    write_safetensors(directory / WEIGHTS, arrays, dtype="float32")


@pytest.mark.parametrize(
    ("config", "whole"),
    [
        ({"target_modules": ["q_proj", "lm_head"]}, [f"{HEAD}.base_layer.weight"]),
        (
            {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
            [f"{EMBEDDING}.weight", f"{HEAD}.weight"],
        ),
    ],
    ids=["a LoRA on the head", "modules_to_save"],
)
@pytest.mark.parametrize("tied", [True, False])
def test_what_is_the_bases_own_is_left_out(
    tied: bool, config: dict[str, Any], whole: list[str], save: Save, tmp_path: Path
) -> None:
    base = write_base(tmp_path / "b", tie=tied, seed=4)
    directory = save(base=base, **config)
    before = load_file(directory / WEIGHTS)
    assert set(whole) <= set(before)
    tensors, notes = packed(directory, read_base(base, name="acme/tiny"))
    assert set(tensors) == set(before) - set(whole)
    assert all(np.array_equal(tensors[name], before[name]) for name in tensors)
    names = ", ".join(sorted(n.split(".model.", 1)[1].split(".weight")[0] for n in whole))
    said = names.replace(".base_layer", "")
    assert f"{WEIGHTS}: left out of the package, because they are those of the base: {said}" in (
        notes
    )


def test_the_numbers_of_peft_stay_when_the_head_is_left_out(
    save: Save, base_dir: Path, facts: BaseFacts
) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    directory = save(target_modules=["q_proj", "lm_head"])
    packed(directory, facts)

    def scores(adapter: Path) -> torch.Tensor:
        base = AutoModelForCausalLM.from_pretrained(base_dir, dtype=torch.float32)
        with warnings.catch_warnings(), torch.inference_mode():
            warnings.simplefilter("ignore")
            model = PeftModel.from_pretrained(base, str(adapter)).eval()
            logits: torch.Tensor = model(input_ids=torch.tensor([[1, 5, 9]])).logits
        return logits

    assert torch.equal(scores(directory), scores(directory.parent / "unpacked"))


@pytest.mark.parametrize("name", [f"{EMBEDDING}.weight", f"{HEAD}.weight"])
def test_one_number_that_was_trained_is_refused(name: str, save: Save, facts: BaseFacts) -> None:
    directory = save(target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"])
    change(directory, name)
    assert refused(directory, facts).endswith(f"{WEIGHTS}: {name}: {CHANGED}")


def test_a_vocabulary_that_was_resized_is_refused(save: Save, facts: BaseFacts) -> None:
    directory = save(rows=300, target_modules=["q_proj"])
    message = refused(directory, facts)
    assert CHANGED in message
    assert "and 1 more" in message


def test_without_the_base_the_way_out_is_said(save: Save) -> None:
    directory = save(target_modules=["q_proj", "lm_head"])
    message = refused(directory, None)
    assert "the base is not here to compare it with" in message
    assert "expertctl base add DIR" in message


def test_a_base_whose_files_are_gone_cannot_be_compared(save: Save, tmp_path: Path) -> None:
    base = write_base(tmp_path / "b", seed=4)
    directory = save(base=base, target_modules=["q_proj", "lm_head"])
    facts = read_base(base, name="acme/tiny")
    (base / "config.json").unlink()
    assert "the base is not here to compare it with" in refused(directory, facts)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_embeddings_are_compared_by_their_numbers_not_their_bytes(
    dtype: str, save: Save, tmp_path: Path
) -> None:
    base = write_base(tmp_path / "half", dtype=dtype, seed=4)
    directory = save(base=base, target_modules=["q_proj", "lm_head"])
    assert load_file(directory / WEIGHTS)[f"{HEAD}.base_layer.weight"].dtype == np.float32
    tensors, _ = packed(directory, read_base(base, name="acme/tiny"))
    assert f"{HEAD}.base_layer.weight" not in tensors


def test_a_base_that_is_cut_short_is_not_equal(save: Save, tmp_path: Path) -> None:
    base = write_base(tmp_path / "b", seed=4)
    directory = save(base=base, target_modules=["q_proj", "lm_head"])
    other = read_base(write_base(tmp_path / "other", seed=5), name="acme/tiny")
    assert CHANGED in refused(directory, other)


def mix(lora: Path, types: list[str]) -> dict[str, Any]:
    """Give the tensors of an adapter types in turn; return their exact values in float32."""
    arrays = load_file(lora / WEIGHTS)
    header: dict[str, Any] = {}
    data, exact = b"", {}
    names = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    for place, (name, array) in enumerate(arrays.items()):
        kind = types[place % len(types)]
        raw = to_bytes(array, names[kind])
        exact[name] = _exact(raw, kind).reshape(array.shape)
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    (lora / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + data)
    return exact


def _exact(raw: bytes, kind: str) -> Any:
    import torch

    types = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    return torch.frombuffer(bytearray(raw), dtype=types[kind]).float().numpy()


@pytest.mark.parametrize("types", [["BF16", "F32"], ["F16", "BF16", "F32"], ["F16", "BF16"]])
def test_tensors_of_several_types_are_packed_as_float32(
    types: list[str], lora: Path, facts: BaseFacts
) -> None:
    exact = mix(lora, types)
    tensors, notes = packed(lora, facts)
    assert set(tensors) == set(exact)
    for name, array in tensors.items():
        assert array.dtype == np.float32
        assert np.array_equal(array, exact[name])
    assert any("packed as float32" in note for note in notes)


def test_tensors_of_one_type_are_packed_byte_by_byte(lora: Path, facts: BaseFacts) -> None:
    mix(lora, ["BF16"])
    plan = plan_build(lora, ManifestOverrides(), base=facts)
    result = build_package(plan, lora.parent / "x.expert")
    unpack_package(result.path, lora.parent / "unpacked")
    assert (lora.parent / "unpacked" / WEIGHTS).read_bytes() == (lora / WEIGHTS).read_bytes()


def test_a_type_that_is_no_float_is_still_refused(lora: Path, facts: BaseFacts) -> None:
    arrays = load_file(lora / WEIGHTS)
    header: dict[str, Any] = {}
    at = 0
    for place, (name, array) in enumerate(arrays.items()):
        kind, width = ("I32", 4) if place else ("F32", 4)
        size = array.size * width
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    (lora / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + bytes(at))
    assert "one of F32, F16, BF16" in refused(lora, facts)


def test_weights_that_are_replaced_before_they_are_written_are_found_out(
    lora: Path, facts: BaseFacts
) -> None:
    mix(lora, ["BF16", "F32"])
    plan = plan_build(lora, ManifestOverrides(), base=facts)
    data = (lora / WEIGHTS).read_bytes()
    (lora / "other").write_bytes(data)
    (lora / "other").replace(lora / WEIGHTS)
    with pytest.raises(DigestError, match="replaced"):
        build_package(plan, lora.parent / "x.expert")
    assert not (lora.parent / "x.expert").exists()
    plan = plan_build(lora, ManifestOverrides(), base=facts)
    with (lora / WEIGHTS).open("r+b") as stream:
        stream.truncate(len(data) - 5)
    with pytest.raises(DigestError, match="cut short"):
        build_package(plan, lora.parent / "x.expert")
