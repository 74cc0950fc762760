"""The ledger: exact, never above its limit, and clear about what does not fit."""

import pytest

from expertctl.engine.memory.budget import PURPOSES, MemoryBudget
from expertctl.errors import BudgetError


def test_bytes_are_held_for_the_length_of_a_block() -> None:
    budget = MemoryBudget(100)
    with budget.reserve_during("base", 60, what="the base"):
        with budget.reserve_during("kv", 40, what="the KV cache"):
            assert (budget.used, budget.free, budget.reserved_bytes("kv")) == (100, 0, 40)
        assert budget.used == 60
    assert (budget.used, budget.peak) == (0, 100)
    budget.check_integrity()


def test_one_byte_too_many_is_refused_and_nothing_is_entered() -> None:
    budget = MemoryBudget(100)
    budget.reserve("base", 60, what="the base")
    with pytest.raises(BudgetError):
        budget.reserve("experts", 41, what="acme/sql@1.0.0")
    assert (budget.used, budget.peak) == (60, 60)
    budget.reserve("experts", 40, what="acme/sql@1.0.0")
    budget.check_integrity()


def test_bytes_are_given_back_when_the_block_fails() -> None:
    budget = MemoryBudget(10)

    def fail() -> None:
        with budget.reserve_during("kv", 10, what="the KV cache"):
            raise KeyError("inside")

    with pytest.raises(KeyError):
        fail()
    assert budget.used == 0


def test_a_refusal_says_what_is_needed_what_is_free_and_the_way_out() -> None:
    budget = MemoryBudget(512 << 20)
    budget.reserve("base", 300 << 20, what="the base")
    with pytest.raises(BudgetError) as caught:
        budget.reserve("kv", 224 << 20, what="the KV cache of 2060 tokens")
    assert caught.value.message == (
        "the KV cache of 2060 tokens: 234.9 MB needed, but only 222.3 MB of the budget of "
        "512 MiB (536.9 MB) are free (held: base 314.6 MB)"
    )
    assert "--max-tokens" in caught.value.hint


def test_a_refusal_by_a_few_bytes_shows_them() -> None:
    with pytest.raises(BudgetError, match="a base: 1,000,001 B needed, but only 1,000,000 B of"):
        MemoryBudget(1_000_000).reserve("base", 1_000_001, what="a base")


@pytest.mark.parametrize("purpose", PURPOSES)
def test_every_refusal_names_a_way_out(purpose: str) -> None:
    error = MemoryBudget(0).make_error(purpose, 1, what="it")  # type: ignore[arg-type]  # a Purpose
    assert "--memory-budget" in error.hint
    assert "held: nothing" in error.message


def test_room_for_the_answer_is_the_way_out_of_buffers() -> None:
    hint = MemoryBudget(0).make_error("buffers", 1, what="the buffers of 349 tokens").hint
    assert hint == "lower --max-tokens, shorten the prompt, or raise --memory-budget"


def test_wrong_book_keeping_is_noticed() -> None:
    budget = MemoryBudget(10)
    with pytest.raises(ValueError, match="cannot be reserved"):
        budget.reserve("kv", -1, what="nonsense")
    with pytest.raises(ValueError, match="not held"):
        budget.release("kv", 1)
