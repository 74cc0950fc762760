"""Experts in the formats of other programs: a LoRA in GGUF, and a base with an expert in it.

`export_gguf` writes what llama.cpp loads beside a base. `export_merged` writes a Hugging Face
directory whose weights are those of the base with the expert applied, in the type in which the
base has them: W + scale B A for LoRA, the rows of that with the learnt norm for DoRA, and rows or
columns multiplied by the factors of IA³. A soft prompt changes no weight, so it cannot be merged.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from expertctl.digest import Progress, ignore_progress
from expertctl.engine.adapters.load import LoadedAdapter
from expertctl.engine.adapters.steps import AdapterStep, DoraTensors, Ia3Tensors, LoraTensors
from expertctl.engine.arrays import AnyArray, FloatArray, round_to_bfloat16, widen
from expertctl.engine.base_files import iter_row_portions
from expertctl.errors import IncompatibleError
from expertctl.package.base_tensors import INDEX_FILE, read_base_tensors
from expertctl.package.config_document import CONFIG_FILE
from expertctl.package.gguf_adapter import LoraMatrices, write_gguf_lora
from expertctl.package.model_config import EMBEDDING_TENSOR, HEAD_TENSOR, read_model_config
from expertctl.package.stored_tensor import StoredTensor

_SHARD_BYTES = 4 << 30
HEAD_MODULE = HEAD_TENSOR.removesuffix(".weight")
_KEPT_FILES = ("generation_config.json", "chat_template.jinja", "tokenizer.json")
_TOKENIZER_FILES = ("tokenizer_config.json", "special_tokens_map.json", "tokenizer.model")
_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_TORCH_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def export_gguf(output: BinaryIO, adapter: LoadedAdapter, base: Path, *, label: str) -> None:
    """Write the LoRA of an expert as a GGUF file, for a base in a directory.

    Raises:
        IncompatibleError: for other kinds, and modules that such a file cannot name.
    """
    config = read_model_config(base)
    if adapter.soft_prompts:
        raise _make_refusal(adapter, "a soft prompt")
    found: dict[str, Sequence[LoraTensors]] = {}
    for module, steps in adapter.modules.items():
        loras = [step for step in steps if isinstance(step, LoraTensors)]
        if len(loras) < len(steps):
            raise _make_refusal(adapter, "DoRA or IA³")
        found[module] = loras
    alphas = {lora.scale * lora.rank for loras in found.values() for lora in loras}
    is_plain = len(alphas) == 1 and all(len(loras) == 1 for loras in found.values())
    write_gguf_lora(
        output,
        [_join(module, loras, is_plain=is_plain) for module, loras in found.items()],
        config,
        alpha=alphas.pop() if is_plain else 1.0,
        name=adapter.ref,
        base=label,
    )


def _make_refusal(adapter: LoadedAdapter, kind: str) -> IncompatibleError:
    return IncompatibleError(
        f"{adapter.ref}: {kind} cannot be written as a GGUF adapter, which llama.cpp has for LoRA",
        hint="`expertctl export … --merged DIR` writes the base with the expert in it"
        if kind != "a soft prompt"
        else "`expertctl export … --peft` writes what PEFT loads",
    )


def _join(module: str, loras: Sequence[LoraTensors], *, is_plain: bool) -> LoraMatrices:
    """Return the sum of the LoRA of a module; if not plain, for an alpha of 1."""
    if is_plain:
        return LoraMatrices(module, loras[0].a, loras[0].b)
    rank = sum(lora.rank for lora in loras)
    a = np.concatenate([widen(lora.a) for lora in loras])
    b = np.concatenate([widen(lora.b) * np.float32(lora.scale * rank) for lora in loras], axis=1)
    return LoraMatrices(module, a, b)


def export_merged(
    directory: Path,
    adapter: LoadedAdapter,
    base: Path,
    *,
    progress: Progress = ignore_progress,
) -> None:
    """Write a base with an expert in it to an existing, empty directory; counts written bytes.

    Memory: some rows at a time in float32.

    Raises:
        IncompatibleError: for soft prompts, and bases whose files have other names or layouts.
        InvalidPackageError: when a file of the base cannot be read to its end.
    """
    config = read_model_config(base)
    if adapter.soft_prompts:
        raise IncompatibleError(
            f"{adapter.ref}: a soft prompt changes no weight, so it cannot be merged",
            hint="`expertctl export … --peft` writes what PEFT loads",
        )
    if not config.stored_places.are_usual:
        raise IncompatibleError(
            f"{adapter.ref}: a base of {config.architecture} cannot be written",
            hint="`expertctl export … --peft` writes what PEFT loads, and merges",
        )
    stored = {name: each for name, each in read_base_tensors(base, config).items()}
    is_untied = config.tied and HEAD_MODULE in adapter.modules
    if is_untied:
        stored[HEAD_TENSOR] = stored[EMBEDDING_TENSOR]
    _require_modules(adapter, stored)
    dtypes = {name: _choose_dtype(tensor) for name, tensor in sorted(stored.items())}
    _write_weights(directory, stored, dtypes, adapter, progress)
    for name in (*_KEPT_FILES, *_TOKENIZER_FILES):
        if (base / name).is_file():
            shutil.copyfile(base / name, directory / name)
    _write_config(directory, base, set(dtypes.values()), is_untied=is_untied)


def _require_modules(adapter: LoadedAdapter, stored: Mapping[str, StoredTensor]) -> None:
    """Require that the base has every module that an expert changes."""
    absent = sorted(module for module in adapter.modules if f"{module}.weight" not in stored)
    if absent:
        raise IncompatibleError(f"{adapter.ref}: the base has no {absent[0]}")


def _choose_dtype(tensor: StoredTensor) -> str:
    """Return the type to write: that of the file; float16 for what is stored in integers."""
    if tensor.codec is not None and tensor.info.dtype == "F32" and len(tensor.info.shape) > 1:
        return "F16"
    return tensor.info.dtype


def _write_weights(
    directory: Path,
    stored: Mapping[str, StoredTensor],
    dtypes: Mapping[str, str],
    adapter: LoadedAdapter,
    progress: Progress,
) -> None:
    shards = _split_shards(stored, dtypes)
    total, places = 0, dict[str, str]()
    for number, names in enumerate(shards, start=1):
        file = "model.safetensors"
        if len(shards) > 1:
            file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        with (directory / file).open("xb") as output:
            output.write(_encode_header(stored, dtypes, names))
            for name in names:
                module, _, end = name.rpartition(".")
                steps = adapter.modules.get(module, ())
                for data in _iter_merged(
                    stored[name], dtypes[name], steps, is_weight=end == "weight"
                ):
                    output.write(data)
                    total += len(data)
                    progress(len(data))
                places[name] = file
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _count_bytes(tensor: StoredTensor, dtype: str) -> int:
    return int(np.prod(tensor.info.shape)) * _ITEM_BYTES[dtype]


def _split_shards(
    stored: Mapping[str, StoredTensor], dtypes: Mapping[str, str]
) -> Sequence[Sequence[str]]:
    shards: list[list[str]] = [[]]
    size = 0
    for name, dtype in dtypes.items():
        own = _count_bytes(stored[name], dtype)
        if shards[-1] and size + own > _SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += own
    return shards


def _encode_header(
    stored: Mapping[str, StoredTensor], dtypes: Mapping[str, str], names: Sequence[str]
) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        begin, end = end, end + _count_bytes(stored[name], dtypes[name])
        shape = list(stored[name].info.shape)
        header[name] = {"dtype": dtypes[name], "shape": shape, "data_offsets": [begin, end]}
    data = json.dumps(header).encode()
    data = data.ljust(-(-len(data) // 8) * 8)
    return len(data).to_bytes(8, "little") + data


def _iter_merged(
    tensor: StoredTensor, dtype: str, steps: Sequence[AdapterStep], *, is_weight: bool
) -> Iterator[bytes]:
    """Yield the bytes of a tensor of the base with the expert in it, some rows at a time."""
    first = 0
    for numbers in iter_row_portions(tensor):
        rows = slice(first, first + len(numbers))
        first = rows.stop
        if not steps and tensor.info.dtype == dtype:
            yield numbers.tobytes()
            continue
        whole = widen(numbers)
        for step in steps:
            whole = _apply(step, whole, rows, is_weight=is_weight)
        yield _ROUND[dtype](whole).tobytes()


def _apply(step: AdapterStep, numbers: FloatArray, rows: slice, *, is_weight: bool) -> FloatArray:
    """Return rows of a weight [out, in], or a part of a bias [out], with one change."""
    match step:
        case Ia3Tensors():
            vector = widen(step.vector).reshape(-1)
            if step.on_input:
                return numbers * vector if is_weight else numbers
            return numbers * (vector[rows, None] if is_weight else vector[rows])
        case _ if not is_weight:
            return numbers
        case LoraTensors():
            return numbers + _multiply(step, rows)
        case DoraTensors():
            changed: FloatArray = numbers + _multiply(step, rows)
            norms = np.sqrt(np.square(changed, dtype=np.float64).sum(axis=1))
            with np.errstate(divide="ignore", invalid="ignore"):  # a row of zeros, as in PEFT
                factors = widen(step.magnitude).reshape(-1)[rows] / norms
                scaled: FloatArray = changed * factors.astype(np.float32)[:, None]
            return scaled


def _multiply(step: LoraTensors | DoraTensors, rows: slice) -> FloatArray:
    product: FloatArray = (widen(step.b[rows]) @ widen(step.a)) * np.float32(step.scale)
    return product


_ROUND: Mapping[str, Callable[[FloatArray], AnyArray]] = {
    "F32": lambda numbers: numbers,
    "F16": lambda numbers: numbers.astype(np.float16),
    "BF16": round_to_bfloat16,
}


def _write_config(directory: Path, base: Path, dtypes: set[str], *, is_untied: bool) -> None:
    """Write the configuration with the type of the weights, and without a quantisation."""
    config = json.loads((base / CONFIG_FILE).read_bytes())
    for name in ("quantization_config", "compression_config"):
        config.pop(name, None)
    narrow = dtypes - {"F32"}
    dtype = narrow.pop() if len(narrow) == 1 else "F32"
    for key in ("torch_dtype", "dtype"):
        if key in config or key == "torch_dtype":
            config[key] = _TORCH_NAMES[dtype]
    if is_untied:
        config["tie_word_embeddings"] = False
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (directory / CONFIG_FILE).write_text(text, encoding="utf-8")
