"""Folders as people bring them: each is named as what it is, in one line a cause, a way out."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from expertctl.errors import ExpertError, InvalidPackageError, UsageError
from expertctl.package.base_model import BaseFacts, read_base
from expertctl.package.build import BuildPlan, plan_build
from expertctl.package.draft import ManifestOverrides
from tests.factories import write_base, write_lora, write_safetensors

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:6d1b341ce42677d63c6e9729640114172097698d92aefc333f4074ec54c5f2b4\nsize 750\n"
)
PAGE = "\n<!DOCTYPE html>\n<html><head><title>Sign in</title></head></html>"
ZIP = b"PK\x03\x04\x00\x00\x08\x08archive/data.pkl"


def planned(directory: Path, facts: BaseFacts | None) -> BuildPlan:
    return plan_build(directory, ManifestOverrides(), base=facts)


def refused(directory: Path, facts: BaseFacts | None) -> ExpertError:
    with pytest.raises(ExpertError) as caught:
        planned(directory, facts)
    return caught.value


def problems(directory: Path, facts: BaseFacts | None) -> list[str]:
    error = refused(directory, facts)
    assert isinstance(error, InvalidPackageError)
    return list(error.problems)


def rename_tensors(directory: Path, rename: Callable[[str], str]) -> None:
    """Give every tensor another name."""
    from safetensors.numpy import load_file

    arrays = load_file(directory / WEIGHTS)
    write_safetensors(
        directory / WEIGHTS, {rename(n): a for n, a in arrays.items()}, dtype="float32"
    )


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
@pytest.mark.parametrize(
    ("content", "problem", "way_out"),
    [
        (POINTER.encode(), "a Git LFS pointer, not the file itself", "git lfs pull"),
        (PAGE.encode(), "an HTML page, not the file itself", "log in"),
        (pickle.dumps({"a": [1]}), "a pickle, and pickles are never opened", "safe_serialization"),
        (ZIP, "a pickle, and pickles are never opened", "safe_serialization"),
        (b"", "the file is empty", "download"),
        (b"GGUF\x03\x00\x00\x00", "a GGUF file", "PEFT"),
    ],
    ids=["LFS pointer", "page", "pickle", "torch.save", "empty", "GGUF"],
)
def test_a_file_that_is_something_else_is_named_as_that(
    name: str, content: bytes, problem: str, way_out: str, lora: Path, facts: BaseFacts
) -> None:
    (lora / name).write_bytes(content)
    error = refused(lora, facts)
    assert error.message == f"{lora}: {name}: {problem}"
    assert way_out in error.hint


def test_every_pickle_protocol_is_told_from_a_table_of_tensors(
    lora: Path, facts: BaseFacts
) -> None:
    for protocol in (2, 3, 4, 5):
        (lora / WEIGHTS).write_bytes(pickle.dumps({"a": [1] * 99}, protocol=protocol))
        assert problems(lora, facts) == [f"{WEIGHTS}: a pickle, and pickles are never opened"]


@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.pt"])
def test_weights_that_torch_saved_are_not_opened_but_explained(
    name: str, lora: Path, facts: BaseFacts
) -> None:
    (lora / WEIGHTS).unlink()
    (lora / name).write_bytes(b"\x80\x02cos\nsystem\n")
    error = refused(lora, facts)
    assert f"{name} is a pickle, and pickles are never opened" in error.message
    assert "model.save_pretrained(DIR, safe_serialization=True)" in error.hint
    assert "--allow-pickle-in-sandbox" in error.hint


def test_the_folder_of_a_training_run_lists_its_checkpoints(
    lora_template: Path, tmp_path: Path, facts: BaseFacts
) -> None:
    for step in (500, 1000, 90):
        shutil.copytree(lora_template, tmp_path / "run" / f"checkpoint-{step}")
    (tmp_path / "run" / "checkpoint-2000").mkdir()
    error = refused(tmp_path / "run", facts)
    assert error.message.startswith(f"{tmp_path / 'run'}: adapter_config.json is missing, but")
    assert error.message.endswith("below it: checkpoint-90, checkpoint-500, checkpoint-1000")
    assert error.hint.endswith(f"expertctl build {tmp_path / 'run' / 'checkpoint-1000'}")


def test_adapters_below_are_listed_whatever_their_folders_are_called(
    lora_template: Path, tmp_path: Path, facts: BaseFacts
) -> None:
    places = ("sql/final", "sql/checkpoint-90", "sql/checkpoint-500", "upper")
    for place in (*places, "a b; rm -rf"):
        shutil.copytree(lora_template, tmp_path / "runs" / place)
    (tmp_path / "runs" / "again").symlink_to(tmp_path / "runs" / "sql")
    error = refused(tmp_path / "runs", facts)
    assert error.message.endswith(
        "below it: sql/checkpoint-90, sql/checkpoint-500, sql/final, upper"
    )
    assert error.hint.endswith(f"expertctl build {tmp_path / 'runs' / 'upper'}")


def test_of_many_adapters_below_the_last_are_listed(
    lora_template: Path, tmp_path: Path, facts: BaseFacts
) -> None:
    for number in range(12):
        folder = tmp_path / "many" / f"step{number}"
        folder.mkdir(parents=True)
        shutil.copy(lora_template / CONFIG, folder)
    message = refused(tmp_path / "many", facts).message
    assert "but there are 12 adapters below it, the last: step2, step3, " in message


def test_what_lies_too_deep_is_not_searched_for(
    lora_template: Path, tmp_path: Path, facts: BaseFacts
) -> None:
    shutil.copytree(lora_template, tmp_path / "deep" / "a" / "b" / "c" / "d" / "e")
    assert "there is no adapter here" in refused(tmp_path / "deep", facts).message


@pytest.mark.parametrize(
    ("name", "way_out"),
    [
        ("sql.expert", "that is a package: `expertctl install "),
        ("adapter_model.safetensors", "`expertctl build "),
        ("notes.txt", "name the directory that PEFT saved the adapter to"),
    ],
)
def test_a_file_instead_of_a_directory_is_called_one(
    name: str, way_out: str, tmp_path: Path, facts: BaseFacts
) -> None:
    (tmp_path / name).touch()
    with pytest.raises(UsageError) as caught:
        planned(tmp_path / name, facts)
    assert caught.value.message == f"{tmp_path / name} is a file, not a directory"
    assert caught.value.hint.startswith(way_out)


@pytest.mark.parametrize(
    ("rename", "cause"),
    [
        (lambda n: f"base_model.model.{n}", "the prefix 'base_model.model.' is doubled"),
        (lambda n: n.replace("model.layers", "_orig_mod.model.layers"), "'_orig_mod.' is in"),
        (lambda n: n.replace(".weight", ".default.weight"), "not saved with save_pretrained"),
        (lambda n: n.replace(".mlp.", "._fsdp_wrapped_module.mlp."), "FSDP wrapped"),
        (lambda n: n.removeprefix("base_model.model."), "begins with 'base_model.model.'"),
    ],
    ids=["doubled prefix", "torch.compile", "default", "FSDP", "no prefix"],
)
def test_names_that_are_wrong_for_one_reason_are_one_line(
    rename: Callable[[str], str], cause: str, lora: Path, facts: BaseFacts
) -> None:
    rename_tensors(lora, rename)
    (line,) = problems(lora, facts)
    assert cause in line
    assert "more: " in line


def test_what_zero_3_left_is_one_line(lora: Path, facts: BaseFacts) -> None:
    header = {
        f"base_model.model.model.layers.{i}.self_attn.q_proj.lora_{half}.weight": {
            "dtype": "F32",
            "shape": [0],
            "data_offsets": [0, 0],
        }
        for i in range(40)
        for half in "AB"
    }
    text = json.dumps(header).encode()
    (lora / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text)
    (line,) = problems(lora, facts)
    assert "and 79 more: empty tensors, as DeepSpeed ZeRO-3 leaves them" in line


def test_an_adapter_of_an_encoder_decoder_model_is_named_as_that(lora: Path) -> None:
    config = json.loads((lora / CONFIG).read_text())
    changes = {"task_type": "SEQ_2_SEQ_LM", "base_model_name_or_path": "google/flan-t5-base"}
    (lora / CONFIG).write_text(json.dumps({**config, **changes}))
    rename_tensors(lora, lambda name: name.replace(".layers.", ".encoder.block."))
    line, *rest = problems(lora, None)
    assert line == (
        f"{WEIGHTS}: model.encoder.block.0.mlp.down_proj and 13 more: part of an encoder; only "
        "causal models are supported"
    )
    assert all("google/flan-t5-base is not known here" in other for other in rest)


def test_a_rank_that_is_wrong_everywhere_is_one_line(lora: Path, facts: BaseFacts) -> None:
    config = json.loads((lora / CONFIG).read_text())
    (lora / CONFIG).write_text(json.dumps({**config, "r": 16}))
    (line,) = problems(lora, facts)
    assert line == (
        f"{WEIGHTS}: model.layers.0.mlp.down_proj and 13 more: rank 4 in lora_A, 4 in lora_B, "
        "16 in the configuration"
    )


def test_an_adapter_of_another_size_is_one_line(lora: Path, tmp_path: Path) -> None:
    wide = read_base(write_base(tmp_path / "wide", hidden=64, layers=1), name="acme/wide")
    assert problems(lora, wide) == [f"{WEIGHTS}: made for hidden size 32; acme/wide has 64"]


def test_the_configuration_and_the_weights_are_checked_together(
    lora: Path, facts: BaseFacts
) -> None:
    config = json.loads((lora / CONFIG).read_text())
    (lora / CONFIG).write_text(json.dumps({**config, "bias": "all", "use_new": 1}))
    (lora / WEIGHTS).write_text(POINTER)
    said = problems(lora, facts)
    assert [line.split(":")[0] for line in said] == [CONFIG, CONFIG, WEIGHTS]


def test_names_are_checked_beside_a_configuration_that_is_refused(
    lora: Path, facts: BaseFacts
) -> None:
    rename_tensors(lora, lambda name: f"base_model.model.{name}")
    (lora / CONFIG).write_text(POINTER)
    config, weights = problems(lora, facts)
    assert config == f"{CONFIG}: a Git LFS pointer, not the file itself"
    assert "is doubled" in weights


def test_a_refused_adapter_says_nothing_of_a_manifest_that_nobody_wrote(
    lora: Path, facts: BaseFacts
) -> None:
    (lora / WEIGHTS).write_text(POINTER)
    assert problems(lora, facts) == [f"{WEIGHTS}: a Git LFS pointer, not the file itself"]
    assert problems(lora, None)[0].startswith(f"{WEIGHTS}: ")
    assert "expert.json" not in "".join(problems(lora, None))


def test_a_manifest_that_somebody_wrote_is_checked_beside_a_refused_adapter(
    lora: Path, facts: BaseFacts
) -> None:
    (lora / "expert.json").write_text(json.dumps({"name": "Not A Name", "version": "1"}))
    (lora / WEIGHTS).write_text(POINTER)
    said = "\n".join(problems(lora, facts))
    assert "Git LFS pointer" in said
    assert "expert.json: name" in said
    assert "expert.json: version" in said
    assert "adapters" not in said


def test_a_quantised_base_that_is_not_here_is_named_with_the_base_it_stands_for(
    lora: Path,
) -> None:
    config = json.loads((lora / CONFIG).read_text())
    label = "unsloth/llama-3-8b-bnb-4bit"
    (lora / CONFIG).write_text(json.dumps({**config, "base_model_name_or_path": label}))
    (line,) = problems(lora, None)
    assert line.startswith(f"base {label} is a quantised copy of unsloth/llama-3-8b, and neither")


def test_an_adapter_that_was_never_trained_is_warned_of(
    lora: Path, facts: BaseFacts, base_dir: Path
) -> None:
    from safetensors.numpy import load_file

    arrays: dict[str, Any] = load_file(lora / WEIGHTS)
    zeros = {n: np.zeros_like(a) if "lora_B" in n else a for n, a in arrays.items()}
    assert planned(lora, facts).warnings == ()
    write_safetensors(lora / WEIGHTS, zeros, dtype="float32")
    (warning,) = planned(lora, facts).warnings
    assert "every lora_B is zero" in warning


def test_the_empty_form_of_a_model_card_is_not_packed(lora: Path, facts: BaseFacts) -> None:
    from huggingface_hub import ModelCard, ModelCardData

    card = ModelCard.from_template(ModelCardData(library_name="peft"), model_id="x")
    (lora / "README.md").write_text(str(card), encoding="utf-8")
    plan = planned(lora, facts)
    assert "README.md" in plan.left_out
    assert "README.md" not in plan.paths
    (lora / "README.md").write_text("# What it does\n\nIt writes SQL.\n")
    assert "README.md" in planned(lora, facts).paths


def test_a_chat_template_that_differs_from_the_bases_is_warned_of(
    lora: Path, facts: BaseFacts, base_dir: Path
) -> None:
    theirs = json.loads((base_dir / "tokenizer_config.json").read_text())["chat_template"]
    (lora / "chat_template.jinja").write_text(theirs + "\n")
    assert planned(lora, facts).warnings == ()
    (lora / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (warning,) = planned(lora, facts).warnings
    assert "chat template differs from the base's" in warning
    (lora / "chat_template.jinja").unlink()
    (lora / "tokenizer_config.json").write_text(json.dumps({"chat_template": "other"}))
    (warning,) = planned(lora, facts).warnings
    assert "chat template differs from the base's" in warning


def test_added_tokens_that_the_base_does_not_know_are_warned_of(
    lora: Path, facts: BaseFacts, base_dir: Path
) -> None:
    shutil.copy(base_dir / "tokenizer.json", lora / "tokenizer.json")
    assert planned(lora, facts).warnings == ()
    (lora / "added_tokens.json").write_text(json.dumps({"<tool>": 260, "</tool>": 261}))
    (warning,) = planned(lora, facts).warnings
    assert warning == "tokens of the adapter that the base does not know: '</tool>', '<tool>'"


def test_nothing_is_said_of_tokens_where_the_bases_are_not_known(
    lora: Path, base_dir: Path, tmp_path: Path
) -> None:
    gone = shutil.copytree(base_dir, tmp_path / "gone")
    facts = read_base(gone, name="acme/tiny")
    shutil.copy(base_dir / "tokenizer.json", lora / "tokenizer.json")
    (lora / "added_tokens.json").write_text(json.dumps({"<tool>": 260}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (gone / name).write_text("[")
    assert planned(lora, facts).warnings == ()


def test_a_label_is_never_opened_and_a_path_in_it_never_packed(
    lora: Path, facts: BaseFacts, tmp_path: Path
) -> None:
    other = write_lora(tmp_path / "elsewhere", write_base(tmp_path / "b2", seed=9))
    config = json.loads((lora / CONFIG).read_text())
    (lora / CONFIG).write_text(json.dumps({**config, "base_model_name_or_path": str(other)}))
    plan = planned(lora, facts)
    assert plan.adapters[0].packed_config is not None
    assert str(tmp_path) not in plan.adapters[0].packed_config.decode()
    assert plan.notes == (f"{CONFIG}: left out of the package: base_model_name_or_path, a path",)
