"""Many callers of one generation server: with experts, without, one by one, and beside PEFT.

``expertctl serve`` in a process of its own, on a home of `served_home`, asked over HTTP by the
clients of `serving_load`; transformers and PEFT compute the same texts in one batch of
``adapter_names``, without a server. Everything takes turns. ``--plot FILE`` draws what comes of
more and more requests a second.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path

from benchmarks import serving_load
from benchmarks.engine_process import EngineProcess
from benchmarks.expert_engines import PEFT_INSTALL, Answers, has_peft, peft
from benchmarks.harness import (
    Row,
    Seconds,
    absent,
    as_table,
    compare_rates,
    compare_times,
    judged,
    machine,
    take_turns,
)
from benchmarks.served_home import BASE, furnish
from benchmarks.serving_load import Ask, Told
from expertctl.settings import Home

EXPERTCTL = str(Path(sys.executable).with_name("expertctl"))
CLIENTS = 16
PROMPT, ANSWER = 64, 48
"""Tokens of what is asked and of what is answered."""
HISTORY = 1024
"""Tokens of a conversation before its next turn."""
ALONE = 4
"""How many are asked one by one: a quarter says as much."""
START_SECONDS = 300


class Server:
    """A server that runs."""

    def __init__(self, url: str) -> None:
        """Ask it at this address."""
        self.url = url

    def experts(self) -> Seconds:
        """Have as many clients as experts answered, each by its own."""
        asks = serving_load.asks(serving_load.experts(CLIENTS), prompt=PROMPT, answer=ANSWER)
        return self._checked(serving_load.together(self.url, asks))

    def base(self) -> Seconds:
        """Have as many answered by the base alone."""
        asks = serving_load.asks(serving_load.base_alone(CLIENTS), prompt=PROMPT, answer=ANSWER)
        return self._checked(serving_load.together(self.url, asks))

    def one_by_one(self) -> Seconds:
        """Have a few answered by their experts, one after the other."""
        asks = serving_load.asks(serving_load.experts(ALONE), prompt=PROMPT, answer=ANSWER)
        return self._checked(serving_load.one_by_one(self.url, asks))

    def turns(self) -> tuple[Seconds, Seconds]:
        """Return the time to the first token of a conversation, and of its next turn."""
        history = serving_load.new_prompt(HISTORY)
        _, [cold] = serving_load.one_by_one(self.url, [Ask(BASE, 4, history, key=history[:6])])
        longer = f"{history} And then?"
        _, [warm] = serving_load.one_by_one(self.url, [Ask(BASE, 4, longer, key=history[:6])])
        assert cold.cached == 0, cold
        assert warm.cached >= HISTORY - 16, warm
        return cold.first, warm.first

    def _checked(self, measured: tuple[Seconds, list[Told]]) -> Seconds:
        seconds, told = measured
        assert all(one.status == 200 and one.tokens == ANSWER for one in told), told
        return seconds


@contextmanager
def serving(home: Home, *options: str) -> Iterator[Server]:
    """Run a server on a home."""
    command = [EXPERTCTL, "serve", "--port", "0", "--json", "--base", BASE, *options]
    environment = {**os.environ, "EXPERT_HOME": str(home.root)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            yield Server(json.loads(process.stdout.readline())["url"])
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(START_SECONDS)


def measure(home: Home, rounds: int) -> Iterator[Row]:
    """Let all take turns, then compare."""
    with ExitStack() as stack:
        server = stack.enter_context(serving(home))
        runs = {"experts": server.experts, "base": server.base, "alone": server.one_by_one}
        if has_peft():
            rival = stack.enter_context(EngineProcess(peft(CLIENTS)))
            task = Answers(texts=CLIENTS, prompt=PROMPT, tokens=ANSWER)
            runs["PEFT"] = rival.runs(task, os.cpu_count() or 1)
        seconds = take_turns(runs, rounds=rounds)
        server.turns()
        turns = [server.turns() for _ in range(rounds)]
        outside = [_outside(server) for _ in range(rounds)]
    yield from _of_the_batch(seconds)
    yield compare_times(
        f"first token of the next turn behind {HISTORY} tokens",
        [warm for _, warm in turns],
        [cold for cold, _ in turns],
        steps=1,
        rival="of the first turn",
        target="<= 0.25",
    )
    yield _outside_row(outside)
    yield from _with_half_the_memory(home, rounds)


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


def _outside(server: Server) -> tuple[Seconds, Seconds]:
    """Return how long a request takes that is alone, and how much of that is not the engine's."""
    asks = serving_load.asks(serving_load.experts(1), prompt=PROMPT, answer=ANSWER)
    seconds, [told] = serving_load.together(server.url, asks)
    inside = sum(told.timings_ms[name] for name in ("load", "prefill", "decode")) / 1000
    return seconds - inside, seconds


def _outside_row(outside: Sequence[tuple[Seconds, Seconds]]) -> Row:
    row = compare_times(
        "time outside the engine: HTTP, decision, checking the answer",
        [beside for beside, _ in outside],
        [whole for _, whole in outside],
        steps=1,
        rival="the whole of a request that is alone",
    )
    return judged(row, "<= 0.05")


def _with_half_the_memory(home: Home, rounds: int) -> Iterator[Row]:
    """Compare the time to the first token where all plans fit with that where half of them do."""
    found: dict[str, list[Seconds]] = {}
    for name, room in (("all", CLIENTS), ("half", CLIENTS // 2)):
        budget = _budget(plans=room)
        with serving(home, "--memory-budget", str(budget), "--rows", "4") as server:
            found[name] = [_median_first(server) for _ in range(rounds + 1)][1:]
    yield compare_times(
        f"first token, {CLIENTS} plans in turn, room for {CLIENTS // 2}",
        found["half"],
        found["all"],
        steps=1,
        rival="room for all",
        target="<= 3",
    )


def _median_first(server: Server) -> Seconds:
    """Return the median time to the first token of two clients that go through all experts."""
    models = serving_load.experts(CLIENTS)

    def ask(number: int) -> Ask:
        return Ask(models[number % CLIENTS], 16, serving_load.new_prompt(PROMPT))

    _, told = serving_load.closed_loop(server.url, ask, clients=2, each=CLIENTS)
    assert all(one.status == 200 for one in told), told
    return statistics.median(one.first for one in told)


def _budget(*, plans: int) -> int:
    """Return a budget with room for so many plans beside all that is needed in any case."""
    base, plan, loading, texts = 1_193_000_000, 20_400_000, 45_000_000, 4 * 20_000_000
    return base + 40_000_000 + texts + loading + plans * plan


def plotted(home: Home, path: Path) -> None:
    """Draw throughput and times to the first token against requests a second."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    points = []
    with serving(home) as server:
        server.experts()
        saturated = CLIENTS / server.experts()
        for share in (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0):
            points.append((share * saturated, *_open(server, share * saturated)))
    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(7, 6))
    rates = [point[0] for point in points]
    above.plot(rates, [point[1] for point in points], marker="o")
    above.set_ylabel("answered tokens a second")
    above.set_ylim(bottom=0)
    for column, label in ((2, "p50"), (3, "p99")):
        below.plot(rates, [point[column] for point in points], marker="o", label=label)
    below.set_ylabel("seconds to the first token")
    below.set_xlabel(f"requests a second, {CLIENTS} experts")
    below.set_yscale("log")
    below.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _open(server: Server, rate: float) -> tuple[float, Seconds, Seconds]:
    models = serving_load.experts(CLIENTS)

    def ask(number: int) -> Ask:
        return Ask(models[number % CLIENTS], ANSWER, serving_load.new_prompt(PROMPT))

    seconds, told = serving_load.open_loop(server.url, ask, rate=rate, seconds=30)
    answered = [one for one in told if one.status == 200]
    firsts = sorted(one.first for one in answered)
    last = firsts[min(int(0.99 * len(firsts)), len(firsts) - 1)]
    return sum(one.tokens for one in answered) / seconds, statistics.median(firsts), last


def main() -> None:
    """The command line: that of every benchmark, and ``--plot``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plot", type=Path, metavar="FILE")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = furnish(Path(folder), Path(folder), experts=CLIENTS)
        rows = list(measure(home, options.rounds))
        if options.plot:
            plotted(home, options.plot)
    document: dict[str, object] = {
        "name": "serving",
        "machine": machine(),
        "rows": [asdict(row) for row in rows],
    }
    print(json.dumps(document) if options.json else as_table(document))


if __name__ == "__main__":
    main()
