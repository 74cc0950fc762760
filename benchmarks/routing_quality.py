"""How often the router finds the expert of a prompt, and how often it correctly abstains.

Every label of a data set becomes one expert, with the label's name as its description and a few of
its training texts as examples. Each test text is routed alone, with the threshold of normal
operation. ``--train`` and ``--test`` name files of lines ``{"text": …, "label": …}``, where the
label ``null`` belongs to no expert; without them CLINC150 is read from its folder next to the
project.

The rivals are the nearest example and the centroid of examples in the same vectors, and the
published result for CLINC150 with frozen dual encoders and ten examples (Casanueva et al., 2020).
"""

import argparse
import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, quantiles
from tempfile import TemporaryDirectory

import numpy as np

from benchmarks.harness import Row, describe_machine, format_table, make_absent_row
from benchmarks.routing_home import (
    DescribedExpert,
    MemoisingEncoder,
    list_starter_experts,
    make_experts,
    make_home,
)
from expertctl.routing.base_choice import BaseSelector
from expertctl.routing.candidate import EligibleExperts, InstalledExpert, find_eligible_experts
from expertctl.routing.decision import RoutingDecision, score_prompt
from expertctl.routing.encoder import Encoder, find_minilm, open_encoder
from expertctl.routing.features import extract_features
from expertctl.routing.index import RoutingIndex
from expertctl.routing.prompt_normalisation import normalise_prompt
from expertctl.routing.request import RouteRequest
from expertctl.store.base_record import StoredBase
from expertctl.store.bases import BaseStore

CLINC = Path(__file__).parents[2] / "shared" / "data" / "clinc150" / "data_full.json"
SEEDS, SHOTS = 10, (10, 5)
PUBLISHED = {10: 0.9326}
TARGETS = {
    ("accuracy", 10): ">= 0.94",
    ("accuracy", 5): ">= 0.9",
    ("answered and right", 10): ">= 0.88",
    ("left to the base", 10): ">= 0.75",
}
_BETWEEN_WORDS = re.compile(r"[^a-z0-9]+")
_LONGEST_NAME = 60

Labelled = Sequence[tuple[str, str | None]]
"""Texts and their labels; ``None`` is out of scope."""


@dataclass(frozen=True, slots=True)
class RoutingShares:
    """The shares of one draw of examples; of prompts in scope unless stated otherwise."""

    accuracy: float  # the best candidate is the right one, used or not
    answered: float  # used and right
    wrong: float  # used and wrong
    out_of_scope: float | None  # of those out of scope: the base answers
    nearest: float
    centroid: float


def main() -> None:
    """Command line: ``--json`` for the document, else a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.routing_quality")
    parser.add_argument("--train", type=Path)
    parser.add_argument("--test", type=Path)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--shots", type=int, nargs="+", default=SHOTS)
    parser.add_argument("--encoder", default="minilm" if find_minilm() else "lexical")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if bool(options.train) != bool(options.test):
        parser.error("--train and --test go together")
    if options.train:
        data = read_labelled(options.train), read_labelled(options.test)
    elif CLINC.exists():
        data = read_clinc(CLINC)
    else:
        data = None
    document = (
        measure_encoder(*data, options.encoder, shots=options.shots, seeds=options.seeds)
        if data
        else make_document(options.encoder, 0, [_make_missing_document()])
    )
    print(json.dumps(document) if options.json else format_table(document))


def measure_encoder(
    train: Labelled, test: Labelled, encoder: str, *, shots: Sequence[int], seeds: int
) -> dict[str, object]:
    """Return the document of all rows."""
    memorised = MemoisingEncoder(open_encoder(encoder))
    memorised.encode_for_rerank([text for text, _ in test])
    rows: list[Row] = []
    with TemporaryDirectory() as folder:
        setting = RoutingSetup.create(Path(folder), memorised)
        for n in shots:
            results = [setting.measure(train, test, n=n, seed=seed) for seed in range(seeds)]
            rows += _make_rows(n, results)
    return make_document(encoder, seeds, rows)


def make_document(encoder: str, seeds: int, rows: Sequence[Row]) -> dict[str, object]:
    """Return the table that the command prints."""
    return {
        "name": "routing_quality",
        "machine": describe_machine(),
        "encoder": encoder,
        "seeds": seeds,
        "rows": [asdict(row) for row in rows],
    }


def _make_missing_document() -> Row:
    how = "CLINC150 is not beside the project; name files with --train and --test"
    return make_absent_row(
        "10 examples: accuracy", rival="-", install=how, target=TARGETS["accuracy", 10]
    )


@dataclass(frozen=True, slots=True)
class RoutingSetup:
    """Creates experts: a folder, an encoder, a base and an expert that fits it."""

    folder: Path
    encoder: Encoder
    base: StoredBase
    like: InstalledExpert

    @classmethod
    def create(cls, folder: Path, encoder: Encoder) -> "RoutingSetup":
        """Install the starter pack, to have a base."""
        home = make_home(folder / "home")
        base = BaseSelector(BaseStore(home.bases)).find_default()
        assert base is not None, "the starter pack brings one"
        return cls(folder, encoder, base, list_starter_experts(home)[0])

    def measure(self, train: Labelled, test: Labelled, *, n: int, seed: int) -> RoutingShares:
        """Draw examples, make experts of them, and route every test text."""
        drawn = draw_examples(train, n=n, seed=seed)
        described = describe_labels(drawn)
        experts = make_experts(described, self.like)
        index = RoutingIndex(self.folder / f"{n}-{seed}", self.encoder)
        roster = find_eligible_experts(
            RouteRequest(prompt="any"), experts, base=self.base, index=index
        )
        names = dict(zip((expert.digest for expert in experts), drawn, strict=True))
        by_position = {at: names[expert.digest] for at, expert in roster.by_position.items()}
        return _score(
            [(label, *self._route_text(roster, index, text, by_position)) for text, label in test]
        )

    def _route_text(
        self, roster: EligibleExperts, index: RoutingIndex, text: str, labels: Mapping[int, str]
    ) -> tuple[str | None, str | None, str, str]:
        """Return the label used, the best label, the nearest example's and the centroid's."""
        seen = normalise_prompt(text, roster.names)
        encoded = self.encoder.encode_for_rerank([seen])
        features = extract_features(text, normalised=seen)
        decision = score_prompt(roster, index, features, encoded, lambda _: None)
        nearest, centroid = _find_nearest(index, encoded.rows[0])
        used = None if decision.leader is None else labels[decision.leader]
        return used, labels.get(_find_best(decision)), labels[nearest], labels[centroid]


def read_labelled(path: Path) -> Labelled:
    """Read lines of ``{"text": …, "label": …}``."""
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [(line["text"], _check_label(line["label"])) for line in lines]


def read_clinc(path: Path) -> tuple[Labelled, Labelled]:
    """Read the training texts of CLINC150, and its test texts with out-of-scope ones last."""
    splits = json.loads(path.read_text(encoding="utf-8"))
    test = [*splits["test"], *((text, None) for text, _ in splits["oos_test"])]
    return [(text, label) for text, label in splits["train"]], [(t, label) for t, label in test]


def draw_examples(train: Labelled, *, n: int, seed: int) -> dict[str, tuple[str, ...]]:
    """Draw so many examples of every label, or all if there are fewer."""
    texts: dict[str, list[str]] = {}
    for text, label in train:
        if label is not None:
            texts.setdefault(label, []).append(text)
    rng = random.Random(seed)  # a sample
    return {
        label: tuple(rng.sample(texts[label], min(n, len(texts[label])))) for label in sorted(texts)
    }


def describe_labels(drawn: Mapping[str, tuple[str, ...]]) -> list[DescribedExpert]:
    """Return the expert of every label; labels with equal names get a number."""
    made: dict[str, DescribedExpert] = {}
    for number, (label, examples) in enumerate(drawn.items()):
        described = describe_label(label, examples)
        if described.name in made:
            described = replace(described, name=f"{described.name}-{number}")
        made[described.name] = described
    return list(made.values())


def describe_label(label: str, examples: tuple[str, ...]) -> DescribedExpert:
    """Return the expert of a label."""
    words = [word for word in _BETWEEN_WORDS.split(label.lower()) if word]
    return DescribedExpert(
        name=f"intents/{'-'.join(words)[:_LONGEST_NAME].strip('-') or 'unnamed'}",
        description=" ".join(words) or label,
        keywords=(),
        examples=examples,
    )


def _check_label(label: object) -> str | None:
    return None if label is None else str(label)


def _find_best(decision: RoutingDecision) -> int:
    """Return the best candidate, whether or not its score reaches the threshold."""
    if decision.leader is not None:
        return decision.leader
    return max(decision.scores, key=lambda at: decision.scores[at].score, default=-1)


def _find_nearest(index: RoutingIndex, query: np.ndarray) -> tuple[int, int]:
    """Return the expert of the nearest text, and that of the nearest centroid."""
    table = index.table
    cosines = table.rows @ query
    centroids = np.add.reduceat(table.rows, table.starts)
    centroids /= np.linalg.norm(centroids, axis=1, keepdims=True)
    return int(table.owners[cosines.argmax()]), int((centroids @ query).argmax())


def _score(routed: Sequence[tuple[str | None, str | None, str | None, str, str]]) -> RoutingShares:
    inside = [each for each in routed if each[0] is not None]
    outside = [each for each in routed if each[0] is None]
    return RoutingShares(
        accuracy=mean(best == label for label, _, best, _, _ in inside),
        answered=mean(used == label for label, used, _, _, _ in inside),
        wrong=mean(used not in {label, None} for label, used, _, _, _ in inside),
        out_of_scope=mean(used is None for _, used, _, _, _ in outside) if outside else None,
        nearest=mean(near == label for label, _, _, near, _ in inside),
        centroid=mean(centroid == label for label, _, _, _, centroid in inside),
    )


def _make_rows(n: int, results: Sequence[RoutingShares]) -> Iterator[Row]:
    accuracy = [result.accuracy for result in results]
    centroid = mean(result.centroid for result in results)
    nearest = mean(result.nearest for result in results)
    yield _make_row("accuracy", n, accuracy, rival="nearest example", theirs=nearest)
    yield _make_row("accuracy", n, accuracy, rival="centroid", theirs=centroid)
    if n in PUBLISHED:
        yield _make_row("accuracy", n, accuracy, rival="published, CLINC150", theirs=PUBLISHED[n])
    yield _make_row("answered and right", n, [r.answered for r in results])
    yield _make_row("answered and wrong", n, [r.wrong for r in results])
    outside = [r.out_of_scope for r in results if r.out_of_scope is not None]
    if outside:
        yield _make_row("left to the base", n, outside)


def _make_row(
    what: str, n: int, shares: Sequence[float], *, rival: str = "-", theirs: float | None = None
) -> Row:
    target, ours = TARGETS.get((what, n)), mean(shares)
    quartiles = quantiles(shares, n=4) if len(shares) > 1 else [ours] * 3
    return Row(
        case=f"{n} examples: {what}",
        ours=round(ours, 4),
        rival=rival,
        theirs=None if theirs is None else round(theirs, 4),
        unit="",
        better="lower" if what == "answered and wrong" else "higher",
        ratio=None if theirs is None else round(ours / theirs, 3),
        spread=(round(quartiles[0], 4), round(quartiles[2], 4)),
        target=target,
        ok=None if target is None else ours >= float(target.split()[1]),
    )


if __name__ == "__main__":
    main()
