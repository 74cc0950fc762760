"""Keys and values kept between turns: the same numbers as reading all again, and never in the way.

The rules are those of ``kv_reuse`` in ``tests/vectors/runtime.json``.
"""

import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from expertctl.engine.kv.kv_cache import KVAllocation, KVRequest
from expertctl.engine.memory.adapter_cache import AdapterCache, CacheRequest, Tier
from expertctl.engine.memory.budget import MemoryBudget
from expertctl.engine.torch.decoder import Decoder
from expertctl.engine.torch.sequence_cache import (
    KVCache,
    KVCacheFactory,
    SequenceKVCache,
)
from expertctl.errors import BudgetError
from expertctl.reference import Digest
from tests.engine.conftest import (
    FLOAT32_CACHE,
    MakeReferenceModel,
    ReferenceModel,
    assert_same_logits,
    stack_logits,
)
from tests.engine.kv.test_kv_pool import common, marks
from tests.engine.torch.test_kv_cache import config

PLAN, OTHER_PLAN = Digest.compute(b"plan"), Digest.compute(b"other plan")
ROW = 2 * 3 * 2 * 8 * 4
"""Bytes of one token: keys and values, layers, key heads, width, float32."""


class SequenceCacheHarness:
    """Slots with a budget of so many tokens, and the decoder that reads with their caches."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        tokens: int = 1000,
        most: int = 64,
        kept_tokens: int | None = None,
    ) -> None:
        self.decoder = decoder
        self.budget = MemoryBudget(tokens * ROW)
        self.tiers = AdapterCache(ram=self.budget, device=self.budget)
        limit = None if kept_tokens is None else kept_tokens * ROW
        self.slots = SequenceKVCache(
            self.tiers, FLOAT32_CACHE, max_sequences=most, cached_limit=limit
        )

    def wanted(self, ids: Sequence[int], *, room: int = 4, **options: Any) -> KVRequest:
        values = {"cache_key": "chat", "identity": PLAN, "virtual_tokens": 0, **options}
        config = self.decoder.config
        return KVRequest(config=config, ids=ids, capacity=len(ids) + room, **values)

    def turn(
        self, ids: Sequence[int], answer: Sequence[int] = (), *, chunk: int = 512, **options: Any
    ) -> tuple[int, torch.Tensor]:
        """Read a prompt and write an answer; return what was reused, and all scores."""
        with self.slots.allocate(self.wanted(ids, **options)) as loan:
            read = self.decoder.prefill(ids[loan.reused :], loan.cache, chunk=chunk)
            rows = [read.logits, *(self.decoder.decode(t, loan.cache).logits for t in answer)]
            loan.complete((*ids, *answer))
        self.check()
        return loan.reused, stack_logits(rows)

    def turn_with_others(self, ids: Sequence[int]) -> None:
        """Read a prompt while another text runs."""
        with self.slots.allocate(self.wanted(ids)) as loan:
            self.decoder.prefill(ids[loan.reused :], loan.cache)
            loan.complete(ids)
        self.slots.check_integrity()

    def check(self) -> None:
        self.tiers.check_integrity()
        self.slots.check_integrity()
        self.slots.check_idle()
        assert self.budget.reserved_bytes("kv") == self.slots.nbytes == self.slots.cached_bytes


@pytest.fixture
def cache_harness(shared_oracle: ReferenceModel) -> SequenceCacheHarness:
    return SequenceCacheHarness(shared_oracle.load_decoder())


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
    arch: str, config: dict[str, Any], chunk: int, oracle: MakeReferenceModel
) -> None:
    model = oracle(arch, **config)
    cache_harness = SequenceCacheHarness(model.load_decoder())
    cache_harness.turn(FIRST, ANSWER, chunk=chunk)
    second = [*FIRST, *ANSWER, 7, 8, 9, 10, 11]
    reused, rows = cache_harness.turn(second, [12, 13], chunk=chunk)
    assert reused == len(FIRST) + len(ANSWER)
    fresh = SequenceCacheHarness(cache_harness.decoder).turn(second, [12, 13])[1]
    assert_same_logits(rows, fresh)
    assert_same_logits(rows, model.compute_logits([*second, 12, 13])[len(second) - 1 :])


def test_token_by_token_the_numbers_are_equal_to_the_bit(
    cache_harness: SequenceCacheHarness,
) -> None:
    cache_harness.turn(FIRST, chunk=1)
    _, rows = cache_harness.turn([*FIRST, 5, 6], chunk=1)
    _, fresh = SequenceCacheHarness(cache_harness.decoder).turn([*FIRST, 5, 6], chunk=1)
    assert torch.equal(rows, fresh)


def test_the_longest_common_beginning_is_reused(cache_harness: SequenceCacheHarness) -> None:
    cache_harness.turn(FIRST, ANSWER)
    changed = [*FIRST[:5], 50, 51, 52]
    reused, rows = cache_harness.turn(changed)
    assert reused == 5
    assert_same_logits(rows, SequenceCacheHarness(cache_harness.decoder).turn(changed)[1])
    assert cache_harness.turn([60, *FIRST])[0] == 0


def test_at_least_one_token_is_always_read(cache_harness: SequenceCacheHarness) -> None:
    cache_harness.turn(FIRST, ANSWER)
    assert cache_harness.turn(FIRST)[0] == len(FIRST) - 1
    assert cache_harness.turn(FIRST[:1])[0] == 0


@pytest.mark.parametrize("virtual", [0, 2])
def test_rows_that_were_never_written_are_not_reused(
    cache_harness: SequenceCacheHarness, virtual: int
) -> None:
    """The last token of an answer that reached its limit was drawn, not read."""
    with cache_harness.slots.allocate(cache_harness.wanted(FIRST, virtual_tokens=virtual)) as loan:
        cache_harness.decoder.prefill([*[50] * virtual, *FIRST], loan.cache)
        loan.complete((*FIRST, 33))
    cache_harness.check()
    with cache_harness.slots.allocate(
        cache_harness.wanted([*FIRST, 33, 34], virtual_tokens=virtual)
    ) as loan:
        assert loan.reused == len(FIRST)


def test_virtual_tokens_stand_before_the_first_and_are_reused_with_it(
    cache_harness: SequenceCacheHarness,
) -> None:
    soft, prompt = [50, 51, 52], [1, 2, 3, 4]
    with cache_harness.slots.allocate(
        cache_harness.wanted(prompt, virtual_tokens=3, room=7)
    ) as loan:
        cache_harness.decoder.prefill([*soft, *prompt], loan.cache)
        loan.complete((*prompt,))
    longer = [*prompt, 5, 6]
    with cache_harness.slots.allocate(
        cache_harness.wanted(longer, virtual_tokens=3, room=7)
    ) as loan:
        assert (loan.reused, loan.cache.length) == (4, 7)
        rows = cache_harness.decoder.prefill(longer[loan.reused :], loan.cache).logits
    fresh = KVCache(cache_harness.decoder.config, 9)
    assert_same_logits(rows, cache_harness.decoder.prefill([*soft, *longer], fresh).logits)


def test_another_plan_under_the_same_key_is_a_miss_that_takes_nothing_away(
    cache_harness: SequenceCacheHarness,
) -> None:
    cache_harness.turn(FIRST)
    assert cache_harness.turn(FIRST, identity=OTHER_PLAN)[0] == 0
    assert cache_harness.turn(FIRST)[0] == len(FIRST) - 1
    assert cache_harness.turn(FIRST, identity=OTHER_PLAN)[0] == len(FIRST) - 1
    assert cache_harness.budget.used == 2 * (len(FIRST) + 4) * ROW


def test_two_keys_never_see_each_others_rows(cache_harness: SequenceCacheHarness) -> None:
    cache_harness.turn(FIRST, cache_key="a")
    assert cache_harness.turn(FIRST, cache_key="b")[0] == 0
    assert cache_harness.turn(FIRST, cache_key=None)[0] == 0
    assert cache_harness.turn(FIRST, cache_key="")[0] == 0
    assert cache_harness.turn(FIRST, cache_key="b")[0] > 0
    assert cache_harness.turn(FIRST, cache_key="a")[0] > 0


def test_two_who_take_turns_each_find_what_they_said(cache_harness: SequenceCacheHarness) -> None:
    said: dict[str, list[int]] = {"a": [], "b": []}
    for turn in range(3):
        for key, token in (("a", 20), ("b", 30)):
            before, ids = len(said[key]), [*said[key], *range(token, token + 6)]
            reused, rows = cache_harness.turn(ids, [token + turn], cache_key=key)
            assert reused == before
            assert_same_logits(
                rows, SequenceCacheHarness(cache_harness.decoder).turn(ids, [token + turn])[1]
            )
            said[key] = [*ids, token + turn]
    assert cache_harness.budget.used == sum(len(ids) + 3 for ids in said.values()) * ROW


def test_of_many_texts_of_one_key_the_one_that_agrees_furthest_is_found(
    cache_harness: SequenceCacheHarness,
) -> None:
    texts = [[*FIRST[:3], token, token, token, token, token, token] for token in (20, 30, 40)]
    for ids in texts:
        cache_harness.turn(ids)
    for ids in texts:
        longer = [*ids, 7, 8]
        reused, rows = cache_harness.turn(longer)
        assert reused == len(ids)
        assert_same_logits(rows, SequenceCacheHarness(cache_harness.decoder).turn(longer)[1])


def test_a_text_that_only_begins_alike_leaves_the_other_where_it_is(
    cache_harness: SequenceCacheHarness,
) -> None:
    cache_harness.turn(FIRST, ANSWER)
    other = [*FIRST[:4], 50, 51, 52]
    reused, rows = cache_harness.turn(other, room=len(FIRST))
    assert reused == 4
    assert_same_logits(rows, SequenceCacheHarness(cache_harness.decoder).turn(other)[1])
    assert cache_harness.turn([*FIRST, *ANSWER, 9])[0] == len(FIRST) + len(ANSWER)
    assert cache_harness.turn([*other, 9])[0] == len(other)


def test_a_text_that_goes_on_takes_the_place_of_the_one_before(
    cache_harness: SequenceCacheHarness,
) -> None:
    cache_harness.turn(FIRST, ANSWER)
    said_again = [*FIRST, 9, 10]
    assert cache_harness.turn(said_again)[0] == len(FIRST)
    assert cache_harness.budget.used == (len(said_again) + 4) * ROW
    assert cache_harness.turn([*FIRST, *ANSWER])[0] == len(FIRST)


def test_a_text_that_says_all_of_another_takes_its_place(
    cache_harness: SequenceCacheHarness,
) -> None:
    with cache_harness.slots.allocate(cache_harness.wanted([*FIRST, 5])) as longer:
        cache_harness.turn_with_others(FIRST)
        cache_harness.decoder.prefill([*FIRST, 5], longer.cache)
        longer.complete([*FIRST, 5])
    cache_harness.check()
    assert cache_harness.budget.used == (len(FIRST) + 5) * ROW


def test_of_too_many_texts_the_longest_unused_goes(shared_oracle: ReferenceModel) -> None:
    cache_harness = SequenceCacheHarness(shared_oracle.load_decoder(), most=2)
    for key in "abac":
        cache_harness.turn(FIRST, cache_key=key)
    assert cache_harness.budget.used == 2 * (len(FIRST) + 4) * ROW
    assert [cache_harness.turn(FIRST, cache_key=key)[0] > 0 for key in "acb"] == [True, True, False]


def test_others_who_need_memory_have_it_from_the_longest_unused(
    cache_harness: SequenceCacheHarness,
) -> None:
    for key in "abcb":
        cache_harness.turn(FIRST, cache_key=key)
    size = (len(FIRST) + 4) * ROW
    room = cache_harness.budget.limit - 2 * size
    with cache_harness.tiers.reserve_during(Tier.DEVICE, "base", room + 1, what="a base"):
        assert cache_harness.budget.reserved_bytes("kv") == cache_harness.slots.cached_bytes == size
    assert [cache_harness.turn(FIRST, cache_key=key)[0] > 0 for key in "bc"] == [True, False]


@pytest.mark.parametrize("kept", [True, False])
def test_a_generation_that_does_not_complete_leaves_nothing(
    cache_harness: SequenceCacheHarness, kept: bool
) -> None:
    if kept:
        cache_harness.turn(FIRST)
    borrowed = cache_harness.slots.allocate(cache_harness.wanted([*FIRST, 5]))
    loan = borrowed.__enter__()
    cache_harness.decoder.prefill([5], loan.cache)
    failure = ZeroDivisionError()
    assert not borrowed.__exit__(type(failure), failure, None)
    assert cache_harness.budget.used == 0
    assert cache_harness.turn([*FIRST, 5])[0] == 0


def test_while_in_use_an_entry_is_nobody_elses(cache_harness: SequenceCacheHarness) -> None:
    cache_harness.turn(FIRST)
    with cache_harness.slots.allocate(cache_harness.wanted(FIRST)) as mine:
        with cache_harness.slots.allocate(cache_harness.wanted(FIRST)) as other:
            assert (mine.reused, other.reused) == (len(FIRST) - 1, 0)
            assert other.cache is not mine.cache
        assert cache_harness.budget.used == (len(FIRST) + 4) * ROW


def test_a_longer_text_moves_into_a_larger_cache_and_scores_the_same(
    cache_harness: SequenceCacheHarness,
) -> None:
    cache_harness.turn(FIRST, room=0)
    longer = [*FIRST, 20, 21, 22]
    reused, rows = cache_harness.turn(longer, [23], room=9)
    assert reused == len(FIRST)
    assert cache_harness.budget.used == (len(longer) + 9) * ROW
    assert_same_logits(rows, SequenceCacheHarness(cache_harness.decoder).turn(longer, [23])[1])


def test_a_shorter_text_holds_no_more_than_it_asks_for(cache_harness: SequenceCacheHarness) -> None:
    cache_harness.turn(FIRST, ANSWER, room=50)
    shorter = [*FIRST, 9]
    reused, rows = cache_harness.turn(shorter, room=2)
    assert reused == len(FIRST)
    assert cache_harness.budget.used == (len(shorter) + 2) * ROW
    assert_same_logits(rows, SequenceCacheHarness(cache_harness.decoder).turn(shorter)[1])


def test_where_both_caches_do_not_fit_the_text_is_read_again(shared_oracle: ReferenceModel) -> None:
    cache_harness = SequenceCacheHarness(shared_oracle.load_decoder(), tokens=30)
    cache_harness.turn(FIRST, room=0)
    longer = [*FIRST, 20, 21]
    reused, rows = cache_harness.turn(longer, room=6)
    assert reused == 0
    assert_same_logits(rows, SequenceCacheHarness(cache_harness.decoder).turn(longer)[1])


def test_no_expert_is_evicted_for_a_moment_with_two_caches(shared_oracle: ReferenceModel) -> None:
    cache_harness = SequenceCacheHarness(shared_oracle.load_decoder(), tokens=50)
    cache_harness.turn(FIRST, room=0)
    key = (Tier.RAM, Digest.compute(b"an expert"))
    expert = CacheRequest(key=key, nbytes=20 * ROW, description="an expert", load=object)
    with cache_harness.tiers.pin([expert]):
        pass
    assert cache_harness.turn([*FIRST, 20, 21], room=6)[0] == 0
    assert cache_harness.tiers.contains(key)


def test_no_expert_is_evicted_for_a_copy_where_kept_texts_can_go(
    shared_oracle: ReferenceModel,
) -> None:
    cache_harness = SequenceCacheHarness(shared_oracle.load_decoder(), tokens=60)
    key = (Tier.RAM, Digest.compute(b"an expert"))
    expert = CacheRequest(key=key, nbytes=29 * ROW, description="an expert", load=object)
    with cache_harness.tiers.pin([expert]):
        pass
    cache_harness.turn(FIRST, room=0, cache_key="another chat")
    cache_harness.turn(FIRST, room=0)
    assert cache_harness.turn([*FIRST, 20], room=0)[0] == len(FIRST)
    assert cache_harness.tiers.contains(key)
    assert cache_harness.turn(FIRST, room=0, cache_key="another chat")[0] == 0


def test_what_is_kept_is_given_up_before_anything_is_refused(
    cache_harness: SequenceCacheHarness,
) -> None:
    cache_harness.turn(FIRST)
    everything = cache_harness.budget.limit
    with cache_harness.tiers.reserve_during(Tier.DEVICE, "base", everything, what="a base"):
        assert cache_harness.budget.reserved_bytes("kv") == 0
    assert cache_harness.turn(FIRST)[0] == 0
    with pytest.raises(BudgetError, match="KV cache of 2000"):
        cache_harness.turn(FIRST, room=1988)
    assert cache_harness.budget.used == 0


def test_what_is_forgotten_is_gone(cache_harness: SequenceCacheHarness) -> None:
    cache_harness.turn(FIRST)
    cache_harness.turn(FIRST, identity=OTHER_PLAN)
    cache_harness.turn(FIRST, cache_key="another chat")
    cache_harness.slots.forget("a third chat")
    assert cache_harness.budget.used == 3 * (len(FIRST) + 4) * ROW
    cache_harness.slots.forget("chat")
    assert cache_harness.budget.used == (len(FIRST) + 4) * ROW
    assert cache_harness.turn(FIRST)[0] == 0
    assert cache_harness.turn(FIRST, cache_key="another chat")[0] > 0


def test_a_text_that_runs_while_its_key_is_forgotten_leaves_nothing(
    cache_harness: SequenceCacheHarness,
) -> None:
    with cache_harness.slots.allocate(cache_harness.wanted(FIRST)) as loan:
        cache_harness.decoder.prefill(FIRST, loan.cache)
        cache_harness.slots.forget("chat")
        loan.complete(FIRST)
    cache_harness.check()
    assert cache_harness.budget.used == 0


@pytest.mark.parametrize(("key", "stays"), [("chat", 0), ("another chat", len(FIRST) + 4)])
def test_where_there_is_no_memory_after_all_nothing_stays_entered(
    key: str, stays: int, shared_oracle: ReferenceModel
) -> None:
    cache_harness = SequenceCacheHarness(shared_oracle.load_decoder())

    def make(wanted: KVRequest) -> KVCache:
        if wanted.capacity > len(FIRST) + 4:
            raise MemoryError
        return FLOAT32_CACHE.make(wanted)

    cache_harness.slots = SequenceKVCache(
        cache_harness.tiers, KVCacheFactory(make, FLOAT32_CACHE.nbytes)
    )
    cache_harness.turn(FIRST)
    wanted = cache_harness.wanted([*FIRST, 5], cache_key=key)
    with pytest.raises(MemoryError), cache_harness.slots.allocate(wanted):
        pass
    cache_harness.check()
    assert cache_harness.budget.used == stays * ROW


def test_memory_may_be_needed_by_another_thread_at_any_time(
    cache_harness: SequenceCacheHarness,
) -> None:
    ended = threading.Event()

    def need_memory() -> None:
        tokens = 0
        while not ended.is_set():
            tokens = tokens % 950 + 50
            with cache_harness.tiers.reserve_during(
                Tier.DEVICE, "buffers", tokens * ROW, what="buffers"
            ):
                cache_harness.tiers.check_integrity()

    other = threading.Thread(target=need_memory)
    other.start()
    try:
        for number in range(60):
            ids = [*FIRST[: number % 5 + 1], number % 4]
            with (
                suppress(BudgetError),
                cache_harness.slots.allocate(cache_harness.wanted(ids)) as loan,
            ):
                cache_harness.decoder.prefill(ids[loan.reused :], loan.cache)
                loan.complete(ids)
    finally:
        ended.set()
        other.join()
    cache_harness.check()
    cache_harness.slots.clear()
    assert cache_harness.budget.used == 0


Origin = tuple[str | None, Digest]


@dataclass
class Kept:
    """What the model knows of a text: whose it is, its tokens, the room it takes."""

    origin: Origin
    ids: tuple[int, ...]
    capacity: int


class KeptCacheModel:
    """The rules in words, in tokens of room."""

    def __init__(self, limit: int, most: int) -> None:
        self.limit, self.most = limit, most
        self.kept: list[Kept] = []  # the longest unused first
        self.lent = self.others = 0

    @property
    def used(self) -> int:
        return self.lent + self.others + sum(text.capacity for text in self.kept)

    def reserve(self, tokens: int, *, besides: int = 0) -> bool:
        """Make room: what is in use stays, of the rest the longest unused goes."""
        if self.lent + self.others + besides + tokens > self.limit:
            return False
        while self.used + besides + tokens > self.limit:
            del self.kept[0]
        return True

    def borrow(self, origin: Origin, ids: tuple[int, ...], capacity: int) -> int | None:
        """Return how many tokens need not be read, or that there is no room."""
        found: tuple[int, Kept] | None = None
        for text in self.kept if origin[0] is not None else []:
            agrees = min(common(text.ids, ids), len(ids) - 1)
            if text.origin == origin and agrees and agrees >= (found[0] if found else 0):
                found = agrees, text
        reused = self.reuse(*found, capacity) if found else 0
        if not reused and not self.reserve(capacity):
            return None
        self.lent += capacity
        return reused

    def reuse(self, agrees: int, text: Kept, capacity: int) -> int:
        """Use a text's own room where it is right, else copy while there is room for both."""
        self.kept = [other for other in self.kept if other is not text]
        is_turn = agrees * 2 >= len(text.ids)
        if is_turn and text.capacity == capacity:
            return agrees
        is_copied = self.reserve(capacity, besides=text.capacity)
        if not is_turn:
            self.kept.append(text)
        return agrees if is_copied else 0

    def complete(self, text: Kept) -> None:
        old = [o for o in self.kept if o.origin != text.origin or not begins(o.ids, text.ids)]
        self.kept = [*old, text][-self.most :]


def begins(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return common(one, other) == len(one)


@dataclass(eq=False)
class KeptSequence:
    """A text that runs, and what it will have read in the end."""

    stack: ExitStack
    loan: KVAllocation[KVCache]
    text: Kept
    is_forgotten: bool = False


class Chats(RuleBasedStateMachine):
    """Chats of two owners and two plans, several at a time, beside others who need memory.

    A row is marked with a number made from the owner, the plan and all tokens up to it.
    """

    tokens = 60

    def __init__(self) -> None:
        super().__init__()
        self.config = config()
        self.row = self.config.count_kv_bytes(1, itemsize=4)
        self.budget = MemoryBudget(self.tokens * self.row)
        self.tiers = AdapterCache(ram=self.budget, device=self.budget)
        self.slots = SequenceKVCache(self.tiers, FLOAT32_CACHE, max_sequences=4)
        self.model = KeptCacheModel(self.tokens, most=4)
        self.open: list[KeptSequence] = []
        self.others: list[int] = []

    @rule(
        ids=st.lists(st.integers(1, 2), min_size=1, max_size=12).map(tuple),
        answer=st.lists(st.integers(1, 2), max_size=4).map(tuple),
        key=st.sampled_from(["a", "b", None]),
        plan=st.sampled_from([PLAN, OTHER_PLAN]),
        spare=st.sampled_from([0, 1, 20]),
    )
    def borrow(
        self,
        ids: tuple[int, ...],
        answer: tuple[int, ...],
        key: str | None,
        plan: Digest,
        spare: int,
    ) -> None:
        text = Kept((key, plan), (*ids, *answer), len(ids) + len(answer) + spare)
        wanted = KVRequest(
            cache_key=key,
            identity=plan,
            config=self.config,
            ids=ids,
            virtual_tokens=0,
            capacity=text.capacity,
        )
        expected, stack = self.model.borrow(text.origin, ids, text.capacity), ExitStack()
        try:
            loan = stack.enter_context(self.slots.allocate(wanted))
        except BudgetError:
            assert expected is None
            return
        assert (loan.reused, loan.cache.capacity) == (expected, text.capacity)
        assert self.rows(loan) == marks(key, plan, ids[: loan.reused])
        self.write(loan, marks(key, plan, text.ids)[loan.reused :])
        self.open.append(KeptSequence(stack, loan, text))

    @rule(place=st.integers(0, 3))
    def complete(self, place: int) -> None:
        for running in self.open[place : place + 1]:
            running.loan.complete(running.text.ids)
            self.end(running)
            if running.text.origin[0] is not None and not running.is_forgotten:
                self.model.complete(running.text)

    @rule(place=st.integers(0, 3))
    def abandon(self, place: int) -> None:
        for running in self.open[place : place + 1]:
            self.end(running)

    @rule(key=st.sampled_from(["a", "b"]))
    def forget(self, key: str) -> None:
        self.slots.forget(key)
        self.model.kept = [text for text in self.model.kept if text.origin[0] != key]
        for running in self.open:
            running.is_forgotten |= running.text.origin[0] == key

    @rule(tokens=st.integers(1, 60))
    def others_reserve(self, tokens: int) -> None:
        fits = self.model.reserve(tokens)
        try:
            self.tiers.reserve(Tier.DEVICE, "buffers", tokens * self.row, what="buffers")
        except BudgetError:
            assert not fits
            return
        assert fits
        self.model.others += tokens
        self.others.append(tokens)

    @rule()
    def others_release(self) -> None:
        for tokens in self.others:
            self.tiers.release(Tier.DEVICE, "buffers", tokens * self.row)
            self.model.others -= tokens
        self.others.clear()

    @rule()
    def all_that_is_kept_goes(self) -> None:
        self.slots.clear()
        self.model.kept.clear()

    @invariant()
    def the_ledger_is_right(self) -> None:
        self.tiers.check_integrity()
        self.slots.check_integrity()
        assert self.budget.used == self.model.used * self.row <= self.budget.limit
        assert self.budget.reserved_bytes("kv") == self.slots.nbytes
        assert self.slots.cached_bytes == sum(t.capacity for t in self.model.kept) * self.row

    def teardown(self) -> None:
        while self.open:
            self.abandon(0)
        self.others_release()
        self.all_that_is_kept_goes()
        self.slots.check_idle()
        assert self.budget.used == 0

    def end(self, running: KeptSequence) -> None:
        """What it has is still its own; then its room is given back."""
        assert self.rows(running.loan) == marks(*running.text.origin, running.text.ids)
        self.open.remove(running)
        running.stack.close()
        self.model.lent -= running.text.capacity

    @staticmethod
    def write(loan: KVAllocation[KVCache], numbers: Sequence[int]) -> None:
        for number in numbers:
            row = torch.full((2, 1, 4), float(number))
            for layer in (0, 1):
                loan.cache.write(layer, row, row)
            loan.cache.advance(1)

    @staticmethod
    def rows(loan: KVAllocation[KVCache]) -> list[float]:
        """What stands in the filled rows of the last layer."""
        empty = torch.empty(2, 0, 4)
        keys, values = loan.cache.write(1, empty, empty)
        assert torch.equal(keys, values)
        return [float(x) for x in keys[1, :, 3]]


class ChatsInMuchMemory(Chats):
    tokens = 400


TestChats = Chats.TestCase
TestChatsInMuchMemory = ChatsInMuchMemory.TestCase
TestChats.settings = TestChatsInMuchMemory.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None
)


def test_texts_one_after_the_other_leave_no_more_rows_than_may_be_kept(
    shared_oracle: ReferenceModel,
) -> None:
    cache_harness = SequenceCacheHarness(shared_oracle.load_decoder(), kept_tokens=30)
    for first in range(5):
        cache_harness.turn((first, 1, 2, 3, 4, 5, 6, 7))  # 12 rows each
        assert cache_harness.slots.cached_bytes <= 30 * ROW
    assert cache_harness.slots.cached_bytes == 24 * ROW
    assert cache_harness.turn((3, 1, 2, 3, 4, 5, 6, 7))[0] == 7
    assert cache_harness.turn((0, 1, 2, 3, 4, 5, 6, 7))[0] == 0


def test_a_text_that_is_longer_than_what_may_be_kept_is_answered_and_not_kept(
    shared_oracle: ReferenceModel,
) -> None:
    cache_harness = SequenceCacheHarness(shared_oracle.load_decoder(), kept_tokens=5)
    cache_harness.turn((1, 2, 3, 4, 5, 6))
    assert cache_harness.slots.cached_bytes == cache_harness.budget.used == 0
