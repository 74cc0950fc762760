"""Log-probabilities of prompts in the batch: with experts, beside others, and after a pause."""

from collections.abc import Sequence
from typing import Any

import peft
import pytest
import torch
import transformers

from expertctl.engine.kernels.packed_format import KV_PAGE_TOKENS
from expertctl.engine.load_plan import NUMPY_MAX_BYTES
from expertctl.engine.request import RunRequest
from expertctl.engine.running_sequence import OutputDelta
from expertctl.engine.serving.model_runner import INITIAL_ANSWER_TOKENS
from expertctl.engine.text.prompt import PromptLogprobs, RawPrompt
from expertctl.engine_config import BatchingConfig, EngineConfig
from expertctl.errors import BudgetError
from expertctl.reference import Reference
from expertctl.routing.request import ForcedExpert, RouteRequest
from expertctl.user_request import SamplingOverrides, UserMessage
from tests.engine.package_fixtures import EnginePackages
from tests.engine.serving.harness import (
    SETTINGS,
    EngineHarness,
    SubmittedRequest,
    engine_packages,
    known,
    make_request,
    open_engine_harness,
    reserve_all_but,
)
from tests.store.fixtures import HomeFixture, fast, user_home

__all__ = ["engine_packages", "fast", "known", "user_home"]

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
TOLERANCE = 1e-4
LONG = [1 + (7 * n * n + 3 * n) % 250 for n in range(300)]
BACKENDS = pytest.mark.parametrize("numpy_below", [NUMPY_MAX_BYTES, 0], ids=["numpy", "kernels"])


def scoring(
    ids: Sequence[int], *experts: str, written: int = 0, cache_key: str | None = None
) -> RunRequest:
    """A request for the scores of tokens."""
    wishes = SamplingOverrides(max_tokens=max(1, written), greedy=True)
    return RunRequest(
        message=UserMessage(prompt="?"),
        route=RouteRequest(prompt="?", seed=0, sampling=wishes, base_alone=not experts),
        experts=tuple(ForcedExpert(Reference.parse(f"acme/{name}")) for name in experts),
        raw=RawPrompt(ids=tuple(ids), is_continued=written > 0),
        cache_key=cache_key,
    )


def scores(caller: SubmittedRequest) -> PromptLogprobs:
    """What was told of a prompt, which is told once."""
    [found] = [
        e.prompt for e in caller.events if isinstance(e, OutputDelta) and e.prompt is not None
    ]
    assert found.is_complete
    return found


def load(engine_packages: EnginePackages) -> Any:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        engine_packages.base_dir, dtype=torch.float32
    )
    return model.eval()


def assert_scores(caller: SubmittedRequest, model: Any, ids: Sequence[int]) -> None:
    with torch.inference_mode():
        rows = model(torch.tensor([list(ids)])).logits[0].double().log_softmax(-1)
    found = scores(caller)
    ours = [found.logprob(place) for place in range(1, len(ids))]
    theirs = [float(rows[place - 1][ids[place]]) for place in range(1, len(ids))]
    assert ours == pytest.approx(theirs, abs=TOLERANCE)


@BACKENDS
def test_prompts_are_scored_beside_each_other_each_with_its_expert(
    user_home: HomeFixture, engine_packages: EnginePackages, numpy_below: int
) -> None:
    adapted = {None: load(engine_packages)}
    for seed, name in enumerate(("sql", "go")):
        folder = engine_packages.package(f"acme/{name}", seed=seed).with_suffix(".files")
        adapted[name] = peft.PeftModel.from_pretrained(load(engine_packages), str(folder)).eval()
    with open_engine_harness(user_home.home, SETTINGS, numpy_below=numpy_below) as harness:
        callers = {
            name: harness.submit_until_ready(
                scoring(LONG[n:], *filter(None, [name])), prompt_logprobs=1
            )
            for n, name in enumerate(adapted)
        }
        harness.finish(*callers.values())
        for n, (name, caller) in enumerate(callers.items()):
            assert_scores(caller, adapted[name], LONG[n:])
            assert caller.results[0].generated.tokens == ()
            assert caller.results[0].generated.finish_reason == "length"
        harness.check_idle()


@BACKENDS
def test_a_prompt_is_scored_whole_although_an_earlier_text_began_so(
    user_home: HomeFixture, engine_packages: EnginePackages, numpy_below: int
) -> None:
    model = load(engine_packages)
    with open_engine_harness(user_home.home, numpy_below=numpy_below) as harness:
        harness.answer(scoring(LONG, written=3, cache_key="a"))
        again = harness.answer(scoring(LONG, written=3, cache_key="a"))
        assert again.results[0].kv_reused_tokens > 0
        scored = harness.answer(scoring(LONG, written=3, cache_key="a"), prompt_logprobs=2)
        assert scored.results[0].kv_reused_tokens == 0
        assert scored.results[0].generated.tokens == again.results[0].generated.tokens
        assert_scores(scored, model, LONG)
        later = harness.answer(scoring(LONG, written=3, cache_key="a"))
        assert later.results[0].kv_reused_tokens > 0


@BACKENDS
def test_only_the_first_of_several_answers_tells_the_scores(
    user_home: HomeFixture, engine_packages: EnginePackages, numpy_below: int
) -> None:
    with open_engine_harness(user_home.home, numpy_below=numpy_below) as harness:
        caller = harness.answer(scoring(LONG, written=3), prompt_logprobs=1, answers=2)
        assert_scores(caller, load(engine_packages), LONG)
        first, second = caller.results
        assert first.generated.tokens == second.generated.tokens


def test_a_prompt_whose_reading_pauses_loses_no_score(
    user_home: HomeFixture, engine_packages: EnginePackages
) -> None:
    with open_engine_harness(user_home.home, numpy_below=0) as harness:
        harness.loop.batch._clock = lambda: 0.0  # chunks and steps take turns one to one
        first = harness.submit_until_ready(make_request("Sort: 1", "sql", max_tokens=300))
        harness.step_until(lambda: is_before_the_end_of_a_page(harness))
        second = harness.submit_until_ready(scoring(LONG), prompt_logprobs=1)
        harness.runner.resources.tiers.clear()
        harness.loop.run_pass()
        with reserve_all_but(harness, leaving=0):
            harness.loop.run_pass()
            assert harness.scheduler.totals.paused == 1
            assert not second.has_started
        harness.finish(first)
        harness.finish(second)
        assert_scores(second, load(engine_packages), LONG)
        harness.check_idle()


def test_a_prompt_is_scored_beside_a_text_that_is_written(
    user_home: HomeFixture, engine_packages: EnginePackages
) -> None:
    with open_engine_harness(user_home.home, numpy_below=0) as harness:
        first = harness.submit_until_ready(make_request("Sort: 1", "sql", max_tokens=300))
        harness.step_until(lambda: bool(harness.loop.batch.sequences))
        second = harness.submit_until_ready(scoring(LONG), prompt_logprobs=1)
        harness.finish(second)
        assert_scores(second, load(engine_packages), LONG)
        harness.finish(first)
        harness.check_idle()


def is_before_the_end_of_a_page(harness: EngineHarness) -> bool:
    """Whether the only text fills the last of its pages with the next token."""
    [text] = harness.loop.batch.sequences or [None]
    if text is None or len(text.writer.tokens) < INITIAL_ANSWER_TOKENS + KV_PAGE_TOKENS:
        return False
    reading: Any = text.session
    length: int = reading.cache.length
    return length % KV_PAGE_TOKENS == KV_PAGE_TOKENS - 1


def test_memory_for_scores_is_held_while_a_prompt_is_scored(user_home: HomeFixture) -> None:
    with open_engine_harness(user_home.home, numpy_below=0) as harness:
        harness.answer(scoring(LONG))
        before = harness.runner.budget.reserved_bytes("buffers")
        caller = harness.submit_until_ready(scoring(LONG, written=40), prompt_logprobs=5)
        harness.loop.run_pass()
        assert harness.runner.budget.reserved_bytes("buffers") >= before + len(LONG) * 2 * 5 * 8
        harness.finish(caller)
        assert harness.runner.budget.reserved_bytes("buffers") == before
        harness.check_idle()


def test_scores_for_which_there_is_no_memory_fail_their_job_alone(user_home: HomeFixture) -> None:
    settings = EngineConfig(
        memory_budget=SETTINGS.memory_budget, batching=BatchingConfig(rows=2, queue=4)
    )
    with open_engine_harness(user_home.home, settings, numpy_below=0) as harness:
        harness.answer(scoring(LONG))
        caller = harness.submit_until_ready(scoring(LONG), prompt_logprobs=5)
        with reserve_all_but(harness, leaving=30_000):
            harness.finish(caller)
        assert isinstance(caller.error, BudgetError)
        assert "the log-probabilities of a prompt" in caller.error.message
        assert harness.answer(scoring(LONG)).results
        harness.check_idle()
