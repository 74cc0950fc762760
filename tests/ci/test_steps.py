"""The steps of the packaged pipelines, run in their own shell against a live registry."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from expertctl.install.installer import STARTER
from expertctl.package.write import unpack_package
from expertctl.reference import PackageName
from expertctl.registry.index_document import open_index
from expertctl.trust.keys import PrivateKey
from registry_server.access.rights import Action, TokenScope
from registry_server.publishing.releases import add_key
from tests.ci.packaging import (
    PipelineStep,
    load_action_steps,
    load_template,
    load_template_steps,
    make_action_inputs,
)
from tests.registry.live_registry import LiveRegistry, run_live_registry

pytestmark = pytest.mark.all

PACKAGE = PackageName("acme", "sorting")
SORTING = [("41, 17, 23, 15", "15, 17, 23, 41"), ("8, 52, 30", "8, 30, 52")]
PLURALS = [("What is the plural of city?", "cities"), ("What is the plural of wolf?", "wolves")]


@dataclass(frozen=True)
class Pipeline:
    """A checkout with an adapter and data, a runner's folder, and a registry to publish to."""

    folder: Path
    live: LiveRegistry
    key: str
    token: str

    @property
    def runner(self) -> Path:
        return self.folder / "runner"

    @property
    def environment(self) -> dict[str, str]:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return {"PATH": path, "HOME": str(self.folder), "OMP_NUM_THREADS": "1"}

    def shell(self, script: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", script],
            cwd=self.folder,
            env={**self.environment, **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    def released(self) -> list[str]:
        """The versions that the signed index names."""
        client = self.live.served.client(self.live.served.create_token("alice"))
        answer = client.get(f"/tuf/targets/index/{PACKAGE}.json")
        if answer.status_code == 404:
            return []
        key = self.live.served.registry.index_key.public
        return [
            str(r.version) for r in open_index(answer.content, key=key, package=PACKAGE).releases
        ]

    def left_secrets(self) -> list[Path]:
        """The files in which the key or the token still is."""
        secret = self.key.splitlines()[1].encode()
        files = [path for path in self.folder.rglob("*") if path.is_file()]
        return [
            p for p in files if (d := p.read_bytes()) and (secret in d or self.token.encode() in d)
        ]


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter") / "sorting"
    unpack_package(STARTER / "sorting.expert", folder)
    return folder


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LiveRegistry]:
    with run_live_registry(tmp_path / "registry") as running:
        yield running


@pytest.fixture
def pipeline(tmp_path: Path, live: LiveRegistry, adapter: Path) -> Pipeline:
    folder = tmp_path / "checkout"
    (folder / "runner").mkdir(parents=True)
    (folder / "sorting").symlink_to(adapter)
    (folder / "base").symlink_to(STARTER / "base")
    write_data(folder / "sorting.jsonl", [(f"Sort these numbers: {q}", a) for q, a in SORTING])
    write_data(folder / "plurals.jsonl", PLURALS)
    key = PrivateKey.generate()
    secret = live.served.create_user("alice")
    live.served.create_namespace("acme", kind="expert", owner="alice")
    live.served.create_namespace("other", kind="expert", owner="alice")
    identity = live.served.authenticate(secret)
    pem = key.public.pem()
    add_key(live.served.registry, identity, namespace="acme", public_key=pem, statement=None)
    token = live.served.create_token("alice", TokenScope(Action.PUSH, "acme"))
    return Pipeline(folder, live, key.pem().decode(), token)


def write_data(path: Path, rows: list[tuple[str, str]]) -> None:
    lines = [json.dumps({"prompt": prompt, "answer": answer}) for prompt, answer in rows]
    path.write_text("\n".join(lines), encoding="utf-8")


def run_action(pipeline: Pipeline, **changes: str) -> tuple[str | None, str]:
    """Run the action as GitHub does; return the step that failed, if one did, and all output."""
    inputs = make_action_inputs(
        **{
            "adapter": "sorting",
            "name": "acme/sorting",
            "base": "base",
            "base_name": "starter/base",
            "data": "sorting.jsonl",
            "min_gain": "0.5",
            "registry": pipeline.live.host,
            "token": pipeline.token,
            "signing_key": pipeline.key,
            "expertctl": "",
            **changes,
        }
    )
    context = {"runner.temp": str(pipeline.runner), "github.ref_name": "v1.4.0"}
    failed, output = None, ""
    for step in load_action_steps():
        if failed is None or step.always:
            done = run_step(pipeline, step, inputs, context)
            output += done.stdout + done.stderr
            failed = failed or (step.name if done.returncode else None)
    return failed, output


def run_step(
    pipeline: Pipeline, step: PipelineStep, inputs: dict[str, str], context: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    return pipeline.shell(step.script, **step.environment(inputs, context))


def test_the_action_publishes_what_beats_its_base(pipeline: Pipeline) -> None:
    failed, output = run_action(pipeline)
    assert failed is None, output
    assert pipeline.released() == ["1.4.0"]
    published = json.loads((pipeline.runner / "publish-expert" / "published.json").read_text())
    assert published["packages"][0]["ref"] == "acme/sorting@1.4.0"
    assert pipeline.left_secrets() == []
    assert not (pipeline.runner / "publish-expert" / "home").exists()


def test_the_same_run_again_is_no_error(pipeline: Pipeline) -> None:
    assert run_action(pipeline)[0] is None
    failed, output = run_action(pipeline)
    assert (failed, pipeline.released()) == (None, ["1.4.0"]), output
    assert "already published" in output


def test_an_expert_below_the_gain_is_not_published(pipeline: Pipeline) -> None:
    failed, output = run_action(pipeline, data="plurals.jsonl")
    assert failed == "evaluate"
    assert "was required" in output
    assert pipeline.released() == []
    assert pipeline.left_secrets() == []


def test_a_token_for_another_namespace_publishes_nothing(pipeline: Pipeline) -> None:
    wrong = pipeline.live.served.create_token("alice", TokenScope(Action.PUSH, "other"))
    failed, output = run_action(pipeline, token=wrong)
    assert (failed, pipeline.released()) == ("publish", [])
    assert wrong not in output.replace(f"::add-mask::{wrong}", "")
    assert pipeline.left_secrets() == []


def test_a_secret_is_masked_line_by_line(pipeline: Pipeline) -> None:
    (mask,) = [step for step in load_action_steps() if step.name == "mask"]
    given = {"EXPERT_TOKEN": pipeline.token, "PUBLISH_KEY": pipeline.key}
    lines = pipeline.shell(mask.script, **given).stdout.splitlines()
    secret = [line for line in pipeline.key.splitlines() if not line.startswith("-----")]
    assert lines == [f"::add-mask::{text}" for text in (pipeline.token, *secret)]


def test_a_version_of_expertctl_that_is_not_exact_is_refused(pipeline: Pipeline) -> None:
    failed, output = run_action(pipeline, expertctl="expertctl[engine]")
    assert failed == "install"
    assert "names no exact version" in output


def test_a_tag_that_is_shell_text_stays_text(pipeline: Pipeline) -> None:
    failed, output = run_action(pipeline, version='1.0.0"; touch "$HOME/owned"; "')
    assert failed == "build"
    assert not (pipeline.folder / "owned").exists(), output


def test_the_template_publishes_what_beats_its_base(pipeline: Pipeline) -> None:
    done = run_job(pipeline)
    assert done.returncode == 0, done.stderr
    assert pipeline.released() == ["2.0.0"]
    assert pipeline.left_secrets() == []


def test_the_template_stops_below_the_gain(pipeline: Pipeline) -> None:
    done = run_job(pipeline, PUBLISH_DATA="plurals.jsonl")
    assert done.returncode == 1
    assert (pipeline.released(), pipeline.left_secrets()) == ([], [])


def run_job(pipeline: Pipeline, **changes: str) -> subprocess.CompletedProcess[str]:
    """Run the job as GitLab does: one shell for all of the script, another one afterwards."""
    place = {"$CI_PROJECT_DIR": str(pipeline.folder), "$CI_COMMIT_TAG": "v2.0.0"}
    variables = {
        "PUBLISH_ADAPTER": "sorting",
        "PUBLISH_NAME": "acme/sorting",
        "PUBLISH_BASE": "base",
        "PUBLISH_DATA": "sorting.jsonl",
        "PUBLISH_MIN_GAIN": "0.5",
        "EXPERT_REGISTRY": pipeline.live.host,
        "EXPERT_TOKEN": pipeline.token,
        "PUBLISH_KEY": pipeline.key,
        **{name: _expanded(text, place) for name, text in load_template()["variables"].items()},
        "PUBLISH_EXPERTCTL": "",
        "PUBLISH_BASE_NAME": "starter/base",
        **changes,
    }
    steps = load_template_steps()
    script = "\n".join(step.script for step in steps if not step.always)
    done = pipeline.shell(script, **variables)
    for step in steps:
        if step.always:
            pipeline.shell(step.script, **variables)
    return done


def _expanded(text: str, place: dict[str, str]) -> str:
    for name, value in place.items():
        text = text.replace(name, value)
    return text
