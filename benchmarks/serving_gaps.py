"""Gaps between the tokens of streams, alone and while a prompt of 6,900 tokens is processed.

``expertctl serve`` in its own process gets requests over HTTP, with one base and no experts: random
weights in the shape of SmolLM2-135M with a byte-level tokenizer, or a directory given by
``--base``. One client reads some streams. In one run they are alone; in the next, once all of them
have begun, another client sends the long prompt, and only gaps between its request and its first
token count. The two runs alternate. The 99th percentiles of the gaps are compared; a second row
gives the time to the first token of the prompt, beside the streams and alone.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path

import httpx2

from benchmarks import serving_load
from benchmarks.harness import Row, Seconds, compare_times, describe_machine, format_table
from benchmarks.served.server import GenerationServer, run_generation_server
from benchmarks.served_home import write_small_base
from benchmarks.serving_load import TIMEOUT_SECONDS, CompletionTask, StreamRecord, percentile
from expertctl.engine.text.tokenizer import Tokenizer
from expertctl.settings import Home
from expertctl.store.bases import BaseStore

NAME = "measured"
STREAMS, ALONE_TOKENS, WITH_PROMPT_TOKENS = 4, 500, 1200
PROMPT = 6900
TARGET, SLOWER = "<= 3", "<= 4"
COUNTING = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, "
"""A text that a language model continues without an end."""
_LINE = "The quick brown fox jumps over the lazy dog and runs along the river. "


@dataclass(frozen=True, slots=True)
class GapRound:
    """One run without the long prompt, and one with it."""

    alone: Sequence[Seconds]
    with_prompt: Sequence[Seconds]
    prompt_alone: Seconds
    """From the request to the first token, without streams."""
    prompt_with_streams: Seconds


def measure(
    server: GenerationServer, tokenizer: Tokenizer, *, streams: int, rounds: int
) -> list[GapRound]:
    """Measure runs in turns, after one that only warms up."""

    def long_ask() -> CompletionTask:
        return CompletionTask(NAME, 1, make_long_prompt(tokenizer, PROMPT))

    asyncio.run(_run_streams(server.url, streams, 40, None))
    found = []
    for number in range(rounds):
        _, [prompt] = serving_load.ask_one_by_one(server.url, [long_ask()])
        kinds = ("alone", "beside") if number % 2 == 0 else ("beside", "alone")
        gaps: dict[str, list[Seconds]] = {}
        beside: StreamRecord | None = None
        for kind in kinds:
            ask = long_ask() if kind == "beside" else None
            tokens = ALONE_TOKENS if ask is None else WITH_PROMPT_TOKENS
            gaps[kind], told = asyncio.run(_run_streams(server.url, streams, tokens, ask))
            beside = told or beside
        assert beside is not None
        one = GapRound(gaps["alone"], gaps["beside"], prompt.first, beside.first)
        print(_describe_round(one), file=sys.stderr, flush=True)
        found.append(one)
    return found


def make_long_prompt(tokenizer: Tokenizer, tokens: int) -> str:
    """Return a text of about so many tokens that was not sent to a server before."""
    text = f"{time.time_ns()} " + _LINE * (tokens // 4)
    ids = tokenizer.encode(text)[:tokens]
    return tokenizer.decode(ids)


async def _run_streams(
    url: str, streams: int, tokens: int, ask: CompletionTask | None
) -> tuple[list[Seconds], StreamRecord | None]:
    """Read some streams, send a prompt once all have begun, and return the gaps that count."""
    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(base_url=url, timeout=TIMEOUT_SECONDS, limits=limits) as client:
        told = [StreamRecord(time.perf_counter()) for _ in range(streams)]
        tasks = [
            asyncio.create_task(
                serving_load.record_stream(
                    client, CompletionTask(NAME, tokens, _wait_for_start()), one
                )
            )
            for one in told
        ]
        while not all(one.times for one in told):
            await asyncio.sleep(0.01)
        begin, prompt = time.perf_counter(), None
        if ask is None:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        else:
            prompt = StreamRecord(time.perf_counter())
            await serving_load.record_stream(client, ask, prompt)
            _check_stream(prompt)
        end = time.perf_counter()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return [gap for one in told for gap in _list_gaps(one, begin, end)], prompt


def _wait_for_start() -> str:
    return f"{serving_load.make_number():03d} {COUNTING}"


def _check_stream(told: StreamRecord) -> None:
    if told.status != httpx2.codes.OK or not told.times:
        raise SystemExit(f"serving_gaps: the long prompt was answered with {told.status}")


def _list_gaps(told: StreamRecord, begin: float, end: float) -> list[Seconds]:
    """Return the gaps of a stream between two times."""
    times = [told.started + at for at in told.times]
    inside = [at for at in times if begin <= at <= end]
    return [later - sooner for sooner, later in pairwise(inside)]


def make_rows(rounds: Sequence[GapRound], *, streams: int, what: str) -> Iterator[Row]:
    """Compare the gaps, and the times to the first token of the prompt."""
    row = compare_times(
        f"p99 of gaps of {streams} streams beside a prompt of {PROMPT} tokens, {what}",
        [percentile(one.with_prompt, 0.99) for one in rounds],
        [percentile(one.alone, 0.99) for one in rounds],
        steps=1,
        rival="of the streams alone",
        target=TARGET,
    )
    beside = [gap for one in rounds for gap in one.with_prompt]
    alone = [gap for one in rounds for gap in one.alone]
    yield replace(row, note=f"beside: {_summarise(beside)}; alone: {_summarise(alone)}")
    yield compare_times(
        f"first token of the prompt beside {streams} streams, {what}",
        [one.prompt_with_streams for one in rounds],
        [one.prompt_alone for one in rounds],
        steps=1,
        rival="alone",
        target=SLOWER,
    )


def _describe_round(one: GapRound) -> str:
    ratio = percentile(one.with_prompt, 0.99) / percentile(one.alone, 0.99)
    return (
        f"ratio {ratio:.2f}; beside {_summarise(one.with_prompt)}; alone {_summarise(one.alone)}; "
        f"prompt {one.prompt_with_streams:.1f} s, alone {one.prompt_alone:.1f} s"
    )


def _summarise(gaps: Sequence[Seconds]) -> str:
    shares = (("median", 0.5), ("p90", 0.9), ("p99", 0.99), ("most", 1.0))
    shown = ", ".join(f"{name} {1000 * percentile(gaps, share):.1f}" for name, share in shares)
    return f"{len(gaps)} gaps: {shown} ms"


def main() -> None:
    """The command line: that of every benchmark, ``--base`` and ``--streams``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving_gaps")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=STREAMS)
    parser.add_argument("--base", type=Path, metavar="DIR")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        base = options.base or write_small_base(Path(folder, "base"))
        home = Home(Path(folder, "home"))
        BaseStore(home.bases).add(base, name=NAME)
        with run_generation_server(home, base=NAME) as server:
            tokenizer = Tokenizer.open(base)
            found = measure(server, tokenizer, streams=options.streams, rounds=options.rounds)
    what = "random weights in the shape of SmolLM2-135M" if options.base is None else base.name
    document: dict[str, object] = {
        "name": "serving_gaps",
        "machine": describe_machine(),
        "rows": [asdict(row) for row in make_rows(found, streams=options.streams, what=what)],
    }
    print(json.dumps(document) if options.json else format_table(document))


if __name__ == "__main__":
    main()
