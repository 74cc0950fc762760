"""LoRA on stacks of routed experts: its tensors are cut as PEFT laid them, or refused by name."""

from pathlib import Path
from typing import Any

import pytest

from expertctl.package.adapter import AdapterSpec, Lora, StackSlice
from expertctl.package.architectures import MAX_EXPERTS_PER_LAYER, MAX_EXPERTS_TOTAL
from expertctl.package.compatibility import check_tensors
from tests.package import forged_packages
from tests.tensor_shapes import lora_config

EXPERTS = "model.layers.0.mlp.experts"
BOTH = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
GATE_UP, DOWN = f"{EXPERTS}.base_layer", EXPERTS
SHAPES = {
    f"base_model.model.{GATE_UP}.lora_A.weight": [12, 32],
    f"base_model.model.{GATE_UP}.lora_B.weight": [40, 12],
    f"base_model.model.{DOWN}.lora_A.weight": [12, 20],
    f"base_model.model.{DOWN}.lora_B.weight": [32, 12],
}
"""What PEFT 0.21 saves for 6 experts of 20, hidden 32, in rank 2."""


def values(**changes: Any) -> dict[str, Any]:
    named = {"target_modules": [], "target_parameters": list(BOTH), **changes}
    return lora_config(Path("b"), rank=2, alpha=6, targets=(), **named)


def spec_of(shapes: dict[str, list[int]] | None = None, **changes: Any) -> AdapterSpec:
    return forged_packages.parse_adapter_spec(
        values(**changes), SHAPES if shapes is None else shapes
    )


def refused(shapes: dict[str, list[int]] | None = None, **changes: Any) -> str:
    return forged_packages.catch_spec_error(values(**changes), SHAPES if shapes is None else shapes)


def renamed(**names: str) -> dict[str, list[int]]:
    """The same tensors at other modules: ``GATE_UP`` or ``DOWN`` by what they are to be called."""
    modules = {GATE_UP: names.get("gate_up", GATE_UP), DOWN: names.get("down", DOWN)}
    found = {}
    for name, shape in SHAPES.items():
        module, half = name.removeprefix("base_model.model.").split(".lora_")
        found[f"base_model.model.{modules[module]}.lora_{half}"] = shape
    return found


def parts_of(spec: AdapterSpec) -> dict[str, Lora]:
    return {part.module: part for part in spec.parts if isinstance(part, Lora)}


def test_each_matrix_of_each_expert_is_a_part() -> None:
    spec = spec_of()
    parts = parts_of(spec)
    assert len(parts) == len(spec.parts) == 18
    assert [part.module for part in parts.values()] == sorted(parts)
    assert (spec.rank, spec.tensors, spec.kind) == (2, 4, "lora")
    gate, up = parts[f"{EXPERTS}.3.gate_proj"], parts[f"{EXPERTS}.3.up_proj"]
    down = parts[f"{EXPERTS}.3.down_proj"]
    assert (gate.a, gate.b) == (up.a, up.b) == tuple(SHAPES)[:2]
    assert (down.a, down.b) == tuple(SHAPES)[2:]
    assert (gate.stacked, up.stacked) == (StackSlice(3, 6, 0, False), StackSlice(3, 6, 20, False))
    assert down.stacked == StackSlice(3, 6, 0, False)
    assert (gate.a_shape, gate.b_shape) == (up.a_shape, up.b_shape) == ((2, 32), (20, 2))
    assert (down.a_shape, down.b_shape, down.scale, down.rank) == ((2, 20), (32, 2), 3.0, 2)


def test_a_single_stack_is_named_by_its_module_alone() -> None:
    for target, halves in ((BOTH[0], tuple(SHAPES)[:2]), (BOTH[1], tuple(SHAPES)[2:])):
        shapes = {
            f"base_model.model.{EXPERTS}.lora_{half}.weight": SHAPES[name]
            for half, name in zip("AB", halves, strict=True)
        }
        names = {
            module.rpartition(".")[2]
            for module in parts_of(spec_of(shapes, target_parameters=[target]))
        }
        assert names == ({"gate_proj", "up_proj"} if target == BOTH[0] else {"down_proj"})


@pytest.mark.parametrize("key", [r".*\.gate_up_proj", "mlp.experts.gate_up_proj", "gate_up_proj"])
@pytest.mark.parametrize("rslora", [False, True])
def test_rank_and_alpha_are_those_of_the_stack(key: str, rslora: bool) -> None:
    wide = {name: [3 * n if n == 12 else n for n in shape] for name, shape in SHAPES.items()}
    shapes = {**SHAPES, **{name: wide[name] for name in tuple(SHAPES)[:2]}}
    spec = spec_of(shapes, rank_pattern={key: 6}, alpha_pattern={key: 12}, use_rslora=rslora)
    parts = parts_of(spec)
    assert len(parts) == 18
    for name, part in parts.items():
        rank, alpha = (2, 6) if name.endswith("down_proj") else (6, 12)
        scale = alpha / (rank**0.5 if rslora else rank)
        assert (part.rank, part.scale, part.a_shape[0]) == (rank, pytest.approx(scale), rank)


def test_before_peft_0_19_1_halves_had_changed_places() -> None:
    """Whose stack [experts, out, in] was read as [experts, in, out]."""
    turned = {
        name.replace("lora_A", "*").replace("lora_B", "lora_A").replace("*", "lora_B"): shape[::-1]
        for name, shape in SHAPES.items()
    }
    shapes = {name: turned[name] for name in SHAPES}
    for version in ("0.18.0", "0.18.1", "0.19.0"):
        parts = parts_of(spec_of(shapes, peft_version=version))
        assert parts[f"{EXPERTS}.5.up_proj"].stacked == StackSlice(5, 6, 20, True)
        for name, part in parts_of(spec_of()).items():
            assert (parts[name].a_shape, parts[name].b_shape) == (part.a_shape, part.b_shape)
    for version in ("0.19.1", "0.20.0", "0.22.0.dev0", "1.0.0", "0.21.2.dev0@abc"):
        assert parts_of(spec_of(peft_version=version)) == parts_of(spec_of())


@pytest.mark.parametrize(
    "version", [None, "", "new", "0.17.1", "0.18.2.dev0@main", "0.19.0.dev0", "0.19.1rc1"]
)
def test_which_way_round_halves_lie_is_not_guessed(version: str | None) -> None:
    assert "does not tell how stacked tensors are stored" in refused(peft_version=version)


def test_weights_of_linear_layers_may_be_named_as_parameters() -> None:
    module = "model.layers.0.self_attn.q_proj"
    names = [f"base_model.model.{module}.lora_{half}.weight" for half in "AB"]
    shapes = {names[0]: [5, 32], names[1]: [64, 5]}
    named = {
        "target_parameters": ["q_proj.weight"],
        "rank_pattern": {"q_proj": 9, "q_proj.weight": 5},
        "peft_version": None,
    }
    [part] = spec_of(shapes, **named).parts
    assert part == Lora(module, *names, 5, 6 / 5, (5, 32), (64, 5))
    assert "does not target" in refused(shapes, **{**named, "target_parameters": ["k_proj.weight"]})


@pytest.mark.parametrize("half", range(4))
def test_a_missing_half_is_told(half: int) -> None:
    absent = list(SHAPES)[half]
    shapes = {name: shape for name, shape in SHAPES.items() if name != absent}
    stack = f"{EXPERTS}.{'gate_up_proj' if half < 2 else 'down_proj'}"
    assert f"{stack}: lora_{'AB'[half % 2]} missing" in refused(shapes)


def test_a_missing_stack_is_told() -> None:
    shapes = {name: shape for name, shape in SHAPES.items() if "base_layer" in name}
    assert f"{EXPERTS}.down_proj: lora_A and lora_B missing" in refused(shapes)


@pytest.mark.parametrize("inner", [f"{EXPERTS}.base_layer.base_layer", f"{EXPERTS}.base_layer"])
def test_a_stack_that_is_no_target_is_told(inner: str) -> None:
    shapes = {**SHAPES, **renamed(gate_up=inner)}
    targets = BOTH if inner.count("base") == 2 else BOTH[1:]
    message = refused(shapes, target_parameters=list(targets))
    assert f"{inner}: the configuration targets no such parameter" in message


def test_stacks_of_other_layers_are_no_targets() -> None:
    message = refused(target_parameters=[f"layers.1.{name}" for name in BOTH])
    assert f"{EXPERTS}.base_layer and 1 more: the configuration targets no such" in message or (
        f"{EXPERTS} and 1 more: the configuration targets no such parameter" in message
    )


@pytest.mark.parametrize(
    ("tensor", "shape", "problem"),
    [
        (0, [13, 32], "13 rows in lora_A and 12 columns in lora_B"),
        (0, [12], "lora_A [12] and lora_B [40, 12] are not matrices"),
        (0, [6, 2, 32], "are not matrices"),
        (1, [41, 12], "41 outputs are not two halves"),
        (1, [40, 11], "12 rows in lora_A and 11 columns in lora_B"),
    ],
)
def test_a_half_of_another_shape_is_told(tensor: int, shape: list[int], problem: str) -> None:
    message = refused({**SHAPES, list(SHAPES)[tensor]: shape})
    assert f"{EXPERTS}.gate_up_proj: " in message
    assert problem in message


def test_a_rank_that_experts_cannot_share_is_told() -> None:
    assert "are not rank 5 of the configuration" in refused(rank_pattern={"gate_up_proj": 5})
    assert "are not rank 24 of the configuration" in refused(rank_pattern={"gate_up_proj": 24})


def test_stacks_of_one_layer_have_as_many_experts() -> None:
    message = refused(rank_pattern={"gate_up_proj": 3})
    assert f"{EXPERTS}: made for different numbers of experts: 6 for down_proj and 4" in message


def test_no_more_experts_than_any_base_has() -> None:
    count = MAX_EXPERTS_PER_LAYER + 1
    shapes = dict(zip(SHAPES, ([count, 1], [2, count], [count, 1], [1, count]), strict=True))
    assert f"made for {count} experts, at most {MAX_EXPERTS_PER_LAYER}" in refused(shapes, r=1)


def test_no_more_experts_in_all_layers_than_any_base_has() -> None:
    many = dict(zip(SHAPES, ([512, 1], [2, 512], [512, 1], [1, 512]), strict=True))
    layers = MAX_EXPERTS_TOTAL // 512 + 1
    shapes = {
        name.replace("layers.0", f"layers.{layer}"): shape
        for layer in range(layers)
        for name, shape in many.items()
    }
    assert f"{2 * 512 * layers} experts in all stacks, at most {2 * MAX_EXPERTS_TOTAL}" in refused(
        shapes, r=1
    )


def test_dora_has_no_stacks() -> None:
    assert "PEFT has no use_dora for parameters" in refused(use_dora=True)
    assert "PEFT has no fan_in_fan_out for parameters" in refused(fan_in_fan_out=True)


def test_without_targets_stacks_are_no_modules() -> None:
    message = refused(target_parameters=None, target_modules=["q_proj"])
    assert f"{EXPERTS} and 1 more: the configuration does not target this module" in message
    assert "names none, and target_parameters neither" in refused(target_parameters=None)


@pytest.mark.parametrize("count", [5, 6, 7])
def test_a_base_has_exactly_those_experts(count: int) -> None:
    """Fewer would be left as they are, silently; that is what a wrong rank looks like."""
    sizes = {"gate_proj": (20, 32), "up_proj": (20, 32), "down_proj": (32, 20)}
    shapes = {f"{EXPERTS}.{n}.{name}": size for n in range(count) for name, size in sizes.items()}
    problems = check_tensors(spec_of(), shapes)
    why = {5: "the base has no such linear layer", 7: "the base has more experts"}
    assert [problem.partition(": ")[0] for problem in problems] == (
        [] if count == 6 else [f"{EXPERTS}.5.down_proj and 2 more"]
    )
    assert all(why[count] in problem for problem in problems)
