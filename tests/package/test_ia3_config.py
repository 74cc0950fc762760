"""The configuration of IA³: PEFT as oracle for which modules are meant, and on which side."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertctl.package.peft_config import Ia3Config
from tests.package.forged_packages import catch_config_error, parse_config_document
from tests.tensor_shapes import ia3_config

MODULES = [
    f"model.layers.{layer}.{part}.{name}"
    for layer in (0, 1)
    for part, name in [("self_attn", "k_proj"), ("mlp", "down_proj"), ("mlp", "up_proj")]
] + ["lm_head", "down_proj", "x.sdown_proj"]
NAMES = ["k_proj", "down_proj", "mlp.down_proj", "proj", "lm_head", "model.layers.0.mlp.up_proj"]


def written(**changes: Any) -> dict[str, Any]:
    return ia3_config(Path("base"), targets=("k_proj", "down_proj"), feedforward=(), **changes)


def parse(**changes: Any) -> Ia3Config:
    config = parse_config_document(written(**changes))
    assert isinstance(config, Ia3Config)
    return config


def test_what_peft_writes_is_read(tmp_path: Path) -> None:
    from peft import IA3Config as PeftConfig

    PeftConfig(
        target_modules=["k_proj", "down_proj"],
        feedforward_modules=["down_proj"],
        exclude_modules=["layers.0.self_attn.k_proj"],
        task_type="CAUSAL_LM",
        base_model_name_or_path="Qwen/Qwen3-0.6B",
        revision="abc",
    ).save_pretrained(str(tmp_path))
    from expertctl.package.adapter import parse_adapter_config

    config = parse_adapter_config((tmp_path / "adapter_config.json").read_bytes(), what="x")
    assert config == Ia3Config(
        target_modules=frozenset({"k_proj", "down_proj"}),
        exclude_modules=frozenset({"layers.0.self_attn.k_proj"}),
        feedforward_modules=frozenset({"down_proj"}),
        base_label="Qwen/Qwen3-0.6B",
        base_revision="abc",
    )


@given(
    st.sampled_from(MODULES),
    st.lists(st.sampled_from(NAMES), min_size=1, max_size=3),
    st.none() | st.lists(st.sampled_from(NAMES), max_size=2),
)
@settings(deadline=None, max_examples=300)
def test_targets_are_chosen_as_peft_chooses_them(
    module: str, targets: list[str], excluded: list[str] | None
) -> None:
    from peft import IA3Config as PeftConfig
    from peft.tuners.tuners_utils import check_target_module_exists

    fields: dict[str, Any] = {
        "target_modules": targets,
        "exclude_modules": excluded,
        "feedforward_modules": [],
    }
    theirs = check_target_module_exists(PeftConfig(**fields), module)
    expected = bool(theirs) and "Excluded" not in type(theirs).__name__
    assert parse(**fields).adapts(module) == expected


@given(st.sampled_from(MODULES), st.lists(st.sampled_from(NAMES), max_size=3))
@settings(deadline=None, max_examples=200)
def test_inputs_are_scaled_where_peft_scales_them(module: str, names: list[str]) -> None:
    from peft import IA3Config as PeftConfig
    from peft.tuners.ia3 import IA3Model

    theirs = PeftConfig(target_modules=NAMES, feedforward_modules=names)
    expected = IA3Model._check_target_module_feedforward(theirs, module)
    assert parse(feedforward_modules=names).scales_input(module) == expected


@pytest.mark.parametrize("value", [".*down_proj", "(a+)+$", None])
def test_without_literal_names_the_tensors_decide_the_side(value: str | None) -> None:
    assert parse(feedforward_modules=value).scales_input("model.layers.0.mlp.down_proj") is None


@pytest.mark.parametrize(
    "field", ["target_modules", "exclude_modules", "feedforward_modules"]
)  # fmt: skip
def test_a_regex_is_never_run(field: str) -> None:
    config = parse(**{field: "(a+)+$" * 20})
    config.adapts("a" * 400 + "!")
    config.scales_input("a" * 400 + "!")


REFUSED: list[tuple[str, Any]] = [
    ("modules_to_save", ["lm_head"]),
    ("auto_mapping", {"base_model_class": "X", "parent_library": "subprocess"}),
    ("task_type", "SEQ_CLS"),
    ("task_type", "SEQ_2_SEQ_LM"),
    ("r", 4),
    ("use_dora", True),
    ("target_modules", []),
    ("target_modules", ["(a+)+"]),
    ("target_modules", {"k_proj": 1}),
    ("target_modules", "x" * 5000),
    ("exclude_modules", [".*"]),
    ("feedforward_modules", ["(a+)+$"]),
    ("feedforward_modules", [""]),
    ("feedforward_modules", [7]),
    ("feedforward_modules", 7),
    ("fan_in_fan_out", "no"),
    ("init_ia3_weights", 1),
    ("inference_mode", "no"),
    ("base_model_name_or_path", ["x"]),
    ("tokenizer_name_or_path", "../x"),
    ("num_virtual_tokens", 4),
]


@pytest.mark.parametrize(("field", "value"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_would_change_the_meaning_is_refused_by_name(field: str, value: Any) -> None:
    assert field in catch_config_error(written(**{field: value}))


def test_all_problems_are_named_at_once() -> None:
    message = catch_config_error(written(modules_to_save=["x"], unknown=1, target_modules=[]))
    assert all(name in message for name in ("modules_to_save", "unknown", "target_modules"))
