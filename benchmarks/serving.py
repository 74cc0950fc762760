"""Many clients of one generation server: with experts, without, sequentially, and against PEFT.

``expertctl serve`` in its own process, on a home of `served_home`, receives requests over HTTP from
the clients of `serving_load`. Transformers and PEFT compute the same sequences in one batch with
``adapter_names``, without a server. All are measured in turns. The modules of `benchmarks.served`
describe the other measurements: a turn of a conversation, the time outside the engine, more plans
than fit. ``--plot FILE`` plots the results of increasing request rates.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from itertools import chain, repeat
from pathlib import Path

from benchmarks import serving_load
from benchmarks.engine_process import EngineProcess
from benchmarks.expert_engines import PEFT_INSTALL, AnswerBatch, has_peft, open_peft
from benchmarks.harness import (
    Row,
    Run,
    Seconds,
    compare_rates,
    describe_machine,
    format_table,
    make_absent_row,
    take_turns,
)
from benchmarks.served.conversation import ask_twice, make_conversation_row
from benchmarks.served.overhead import ask_routed, make_overhead_row
from benchmarks.served.oversubscription import (
    compare_oversubscription,
    compute_budget,
    make_oversubscription_row,
)
from benchmarks.served.saturation import draw_saturation, make_saturation_row, measure_saturation
from benchmarks.served.server import GenerationServer, ServerMetrics, run_generation_server
from benchmarks.served_home import make_serving_home
from benchmarks.serving_load import CompletionTask, StreamRecord
from expertctl.settings import Home

CLIENTS = 16
PROMPT, ANSWER = 64, 48
"""Tokens of a prompt and of an answer."""
HISTORY = 1024
"""Tokens of a conversation before its next turn."""
ALONE = 4
"""Number of sequential requests: a quarter of the clients is enough."""
FITTING = 8
"""Number of plans that fit, when twice as many are requested."""


class ServingLoad:
    """The requests that a server gets in turns."""

    def __init__(self, server: GenerationServer) -> None:
        """Send requests to this server."""
        self._url = server.url

    def run_with_experts(self) -> Seconds:
        """Run as many clients as there are experts, each with its own expert."""
        return self._run_together(serving_load.list_expert_names(CLIENTS))

    def run_base(self) -> Seconds:
        """Run as many clients with the base alone."""
        return self._run_together(serving_load.list_base_names(CLIENTS))

    def run_one_by_one(self) -> Seconds:
        """Send a few requests to their experts, one after the other."""
        asks = serving_load.make_requests(
            serving_load.list_expert_names(ALONE), prompt=PROMPT, answer=ANSWER
        )
        return _check_streams(serving_load.ask_one_by_one(self._url, asks))

    def _run_together(self, models: Sequence[str]) -> Seconds:
        asks = serving_load.make_requests(models, prompt=PROMPT, answer=ANSWER)
        return _check_streams(serving_load.ask_together(self._url, asks))


def measure(home: Home, rounds: int, *, plot: Path | None = None) -> Iterator[Row]:
    """Measure all workloads in turns, then the rest; with ``plot``, up to saturation."""
    with run_generation_server(home) as server:
        seconds = _measure_batches(server, rounds)
        yield from _make_batch_rows(seconds)
        figures = server.read_metrics()
        yield _measure_conversations(server, rounds)
        yield _measure_routed(server, rounds)
        if plot:
            yield _draw_saturation(server, CLIENTS / statistics.median(seconds["experts"]), plot)
    yield _measure_oversubscription(home, figures, rounds)


def _measure_batches(server: GenerationServer, rounds: int) -> dict[str, list[Seconds]]:
    load = ServingLoad(server)
    runs: dict[str, Run] = {
        "experts": load.run_with_experts,
        "base": load.run_base,
        "alone": load.run_one_by_one,
    }
    with ExitStack() as stack:
        if has_peft():
            runs["PEFT"] = _make_peft_run(stack.enter_context(EngineProcess(open_peft(CLIENTS))))
        return take_turns(runs, rounds=rounds)


def _make_peft_run(rival: EngineProcess[AnswerBatch]) -> Run:
    """Return its run; the first run, which only warms up, generates two tokens."""
    threads = os.cpu_count() or 1
    short, whole = (
        rival.bind(AnswerBatch(texts=CLIENTS, prompt=PROMPT, tokens=tokens), threads)
        for tokens in (2, ANSWER)
    )
    runs = chain([short], repeat(whole))
    return lambda: next(runs)()


def _make_batch_rows(seconds: dict[str, list[Seconds]]) -> Iterator[Row]:
    many, few = float(CLIENTS * ANSWER), float(ALONE * ANSWER)
    case = f"{CLIENTS} clients, {CLIENTS} plans"
    others = [
        ("base", f"{CLIENTS} clients without experts", many, ">= 0.65"),
        ("alone", "the same one after the other", few, ">= 3"),
        ("PEFT", "PEFT, adapter_names", many, ">= 3"),
    ]
    for name, rival, work, target in others:
        if name not in seconds:
            yield make_absent_row(case, rival=rival, install=PEFT_INSTALL, target=target)
            continue
        yield compare_rates(
            case,
            seconds["experts"],
            seconds[name],
            work=(many, work),
            rival=rival,
            unit="tok/s",
            target=target,
        )


def _measure_conversations(server: GenerationServer, rounds: int) -> Row:
    [model] = serving_load.list_expert_names(1)
    turns = [
        ask_twice(server.url, model=model, history=HISTORY, cold_first=bool(number % 2))
        for number in range(rounds + 1)
    ]
    return make_conversation_row(turns[1:], history=HISTORY, target="<= 0.25")


def _measure_routed(server: GenerationServer, rounds: int) -> Row:
    routed = [ask_routed(server.url, tokens=ANSWER) for _ in range(rounds + 1)]
    return make_overhead_row(routed[1:], target="<= 0.05")


def _measure_oversubscription(home: Home, figures: ServerMetrics, rounds: int) -> Row:
    """Compare times to the first token when all plans fit and when half of them fit."""
    options = "--memory-budget", str(compute_budget(FITTING, figures))
    with (
        run_generation_server(home, *options) as roomy,
        run_generation_server(home, *options) as crowded,
    ):
        pairs = list(compare_oversubscription(roomy, crowded, fitting=FITTING, rounds=rounds))
    return make_oversubscription_row(pairs, target="<= 3")


def _draw_saturation(server: GenerationServer, capacity: float, path: Path) -> Row:
    """Load a server until it is saturated, and plot the result."""
    models = serving_load.list_expert_names(CLIENTS)

    def ask(number: int) -> CompletionTask:
        return CompletionTask(models[number % CLIENTS], ANSWER, serving_load.make_prompt(PROMPT))

    found = measure_saturation(server, ask, tokens=ANSWER, capacity=capacity)
    what = f"expertctl serve, shape of Qwen3-0.6B, {CLIENTS} experts, {os.cpu_count()} cores\n"
    what += f"open loop, prompts of {PROMPT} tokens, answers of {ANSWER}"
    draw_saturation(found, path, tokens=ANSWER, what=what)
    return make_saturation_row(found, capacity=capacity, clients=CLIENTS)


def _check_streams(measured: tuple[Seconds, list[StreamRecord]]) -> Seconds:
    seconds, told = measured
    if not all(one.status == 200 and one.tokens == ANSWER for one in told):
        raise SystemExit(f"serving: not all answers are whole: {told}")
    return seconds


def _print_row(row: Row) -> Row:
    """Print a row immediately, so that a later error does not lose it."""
    print(f"{row.case} / {row.rival}: {row.ratio}", file=sys.stderr, flush=True)
    return row


def main() -> None:
    """The command line: that of every benchmark, and ``--plot``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plot", type=Path, metavar="FILE")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = make_serving_home(Path(folder), Path(folder), experts=CLIENTS)
        rows = [_print_row(row) for row in measure(home, options.rounds, plot=options.plot)]
    document: dict[str, object] = {
        "name": "serving",
        "machine": describe_machine(),
        "rows": [asdict(row) for row in rows],
    }
    print(json.dumps(document) if options.json else format_table(document))


if __name__ == "__main__":
    main()
