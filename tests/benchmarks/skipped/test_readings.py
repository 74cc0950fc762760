"""Text and answers, read with all experts in memory and with some."""

from pathlib import Path

import pytest
import torch
from transformers import Qwen3MoeForCausalLM

from benchmarks.skipped.evaluation import (
    BaseLoader,
    CacheConfiguration,
    EvaluationSet,
    evaluate,
    evaluate_whole,
    make_evaluation_set,
)
from examples.moe.train import perplexity
from examples.starter.vocab import END, SPECIALS
from expertctl.engine.moe.expert_cache import MissPolicy

SKIPS = MissPolicy(skips=True, cap=1.0, prefetches=False)


@pytest.fixture(scope="module")
def bases(base: Path) -> BaseLoader:
    return BaseLoader(base, threads=1)


@pytest.fixture(scope="module")
def read() -> EvaluationSet:
    return make_evaluation_set(documents=1, questions=1)


def test_the_whole_base_reads_text_as_transformers_does(
    bases: BaseLoader, base: Path, read: EvaluationSet
) -> None:
    model = Qwen3MoeForCausalLM.from_pretrained(base, dtype=torch.float32)
    theirs, _ = perplexity(model, read.documents)
    mine = evaluate_whole(bases, read)
    assert mine.text.perplexity == pytest.approx(theirs, rel=1e-5)
    assert (mine.text.skipped, mine.text.fallback) == (0, 0)


def test_exact_reads_as_the_whole_base_does_however_little_is_in_memory(
    bases: BaseLoader, read: EvaluationSet
) -> None:
    whole, exact = (
        evaluate_whole(bases, read),
        evaluate(bases, CacheConfiguration(share=0.75), read),
    )
    assert exact.text.perplexity == pytest.approx(whole.text.perplexity, rel=1e-5)
    assert exact.answers.perplexity == pytest.approx(whole.answers.perplexity, rel=1e-5)
    assert exact.accuracy == whole.accuracy
    assert exact.text.fallback > 0
    assert exact.text.skipped == 0


def test_skipping_leaves_weights_out_where_experts_are_missing_and_else_changes_nothing(
    bases: BaseLoader, read: EvaluationSet
) -> None:
    whole = evaluate_whole(bases, read)
    full = evaluate(bases, CacheConfiguration(share=1.0, policy=SKIPS), read)
    assert full.text.perplexity == pytest.approx(whole.text.perplexity, rel=1e-5)
    part = evaluate(bases, CacheConfiguration(share=0.75, policy=SKIPS), read)
    assert 0 < part.text.skipped < 1
    assert part.answers.skipped > 0
    assert part.text.perplexity != whole.text.perplexity


def test_questions_of_all_tasks_are_asked_in_turn_with_answers_that_end(
    read: EvaluationSet,
) -> None:
    assert len(read.questions) == 9
    assert all(answer[-1] == SPECIALS[END] for _, answer in read.questions)
    assert not set(read.before) & set(read.documents)
