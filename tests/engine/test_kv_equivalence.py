"""What a text computes on pages of the pool is what it computes alone, and what transformers say.

The cases are ``kv_equivalence`` of ``tests/vectors/runtime.json`` and more: texts that take turns,
that go on from what others left, that are read in any stretches; bits are compared where the same
rows are computed.
"""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from expertctl.digest import Digest
from expertctl.engine.arrays import AnyArray
from expertctl.engine.cpu.decoder import PackedDecoder
from expertctl.engine.kernels.packed_format import Scheme
from expertctl.engine.kernels.thread_pool import ThreadPool
from expertctl.engine.kv.block_pool import BlockPool, InterleavedPages, PagedKVCache
from expertctl.engine.kv.kv_cache import KVRequest
from expertctl.engine.memory.adapter_cache import AdapterCache
from expertctl.engine.memory.budget import MemoryBudget
from expertctl.engine.torch.weights import load_base_weights
from expertctl.package.model_config import read_model_config
from tests.engine.conftest import KERNEL_SIZES, MakeReferenceModel, ReferenceModel, stack_logits
from tests.engine.cpu.test_decoder import assert_exact
from tests.engine.packing import pack_base

VECTORS = Path(__file__).parent.parent / "vectors" / "runtime.json"
KV = json.loads(VECTORS.read_text(encoding="utf-8"))["kv_equivalence"]
SIZES: dict[str, Any] = {
    **KERNEL_SIZES,
    "num_attention_heads": KV["q_heads"],
    "num_key_value_heads": KV["kv_heads"],
    "max_position_embeddings": 256,
}
IDS = [(7 * n * n + 3 * n) % 61 for n in range(100)]
KINDS = [
    ("qwen3", {}),
    ("llama", {"attention_bias": True}),
    ("mistral", {"sliding_window": 4}),
    ("mistral", {"sliding_window": 18}),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 33}),
]


class PooledDecoder:
    """A decoder and a pool for its texts."""

    def __init__(
        self,
        oracle: ReferenceModel,
        crew: ThreadPool,
        *,
        scheme: Scheme = Scheme.FLOAT32,
        numbers: Scheme = Scheme.FLOAT32,
        chunk: int = 512,
    ) -> None:
        config = read_model_config(oracle.directory)
        base = pack_base(config, load_base_weights(oracle.directory, config), scheme)
        self.decoder = PackedDecoder(base, crew, chunk=chunk)
        self.budget = MemoryBudget(1 << 24)
        self.tiers = AdapterCache(ram=self.budget, device=self.budget)
        self.pool = BlockPool(self.tiers, layout=InterleavedPages(numbers))

    def wanted(self, ids: Sequence[int], **options: Any) -> KVRequest:
        values: dict[str, Any] = {"cache_key": "chat", "virtual_tokens": 0, "room": 21, **options}
        capacity = values["virtual_tokens"] + len(ids) + values.pop("room")
        return KVRequest(
            identity=Digest.compute(b"plan"),
            config=self.decoder.config,
            ids=ids,
            capacity=capacity,
            **values,
        )

    def turn(
        self,
        ids: Sequence[int],
        answer: Sequence[int] = (),
        soft: AnyArray | None = None,
        **options: Any,
    ) -> tuple[int, torch.Tensor]:
        """Read a prompt and an answer; return what was reused, and the scores from the prompt's
        last token on.
        """
        virtual = 0 if soft is None else len(soft)
        with self.pool.allocate(self.wanted(ids, virtual_tokens=virtual, **options)) as loan:
            first = soft if loan.cache.length == 0 else None
            rest = ids[loan.reused :]
            rows = [self.decoder.prefill(rest, loan.cache, soft_prompt=first).logits]
            rows += [self.decoder.decode(t, loan.cache).logits for t in answer]
            loan.cache.check_integrity()
            loan.complete((*ids, *answer))
        self.pool.check_integrity()
        self.tiers.check_integrity()
        return loan.reused, stack_logits(rows)

    def alone(self, ids: Sequence[int], answer: Sequence[int] = ()) -> torch.Tensor:
        """Return the scores of a text without a key."""
        reused, rows = self.turn(ids, answer, cache_key=None)
        assert reused == 0
        return rows


@pytest.mark.parametrize("arch", ["llama", "mistral", "qwen2", "qwen3"])
def test_prefill_and_decode_equal_one_full_forward(
    arch: str, oracle: MakeReferenceModel, crew: ThreadPool
) -> None:
    model = oracle(arch, **SIZES)
    pooled_decoder, ids = PooledDecoder(model, crew), IDS[: KV["prefill"] + KV["decode"]]
    prompt, answer = ids[: KV["prefill"]], ids[KV["prefill"] :]
    full = model.compute_logits(ids)[KV["prefill"] - 1 :]
    for room in (len(answer), len(answer) + 1, 50):
        _, split = pooled_decoder.turn(prompt, answer, room=room, cache_key=None)
        assert float((split - full).abs().max()) <= KV["tolerance_abs"]
        assert split.argmax(-1).tolist() == full.argmax(-1).tolist()


@pytest.mark.parametrize(("arch", "config"), KINDS)
def test_a_text_that_goes_on_from_another_has_the_bits_of_reading_it_all(
    arch: str, config: dict[str, Any], oracle: MakeReferenceModel, crew: ThreadPool
) -> None:
    model = oracle(arch, **SIZES, **config)
    pooled_decoder = PooledDecoder(model, crew)
    pooled_decoder.turn(IDS[:50], IDS[50:53])
    for ids in (IDS[:70], [*IDS[:40], *IDS[:9]], IDS[:33], IDS[:64]):
        reused, rows = pooled_decoder.turn(ids, [1, 2, 3])
        assert reused in (53, 40, 32, 63)
        assert torch.equal(rows, pooled_decoder.alone(ids, [1, 2, 3]))
        assert_exact(rows, model, [*ids, 1, 2, 3])


@pytest.mark.parametrize("scheme", [Scheme.BFLOAT16, Scheme.INT8, Scheme.INT4])
@pytest.mark.parametrize("numbers", [Scheme.FLOAT32, Scheme.FLOAT16])
def test_in_every_storage_what_is_reused_has_the_bits_of_reading_it(
    scheme: Scheme, numbers: Scheme, qwen3: ReferenceModel, crew: ThreadPool
) -> None:
    pooled_decoder = PooledDecoder(qwen3, crew, scheme=scheme, numbers=numbers, chunk=19)
    pooled_decoder.turn(IDS[:50], IDS[50:53])
    reused, rows = pooled_decoder.turn(IDS[:70], [4, 5])
    assert reused == 53
    assert torch.equal(rows, pooled_decoder.alone(IDS[:70], [4, 5]))


def test_two_texts_may_take_turns_on_the_same_pages(
    qwen3: ReferenceModel, crew: ThreadPool
) -> None:
    pooled_decoder = PooledDecoder(qwen3, crew)
    pooled_decoder.turn(IDS[:40])
    texts = ([*IDS[:38], *IDS[60:75]], [*IDS[:33], *IDS[20:40]], IDS[7:30])
    with ExitStack() as stack:
        loans = [
            stack.enter_context(pooled_decoder.pool.allocate(pooled_decoder.wanted(text)))
            for text in texts
        ]
        assert [loan.reused for loan in loans] == [38, 33, 0]
        rows: list[list[torch.Tensor]] = []
        for text, loan in zip(texts, loans, strict=True):
            prompt = text[loan.reused : len(text) - 8]
            rows.append([pooled_decoder.decoder.prefill(prompt, loan.cache).logits])
        for step in range(8):
            for text, loan, got in zip(texts, loans, rows, strict=True):
                token = text[len(text) - 8 + step]
                got.append(pooled_decoder.decoder.decode(token, loan.cache).logits)
    for text, got in zip(texts, rows, strict=True):
        assert torch.equal(stack_logits(got), pooled_decoder.alone(text[:-8], text[-8:]))
        assert_exact(stack_logits(got), qwen3, text)


@pytest.mark.parametrize("numbers", [Scheme.FLOAT32, Scheme.FLOAT16])
def test_sixteen_texts_with_one_system_prompt_read_it_once(
    numbers: Scheme, qwen3: ReferenceModel, crew: ThreadPool
) -> None:
    pooled_decoder = PooledDecoder(qwen3, crew, numbers=numbers, chunk=19)
    texts = [[*IDS[:60], *IDS[n : n + 5 + n]] for n in range(16)]
    answers, rows = [IDS[n : n + 3] for n in range(16)], list[list[torch.Tensor]]()
    with ExitStack() as stack:
        caches = []
        for text in texts:
            loan = stack.enter_context(pooled_decoder.pool.allocate(pooled_decoder.wanted(text)))
            assert loan.reused >= 60 if caches else loan.reused == 0
            caches.append(loan.cache)
            rows.append([pooled_decoder.decoder.prefill(text[loan.reused :], loan.cache).logits])
        for step in range(3):
            for cache, answer, got in zip(caches, answers, rows, strict=True):
                got.append(pooled_decoder.decoder.decode(answer[step], cache).logits)
        pooled_decoder.pool.check_integrity()
    for text, answer, got in zip(texts, answers, rows, strict=True):
        assert torch.equal(stack_logits(got), pooled_decoder.alone(text, answer))


def test_a_text_may_begin_where_another_is_in_the_middle_of_its_prompt(
    qwen3: ReferenceModel, crew: ThreadPool
) -> None:
    pooled_decoder = PooledDecoder(qwen3, crew)
    with pooled_decoder.pool.allocate(pooled_decoder.wanted(IDS[:70])) as first:
        pooled_decoder.decoder.prefill(IDS[:41], first.cache)
        reused, rows = pooled_decoder.turn(IDS[:60], [1, 2])
        assert reused == 32
        assert torch.equal(rows, pooled_decoder.alone(IDS[:60], [1, 2]))
        got = [pooled_decoder.decoder.prefill(IDS[41:70], first.cache).logits]
        got.append(pooled_decoder.decoder.decode(3, first.cache).logits)
    assert torch.equal(stack_logits(got), pooled_decoder.alone(IDS[:70], [3]))


def test_a_prompt_that_is_given_up_leaves_what_others_began_with(
    qwen3: ReferenceModel, crew: ThreadPool
) -> None:
    pooled_decoder, texts = PooledDecoder(qwen3, crew, chunk=20), ExitStack()

    def begin_another(_: int) -> None:
        loan = texts.enter_context(pooled_decoder.pool.allocate(pooled_decoder.wanted(IDS[:50])))
        if loan.reused == 32:
            raise KeyboardInterrupt

    with texts:
        first = texts.enter_context(pooled_decoder.pool.allocate(pooled_decoder.wanted(IDS[:70])))
        with pytest.raises(KeyboardInterrupt):
            pooled_decoder.decoder.prefill(IDS[:70], first.cache, progress=begin_another)
        assert first.cache.length == 32
        rows = [pooled_decoder.decoder.prefill(IDS[32:70], first.cache).logits]
    pooled_decoder.pool.check_integrity()
    assert np.array_equal(rows[0], pooled_decoder.alone(IDS[:70])[0])


def test_pages_serve_again_after_a_reset(qwen3: ReferenceModel, crew: ThreadPool) -> None:
    pooled_decoder = PooledDecoder(qwen3, crew)
    cache = PagedKVCache(pooled_decoder.decoder.config, 53)
    for text in (IDS[:50], IDS[50:57], IDS[3:41]):
        cache.reset()
        rows = [pooled_decoder.decoder.prefill(text[:5], cache).logits]
        rows += [pooled_decoder.decoder.decode(token, cache).logits for token in text[5:]]
        assert_exact(stack_logits(rows), qwen3, text)


def test_pages_that_went_back_to_the_pool_hold_nothing_of_their_last_user(
    qwen3: ReferenceModel, crew: ThreadPool
) -> None:
    pooled_decoder = PooledDecoder(qwen3, crew)
    for text in (IDS, IDS[4:12], IDS[20:60], IDS[4:13]):
        for key in ("chat", None, "another chat"):
            _, rows = pooled_decoder.turn(text, cache_key=key)
            assert_exact(rows, qwen3, text)
    pooled_decoder.pool.forget("chat")
    pooled_decoder.pool.forget("another chat")
    assert pooled_decoder.budget.used == 0


def test_a_soft_prompt_is_reused_with_what_follows_it(
    qwen3: ReferenceModel, crew: ThreadPool
) -> None:
    pooled_decoder = PooledDecoder(qwen3, crew)
    soft = (torch.randn(21, 48, generator=torch.Generator().manual_seed(2)) * 0.3).numpy()
    pooled_decoder.turn(IDS[:30], soft=soft)
    reused, rows = pooled_decoder.turn(IDS[:40], [1, 2], soft=soft)
    assert reused == 30
    assert torch.equal(rows, pooled_decoder.turn(IDS[:40], [1, 2], soft=soft, cache_key=None)[1])
    assert not torch.equal(rows, pooled_decoder.alone(IDS[:40], [1, 2]))


def test_a_prompt_that_is_given_up_leaves_nothing(qwen3: ReferenceModel, crew: ThreadPool) -> None:
    pooled_decoder = PooledDecoder(qwen3, crew, chunk=8)
    pooled_decoder.turn(IDS[:30])

    def stop(_: int) -> None:
        raise KeyboardInterrupt

    def give_up() -> None:
        with pooled_decoder.pool.allocate(pooled_decoder.wanted(IDS[:60])) as loan:
            pooled_decoder.decoder.prefill(IDS[30:60], loan.cache, progress=stop)

    with pytest.raises(KeyboardInterrupt):
        give_up()
    pooled_decoder.pool.check_integrity()
    reused, rows = pooled_decoder.turn(IDS[:60])
    assert reused == 30
    assert torch.equal(rows, pooled_decoder.alone(IDS[:60]))


@pytest.mark.parametrize(("arch", "config"), KINDS)
def test_float16_pages_change_scores_by_two_thousandths_at_most(
    arch: str, config: dict[str, Any], oracle: MakeReferenceModel, crew: ThreadPool
) -> None:
    model = oracle(arch, **SIZES, **config)
    exact = PooledDecoder(model, crew).alone(IDS[:70], IDS[70:90])
    halves = PooledDecoder(model, crew, numbers=Scheme.FLOAT16).alone(IDS[:70], IDS[70:90])
    error = float((halves - exact).norm() / exact.norm())
    assert 0 < error < 2e-3
    assert float((halves - exact).abs().max()) < 4e-3 * float(exact.abs().max())
