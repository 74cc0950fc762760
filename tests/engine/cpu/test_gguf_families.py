"""GGUF files of every family against the models of transformers that they were made from.

Where ``llama-cpp-python`` is installed, it reads the same files, so they are what it understands.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from expertctl.engine.backend import LoadConfig
from expertctl.engine.cpu.backend import PackedBackend
from expertctl.engine.cpu.base_loader import load_packed_base
from expertctl.engine.cpu.decoder import PackedDecoder
from expertctl.engine.cpu.plain_decoder import PlainDecoder
from expertctl.engine.cpu.plain_weights import load_plain_weights
from expertctl.engine.kernels.packed_format import Scheme
from expertctl.engine.kernels.thread_pool import ThreadPool
from expertctl.engine.kv.block_pool import ROW_PAGES, PagedKVCache
from expertctl.engine.load_plan import add_storages, choose_backend
from expertctl.errors import IncompatibleError, InvalidPackageError
from expertctl.package import gguf_codec
from expertctl.package.base_model import read_base
from expertctl.package.base_tensors import read_base_tensors
from expertctl.package.gguf_base import derive_weight_files
from expertctl.package.gguf_codec import GGUF_TABLE
from expertctl.package.gguf_file import BLOCK_KINDS, read_gguf_header
from expertctl.package.model_config import read_model_config
from tests.engine.conftest import build_reference_model
from tests.engine.family_models import build_family_model
from tests.engine.reference_models import ROUTED_CONFIGS
from tests.factories import VOCAB, write_tokenizer
from tests.gguf_families import write_family_gguf

IDS = [3, 60, 0, 17, 17, 42, 8, 25, 31, 5, 59, 2, 44, 13, 7, 28]
_ALONE = {"num_key_value_heads": 4}
_FACTORS = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.5, 2.0],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 256,
}
_LONGROPE = {
    "rope_parameters": _FACTORS,
    "original_max_position_embeddings": 256,
    "max_position_embeddings": 1024,
}
_GEMMA = {"head_dim": 12, "query_pre_attn_scalar": 12}
_GRANITE = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.3,
    "logits_scaling": 8.0,
}
_ALPHA = {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 1e4}
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("gemma", {"head_dim": 12}),
    ("gemma2", {**_GEMMA, "sliding_window": 5}),
    (
        "gemma2",
        {
            **_ALONE,
            **_GEMMA,
            "sliding_window": 4,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    ("gemma3_text", {**_GEMMA, "sliding_window": 5, "num_hidden_layers": 7}),
    ("phi", {"intermediate_size": 128, **_ALONE}),
    ("phi3", {}),
    ("phi3", {**_ALONE, "tie_word_embeddings": True, "partial_rotary_factor": 0.5}),
    ("phi3", _LONGROPE),
    ("gpt2", {}),
    ("gpt_neox", {"use_parallel_residual": False}),
    ("gpt_neox", {}),
    ("falcon", {}),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    (
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    ("starcoder2", {"sliding_window": None}),
    ("stablelm", {"use_qkv_bias": True, "partial_rotary_factor": 0.5}),
    ("stablelm", {**_ALONE, "qk_layernorm": True, "use_parallel_residual": True}),
    ("olmo2", {}),
    ("olmo3", {"sliding_window": 5, "num_hidden_layers": 5}),
    ("granite", _GRANITE),
    ("granite", {**_ALONE, **_GRANITE, "mlp_bias": True, "attention_bias": True}),
    ("smollm3", {"num_hidden_layers": 5}),
    ("exaone4", {**_ALONE, "sliding_window": None, "layer_types": ["full_attention"] * 3}),
    ("glm4", {"head_dim": 8, "attention_bias": True}),
    ("cohere", {"logit_scale": 0.8}),
    ("cohere", {"use_qk_norm": True, "logit_scale": 0.7, "num_hidden_layers": 64}),
    ("hunyuan_v1_dense", {"head_dim": 12}),
    ("hunyuan_v1_dense", {**_ALONE, "head_dim": 8, "rope_parameters": _ALPHA}),
]


def convert(
    tmp_path: Path, arch: str, options: dict[str, Any], *, kind: str = "F32"
) -> tuple[Path, Path, Any]:
    """Return the folder of a model, that of the base of its GGUF file, and the model."""
    source, derived = tmp_path / "source", tmp_path / "derived"
    model = build_model(source, arch, **options)
    if kind == "BF16":
        model = model.bfloat16()
        model.save_pretrained(source)
    file = write_family_gguf(tmp_path / "model.gguf", model, source, kind=kind)
    derived.mkdir()
    write_tokenizer(source)
    write_tokenizer(derived)
    for name, data in derive_weight_files(read_gguf_header(file), file=str(file)).items():
        (derived / name).write_bytes(data)
    return source, derived, model


def build_model(directory: Path, arch: str, **options: Any) -> Any:
    """Save a random model and return it as transformers runs it."""
    if arch in ROUTED_CONFIGS:
        values = {"vocab_size": VOCAB, "num_hidden_layers": 2, **options}
        return build_reference_model(directory, arch, **values).model
    return build_family_model(directory, arch, **options)


def compute_logits(directory: Path) -> np.ndarray[Any, Any]:
    config = read_model_config(directory)
    decoder = PlainDecoder(config, load_plain_weights(directory, config))
    cache = PagedKVCache(config, 30, layout=ROW_PAGES)
    return decoder.score(decoder.read_hidden(IDS, cache))


FAMILIES += [
    ("mixtral", {}),
    ("qwen2_moe", {}),
    ("qwen3_moe", {"norm_topk_prob": True}),
    ("olmoe", {**_ALONE}),
    ("dots1", {**_ALONE, "sliding_window": None}),
]
EVERY = pytest.mark.parametrize(("arch", "options"), FAMILIES, ids=str)


@EVERY
def test_a_file_is_the_model_it_was_made_from(
    arch: str, options: dict[str, Any], tmp_path: Path
) -> None:
    source, derived, model = convert(tmp_path, arch, options)
    with torch.no_grad():
        wanted = model(torch.tensor([IDS])).logits[0].numpy()
    np.testing.assert_allclose(compute_logits(derived), wanted, atol=2e-4, rtol=1e-3)
    if "alpha" not in str(options):  # its stretch is computed into the base frequency
        assert read_model_config(derived) == read_model_config(source)


_WHOLE = {"hidden_size": 64, "intermediate_size": 128}


@pytest.mark.parametrize(
    ("arch", "options"),
    [
        ("gemma2", {**_WHOLE, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 5}),
        ("gpt2", {"n_embd": 64, "n_inner": 128}),
        ("phi3", _WHOLE),
        ("gpt_neox", _WHOLE),
        ("glm4", {**_WHOLE, "head_dim": 32}),
    ],
    ids=str,
)
def test_kernels_compute_with_the_blocks_of_a_file(
    arch: str, options: dict[str, Any], crew: ThreadPool, tmp_path: Path
) -> None:
    """Beside float32 on the same weights, only the rounding of activations is left."""
    _, derived, _ = convert(tmp_path, arch, options, kind="Q8_0")
    config = read_model_config(derived)
    backend, _ = choose_backend(config, add_storages(LoadConfig("gguf"), derived, config))
    assert isinstance(backend, PackedBackend)
    assert backend.blocks is not None
    assert set(backend.blocks.schemes.values()) == {Scheme.Q8_0}
    base = load_packed_base(derived, config, backend.scheme, schemes=backend.blocks.schemes)
    ours = PackedDecoder(base, crew).prefill(IDS, PagedKVCache(config, 30)).logits
    theirs = compute_logits(derived)[-1]
    assert np.linalg.norm(ours - theirs) <= 0.05 * np.linalg.norm(theirs)


@pytest.mark.all
@EVERY
def test_a_file_in_bf16_has_the_digests_of_its_folder(
    arch: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """Also where the converter adds one, joins, transposes or reorders."""
    source, derived, _ = convert(tmp_path, arch, options, kind="BF16")
    found, known = read_base(derived).identity, read_base(source).identity
    assert found.weights == known.weights
    assert found.arch == known.arch or "alpha" in str(options)


def test_a_transposed_matrix_is_hashed_a_few_columns_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, derived, _ = convert(tmp_path, "gpt2", {})
    monkeypatch.setattr(gguf_codec, "_COLUMNS", 200)
    monkeypatch.setattr(gguf_codec, "_PORTION", 1000)
    assert read_base(derived).identity.weights == read_base(source).identity.weights


@pytest.mark.all
@EVERY
def test_llama_cpp_reads_the_same_model(arch: str, options: dict[str, Any], tmp_path: Path) -> None:
    """It rounds what it looks up for GELU to float16."""
    llama_cpp = pytest.importorskip("llama_cpp")
    _, derived, _ = convert(tmp_path, arch, options)
    theirs = llama_cpp.Llama(
        str(tmp_path / "model.gguf"),
        n_ctx=256,
        logits_all=True,
        verbose=False,
        n_threads=1,
        type_k=llama_cpp.GGML_TYPE_F32,
        type_v=llama_cpp.GGML_TYPE_F32,
    )
    theirs.eval(IDS)
    wanted = np.array(theirs.scores[: len(IDS)])
    has_gelu = "gelu" in read_model_config(derived).block.activation
    limit = 0.02 if has_gelu else 1e-4
    assert np.abs(compute_logits(derived) - wanted).max() < limit * wanted.std()


@pytest.mark.parametrize(
    ("arch", "options", "changed", "problem"),
    [
        ("gemma3_text", {}, {"gemma3__attention__sliding_window_pattern": [True]}, "3 booleans"),
        ("gemma3_text", {}, {"gemma3__attention__sliding_window_pattern": 0}, "from 1 to"),
        ("gemma3_text", {}, {"gemma3__attention__sliding_window": "wide"}, "whole number"),
        ("gemma3_text", {}, {"gemma3__rope__freq_base_swa": 0.5}, "freq_base_swa"),
        ("gemma2", {}, {"gemma2__final_logit_softcapping": "high"}, "must be a number"),
        ("phi3", {}, {"phi3__rope__dimension_count": 7}, "number of pairs"),
        ("phi3", {}, {"phi3__rope__dimension_count": 10}, "a head has 8"),
        ("phi3", _LONGROPE, {"phi3__rope__scaling__attn_factor": 1e9}, "attn_factor"),
        ("gpt_neox", {}, {"gptneox__use_parallel_residual": "yes"}, "a boolean"),
        ("qwen3_moe", {}, {"qwen3moe__expert_used_count": 7}, "more than the 6"),
        ("qwen3_moe", {}, {"qwen3moe__expert_count": 1 << 19}, "from 1 to 1024"),
        ("qwen3_moe", {}, {"qwen3moe__expert_count": 0}, "from 1 to 1024"),
        ("qwen3_moe", {}, {"qwen3moe__expert_feed_forward_length": None}, "is missing"),
        ("dots1", {}, {"dots1__expert_gating_func": 1}, "is 1, not 2"),
        ("mixtral", {}, {"llama__expert_count": 6}, "it cannot hold"),
        ("starcoder2", {}, {"starcoder2__attention__layer_norm_epsilon": None}, "is missing"),
    ],
)
def test_keys_that_contradict_the_model_are_refused(
    arch: str, options: dict[str, Any], changed: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    model = build_model(tmp_path / "source", arch, **options)
    file = write_family_gguf(tmp_path / "m.gguf", model, tmp_path / "source", **changed)
    with pytest.raises(InvalidPackageError, match=problem):
        derive_weight_files(read_gguf_header(file), file="m.gguf")


@pytest.mark.parametrize(
    ("arch", "key", "value"),
    [
        ("gemma", "gemma.attention.sliding_window", 8),
        ("glm4", "glm4.rope.dimension_sections", [2, 2, 0, 0]),
        ("glm4", "glm4.nextn_predict_layers", 1),
        ("olmo2", "olmo2.logit_scale", 2.0),
        ("olmo2", "olmo2.expert_count", 8),
        ("dots1", "dots1.expert_group_count", 4),
        ("falcon", "falcon.attention.max_alibi_bias", 8.0),
    ],
)
def test_settings_that_no_decoder_has_are_named(
    arch: str, key: str, value: Any, tmp_path: Path
) -> None:
    model = build_model(tmp_path / "source", arch)
    changed = {key.replace(".", "__"): value}
    file = write_family_gguf(tmp_path / "m.gguf", model, tmp_path / "source", **changed)
    with pytest.raises(IncompatibleError, match=key):
        derive_weight_files(read_gguf_header(file), file="m.gguf")


@pytest.mark.parametrize(
    ("arch", "options", "name", "change", "problem"),
    [
        ("gpt2", {}, "blk.0.attn_qkv.weight", {"shape": (95, 32)}, "it cannot hold"),
        ("gpt2", {}, "blk.0.attn_qkv.bias", {"shape": (64,)}, "it cannot hold"),
        ("phi3", {}, "blk.0.ffn_up.weight", {"shape": (96, 31)}, "it cannot hold"),
        ("stablelm", {"qk_layernorm": True}, "blk.0.attn_k_norm.weight", {"shape": (9, 8)}, "hold"),
        ("gemma", {}, "blk.0.ffn_norm.weight", {"kind": BLOCK_KINDS[1]}, "norms of this"),
        ("phi3", _LONGROPE, "rope_factors_long.weight", {"shape": (2, 2)}, "no vector"),
        ("phi3", _LONGROPE, "rope_factors_long.weight", {"shape": (3,)}, "must be 4 numbers"),
        ("phi3", _LONGROPE, "rope_factors_short.weight", {"shape": (1 << 20,)}, "at most 1024"),
        ("mixtral", {}, "blk.0.ffn_up_exps.weight", {"shape": (5, 32, 48)}, "it cannot hold"),
        ("mixtral", {}, "blk.0.ffn_up_exps.weight", {"shape": (1 << 40, 48, 32)}, "cannot hold"),
        ("qwen2_moe", {}, "blk.0.attn_q.weight", {"shape": (2, 16, 32)}, "has 3 dimensions"),
        ("phi3", {}, "blk.0.ffn_up_exps.weight", {"shape": (2, 4, 4)}, "unexpected tensor"),
        ("phi3", {}, "blk.0.attn_rot.weight", {}, "unexpected tensor"),
        ("phi3", {}, "blk.0.attn_norm.scale", {}, "unexpected tensor"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    arch: str,
    options: dict[str, Any],
    name: str,
    change: dict[str, Any],
    problem: str,
    tmp_path: Path,
) -> None:
    model = build_model(tmp_path / "source", arch, **options)
    file = write_family_gguf(tmp_path / "m.gguf", model, tmp_path / "source")
    header = read_gguf_header(file)
    some = header.tensors.get(name) or header.tensors["output_norm.weight"]
    tensors = {**header.tensors, name: replace(some, name=name, **change)}
    with pytest.raises(InvalidPackageError, match=problem):
        derive_weight_files(replace(header, tensors=tensors), file="m.gguf")


@pytest.mark.parametrize(
    "change", [{"shifted": True, "kind": "F16"}, {"transposed": True}], ids=str
)
def test_a_table_with_a_mark_that_does_not_fit_is_refused(
    change: dict[str, Any], tmp_path: Path
) -> None:
    _, derived, _ = convert(tmp_path, "gemma", {})
    table = json.loads((derived / GGUF_TABLE).read_text())
    norm = next(entry for entry in table["tensors"] if "norm" in entry["name"])
    norm |= change
    (derived / GGUF_TABLE).write_text(json.dumps(table))
    with pytest.raises(InvalidPackageError, match="malformed entry"):
        read_base_tensors(derived, read_model_config(derived))
