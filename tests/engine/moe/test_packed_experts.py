"""Bases of routed experts on kernels: all experts in memory, or fewer, to the same bit."""

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch

from expertctl.engine.cpu.base_loader import load_packed_base
from expertctl.engine.cpu.decoder import DecodeRow, PackedDecoder
from expertctl.engine.cpu.decoder_program import build_decoder_program, estimate_program_bytes
from expertctl.engine.cpu.packed_base import make_expert_shape
from expertctl.engine.cpu.workspace import Workspace, choose_variant
from expertctl.engine.decoding import PREFILL_CHUNK
from expertctl.engine.kernels.packed_format import Scheme
from expertctl.engine.kernels.packed_matrix import pack_matrix, unpack_matrix
from expertctl.engine.kernels.thread_pool import ThreadPool
from expertctl.engine.kv.block_pool import PagedKVCache
from expertctl.engine.moe import expert_loader
from expertctl.engine.moe.expert_cache import EXACT_POLICY, ExpertCache, MissPolicy
from expertctl.engine.moe.expert_files import StoredExperts
from expertctl.engine.moe.expert_memory import ExpertMemory
from expertctl.engine.moe.layer_slots import LayerSlots
from expertctl.engine.torch.decoder import Decoder
from expertctl.engine.torch.weights import load_base_weights
from expertctl.errors import InvalidPackageError
from expertctl.package.base_tensors import read_base_tensors
from expertctl.package.model_config import EMBEDDING_TENSOR, HEAD_TENSOR, read_model_config
from tests.engine.conftest import MakeReferenceModel, ReferenceModel, run_decoder, stack_logits
from tests.engine.cpu.test_decoder import assert_exact, scores
from tests.engine.memory_measurement import count_fewest_allocations
from tests.engine.packing import pack_base
from tests.engine.reference_models import ROUTED_SHAPES

IDS = [3, 60, 0, 17, 17, 42, 8, 25, 31, 5, 59, 2, 44, 13, 7, 28, 50, 1, 9, 33, 12, 4, 57, 21]
BLOCKS: dict[str, Any] = {"head_dim": 16, "hidden_size": 48, "intermediate_size": 80}
"""Sizes that fill the blocks of kernels, of whatever is dense."""
SIZES: dict[str, dict[str, Any]] = {
    "mixtral": {"intermediate_size": 32},
    "qwen2_moe": {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64},
    "qwen3_moe": {"moe_intermediate_size": 48},
    "olmoe": {"intermediate_size": 32, "hidden_size": 64, "num_attention_heads": 4},
    "dots1": {"moe_intermediate_size": 16},
}


def fitting(arch: str, config: dict[str, Any]) -> dict[str, Any]:
    """A configuration of the same kind in sizes that fill blocks."""
    return {**BLOCKS, **config, **SIZES[arch], "head_dim": 16}


@pytest.mark.parametrize(("arch", "config"), ROUTED_SHAPES)
def test_scores_are_those_of_transformers(
    arch: str, config: dict[str, Any], oracle: MakeReferenceModel, crew: ThreadPool
) -> None:
    reference = oracle(arch, **fitting(arch, config))
    assert_exact(scores(whole(reference, crew), IDS, prefill=9), reference, IDS)


@pytest.mark.parametrize(
    ("scheme", "most"),
    [(Scheme.BFLOAT16, 0.01), (Scheme.INT8, 0.03), (Scheme.INT5, 0.03), (Scheme.INT4, 0.03)],
)
def test_fewer_bits_are_those_of_the_weights_and_of_what_meets_them(
    scheme: Scheme, most: float, oracle: MakeReferenceModel, crew: ThreadPool
) -> None:
    """Beside float32 on the rounded weights, only the rounding of activations is left.

    A token that rounding sends to another expert would differ by far more: in this base none is.
    """
    reference = oracle("qwen3_moe", seed=1, **fitting("qwen3_moe", {}), num_experts_per_tok=4)
    config = read_model_config(reference.directory)
    weights = load_base_weights(reference.directory, config)
    outer = (EMBEDDING_TENSOR, HEAD_TENSOR)
    schemes = {name: scheme.embedding if name in outer else scheme for name in weights.tensors}
    rounded = {
        name: torch.from_numpy(unpack_matrix(pack_matrix(tensor.numpy(), schemes[name])))
        if tensor.ndim == 2 and "mlp.gate." not in name
        else tensor
        for name, tensor in weights.tensors.items()
    }
    theirs = run_decoder(Decoder(config, replace(weights, tensors=rounded)), IDS, prefill=9)
    ours = scores(whole(reference, crew, scheme), IDS, prefill=9)
    assert float((ours - theirs).norm() / theirs.norm()) <= most


def test_neither_workers_nor_stretches_nor_who_else_is_read_change_a_bit(
    olmoe: ReferenceModel, crew: ThreadPool
) -> None:
    together = scores(whole(olmoe, crew), IDS, prefill=20)
    for chunk in (1, 7, 16):
        assert torch.equal(scores(whole(olmoe, crew, chunk=chunk), IDS, prefill=20), together)
    with closing(ThreadPool(1)) as alone:
        assert torch.equal(scores(whole(olmoe, alone), IDS, prefill=20), together)
    decoder = whole(olmoe, crew)
    texts = [IDS[:5], IDS[3:17], IDS[1:2]]
    caches = [PagedKVCache(decoder.config, 40) for _ in texts]
    for text, cache in zip(texts, caches, strict=True):
        decoder.prefill(text, cache)
    rows = decoder.step([DecodeRow(7, cache) for cache in caches])
    apart = [scores(decoder, [*text, 7], prefill=len(text))[-1] for text in texts]
    assert np.array_equal(rows, stack_logits(apart))


@pytest.mark.parametrize("scheme", [Scheme.FLOAT32, Scheme.BFLOAT16, Scheme.INT8, Scheme.INT4])
@pytest.mark.parametrize("slots", [0, 2, 5])
def test_fewer_experts_in_memory_change_no_bit(
    slots: int, scheme: Scheme, olmoe: ReferenceModel, crew: ThreadPool
) -> None:
    expected = scores(whole(olmoe, crew, scheme), IDS, prefill=9)
    with cached(olmoe, crew, scheme, slots=slots) as (decoder, cache):
        for _ in range(3):
            assert torch.equal(scores(decoder, IDS, prefill=9), expected)
            cache.check_integrity()
        assert cache.activity().loads > 0
        assert cache.nbytes < decoder.config.experts.count * 3 * cache.shape.nbytes


@pytest.mark.parametrize("slots", [None, 2])
def test_a_prompt_asks_the_last_layer_for_its_last_token_alone(
    slots: int | None, olmoe: ReferenceModel, crew: ThreadPool
) -> None:
    """Of each stretch: nobody reads what that layer would make of the others."""
    with ExitStack() as stack:
        if slots is None:
            decoder = whole(olmoe, crew, chunk=7)
        else:
            decoder, cache = stack.enter_context(cached(olmoe, crew, slots=slots, chunk=7))
        owner: Any = decoder._experts
        decoder.prefill(IDS[:20], PagedKVCache(decoder.config, 40))
        counted = [
            layer.hits + layer.misses
            for layer in owner.counters.observed_snapshot().layers.values()
        ]
        routed = decoder.config.experts
        assert routed is not None
        assert counted == [20 * routed.used] * (len(routed.layers) - 1) + [3 * routed.used]
        if slots is not None:
            cache.check_integrity()


@pytest.mark.parametrize("scheme", [Scheme.FLOAT32, Scheme.INT8])
@pytest.mark.parametrize("prefill", [1, 20])
def test_those_who_are_there_are_computed_while_others_are_read(
    prefill: int,
    scheme: Scheme,
    olmoe: ReferenceModel,
    crew: ThreadPool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []
    expected = scores(whole(olmoe, crew, scheme), IDS, prefill=prefill)
    policy = MissPolicy(prefetches=False)
    monkeypatch.setattr(expert_loader, "_MIN_WAVE", 1)
    with cached(olmoe, crew, scheme, slots=3, policy=policy) as (decoder, cache):
        scores(decoder, IDS, prefill=prefill)
        ask, wait, run = cache.request, cache.wait_for_some, crew.run

        def asked(*arguments: Any, **named: Any) -> bool:
            waits = ask(*arguments, **named)
            events.append("waits" if waits else "has all")
            return waits

        def came(more: bool) -> bool:
            events.append("some came" if more else "came")
            return more

        turns = count()

        def read_slowly(layer: int, expert: int, block: Any, **more: Any) -> int:
            Event().wait(0.005 + 0.03 * (next(turns) % 3))  # nobody comes with another
            return read(layer, expert, block, **more)

        reader = cache._loader._reader
        read = reader.read
        monkeypatch.setattr(reader, "read", read_slowly)
        monkeypatch.setattr(cache, "request", asked)
        monkeypatch.setattr(cache, "wait_for_some", lambda: came(wait()))
        monkeypatch.setattr(crew, "run", lambda *a, **k: (events.append("ran"), run(*a, **k)))
        for _ in range(3):
            assert torch.equal(scores(decoder, IDS, prefill=prefill), expected)
            cache.check_integrity()
    letters = {"waits": "w", "has all": "h", "some came": "s", "came": "c", "ran": "r"}
    told = "".join(letters[event] for event in events)
    assert "wrcr" in told, "between asking and waiting somebody computes"
    assert prefill == 1 or "wrsr" in told, "and while others are to come those who came"
    assert "hr" in told


def test_slots_go_to_those_who_are_asked_for(olmoe: ReferenceModel, crew: ThreadPool) -> None:
    with cached(olmoe, crew, slots=3) as (decoder, cache):
        scores(decoder, IDS, prefill=1)
        before = [set(slots.resident_ids) for slots in cache.slots]
        for _ in range(20):
            scores(decoder, [5] * 30, prefill=1)
        after = [set(slots.resident_ids) for slots in cache.slots]
        assert before != after
        assert cache.counters.observed_snapshot().summary.swaps > 0
        cache.check_integrity()


def test_experts_are_left_out_where_that_was_asked_for(
    olmoe: ReferenceModel, crew: ThreadPool
) -> None:
    """With no expert in memory, and none brought, only attention is left."""
    policy = MissPolicy(skips=True, prefetches=False)
    with cached(olmoe, crew, slots=0, policy=policy) as (decoder, _):
        logits = decoder.prefill(IDS[:1], PagedKVCache(decoder.config, 40)).logits
    config = read_model_config(olmoe.directory)
    weights = load_base_weights(olmoe.directory, config)
    zeroed = {
        name: torch.zeros_like(tensor) if ".experts." in name else tensor
        for name, tensor in weights.tensors.items()
    }
    theirs = run_decoder(Decoder(config, replace(weights, tensors=zeroed)), IDS[:1], prefill=1)
    assert np.abs(logits - theirs[0].numpy()).max() <= 1e-5


def test_a_cap_on_what_is_left_out_has_the_rest_brought(
    olmoe: ReferenceModel, crew: ThreadPool
) -> None:
    expected = scores(whole(olmoe, crew), IDS, prefill=9)
    with cached(olmoe, crew, slots=0, policy=MissPolicy(skips=True, cap=0.0)) as (decoder, _):
        assert torch.equal(scores(decoder, IDS, prefill=9), expected)


def test_a_file_that_cannot_be_read_ends_the_text_and_the_next_goes_on(
    olmoe: ReferenceModel, crew: ThreadPool
) -> None:
    expected = scores(whole(olmoe, crew), IDS, prefill=9)
    [file] = olmoe.directory.glob("*.safetensors")
    hidden = file.with_suffix(".hidden")
    with cached(olmoe, crew, slots=2) as (decoder, cache):
        file.rename(hidden)
        with pytest.raises(Exception, match="not a readable file of weights"):
            scores(decoder, IDS, prefill=9)
        hidden.rename(file)
        cache.check_integrity()
        assert torch.equal(scores(decoder, IDS, prefill=9), expected)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_file_of_other_weights_is_no_part_of_a_base_in_memory(
    in_place: bool, olmoe: ReferenceModel, crew: ThreadPool
) -> None:
    """Somebody updates the model's folder; those who are in memory are of the old one."""
    [file] = olmoe.directory.glob("*.safetensors")
    expected, old = scores(whole(olmoe, crew), IDS, prefill=9), file.read_bytes()
    new = old[: len(old) // 2] + bytes(len(old) - len(old) // 2)
    try:
        with cached(olmoe, crew, slots=2) as (decoder, cache):
            if in_place:
                file.write_bytes(new)
            else:
                other = file.with_suffix(".new")
                other.write_bytes(new)
                other.rename(file)
            with pytest.raises(InvalidPackageError, match="load the base again"):
                scores(decoder, IDS, prefill=9)
            cache.check_integrity()
    finally:
        file.write_bytes(old)
    with cached(olmoe, crew, slots=2) as (decoder, _):
        assert torch.equal(scores(decoder, IDS, prefill=9), expected)


def test_an_expert_is_read_without_the_others(olmoe: ReferenceModel) -> None:
    config = read_model_config(olmoe.directory)
    base = load_packed_base(olmoe.directory, config, Scheme.BFLOAT16)
    reader = StoredExperts(read_base_tensors(olmoe.directory, config), config, Scheme.BFLOAT16)
    for key, block in base.experts.items():
        alone = np.zeros_like(block)
        assert reader.read(*key, alone) == 3 * 32 * 64 * 4, "as stored, in float32"
        assert np.array_equal(alone, block)


@pytest.mark.parametrize("arch", SIZES)
def test_programs_and_rooms_take_no_more_than_is_said(
    arch: str, oracle: MakeReferenceModel, crew: ThreadPool
) -> None:
    reference = oracle(arch, **fitting(arch, {}))
    with cached(reference, crew, Scheme.INT8, slots=2) as (decoder, _):
        config = decoder.config
        kinds = choose_variant(single_sequence=False, numbers=Scheme.FLOAT16, plans=[])
        make_room = partial(Workspace, config, Scheme.INT8, tokens=64, rows=4)
        room = make_room()
        assert count_fewest_allocations(make_room).python_bytes <= 1.1 * room.nbytes
        build = partial(build_decoder_program, decoder._base, room, kinds, decoder._experts)
        held = build()  # kernels are there from now on
        found = count_fewest_allocations(build)
        assert len(held.layers) == len(config.experts.layers)  # type: ignore[union-attr]
        assert found.python_bytes <= estimate_program_bytes(config, schemes=0, scales=False)


@pytest.fixture
def olmoe(oracle: MakeReferenceModel) -> ReferenceModel:
    return oracle("olmoe", **fitting("olmoe", {}))


def whole(
    oracle: ReferenceModel, crew: ThreadPool, scheme: Scheme = Scheme.FLOAT32, **options: Any
) -> PackedDecoder:
    config = read_model_config(oracle.directory)
    base = pack_base(config, load_base_weights(oracle.directory, config), scheme)
    return PackedDecoder(base, crew, **options)


@contextmanager
def cached(
    oracle: ReferenceModel,
    crew: ThreadPool,
    scheme: Scheme = Scheme.FLOAT32,
    *,
    slots: int,
    policy: MissPolicy = EXACT_POLICY,
    chunk: int = PREFILL_CHUNK,
) -> Iterator[tuple[PackedDecoder, ExpertCache]]:
    """A decoder whose layers have so few slots, and as many blocks besides as it must have."""
    config = read_model_config(oracle.directory)
    routed = config.experts
    assert routed is not None
    trunk = load_packed_base(oracle.directory, config, scheme, experts=False)
    layers = len(routed.layers)
    memory = ExpertMemory(
        make_expert_shape(config, scheme),
        layers=layers,
        experts=routed.count,
        blocks=layers * slots + routed.count - slots,
    )
    cache = ExpertCache(
        memory,
        StoredExperts(read_base_tensors(oracle.directory, config), config, scheme),
        layer_numbers=routed.layers,
        slots=[LayerSlots(experts=routed.count, capacity=slots) for _ in range(layers)],
        policy=policy,
    )
    with closing(cache):
        yield PackedDecoder(trunk, crew, experts=cache, chunk=chunk), cache
