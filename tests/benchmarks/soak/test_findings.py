"""What counts as wrong after hours of load, and what was asked for."""

from dataclasses import replace

import pytest

from benchmarks.soak.caller import Told
from benchmarks.soak.churn import Away, Change
from benchmarks.soak.findings import (
    SPARE_THREADS,
    failed_changes,
    faults,
    fit,
    kept_at_end,
    memory_of,
    not_asked_for,
    refused,
)
from benchmarks.soak.mistake import Mistake
from benchmarks.soak.request import LONG_MS, Request
from benchmarks.soak.watch import Processes, Sample, is_idle, metrics_of

ASKED = Request(api="chat", body={"model": "soak/ia3"}, experts=("soak/ia3",))
TIMED = Request(api="chat", body={"model": "auto", "timeout_ms": 20})
IDLE = """# TYPE expertctl_queue_jobs gauge
expertctl_queue_jobs 0.0
expertctl_batch_texts 0.0
expertctl_memory_bytes{owner="kv"} 64.0
expertctl_memory_bytes{owner="experts"} 36.0
expertctl_memory_limit_bytes 100.0
expertctl_memory_peak_bytes 90.0
python_info{version="3"} 1.0
"""


GONE = [Away("soak/ia3", 10.0, 20.0), Away("soak/dora", 0.0)]


def told(asked: Request | Mistake = ASKED, **fields: object) -> Told:
    return replace(Told(asked=asked, begun=0.0, ended=1.0, status=200), **fields)  # type: ignore[arg-type]  # of Told


def sample(at: float = 0.0, *, resident: int = 1, files: int = 10, text: str = IDLE) -> Sample:
    return Sample(at, Processes((1, 2), resident, files, 5), metrics_of(text))


def test_a_line_through_values_is_as_steep_as_they_rise() -> None:
    times = [float(second) for second in range(600)]
    line = fit(times, [3.0 * second + 7 for second in times])
    assert line.slope == pytest.approx(3.0)
    assert line.error == pytest.approx(0.0, abs=1e-9)


def test_the_error_of_a_flat_line_covers_its_slope() -> None:
    times = [float(second) for second in range(600)]
    line = fit(times, [100.0 + (second // 30 % 2) for second in times])
    assert abs(line.slope) <= 2 * line.error
    assert line.error > 0


def test_memory_is_compared_between_the_last_third_and_the_second() -> None:
    samples = [sample(float(n), resident=100 if n < 200 else 110) for n in range(300)]
    found = memory_of(samples)
    assert (found.second_third, found.last_third) == (100, 110)
    assert found.growth == pytest.approx(0.1)


@pytest.mark.parametrize(
    "fine",
    [
        told(),
        told(status=404, error="model_not_found: gone", begun=9.0, ended=11.0),
        told(error="not_found: removed meanwhile", begun=19.0, ended=30.0),
        told(TIMED, status=408, error="timeout: over"),
        told(TIMED, error="timed_out: over"),
        told(is_left=True, status=None),
        told(status=429),
        told(Mistake(415, "POST", "/v1/infer"), status=415),
    ],
)
def test_what_was_asked_for_is_not_wrong(fine: Told) -> None:
    assert not_asked_for([fine], GONE) == []


@pytest.mark.parametrize(
    "fault",
    [
        told(status=500, error="error: oh"),
        told(status=404, error="model_not_found: gone", begun=30.0, ended=31.0),
        told(TIMED, status=404, error="model_not_found: gone", begun=11.0, ended=12.0),
        told(replace(TIMED, body={"timeout_ms": LONG_MS}), status=408, error="timeout: over"),
        told(error="internal: in the middle of a stream"),
        told(status=408, error="timeout: over"),
        told(problem="the stream ended behind ''"),
        told(is_left=True, status=503),
        told(Mistake(415, "POST", "/v1/infer"), status=200),
        told(Mistake(415, "POST", "/v1/infer"), status=500),
    ],
)
def test_what_nobody_asked_for_is_wrong(fault: Told) -> None:
    assert len(not_asked_for([told(), fault], GONE)) == 1
    assert faults([told(), fault], GONE) == 1


def test_faults_of_one_kind_are_told_once_with_their_number() -> None:
    [line] = not_asked_for([told(status=500, error="error: oh")] * 7, GONE)
    assert line.startswith("7 times chat, status 500: error: oh")


def test_who_was_refused_for_want_of_room_is_counted() -> None:
    assert refused([told(), told(status=429)]) == 1


def test_a_change_that_failed_is_told_with_what_it_said() -> None:
    changes = [Change(("gc",), 0.0, 0, ""), Change(("remove", "soak/ia3"), 0.0, 4, "error: no")]
    assert failed_changes(changes) == ["remove soak/ia3: exit 4: error: no"]


def test_a_server_that_gave_everything_back_keeps_nothing() -> None:
    assert list(kept_at_end(sample(), sample(), [told()])) == []


@pytest.mark.parametrize(
    ("after", "word"),
    [
        (sample(files=11), "open files"),
        (sample(text=IDLE.replace("texts 0.0", "texts 1.0")), "not idle"),
        (sample(text=IDLE.replace("peak_bytes 90.0", "peak_bytes 101.0")), "budget"),
        (replace(sample(), processes=Processes((1, 3), 1, 10, 5)), "processes"),
        (replace(sample(), processes=Processes((1, 2), 1, 10, 6 + SPARE_THREADS)), "threads"),
    ],
)
def test_what_is_kept_is_named(after: Sample, word: str) -> None:
    [line] = kept_at_end(sample(), after, [told()])
    assert word in line


def test_a_caller_without_an_answer_is_noticed() -> None:
    [line] = kept_at_end(sample(), sample(), [told(ended=0.0)])
    assert "no answer" in line


def test_series_are_read_with_their_labels_and_summed() -> None:
    now = sample()
    assert now.metric("expertctl_memory_bytes") == 100
    assert now.metric("expertctl_memory_bytes", owner="kv") == 64
    assert is_idle(now)
    assert not any(name.startswith("python_info") for name in now.metrics)
