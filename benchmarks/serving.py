"""Many callers of one generation server: with experts, without, one by one, and beside PEFT.

``expertctl serve`` in a process of its own, on a home of `served_home`, asked over HTTP by the
clients of `serving_load`; transformers and PEFT compute the same texts in one batch of
``adapter_names``, without a server. Everything takes turns. What else is measured of it, and how,
is told by the modules of `benchmarks.served`: a turn of a conversation, the time outside the
engine, more plans than fit. ``--plot FILE`` draws what comes of more and more requests a second.
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
from benchmarks.expert_engines import PEFT_INSTALL, Answers, has_peft, peft
from benchmarks.harness import (
    Row,
    Run,
    Seconds,
    absent,
    as_table,
    compare_rates,
    machine,
    take_turns,
)
from benchmarks.served.conversation import ask_twice, conversation_row
from benchmarks.served.crowding import budget_for, compare_crowds, crowding_row
from benchmarks.served.load_plot import draw
from benchmarks.served.outside import ask_routed, outside_row
from benchmarks.served.saturation import saturation_of, saturation_row
from benchmarks.served.server import Figures, Server, serving
from benchmarks.served_home import furnish
from benchmarks.serving_load import Ask, Told
from expertctl.settings import Home

CLIENTS = 16
PROMPT, ANSWER = 64, 48
"""Tokens of what is asked and of what is answered."""
HISTORY = 1024
"""Tokens of a conversation before its next turn."""
ALONE = 4
"""How many are asked one by one: a quarter says as much."""
FITTING = 8
"""How many plans fit where twice as many are asked for."""


class Load:
    """What a server is asked for in turns."""

    def __init__(self, server: Server) -> None:
        """Ask this one."""
        self._url = server.url

    def experts(self) -> Seconds:
        """Have as many clients as experts answered, each by its own."""
        return self._together(serving_load.experts(CLIENTS))

    def base(self) -> Seconds:
        """Have as many answered by the base alone."""
        return self._together(serving_load.base_alone(CLIENTS))

    def one_by_one(self) -> Seconds:
        """Have a few answered by their experts, one after the other."""
        asks = serving_load.asks(serving_load.experts(ALONE), prompt=PROMPT, answer=ANSWER)
        return _checked(serving_load.one_by_one(self._url, asks))

    def _together(self, models: Sequence[str]) -> Seconds:
        asks = serving_load.asks(models, prompt=PROMPT, answer=ANSWER)
        return _checked(serving_load.together(self._url, asks))


def measure(home: Home, rounds: int, *, plot: Path | None = None) -> Iterator[Row]:
    """Let all take turns, then measure the rest; with ``plot``, up to saturation."""
    with serving(home) as server:
        seconds = _batches(server, rounds)
        yield from _of_the_batch(seconds)
        figures = server.figures()
        yield _of_conversations(server, rounds)
        yield _of_routed(server, rounds)
        if plot:
            yield _saturated(server, CLIENTS / statistics.median(seconds["experts"]), plot)
    yield _of_crowds(home, figures, rounds)


def _batches(server: Server, rounds: int) -> dict[str, list[Seconds]]:
    load = Load(server)
    runs: dict[str, Run] = {
        "experts": load.experts,
        "base": load.base,
        "alone": load.one_by_one,
    }
    with ExitStack() as stack:
        if has_peft():
            runs["PEFT"] = _peft(stack.enter_context(EngineProcess(peft(CLIENTS))))
        return take_turns(runs, rounds=rounds)


def _peft(rival: EngineProcess[Answers]) -> Run:
    """Return its run; for the first one, which only warms up, two tokens are enough."""
    threads = os.cpu_count() or 1
    short, whole = (
        rival.runs(Answers(texts=CLIENTS, prompt=PROMPT, tokens=tokens), threads)
        for tokens in (2, ANSWER)
    )
    runs = chain([short], repeat(whole))
    return lambda: next(runs)()


def _of_the_batch(seconds: dict[str, list[Seconds]]) -> Iterator[Row]:
    many, few = float(CLIENTS * ANSWER), float(ALONE * ANSWER)
    case = f"{CLIENTS} clients, {CLIENTS} plans"
    others = [
        ("base", f"{CLIENTS} clients without experts", many, ">= 0.65"),
        ("alone", "the same one after the other", few, ">= 3"),
        ("PEFT", "PEFT, adapter_names", many, ">= 3"),
    ]
    for name, rival, work, target in others:
        if name not in seconds:
            yield absent(case, rival=rival, install=PEFT_INSTALL, target=target)
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


def _of_conversations(server: Server, rounds: int) -> Row:
    [model] = serving_load.experts(1)
    turns = [
        ask_twice(server.url, model=model, history=HISTORY, cold_first=bool(number % 2))
        for number in range(rounds + 1)
    ]
    return conversation_row(turns[1:], history=HISTORY, target="<= 0.25")


def _of_routed(server: Server, rounds: int) -> Row:
    routed = [ask_routed(server.url, tokens=ANSWER) for _ in range(rounds + 1)]
    return outside_row(routed[1:], target="<= 0.05")


def _of_crowds(home: Home, figures: Figures, rounds: int) -> Row:
    """Compare times to the first token where plans fit with those where half of them do."""
    options = "--memory-budget", str(budget_for(FITTING, figures))
    with serving(home, *options) as roomy, serving(home, *options) as crowded:
        pairs = list(compare_crowds(roomy, crowded, fitting=FITTING, rounds=rounds))
    return crowding_row(pairs, target="<= 3")


def _saturated(server: Server, capacity: float, path: Path) -> Row:
    """Load a server until it is saturated, and draw that."""
    models = serving_load.experts(CLIENTS)

    def ask(number: int) -> Ask:
        return Ask(models[number % CLIENTS], ANSWER, serving_load.new_prompt(PROMPT))

    found = saturation_of(server, ask, tokens=ANSWER, capacity=capacity)
    what = f"expertctl serve, shape of Qwen3-0.6B, {CLIENTS} experts, {os.cpu_count()} cores\n"
    what += f"open loop, prompts of {PROMPT} tokens, answers of {ANSWER}"
    draw(found, path, tokens=ANSWER, what=what)
    return saturation_row(found, capacity=capacity, clients=CLIENTS)


def _checked(measured: tuple[Seconds, list[Told]]) -> Seconds:
    seconds, told = measured
    if not all(one.status == 200 and one.tokens == ANSWER for one in told):
        raise SystemExit(f"serving: not all answers are whole: {told}")
    return seconds


def _said(row: Row) -> Row:
    """Print a row at once, so that a later error does not lose it."""
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
        home = furnish(Path(folder), Path(folder), experts=CLIENTS)
        rows = [_said(row) for row in measure(home, options.rounds, plot=options.plot)]
    document: dict[str, object] = {
        "name": "serving",
        "machine": machine(),
        "rows": [asdict(row) for row in rows],
    }
    print(json.dumps(document) if options.json else as_table(document))


if __name__ == "__main__":
    main()
