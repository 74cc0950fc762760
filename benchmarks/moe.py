"""Bases of routed experts: decoding with some in memory, prompts, memory, and hits.

The base has the shape of OLMoE-1B-7B, cut in layers, with random weights; each token of its
vocabulary asks for the experts that a trace says: one drawn by Zipf's law (1.0, seed 0), or with
``--trace`` one of a trained model, ``.npy`` with int16 [tokens, layers, used]. Every process has
two threads. *From memory*: experts that are not resident lie in memory that stands for memory
outside the device's budget. *From the disk*: the process may have less memory than the base takes
(RLIMIT_DATA), and the system forgets what was read of the file (posix_fadvise), so every missing
expert comes from the disk; we read the copy that a machine keeps of a base, past the system's file
cache (``--moe-cold direct``), the rival reads and packs the base's own bytes. Both have the same
bytes for experts; in bfloat16 ours are compact there, so more of them are in memory. Where the next
layer's experts are read ahead, a fifth of the guesses is made wrong.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks import engines as dense_engines
from benchmarks.cache_oracles import Trace
from benchmarks.engine_process import EngineProcess, ReadPrompt
from benchmarks.harness import (
    Row,
    Run,
    absent,
    as_table,
    compare_rates,
    judged,
    machine,
    take_turns,
)
from benchmarks.routed import on_device
from benchmarks.routed.budgeted import ANSWER, ANSWERS, Budgeted, Told, answering
from benchmarks.routed.engines import THREADS, WARM_UP, Setting, ours, transformers
from benchmarks.routed.hit_rows import SHARE, draw, hit_rows
from benchmarks.routed.readers import keep_copy
from benchmarks.routed.shape import RoutedShape, write_base
from benchmarks.routed.tasks import Figure, Follow, Keeping, RoutedTask, Tell
from benchmarks.routed.traces import drawn, shape_of, stored
from expertctl.cli.plot import check_picture
from expertctl.engine.kernels.scheme import Scheme
from expertctl.engine.memory import unused
from expertctl.engine.packed_base import packed_bytes
from expertctl.routing.request import Dtype

NAME = "moe"
TOKENS, DRIFT = 4000, 1000
LAYERS, FEW_LAYERS, ENOUGH = 4, 2, 14 << 30
"""How many layers the base has where so many bytes are free, and where they are not."""
STEPS, PROMPT = 24, 512
SHORT_TURNS = 5
"""Where all is in memory a turn takes a second, and the next may be a tenth slower: so many more
are taken in each round."""
LIMIT = 0.75
"""The memory that a process that reads from the disk may have, as a share of the base's size."""
IMPLEMENTATIONS = ("grouped_mm", "eager")
"""How transformers multiplies with experts; the better one counts."""
DTYPES: dict[Scheme, Dtype] = {
    Scheme.BFLOAT16: "bf16",
    Scheme.INT8: "int8",
    Scheme.INT4: "int4",
}
_LOOKED = "anonymous memory, looked at every 2 ms"
Process = EngineProcess[RoutedTask]


@dataclass(frozen=True, slots=True)
class Subject:
    """A base that was written, and the trace that its tokens follow."""

    directory: Path
    home: Path
    shape: RoutedShape
    trace: Trace
    simulates: str

    def setting(self, *keepings: Keeping, limit: float | None = None) -> Setting:
        """Return how decoders of it are held, `SHARE` of the experts resident."""
        tokens = len(self.trace)
        return Setting(self.directory, self.home, keepings, tokens, share=SHARE, limit=limit)


def measure(trace: Path | None, picture: Path | None, folder: Path, rounds: int) -> list[Row]:
    """Measure everything in a folder that is on the disk that counts."""
    layers = LAYERS if (unused() or 0) >= ENOUGH else FEW_LAYERS
    rows = _hits(trace, picture, layers)
    with _subject(trace, folder, layers) as subject:
        rows += from_memory(subject, rounds)
        for scheme in (Scheme.BFLOAT16, Scheme.INT8, Scheme.INT4):
            rows += from_disk(subject, rounds, scheme=scheme)
        tokens, simulates = len(subject.trace), subject.simulates
        rows.append(
            on_device.row(subject.directory, tokens=tokens, simulates=simulates, rounds=rounds)
        )
        for scheme in (Scheme.BFLOAT16, Scheme.INT8):
            rows += prompts(subject, scheme, rounds)
    with _subject(trace, folder, min(layers, FEW_LAYERS)) as small:
        rows += prompts(small, Scheme.FLOAT32, rounds)
    return rows


@contextmanager
def _subject(path: Path | None, folder: Path, layers: int) -> Iterator[Subject]:
    """Write a base, and delete it afterwards."""
    if path is None:
        shape, source = RoutedShape(layers), "requests by Zipf's law"
        trace = drawn(shape, TOKENS)
    else:
        trace = stored(path)
        shape, source = shape_of(trace, layers=layers), f"requests of {path.stem}"
        trace = trace[: shape.vocabulary, : shape.layers]
    simulates = (
        f"{shape.layers} of OLMoE's 16 layers, {shape.experts} experts, {shape.used} used, {source}"
    )
    with TemporaryDirectory(dir=folder) as directory:
        base = write_base(Path(directory), shape, trace)
        yield Subject(base, folder / "home", shape, trace, simulates)


def from_memory(subject: Subject, rounds: int) -> list[Row]:
    """Run all decoders in one process, in turns: they share the weights and the workers."""
    keepings = (Keeping.WHOLE, Keeping.CACHED, Keeping.LENT)
    with EngineProcess(ours(subject.setting(*keepings))) as process:
        runs = _follow(dict.fromkeys(keepings, process))
        seconds = take_turns(runs, rounds=SHORT_TURNS * rounds)
        misses, huge = (
            process.run(Tell(Keeping.LENT, figure), THREADS)
            for figure in (Figure.MISSES, Figure.HUGE)
        )
    lent = _decoded(
        f"decode, {SHARE:.0%} resident, cold experts in memory", seconds, Keeping.LENT, ">= 0.9"
    )
    cached = _decoded("decode, all resident, through the cache", seconds, Keeping.CACHED, ">= 0.95")
    about = f"{subject.simulates}, bf16; {huge:.0%} of the process in huge pages"
    note = f"{about}; {misses:.0%} of requests not in memory; blocks are lent"
    return [replace(cached, note=about), replace(lent, note=note)]


def from_disk(
    subject: Subject,
    rounds: int,
    *,
    scheme: Scheme = Scheme.BFLOAT16,
    limit: float | None = LIMIT,
) -> list[Row]:
    """Run each decoder in its own process; the two that read the disk may not hold the base.

    We read the copy that a machine keeps, past the system's file cache; the rival the base's files.
    """
    mine, copies = Keeping.PREPACKED, subject.home / "bases"
    keep_copy(subject.directory, copies, scheme)
    settings = {
        keeping: replace(
            subject.setting(keeping, limit=None if keeping is Keeping.WHOLE else limit),
            scheme=scheme,
            copies=copies,
        )
        for keeping in (Keeping.WHOLE, mine, Keeping.ON_MISS)
    }
    with ExitStack() as stack:
        opened = {k: stack.enter_context(EngineProcess(ours(s))) for k, s in settings.items()}
        seconds = take_turns(_follow(opened), rounds=rounds)
        told = {
            name: _told(keeping, opened[keeping])
            for name, keeping in (("ours", mine), ("theirs", Keeping.ON_MISS))
        }
    case = f"decode, {scheme.value}, {SHARE:.0%} resident, cold experts on disk"
    naive = _decoded(case, seconds, mine, ">= 3", rival=Keeping.ON_MISS)
    whole = _decoded(case, seconds, mine, None)
    compact = "ours are compact, so as many bytes hold more of them; "
    held = compact if scheme is Scheme.BFLOAT16 else ""
    return [
        replace(naive, note=f"{subject.simulates}; {held}{_read_note(told)}"),
        replace(whole, note=f"the process may have {LIMIT:.0%} of the size of the base"),
        _parts(told["ours"], scheme),
        _budget(subject, scheme, limit),
    ]


def _told(keeping: Keeping, process: Process) -> dict[Figure, float]:
    return {figure: process.run(Tell(keeping, figure), THREADS) for figure in Figure}


def _read_note(told: Mapping[str, Mapping[Figure, float]]) -> str:
    """Say what was missing, and whether it came from the disk."""
    parts = []
    for name, found in told.items():
        parts.append(
            f"{name}: {found[Figure.MISSES]:.0%} of requests were not in memory, "
            f"{found[Figure.READ] / 1e9:.1f} GB of experts were read, and with all else "
            f"{found[Figure.DISK] / 1e9:.1f} GB from the disk"
        )
    return "; ".join(parts)


def _parts(told: Mapping[Figure, float], scheme: Scheme) -> Row:
    """Compare what that process took with what its parts report; Python and kernels are no part."""
    return _megabytes(
        f"memory at most, {scheme.value}, {SHARE:.0%} resident, cold experts on disk",
        told[Figure.GROWN],
        told[Figure.HELD],
        rival="trunk, blocks, buffers, keys and values",
        note=f"{_LOOKED} while the base is read and 2 times {WARM_UP} tokens are decoded",
    )


def _budget(subject: Subject, scheme: Scheme, share: float | None) -> Row:
    """Compare what `run` takes with the budget that it has, a share of the size of the base."""
    size = packed_bytes(subject.shape.config(), scheme)
    budget, dtype = int((share or LIMIT) * size), DTYPES[scheme]
    setting = Budgeted(subject.directory, subject.home, dtype, budget)
    with EngineProcess(answering(setting)) as process:
        grown = process.run(Told.GROWN, THREADS)
    row = _megabytes(
        f"memory at most, {scheme.value}, a run in {budget / size:.0%} of the size of the base",
        grown,
        budget,
        rival="--memory-budget",
        note=f"{_LOOKED} while the base is read and {ANSWERS} answers of {ANSWER} tokens written",
    )
    return judged(row, "<= 1.0")


def _megabytes(case: str, ours: float, theirs: float, *, rival: str, note: str) -> Row:
    return Row(
        case=case,
        ours=round(ours / 1e6, 1),
        rival=rival,
        theirs=round(theirs / 1e6, 1),
        unit="MB",
        better="lower",
        ratio=round(ours / theirs, 3),
        spread=None,
        note=note,
    )


def prompts(subject: Subject, scheme: Scheme, rounds: int) -> list[Row]:
    """Read a prompt with all experts in memory, against the better of two implementations.

    Where ours is quantised, transformers reads bfloat16.
    """
    case = f"prompt of {PROMPT} tokens, all resident, {scheme.value}"
    if not dense_engines.has_transformers():
        install = dense_engines.TRANSFORMERS_INSTALL
        return [absent(case, rival="transformers", install=install, target=">= 2")]
    setting = replace(subject.setting(Keeping.WHOLE), scheme=scheme)
    dtype = "float32" if scheme is Scheme.FLOAT32 else "bfloat16"
    openers = {"ours": ours(setting)}
    for name in IMPLEMENTATIONS:
        openers[name] = transformers(subject.directory, dtype, name)
    with ExitStack() as stack:
        opened = {n: stack.enter_context(EngineProcess(o)) for n, o in openers.items()}
        runs = {name: each.runs(ReadPrompt(PROMPT), THREADS) for name, each in opened.items()}
        seconds = take_turns(runs, rounds=rounds)
        about = {name: each.about for name, each in opened.items()}
    best = min(IMPLEMENTATIONS, key=lambda name: sorted(seconds[name])[rounds // 2])
    row = compare_rates(
        case, seconds["ours"], seconds[best], work=(PROMPT, PROMPT),
        rival=f"transformers, {dtype}", unit="tok/s", target=">= 2",
    )  # fmt: skip
    return [replace(row, note=f"{subject.simulates}; {about[best]}")]


def _hits(path: Path | None, picture: Path | None, layers: int) -> list[Row]:
    """Compare hits on the trace that the base follows, and on one whose favourites change."""
    if path is None:
        shape = RoutedShape(layers)
        traces = {
            "Zipf's law": drawn(shape, TOKENS),
            f"Zipf's law, new favourites every {DRIFT} tokens": drawn(shape, TOKENS, every=DRIFT),
        }
    else:
        whole = stored(path)
        shape, traces = shape_of(whole, layers=whole.shape[1]), {path.stem: whole}
    rows, outcomes = [], []
    for name, trace in traces.items():
        found, outcome = hit_rows(name, trace, shape)
        rows += found
        outcomes.append((name, outcome))
    if picture is not None:
        draw(outcomes, picture, used=shape.used)
    return rows


def _follow(processes: Mapping[Keeping, Process]) -> dict[str, Run]:
    return {
        keeping.name: process.runs(Follow(keeping, STEPS), THREADS)
        for keeping, process in processes.items()
    }


def _decoded(
    case: str,
    seconds: Mapping[str, Sequence[float]],
    mine: Keeping,
    target: str | None,
    *,
    rival: Keeping = Keeping.WHOLE,
) -> Row:
    names = {Keeping.WHOLE: "all resident", Keeping.ON_MISS: "load on miss, LRU"}
    return compare_rates(
        case, seconds[mine.name], seconds[rival.name], work=(STEPS, STEPS),
        rival=names[rival], unit="tok/s", target=target,
    )  # fmt: skip


def main() -> None:
    """Command line: which trace, where to draw hits, and where the base is written."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{NAME}")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--trace", type=Path, help=".npy, int16 [tokens, layers, used]")
    parser.add_argument("--plot", type=Path, help="draw hits of each layer here, .svg or .png")
    parser.add_argument("--folder", type=Path, help="write bases here, for a while")
    options = parser.parse_args()
    if options.plot is not None:
        check_picture(options.plot, example="hits")
    with TemporaryDirectory(dir=options.folder) as folder:
        rows = measure(options.trace, options.plot, Path(folder), options.rounds)
    document: dict[str, object] = {
        "name": NAME,
        "machine": machine(),
        "rows": [asdict(row) for row in rows],
    }
    print(json.dumps(document) if options.json else as_table(document))


if __name__ == "__main__":
    main()
