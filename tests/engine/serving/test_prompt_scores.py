"""Log-probabilities of prompts in the batch: with experts, beside others, and after a pause."""

from collections.abc import Sequence
from typing import Any

import peft
import pytest
import torch
import transformers

from expertctl.engine.kernels.heads import PAGE
from expertctl.engine.loaded_base import TORCH_BELOW
from expertctl.engine.message import RawPrompt, UserMessage
from expertctl.engine.prompt_scores import PromptScores
from expertctl.engine.request import RunRequest
from expertctl.engine.serving.batch_settings import BatchSettings
from expertctl.engine.serving.house import AT_ONCE
from expertctl.engine.serving.job import Piece
from expertctl.errors import BudgetError
from expertctl.reference import Reference
from expertctl.routing.presets import SamplingWishes
from expertctl.routing.request import Forced, RouteRequest
from tests.engine.market import Market
from tests.engine.serving.workshop import (
    SETTINGS,
    Caller,
    Workshop,
    held_by_others,
    known,
    market,
    request,
    workshop,
)
from tests.store.shop import House, fast, house

__all__ = ["fast", "house", "known", "market"]

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
TOLERANCE = 1e-4
LONG = [1 + (7 * n * n + 3 * n) % 250 for n in range(300)]
BACKENDS = pytest.mark.parametrize("torch_below", [TORCH_BELOW, 0], ids=["torch", "kernels"])


def scoring(
    ids: Sequence[int], *experts: str, written: int = 0, cache_key: str | None = None
) -> RunRequest:
    """A request for the scores of tokens."""
    wishes = SamplingWishes(max_tokens=max(1, written), greedy=True)
    return RunRequest(
        message=UserMessage(prompt="?"),
        route=RouteRequest(prompt="?", seed=0, wishes=wishes, base_alone=not experts),
        experts=tuple(Forced(Reference.parse(f"acme/{name}")) for name in experts),
        raw=RawPrompt(ids=tuple(ids), is_continued=written > 0),
        cache_key=cache_key,
    )


def scores(caller: Caller) -> PromptScores:
    """What was told of a prompt, which is told once."""
    [found] = [e.prompt for e in caller.events if isinstance(e, Piece) and e.prompt is not None]
    assert found.is_complete
    return found


def load(market: Market) -> Any:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        market.base_dir, dtype=torch.float32
    )
    return model.eval()


def assert_scores(caller: Caller, model: Any, ids: Sequence[int]) -> None:
    with torch.inference_mode():
        rows = model(torch.tensor([list(ids)])).logits[0].double().log_softmax(-1)
    found = scores(caller)
    ours = [found.logprob(place) for place in range(1, len(ids))]
    theirs = [float(rows[place - 1][ids[place]]) for place in range(1, len(ids))]
    assert ours == pytest.approx(theirs, abs=TOLERANCE)


@BACKENDS
def test_prompts_are_scored_beside_each_other_each_with_its_expert(
    house: House, market: Market, torch_below: int
) -> None:
    adapted = {None: load(market)}
    for seed, name in enumerate(("sql", "go")):
        folder = market.package(f"acme/{name}", seed=seed).with_suffix(".files")
        adapted[name] = peft.PeftModel.from_pretrained(load(market), str(folder)).eval()
    with workshop(house.home, SETTINGS, torch_below=torch_below) as shop:
        callers = {
            name: shop.ready(scoring(LONG[n:], *filter(None, [name])), prompt_logprobs=1)
            for n, name in enumerate(adapted)
        }
        shop.finish(*callers.values())
        for n, (name, caller) in enumerate(callers.items()):
            assert_scores(caller, adapted[name], LONG[n:])
            assert caller.results[0].generated.tokens == ()
            assert caller.results[0].generated.finish_reason == "length"
        shop.check_idle()


@BACKENDS
def test_a_prompt_is_scored_whole_although_an_earlier_text_began_so(
    house: House, market: Market, torch_below: int
) -> None:
    model = load(market)
    with workshop(house.home, torch_below=torch_below) as shop:
        shop.answer(scoring(LONG, written=3, cache_key="a"))
        again = shop.answer(scoring(LONG, written=3, cache_key="a"))
        assert again.results[0].kv_reused_tokens > 0
        scored = shop.answer(scoring(LONG, written=3, cache_key="a"), prompt_logprobs=2)
        assert scored.results[0].kv_reused_tokens == 0
        assert scored.results[0].generated.tokens == again.results[0].generated.tokens
        assert_scores(scored, model, LONG)
        later = shop.answer(scoring(LONG, written=3, cache_key="a"))
        assert later.results[0].kv_reused_tokens > 0


@BACKENDS
def test_only_the_first_of_several_answers_tells_the_scores(
    house: House, market: Market, torch_below: int
) -> None:
    with workshop(house.home, torch_below=torch_below) as shop:
        caller = shop.answer(scoring(LONG, written=3), prompt_logprobs=1, texts=2)
        assert_scores(caller, load(market), LONG)
        first, second = caller.results
        assert first.generated.tokens == second.generated.tokens


def test_a_prompt_whose_reading_pauses_loses_no_score(house: House, market: Market) -> None:
    with workshop(house.home, torch_below=0) as shop:
        shop.press.batch._clock = lambda: 0.0  # chunks and steps take turns one to one
        first = shop.ready(request("Sort: 1", "sql", max_tokens=300))
        shop.turn_until(lambda: is_before_the_end_of_a_page(shop))
        second = shop.ready(scoring(LONG), prompt_logprobs=1)
        shop.house.residents.tiers.clear()
        shop.press.turn()
        with held_by_others(shop, leaving=0):
            shop.press.turn()
            assert shop.board.totals.paused == 1
            assert not second.has_begun
        shop.finish(first)
        shop.finish(second)
        assert_scores(second, load(market), LONG)
        shop.check_idle()


def test_a_prompt_is_scored_beside_a_text_that_is_written(house: House, market: Market) -> None:
    with workshop(house.home, torch_below=0) as shop:
        first = shop.ready(request("Sort: 1", "sql", max_tokens=300))
        shop.turn_until(lambda: bool(shop.press.batch.texts))
        second = shop.ready(scoring(LONG), prompt_logprobs=1)
        shop.finish(second)
        assert_scores(second, load(market), LONG)
        shop.finish(first)
        shop.check_idle()


def is_before_the_end_of_a_page(shop: Workshop) -> bool:
    """Whether the only text fills the last of its pages with the next token."""
    [text] = shop.press.batch.texts or [None]
    if text is None or len(text.writer.tokens) < AT_ONCE + PAGE:
        return False
    reading: Any = text.reading
    length: int = reading.cache.length
    return length % PAGE == PAGE - 1


def test_memory_for_scores_is_held_while_a_prompt_is_scored(house: House) -> None:
    with workshop(house.home, torch_below=0) as shop:
        shop.answer(scoring(LONG))
        before = shop.house.budget.held("buffers")
        caller = shop.ready(scoring(LONG, written=40), prompt_logprobs=5)
        shop.press.turn()
        assert shop.house.budget.held("buffers") >= before + len(LONG) * 2 * 5 * 8
        shop.finish(caller)
        assert shop.house.budget.held("buffers") == before
        shop.check_idle()


def test_scores_for_which_there_is_no_memory_fail_their_job_alone(house: House) -> None:
    settings = BatchSettings(budget=SETTINGS.budget, rows=2, queue=4)
    with workshop(house.home, settings, torch_below=0) as shop:
        shop.answer(scoring(LONG))
        caller = shop.ready(scoring(LONG), prompt_logprobs=5)
        with held_by_others(shop, leaving=30_000):
            shop.finish(caller)
        assert isinstance(caller.error, BudgetError)
        assert "the log-probabilities of a prompt" in caller.error.message
        assert shop.answer(scoring(LONG)).results
        shop.check_idle()
