"""Calibration: quantiles and a posterior against plain formulas, and what asking again hides."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertctl.routing.calibration import (
    CALIBRATION_FILE,
    MAX_REJECTED_SHARE,
    MAX_REPLAYED_EXAMPLES,
    MIN_STRANGER_REJECTION,
    NO_EVIDENCE,
    PRIORS,
    Calibration,
    CalibrationEvidence,
    collect_evidence,
    fit_calibration,
    read_calibration,
    rerank,
    write_calibration,
)
from expertctl.routing.encoder import LexicalEncoder
from expertctl.routing.index import RoutingIndex
from expertctl.routing.vector_search import find_nearest_exact
from expertctl.routing.vector_table import SearchHits, Vectors, VectorTable
from tests.routing.experts import make_content_digest, make_manifest
from tests.routing.vector_tables import TEXTS, make_clusters, make_expert_digest, make_table

PRIOR = Calibration(0.6, 9.0)


def spread(start: float, end: float, count: int) -> tuple[float, ...]:
    return tuple(np.linspace(start, end, count).tolist())


def test_the_score_is_a_half_at_the_threshold_and_the_logistic_function_around_it() -> None:
    calibration = Calibration(1.0, 8.0)
    scores = [calibration.score(evidence) for evidence in (1.0, 1.25, 0.5, 90.0, -90.0)]
    plain = [1 / (1 + np.exp(-8 * (e - 1))) for e in (1.0, 1.25, 0.5)]
    assert np.allclose(scores, [*plain, 1, 0], atol=1e-6)


def test_the_score_is_the_posterior_of_two_normal_distributions() -> None:
    inside, outside = spread(1.2, 1.6, 5000), spread(0.4, 0.8, 5000)
    made = fit_calibration(CalibrationEvidence(inside, outside), PRIOR, experts=3)
    variance = (np.var(inside) + np.var(outside)) / 2
    slope = min((np.mean(inside) - np.mean(outside)) / variance, 40)
    assert made.slope == pytest.approx(slope, rel=0.01)

    def density(x: float, mean: float) -> float:
        return float(np.exp(-((x - mean) ** 2) / (2 * variance)))

    low, high = np.mean(outside), np.mean(inside)
    odds = density(made.threshold, low) / density(made.threshold, high)  # those that make it 0.5
    for x in (0.9, 1.0, 1.1):
        ratio = odds * density(x, high) / density(x, low)
        posterior = ratio / (1 + ratio)
        calibration = Calibration(made.threshold, float((high - low) / variance))
        assert calibration.score(x) == pytest.approx(posterior, abs=1e-4)


def test_three_in_a_hundred_of_what_is_right_are_turned_away_where_strangers_come_close() -> None:
    inside, outside = spread(1.0, 2.0, 5000), spread(0.5, 1.9, 5000)
    made = fit_calibration(CalibrationEvidence(inside, outside), PRIOR, experts=3)
    assert np.mean(np.array(inside) < made.threshold) == pytest.approx(
        MAX_REJECTED_SHARE, abs=0.004
    )


def test_fewer_are_turned_away_where_nine_in_ten_strangers_are_all_the_same() -> None:
    inside, outside = spread(1.0, 2.0, 5000), spread(0.2, 0.6, 5000)
    made = fit_calibration(CalibrationEvidence(inside, outside), PRIOR, experts=3)
    assert np.mean(np.array(outside) < made.threshold) == pytest.approx(
        MIN_STRANGER_REJECTION, abs=0.01
    )
    assert made.threshold < min(inside)


def test_with_few_examples_much_of_the_prior_stays() -> None:
    inside, outside = (1.4, 1.5), (0.9, 1.2)
    made = fit_calibration(CalibrationEvidence(inside, outside), PRIOR, experts=2)
    own = min(
        float(np.quantile(inside, MAX_REJECTED_SHARE)),
        float(np.quantile(outside, MIN_STRANGER_REJECTION)),
    )
    assert made.threshold == pytest.approx(2 / 22 * own + 20 / 22 * PRIOR.threshold)
    assert made.experts == 2
    lone = fit_calibration(CalibrationEvidence(inside, ()), PRIOR, experts=1)
    assert (lone.slope, lone.threshold > PRIOR.threshold) == (PRIOR.slope, True)
    none = fit_calibration(NO_EVIDENCE, PRIOR, experts=4)
    assert none == Calibration(PRIOR.threshold, PRIOR.slope, 4)
    assert fit_calibration(CalibrationEvidence((), outside), PRIOR, experts=4) == none


@given(st.lists(st.floats(0, 2), max_size=30), st.lists(st.floats(0, 2), max_size=30))
def test_whatever_was_found_the_slope_is_bounded_and_the_threshold_is_a_number(
    inside: list[float], outside: list[float]
) -> None:
    made = fit_calibration(CalibrationEvidence(tuple(inside), tuple(outside)), PRIOR, experts=5)
    assert 4 <= made.slope <= 40
    assert 0 <= made.threshold <= 2


@pytest.mark.parametrize(
    ("experts", "now", "fresh"),
    [(0, 0, True), (0, 1, False), (9, 9, True), (10, 11, True), (10, 12, False), (10, 8, False)],
)
def test_it_holds_while_nearly_as_many_experts_are_there(
    experts: int, now: int, fresh: bool
) -> None:
    assert Calibration(1.0, 9.0, experts).is_fresh(now) is fresh


@pytest.mark.parametrize("encoder", ["minilm", "static", "lexical"])
def test_every_encoder_has_a_prior(encoder: str) -> None:
    assert 0 < PRIORS[encoder].threshold < 1.5


def search_in(table: VectorTable, asked: list[Vectors] | None = None) -> object:
    def run(query: Vectors) -> SearchHits:
        if asked is not None:
            asked.append(query)
        return find_nearest_exact(table, query, count=64)

    return run


def test_examples_are_asked_without_their_own_row_and_without_their_expert() -> None:
    table = make_clusters(6)
    evidence = collect_evidence(table, table, search_in(table))  # type: ignore[arg-type]  # a local search
    inside, outside = [], []
    for position in range(6):
        for text in range(1, TEXTS):
            number = position * TEXTS + text
            query = table.rows[number]
            rest = {
                make_expert_digest(p): np.delete(rows, text, axis=0) if p == position else rows
                for p, rows in enumerate(np.split(table.rows, 6))
            }
            held = make_table(rest)
            order = find_nearest_exact(held, query, count=64).experts
            verdict = rerank(held, order, query)
            best = int(verdict.evidence.argmax())
            if order[best] == position:
                inside.append(float(verdict.evidence[best]))
            others = order[order != position]
            outside.append(float(rerank(table, others, query).evidence.max()))
    assert np.allclose(evidence.inside, inside, atol=1e-4)
    assert np.allclose(evidence.outside, outside, atol=1e-4)


def test_no_more_than_so_many_examples_are_asked_and_always_the_same() -> None:
    table = make_clusters(80)
    first, second = [], []
    found = collect_evidence(table, table, search_in(table, first))  # type: ignore[arg-type]  # as above
    assert collect_evidence(table, table, search_in(table, second)) == found  # type: ignore[arg-type]
    assert len(first) == len(second) == len(found.outside) == MAX_REPLAYED_EXAMPLES
    described = {row.tobytes() for row in table.rows[::TEXTS]}
    assert all(query.tobytes() not in described for query in first)


def test_one_expert_alone_has_no_strangers_and_none_has_nothing() -> None:
    table = make_clusters(1)
    found = collect_evidence(table, table, search_in(table))  # type: ignore[arg-type]  # a local search
    assert (len(found.inside), found.outside) == (TEXTS - 1, ())
    empty = make_table({})
    assert collect_evidence(empty, empty, search_in(empty)) == NO_EVIDENCE  # type: ignore[arg-type]


def test_it_is_read_as_it_was_written_by_the_same_encoder_only(tmp_path: Path) -> None:
    path = tmp_path / CALIBRATION_FILE
    made = Calibration(1.25, 7.5, 30)
    write_calibration(path, made, encoder="lexical 1")
    assert read_calibration(path, encoder="lexical 1") == made
    assert read_calibration(path, encoder="lexical 2") is None
    assert path.stat().st_mode & 0o777 == 0o600
    write_calibration(tmp_path / "absent" / CALIBRATION_FILE, made, encoder="x")
    assert read_calibration(tmp_path / "absent" / CALIBRATION_FILE, encoder="x") is None


ENTRIES = {
    make_content_digest(made.ref): made
    for made in (
        make_manifest(
            f"acme/e{n}", description=f"does job{n}", examples=(f"do job{n} now", f"job{n}")
        )
        for n in range(10)
    )
}


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"words"',
        b"{}",
        b"\xff\xfe",
        b'{"encoder": "other", "threshold": 9, "slope": 9, "experts": 10}',
        b'{"encoder": "ENCODER", "threshold": NaN, "slope": 9, "experts": 10}',
        b'{"encoder": "ENCODER", "threshold": 1, "slope": Infinity, "experts": 10}',
        b'{"encoder": "ENCODER", "threshold": 1, "slope": 9, "experts": Infinity}',
    ],
)
def test_a_damaged_or_foreign_file_is_made_again(tmp_path: Path, damaged: bytes) -> None:
    index = RoutingIndex(tmp_path, LexicalEncoder())
    index.add(ENTRIES)
    path = tmp_path / CALIBRATION_FILE
    before = path.read_bytes()
    path.write_bytes(damaged.replace(b"ENCODER", LexicalEncoder().stamp.encode()))
    assert RoutingIndex(tmp_path, LexicalEncoder()).calibration == index.calibration
    assert path.read_bytes() == before


def test_examples_are_asked_again_only_when_many_experts_came_or_went(tmp_path: Path) -> None:
    index = RoutingIndex(tmp_path, LexicalEncoder())
    index.add(ENTRIES)
    made = index.calibration
    assert made.experts == 10
    extra = [
        make_manifest(f"zed/e{n}", description=f"other{n}", examples=(f"x{n}",)) for n in (1, 2)
    ]
    index.add({make_content_digest(extra[0].ref): extra[0]})
    assert index.calibration is made
    index.add({make_content_digest(extra[1].ref): extra[1]})
    assert index.calibration.experts == 12
    index.remove(list(ENTRIES))
    assert index.calibration.experts == 2
    assert json.loads((tmp_path / CALIBRATION_FILE).read_bytes())["experts"] == 2


def test_whoever_makes_all_vectors_again_asks_all_examples_again(tmp_path: Path) -> None:
    index = RoutingIndex(tmp_path, LexicalEncoder())
    index.add(ENTRIES)
    made = index.calibration
    stale = Calibration(9.0, 9.0, len(ENTRIES))
    write_calibration(tmp_path / CALIBRATION_FILE, stale, encoder=index.calibration_key)
    index = RoutingIndex(tmp_path, LexicalEncoder())
    assert index.calibration == stale
    index.rebuild(ENTRIES)
    assert index.calibration == made
