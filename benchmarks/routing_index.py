"""The routing index at scale: search, filters, memory, and what installing one expert costs.

The rival of a search is the bare query of hnswlib on the same graph (M = 16, the smallest ef with
recall@10 of 0.99). Rows are drawn with the spectrum of real vectors; `--rows` may be given several
times and reach 1,000,000, and `--folder` keeps what was built for the next run.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import numpy as np
import psutil

from benchmarks.harness import (
    Row,
    Run,
    compare,
    describe_machine,
    format_table,
    judge,
    make_absent_row,
    time_action,
)
from benchmarks.random_rows import RandomEncoder, make_random_prompts, make_random_table
from expertctl.reference import Digest
from expertctl.routing.encoder import Encoder, ExpertTexts, open_encoder
from expertctl.routing.index import RoutingIndex
from expertctl.routing.vector_files import VectorFiles
from expertctl.routing.vector_search import (
    RECALL,
    HnswGraph,
    build_graph,
    find_nearest_exact,
    load_graph,
    read_record,
    save_graph,
)
from expertctl.routing.vector_table import Rows, SearchFilter, Vectors, VectorTable
from expertctl.schema.manifest import BaseRequirement, CompositionRules, Decoding, Manifest, Routing

NAME = "routing_index"
ABSENT = {"rival": "hnswlib", "install": "pip install 'expertctl[ann]'"}
_WORDS = """
account add answer append average balance book bug build cancel card change check city clean code
column compare convert count country credit currency date delete describe distance email error
explain export extract file find flight format from function graph group hotel image import index
invoice join json kitchen label length letter limit list loan math measure meeting merge message
month music name number order parse password payment phone plan plot poem price print query random
rate recipe record rename report request reset review route sales schedule score search select send
sentence sort song split status stock sum table tax test text ticket time title train translate
travel update user value verb video weather week weight word write year
"""
WORDS = _WORDS.split()
QueryItem = TypeVar("QueryItem")
ROWS = (10_000, 100_000)
COUNT = 32
SHARES = (0.5, 0.1, 0.01, 0.001)
PROMPTS, TIMED, SOME, TEN = 500, 100, 20, 10
BLOCK = 50_000
WIDTHS = (
    10,
    12,
    16,
    20,
    24,
    32,
    40,
    48,
    64,
    80,
    96,
    128,
    160,
    192,
    256,
    384,
    512,
    768,
    1024,
    1536,
    2048,
    3072,
    4096,
    6144,
)


@dataclass(frozen=True, slots=True)
class BuiltIndex:
    """An index that is ready, a bare graph of the same file, and prompts."""

    index: RoutingIndex
    table: VectorTable
    graph: HnswGraph
    prompts: Vectors
    exact: list[Rows]
    """The ten closest rows of every prompt."""
    note: str


def measure(size: int, folder: Path, rounds: int) -> list[Row]:
    """Measure one size."""
    built = build_index(size, folder)
    width, timed_ones = find_smallest_width(built), built.prompts[:TIMED]
    search = compare(
        f"search {size} rows, {COUNT} closest",
        make_mean_run(timed_ones, lambda prompt: built.index.search(prompt, count=COUNT)),
        make_mean_run(timed_ones, lambda prompt: built.graph.index.knn_query(prompt, k=TEN)),
        rival=f"hnswlib, 10 closest, ef {width}",
        rounds=rounds,
        target="<= 2.0",
    )
    recall = _measure_recall(built, built.exact, None)
    filters = [_make_filter(built.table, share) for share in SHARES]
    truths = _find_ten_closest(built.table, built.prompts, filters)
    told = zip(SHARES, filters, truths, strict=True)
    rows = [
        _compare_filtered(built, share, allowed, exact, rounds) for share, allowed, exact in told
    ]
    return [replace(search, note=built.note), _make_recall_row(f"{size} rows", recall), *rows]


def compare_install(experts: int, encoder: Encoder, rounds: int) -> list[Row]:
    """Compare installing one expert into many with making all vectors again."""
    manifests = [_make_manifest(n) for n in range(experts + rounds + 1)]
    listed = {Digest.compute(manifest.ref.encode()): manifest for manifest in manifests}
    many = dict(islice(listed.items(), experts))
    later = iter([(d, m) for d, m in listed.items() if d not in many])
    with TemporaryDirectory() as folder:
        index = RoutingIndex(Path(folder), encoder)
        start = time.perf_counter()
        index.rebuild(many)
        rebuilt = time.perf_counter() - start
        installs = [_time_install(Path(folder), encoder, *next(later)) for _ in range(rounds)]
    texts = [text for m in many.values() for text in ExpertTexts.from_manifest(m).all]
    sample = time_action(lambda: encoder.encode_for_rerank(texts[:1000]))() * len(texts) / 1000
    once = time_action(lambda: encoder.encode_for_rerank(texts[: len(texts) // experts]))()
    median = statistics.median(installs)
    ratios = sorted(seconds / rebuilt for seconds in installs)
    row = Row(
        case=f"install one expert into {experts}, {encoder.name}",
        ours=round(median * 1000, 1),
        rival="all made again",
        theirs=round(rebuilt * 1000, 1),
        unit="ms",
        better="lower",
        ratio=round(median / rebuilt, 6),
        spread=(round(ratios[0], 6), round(ratios[-1], 6)),
        note=f"of that encoding: {once * 1000:.1f} ms, and about {sample:.0f} s",
    )
    return [judge(row, "<= 0.02")]


def build_index(size: int, folder: Path) -> BuiltIndex:
    """Open the index of a folder, which is built first where there is none."""
    encoder = RandomEncoder()
    files = VectorFiles(folder, dimensions=encoder.dimensions)
    table = files.read()
    note = "built before"
    if table is None or read_record(folder, table) is None:
        folder.mkdir(parents=True, exist_ok=True)
        table = files.replace(make_random_table(size))
        note = _build_graph(folder, table)
    before = psutil.Process().memory_info().rss
    index = RoutingIndex(folder, encoder)
    index.load_search_graph()
    prompts = make_random_prompts(PROMPTS, rows=size)
    index.search(prompts[0])
    resident = psutil.Process().memory_info().rss - before
    bare, record = load_graph(folder, table), read_record(folder, table)
    assert bare is not None
    assert record is not None
    files_size = record.size + table.rows.nbytes
    note += f"; files {files_size >> 20} MiB; loaded, {resident >> 20} MiB of memory"
    note += f"; ef {record.width}, recall@10 of held out rows {record.recall}"
    (exact,) = _find_ten_closest(table, prompts, [None])
    return BuiltIndex(index, index.table, bare, prompts, exact, note)


def _build_graph(folder: Path, table: VectorTable) -> str:
    start, used = time.perf_counter(), time.process_time()
    graph = build_graph(table)
    built, used = time.perf_counter() - start, time.process_time() - used
    assert graph is not None
    save_graph(folder, graph, table)
    saved = time.perf_counter() - start - built
    return f"built in {built:.0f} s ({used:.0f} s of a core), saved in {saved:.1f} s"


def find_smallest_width(built: BuiltIndex) -> int:
    """Set and return the smallest ef at which the bare graph finds enough of the ten closest."""
    for width in WIDTHS:
        built.graph.index.set_ef(width)
        found = built.graph.index.knn_query(built.prompts, k=TEN)[0]
        hits = [np.isin(exact, rows).sum() for exact, rows in zip(built.exact, found, strict=True)]
        if sum(hits) >= RECALL * TEN * len(hits):
            break
    return width


def _make_filter(table: VectorTable, share: float) -> SearchFilter:
    """Return a filter that lets a share of the experts through."""
    experts = len(table)
    mask = np.zeros(experts, np.bool_)
    mask[np.random.default_rng(2).permutation(experts)[: max(int(experts * share), TEN)]] = True
    return SearchFilter(table, mask)


def _compare_filtered(
    built: BuiltIndex, share: float, allowed: SearchFilter, exact: list[Rows], rounds: int
) -> Row:
    """Compare a search among a share of the experts with comparing just these."""
    recall = _measure_recall(built, exact, allowed)
    some = built.prompts[:SOME]
    times = compare(
        "",
        make_mean_run(
            some, lambda prompt: built.index.search(prompt, count=COUNT, allowed=allowed)
        ),
        make_mean_run(
            some,
            lambda prompt: find_nearest_exact(built.table, prompt, count=COUNT, allowed=allowed),
        ),
        rival="",
        rounds=rounds,
    )
    note = f"{times.ours} ms; comparing just these {allowed.row_count} rows {times.theirs} ms"
    return _make_recall_row(
        f"{100 * share:g} % of {len(built.table.rows)} rows allowed", recall, note
    )


def _measure_recall(built: BuiltIndex, exact: list[Rows], allowed: SearchFilter | None) -> float:
    """Return the share of the ten closest rows whose experts a search finds."""
    owners = built.table.owners
    hits = 0
    for prompt, rows in zip(built.prompts, exact, strict=True):
        found = built.index.search(prompt, count=COUNT, allowed=allowed)
        hits += int(np.isin(owners[rows], found.experts).sum())
    return hits / sum(map(len, exact))


def _make_recall_row(case: str, recall: float, note: str | None = None) -> Row:
    value = round(recall, 4)
    row = Row(
        f"recall@10, {case}", value, "exact search", 1.0, "", "higher", value, None, note=note
    )
    return judge(row, f">= {RECALL}")


def _find_ten_closest(
    table: VectorTable, prompts: Vectors, filters: Sequence[SearchFilter | None]
) -> list[list[Rows]]:
    """Return, for every filter, the ten closest rows of every prompt."""
    best = [([np.zeros(0, np.int64)] * len(prompts), [np.zeros(0, np.float32)] * len(prompts))]
    best = [(list(rows), list(cosines)) for rows, cosines in best * len(filters)]
    for start in range(0, len(table.rows), BLOCK):
        product = prompts @ table.rows[start : start + BLOCK].T
        owners = table.owners[start : start + BLOCK]
        for (rows, cosines), allowed in zip(best, filters, strict=True):
            passing = np.arange(len(owners))
            if allowed is not None:
                passing = np.flatnonzero(allowed.mask[owners])
            for n in range(len(prompts)):
                both = np.concatenate([cosines[n], product[n, passing]])
                kept = np.argsort(-both)[:TEN] if len(both) <= TEN else np.argpartition(-both, TEN)
                numbers = np.concatenate([rows[n], start + passing])
                rows[n], cosines[n] = numbers[kept[:TEN]], both[kept[:TEN]]
    return [rows for rows, _ in best]


def make_mean_run(
    prompts: Sequence[QueryItem] | Vectors, search: Callable[[QueryItem], object]
) -> Run:
    """Return a run that gives the mean seconds of one search."""

    def run() -> float:
        start = time.perf_counter()
        for prompt in prompts:
            search(prompt)
        return (time.perf_counter() - start) / len(prompts)

    return run


def _time_install(folder: Path, encoder: Encoder, digest: Digest, manifest: Manifest) -> float:
    """Return the seconds that a process which has read nothing takes to add one expert."""
    start = time.perf_counter()
    RoutingIndex(folder, encoder).add({digest: manifest})
    return time.perf_counter() - start


def _make_manifest(number: int) -> Manifest:
    """Return a manifest with ten examples of six to twelve words, different for every number."""
    rng = random.Random(number)
    examples = [" ".join(rng.choices(WORDS, k=rng.randint(6, 12))) for _ in range(TEN)]
    digest = str(Digest.compute(b"base"))
    return Manifest(
        schema=1,
        name=f"acme/expert{number}",
        version="1.0.0",
        description=" ".join(rng.choices(WORDS, k=10)),
        license="Apache-2.0",
        base=BaseRequirement("acme/base", digest, digest),
        adapters=(),
        routing=Routing(examples=tuple(examples), keywords=tuple(rng.sample(WORDS, 4))),
        composition=CompositionRules(),
        decoding=Decoding(),
    )


def main() -> None:
    """Command line: which sizes, and where to keep what was built."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{NAME}")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rows", type=int, action="append", help="sizes to search")
    parser.add_argument("--experts", type=int, default=10_000, help="how many to install into")
    parser.add_argument("--encoder", default="lexical", help="the setting for installing")
    parser.add_argument("--folder", type=Path, help="keep what was built here")
    options = parser.parse_args()
    rows = _measure_all(options) if find_spec("hnswlib") else [make_absent_row("search", **ABSENT)]
    if options.experts:
        rows += compare_install(options.experts, open_encoder(options.encoder), options.rounds)
    document: dict[str, object] = {
        "name": NAME,
        "machine": describe_machine(),
        "rows": [asdict(row) for row in rows],
    }
    print(json.dumps(document) if options.json else format_table(document))


def _measure_all(options: argparse.Namespace) -> list[Row]:
    with TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        sizes = options.rows or ROWS
        return [row for n in sizes for row in measure(n, folder / str(n), options.rounds)]


if __name__ == "__main__":
    main()
