"""Every example below ``schemas/examples`` is what its folder says it is."""

import json
from pathlib import Path

import pytest
from jsonschema_rs import Draft202012Validator, meta

from expertctl.errors import InvalidPackageError
from expertctl.package.adapter import parse_adapter_config
from expertctl.registry.index_document import IndexDocument
from expertctl.schema.manifest import parse_manifest
from expertctl.schema.validation import find_problems

SCHEMAS = Path(__file__).parents[2] / "schemas"
NAMES = sorted(path.name.removesuffix(".schema.json") for path in SCHEMAS.glob("*.schema.json"))
VALID, INVALID = (
    sorted((SCHEMAS / "examples").glob(f"*/{kind}/*.json")) for kind in ("valid", "invalid")
)
READERS = {
    "manifest": parse_manifest,
    "adapter-config-lora": parse_adapter_config,
    "adapter-config-ia3": parse_adapter_config,
    "adapter-config-prompt": parse_adapter_config,
    "index": IndexDocument.parse,
}


def example_name(path: Path) -> str:
    return f"{path.parents[1].name}/{path.stem}"


@pytest.mark.parametrize("name", NAMES)
def test_a_schema_is_a_schema_with_examples_of_both_kinds(name: str) -> None:
    schema = json.loads((SCHEMAS / f"{name}.schema.json").read_text(encoding="utf-8"))
    meta.validate(schema)
    Draft202012Validator(schema)
    assert [path for path in VALID if path.parents[1].name == name]
    assert [path for path in INVALID if path.parents[1].name == name]


def test_every_example_belongs_to_a_schema() -> None:
    assert {path.parents[1].name for path in (*VALID, *INVALID)} <= set(NAMES)


@pytest.mark.parametrize("path", VALID, ids=example_name)
def test_a_valid_example_is_valid(path: Path) -> None:
    schema = path.parents[1].name
    assert find_problems(json.loads(path.read_text(encoding="utf-8")), schema) == []
    if schema in READERS:
        assert READERS[schema](path.read_bytes(), what=path.name)


@pytest.mark.parametrize("path", INVALID, ids=example_name)
def test_an_invalid_example_is_invalid(path: Path) -> None:
    schema = path.parents[1].name
    assert find_problems(json.loads(path.read_text(encoding="utf-8")), schema) != []
    if schema in READERS:
        with pytest.raises(InvalidPackageError):
            READERS[schema](path.read_bytes(), what=path.name)
