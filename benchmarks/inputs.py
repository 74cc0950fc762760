"""What the benchmarks work on: a base in the shape of Qwen3-0.6B, adapters with random weights.

Adapters of the benchmarks as the store would offer them, once they are installed.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from expertctl.engine.adapters.experts import ExpertSource
from expertctl.engine.adapters.load import StoredFiles, estimate_adapter_bytes, load_adapter
from expertctl.package.base_model import BaseFacts, BaseIdentity
from expertctl.package.build import BuildResult, build_package, plan_build
from expertctl.package.draft import ManifestOverrides
from expertctl.package.model_config import ModelConfig, parse_model_config
from expertctl.package.tensor_file import read_table
from expertctl.reference import Digest, FileDigest, hash_file
from expertctl.schema.manifest import AdapterEntry, BaseRequirement, Manifest
from expertctl.schema.strict_json import JsonObject
from expertctl.trust.keys import PrivateKey

LAYERS, HIDDEN, INTERMEDIATE, QUERIES, KEYS = 28, 1024, 3072, 2048, 1024
HEAD_DIM, VOCABULARY = 128, 151936
PROJECTIONS = {
    "self_attn.q_proj": (QUERIES, HIDDEN),
    "self_attn.k_proj": (KEYS, HIDDEN),
    "self_attn.v_proj": (KEYS, HIDDEN),
    "self_attn.o_proj": (HIDDEN, QUERIES),
    "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
    "mlp.up_proj": (INTERMEDIATE, HIDDEN),
    "mlp.down_proj": (HIDDEN, INTERMEDIATE),
}
"""``(out, in)`` of one layer's linear modules (Qwen3-0.6B, config.json)."""
RANK = 16


def list_module_shapes() -> dict[str, tuple[int, int]]:
    """Return ``(out, in)`` of every linear module of the base."""
    return {
        f"model.layers.{layer}.{name}": shape
        for layer in range(LAYERS)
        for name, shape in PROJECTIONS.items()
    }


def make_config_document(vocabulary: int = VOCABULARY) -> JsonObject:
    """Return what ``config.json`` of the base says."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": QUERIES // HEAD_DIM,
        "num_key_value_heads": KEYS // HEAD_DIM,
        "head_dim": HEAD_DIM,
        "vocab_size": vocabulary,
        "max_position_embeddings": 40960,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        "attention_bias": False,
    }


def make_base_config(vocabulary: int = VOCABULARY) -> ModelConfig:
    """Return the configuration of the base."""
    return parse_model_config(make_config_document(vocabulary))


def make_base_facts() -> BaseFacts:
    """The base that the adapters are for, by made-up digests: no weights are needed here."""
    arch, tokenizer = Digest.compute(b"arch"), Digest.compute(b"tokenizer")
    identity = BaseIdentity("bench/qwen3-0.6b", None, arch, None, tokenizer)
    return BaseFacts(identity, list_module_shapes())


def write_lora(directory: Path, *, seed: int = 0, rank: int = RANK) -> Path:
    """Write a float32 LoRA on all projections as PEFT does: about 2.5 MB for each rank."""
    directory.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    save_file(
        dict(_make_lora_tensors(rng, rank)),
        directory / "adapter_model.safetensors",
        {"format": "pt"},
    )
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "bench/qwen3-0.6b",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(name.split(".")[1] for name in PROJECTIONS),
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def write_package(directory: Path, output: Path, *, name: str, key: PrivateKey) -> BuildResult:
    """Build and sign a package of an adapter that `write_lora` made."""
    overrides = ManifestOverrides(name=name, version="1.0.0", description="a benchmark's adapter")
    return build_package(plan_build(directory, overrides, base=make_base_facts()), output, key=key)


def _make_lora_tensors(rng: np.random.Generator, rank: int) -> Iterator[tuple[str, np.ndarray]]:
    for module, (out, into) in list_module_shapes().items():
        name = f"base_model.model.{module}"
        yield f"{name}.lora_A.weight", _random_matrix(rng, (rank, into))
        yield f"{name}.lora_B.weight", _random_matrix(rng, (out, rank))


def _random_matrix(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return (rng.standard_normal(shape) * 0.01).astype(np.float32)


WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def make_source(directory: Path, *, base: str) -> ExpertSource:
    """Offer the float32 LoRA of a directory, named after it; its files are hashed now."""
    files = {
        name: (directory / name, FileDigest(name, *hash_file(directory / name)))
        for name in (WEIGHTS, CONFIG)
    }
    tensors = len(read_table(directory / WEIGHTS).tensors)
    manifest = Manifest(
        schema=1,
        name=f"bench/{directory.name}",
        version="1.0.0",
        description="a benchmark's adapter",
        license="Apache-2.0",
        base=BaseRequirement(name=base, arch="", tokenizer=""),
        adapters=(AdapterEntry("lora", WEIGHTS, CONFIG, "float32", tensors),),
    )
    stored = StoredFiles(manifest.ref, files)
    cost = estimate_adapter_bytes(manifest, {name: file.size for name, (_, file) in files.items()})
    digest = files[WEIGHTS][1].digest
    return ExpertSource(manifest, digest, cost, lambda: load_adapter(manifest, stored))
