"""The time of a request outside the engine: one routed request, whose answer is checked.

A request to `/v1/infer`, without streaming, asks for an answer that fits a JSON Schema. It names no
expert, so the prompt is routed. The time outside is measured by the client, from before the request
is sent until the whole answer was read, minus ``prefill`` and ``decode`` (the passes over the base,
and sampling) and minus ``load``: loading the expert and allocating keys and values, which belongs
to neither and is reported separately. So the time outside covers HTTP on both sides, reading and
checking the request, the routing decision, tokenising, passing work between threads, waiting in the
queue, checking the answer against the schema, recording the result, and writing the response. The
time of the whole request excludes ``load``, too.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx2

from benchmarks.harness import Row, Seconds, compare_times
from benchmarks.served_home import make_question
from benchmarks.serving_load import TIMEOUT_SECONDS, make_number

EACH = 4
"""Number of sequential requests in a round."""
ANSWER_FORMAT = {
    "type": "json_schema",
    "schema": {
        "anyOf": [
            {
                "type": "object",
                "properties": {
                    "answer": {"type": "string"},
                    "sources": {"type": "array", "items": {"type": "string"}, "maxItems": 8},
                },
                "required": ["answer", "sources"],
                "additionalProperties": False,
            },
            {"type": "integer", "minimum": 0},
        ]
    },
}


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """The time of one request, and of its stages as the server reports them."""

    wall: Seconds
    timings_ms: Mapping[str, float]
    stages: Mapping[str, float]
    experts: int
    """Number of experts that were chosen."""
    passed: bool | None
    """Whether the answer has the format; None if it was not checked."""

    @property
    def total(self) -> Seconds:
        """The request without the loading of experts."""
        return self.wall - self._sum_step("load")

    @property
    def overhead(self) -> Seconds:
        """The time outside the engine."""
        return self.total - self._sum_step("prefill") - self._sum_step("decode")

    def _sum_step(self, step: str) -> Seconds:
        return self.timings_ms.get(step, 0.0) / 1000


def ask_routed(url: str, *, tokens: int, each: int = EACH) -> list[RoutedRequest]:
    """Send a few requests, one after the other.

    Raises:
        SystemExit: when one was not routed to an expert, or its answer was not checked.
    """
    with httpx2.Client(base_url=url, timeout=TIMEOUT_SECONDS) as client:
        routed = [_ask(client, tokens) for _ in range(each)]
    check_routed(routed)
    return routed


def check_routed(routed: Sequence[RoutedRequest]) -> None:
    """Require a routing decision and a check in each request.

    Raises:
        SystemExit: when there was none.
    """
    if not all(one.experts for one in routed):
        raise SystemExit("serving: a prompt was left to the base: no decision was measured")
    if any(one.passed is None for one in routed):
        raise SystemExit("serving: an answer was not checked: no check was measured")


def compute_overhead_share(routed: Sequence[RoutedRequest]) -> float:
    """Return the share of the time of some requests that is outside the engine."""
    return sum(one.overhead for one in routed) / sum(one.total for one in routed)


def make_overhead_row(rounds: Sequence[Sequence[RoutedRequest]], *, target: str) -> Row:
    """Compare the time outside the engine with the whole."""
    row = compare_times(
        "time outside the engine of a routed request with a JSON Schema",
        [sum(one.overhead for one in routed) for routed in rounds],
        [sum(one.total for one in routed) for routed in rounds],
        steps=len(rounds[0]),
        rival="the whole of it, alone, without loading",
        target=target,
    )
    return replace(row, note=_describe_parts([one for routed in rounds for one in routed]))


def _ask(client: httpx2.Client, tokens: int) -> RoutedRequest:
    number = make_number()
    body = {
        "prompt": f"{make_question(number)} (number {number:06d})",
        "max_tokens": tokens,
        "temperature": 0.0,
        "response_format": ANSWER_FORMAT,
    }
    begun = time.perf_counter()
    said: dict[str, Any] = client.post("/v1/infer", json=body).raise_for_status().json()
    return RoutedRequest(
        wall=time.perf_counter() - begun,
        timings_ms=said["timings_ms"],
        stages=said["stages"],
        experts=len(said["experts_used"]),
        passed=said["validation_passed"],
    )


def _describe_parts(routed: Sequence[RoutedRequest]) -> str:
    """Describe the time inside the engine, and the number of answers with the format."""
    names = ("reception", "reasoning", "post_processing")
    parts = [(name, _median([one.stages[name] for one in routed])) for name in names]
    known = [sum(one.stages[name] for name in names) for one in routed]
    beside = [one.overhead * 1000 - ms for one, ms in zip(routed, known, strict=True)]
    parts.append(("HTTP, tokenising and handing over", _median(beside)))
    parts.append(("(not counted) loading", _median([one.stages["preparation"] for one in routed])))
    told = ", ".join(f"{name} {ms:.1f} ms" for name, ms in parts)
    passed = sum(bool(one.passed) for one in routed)
    return f"medians: {told}; {passed} of {len(routed)} answers fit the schema"


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)
