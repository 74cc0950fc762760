"""What ``route`` shows to a person: the table says in a glance what was decided."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from expertctl.cli.run_view import _format_check, _format_figures, format_routing
from expertctl.digest import Digest
from expertctl.routing.candidate import RoutingCandidate
from expertctl.routing.features import extract_features
from expertctl.routing.plan import Plan, SamplingParams
from expertctl.routing.router import RoutingResult
from expertctl.store.preference import Flag
from tests.routing.experts import PROMPT, make_sort_expert

LONG = "its example 'Put these numbers in order, the smallest first: 41, 7, 23, 19, …'"


def candidate(name: str, **known: object) -> RoutingCandidate:
    plain = RoutingCandidate(
        expert=make_sort_expert(name),
        cosine=0.5,
        text=LONG,
        keywords=(),
        hint=None,
        success=0.5,
        vram_mb=1.0,
        score=0.2,
        probability=0.3,
        similarity=0.4,
    )
    return replace(plain, **known)  # type: ignore[arg-type]  # a test names the fields


def render_candidates(*candidates: RoutingCandidate, width: int = 0) -> list[str]:
    """The rows of the table, without the lines above."""
    plan = Plan(Digest.compute(b"plan"), 1, "acme/tiny", (), SamplingParams())
    features = extract_features(PROMPT, normalised=PROMPT)
    result = RoutingResult(plan, (), candidates, features, "minilm", ("nobody",), (), {})
    head, note, empty, *rows = format_routing(result, width=width).splitlines()
    assert (head, note, empty) == ("base acme/tiny, encoder minilm", "  nobody", "")
    return rows


def of_another_base(name: str) -> RoutingCandidate:
    why = "refused: was made for starter/base (hidden size 64; tiny has 576)"
    barred = candidate(name, probability=None, similarity=None).mark_ineligible(why)
    return replace(barred, other_base="starter/base")


def routed(*candidates: RoutingCandidate, **others: int) -> RoutingResult:
    plan = Plan(Digest.compute(b"plan"), 1, "tiny", (), SamplingParams())
    features = extract_features(PROMPT, normalised=PROMPT)
    counts = {name.replace("_", "/"): count for name, count in others.items()}
    return RoutingResult(plan, (), candidates, features, "minilm", ("nobody",), (), {}, counts)


def test_experts_of_another_base_are_one_line() -> None:
    result = routed(candidate("acme/sort"), of_another_base("starter/sql"), starter_base=9)
    assert format_routing(result, width=0).splitlines()[-3:] == [
        f"no    0.20   0.30   0.50    acme/sort@1.0.0  below 0.50; closest: {LONG}",
        "",
        "9 experts are for starter/base, not tiny",
    ]


def test_where_all_experts_are_of_other_bases_there_is_no_table() -> None:
    result = routed(of_another_base("starter/sql"), acme_big=2, starter_base=1)
    assert format_routing(result, width=0).splitlines()[2:] == [
        "",
        "2 experts are for acme/big, not tiny",
        "1 expert is for starter/base, not tiny",
    ]


def test_experts_for_another_base_of_the_same_name_say_so() -> None:
    last = format_routing(routed(of_another_base("a/b"), tiny=1), width=0).splitlines()[-1]
    assert last == "1 expert is for another tiny than the one here"


def test_a_person_who_asks_for_more_gets_them_one_by_one() -> None:
    result = routed(of_another_base("starter/sql"), starter_base=1)
    assert format_routing(result, width=0, verbose=True).splitlines()[-1] == (
        "no    -      -      0.50    starter/sql@1.0.0  "
        "made for starter/base (hidden size 64; tiny has 576)"
    )


def test_a_pipe_gets_the_whole_text_that_is_closest() -> None:
    header, row = render_candidates(candidate("acme/sort"))
    assert header == "USED  SCORE  SHARE  COSINE  EXPERT           WHY"
    assert row == f"no    0.20   0.30   0.50    acme/sort@1.0.0  below 0.50; closest: {LONG}"


@pytest.mark.parametrize("width", [80, 100, 120])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    chosen = candidate("acme/sort").mark_accepted(f"best of 2: share 0.30, cosine 0.50 to {LONG}")
    rows = render_candidates(chosen, candidate("acme/other"), width=width)
    assert max(map(len, rows)) <= width
    assert rows[2].rstrip("…") in render_candidates(chosen, candidate("acme/other"))[2]


def test_a_text_that_only_a_word_of_fits_is_left_out() -> None:
    rows = render_candidates(candidate("acme/sort"), width=80)
    assert rows[1].endswith("  below 0.50")


def test_what_was_not_compared_has_no_score() -> None:
    far = candidate("acme/far", probability=None, similarity=None, score=0.0)
    vetoed = far.mark_vetoed("not for prompts with 'joke', according to its manifest")
    rows = render_candidates(far, vetoed)
    assert rows[1] == "no    -      -      0.50    acme/far@1.0.0  others are closer"
    assert rows[2].endswith("-      -      0.50    acme/far@1.0.0  not for prompts with 'joke'")


def test_who_is_excluded_is_told_without_the_word_refused() -> None:
    barred = candidate("acme/sort").mark_ineligible("refused: the key that signed it was revoked")
    assert render_candidates(barred)[1].endswith("  the key that signed it was revoked")


def test_a_package_with_flags_is_called_suspicious() -> None:
    flagged = candidate("acme/sort", flags=(Flag("stuffed", "it has 76 keywords"),))
    assert render_candidates(flagged, width=80)[1].endswith("  below 0.50, suspicious")


def test_there_is_no_negative_nought() -> None:
    assert (
        "  0.00   0.50  "
        in render_candidates(candidate("acme/sort", probability=-0.001, score=0.0))[1]
    )


def test_of_a_hundred_experts_the_best_are_shown_and_all_that_were_chosen() -> None:
    many = [candidate(f"acme/sort-{n}") for n in range(99)]
    rows = render_candidates(
        *many, candidate("acme/chosen").mark_accepted("required by acme/sort-0")
    )
    assert [row.split()[4] for row in rows[1:13]] == [f"acme/sort-{n}@1.0.0" for n in range(12)]
    assert "acme/chosen@1.0.0" in rows[13]
    assert rows[14:] == ["and 87 more, which --json shows"]


@pytest.mark.parametrize(
    ("passed", "text", "told"),
    [
        (False, "", "the answer is empty"),
        (False, " \n", "the answer is empty"),
        (False, "{", "not as requested"),
        (True, "{}", "as requested"),
        (None, "", "none requested"),
    ],
)
def test_the_form_of_an_answer_is_told_as_it_is(passed: bool | None, text: str, told: str) -> None:
    result: Any = SimpleNamespace(validation_passed=passed, text=text)
    assert _format_check(result) == told


@pytest.mark.parametrize(
    ("tokens", "rate", "told"),
    [
        (0, 0.0, "32 tokens read, nothing written (stop), on tiny, 90 ms in all"),
        (1, 0.0, "32 tokens read, 1 written (stop), on tiny, first after 80 ms, 90 ms in all"),
        (
            3,
            20.0,
            "32 tokens read, 3 written (stop), on tiny, 20 tokens/s, first after 80 ms, "
            "90 ms in all",
        ),
    ],
)
def test_the_figures_say_only_what_there_was(tokens: int, rate: float, told: str) -> None:
    result: Any = SimpleNamespace(
        tokens=SimpleNamespace(prompt=32, generated=tokens),
        timings_ms={"ttft": 80.0, "total": 90.0},
        decode_tokens_per_s=rate,
        finish_reason="stop",
        plan=SimpleNamespace(base="tiny"),
    )
    assert _format_figures(result).strip() == told


def test_the_demo_says_what_it_is_where_no_expert_answers() -> None:
    demo = Plan(Digest.compute(b"plan"), 1, "starter/base", (), SamplingParams())
    alone = format_routing(replace(routed(), plan=demo), width=0)
    assert "  starter/base is a demo of two million weights" in alone
    assert "`expertctl pull smollm2:135m` brings a real model" in alone
    assert "demo" not in format_routing(routed(), width=0)
