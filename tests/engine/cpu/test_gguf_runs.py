"""A GGUF file in memory as it is in the file: every matrix, and what a decoder makes of it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize

from expertctl.engine.backend import LoadConfig, LoadContext
from expertctl.engine.cpu.backend import PackedBackend, PackedModel
from expertctl.engine.cpu.packed_base import PackedMlp
from expertctl.engine.cpu.plain_decoder import PlainDecoder
from expertctl.engine.cpu.plain_weights import load_plain_weights
from expertctl.engine.kernels.packed_format import Scheme
from expertctl.engine.kernels.packed_matrix import PackedMatrix
from expertctl.engine.kv.block_pool import ROW_PAGES, PagedKVCache
from expertctl.package.base_tensors import read_storages
from expertctl.package.gguf_base import derive_base_files
from expertctl.package.gguf_file import read_gguf_header
from expertctl.package.model_config import read_model_config
from expertctl.settings import Home
from tests.factories import write_base
from tests.gguf_files import read_numbers, write_gguf

Array = np.ndarray[Any, Any]
IDS = [3, 77, 5, 200, 41, 9, 120, 8, 60, 33, 7]
EVERY = pytest.mark.parametrize(
    ("arch", "kind"),
    [("llama", "Q8_0"), ("llama", "Q4_0"), ("qwen3", "Q4_1"), ("qwen3", "Q5_0"), ("llama", "Q5_1")],
)
MIXED = {"v_proj": "Q8_0", "up_proj": "Q5_1", "down_proj": "Q5_0", "embed_tokens": "Q8_0"}
"""The kinds of some matrices of a mixed file, as llama.cpp writes Q4_K_M."""


def derive(tmp_path: Path, arch: str, kind: str, *, kinds: Mapping[str, str] | None = None) -> Path:
    """Return the folder of a base in GGUF whose rows fill blocks, untied, with grouped queries."""
    sizes = {"hidden": 64, "intermediate": 96, "head_dim": 16, "heads": 4, "kv_heads": 2}
    source = write_base(tmp_path / "source", arch=arch, tie=False, seed=3, **sizes)
    file = write_gguf(tmp_path / "base.gguf", source, kind=kind, kinds=kinds)
    folder = tmp_path / "derived"
    folder.mkdir()
    for name, data in derive_base_files(read_gguf_header(file), file=str(file)).items():
        (folder / name).write_bytes(data)
    return folder


def load(folder: Path, home: Path) -> tuple[PackedBackend, PackedModel]:
    config = read_model_config(folder)
    load_config = LoadConfig("gguf", storages=read_storages(folder, config))
    backend = PackedBackend.choose(config, load_config)
    return backend, backend.load(LoadContext(directory=folder, home=Home(home)))


@EVERY
def test_every_matrix_is_that_of_the_file(arch: str, kind: str, tmp_path: Path) -> None:
    """Also queries and keys, whose rows llama.cpp stores in another order."""
    folder = derive(tmp_path, arch, kind)
    backend, model = load(folder, tmp_path / "home")
    try:
        numbers = read_numbers(folder)
        matrices = [name for name, each in numbers.items() if each.ndim == 2]
        for name in matrices:
            if name == "model.embed_tokens.weight":
                continue
            np.testing.assert_array_equal(model.matrix(name.removesuffix(".weight")), numbers[name])
        held = {
            place.scheme
            for place in model.base.tensor_places().values()
            if isinstance(place, PackedMatrix)
        }
        assert held == {Scheme[kind]}
        assert model.nbytes == backend.weight_bytes
        assert model.warnings == ()
    finally:
        model.close()
    stored = {
        tensor.name: dequantize(tensor.data, GGMLQuantizationType[kind])
        for tensor in GGUFReader(tmp_path / "base.gguf").tensors
        if len(tensor.shape) == 2
    }
    np.testing.assert_array_equal(numbers["lm_head.weight"], stored["output.weight"])
    np.testing.assert_array_equal(
        numbers["model.layers.0.self_attn.v_proj.weight"], stored["blk.0.attn_v.weight"]
    )


def test_matrices_with_one_input_keep_their_kinds(tmp_path: Path) -> None:
    folder = derive(tmp_path, "llama", "Q4_0", kinds=MIXED)
    _, model = load(folder, tmp_path / "home")
    try:
        layer = model.base.layers[0]
        assert [part.scheme for part in layer.inputs.parts] == [Scheme.Q4_0, Scheme.Q8_0]
        assert isinstance(layer.mlp, PackedMlp)
        assert [part.scheme for part in layer.mlp.gate_up.parts] == [Scheme.Q4_0, Scheme.Q5_1]
        for name, numbers in read_numbers(folder).items():
            if numbers.ndim == 2 and name != "model.embed_tokens.weight":
                found = model.matrix(name.removesuffix(".weight"))
                np.testing.assert_array_equal(found, numbers)
        assert model.warnings == ()
    finally:
        model.close()


@pytest.mark.parametrize(
    ("arch", "kind", "kinds"),
    [
        ("llama", "Q8_0", {}),
        ("llama", "Q4_0", {}),
        ("qwen3", "Q4_1", {}),
        ("qwen3", "Q5_0", {}),
        ("llama", "Q4_0", MIXED),
    ],
    ids=str,
)
def test_a_decoder_predicts_as_one_with_the_decoded_numbers(
    arch: str, kind: str, kinds: dict[str, str], tmp_path: Path
) -> None:
    """Only activations are rounded, to eight bits."""
    folder = derive(tmp_path, arch, kind, kinds=kinds)
    backend, model = load(folder, tmp_path / "home")
    try:
        cache = PagedKVCache(model.base.config, 64, layout=backend.page_layout)
        found = model.decoder.prefill(IDS[:6], cache).logits
        for token in IDS[6:]:
            found = model.decoder.decode(token, cache).logits
    finally:
        model.close()
    config = read_model_config(folder)
    plain = PlainDecoder(config, load_plain_weights(folder, config))
    expected = plain.prefill(IDS, PagedKVCache(config, 64, layout=ROW_PAGES)).logits
    difference = np.abs(found - expected).max() / expected.std()
    assert difference < 0.06, difference
