"""What the rows of decode and prefill say, from times that are given."""

import pytest

from benchmarks.comparison import ComparisonCase, ComparisonTargets, make_rows
from benchmarks.decode import TARGETS as DECODE
from benchmarks.engine_process import Decode, ReadPrompt
from benchmarks.prefill import TARGETS as PREFILL
from expertctl.engine.kernels.packed_format import Scheme

ASKED = ComparisonTargets(llama=">= 1.2", transformers=">= 3.5", memory=">= 0.87")
DECODING = ComparisonCase(Scheme.BFLOAT16, Decode(tokens=16, context=128), 2, ASKED)
SECONDS = {
    "ours": [0.5, 0.5, 0.5],
    "llama.cpp": [0.9, 0.8, 0.7],
    "llama.cpp, flash attention": [0.4, 0.7, 0.7],
    "transformers": [1.6, 1.6, 2.0],
    "memory": [0.025, 0.025, 0.025],
}


def test_the_rival_is_the_better_of_flash_attention_on_and_off() -> None:
    row, *_ = make_rows(DECODING, SECONDS, weight_bytes=10**9)
    assert row.case == "decode after 128 tokens, bf16, threads: 2"
    assert (row.rival, row.ours, row.theirs) == ("llama.cpp, flash attention", 32.0, 22.86)
    assert (row.ratio, row.unit, row.ok) == (1.4, "tok/s", True)


def test_bf16_has_transformers_and_the_share_of_memory_beside_it() -> None:
    _, other, share = make_rows(DECODING, SECONDS, weight_bytes=10**9)
    assert (other.rival, other.ratio, other.ok) == ("transformers", 3.2, False)
    assert (share.ours, share.theirs, share.unit) == (32.0, 40.0, "GB/s")
    assert (share.ratio, share.ok) == (0.8, False)


def test_prompts_in_integers_are_compared_with_llama_cpp_only() -> None:
    case = ComparisonCase(Scheme.INT8, ReadPrompt(128), 1, ComparisonTargets(llama=">= 1.8"))
    seconds = {name: found for name, found in SECONDS.items() if name != "memory"}
    [row] = make_rows(case, seconds, weight_bytes=10**9)
    assert row.case == "prompt of 128 tokens, q8_0, threads: 1"
    assert (row.ours, row.theirs, row.target, row.ok) == (256.0, 182.86, ">= 1.8", False)


def test_decoding_in_integers_has_the_share_of_memory_beside_it_without_a_target() -> None:
    case = ComparisonCase(
        Scheme.INT4, Decode(tokens=16, context=128), 1, ComparisonTargets(llama=">= 1.2")
    )
    _, share = make_rows(case, SECONDS, weight_bytes=10**9)
    assert (share.ratio, share.target, share.ok) == (0.8, None, None)


def test_rivals_that_are_not_installed_are_absent_rows() -> None:
    seconds = {"ours": [0.5], "memory": [0.025]}
    llama, other, share = make_rows(DECODING, seconds, weight_bytes=10**9)
    assert (llama.rival, llama.ratio, llama.ok) == ("llama.cpp", None, False)
    assert (other.rival, other.ratio, other.ok) == ("transformers", None, False)
    assert "pip install llama-cpp-python" in str(llama.note)
    assert share.ratio == 0.8


@pytest.mark.parametrize("scheme", [Scheme.BFLOAT16, Scheme.INT8, Scheme.INT4])
def test_every_width_is_decoded_with_one_thread_and_two_and_read(scheme: Scheme) -> None:
    assert {threads for width, threads in DECODE if width is scheme} == {1, 2}
    assert scheme in PREFILL
