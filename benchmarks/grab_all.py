"""What a package with examples about everything takes from honest experts, flagged and not.

Experts are made of intents of a data set in the layout of CLINC150, whose file ``EXPERT_INTENTS``
names: five examples each, and beside them one package with 200 texts drawn from all intents. Ours
is the router as it is, which flags that package; the rival is the same router without the flag.
Figures are the percentage of test prompts that are answered rightly.
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
from benchmarks.routed_home import Choose, Described, choosing, furnish, made_up, starter_experts
from expertctl.routing.candidate import Installed
from expertctl.routing.encoder import find_minilm
from expertctl.routing.index import RoutingIndex
from expertctl.routing.planner import Planner
from expertctl.routing.vetting import vet
from expertctl.settings import Home, Settings

INTENTS = "EXPERT_INTENTS"
SIZES = (5, 20)
"""How many honest experts there are."""
EXAMPLES, STOLEN, PROMPTS = 5, 200, 100
KINDS = ("theirs right", "other intents' left to the base", "out of scope left to the base")
CASES = ("without", "plain", "flagged")
"""The package about everything is absent, present but not flagged, or flagged."""
GRABBER = "grabber/helper"
DESCRIPTIONS = (
    "A helpful assistant for everything.",
    "Answers questions of all kinds.",
    "Does what you ask for.",
    "The best expert for every task.",
    "A general helper for daily life.",
)


@dataclass(frozen=True, slots=True)
class Intents:
    """Utterances by intent, those of a test, and those that are of no intent at all."""

    texts: dict[str, list[str]]
    tests: list[tuple[str, str]]
    outside: list[str]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a data set."""
        document = json.loads(path.read_bytes())
        texts: dict[str, list[str]] = defaultdict(list)
        for text, label in document["train"]:
            texts[_name(label)].append(text)
        tests = [(text, _name(label)) for text, label in document["test"]]
        return cls(dict(texts), tests, [text for text, _ in document["oos_test"]])


@dataclass(frozen=True, slots=True)
class Draw:
    """Some intents, a package about everything, prompts for the former and two sorts of others."""

    honest: tuple[Described, ...]
    grabber: Described
    theirs: tuple[tuple[str, str], ...]
    others: tuple[str, ...]
    outside: tuple[str, ...]

    @classmethod
    def of(cls, intents: Intents, size: int, number: int) -> Self:
        """Draw with a seed of its own."""
        draw = random.Random(1_000 * size + number)
        names = draw.sample(sorted(intents.texts), size)
        honest = tuple(_described(n, draw.sample(intents.texts[n], EXAMPLES)) for n in names)
        everything = [text for texts in intents.texts.values() for text in texts]
        stolen = tuple(draw.sample(everything, STOLEN))
        described = DESCRIPTIONS[number % len(DESCRIPTIONS)]
        theirs = [test for test in intents.tests if test[1] in names]
        others = [text for text, name in intents.tests if name not in names]
        return cls(
            honest,
            Described(GRABBER, described, (), stolen),
            tuple(draw.sample(theirs, PROMPTS)),
            tuple(draw.sample(others, PROMPTS)),
            tuple(draw.sample(intents.outside, PROMPTS)),
        )

    def rightly(self, choose: Choose) -> tuple[float, ...]:
        """Return which percentage of each of `KINDS` is answered rightly."""
        theirs = [choose(prompt) == (name,) for prompt, name in self.theirs]
        alone = [[choose(prompt) == () for prompt in left] for left in (self.others, self.outside)]
        return tuple(100 * mean(right) for right in (theirs, *alone))


def measure(rounds: int) -> Sequence[Row]:
    """Route the prompts of each draw with the package, flagged and not, and without it."""
    data = os.environ.get(INTENTS)
    if data is None or find_minilm() is None:
        return [_missing(f"needs {INTENTS}=FILE in the layout of CLINC150, and the extra `minilm`")]
    intents = Intents.read(Path(data))
    with tempfile.TemporaryDirectory() as folder:
        home = furnish(Path(folder) / "home")
        return [row for size in SIZES for row in _rows(home, intents, size, rounds)]


def _rows(home: Home, intents: Intents, size: int, rounds: int) -> list[Row]:
    draws = [Draw.of(intents, size, number) for number in range(rounds)]
    shares = {case: [_measured(home, draw, case=case) for draw in draws] for case in CASES}
    return compared(size, shares)


def compared(size: int, shares: Mapping[str, Sequence[tuple[float, ...]]]) -> list[Row]:
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


def _measured(home: Home, draw: Draw, *, case: str) -> tuple[float, ...]:
    """Install nothing: experts are in memory, their vectors and flags in a folder of their own."""
    planner = Planner.open(Settings(home, encoder="minilm"))
    with tempfile.TemporaryDirectory() as folder:
        own = replace(planner, index=RoutingIndex(Path(folder), planner.index.encoder))
        described = [*draw.honest, *(() if case == "without" else (draw.grabber,))]
        experts = made_up(described, starter_experts(home)[0])
        if case == "flagged":
            _judge(experts, own.index)
        return draw.rightly(choosing(own, experts))


def _judge(experts: Sequence[Installed], index: RoutingIndex) -> None:
    manifests = {expert.digest: expert.manifest for expert in experts}
    index.add(manifests)
    flags = vet(manifests, index)
    assert [bool(flags[expert.digest]) for expert in experts] == [False] * (len(experts) - 1) + [
        True
    ]


def _described(name: str, texts: Sequence[str]) -> Described:
    return Described(name, name.partition("/")[2].replace("-", " "), (), tuple(texts))


def _name(label: str) -> str:
    return f"intents/{label.replace('_', '-')}"


def _missing(why: str) -> Row:
    return Row("a package about everything", None, "-", None, "%", "higher", None, None, note=why)


if __name__ == "__main__":
    main("grab_all", measure, rounds=5)
