"""The background: everyday texts that compete with the installed experts, and are never chosen."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from expertctl.routing.background import load_background, read_background_texts
from expertctl.routing.candidate import find_eligible_experts
from expertctl.routing.encoder import LexicalEncoder, open_encoder
from expertctl.routing.index import RoutingIndex
from expertctl.routing.request import RouteRequest
from expertctl.routing.reranker import (
    BACKGROUND_ROWS,
    KERNEL_WIDTH,
    MAX_BACKGROUND_COSINE,
    RIDGE,
    rerank,
    rerank_all,
)
from expertctl.routing.router import route_prompt
from expertctl.routing.vector_table import VectorTable
from tests.routing.experts import make_base, make_content_digest, make_installed, make_manifest

EVERYDAY = json.loads(Path(__file__).with_name("everyday_prompts.json").read_text("utf-8"))
"""Experts as people install them; prompts for them, for none, and that only look like theirs."""
EXPERTS, UNRELATED_EXPERTS = EVERYDAY["experts"], EVERYDAY["unrelated_experts"]
IN_SCOPE, COMPOSING = EVERYDAY["in_scope"], EVERYDAY["composing"]
UNRELATED, NEAR_MISSES = EVERYDAY["unrelated"], EVERYDAY["near_misses"]
WIDTH = 8
Rows = np.ndarray[tuple[int, ...], np.dtype[np.float32]]


def unit(rows: object) -> Rows:
    array = np.asarray(rows, np.float32)
    found: Rows = array / np.linalg.norm(array, axis=-1, keepdims=True)
    return found


def make_table(*parts: Rows) -> VectorTable:
    empty = VectorTable.empty(stamp="any", dimensions=WIDTH)
    return empty.add_entries({make_content_digest(str(n)): rows for n, rows in enumerate(parts)})


def solve(parts: list[Rows], query: Rows) -> list[float]:
    """Ridge regression of each part against the rest, by the plain formula in float64."""
    rows = np.concatenate(parts).astype(np.float64)
    kernel = np.exp(KERNEL_WIDTH * (rows @ rows.T - 1)) + RIDGE * np.eye(len(rows))
    near = np.exp(KERNEL_WIDTH * (rows @ query - 1))
    sizes = [len(part) for part in parts]
    members = np.repeat(np.eye(len(parts)), sizes, axis=0)
    even = 1 / (len(parts) + 1)
    found: list[float] = (near @ np.linalg.inv(kernel) @ (members - even) + even).tolist()
    return found


def test_the_background_is_one_more_group_that_is_never_chosen() -> None:
    generator = np.random.default_rng(3)
    parts = [unit(generator.normal(size=(3, WIDTH)) + 3 * np.eye(WIDTH)[n]) for n in range(3)]
    others = unit(generator.normal(size=(4, WIDTH)) - 2 * np.eye(WIDTH)[0])
    query = unit(generator.normal(size=WIDTH))
    assert (others @ np.concatenate(parts).T).max() < MAX_BACKGROUND_COSINE
    table, candidates = make_table(*parts), np.arange(3)
    found = rerank_all(table, candidates, query, background=others)
    assert len(found) == 3
    assert found.probabilities.tolist() == pytest.approx(
        solve([*parts, others], query)[:3], abs=1e-5
    )
    alone = rerank_all(table, candidates, query)
    assert alone.probabilities.tolist() == pytest.approx(solve(parts, query), abs=1e-5)
    assert found.similarities.tolist() == alone.similarities.tolist()


def test_a_prompt_like_the_background_is_evidence_for_no_expert() -> None:
    eye = np.eye(WIDTH, dtype=np.float32)
    table, query = make_table(eye[:1], eye[1:2]), unit(eye[2] + 0.3 * eye[0])
    before = rerank(table, np.arange(2), query).evidence
    after = rerank(table, np.arange(2), query, background=eye[2:3]).evidence
    assert after.max() < before.max() - 0.2


def test_only_the_closest_rows_compete() -> None:
    generator = np.random.default_rng(5)
    eye = np.eye(WIDTH, dtype=np.float32)
    table, query = make_table(eye[:1], eye[1:2]), unit(eye[0] + eye[2])
    rows = unit(generator.normal(size=(40, WIDTH)) * 0.3 + eye[3])
    order = np.argsort(-(rows @ query))
    few = rerank(table, np.arange(2), query, background=rows[order[:BACKGROUND_ROWS]])
    many = rerank(table, np.arange(2), query, background=rows)
    assert many.probabilities.tolist() == pytest.approx(few.probabilities.tolist(), abs=1e-6)


def test_what_an_expert_is_for_is_no_background() -> None:
    eye = np.eye(WIDTH, dtype=np.float32)
    table, query = make_table(eye[:1], eye[1:2]), unit(eye[0] + 0.1 * eye[2])
    close = unit(eye[0] + math.tan(math.acos(0.9)) * eye[3])[None]
    far = unit(eye[0] + math.tan(math.acos(0.7)) * eye[3])[None]
    alone = rerank(table, np.arange(2), query).probabilities.tolist()
    assert rerank(table, np.arange(2), query, background=close).probabilities.tolist() == alone
    assert rerank(table, np.arange(2), query, background=far).probabilities[0] < alone[0]


def test_texts_are_many_and_each_is_one_line() -> None:
    texts = read_background_texts()
    assert len(texts) == len(set(texts)) > 150
    assert all(text == text.strip() and text for text in texts)
    shown = {text.casefold().rstrip("?.!") for text in texts}
    assert shown.isdisjoint(p.casefold().rstrip("?.!") for p in (*UNRELATED, *NEAR_MISSES))


def test_an_encoder_of_words_has_no_background(tmp_path: Path) -> None:
    assert load_background(tmp_path, LexicalEncoder()) is None
    assert RoutingIndex(tmp_path, LexicalEncoder()).background is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.all
def test_rows_are_kept_and_made_again_where_they_are_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder, calls = open_encoder("minilm"), list[int]()
    encode = type(encoder).encode_for_rerank

    def count(self: object, texts: list[str]) -> object:
        calls.append(len(texts))
        return encode(self, texts)  # type: ignore[arg-type]  # the encoder itself

    monkeypatch.setattr(type(encoder), "encode_for_rerank", count)
    (tmp_path / "background-0123.f32").write_bytes(b"of another encoder")
    made = load_background(tmp_path, encoder)
    again = load_background(tmp_path, encoder)
    assert made is not None and again is not None  # noqa: PT018  # for the type checker
    assert np.array_equal(made.rerank_rows, again.rerank_rows)
    assert np.array_equal(made.rows, again.rows)
    assert calls == [len(read_background_texts())]
    (path,) = tmp_path.iterdir()
    for damage in (b"", path.read_bytes()[:-4], bytes(path.stat().st_size)):
        path.write_bytes(damage)
        found = load_background(tmp_path, encoder)
        assert found is not None
        assert np.array_equal(found.rows, made.rows)
    assert len(calls) == 4


Route = Callable[[str], str | None]


def make_route(folder: Path, experts: Mapping[str, Any], *, composes: bool = False) -> Route:
    """Install experts, and return a function from a prompt to the expert that answers it."""
    manifests = []
    for name, texts in experts.items():
        composition: dict[str, object] = {}
        if composes and name == "polite":
            composition = {"role": "style", "composes_with": ("task",)}
        elif composes and name in COMPOSING:
            composition = {"role": "task", "composes_with": ("style",)}
        manifests.append(
            make_manifest(
                f"acme/{name}",
                description=texts["description"],
                examples=tuple(texts["examples"]),
                composition=composition,
            )
        )
    installed = [make_installed(manifest) for manifest in manifests]
    index, base = RoutingIndex(folder, open_encoder("minilm")), make_base(folder / "base")
    index.add({expert.digest: expert.manifest for expert in installed})
    eligible = find_eligible_experts(RouteRequest(prompt="x"), installed, base=base, index=index)

    def route(prompt: str) -> str | None:
        found = route_prompt(RouteRequest(prompt=prompt), eligible, base=base, index=index)
        names = [chosen.expert.manifest.name.removeprefix("acme/") for chosen in found.selected]
        return next(iter(names), None)

    return route


def count_right(route: Route, experts: Mapping[str, object]) -> tuple[int, int, int]:
    """Return the right decisions about prompts for experts, for none, and that look like theirs."""
    inside = [route(p) == name for name, ps in IN_SCOPE.items() if name in experts for p in ps]
    outside = [route(prompt) is None for prompt in UNRELATED]
    return sum(inside), sum(outside), sum(route(prompt) is None for prompt in NEAR_MISSES)


@pytest.mark.all
def test_everyday_prompts_are_left_to_the_base(tmp_path: Path) -> None:
    """Without a background, 88 of the 100 unrelated prompts were, and 80 with two experts."""
    five = {name: EXPERTS[name] for name in ("sql", "json", "bank", "dates", "polite")}
    inside, outside, near = count_right(make_route(tmp_path / "five", five), five)
    assert inside >= 25  # of 26
    assert outside >= 97
    assert near >= 17  # of 20
    two = {name: EXPERTS[name] for name in ("sql", "bank")}
    inside, outside, near = count_right(make_route(tmp_path / "two", two), two)
    assert inside >= 13  # of 14
    assert outside >= 97
    assert near >= 17


@pytest.mark.all
def test_what_composes_and_what_is_unrelated_make_nobody_bolder(tmp_path: Path) -> None:
    before = count_right(make_route(tmp_path / "eight", EXPERTS), EXPERTS)
    assert before[0] >= 34  # of 35
    composing = count_right(make_route(tmp_path / "composing", EXPERTS, composes=True), EXPERTS)
    assert all(abs(one - other) <= 1 for one, other in zip(before, composing, strict=True))
    more = {**EXPERTS, **UNRELATED_EXPERTS}
    grown = count_right(make_route(tmp_path / "ten", more), EXPERTS)
    assert grown[0] >= before[0]
    assert grown[1] >= 96
