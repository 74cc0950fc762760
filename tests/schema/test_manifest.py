"""The manifest: every key of the published example, and refusals that name every problem."""

import json
from pathlib import Path
from typing import Any

import pytest

from expertctl.errors import InvalidPackageError
from expertctl.schema.manifest import parse_manifest
from expertctl.schema.strict_json import JsonObject
from expertctl.schema.validation import find_schema

EXAMPLES = Path(__file__).parents[2] / "schemas" / "examples" / "manifest"


@pytest.fixture
def document() -> JsonObject:
    example: JsonObject = json.loads((EXAMPLES / "valid" / "every-key.json").read_text())
    return example


def refused(document: JsonObject) -> str:
    with pytest.raises(InvalidPackageError) as caught:
        parse_manifest(json.dumps(document).encode())
    return caught.value.message


def test_every_key_of_the_example_is_read(document: JsonObject) -> None:
    manifest = parse_manifest(json.dumps(document).encode())
    assert manifest.ref == "acme/sql-gen@1.2.0"
    assert manifest.base.revision == "c1899de289a04d12100db370d81485cdf75e47ca"
    assert (manifest.adapters[0].rank, manifest.adapters[0].tensors) == (16, 392)
    assert manifest.routing.exclude_keywords == ("mongodb",)
    assert manifest.composition.requires == ("acme/english@^1",)
    assert (manifest.decoding.temperature, manifest.decoding.stop) == (0.2, (";",))
    assert manifest.evaluation[0].expert == 0.91
    assert manifest.limitations[0].workaround == "state the depth"


def test_all_problems_are_reported_at_once(document: JsonObject) -> None:
    document["name"] = "Bad Name"
    document["description"] = ""
    document["surprise"] = 1
    message = refused(document)
    assert message.startswith("expert.json: 3 problems")
    assert "name:" in message
    assert "description:" in message
    assert "surprise" in message


def test_keys_that_begin_with_x_are_allowed_at_every_level(document: JsonObject) -> None:
    document["x-team"] = {"any": "thing"}
    routing = document["routing"]
    assert isinstance(routing, dict)
    routing["x-note"] = 1
    assert parse_manifest(json.dumps(document).encode()).name == "acme/sql-gen"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("schema", 2),
        ("schema", True),
        ("version", "1.2"),
        ("version", "1.2.0+build"),
        ("version", "1.2.0-"),
        ("version", "1.2.0-01"),
        ("name", "acme/../x"),
        ("name", "sql"),
        ("name", f"{'a' * 65}/b"),
        ("name", f"a/{'b' * 65}"),
        ("homepage", "javascript:alert(1)"),
        ("adapters", []),
        ("base", {"name": "x"}),
        ("composition", {"max_chain": 11}),
        ("composition", {"requires": ["acme/english@latest"]}),
        ("decoding", {"temperature": 3}),
        ("decoding", {"grammar": "../../etc/passwd"}),
        ("routing", {"priority": 2}),
    ],
)
def test_a_value_outside_the_format_is_refused(
    document: JsonObject, key: str, value: object
) -> None:
    document[key] = value  # type: ignore[assignment]  # hostile on purpose
    assert key in refused(document)


@pytest.mark.parametrize("control", ["\n", "\r", "\x1b", "\x85", "\u2028"])
@pytest.mark.parametrize("place", ["license", "base/name", "base/revision", "routing/task"])
def test_a_label_that_messages_show_is_one_line(
    document: JsonObject, place: str, control: str
) -> None:
    *outer, last = place.split("/")
    table: Any = document[outer[0]] if outer else document
    table[last] = f"x{control}hint: run this"
    assert f"{place}: " in refused(document)


@pytest.mark.parametrize(
    "path",
    [
        "../x.safetensors", "/abs", "a/b", "C:\\x", "..", ".hidden", "a\x00b", "con:", "a b", "é",
        "x" * 101, "",
    ],
)  # fmt: skip
def test_a_file_name_that_could_leave_the_package_is_refused(
    document: JsonObject, path: str
) -> None:
    document["adapters"][0]["path"] = path  # type: ignore[index,call-overload]  # known shape
    assert "adapters/0/path" in refused(document)


def test_two_adapters_may_not_share_a_file(document: JsonObject) -> None:
    document["adapters"] *= 2  # type: ignore[operator]  # known shape
    assert "two adapters use 'adapter_config.json'" in refused(document)


def test_a_lora_without_a_rank_is_refused(document: JsonObject) -> None:
    del document["adapters"][0]["rank"]  # type: ignore[index,union-attr,call-overload]  # known shape
    assert '"rank" is a required property' in refused(document)


SIZES: dict[str, dict[str, int]] = {
    "lora": {"rank": 8},
    "dora": {"rank": 4},
    "ia3": {},
    "soft_prompt": {"tokens": 20},
}


def entry(number: int, kind: str, **changes: Any) -> Any:
    """An adapter's entry, right unless changed."""
    names = {"path": f"{number}.safetensors", "config": f"{number}.json"}
    return {"kind": kind, **names, "dtype": "float32", "tensors": 1, **SIZES[kind], **changes}


@pytest.mark.parametrize(
    ("kinds", "said", "tokens"),
    [
        (["lora"], "lora", 0),
        (["soft_prompt"], "soft_prompt", 20),
        (["lora", "soft_prompt"], "lora+soft_prompt", 20),
        (["ia3", "lora", "ia3", "dora"], "ia3+lora+dora", 0),
        (["soft_prompt", "lora", "soft_prompt"], "soft_prompt+lora", 40),
    ],
)
def test_a_package_is_of_the_kinds_of_its_adapters(
    document: JsonObject, kinds: list[str], said: str, tokens: int
) -> None:
    document["adapters"] = [entry(number, kind) for number, kind in enumerate(kinds)]
    manifest = parse_manifest(json.dumps(document).encode())
    assert (manifest.kind, manifest.virtual_tokens) == (said, tokens)


@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("field", ["rank", "tokens"])
def test_each_kind_states_its_size_and_no_other(
    document: JsonObject, kind: str, field: str
) -> None:
    wanted = field in SIZES[kind]
    document["adapters"] = [entry(0, kind, **{field: None if wanted else 4})]
    assert f"adapters/0/{field}" in refused(document)
    document["adapters"] = [entry(0, kind, **{field: 0})]
    assert f"adapters/0/{field}" in refused(document)
    if not wanted:
        document["adapters"] = [entry(0, kind, **{field: None})]
        assert parse_manifest(json.dumps(document).encode()).kind == kind


@pytest.mark.parametrize("tokens", [16385, 2.5, "20", True])
def test_a_number_of_virtual_tokens_is_bounded(document: JsonObject, tokens: Any) -> None:
    document["adapters"] = [entry(0, "soft_prompt", tokens=tokens)]
    assert "adapters/0/tokens" in refused(document)


def test_more_than_eight_adapters_are_refused(document: JsonObject) -> None:
    document["adapters"] = [entry(number, "ia3") for number in range(9)]
    assert "adapters:" in refused(document)


def test_no_part_of_a_hostile_document_makes_a_huge_message(document: JsonObject) -> None:
    document["evaluation"] = [{"k" * 100_000: 0}]
    document["k" * 100_000] = 0
    document["description"] = "d" * 100_000
    assert len(refused(document)) < 10_000


def test_the_schema_is_found_in_the_checkout() -> None:
    assert json.loads(find_schema("manifest").read_text())["title"] == "expert.json"
