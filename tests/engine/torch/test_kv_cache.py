"""The cache of one generation: its layout, its bytes, its limits."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from expertctl.engine.torch.sequence_cache import KVCache
from expertctl.errors import BudgetError
from expertctl.package.model_config import ModelConfig, parse_model_config, read_model_config
from tests.engine.conftest import CLASSES, MakeReferenceModel

VECTORS = json.loads(
    Path(__file__).parents[2].joinpath("vectors", "runtime.json").read_text(encoding="utf-8")
)


def config(*, layers: int = 2, kv_heads: int = 2, head_dim: int = 4) -> ModelConfig:
    return parse_model_config(
        {
            "model_type": "qwen3",
            "vocab_size": 11,
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_hidden_layers": layers,
            "num_attention_heads": kv_heads * 2,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "max_position_embeddings": 64,
        }
    )


def rows(tokens: int, first: float) -> torch.Tensor:
    """[kv_heads, tokens, head_dim], every value another one."""
    return torch.arange(2 * tokens * 4, dtype=torch.float32).reshape(2, tokens, 4) + first


def test_bytes_of_a_token_are_those_of_the_published_case() -> None:
    qwen = config(layers=28, kv_heads=8, head_dim=128)
    per_token = VECTORS["kv_bytes_per_token"]["qwen3_0_6b_fp16"]
    assert qwen.count_kv_bytes(1, itemsize=2) == per_token
    assert KVCache(qwen, 3, dtype=torch.float16).nbytes == 3 * per_token
    assert KVCache(qwen, 3).nbytes == qwen.count_kv_bytes(3, itemsize=4)


@pytest.mark.parametrize("arch", sorted(CLASSES))
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 8), (4, 1, 16), (3, 3, 20)])
def test_bytes_are_those_of_transformers_for_every_architecture(
    arch: str, heads: int, kv_heads: int, head_dim: int, oracle: MakeReferenceModel
) -> None:
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    model = oracle(arch, hidden_size=48, num_hidden_layers=3, **sizes)
    cache = model.model(torch.tensor([[5, 7, 11, 13]]), use_cache=True).past_key_values
    theirs = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    ours = read_model_config(model.directory)
    assert ours.count_kv_bytes(4, itemsize=4) == KVCache(ours, 4).nbytes == theirs
    assert theirs == 2 * 3 * kv_heads * head_dim * 4 * 4


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.integers(0, 7))
def test_what_was_written_is_read_back_whatever_the_capacity(steps: list[int], spare: int) -> None:
    cache = KVCache(config(), sum(steps) + spare)
    written: list[list[torch.Tensor]] = [[], []]
    for step, tokens in enumerate(steps):
        for layer in (0, 1):
            new = rows(tokens, 1000.0 * step + 500 * layer)
            written[layer].append(new)
            keys, values = cache.write(layer, new, -new)
            assert torch.equal(keys, torch.cat(written[layer], dim=1))
            assert torch.equal(values, -keys)
        cache.advance(tokens)
    cache.check_integrity()
    assert cache.length == sum(steps)


def test_views_share_the_memory_of_the_cache() -> None:
    cache = KVCache(config(), 9)
    keys, _ = cache.write(1, rows(3, 0), rows(3, 0))
    assert keys.data_ptr() == cache._keys[1].data_ptr()
    assert keys.stride(0) == 9 * 4


def test_a_step_that_was_not_finished_leaves_no_trace() -> None:
    cache = KVCache(config(), 9)
    for layer in (0, 1):
        cache.write(layer, rows(2, 0), rows(2, 0))
    cache.advance(2)
    cache.write(0, rows(3, 90), rows(3, 90))
    keys, _ = cache.write(0, rows(1, 7), rows(1, 7))
    assert cache.length == 2
    assert torch.equal(keys, torch.cat((rows(2, 0), rows(1, 7)), dim=1))


def test_more_than_its_capacity_is_refused() -> None:
    cache = KVCache(config(), 4)
    cache.ensure_capacity(4)
    with pytest.raises(BudgetError, match="5 more tokens do not fit into the KV cache: 0 of 4"):
        cache.ensure_capacity(5)
    cache.advance(3)
    cache.ensure_capacity(1)
    with pytest.raises(BudgetError, match="3 of 4 are used") as caught:
        cache.ensure_capacity(2)
    assert caught.value.hint


def test_rewinding_keeps_the_rows_before() -> None:
    cache = KVCache(config(), 8)
    cache.write(0, rows(5, 0), rows(5, 0))
    cache.advance(5)
    cache.rewind(3)
    keys, _ = cache.write(0, rows(1, 70), rows(1, 70))
    assert torch.equal(keys, torch.cat((rows(5, 0)[:, :3], rows(1, 70)), dim=1))
    with pytest.raises(AssertionError):
        cache.rewind(4)
    cache.reset()
    assert cache.length == 0


def test_a_copy_holds_the_same_rows_whatever_its_capacity() -> None:
    cache = KVCache(config(), 5)
    for layer in (0, 1):
        cache.write(layer, rows(3, 10.0 * layer), -rows(3, 10.0 * layer))
    cache.advance(3)
    larger = KVCache(config(), 11)
    larger.copy_from(cache, 3)
    larger.check_integrity()
    for layer in (0, 1):
        keys, values = larger.write(layer, rows(1, 70), rows(1, 70))
        assert torch.equal(keys[:, :3], rows(3, 10.0 * layer))
        assert torch.equal(values[:, :3], -rows(3, 10.0 * layer))
    assert (cache.length, larger.length) == (3, 3)
    with pytest.raises(BudgetError):
        KVCache(config(), 2).copy_from(cache, 3)
    smaller = KVCache(config(), 2)
    smaller.copy_from(cache, 2)
    assert (cache.length, smaller.length) == (3, 2)
    with pytest.raises(AssertionError):
        larger.copy_from(smaller, 3)


def test_integrity_fails_on_a_number_that_is_none() -> None:
    cache = KVCache(config(), 8)
    for layer in (0, 1):
        cache.write(layer, rows(2, 0), rows(2, 0))
    cache.advance(2)
    cache.check_integrity()
    cache._values[1, 1, 1, 3] = torch.nan
    with pytest.raises(AssertionError):
        cache.check_integrity()
