"""The tree of pages that are kept: who is found, who is kept once, and in which order they go."""

import numpy as np
import pytest

from expertctl.engine.kv.kv_cache import PrefixKey
from expertctl.engine.kv.radix_cache import PrefixMatch, RadixCache
from expertctl.reference import Digest

CHAT = PrefixKey("chat", Digest.compute(b"plan"))
OTHERS = [
    PrefixKey("another chat", CHAT.identity),
    PrefixKey("chat", Digest.compute(b"another plan")),
]
TEXT = tuple(range(40))


def pages(count: int) -> "list[np.ndarray[tuple[int], np.dtype[np.uint8]]]":
    return [np.zeros(100, np.uint8) for _ in range(count)]


@pytest.fixture
def tree() -> RadixCache:
    tree = RadixCache()
    tree.insert(CHAT, TEXT, pages(3))
    return tree


@pytest.mark.parametrize(
    ("text", "blocks", "part"),
    [
        (TEXT, 2, 8),
        ((*TEXT, 99), 2, 8),
        (TEXT[:39], 2, 7),
        (TEXT[:33], 2, 1),
        (TEXT[:32], 2, 0),
        (TEXT[:31], 1, 15),
        ((*TEXT[:20], 99), 1, 4),
        ((*TEXT[:3], 99), 0, 3),
        ((99, *TEXT), 0, 0),
        ((), 0, 0),
    ],
)
def test_what_agrees_is_found_block_by_block(
    tree: RadixCache, text: tuple[int, ...], blocks: int, part: int
) -> None:
    found = tree.find(CHAT, text)
    assert (len(found.blocks), found.partial_tokens) == (blocks, part)
    assert found.tokens == 16 * blocks + part
    assert (found.partial_block is None) == (part == 0)
    for origin in OTHERS:
        assert tree.find(origin, text) == PrefixMatch()


def test_of_several_ends_the_one_that_agrees_longest_is_found(tree: RadixCache) -> None:
    for end in ((32, 33, 7), (32, 33, 34, 8), (32, 9)):
        tree.insert(CHAT, (*TEXT[:32], *end), [*pages(2), *pages(1)])
    assert tree.find(CHAT, (*TEXT[:32], 32, 33, 34, 8, 1)).partial_tokens == 4
    assert tree.find(CHAT, (*TEXT[:32], 32, 9, 9)).partial_tokens == 2
    tree.check_integrity()


def test_a_page_that_says_nothing_new_is_not_kept(tree: RadixCache) -> None:
    tree.insert(CHAT, TEXT[:37], pages(3))
    tree.insert(CHAT, TEXT, pages(3))
    assert tree.nbytes == 300
    tree.insert(CHAT, (*TEXT, 40, 41), pages(3))
    assert tree.nbytes == 300, "the shorter end is part of the longer one"
    assert tree.find(CHAT, (*TEXT, 40, 41)).partial_tokens == 10
    tree.check_integrity()


def test_ends_go_before_beginnings_and_the_oldest_first(tree: RadixCache) -> None:
    tree.insert(OTHERS[0], TEXT[:17], pages(2))
    tree.retain(tree.find(CHAT, TEXT).blocks[:1])
    tree.release(tree.find(CHAT, TEXT).blocks[:1])
    left = []
    while tree.idle_bytes:
        assert tree.evict(1) == 100
        tree.check_integrity()
        left.append([tree.find(origin, TEXT).tokens for origin in (CHAT, OTHERS[0])])
    assert left == [[32, 17], [16, 17], [16, 16], [16, 0], [0, 0]]
    assert tree.evict(1) == tree.nbytes == 0
    assert tree.find(CHAT, TEXT) == PrefixMatch()


def test_what_is_rented_stays_with_all_before_it(tree: RadixCache) -> None:
    found = tree.find(CHAT, TEXT[:35])
    tree.retain(found.blocks)
    tree.retain(found.blocks[:1])
    assert tree.evict(10**6) == 100
    tree.release(found.blocks)
    assert tree.evict(10**6) == 100
    tree.check_integrity()
    tree.release(found.blocks[:1])
    assert tree.evict(10**6) == 100
    with pytest.raises(AssertionError):
        tree.release(found.blocks)


def test_what_is_forgotten_while_it_is_rented_goes_when_it_is_given_back(tree: RadixCache) -> None:
    blocks = tree.find(CHAT, TEXT).blocks[:1]
    tree.retain(blocks)
    tree.forget("chat")
    assert (tree.nbytes, tree.idle_bytes) == (100, 0)
    assert tree.find(CHAT, TEXT) == PrefixMatch()
    tree.insert(CHAT, TEXT[:16], pages(1))
    tree.check_integrity()
    tree.release(blocks)
    assert tree.nbytes == tree.idle_bytes == 100
    tree.check_integrity()


def test_forgetting_somebody_is_all_plans_of_theirs_and_nobody_elses(tree: RadixCache) -> None:
    for origin in OTHERS:
        tree.insert(origin, TEXT, pages(3))
    tree.forget("chat")
    assert [tree.find(origin, TEXT).tokens for origin in (CHAT, *OTHERS)] == [0, 40, 0]
    assert tree.nbytes == 300


def test_integrity_is_lost_with_what_is_counted_wrongly(tree: RadixCache) -> None:
    tree.check_integrity()
    block = tree.find(CHAT, TEXT).blocks[0]
    block.ref_count = 1
    with pytest.raises(AssertionError):
        tree.check_integrity()
    block.ref_count = 0
    block.children[TEXT[16:32]].page = block.page
    with pytest.raises(AssertionError):
        tree.check_integrity()
