"""Decoding and prompts of one GGUF file, by our kernels for its blocks and by llama.cpp.

A base in the shape of Qwen3-0.6B, all matrices in one kind of block. Both engines read the same
file and compute with its numbers, with activations in eight bits; `decode` and `prefill` compare
formats of our own.
"""

from collections.abc import Sequence

from benchmarks.comparison import THREADS, ComparisonCase, ComparisonTargets, measure_cases
from benchmarks.engine_process import Decode, ReadPrompt
from benchmarks.harness import Row, main
from expertctl.engine.kernels.packed_format import Scheme

SCHEMES = (Scheme.Q8_0, Scheme.Q4_0, Scheme.Q4_K, Scheme.Q6_K)
TASKS: dict[Decode | ReadPrompt, ComparisonTargets] = {
    Decode(tokens=16, context=128): ComparisonTargets(llama=">= 1.2"),
    ReadPrompt(512): ComparisonTargets(llama=">= 1.3"),
}


def measure(rounds: int) -> Sequence[Row]:
    """Decode, and process a prompt, in every kind of block with one and two threads."""
    cases = [
        ComparisonCase(scheme, task, threads, asked)
        for scheme in SCHEMES
        for task, asked in TASKS.items()
        for threads in THREADS
    ]
    return measure_cases(cases, rounds=rounds)


if __name__ == "__main__":
    main("gguf_blocks", measure, rounds=5)
