"""What work costs: counted by torch on transformers' own model, and by hand."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache

from expertctl.engine.bench_result import ModelCosts, PassWork, Roofline
from expertctl.engine.cpu.base_loader import (
    create_random_base,
    decode_bytes_per_token,
    list_matrices,
)
from expertctl.engine.cpu.packed_base import make_expert_shape
from expertctl.engine.kernels.packed_format import Scheme
from expertctl.package.model_config import read_model_config
from tests.benchmarks.test_gguf import small_config
from tests.engine.conftest import build_reference_model
from tests.engine.moe.test_packed_experts import fitting
from tests.engine.reference_models import ROUTED_CLASSES as ROUTED

CONFIG = small_config()  # 2 layers, hidden 64, 4 heads and 2 kv heads of 32, MLP 160, vocabulary 96
LAYER = 64 * 256 + 128 * 64 + 64 * 320 + 160 * 64
HEAD = 96 * 64


def costs(**changes: object) -> ModelCosts:
    plain = ModelCosts(config=CONFIG, layer_bytes=2 * 2 * LAYER, head_bytes=2 * HEAD, kv_itemsize=4)
    return replace(plain, **changes)


@pytest.mark.parametrize("arch", ["qwen3", *sorted(ROUTED)])
@pytest.mark.parametrize("context", [0, 1, 17])
def test_a_token_computes_what_torch_counts_in_transformers(
    context: int, arch: str, tmp_path: Path
) -> None:
    """Of routed experts those that a token uses, and their router."""
    oracle = build_reference_model(tmp_path / "base", arch, attn_implementation="eager")
    oracle.model.set_experts_implementation("eager")  # which multiplies by those alone
    past = DynamicCache(config=oracle.model.config)
    with torch.inference_mode():
        if context:
            oracle.model(torch.tensor([list(range(context))]), past_key_values=past)
        with FlopCounterMode(display=False) as counted:
            oracle.model(torch.tensor([[3]]), past_key_values=past)
    config = read_model_config(tmp_path / "base")
    ours = ModelCosts(config=config, layer_bytes=0, head_bytes=0, kv_itemsize=4)
    assert ours.decode_work(context).operations == counted.get_total_flops()


def test_a_token_reads_every_weight_once_and_the_keys_and_values_before_it() -> None:
    work = costs(expert_bytes=1000).decode_work(9)
    assert work.weight_bytes == 2 * (2 * LAYER + HEAD)
    assert work.kv_bytes == 10 * 2 * 2 * 2 * 32 * 4  # tokens, layers, keys and values, heads, dim
    assert work.nbytes == work.weight_bytes + work.kv_bytes + 1000


def test_a_pass_reads_as_many_routed_experts_as_a_token_uses(tmp_path: Path) -> None:
    build_reference_model(tmp_path / "base", "olmoe", **fitting("olmoe", {}))
    config = read_model_config(tmp_path / "base")
    assert config.experts is not None
    base = create_random_base(config, Scheme.INT8)
    own = sum(matrix.nbytes for matrix in list_matrices(base)[:-1])
    routed = ModelCosts(
        config=config,
        layer_bytes=own,
        head_bytes=base.head.nbytes,
        kv_itemsize=4,
        routed_bytes=make_expert_shape(config, Scheme.INT8).nbytes,
    )
    assert routed.decode_work(0).weight_bytes == decode_bytes_per_token(base)
    read = decode_bytes_per_token(base) - base.head.nbytes
    assert routed.prefill_work(20, chunk=8).weight_bytes == 3 * read + base.head.nbytes
    wide = replace(config, experts=replace(config.experts, count=1000))
    more = replace(routed, config=wide).decode_work(0)
    assert more.weight_bytes == routed.decode_work(0).weight_bytes
    routers = (1000 - config.experts.count) * config.hidden_size * len(config.experts.layers)
    assert more.operations == routed.decode_work(0).operations + 2 * routers


def test_a_window_bounds_what_a_token_looks_at_in_its_layers() -> None:
    windowed = costs(config=replace(CONFIG, windows=(4, None)))
    assert windowed.decode_work(9).kv_bytes == (4 + 10) * 2 * 2 * 32 * 4
    assert costs().decode_work(3) == windowed.decode_work(3)
    lost = costs().decode_work(9).operations - windowed.decode_work(9).operations
    assert lost == 4 * 4 * 32 * (10 - 4)


def test_a_prompt_reads_weights_for_each_stretch_and_computes_what_its_tokens_do() -> None:
    work = costs(expert_bytes=1000, expert_numbers=250).prefill_work(20, chunk=8)
    assert work.weight_bytes == 2 * (3 * 2 * LAYER + HEAD)
    assert work.expert_bytes == 3000
    assert work.kv_bytes == (8 + 16 + 20) * 2 * 2 * 2 * 32 * 4
    tokens = [costs(expert_numbers=250).decode_work(k).operations for k in range(20)]
    assert work.operations == sum(tokens) - 19 * 2 * HEAD


def test_the_bytes_of_a_random_base_are_those_of_its_costs() -> None:
    base = create_random_base(CONFIG, Scheme.BFLOAT16)
    assert decode_bytes_per_token(base) == costs().decode_work(0).weight_bytes
    assert costs().numbers == 2 * LAYER + HEAD


def test_the_roof_is_memory_up_to_its_ridge_and_arithmetic_from_there() -> None:
    roof = Roofline(nbytes=50e9, operations=1000e9)
    assert roof.ridge_intensity == 20
    assert [roof.attainable_rate(x) for x in (1, 20, 100)] == [50e9, 1000e9, 1000e9]
    token = PassWork(weight_bytes=10**9, expert_bytes=0, kv_bytes=0, operations=10**9)
    assert roof.min_seconds(token) == pytest.approx(1 / 50)
    prompt = replace(token, operations=10**12)
    assert roof.min_seconds(prompt) == pytest.approx(1.0)
