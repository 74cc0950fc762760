"""The files that llama.cpp is given, read back by the format's description."""

import struct
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.gguf import width_name, write_gguf
from benchmarks.inputs import make_base_config
from expertctl.engine.cpu.base_loader import WEIGHT_STD
from expertctl.engine.kernels.packed_format import Scheme
from expertctl.package.model_config import ModelConfig

CODES = {Scheme.FLOAT32: 0, Scheme.BFLOAT16: 30, Scheme.INT8: 8, Scheme.INT4: 2}
BYTES = {Scheme.FLOAT32: 32 * 4, Scheme.BFLOAT16: 32 * 2, Scheme.INT8: 34, Scheme.INT4: 18}
"""Bytes of 32 numbers."""


@dataclass(frozen=True)
class TensorEntry:
    shape: tuple[int, ...]
    code: int
    offset: int


@dataclass(frozen=True)
class File:
    facts: dict[str, object]
    entries: dict[str, TensorEntry]
    numbers: bytes


def small_config() -> ModelConfig:
    config = make_base_config(vocabulary=96)
    return replace(
        config,
        hidden_size=64,
        intermediate_size=160,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=32,
        rope=replace(config.rope, dims=32),
        windows=(None, None),
    )


class GgufReader:
    def __init__(self, data: bytes) -> None:
        self.data, self.place = data, 0

    def take(self, form: str) -> tuple[int | float | bytes, ...]:
        found = struct.unpack_from("<" + form, self.data, self.place)
        self.place += struct.calcsize("<" + form)
        return found

    def number(self, form: str) -> int:
        return int(self.take(form)[0])

    def text(self) -> str:
        length = self.number("Q")
        self.place += length
        return self.data[self.place - length : self.place].decode()

    def value(self) -> object:
        kind = self.number("I")
        return self.text() if kind == 8 else self.take({4: "I", 6: "f"}[kind])[0]

    def entry(self) -> TensorEntry:
        shape = tuple(self.number("Q") for _ in range(self.number("I")))[::-1]
        return TensorEntry(shape, self.number("I"), self.number("Q"))


def read(path: Path) -> File:
    reader = GgufReader(path.read_bytes())
    assert reader.take("4sI") == (b"GGUF", 3)
    tensors, facts = reader.number("Q"), reader.number("Q")
    known = {reader.text(): reader.value() for _ in range(facts)}
    entries = {reader.text(): reader.entry() for _ in range(tensors)}
    return File(known, entries, reader.data[-(-reader.place // 32) * 32 :])


@pytest.fixture(params=list(CODES), ids=lambda scheme: scheme.value)
def written(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Scheme, File]:
    scheme: Scheme = request.param
    return scheme, read(write_gguf(tmp_path / "base.gguf", small_config(), scheme))


def test_every_tensor_stands_at_its_place_and_the_file_ends_with_the_last(
    written: tuple[Scheme, File],
) -> None:
    scheme, file = written
    end = 0
    for entry in file.entries.values():
        matrix = len(entry.shape) == 2
        assert entry.code == (CODES[scheme] if matrix else CODES[Scheme.FLOAT32])
        assert entry.offset == -(-end // 32) * 32
        count = int(np.prod(entry.shape))
        end = entry.offset + count // 32 * BYTES[scheme if matrix else Scheme.FLOAT32]
    assert end == len(file.numbers)


def test_names_and_sizes_are_those_of_the_base(written: tuple[Scheme, File]) -> None:
    _, file = written
    assert len(file.entries) == 2 + 2 * 11
    assert file.entries["token_embd.weight"].shape == (96, 64)
    assert file.entries["blk.1.attn_output.weight"].shape == (64, 128)
    assert file.entries["blk.0.attn_k.weight"].shape == (64, 64)
    assert file.entries["blk.1.ffn_down.weight"].shape == (64, 160)
    assert file.entries["blk.0.attn_q_norm.weight"].shape == (32,)
    assert "output.weight" not in file.entries
    assert file.facts["general.architecture"] == "qwen3"
    assert (file.facts["qwen3.attention.head_count_kv"], file.facts["qwen3.vocab_size"]) == (2, 96)
    assert file.facts["qwen3.rope.freq_base"] == 1e6


def test_norms_are_ones_and_weights_are_as_far_apart_as_intended(
    written: tuple[Scheme, File],
) -> None:
    scheme, file = written
    norm = file.entries["output_norm.weight"]
    found = np.frombuffer(file.numbers, "<f4", 64, norm.offset)
    np.testing.assert_array_equal(found, 1)
    down = file.entries["blk.1.ffn_down.weight"]
    size = 64 * 160 // 32 * BYTES[scheme]
    weights = numbers(scheme, file.numbers[down.offset : down.offset + size])
    assert np.isfinite(weights).all()
    assert 0.9 * WEIGHT_STD < weights.std() < 1.1 * WEIGHT_STD


def numbers(scheme: Scheme, data: bytes) -> np.ndarray:
    """What ggml makes of stored numbers."""
    raw = np.frombuffer(data, np.uint8)
    if scheme is Scheme.FLOAT32:
        return raw.view("<f4")
    if scheme is Scheme.BFLOAT16:
        return (raw.view("<u2").astype("<u4") << 16).view("<f4")
    blocks = raw.reshape(-1, BYTES[scheme])
    steps = blocks[:, :2].copy().view("<f2").astype(np.float32)
    stored = blocks[:, 2:]
    if scheme is Scheme.INT8:
        return stored.view(np.int8) * steps
    return (np.concatenate((stored & 15, stored >> 4), axis=1).astype(np.int32) - 8) * steps


def test_widths_have_the_names_that_llama_cpp_gives_them() -> None:
    assert [width_name(scheme) for scheme in CODES] == ["f32", "bf16", "q8_0", "q4_0"]


def test_rows_that_are_no_whole_blocks_are_refused(tmp_path: Path) -> None:
    config = replace(small_config(), intermediate_size=168)
    with pytest.raises(AssertionError, match="rows of 168 are not whole blocks"):
        write_gguf(tmp_path / "base.gguf", config, Scheme.INT8)
