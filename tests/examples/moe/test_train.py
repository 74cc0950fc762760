"""The training of the base of routed experts, for a few seconds."""

from pathlib import Path

import pytest
import torch
from transformers import Qwen3MoeForCausalLM

from examples.moe.text import held_out_documents
from examples.moe.train import (
    advance,
    begin,
    build_model,
    imbalance,
    keep,
    perplexity,
    resume,
    train,
    unigram_perplexity,
)
from examples.starter.fitting import Schedule
from expertctl.package.model_config import read_model_config
from expertctl.store.bases import BaseStore

pytestmark = pytest.mark.all

FEW = Schedule(steps=6, batch=1, peak=3e-3, warmup=1)


def small() -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    return build_model(layers=1, experts=8)


def test_perplexity_of_text_that_training_does_not_see_falls() -> None:
    training = begin(Schedule(steps=30, batch=4, peak=1e-2, warmup=3), seed=0, model=small())
    documents = held_out_documents(4)
    before, _ = perplexity(training.model, documents)
    assert before == pytest.approx(264, rel=0.1), "it knows nothing"
    assert advance(training, 0) == 30
    after, answers = perplexity(training.model, documents)
    assert after < unigram_perplexity(documents) < 40
    assert answers > 1


def test_training_that_is_cut_comes_to_the_same_weights_to_the_bit(tmp_path: Path) -> None:
    whole = begin(FEW, seed=0, model=small())
    advance(whole, 0)
    cut, path = begin(FEW, seed=0, model=small()), tmp_path / "training.pt"
    assert resume(cut, path) == 0
    first = advance(cut, 0, seconds=0)
    assert first == 0, "no time, no step"
    keep(cut, path, advance(cut, first, most=3))
    again = begin(FEW, seed=0, model=small())
    torch.nn.init.zeros_(again.model.lm_head.weight)
    assert advance(again, resume(again, path)) == 6
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, again.model.state_dict()[name]), name


def test_what_is_not_done_is_kept_and_what_is_done_is_a_base(tmp_path: Path) -> None:
    schedule, out = Schedule(steps=1, batch=1, peak=3e-3, warmup=1), tmp_path / "base"
    assert not train(schedule, out, seed=0, seconds=0)
    assert [path.name for path in out.iterdir()] == ["training.pt"]
    assert train(schedule, out, seed=0)
    assert not (out / "training.pt").exists()
    assert BaseStore(tmp_path / "bases").add(out).name == "base"
    experts = read_model_config(out).experts
    assert experts is not None
    assert (experts.count, experts.used, len(experts.layers)) == (32, 4, 6)
    weights = (out / "model.safetensors").read_bytes()
    assert train(schedule, out, seed=0), "there is nothing left to do"
    assert (out / "model.safetensors").read_bytes() == weights


def test_layers_are_balanced_one_by_one() -> None:
    even = torch.eye(4).repeat(8, 1) * 9
    one = torch.tensor([9.0, 0, 0, 0]).repeat(32, 1)
    assert imbalance([even, even], used=1).item() == pytest.approx(1)
    assert imbalance([one, one.flip(1)], used=1).item() > 3.9
