"""What the history of a home knows of runs: who, when, how long, in what form; never the words."""

import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from expertctl.engine.local_engine import LocalEngine
from expertctl.errors import BudgetError, DigestError, ExpertError, NotFoundError, UsageError
from expertctl.store.run_record import RunRecord
from tests.engine.package_fixtures import EnginePackages, engine_packages
from tests.engine.test_local_engine import SQL, WISHES, engine, known, planner, request, run
from tests.store.fixtures import HomeFixture, fast, user_home

__all__ = ["engine", "engine_packages", "fast", "known", "user_home"]


def newest(user_home: HomeFixture) -> RunRecord:
    return user_home.catalogue.history.list_runs()[0]


def test_a_run_is_remembered_with_its_figures(
    engine: LocalEngine, user_home: HomeFixture, engine_packages: EnginePackages
) -> None:
    [installed] = user_home.install(engine_packages.package())
    result = run(engine, request(SQL, prompt="Write SQL: the names of all users"))
    job = newest(user_home)
    assert job.job_id == result.job_id
    assert job.task == result.planned.result.features.task == "code_generation"
    assert job.base == result.planned.base.name
    assert [(e.ref, e.content_digest) for e in job.experts] == [
        ("acme/sql@1.0.0", installed.expert.content_digest)
    ]
    assert (job.finish_reason, job.verdict) == (result.generated.finish_reason, None)
    assert job.prompt_tokens == result.prompt_tokens
    assert job.generated_tokens == len(result.generated.tokens)
    assert job.times.total == result.timings_ms["total"]
    assert job.times.ttft == result.timings_ms["ttft"]


def test_neither_prompt_nor_answer_is_in_the_history(
    engine: LocalEngine, user_home: HomeFixture, engine_packages: EnginePackages
) -> None:
    user_home.install(engine_packages.package())
    prompt = "Write as JSON: the quokka of Rottnest"
    result = run(engine, request(SQL, prompt=prompt))
    with sqlite3.connect(user_home.home.index) as connection:
        dump = "\n".join(connection.iterdump())
    connection.close()
    assert result.job_id in dump
    for words in (prompt, "quokka", "Rottnest", result.generated.text):
        assert words not in dump
        for path in user_home.root.glob("index.db*"):
            assert words.encode() not in path.read_bytes()


def test_an_answer_that_was_cut_at_the_limit_is_not_blamed_for_its_form(
    engine: LocalEngine, user_home: HomeFixture, engine_packages: EnginePackages
) -> None:
    [installed] = user_home.install(engine_packages.package(routing={"task": "json_parsing"}))
    result = run(engine, request(SQL, prompt="Fields: name Ada"))
    assert result.generated.finish_reason == "length"
    assert result.validation_passed is None
    assert [w for w in result.warnings if "JSON" in w] == []
    assert any("cut at the token limit" in w for w in result.warnings)
    assert newest(user_home).validation is None
    assert (
        user_home.catalogue.read_success_rates().find_rate(installed.expert.content_digest) is None
    )


def test_a_guess_that_code_was_wanted_neither_warns_nor_teaches(
    engine: LocalEngine, user_home: HomeFixture, engine_packages: EnginePackages
) -> None:
    [installed] = user_home.install(engine_packages.package())
    result = run(engine, request(SQL, prompt="Write a Python function that adds two numbers"))
    assert result.validation_passed is None
    assert not any("Python" in warning for warning in result.warnings)
    assert newest(user_home).validation is None
    assert (
        user_home.catalogue.read_success_rates().find_rate(installed.expert.content_digest) is None
    )


def test_an_empty_answer_speaks_against_its_expert(
    engine: LocalEngine, user_home: HomeFixture, engine_packages: EnginePackages
) -> None:
    [installed] = user_home.install(engine_packages.package())
    begins = run(engine, request(SQL)).generated.text[0]
    before = user_home.catalogue.read_revision()
    wanted = request(SQL)
    wishes = replace(WISHES, stop=(begins,))
    result = run(engine, replace(wanted, route=replace(wanted.route, sampling=wishes)))
    assert (result.generated.finish_reason, result.generated.text) == ("stop", "")
    assert result.validation_passed is False
    assert "the answer is empty" in result.warnings
    digest = installed.expert.content_digest
    assert user_home.catalogue.read_success_rates().find_rate(digest) == pytest.approx(2 / 4.5)
    assert user_home.catalogue.read_revision() > before


def test_without_a_form_nothing_is_said_of_an_answer(
    engine: LocalEngine, user_home: HomeFixture, engine_packages: EnginePackages
) -> None:
    user_home.install(engine_packages.package())
    before = user_home.catalogue.read_revision()
    result = run(engine, request(SQL))
    assert result.validation_passed is None
    assert newest(user_home).validation is None
    assert user_home.catalogue.read_revision() == before


def test_a_stopped_answer_is_remembered_and_not_checked(
    engine: LocalEngine, user_home: HomeFixture, engine_packages: EnginePackages
) -> None:
    user_home.install(engine_packages.package(routing={"task": "json_parsing"}))
    result = run(engine, request(SQL), cancelled=lambda: True)
    assert result.validation_passed is None
    assert (newest(user_home).finish_reason, newest(user_home).validation) == ("cancelled", None)


def damaged(user_home: HomeFixture) -> Path:
    """Change one byte of an adapter in the store."""
    [expert] = user_home.store.list_experts()
    [path] = [user_home.store.paths.blob(f.digest) for f in expert.files if "safetensors" in f.path]
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    return path


def test_a_run_that_a_damaged_expert_ended_speaks_against_it(
    engine: LocalEngine, user_home: HomeFixture, engine_packages: EnginePackages
) -> None:
    [installed] = user_home.install(engine_packages.package())
    before = user_home.catalogue.read_revision()
    damaged(user_home)
    with pytest.raises(DigestError, match="acme/sql"):
        run(engine, request(SQL))
    job = newest(user_home)
    assert (job.finish_reason, job.blamed) == ("error", True)
    assert user_home.catalogue.read_revision() > before
    assert user_home.catalogue.read_success_rates().find_rate(
        installed.expert.content_digest
    ) == pytest.approx(2 / 5)
    assert (
        user_home.catalogue.history.read_usage_counts().get(installed.expert.content_digest) is None
    )
    with pytest.raises(NotFoundError, match="no run is remembered"):
        user_home.catalogue.history.rate_run("last", "good")


def test_a_run_that_did_not_fit_blames_nobody(
    user_home: HomeFixture, engine_packages: EnginePackages
) -> None:
    [installed] = user_home.install(engine_packages.package())
    with pytest.raises(BudgetError):
        run(LocalEngine(planner(user_home), budget=1000), request(SQL))
    assert (newest(user_home).finish_reason, newest(user_home).blamed) == ("error", False)
    assert (
        user_home.catalogue.read_success_rates().find_rate(installed.expert.content_digest) is None
    )


@pytest.mark.parametrize("prompt", ["word " * 3000])
def test_a_call_that_was_wrong_is_no_run(
    prompt: str, engine: LocalEngine, user_home: HomeFixture, engine_packages: EnginePackages
) -> None:
    user_home.install(engine_packages.package())
    with pytest.raises(UsageError):
        run(engine, request(SQL, prompt=prompt))
    assert user_home.catalogue.history.list_runs() == []


def test_a_failure_that_cannot_be_written_is_told_as_itself(
    user_home: HomeFixture, engine_packages: EnginePackages, monkeypatch: pytest.MonkeyPatch
) -> None:
    user_home.install(engine_packages.package())
    home = planner(user_home)
    home.catalogue.database.path = Path("/proc/nowhere/index.db")
    with pytest.raises(ExpertError) as told:
        run(LocalEngine(home, budget=1000), request(SQL))
    assert isinstance(told.value, BudgetError)
