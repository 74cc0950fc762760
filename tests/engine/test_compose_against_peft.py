"""Whole models with experts: our decoder and compiled plans against transformers and PEFT."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from expertctl.engine.adapter_load import LoadedAdapter
from expertctl.engine.compose import CompiledPlan, Form, Weighted, compose
from expertctl.engine.decoder import Decoder
from expertctl.engine.dora import DoraTensors
from expertctl.engine.dora import gains as dora_gains
from expertctl.engine.kv_cache import KVCache
from tests.engine.adapter_files import load
from tests.engine.conftest import CLASSES, MakeOracle, Oracle, assert_same_logits
from tests.factories import (
    write_dora,
    write_ia3,
    write_lora,
    write_soft_prompt,
)
from tests.peft_layout import ALL_PROJECTIONS

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
IDS = [3, 60, 0, 17, 17, 42, 8, 25, 31, 5, 59, 2]
CPU = torch.device("cpu")
LORAS: dict[str, dict[str, Any]] = {
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
IA3S: dict[str, dict[str, Any]] = {
    "PEFT's own choice": {},
    "attention only": {"targets": ("q_proj", "v_proj", "o_proj"), "feedforward": ()},
    "feed-forward only": {
        "targets": ("up_proj", "down_proj"),
        "feedforward": ("up_proj", "down_proj"),
    },
    "every layer": {"targets": ALL_PROJECTIONS, "feedforward": ("down_proj", "q_proj")},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    **{arch: (arch, {}) for arch in CLASSES},
    "llama with biases": ("llama", {"attention_bias": True}),
    "qwen3 with biases, tied": ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    "qwen2, no groups": ("qwen2", {"num_key_value_heads": 4}),
}
"""Bases: qwen2 has biases of its own, all have two heads for a group of four."""


def plan_of(decoder: Decoder, *experts: tuple[Path, float]) -> CompiledPlan:
    chain = [weighted(decoder, load(directory), weight) for directory, weight in experts]
    config = decoder.config
    return compose(
        chain, Form(config.linear_shapes(), config.hidden_size, torch.float32, CPU)
    ).compile()


def weighted(decoder: Decoder, adapter: LoadedAdapter, weight: float) -> Weighted:
    gains = {
        module: tuple(
            dora_gains(decoder.matrix(module), step, what=module)
            for step in steps
            if isinstance(step, DoraTensors)
        )
        for module, steps in adapter.modules.items()
    }
    return Weighted(adapter, weight, gains)


def ours(oracle: Oracle, *experts: tuple[Path, float]) -> torch.Tensor:
    """Scores after the prompt and after each decoded token."""
    decoder = oracle.decoder()
    plan = plan_of(decoder, *experts)
    cache = KVCache(decoder.config, len(IDS) + 20)
    first = decoder.prefill(IDS[:7], cache, plan.deltas, soft_prompt=plan.soft_prompt, chunk=5)
    rows = [first.logits, *(decoder.decode(i, cache, plan.deltas).logits for i in IDS[7:])]
    return torch.stack(rows)


def theirs(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([IDS]), use_cache=False).logits[0, 6 - len(IDS) :]
    return logits


def adapted(model: Oracle, directory: Path) -> Any:
    return peft.PeftModel.from_pretrained(model.model, str(directory)).eval()


def assert_equals_peft(model: Oracle, directory: Path) -> None:
    base = theirs(model.model)
    expected = theirs(adapted(model, directory))
    assert float((expected - base).abs().max()) > 0.01, "the expert must change something"
    assert_same_logits(ours(model, (directory, 1.0)), expected)


@pytest.mark.parametrize("variant", LORAS)
@pytest.mark.parametrize("base", SHAPES)
def test_one_lora_equals_peft(base: str, variant: str, oracle: MakeOracle, tmp_path: Path) -> None:
    arch, config = SHAPES[base]
    model = oracle(arch, **config)
    assert_equals_peft(model, write_lora(tmp_path / "x", model.directory, **LORAS[variant]))


@pytest.mark.parametrize("variant", LORAS)
@pytest.mark.parametrize("base", SHAPES)
def test_one_dora_equals_peft(base: str, variant: str, oracle: MakeOracle, tmp_path: Path) -> None:
    arch, config = SHAPES[base]
    model = oracle(arch, **config)
    assert_equals_peft(model, write_dora(tmp_path / "x", model.directory, **LORAS[variant]))


@pytest.mark.parametrize("variant", IA3S)
@pytest.mark.parametrize("base", SHAPES)
def test_one_ia3_equals_peft(base: str, variant: str, oracle: MakeOracle, tmp_path: Path) -> None:
    arch, config = SHAPES[base]
    model = oracle(arch, **config)
    ia3 = write_ia3(tmp_path / "x", model.directory, scale=0.1, **IA3S[variant])
    assert_equals_peft(model, ia3)


PROMPTS: dict[str, Callable[[int], Any]] = {
    "prompt tuning": lambda n: peft.PromptTuningConfig("CAUSAL_LM", num_virtual_tokens=n),
    "P-tuning, MLP": lambda n: peft.PromptEncoderConfig(
        "CAUSAL_LM", num_virtual_tokens=n, encoder_hidden_size=16
    ),
    "P-tuning, LSTM": lambda n: peft.PromptEncoderConfig(
        "CAUSAL_LM",
        num_virtual_tokens=n,
        encoder_reparameterization_type="LSTM",
        encoder_hidden_size=16,
    ),
}


@pytest.mark.parametrize("kind", PROMPTS)
@pytest.mark.parametrize("base", SHAPES)
def test_a_soft_prompt_saved_by_peft_itself_equals_it(
    base: str, kind: str, oracle: MakeOracle, tmp_path: Path
) -> None:
    arch, config = SHAPES[base]
    model = oracle(arch, **config)
    plain = theirs(model.model)
    torch.manual_seed(3)
    config_of = PROMPTS[kind]
    prompted: Any = peft.get_peft_model(model.model, config_of(6))
    prompted.eval()
    prompted.save_pretrained(str(tmp_path / "prompt"))
    expected = theirs(prompted)
    assert float((expected - plain).abs().max()) > 0.01, "the prompt must change something"
    assert_same_logits(ours(model, (tmp_path / "prompt", 1.0)), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_soft_prompt_of_any_dtype_equals_its_embeddings(
    dtype: str, oracle: MakeOracle, tmp_path: Path
) -> None:
    model = oracle("qwen3")
    one = write_soft_prompt(tmp_path / "one", model.directory, tokens=3, dtype=dtype)
    two = write_soft_prompt(tmp_path / "two", model.directory, tokens=2, seed=1, kind="P_TUNING")
    for order in ((one, two), (two, one)):
        expected = embedded(model.model, *order)
        assert_same_logits(ours(model, *((path, 1.0) for path in order)), expected)
    assert torch.equal(ours(model, (one, 1.0), (two, 0.0)), ours(model, (one, 1.0)))


def embedded(model: Any, *prompts: Path) -> torch.Tensor:
    """What transformers answers to the embeddings themselves."""
    rows = [load(path).soft_prompts[0].float() for path in prompts]
    with torch.inference_mode():
        tokens = model.get_input_embeddings()(torch.tensor(IDS))
        together = torch.cat((*rows, tokens))[None]
        logits: torch.Tensor = model(inputs_embeds=together, use_cache=False).logits[0]
    return logits[6 - len(IDS) :]


@pytest.mark.parametrize("write", [write_lora, write_dora, write_ia3])
def test_a_soft_prompt_beside_another_kind_equals_the_embeddings_into_peft(
    write: Callable[..., Path], oracle: MakeOracle, tmp_path: Path
) -> None:
    """PEFT refuses the two together, so its adapted model is given the embeddings."""
    model = oracle("qwen2")
    other = write(tmp_path / "other", model.directory)
    prompt = write_soft_prompt(tmp_path / "prompt", model.directory)
    expected = embedded(adapted(model, other).base_model.model, prompt)
    assert_same_logits(ours(model, (prompt, 1.0), (other, 1.0)), expected)
    assert_same_logits(ours(model, (other, 1.0), (prompt, 1.0)), expected)


def active_together(model: Oracle, *directories: Path) -> torch.Tensor:
    """What PEFT answers with several adapters of one type at once."""
    names = [str(n) for n in range(len(directories))]
    wrapped: Any = peft.PeftModel.from_pretrained(
        model.model, str(directories[0]), adapter_name=names[0]
    )
    for name, directory in zip(names[1:], directories[1:], strict=True):
        wrapped.load_adapter(str(directory), adapter_name=name)
    wrapped.base_model.set_adapter(names)
    return theirs(wrapped.eval())


@pytest.mark.parametrize("base", SHAPES)
def test_loras_that_peft_runs_together_equal_it(
    base: str, oracle: MakeOracle, tmp_path: Path
) -> None:
    arch, config = SHAPES[base]
    model = oracle(arch, **config)
    some = [
        write_lora(tmp_path / str(n), model.directory, seed=n, rank=n + 1, alpha=3)
        for n in range(3)
    ]
    expected = active_together(model, *some)
    assert_same_logits(ours(model, *((path, 1.0) for path in some)), expected)


@pytest.mark.parametrize("base", SHAPES)
def test_ia3s_that_peft_runs_together_equal_it(
    base: str, oracle: MakeOracle, tmp_path: Path
) -> None:
    arch, config = SHAPES[base]
    model = oracle(arch, **config)
    some = [write_ia3(tmp_path / str(n), model.directory, scale=0.1, seed=n) for n in range(3)]
    expected = active_together(model, *some)
    assert_same_logits(ours(model, *((path, 1.0) for path in some)), expected)


@pytest.mark.parametrize("step", [1, -1])
@pytest.mark.parametrize("base", SHAPES)
def test_loras_and_doras_that_peft_runs_together_equal_it(
    base: str, step: int, oracle: MakeOracle, tmp_path: Path
) -> None:
    """A DoRA scales all that stands before it but the bias, so their order counts."""
    arch, config = SHAPES[base]
    model = oracle(arch, **config)
    writers = (write_lora, write_dora, write_dora)
    some = [write(tmp_path / str(n), model.directory, seed=n) for n, write in enumerate(writers)]
    order = some[::step]
    expected = active_together(model, *order)
    assert_same_logits(ours(model, *((path, 1.0) for path in order)), expected)


def test_fan_in_fan_out_changes_nothing_on_linear_layers(
    oracle: MakeOracle, tmp_path: Path
) -> None:
    """PEFT corrects the setting for ``torch.nn.Linear``; A and B lie the same way in both."""
    model = oracle("llama")
    lora = write_lora(tmp_path / "lora", model.directory, fan_in_fan_out=True)
    with pytest.warns(UserWarning, match="fan_in_fan_out"):
        wrapped = adapted(model, lora)
    assert_same_logits(ours(model, (lora, 1.0)), theirs(wrapped))


def test_weighted_loras_equal_the_concatenation_of_peft(oracle: MakeOracle, tmp_path: Path) -> None:
    model = oracle("qwen3")
    one = write_lora(tmp_path / "one", model.directory, rank=4, alpha=6, seed=1)
    two = write_lora(
        tmp_path / "two", model.directory, rank=4, targets=("q_proj", "up_proj"), seed=2
    )
    wrapped = peft.PeftModel.from_pretrained(model.model, str(one), adapter_name="one")
    wrapped.load_adapter(str(two), adapter_name="two")
    wrapped.add_weighted_adapter(["one", "two"], [0.7, 1.5], "both", combination_type="cat")
    wrapped.set_adapter("both")
    expected = theirs(wrapped)
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
