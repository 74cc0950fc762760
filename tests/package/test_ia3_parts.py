"""The tensors of IA³: each is a vector for one side of one module, or it is refused by name."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertctl.errors import InvalidPackageError
from expertctl.package.adapter import AdapterSpec, Ia3
from tests.package import forged_packages
from tests.package.forged_packages import Shapes, catch_spec_error
from tests.tensor_shapes import IA3_FEEDFORWARD, IA3_TARGETS, ia3_config

K, DOWN = "model.layers.0.self_attn.k_proj", "model.layers.0.mlp.down_proj"
K_L, DOWN_L = (f"base_model.model.{module}.ia3_l" for module in (K, DOWN))
BOTH: Shapes = {K_L: [16, 1], DOWN_L: [1, 48]}


def written(**changes: Any) -> dict[str, Any]:
    return ia3_config(Path("b"), targets=IA3_TARGETS, feedforward=IA3_FEEDFORWARD, **changes)


def spec_of(shapes: Shapes, **changes: Any) -> AdapterSpec:
    return forged_packages.parse_adapter_spec(written(**changes), shapes)


def test_each_vector_becomes_a_part_on_its_side() -> None:
    spec = spec_of(BOTH)
    assert spec.parts == (
        Ia3(DOWN, DOWN_L, on_input=True, size=48),
        Ia3(K, K_L, on_input=False, size=16),
    )
    assert (spec.kind, spec.rank, spec.tokens, spec.tensors) == ("ia3", None, None, 2)


@pytest.mark.parametrize("names", [".*down_proj", None])
def test_where_no_names_are_listed_the_shape_shows_the_side(names: str | None) -> None:
    assert spec_of(BOTH, feedforward_modules=names) == spec_of(BOTH)


@pytest.mark.parametrize("names", [".*", None])
def test_a_single_number_does_not_show_its_side(names: str | None) -> None:
    document = written(feedforward_modules=names)
    assert "list feedforward_modules" in catch_spec_error(document, {K_L: [1, 1]})


@pytest.mark.parametrize(("names", "on_input"), [([], False), (["k_proj"], True)])
def test_a_single_number_is_on_the_side_that_is_listed(names: list[str], on_input: bool) -> None:
    assert spec_of({K_L: [1, 1]}, feedforward_modules=names).parts == (Ia3(K, K_L, on_input, 1),)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({K_L: [1, 16]}, "[1, 16], the configuration scales outputs, as [size, 1]"),
        ({DOWN_L: [48, 1]}, "[48, 1], the configuration scales inputs, as [1, size]"),
        ({K_L: [16]}, "[16] is neither [size, 1] nor [1, size]"),
        ({K_L: [16, 16]}, "[16, 16] is neither"),
        ({K_L: [16, 1, 1]}, "[16, 1, 1] is neither"),
    ],
)
def test_a_shape_that_does_not_fit_is_refused(shapes: Shapes, message: str) -> None:
    assert message in catch_spec_error(written(), shapes)


STEM = f"base_model.model.{K}"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (f"{STEM}.ia3_l.weight", "not the name of an IA³ tensor"),
        (f"{STEM}.ia3_l.default", "not the name"),
        (f"{STEM}.lora_A.weight", "not the name"),
        (f"{STEM}.ia3_b", "not the name"),
        ("base_model.model.ia3_l", "not the name"),
        (f"{K}.ia3_l", "begins with 'base_model.model.'"),
        ("prompt_embeddings", "begins with"),
        ("base_model.model.lm_head.modules_to_save.weight", "whole modules"),
    ],
)
def test_a_tensor_that_means_nothing_is_refused_by_name(name: str, message: str) -> None:
    text = catch_spec_error(written(), {**BOTH, name: [16, 1]})
    assert name in text
    assert message in text


@pytest.mark.parametrize(
    "changes", [{"target_modules": ["down_proj"]}, {"exclude_modules": ["k_proj"]}]
)
def test_a_module_that_is_no_target_is_refused(changes: dict[str, Any]) -> None:
    assert f"{K}: the configuration does not target" in catch_spec_error(written(**changes), BOTH)


def test_many_modules_and_many_names_are_matched_at_once() -> None:
    modules = [f"m{i}.x{i % 7}" for i in range(20_000)]
    shapes: Shapes = {f"base_model.model.{module}.ia3_l": [4, 1] for module in modules}
    names = [f"layer.y{i}" for i in range(9_000)]
    targets = [*names, *(f"x{i}" for i in range(7))]
    spec = spec_of(shapes, target_modules=targets, feedforward_modules=names)
    assert len(spec.parts) == 20_000


@given(
    st.lists(st.integers(1, 3), min_size=0, max_size=3),
    st.sampled_from([[], ["k_proj"], ".*", None]),
)
@settings(deadline=None, max_examples=200)
def test_any_shape_is_a_vector_on_one_side_or_refused(shape: list[int], names: Any) -> None:
    try:
        (part,) = spec_of({K_L: shape}, feedforward_modules=names).parts
    except InvalidPackageError:
        return
    assert isinstance(part, Ia3)
    assert shape == ([1, part.size] if part.on_input else [part.size, 1])
