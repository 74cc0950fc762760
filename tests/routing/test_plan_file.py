import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertctl.errors import InvalidPackageError, NotFoundError
from expertctl.reference import Digest
from expertctl.routing.plan import (
    MAX_PLAN_BYTES,
    Plan,
    PlannedExpert,
    SamplingParams,
    parse_plan,
    read_plan,
)
from expertctl.schema.validation import find_problems

EXAMPLES = Path(__file__).parents[2] / "schemas" / "examples" / "route"
ROUTE = EXAMPLES / "valid" / "one-expert.json"


def document() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(ROUTE.read_text())
    return loaded


def test_a_route_document_is_read() -> None:
    assert read_plan(ROUTE).plan == Plan(
        identity=Digest("d" * 64),
        seed=7,
        base="acme/tiny",
        experts=(
            PlannedExpert(
                ref="acme/sql@1.2.0",
                content_digest=Digest("1" * 64),
                package_digest=Digest("2" * 64),
                kind="lora",
                score=0.97,
                weight=1.0,
                reason="best of 2, score 0.97: share 0.94, cosine 0.93 to its example "
                "'List the users over 30'",
            ),
        ),
        params=SamplingParams(temperature=0.2, repetition_penalty=1.0, stop=(";",)),
    )


def test_a_run_document_is_read_as_its_plan_and_the_rest_is_ignored() -> None:
    run = {"job_id": "x", "text": "SELECT", "plan": document()["plan"], "seed": 99, "tokens": {}}
    assert parse_plan(json.dumps(run).encode()) == read_plan(ROUTE)


def test_the_threads_of_the_run_that_saved_it_are_read() -> None:
    assert read_plan(ROUTE).threads is None
    assert parse_plan(json.dumps({**document(), "threads": 3}).encode()).threads == 3
    for threads in (0, -1, 1.0, True, "2", [2], 1 << 20):
        with pytest.raises(InvalidPackageError, match="not a number of threads"):
            parse_plan(json.dumps({**document(), "threads": threads}).encode())


@pytest.mark.parametrize("path", sorted((EXAMPLES / "valid").iterdir()), ids=lambda p: p.name)
def test_valid_examples_satisfy_the_schema(path: Path) -> None:
    assert find_problems(json.loads(path.read_text()), "route") == []
    read_plan(path)


@pytest.mark.parametrize("path", sorted((EXAMPLES / "invalid").iterdir()), ids=lambda p: p.name)
def test_invalid_examples_do_not(path: Path) -> None:
    assert find_problems(json.loads(path.read_text()), "route") != []


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("identity",), "sha256:" + "D" * 64),
        (("identity",), "md5:" + "0" * 32),
        (("seed",), -1),
        (("seed",), 1.5),
        (("seed",), 7.0),
        (("params", "top_k"), 40.0),
        (("seed",), "0"),
        (("base",), ""),
        (("extra",), 1),
        (("experts",), {}),
        (("experts", 0, "ref"), "acme/sql"),
        (("experts", 0, "ref"), "../../etc/passwd@1.0.0"),
        (("experts", 0, "content_digest"), "sha256:../../x"),
        (("experts", 0, "kind"), "pickle"),
        (("experts", 0, "kind"), "lora+pickle"),
        (("experts", 0, "kind"), "lora+"),
        (("experts", 0, "kind"), "lora+ia3\n"),
        (("experts", 0, "kind"), "lora" + "+lora" * 4),
        (("experts", 0, "kind"), None),
        (("experts", 0, "weight"), 1e300),
        (("experts", 0, "weight"), None),
        (("experts", 0, "path"), "/tmp/x"),
        (("experts", 0, "reason"), "x" * 3000),
        (("params", "temperature"), 2.1),
        (("params", "top_p"), 0),
        (("params", "max_tokens"), 0),
        (("params", "max_tokens"), 10**9),
        (("params", "stop"), [""]),
        (("params", "stop"), ["x"] * 17),
        (("params", "grammar"), "x"),
    ],
    ids=str,
)
def test_a_plan_with_a_wrong_value_is_refused(where: tuple[str | int, ...], value: object) -> None:
    hostile = document()
    place: Any = hostile["plan"]
    for step in where[:-1]:
        place = place[step]
    place[where[-1]] = value
    with pytest.raises(InvalidPackageError, match=r"plan: "):
        parse_plan(json.dumps(hostile).encode())


def test_all_problems_are_told_at_once() -> None:
    hostile = document()
    hostile["plan"]["seed"], hostile["plan"]["base"] = -1, ""
    with pytest.raises(InvalidPackageError) as caught:
        parse_plan(json.dumps(hostile).encode(), what="saved.json")
    assert len(caught.value.problems) == 2
    assert "saved.json: 2 problems" in caught.value.message


def test_an_expert_planned_twice_is_refused() -> None:
    hostile = document()
    hostile["plan"]["experts"] *= 2
    with pytest.raises(InvalidPackageError, match=r"acme/sql@1\.2\.0 is planned twice"):
        parse_plan(json.dumps(hostile).encode())


def test_more_than_ten_experts_are_refused() -> None:
    hostile = document()
    expert = hostile["plan"]["experts"][0]
    digests = [f"sha256:{i:064x}" for i in range(11)]
    hostile["plan"]["experts"] = [{**expert, "content_digest": d} for d in digests]
    with pytest.raises(InvalidPackageError, match="experts"):
        parse_plan(json.dumps(hostile).encode())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b'{"plan": {}}',
        b'{"plan": null, "plan": null}',
        b"\xef\xbb\xbf{}",
        b"\xff",
        b'{"plan": NaN}',
        b'{"plan":' + b"[" * 5000,
        b" " * (MAX_PLAN_BYTES + 1),
    ],
    ids=lambda data: repr(data[:20]),
)
def test_what_is_no_plan_document_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidPackageError):
        parse_plan(data)


def test_a_document_without_a_plan_says_how_to_save_one() -> None:
    with pytest.raises(InvalidPackageError) as caught:
        parse_plan(b'{"error": {}}')
    assert "route --json" in caught.value.hint


def test_a_file_that_cannot_be_read_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no such file"):
        read_plan(tmp_path / "absent.json")
    with pytest.raises(NotFoundError, match="plan "):
        read_plan(tmp_path / ("x" * 300))


def test_a_folder_is_no_plan(tmp_path: Path) -> None:
    with pytest.raises(InvalidPackageError, match="not a regular file"):
        read_plan(tmp_path)


values = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(max_size=5) | st.integers(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(["identity", "seed", "base", "experts", "params"]), values)
def test_no_value_makes_the_reader_fail_otherwise(key: str, value: object) -> None:
    hostile = document()
    hostile["plan"][key] = value
    with suppress(InvalidPackageError):
        read = parse_plan(json.dumps(hostile).encode()).plan.to_json()
        assert read[key] == hostile["plan"][key]
