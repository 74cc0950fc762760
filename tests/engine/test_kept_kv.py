"""Keys and values kept between turns: the same numbers as reading all again, and never in the way.

The rules are those of ``kv_reuse`` in ``tests/vectors/runtime.json``.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from expertctl.digest import Digest
from expertctl.engine.budget import Budget
from expertctl.engine.decoder import Decoder
from expertctl.engine.kept_kv import KVSlot
from expertctl.engine.kv_cache import KVCache
from expertctl.engine.kv_loan import KVLoan, KVWanted
from expertctl.engine.tiers import Tier, Tiers, Wanted
from expertctl.errors import BudgetError
from tests.engine.conftest import MakeOracle, Oracle, assert_same_logits
from tests.engine.test_kv_cache import config

PLAN, OTHER_PLAN = Digest.of(b"plan"), Digest.of(b"other plan")
ROW = 2 * 3 * 2 * 8 * 4
"""Bytes of one token: keys and values, layers, key heads, width, float32."""


class Desk:
    """A slot with a budget of so many tokens, and the decoder that reads with its caches."""

    def __init__(self, decoder: Decoder, *, tokens: int = 1000) -> None:
        self.decoder = decoder
        self.budget = Budget(tokens * ROW)
        self.tiers = Tiers(ram=self.budget, device=self.budget)
        self.slot = KVSlot(self.tiers)

    def wanted(self, ids: Sequence[int], *, room: int = 4, **options: Any) -> KVWanted:
        values = {"cache_key": "chat", "identity": PLAN, "virtual": 0, **options}
        config = self.decoder.config
        return KVWanted(config=config, ids=ids, capacity=len(ids) + room, **values)

    def turn(
        self, ids: Sequence[int], answer: Sequence[int] = (), *, chunk: int = 512, **options: Any
    ) -> tuple[int, torch.Tensor]:
        """Read a prompt and write an answer; return what was reused, and all scores."""
        with self.slot.borrow(self.wanted(ids, **options)) as loan:
            read = self.decoder.prefill(ids[loan.reused :], loan.cache, chunk=chunk)
            rows = [read.logits, *(self.decoder.decode(t, loan.cache).logits for t in answer)]
            loan.complete((*ids, *answer))
        self.check()
        return loan.reused, torch.stack(rows)

    def check(self) -> None:
        self.tiers.check_integrity()
        self.slot.check_integrity()


@pytest.fixture
def desk(shared_oracle: Oracle) -> Desk:
    return Desk(shared_oracle.decoder())


KINDS = [
    ("qwen3", {}),
    ("llama", {"num_key_value_heads": 4}),
    ("mistral", {"sliding_window": 4}),
    ("mistral", {"sliding_window": 1}),
    (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
]
FIRST, ANSWER = list(range(1, 13)), [40, 41, 42]


@pytest.mark.parametrize(("arch", "config"), KINDS)
@pytest.mark.parametrize("chunk", [1, 3, 512])
def test_a_turn_on_kept_rows_scores_as_one_that_reads_everything(
    arch: str, config: dict[str, Any], chunk: int, oracle: MakeOracle
) -> None:
    model = oracle(arch, **config)
    desk = Desk(model.decoder())
    desk.turn(FIRST, ANSWER, chunk=chunk)
    second = [*FIRST, *ANSWER, 7, 8, 9, 10, 11]
    reused, rows = desk.turn(second, [12, 13], chunk=chunk)
    assert reused == len(FIRST) + len(ANSWER)
    fresh = Desk(desk.decoder).turn(second, [12, 13])[1]
    assert_same_logits(rows, fresh)
    assert_same_logits(rows, model.logits([*second, 12, 13])[len(second) - 1 :])


def test_token_by_token_the_numbers_are_equal_to_the_bit(desk: Desk) -> None:
    desk.turn(FIRST, chunk=1)
    _, rows = desk.turn([*FIRST, 5, 6], chunk=1)
    _, fresh = Desk(desk.decoder).turn([*FIRST, 5, 6], chunk=1)
    assert torch.equal(rows, fresh)


def test_the_longest_common_beginning_is_reused(desk: Desk) -> None:
    desk.turn(FIRST, ANSWER)
    changed = [*FIRST[:5], 50, 51, 52]
    reused, rows = desk.turn(changed)
    assert reused == 5
    assert_same_logits(rows, Desk(desk.decoder).turn(changed)[1])
    assert desk.turn([60, *FIRST])[0] == 0


def test_at_least_one_token_is_always_read(desk: Desk) -> None:
    desk.turn(FIRST, ANSWER)
    assert desk.turn(FIRST)[0] == len(FIRST) - 1
    assert desk.turn(FIRST[:1])[0] == 0


def test_rows_that_were_never_written_are_not_reused(desk: Desk) -> None:
    """The last token of an answer that reached its limit was drawn, not read."""
    with desk.slot.borrow(desk.wanted(FIRST)) as loan:
        desk.decoder.prefill(FIRST, loan.cache)
        loan.complete((*FIRST, 33))
    assert desk.turn([*FIRST, 33, 34])[0] == len(FIRST)


def test_virtual_tokens_stand_before_the_first_and_are_reused_with_it(desk: Desk) -> None:
    soft, prompt = [50, 51, 52], [1, 2, 3, 4]
    with desk.slot.borrow(desk.wanted(prompt, virtual=3, room=7)) as loan:
        desk.decoder.prefill([*soft, *prompt], loan.cache)
        loan.complete((*prompt,))
    longer = [*prompt, 5, 6]
    with desk.slot.borrow(desk.wanted(longer, virtual=3, room=7)) as loan:
        assert (loan.reused, loan.cache.length) == (4, 7)
        rows = desk.decoder.prefill(longer[loan.reused :], loan.cache).logits
    fresh = KVCache(desk.decoder.config, 9)
    assert_same_logits(rows, desk.decoder.prefill([*soft, *longer], fresh).logits)


def test_another_plan_under_the_same_key_is_a_miss_that_ends_the_entry(desk: Desk) -> None:
    desk.turn(FIRST)
    assert desk.turn(FIRST, identity=OTHER_PLAN)[0] == 0
    assert desk.turn(FIRST)[0] == 0
    assert desk.budget.used == (len(FIRST) + 4) * ROW


def test_two_keys_never_see_each_others_rows(desk: Desk) -> None:
    desk.turn(FIRST, cache_key="a")
    assert desk.turn(FIRST, cache_key="b")[0] == 0
    assert desk.turn(FIRST, cache_key="b")[0] > 0
    assert desk.turn(FIRST, cache_key="a")[0] == 0
    assert desk.turn(FIRST, cache_key=None)[0] == 0
    assert desk.turn(FIRST, cache_key="a")[0] > 0


@pytest.mark.parametrize("kept", [True, False])
def test_a_generation_that_does_not_complete_leaves_nothing(desk: Desk, kept: bool) -> None:
    if kept:
        desk.turn(FIRST)
    borrowed = desk.slot.borrow(desk.wanted([*FIRST, 5]))
    loan = borrowed.__enter__()
    desk.decoder.prefill([5], loan.cache)
    failure = ZeroDivisionError()
    assert not borrowed.__exit__(type(failure), failure, None)
    assert desk.budget.used == 0
    assert desk.turn([*FIRST, 5])[0] == 0


def test_while_in_use_an_entry_is_nobody_elses(desk: Desk) -> None:
    desk.turn(FIRST)
    with desk.slot.borrow(desk.wanted(FIRST)) as mine:
        with desk.slot.borrow(desk.wanted(FIRST)) as other:
            assert (mine.reused, other.reused) == (len(FIRST) - 1, 0)
            assert other.cache is not mine.cache
        assert desk.budget.used == (len(FIRST) + 4) * ROW


def test_a_longer_text_moves_into_a_larger_cache_and_scores_the_same(desk: Desk) -> None:
    desk.turn(FIRST, room=0)
    longer = [*FIRST, 20, 21, 22]
    reused, rows = desk.turn(longer, [23], room=9)
    assert reused == len(FIRST)
    assert desk.budget.used == (len(longer) + 9) * ROW
    assert_same_logits(rows, Desk(desk.decoder).turn(longer, [23])[1])


def test_a_shorter_text_holds_no_more_than_it_asks_for(desk: Desk) -> None:
    desk.turn(FIRST, ANSWER, room=50)
    shorter = [*FIRST, 9]
    reused, rows = desk.turn(shorter, room=2)
    assert reused == len(FIRST)
    assert desk.budget.used == (len(shorter) + 2) * ROW
    assert_same_logits(rows, Desk(desk.decoder).turn(shorter)[1])


def test_where_both_caches_do_not_fit_the_text_is_read_again(shared_oracle: Oracle) -> None:
    desk = Desk(shared_oracle.decoder(), tokens=30)
    desk.turn(FIRST, room=0)
    longer = [*FIRST, 20, 21]
    reused, rows = desk.turn(longer, room=6)
    assert reused == 0
    assert_same_logits(rows, Desk(desk.decoder).turn(longer)[1])


def test_no_expert_is_evicted_for_a_moment_with_two_caches(shared_oracle: Oracle) -> None:
    desk = Desk(shared_oracle.decoder(), tokens=50)
    desk.turn(FIRST, room=0)
    key = (Tier.RAM, Digest.of(b"an expert"))
    expert = Wanted(key=key, nbytes=20 * ROW, what="an expert", load=object)
    with desk.tiers.pin([expert]):
        pass
    assert desk.turn([*FIRST, 20, 21], room=6)[0] == 0
    assert desk.tiers.holds(key)


def test_what_is_kept_is_given_up_before_anything_is_refused(desk: Desk) -> None:
    desk.turn(FIRST)
    everything = desk.budget.limit
    with desk.tiers.holding(Tier.DEVICE, "base", everything, what="a base"):
        assert desk.budget.held("kv") == 0
    assert desk.turn(FIRST)[0] == 0
    with pytest.raises(BudgetError, match="KV cache of 2000"):
        desk.turn(FIRST, room=1988)
    assert desk.budget.used == 0


def test_what_is_forgotten_is_gone(desk: Desk) -> None:
    desk.turn(FIRST)
    desk.slot.forget("another chat")
    assert desk.slot.holds("chat", PLAN)
    desk.slot.forget("chat")
    assert not desk.slot.holds("chat", PLAN)
    assert desk.budget.used == 0


class Chats(RuleBasedStateMachine):
    """Two chats, two plans and little memory: what is reused was always read before, by the same.

    Rows of a cache that nobody computed are marked with the token that stands there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.config = config()
        self.row = self.config.kv_bytes(1, itemsize=4)
        self.budget = Budget(40 * self.row)
        self.tiers = Tiers(ram=self.budget, device=self.budget)
        self.slot = KVSlot(self.tiers)

    @rule(
        ids=st.lists(st.integers(1, 2), min_size=1, max_size=12),
        answer=st.lists(st.integers(1, 2), max_size=4),
        key=st.sampled_from(["a", "b", None]),
        plan=st.sampled_from([PLAN, OTHER_PLAN]),
        completes=st.booleans(),
        spare=st.integers(0, 20),
    )
    def turn(
        self,
        ids: list[int],
        answer: list[int],
        key: str | None,
        plan: Digest,
        completes: bool,
        spare: int,
    ) -> None:
        capacity = len(ids) + len(answer) + spare
        wanted = KVWanted(
            cache_key=key, identity=plan, config=self.config, ids=ids, virtual=0, capacity=capacity
        )
        mark = {PLAN: 100, OTHER_PLAN: 200}[plan] + {"a": 10, "b": 20, None: 30}[key]
        with self.slot.borrow(wanted) as loan:
            assert 0 <= loan.reused < len(ids)
            assert loan.cache.capacity == capacity
            assert self.rows(loan) == [mark + token for token in ids[: loan.reused]]
            for token in (*ids[loan.reused :], *answer):
                row = torch.full((2, 1, 4), float(mark + token))
                for layer in (0, 1):
                    loan.cache.write(layer, row, row)
                loan.cache.advance(1)
            if completes:
                loan.complete((*ids, *answer))

    @rule(tokens=st.integers(1, 40))
    def need_memory(self, tokens: int) -> None:
        with self.tiers.holding(Tier.DEVICE, "buffers", tokens * self.row, what="buffers"):
            assert self.budget.used <= self.budget.limit

    @rule(key=st.sampled_from(["a", "b"]))
    def forget(self, key: str) -> None:
        self.slot.forget(key)
        assert not self.slot.holds(key, PLAN)

    @invariant()
    def the_ledger_is_right(self) -> None:
        self.tiers.check_integrity()
        self.slot.check_integrity()

    @staticmethod
    def rows(loan: KVLoan[KVCache]) -> list[float]:
        """What stands in the filled rows of the last layer."""
        empty = torch.empty(2, 0, 4)
        keys, values = loan.cache.write(1, empty, empty)
        assert torch.equal(keys, values)
        return [float(x) for x in keys[1, :, 3]]


TestChats = Chats.TestCase
TestChats.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
