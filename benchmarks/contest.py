"""What decode and prefill have in common: the engines of one width, and the rows of one case."""

import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks import engines
from benchmarks.engine_process import Decode, EngineProcess, ReadMemory, ReadPrompt, Task
from benchmarks.gguf import width_name, write_gguf
from benchmarks.harness import Row, Run, Seconds, absent, compare_rates, take_turns
from benchmarks.inputs import base_config
from expertctl.engine.kernels.scheme import Scheme

OURS, TRANSFORMERS, MEMORY = "ours", "transformers", "memory"
FLASH = {False: "llama.cpp", True: "llama.cpp, flash attention"}
THREADS = (1, 2)


@dataclass(frozen=True, slots=True)
class Targets:
    """What is asked for against each rival; None: nothing."""

    llama: str | None = None
    transformers: str | None = None
    memory: str | None = None


NO_TARGETS = Targets()


@dataclass(frozen=True, slots=True)
class Case:
    """One task, of one width and with one number of threads."""

    scheme: Scheme
    task: Decode | ReadPrompt
    threads: int
    targets: Targets

    @property
    def name(self) -> str:
        """What the row is called."""
        match self.task:
            case Decode(_, context):
                what = f"decode behind {context} tokens"
            case ReadPrompt(tokens):
                what = f"prompt of {tokens} tokens"
        return f"{what}, {width_name(self.scheme)}, threads: {self.threads}"


def measure_cases(cases: Sequence[Case], *, rounds: int) -> list[Row]:
    """Measure cases; those of one width behind each other, with all engines of that width open."""
    rows: list[Row] = []
    for scheme in dict.fromkeys(case.scheme for case in cases):
        mine = [case for case in cases if case.scheme is scheme]
        with _engines(scheme) as opened:
            for case in mine:
                seconds = take_turns(_runs(case, opened), rounds=rounds)
                rows += compared(case, seconds, weight_bytes=opened[OURS].weight_bytes)
            notes = "; ".join(
                sorted({e.about for name, e in opened.items() if name not in (OURS, MEMORY)})
            )
            rows[-1] = replace(rows[-1], note=notes)
    return rows


@contextmanager
def _engines(scheme: Scheme) -> Iterator[dict[str, EngineProcess[Task]]]:
    """Open all that are installed; memory is read by our own engine, from its own weights."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        openers = {OURS: engines.ours(scheme, THREADS)}
        if engines.has_llama():
            path = write_gguf(Path(folder, "base.gguf"), base_config(), scheme)
            for flash, name in FLASH.items():
                openers[name] = engines.llama(path, scheme, flash=flash)
        if scheme is Scheme.BFLOAT16 and engines.has_transformers():
            openers[TRANSFORMERS] = engines.transformers()
        opened = {n: stack.enter_context(EngineProcess(opener)) for n, opener in openers.items()}
        yield opened | {MEMORY: opened[OURS]}


def _runs(case: Case, opened: Mapping[str, EngineProcess[Task]]) -> dict[str, Run]:
    return {
        name: engine.runs(ReadMemory() if name == MEMORY else case.task, case.threads)
        for name, engine in opened.items()
        if name != MEMORY or isinstance(case.task, Decode)
    }


def compared(
    case: Case, seconds: Mapping[str, Sequence[Seconds]], *, weight_bytes: int
) -> Iterator[Row]:
    """Yield the rows of a case, by what each of those that took turns needed."""
    yield _against_llama(case, seconds)
    if case.scheme is Scheme.BFLOAT16:
        yield _against_transformers(case, seconds)
    if MEMORY in seconds:
        yield _share(case, seconds, weight_bytes)


def _against_llama(case: Case, seconds: Mapping[str, Sequence[Seconds]]) -> Row:
    """Compare with the better of flash attention on and off."""
    found = {name: statistics.median(seconds[name]) for name in FLASH.values() if name in seconds}
    if not found:
        install = engines.LLAMA_INSTALL
        return absent(case.name, rival="llama.cpp", install=install, target=case.targets.llama)
    return _compared(case, min(found, key=found.__getitem__), seconds, case.targets.llama)


def _against_transformers(case: Case, seconds: Mapping[str, Sequence[Seconds]]) -> Row:
    rival, target = TRANSFORMERS, case.targets.transformers
    if rival not in seconds:
        install = engines.TRANSFORMERS_INSTALL
        return absent(case.name, rival=rival, install=install, target=target)
    return _compared(case, rival, seconds, target)


def _compared(
    case: Case, rival: str, seconds: Mapping[str, Sequence[Seconds]], target: str | None
) -> Row:
    work = (float(case.task.tokens), float(case.task.tokens))
    ours, theirs = seconds[OURS], seconds[rival]
    return compare_rates(
        case.name, ours, theirs, work=work, rival=rival, unit="tok/s", target=target
    )


def _share(case: Case, seconds: Mapping[str, Sequence[Seconds]], weight_bytes: int) -> Row:
    """Compare the bytes of weights that decoding reads with what only reading them reaches."""
    work = (case.task.tokens * weight_bytes / 1e9, weight_bytes / 1e9)
    return compare_rates(
        f"weights read, {case.name}", seconds[OURS], seconds[MEMORY], work=work,
        rival="only reading them", unit="GB/s", target=case.targets.memory,
    )  # fmt: skip
