"""Thread counts are chosen by the size of the model and given back afterwards."""

import torch

from expertctl.engine.devices import (
    SMALL_MODEL,
    choose_thread_count,
    use_torch_threads,
)
from expertctl.engine.memory.host import count_usable_cores


def test_a_small_model_gets_one_thread() -> None:
    assert choose_thread_count(SMALL_MODEL - 1) == 1


def test_a_large_model_gets_no_more_threads_than_there_are_cores() -> None:
    with use_torch_threads(512):
        assert choose_thread_count(SMALL_MODEL) == count_usable_cores()
    with use_torch_threads(1):
        assert choose_thread_count(1 << 40) == 1


def test_the_thread_count_is_given_back_also_after_a_failure() -> None:
    before = torch.get_num_threads()
    try:
        with use_torch_threads(before + 1):
            assert torch.get_num_threads() == before + 1
            raise KeyError
    except KeyError:
        assert torch.get_num_threads() == before
