"""Whole models with LoRAs: our decoder and compiled plans against transformers and PEFT."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from expertctl.engine.adapter_load import load_adapter
from expertctl.engine.compose import CompiledPlan, Weighted, compile_plan
from expertctl.engine.kv_cache import KVCache
from tests.engine.adapter_files import files_of, manifest_of
from tests.engine.conftest import CLASSES, MakeOracle, Oracle, assert_same_logits
from tests.factories import write_lora

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
IDS = [3, 60, 0, 17, 17, 42, 8, 25, 31, 5, 59, 2]
CPU = torch.device("cpu")
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rank 1, alpha 1": {"rank": 1, "alpha": 1},
    "rslora": {"use_rslora": True, "rank": 8, "alpha": 5},
    "rank_pattern": {"rank_pattern": {"q_proj": 2, "layers.1.mlp.down_proj": 7}},
    "alpha_pattern": {"alpha_pattern": {"v_proj": 3, "mlp.up_proj": 1.5}},
    "both patterns and rslora": {
        "use_rslora": True,
        "rank_pattern": {"o_proj": 3},
        "alpha_pattern": {"o_proj": 7, "gate_proj": 2},
    },
    "layers_to_transform": {"layers_to_transform": [0, 2]},
    "attention only": {"targets": ("q_proj", "v_proj")},
    "bfloat16": {"dtype": "bfloat16", "rank": 3},
    "float16": {"dtype": "float16", "rank": 3},
}


def plan_of(decoder: Any, *experts: tuple[Path, float]) -> CompiledPlan:
    chain = [
        Weighted(load_adapter(manifest_of(directory), files_of(directory)), weight)
        for directory, weight in experts
    ]
    shapes = decoder.config.linear_shapes()
    return compile_plan(chain, shapes, dtype=torch.float32, device=CPU)


def ours(oracle: Oracle, *experts: tuple[Path, float]) -> torch.Tensor:
    """Scores after the prompt and after each decoded token."""
    decoder = oracle.decoder()
    deltas = plan_of(decoder, *experts).deltas
    cache = KVCache(decoder.config, len(IDS) + 3)
    rows = [decoder.prefill(IDS[:7], cache, deltas).logits]
    rows += [decoder.decode(token, cache, deltas).logits for token in IDS[7:]]
    return torch.stack(rows)


def theirs(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([IDS]), use_cache=False).logits[0, 6:]
    return logits


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("arch", CLASSES)
def test_one_lora_equals_peft(arch: str, variant: str, oracle: MakeOracle, tmp_path: Path) -> None:
    model = oracle(arch)
    lora = write_lora(tmp_path / "lora", model.directory, **VARIANTS[variant])
    base = theirs(model.model)
    expected = theirs(peft.PeftModel.from_pretrained(model.model, str(lora)))
    assert float((expected - base).abs().max()) > 0.01, "the LoRA must change something"
    assert_same_logits(ours(model, (lora, 1.0)), expected)


def test_fan_in_fan_out_changes_nothing_on_linear_layers(
    oracle: MakeOracle, tmp_path: Path
) -> None:
    """PEFT corrects the setting for ``torch.nn.Linear``; A and B lie the same way in both."""
    model = oracle("llama")
    lora = write_lora(tmp_path / "lora", model.directory, fan_in_fan_out=True)
    with pytest.warns(UserWarning, match="fan_in_fan_out"):
        adapted = peft.PeftModel.from_pretrained(model.model, str(lora))
    assert_same_logits(ours(model, (lora, 1.0)), theirs(adapted))


def test_weighted_loras_equal_the_concatenation_of_peft(oracle: MakeOracle, tmp_path: Path) -> None:
    model = oracle("qwen3")
    one = write_lora(tmp_path / "one", model.directory, rank=4, alpha=6, seed=1)
    two = write_lora(
        tmp_path / "two", model.directory, rank=4, targets=("q_proj", "up_proj"), seed=2
    )
    adapted = peft.PeftModel.from_pretrained(model.model, str(one), adapter_name="one")
    adapted.load_adapter(str(two), adapter_name="two")
    adapted.add_weighted_adapter(["one", "two"], [0.7, 1.5], "both", combination_type="cat")
    adapted.set_adapter("both")
    expected = theirs(adapted)
    assert_same_logits(ours(model, (one, 0.7), (two, 1.5)), expected)
    assert_same_logits(ours(model, (two, 1.5), (one, 0.7)), expected)


def test_weight_zero_is_the_base_bit_by_bit(oracle: MakeOracle, tmp_path: Path) -> None:
    model = oracle("qwen2")
    lora = write_lora(tmp_path / "lora", model.directory)
    assert torch.equal(ours(model, (lora, 0.0)), ours(model))


def test_a_negative_weight_takes_back_what_the_expert_adds(
    oracle: MakeOracle, tmp_path: Path
) -> None:
    model = oracle("llama")
    lora = write_lora(tmp_path / "lora", model.directory)
    assert_same_logits(ours(model, (lora, 1.0), (lora, -1.0)), theirs(model.model))


def test_the_base_is_not_changed_by_a_plan(oracle: MakeOracle, tmp_path: Path) -> None:
    model = oracle("qwen3", tie_word_embeddings=True)
    lora = write_lora(tmp_path / "lora", model.directory)
    decoder = model.decoder()

    def logits(deltas: Any) -> torch.Tensor:
        return decoder.prefill(IDS, KVCache(decoder.config, 20), deltas).logits

    before = logits({})
    assert not torch.equal(logits(plan_of(decoder, (lora, 1.0)).deltas), before)
    assert torch.equal(logits({}), before)
