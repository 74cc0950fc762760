"""How an evaluation is shown: the document of ``eval --json``, and the same for people."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from expertctl.cli.output import table
from expertctl.cli.routed_view import routed_text
from expertctl.package.evaluation_summary import count_text, interval_text

if TYPE_CHECKING:
    from expertctl.engine.evaluation_result import Answer, Evaluated, Gain, Score
    from expertctl.package.proportion import Interval

_SHOWN_CHARACTERS = 300


def document(found: "Evaluated", *, show: int, min_gain: float | None) -> dict[str, object]:
    """Return all results, with the first few wrong answers of the last score."""
    gain = found.gains[-1].value
    return {
        "ref": found.expert.experts[-1].ref,
        "data": str(found.data.path),
        "dataset_sha256": found.data.digest.hex,
        "metric": found.data.metric,
        "max_tokens": found.max_tokens,
        "base_model": found.base_name,
        "dtype": found.dtype,
        "n": len(found.data.samples),
        "base": found.base.share,
        "expert": found.expert.share,
        "scores": [_score(score) for score in found.scores],
        "gains": [_gain(each) for each in found.gains],
        "min_gain": min_gain,
        "passed": min_gain is None or gain >= min_gain,
        "wrong": [_wrong(answer) for answer in found.scores[-1].wrong[:show]],
        "warnings": list(found.warnings),
        **({} if found.moe is None else {"moe": found.moe.to_json()}),
    }


def text(found: "Evaluated", *, show: int) -> str:
    """Return the scores, the gains, and the first wrong answers of the last score."""
    n, data = len(found.data.samples), found.data
    head = (
        f"{data.path}: n = {n}, {data.metric}, base {found.base_name} in {found.dtype}, "
        f"at most {found.max_tokens} tokens"
    )
    rows = [[s.name, count_text(s.right, n), interval_text(s.interval, n)] for s in found.scores]
    lines = [
        head,
        *routed_text(found.moe),
        "",
        table(["", "right", "95 % interval"], rows),
        "",
    ]
    lines += map(_gain_text, found.gains)
    return "\n".join([*lines, *_wrong_texts(found.scores[-1], show)])


def oddities(found: "Evaluated") -> Iterator[str]:
    """Warn of answers of experts that had no room to end, or say nothing."""
    for score in found.scores:
        if score.experts and score.empty:
            yield f"{score.name}: {score.empty} of {len(score.answers)} answers are empty"
        if score.experts and score.cut:
            yield (
                f"{score.name}: {score.cut} of {len(score.answers)} answers were cut at "
                f"{found.max_tokens} tokens; see --max-tokens and decoding.max_tokens"
            )


def shortfall(found: "Evaluated", min_gain: float | None) -> str:
    """Say how a gain is too small; empty if it is not, or none was demanded."""
    gain = found.gains[-1]
    if min_gain is None or gain.value >= min_gain:
        return ""
    score, over, n = gain.score, gain.over, len(gain.score.answers)
    return (
        f"{score.name}: a gain of {gain.value:+.3f} over {over.name}, at least {min_gain:+g} was "
        f"demanded ({score.right} of {n} right against {over.right} of {n})"
    )


def _score(score: "Score") -> dict[str, object]:
    return {
        "name": score.name,
        "experts": [
            {"ref": e.ref, "content_digest": str(e.content_digest), "weight": e.weight}
            for e in score.experts
        ],
        "right": score.right,
        "share": score.share,
        **_interval(score.interval),
        "cut_off": score.cut,
    }


def _gain(gain: "Gain") -> dict[str, object]:
    return {
        "name": gain.score.name,
        "over": gain.over.name,
        "gain": gain.value,
        **_interval(gain.interval),
        "gained": gain.gained,
        "lost": gain.lost,
        "p": gain.p,
    }


def _interval(interval: "Interval") -> dict[str, object]:
    return {"low": round(interval.low, 6), "high": round(interval.high, 6)}


def _wrong(answer: "Answer") -> dict[str, object]:
    sample = answer.sample
    return {
        "line": sample.line,
        "id": sample.id,
        "prompt": sample.prompt,
        "wanted": sample.answer,
        "got": answer.text,
    }


def _gain_text(gain: "Gain") -> str:
    low, high = gain.interval.low, gain.interval.high
    return (
        f"{gain.score.name} over {gain.over.name}: gain {gain.value:+.3f}, "
        f"95 % interval {low:+.3f} to {high:+.3f}, p = {gain.p:.2g}"
    )


def _wrong_texts(score: "Score", show: int) -> list[str]:
    """Show wrong answers, quoted so that spaces and line ends are visible."""
    shown = score.wrong[:show]
    lines = ["", f"wrong answers of {score.name}, {len(shown)} of {len(score.wrong)}:"]
    for answer in shown:
        sample = answer.sample
        texts = {"prompt": sample.prompt, "wanted": sample.answer, "got": answer.text}
        lines.append(f"  line {sample.line}" + (f" ({sample.id})" if sample.id else ""))
        lines += [f"    {label.ljust(6)}  {_quoted(value)}" for label, value in texts.items()]
    return lines if shown else []


def _quoted(value: str) -> str:
    cut = value if len(value) <= _SHOWN_CHARACTERS else f"{value[:_SHOWN_CHARACTERS]}…"
    return json.dumps(cut, ensure_ascii=False)
