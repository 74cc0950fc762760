"""Answers of a base whose layers have states: in a batch, after a pause, after another prompt."""

from dataclasses import replace
from pathlib import Path

import pytest

from expertctl.engine.request import RunRequest
from expertctl.engine.serving.model_runner import INITIAL_ANSWER_TOKENS
from tests.engine.family_models import DELTA_NET, build_family_model
from tests.engine.serving.harness import (
    EngineHarness,
    harness,
    make_request,
    open_engine_harness,
    reserve_all_but,
)
from tests.factories import write_tokenizer
from tests.store.fixtures import HomeFixture, fast, user_home

__all__ = ["fast", "harness", "user_home"]


@pytest.fixture(scope="session")
def base_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base with two layers of each kind."""
    directory = tmp_path_factory.mktemp("recurrent")
    config = {
        **DELTA_NET,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "max_position_embeddings": 512,
    }
    build_family_model(directory, "qwen3_5_text", seed=3, **config)
    write_tokenizer(directory)
    return directory


@pytest.fixture(autouse=True)
def registered(user_home: HomeFixture, base_dir: Path) -> None:
    """The base is registered."""
    user_home.bases.add(base_dir)


def list_tokens(harness: EngineHarness, asked: list[RunRequest]) -> list[tuple[int, ...]]:
    """The answers to requests, one after the other."""
    return [harness.answer(one).results[0].generated.tokens for one in asked]


def test_answers_of_a_batch_are_those_of_each_alone(harness: EngineHarness) -> None:
    asked = [
        make_request("Sort: 3, 1, 2", max_tokens=40),
        make_request("Sum: 5", max_tokens=25),
    ]
    alone = list_tokens(harness, asked)
    callers = [harness.submit_until_ready(one) for one in asked]
    harness.finish(*callers)
    assert [caller.results[0].generated.tokens for caller in callers] == alone
    assert alone[0][:10] != alone[1][:10]
    harness.check_idle()


@pytest.mark.all
def test_a_paused_answer_goes_on_as_if_it_had_not(user_home: HomeFixture) -> None:
    asked = [make_request(f"Sort: {n}", max_tokens=300) for n in (3, 4)]
    with open_engine_harness(user_home.home) as harness:
        alone = list_tokens(harness, asked)
        assert all(len(tokens) > 2 * INITIAL_ANSWER_TOKENS for tokens in alone), "they grow"
        first, second = (harness.submit_until_ready(one) for one in asked)
        harness.loop.run_pass()
        base = harness.runner.base
        room = base.kv_bytes(400) - base.kv_bytes(16)
        with reserve_all_but(harness, leaving=room):
            harness.finish(first)
            assert harness.scheduler.totals.paused >= 1
            harness.finish(second)
        together = [caller.results[0].generated.tokens for caller in (first, second)]
        assert together == alone
        harness.check_idle()


def test_a_prompt_that_begins_as_an_earlier_one_is_read_from_its_last_state(
    harness: EngineHarness,
) -> None:
    long = "Tell me about rivers, lakes and seas, and how they differ from one another. " * 2
    asked = [make_request(long + end, max_tokens=20) for end in ("Briefly.", "At length.")]
    alone = list_tokens(harness, asked)
    kept = [replace(one, cache_key="chat") for one in asked]
    first, second, again = (harness.answer(one).results[0] for one in (*kept, kept[0]))
    assert (first.kv_reused_tokens, second.kv_reused_tokens) == (0, 128)
    assert again.kv_reused_tokens == (again.prompt_tokens - 1) // 16 * 16
    assert [one.generated.tokens for one in (first, second, again)] == [*alone, alone[0]]
    harness.check_idle()
