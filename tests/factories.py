"""Tiny random models and adapters as real files; torch-free, equal for equal arguments.

`write_base` makes a Hugging Face directory; `write_lora`, `write_dora`, `write_ia3` and
`write_soft_prompt` make PEFT directories for it, `make_package` a ``.expert`` file from both.
The values are small random numbers from a seeded generator, so that every tensor differs from
every other.
"""

import codecs
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from expertctl.engine_config import EngineConfig
from expertctl.package.base_model import BaseFacts, read_base
from expertctl.package.build import build_package, plan_build
from expertctl.package.directory import CONFIG_PATH, WEIGHTS_PATH
from expertctl.package.draft import ManifestOverrides
from expertctl.routing.request import RouteRequest
from expertctl.schema.manifest import AdapterKind
from expertctl.trust.keys import PrivateKey
from tests import tensor_shapes
from tests.tensor_shapes import (
    ALL_PROJECTIONS,
    IA3_FEEDFORWARD,
    IA3_TARGETS,
    ia3_config,
    ia3_shapes,
    lora_config,
    lora_shapes,
    prompt_config,
)

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BYTE_TOKENS = 256
VOCAB = BYTE_TOKENS + len(SPECIAL_TOKENS)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    **tensor_shapes.CLASSES,
}
_ROW_NORM = 0.3
"""About what the rows of such a random base have."""
_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}

Arrays = Mapping[str, np.ndarray[Any, Any]]
Adapter = tuple[AdapterKind, Mapping[str, Any]]
"""A kind, and the options of its writer."""


def write_base(
    directory: Path,
    *,
    arch: str = "qwen3",
    layers: int = 2,
    hidden: int = 32,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 8,
    intermediate: int = 48,
    vocab: int = VOCAB,
    tie: bool = True,
    dtype: str = "float32",
    shards: int = 1,
    seed: int = 0,
    **config: object,
) -> Path:
    """Write a decoder with random weights and a byte-level tokenizer; return the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    values: dict[str, object] = {
        "architectures": [_CLASSES[arch]],
        "model_type": arch,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "max_position_embeddings": 512,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tie,
        "attention_bias": False,
        "use_cache": True,
        "bos_token_id": BYTE_TOKENS,
        "eos_token_id": BYTE_TOKENS + 2,
        "dtype": dtype,
        **tensor_shapes.DEFAULTS.get(arch, {}),
        **config,
    }
    if arch == "mistral":
        values.setdefault("sliding_window", None)
    shapes = base_shapes(values)
    _write_json(directory / "config.json", values)
    _write_shards(directory, _random_arrays(shapes, seed), dtype=dtype, shards=shards)
    write_tokenizer(directory)
    return directory


def base_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor that such a configuration has."""
    hidden, dim = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
            f"{prefix}.self_attn.q_proj.weight": (queries, hidden),
            f"{prefix}.self_attn.k_proj.weight": (keys, hidden),
            f"{prefix}.self_attn.v_proj.weight": (keys, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, queries),
        }
        mlp = tensor_shapes.mlp_shapes(config, layer)
        shapes |= {f"{prefix}.{name}": shape for name, shape in mlp.items()}
        if config["model_type"] in {"qwen3", "qwen3_moe", "dots1", "olmoe"}:
            whole = config["model_type"] == "olmoe"
            shapes[f"{prefix}.self_attn.q_norm.weight"] = (queries if whole else dim,)
            shapes[f"{prefix}.self_attn.k_norm.weight"] = (keys if whole else dim,)
        biased = _has_bias(config)
        shapes |= {
            f"{prefix}.self_attn.{name}.bias": shapes[f"{prefix}.self_attn.{name}.weight"][:1]
            for name in biased
        }
    return shapes


def write_tokenizer(directory: Path) -> None:
    """Write a byte-level tokenizer of `VOCAB` tokens with a ChatML template."""
    alphabet = byte_alphabet()
    tokenizer = Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[], fuse_unk=False)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL_TOKENS])
    (directory / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": None,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "add_bos_token": False,
            "model_max_length": 512,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    _write_json(
        directory / "generation_config.json",
        {
            "bos_token_id": BYTE_TOKENS,
            "eos_token_id": [BYTE_TOKENS + 2, BYTE_TOKENS],
            "pad_token_id": BYTE_TOKENS,
        },
    )


def decode_bytes(tokens: Iterable[int]) -> str:
    """Return the text of tokens of `write_tokenizer`; a character that is cut at the end is left
    out, as Python's incremental decoder does it."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return decoder.decode(bytes(token for token in tokens if token < BYTE_TOKENS))


def byte_alphabet() -> list[str]:
    """Return the printable stand-in of each byte, as byte-level BPE defines it."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def write_lora(
    directory: Path,
    base_dir: Path,
    *,
    rank: int = 4,
    alpha: float = 8,
    dtype: str = "float32",
    targets: Iterable[str] = ALL_PROJECTIONS,
    seed: int = 0,
    scale: float = 0.1,
    **config: Any,
) -> Path:
    """Write a PEFT LoRA for every layer of a base; return the directory.

    ``scale`` is the standard deviation of the values; ``config`` overrides adapter_config.json.
    ``rank_pattern`` and ``layers_to_transform`` decide which tensors there are.
    """
    wanted = tuple(targets)
    values = lora_config(base_dir, rank=rank, alpha=alpha, targets=wanted, **config)
    shapes = lora_shapes(_read_base_shapes(base_dir), values, targets=wanted)
    noise = _random_arrays(shapes, seed)
    arrays = {
        name: np.abs(_ROW_NORM + array) if "magnitude" in name else array * (scale / 0.05)
        for name, array in noise.items()
    }
    return _write_adapter(directory, values, arrays, dtype)


def write_dora(directory: Path, base_dir: Path, **options: Any) -> Path:
    """Write a PEFT DoRA; options as in `write_lora`."""
    return write_lora(directory, base_dir, use_dora=True, **options)


def write_ia3(
    directory: Path,
    base_dir: Path,
    *,
    targets: Iterable[str] = IA3_TARGETS,
    feedforward: Iterable[str] = IA3_FEEDFORWARD,
    dtype: str = "float32",
    seed: int = 0,
    scale: float = 0.3,
    **config: Any,
) -> Path:
    """Write a PEFT IA³ adapter; ``scale`` is the standard deviation around 1."""
    wanted, inputs = tuple(targets), tuple(feedforward)
    values = ia3_config(base_dir, targets=wanted, feedforward=inputs, **config)
    shapes = ia3_shapes(_read_base_shapes(base_dir), targets=wanted, feedforward=inputs)
    arrays = {
        name: 1 + array * (scale / 0.05) for name, array in _random_arrays(shapes, seed).items()
    }
    return _write_adapter(directory, values, arrays, dtype)


def write_soft_prompt(
    directory: Path,
    base_dir: Path,
    *,
    tokens: int = 4,
    kind: Literal["PROMPT_TUNING", "P_TUNING"] = "PROMPT_TUNING",
    dtype: str = "float32",
    seed: int = 0,
    scale: float = 0.1,
    **config: Any,
) -> Path:
    """Write a soft prompt as PEFT does after prompt tuning or P-tuning."""
    base = json.loads((base_dir / "config.json").read_text(encoding="utf-8"))
    values = prompt_config(base_dir, base, kind=kind, tokens=tokens, **config)
    noise = _random_arrays({"prompt_embeddings": (tokens, base["hidden_size"])}, seed)
    arrays = {name: array * (scale / 0.05) for name, array in noise.items()}
    return _write_adapter(directory, values, arrays, dtype)


def _read_base_shapes(base_dir: Path) -> dict[str, tuple[int, ...]]:
    return base_shapes(json.loads((base_dir / "config.json").read_text(encoding="utf-8")))


def _write_adapter(directory: Path, config: Mapping[str, Any], arrays: Arrays, dtype: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / CONFIG_PATH, config)
    write_safetensors(directory / WEIGHTS_PATH, arrays, dtype=dtype, metadata={"format": "pt"})
    return directory


def write_safetensors(
    path: Path,
    arrays: Arrays,
    *,
    dtype: str = "float32",
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write arrays as the safetensors library does: names sorted, header padded to 8 bytes."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    parts, begin = [], 0
    for name in sorted(arrays):
        data = to_bytes(arrays[name], dtype)
        header[name] = {
            "dtype": _DTYPES[dtype],
            "shape": list(arrays[name].shape),
            "data_offsets": [begin, begin + len(data)],
        }
        parts.append(data)
        begin += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(parts))


def to_bytes(array: np.ndarray[Any, Any], dtype: str) -> bytes:
    """Return the little-endian bytes of an array; bfloat16 is rounded to nearest even."""
    if dtype == "bfloat16":
        bits = array.astype("<f4").view("<u4").astype(np.uint64)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()
    return array.astype({"float32": "<f4", "float16": "<f2"}[dtype]).tobytes()


def _has_bias(config: Mapping[str, Any]) -> tuple[str, ...]:
    if config["model_type"] in {"qwen2", "qwen2_moe"}:
        return ("q_proj", "k_proj", "v_proj")
    biased = {"llama", "qwen3", "qwen3_moe", "olmoe", "dots1"}
    if config["model_type"] in biased and config["attention_bias"]:
        return ("q_proj", "k_proj", "v_proj", "o_proj")
    return ()


def _random_arrays(
    shapes: Mapping[str, tuple[int, ...]], seed: int
) -> dict[str, np.ndarray[Any, Any]]:
    generator = np.random.default_rng(seed)
    arrays = {}
    for name in sorted(shapes):
        noise = generator.standard_normal(shapes[name]).astype(np.float32) * np.float32(0.05)
        arrays[name] = 1 + noise if name.endswith("norm.weight") else noise
    return arrays


def _write_shards(directory: Path, arrays: Arrays, *, dtype: str, shards: int) -> None:
    if shards == 1:
        write_safetensors(
            directory / "model.safetensors", arrays, dtype=dtype, metadata={"format": "pt"}
        )
        return
    weight_map: dict[str, str] = {}
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        part = {name: arrays[name] for name in sorted(arrays)[number::shards]}
        write_safetensors(directory / file, part, dtype=dtype, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(len(to_bytes(array, dtype)) for array in arrays.values())
    _write_json(
        directory / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))},
    )


def _write_json(path: Path, document: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def make_package(
    directory: Path,
    name: str = "acme/sql",
    version: str = "1.0.0",
    *,
    base_dir: Path,
    key: PrivateKey | None = None,
    base: BaseFacts | None = None,
    output: Path | None = None,
    lora: Mapping[str, Any] | None = None,
    adapters: Sequence[Adapter] | None = None,
    **manifest: Any,
) -> Path:
    """Build a package below ``directory``; return the ``.expert`` file.

    ``lora`` goes to `write_lora`, everything else becomes a key of the manifest. ``adapters`` are
    written instead of one LoRA, in that order: ``[("ia3", {"seed": 1}), ("soft_prompt", {})]``.
    Reading a base takes time, so give ``base`` where many packages share one.
    """
    slug = f"{name.replace('/', '-')}-{version}"
    files = directory / f"{slug}.files"
    stated = _write_adapters(files, base_dir, adapters or [("lora", lora or {})])
    document = {"name": name, "version": version, **stated, **manifest}
    _write_json(files / "expert.json", document)
    facts = base or read_base(base_dir)
    plan = plan_build(files, ManifestOverrides(), base=facts)
    return build_package(plan, output or directory / f"{slug}.expert", key=key).path


def _write_adapters(
    directory: Path, base_dir: Path, adapters: Sequence[Adapter]
) -> dict[str, list[dict[str, str]]]:
    """Write adapters beside each other; return what the manifest must say of several."""
    if len(adapters) == 1:
        kind, options = adapters[0]
        _WRITERS[kind](directory, base_dir, **options)
        return {}
    entries = []
    for number, (kind, options) in enumerate(adapters, 1):
        apart = _WRITERS[kind](directory / kind, base_dir, **options)
        entry = {"path": f"{number}-{kind}.safetensors", "config": f"{number}-{kind}.json"}
        (apart / WEIGHTS_PATH).rename(directory / entry["path"])
        (apart / CONFIG_PATH).rename(directory / entry["config"])
        apart.rmdir()
        entries.append(entry)
    return {"adapters": entries}


_WRITERS: Mapping[AdapterKind, Callable[..., Path]] = {
    "lora": write_lora,
    "dora": write_dora,
    "ia3": write_ia3,
    "soft_prompt": write_soft_prompt,
}


def make_route_request(**options: Any) -> RouteRequest:
    """Return a routing request; options of the engine go into its configuration."""
    names = {each.name for each in fields(EngineConfig)} & options.keys()
    config = EngineConfig(**{name: options.pop(name) for name in names})
    return RouteRequest(**{"prompt": "x", **options}, config=config)
