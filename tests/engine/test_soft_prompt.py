"""Rows before the first token: positions from 0, counted in the cache, once per text."""

import numpy as np
import pytest
import torch
from torch import Tensor

from expertctl.engine.arrays import AnyArray
from expertctl.engine.torch.sequence_cache import KVCache
from expertctl.errors import BudgetError, IncompatibleError
from tests.engine.conftest import ReferenceModel, assert_same_logits, stack_logits

IDS = [3, 60, 0, 17, 17, 42, 8, 25, 31, 5, 59, 2]
VIRTUAL = 5


@pytest.fixture(scope="module")
def rows() -> AnyArray:
    return torch.randn(VIRTUAL, 32, generator=torch.Generator().manual_seed(1)).numpy() * 0.2


def expected(oracle: ReferenceModel, rows: AnyArray) -> Tensor:
    """Scores after each token, of transformers reading the embeddings in one pass."""
    with torch.inference_mode():
        tokens = oracle.model.get_input_embeddings()(torch.tensor(IDS))
        together = torch.cat((torch.from_numpy(rows), tokens))[None]
        logits: Tensor = oracle.model(inputs_embeds=together, use_cache=False).logits[0, VIRTUAL:]
    return logits


@pytest.mark.parametrize("chunk", [1, 2, 4, 5, 6, 7, 100])
def test_a_soft_prompt_equals_its_embeddings_however_it_is_cut(
    shared_oracle: ReferenceModel, rows: AnyArray, chunk: int
) -> None:
    decoder = shared_oracle.load_decoder()
    cache = KVCache(decoder.config, 40)
    seen: list[int] = []
    first = decoder.prefill(IDS[:7], cache, soft_prompt=rows, chunk=chunk, progress=seen.append)
    assert cache.length == first.tokens == sum(seen) == VIRTUAL + 7
    assert max(seen) <= chunk
    logits = [first.logits, *(decoder.decode(token, cache).logits for token in IDS[7:])]
    assert_same_logits(stack_logits(logits), expected(shared_oracle, rows)[6:])


def test_the_next_turn_reads_behind_it(shared_oracle: ReferenceModel, rows: AnyArray) -> None:
    decoder = shared_oracle.load_decoder()
    cache = KVCache(decoder.config, 40)
    decoder.prefill(IDS[:4], cache, soft_prompt=rows)
    last = decoder.prefill(IDS[4:], cache)
    assert_same_logits(last.logits[None], expected(shared_oracle, rows)[-1:])
    cache.rewind(VIRTUAL + 4)
    again = decoder.prefill(IDS[4:], cache)
    assert np.array_equal(again.logits, last.logits)


def test_a_second_one_is_a_bug_of_ours(shared_oracle: ReferenceModel, rows: AnyArray) -> None:
    decoder = shared_oracle.load_decoder()
    cache = KVCache(decoder.config, 40)
    decoder.prefill(IDS, cache)
    with pytest.raises(AssertionError, match="before the first token"):
        decoder.prefill(IDS, cache, soft_prompt=rows)


def test_its_rows_need_room_like_tokens(shared_oracle: ReferenceModel, rows: AnyArray) -> None:
    decoder = shared_oracle.load_decoder()
    cache = KVCache(decoder.config, len(IDS) + VIRTUAL - 1)
    with pytest.raises(BudgetError, match=f"{len(IDS) + VIRTUAL} more tokens do not fit"):
        decoder.prefill(IDS, cache, soft_prompt=rows)
    assert cache.length == 0


def test_one_of_another_width_is_refused(shared_oracle: ReferenceModel) -> None:
    decoder = shared_oracle.load_decoder()
    with pytest.raises(IncompatibleError, match="has width 33, the base 32"):
        decoder.prefill(IDS, KVCache(decoder.config, 40), soft_prompt=np.zeros((2, 33), np.float32))
