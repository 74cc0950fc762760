"""LoRA in GGUF files, as llama.cpp's ``convert_lora_to_gguf.py`` writes them.

A file has ``general.type`` adapter, ``adapter.type`` lora and ``adapter.lora.alpha``, and for each
module two tensors: ``NAME.weight.lora_a`` [rank, in] and ``NAME.weight.lora_b`` [out, rank]. Where
the base stores the rows of queries and keys in pairs, so does B. The factor of a module is alpha
divided by its rank; an alpha of 0 stands for the factor 1.

`read_gguf_adapter` turns such a file into PEFT's terms, `write_gguf_lora` writes one. Modules have
the same names in PEFT only for architectures whose files have our names, so others are refused.
"""

import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from expertctl.errors import IncompatibleError, InvalidPackageError
from expertctl.package.adapter import PEFT_PREFIX
from expertctl.package.directory import find_source_file
from expertctl.package.foreign_adapter import ForeignAdapter, ForeignTensor, list_targets
from expertctl.package.gguf_file import GgufHeader, GgufTensor
from expertctl.package.gguf_rows import GGUF_ARCHITECTURES, LAYER_MODULES, find_gguf_name
from expertctl.package.model_config import ModelConfig
from expertctl.schema.strict_json import JsonObject

_TENSOR = re.compile(r"(?:blk\.(0|[1-9][0-9]{0,3})\.([a-z0-9_]+)|output)\.weight\.lora_([ab])")
_LAYER = re.compile(r"model\.layers\.(0|[1-9][0-9]{0,3})\.(.+)")
_REPOSITORY = re.compile(r"https://huggingface\.co/([A-Za-z0-9._-]{1,96}/[A-Za-z0-9._-]{1,96})/?")
_PAIRED = ("self_attn.q_proj", "self_attn.k_proj")
_STORED_NAMES = {module: name for name, module in LAYER_MODULES.items()}
_DTYPES: Mapping[str, np.dtype[np.generic]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}
_KINDS: Mapping[np.dtype[np.generic], int] = {
    np.dtype("<f4"): 0,
    np.dtype("<f2"): 1,
    np.dtype("<u2"): 30,
}
"""The number of a kind in the file; 16-bit words are those of bfloat16."""
_MAX_ALPHA, _MAX_RANK = 1e6, 1 << 16
_STRING, _UINT32, _FLOAT32 = 8, 4, 6
_ALIGNMENT, _VERSION = 32, 3
_FILE_TYPE_OTHER = "use the adapter's own folder, as PEFT saved it"

Array = np.ndarray[tuple[int, ...], np.dtype[np.generic]]


def is_adapter(header: GgufHeader) -> bool:
    """Tell whether a file is an adapter, not a model."""
    return header.metadata.get("general.type") == "adapter"


def find_label(header: GgufHeader) -> str | None:
    """Return the repository of the base that a file names, if it is one of the hub."""
    stated = header.metadata.get("general.base_model.0.repo_url")
    match = _REPOSITORY.fullmatch(stated) if isinstance(stated, str) else None
    return match[1] if match else None


def read_gguf_adapter(header: GgufHeader, config: ModelConfig) -> ForeignAdapter:
    """Return the LoRA in a file, in PEFT's terms, for a base with this configuration.

    Raises:
        IncompatibleError: for another kind of adapter, or another architecture than the base's.
        InvalidPackageError: when a tensor is unknown, or the tensors of a module do not fit.
    """
    what = str(header.path)
    arch, kind = (header.metadata.get(k) for k in ("general.architecture", "adapter.type"))
    if kind != "lora":
        raise IncompatibleError(
            f"{what} is an adapter of type {str(kind)[:40]!r}, only lora is supported"
        )
    if arch != find_gguf_name(config.architecture):
        raise IncompatibleError(
            f"{what} is for the architecture {str(arch)[:40]!r}, the base is {config.architecture}",
            hint="name its base with `--base NAME`",
        )
    require_usual_names(config, what)
    source = find_source_file(header.path.parent, header.path.name)
    if source is None:
        raise InvalidPackageError(what, ["is not a regular file"])
    ranks, tensors = _read_tensors(header, config)
    peft = _build_config(header, ranks, tensors)
    note = f"converted from a GGUF LoRA of {len(ranks)} modules"
    if GGUF_ARCHITECTURES[str(arch)].paired:
        note += ": rows of queries and keys are no longer in pairs"
    return ForeignAdapter(source, tensors, peft, note)


def require_usual_names(config: ModelConfig, what: str) -> None:
    """Require a base whose modules have the same names in PEFT, here and in a GGUF file.

    Raises:
        IncompatibleError: for another architecture.
    """
    if not config.stored_places.are_usual or find_gguf_name(config.architecture) is None:
        raise IncompatibleError(
            f"{what}: LoRA of {config.architecture} in GGUF are not supported",
            hint=_FILE_TYPE_OTHER,
        )


def _read_tensors(
    header: GgufHeader, config: ModelConfig
) -> tuple[dict[str, int], tuple[ForeignTensor, ...]]:
    """Return the rank of each module, and the tensors by PEFT's names."""
    halves: dict[str, dict[str, GgufTensor]] = {}
    problems = []
    for name, tensor in header.tensors.items():
        module = _find_module(name)
        if module is None:
            problems.append(f"unexpected tensor {name}")
        elif tensor.kind.name not in _DTYPES or len(tensor.shape) != 2:
            problems.append(f"{name} is {tensor.kind.name} {list(tensor.shape)}, not a matrix")
        else:
            halves.setdefault(module, {})[name[-1]] = tensor
    ranks = {}
    for module, pair in halves.items():
        if len(pair) < 2:
            problems.append(f"{module} has only lora_{next(iter(pair))}")
        elif not 0 < pair["a"].shape[0] == pair["b"].shape[1] <= _MAX_RANK:
            shapes = f"{list(pair['a'].shape)} and {list(pair['b'].shape)}"
            problems.append(f"{module}: lora_a and lora_b are {shapes}")
        else:
            ranks[module] = pair["a"].shape[0]
    if problems or not ranks:
        raise InvalidPackageError(str(header.path), problems[:20] or ["it has no tensor"])
    arch = find_gguf_name(config.architecture)
    is_paired = arch is not None and GGUF_ARCHITECTURES[arch].paired
    found = []
    for module, pair in halves.items():
        size = config.head_dim if is_paired and module.endswith(_PAIRED) else 0
        if size and pair["b"].shape[0] % size:
            problem = f"{module}: {pair['b'].shape[0]} outputs are no heads of {size}"
            raise InvalidPackageError(str(header.path), [problem])
        found += [_convert(module, "A", pair["a"], 0), _convert(module, "B", pair["b"], size)]
    return ranks, tuple(sorted(found, key=lambda each: each.name))


def _find_module(name: str) -> str | None:
    match = _TENSOR.fullmatch(name)
    if match is None:
        return None
    if match[1] is None:
        return "lm_head"
    module = LAYER_MODULES.get(match[2])
    return None if module is None else f"model.layers.{match[1]}.{module}"


def _convert(module: str, half: str, tensor: GgufTensor, head_dim: int) -> ForeignTensor:
    def read(stream: BinaryIO) -> bytes:
        stream.seek(tensor.offset)
        data = stream.read(tensor.size)
        if len(data) != tensor.size:
            raise InvalidPackageError("the weights", ["the file is cut short"])
        if not head_dim:
            return data
        rows: Array = np.frombuffer(data, _DTYPES[tensor.kind.name])
        pairs = rows.reshape(-1, head_dim // 2, 2, tensor.shape[1])
        return bytes(pairs.swapaxes(1, 2).tobytes())

    name = f"{PEFT_PREFIX}{module}.lora_{half}.weight"
    return ForeignTensor(name, tensor.kind.name, tensor.shape, read)


def _build_config(
    header: GgufHeader, ranks: Mapping[str, int], tensors: Sequence[ForeignTensor]
) -> JsonObject:
    alpha = header.metadata.get("adapter.lora.alpha")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not 0 <= alpha < _MAX_ALPHA:
        problem = f"adapter.lora.alpha is {str(alpha)[:40]}, not 0 to {_MAX_ALPHA:g}"
        raise InvalidPackageError(str(header.path), [problem])
    counts = list(ranks.values())
    rank = max(set(counts), key=lambda each: (counts.count(each), each))
    others: JsonObject = {module: r for module, r in sorted(ranks.items()) if r != rank}
    return {
        "base_model_name_or_path": find_label(header),
        "alpha_pattern": {} if alpha else dict(others),
        "bias": "none",
        "lora_alpha": alpha or rank,
        "peft_type": "LORA",
        "r": rank,
        "rank_pattern": others,
        "target_modules": list(list_targets(tensors)),
        "task_type": "CAUSAL_LM",
    }


@dataclass(frozen=True, slots=True)
class LoraMatrices:
    """The LoRA of one module: A [rank, in], B [out, rank], in float32, float16 or bfloat16."""

    module: str
    a: Array
    b: Array


def write_gguf_lora(
    output: BinaryIO,
    loras: Iterable[LoraMatrices],
    config: ModelConfig,
    *,
    alpha: float,
    name: str,
    base: str,
) -> None:
    """Write a LoRA; ``name`` and ``base`` are those of the expert and of its base.

    Raises:
        IncompatibleError: when a module has no name in such a file.
    """
    require_usual_names(config, name)
    arch = find_gguf_name(config.architecture)
    assert arch is not None, "checked"
    head_dim = config.head_dim if GGUF_ARCHITECTURES[arch].paired else 0
    matrices = [each for lora in loras for each in _list_matrices(lora, head_dim, name)]
    keys: dict[str, str | int | float] = {
        "general.architecture": arch,
        "general.type": "adapter",
        "general.name": name,
        "general.file_type": 0,
        "general.base_model.count": 1,
        "general.base_model.0.name": base,
        "adapter.type": "lora",
        "adapter.lora.alpha": float(alpha),
    }
    if _REPOSITORY.fullmatch(f"https://huggingface.co/{base}"):
        keys["general.base_model.0.repo_url"] = f"https://huggingface.co/{base}"
    head = bytearray(struct.pack("<4sIQQ", b"GGUF", _VERSION, len(matrices), len(keys)))
    for key, value in keys.items():
        head += _encode_text(key) + _encode_value(value)
    offset = 0
    for stored, matrix in matrices:
        rows, columns = matrix.shape
        head += _encode_text(stored) + struct.pack(
            "<IQQIQ", 2, columns, rows, _KINDS[matrix.dtype], offset
        )
        offset += _align(matrix.nbytes)
    output.write(head.ljust(_align(len(head)), b"\0"))
    for _, matrix in matrices:
        output.write(matrix.tobytes().ljust(_align(matrix.nbytes), b"\0"))


def _list_matrices(lora: LoraMatrices, head_dim: int, what: str) -> Iterator[tuple[str, Array]]:
    match = _LAYER.fullmatch(lora.module)
    part = _STORED_NAMES.get(match[2]) if match else None
    if part is None and lora.module != "lm_head":
        raise IncompatibleError(
            f"{what}: {lora.module} has no name in a LoRA of GGUF",
            hint="`expertctl export … --merged DIR` writes the base with the expert in it",
        )
    stored = "output" if match is None else f"blk.{match[1]}.{part}"
    b = lora.b
    if head_dim and lora.module.endswith(_PAIRED):
        halves = b.reshape(-1, 2, head_dim // 2, b.shape[1])
        b = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(b.shape))
    yield f"{stored}.weight.lora_a", lora.a
    yield f"{stored}.weight.lora_b", b


def _encode_text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _encode_value(value: str | float) -> bytes:
    match value:
        case str():
            return struct.pack("<I", _STRING) + _encode_text(value)
        case int():
            return struct.pack("<II", _UINT32, value)
        case _:
            return struct.pack("<If", _FLOAT32, value)


def _align(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
