"""Prompt tokens per second, up to the logits of the last one, against llama.cpp and transformers.

The base and the engines are those of `decode`.
"""

from collections.abc import Sequence

from benchmarks.comparison import (
    NO_TARGETS,
    THREADS,
    ComparisonCase,
    ComparisonTargets,
    measure_cases,
)
from benchmarks.engine_process import ReadPrompt
from benchmarks.harness import Row, main
from expertctl.engine.kernels.packed_format import Scheme

PROMPTS = (128, 512)
TARGETS = {
    Scheme.BFLOAT16: ComparisonTargets(llama=">= 1.3", transformers=">= 1.0"),
    Scheme.INT8: ComparisonTargets(llama=">= 1.8"),
    Scheme.INT4: NO_TARGETS,
}


def measure(rounds: int) -> Sequence[Row]:
    """Process both prompts in every data type with one and two threads."""
    cases = [
        ComparisonCase(scheme, ReadPrompt(tokens), threads, asked)
        for scheme, asked in TARGETS.items()
        for tokens in PROMPTS
        for threads in THREADS
    ]
    return measure_cases(cases, rounds=rounds)


if __name__ == "__main__":
    main("prefill", measure, rounds=3)
