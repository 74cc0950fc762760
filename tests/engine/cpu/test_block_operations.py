"""Today's model families in compiled kernels, against transformers and PEFT."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from expertctl.engine.adapters.compile import WeightedAdapter, fold_plan
from expertctl.engine.adapters.steps import EMPTY_DELTAS
from expertctl.engine.arrays import AnyArray
from expertctl.engine.backend import LoadConfig
from expertctl.engine.cpu.backend import PackedBackend
from expertctl.engine.cpu.base_loader import load_packed_base
from expertctl.engine.cpu.decoder import DecodeRow, PackedDecoder
from expertctl.engine.cpu.decoder_program import (
    build_decoder_program,
    estimate_program_bytes,
    list_common_sources,
)
from expertctl.engine.cpu.plain_backend import PlainBackend
from expertctl.engine.cpu.plain_decoder import PlainDecoder
from expertctl.engine.cpu.plain_weights import load_plain_weights
from expertctl.engine.cpu.program_cache import estimate_buffer_bytes
from expertctl.engine.cpu.workspace import Workspace, choose_variant
from expertctl.engine.kernels.layer_operations import affine_kernel
from expertctl.engine.kernels.packed_format import PackedDeltas, Scheme
from expertctl.engine.kernels.packed_matrix import (
    PackedMatrix,
    pack_matrix,
    packing_kernel,
    unpack_matrix,
)
from expertctl.engine.kernels.thread_pool import POOL_SOURCES, ThreadPool
from expertctl.engine.kv.block_pool import ROW_PAGES, PagedKVCache
from expertctl.engine.load_plan import choose_backend
from expertctl.errors import IncompatibleError
from expertctl.package.model_config import (
    EMBEDDING_TENSOR,
    HEAD_TENSOR,
    POSITIONS_TENSOR,
    ModelConfig,
    read_model_config,
)
from expertctl.store.bases import BaseStore
from expertctl.store.quantised_cache import QuantisedCache
from tests.engine.conftest import TOLERANCE
from tests.engine.family_models import (
    SHAPES,
    build_family_model,
    is_recurrent,
    save_family_adapter,
)
from tests.engine.memory_measurement import count_fewest_allocations
from tests.engine.package_fixtures import load_adapters
from tests.engine.random_experts import make_packed_plan, make_random_expert
from tests.factories import write_tokenizer

COMPILED = [(a, c) for a, c in SHAPES if not is_recurrent(a) and a != "gpt_oss"]
IDS = [3, 60, 0, 17, 17, 42, 8, 25, 31, 5, 59, 2, 44, 13, 7, 28, 9, 30, 21, 52]


def enlarge(arch: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return a shape with heads and MLPs that fill the blocks of kernels."""
    if arch == "gpt2":
        return {"n_embd": 64, "n_head": config.get("n_head", 4), **config, "n_inner": 80}
    made = {"hidden_size": 64, "intermediate_size": 80, **config}
    if "head_dim" in config:
        made["head_dim"] = 32 if config["head_dim"] == 12 else 16
    if "shared_intermediate_size" in config:
        made["shared_intermediate_size"] = 48
    rope = config.get("rope_parameters", {})
    if "short_factor" in rope:
        longer = {name: rope[name] * 2 for name in ("short_factor", "long_factor")}
        made["rope_parameters"] = {**rope, **longer}
    return made


def run(decoder: PackedDecoder, *, prefill: int, deltas: PackedDeltas | None = None) -> AnyArray:
    """Logits from the last prompt token on, [1 + decoded, vocab]."""
    cache = PagedKVCache(decoder.config, 30)
    rows = [decoder.prefill(IDS[:prefill], cache, deltas).logits]
    rows += [decoder.decode(token, cache, deltas).logits for token in IDS[prefill:]]
    return np.stack(rows)


def assert_close(ours: AnyArray, theirs: AnyArray) -> None:
    scale = max(1.0, float(np.abs(theirs).max()))
    assert float(np.abs(ours - theirs).max()) <= TOLERANCE * scale
    assert (ours.argmax(-1) == theirs.argmax(-1)).all()


def assert_left_to_numpy(config: ModelConfig) -> None:
    backend, warnings = choose_backend(config, LoadConfig("float32"), numpy_below=0)
    assert isinstance(backend, PlainBackend)
    assert "numpy runs the base, which is slower: the kernels cannot run" in "".join(warnings)
    with pytest.raises(IncompatibleError, match="the kernels cannot run the architecture"):
        choose_backend(config, LoadConfig("int8"))


def find_shape(arch: str, place: int = 0) -> dict[str, Any]:
    """Return a shape of a family, by its place among those of the family."""
    return enlarge(arch, [config for name, config in SHAPES if name == arch][place])


def load(
    directory: Path, crew: ThreadPool, scheme: Scheme = Scheme.FLOAT32, *, chunk: int = 8
) -> PackedDecoder:
    base = load_packed_base(directory, read_model_config(directory), scheme)
    return PackedDecoder(base, crew, chunk=chunk)


@pytest.mark.parametrize(("arch", "config"), COMPILED, ids=str)
def test_logits_and_loras_are_those_of_transformers_and_peft(
    arch: str, config: dict[str, Any], crew: ThreadPool, tmp_path: Path
) -> None:
    directory, lora = tmp_path / "base", tmp_path / "lora"
    model = build_family_model(directory, arch, **enlarge(arch, config))
    parsed = read_model_config(directory)
    if not parsed.has_kernels:
        assert_left_to_numpy(parsed)
        return
    adapted = save_family_adapter(model, "lora", lora)
    backend, warnings = choose_backend(parsed, LoadConfig("float32"), numpy_below=0)
    assert isinstance(backend, PackedBackend)
    assert warnings == ()
    spec = backend.compile_spec
    plan = fold_plan([WeightedAdapter(spec.adapt(load_adapters(lora)))], spec).compile()
    decoder = load(directory, crew)
    assert decoder._base.nbytes == backend.weight_bytes
    for deltas, reference in ((None, model), (plan.packed, adapted)):
        with torch.inference_mode():
            theirs = reference(torch.tensor([IDS]), use_cache=False).logits[0].numpy()
        for prefill in (9, 20):
            assert_close(run(decoder, prefill=prefill, deltas=deltas), theirs[prefill - 1 :])


@pytest.mark.parametrize("arch", ["gemma2", "gpt_neox", "gpt2", "phi3", "phi", "cohere"])
def test_ia3_changes_what_it_changes_in_peft(arch: str, crew: ThreadPool, tmp_path: Path) -> None:
    directory, folder = tmp_path / "base", tmp_path / "ia3"
    model = build_family_model(directory, arch, **find_shape(arch))
    adapted = save_family_adapter(model, "ia3", folder)
    with torch.inference_mode():
        theirs = adapted(torch.tensor([IDS]), use_cache=False).logits[0].numpy()
    spec = PackedBackend.choose(read_model_config(directory), LoadConfig("float32")).compile_spec
    plan = fold_plan([WeightedAdapter(spec.adapt(load_adapters(folder)))], spec).compile()
    assert_close(run(load(directory, crew), prefill=9, deltas=plan.packed), theirs[8:])


@pytest.mark.parametrize("arch", ["gemma", "granite", "gpt2"])
def test_a_soft_prompt_is_scaled_and_placed_as_in_the_plain_decoder(
    arch: str, crew: ThreadPool, tmp_path: Path
) -> None:
    build_family_model(tmp_path, arch, **find_shape(arch, -1))
    config = read_model_config(tmp_path)
    soft = np.random.default_rng(2).standard_normal((6, 64)).astype(np.float32) * np.float32(0.3)
    plain = PlainDecoder(config, load_plain_weights(tmp_path, config))
    cache = PagedKVCache(config, 40, layout=ROW_PAGES)
    theirs = plain.prefill(IDS, cache, EMPTY_DELTAS, soft_prompt=soft).logits
    for chunk in (4, 32):
        decoder = load(tmp_path, crew, chunk=chunk)
        ours = decoder.prefill(IDS, PagedKVCache(config, 40), soft_prompt=soft).logits
        assert_close(ours[None], theirs[None])


@pytest.mark.parametrize("arch", ["gemma2", "gpt2", "gpt_neox"])
def test_a_copy_of_integers_is_kept_and_read(arch: str, tmp_path: Path) -> None:
    directory, bases = tmp_path / "base", BaseStore(tmp_path / "bases")
    build_family_model(directory, arch, **find_shape(arch))
    write_tokenizer(directory)
    copies = QuantisedCache(bases, bases.add(directory))
    config = read_model_config(directory)
    first, again = (
        load_packed_base(directory, config, Scheme.INT8, copies=copies) for _ in range(2)
    )
    assert again.read_bytes == again.nbytes != first.read_bytes
    places = again.tensor_places()
    for name, place in first.tensor_places().items():
        ours, other = (
            each.data if isinstance(each, PackedMatrix) else each for each in (place, places[name])
        )
        np.testing.assert_array_equal(ours, other, name)


@dataclass(frozen=True)
class RoundedWeights:
    """What a decoder is built of."""

    tensors: dict[str, AnyArray]

    def get_output_matrix(self) -> AnyArray:
        return self.tensors.get(HEAD_TENSOR, self.tensors[EMBEDDING_TENSOR])

    def stack(self, names: Sequence[str]) -> AnyArray:
        return np.concatenate([self.tensors[name] for name in names])


@pytest.mark.parametrize(
    ("arch", "place", "scheme", "most"),
    [
        ("gemma2", 0, Scheme.INT4, 0.04),
        ("gemma3_text", 0, Scheme.BFLOAT16, 0.01),
        ("granite", 1, Scheme.INT8, 0.04),
        ("gpt2", 0, Scheme.INT8, 0.04),
        ("cohere", 0, Scheme.INT5, 0.04),
        ("gpt_neox", 0, Scheme.INT4, 0.04),
    ],
)
def test_fewer_bits_are_those_of_the_weights_and_of_what_meets_them(
    arch: str, place: int, scheme: Scheme, most: float, crew: ThreadPool, tmp_path: Path
) -> None:
    """Beside float32 on the rounded weights, only the rounding of activations is left."""
    build_family_model(tmp_path, arch, **find_shape(arch, place))
    config = read_model_config(tmp_path)
    weights = load_plain_weights(tmp_path, config)
    outer = (EMBEDDING_TENSOR, HEAD_TENSOR, POSITIONS_TENSOR)
    rounded = {
        name: unpack_matrix(pack_matrix(tensor, scheme.embedding if name in outer else scheme))
        if tensor.ndim == 2
        else tensor
        for name, tensor in weights.tensors.items()
    }
    plain = PlainDecoder(config, RoundedWeights(rounded))
    cache = PagedKVCache(config, 30, layout=ROW_PAGES)
    theirs = [plain.prefill(IDS[:9], cache).logits]
    theirs += [plain.decode(token, cache).logits for token in IDS[9:]]
    ours = run(load(tmp_path, crew, scheme), prefill=9)
    lost = np.linalg.norm(ours - np.stack(theirs)) / np.linalg.norm(theirs)
    assert 0 < lost <= most


@pytest.mark.parametrize("arch", ["gemma3_text", "cohere", "gpt2", "exaone4"])
def test_rows_of_a_batch_and_chunks_of_a_prompt_have_the_bits_they_have_alone(
    arch: str, crew: ThreadPool, tmp_path: Path
) -> None:
    build_family_model(tmp_path, arch, **find_shape(arch))
    decoder = load(tmp_path, crew)
    caches = [PagedKVCache(decoder.config, 60) for _ in range(3)]
    for number, cache in enumerate(caches):
        decoder.prefill(IDS[number : 2 * number + 3], cache)
    turns = list[AnyArray]()

    def step() -> None:
        turns.append(decoder.step([DecodeRow(IDS[len(turns)], cache) for cache in caches]))

    whole = decoder.prefill(IDS, PagedKVCache(decoder.config, 30)).logits
    cut = PagedKVCache(decoder.config, 30)
    for part in (IDS[:3], IDS[3:4], IDS[4:]):
        found = decoder.prefill(part, cut, between_layers=step).logits
    assert np.array_equal(found, whole)
    scored: dict[int, AnyArray] = {}

    def record(first: int, logits: AnyArray) -> None:
        scored.update({first + n: row.copy() for n, row in enumerate(logits)})

    decoder.prefill(IDS, PagedKVCache(decoder.config, 30), scores=record)
    assert sorted(scored) == list(range(len(IDS)))
    assert np.array_equal(scored[len(IDS) - 1], whole)
    for number in range(3):
        cache = PagedKVCache(decoder.config, 60)
        decoder.prefill(IDS[number : 2 * number + 3], cache)
        alone = [decoder.decode(IDS[n], cache).logits for n in range(len(turns))]
        assert np.array_equal(np.stack(alone), np.stack([rows[number] for rows in turns]))
    announced = estimate_buffer_bytes(
        decoder.config, Scheme.FLOAT32, tokens=len(IDS), chunk=8, rows=3
    )
    assert decoder.nbytes <= announced


@pytest.mark.parametrize(
    ("arch", "place"),
    [("gemma2", 1), ("cohere", 1), ("stablelm", 1), ("gpt2", 0), ("ministral3", 1), ("phi", 1)],
)
def test_programs_have_the_announced_kernels_and_take_no_more_than_is_said(
    arch: str, place: int, crew: ThreadPool, tmp_path: Path
) -> None:
    build_family_model(tmp_path, arch, **find_shape(arch, place))
    base = load(tmp_path, crew)._base
    experts = [make_random_expert(base.config, kind) for kind in ("ia3", "lora")]
    scaling, both = (
        make_packed_plan(base.config, some, base=base.scheme) for some in (experts[:1], experts)
    )
    room, names = Workspace(base.config, base.scheme, tokens=4, rows=4), set[str]()
    for plans in ([], [scaling], [both]):
        for is_prompt in (True, False):
            variant = choose_variant(single_sequence=is_prompt, numbers=Scheme.FLOAT32, plans=plans)
            build = partial(build_decoder_program, base, room, variant)
            held = build()  # kernels and room are there from now on
            stages = [stage.program for stage in (*held.layers, *held.last)]
            if not plans:
                names.update(*(program.names for program in (held.embed, *stages, held.score)))
            most = estimate_program_bytes(
                base.config, schemes=len(variant.adapters), scales=variant.scales
            )
            assert count_fewest_allocations(build).python_bytes <= most
    common = set(list_common_sources(base.config, Scheme.FLOAT32, Scheme.FLOAT32))
    common -= {*POOL_SOURCES, packing_kernel(Scheme.FLOAT32).name}
    assert names - {affine_kernel().name} == common
