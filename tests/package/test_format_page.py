"""``docs/reference/format.md`` says what the code does."""

import json
from dataclasses import fields
from pathlib import Path

import pytest

from expertctl.package import layout
from expertctl.package.adapter import KIND_NAMES, MAX_CONFIG_BYTES
from expertctl.package.adapter_weights import EXTREME_VALUE
from expertctl.package.architectures import ExpertsConfig
from expertctl.package.archive import MAX_KEPT_BYTES, MAX_SMALL_BYTES
from expertctl.package.attention_config import Llama3Scaling, RopeConfig, YarnScaling
from expertctl.package.frame import (
    MANY_BLOCKS,
    MAX_RATIO,
    MAX_WINDOW,
    RATIO_FREE_BYTES,
    SMALL_BLOCK,
)
from expertctl.package.layout import MAX_PACKAGES, MAX_SET_BYTES
from expertctl.package.model_config import ModelConfig
from expertctl.package.tensor_file import ADAPTER_LIMITS
from expertctl.schema.manifest import MAX_MANIFEST_BYTES

TYPES = ("LORA", "IA3", "PROMPT_TUNING", "P_TUNING")
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "format.md").read_text(encoding="utf-8")


def schema(name: str) -> dict[str, dict[str, object]]:
    path = ROOT / "schemas" / f"{name}.schema.json"
    properties: dict[str, dict[str, object]] = json.loads(path.read_text())["properties"]
    return properties


def test_every_limit_is_on_the_page() -> None:
    limits = {
        "files": f"{layout.MAX_FILES}",
        "one file": f"{layout.MAX_FILE_BYTES} bytes",
        "all files": f"{layout.MAX_TOTAL_BYTES} bytes",
        "OCI manifest": f"{layout.MAX_MANIFEST_BYTES} bytes",
        "safetensors header of an adapter": (
            f"{ADAPTER_LIMITS.header_bytes} bytes, {ADAPTER_LIMITS.tensors} tensors"
        ),
        "content beyond 64 MiB, as a multiple of the file size": f"{MAX_RATIO} times",
        "blocks of the frame": (
            f"{MANY_BLOCKS}, and one more for each {SMALL_BLOCK} bytes of content"
        ),
    }
    assert f"holds 1 to {MAX_PACKAGES} packages and at most {MAX_SET_BYTES} bytes" in PAGE
    assert f"files of up to {MAX_SMALL_BYTES} bytes" in PAGE
    assert f"most {MAX_KEPT_BYTES} bytes, counted for every file" in PAGE
    assert [row for row in limits.items() if f"| {row[0]} | {row[1]} |" not in PAGE] == []
    assert MAX_MANIFEST_BYTES == MAX_CONFIG_BYTES == 1048576
    assert (MAX_WINDOW, RATIO_FREE_BYTES) == (8 << 20, 64 << 20)


def test_every_media_type_and_name_is_on_the_page() -> None:
    for text in (
        layout.ARTIFACT_TYPE,
        layout.CONFIG_TYPE,
        layout.WEIGHT_TYPE,
        layout.DOC_TYPE,
        layout.SETTINGS_TYPE,
        layout.FILEPATH,
    ):
        assert f"`{text}`" in PAGE


def test_every_key_of_the_manifest_is_on_the_page() -> None:
    for key, value in schema("manifest").items():
        assert f"`{key}`" in PAGE
        items = value.get("items", value)
        for inner in items.get("properties", {}) if isinstance(items, dict) else ():
            assert f"`{inner}`" in PAGE


@pytest.mark.parametrize("name", ["lora", "ia3", "prompt"])
def test_every_field_that_is_refused_or_supported_is_on_the_page(name: str) -> None:
    harmless = {
        "peft_version", "inference_mode", "lora_dropout", "qalora_group_size", "eva_config",
        "revision", "init_ia3_weights",
    }  # fmt: skip
    fields_of = set(schema(f"adapter-config-{name}"))
    assert fields_of - harmless <= {field for field in fields_of if f"`{field}`" in PAGE}


def test_every_type_and_kind_of_adapter_is_on_the_page() -> None:
    assert [name for name in (*TYPES, *KIND_NAMES) if f"`{name}`" not in PAGE] == []
    assert f"a number above {EXTREME_VALUE:g}" in PAGE.replace("\n", " ")


def test_every_field_that_a_decoder_reads_is_on_the_page() -> None:
    classes = (ModelConfig, ExpertsConfig, RopeConfig, Llama3Scaling, YarnScaling)
    named = [field.name for kind in classes for field in fields(kind)]
    assert [name for name in named if f"`{name}`" not in PAGE] == []
