"""A base read straight into packed matrices: its own numbers, in the memory told before."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from expertctl.engine.cpu import base_loader
from expertctl.engine.cpu.base_loader import load_packed_base
from expertctl.engine.cpu.packed_base import (
    PackedBase,
    allocate_base,
    packed_base_bytes,
    write_tensor,
)
from expertctl.engine.cpu.tensor_packing import compact_expert
from expertctl.engine.kernels.packed_format import PACKED_SCHEMES, Scheme
from expertctl.engine.kernels.packed_matrix import ExpertShape, PackedMatrix, pack_matrix
from expertctl.engine.memory.host import allocate
from expertctl.engine.torch.weights import load_base_weights
from expertctl.errors import (
    BaseMismatchError,
    IncompatibleError,
    InvalidPackageError,
    NotFoundError,
)
from expertctl.files import open_staged_file
from expertctl.package.base_tensors import read_base_tensors
from expertctl.package.model_config import EMBEDDING_TENSOR, ModelConfig, read_model_config
from expertctl.routing.plan import NUMERIC_VERSION
from expertctl.store.bases import BaseStore
from expertctl.store.quantised_cache import VERSION, QuantisedCache
from expertctl.store.quantised_file import QuantisedLayout, iterate_pieces, write_quantised
from tests.engine.packing import pack_base
from tests.factories import VOCAB, write_base

INTEGERS = (Scheme.INT8, Scheme.INT5, Scheme.INT4)
SIZES: dict[str, Any] = {"head_dim": 16, "hidden": 48, "intermediate": 80}


def made(directory: Path, **config: Any) -> Path:
    return write_base(directory, **{**SIZES, **config})


def load(directory: Path, scheme: Scheme = Scheme.FLOAT32, **options: Any) -> PackedBase:
    return load_packed_base(directory, read_model_config(directory), scheme, **options)


def arrays(base: PackedBase) -> dict[str, np.ndarray[Any, Any]]:
    found = {}
    for name, place in base.tensor_places().items():
        if isinstance(place, PackedMatrix):
            found[f"{name} data"], found[f"{name} scales"] = place.data, place.scales
        else:
            found[name] = place
    return found


def rewrite(directory: Path, **changes: torch.Tensor | None) -> None:
    """Replace tensors (``__`` stands for a dot); None removes one."""
    path = directory / "model.safetensors"
    tensors: dict[str, Any] = {n: t.clone() for n, t in load_file(path).items()}
    tensors |= {name.replace("__", "."): tensor for name, tensor in changes.items()}
    save_file({n: t for n, t in tensors.items() if t is not None}, path)


@pytest.mark.parametrize("scheme", PACKED_SCHEMES, ids=lambda scheme: scheme.value)
@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
def test_a_base_is_what_its_tensors_packed_in_memory_are(
    stored: str, scheme: Scheme, tmp_path: Path
) -> None:
    base = made(tmp_path / "base", arch="qwen2", tie=False, shards=3, dtype=stored)
    expected = pack_base(
        read_model_config(base), load_base_weights(base, read_model_config(base)), scheme
    )
    found = load(base, scheme)
    assert arrays(found).keys() == arrays(expected).keys()
    for name, numbers in arrays(expected).items():
        np.testing.assert_array_equal(arrays(found)[name], numbers, name, strict=True)
    assert found.nbytes == packed_base_bytes(found.config, scheme)


def test_a_tensor_of_many_stretches_is_packed_like_a_whole(tmp_path: Path) -> None:
    """The embedding is read in several goes by several threads, the last one not a full block."""
    base = made(tmp_path / "base", hidden=512, vocab=20_003, layers=1, dtype="bfloat16")
    weights = load_base_weights(base, read_model_config(base))
    found = load(base, Scheme.FLOAT32).unpack_weights("lm_head")
    assert torch.equal(torch.from_numpy(found), weights.tensors[EMBEDDING_TENSOR])


@pytest.mark.parametrize(
    ("stored", "scheme", "warnings"),
    [
        ("bfloat16", Scheme.BFLOAT16, ()),
        ("bfloat16", Scheme.FLOAT32, ()),
        (
            "float16",
            Scheme.BFLOAT16,
            ("base weights stored as float16 are rounded to bfloat16",),
        ),
        ("bfloat16", Scheme.INT8, ()),
        ("float32", Scheme.INT4, ()),
    ],
)
def test_what_the_numbers_lose_is_told_unless_it_was_asked_for_by_name(
    stored: str, scheme: Scheme, warnings: tuple[str, ...], tmp_path: Path
) -> None:
    base = made(tmp_path / "base", dtype=stored)
    assert load(base, scheme).warnings == warnings


def test_progress_counts_every_packed_byte(tmp_path: Path) -> None:
    base = made(tmp_path / "base", vocab=1000)
    seen: list[int] = []
    found = load(base, Scheme.INT8, progress=seen.append)
    assert sum(seen) == found.nbytes


@pytest.mark.parametrize("scheme", INTEGERS, ids=lambda scheme: scheme.value)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused_by_name(
    scheme: Scheme, bad: float, added: tuple[Path, QuantisedCache]
) -> None:
    directory, copies = added
    name = "model.layers.1.mlp.down_proj.weight"
    weights = load_file(directory / "model.safetensors")[name].clone()
    weights[5, 7] = bad
    rewrite(directory, **{name.replace(".", "__"): weights})
    with pytest.raises(InvalidPackageError, match=f"{name} has NaN or infinity") as refused:
        load(directory, scheme, copies=copies)
    assert "int8 and int4 cannot store them" in refused.value.hint
    assert not copies.path(scheme.value).exists()
    load(directory, Scheme.BFLOAT16)


def test_weights_that_are_too_large_for_int4_are_refused_by_name(
    added: tuple[Path, QuantisedCache],
) -> None:
    directory, copies = added
    name = "model.layers.1.mlp.down_proj.weight"
    weights = load_file(directory / "model.safetensors")[name].clone()
    weights[5, 7] = 2e5
    rewrite(directory, **{name.replace(".", "__"): weights})
    for scheme in (Scheme.INT5, Scheme.INT4):
        with pytest.raises(IncompatibleError, match=f"{name} has weights up to 2e") as refused:
            load(directory, scheme, copies=copies)
        assert refused.value.hint == "use --dtype int8 or bf16"
        assert not copies.path(scheme.value).exists()
    load(directory, Scheme.INT8)


def test_what_progress_raises_ends_the_load(tmp_path: Path) -> None:
    class GivenUpError(Exception):
        pass

    def give_up(_: int) -> None:
        raise GivenUpError

    with pytest.raises(GivenUpError):
        load(made(tmp_path / "base"), progress=give_up)


def test_a_tied_head_is_the_embedding_and_may_be_stored_too(tmp_path: Path) -> None:
    base = made(tmp_path / "base", tie=True)
    before = load(base)
    assert before.head is before.embedding
    rewrite(base, lm_head__weight=load_file(base / "model.safetensors")[EMBEDDING_TENSOR].clone())
    assert load(base).nbytes == before.nbytes


def test_a_tied_head_that_is_another_matrix_is_refused(tmp_path: Path) -> None:
    base = made(tmp_path / "base", tie=True)
    other = load_file(base / "model.safetensors")[EMBEDDING_TENSOR].clone()
    other[-1, -1] += 1
    rewrite(base, lm_head__weight=other)
    with pytest.raises(IncompatibleError, match=r"lm_head\.weight differs"):
        load(base)


def test_what_is_wrong_with_tensors_is_told_as_for_any_base(tmp_path: Path) -> None:
    base = made(tmp_path / "base")
    rewrite(base, model__norm__weight=None, other__weight=torch.zeros(2, 2))
    with pytest.raises(InvalidPackageError) as caught:
        load(base)
    problems = ("missing tensor model.norm.weight", "unexpected tensor other.weight")
    assert caught.value.problems == problems
    rewrite(base, other__weight=None, model__norm__weight=torch.ones(48, dtype=torch.int8))
    with pytest.raises(IncompatibleError, match=r"model\.norm\.weight is I8"):
        load(base)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    base = made(tmp_path / "base", shards=2)
    next(base.glob("*-00002-*")).unlink()
    with pytest.raises(NotFoundError, match=r"00002-of-00002\.safetensors is missing"):
        load(base)


def test_a_file_that_is_cut_between_its_header_and_its_numbers_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = made(tmp_path / "base")

    def cut_then(directory: Path, config: ModelConfig) -> Any:
        read = read_base_tensors(directory, config)
        path = directory / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
        return read

    monkeypatch.setattr(base_loader, "read_base_tensors", cut_then)
    with pytest.raises(InvalidPackageError, match=r"model\.safetensors: .*it changed"):
        load(base)


def test_sizes_that_fill_no_blocks_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    base = made(tmp_path / "base", head_dim=24)
    with pytest.raises(IncompatibleError, match="head_dim is 24, not a multiple of 16"):
        load(base)


@pytest.fixture
def added(tmp_path: Path) -> tuple[Path, QuantisedCache]:
    """A base that the machine knows, and its copies."""
    directory, bases = made(tmp_path / "base", arch="qwen2"), BaseStore(tmp_path / "bases")
    return directory, QuantisedCache(bases, bases.add(directory))


def assert_same(found: PackedBase, expected: PackedBase) -> None:
    for name, numbers in arrays(expected).items():
        np.testing.assert_array_equal(arrays(found)[name], numbers, name, strict=True)
    assert found.warnings == expected.warnings


@pytest.mark.parametrize("scheme", [Scheme.INT8, Scheme.INT4])
def test_a_quantised_base_is_read_from_its_copy_the_next_time(
    scheme: Scheme, added: tuple[Path, QuantisedCache]
) -> None:
    directory, copies = added
    config = read_model_config(directory)
    expected = load(directory, scheme)
    tensors = config.tensor_shapes().values()
    first = load(directory, scheme, copies=copies)
    assert first.read_bytes == sum(4 * int(np.prod(shape)) for shape in tensors)
    assert_same(first, expected)
    rewrite(directory, model__norm__weight=torch.zeros(48))  # the store would refuse such a base
    seen: list[int] = []
    again = load(directory, scheme, copies=copies, progress=seen.append)
    assert_same(again, expected)
    assert again.read_bytes == sum(seen) == packed_base_bytes(config, scheme)
    assert copies.take_notes() == ()


def test_a_damaged_copy_is_made_again_from_the_base(added: tuple[Path, QuantisedCache]) -> None:
    directory, copies = added
    expected = load(directory, Scheme.INT8, copies=copies)
    path = copies.path("int8")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)
    seen: list[int] = []
    assert_same(load(directory, Scheme.INT8, copies=copies, progress=seen.append), expected)
    assert sum(seen) == expected.nbytes, "no byte is counted twice"
    assert [note.endswith("made again") for note in copies.take_notes()] == [True]
    assert copies.find_problems() == {}
    assert load(directory, Scheme.INT8, copies=copies).read_bytes == expected.nbytes


def test_a_copy_does_not_hide_what_is_wrong_with_the_base(
    added: tuple[Path, QuantisedCache],
) -> None:
    directory, copies = added
    load(directory, Scheme.INT8, copies=copies)
    rewrite(directory, lm_head__weight=torch.zeros(VOCAB, 48))
    with pytest.raises(IncompatibleError, match=r"lm_head\.weight differs"):
        load(directory, Scheme.INT8, copies=copies)
    rewrite(directory, lm_head__weight=None, model__norm__weight=None)
    with pytest.raises(InvalidPackageError, match=r"missing tensor model\.norm\.weight"):
        load(directory, Scheme.INT8, copies=copies)


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
def test_what_is_packed_for_a_copy_has_the_digest_of_the_base(stored: str, tmp_path: Path) -> None:
    """Tensors of several stretches, biases, a head of its own and one that is stored twice."""
    bases = BaseStore(tmp_path / "bases")
    cases: dict[str, dict[str, Any]] = {
        "large": {"hidden": 512, "vocab": 20_003, "layers": 1},
        "untied": {"arch": "qwen2", "tie": False, "shards": 3},
        "tied": {"tie": True},
    }
    for name, config in cases.items():
        directory = made(tmp_path / name, dtype=stored, **config)
        if name == "tied":
            head = load_file(directory / "model.safetensors")[EMBEDDING_TENSOR].clone()
            rewrite(directory, lm_head__weight=head)
        copies = QuantisedCache(bases, bases.add(directory))
        made_now = load(directory, Scheme.INT4, copies=copies)
        assert copies.path("int4").exists()
        assert_same(load(directory, Scheme.INT4, copies=copies), made_now)


def test_a_base_that_changed_unseen_is_refused_and_not_kept(
    added: tuple[Path, QuantisedCache],
) -> None:
    """One number of one tensor is another, as a write that keeps size and time would leave it."""
    directory, copies = added
    other = load_file(directory / "model.safetensors")[EMBEDDING_TENSOR].clone()
    other[-1, -1] += 1
    rewrite(directory, model__embed_tokens__weight=other)
    for scheme in INTEGERS:
        with pytest.raises(BaseMismatchError, match="its weights are sha256:"):
            load(directory, scheme, copies=copies)
        assert not copies.path(scheme.value).exists()


def test_floats_are_read_from_the_base_itself(added: tuple[Path, QuantisedCache]) -> None:
    directory, copies = added
    for scheme in (Scheme.FLOAT32, Scheme.FLOAT16, Scheme.BFLOAT16):
        load(directory, scheme, copies=copies)
        assert not copies.path(scheme.value).exists()


BYTES_OF_VERSION = {
    1: {Scheme.INT8: "66834e4f103f2473", Scheme.INT4: "1c59b71787133ed0"},
    2: {Scheme.INT8: "66834e4f103f2473", Scheme.INT4: "7fa4a9adb950eec5"},
    3: {Scheme.INT8: "66834e4f103f2473", Scheme.INT4: "7fa4a9adb950eec5"},
    4: {Scheme.INT8: "66834e4f103f2473", Scheme.INT4: "7fa4a9adb950eec5"},
    5: {
        Scheme.INT8: "f2e3877f6303c4fa",
        Scheme.INT5: "f5f631ded8a7013f",
        Scheme.INT4: "547b99ac5a733a32",
    },
    6: {
        Scheme.INT8: "ed3bf99dc06d2b5f",
        Scheme.INT5: "fcda02809bd95a1a",
        Scheme.INT4: "b74402efb6d9dad4",
    },
    7: {
        Scheme.INT8: "761fa1fc79970f3f",
        Scheme.INT5: "14597f5550eeb88c",
        Scheme.INT4: "cc7f455de8f2b80f",
    },
}
"""What a small base is like in each `VERSION`. Lines are added, never changed: copies of an older
version are still on disks, and their seals are right."""
LAYOUT_OF_VERSION = {
    1: "a seal, then the memory",
    2: "a seal, then the memory",
    3: "030d6436f91839f0",
    4: "81fe6915197b92e0",
    5: "81fe6915197b92e0",
    6: "81fe6915197b92e0",
    7: "81fe6915197b92e0",
}
"""What the file is like in which they are; from 3 on a digest of a small one."""
NUMBERS_OF_VERSION = {2: 4, 3: 4, 4: 4, 5: 6, 6: 7, 7: 8}
"""The `NUMERIC_VERSION` that a `VERSION` came with, as other steps give other answers."""
_GOLDEN = {Scheme.INT8: "1ddc00b5523a8dc1", Scheme.INT4: "c9cb2db5da890d55"}
GOLDEN_OF_VERSION = {
    **dict.fromkeys((2, 3, 4), _GOLDEN),
    5: {
        Scheme.INT8: "d8e35a86902ace05",
        Scheme.INT5: "83069b1c1bb0022d",
        Scheme.INT4: "ebd5297d464d2a44",
    },
    6: {
        Scheme.INT8: "e98d108042137090",
        Scheme.INT5: "83069b1c1bb0022d",
        Scheme.INT4: "ebd5297d464d2a44",
    },
    7: {
        Scheme.INT8: "532d259f67389609",
        Scheme.INT5: "83069b1c1bb0022d",
        Scheme.INT4: "ebd5297d464d2a44",
    },
}
"""The same of a matrix that a formula makes, whatever becomes of random numbers."""


COMPACT_OF_VERSION = dict.fromkeys((4, 5, 6, 7), "f3293de8a18e2c36")
"""And of an expert in bfloat16, from the version on that keeps them compact."""


def test_what_is_kept_has_the_version_of_its_bytes(
    added: tuple[Path, QuantisedCache],
) -> None:
    """Whoever changes how a base is quantised or laid out raises VERSION and adds its digests."""
    directory, _ = added
    config = read_model_config(directory)
    found = {}
    for scheme in INTEGERS:
        memory = allocate(packed_base_bytes(config, scheme))
        weights = load_base_weights(directory, config)
        for name, place in allocate_base(config, scheme, memory).tensor_places().items():
            write_tensor(place, weights.tensors[name].numpy())
        found[scheme] = hashlib.sha256(memory).hexdigest()[:16]
    assert found == BYTES_OF_VERSION[VERSION]


def test_a_golden_matrix_has_the_bytes_of_its_version() -> None:
    mixed = (np.arange(40 * 300, dtype=np.uint32) * np.uint32(2654435761)) >> np.uint32(8)
    numbers = (mixed.astype(np.float32) / np.float32(1 << 23) - 1).reshape(40, 300)
    assert {scheme: digest_of(pack_matrix(numbers, scheme)) for scheme in INTEGERS} == (
        GOLDEN_OF_VERSION[VERSION]
    )


def test_a_compact_expert_has_the_bytes_of_its_version() -> None:
    shape = ExpertShape(Scheme.BFLOAT16, 272, 144)
    mixed = (np.arange(shape.nbytes // 2, dtype=np.uint32) * np.uint32(2654435761)) >> np.uint32(8)
    numbers = mixed.astype(np.float32) / np.float32(1 << 23) - 1
    block = (numbers.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    found = hashlib.sha256(compact_expert(block, shape).tobytes()).hexdigest()[:16]
    assert found == COMPACT_OF_VERSION[VERSION]


def test_a_file_is_laid_out_as_its_version_says(tmp_path: Path) -> None:
    shape, memory = (
        QuantisedLayout(rest_bytes=300, blocks=2, block_bytes=64),
        memoryview(bytes(428)),
    )
    with open_staged_file(tmp_path / "copy") as write:
        write_quantised(write, "of a version", shape, iterate_pieces(memory, shape))
    found = hashlib.sha256((tmp_path / "copy").read_bytes()).hexdigest()
    assert found[:16] == LAYOUT_OF_VERSION[VERSION]


def test_a_version_is_never_given_to_other_bytes() -> None:
    assert list(BYTES_OF_VERSION) == list(range(1, VERSION + 1))
    told = [(*BYTES_OF_VERSION[n].values(), LAYOUT_OF_VERSION[n]) for n in BYTES_OF_VERSION]
    assert len(set(told)) == len(told), "a version that changes nothing loses copies for nothing"
    assert NUMBERS_OF_VERSION[VERSION] <= NUMERIC_VERSION, "saved plans would be believed"


def digest_of(matrix: PackedMatrix) -> str:
    return hashlib.sha256(matrix.data.tobytes() + matrix.scales.tobytes()).hexdigest()[:16]
