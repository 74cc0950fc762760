"""What a decision of the router costs beside the bare query of hnswlib on the same index.

Ours is all that happens once a prompt's vector is there: what the router looks at, features,
search, vetoes, the head, the score. The rival finds ten rows in the same graph (M = 16) at the
smallest ``ef`` with recall@10 of 0.99. Prompts are the examples of the starter experts, their rows
are drawn with the spectrum of real ones; encoding is not part of either side.

``--large`` measures 100,000 experts too. That takes 10 GB on the disk, 5 GB of memory for the graph
and as much again in the page cache, and half an hour where ``--folder`` has no graph yet.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.drawn_deep import DeepEncoder, deep_prompts, write_deep
from benchmarks.drawn_rows import CLUSTER
from benchmarks.harness import Row, absent, as_table, compare, machine
from benchmarks.routed_home import Described, furnish, made_up, starter_experts
from benchmarks.routing_index import ABSENT, TEN, TIMED, built_index, mean_of, smallest_width
from expertctl.routing.base_choice import BaseRule
from expertctl.routing.candidate import Installed
from expertctl.routing.decision import Decision, decide
from expertctl.routing.encoded import Encoded
from expertctl.routing.features import features_of
from expertctl.routing.head import FEW
from expertctl.routing.index import DEEP_FOLDER, RoutingIndex
from expertctl.routing.prompt_view import view
from expertctl.routing.request import RouteRequest
from expertctl.routing.roster import Roster
from expertctl.routing.router import roster_of
from expertctl.routing.vector_table import VectorTable
from expertctl.settings import Home
from expertctl.store.bases import BaseStore

NAME = "routing_cost"
EXPERTS, LARGE = 1_000, 100_000
TARGET = "<= 3.0"


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt with what an encoder made of it."""

    text: str
    encoded: Encoded


@dataclass(frozen=True, slots=True)
class Router:
    """What stays from prompt to prompt."""

    roster: Roster
    index: RoutingIndex

    def decide(self, asked: Asked) -> Decision:
        """Decide one prompt."""
        seen = view(asked.text, self.roster.names)
        features = features_of(asked.text, seen=seen)
        return decide(self.roster, self.index, features, asked.encoded, _nobody_judged)

    def is_settled(self, asked: Asked) -> bool:
        """Tell whether the head was content with the closest few."""
        return len(self.decide(asked).standings) <= FEW.candidates


def measure(experts: int, folder: Path, rounds: int) -> list[Row]:
    """Measure one size."""
    built = built_index(experts * CLUSTER, folder)
    width = smallest_width(built)
    if not (folder / DEEP_FOLDER).exists():
        write_deep(folder / DEEP_FOLDER, built.table)
    bare, table, note = built.bare, built.table, built.note
    del built  # its index would be one graph more in memory
    router, texts = _opened(folder, table)
    drawn = deep_prompts(TIMED, rows=experts * CLUSTER)
    asked = [Asked(texts[n % len(texts)], encoded) for n, encoded in enumerate(drawn)]
    settled = [each for each in asked if router.is_settled(each)]
    open_ones = [each for each in asked if not router.is_settled(each)]

    def row(case: str, some: Sequence[Asked], target: str | None) -> Row:
        return compare(
            f"{case}, {experts} experts",
            mean_of(some, router.decide),
            mean_of(some, lambda a: bare.index.knn_query(a.encoded.rows[0], k=TEN)),
            rival=f"hnswlib, 10 closest, ef {width}",
            rounds=rounds,
            target=target,
        )

    share = len(open_ones) / len(asked)
    note = f"{100 * share:.0f} % of prompts make the head look at more candidates; {note}"
    parts = [("settled by the closest few", settled), ("looking at more", open_ones)]
    rows = [replace(row("a decision", asked, TARGET), note=note)]
    rows += [row(case, some, None) for case, some in parts if some]
    return rows


def _opened(folder: Path, table: VectorTable) -> tuple[Router, list[str]]:
    """Return a router for the experts of a table, and prompts."""
    with TemporaryDirectory() as root:
        home = furnish(Path(root))
        index = RoutingIndex(folder, DeepEncoder())
        index.prepare()
        starter = starter_experts(home)
        roster = _roster(home, index, table, starter[0])
    index.search(index.table.rows[0], allowed=roster.allowed)
    return Router(roster, index), [
        example for expert in starter for example in expert.manifest.routing.examples
    ]


def _roster(home: Home, index: RoutingIndex, table: VectorTable, like: Installed) -> Roster:
    """Return a roster of as many experts as the table has entries, each with its digest."""
    described = [
        Described(f"acme/expert-{n}", f"Answers questions of kind {n}.", (f"kind{n}",), ())
        for n in range(len(table))
    ]
    experts = [
        replace(expert, stored=replace(expert.stored, content_digest=table.digest(n)))
        for n, expert in enumerate(made_up(described, like))
    ]
    base = BaseRule(BaseStore(home.bases)).default()
    assert base is not None, "the starter pack brings one"
    return roster_of(RouteRequest(prompt="any"), experts, base=base, index=index)


def _nobody_judged(_: Installed) -> None:
    """Know of no usage."""


def main() -> None:
    """Command line: which sizes, and where to keep what was built."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{NAME}")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--large", action="store_true", help="100,000 experts too")
    parser.add_argument("--folder", type=Path, help="keep what was built here")
    options = parser.parse_args()
    rows = _all_rows(options) if find_spec("hnswlib") else [absent("a decision", **ABSENT)]
    document: dict[str, object] = {
        "name": NAME,
        "machine": machine(),
        "rows": [asdict(row) for row in rows],
    }
    print(json.dumps(document) if options.json else as_table(document))


def _all_rows(options: argparse.Namespace) -> list[Row]:
    sizes = [EXPERTS, LARGE] if options.large else [EXPERTS]
    with TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        return [row for n in sizes for row in measure(n, folder / str(n * CLUSTER), options.rounds)]


if __name__ == "__main__":
    main()
