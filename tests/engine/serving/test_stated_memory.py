"""What a server says of its memory, and what it keeps of earlier requests."""

from dataclasses import replace

import pytest

from expertctl.engine.memory.budget import choose_kv_cache_limit
from expertctl.engine.serving.memory_report import (
    REQUEST_BYTES,
    ProcessMemory,
    describe_memory,
    estimate_memory_bound,
)
from tests.engine.serving.harness import (
    SETTINGS,
    adapt_batching,
    engine_packages,
    known,
    make_request,
    open_engine_harness,
)
from tests.store.fixtures import HomeFixture, fast, user_home

__all__ = ["engine_packages", "fast", "known", "user_home"]

MB = 10**6


@pytest.mark.parametrize(
    ("wanted", "budget", "limit"),
    [(None, 1000, 250), (0, 1000, 0), (300, 1000, 300), (5000, 1000, 1000)],
)
def test_a_quarter_of_the_budget_is_kept_where_nothing_else_is_said(
    wanted: int | None, budget: int, limit: int
) -> None:
    assert choose_kv_cache_limit(wanted, budget) == limit


def test_a_server_states_its_budget_and_what_its_process_has_besides() -> None:
    process = ProcessMemory(before=350 * MB, resident=690 * MB, entered=290 * MB)
    assert estimate_memory_bound(process, budget=2000 * MB) == 2400 * MB + REQUEST_BYTES


def test_room_for_routed_experts_that_is_still_empty_does_not_hide_the_program() -> None:
    process = ProcessMemory(before=350 * MB, resident=690 * MB, entered=4000 * MB)
    assert estimate_memory_bound(process, budget=5000 * MB) == 5350 * MB + REQUEST_BYTES


def test_the_sentence_names_all_of_it_and_the_option() -> None:
    process = ProcessMemory(before=350 * MB, resident=690 * MB, entered=290 * MB)
    said = describe_memory(process, budget=2000 * MB, kept_kv=500 * MB, weights=269 * MB)
    assert said.startswith("memory: at most 2.5 GB; the budget is 2 GB: 269.0 MB for the base")
    assert "up to 500.0 MB for keys and values of earlier requests (--prefix-cache-memory)" in said
    assert "534.2 MB outside it for the program" in said


def test_where_the_system_does_not_tell_only_the_budget_is_stated() -> None:
    said = describe_memory(None, budget=2000, kept_kv=500, weights=269)
    assert said.startswith("memory: the budget is 2 kB: 269 B for the base")


def test_a_server_keeps_no_more_of_earlier_requests_than_it_was_told(
    user_home: HomeFixture,
) -> None:
    settings = adapt_batching(SETTINGS, kept_kv=100_000)
    with open_engine_harness(user_home.home, settings) as package_factory:
        assert any(
            line.startswith("memory: ") and "100.0 kB" in line for line in package_factory.messages
        )
        keeper = package_factory.runner.resources.get_kv_store(package_factory.runner.base.backend)
        for number in range(8):
            wanted = replace(make_request(f"Sort: {number}"), cache_key="chat")
            assert package_factory.answer(wanted).results
            assert keeper.cached_bytes <= 100_000
        assert keeper.cached_bytes > 0
        keeper.check_integrity()
