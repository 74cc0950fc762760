"""Names of models of a hub, and the choice among the files of a repository."""

import json
from typing import Any

import pytest

from expertctl.errors import ExpertError, IncompatibleError, RegistryError, UsageError
from expertctl.install.hub_files import (
    SHORT_NAMES,
    HubListing,
    HubName,
    choose_files,
    parse_hub_name,
    parse_listing,
    search_short_names,
)
from tests.install.hub_server import COMMIT, LATER_COMMIT, HubRepository

NAME = HubName("acme/tiny")
BASE = {"config.json": b"{}", "tokenizer.json": b"{}", "tokenizer_config.json": b"{}"}
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARDS = [f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3)]
FROM_ZERO = [f"model-{number:05}-of-00002.safetensors" for number in (0, 1, 2)]
"""As gpt-oss is published."""


@pytest.mark.parametrize(
    ("text", "repository", "revision"),
    [
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B", None),
        ("Qwen/Qwen3-0.6B@main", "Qwen/Qwen3-0.6B", "main"),
        (f"a/b@{COMMIT}", "a/b", COMMIT),
        ("a/b@refs/pr/1", "a/b", "refs/pr/1"),
        ("hf:a/b@v1.0", "a/b", "v1.0"),
        ("hf:gpt2", "gpt2", None),
        ("qwen3:0.6b", "Qwen/Qwen3-0.6B", None),
        ("qwen3", "Qwen/Qwen3-0.6B", None),
        ("hf:smollm2@main", "HuggingFaceTB/SmolLM2-135M-Instruct", "main"),
    ],
)
def test_a_model_is_named_with_its_revision(
    text: str, repository: str, revision: str | None
) -> None:
    assert parse_hub_name(text) == HubName(repository, revision)


@pytest.mark.parametrize(
    "text",
    [
        *("", "model", "./a/b", "../a", "/a/b", "~/a", "a/b/c", "a//b", "a/", "/b", "a\\b", ".a/b"),
        *(
            "a--b/c",
            "a/b..c",
            "a/b.git",
            "a/b.",
            "a/b-",
            "a b/c",
            "ä/b",
            "a/b\n",
            "C:/x",
            "qwen3:9b",
        ),
    ],
)
def test_anything_else_is_a_path(text: str) -> None:
    assert parse_hub_name(text) is None
    if text != "model":
        with pytest.raises(UsageError, match="does not name a model"):
            parse_hub_name(f"hf:{text}")


@pytest.mark.parametrize(
    "revision", ["", "..", "a/../b", "/a", "a/", "a//b", ".a", "a b", "a\0", "a\n", "x" * 201]
)
def test_a_revision_is_a_safe_path(revision: str) -> None:
    with pytest.raises(UsageError, match="cannot be a revision"):
        parse_hub_name(f"a/b@{revision}")


def test_every_short_name_stands_for_its_row() -> None:
    for row in SHORT_NAMES:
        assert parse_hub_name(row.name) == HubName(row.repository)
        assert row in search_short_names(row.repository.upper())
    families = [row.name.partition(":")[0] for row in SHORT_NAMES]
    assert families == sorted(families, key=families.index), "each family is together"


def list_repository(*names: str) -> HubListing:
    files = {**BASE, **dict.fromkeys(names, b"x")}
    return parse_listing(json.dumps(HubRepository(files).listing()).encode(), NAME)


def choose(*names: str, pattern: str | None = None) -> list[str]:
    return [file.name for file in choose_files(list_repository(*names), pattern)]


@pytest.mark.parametrize(
    ("names", "pattern", "weights"),
    [
        ([WHOLE, "consolidated.safetensors", "x.gguf", "x.bin", "x.py"], None, [WHOLE]),
        ([*reversed(SHARDS), INDEX], None, [INDEX, *SHARDS]),
        ([*SHARDS, INDEX, WHOLE], None, [INDEX, *SHARDS]),
        ([*SHARDS, INDEX, WHOLE], WHOLE, [WHOLE]),
        ([*FROM_ZERO, INDEX, "original/model.safetensors"], None, [INDEX, *FROM_ZERO]),
        ([*SHARDS, WHOLE], None, [WHOLE]),
        ([WHOLE, INDEX], None, [WHOLE]),
        (["onnx/model.safetensors", WHOLE], None, [WHOLE]),
    ],
)
def test_the_weights_are_chosen_by_rule(
    names: list[str], pattern: str | None, weights: list[str]
) -> None:
    assert choose(*names, pattern=pattern) == [*BASE, *weights]


def test_a_gguf_file_comes_alone() -> None:
    assert choose("a-Q4_K_M.gguf", "a-Q8_0.gguf", pattern="*Q8*") == ["a-Q8_0.gguf"]
    assert choose("q4/a.gguf", "q8/a.gguf", pattern="q4/*") == ["q4/a.gguf"]


@pytest.mark.parametrize(
    ("names", "error", "words"),
    [
        ([], IncompatibleError, "has no weights"),
        (["pytorch_model.bin"], IncompatibleError, "only as pickles"),
        ([*SHARDS[:2], INDEX], IncompatibleError, "lacks some of its weight files"),
        ([*SHARDS[1:], INDEX], IncompatibleError, "lacks some of its weight files"),
        ([*SHARDS[::2], INDEX], IncompatibleError, "lacks some of its weight files"),
        ([*FROM_ZERO[:2], INDEX], IncompatibleError, "lacks some of its weight files"),
        ([FROM_ZERO[0], *SHARDS, INDEX], IncompatibleError, "lacks some of its weight files"),
        (["a.gguf", "x.bin"], UsageError, "has only GGUF files: a.gguf"),
    ],
)
def test_what_cannot_be_chosen_is_refused(
    names: list[str], error: type[ExpertError], words: str
) -> None:
    with pytest.raises(error, match=words) as caught:
        choose(*names)
    assert caught.value.hint


@pytest.mark.parametrize(
    "document", [None, [], {}, {"sha": 1}, {"sha": COMMIT, "siblings": [{}]}, {"sha": "c" * 39}]
)
def test_an_answer_of_another_kind_is_refused(document: Any) -> None:
    with pytest.raises(RegistryError):
        parse_listing(json.dumps(document).encode(), NAME)


@pytest.mark.parametrize("wanted", [COMMIT, COMMIT[:8]])
def test_a_hub_may_not_answer_with_another_commit(wanted: str) -> None:
    name = HubName("acme/tiny", wanted)
    document = HubRepository(dict(BASE)).listing()
    assert parse_listing(json.dumps(document).encode(), name).commit == COMMIT
    with pytest.raises(RegistryError, match="answers with commit 9f0c2a77b7b2"):
        parse_listing(json.dumps(document | {"sha": LATER_COMMIT}).encode(), name)


def test_a_date_is_no_commit() -> None:
    document = HubRepository(dict(BASE)).listing()
    assert parse_listing(json.dumps(document).encode(), HubName("acme/tiny", "20260101"))


@pytest.mark.parametrize(
    ("names", "pattern"),
    [
        ([WHOLE, "model.fp16.safetensors"], "*fp16*"),
        ([WHOLE, f"onnx/{WHOLE}"], f"onnx/{WHOLE}"),
        ([WHOLE, f"onnx/{WHOLE}"], "*.safetensors"),
        ([*SHARDS, INDEX, WHOLE], "*.safetensors"),
        ([*SHARDS, INDEX], SHARDS[0]),
        ([*SHARDS, WHOLE], "model-*"),
    ],
)
def test_a_pattern_for_safetensors_names_all_weights_of_the_base(
    names: list[str], pattern: str
) -> None:
    with pytest.raises(UsageError, match="--file") as caught:
        choose(*names, pattern=pattern)
    assert caught.value.hint


def test_a_pattern_may_name_all_shards() -> None:
    assert choose(*SHARDS, INDEX, WHOLE, pattern="model-*") == [*BASE, INDEX, *SHARDS]
    assert choose(WHOLE, "a.gguf", pattern="*.safetensors") == [*BASE, WHOLE]


@pytest.mark.parametrize("pattern", ["*Q8_0*", "*-00001-of-*"])
def test_a_gguf_file_in_parts_is_refused_by_its_name(pattern: str) -> None:
    parts = [f"a-Q8_0-{number:05}-of-00002.gguf" for number in (1, 2)]
    with pytest.raises(IncompatibleError, match="in parts") as caught:
        choose(*parts, pattern=pattern)
    assert "llama-gguf-split --merge" in caught.value.hint
    assert choose("a-00001-of-00001.gguf", pattern="*") == ["a-00001-of-00001.gguf"]


@pytest.mark.parametrize(
    "name",
    ["../../x", "a/../../x", "/etc/x", "..\\x", "C:x", "a\x1b[2J", "a" * 251, "a//b", "./a", ""],
)
def test_a_name_that_may_not_be_written_is_left_out(name: str) -> None:
    assert list_repository(WHOLE, name).files == list_repository(WHOLE).files
