"""Experts read from files as rows: the numbers of the loader, in either dtype."""

from pathlib import Path

import numpy as np
import pytest
import torch

from expertctl.engine.torch.expert_stack import StackRowReader, StackShape, expert_module_name
from expertctl.engine.torch.weights import load_base_weights
from expertctl.package.base_tensors import read_base_tensors
from expertctl.package.model_config import read_model_config
from expertctl.store.quantised_file import ReadCancelled
from tests.factories import write_base


def rows_of(base: Path, dtype: torch.dtype) -> tuple[StackRowReader, StackShape]:
    config = read_model_config(base)
    shape = StackShape.from_config(config, dtype)
    return StackRowReader(read_base_tensors(base, config), shape), shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
def test_rows_are_the_tensors_of_the_loader(
    stored: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    base = write_base(tmp_path / "base", arch="qwen3_moe", dtype=stored)
    reader, shape = rows_of(base, dtype)
    wanted = load_base_weights(base, read_model_config(base), dtype=dtype).tensors
    block, module = np.empty(shape.nbytes, np.uint8), expert_module_name(1, 2)
    read = reader.read(1, 2, block)
    assert read == shape.nbytes // dtype.itemsize * (4 if stored == "float32" else 2)
    gate_up, down = shape.split(torch.from_numpy(block))
    parts = ("gate_proj", "up_proj", "down_proj")
    gate, up, low = (wanted[f"{module}.{part}.weight"] for part in parts)
    assert torch.equal(gate_up, torch.cat((gate, up)))
    assert torch.equal(down, low)
    for part, there in zip(parts, (gate, up, low), strict=True):
        assert torch.equal(reader.read_matrix(f"{module}.{part}"), there)
    assert reader.find_cached_address(1, 2) is None


def test_who_is_wanted_no_more_is_dropped_in_the_middle(tmp_path: Path) -> None:
    reader, shape = rows_of(write_base(tmp_path / "base", arch="olmoe"), torch.float32)
    answers = iter([True, False])
    with pytest.raises(ReadCancelled) as dropped:
        reader.read(0, 1, np.empty(shape.nbytes, np.uint8), is_wanted=lambda: next(answers))
    assert dropped.value.read_bytes == shape.nbytes // 3
