"""Tokens per second of decoding one token at a time, against llama.cpp and transformers.

A base in the shape of Qwen3-0.6B with random weights in three data types, the embedding in the same
one; llama.cpp with flash attention on or off, whichever is faster. The limit of the memory is
measured in the same run, by reading the weights without computing.
"""

from collections.abc import Sequence

from benchmarks.comparison import ComparisonCase, ComparisonTargets, measure_cases
from benchmarks.engine_process import Decode
from benchmarks.harness import Row, main
from expertctl.engine.kernels.packed_format import Scheme

TASK = Decode(tokens=16, context=128)
TARGETS = {
    (Scheme.BFLOAT16, 2): ComparisonTargets(
        llama=">= 1.2", transformers=">= 3.5", memory=">= 0.87"
    ),
    (Scheme.BFLOAT16, 1): ComparisonTargets(llama=">= 1.05", memory=">= 0.87"),
    (Scheme.INT8, 2): ComparisonTargets(llama=">= 1.6"),
    (Scheme.INT8, 1): ComparisonTargets(llama=">= 1.4"),
    (Scheme.INT4, 2): ComparisonTargets(llama=">= 1.2"),
    (Scheme.INT4, 1): ComparisonTargets(llama=">= 1.2"),
}


def measure(rounds: int) -> Sequence[Row]:
    """Decode in every data type with one and two threads."""
    cases = [
        ComparisonCase(scheme, TASK, threads, asked) for (scheme, threads), asked in TARGETS.items()
    ]
    return measure_cases(cases, rounds=rounds)


if __name__ == "__main__":
    main("decode", measure, rounds=7)
