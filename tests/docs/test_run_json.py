"""The reference of ``run --json`` names every key of its schema, and no other."""

import json
import re
from pathlib import Path
from typing import Any

from expertctl.schema.validation import find_schema

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "run-json.md"
DEEP = {
    "timings_ms",
    "numerics",
    "tokens",
    "memory",
    "cache",
    "moe",
    "bytes_read",
    "trace",
    "plan",
}


def keys_of(schema: dict[str, Any]) -> set[str]:
    keys = set()
    for name, part in schema["properties"].items():
        inner = part.get("properties", {}) if name in DEEP else {}
        keys |= {f"{name}.{key}" for key in inner} or {name}
    return keys | {"plan"}


def test_every_key_has_a_row_and_every_row_a_key() -> None:
    schema = json.loads(find_schema("run").read_text(encoding="utf-8"))
    rows = re.findall(r"^\| `([a-z_.]+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert set(rows) == keys_of(schema)
    assert len(rows) == len(set(rows))


def test_the_rows_of_a_plan_name_every_key_inside() -> None:
    schema = json.loads(find_schema("run").read_text(encoding="utf-8"))
    plan, page = schema["properties"]["plan"]["properties"], PAGE.read_text(encoding="utf-8")
    inner = {*plan["experts"]["items"]["properties"], *plan["params"]["properties"]}
    assert [key for key in inner if f"`{key}`" not in page] == []
