"""Results in a manifest: valid, in one place each, with a date that can be repeated."""

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from expertctl.errors import InvalidPackageError, UsageError
from expertctl.package.base_model import read_base
from expertctl.package.build import BuildPlan, add_evaluation, choose_build_date, plan_build
from expertctl.package.draft import ManifestOverrides
from expertctl.schema.manifest import Evaluation, parse_manifest
from tests.factories import write_base, write_lora

DATA, OTHER = "a" * 64, "b" * 64
ENTRY = Evaluation(
    task="sums",
    dataset_sha256=DATA,
    n=8,
    metric="exact_match",
    base=0.25,
    expert=0.75,
    date="2026-02-03",
)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> BuildPlan:
    folder = tmp_path_factory.mktemp("plan")
    base = write_base(folder / "base", layers=1)
    lora = write_lora(folder / "lora", base)
    return plan_build(lora, ManifestOverrides(name="acme/sums"), base=read_base(base))


def test_an_entry_is_part_of_a_valid_manifest(plan: BuildPlan) -> None:
    measured = add_evaluation(plan, ENTRY)
    assert measured.manifest == replace(plan.manifest, evaluation=(ENTRY,))
    assert parse_manifest(measured.document) == measured.manifest
    document = json.loads(measured.document)
    assert document.pop("evaluation") == [json.loads(json.dumps(vars_of(ENTRY)))]
    assert document == json.loads(plan.document)
    assert (measured.paths, measured.directory) == (plan.paths, plan.directory)


def vars_of(entry: Evaluation) -> dict[str, object]:
    return {name: getattr(entry, name) for name in Evaluation.__dataclass_fields__}


def test_an_entry_replaces_one_of_the_same_data_and_metric_and_no_other(plan: BuildPlan) -> None:
    other_data = replace(ENTRY, dataset_sha256=OTHER)
    other_metric = replace(ENTRY, metric="contains")
    for entry in (ENTRY, other_data, other_metric):
        plan = add_evaluation(plan, entry)
    newer = replace(ENTRY, expert=0.875, task="more sums", date="2026-03-04")
    assert add_evaluation(plan, newer).manifest.evaluation == (newer, other_data, other_metric)


def test_repeated_entries_of_a_person_become_one(plan: BuildPlan) -> None:
    document = json.loads(plan.document)
    document["evaluation"] = [vars_of(replace(ENTRY, n=n)) for n in (1, 2)]
    twice = replace(plan, document=json.dumps(document).encode())
    assert add_evaluation(twice, ENTRY).manifest.evaluation == (ENTRY,)


@pytest.mark.parametrize("task", ["", "x\ny", "x" * 201])
def test_a_task_that_no_manifest_may_have_is_refused(task: str, plan: BuildPlan) -> None:
    with pytest.raises(InvalidPackageError, match="evaluation/0/task"):
        add_evaluation(plan, replace(ENTRY, task=task))


def test_the_date_is_today_or_that_of_the_source() -> None:
    before = datetime.now(UTC).date().isoformat()
    assert before <= choose_build_date({}) <= datetime.now(UTC).date().isoformat()
    assert choose_build_date({"SOURCE_DATE_EPOCH": "0"}) == "1970-01-01"
    assert choose_build_date({"SOURCE_DATE_EPOCH": "1700000000"}) == "2023-11-14"
    assert choose_build_date({"SOURCE_DATE_EPOCH": "951782399"}) == "2000-02-28"
    assert choose_build_date({"SOURCE_DATE_EPOCH": "951782400"}) == "2000-02-29"


@pytest.mark.parametrize("text", ["", "-1", "1.5", "today", " 1", "1_0", "٣", "9" * 12, "9" * 5000])
def test_what_is_no_moment_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="SOURCE_DATE_EPOCH"):
        choose_build_date({"SOURCE_DATE_EPOCH": text})


def test_the_environment_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "86400")
    assert choose_build_date() == "1970-01-02"
