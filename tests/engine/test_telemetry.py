"""What a run tells of itself: bytes by tier, speeds apart, and on request each layer."""

from dataclasses import replace

import pytest

from expertctl.engine.local_engine import LocalEngine
from expertctl.engine.request import FileExpert
from expertctl.routing.request import ForcedExpert
from expertctl.schema.validation import find_problems
from tests.engine.package_fixtures import EnginePackages, engine_packages
from tests.engine.test_local_engine import SQL, engine, known, request, run
from tests.store.fixtures import HomeFixture, fast, user_home

__all__ = ["engine", "engine_packages", "fast", "known", "user_home"]


def test_bytes_come_from_files_once(
    engine: LocalEngine, user_home: HomeFixture, engine_packages: EnginePackages
) -> None:
    [installed] = user_home.install(engine_packages.package())
    first, second = run(engine, request(SQL)), run(engine, request(SQL))
    expert = sum(file.size for file in installed.expert.files if file.path.endswith("safetensors"))
    assert first.bytes_read.ssd >= first.memory.held["base"] + expert
    assert first.bytes_read.ssd < 2 * (first.memory.held["base"] + expert) + 100_000
    assert first.bytes_read.ram > 0
    assert (second.bytes_read.ssd, second.bytes_read.ram) == (0, 0)


def test_the_history_has_the_figures_of_a_run(
    engine: LocalEngine, user_home: HomeFixture, engine_packages: EnginePackages
) -> None:
    user_home.install(engine_packages.package())
    result = run(engine, request(SQL))
    [job] = user_home.catalogue.history.list_runs()
    assert job.figures is not None
    assert job.figures.ssd_bytes == result.bytes_read.ssd
    assert job.figures.ram_bytes == result.bytes_read.ram
    assert job.figures.threads == result.threads
    assert job.figures.prefill_tokens == result.prompt_tokens
    assert job.figures.decode_steps == result.generated.decode_steps
    assert job.decode_tokens_per_s == pytest.approx(result.generated.tokens_per_s)
    assert job.prefill_tokens_per_s == pytest.approx(result.generated.prefill_tokens_per_s)


@pytest.mark.parametrize("experts", [(), (SQL,)], ids=["base alone", "an expert"])
def test_a_traced_run_says_the_same_and_tells_each_layer(
    experts: tuple[ForcedExpert, ...],
    engine: LocalEngine,
    user_home: HomeFixture,
    engine_packages: EnginePackages,
) -> None:
    user_home.install(engine_packages.package())
    asked = request(*experts)
    plain, traced = run(engine, asked), run(engine, replace(asked, trace=True))
    assert plain.trace is None
    assert "trace" not in plain.to_json()
    assert traced.generated.tokens == plain.generated.tokens
    assert traced.trace is not None
    own = {f"layers.{n}.{part}" for n in range(2) for part in ("attention", "mlp")}
    assert {*own, "head"} <= set(traced.trace.prefill.places)
    assert {*own, "head"} <= set(traced.trace.decode.places)
    steps = traced.generated.decode_steps
    counted = len(traced.trace.allocations)
    assert traced.trace.timed_steps + counted == steps
    assert 0 <= traced.trace.timed_steps - counted <= 1
    document = traced.to_json()
    assert find_problems(document, "run") == []
    assert traced.trace.decode.seconds * 1e3 < traced.timings_ms["decode"]


def test_an_expert_that_is_used_from_its_file_counts_as_read(
    engine: LocalEngine, known: None, engine_packages: EnginePackages
) -> None:
    run(engine, request())
    file = FileExpert(engine_packages.package())
    result = run(engine, request(file))
    assert result.bytes_read.ssd > 1000
    assert result.bytes_read.ram > 0
