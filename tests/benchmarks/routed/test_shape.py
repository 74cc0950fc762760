"""The files of a base whose tokens say whom they ask for."""

import json
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

from benchmarks.cache_policies import Trace
from benchmarks.routed.traced_base import RoutedShape, write_base
from expertctl.package.base_tensors import read_base_tensors
from tests.benchmarks.routed.conftest import SHAPE


def test_the_sizes_are_those_of_olmoe() -> None:
    config = RoutedShape(4).make_config()
    assert config.experts is not None
    assert (config.hidden_size, config.head_dim, config.vocab_size) == (2048, 128, 50304)
    assert (config.experts.count, config.experts.used) == (64, 8)
    assert config.experts.intermediate_size == 1024
    whole = RoutedShape(16).make_config().tensor_shapes()
    assert 6.9e9 < sum(int(np.prod(shape)) for shape in whole.values()) < 7.0e9


def test_files_hold_every_tensor_and_others_read_them(directory: Path) -> None:
    assert (
        read_base_tensors(directory, SHAPE.make_config()).keys()
        == SHAPE.make_config().tensor_shapes().keys()
    )
    assert json.loads((directory / "config.json").read_text())["model_type"] == "olmoe"
    with safe_open(directory / "model.safetensors", "pt") as file:
        norm = file.get_tensor("model.norm.weight")
        down = file.get_tensor("model.layers.1.mlp.experts.3.down_proj.weight").float()
    assert torch.equal(norm, torch.ones(128, dtype=torch.bfloat16))
    assert not down[:16].any(), "nobody else writes where tokens call"
    assert 0.015 < float(down[16:].std()) < 0.025


def test_one_seed_gives_one_base(tmp_path: Path, trace: Trace) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first, second = (write_base(tmp_path / name, SHAPE, trace) for name in "ab")
    name = "model.safetensors"
    assert (first / name).read_bytes() == (second / name).read_bytes()
