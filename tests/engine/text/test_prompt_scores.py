"""Log-probabilities of a prompt, in both decoders, against log-softmax of transformers' logits."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from expertctl.engine.kernels.thread_pool import ThreadPool
from expertctl.engine.kv.block_pool import PagedKVCache
from expertctl.engine.text.prompt import PromptLogprobs
from expertctl.engine.torch.cuda_graph_decoder import CudaGraphDecoder
from expertctl.engine.torch.cuda_graph_step import StaticKVCache
from expertctl.engine.torch.sequence_cache import KVCache
from expertctl.engine.torch.weights import load_base_weights
from expertctl.errors import IncompatibleError
from expertctl.package.model_config import read_model_config
from tests.engine.conftest import KERNEL_SIZES, MakeReferenceModel, ReferenceModel, stack_logits
from tests.engine.cpu.test_decoder import IDS, packed
from tests.engine.random_experts import make_packed_plan, make_random_expert, make_torch_plan

TOP = 5
TOLERANCE = 1e-4


def assert_scores(found: PromptLogprobs, logits: Tensor, ids: list[int] = IDS) -> None:
    """Compare with log-softmax of ``logits`` [tokens, vocab], which score the token after each."""
    theirs = logits.double().log_softmax(-1)
    assert found.is_complete
    assert (found.logprob(0), found.top_logprobs(0)) == (None, [])
    for place in range(1, len(ids)):
        row = theirs[place - 1]
        assert found.logprob(place) == pytest.approx(float(row[ids[place]]), abs=TOLERANCE)
        expected = row.topk(TOP)
        ours = found.top_logprobs(place)
        assert [logprob for _, logprob in ours] == pytest.approx(
            expected.values.tolist(), abs=TOLERANCE
        )
        assert [float(row[token]) for token, _ in ours] == pytest.approx(
            expected.values.tolist(), abs=TOLERANCE
        )


def read(decoder: Any, cache: Any, *parts: list[int], **options: Any) -> PromptLogprobs:
    """Read a prompt in parts; whatever comes first may be a soft prompt."""
    soft = options.pop("soft_prompt", None)
    ids = [token for part in parts for token in part]
    scores = PromptLogprobs(ids, top=TOP, virtual=0 if soft is None else len(soft))
    for number, part in enumerate(parts):
        before = soft if number == 0 else None
        decoder.prefill(part, cache, soft_prompt=before, scores=scores.record, **options)
    return scores


@pytest.mark.parametrize("arch", ["llama", "qwen3", "qwen3_moe"])
def test_the_torch_decoder_scores_every_token_of_a_prompt(
    arch: str, oracle: MakeReferenceModel
) -> None:
    reference = oracle(arch)
    decoder = reference.load_decoder()
    found = read(decoder, KVCache(decoder.config, 40), IDS)
    assert_scores(found, reference.compute_logits(IDS))


@pytest.mark.parametrize("chunk", [1, 5, 16, 24])
def test_the_torch_decoder_scores_a_prompt_chunk_by_chunk(
    chunk: int, qwen3: ReferenceModel
) -> None:
    decoder = qwen3.load_decoder()
    found = read(decoder, KVCache(decoder.config, 40), IDS, chunk=chunk)
    assert_scores(found, qwen3.compute_logits(IDS))


def test_the_decoder_of_devices_scores_a_prompt_as_the_torch_decoder_does(
    qwen3: ReferenceModel,
) -> None:
    config = read_model_config(qwen3.directory)
    decoder = CudaGraphDecoder(config, load_base_weights(qwen3.directory, config), captures=False)
    arena = StaticKVCache(
        config, rows=1, capacity=40, dtype=torch.float32, device=torch.device("cpu")
    )
    assert_scores(read(decoder, arena.get_row(0), IDS), qwen3.compute_logits(IDS))


@pytest.mark.parametrize("arch", ["llama", "qwen3", "qwen3_moe"])
def test_kernels_score_every_token_of_a_prompt(
    arch: str, oracle: MakeReferenceModel, crew: ThreadPool
) -> None:
    sizes = {"moe_intermediate_size": 32} if arch == "qwen3_moe" else {}
    reference = oracle(arch, **KERNEL_SIZES, **sizes)
    decoder = packed(reference, crew)
    found = read(decoder, PagedKVCache(decoder.config, 40), IDS)
    assert_scores(found, reference.compute_logits(IDS))


@pytest.mark.parametrize("rows", [1, 3, 8, 32])
@pytest.mark.parametrize("chunk", [5, 16])
def test_kernels_score_as_many_rows_at_a_time_as_a_step_has(
    rows: int, chunk: int, qwen3: ReferenceModel, crew: ThreadPool
) -> None:
    decoder = packed(qwen3, crew, chunk=chunk)
    cache = PagedKVCache(decoder.config, 40)
    decoder.prepare(cache, tokens=len(IDS), rows=rows)
    assert_scores(read(decoder, cache, IDS), qwen3.compute_logits(IDS))


def test_scoring_changes_neither_the_next_token_nor_the_text_behind_it(
    qwen3: ReferenceModel, crew: ThreadPool
) -> None:
    decoder = packed(qwen3, crew)
    plain, scored = PagedKVCache(decoder.config, 40), PagedKVCache(decoder.config, 40)
    scores = PromptLogprobs(IDS, top=1)
    one = decoder.prefill(IDS, plain).logits
    other = decoder.prefill(IDS, scored, scores=scores.record).logits
    assert np.array_equal(one, other)
    assert np.array_equal(decoder.decode(3, plain).logits, decoder.decode(3, scored).logits)


def test_a_prompt_that_is_read_in_two_calls_is_scored_as_a_whole(
    qwen3: ReferenceModel, crew: ThreadPool
) -> None:
    decoder = packed(qwen3, crew)
    found = read(decoder, PagedKVCache(decoder.config, 40), IDS[:7], IDS[7:])
    assert_scores(found, qwen3.compute_logits(IDS))


@pytest.mark.parametrize("kinds", [("lora",), ("lora", "ia3", "dora")], ids=str)
def test_adapters_change_the_scores_of_a_prompt(
    kinds: tuple[str, ...], qwen3: ReferenceModel, crew: ThreadPool
) -> None:
    """The expected values are single steps of the torch decoder with the same adapters."""
    decoder = qwen3.load_decoder()
    experts = [make_random_expert(decoder.config, kind, seed=n) for n, kind in enumerate(kinds)]
    deltas = make_torch_plan(decoder.config, experts).torch_deltas
    cache = KVCache(decoder.config, 40)
    rows = [decoder.prefill(IDS[:1], cache, deltas).logits]
    rows += [decoder.decode(token, cache, deltas).logits for token in IDS[1:]]
    expected = stack_logits(rows)
    assert not torch.allclose(expected, qwen3.compute_logits(IDS), atol=0.01)
    found = read(decoder, KVCache(decoder.config, 40), IDS, deltas=deltas)
    assert_scores(found, expected)
    kernels = packed(qwen3, crew)
    plan = make_packed_plan(kernels.config, experts)
    assert_scores(read(kernels, PagedKVCache(kernels.config, 40), IDS, deltas=plan), expected)


@pytest.mark.parametrize("chunk", [4, 16])
def test_a_soft_prompt_stands_before_the_tokens_that_are_scored(
    chunk: int, qwen3: ReferenceModel, crew: ThreadPool
) -> None:
    soft = (torch.randn(7, 48, generator=torch.Generator().manual_seed(2)) * 0.3).numpy()
    decoder = qwen3.load_decoder()
    cache = KVCache(decoder.config, 40)
    rows = [decoder.prefill(IDS[:1], cache, soft_prompt=soft).logits]
    rows += [decoder.decode(token, cache).logits for token in IDS[1:]]
    expected = stack_logits(rows)
    found = read(decoder, KVCache(decoder.config, 40), IDS, soft_prompt=soft, chunk=chunk)
    assert_scores(found, expected)
    kernels = packed(qwen3, crew, chunk=chunk)
    assert_scores(read(kernels, PagedKVCache(kernels.config, 40), IDS, soft_prompt=soft), expected)


def test_a_decoder_gives_no_more_rows_of_logits_than_it_may_hold(
    qwen3: ReferenceModel, crew: ThreadPool
) -> None:
    shapes: list[tuple[int, ...]] = []
    decoder = qwen3.load_decoder()
    decoder.prefill(IDS, KVCache(decoder.config, 40), scores=lambda _, x: shapes.append(x.shape))
    assert shapes == [(8, 61), (8, 61), (8, 61)]
    shapes.clear()
    kernels = packed(qwen3, crew)
    cache = PagedKVCache(kernels.config, 40)
    kernels.prepare(cache, tokens=len(IDS), rows=16)
    kernels.prefill(IDS, cache, scores=lambda _, x: shapes.append(x.shape))
    assert shapes == [(16, 61), (8, 61)]


def test_of_equally_likely_tokens_the_lowest_come_first() -> None:
    scores = PromptLogprobs([0, 1], top=3)
    scores.record(0, np.array([[1.0, 3.0, 3.0, 2.0, 3.0]], np.float32))
    assert [token for token, _ in scores.top_logprobs(1)] == [1, 2, 4]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_scores_that_are_not_numbers_are_refused(bad: float) -> None:
    scores = PromptLogprobs([0, 1], top=1)
    row = np.full((1, 5), bad, np.float32)
    with pytest.raises(IncompatibleError, match="not finite"):
        scores.record(0, row)


def test_a_prompt_of_one_token_is_complete_without_a_score() -> None:
    assert PromptLogprobs([4], top=1).is_complete
    assert not PromptLogprobs([4, 4], top=1).is_complete
