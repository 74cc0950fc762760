"""Sliding windows of bases of routed experts: those that transformers gives each layer.

Those of dense bases are in ``test_model_config``.
"""

from typing import Any

import pytest

from expertctl.errors import InvalidPackageError
from tests.package.test_experts_config import parse, theirs

TWO_KINDS = ["sliding_attention", "full_attention"] * 3


@pytest.mark.parametrize("arch", ["qwen2_moe", "dots1"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sliding_window": 9},
        {"sliding_window": 9, "max_window_layers": 3},
        {"sliding_window": 9, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": 9},
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 3},
        {"use_sliding_window": True, "sliding_window": 9, "layer_types": TWO_KINDS},
        {"use_sliding_window": True, "max_window_layers": 4},
    ],
    ids=str,
)
def test_windows_by_layer_are_those_of_transformers(arch: str, changes: dict[str, Any]) -> None:
    reference = theirs(arch, **changes)
    kinds, window = reference.layer_types, reference.sliding_window
    wanted = tuple(window if kind == "sliding_attention" else None for kind in kinds)
    assert parse(arch, **changes).windows == wanted


@pytest.mark.parametrize("arch", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sliding_window": None},
        {"sliding_window": 9},
        {"use_sliding_window": True, "sliding_window": 9},
        {"use_sliding_window": True, "sliding_window": None},
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2},
    ],
    ids=str,
)
def test_one_window_of_all_layers_is_that_of_transformers(
    arch: str, changes: dict[str, Any]
) -> None:
    assert parse(arch, **changes).windows == (theirs(arch, **changes).sliding_window,) * 6


def test_olmoe_sees_every_earlier_token() -> None:
    assert parse("olmoe", sliding_window=9).windows == (None,) * 6


@pytest.mark.parametrize(
    ("arch", "changes", "problem"),
    [
        ("mixtral", {"layer_types": TWO_KINDS}, "layer_types is not supported"),
        ("qwen3_moe", {"layer_types": TWO_KINDS}, "layer_types is not supported"),
        ("mixtral", {"sliding_window": 0}, "sliding_window is 0"),
        ("mixtral", {"sliding_window": "9"}, "sliding_window is '9'"),
        ("qwen2_moe", {"layer_types": TWO_KINDS}, "use_sliding_window is not set"),
        (
            "qwen2_moe",
            {"use_sliding_window": True, "sliding_window": None},
            "sliding_window is null, but use_sliding_window is set",
        ),
        ("dots1", {"layer_types": TWO_KINDS, "sliding_window": None}, "sliding_window is null"),
        ("dots1", {"layer_types": TWO_KINDS[:5]}, "layer_types must be 6 times"),
    ],
    ids=str,
)
def test_what_transformers_fails_on_is_refused(
    arch: str, changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(InvalidPackageError) as caught:
        parse(arch, **changes)
    assert any(problem in line for line in caught.value.problems), caught.value.problems
