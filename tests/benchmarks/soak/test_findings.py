"""What counts as wrong after hours of load, and what was asked for."""

from dataclasses import replace

import pytest

from benchmarks.soak.caller import CallRecord
from benchmarks.soak.home import Absence, HomeChange
from benchmarks.soak.monitor import ProcessUsage, ServerSample, is_idle, parse_metrics
from benchmarks.soak.report import (
    SPARE_THREADS,
    count_faults,
    count_refused,
    describe_faults,
    fit_line,
    list_failed_changes,
    list_leaks,
    measure_memory,
)
from benchmarks.soak.requests import LONG_MS, InvalidRequest, SoakRequest

ASKED = SoakRequest(api="chat", body={"model": "soak/ia3"}, experts=("soak/ia3",))
TIMED = SoakRequest(api="chat", body={"model": "auto", "timeout_ms": 20})
IDLE = """# TYPE expertctl_queue_jobs gauge
expertctl_queue_jobs 0.0
expertctl_batch_texts 0.0
expertctl_memory_bytes{owner="kv"} 64.0
expertctl_memory_bytes{owner="experts"} 36.0
expertctl_memory_limit_bytes 100.0
expertctl_memory_peak_bytes 90.0
python_info{version="3"} 1.0
"""


GONE = [Absence("soak/ia3", 10.0, 20.0), Absence("soak/dora", 0.0)]


def make_record(asked: SoakRequest | InvalidRequest = ASKED, **fields: object) -> CallRecord:
    return replace(CallRecord(asked=asked, begun=0.0, ended=1.0, status=200), **fields)  # type: ignore[arg-type]  # of Told


def sample(
    at: float = 0.0, *, resident: int = 1, files: int = 10, text: str = IDLE
) -> ServerSample:
    return ServerSample(at, ProcessUsage((1, 2), resident, files, 5), parse_metrics(text))


def test_a_line_through_values_is_as_steep_as_they_rise() -> None:
    times = [float(second) for second in range(600)]
    line = fit_line(times, [3.0 * second + 7 for second in times])
    assert line.slope == pytest.approx(3.0)
    assert line.error == pytest.approx(0.0, abs=1e-9)


def test_the_error_of_a_flat_line_covers_its_slope() -> None:
    times = [float(second) for second in range(600)]
    line = fit_line(times, [100.0 + (second // 30 % 2) for second in times])
    assert abs(line.slope) <= 2 * line.error
    assert line.error > 0


def test_memory_is_compared_between_the_last_third_and_the_second() -> None:
    samples = [sample(float(n), resident=100 if n < 200 else 110) for n in range(300)]
    found = measure_memory(samples)
    assert (found.second_third, found.last_third) == (100, 110)
    assert found.growth == pytest.approx(0.1)


@pytest.mark.parametrize(
    "fine",
    [
        make_record(),
        make_record(status=404, error="model_not_found: gone", begun=9.0, ended=11.0),
        make_record(error="not_found: removed meanwhile", begun=19.0, ended=30.0),
        make_record(TIMED, status=408, error="timeout: over"),
        make_record(TIMED, error="timed_out: over"),
        make_record(is_left=True, status=None),
        make_record(status=429),
        make_record(InvalidRequest(415, "POST", "/v1/infer"), status=415),
    ],
)
def test_what_was_asked_for_is_not_wrong(fine: CallRecord) -> None:
    assert describe_faults([fine], GONE) == []


@pytest.mark.parametrize(
    "fault",
    [
        make_record(status=500, error="error: oh"),
        make_record(status=404, error="model_not_found: gone", begun=30.0, ended=31.0),
        make_record(TIMED, status=404, error="model_not_found: gone", begun=11.0, ended=12.0),
        make_record(
            replace(TIMED, body={"timeout_ms": LONG_MS}), status=408, error="timeout: over"
        ),
        make_record(error="internal: in the middle of a stream"),
        make_record(status=408, error="timeout: over"),
        make_record(problem="the stream ended behind ''"),
        make_record(is_left=True, status=503),
        make_record(InvalidRequest(415, "POST", "/v1/infer"), status=200),
        make_record(InvalidRequest(415, "POST", "/v1/infer"), status=500),
    ],
)
def test_what_nobody_asked_for_is_wrong(fault: CallRecord) -> None:
    assert len(describe_faults([make_record(), fault], GONE)) == 1
    assert count_faults([make_record(), fault], GONE) == 1


def test_faults_of_one_kind_are_told_once_with_their_number() -> None:
    [line] = describe_faults([make_record(status=500, error="error: oh")] * 7, GONE)
    assert line.startswith("7 times chat, status 500: error: oh")


def test_who_was_refused_for_want_of_room_is_counted() -> None:
    assert count_refused([make_record(), make_record(status=429)]) == 1


def test_a_change_that_failed_is_told_with_what_it_said() -> None:
    changes = [
        HomeChange(("gc",), 0.0, 0, ""),
        HomeChange(("remove", "soak/ia3"), 0.0, 4, "error: no"),
    ]
    assert list_failed_changes(changes) == ["remove soak/ia3: exit 4: error: no"]


def test_a_server_that_gave_everything_back_keeps_nothing() -> None:
    assert list(list_leaks(sample(), sample(), [make_record()])) == []


@pytest.mark.parametrize(
    ("after", "word"),
    [
        (sample(files=11), "open files"),
        (sample(text=IDLE.replace("texts 0.0", "texts 1.0")), "not idle"),
        (sample(text=IDLE.replace("peak_bytes 90.0", "peak_bytes 101.0")), "budget"),
        (replace(sample(), processes=ProcessUsage((1, 3), 1, 10, 5)), "processes"),
        (replace(sample(), processes=ProcessUsage((1, 2), 1, 10, 6 + SPARE_THREADS)), "threads"),
    ],
)
def test_what_is_kept_is_named(after: ServerSample, word: str) -> None:
    [line] = list_leaks(sample(), after, [make_record()])
    assert word in line


def test_a_caller_without_an_answer_is_noticed() -> None:
    [line] = list_leaks(sample(), sample(), [make_record(ended=0.0)])
    assert "no answer" in line


def test_series_are_read_with_their_labels_and_summed() -> None:
    now = sample()
    assert now.sum_metric("expertctl_memory_bytes") == 100
    assert now.sum_metric("expertctl_memory_bytes", owner="kv") == 64
    assert is_idle(now)
    assert not any(name.startswith("python_info") for name in now.metrics)
