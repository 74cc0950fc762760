"""Prompts that a package with examples of all subjects takes from other experts, flagged or not.

Experts are made from the intents of a data set in the layout of CLINC150, in the file that
``EXPERT_INTENTS`` names: five examples each, together with one package that has 200 texts drawn
from all intents. Ours is the router as it is, which flags that package; the rival is the same
router without the flag. Figures are the percentage of test prompts that are answered correctly.
"""

import json
import os
import random
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Self

from benchmarks.harness import Row, main
from benchmarks.routing_home import (
    DescribedExpert,
    RoutePrompt,
    list_starter_experts,
    make_experts,
    make_home,
    make_router,
)
from expertctl.routing.candidate import InstalledExpert
from expertctl.routing.encoder import find_minilm
from expertctl.routing.index import RoutingIndex
from expertctl.routing.planner import Planner
from expertctl.routing.vetting import vet_experts
from expertctl.settings import Home, Settings

INTENTS = "EXPERT_INTENTS"
SIZES = (5, 20)
"""The numbers of legitimate experts."""
EXAMPLES, COPIED_EXAMPLES, PROMPTS = 5, 200, 100
KINDS = ("theirs right", "other intents' left to the base", "out of scope left to the base")
CASES = ("without", "plain", "flagged")
"""The package of all subjects is absent, present without a flag, or flagged."""
CATCH_ALL = "grabber/helper"
DESCRIPTIONS = (
    "A helpful assistant for everything.",
    "Answers questions of all kinds.",
    "Does what you ask for.",
    "The best expert for every task.",
    "A general helper for daily life.",
)


@dataclass(frozen=True, slots=True)
class IntentDataset:
    """Utterances by intent, those of a test, and out-of-scope ones."""

    texts: dict[str, list[str]]
    tests: list[tuple[str, str]]
    outside: list[str]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a data set."""
        document = json.loads(path.read_bytes())
        texts: dict[str, list[str]] = defaultdict(list)
        for text, label in document["train"]:
            texts[_make_name(label)].append(text)
        tests = [(text, _make_name(label)) for text, label in document["test"]]
        return cls(dict(texts), tests, [text for text, _ in document["oos_test"]])


@dataclass(frozen=True, slots=True)
class IntentSample:
    """Some intents, a package of all subjects, and three kinds of prompts."""

    honest: tuple[DescribedExpert, ...]
    catch_all: DescribedExpert
    honest_prompts: tuple[tuple[str, str], ...]
    other_prompts: tuple[str, ...]
    out_of_scope: tuple[str, ...]

    @classmethod
    def sample(cls, intents: IntentDataset, size: int, number: int) -> Self:
        """Draw with a separate seed."""
        draw = random.Random(1_000 * size + number)
        names = draw.sample(sorted(intents.texts), size)
        honest = tuple(_describe(n, draw.sample(intents.texts[n], EXAMPLES)) for n in names)
        everything = [text for texts in intents.texts.values() for text in texts]
        stolen = tuple(draw.sample(everything, COPIED_EXAMPLES))
        described = DESCRIPTIONS[number % len(DESCRIPTIONS)]
        theirs = [test for test in intents.tests if test[1] in names]
        others = [text for text, name in intents.tests if name not in names]
        return cls(
            honest,
            DescribedExpert(CATCH_ALL, described, (), stolen),
            tuple(draw.sample(theirs, PROMPTS)),
            tuple(draw.sample(others, PROMPTS)),
            tuple(draw.sample(intents.outside, PROMPTS)),
        )

    def score(self, choose: RoutePrompt) -> tuple[float, ...]:
        """Return the percentage of each of `KINDS` that is answered correctly."""
        theirs = [choose(prompt) == (name,) for prompt, name in self.honest_prompts]
        alone = [
            [choose(prompt) == () for prompt in left]
            for left in (self.other_prompts, self.out_of_scope)
        ]
        return tuple(100 * mean(right) for right in (theirs, *alone))


def measure(rounds: int) -> Sequence[Row]:
    """Route the prompts of each draw with the package, flagged and not, and without it."""
    data = os.environ.get(INTENTS)
    if data is None or find_minilm() is None:
        return [
            _make_missing_rows(
                f"needs {INTENTS}=FILE in the layout of CLINC150, and the extra `minilm`"
            )
        ]
    intents = IntentDataset.read(Path(data))
    with tempfile.TemporaryDirectory() as folder:
        home = make_home(Path(folder) / "home")
        return [row for size in SIZES for row in _rows(home, intents, size, rounds)]


def _rows(home: Home, intents: IntentDataset, size: int, rounds: int) -> list[Row]:
    draws = [IntentSample.sample(intents, size, number) for number in range(rounds)]
    shares = {case: [_measure_case(home, draw, case=case) for draw in draws] for case in CASES}
    return make_rows(size, shares)


def make_rows(size: int, shares: Mapping[str, Sequence[tuple[float, ...]]]) -> list[Row]:
    """Return a row for each of `KINDS`; ``shares`` are those of each draw, by case."""

    def share(case: str, kind: int) -> float:
        return mean(each[kind] for each in shares[case])

    return [
        Row(
            case=f"{size} experts, {name}",
            ours=round(share("flagged", kind), 1),
            rival="beside it, not flagged",
            theirs=round(share("plain", kind), 1),
            unit="%",
            better="higher",
            ratio=None,
            spread=None,
            note=f"without it {share('without', kind):.1f} %; {len(shares['flagged'])} draws",
        )
        for kind, name in enumerate(KINDS)
    ]


def _measure_case(home: Home, draw: IntentSample, *, case: str) -> tuple[float, ...]:
    """Install nothing: experts are in memory, their vectors and flags in a separate folder."""
    planner = Planner.open(Settings(home, encoder="minilm"))
    with tempfile.TemporaryDirectory() as folder:
        own = replace(planner, index=RoutingIndex(Path(folder), planner.index.encoder))
        described = [*draw.honest, *(() if case == "without" else (draw.catch_all,))]
        experts = make_experts(described, list_starter_experts(home)[0])
        if case == "flagged":
            _flag_experts(experts, own.index)
        return draw.score(make_router(own, experts))


def _flag_experts(experts: Sequence[InstalledExpert], index: RoutingIndex) -> None:
    manifests = {expert.digest: expert.manifest for expert in experts}
    index.add(manifests)
    flags = vet_experts(manifests, index)
    assert [bool(flags[expert.digest]) for expert in experts] == [False] * (len(experts) - 1) + [
        True
    ]


def _describe(name: str, texts: Sequence[str]) -> DescribedExpert:
    return DescribedExpert(name, name.partition("/")[2].replace("-", " "), (), tuple(texts))


def _make_name(label: str) -> str:
    return f"intents/{label.replace('_', '-')}"


def _make_missing_rows(why: str) -> Row:
    return Row("a package about everything", None, "-", None, "%", "higher", None, None, note=why)


if __name__ == "__main__":
    main("grab_all", measure, rounds=5)
