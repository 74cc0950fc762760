"""The cost of leaving experts out: `skip` against `exact`, at equal memory, on a trained base.

The base is that of `examples.moe`: six layers of 32 experts of which 4 are used, trained on the
text of the starter pack. It is in float32, and its experts come from other memory. Perplexity is
per byte. *Text* is read token by token; for *answers* the question is read in one pass.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.harness import Row, describe_machine, format_table, judge
from benchmarks.skipped.evaluation import (
    BaseLoader,
    CacheConfiguration,
    EvaluationSet,
    SkippingResult,
    evaluate,
    evaluate_whole,
    make_evaluation_set,
)
from benchmarks.skipped.plot import Results, draw_skipping
from expertctl.cli.plot import check_plot_path
from expertctl.engine.kernels.jit import use_kernel_cache
from expertctl.engine.moe.expert_cache import EXACT_POLICY, MissPolicy
from expertctl.settings import Home

NAME = "moe_skip"
SHARES = (1.0, 0.8, 0.6, 0.5, 0.4, 0.3, 0.2)
CAPS, LATE_CAPS = (0.1, 0.25, 0.5, 1.0), (0.25, 1.0)
BUILD = Path(__file__).parents[1] / "build" / "moe"
_SAME = "<= 1.00001"


def list_configurations(shares: Sequence[float]) -> Iterator[CacheConfiguration]:
    """Yield the configurations to compare, two of the caps also without prefetching."""
    policies = [EXACT_POLICY, *(MissPolicy(skips=True, cap=cap) for cap in CAPS)]
    policies += [MissPolicy(skips=True, cap=cap, prefetches=False) for cap in LATE_CAPS]
    yield from (
        CacheConfiguration(share=share, policy=policy) for share in shares for policy in policies
    )


def measure(
    bases: BaseLoader, read: EvaluationSet, shares: Sequence[float]
) -> tuple[SkippingResult, Results]:
    """Process the material with all experts in memory, and with each configuration."""
    results = {}
    for holding in list_configurations(shares):
        results[holding] = evaluate(bases, holding, read)
        print(f"{_describe(holding)}: {results[holding]}", file=sys.stderr, flush=True)
    return evaluate_whole(bases, read), results


def make_rows(whole: SkippingResult, results: Results) -> list[Row]:
    """Compare exact figures with those of the whole base, and skipping with exact figures."""
    made = []
    for holding, mine in results.items():
        if not holding.policy.skips:
            exact = mine
            row = _compare_perplexity(
                f"text, {_describe(holding)}", mine, whole, "all in memory, no cache"
            )
            made.append(judge(row, _SAME))
        else:
            row = _compare_perplexity(f"text, {_describe(holding)}", mine, exact, "exact")
            made += [row, _compare_accuracy(f"answers, {_describe(holding)}", mine, exact)]
    return made


def _compare_perplexity(case: str, mine: SkippingResult, other: SkippingResult, rival: str) -> Row:
    ours, theirs = mine.text.perplexity, other.text.perplexity
    note = (
        f"{mine.text.skipped:.1%} of weights left out, {mine.text.fallback:.0%} of requests were "
        f"not in memory, {mine.rate:.0f} tok/s beside {other.rate:.0f}"
    )
    row = Row(case, round(ours, 5), rival, round(theirs, 5), "ppl", "lower", None, None, note=note)
    return replace(row, ratio=round(ours / theirs, 6))


def _compare_accuracy(case: str, mine: SkippingResult, other: SkippingResult) -> Row:
    ours, theirs = 100 * mine.accuracy, 100 * other.accuracy
    note = (
        f"perplexity {mine.answers.perplexity:.4f} beside {other.answers.perplexity:.4f}, "
        f"{mine.answers.skipped:.1%} of weights left out"
    )
    row = Row(case, round(ours, 1), "exact", round(theirs, 1), "%", "higher", None, None, note=note)
    return replace(row, ratio=round(ours / theirs, 4)) if theirs else row


def _describe(holding: CacheConfiguration) -> str:
    policy = holding.policy
    there = f"{holding.share:.0%} of experts in memory"
    if not policy.skips:
        return f"{there}, exact"
    late = "" if policy.prefetches else ", nothing read ahead"
    return f"{there}, skip up to {policy.cap:.0%} of a token{late}"


def find_trained_base(base: Path | None) -> Path:
    """Return the folder of the base, which is trained first if it does not exist."""
    if base is not None:
        return base
    command = [sys.executable, "-m", "examples.moe.train", "--out", str(BUILD / "base")]
    subprocess.run(command, check=True)  # trains nothing where there is a base
    return BUILD / "base"


def main() -> None:
    """Command line: the base, the amount of text, and the file of the plot."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{NAME}")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--base", type=Path, help="folder of the base; default: build/moe/base")
    parser.add_argument("--documents", type=int, default=8, help="texts of 512 tokens")
    parser.add_argument("--questions", type=int, default=20, help="of each of nine tasks")
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--plot", type=Path, help="draw the figures here, .svg or .png")
    options = parser.parse_args()
    if options.plot is not None:
        check_plot_path(options.plot, example="skip")
    directory = find_trained_base(options.base)
    use_kernel_cache(Home(BUILD / "home"))
    bases = BaseLoader(directory, threads=options.threads)
    read = make_evaluation_set(documents=options.documents, questions=options.questions)
    whole, results = measure(bases, read, options.shares)
    if options.plot is not None:
        draw_skipping(results, options.plot)
    document: dict[str, object] = {
        "name": NAME,
        "machine": describe_machine(),
        "rows": [asdict(row) for row in make_rows(whole, results)],
    }
    print(json.dumps(document) if options.json else format_table(document))


if __name__ == "__main__":
    main()
