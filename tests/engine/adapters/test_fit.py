"""Every tensor has its place in the base, or the expert is refused with all that does not fit."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from expertctl.engine.adapters.compile import check_adapter_fits
from expertctl.engine.adapters.load import LoadedAdapter
from expertctl.engine.adapters.steps import AdapterStep
from expertctl.errors import IncompatibleError
from tests.engine.package_fixtures import load_adapters, read_linear_shapes
from tests.engine.random_experts import MODULE, make_chain_step, make_dora, make_ia3, make_lora
from tests.factories import write_base, write_dora, write_ia3, write_lora, write_soft_prompt

WRITERS: dict[str, Callable[..., Path]] = {"lora": write_lora, "dora": write_dora, "ia3": write_ia3}


def test_adapters_of_every_kind_fit_the_base_that_they_were_made_for(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    for name, write in {**WRITERS, "prompt": write_soft_prompt}.items():
        check_adapter_fits(
            load_adapters(write(tmp_path / name, base)), read_linear_shapes(base), width=32
        )


@pytest.mark.parametrize("kind", WRITERS)
def test_a_tensor_without_a_module_is_an_error_never_the_base_in_disguise(
    kind: str, tmp_path: Path
) -> None:
    base = write_base(tmp_path / "base")
    deeper = write_base(tmp_path / "deeper", layers=3)
    expert = load_adapters(WRITERS[kind](tmp_path / kind, deeper))
    with pytest.raises(IncompatibleError, match=r"layers\.2\..*the base has no such") as caught:
        check_adapter_fits(expert, read_linear_shapes(base), width=32)
    assert f"acme/{kind}@1.0.0 does not fit the base" in caught.value.message


@pytest.mark.parametrize(
    ("step", "problem"),
    [
        (make_lora(torch.ones(1, 3), torch.ones(5, 1), 1.0), "made for 5 x 3, the base has 4 x"),
        (make_lora(torch.ones(1, 2), torch.ones(4, 1), 1.0), "made for 4 x 2, the base has 4 x"),
        (
            make_dora(torch.ones(1, 3), torch.ones(5, 1), torch.ones(5), 1.0),
            "made for 5 x 3, the base has 4 x 3",
        ),
        (make_ia3(torch.ones(4), on_input=True), "made for 4 inputs, the base has 3"),
        (make_ia3(torch.ones(3), on_input=False), "made for 3 outputs, the base has 4"),
    ],
)
def test_a_tensor_of_another_shape_is_an_error_that_gives_both(
    step: AdapterStep, problem: str
) -> None:
    with pytest.raises(IncompatibleError, match=f"{MODULE}: {problem}"):
        check_adapter_fits(make_chain_step(step), {MODULE: (4, 3)}, width=4)


def test_a_soft_prompt_of_another_width_is_an_error_that_gives_both() -> None:
    prompt = LoadedAdapter("acme/x@1.0.0", {}, (np.ones((3, 8), np.float32),), 1, 0)
    check_adapter_fits(prompt, {}, width=8)
    with pytest.raises(IncompatibleError, match="8 wide, tokens of the base are 4"):
        check_adapter_fits(prompt, {}, width=4)


def test_an_expert_that_changes_nothing_is_an_error() -> None:
    with pytest.raises(IncompatibleError, match="changes no module at all"):
        check_adapter_fits(
            LoadedAdapter("acme/none@1.0.0", {}, (), 0, 0), {MODULE: (1, 1)}, width=1
        )
