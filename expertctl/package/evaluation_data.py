"""Evaluation data: prompts with their right answers, and when an answer is right.

A file is JSON Lines in UTF-8, one `Sample` a line (``schemas/evaluation-sample.schema.json``). It
is bounded, read strictly, and all of its problems are reported at once, each with its line.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from expertctl.digest import Digest
from expertctl.errors import InvalidPackageError
from expertctl.schema.json_lines import MAX_LINE_BYTES, JsonLines, read_lines, repeated
from expertctl.schema.shape import shape
from expertctl.schema.strict_json import JsonObject, JsonValue, canonical, loads

_HINT = 'each line is an object such as {"prompt": "3 + 4", "answer": "7"}'

Metric = Literal["exact_match", "contains", "json"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One line: what is asked, and the right answer."""

    line: int
    prompt: str
    answer: str
    body: str | None = None
    id: str | None = None


@dataclass(frozen=True, slots=True)
class EvaluationData:
    """A file of samples; ``digest`` is that of its bytes."""

    path: Path
    digest: Digest
    metric: Metric
    samples: tuple[Sample, ...]
    warnings: tuple[str, ...]


def read_data(path: Path, *, metric: Metric) -> EvaluationData:
    """Read a file of samples whose answers the metric can compare.

    Raises:
        NotFoundError: when the file cannot be read.
        InvalidPackageError: with every problem of the file.
    """
    data = read_lines(path)
    samples = _samples(str(path), data, metric)
    prompts = ((sample.line, (sample.prompt, sample.body)) for sample in samples)
    return EvaluationData(path, Digest.of(data), metric, samples, repeated(path, prompts))


def is_right(answer: str, wanted: str, *, metric: Metric) -> bool:
    """Tell whether an answer is right; space at the end of either never counts."""
    match metric:
        case "exact_match":
            return answer.rstrip() == wanted.rstrip()
        case "contains":
            return wanted.rstrip() in answer
        case "json":
            return _same_json(answer, wanted)


def _same_json(answer: str, wanted: str) -> bool:
    """Compare values: the order of keys and the spelling of numbers do not count."""
    try:
        return canonical(_json(answer)) == canonical(_json(wanted))
    except InvalidPackageError:
        return False


def _json(text: str) -> JsonValue:
    return loads(text.encode(), what="the answer", max_bytes=MAX_LINE_BYTES)


def _samples(what: str, data: bytes, metric: Metric) -> tuple[Sample, ...]:
    lines = JsonLines(what, schema="evaluation-sample", hint=_HINT)
    samples: list[Sample] = []
    for number, document in lines.read(data):
        lines.complain(number, *_unfit(document, metric))
        samples.append(shape({**document, "line": number}, Sample))
    lines.check_ids((sample.line, sample.id) for sample in samples)
    lines.check()
    return tuple(samples)


def _unfit(document: JsonObject, metric: Metric) -> tuple[str, ...]:
    if metric == "json":
        try:
            _json(str(document["answer"]))
        except InvalidPackageError as error:
            return tuple(f"answer: {problem}" for problem in error.problems)
    return ()
