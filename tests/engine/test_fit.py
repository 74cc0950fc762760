"""Every tensor has its place in the base, or the expert is refused with all that does not fit."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from expertctl.engine.adapter_load import LoadedAdapter
from expertctl.engine.chain import Step
from expertctl.engine.dora import DoraTensors
from expertctl.engine.fit import check_fit
from expertctl.engine.ia3 import Ia3Tensors
from expertctl.engine.lora import LoraTensors
from expertctl.errors import IncompatibleError
from tests.engine.adapter_files import linear_shapes, load
from tests.engine.chains import MODULE, adapter
from tests.factories import write_base, write_dora, write_ia3, write_lora, write_soft_prompt

WRITERS: dict[str, Callable[..., Path]] = {"lora": write_lora, "dora": write_dora, "ia3": write_ia3}


def test_adapters_of_every_kind_fit_the_base_that_they_were_made_for(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    for name, write in {**WRITERS, "prompt": write_soft_prompt}.items():
        check_fit(load(write(tmp_path / name, base)), linear_shapes(base), width=32)


@pytest.mark.parametrize("kind", WRITERS)
def test_a_tensor_without_a_module_is_an_error_never_the_base_in_disguise(
    kind: str, tmp_path: Path
) -> None:
    base = write_base(tmp_path / "base")
    deeper = write_base(tmp_path / "deeper", layers=3)
    expert = load(WRITERS[kind](tmp_path / kind, deeper))
    with pytest.raises(IncompatibleError, match=r"layers\.2\..*the base has no such") as caught:
        check_fit(expert, linear_shapes(base), width=32)
    assert f"acme/{kind}@1.0.0 does not fit the base" in caught.value.message


@pytest.mark.parametrize(
    ("step", "problem"),
    [
        (LoraTensors(torch.ones(1, 3), torch.ones(5, 1), 1.0), "made for 5 x 3, the base has 4 x"),
        (LoraTensors(torch.ones(1, 2), torch.ones(4, 1), 1.0), "made for 4 x 2, the base has 4 x"),
        (
            DoraTensors(torch.ones(1, 3), torch.ones(5, 1), torch.ones(5), 1.0),
            "made for 5 x 3, the base has 4 x 3",
        ),
        (Ia3Tensors(torch.ones(4), on_input=True), "made for 4 inputs, the base has 3"),
        (Ia3Tensors(torch.ones(3), on_input=False), "made for 3 outputs, the base has 4"),
    ],
)
def test_a_tensor_of_another_shape_is_an_error_that_gives_both(step: Step, problem: str) -> None:
    with pytest.raises(IncompatibleError, match=f"{MODULE}: {problem}"):
        check_fit(adapter(step), {MODULE: (4, 3)}, width=4)


def test_a_soft_prompt_of_another_width_is_an_error_that_gives_both() -> None:
    prompt = LoadedAdapter("acme/x@1.0.0", {}, (torch.ones(3, 8),), 1, 0)
    check_fit(prompt, {}, width=8)
    with pytest.raises(IncompatibleError, match="8 wide, tokens of the base are 4"):
        check_fit(prompt, {}, width=4)


def test_an_expert_that_changes_nothing_is_an_error() -> None:
    with pytest.raises(IncompatibleError, match="changes no module at all"):
        check_fit(LoadedAdapter("acme/none@1.0.0", {}, (), 0, 0), {MODULE: (1, 1)}, width=1)
