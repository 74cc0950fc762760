"""Shared by `decode` and `prefill`: the engines of one data type, and the rows of one case."""

import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks import engines
from benchmarks.engine_process import Decode, EngineProcess, ReadMemory, ReadPrompt, Task
from benchmarks.gguf import width_name, write_gguf
from benchmarks.harness import Row, Run, Seconds, compare_rates, make_absent_row, take_turns
from benchmarks.inputs import make_base_config
from benchmarks.trained.formats import describe_divergences
from expertctl.engine.kernels.packed_format import BLOCK_SCHEMES, Scheme

OURS, TRANSFORMERS, MEMORY_READ = "ours", "transformers", "memory"
LLAMA_LABELS = {False: "llama.cpp", True: "llama.cpp, flash attention"}
THREADS = (1, 2)
QUALITIES = {Scheme.INT8: ("int8", "Q8_0"), Scheme.INT4: ("int4, 4 bits", "Q4_0")}
"""Our format and that of llama.cpp as `benchmarks.quality` names them."""


@dataclass(frozen=True, slots=True)
class ComparisonTargets:
    """The target ratio for each rival; None for no target."""

    llama: str | None = None
    transformers: str | None = None
    memory: str | None = None


NO_TARGETS = ComparisonTargets()


@dataclass(frozen=True, slots=True)
class ComparisonCase:
    """One task, with one data type and one number of threads."""

    scheme: Scheme
    task: Decode | ReadPrompt
    threads: int
    targets: ComparisonTargets

    @property
    def label(self) -> str:
        """The name of the row."""
        match self.task:
            case Decode(_, context):
                what = f"decode after {context} tokens"
            case ReadPrompt(tokens):
                what = f"prompt of {tokens} tokens"
        return f"{what}, {width_name(self.scheme)}, threads: {self.threads}"


def measure_cases(cases: Sequence[ComparisonCase], *, rounds: int) -> list[Row]:
    """Measure cases, grouped by data type, with all engines of that data type open."""
    rows: list[Row] = []
    for scheme in dict.fromkeys(case.scheme for case in cases):
        mine = [case for case in cases if case.scheme is scheme]
        with _open_engines(scheme) as opened:
            for case in mine:
                seconds = take_turns(_make_runs(case, opened), rounds=rounds)
                rows += make_rows(case, seconds, weight_bytes=opened[OURS].weight_bytes)
            notes = "; ".join(
                sorted({e.about for name, e in opened.items() if name not in (OURS, MEMORY_READ)})
            )
            if scheme in QUALITIES:
                notes = f"{describe_divergences(*QUALITIES[scheme])}; {notes}"
            rows[-1] = replace(rows[-1], note=notes)
    return rows


@contextmanager
def _open_engines(scheme: Scheme) -> Iterator[dict[str, EngineProcess[Task]]]:
    """Open all engines that are installed; ours also measures memory, with its own weights."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        path = Path(folder, "base.gguf")
        if engines.has_llama() or scheme in BLOCK_SCHEMES:
            write_gguf(path, make_base_config(), scheme)
        own = path if scheme in BLOCK_SCHEMES else None
        openers = {OURS: engines.open_ours(scheme, THREADS, file=own)}
        if engines.has_llama():
            for flash, name in LLAMA_LABELS.items():
                openers[name] = engines.open_llama(path, scheme, flash=flash)
        if scheme is Scheme.BFLOAT16 and engines.has_transformers():
            openers[TRANSFORMERS] = engines.open_transformers()
        opened = {n: stack.enter_context(EngineProcess(opener)) for n, opener in openers.items()}
        yield opened | {MEMORY_READ: opened[OURS]}


def _make_runs(case: ComparisonCase, opened: Mapping[str, EngineProcess[Task]]) -> dict[str, Run]:
    return {
        name: engine.bind(ReadMemory() if name == MEMORY_READ else case.task, case.threads)
        for name, engine in opened.items()
        if name != MEMORY_READ or isinstance(case.task, Decode)
    }


def make_rows(
    case: ComparisonCase, seconds: Mapping[str, Sequence[Seconds]], *, weight_bytes: int
) -> Iterator[Row]:
    """Yield the rows of a case, from the seconds of each engine."""
    yield _compare_with_llama(case, seconds)
    if case.scheme is Scheme.BFLOAT16:
        yield _compare_with_transformers(case, seconds)
    if MEMORY_READ in seconds:
        yield _compare_with_memory(case, seconds, weight_bytes)


def _compare_with_llama(case: ComparisonCase, seconds: Mapping[str, Sequence[Seconds]]) -> Row:
    """Compare with llama.cpp, with flash attention or without: the faster one counts."""
    found = {
        name: statistics.median(seconds[name]) for name in LLAMA_LABELS.values() if name in seconds
    }
    if not found:
        install = engines.LLAMA_INSTALL
        return make_absent_row(
            case.label, rival="llama.cpp", install=install, target=case.targets.llama
        )
    return _compare_rates(case, min(found, key=found.__getitem__), seconds, case.targets.llama)


def _compare_with_transformers(
    case: ComparisonCase, seconds: Mapping[str, Sequence[Seconds]]
) -> Row:
    rival, target = TRANSFORMERS, case.targets.transformers
    if rival not in seconds:
        install = engines.TRANSFORMERS_INSTALL
        return make_absent_row(case.label, rival=rival, install=install, target=target)
    return _compare_rates(case, rival, seconds, target)


def _compare_rates(
    case: ComparisonCase, rival: str, seconds: Mapping[str, Sequence[Seconds]], target: str | None
) -> Row:
    work = (float(case.task.tokens), float(case.task.tokens))
    ours, theirs = seconds[OURS], seconds[rival]
    return compare_rates(
        case.label, ours, theirs, work=work, rival=rival, unit="tok/s", target=target
    )


def _compare_with_memory(
    case: ComparisonCase, seconds: Mapping[str, Sequence[Seconds]], weight_bytes: int
) -> Row:
    """Compare the rate at which decoding reads weights with the rate of reading alone."""
    work = (case.task.tokens * weight_bytes / 1e9, weight_bytes / 1e9)
    return compare_rates(
        f"weights read, {case.label}", seconds[OURS], seconds[MEMORY_READ], work=work,
        rival="only reading them", unit="GB/s", target=case.targets.memory,
    )  # fmt: skip
