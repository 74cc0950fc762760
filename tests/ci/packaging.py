"""The steps of the packaged pipelines, read from their own files."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
ACTION = ROOT / "ci" / "github" / "action.yml"
TEMPLATE = ROOT / "ci" / "gitlab" / "expert.gitlab-ci.yml"
PAGE = ROOT / "docs" / "how-to" / "publish-from-ci.md"
SECRETS = {"EXPERT_TOKEN", "PUBLISH_KEY"}
ALWAYS = "always()"
_EXPRESSION = re.compile(r"\$\{\{ *(.*?) *\}\}")


@dataclass(frozen=True)
class PipelineStep:
    """A step: its shell text, what it is given, and whether it runs after a failure, too."""

    name: str
    script: str
    variables: dict[str, str] = field(default_factory=dict)
    always: bool = False

    def environment(self, inputs: dict[str, str], context: dict[str, str]) -> dict[str, str]:
        """Return its variables as GitHub would fill them in."""
        return {name: _substitute(text, inputs, context) for name, text in self.variables.items()}


def _substitute(text: str, inputs: dict[str, str], context: dict[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        terms = [term.strip() for term in match[1].split("||")]
        known = {**{f"inputs.{name}": v for name, v in inputs.items()}, **context}
        return next((known[term] for term in terms if known[term]), "")

    return _EXPRESSION.sub(value, text)


def load_action() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(ACTION.read_text(encoding="utf-8"))
    return document


def load_action_steps() -> list[PipelineStep]:
    return [
        PipelineStep(step["name"], step["run"], step.get("env", {}), step.get("if") == ALWAYS)
        for step in load_action()["runs"]["steps"]
    ]


def load_template() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(TEMPLATE.read_text(encoding="utf-8"))
    (job,) = document.values()
    return dict(job)


def load_template_steps() -> list[PipelineStep]:
    job = load_template()
    return [
        *(PipelineStep("before", text) for text in job["before_script"]),
        *(PipelineStep("script", text) for text in job["script"]),
        *(PipelineStep("after", text, always=True) for text in job["after_script"]),
    ]


def make_action_inputs(**given: str) -> dict[str, str]:
    """Return inputs with their defaults; what is required must be given."""
    declared = load_action()["inputs"]
    missing = {n for n, i in declared.items() if i["required"]} - {
        n.replace("_", "-") for n in given
    }
    assert not missing, missing
    defaults = {name: entry.get("default", "") for name, entry in declared.items()}
    return {**defaults, **{name.replace("_", "-"): value for name, value in given.items()}}
