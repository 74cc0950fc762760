"""The clock of a request: how long its steps took, and when."""

import pytest

from expertctl.engine import result_builder
from expertctl.engine.generation import GenerationOutput
from expertctl.engine.result import StageSpan
from expertctl.engine.result_builder import StageTimer

GENERATED = GenerationOutput(
    text="",
    tokens=(1,),
    finish_reason="stop",
    prefill_tokens=1,
    prefill_ms=3.0,
    first_token_ms=4.0,
    decode_ms=5.0,
    decode_steps=1,
)


class Time:
    """Seconds that pass when the test says so."""

    now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time()
    monkeypatch.setattr(result_builder, "time", time)
    return time


def test_a_step_that_goes_on_twice_has_two_laps_and_one_sum(time: Time) -> None:
    clock = StageTimer()
    for step, seconds in (("queue", 1.0), ("route", 2.0), ("queue", 0.5)):
        time.now += seconds
        clock.end_stage(step)
    assert clock.spans == (
        StageSpan("queue", 100.0, 101.0),
        StageSpan("route", 101.0, 103.0),
        StageSpan("queue", 103.0, 103.5),
    )
    timings = clock.compute_timings(GENERATED)
    assert list(timings) == ["queue", "route", "prefill", "ttft", "decode", "total"]
    assert (timings["queue"], timings["route"], timings["ttft"]) == (1500.0, 2000.0, 3504.0)


def test_a_step_that_is_tried_again_and_again_has_one_span(time: Time) -> None:
    clock = StageTimer()
    for _ in range(1000):
        time.now += 1.0
        clock.end_stage("queue")
    assert clock.spans == (StageSpan("queue", 100.0, 1100.0),)


def test_what_is_between_a_span_and_the_next_step_belongs_to_neither(time: Time) -> None:
    clock = StageTimer()
    time.now += 1.0
    clock.end_stage("load")
    time.now += 10.0
    clock.restart_stage()
    time.now += 2.0
    clock.end_stage("post")
    assert clock.spans[-1] == StageSpan("post", 111.0, 113.0)
    assert (
        clock.compute_timings(GENERATED)["ttft"] == 1004.0
    )  # what comes after the text is none of it
