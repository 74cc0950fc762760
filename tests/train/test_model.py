"""Bases in transformers for training, against what transformers and llama.cpp's package read."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    Phi3Config,
    Phi3ForCausalLM,
)

from expertctl.errors import BudgetError, IncompatibleError
from expertctl.package.stored_layout import StoredPlaces
from expertctl.store.bases import BaseStore
from expertctl.train.base import TrainingBase, choose_training_dtype, open_training_base
from expertctl.train.batches import EncodedExample
from expertctl.train.model import add_adapter, compute_loss, find_linear_names, list_trained
from expertctl.train.options import TrainingOptions
from tests.factories import write_base, write_tokenizer
from tests.gguf_files import read_numbers, write_gguf
from tests.train.fixtures import add_tiny_base

LINEAR = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
EXAMPLES = (
    EncodedExample(1, (5, 6, 7, 8, 9, 10), ((3, 6),)),
    EncodedExample(2, (11, 12, 13, 14), ((1, 2), (3, 4))),
)


def open_base(folder: Path, dtype: str = "float32", **config: Any) -> TrainingBase:
    bases, stored = add_tiny_base(folder, **config)
    return open_training_base(bases, stored, dtype=dtype, device="cpu")


def add_file(folder: Path, source: Path) -> TrainingBase:
    bases = BaseStore(folder / "bases")
    return open_training_base(bases, bases.add(source), dtype="float32", device="cpu")


@pytest.mark.parametrize("arch", ["llama", "qwen3", "mistral"])
def test_a_base_has_the_weights_that_transformers_reads(arch: str, tmp_path: Path) -> None:
    base = open_base(tmp_path, arch=arch)
    theirs = AutoModelForCausalLM.from_pretrained(base.stored.path, dtype=torch.float32)
    found, expected = base.model.state_dict(), theirs.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert base.context == 512
    assert find_linear_names(base.model) == LINEAR


def test_a_base_in_bf16_has_rounded_weights(tmp_path: Path) -> None:
    base = open_base(tmp_path, "bf16")
    theirs = AutoModelForCausalLM.from_pretrained(base.stored.path, dtype=torch.bfloat16)
    for name, weight in base.model.state_dict().items():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, theirs.state_dict()[name])
    weights = list_trained(add_adapter(base, TrainingOptions()))
    assert {weight.dtype for weight in weights.values()} == {torch.float32}


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_a_gguf_base_has_the_numbers_that_its_blocks_stand_for(kind: str, tmp_path: Path) -> None:
    source = write_base(tmp_path / "tiny", arch="qwen3", intermediate=64)
    base = add_file(tmp_path, write_gguf(tmp_path / "tiny.gguf", source, kind=kind))
    found = base.model.state_dict()
    compared = 0
    for name, numbers in read_numbers(source).items():
        blocks = gguf.quants.quantize(numbers, Kind[kind]) if numbers.ndim == 2 else None
        expected = numbers if blocks is None else gguf.quants.dequantize(blocks, Kind[kind])
        np.testing.assert_allclose(found[name].numpy(), expected, rtol=1e-6, atol=1e-7)
        compared += 1
    assert compared == len(found) - 1  # the head is tied


def test_a_base_that_only_transformers_runs_can_be_adapted(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = GPT2Config(n_layer=1, n_head=2, n_embd=16, n_positions=64, vocab_size=259)
    model: Any = GPT2LMHeadModel(config)
    model.save_pretrained(tmp_path / "gpt2")
    write_tokenizer(tmp_path / "gpt2")
    base = add_file(tmp_path, tmp_path / "gpt2")
    adapted = add_adapter(base, TrainingOptions())
    assert find_linear_names(base.model)
    assert {n.rpartition(".lora_")[0].rpartition(".")[2] for n in list_trained(adapted)} == {
        "c_attn",
        "c_fc",
        "c_proj",
    }


def test_the_loss_is_that_of_each_example_alone(tmp_path: Path) -> None:
    base = open_base(tmp_path)
    adapted = add_adapter(base, TrainingOptions())
    together = compute_loss(adapted, EXAMPLES, device="cpu")
    expected = 0.0
    for example in EXAMPLES:
        with torch.no_grad():
            logits = base.model(input_ids=torch.tensor([example.ids])).logits[0].double()
        logprobs = torch.log_softmax(logits, -1)
        for begin, end in example.spans:
            expected -= sum(float(logprobs[at - 1, example.ids[at]]) for at in range(begin, end))
    assert float(together.detach()) == pytest.approx(expected, rel=1e-5)


def test_a_new_adapter_changes_nothing_and_follows_from_the_seed(tmp_path: Path) -> None:
    ids = torch.tensor([EXAMPLES[0].ids])
    expected = open_base(tmp_path).model(input_ids=ids).logits
    made = [
        add_adapter(open_base(tmp_path / str(n)), TrainingOptions(seed=seed))
        for n, seed in enumerate((0, 0, 1))
    ]
    first, again, other = (
        torch.cat([w.detach().flatten() for w in list_trained(model).values()]) for model in made
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(made[0](input_ids=ids).logits, expected)


def test_what_peft_cannot_adapt_is_an_error(tmp_path: Path) -> None:
    base = open_base(tmp_path)
    for name in ("k_proj", "v_proj"):
        setattr(base.model.model.layers[0].self_attn, name, torch.nn.Identity())
    base.model.model.layers[0].mlp = torch.nn.Identity()
    with pytest.raises(IncompatibleError, match="PEFT cannot adapt tiny") as caught:
        add_adapter(base, TrainingOptions(kind="ia3"))
    assert "`expertctl build`" in caught.value.hint


@pytest.mark.parametrize(
    ("features", "dtype"),
    [({}, "float32"), ({"avx512_bf16": True}, "bf16"), ({"amx_bf16": True}, "bf16")],
)
def test_bf16_is_used_where_the_processor_has_it(
    features: dict[str, bool], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: features, raising=False)
    assert choose_training_dtype("cpu") == dtype


def test_a_base_that_does_not_fit_in_memory_is_refused_before_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bases, stored = add_tiny_base(tmp_path)
    monkeypatch.setattr("expertctl.train.base.find_available_bytes", lambda: 50_000)
    monkeypatch.setattr("expertctl.train.base.load_plain_weights", None)
    with pytest.raises(
        BudgetError, match=r"training on tiny needs about .* and this process may use 50.0 kB"
    ):
        open_training_base(bases, stored, dtype="float32", device="cpu")


def test_a_gguf_file_whose_matrices_transformers_has_otherwise_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_base(tmp_path / "tiny", arch="qwen3", intermediate=64)
    file = write_gguf(tmp_path / "tiny.gguf", source)
    monkeypatch.setattr(StoredPlaces, "are_usual", False)
    with pytest.raises(IncompatibleError, match="tiny cannot be trained: GGUF") as caught:
        add_file(tmp_path, file)
    assert "safetensors" in caught.value.hint


def test_a_base_with_fused_matrices_is_loaded_as_transformers_does(tmp_path: Path) -> None:
    config = Phi3Config(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=259,
        pad_token_id=0,
        max_position_embeddings=512,
    )
    model: Any = Phi3ForCausalLM(config)
    model.save_pretrained(tmp_path / "phi3")
    write_tokenizer(tmp_path / "phi3")
    found = add_file(tmp_path, tmp_path / "phi3").model
    assert find_linear_names(found) == ["down_proj", "gate_up_proj", "o_proj", "qkv_proj"]
    expected = model.state_dict()
    assert all(torch.equal(w, expected[name]) for name, w in found.state_dict().items())
