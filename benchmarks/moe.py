"""Mixture-of-experts bases: decoding with some experts in memory, prompts, memory, and hit rates.

The base has the shape of OLMoE-1B-7B, with fewer layers and random weights. Each token of its
vocabulary requests the experts of a trace: one drawn from Zipf's law (1.0, seed 0), or with
``--trace`` one of a trained model, ``.npy`` with int16 [tokens, layers, used]. Every process has
two threads. *From memory*: experts that are not resident are in memory that stands for storage
outside the device's budget. *From the disk*: the process may use less memory than the base takes
(RLIMIT_DATA), and what was read of the file is dropped from the page cache (posix_fadvise), so
every missing expert is read from the disk; ours reads the copy that a machine keeps of a base,
bypassing the page cache (``--moe-cold direct``), the rival reads and packs the base's own bytes.
Both have the same number of bytes for experts; in bfloat16 ours are compact there, so more of them
are in memory. Where the experts of the next layer are prefetched, a fifth of the predictions is
made wrong.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks import engines as dense_engines
from benchmarks.cache_policies import Trace
from benchmarks.engine_process import EngineProcess, ReadPrompt
from benchmarks.harness import (
    Row,
    Run,
    compare_rates,
    describe_machine,
    format_table,
    judge,
    make_absent_row,
    take_turns,
)
from benchmarks.routed import on_device
from benchmarks.routed.decoders import (
    ExpertPlacement,
    FollowTask,
    ProcessFigure,
    ReportTask,
    RoutedTask,
)
from benchmarks.routed.engine_processes import (
    ANSWER,
    ANSWERS,
    THREADS,
    WARM_UP,
    BudgetFigure,
    BudgetSetup,
    DecoderSetup,
    open_answering,
    open_our_decoders,
    open_transformers,
)
from benchmarks.routed.expert_sources import make_packed_copy
from benchmarks.routed.hit_rates import SHARE, compare_hit_rates, draw_hit_rates
from benchmarks.routed.traced_base import (
    RoutedShape,
    make_shape,
    make_trace,
    read_trace,
    write_base,
)
from expertctl.cli.plot import check_plot_path
from expertctl.engine.cpu.packed_base import packed_base_bytes
from expertctl.engine.kernels.packed_format import Scheme
from expertctl.engine.memory.host import find_unused_bytes
from expertctl.engine_config import Dtype

NAME = "moe"
TOKENS, DRIFT = 4000, 1000
LAYERS, FEW_LAYERS, MIN_FREE_BYTES = 4, 2, 14 << 30
"""Numbers of layers of the base: with this much free memory, and with less."""
STEPS, PROMPT = 24, 512
SHORT_TURNS = 5
"""With all experts in memory a turn takes a second, and the next may be a tenth slower: so each
round has this many turns.
"""
LIMIT = 0.75
"""Memory limit of a process that reads from the disk, as a share of the size of the base."""
IMPLEMENTATIONS = ("grouped_mm", "eager")
"""Implementations of expert products in transformers; the faster one counts."""
DTYPES: dict[Scheme, Dtype] = {
    Scheme.BFLOAT16: "bf16",
    Scheme.INT8: "int8",
    Scheme.INT4: "int4",
}
_SAMPLING_NOTE = "anonymous memory, sampled every 2 ms"
Process = EngineProcess[RoutedTask]


@dataclass(frozen=True, slots=True)
class BenchmarkedBase:
    """A base on disk, and the trace that its tokens follow."""

    directory: Path
    home: Path
    shape: RoutedShape
    trace: Trace
    simulates: str

    def make_setting(self, *keepings: ExpertPlacement, limit: float | None = None) -> DecoderSetup:
        """Return the settings of its decoders, with `SHARE` of the experts resident."""
        tokens = len(self.trace)
        return DecoderSetup(self.directory, self.home, keepings, tokens, share=SHARE, limit=limit)


def measure(trace: Path | None, picture: Path | None, folder: Path, rounds: int) -> list[Row]:
    """Measure everything in a folder on the disk that is to be measured."""
    layers = LAYERS if (find_unused_bytes() or 0) >= MIN_FREE_BYTES else FEW_LAYERS
    rows = _measure_hits(trace, picture, layers)
    with _write_subject(trace, folder, layers) as subject:
        rows += measure_from_memory(subject, rounds)
        for scheme in (Scheme.BFLOAT16, Scheme.INT8, Scheme.INT4):
            rows += measure_from_disk(subject, rounds, scheme=scheme)
        tokens, simulates = len(subject.trace), subject.simulates
        rows.append(
            on_device.compare_on_device(
                subject.directory, tokens=tokens, simulates=simulates, rounds=rounds
            )
        )
        for scheme in (Scheme.BFLOAT16, Scheme.INT8):
            rows += measure_prompts(subject, scheme, rounds)
    with _write_subject(trace, folder, min(layers, FEW_LAYERS)) as small:
        rows += measure_prompts(small, Scheme.FLOAT32, rounds)
    return rows


@contextmanager
def _write_subject(path: Path | None, folder: Path, layers: int) -> Iterator[BenchmarkedBase]:
    """Write a base, and delete it afterwards."""
    if path is None:
        shape, source = RoutedShape(layers), "requests by Zipf's law"
        trace = make_trace(shape, TOKENS)
    else:
        trace = read_trace(path)
        shape, source = make_shape(trace, layers=layers), f"requests of {path.stem}"
        trace = trace[: shape.vocabulary, : shape.layers]
    simulates = (
        f"{shape.layers} of OLMoE's 16 layers, {shape.experts} experts, {shape.used} used, {source}"
    )
    with TemporaryDirectory(dir=folder) as directory:
        base = write_base(Path(directory), shape, trace)
        yield BenchmarkedBase(base, folder / "home", shape, trace, simulates)


def measure_from_memory(subject: BenchmarkedBase, rounds: int) -> list[Row]:
    """Run all decoders in one process, in turns: they share the weights and the workers."""
    keepings = (ExpertPlacement.WHOLE, ExpertPlacement.CACHED, ExpertPlacement.LENT)
    with EngineProcess(open_our_decoders(subject.make_setting(*keepings))) as process:
        runs = _make_follow_runs(dict.fromkeys(keepings, process))
        seconds = take_turns(runs, rounds=SHORT_TURNS * rounds)
        misses, huge = (
            process.run(ReportTask(ExpertPlacement.LENT, figure), THREADS)
            for figure in (ProcessFigure.MISSES, ProcessFigure.HUGE)
        )
    lent = _make_decode_row(
        f"decode, {SHARE:.0%} resident, cold experts in memory",
        seconds,
        ExpertPlacement.LENT,
        ">= 0.9",
    )
    cached = _make_decode_row(
        "decode, all resident, through the cache", seconds, ExpertPlacement.CACHED, ">= 0.95"
    )
    about = f"{subject.simulates}, bf16; {huge:.0%} of the process in huge pages"
    note = f"{about}; {misses:.0%} of requests not in memory; blocks are shared"
    return [replace(cached, note=about), replace(lent, note=note)]


def measure_from_disk(
    subject: BenchmarkedBase,
    rounds: int,
    *,
    scheme: Scheme = Scheme.BFLOAT16,
    limit: float | None = LIMIT,
) -> list[Row]:
    """Run each decoder in its own process; the two that read the disk cannot hold the whole base.

    Ours reads the copy that a machine keeps, bypassing the page cache; the rival the base's files.
    """
    mine, copies = ExpertPlacement.PREPACKED, subject.home / "bases"
    make_packed_copy(subject.directory, copies, scheme)
    settings = {
        keeping: replace(
            subject.make_setting(
                keeping, limit=None if keeping is ExpertPlacement.WHOLE else limit
            ),
            scheme=scheme,
            copies=copies,
        )
        for keeping in (ExpertPlacement.WHOLE, mine, ExpertPlacement.ON_MISS)
    }
    with ExitStack() as stack:
        opened = {
            k: stack.enter_context(EngineProcess(open_our_decoders(s))) for k, s in settings.items()
        }
        seconds = take_turns(_make_follow_runs(opened), rounds=rounds)
        told = {
            name: _read_figures(keeping, opened[keeping])
            for name, keeping in (("ours", mine), ("theirs", ExpertPlacement.ON_MISS))
        }
    case = f"decode, {scheme.value}, {SHARE:.0%} resident, cold experts on disk"
    naive = _make_decode_row(case, seconds, mine, ">= 3", rival=ExpertPlacement.ON_MISS)
    whole = _make_decode_row(case, seconds, mine, None)
    compact = "ours are compact, so as many bytes hold more of them; "
    held = compact if scheme is Scheme.BFLOAT16 else ""
    return [
        replace(naive, note=f"{subject.simulates}; {held}{_describe_reads(told)}"),
        replace(whole, note=f"the process may have {LIMIT:.0%} of the size of the base"),
        _compare_parts(told["ours"], scheme),
        _measure_budget(subject, scheme, limit),
    ]


def _read_figures(keeping: ExpertPlacement, process: Process) -> dict[ProcessFigure, float]:
    return {figure: process.run(ReportTask(keeping, figure), THREADS) for figure in ProcessFigure}


def _describe_reads(told: Mapping[str, Mapping[ProcessFigure, float]]) -> str:
    """Describe the share of missing experts, and whether they came from the disk."""
    parts = []
    for name, found in told.items():
        parts.append(
            f"{name}: {found[ProcessFigure.MISSES]:.0%} of requests were not in memory, "
            f"{found[ProcessFigure.READ] / 1e9:.1f} GB of experts were read, and with all else "
            f"{found[ProcessFigure.DISK] / 1e9:.1f} GB from the disk"
        )
    return "; ".join(parts)


def _compare_parts(told: Mapping[ProcessFigure, float], scheme: Scheme) -> Row:
    """Compare the memory of that process with the sum of its parts, without Python and kernels."""
    return _make_megabyte_row(
        f"memory at most, {scheme.value}, {SHARE:.0%} resident, cold experts on disk",
        told[ProcessFigure.GROWN],
        told[ProcessFigure.HELD],
        rival="trunk, blocks, buffers, keys and values",
        note=f"{_SAMPLING_NOTE} while the base is read and 2 times {WARM_UP} tokens are decoded",
    )


def _measure_budget(subject: BenchmarkedBase, scheme: Scheme, share: float | None) -> Row:
    """Compare the peak memory of `run` with its budget, a share of the size of the base."""
    size = packed_base_bytes(subject.shape.make_config(), scheme)
    budget, dtype = int((share or LIMIT) * size), DTYPES[scheme]
    setting = BudgetSetup(subject.directory, subject.home, dtype, budget)
    with EngineProcess(open_answering(setting)) as process:
        grown = process.run(BudgetFigure.GROWN, THREADS)
    row = _make_megabyte_row(
        f"memory at most, {scheme.value}, a run in {budget / size:.0%} of the size of the base",
        grown,
        budget,
        rival="--memory-budget",
        note=f"{_SAMPLING_NOTE} while the base is read and {ANSWERS} answers of {ANSWER} tokens "
        "written",
    )
    return judge(row, "<= 1.0")


def _make_megabyte_row(case: str, ours: float, theirs: float, *, rival: str, note: str) -> Row:
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


def measure_prompts(subject: BenchmarkedBase, scheme: Scheme, rounds: int) -> list[Row]:
    """Process a prompt with all experts in memory, against the faster of two implementations.

    Where ours is quantised, transformers uses bfloat16.
    """
    case = f"prompt of {PROMPT} tokens, all resident, {scheme.value}"
    if not dense_engines.has_transformers():
        install = dense_engines.TRANSFORMERS_INSTALL
        return [make_absent_row(case, rival="transformers", install=install, target=">= 2")]
    setting = replace(subject.make_setting(ExpertPlacement.WHOLE), scheme=scheme)
    dtype = "float32" if scheme is Scheme.FLOAT32 else "bfloat16"
    openers = {"ours": open_our_decoders(setting)}
    for name in IMPLEMENTATIONS:
        openers[name] = open_transformers(subject.directory, dtype, name)
    with ExitStack() as stack:
        opened = {n: stack.enter_context(EngineProcess(o)) for n, o in openers.items()}
        runs = {name: each.bind(ReadPrompt(PROMPT), THREADS) for name, each in opened.items()}
        seconds = take_turns(runs, rounds=rounds)
        about = {name: each.about for name, each in opened.items()}
    best = min(IMPLEMENTATIONS, key=lambda name: sorted(seconds[name])[rounds // 2])
    row = compare_rates(
        case, seconds["ours"], seconds[best], work=(PROMPT, PROMPT),
        rival=f"transformers, {dtype}", unit="tok/s", target=">= 2",
    )  # fmt: skip
    return [replace(row, note=f"{subject.simulates}; {about[best]}")]


def _measure_hits(path: Path | None, picture: Path | None, layers: int) -> list[Row]:
    """Compare hit rates on the trace of the base, and on one whose popular experts change."""
    if path is None:
        shape = RoutedShape(layers)
        traces = {
            "Zipf's law": make_trace(shape, TOKENS),
            f"Zipf's law, other experts become frequent every {DRIFT} tokens": make_trace(
                shape, TOKENS, every=DRIFT
            ),
        }
    else:
        whole = read_trace(path)
        shape, traces = make_shape(whole, layers=whole.shape[1]), {path.stem: whole}
    rows, outcomes = [], []
    for name, trace in traces.items():
        found, outcome = compare_hit_rates(name, trace, shape)
        rows += found
        outcomes.append((name, outcome))
    if picture is not None:
        draw_hit_rates(outcomes, picture, used=shape.used)
    return rows


def _make_follow_runs(processes: Mapping[ExpertPlacement, Process]) -> dict[str, Run]:
    return {
        keeping.name: process.bind(FollowTask(keeping, STEPS), THREADS)
        for keeping, process in processes.items()
    }


def _make_decode_row(
    case: str,
    seconds: Mapping[str, Sequence[float]],
    mine: ExpertPlacement,
    target: str | None,
    *,
    rival: ExpertPlacement = ExpertPlacement.WHOLE,
) -> Row:
    names = {ExpertPlacement.WHOLE: "all resident", ExpertPlacement.ON_MISS: "load on miss, LRU"}
    return compare_rates(
        case, seconds[mine.name], seconds[rival.name], work=(STEPS, STEPS),
        rival=names[rival], unit="tok/s", target=target,
    )  # fmt: skip


def main() -> None:
    """Command line: the trace, the file of the plot, and the folder of the base."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{NAME}")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--trace", type=Path, help=".npy, int16 [tokens, layers, used]")
    parser.add_argument("--plot", type=Path, help="draw hits of each layer here, .svg or .png")
    parser.add_argument("--folder", type=Path, help="write bases here, for a while")
    options = parser.parse_args()
    if options.plot is not None:
        check_plot_path(options.plot, example="hits")
    with TemporaryDirectory(dir=options.folder) as folder:
        rows = measure(options.trace, options.plot, Path(folder), options.rounds)
    document: dict[str, object] = {
        "name": NAME,
        "machine": describe_machine(),
        "rows": [asdict(row) for row in rows],
    }
    print(json.dumps(document) if options.json else format_table(document))


if __name__ == "__main__":
    main()
