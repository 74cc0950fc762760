"""What `benchmarks.routing_quality` draws and counts, and the floor under the router's quality."""

from pathlib import Path

import pytest

from benchmarks.routing_quality import (
    CLINC,
    describe_label,
    describe_labels,
    draw_examples,
    measure_encoder,
    read_clinc,
    read_labelled,
)
from expertctl.routing.encoder import find_minilm

TASKS = {
    "pay_bill": ("pay my {} bill", "settle the {} bill today", "i want my {} bill paid off"),
    "play-music": ("play a {} song", "put on some {} music", "i feel like a {} track now"),
    "Book Hotel": ("book a hotel in {}", "reserve me a room in {}", "find a hotel near {} please"),
}
FILLS = ("gas", "water", "berlin", "jazz", "phone")


def labelled() -> list[tuple[str, str | None]]:
    return [(t.format(f), label) for label, texts in TASKS.items() for t in texts for f in FILLS]


def test_draws_are_those_of_a_seeded_sample_and_differ_between_seeds() -> None:
    train = [*labelled(), ("nobody's", None)]
    first, again, other = (
        draw_examples(train, n=4, seed=0),
        draw_examples(train, n=4, seed=0),
        draw_examples(train, n=4, seed=1),
    )
    assert first == again != other
    assert sorted(first) == ["Book Hotel", "pay_bill", "play-music"]
    assert all(len(set(texts)) == 4 for texts in first.values())


def test_a_label_is_an_expert_by_its_words() -> None:
    expert = describe_label("Book Hotel_v2", ("a", "b"))
    assert (expert.name, expert.description) == ("intents/book-hotel-v2", "book hotel v2")
    assert (expert.keywords, expert.examples) == ((), ("a", "b"))


def test_labels_of_any_spelling_become_experts_of_their_own() -> None:
    drawn = {"Pay bill?": ("a",), "pay-bill": ("b",), "支払う": ("c",), "x" * 90: ("d",)}
    names = [each.name for each in describe_labels(drawn)]
    assert names == [
        "intents/pay-bill",
        "intents/pay-bill-1",
        "intents/unnamed",
        f"intents/{'x' * 60}",
    ]
    assert [each.description for each in describe_labels(drawn)][2] == "支払う"
    assert draw_examples([("a", "l"), ("b", "l")], n=5, seed=0)["l"] in {("a", "b"), ("b", "a")}


def test_lines_of_any_data_set_are_read(tmp_path: Path) -> None:
    path = tmp_path / "test.jsonl"
    path.write_text(
        '{"text": "hé", "label": "a"}\n{"text": "x", "label": null}\n', encoding="utf-8"
    )
    assert read_labelled(path) == [("hé", "a"), ("x", None)]


def test_shares_are_counted_in_scope_and_out_of_it_apart() -> None:
    train, strange = labelled(), [("how tall is a giraffe", None), ("who was caesar", None)]
    document = measure_encoder(train, [*train, *strange], "lexical", shots=[5], seeds=1)
    rows = document["rows"]
    assert isinstance(rows, list)
    shares = {row["case"]: row["ours"] for row in rows}
    assert shares["5 examples: accuracy"] >= 0.85
    assert shares["5 examples: left to the base"] == 1.0
    assert shares["5 examples: answered and right"] + shares["5 examples: answered and wrong"] <= 1
    assert [row["ok"] for row in rows if row["case"] == "5 examples: accuracy"] == [True, True]


@pytest.mark.all
@pytest.mark.skipif(not CLINC.exists() or find_minilm() is None, reason="CLINC150 and MiniLM")
def test_the_router_keeps_its_quality_on_150_intents() -> None:
    document = measure_encoder(*read_clinc(CLINC), "minilm", shots=[10], seeds=1)
    shares = {row["case"]: row["ours"] for row in document["rows"]}  # type: ignore[attr-defined]  # rows are a list
    assert shares["10 examples: accuracy"] >= 0.92
    assert shares["10 examples: answered and right"] >= 0.88
    assert shares["10 examples: left to the base"] >= 0.8
