"""Evaluation data, and statistics of the proportion of right answers.

- one proportion: Wilson's score interval (Wilson 1927, *J. Am. Stat. Assoc.* 22:209-212);
- the difference of two proportions on the same prompts: the Wald interval with the adjustment of
  Bonett and Price (2012, *J. Educ. Behav. Stat.* 37:479-488);
- whether they differ: McNemar's exact test (McNemar 1947, *Psychometrika* 12:153-157).

All intervals are 95 % ones. A file of samples is JSON Lines in UTF-8, one `EvaluationSample` a line
(``schemas/evaluation-sample.schema.json``). It is bounded and read strictly, and all problems are
reported at once, with their lines.
"""

from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Literal

from expertctl.digest import Digest
from expertctl.errors import InvalidPackageError
from expertctl.schema.manifest import Evaluation
from expertctl.schema.strict_json import JsonObject, JsonValue, encode_canonical, loads
from expertctl.schema.validation import (
    MAX_LINE_BYTES,
    JsonLinesReader,
    convert_document,
    read_json_lines,
    warn_repeated,
)

Z_95 = 1.959963984540054
"""The 97.5 % quantile of the standard normal distribution."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A 95 % confidence interval."""

    low: float
    high: float


def wilson_interval(right: int, n: int) -> Interval:
    """Return Wilson's interval: (p + z²/2n ± z √(p(1-p)/n + z²/4n²)) / (1 + z²/n)."""
    share, shrink = right / n, 1 + Z_95 * Z_95 / n
    middle = (share + Z_95 * Z_95 / (2 * n)) / shrink
    reach = Z_95 * sqrt(share * (1 - share) / n + Z_95 * Z_95 / (4 * n * n)) / shrink
    low, high = middle - reach, middle + reach
    return Interval(max(0.0, min(low, share)), min(1.0, max(high, share)))  # against rounding


def paired_difference_interval(gained: int, lost: int, n: int) -> Interval:
    """Return Bonett and Price's interval of a paired difference.

    ``gained`` prompts are right only now, ``lost`` ones were right only before. It is
    p - q ± z √((p + q - (p - q)²) / (n + 2)) with p = (gained + 1) / (n + 2) and
    q = (lost + 1) / (n + 2).
    """
    more, less = (gained + 1) / (n + 2), (lost + 1) / (n + 2)
    middle = more - less
    reach = Z_95 * sqrt((more + less - middle * middle) / (n + 2))
    return Interval(max(-1.0, middle - reach), min(1.0, middle + reach))


def mcnemar_p_value(gained: int, lost: int) -> float:
    """Return the two-sided exact p-value for ``gained`` and ``lost`` prompts."""
    changes, fewer = gained + lost, min(gained, lost)
    term = tail = 1  # the current binomial coefficient, and the sum of all so far
    for i in range(fewer):
        term = term * (changes - i) // (i + 1)
        tail += term
    share: float = 2 * tail / (1 << changes)
    return min(1.0, share)


_PROPORTION_METRICS = frozenset({"exact_match", "contains", "json", "accuracy"})
"""The metrics whose values are proportions of right answers."""
_ROUNDING = 0.00005
"""The tolerance for a proportion in a manifest: `expertctl build` writes four digits."""


@dataclass(frozen=True, slots=True)
class EvaluationSummary:
    """An entry of ``evaluation`` as cells of a table; only proportions have counts and intervals.

    Whether the expert is better or worse is known for proportions only.
    """

    base: str
    expert: str
    gain: str
    base_count: str = ""
    expert_count: str = ""
    interval: str = ""
    is_better: bool = False
    is_worse: bool = False


def summarise_evaluation(entry: Evaluation) -> EvaluationSummary:
    """Return the results of an entry, as percentages if the metric counts right answers."""
    n, base, expert = entry.n, count_correct(entry, entry.base), count_correct(entry, entry.expert)
    if base is None or expert is None:
        gain = _format_gain(entry.expert - entry.base, ".3g")
        return EvaluationSummary(f"{entry.base:.4g}", f"{entry.expert:.4g}", gain)
    change = 100 * (expert - base) / n
    precision = ".1g" if 0 < abs(change) < 1 else f".{_count_digits(n)}f"  # never "-0 points"
    return EvaluationSummary(
        base=format_proportion(base, n),
        expert=format_proportion(expert, n),
        gain=f"{_format_gain(change, precision)} points",
        base_count=f"{base:,} of {n:,}",
        expert_count=f"{expert:,} of {n:,}",
        interval=format_interval(wilson_interval(expert, n), n),
        is_better=expert > base,
        is_worse=expert < base,
    )


def _format_gain(value: float, digits: str) -> str:
    return f"{value:+{digits}}".replace("-", "\N{MINUS SIGN}")


def describe_evaluation(entry: Evaluation) -> str:
    """Describe an entry in one line: ``5 of 5 right (100 %, …); base alone 0 of 5``."""
    n, base, expert = entry.n, count_correct(entry, entry.base), count_correct(entry, entry.expert)
    if base is None or expert is None:
        values = f"{entry.expert:.4g}; base alone {entry.base:.4g}"
        return f"{values} ({entry.metric}, n = {n})"
    share = format_proportion(expert, n)
    interval = format_interval(wilson_interval(expert, n), n)
    return f"{expert} of {n} right ({share}, 95 % interval {interval}); base alone {base} of {n}"


def count_correct(entry: Evaluation, value: float) -> int | None:
    """Return the number of right answers in a proportion; None if it is not one."""
    if entry.metric not in _PROPORTION_METRICS or not 0 <= value <= 1:
        return None
    count = round(value * entry.n)
    return count if abs(value - count / entry.n) <= _ROUNDING + 1e-9 else None


def format_correct_count(right: int, n: int) -> str:
    """Format a number of right answers: ``5 of 5 (100 %)``."""
    return f"{right} of {n} ({format_proportion(right, n)})"


def format_proportion(right: int, n: int) -> str:
    """Format a proportion in per cent: 100 only for all answers right, 0 only for none."""
    least = 10.0 ** -_count_digits(n)
    shown = 100 * right / n
    if 0 < right < n:
        shown = min(max(shown, least), 100 - least)
    return format_percent(shown / 100, n)


def format_interval(interval: Interval, n: int) -> str:
    """Format an interval of a proportion: ``57 to 100 %``."""
    low = format_percent(interval.low, n).removesuffix(" %")
    return f"{low} to {format_percent(interval.high, n)}"


def format_percent(share: float, n: int) -> str:
    """Format a proportion of ``n`` answers in per cent, with one decimal from 1,000 on."""
    return f"{100 * share:.{_count_digits(n)}f} %"


def _count_digits(n: int) -> int:
    return 1 if n >= 1000 else 0


_HINT = 'each line is an object such as {"prompt": "3 + 4", "answer": "7"}'

Metric = Literal["exact_match", "contains", "json"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSample:
    """One line: a prompt and the right answer."""

    line: int
    prompt: str
    answer: str
    body: str | None = None
    id: str | None = None


@dataclass(frozen=True, slots=True)
class EvaluationData:
    """The samples of a file; ``digest`` is that of its bytes."""

    path: Path
    digest: Digest
    metric: Metric
    samples: tuple[EvaluationSample, ...]
    warnings: tuple[str, ...]


def read_evaluation_data(path: Path, *, metric: Metric) -> EvaluationData:
    """Read a file of samples for a metric.

    Raises:
        NotFoundError: when the file cannot be read.
        InvalidPackageError: with every problem of the file.
    """
    data = read_json_lines(path)
    samples = _parse_samples(str(path), data, metric)
    prompts = ((sample.line, (sample.prompt, sample.body)) for sample in samples)
    return EvaluationData(path, Digest.compute(data), metric, samples, warn_repeated(path, prompts))


def is_correct(answer: str, expected: str, *, metric: Metric) -> bool:
    """Tell whether an answer is right; trailing white space is ignored."""
    match metric:
        case "exact_match":
            return answer.rstrip() == expected.rstrip()
        case "contains":
            return expected.rstrip() in answer
        case "json":
            return _equals_json(answer, expected)


def _equals_json(answer: str, expected: str) -> bool:
    """Compare JSON values, whatever the order of keys and the notation of numbers."""
    try:
        return encode_canonical(_parse_json(answer)) == encode_canonical(_parse_json(expected))
    except InvalidPackageError:
        return False


def _parse_json(text: str) -> JsonValue:
    return loads(text.encode(), what="the answer", max_bytes=MAX_LINE_BYTES)


def _parse_samples(what: str, data: bytes, metric: Metric) -> tuple[EvaluationSample, ...]:
    lines = JsonLinesReader(what, schema="evaluation-sample", hint=_HINT)
    samples: list[EvaluationSample] = []
    for number, document in lines.read(data):
        lines.add_problems(number, *find_unfit_values(document, metric))
        samples.append(convert_document({**document, "line": number}, EvaluationSample))
    lines.check_duplicate_ids((sample.line, sample.id) for sample in samples)
    lines.raise_problems()
    return tuple(samples)


def find_unfit_values(document: JsonObject, metric: Metric) -> tuple[str, ...]:
    """Return why the answer of a sample is none for a metric; empty if it is one."""
    if metric == "json":
        try:
            _parse_json(str(document["answer"]))
        except InvalidPackageError as error:
            return tuple(f"answer: {problem}" for problem in error.problems)
    return ()
