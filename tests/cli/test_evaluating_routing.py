"""``eval --routing`` from the outside; its figures are counted in tests/routing."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from expertctl.schema.validation import find_problems
from tests.cli.command_runner import CommandRunner, expertctl
from tests.store.fixtures import HomeFixture, PackageFactory, fast, package_factory, user_home

__all__ = ["expertctl", "fast", "package_factory", "user_home"]

pytestmark = pytest.mark.all

SORT, DAYS, HELLO = "Sort these numbers: 3, 1, 2", "Which day of the week is it?", "Hello there"


@pytest.fixture
def data(
    user_home: HomeFixture,
    package_factory: PackageFactory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """Three prompts of two experts and none, the last one labelled wrong."""
    monkeypatch.setenv("EXPERT_ENCODER", "lexical")
    user_home.bases.add(package_factory.base_dir)
    user_home.install(
        package_factory.package(
            "acme/sorting", description="Sorts numbers.", routing={"examples": [SORT]}
        ),
        package_factory.package(
            "acme/dates", description="Names days.", routing={"examples": [DAYS]}
        ),
    )
    rows = [(SORT, "acme/sorting"), (DAYS, "acme/dates"), (HELLO, None), (DAYS + " ", None)]
    return written(tmp_path, *rows)


def written(folder: Path, *rows: tuple[str, str | None]) -> Path:
    path = folder / "held-out.jsonl"
    path.write_text("".join(json.dumps({"prompt": p, "expert": e}) + "\n" for p, e in rows))
    return path


def test_the_document_holds_every_figure(data: Path, expertctl: CommandRunner) -> None:
    found = expertctl("eval", "--routing", data, "--json").document
    assert find_problems(found, "eval-routing") == []
    assert (found["n"], found["experts"], found["encoder"]) == (4, 2, "lexical")
    assert (found["accuracy"]["right"], found["in_scope"]["share"]) == (3, 1.0)
    assert (found["out_of_scope"]["right"], found["precision"]["n"]) == (1, 3)
    assert (found["passed"], found["min_accuracy"]) == (True, None)
    assert {"wanted": None, "got": "acme/dates", "n": 1} in found["confusion"]
    (wrong,) = found["wrong"]
    assert (wrong["line"], wrong["prompt"], wrong["got"]) == (4, DAYS + " ", "acme/dates")
    assert found["latency_ms"]["plan"]["median"] > 0


def test_a_person_sees_the_figures_and_the_wrong_decisions(
    data: Path, expertctl: CommandRunner
) -> None:
    said = expertctl("eval", "--routing", data)
    for part in (
        "n = 4, 2 experts installed, encoder lexical, threshold ",
        "decided as wanted               3 of 4   0.750  0.301 to 0.954",
        "TIMES  WANTED  GOT\n1      none    acme/dates",
        "ANSWERED  WRONG   THRESHOLD",
        "MS A PROMPT",
        "wrong decisions, 1 of 1:\n  line 4\n",
        "    wanted  none\n    got     acme/dates: ",
    ):
        assert part in said.out
    assert "wrong decisions" not in expertctl("eval", "--routing", data, "--show", "0").out


@pytest.mark.parametrize(("demanded", "code"), [("0.75", 0), ("0.76", 1), ("0", 0), ("1", 1)])
def test_an_accuracy_can_be_demanded(
    demanded: str, code: int, data: Path, expertctl: CommandRunner
) -> None:
    words = ("eval", "--routing", data, "--min-accuracy", demanded)
    said = expertctl(*words, exit_code=code)
    assert ("error: " in said.err) == bool(code)
    assert "decided as wanted" in said.out
    found = expertctl(*words, "--json", exit_code=code).document
    assert (found["passed"], found["min_accuracy"]) == (not code, float(demanded))


def test_what_was_demanded_and_missed_is_said_with_its_figures(
    data: Path, expertctl: CommandRunner
) -> None:
    said = expertctl("eval", "--routing", data, "--min-accuracy", "0.9", exit_code=1)
    assert f"{data}: an accuracy of 0.750, at least 0.9 was required (3 of 4 decisions" in said.err


def test_unknown_experts_are_all_named(
    data: Path, tmp_path: Path, expertctl: CommandRunner
) -> None:
    path = written(tmp_path, (SORT, "acme/sortign"), (DAYS, "corp/dates"), (HELLO, None))
    said = expertctl("eval", "--routing", path, exit_code=3)
    assert "line 1: acme/sortign; did you mean acme/sorting?" in said.err
    assert "line 2: corp/dates; did you mean acme/dates?" in said.err


def test_a_malformed_file_is_refused_with_all_of_its_problems(
    data: Path, tmp_path: Path, expertctl: CommandRunner
) -> None:
    data.write_text('{"prompt": "x"}\nno\n')
    said = expertctl("eval", "--routing", data, exit_code=8)
    assert "line 1: " in said.err
    assert "line 2: " in said.err
    expertctl("eval", "--routing", tmp_path / "nowhere", exit_code=3)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("acme/sorting",), "FILE|REF"),
        (("--data", "x"), "--data"),
        (("--compose", "a/b", "--min-gain", "0"), "--compose, --min-gain"),
        (("--max-tokens", "3"), "--max-tokens"),
        (("--memory-budget", "1GB"), "--memory-budget"),
    ],
)
def test_what_does_not_count_for_routing_is_refused(
    words: tuple[str, ...], named: str, expertctl: CommandRunner
) -> None:
    said = expertctl("eval", "--routing", "x", *words, exit_code=2)
    assert f"error: {named}: --routing measures which expert is chosen" in said.err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "FILE|REF is missing"),
        (("acme/sorting",), "--data is missing"),
        (("acme/sorting", "--data", "x", "--min-accuracy", "0"), "--min-accuracy: applies only to"),
        (("--routing", "x", "--min-accuracy", "1.1"), "1.1 is more than 1"),
    ],
)
def test_a_call_that_says_too_little_or_too_much_is_refused(
    words: tuple[str, ...], told: str, expertctl: CommandRunner
) -> None:
    assert told in expertctl("eval", *words, exit_code=2).err


def test_a_picture_is_drawn(data: Path, tmp_path: Path, expertctl: CommandRunner) -> None:
    picture = tmp_path / "routing.svg"
    expertctl("eval", "--routing", data, "--plot", picture)
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")
    said = expertctl("eval", "--routing", data, "--plot", tmp_path / "routing.gif", exit_code=2)
    assert "unsupported plot format" in said.err


def test_warnings_go_to_stderr_and_into_the_document(
    data: Path, tmp_path: Path, expertctl: CommandRunner
) -> None:
    path = written(tmp_path, (SORT, "acme/sorting"), (SORT, "acme/sorting"))
    said = expertctl("eval", "--routing", path, "--json")
    assert "warning: " in said.err
    assert "1 prompt is repeated" in said.document["warnings"][0]


def test_an_exclusion_that_excludes_nothing_is_warned_of(
    data: Path, expertctl: CommandRunner
) -> None:
    said = expertctl("route", SORT, "--exclude", "acme/sortin", "--json")
    assert "warning: acme/sortin is excluded, and no such expert is installed" in said.err
    assert "did you mean acme/sorting?" in said.document["warnings"][0]


def test_an_unknown_expert_is_answered_with_what_was_meant(
    data: Path, expertctl: CommandRunner
) -> None:
    said = expertctl("route", SORT, "--expert", "corp/sorting", exit_code=3)
    assert "hint: did you mean acme/sorting?" in said.err


def test_what_a_hostile_prompt_holds_never_reaches_the_terminal(
    data: Path, tmp_path: Path, expertctl: CommandRunner
) -> None:
    hostile = f"{SORT}\x1b[2J\u202e\r\nerror: none"
    said = expertctl("eval", "--routing", written(tmp_path, (hostile, None)))
    assert not {"\x1b", "\u202e", "\r"} & set(said.out)
    assert "\nerror: none" not in said.out
