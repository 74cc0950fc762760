"""The reference of the index document shows one, and names every key of its schema."""

import json
import re
from pathlib import Path
from typing import Any

from expertctl.registry.index_document import INDEX_PAYLOAD_TYPE, IndexDocument
from expertctl.schema.strict_json import encode_canonical
from expertctl.schema.validation import find_schema
from expertctl.trust.dsse import KEY_STATEMENT_TYPE as STATEMENT_TYPE

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "index-document.md"
TEXT = PAGE.read_text(encoding="utf-8")
NAMED = {"base", "revoked"}
"""Objects whose keys stand in the row of the object itself."""


def keys_of(schema: dict[str, Any], definitions: dict[str, Any], prefix: str = "") -> set[str]:
    """The path of every key, as the rows of the page write it."""
    keys = set()
    for name, part in schema["properties"].items():
        keys.add(f"{prefix}{name}")
        items = part.get("items", {})
        inner = definitions.get(str(items.get("$ref")).rpartition("/")[2], items)
        if "properties" in inner and name not in NAMED:
            keys |= keys_of(inner, definitions, f"{prefix}{name}[].")
    return keys


def test_every_key_has_a_row_and_every_row_a_key() -> None:
    schema = json.loads(find_schema("index").read_text(encoding="utf-8"))
    section = TEXT.partition("## The document")[2].partition("```json")[0]
    cells = re.findall(r"^\| (`[^|]+`) \|", section, re.MULTILINE)
    rows = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    assert len(rows) == len(set(rows))
    assert set(rows) == keys_of(schema, schema["$defs"])


def test_the_keys_inside_a_base_are_named() -> None:
    schema = json.loads(find_schema("index").read_text(encoding="utf-8"))
    base = schema["$defs"]["release"]["properties"]["base"]["properties"]
    [row] = re.findall(r"^\| `releases\[\]\.base` \|.*$", TEXT, re.MULTILINE)
    assert [key for key in base if f"`{key}`" not in row] == []


def test_the_example_is_an_index_document() -> None:
    [example] = re.findall(r"```json\n(.*?)```", TEXT, re.DOTALL)
    data = encode_canonical(json.loads(example))
    assert IndexDocument.parse(data, what="the example").encode() == data


def test_the_types_of_the_envelopes_are_told() -> None:
    assert INDEX_PAYLOAD_TYPE in TEXT
    assert STATEMENT_TYPE in TEXT
