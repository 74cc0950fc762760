"""The decoder of compiled kernels against transformers; with plans, against the torch decoder."""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch

from expertctl.engine.base_weights import load_base
from expertctl.engine.decoder import Decoder
from expertctl.engine.kernels.crew import Crew
from expertctl.engine.kernels.packed import pack, unpack
from expertctl.engine.kernels.scheme import Scheme
from expertctl.engine.kv_cache import KVCache
from expertctl.engine.kv_pages import KVPages
from expertctl.engine.linear import LinearDelta
from expertctl.engine.packed_base import pack_base
from expertctl.engine.packed_decoder import PackedDecoder
from expertctl.errors import BudgetError, IncompatibleError, UsageError
from expertctl.package.model_config import ModelConfig, read_config
from tests.engine.conftest import (
    TOLERANCE,
    MakeOracle,
    Oracle,
    assert_same_logits,
    build_oracle,
    run_decoder,
)

IDS = [3, 60, 0, 17, 17, 42, 8, 25, 31, 5, 59, 2, 44, 13, 7, 28, 50, 1, 9, 33, 12, 4, 57, 21]
SIZES: dict[str, Any] = {"head_dim": 16, "hidden_size": 48, "intermediate_size": 80}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3", {}),
    ("qwen3", {"tie_word_embeddings": True, "head_dim": 32}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"num_key_value_heads": 4}),
    ("llama", {"num_key_value_heads": 1, "rms_norm_eps": 1e-3}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0}}),
    ("llama", {"rope_parameters": {**LLAMA3, "rope_theta": 10000.0}}),
    ("mistral", {"sliding_window": 4}),
    ("mistral", {"sliding_window": 1}),
    ("mistral", {"sliding_window": 18}),
    ("qwen2", {"rope_parameters": {**YARN, "rope_theta": 1e6}}),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 5}),
]


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    crew = Crew(2)
    yield crew
    crew.close()


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return build_oracle(tmp_path_factory.mktemp("qwen3") / "model", **SIZES)


def assert_exact(ours: torch.Tensor, oracle: Oracle, ids: list[int]) -> None:
    """Compare scores of the last rows with transformers in float64.

    The bound is 1e-5 or twice what transformers itself loses in float32: on these weights it loses
    up to 1.1e-5.
    """
    with torch.inference_mode():
        model = deepcopy(oracle.model).double()
        theirs = model(torch.tensor([ids]), use_cache=False).logits[0][-len(ours) :]
    lost = float((oracle.logits(ids)[-len(ours) :] - theirs).abs().max())
    assert float(theirs.abs().max()) > 0.5, "the numbers are too small for an absolute tolerance"
    assert float((ours - theirs).abs().max()) <= max(TOLERANCE, 2 * lost)


def packed(oracle: Oracle, crew: Crew, scheme: Scheme = Scheme.FLOAT32, **options: Any) -> Any:
    config = read_config(oracle.directory)
    return PackedDecoder(
        pack_base(config, load_base(oracle.directory, config), scheme), crew, **options
    )


def scores(decoder: Any, ids: list[int], *, prefill: int, **options: Any) -> torch.Tensor:
    """Scores from the last prompt token on, [1 + decoded, vocab]."""
    cache = KVPages(decoder.config, 40)
    deltas = options.pop("deltas", {})
    rows = [decoder.prefill(ids[:prefill], cache, deltas, **options).logits.clone()]
    rows += [decoder.decode(token, cache, deltas).logits.clone() for token in ids[prefill:]]
    cache.check_integrity()
    return torch.stack(rows)


def random_deltas(config: ModelConfig, *, vectors: bool) -> dict[str, LinearDelta]:
    generator = torch.Generator().manual_seed(5)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    deltas = {}
    for place, (module, (out, into)) in enumerate(config.linear_shapes().items()):
        if place % 4 == 3:
            continue
        rank = 1 + 7 * place % 23
        deltas[module] = LinearDelta(
            a=random(rank, into) * 0.05,
            b=random(out, rank) * 0.1,
            input_scale=1 + 0.2 * random(into) if vectors and place % 2 else None,
            output_scale=1 + 0.2 * random(out) if vectors and place % 3 else None,
            bias_scale=1 + 0.2 * random(out) if vectors and place % 5 else None,
        )
    return deltas


@pytest.mark.parametrize(("arch", "config"), MODELS)
def test_scores_are_those_of_transformers(
    arch: str, config: dict[str, Any], oracle: MakeOracle, crew: Crew
) -> None:
    reference = oracle(arch, **{**SIZES, **config})
    ours = scores(packed(reference, crew), IDS, prefill=9)
    assert_exact(ours, reference, IDS)


@pytest.mark.parametrize("chunk", [1, 5, 16, 24])
def test_a_prompt_read_in_stretches_is_the_whole_prompt(
    chunk: int, qwen3: Oracle, crew: Crew
) -> None:
    ours = scores(packed(qwen3, crew, chunk=chunk), IDS, prefill=20)
    assert_exact(ours, qwen3, IDS)


@pytest.mark.parametrize("vectors", [False, True])
@pytest.mark.parametrize("arch", ["qwen3", "llama"])
def test_a_plan_changes_what_it_changes_in_the_torch_decoder(
    arch: str, vectors: bool, oracle: MakeOracle, crew: Crew
) -> None:
    bias = {"attention_bias": True, "mlp_bias": True} if arch == "llama" else {}
    reference = oracle(arch, **SIZES, **bias)
    decoder, deltas = reference.decoder(), {}
    deltas = random_deltas(decoder.config, vectors=vectors)
    cache = KVCache(decoder.config, 40)
    theirs = [decoder.prefill(IDS[:9], cache, deltas).logits]
    theirs += [decoder.decode(token, cache, deltas).logits for token in IDS[9:]]
    ours = scores(packed(reference, crew), IDS, prefill=9, deltas=deltas)
    assert_same_logits(ours, torch.stack(theirs))


def test_plans_take_turns(qwen3: Oracle, crew: Crew) -> None:
    decoder = packed(qwen3, crew)
    deltas = random_deltas(decoder.config, vectors=True)
    plain = scores(decoder, IDS, prefill=9)
    changed = scores(decoder, IDS, prefill=9, deltas=deltas)
    assert not torch.allclose(plain, changed, atol=0.1)
    assert torch.equal(scores(decoder, IDS, prefill=9), plain)
    assert torch.equal(scores(decoder, IDS, prefill=9, deltas=deltas), changed)


def test_the_number_of_workers_does_not_change_a_bit(qwen3: Oracle, crew: Crew) -> None:
    alone = Crew(1)
    try:
        one = scores(packed(qwen3, alone), IDS, prefill=9)
    finally:
        alone.close()
    assert torch.equal(scores(packed(qwen3, crew), IDS, prefill=9), one)


def test_a_soft_prompt_stands_before_the_first_token(qwen3: Oracle, crew: Crew) -> None:
    torch_decoder = qwen3.decoder()
    soft = torch.randn(7, 48, generator=torch.Generator().manual_seed(2)) * 0.3
    cache = KVCache(torch_decoder.config, 40)
    theirs = torch_decoder.prefill(IDS[:9], cache, soft_prompt=soft).logits
    for chunk in (4, 16):
        ours = scores(packed(qwen3, crew, chunk=chunk), IDS[:9], prefill=9, soft_prompt=soft)
        assert_same_logits(ours, theirs[None])


def test_a_text_goes_on_from_where_it_was_rewound_to(qwen3: Oracle, crew: Crew) -> None:
    decoder = packed(qwen3, crew)
    cache = KVPages(decoder.config, 40)
    decoder.prefill([5] * 10 + [9] * 20, cache)
    cache.rewind(0)
    decoder.prefill(IDS[:18], cache)
    other = KVPages(decoder.config, 33)
    other.copy_from(cache)
    other.rewind(12)
    again = decoder.prefill(IDS[12:], other).logits
    assert_exact(again[None], qwen3, IDS)
    cache.check_integrity()
    other.check_integrity()


@pytest.mark.parametrize(
    ("scheme", "most"), [(Scheme.BFLOAT16, 0.01), (Scheme.INT8, 0.05), (Scheme.INT4, 0.05)]
)
def test_fewer_bits_are_those_of_the_weights_and_of_what_meets_them(
    scheme: Scheme, most: float, qwen3: Oracle, crew: Crew
) -> None:
    """Beside float32 on the rounded weights, only the rounding of activations is left."""
    config = read_config(qwen3.directory)
    weights = load_base(qwen3.directory, config)
    rounded = {
        name: torch.from_numpy(unpack(pack(tensor.numpy(), scheme))) if tensor.ndim == 2 else tensor
        for name, tensor in weights.tensors.items()
    }
    decoder = Decoder(config, replace(weights, tensors=rounded))
    theirs = run_decoder(decoder, IDS, prefill=9)
    ours = scores(packed(qwen3, crew, scheme), IDS, prefill=9)
    assert float((ours - theirs).norm() / theirs.norm()) <= most
    assert not torch.equal(ours, theirs)


def test_what_does_not_fit_is_refused_and_nothing_is_read(qwen3: Oracle, crew: Crew) -> None:
    decoder = packed(qwen3, crew)
    cache = KVPages(decoder.config, 8)
    with pytest.raises(BudgetError):
        decoder.prefill(IDS[:9], cache)
    with pytest.raises(UsageError):
        decoder.prefill([], cache)
    with pytest.raises(IncompatibleError):
        decoder.prefill([61], cache)
    with pytest.raises(IncompatibleError):
        decoder.decode(-1, cache)
    delta = LinearDelta(output_scale=torch.ones(48))
    with pytest.raises(IncompatibleError):
        decoder.prefill(IDS[:3], cache, {"model.layers.9.mlp.down_proj": delta})
    with pytest.raises(IncompatibleError):
        decoder.prefill(IDS[:3], cache, soft_prompt=torch.zeros(2, 47))
    assert cache.length == 0
    decoder.prefill(IDS[:8], cache)
    with pytest.raises(BudgetError):
        decoder.decode(3, cache)


def test_a_prompt_that_is_given_up_leaves_the_text_as_it_was(qwen3: Oracle, crew: Crew) -> None:
    decoder = packed(qwen3, crew, chunk=4)
    cache = KVPages(decoder.config, 40)
    decoder.prefill(IDS[:5], cache)

    def stop(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        decoder.prefill(IDS[5:], cache, progress=stop)
    assert cache.length == 5
    again = decoder.prefill(IDS[5:], cache).logits
    assert_exact(again[None], qwen3, IDS)


def test_a_decoder_at_rest_holds_only_its_weights(qwen3: Oracle, crew: Crew) -> None:
    decoder = packed(qwen3, crew)
    assert decoder.is_at_rest
    first = scores(decoder, IDS, prefill=9)
    assert not decoder.is_at_rest
    decoder.rest()
    assert decoder.is_at_rest
    assert torch.equal(scores(decoder, IDS, prefill=9), first)
