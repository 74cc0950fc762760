"""How much of a request is not the engine's: a routed one, whose answer is checked, alone.

`/v1/infer` is asked, without a stream, for an answer that fits a JSON Schema; no expert is named,
so the prompt is routed. Counted as outside is the time from before the request is sent until its
whole answer was read, by the client's clock, less ``prefill`` and ``decode`` (the passes over the
base, and drawing tokens from their scores) and less ``load``: bringing the expert into memory and
finding room for keys and values, which is neither and is told apart. So what is outside is HTTP on
both sides, reading and checking the request, the decision, tokenising, handing over between
threads, waiting for a turn, checking the answer against the schema, remembering the outcome, and
writing the reply. The whole that it is a part of is without ``load``, too.
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
"""How many are asked one after the other in a round."""
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
    """One request: how long it took, and what the server says of its parts."""

    wall: Seconds
    timings_ms: Mapping[str, float]
    stages: Mapping[str, float]
    experts: int
    """How many experts were chosen."""
    passed: bool | None
    """Whether the answer has the form; None where it was not checked."""

    @property
    def total(self) -> Seconds:
        """The request without the loading of experts."""
        return self.wall - self._sum_step("load")

    @property
    def overhead(self) -> Seconds:
        """What of it is not the engine's."""
        return self.total - self._sum_step("prefill") - self._sum_step("decode")

    def _sum_step(self, step: str) -> Seconds:
        return self.timings_ms.get(step, 0.0) / 1000


def ask_routed(url: str, *, tokens: int, each: int = EACH) -> list[RoutedRequest]:
    """Ask a few, one after the other.

    Raises:
        SystemExit: when one was not routed to an expert, or its answer was not checked.
    """
    with httpx2.Client(base_url=url, timeout=TIMEOUT_SECONDS) as client:
        routed = [_ask(client, tokens) for _ in range(each)]
    check_routed(routed)
    return routed


def check_routed(routed: Sequence[RoutedRequest]) -> None:
    """Demand that there was a decision and a check in each.

    Raises:
        SystemExit: when there was none.
    """
    if not all(one.experts for one in routed):
        raise SystemExit("serving: a prompt was left to the base: no decision was measured")
    if any(one.passed is None for one in routed):
        raise SystemExit("serving: an answer was not checked: no check was measured")


def compute_overhead_share(routed: Sequence[RoutedRequest]) -> float:
    """Return the part of some requests that is not the engine's."""
    return sum(one.overhead for one in routed) / sum(one.total for one in routed)


def make_overhead_row(rounds: Sequence[Sequence[RoutedRequest]], *, target: str) -> Row:
    """Compare what is outside the engine with the whole."""
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
    """Say what is inside, and how many answers had the form."""
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
