"""Evaluation data: prompts with their right answers, and when an answer is right.

A file is JSON Lines in UTF-8, one `Sample` a line (``schemas/evaluation-sample.schema.json``). It
is bounded, read strictly, and all of its problems are reported at once, each with its line.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from expertctl.digest import Digest
from expertctl.errors import InvalidPackageError, NotFoundError
from expertctl.regular_file import open_regular
from expertctl.schema.shape import shape
from expertctl.schema.strict_json import JsonObject, JsonValue, canonical, load_object, loads
from expertctl.schema.validation import MAX_PROBLEMS, problems_of

MAX_DATA_BYTES = 64 << 20
MAX_LINE_BYTES = 8 << 20
MAX_SAMPLES = 100_000

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
    try:
        with open_regular(path) as stream:
            data = stream.read(MAX_DATA_BYTES + 1)
    except OSError as error:
        raise NotFoundError(f"{path}: {error.strerror or error}") from error
    samples = _Lines(str(path), metric).read(data)
    return EvaluationData(path, Digest.of(data), metric, samples, _repeated(path, samples))


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


class _Lines:
    """Reads lines and remembers what is wrong with them."""

    def __init__(self, what: str, metric: Metric) -> None:
        self._what, self._metric = what, metric
        self._problems: list[str] = []

    def read(self, data: bytes) -> tuple[Sample, ...]:
        """Return the samples of a file.

        Raises:
            InvalidPackageError: with all problems.
        """
        text = data.removesuffix(b"\n")
        self._check_size(data, lines=text.count(b"\n") + 1)
        samples = [self._sample(n, line) for n, line in enumerate(text.split(b"\n"), start=1)]
        read = tuple(sample for sample in samples if sample is not None)
        self._check_ids(read)
        self._raise_if_any()
        return read

    def _check_size(self, data: bytes, *, lines: int) -> None:
        """Refuse too many lines before there is an object for each."""
        if not data.strip():
            self._problems.append("it is empty: there is nothing to evaluate")
        if len(data) > MAX_DATA_BYTES:
            self._problems.append(f"more than {MAX_DATA_BYTES >> 20} MiB")
        if lines > MAX_SAMPLES:
            self._problems.append(f"{lines} lines, at most {MAX_SAMPLES} are allowed")
        self._raise_if_any()

    def _sample(self, number: int, line: bytes) -> Sample | None:
        """Read one line; what is wrong with it is kept, up to a bound."""
        if len(self._problems) > MAX_PROBLEMS:
            return None
        try:
            document = load_object(line, what=f"line {number}", max_bytes=MAX_LINE_BYTES)
        except InvalidPackageError as error:
            problems = error.problems if line.strip() else ("it is blank",)
        else:
            problems = tuple(problems_of(document, "evaluation-sample"))
            problems = problems or self._unfit(document)
            if not problems:
                return shape({**document, "line": number}, Sample)
        self._problems += [f"line {number}: {problem}" for problem in problems]
        return None

    def _unfit(self, document: JsonObject) -> tuple[str, ...]:
        if self._metric == "json":
            try:
                _json(str(document["answer"]))
            except InvalidPackageError as error:
                return tuple(f"answer: {problem}" for problem in error.problems)
        return ()

    def _check_ids(self, samples: tuple[Sample, ...]) -> None:
        first: dict[str, int] = {}
        for sample in samples:
            if sample.id is not None and first.setdefault(sample.id, sample.line) != sample.line:
                told = f"id {sample.id!r} is that of line {first[sample.id]} already"
                self._problems.append(f"line {sample.line}: {told}")

    def _raise_if_any(self) -> None:
        found = self._problems
        shown = found if len(found) <= MAX_PROBLEMS else [*found[:MAX_PROBLEMS], "… and more"]
        if found:
            hint = 'each line is an object such as {"prompt": "3 + 4", "answer": "7"}'
            raise InvalidPackageError(self._what, shown, hint=hint)


def _repeated(path: Path, samples: tuple[Sample, ...]) -> tuple[str, ...]:
    """Warn of prompts that count more than once."""
    first: dict[tuple[str, str | None], int] = {}
    again: list[tuple[int, int]] = []
    for sample in samples:
        earlier = first.setdefault((sample.prompt, sample.body), sample.line)
        if earlier != sample.line:
            again.append((earlier, sample.line))
    if not again:
        return ()
    count = "1 prompt is" if len(again) == 1 else f"{len(again)} prompts are"
    earlier, later = again[0]
    return (f"{path}: {count} repeated, the first on line {later}, from line {earlier}",)
