"""Engines in processes of their own."""

import os
from functools import partial

import pytest

from benchmarks.engine_process import Decode, EngineProcess, ReadPrompt, Task, make_prompt_ids


class Echo:
    """An engine whose every task takes as many seconds as it is told and it has threads."""

    def __init__(self, weight_bytes: int) -> None:
        self.about, self.weight_bytes = f"process {os.getpid()}", weight_bytes

    def run(self, task: Task, threads: int) -> float:
        match task:
            case ReadPrompt(tokens):
                return float(tokens * threads)
            case _:
                raise ValueError("only prompts are read")


def test_an_engine_answers_from_another_process_until_it_is_closed() -> None:
    with EngineProcess(partial(Echo, 7)) as first, EngineProcess(partial(Echo, 8)) as second:
        assert (first.weight_bytes, second.weight_bytes) == (7, 8)
        assert len({first.about, second.about, f"process {os.getpid()}"}) == 3
        assert first.run(ReadPrompt(3), 2) == 6.0
        assert second.bind(ReadPrompt(5), 1)() == 5.0


def test_an_engine_that_fails_fails_the_benchmark(capfd: pytest.CaptureFixture[str]) -> None:
    with EngineProcess(partial(Echo, 7)) as engine, pytest.raises(EOFError):
        engine.run(Decode(1, 1), 1)
    assert "only prompts are read" in capfd.readouterr().err


def test_prompts_do_not_repeat_themselves_within_the_vocabulary() -> None:
    ids = make_prompt_ids(512, 151_936)
    assert len(set(ids)) == 512
    assert all(0 <= token < 151_936 for token in ids)
