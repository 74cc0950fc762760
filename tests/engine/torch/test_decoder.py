"""The decoder against transformers in float32, and against itself in every order of calls."""

import json
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from expertctl.engine.adapters.steps import LinearDelta
from expertctl.engine.decoding import LayerTimer
from expertctl.engine.torch.decoder import Decoder, estimate_pass_bytes
from expertctl.engine.torch.functional import TorchDelta
from expertctl.engine.torch.sequence_cache import KVCache
from expertctl.engine.torch.weights import load_base_weights
from expertctl.errors import BudgetError, IncompatibleError, UsageError
from expertctl.package.model_config import read_model_config
from tests.engine.conftest import (
    TOLERANCE,
    MakeReferenceModel,
    ReferenceModel,
    assert_same_logits,
    build_reference_model,
    run_decoder,
    stack_logits,
)
from tests.engine.reference_models import LLAMA3, TORCH_SHAPES, get_weight
from tests.engine.reference_models import ROUTED_CLASSES as ROUTED_CLASSES
from tests.factories import write_base

VECTORS = json.loads(
    Path(__file__).parents[2].joinpath("vectors", "runtime.json").read_text(encoding="utf-8")
)
KV = VECTORS["kv_equivalence"]
IDS = [3, 60, 0, 17, 17, 42, 8, 25, 31, 5, 59, 2, 44, 13, 7, 28]


@pytest.mark.parametrize(("arch", "config"), TORCH_SHAPES, ids=str)
def test_logits_equal_those_of_transformers(
    oracle: MakeReferenceModel, arch: str, config: dict[str, Any]
) -> None:
    model = oracle(arch, **config)
    ours = run_decoder(model.load_decoder(), IDS, prefill=9)
    assert_same_logits(ours, model.compute_logits(IDS)[8:])


@pytest.mark.parametrize(("arch", "config"), TORCH_SHAPES, ids=str)
def test_prefill_in_chunks_equals_prefill_in_one_go(
    oracle: MakeReferenceModel, arch: str, config: dict[str, Any]
) -> None:
    decoder = oracle(arch, **config).load_decoder()
    whole = run_decoder(decoder, IDS, prefill=12)
    for chunk in (1, 5, 7):
        assert_same_logits(run_decoder(decoder, IDS, prefill=12, chunk=chunk), whole)


def test_the_old_spelling_of_rope_is_read_as_the_new_one(oracle: MakeReferenceModel) -> None:
    model = oracle("llama", rope_parameters={**LLAMA3, "rope_theta": 321.0})
    path = model.directory / "config.json"
    config = json.loads(path.read_text())
    assert config["rope_parameters"]["rope_theta"] == 321.0
    old = config.pop("rope_parameters")
    config["rope_theta"] = old.pop("rope_theta")
    config["rope_scaling"] = {"type": old.pop("rope_type"), **old}
    path.write_text(json.dumps(config))
    assert_same_logits(
        run_decoder(model.load_decoder(), IDS, prefill=9), model.compute_logits(IDS)[8:]
    )


@pytest.mark.parametrize("arch", ["llama", "mistral", "qwen2", "qwen3", *ROUTED_CLASSES])
def test_prefill_and_decode_equal_one_full_forward(oracle: MakeReferenceModel, arch: str) -> None:
    model = oracle(arch, num_attention_heads=KV["q_heads"], num_key_value_heads=KV["kv_heads"])
    decoder, ids = model.load_decoder(), IDS[: KV["prefill"] + KV["decode"]]
    full = model.compute_logits(ids)[KV["prefill"] - 1 :]
    for capacity in (len(ids), len(ids) + 1, 61):
        split = run_decoder(decoder, ids, prefill=KV["prefill"], capacity=capacity)
        assert float((split - full).abs().max()) <= KV["tolerance_abs"]
        assert split.argmax(-1).tolist() == full.argmax(-1).tolist()


def test_two_sessions_may_take_turns(shared_oracle: ReferenceModel) -> None:
    decoder = shared_oracle.load_decoder()
    texts = (IDS[:8], list(reversed(IDS))[:9])
    caches = (KVCache(decoder.config, 11), KVCache(decoder.config, 30))
    rows: tuple[list[torch.Tensor], ...] = ([], [])
    for session in (0, 1):
        rows[session].append(decoder.prefill(texts[session][:5], caches[session]).logits)
    for step in range(5, 9):
        for session in (0, 1):
            if step < len(texts[session]):
                rows[session].append(decoder.decode(texts[session][step], caches[session]).logits)
    for text, got in zip(texts, rows, strict=True):
        assert_same_logits(stack_logits(got), shared_oracle.compute_logits(text)[4:])


def test_a_cache_serves_again_after_a_reset(shared_oracle: ReferenceModel) -> None:
    decoder = shared_oracle.load_decoder()
    cache = KVCache(decoder.config, 23)
    for text in (IDS, IDS[::-1][:7], IDS[3:11]):
        cache.reset()
        first = decoder.prefill(text[:5], cache).logits
        rest = [decoder.decode(token, cache).logits for token in text[5:]]
        assert_same_logits(stack_logits([first, *rest]), shared_oracle.compute_logits(text)[4:])


def test_a_cache_taken_from_a_pool_holds_nothing_of_its_last_user(
    shared_oracle: ReferenceModel,
) -> None:
    decoder = shared_oracle.load_decoder()
    pool = [KVCache(decoder.config, 30)]
    for text in (IDS, IDS[4:12]):
        cache = pool.pop()
        cache.reset()
        got = decoder.prefill(text, cache).logits
        assert_same_logits(got[None], shared_oracle.compute_logits(text)[-1:])
        pool.append(cache)


def test_rows_beyond_the_length_are_never_read(shared_oracle: ReferenceModel) -> None:
    decoder = shared_oracle.load_decoder()
    cache = KVCache(decoder.config, 30)
    cache._keys.fill_(torch.nan)
    cache._values.fill_(torch.nan)
    rows = [decoder.prefill(IDS[:5], cache, chunk=2).logits]
    rows += [decoder.decode(token, cache).logits for token in IDS[5:8]]
    assert_same_logits(stack_logits(rows), shared_oracle.compute_logits(IDS[:8])[4:])
    cache.check_integrity()


def test_results_say_what_was_done(shared_oracle: ReferenceModel) -> None:
    decoder = shared_oracle.load_decoder()
    cache = KVCache(decoder.config, 30)
    seen: list[int] = []
    prefill = decoder.prefill(IDS[:7], cache, chunk=3, progress=seen.append)
    decode = decoder.decode(1, cache)
    assert (prefill.tokens, decode.position, cache.length) == (7, 7, 8)
    assert seen == [3, 3, 1]
    assert prefill.ms > 0
    assert decode.ms > 0
    assert prefill.logits.dtype == decode.logits.dtype == np.float32


def test_the_time_of_each_part_is_told_where_it_is_asked_for(shared_oracle: ReferenceModel) -> None:
    decoder = shared_oracle.load_decoder()
    plain, looked_at = (KVCache(decoder.config, 8) for _ in range(2))
    unseen = decoder.prefill([3, 5, 7], plain), decoder.decode(4, plain)
    times = LayerTimer()
    with decoder.time_layers(times):
        seen = decoder.prefill([3, 5, 7], looked_at), decoder.decode(4, looked_at)
    wall = (seen[0].ms + seen[1].ms) / 1e3
    parts = [f"layers.{n}.{part}" for n in range(3) for part in ("attention", "mlp")]
    assert list(times.places) == [*parts, "head"]
    assert all(spent > 0 for spent in times.places.values())
    assert times.seconds < wall
    assert [a.logits.tolist() for a in seen] == [b.logits.tolist() for b in unseen]
    before = times.seconds
    decoder.decode(6, looked_at)
    assert times.seconds == before


def test_a_text_that_does_not_fit_is_refused_and_changes_nothing(
    shared_oracle: ReferenceModel,
) -> None:
    decoder = shared_oracle.load_decoder()
    cache = KVCache(decoder.config, 8)
    with pytest.raises(BudgetError, match="9 more tokens do not fit"):
        decoder.prefill(IDS[:9], cache, chunk=4)
    assert cache.length == 0
    decoder.prefill(IDS[:8], cache)
    with pytest.raises(BudgetError, match="8 of 8 are used"):
        decoder.decode(1, cache)
    assert cache.length == 8


def test_an_interrupted_prefill_leaves_the_cache_as_it_was(shared_oracle: ReferenceModel) -> None:
    decoder = shared_oracle.load_decoder()
    cache = KVCache(decoder.config, 30)
    decoder.prefill(IDS[:3], cache)

    def stop(_: int) -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        decoder.prefill(IDS[3:9], cache, chunk=2, progress=stop)
    assert cache.length == 3
    assert_same_logits(
        decoder.prefill(IDS[3:9], cache).logits[None], shared_oracle.compute_logits(IDS[:9])[-1:]
    )


def test_an_empty_prompt_is_refused(shared_oracle: ReferenceModel) -> None:
    decoder = shared_oracle.load_decoder()
    with pytest.raises(UsageError, match="no token"):
        decoder.prefill([], KVCache(decoder.config, 8))


@pytest.mark.parametrize("token", [-1, 61, 10**6])
def test_a_token_of_another_vocabulary_is_refused(
    shared_oracle: ReferenceModel, token: int
) -> None:
    decoder = shared_oracle.load_decoder()
    with pytest.raises(
        IncompatibleError, match=f"token {token} is outside the vocabulary of the base, 61"
    ):
        decoder.prefill([1, token, 2], KVCache(decoder.config, 8))
    with pytest.raises(IncompatibleError, match=f"token {token} "):
        decoder.decode(token, KVCache(decoder.config, 8))


def test_a_delta_for_no_module_is_refused(shared_oracle: ReferenceModel) -> None:
    decoder = shared_oracle.load_decoder()
    cache = KVCache(decoder.config, 8)
    for module in ("model.layers.3.self_attn.q_proj", "base_model.model.lm_head", "q_proj"):
        with pytest.raises(IncompatibleError, match=f"no linear layer {module}"):
            decoder.prefill([1], cache, {module: LinearDelta()})
        with pytest.raises(IncompatibleError, match=module):
            decoder.decode(1, cache, {module: LinearDelta()})


def merged(oracle: ReferenceModel, deltas: dict[str, TorchDelta]) -> None:
    """Write deltas of low rank, input and output scale into the oracle's own weights."""
    biases = dict(oracle.model.named_parameters())
    with torch.no_grad():
        for module, delta in deltas.items():
            stored = get_weight(oracle.model, module)
            assert delta.a is not None
            assert delta.b is not None
            weight = stored.double()
            if delta.input_scale is not None:
                weight = weight * delta.input_scale
            if delta.output_scale is not None:
                weight = weight * delta.output_scale[:, None]
            stored.copy_(weight + delta.b.double() @ delta.a.double())
            if delta.bias_scale is not None and f"{module}.bias" in biases:
                biases[f"{module}.bias"].mul_(delta.bias_scale)


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
    decoder = model.load_decoder()
    generator = torch.Generator().manual_seed(1)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.2

    deltas = {
        module: LinearDelta(
            a=noise(3, shape[1]),
            b=noise(shape[0], 3),
            input_scale=1 + noise(shape[1]),
            output_scale=1 + noise(shape[0]),
            bias_scale=1 + noise(shape[0]),
        )
        for module, shape in decoder.config.linear_shapes().items()
    }
    assert deltas.keys() == decoder.modules
    cache = KVCache(decoder.config, 20)
    plain = model.compute_logits(IDS)
    rows = [decoder.prefill(IDS[:5], cache, deltas).logits]
    rows += [decoder.decode(token, cache, deltas).logits for token in IDS[5:8]]
    merged(model, deltas)
    assert_same_logits(stack_logits(rows), model.compute_logits(IDS[:8])[4:])
    assert_same_logits(run_decoder(decoder, IDS, prefill=9), plain[8:])


def test_a_delta_on_a_tied_head_leaves_the_embedding_alone(oracle: MakeReferenceModel) -> None:
    model = oracle("qwen3", tie_word_embeddings=True)
    decoder = model.load_decoder()
    delta = LinearDelta(a=torch.full((1, 32), 0.1), b=torch.linspace(-1, 1, 61)[:, None])
    hidden = torch.zeros(0)

    def keep(_module: object, args: tuple[torch.Tensor, ...], _out: object) -> None:
        nonlocal hidden
        hidden = args[0][0, -1]

    model.model.lm_head.register_forward_hook(keep)
    plain = model.compute_logits(IDS[:6])[-1]
    got = decoder.prefill(IDS[:6], KVCache(decoder.config, 8), {"lm_head": delta}).logits
    assert delta.a is not None
    assert delta.b is not None
    assert_same_logits(got[None], (plain + delta.b @ (delta.a @ hidden))[None])


def test_bfloat16_weights_come_close(shared_oracle: ReferenceModel) -> None:
    decoder = shared_oracle.load_decoder(torch.bfloat16)
    ours, theirs = run_decoder(decoder, IDS, prefill=9), shared_oracle.compute_logits(IDS)[8:]
    assert ours.dtype == torch.float32
    assert float((ours - theirs).norm() / theirs.norm()) < 0.03


def test_base_weights_are_not_changed_by_use(shared_oracle: ReferenceModel) -> None:
    config = read_model_config(shared_oracle.directory)
    weights = load_base_weights(shared_oracle.directory, config)
    before = {name: tensor.clone() for name, tensor in weights.tensors.items()}
    delta = {"lm_head": LinearDelta(output_scale=torch.full((61,), 2.0))}
    Decoder(config, weights).prefill(IDS, KVCache(config, 20), delta)
    assert all(torch.equal(before[name], tensor) for name, tensor in weights.tensors.items())


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
    sliding = {
        "mistral": {"sliding_window": window},
        "qwen2": {"use_sliding_window": window is not None, "sliding_window": window},
        "qwen3": {"use_sliding_window": window is not None, "sliding_window": window},
    }
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
    ours = run_decoder(model.load_decoder(), IDS, prefill=prefill, chunk=chunk)
    theirs = model.compute_logits(IDS)[prefill - 1 :]
    model.model.double()
    rounding = float((theirs - model.compute_logits(IDS)[prefill - 1 :]).abs().max())
    scale = max(1.0, float(theirs.abs().max()))
    # Some of these models magnify rounding: there even transformers is farther than that from
    # its own answer in float64.
    assert float((ours - theirs).abs().max()) <= max(TOLERANCE * scale, 4 * rounding)


def peak_bytes(decoder: Decoder, *, capacity: int, chunk: int) -> int:
    """The most memory that one prompt and one further token have in use besides the cache."""
    cache = KVCache(decoder.config, capacity)
    ids = [n % 61 for n in range(capacity - 1)]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        decoder.prefill(ids, cache, chunk=chunk)
        decoder.decode(1, cache)
    events = profiler.profiler.kineto_results.events()
    changes = [event.nbytes() for event in events if event.name() == "[memory]"]
    return max(accumulate(changes))


@pytest.mark.parametrize("arch", ["llama", "mistral", "mixtral", "qwen2_moe", "dots1"])
@pytest.mark.parametrize(("capacity", "chunk"), [(64, 64), (300, 16), (300, 300), (33, 512)])
def test_a_pass_needs_no_more_memory_than_it_says(
    oracle: MakeReferenceModel, arch: str, capacity: int, chunk: int
) -> None:
    window = {"sliding_window": 20} if arch == "mistral" else {}
    model = oracle(arch, max_position_embeddings=512, num_hidden_layers=2, **window)
    promised = estimate_pass_bytes(model.load_decoder().config, capacity, chunk=chunk)
    needed = peak_bytes(model.load_decoder(), capacity=capacity, chunk=chunk)
    assert needed <= promised <= 8 * needed


def test_the_masks_of_a_long_prompt_are_counted(tmp_path: Path) -> None:
    base = write_base(
        tmp_path, layers=2, heads=2, kv_heads=2, head_dim=16, max_position_embeddings=16384
    )
    decoder = Decoder(read_model_config(base), load_base_weights(base, read_model_config(base)))
    promised = estimate_pass_bytes(decoder.config, 16384)
    needed = peak_bytes(decoder, capacity=16384, chunk=512)
    assert needed <= promised <= 2 * needed


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_device_gives_the_same_scores(shared_oracle: ReferenceModel) -> None:
    config = read_model_config(shared_oracle.directory)
    decoder = Decoder(config, load_base_weights(shared_oracle.directory, config, device="cuda"))
    cache = KVCache(config, 30, device="cuda")
    rows = [decoder.prefill(IDS[:9], cache, chunk=4).logits]
    rows += [decoder.decode(token, cache).logits for token in IDS[9:]]
    difference = stack_logits(rows) - shared_oracle.compute_logits(IDS)[8:]
    assert float(difference.abs().max()) <= 1e-4


def test_positions_are_rotated_right_beyond_the_first_table(oracle: MakeReferenceModel) -> None:
    model = oracle("llama", num_hidden_layers=1, max_position_embeddings=300)
    ids = [(7 * n) % 61 for n in range(260)]
    ours = run_decoder(model.load_decoder(), ids, prefill=250, capacity=280, chunk=100)
    assert_same_logits(ours, model.compute_logits(ids)[249:])
