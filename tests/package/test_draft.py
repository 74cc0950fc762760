"""Drafts: labels of bases, and who wins when several say something."""

import json
from pathlib import Path
from typing import Any

import pytest

from expertctl.errors import InvalidPackageError
from expertctl.package.adapter import is_hub_name
from expertctl.package.adapter_files import read_adapter
from expertctl.package.base_model import BaseFacts
from expertctl.package.draft import (
    ManifestOverrides,
    complete_manifest,
    encode_manifest,
    find_base_label,
    find_base_problems,
)
from expertctl.schema.manifest import MAX_MANIFEST_BYTES

DIGEST = f"sha256:{'1' * 64}"


def completed(lora: Path, existing: dict[str, Any], facts: BaseFacts | None) -> dict[str, Any]:
    adapter = read_adapter(lora, weights="adapter_model.safetensors", config="adapter_config.json")
    document = complete_manifest(
        existing, ManifestOverrides(), directory=lora, adapters=[adapter], base=facts
    )
    return dict(document)


@pytest.mark.parametrize("label", ["Qwen/Qwen3-0.6B", "gpt2", "a/b.c-d_e", "meta-llama/Llama-3.2"])
def test_a_hub_name_is_one(label: str) -> None:
    assert is_hub_name(label)


@pytest.mark.parametrize(
    "label",
    [
        "/data/base",
        "./base",
        "../base",
        "a/b/c",
        "C:\\base",
        "https://x/y",
        "",
        "a b",
        "~/base",
        "é",
    ],
)
def test_a_place_on_a_disk_is_no_hub_name(label: str) -> None:
    assert not is_hub_name(label)


def test_the_label_comes_from_the_manifest_then_from_peft(lora: Path) -> None:
    config = json.loads((lora / "adapter_config.json").read_text())
    assert find_base_label(lora) == config["base_model_name_or_path"]
    (lora / "expert.json").write_text(json.dumps({"base": {"name": "acme/base"}}))
    assert find_base_label(lora) == "acme/base"
    (lora / "expert.json").unlink()
    (lora / "adapter_config.json").unlink()
    assert find_base_label(lora) is None


def test_a_configuration_that_cannot_be_read_names_no_base(lora: Path) -> None:
    (lora / "adapter_config.json").write_text("{")
    assert find_base_label(lora) is None
    with pytest.raises(InvalidPackageError, match=r"adapter_config\.json"):
        read_adapter(lora, weights="adapter_model.safetensors", config="adapter_config.json")


@pytest.mark.parametrize("name", ["expert.json", "adapter_config.json"])
def test_a_file_of_any_size_is_read_up_to_its_bound(name: str, lora: Path) -> None:
    (lora / name).unlink(missing_ok=True)
    with (lora / name).open("wb") as stream:
        stream.truncate(1 << 40)  # a sparse file: it takes no room
    if name == "expert.json":
        with pytest.raises(InvalidPackageError, match="at most 1048576 allowed"):
            find_base_label(lora)
    with pytest.raises(InvalidPackageError, match="at most 1048576 allowed"):
        read_adapter(lora, weights="adapter_model.safetensors", config=name)


def test_what_the_publisher_states_of_the_base_stays(lora: Path, facts: BaseFacts) -> None:
    stated = {"name": "acme/base", "arch": DIGEST, "tokenizer": DIGEST}
    assert completed(lora, {"base": stated}, facts)["base"] == stated
    assert completed(lora, {"base": stated}, None)["base"] == stated


def test_what_is_missing_of_the_base_is_filled_in(lora: Path, facts: BaseFacts) -> None:
    base = completed(lora, {"base": {"name": "acme/base", "accepts": [DIGEST]}}, facts)["base"]
    assert (base["name"], base["accepts"]) == ("acme/base", [DIGEST])
    assert base["arch"] == str(facts.identity.arch)


def test_the_tokenizer_is_stated_by_its_canonical_form(lora: Path, facts: BaseFacts) -> None:
    base = completed(lora, {}, facts)["base"]
    assert base["tokenizer"] == str(facts.identity.canonical_tokenizer)
    assert base["tokenizer_version"] == 2


def test_a_publisher_may_ask_for_the_digest_of_the_file(lora: Path, facts: BaseFacts) -> None:
    base = completed(lora, {"base": {"tokenizer_version": 1}}, facts)["base"]
    assert base["tokenizer"] == str(facts.identity.tokenizer)
    assert base["tokenizer_version"] == 1


def test_the_version_of_a_tokenizer_that_the_publisher_states_is_not_touched(
    lora: Path, facts: BaseFacts
) -> None:
    base = completed(lora, {"base": {"name": "acme/base", "tokenizer": DIGEST}}, facts)["base"]
    assert base["tokenizer"] == DIGEST
    assert "tokenizer_version" not in base


@pytest.mark.parametrize("entries", [[None], [5], [{}], ["x"], [{"path": 1, "config": 2}]])
def test_entries_that_are_none_stay_for_the_schema_to_refuse(
    lora: Path, facts: BaseFacts, entries: Any
) -> None:
    assert completed(lora, {"adapters": entries}, facts)["adapters"] == entries


@pytest.mark.parametrize("entries", [{"path": "x"}, "adapter_model.safetensors", 1, False])
def test_adapters_that_are_no_list_stay_for_the_schema_to_refuse(
    lora: Path, facts: BaseFacts, entries: Any
) -> None:
    assert completed(lora, {"adapters": entries}, facts)["adapters"] == entries


def test_the_base_of_several_adapters_is_what_the_first_says(lora: Path) -> None:
    (lora / "adapter_config.json").rename(lora / "1.json")
    entry = {"path": "adapter_model.safetensors", "config": "1.json"}
    for entries, known in (([entry], True), ([{**entry, "config": "../x"}], False), ([], False)):
        (lora / "expert.json").write_text(json.dumps({"adapters": entries}))
        assert (find_base_label(lora) is not None) == known


def test_adapters_that_are_stated_stay(lora: Path, facts: BaseFacts) -> None:
    assert completed(lora, {"adapters": []}, facts)["adapters"] == []


@pytest.mark.parametrize(
    "base", [None, {}, "text", {"name": "x"}, {"name": "x", "arch": DIGEST, "tokenizer": None}]
)
def test_a_base_without_its_digests_is_a_problem(base: Any) -> None:
    (problem,) = find_base_problems({"base": base})
    assert "--base DIR" in problem


def test_a_manifest_that_grew_beyond_what_is_read_is_refused() -> None:
    rows: dict[str, Any] = {"training": {"losses": [[number] for number in range(100_000)]}}
    assert len(json.dumps(rows, separators=(",", ":"))) < MAX_MANIFEST_BYTES
    with pytest.raises(InvalidPackageError, match="bytes when it is complete, at most 1048576"):
        encode_manifest(rows)


def test_a_manifest_is_written_as_people_read_it() -> None:
    assert encode_manifest({"a": "é"}) == '{\n  "a": "é"\n}\n'.encode()
