"""What work costs: counted by torch on transformers' own model, and by hand."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache

from expertctl.engine.kernels.scheme import Scheme
from expertctl.engine.packed_base import expert_shape
from expertctl.engine.random_base import base_bytes, base_matrices, random_base
from expertctl.engine.roofline import Costs, Roof, Work
from expertctl.package.model_config import read_config
from tests.benchmarks.test_gguf import small_config
from tests.engine.conftest import build_oracle
from tests.engine.moe.test_packed_experts import fitting
from tests.engine.routed_models import CLASSES as ROUTED

CONFIG = small_config()  # 2 layers, hidden 64, 4 heads and 2 kv heads of 32, MLP 160, vocabulary 96
LAYER = 64 * 256 + 128 * 64 + 64 * 320 + 160 * 64
HEAD = 96 * 64


def costs(**changes: object) -> Costs:
    plain = Costs(config=CONFIG, layer_bytes=2 * 2 * LAYER, head_bytes=2 * HEAD, kv_itemsize=4)
    return replace(plain, **changes)


@pytest.mark.parametrize("arch", ["qwen3", *sorted(ROUTED)])
@pytest.mark.parametrize("context", [0, 1, 17])
def test_a_token_computes_what_torch_counts_in_transformers(
    context: int, arch: str, tmp_path: Path
) -> None:
    """Of routed experts those that a token uses, and their router."""
    oracle = build_oracle(tmp_path / "base", arch, attn_implementation="eager")
    oracle.model.set_experts_implementation("eager")  # which multiplies by those alone
    past = DynamicCache(config=oracle.model.config)
    with torch.inference_mode():
        if context:
            oracle.model(torch.tensor([list(range(context))]), past_key_values=past)
        with FlopCounterMode(display=False) as counted:
            oracle.model(torch.tensor([[3]]), past_key_values=past)
    config = read_config(tmp_path / "base")
    ours = Costs(config=config, layer_bytes=0, head_bytes=0, kv_itemsize=4)
    assert ours.token(context).operations == counted.get_total_flops()


def test_a_token_reads_every_weight_once_and_the_keys_and_values_before_it() -> None:
    work = costs(expert_bytes=1000).token(9)
    assert work.weight_bytes == 2 * (2 * LAYER + HEAD)
    assert work.kv_bytes == 10 * 2 * 2 * 2 * 32 * 4  # tokens, layers, keys and values, heads, dim
    assert work.nbytes == work.weight_bytes + work.kv_bytes + 1000


def test_a_pass_reads_as_many_routed_experts_as_a_token_uses(tmp_path: Path) -> None:
    build_oracle(tmp_path / "base", "olmoe", **fitting("olmoe", {}))
    config = read_config(tmp_path / "base")
    assert config.experts is not None
    base = random_base(config, Scheme.INT8)
    own = sum(matrix.nbytes for matrix in base_matrices(base)[:-1])
    routed = Costs(
        config=config,
        layer_bytes=own,
        head_bytes=base.head.nbytes,
        kv_itemsize=4,
        routed_bytes=expert_shape(config, Scheme.INT8).nbytes,
    )
    assert routed.token(0).weight_bytes == base_bytes(base)
    read = base_bytes(base) - base.head.nbytes
    assert routed.prompt(20, chunk=8).weight_bytes == 3 * read + base.head.nbytes
    wide = replace(config, experts=replace(config.experts, count=1000))
    more = replace(routed, config=wide).token(0)
    assert more.weight_bytes == routed.token(0).weight_bytes
    routers = (1000 - config.experts.count) * config.hidden_size * len(config.experts.layers)
    assert more.operations == routed.token(0).operations + 2 * routers


def test_a_window_bounds_what_a_token_looks_at_in_its_layers() -> None:
    windowed = costs(config=replace(CONFIG, windows=(4, None)))
    assert windowed.token(9).kv_bytes == (4 + 10) * 2 * 2 * 32 * 4
    assert costs().token(3) == windowed.token(3)
    lost = costs().token(9).operations - windowed.token(9).operations
    assert lost == 4 * 4 * 32 * (10 - 4)


def test_a_prompt_reads_weights_for_each_stretch_and_computes_what_its_tokens_do() -> None:
    work = costs(expert_bytes=1000, expert_numbers=250).prompt(20, chunk=8)
    assert work.weight_bytes == 2 * (3 * 2 * LAYER + HEAD)
    assert work.expert_bytes == 3000
    assert work.kv_bytes == (8 + 16 + 20) * 2 * 2 * 2 * 32 * 4
    tokens = [costs(expert_numbers=250).token(k).operations for k in range(20)]
    assert work.operations == sum(tokens) - 19 * 2 * HEAD


def test_the_bytes_of_a_random_base_are_those_of_its_costs() -> None:
    base = random_base(CONFIG, Scheme.BFLOAT16)
    assert base_bytes(base) == costs().token(0).weight_bytes
    assert costs().numbers == 2 * LAYER + HEAD


def test_the_roof_is_memory_up_to_its_ridge_and_arithmetic_from_there() -> None:
    roof = Roof(nbytes=50e9, operations=1000e9)
    assert roof.ridge == 20
    assert [roof.at(x) for x in (1, 20, 100)] == [50e9, 1000e9, 1000e9]
    token = Work(weight_bytes=10**9, expert_bytes=0, kv_bytes=0, operations=10**9)
    assert roof.seconds(token) == pytest.approx(1 / 50)
    prompt = replace(token, operations=10**12)
    assert roof.seconds(prompt) == pytest.approx(1.0)
