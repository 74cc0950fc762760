"""A GGUF file as a base: the files of a Hugging Face folder that follow from its header.

`derive_base_files` returns ``config.json``, ``tokenizer.json`` and ``tokenizer_config.json`` with
the same bytes for the same file, and `GGUF_TABLE`, which names the file and its tensors. Written
into one folder, they are a base like any other, and the GGUF file stays as it is.

What llama.cpp's converter does to a model is undone, as the rows of `expertctl.package.gguf_rows`
say: names of tensors, projections in one matrix, the order of the rows of queries and keys (llama),
one added to the weights of norms (Gemma), and RoPE factors that follow from a configuration (Llama
3). The numbers of the header are float32; as config.json states decimals, the shortest one of each
is taken.
"""

import json
import math
import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import msgspec

from expertctl.errors import IncompatibleError, InvalidPackageError
from expertctl.package.architecture_rows import ARCHITECTURES
from expertctl.package.architectures import Architecture, ConfigFields
from expertctl.package.config_document import CONFIG_FILE
from expertctl.package.gguf_codec import GGUF_TABLE, GgufCodec, GgufEntry, GgufTable
from expertctl.package.gguf_file import GgufHeader, GgufTensor
from expertctl.package.gguf_rows import (
    GGUF_ARCHITECTURES,
    OWN_FILES_HINT,
    GgufArchitecture,
    read_family_settings,
    reject_settings,
    split_tensor,
)
from expertctl.package.gguf_tokenizer import build_tokenizer_files
from expertctl.package.model_config import parse_model_config
from expertctl.package.stored_tensor import StoredTensor
from expertctl.package.tensor_file import TensorInfo
from expertctl.schema.strict_json import JsonObject, JsonValue

if TYPE_CHECKING:
    import numpy as np


_EMBEDDING, _HEAD, _ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
_FACTORS = (_ROPE_FACTORS, _LONG, _SHORT)
_PAIRED = ("self_attn.q_proj", "self_attn.k_proj")
_NARROW = ("F16", "BF16")
_FLOATS = (*_NARROW, "F32")
_MAX_LAYERS = 1 << 10
_LLAMA3_ORIGINALS = (8192, 4096, 16384, 32768)
_LLAMA3_LOW, _LLAMA3_HIGH = 1.0, 4.0
_MAX_FACTOR_ERROR = 1e-5
_MAX_FACTOR = 1e4
_MAX_DIVISORS = 1 << 10
_ORIGINAL = "original_context_length"
_ATTENTION = ("attn_q", "attn_qkv", "attn_output")
_MAX_WIDENED_BYTES = 16 << 20
"""Longer tensors are not read to find out whether they were widened."""


def derive_base_files(header: GgufHeader, *, file: str) -> dict[str, bytes]:
    """Return the files of a base by name; ``file`` is how the table names the GGUF file.

    Raises:
        IncompatibleError: when the architecture, the tokenizer or a setting is not supported.
        InvalidPackageError: when the header contradicts itself.
        OSError: when the file cannot be read.
    """
    return {**derive_weight_files(header, file=file), **build_tokenizer_files(header)}


def derive_weight_files(header: GgufHeader, *, file: str) -> dict[str, bytes]:
    """Return the files of a base without its tokenizer; raises as above."""
    config, row = _build_config(header)
    table = GgufTable(1, file, tuple(_list_entries(header, config, row)))
    return {
        CONFIG_FILE: encode_document(config),
        GGUF_TABLE: msgspec.json.format(msgspec.json.encode(table), indent=1) + b"\n",
    }


def encode_document(document: JsonObject) -> bytes:
    """Return a JSON document as a file, with the same bytes for the same values."""
    return json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False).encode() + b"\n"


def _build_config(header: GgufHeader) -> tuple[JsonObject, GgufArchitecture]:
    """Return ``config.json``, with the keys of its architecture, and the row of the file."""
    what, values = str(header.path), _collect_scalars(header)
    fields = ConfigFields(values)
    name = fields.read_text("general.architecture")
    fields.raise_problems(what)
    _reject_other_files(fields, what)
    row = GGUF_ARCHITECTURES.get(name)
    if row is None:
        raise IncompatibleError(
            f"{what}: architecture {name[:40]!r} is not supported",
            hint=f"supported in GGUF are {', '.join(GGUF_ARCHITECTURES)}",
        )
    reject_settings(header, fields, name, row)
    embedding = header.tensors.get(_EMBEDDING)
    if embedding is None or len(embedding.shape) != 2:
        raise InvalidPackageError(what, [f"{_EMBEDDING} is missing, or no matrix"])
    kind = row.find_type(fields, name)
    rules = ARCHITECTURES[kind]
    config = _read_sizes(fields, name, rules)
    config |= {
        "vocab_size": embedding.shape[0],
        "hidden_act": rules.activation,
        "attention_bias": any(f"blk.0.{part}.bias" in header.tensors for part in _ATTENTION),
        "mlp_bias": "blk.0.ffn_down.bias" in header.tensors,
        "tie_word_embeddings": _HEAD not in header.tensors,
    }
    config |= _read_rope(header, fields, name, config)
    config |= read_family_settings(header, fields, name, config)
    fields.raise_problems(what)
    named: JsonObject = {rules.keys.get(key, key): value for key, value in config.items()}
    return {**named, "architectures": [rules.class_name], "model_type": kind}, row


def _collect_scalars(header: GgufHeader) -> JsonObject:
    """Return all values but arrays; an array of one value for every layer counts as that value."""
    values: JsonObject = {}
    for key, value in header.metadata.items():
        if not isinstance(value, tuple):
            values[key] = _shorten(value)
        elif value and len(value) <= _MAX_LAYERS and len(set(value)) == 1:
            values[key] = _shorten(value[0])
    return values


def _shorten(value: bool | int | float | str) -> JsonValue:
    """Return the shortest decimal of a float32 number, as 1e-05 for 9.999999747378752e-06."""
    if not isinstance(value, float):
        return value
    for digits in range(1, 10):
        short = float(f"{value:.{digits}g}")
        if _to_float32(short) == _to_float32(value):
            return short
    return value


def _to_float32(number: float) -> bytes | None:
    try:
        return struct.pack("<f", number)
    except OverflowError:
        return None


def _reject_other_files(fields: ConfigFields, what: str) -> None:
    kind = fields.read_text("general.type", default="model")
    if kind != "model":
        hint = "give the GGUF file of the whole model"
        raise IncompatibleError(f"{what}: a GGUF file of type {kind[:40]!r}", hint=hint)
    if fields.read_integer("split.count", minimum=0, maximum=1 << 16, default=0) > 1:
        raise IncompatibleError(
            f"{what}: one of several files of a model",
            hint="merge them first: `llama-gguf-split --merge FIRST.gguf MODEL.gguf`",
        )


def _read_sizes(fields: ConfigFields, name: str, rules: Architecture) -> JsonObject:
    limit = 1 << 24
    hidden = fields.read_integer(f"{name}.embedding_length", minimum=1, maximum=limit)
    heads = fields.read_integer(f"{name}.attention.head_count", minimum=1, maximum=limit)
    dim = fields.read_integer(
        f"{name}.attention.key_length", minimum=2, maximum=limit, default=max(hidden // heads, 2)
    )
    rotated = fields.read_integer(
        f"{name}.rope.dimension_count", minimum=2, maximum=limit, default=dim
    )
    is_whole = rotated == dim or (rules.partial_rotary is not None and rotated < dim)
    if not is_whole or fields.get(f"{name}.attention.value_length") not in (None, dim):
        fields.add_problem(f"{name}.rope.dimension_count", f"is {rotated}, a head has {dim}")
    part: JsonObject = {"partial_rotary_factor": _divide(rotated, dim)}
    norm = "layer_norm" if rules.norm.startswith("layer") else "layer_norm_rms"
    return {
        **(part if rules.partial_rotary is not None else {}),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "head_dim": dim,
        "num_key_value_heads": fields.read_integer(
            f"{name}.attention.head_count_kv", minimum=1, maximum=limit, default=heads
        ),
        "num_hidden_layers": fields.read_integer(
            f"{name}.block_count", minimum=1, maximum=_MAX_LAYERS
        ),
        "intermediate_size": fields.read_integer(
            f"{name}.feed_forward_length", minimum=1, maximum=limit
        ),
        "max_position_embeddings": fields.read_integer(
            f"{name}.context_length", minimum=1, maximum=limit
        ),
        "rms_norm_eps": fields.read_number(
            f"{name}.attention.{norm}_epsilon", minimum=0.0, maximum=1.0
        ),
    }


def _divide(part: int, whole: int) -> float:
    """Return a fraction of a whole number that makes the part again when it is rounded down."""
    exact = part / whole
    above = math.nextafter(exact, math.inf)
    return exact if int(whole * exact) == part else above


def _read_rope(
    header: GgufHeader, fields: ConfigFields, name: str, config: JsonObject
) -> JsonObject:
    theta = fields.read_number(f"{name}.rope.freq_base", minimum=2.0, maximum=1e12, default=10000.0)
    rope: JsonObject = {"rope_theta": theta}
    old = fields.read_number(f"{name}.rope.scale_linear", minimum=1.0, maximum=1e4, default=1.0)
    kind = fields.read_text(f"{name}.rope.scaling.type", default="linear" if old != 1 else "none")
    factor = fields.read_number(
        f"{name}.rope.scaling.factor", minimum=0.0, maximum=1e4, default=old
    )
    if _ROPE_FACTORS in header.tensors:
        if kind != "none":
            fields.add_problem(f"{name}.rope.scaling.type", f"is {kind}, besides {_ROPE_FACTORS}")
        return {**rope, "rope_scaling": _find_llama3_scaling(header, theta, config)}
    if _SHORT in header.tensors:
        return {**rope, **_read_longrope(header, fields, name, config)}
    scaling: JsonObject = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        scaling |= _read_yarn(fields, f"{name}.rope.scaling")
    elif kind not in {"none", "linear"}:
        raise IncompatibleError(
            f"{header.path}: RoPE scaling {kind[:40]!r} is not supported",
            hint="supported in GGUF are none, linear, yarn and the factors of Llama 3",
        )
    is_scaled = kind == "yarn" or (kind == "linear" and factor not in (0.0, 1.0))
    return {**rope, "rope_scaling": scaling} if is_scaled else rope


def _read_yarn(fields: ConfigFields, prefix: str) -> JsonObject:
    original = fields.read_integer(f"{prefix}.{_ORIGINAL}", minimum=1, maximum=1 << 24)
    found: JsonObject = {"original_max_position_embeddings": original}
    for name in ("beta_fast", "beta_slow"):
        if fields.get(f"{prefix}.yarn_{name}") is not None:
            key = f"{prefix}.yarn_{name}"
            found[name] = fields.read_number(key, minimum=0.0, maximum=1e4)
    if fields.read_number(f"{prefix}.attn_factor", minimum=0.0, maximum=1e4, default=1.0) != 1.0:
        fields.add_problem(f"{prefix}.attn_factor", "other than 1 is not supported")
    return found


def _find_llama3_scaling(header: GgufHeader, theta: float, config: JsonObject) -> JsonObject:
    """Return the Llama 3 scaling whose factors a file stores.

    Raises:
        IncompatibleError: when they follow from none that is known.
    """
    stored = header.tensors[_ROPE_FACTORS]
    dim = cast(int, config["head_dim"])
    if stored.kind.name == "F32" and stored.shape == (dim // 2,):
        factors = [float(n) for n in _read_tensor(header, stored)]
        is_sound = all(1.0 <= number <= _MAX_FACTOR for number in factors)
        for original in _LLAMA3_ORIGINALS if is_sound else ():
            expected = list(_iter_llama3_factors(max(factors), original, theta, dim))
            pairs = zip(factors, expected, strict=True)
            if all(abs(a - b) <= _MAX_FACTOR_ERROR * b for a, b in pairs):
                return {
                    "rope_type": "llama3",
                    "factor": _shorten(max(factors)),
                    "low_freq_factor": _LLAMA3_LOW,
                    "high_freq_factor": _LLAMA3_HIGH,
                    "original_max_position_embeddings": original,
                }
    raise IncompatibleError(
        f"{header.path}: the factors in {_ROPE_FACTORS} are not those of Llama 3",
        hint=OWN_FILES_HINT,
    )


def _read_longrope(
    header: GgufHeader, fields: ConfigFields, name: str, config: JsonObject
) -> JsonObject:
    """Return the LongRoPE scaling whose divisors are two tensors of the file."""
    prefix = f"{name}.rope.scaling"
    original = fields.read_integer(f"{prefix}.{_ORIGINAL}", minimum=1, maximum=1 << 24)
    stretch = max(1.0, cast(int, config["max_position_embeddings"]) / original)
    usual = math.sqrt(1 + math.log(stretch) / math.log(original)) if original > 1 else 1.0
    found = fields.read_number(f"{prefix}.attn_factor", minimum=1e-3, maximum=1e3, default=usual)
    scaling: JsonObject = {"rope_type": "longrope"}
    for key, tensor in (("short_factor", _SHORT), ("long_factor", _LONG)):
        scaling[key] = _read_divisors(header, tensor)
    if abs(found - usual) > _MAX_FACTOR_ERROR * usual:
        scaling["attention_factor"] = found
    return {"rope_scaling": scaling, "original_max_position_embeddings": original}


def _read_divisors(header: GgufHeader, name: str) -> list[JsonValue]:
    stored = header.tensors.get(name)
    if stored is None or stored.kind.name != "F32" or len(stored.shape) != 1:
        raise InvalidPackageError(str(header.path), [f"{name} is missing, or no vector in F32"])
    if stored.shape[0] > _MAX_DIVISORS:
        problem = f"{name} has {stored.shape[0]} numbers, at most {_MAX_DIVISORS} are read"
        raise InvalidPackageError(str(header.path), [problem])
    return [_shorten(float(number)) for number in _read_tensor(header, stored)]


def _iter_llama3_factors(factor: float, original: int, theta: float, dim: int) -> Iterator[float]:
    """Yield what each frequency is divided by; see `Llama3Scaling`."""
    for number in range(dim // 2):
        turns = original / (2 * math.pi * theta ** (2 * number / dim))
        if turns > _LLAMA3_HIGH:
            yield 1.0
        elif turns < _LLAMA3_LOW:
            yield factor
        else:
            share = (turns - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
            yield 1 / ((1 - share) / factor + share)


def _list_entries(
    header: GgufHeader, config: JsonObject, row: GgufArchitecture
) -> Iterator[GgufEntry]:
    """Yield the entry of every tensor; the caller of `read_base_tensors` checks that all are there.

    Raises:
        InvalidPackageError: when the name of one is unknown, or its shape does not fit.
    """
    sizes = parse_model_config(config, what=str(header.path))
    shapes = sizes.tensor_shapes()
    narrow = _find_matrix_dtype(header)
    for tensor in header.tensors.values():
        if tensor.name in _FACTORS:
            continue
        if len(tensor.shape) == 1 and tensor.kind.name not in _FLOATS:
            problem = f"{tensor.name} is a vector in blocks of {tensor.kind.name}"
            raise InvalidPackageError(str(header.path), [problem])
        shifted = row.shifted and tensor.name.endswith("norm.weight")
        if shifted and tensor.kind.name != "F32":
            problem = f"{tensor.name} is {tensor.kind.name}, norms of this architecture are F32"
            raise InvalidPackageError(str(header.path), [problem])
        plain = narrow if narrow and _is_widened(header, tensor, narrow, shifted=shifted) else ""
        for name, shape, first in split_tensor(header, tensor, row, sizes, shapes):
            module = name.rpartition(".")[0]
            is_paired = row.paired and module.endswith(_PAIRED)
            is_float = tensor.kind.name in _FLOATS
            yield GgufEntry(
                name=name,
                stored=tensor.name,
                kind=tensor.kind.name,
                shape=shape,
                offset=tensor.offset + tensor.kind.count_bytes(first),
                paired=sizes.head_dim if is_paired else 0,
                plain=plain,
                shifted=shifted,
                transposed=is_float and sizes.stored_places.is_transposed(module, shape),
            )


def _find_matrix_dtype(header: GgufHeader) -> str:
    """Return the 16-bit float of all matrices that are not float32; empty if there is no such."""
    matrices = (tensor for tensor in header.tensors.values() if len(tensor.shape) > 1)
    kinds = {tensor.kind.name for tensor in matrices} - {"F32"}
    return kinds.pop() if len(kinds) == 1 and kinds.issubset(_NARROW) else ""


def _is_widened(header: GgufHeader, tensor: GgufTensor, dtype: str, *, shifted: bool) -> bool:
    """Tell whether a float32 tensor has only numbers of a narrower dtype, so was widened."""
    if tensor.kind.name != "F32" or len(tensor.shape) > 2 or tensor.size > _MAX_WIDENED_BYTES:
        return False
    from expertctl.package.gguf_blocks import is_exact_in  # numpy: only to read numbers

    numbers = _read_tensor(header, tensor)
    return is_exact_in(numbers - 1 if shifted else numbers, dtype)


def _read_tensor(header: GgufHeader, tensor: GgufTensor) -> "np.ndarray[Any, Any]":
    info = TensorInfo("F32", tensor.shape, 0, tensor.size)
    raw = StoredTensor(header.path, info, tensor.offset, tensor.name, file=header.state)
    return GgufCodec(raw, tensor.kind, 0).read_rows(0, tensor.shape[0])
