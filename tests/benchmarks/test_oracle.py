"""What is measured is checked first, and wrong weights or scores are noticed."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from benchmarks.expert_engines import check_experts
from benchmarks.oracle import SEED, TorchReference, check_decoder, check_tokens, make_small_config
from expertctl.engine.cpu.base_loader import create_random_base
from expertctl.engine.kernels.packed_format import PACKED_SCHEMES, Scheme
from expertctl.engine.kernels.thread_pool import ThreadPool


@pytest.fixture(scope="module")
def crew() -> Iterator[ThreadPool]:
    crew = ThreadPool(2)
    yield crew
    crew.close()


@pytest.mark.parametrize("scheme", PACKED_SCHEMES, ids=lambda scheme: scheme.value)
def test_the_tokens_that_are_measured_are_those_of_the_formulas(
    scheme: Scheme, crew: ThreadPool
) -> None:
    check_decoder(scheme, crew)


def test_another_layer_than_the_one_that_the_oracle_has_is_noticed(crew: ThreadPool) -> None:
    base = create_random_base(make_small_config(), Scheme.INT8, seed=SEED)
    other = create_random_base(make_small_config(), Scheme.INT8, seed=SEED + 1)
    mixed = replace(base, layers=(base.layers[0], other.layers[1]))
    with pytest.raises(AssertionError, match="scores are off by"):
        check_tokens(mixed, TorchReference(base), crew)


def test_scores_that_are_no_numbers_are_noticed(crew: ThreadPool) -> None:
    base = create_random_base(make_small_config(), Scheme.INT8, seed=SEED)
    base.layers[1].mlp.down.scales[0, 0, 3] = 0x7FC0  # NaN in bfloat16
    with pytest.raises(AssertionError, match="scores are no numbers"):
        check_tokens(base, TorchReference(base), crew)


def test_experts_that_are_measured_do_what_the_formulas_say(crew: ThreadPool) -> None:
    check_experts(crew)


def test_experts_that_change_nothing_are_noticed(crew: ThreadPool) -> None:
    with pytest.raises(AssertionError, match="experts change nothing"):
        check_experts(crew, spread=1e-6)
