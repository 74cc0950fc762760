"""What the packaged pipelines promise, read from their files; `test_steps` runs them."""

import re

import pytest

from expertctl import __version__
from tests.ci.packaging import (
    ACTION,
    PAGE,
    SECRETS,
    TEMPLATE,
    PipelineStep,
    load_action,
    load_action_steps,
    load_template,
    load_template_steps,
)

STEPS = load_action_steps()
ALL = [*STEPS, *load_template_steps()]


def test_both_pipelines_run_the_same_commands() -> None:
    ours = [step.script for step in STEPS if step.name != "mask"]
    assert ours == [step.script for step in load_template_steps()]


def test_the_steps_are_in_the_order_that_lets_nothing_bad_out() -> None:
    names = [step.name for step in STEPS]
    assert names == ["mask", "install", "build", "evaluate", "sign", "publish", "clean"]
    assert [step.name for step in STEPS if step.always] == ["clean"]


def test_the_action_is_composite_and_uses_nobody_elses() -> None:
    runs = load_action()["runs"]
    assert runs["using"] == "composite"
    assert all(step["shell"] == "bash" and "uses" not in step for step in runs["steps"])
    assert set(load_action()) == {"name", "description", "inputs", "outputs", "runs"}


def test_every_input_is_described_and_used_and_no_other() -> None:
    inputs = load_action()["inputs"]
    used = set(re.findall(r"inputs\.([a-z-]+)", ACTION.read_text(encoding="utf-8")))
    assert used == set(inputs)
    assert all(entry["description"] and "required" in entry for entry in inputs.values())
    assert all(("default" in entry) != entry["required"] for entry in inputs.values())


@pytest.mark.parametrize("step", ALL, ids=lambda step: step.name)
def test_no_input_is_pasted_into_a_script(step: PipelineStep) -> None:
    """What somebody may choose, the name of a tag say, must not become shell text."""
    assert "${{" not in step.script


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_a_secret_is_given_only_to_the_step_that_needs_it(step: PipelineStep) -> None:
    given = SECRETS & set(step.variables)
    needed = {"mask": SECRETS, "sign": {"PUBLISH_KEY"}, "publish": {"EXPERT_TOKEN"}}
    assert given == needed.get(step.name, set())


@pytest.mark.parametrize("step", ALL, ids=lambda step: step.name)
def test_a_secret_is_never_an_argument_of_a_program(step: PipelineStep) -> None:
    """``printf`` is the shell's own; whatever else there is would show it in the process list."""
    lines = [line for line in step.script.splitlines() if "$PUBLISH_KEY" in line]
    lines += [line for line in step.script.splitlines() if "$EXPERT_TOKEN" in line]
    assert all(line.strip().startswith("printf '%s\\n' ") for line in lines)


def test_the_key_is_in_one_step_only_and_is_removed_there() -> None:
    (sign,) = [step for step in load_template_steps() if "PUBLISH_KEY" in step.script]
    lines = [line.strip() for line in sign.script.splitlines()]
    assert lines.index("umask 077") < lines.index(
        'trap \'rm -f "$PUBLISH_WORK/key.pem" "$EXPERT_HOME/keys/ci.pem"\' EXIT'
    )
    assert (lines[1], lines[-1]) == ("(", ")")


def test_what_is_installed_has_one_version_which_is_this_one() -> None:
    wanted = f"expertctl[engine]=={__version__}"
    assert load_action()["inputs"]["expertctl"]["default"] == wanted
    assert load_template()["variables"]["PUBLISH_EXPERTCTL"] == wanted


@pytest.mark.parametrize(
    ("tag", "runs"),
    [("v1.2.3", True), ("1.2.3", True), ("1.2.3-rc.1", True), ("v1.2", False), ("latest", False)],
)
def test_the_template_works_on_tags_that_are_versions(tag: str, runs: bool) -> None:
    (rule,) = load_template()["rules"]
    pattern = re.fullmatch(r"\$CI_COMMIT_TAG =~ /(.*)/", rule["if"])
    assert pattern is not None
    assert bool(re.match(pattern[1], tag)) is runs


def test_the_page_names_every_input_and_every_variable() -> None:
    page = PAGE.read_text(encoding="utf-8")
    variables = set(re.findall(r"\b(?:PUBLISH|EXPERT)_[A-Z_]+", TEMPLATE.read_text("utf-8")))
    internal = {"PUBLISH_WORK", "EXPERT_HOME"}
    names = {*load_action()["inputs"], *(variables - internal), "EXPERT_REGISTRY", "EXPERT_TOKEN"}
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []
