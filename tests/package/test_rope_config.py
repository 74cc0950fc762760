"""Settings of rotary positions: both spellings, and what is refused."""

from typing import Any

import pytest

from expertctl.errors import IncompatibleError, InvalidPackageError
from expertctl.package.architectures import ConfigFields
from expertctl.package.attention_config import RopeConfig, YarnScaling, parse_rope_config

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 32768,
}


def ours(parameters: dict[str, Any], *, dims: int = 64, positions: int = 131072) -> RopeConfig:
    fields = ConfigFields({"rope_parameters": parameters})
    rope = parse_rope_config(fields, dims=dims, max_positions=positions)
    fields.raise_problems("config.json")
    return rope


def test_both_spellings_mean_the_same() -> None:
    new = ours(LLAMA3)
    rest = {k: v for k, v in LLAMA3.items() if k not in {"rope_type", "rope_theta"}}
    for name in ("type", "rope_type"):
        old = ConfigFields({"rope_theta": 5e5, "rope_scaling": {name: "llama3", **rest}})
        assert parse_rope_config(old, dims=64, max_positions=131072) == new
        assert old.problems == []


def test_the_original_length_is_found_where_transformers_looks() -> None:
    short = {k: v for k, v in YARN.items() if k != "original_max_position_embeddings"}
    assert ours({**short, "factor": 2.0}, positions=500).scaling.original == 500  # type: ignore[union-attr]
    top = ConfigFields({"rope_parameters": YARN, "original_max_position_embeddings": 77})
    rope = parse_rope_config(top, dims=64, max_positions=500)
    assert rope.scaling.original == 77  # type: ignore[union-attr]


def test_an_absent_yarn_factor_is_the_stretch_of_the_context() -> None:
    parameters = {"rope_type": "yarn", "original_max_position_embeddings": 32768}
    assert ours(parameters).scaling.factor == 4.0  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["proportional", "su", "mrope", ""])
def test_other_types_are_refused_by_name(kind: str) -> None:
    with pytest.raises(IncompatibleError, match=f"RoPE scaling '{kind}' is not supported") as error:
        ours({"rope_type": kind, "factor": 2.0})
    assert "yarn" in error.value.hint


@pytest.mark.parametrize(
    ("parameters", "problem"),
    [
        ({"rope_type": "linear"}, "factor is missing"),
        ({"rope_type": "linear", "factor": 0.5}, "factor is 0.5"),
        ({"rope_type": "linear", "factor": 1e9}, "factor is 1000000000.0"),
        ({"rope_type": "linear", "factor": 2.0, "mscale": 1.0}, "mscale is not a known setting"),
        ({"rope_type": "default", "mrope_section": [16]}, "mrope_section is not a known setting"),
        ({**LLAMA3, "high_freq_factor": 1.0}, "high_freq_factor must be greater"),
        ({**LLAMA3, "low_freq_factor": 0}, "low_freq_factor is 0"),
        ({**YARN, "truncate": "no"}, "truncate is 'no'"),
        ({**YARN, "attention_factor": -1.0}, "attention_factor is -1.0"),
        ({**YARN, "original_max_position_embeddings": 0}, "original_max_position_embeddings is 0"),
        ({"rope_theta": 1.0}, "rope_theta is 1.0"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor below 1"),
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_refused(parameters: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidPackageError) as caught:
        ours(parameters)
    assert [p for p in caught.value.problems if f"rope_parameters.{problem}" in p]


def test_an_empty_scaling_leaves_the_parameters_and_any_other_replaces_them() -> None:
    for scaling in (None, {}):
        both = ConfigFields({"rope_scaling": scaling, "rope_parameters": LLAMA3})
        assert parse_rope_config(both, dims=64, max_positions=131072) == ours(LLAMA3)
    both = ConfigFields(
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": LLAMA3}
    )
    rope = parse_rope_config(both, dims=64, max_positions=131072)
    assert rope == ours({"rope_type": "linear", "factor": 2.0})


@pytest.mark.parametrize(
    ("same", "as_this"),
    [
        ({"mscale": 0.7}, {}),
        ({"mscale_all_dim": 0.7}, {}),
        ({"mscale": 0, "mscale_all_dim": 1.1}, {}),
        ({"beta_fast": 0.0, "beta_slow": None}, {"beta_fast": 32, "beta_slow": 1}),
        ({"attention_factor": 2.0, "mscale": 7, "mscale_all_dim": 1}, {"attention_factor": 2.0}),
        ({"truncate": None}, {"truncate": True}),
    ],
    ids=str,
)  # fmt: skip
def test_settings_without_effect_change_nothing(
    same: dict[str, Any], as_this: dict[str, Any]
) -> None:
    assert ours({**YARN, **same}) == ours({**YARN, **as_this})


def test_what_is_digested_holds_no_logarithm() -> None:
    """Its last digit depends on the platform, and a digest must not."""
    rope = ours({**YARN, "mscale": 0.7, "mscale_all_dim": 1.1})
    assert isinstance(rope.scaling, YarnScaling)
    assert rope.to_json() == {
        "theta": 1e6,
        "dims": 64,
        "scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "attention_factor": None,
            "mscale": 0.7,
            "mscale_all_dim": 1.1,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original": 32768,
            "truncate": True,
        },
    }
