"""Layers with a gated DeltaNet in numpy: long prompts; states that are kept, shared, rewound."""

import tracemalloc
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from expertctl.digest import Digest
from expertctl.engine.adapters.compile import WeightedAdapter, fold_plan
from expertctl.engine.arrays import AnyArray
from expertctl.engine.backend import LoadConfig
from expertctl.engine.cpu.plain_backend import PlainBackend
from expertctl.engine.cpu.plain_decoder import PlainDecoder
from expertctl.engine.cpu.plain_layers import estimate_plain_pass_bytes
from expertctl.engine.cpu.plain_weights import load_plain_weights
from expertctl.engine.kv.block_pool import (
    ROW_PAGES,
    BlockPool,
    PagedKVCache,
    count_pages,
    estimate_pages_bytes,
)
from expertctl.engine.kv.kv_cache import KVRequest
from expertctl.engine.kv.recurrent_state import choose_interval, estimate_state_bytes
from expertctl.engine.load_plan import choose_backend
from expertctl.engine.memory.adapter_cache import AdapterCache
from expertctl.engine.memory.budget import MemoryBudget
from expertctl.engine_config import EngineConfig
from expertctl.errors import BudgetError, CancelledError, IncompatibleError, InvalidPackageError
from expertctl.package.base_model import read_base_headers
from expertctl.package.base_tensors import (
    find_base_name,
    list_unread_parts,
    read_base_tensors,
)
from expertctl.package.model_config import parse_model_config, read_model_config
from tests.engine.conftest import assert_same_logits
from tests.engine.cpu.test_families import load_decoder
from tests.engine.family_models import (
    DELTA_NET,
    build_family_model,
    save_family_adapter,
    save_with_images,
)
from tests.engine.package_fixtures import load_adapters

PLAN = Digest("sha256:" + "0" * 64)
CONFIG = {
    **DELTA_NET,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "max_position_embeddings": 1024,
}
TEXT = [(n * n + 7 * n) % 61 for n in range(300)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[PlainDecoder, Any]:
    directory = tmp_path_factory.mktemp("base")
    model = build_family_model(directory, "qwen3_5_text", **CONFIG)
    return load_decoder(directory), model


def make_cache(decoder: PlainDecoder, capacity: int = 320) -> PagedKVCache:
    return PagedKVCache(decoder.config, capacity, layout=ROW_PAGES)


def read(decoder: PlainDecoder, ids: Sequence[int]) -> AnyArray:
    return decoder.prefill(ids, make_cache(decoder)).logits


class Pool:
    """A pool with its memory; every request is one prompt and some tokens that follow it."""

    def __init__(self, decoder: PlainDecoder, *, limit: int = 1 << 26) -> None:
        self.decoder, self.budget = decoder, MemoryBudget(limit)
        tiers = AdapterCache(ram=self.budget, device=self.budget)
        self.blocks = BlockPool(tiers, layout=ROW_PAGES)

    def make_request(self, ids: Sequence[int], *, key: str = "chat", answer: int = 0) -> KVRequest:
        return KVRequest(
            cache_key=key,
            identity=PLAN,
            config=self.decoder.config,
            ids=tuple(ids),
            virtual_tokens=0,
            capacity=len(ids) + answer,
        )

    def run(self, ids: Sequence[int], answer: Sequence[int] = ()) -> tuple[int, AnyArray]:
        """Return the number of tokens that were not read again, and the logits of the rest."""
        request = self.make_request(ids, answer=len(answer))
        with self.blocks.allocate(request) as loan:
            self.blocks.check_integrity()
            rows = [self.decoder.prefill(ids[loan.reused :], loan.cache).logits]
            rows += [self.decoder.decode(token, loan.cache).logits for token in answer]
            loan.cache.check_integrity()
            loan.complete((*ids, *answer))
            reused = loan.reused
        self.blocks.check_integrity()
        self.blocks.check_idle()
        assert self.budget.used == self.blocks.nbytes
        return reused, np.stack(rows)


@pytest.mark.parametrize("chunk", [512, 128, 64, 50, 7])
@pytest.mark.parametrize("prompt", [128, 193, 299])
def test_long_prompts_equal_one_pass_of_transformers(
    base: tuple[PlainDecoder, Any], prompt: int, chunk: int
) -> None:
    decoder, model = base
    with torch.inference_mode():
        theirs = model(torch.tensor([TEXT]), use_cache=False).logits[0].numpy()
    cache, seen = make_cache(decoder), dict[int, AnyArray]()

    def record(first: int, logits: AnyArray) -> None:
        seen.update((first + n, row) for n, row in enumerate(logits))

    rows = [decoder.prefill(TEXT[:prompt], cache, chunk=chunk, scores=record).logits]
    rows += [decoder.decode(token, cache).logits for token in TEXT[prompt : prompt + 4]]
    cache.check_integrity()
    assert_same_logits(np.stack([seen[n] for n in range(prompt)]), theirs[:prompt], relative=True)
    assert_same_logits(np.stack(rows), theirs[prompt - 1 : prompt + 4][: len(rows)], relative=True)


def test_sequences_that_take_turns_do_not_mix(base: tuple[PlainDecoder, Any]) -> None:
    decoder, _ = base
    texts = [TEXT[:40], TEXT[5:90], TEXT[100:103]]
    caches = [make_cache(decoder) for _ in texts]
    for begin in range(0, 85, 9):
        for ids, cache in zip(texts, caches, strict=True):
            if part := ids[begin : begin + 9]:
                last = decoder.prefill(part, cache).logits
                if begin + 9 >= len(ids):
                    assert_same_logits(last, read(decoder, ids))


def test_a_failed_pass_changes_no_state(base: tuple[PlainDecoder, Any]) -> None:
    decoder, _ = base
    cache, calls = make_cache(decoder), list[int]()
    decoder.prefill(TEXT[:37], cache)
    decoder.decode(TEXT[37], cache)

    def fail(tokens: int) -> None:
        calls.append(tokens)
        if len(calls) == 3:
            raise CancelledError("it is no longer needed")

    with pytest.raises(CancelledError):
        decoder.prefill(TEXT[38:250], cache, chunk=70, progress=fail)
    assert (cache.length, calls) == (38, [70, 70, 70])
    cache.check_integrity()
    found = decoder.prefill(TEXT[38:60], cache).logits
    assert_same_logits(found, read(decoder, TEXT[:60]))


def test_a_cache_rewinds_to_a_kept_state_and_to_its_start(base: tuple[PlainDecoder, Any]) -> None:
    decoder, _ = base
    cache, interval = make_cache(decoder), choose_interval(decoder.config)
    assert interval == 64
    decoder.prefill(TEXT[:200], cache)
    mark = cache.mark()
    decoder.decode(1, cache)
    cache.restore(mark)
    assert_same_logits(decoder.decode(TEXT[200], cache).logits, read(decoder, TEXT[:201]))
    cache.rewind(2 * interval)
    cache.check_integrity()
    found = decoder.prefill(TEXT[2 * interval : 150], cache).logits
    assert_same_logits(found, read(decoder, TEXT[:150]))
    cache.reset()
    assert_same_logits(decoder.prefill(TEXT[:9], cache).logits, read(decoder, TEXT[:9]))
    with pytest.raises(AssertionError, match="cannot be cut"):
        cache.rewind(5)


def test_a_conversation_continues_where_it_ended(base: tuple[PlainDecoder, Any]) -> None:
    pool = Pool(base[0])
    assert pool.run(TEXT[:30], TEXT[30:41])[0] == 0
    reused, logits = pool.run(TEXT[:70])
    assert reused == 41
    assert_same_logits(logits[0], read(base[0], TEXT[:70]))


@pytest.mark.parametrize("cut", [20, 45, 47, 48, 49, 63, 64, 65, 130, 150])
def test_another_text_starts_at_the_last_state_of_the_common_part(
    base: tuple[PlainDecoder, Any], cut: int
) -> None:
    pool = Pool(base[0])
    pool.run(TEXT[:150], TEXT[150:160])
    other = [*TEXT[:cut], *TEXT[200:230]]
    reused, logits = pool.run(other)
    assert reused == max(n for n in (0, 64, 128, 144) if n <= cut)
    assert_same_logits(logits[0], read(base[0], other))
    again, logits = pool.run(other)
    assert again == (len(other) - 1) // 16 * 16
    assert_same_logits(logits[0], read(base[0], other))


def test_a_running_prompt_lends_its_states(base: tuple[PlainDecoder, Any]) -> None:
    decoder, pool = base[0], Pool(base[0])
    with ExitStack() as stack:
        first = stack.enter_context(pool.blocks.allocate(pool.make_request(TEXT[:200])))
        decoder.prefill(TEXT[:150], first.cache)
        second = stack.enter_context(pool.blocks.allocate(pool.make_request(TEXT[:140])))
        assert second.reused == 128
        pool.blocks.check_integrity()
        found = decoder.prefill(TEXT[128:140], second.cache).logits
        rest = decoder.prefill(TEXT[150:200], first.cache).logits
        # other chunks are added in another order, so relative, as the comparison with transformers
        assert_same_logits(found, read(decoder, TEXT[:140]), relative=True)
        assert_same_logits(rest, read(decoder, TEXT[:200]), relative=True)
        for loan in (first, second):
            loan.cache.check_integrity()
    pool.blocks.check_integrity()
    assert pool.budget.used == pool.blocks.nbytes
    pool.blocks.clear()
    assert pool.budget.used == 0


def test_other_keys_share_no_state(base: tuple[PlainDecoder, Any]) -> None:
    pool = Pool(base[0])
    pool.run(TEXT[:100])
    with pool.blocks.allocate(pool.make_request(TEXT[:100], key="other")) as loan:
        assert loan.reused == 0
    pool.blocks.forget("chat")
    assert pool.blocks.nbytes == 0
    assert pool.run(TEXT[:100])[0] == 0


def test_states_count_in_the_budget_and_go_with_their_pages(
    base: tuple[PlainDecoder, Any],
) -> None:
    decoder = base[0]
    config = decoder.config
    size = estimate_pages_bytes(config, 300, ROW_PAGES)
    states = config.state_bytes * (2 + 304 // 64)
    assert size == count_pages(300) * ROW_PAGES.page_bytes(config) + states
    assert PlainBackend(config, "float32").kv_bytes(300) == size
    assert make_cache(decoder, 300).nbytes == size
    pool = Pool(decoder, limit=size + 100)
    for begin in range(4):
        reused, logits = pool.run(TEXT[begin:280], TEXT[280:290])
        assert reused == 0
        assert_same_logits(logits[-1], read(decoder, TEXT[begin:290]), relative=True)
    with pytest.raises(BudgetError), pool.blocks.allocate(pool.make_request(TEXT * 2)):
        pass
    pool.blocks.check_integrity()


def test_a_sequence_grows_with_its_states(base: tuple[PlainDecoder, Any]) -> None:
    decoder, grown = base[0], list[int]()
    cache = PagedKVCache(
        decoder.config, 300, layout=ROW_PAGES, initial_tokens=16, on_growth=grown.append
    )
    before = cache.nbytes
    for begin in range(0, 200, 20):
        decoder.prefill(TEXT[begin : begin + 20], cache)
        assert cache.nbytes == before + sum(grown)
    cache.check_integrity()


def test_a_pass_needs_no_more_memory_than_it_says(tmp_path: Path) -> None:
    build_family_model(
        tmp_path,
        "qwen3_5_text",
        **{
            **CONFIG,
            "hidden_size": 96,
            "intermediate_size": 200,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 24,
        },
    )
    decoder = load_decoder(tmp_path)
    for capacity, chunk in ((300, 300), (300, 16), (33, 512)):
        cache = make_cache(decoder, capacity)
        tracemalloc.start()
        try:
            decoder.prefill([n % 61 for n in range(capacity - 1)], cache, chunk=chunk)
            decoder.decode(1, cache)
            needed = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        decoder.free_buffers()
        states = estimate_state_bytes(decoder.config, capacity)
        allowed = estimate_plain_pass_bytes(decoder.config, capacity, chunk=chunk) + states
        assert allowed / 4 <= needed <= allowed


def test_no_kernel_runs_it(base: tuple[PlainDecoder, Any]) -> None:
    config = base[0].config
    backend, warnings = choose_backend(config, LoadConfig("float32"), numpy_below=0)
    assert isinstance(backend, PlainBackend)
    assert [text.split(":")[0] for text in warnings] == ["numpy runs the base, which is slower"]
    with pytest.raises(IncompatibleError, match="cannot run the architecture qwen3_5_text"):
        choose_backend(config, LoadConfig("int8"))
    routed = parse_model_config(
        {
            "model_type": "qwen3_5_moe_text",
            "vocab_size": 61,
            "hidden_size": 32,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
        }
    )
    with pytest.raises(IncompatibleError, match="routed experts and layers with a gated DeltaNet"):
        choose_backend(routed, LoadConfig("float32", engine=EngineConfig(device="cuda")))


def test_the_text_part_of_a_model_that_reads_images_is_the_same_base(tmp_path: Path) -> None:
    text, both = tmp_path / "text", tmp_path / "both"
    model = build_family_model(text, "qwen3_5_text", **CONFIG)
    whole = save_with_images(model, both)
    with torch.inference_mode():
        theirs = whole(input_ids=torch.tensor([TEXT[:16]]), use_cache=False).logits[0].numpy()
    assert list_unread_parts(text) == ()
    assert list_unread_parts(both) == ("model.visual.", "mtp.")
    ours, same = read_base_headers(both), read_base_headers(text)
    assert (ours.foreign, ours.config, ours.shapes) == (False, same.config, same.shapes)
    decoder = load_decoder(both)
    found = decoder.prefill(TEXT[:16], make_cache(decoder)).logits
    assert_same_logits(found, theirs[-1], relative=True)
    adapted = save_family_adapter(whole, "lora", tmp_path / "lora")
    with torch.inference_mode():
        theirs = adapted(input_ids=torch.tensor([TEXT[:16]]), use_cache=False).logits[0].numpy()
    spec = PlainBackend(decoder.config, "float32").compile_spec
    adapter = load_adapters(tmp_path / "lora")
    assert all(name.startswith("model.language_model.") for name in adapter.modules)
    assert {find_base_name(name, ours.shapes) for name in adapter.modules} < set(ours.shapes)
    deltas = fold_plan([WeightedAdapter(spec.adapt(adapter))], spec).compile().deltas
    found = decoder.prefill(TEXT[:16], make_cache(decoder), deltas).logits
    assert_same_logits(found, theirs[-1], relative=True)


def test_a_tensor_that_is_stored_by_both_names_is_refused(tmp_path: Path) -> None:
    save_with_images(build_family_model(tmp_path, "qwen3_5_text", **CONFIG), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.language_model.norm.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(InvalidPackageError, match=r"model\.norm\.weight: stored both as"):
        read_base_tensors(tmp_path, read_model_config(tmp_path))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"linear_num_value_heads": 3}, "linear_num_value_heads is not a multiple"),
        ({"linear_num_key_heads": 0}, "linear_num_key_heads is 0"),
        ({"linear_key_head_dim": 1 << 11}, "linear_key_head_dim is 2048"),
        ({"linear_value_head_dim": "8"}, "linear_value_head_dim is '8'"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types must be 3 times"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "layer_types must be 3 times"),
        ({"layer_types": None, "full_attention_interval": 0}, "full_attention_interval is 0"),
        ({"layer_types": None, "full_attention_interval": 4}, "layer_types must be 3 times"),
        ({"layer_types": {"linear_attention": 1}}, "layer_types must be 3 times"),
    ],
    ids=str,
)
def test_sizes_and_layers_that_make_no_sense_are_refused(
    changes: dict[str, Any], problem: str
) -> None:
    document: dict[str, Any] = {
        "model_type": "qwen3_5_text",
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        **DELTA_NET,
    }
    assert parse_model_config(document).delta_net is not None
    with pytest.raises(InvalidPackageError, match=problem):
        parse_model_config(document | changes)
    with pytest.raises(InvalidPackageError, match="text_config"):
        parse_model_config({"model_type": "qwen3_5", "text_config": 3})
    inner = {"model_type": "qwen3_5", "text_config": document | changes}
    with pytest.raises(InvalidPackageError, match=problem):
        parse_model_config(inner)


def test_absent_keys_mean_what_they_mean_to_transformers() -> None:
    for arch, name in (
        ("qwen3_5_text", "Qwen3_5TextConfig"),
        ("qwen3_next", "Qwen3NextConfig"),
        ("qwen3_5_moe_text", "Qwen3_5MoeTextConfig"),
    ):
        theirs = getattr(transformers, name)()
        sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
        document: dict[str, Any] = {size: getattr(theirs, size) for size in sizes}
        if arch != "qwen3_5_moe_text":
            document["intermediate_size"] = theirs.intermediate_size
        ours = parse_model_config({"model_type": arch, **document})
        net = ours.delta_net
        assert net is not None
        kinds = enumerate(theirs.layer_types)
        assert net.layers == tuple(n for n, kind in kinds if kind == "linear_attention")
        assert net.key_heads == theirs.linear_num_key_heads
        assert net.value_heads == theirs.linear_num_value_heads
        assert net.key_dim == theirs.linear_key_head_dim
        assert net.value_dim == theirs.linear_value_head_dim
        assert net.kernel == theirs.linear_conv_kernel_dim
        assert (ours.kv_heads, ours.head_dim) == (theirs.num_key_value_heads, theirs.head_dim)
        assert ours.rope.dims == theirs.head_dim * theirs.rope_parameters["partial_rotary_factor"]
        assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
        assert (ours.norm_eps, ours.max_positions) == (
            theirs.rms_norm_eps,
            theirs.max_position_embeddings,
        )
        if ours.experts is not None:
            assert (ours.experts.count, ours.experts.used) == (
                theirs.num_experts,
                theirs.num_experts_per_tok,
            )
            assert ours.experts.intermediate_size == theirs.moe_intermediate_size
            assert ours.experts.shared_size == theirs.shared_expert_intermediate_size
            assert ours.experts.normalised


def test_matrices_of_bfloat16_give_what_their_numbers_give(tmp_path: Path) -> None:
    build_family_model(tmp_path, "qwen3_5_text", **CONFIG)
    path = tmp_path / "model.safetensors"
    rounded = {n: t.bfloat16().float() if t.ndim == 2 else t for n, t in load_file(path).items()}
    save_file(rounded, path, metadata={"format": "pt"})
    config = read_model_config(tmp_path)
    found = []
    for dtype in ("float32", "bf16"):
        weights = load_plain_weights(tmp_path, config, dtype=dtype)
        assert weights.nbytes == PlainBackend(config, dtype).weight_bytes
        found.append(read(PlainDecoder(config, weights), TEXT[:90]))
    assert_same_logits(found[1], found[0], relative=True)


def test_another_activation_is_refused() -> None:
    """Its convolution would have it, too."""
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_attention_heads": 4, "head_dim": 16}
    document = {"model_type": "qwen3_5_text", "num_hidden_layers": 4, "intermediate_size": 48}
    with pytest.raises(IncompatibleError, match="activation 'gelu'"):
        parse_model_config({**document, **sizes, "hidden_act": "gelu"})
