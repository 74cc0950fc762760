"""The time of a routing decision, against the bare query of hnswlib on the same index.

Ours is everything that follows the encoding of a prompt: normalisation, features, search, vetoes,
the reranker, the score. The rival finds ten rows in the same graph (M = 16) at the smallest ``ef``
with recall@10 of 0.99. Prompts are the examples of the starter experts; their rows are drawn with
the spectrum of real ones. Encoding is not part of either side.

``--large`` measures 100,000 experts too. That takes 10 GB on the disk, 5 GB of memory for the graph
and as much again in the page cache, and half an hour if ``--folder`` has no graph yet.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.harness import Row, compare, describe_machine, format_table, make_absent_row
from benchmarks.random_rows import (
    CLUSTER,
    RandomDeepEncoder,
    make_random_deep_prompts,
    write_random_deep_rows,
)
from benchmarks.routing_home import DescribedExpert, list_starter_experts, make_experts, make_home
from benchmarks.routing_index import (
    ABSENT,
    TEN,
    TIMED,
    build_index,
    find_smallest_width,
    make_mean_run,
)
from expertctl.routing.base_choice import BaseSelector
from expertctl.routing.candidate import EligibleExperts, InstalledExpert, find_eligible_experts
from expertctl.routing.decision import RoutingDecision, score_prompt
from expertctl.routing.features import extract_features
from expertctl.routing.index import RERANK_FOLDER, RoutingIndex
from expertctl.routing.prompt_normalisation import normalise_prompt
from expertctl.routing.request import RouteRequest
from expertctl.routing.reranker import SMALL_RERANK
from expertctl.routing.vector_table import EncodedTexts, VectorTable
from expertctl.settings import Home
from expertctl.store.bases import BaseStore

NAME = "routing_cost"
EXPERTS, LARGE = 1_000, 100_000
TARGET = "<= 3.0"


@dataclass(frozen=True, slots=True)
class PromptSample:
    """A prompt and its vectors."""

    text: str
    encoded: EncodedTexts


@dataclass(frozen=True, slots=True)
class BenchmarkedRouter:
    """The state that all prompts share."""

    roster: EligibleExperts
    index: RoutingIndex

    def decide(self, asked: PromptSample) -> RoutingDecision:
        """Decide one prompt."""
        seen = normalise_prompt(asked.text, self.roster.names)
        features = extract_features(asked.text, normalised=seen)
        return score_prompt(self.roster, self.index, features, asked.encoded, _report_no_usage)

    def is_reranked_once(self, asked: PromptSample) -> bool:
        """Return whether the reranker needed only the closest few experts."""
        return len(self.decide(asked).scores) <= SMALL_RERANK.candidates


def measure(experts: int, folder: Path, rounds: int) -> list[Row]:
    """Measure one size."""
    built = build_index(experts * CLUSTER, folder)
    width = find_smallest_width(built)
    if not (folder / RERANK_FOLDER).exists():
        write_random_deep_rows(folder / RERANK_FOLDER, built.table)
    bare, table, note = built.graph, built.table, built.note
    del built  # its index would be one graph more in memory
    router, texts = _open_router(folder, table)
    drawn = make_random_deep_prompts(TIMED, rows=experts * CLUSTER)
    asked = [PromptSample(texts[n % len(texts)], encoded) for n, encoded in enumerate(drawn)]
    settled = [each for each in asked if router.is_reranked_once(each)]
    open_ones = [each for each in asked if not router.is_reranked_once(each)]

    def row(case: str, some: Sequence[PromptSample], target: str | None) -> Row:
        return compare(
            f"{case}, {experts} experts",
            make_mean_run(some, router.decide),
            make_mean_run(some, lambda a: bare.index.knn_query(a.encoded.rows[0], k=TEN)),
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


def _open_router(folder: Path, table: VectorTable) -> tuple[BenchmarkedRouter, list[str]]:
    """Return a router for the experts of a table, and prompts."""
    with TemporaryDirectory() as root:
        home = make_home(Path(root))
        index = RoutingIndex(folder, RandomDeepEncoder())
        index.load_search_graph()
        starter = list_starter_experts(home)
        roster = _make_eligible_experts(home, index, table, starter[0])
    index.search(index.table.rows[0], allowed=roster.search_filter)
    return BenchmarkedRouter(roster, index), [
        example for expert in starter for example in expert.manifest.routing.examples
    ]


def _make_eligible_experts(
    home: Home, index: RoutingIndex, table: VectorTable, like: InstalledExpert
) -> EligibleExperts:
    """Return as many eligible experts as the table has entries, each with its digest."""
    described = [
        DescribedExpert(f"acme/expert-{n}", f"Answers questions of kind {n}.", (f"kind{n}",), ())
        for n in range(len(table))
    ]
    experts = [
        replace(expert, stored=replace(expert.stored, content_digest=table.digest_at(n)))
        for n, expert in enumerate(make_experts(described, like))
    ]
    base = BaseSelector(BaseStore(home.bases)).find_default()
    assert base is not None, "the starter pack brings one"
    return find_eligible_experts(RouteRequest(prompt="any"), experts, base=base, index=index)


def _report_no_usage(_: InstalledExpert) -> None:
    """Report no usage."""


def main() -> None:
    """Command line: the sizes, and the folder for what was built."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{NAME}")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--large", action="store_true", help="100,000 experts too")
    parser.add_argument("--folder", type=Path, help="keep what was built here")
    options = parser.parse_args()
    rows = (
        _measure_all(options) if find_spec("hnswlib") else [make_absent_row("a decision", **ABSENT)]
    )
    document: dict[str, object] = {
        "name": NAME,
        "machine": describe_machine(),
        "rows": [asdict(row) for row in rows],
    }
    print(json.dumps(document) if options.json else format_table(document))


def _measure_all(options: argparse.Namespace) -> list[Row]:
    sizes = [EXPERTS, LARGE] if options.large else [EXPERTS]
    with TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        return [row for n in sizes for row in measure(n, folder / str(n * CLUSTER), options.rounds)]


if __name__ == "__main__":
    main()
