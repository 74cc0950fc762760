"""Tokens per second of sixteen sequences in one batch: without experts, with one, with sixteen.

A bf16 base in the shape of Qwen3-0.6B and different bf16 rank-16 LoRAs on all seven projections,
random weights. PEFT gets the names of its adapters row by row (``adapter_names``).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack

from benchmarks.engine_process import EngineProcess
from benchmarks.expert_engines import (
    PEFT_INSTALL,
    TOKENS,
    DecodeBatch,
    has_peft,
    open_ours,
    open_peft,
)
from benchmarks.harness import Row, Seconds, compare_rates, main, make_absent_row, take_turns

TEXTS, WORKERS = 16, 2
ONE_TEXT, BASE_ONLY = DecodeBatch(1, 1), DecodeBatch(TEXTS, 0)
ONE_EXPERT, MANY_EXPERTS = DecodeBatch(TEXTS, 1), DecodeBatch(TEXTS, TEXTS)
OURS = {"one": ONE_TEXT, "base": BASE_ONLY, "same": ONE_EXPERT, "many": MANY_EXPERTS}


def measure(rounds: int) -> Sequence[Row]:
    """Measure all workloads in turns, then compare them."""
    with ExitStack() as stack:
        mine = stack.enter_context(EngineProcess(open_ours(TEXTS)))
        runs = {name: mine.bind(task, WORKERS) for name, task in OURS.items()}
        if has_peft():
            rival = stack.enter_context(EngineProcess(open_peft(TEXTS)))
            runs["PEFT"] = rival.bind(MANY_EXPERTS, WORKERS)
        seconds = take_turns(runs, rounds=rounds)
    return list(_make_rows(seconds))


def _make_rows(seconds: Mapping[str, Sequence[Seconds]]) -> Iterator[Row]:
    many, case = float(TEXTS * TOKENS), f"{TEXTS} sequences, {TEXTS} experts, threads: {WORKERS}"
    yield compare_rates(
        case,
        seconds["many"],
        seconds["base"],
        work=(many, many),
        rival=f"{TEXTS} texts without",
        unit="tok/s",
        target=">= 0.7",
    )
    if "PEFT" in seconds:
        yield compare_rates(
            case,
            seconds["many"],
            seconds["PEFT"],
            work=(many, many),
            rival="PEFT, adapter_names",
            unit="tok/s",
            target=">= 3",
        )
    else:
        yield make_absent_row(
            case, rival="PEFT, adapter_names", install=PEFT_INSTALL, target=">= 3"
        )
    yield compare_rates(
        f"{TEXTS} sequences, one expert, threads: {WORKERS}",
        seconds["same"],
        seconds["one"],
        work=(many, float(TOKENS)),
        rival="one text with it",
        unit="tok/s",
        target=">= 6",
    )


if __name__ == "__main__":
    main("batch", measure, rounds=9)
