"""The tensors of LoRA and DoRA: each means something for a module, or is refused by name."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertctl.errors import InvalidPackageError
from expertctl.package.adapter import AdapterSpec, Dora, Lora, parse_adapter_config
from expertctl.package.adapter_spec import build_adapter_spec
from expertctl.package.tensor_file import read_table
from tests.factories import write_lora
from tests.package import forged_packages
from tests.package.forged_packages import catch_spec_error
from tests.tensor_shapes import ALL_PROJECTIONS, lora_config

MODULE = "model.layers.0.self_attn.q_proj"
A, B = (f"base_model.model.{MODULE}.lora_{half}.weight" for half in "AB")
PAIR = {A: [4, 32], B: [32, 4]}


def spec_of(shapes: dict[str, list[int]], dtype: str = "F32", **config: Any) -> AdapterSpec:
    values = lora_config(Path("b"), rank=4, alpha=8, targets=ALL_PROJECTIONS, **config)
    return forged_packages.parse_adapter_spec(values, shapes, dtype=dtype)


def refused(shapes: dict[str, list[int]], dtype: str = "F32", **config: Any) -> str:
    with pytest.raises(InvalidPackageError) as caught:
        spec_of(shapes, dtype, **config)
    return caught.value.message


def test_a_pair_becomes_one_part() -> None:
    spec = spec_of(PAIR, use_rslora=True)
    (part,) = spec.parts
    assert isinstance(part, Lora)
    assert (part.module, part.a, part.b, part.rank, part.scale) == (MODULE, A, B, 4, 4.0)
    assert (part.inputs, part.outputs) == (32, 32)
    assert (spec.dtype, spec.rank, spec.tensors) == ("float32", 4, 2)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_three_types_are_read(dtype: str, base_dir: Path, tmp_path: Path) -> None:
    lora = write_lora(tmp_path / "l", base_dir, dtype=dtype, rank_pattern={"q_proj": 2})
    config = parse_adapter_config((lora / "adapter_config.json").read_bytes(), what="c")
    spec = build_adapter_spec(config, read_table(lora / "adapter_model.safetensors"), what="w")
    assert spec.dtype == dtype
    parts = [part for part in spec.parts if isinstance(part, Lora)]
    assert len(parts) == len(spec.parts) == 14
    assert {p.rank for p in parts if p.module.endswith("q_proj")} == {2}
    assert [p.module for p in parts] == sorted(p.module for p in parts)


def test_the_head_may_be_adapted() -> None:
    names = [f"base_model.model.lm_head.lora_{half}.weight" for half in "AB"]
    spec = spec_of({names[0]: [4, 32], names[1]: [259, 4]}, target_modules=["lm_head"])
    assert isinstance(spec.parts[0], Lora)
    assert spec.parts[0].module == "lm_head"


STEM = f"base_model.model.{MODULE}"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (f"{STEM}.lora_magnitude_vector", "DoRA"),
        (f"{STEM}.lora_magnitude_vector.weight", "DoRA"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", "embeddings"),
        ("base_model.model.lm_head.modules_to_save.weight", "whole modules"),
        (f"{STEM}.ia3_l", "IA³"),
        ("prompt_embeddings", "soft prompt"),
        (f"{MODULE}.lora_A.weight", "begins with 'base_model.model.'"),
        (f"{STEM}.lora_A.default.weight", "not the name of a LoRA tensor"),
        (f"{STEM}.lora_A.bias", "not the name"),
        (f"{STEM}.lora_C.weight", "not the name"),
        (f"{STEM}.weight", "not the name"),
        ("base_model.model.lora_A.weight", "not the name"),
    ],
)
def test_a_tensor_that_means_nothing_is_refused_by_name(name: str, message: str) -> None:
    text = refused({**PAIR, name: [4, 4]})
    assert name in text
    assert message in text


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({A: [4, 32]}, "lora_B is missing"),
        ({B: [32, 4]}, "lora_A is missing"),
        ({A: [8, 32], B: [32, 8]}, "rank 8 in lora_A, 8 in lora_B, 4 in the configuration"),
        ({A: [4, 32], B: [32, 8]}, "rank 4 in lora_A, 8 in lora_B"),
        ({A: [4, 32, 1], B: [32, 4]}, "not matrices"),
        ({A: [128], B: [128]}, "not matrices"),
    ],
)
def test_pairs_that_do_not_fit_are_refused(shapes: dict[str, list[int]], message: str) -> None:
    assert message in refused(shapes)


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": ["k_proj"]},
        {"target_modules": ["proj"]},
        {"layers_to_transform": [1]},
        {"exclude_modules": ["q_proj"]},
    ],
)
def test_a_tensor_for_a_module_that_is_no_target_is_refused(config: dict[str, Any]) -> None:
    assert f"{MODULE}: the configuration does not target" in refused(PAIR, **config)


@pytest.mark.parametrize("dtype", ["F64", "I8"])
def test_other_types_are_refused(dtype: str) -> None:
    assert f"tensors are {dtype}" in refused(PAIR, dtype)


def test_all_problems_are_named_at_once() -> None:
    message = refused({A: [4, 32], "prompt_embeddings": [1, 32]}, "F64")
    assert all(text in message for text in ("lora_B is missing", "prompt_emb", "F64"))


def test_many_modules_and_many_targets_are_matched_at_once() -> None:
    modules = [f"m{i}.layer.x{i % 7}" for i in range(10_000)]
    shapes = {f"base_model.model.{m}.lora_{h}.weight": [4, 4] for m in modules for h in "AB"}
    targets = [f"layer.y{i}" for i in range(9_000)] + [f"layer.x{i}" for i in range(7)]
    assert len(spec_of(shapes, target_modules=targets).parts) == 10_000


def test_more_matching_than_any_adapter_needs_is_refused_before_it_is_done() -> None:
    modules = [f"m{i}.x" for i in range(5_000)]
    shapes = {f"base_model.model.{m}.lora_{h}.weight": [4, 4] for m in modules for h in "AB"}
    patterns = {f"{i:05}|{'y' * 400}": 4 for i in range(100)}
    message = refused(shapes, rank_pattern=patterns)
    assert "5000 modules are too many for such long patterns of rank and alpha" in message


def test_many_problems_are_cut_short() -> None:
    shapes = {
        f"base_model.model.m{i}.q_proj.lora_{half}.weight": [rank, 4] if half == "A" else [4, rank]
        for i, rank in enumerate(range(5, 45))
        for half in "AB"
    }
    assert "and 20 more" in refused(shapes)


def test_one_cause_in_many_modules_is_one_line() -> None:
    shapes = {f"base_model.model.m{i}.x.lora_A.weight": [4, 4] for i in range(40)}
    assert refused(shapes) == "w: m0.x and 39 more: lora_B is missing"


M = f"{STEM}.lora_magnitude_vector"
TRIPLE = {**PAIR, M: [32]}


def test_a_triple_becomes_one_part_of_a_dora() -> None:
    spec = spec_of(TRIPLE, use_dora=True, use_rslora=True)
    (part,) = spec.parts
    assert part == Dora(MODULE, A, B, M, 4, 4.0, (4, 32), (32, 4))
    assert (part.inputs, part.outputs) == (32, 32)
    assert (spec.kind, spec.dtype, spec.rank, spec.tensors) == ("dora", "float32", 4, 3)


def test_a_magnitude_may_be_named_as_the_module_that_holds_it() -> None:
    (part,) = spec_of({**PAIR, f"{M}.weight": [32]}, use_dora=True).parts
    assert isinstance(part, Dora)
    assert part.magnitude == f"{M}.weight"


def test_each_module_of_a_dora_has_its_rank_and_scale() -> None:
    (part,) = spec_of(
        {A: [2, 32], B: [32, 2], M: [32]},
        use_dora=True,
        rank_pattern={"q_proj": 2},
        alpha_pattern={"q_proj": 3},
    ).parts
    assert isinstance(part, Dora)
    assert (part.rank, part.scale) == (2, 1.5)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (PAIR, f"{MODULE}: lora_magnitude_vector is missing, and use_dora requires it"),
        ({M: [32]}, f"{MODULE}: lora_A and lora_B are missing"),
        ({A: [4, 32], M: [32]}, "lora_B is missing"),
        ({B: [32, 4], M: [32]}, "lora_A is missing"),
        ({**PAIR, M: [31]}, "lora_magnitude_vector [31] for 32 outputs of lora_B"),
        ({**PAIR, M: [32, 1]}, "lora_magnitude_vector [32, 1] for 32 outputs"),
        ({**PAIR, M: [1, 32]}, "lora_magnitude_vector [1, 32] for 32 outputs"),
        ({**PAIR, M: []}, "lora_magnitude_vector [] for 32 outputs"),
        ({**TRIPLE, f"{M}.weight": [32]}, "its magnitude is duplicated"),
        ({**TRIPLE, f"{M}.default": [32]}, f"{M}.default: "),
        ({**TRIPLE, f"{STEM}.ia3_l": [32, 1]}, "it belongs to IA³"),
        ({A: [8, 32], B: [32, 8], M: [32]}, "rank 8 in lora_A"),
    ],
)
def test_triples_that_do_not_fit_are_refused(shapes: dict[str, list[int]], message: str) -> None:
    assert message in refused(shapes, use_dora=True)


def test_a_plain_lora_has_no_magnitudes() -> None:
    message = refused(TRIPLE)
    assert M in message
    assert "does not set use_dora" in message


def test_a_magnitude_of_another_type_is_refused_as_peft_never_writes_one() -> None:
    values = lora_config(Path("b"), rank=4, alpha=8, targets=ALL_PROJECTIONS, use_dora=True)
    message = catch_spec_error(values, TRIPLE, dtype="BF16", dtypes={M: "F32"})
    assert "tensors are BF16, F32; one of F32, F16, BF16 for all" in message


@given(
    st.dictionaries(
        st.sampled_from([A, B, M, f"{M}.weight", f"{STEM}.ia3_l", "prompt_embeddings"]),
        st.lists(st.sampled_from([1, 4, 32]), max_size=3),
        min_size=1,
    ),
    st.booleans(),
)
@settings(deadline=None, max_examples=200)
def test_any_tensors_make_whole_parts_or_are_refused(
    shapes: dict[str, list[int]], dora: bool
) -> None:
    try:
        spec = spec_of(shapes, use_dora=dora)
    except InvalidPackageError:
        return
    (part,) = spec.parts
    assert isinstance(part, Dora if dora else Lora)
    named = {part.a, part.b, part.magnitude} if isinstance(part, Dora) else {part.a, part.b}
    assert named == set(shapes)
