"""Today's model families in the numpy decoder against transformers, in every order of calls."""

import json
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from expertctl.engine.adapters.compile import DoraScales, WeightedAdapter, fold_plan
from expertctl.engine.adapters.load import LoadedAdapter
from expertctl.engine.adapters.steps import (
    EMPTY_DELTAS,
    Deltas,
    DoraTensors,
    compute_dora_scales,
)
from expertctl.engine.arrays import AnyArray
from expertctl.engine.backend import LoadConfig
from expertctl.engine.cpu.plain_backend import PlainBackend
from expertctl.engine.cpu.plain_decoder import PlainDecoder
from expertctl.engine.cpu.plain_layers import estimate_plain_pass_bytes
from expertctl.engine.cpu.plain_weights import load_plain_weights
from expertctl.engine.kv.block_pool import ROW_PAGES, PagedKVCache
from expertctl.engine.load_plan import choose_backend
from expertctl.engine.torch.decoder import Decoder
from expertctl.engine.torch.sequence_cache import KVCache
from expertctl.engine.torch.weights import load_base_weights
from expertctl.engine_config import EngineConfig
from expertctl.errors import IncompatibleError
from expertctl.package.adapter import parse_adapter_config
from expertctl.package.adapter_spec import build_adapter_spec
from expertctl.package.base_model import read_base_headers
from expertctl.package.compatibility import check_tensors
from expertctl.package.model_config import parse_model_config, read_model_config
from expertctl.package.tensor_file import ADAPTER_LIMITS, read_table
from tests.engine.conftest import assert_same_logits
from tests.engine.family_models import (
    SHAPES,
    build_family_model,
    is_recurrent,
    save_family_adapter,
)
from tests.engine.package_fixtures import load_adapters

GPT_OSS = [shape for shape in SHAPES if shape[0] == "gpt_oss"]
IDS = [3, 60, 0, 17, 17, 42, 8, 25, 31, 5, 59, 2, 44, 13, 7, 28]


def load_decoder(directory: Path) -> PlainDecoder:
    config = read_model_config(directory)
    return PlainDecoder(config, load_plain_weights(directory, config))


def run(
    decoder: PlainDecoder, *, prefill: int, chunk: int = 512, deltas: Deltas = EMPTY_DELTAS
) -> AnyArray:
    """Logits from the last prompt token on, [1 + decoded, vocab]."""
    cache = PagedKVCache(decoder.config, 30, layout=ROW_PAGES)
    for page in cache.pages:
        page[...] = np.nan
    rows = [decoder.prefill(IDS[:prefill], cache, deltas, chunk=chunk).logits]
    rows += [decoder.decode(token, cache, deltas).logits for token in IDS[prefill:]]
    cache.check_integrity()
    return np.stack(rows)


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Any]]:
    """Return a saved model of a family, made once for all tests."""
    made: dict[str, tuple[Path, Any]] = {}

    def get(arch: str, config: dict[str, Any]) -> tuple[Path, Any]:
        key = json.dumps([arch, config])
        if key not in made:
            directory = tmp_path_factory.mktemp(arch)
            made[key] = directory, build_family_model(directory, arch, **config)
        return made[key]

    return get


@pytest.mark.parametrize(("arch", "config"), SHAPES, ids=str)
def test_logits_equal_those_of_transformers_however_a_prompt_is_cut(
    family: Callable[..., tuple[Path, Any]], arch: str, config: dict[str, Any]
) -> None:
    directory, model = family(arch, config)
    assert not read_base_headers(directory).foreign
    with torch.inference_mode():
        theirs = model(torch.tensor([IDS]), use_cache=False).logits[0].numpy()
    decoder = load_decoder(directory)
    for prefill, chunk in ((16, 512), (9, 512), (12, 5), (1, 1)):
        ours = run(decoder, prefill=prefill, chunk=chunk)
        assert_same_logits(ours, theirs[prefill - 1 :], relative=is_recurrent(arch))


@pytest.mark.parametrize("kind", ["lora", "dora", "ia3"])
@pytest.mark.parametrize(("arch", "config"), SHAPES, ids=str)
def test_adapters_of_every_projection_change_what_they_change_in_peft(
    family: Callable[..., tuple[Path, Any]],
    arch: str,
    config: dict[str, Any],
    kind: str,
    tmp_path: Path,
) -> None:
    directory, model = family(arch, config)
    if kind == "dora" and "num_experts" in config:
        pytest.skip("PEFT has no DoRA of routed experts")
    adapted = save_family_adapter(model, kind, tmp_path, head=kind == "lora")
    if arch == "gemma4_text":  # in float32, its scores of up to 16 differ from these by 1e-5, too
        adapted = adapted.double()
    with torch.inference_mode():
        theirs = adapted(torch.tensor([IDS]), use_cache=False).logits[0].numpy()
    decoder = load_decoder(directory)
    spec = PlainBackend(decoder.config, "float32").compile_spec
    adapter = spec.adapt(load_adapters(tmp_path))
    plan = fold_plan([WeightedAdapter(adapter, 1.0, compute_scales(decoder, adapter))], spec)
    ours = run(decoder, prefill=9, deltas=plan.compile().deltas)
    assert_same_logits(ours, theirs[8:], relative=is_recurrent(arch))


STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.mark.parametrize(
    "parameters",
    [STACKS, STACKS[:1], ["1.mlp.experts.down_proj", "2.mlp.experts.gate_up_proj"]],
    ids=["both", "gate and up", "of some layers"],
)
@pytest.mark.parametrize("release", [None, "0.18.1"], ids=str)
@pytest.mark.parametrize(("arch", "config"), GPT_OSS, ids=str)
def test_adapters_of_experts_stored_as_columns_change_what_they_change_in_peft(
    family: Callable[..., tuple[Path, Any]],
    arch: str,
    config: dict[str, Any],
    release: str | None,
    parameters: list[str],
    tmp_path: Path,
) -> None:
    """No release of PEFT swaps the tensors of such stacks, as 0.18 does those of others."""
    directory, model = family(arch, config)
    adapted = save_family_adapter(model, "lora", tmp_path, parameters=parameters)
    if release is not None:
        path = tmp_path / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "peft_version": release}))
    with torch.inference_mode():
        plain, theirs = (
            each(torch.tensor([IDS]), use_cache=False).logits[0].numpy()
            for each in (model, adapted)
        )
    assert float(np.abs(plain - theirs).max()) > 0.01
    decoder, loaded = load_decoder(directory), load_adapters(tmp_path)
    spec = PlainBackend(decoder.config, "float32").compile_spec
    adapter = spec.adapt(loaded)
    plan = fold_plan([WeightedAdapter(adapter)], spec)
    assert_same_logits(run(decoder, prefill=9, deltas=plan.compile().deltas), theirs[8:])
    table = read_table(tmp_path / "adapter_model.safetensors", limits=ADAPTER_LIMITS)
    described = parse_adapter_config((tmp_path / "adapter_config.json").read_bytes(), what="c")
    built = build_adapter_spec(described, table, what="w")
    assert check_tensors(built, decoder.config.adapted_shapes()) == []


def compute_scales(decoder: PlainDecoder, adapter: LoadedAdapter) -> DoraScales:
    return {
        module: tuple(
            compute_dora_scales(decoder.matrix(module), step, what=module)
            for step in steps
            if isinstance(step, DoraTensors)
        )
        for module, steps in adapter.modules.items()
    }


def test_virtual_tokens_are_refused_where_layers_read_embeddings_of_tokens(
    family: Callable[..., tuple[Path, Any]],
) -> None:
    [config, other] = [config for name, config in SHAPES if name == "gemma4_text"]
    rows = np.ones((2, 32), np.float32)
    decoder = load_decoder(family("gemma4_text", config)[0])
    weights = load_base_weights(family("gemma4_text", config)[0], decoder.config)
    prompts = Decoder(decoder.config, weights)
    with pytest.raises(IncompatibleError, match="virtual tokens do not have"):
        decoder.prefill(IDS, PagedKVCache(decoder.config, 30, layout=ROW_PAGES), soft_prompt=rows)
    with pytest.raises(IncompatibleError, match="virtual tokens do not have"):
        prompts.prefill(IDS, KVCache(decoder.config, 30), soft_prompt=rows)
    decoder = load_decoder(family("gemma4_text", other)[0])
    decoder.prefill(IDS, PagedKVCache(decoder.config, 30, layout=ROW_PAGES), soft_prompt=rows)


MEMORY_SIZES = {"hidden_size": 128, "intermediate_size": 400, "max_position_embeddings": 512}


@pytest.mark.parametrize(
    "arch",
    ["gemma2", "gemma3_text", "gemma4_text", "gpt2", "gpt_oss", "falcon", "cohere", "phi", "glm4"],
)
def test_a_pass_needs_no_more_memory_than_it_says(arch: str, tmp_path: Path) -> None:
    shape = next(config for name, config in SHAPES if name == arch)
    build_family_model(tmp_path, arch, **{**shape, **MEMORY_SIZES})
    decoder = load_decoder(tmp_path)
    for capacity, chunk in ((300, 300), (300, 16), (33, 512)):
        cache = PagedKVCache(decoder.config, capacity, layout=ROW_PAGES)
        tracemalloc.start()
        try:
            decoder.prefill([n % 61 for n in range(capacity - 1)], cache, chunk=chunk)
            decoder.decode(1, cache)
            needed = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        decoder.free_buffers()
        assert needed <= estimate_plain_pass_bytes(decoder.config, capacity, chunk=chunk)


def test_an_adapter_of_other_fused_sizes_is_refused_by_the_name_that_it_has(
    family: Callable[..., tuple[Path, Any]], tmp_path: Path
) -> None:
    _, wide = family("phi3", {"num_key_value_heads": 4})
    save_family_adapter(wide, "lora", tmp_path)
    directory, _ = family("phi3", {"num_key_value_heads": 1})
    config = read_model_config(directory)
    with pytest.raises(IncompatibleError, match=r"0\.self_attn\.qkv_proj: made for 96 outputs"):
        PlainBackend(config, "float32").compile_spec.adapt(load_adapters(tmp_path))


def test_a_plan_of_copied_rows_holds_them_itself(
    family: Callable[..., tuple[Path, Any]], tmp_path: Path
) -> None:
    directory, model = family("gpt_neox", {"num_attention_heads": 4})
    save_family_adapter(model, "lora", tmp_path)
    spec = PlainBackend(read_model_config(directory), "float32").compile_spec
    adapter = load_adapters(tmp_path)
    module = "gpt_neox.layers.0.attention.query_key_value"
    scaled = [replace(step, scale=1.0) for step in adapter.modules[module]]
    adapter = spec.adapt(replace(adapter, modules={module: tuple(scaled)}))
    plan = fold_plan([WeightedAdapter(adapter)], spec)
    deltas = plan.compile().deltas
    assert sorted(deltas) == [f"model.layers.0.self_attn.{name}_proj" for name in "kqv"]
    assert plan.nbytes >= sum(delta.b.nbytes for delta in deltas.values() if delta.b is not None)


def test_the_text_part_of_gemma_3_with_images_is_the_same_base(tmp_path: Path) -> None:
    """Also with a configuration that leaves out what is the default of transformers."""
    sizes = dict(next(config for name, config in SHAPES if name == "gemma3_text"))
    text = build_family_model(tmp_path / "text", "gemma3_text", **sizes)
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 8, "patch_size": 4}
    settings = transformers.Gemma3Config(
        text_config=text.config.to_dict(), vision_config=vision, mm_tokens_per_image=4
    )
    whole = transformers.Gemma3ForConditionalGeneration(settings).eval()
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.tie_weights()
    whole.save_pretrained(tmp_path / "both")
    with torch.inference_mode():
        theirs = whole(input_ids=torch.tensor([IDS]), use_cache=False).logits[0]
    decoder, alone = load_decoder(tmp_path / "both"), read_base_headers(tmp_path / "text")
    found = decoder.prefill(IDS, PagedKVCache(decoder.config, 30, layout=ROW_PAGES)).logits
    assert_same_logits(torch.from_numpy(found), theirs[-1])
    ours = read_base_headers(tmp_path / "both")
    assert (ours.foreign, ours.config, ours.shapes) == (False, alone.config, alone.shapes)


def test_the_published_configuration_of_gemma_3_means_what_transformers_reads() -> None:
    """That of ``google/gemma-3-4b-it``: its text part names neither heads nor vocabulary."""
    part = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text"}
    part |= {"num_hidden_layers": 34, "sliding_window": 1024}
    scaling = {"factor": 8.0, "rope_type": "linear"}
    document = {"model_type": "gemma3", "text_config": {**part, "rope_scaling": scaling}}
    ours = parse_model_config({**document, "architectures": ["Gemma3ForConditionalGeneration"]})
    theirs = transformers.Gemma3Config(**document).text_config
    assert ours.architecture == "gemma3_text"
    assert ours.vocab_size == theirs.vocab_size
    assert (ours.heads, ours.kv_heads) == (theirs.num_attention_heads, theirs.num_key_value_heads)
    assert (ours.head_dim, ours.max_positions) == (theirs.head_dim, theirs.max_position_embeddings)
    assert [w is not None for w in ours.windows] == [
        kind == "sliding_attention" for kind in theirs.layer_types
    ]
    assert ours.tied == theirs.tie_word_embeddings


def test_a_device_takes_gpt_oss(tmp_path: Path) -> None:
    """Its experts are a stack there; what no device computes is refused where a base is chosen."""
    build_family_model(tmp_path, "gpt_oss", **GPT_OSS[0][1])
    config = read_model_config(tmp_path)
    loading = LoadConfig("float32", engine=EngineConfig(device="cuda"))
    backend, warnings = choose_backend(config, loading)
    assert (backend.name, warnings) == ("cuda", ())
