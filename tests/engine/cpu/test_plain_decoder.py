"""The decoder in numpy against transformers and the torch decoder, in every order of calls."""

import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from expertctl.engine.adapters.steps import EMPTY_DELTAS, Deltas, LinearDelta
from expertctl.engine.arrays import AnyArray, FloatArray
from expertctl.engine.cpu.plain_decoder import PlainDecoder
from expertctl.engine.cpu.plain_layers import estimate_plain_pass_bytes
from expertctl.engine.cpu.plain_weights import load_plain_weights
from expertctl.engine.decoding import LayerTimer
from expertctl.engine.kv.block_pool import ROW_PAGES, PagedKVCache
from expertctl.engine.text.prompt import PromptLogprobs
from expertctl.engine.torch.sequence_cache import KVCache
from expertctl.errors import BudgetError, IncompatibleError, UsageError
from expertctl.package.model_config import ModelConfig, read_model_config
from tests.engine.conftest import (
    TOLERANCE,
    MakeReferenceModel,
    ReferenceModel,
    assert_same_logits,
    build_reference_model,
)
from tests.engine.reference_models import TORCH_SHAPES, get_weight
from tests.factories import write_base

IDS = [3, 60, 0, 17, 17, 42, 8, 25, 31, 5, 59, 2, 44, 13, 7, 28]
Delta = LinearDelta[FloatArray]


def load_decoder(directory: Path, dtype: str = "float32") -> PlainDecoder:
    config = read_model_config(directory)
    return PlainDecoder(config, load_plain_weights(directory, config, dtype=dtype))


def make_cache(config: ModelConfig, capacity: int = 40) -> PagedKVCache:
    """Pages whose rows are no numbers until they are written."""
    cache = PagedKVCache(config, capacity, layout=ROW_PAGES)
    for page in cache.pages:
        page[...] = np.nan
    return cache


def compute_scores(
    decoder: PlainDecoder,
    ids: list[int],
    *,
    prefill: int,
    deltas: Deltas = EMPTY_DELTAS,
    **options: Any,
) -> torch.Tensor:
    """Scores from the last prompt token on, [1 + decoded, vocab]."""
    cache = make_cache(decoder.config, 60 if len(ids) < 60 else len(ids))
    rows = [decoder.prefill(ids[:prefill], cache, deltas, **options).logits]
    rows += [decoder.decode(token, cache, deltas).logits for token in ids[prefill:]]
    cache.check_integrity()
    return torch.from_numpy(np.stack(rows))


@pytest.fixture(scope="module")
def decoder(shared_oracle: ReferenceModel) -> PlainDecoder:
    return load_decoder(shared_oracle.directory)


@pytest.mark.parametrize(("arch", "config"), TORCH_SHAPES, ids=str)
def test_logits_equal_those_of_transformers_however_a_prompt_is_cut(
    oracle: MakeReferenceModel, arch: str, config: dict[str, Any]
) -> None:
    model = oracle(arch, **config)
    decoder, theirs = load_decoder(model.directory), model.compute_logits(IDS)
    assert_same_logits(compute_scores(decoder, IDS, prefill=9), theirs[8:])
    for chunk in (1, 5, 7):
        assert_same_logits(compute_scores(decoder, IDS, prefill=12, chunk=chunk), theirs[11:])


@pytest.mark.parametrize(("arch", "config"), TORCH_SHAPES[:10], ids=str)
def test_logits_over_several_pages_equal_those_of_the_torch_decoder(
    oracle: MakeReferenceModel, arch: str, config: dict[str, Any]
) -> None:
    model, ids = oracle(arch, **config), [(7 * n * n + 3 * n) % 61 for n in range(60)]
    theirs, cache = model.load_decoder(), KVCache(read_model_config(model.directory), 60)
    rows = [theirs.prefill(ids[:37], cache).logits]
    rows += [theirs.decode(token, cache).logits for token in ids[37:]]
    expected = np.stack([np.asarray(row) for row in rows])
    for chunk in (512, 10):
        found = compute_scores(load_decoder(model.directory), ids, prefill=37, chunk=chunk)
        assert_same_logits(found, torch.from_numpy(expected))


@settings(deadline=None, max_examples=40)
@given(
    arch=st.sampled_from(["llama", "mistral", "qwen2", "qwen3"]),
    kv_heads=st.integers(1, 4),
    groups=st.integers(1, 3),
    head_dim=st.sampled_from([2, 4, 6, 10, 16]),
    hidden=st.sampled_from([6, 8, 24]),
    layers=st.integers(1, 3),
    window=st.none() | st.integers(1, 12),
    prefill=st.integers(1, 15),
    chunk=st.integers(1, 16),
    seed=st.integers(0, 99),
)
def test_any_shape_of_model_equals_transformers(
    tmp_path_factory: pytest.TempPathFactory,
    arch: str,
    kv_heads: int,
    groups: int,
    head_dim: int,
    hidden: int,
    layers: int,
    window: int | None,
    prefill: int,
    chunk: int,
    seed: int,
) -> None:
    heads = kv_heads * groups
    used = {"use_sliding_window": window is not None, "sliding_window": window}
    sliding = {"mistral": {"sliding_window": window}, "qwen2": used, "qwen3": used}
    model = build_reference_model(
        tmp_path_factory.mktemp("any") / "model",
        arch,
        seed=seed,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        hidden_size=hidden * heads,
        num_hidden_layers=layers,
        max_window_layers=1,
        **sliding.get(arch, {}),
    )
    ours = compute_scores(load_decoder(model.directory), IDS, prefill=prefill, chunk=chunk)
    theirs = model.compute_logits(IDS)[prefill - 1 :]
    model.model.double()
    rounding = float((theirs - model.compute_logits(IDS)[prefill - 1 :]).abs().max())
    scale = max(1.0, float(theirs.abs().max()))
    # Some of these models magnify rounding: there even transformers is farther than that from
    # its own answer in float64.
    assert float((ours - theirs).abs().max()) <= max(TOLERANCE * scale, 4 * rounding)


@pytest.mark.parametrize("arch", ["llama", "qwen3", "qwen2_moe", "dots1"])
def test_bfloat16_weights_are_computed_with_as_float32(
    arch: str, oracle: MakeReferenceModel
) -> None:
    model = oracle(arch)
    for parameter in model.model.parameters():
        if parameter.ndim >= 2:  # norms and biases stay as they are
            parameter.data = parameter.data.bfloat16().float()
    model.model.save_pretrained(model.directory)
    exact = load_decoder(model.directory)
    held = load_decoder(model.directory, "bf16")
    assert held.matrix("lm_head").dtype == np.uint16
    found = compute_scores(held, IDS, prefill=9)
    assert_same_logits(found, compute_scores(exact, IDS, prefill=9))
    assert_same_logits(found, model.compute_logits(IDS)[8:])


def test_positions_are_rotated_right_beyond_the_first_table(oracle: MakeReferenceModel) -> None:
    model = oracle("llama", num_hidden_layers=1, max_position_embeddings=300)
    decoder, ids = load_decoder(model.directory), [(7 * n) % 61 for n in range(260)]
    compute_scores(decoder, ids[:20], prefill=20)
    ours = compute_scores(decoder, ids, prefill=250, chunk=100)
    assert_same_logits(ours, model.compute_logits(ids)[249:])


def test_two_sessions_may_take_turns(decoder: PlainDecoder, shared_oracle: ReferenceModel) -> None:
    texts = (IDS[:8], list(reversed(IDS))[:9])
    caches = (make_cache(decoder.config, 11), make_cache(decoder.config, 30))
    rows: tuple[list[AnyArray], ...] = ([], [])
    for session in (0, 1):
        rows[session].append(decoder.prefill(texts[session][:5], caches[session]).logits)
    for step in range(5, 9):
        for session in (0, 1):
            if step < len(texts[session]):
                rows[session].append(decoder.decode(texts[session][step], caches[session]).logits)
    for text, got in zip(texts, rows, strict=True):
        found = torch.from_numpy(np.stack(got))
        assert_same_logits(found, shared_oracle.compute_logits(text)[4:])


def test_a_text_goes_on_from_where_it_was_rewound_to(
    decoder: PlainDecoder, shared_oracle: ReferenceModel
) -> None:
    cache = make_cache(decoder.config)
    decoder.prefill([5] * 10 + [9] * 20, cache)
    cache.rewind(0)
    decoder.prefill(IDS[:10], cache)
    cache.rewind(7)
    again = torch.from_numpy(decoder.prefill(IDS[7:], cache).logits)
    assert_same_logits(again[None], shared_oracle.compute_logits(IDS)[-1:])
    cache.check_integrity()


def test_results_say_what_was_done(decoder: PlainDecoder) -> None:
    cache, seen = make_cache(decoder.config, 30), list[int]()
    prefill = decoder.prefill(IDS[:7], cache, chunk=3, progress=seen.append)
    decode = decoder.decode(1, cache)
    assert (prefill.tokens, decode.position, cache.length) == (7, 7, 8)
    assert seen == [3, 3, 1]
    assert prefill.ms > 0
    assert decode.ms > 0
    assert prefill.logits.dtype == decode.logits.dtype == np.float32
    before = prefill.logits.copy()
    decoder.decode(2, cache)
    assert np.array_equal(prefill.logits, before)


def test_what_does_not_fit_is_refused_and_nothing_is_read(decoder: PlainDecoder) -> None:
    cache = make_cache(decoder.config, 8)
    strange: Mapping[str, Delta] = {"model.layers.3.self_attn.q_proj": LinearDelta()}
    with pytest.raises(BudgetError, match="9 more tokens do not fit"):
        decoder.prefill(IDS[:9], cache, chunk=4)
    with pytest.raises(UsageError, match="no token"):
        decoder.prefill([], cache)
    for token in (-1, 61, 10**6):
        with pytest.raises(IncompatibleError, match=f"token {token} is outside"):
            decoder.prefill([1, token, 2], cache)
        with pytest.raises(IncompatibleError, match=f"token {token} "):
            decoder.decode(token, cache)
    with pytest.raises(IncompatibleError, match=r"no linear layer model\.layers\.3"):
        decoder.prefill(IDS[:3], cache, strange)
    with pytest.raises(IncompatibleError, match=r"layers\.3"):
        decoder.decode(3, cache, strange)
    with pytest.raises(IncompatibleError, match="width 31"):
        decoder.prefill(IDS[:3], cache, soft_prompt=np.zeros((2, 31), np.float32))
    assert cache.length == 0
    decoder.prefill(IDS[:8], cache)
    with pytest.raises(BudgetError, match="8 of 8 are used"):
        decoder.decode(3, cache)
    assert cache.length == 8


def test_a_prompt_that_is_given_up_leaves_the_text_as_it_was(
    decoder: PlainDecoder, shared_oracle: ReferenceModel
) -> None:
    cache = make_cache(decoder.config)
    decoder.prefill(IDS[:5], cache)

    def stop(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        decoder.prefill(IDS[5:], cache, chunk=2, progress=stop)
    assert cache.length == 5
    again = torch.from_numpy(decoder.prefill(IDS[5:], cache).logits)
    assert_same_logits(again[None], shared_oracle.compute_logits(IDS)[-1:])


def test_a_text_whose_scores_fail_is_as_it_was(
    decoder: PlainDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_out(self: PlainDecoder, hidden: AnyArray, deltas: Deltas) -> AnyArray:
        raise MemoryError

    cache = make_cache(decoder.config)
    decoder.prefill(IDS[:5], cache)
    monkeypatch.setattr(PlainDecoder, "_compute_logits", run_out)
    with pytest.raises(MemoryError):
        decoder.prefill(IDS[5:], cache, chunk=2)
    assert cache.length == 5
    with pytest.raises(MemoryError):
        decoder.decode(IDS[5], cache)
    assert cache.length == 5


@pytest.mark.parametrize("module", ["lm_head", "model.layers.2.mlp.down_proj"])
@pytest.mark.parametrize("number", [np.inf, 3e38, np.nan])
def test_scores_that_are_no_numbers_give_no_warning(
    number: float, module: str, decoder: PlainDecoder
) -> None:
    out, inner = decoder.config.linear_shapes()[module]
    delta = LinearDelta(
        a=np.full((2, inner), number, np.float32), b=np.full((out, 2), number, np.float32)
    )
    cache, scores = make_cache(decoder.config), list[AnyArray]()
    first = decoder.prefill(IDS, cache, {module: delta}, scores=lambda _, rows: scores.append(rows))
    for logits in (first.logits, decoder.decode(1, cache, {module: delta}).logits, *scores):
        assert not np.isfinite(logits).any()


@pytest.mark.parametrize("chunk", [1, 2, 4, 5, 6, 100])
def test_a_soft_prompt_equals_its_embeddings_however_it_is_cut(
    chunk: int, decoder: PlainDecoder, shared_oracle: ReferenceModel
) -> None:
    soft = torch.randn(5, 32, generator=torch.Generator().manual_seed(1)) * 0.2
    with torch.inference_mode():
        tokens = shared_oracle.model.get_input_embeddings()(torch.tensor(IDS))
        together = torch.cat((soft, tokens))[None]
        theirs = shared_oracle.model(inputs_embeds=together, use_cache=False).logits[0, 5:]
    rows, cache = soft.numpy(), make_cache(decoder.config)
    before = rows.copy()
    first = decoder.prefill(IDS[:7], cache, soft_prompt=rows, chunk=chunk)
    assert cache.length == first.tokens == 12
    logits = [first.logits, *(decoder.decode(token, cache).logits for token in IDS[7:])]
    assert_same_logits(torch.from_numpy(np.stack(logits)), theirs[6:])
    assert np.array_equal(rows, before)


def test_every_position_is_scored(decoder: PlainDecoder, shared_oracle: ReferenceModel) -> None:
    theirs = shared_oracle.compute_logits(IDS).double().log_softmax(-1)
    for chunk in (1, 11, 512):
        scores = PromptLogprobs(IDS, top=2)
        last = decoder.prefill(IDS, make_cache(decoder.config), chunk=chunk, scores=scores.record)
        assert scores.is_complete
        for place in range(1, len(IDS)):
            expected = float(theirs[place - 1, IDS[place]])
            assert scores.logprob(place) == pytest.approx(expected, abs=1e-4)
        found = torch.from_numpy(last.logits)[None]
        assert_same_logits(found, shared_oracle.compute_logits(IDS)[-1:])


def test_the_time_of_each_part_is_told_and_changes_no_bit(decoder: PlainDecoder) -> None:
    unseen, times = compute_scores(decoder, IDS, prefill=9), LayerTimer()
    with decoder.time_layers(times):
        seen = compute_scores(decoder, IDS, prefill=9)
    assert torch.equal(seen, unseen)
    parts = [f"layers.{n}.{part}" for n in range(3) for part in ("attention", "mlp")]
    assert list(times.places) == [*parts, "head"]
    assert all(spent > 0 for spent in times.places.values())
    before = times.seconds
    compute_scores(decoder, IDS, prefill=9)
    assert times.seconds == before


def test_a_decoder_at_rest_holds_only_its_weights(shared_oracle: ReferenceModel) -> None:
    decoder = load_decoder(shared_oracle.directory)
    assert decoder.holds_only_weights
    first = compute_scores(decoder, IDS, prefill=9)
    assert not decoder.holds_only_weights
    decoder.free_buffers()
    assert decoder.holds_only_weights
    assert torch.equal(compute_scores(decoder, IDS, prefill=9), first)


def merge_deltas(model: ReferenceModel, deltas: Deltas) -> None:
    """Write deltas with all parts into the weights of the reference model."""
    biases = dict(model.model.named_parameters())
    for module, delta in deltas.items():
        a, b, u, d, e = (torch.from_numpy(part).double() for part in delta.tensors)
        weight = get_weight(model.model, module)
        with torch.no_grad():
            weight.copy_(weight.double() * u * d[:, None] + b @ a)
            if f"{module}.bias" in biases:
                biases[f"{module}.bias"].mul_(e)


def draw_deltas(config: ModelConfig, *, rank: int = 3) -> dict[str, Delta]:
    """A random change of every linear layer, with all parts."""
    generator = np.random.default_rng(1)

    def noise(*shape: int) -> AnyArray:
        return generator.standard_normal(shape).astype(np.float32) * np.float32(0.2)

    return {
        module: LinearDelta(
            a=noise(rank, shape[1]),
            b=noise(shape[0], rank),
            input_scale=1 + noise(shape[1]),
            output_scale=1 + noise(shape[0]),
            bias_scale=1 + noise(shape[0]),
        )
        for module, shape in config.linear_shapes().items()
    }


@pytest.mark.parametrize(
    ("arch", "config"),
    [
        ("qwen3", {"attention_bias": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen2", {}),
        ("mistral", {"sliding_window": 4}),
        ("mixtral", {}),
        ("qwen2_moe", {"decoder_sparse_step": 2}),
        ("qwen3_moe", {"norm_topk_prob": True}),
        ("olmoe", {"attention_bias": True}),
        ("dots1", {}),
    ],
    ids=str,
)
def test_deltas_reach_every_linear_layer(
    oracle: MakeReferenceModel, arch: str, config: dict[str, Any]
) -> None:
    model = oracle(arch, **config)
    decoder = load_decoder(model.directory)
    deltas, plain = draw_deltas(decoder.config), model.compute_logits(IDS)
    assert deltas.keys() == decoder.modules
    changed = compute_scores(decoder, IDS[:8], prefill=5, deltas=deltas)
    merge_deltas(model, deltas)
    assert_same_logits(changed, model.compute_logits(IDS[:8])[4:])
    assert_same_logits(compute_scores(decoder, IDS, prefill=9), plain[8:])


def test_a_delta_on_a_tied_head_leaves_the_embedding_alone(oracle: MakeReferenceModel) -> None:
    model = oracle("qwen3", tie_word_embeddings=True)
    decoder = load_decoder(model.directory)
    scale = np.linspace(0.5, 2, 61, dtype=np.float32)
    changed = compute_scores(
        decoder, IDS, prefill=9, deltas={"lm_head": LinearDelta(output_scale=scale)}
    )
    assert_same_logits(changed, model.compute_logits(IDS)[8:] * torch.from_numpy(scale))


def measure_peak(decoder: PlainDecoder, *, capacity: int, chunk: int, deltas: Deltas) -> int:
    """The most memory that one prompt and one further token have in use besides the cache."""
    cache = make_cache(decoder.config, capacity)
    ids = [n % 61 for n in range(capacity - 1)]
    tracemalloc.start()
    try:
        decoder.prefill(ids, cache, deltas, chunk=chunk)
        decoder.decode(1, cache, deltas)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("dtype", ["float32", "bf16"])
@pytest.mark.parametrize("arch", ["llama", "mistral", "mixtral", "qwen2_moe", "dots1"])
@pytest.mark.parametrize(("capacity", "chunk"), [(64, 64), (300, 16), (300, 300), (33, 512)])
def test_a_pass_needs_no_more_memory_than_it_says(
    oracle: MakeReferenceModel, arch: str, capacity: int, chunk: int, dtype: str
) -> None:
    window = {"sliding_window": 20} if arch == "mistral" else {}
    model = oracle(arch, max_position_embeddings=512, num_hidden_layers=2, **window)
    decoder = load_decoder(model.directory, dtype)
    for deltas, width in ((EMPTY_DELTAS, 0), (draw_deltas(decoder.config), 3)):
        promised = estimate_plain_pass_bytes(
            decoder.config, capacity, dtype=dtype, width=width, chunk=chunk
        )
        needed = measure_peak(decoder, capacity=capacity, chunk=chunk, deltas=deltas)
        decoder.free_buffers()
        assert needed <= promised


@pytest.mark.parametrize("heads", [2, 12])
def test_the_memory_of_a_long_prompt_is_known_in_advance(tmp_path: Path, heads: int) -> None:
    base = write_base(
        tmp_path,
        layers=2,
        heads=heads,
        kv_heads=2,
        head_dim=16,
        intermediate=600,
        max_position_embeddings=6000,
    )
    decoder = load_decoder(base)
    promised = estimate_plain_pass_bytes(decoder.config, 6000)
    needed = measure_peak(decoder, capacity=6000, chunk=512, deltas=EMPTY_DELTAS)
    assert needed <= promised <= 2 * needed
