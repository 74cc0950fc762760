"""A run as a file: what was seen every second, and what each caller was told, a line for each."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.soak.caller import Told
from benchmarks.soak.watch import Sample


def write_record(samples: Sequence[Sample], told: Sequence[Told], path: Path) -> None:
    """Write lines of JSON; times are seconds since the first sample."""
    begun = samples[0].at
    lines = (*_looks(samples, begun), *_answers(told, begun))
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")


def _looks(samples: Sequence[Sample], begun: float) -> Iterator[dict[str, object]]:
    for sample in samples:
        seen = {"processes": asdict(sample.processes), "metrics": dict(sample.metrics)}
        yield {"at": round(sample.at - begun, 3), **seen}


def _answers(told: Sequence[Told], begun: float) -> Iterator[dict[str, object]]:
    for one in told:
        yield {
            "at": round(one.begun - begun, 3),
            "asked": one.kind,
            "status": one.status,
            "error": one.error,
            "problem": one.problem,
            "left": one.is_left,
            "first": one.first,
            "seconds": round(one.seconds, 4),
        }
