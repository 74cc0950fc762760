"""GGUF files as bases, against the folders that they were made from."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from expertctl.errors import IncompatibleError, InvalidPackageError, NotFoundError
from expertctl.package.base_model import read_base
from expertctl.package.base_tensors import read_base_tensors, read_foreign_tensors
from expertctl.package.gguf_base import derive_base_files
from expertctl.package.gguf_codec import GGUF_TABLE
from expertctl.package.gguf_file import read_gguf_header
from expertctl.package.model_config import read_model_config
from tests.factories import write_base
from tests.gguf_files import read_numbers, write_gguf

_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def derive(path: Path, folder: Path) -> Path:
    folder.mkdir()
    files = derive_base_files(read_gguf_header(path), file=str(path))
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def convert(tmp_path: Path, *, kind: str = "F32", **options: Any) -> tuple[Path, Path]:
    base = write_base(tmp_path / "base", **{"hidden": 64, "intermediate": 96, **options})
    return base, derive(write_gguf(tmp_path / "model.gguf", base, kind=kind), tmp_path / "derived")


@pytest.mark.parametrize(
    ("arch", "options"),
    [
        ("llama", {"rms_norm_eps": 1e-5, "rope_theta": 500000.0}),
        ("llama", {"attention_bias": True, "tie": False}),
        ("qwen2", {"tie": False}),
        ("qwen3", {"head_dim": 32}),
    ],
)
def test_a_float32_file_is_the_base_it_was_made_from(
    arch: str, options: dict[str, Any], tmp_path: Path
) -> None:
    base, derived = convert(tmp_path, arch=arch, **options)
    assert read_model_config(derived) == read_model_config(base)
    ours, theirs = read_numbers(derived), read_numbers(base)
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
    found, known = read_base(derived).identity, read_base(base).identity
    assert (found.arch, found.weights) == (known.arch, known.weights)


@pytest.mark.parametrize(("dtype", "kind"), [("float16", "F16"), ("bfloat16", "BF16")])
@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_a_16_bit_file_has_the_digests_of_its_base(
    dtype: str, kind: str, arch: str, tmp_path: Path
) -> None:
    """The converter widens vectors to float32; they are hashed as what they were."""
    base, derived = convert(tmp_path, arch=arch, dtype=dtype, kind=kind)
    found, known = read_base(derived).identity, read_base(base).identity
    assert (found.arch, found.weights) == (known.arch, known.weights)
    ours, theirs = read_numbers(derived), read_numbers(base)
    assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_blocks_have_the_numbers_that_llama_cpp_reads(kind: str, tmp_path: Path) -> None:
    base, derived = convert(tmp_path, arch="llama", kind=kind)
    stored = read_base_tensors(derived, read_model_config(derived))
    ours, theirs = read_numbers(derived), read_numbers(base)
    for name, numbers in theirs.items():
        assert stored[name].storage == (kind if numbers.ndim == 2 else "F32")
        blocks = gguf.quants.quantize(numbers, gguf.GGMLQuantizationType[kind])
        rounded = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
        assert np.array_equal(ours[name], rounded if numbers.ndim == 2 else numbers)
    found, known = read_base(derived).identity, read_base(base).identity
    assert found.arch == known.arch
    assert found.weights != known.weights


def test_rows_are_read_from_any_place(tmp_path: Path) -> None:
    _, derived = convert(tmp_path, arch="llama", kind="Q8_0", head_dim=16)
    name = "model.layers.1.self_attn.q_proj.weight"
    tensor = read_base_tensors(derived, read_model_config(derived))[name]
    whole = read_numbers(derived)[name]
    assert tensor.codec is not None
    for first, count in ((0, 1), (5, 1), (7, 20), (15, 2), (63, 1)):
        assert np.array_equal(tensor.codec.read_rows(first, count), whole[first : first + count])


def test_factors_of_llama_3_become_its_scaling(tmp_path: Path) -> None:
    base = write_base(
        tmp_path / "base", arch="llama", head_dim=64, rope_theta=500000.0, rope_scaling=_LLAMA3
    )
    path = write_gguf(tmp_path / "plain.gguf", base)
    scaled = add_tensor(path, tmp_path / "scaled.gguf", "rope_freqs.weight", make_factors())
    derived = derive(scaled, tmp_path / "derived")
    assert read_model_config(derived).rope == read_model_config(base).rope
    odd = add_tensor(path, tmp_path / "odd.gguf", "rope_freqs.weight", make_factors() + 1)
    with pytest.raises(IncompatibleError, match="not those of Llama 3"):
        derive_base_files(read_gguf_header(odd), file="odd.gguf")


def make_factors() -> np.ndarray[Any, Any]:
    """Return the factors as llama.cpp's converter computes them."""
    frequencies = 1.0 / (500000.0 ** (np.arange(0, 64, 2) / 64))
    lengths = 2 * np.pi / frequencies
    smooth = (8192 / lengths - 1.0) / (4.0 - 1.0)
    between = 1 / ((1 - smooth) / 8.0 + smooth)
    factors = np.where(lengths < 8192 / 4.0, 1.0, np.where(lengths > 8192, 8.0, between))
    return factors.astype(np.float32)


def add_tensor(path: Path, target: Path, name: str, numbers: np.ndarray[Any, Any]) -> Path:
    """Copy a file of one architecture with one more tensor, and its keys as they are."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            kinds = [*field.types, None]
            writer.add_key_value(field.name, field.contents(), kinds[0], kinds[1])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    writer.add_tensor(name, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


@pytest.mark.parametrize(
    ("keys", "scaling"),
    [
        ({"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 128},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        ),
        ({"type": "none"}, None),
    ],
)
def test_rope_scaling_is_read(
    keys: dict[str, Any], scaling: dict[str, Any] | None, tmp_path: Path
) -> None:
    base = write_base(tmp_path / "base", rope_scaling=scaling)
    changed = {f"qwen3__rope__scaling__{name}": value for name, value in keys.items()}
    path = write_gguf(tmp_path / "model.gguf", base, **changed)
    derived = derive(path, tmp_path / "derived")
    assert read_model_config(derived).rope == read_model_config(base).rope


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"general__architecture": "mamba"}, "architecture 'mamba'"),
        ({"general__type": "adapter"}, "type 'adapter'"),
        ({"split__count": 3}, "one of several files"),
        ({"qwen3__expert_count": 8}, "routed experts"),
        ({"qwen3__attention__sliding_window": 512}, "sliding_window"),
        ({"qwen3__attention__sliding_window": [64, 0]}, "sliding_window"),
        ({"qwen3__attention__scale": [0.5, 0.25]}, r"attention\.scale"),
        ({"qwen3__rope__freq_base": [1e6, 5e5]}, r"rope\.freq_base"),
        ({"qwen3__rope__scaling__factor": [2.0, 4.0]}, r"rope\.scaling\.factor"),
        ({"qwen3__expert_count": [0, 2]}, "expert_count"),
        ({"qwen3__rope__scaling__type": "longrope"}, "'longrope'"),
        ({"tokenizer__ggml__model": "rwkv"}, "tokenizer model 'rwkv'"),
        ({"tokenizer__ggml__pre": "unheard-of"}, "pre-tokenizer 'unheard-of'"),
    ],
)
def test_what_is_not_supported_is_named(
    changed: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    base = write_base(tmp_path / "base", layers=1)
    if changed.keys() == {"general__architecture"}:
        path = tmp_path / "model.gguf"
        writer = gguf.GGUFWriter(path, "mamba")
        writer.add_tensor("token_embd.weight", np.zeros((2, 2), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    else:
        path = write_gguf(tmp_path / "model.gguf", base, **changed)
    with pytest.raises(IncompatibleError, match=problem) as error:
        derive_base_files(read_gguf_header(path), file="model.gguf")
    assert error.value.hint


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"qwen3__block_count": None}, "block_count is missing"),
        ({"qwen3__rope__dimension_count": 4}, "a head has 8"),
        ({"qwen3__rope__dimension_count": 61}, "a head has 8"),
        ({"tokenizer__ggml__tokens": ["a", "a"]}, "token_type has 259 items"),
        ({"tokenizer__ggml__tokens": None}, "tokens is missing"),
        ({"tokenizer__ggml__merges": ["ab"]}, "does not make a token"),
        ({"tokenizer__ggml__eos_token_id": 999}, "there are 259"),
        ({"tokenizer__ggml__add_bos_token": "yes"}, "no boolean"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(
    changed: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "m.gguf", write_base(tmp_path / "base", layers=1), **changed)
    with pytest.raises(InvalidPackageError, match=problem):
        derive_base_files(read_gguf_header(path), file="m.gguf")


def test_the_same_file_gives_the_same_bytes(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", write_base(tmp_path / "base"))
    first, second = (derive_base_files(read_gguf_header(path), file="m") for _ in range(2))
    assert first == second


def test_a_table_that_does_not_fit_the_file_is_refused(tmp_path: Path) -> None:
    _, derived = convert(tmp_path, kind="Q8_0")
    config, place = read_model_config(derived), derived / GGUF_TABLE
    table = json.loads(place.read_text())
    for changes, problem in (
        ({"offset": 1 << 40}, "ends after the file"),
        ({"kind": "Q2_K"}, "malformed entry"),
        ({"shape": [1, 2, 3]}, "malformed entry"),
        ({"more": 1}, "not a table"),
    ):
        changed = [{**table["tensors"][0], **changes}, *table["tensors"][1:]]
        place.write_text(json.dumps({**table, "tensors": changed}))
        with pytest.raises(InvalidPackageError, match=problem):
            read_base_tensors(derived, config)
    place.write_text(json.dumps({**table, "file": "gone.gguf"}))
    with pytest.raises(NotFoundError, match=r"gone\.gguf is missing"):
        read_base_tensors(derived, config)
    with pytest.raises(IncompatibleError, match="transformers does not run"):
        read_foreign_tensors(derived)


def test_a_vector_in_blocks_is_refused(tmp_path: Path) -> None:
    """Also one that a table names; the numbers of a vector are read without blocks."""
    _, derived = convert(tmp_path, kind="Q8_0")
    header = read_gguf_header(tmp_path / "model.gguf")
    config, place = read_model_config(derived), derived / GGUF_TABLE
    table = json.loads(place.read_text())
    for entry in table["tensors"]:
        if len(entry["shape"]) == 1:
            entry["kind"] = "Q8_0"
    place.write_text(json.dumps(table))
    with pytest.raises(InvalidPackageError, match="malformed entry"):
        read_base_tensors(derived, config)
    tensors = dict(header.tensors)
    norm = tensors["output_norm.weight"]
    tensors["output_norm.weight"] = replace(norm, kind=tensors["token_embd.weight"].kind)
    with pytest.raises(InvalidPackageError, match="a vector in blocks of Q8_0"):
        derive_base_files(replace(header, tensors=tensors), file="m")


@pytest.mark.parametrize("factors", [np.zeros(32), np.full(32, 1e9), np.ones((2, 16))], ids=str)
def test_factors_that_no_scaling_has_are_refused(
    factors: np.ndarray[Any, Any], tmp_path: Path
) -> None:
    base = write_base(tmp_path / "base", arch="llama", head_dim=64)
    path = write_gguf(tmp_path / "plain.gguf", base)
    odd = add_tensor(path, tmp_path / "odd.gguf", "rope_freqs.weight", factors.astype(np.float32))
    with pytest.raises(IncompatibleError, match="not those of Llama 3"):
        derive_base_files(read_gguf_header(odd), file="odd.gguf")
