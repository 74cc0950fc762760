"""``expertctl base`` as a person types it."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from expertctl.errors import format_install_command
from tests.cli.command_runner import CommandRunner, expertctl
from tests.factories import write_base
from tests.gpt2_base import write_gpt2
from tests.quantised_bases import BNB_CONFIG, make_nf4, quantise_base
from tests.store.fixtures import (
    BASE_NAME,
    HomeFixture,
    PackageFactory,
    fast,
    package_factory,
    user_home,
)

__all__ = ["expertctl", "fast", "package_factory", "user_home"]


@pytest.mark.parametrize("command", ["add", "list", "remove"])
def test_every_command_has_an_example(command: str, expertctl: CommandRunner) -> None:
    text = expertctl("base", command, "--help").out
    assert f"expertctl base {command}" in text.split("Example")[1]
    assert "--json" in text


def test_a_base_is_added_and_listed(
    expertctl: CommandRunner, user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    assert "base add DIR" in expertctl("base", "list").err
    identity = package_factory.base.identity
    said = expertctl("base", "add", package_factory.base_dir)
    assert said.out.splitlines()[0].startswith(f"{BASE_NAME}  ")
    assert said.out.splitlines()[1:] == [
        f"arch {identity.arch}",
        f"weights {identity.weights}",
        f"tokenizer {identity.tokenizer}",
        f"canonical tokenizer {identity.canonical_tokenizer}",
    ]
    (shown,) = expertctl("base", "list", "--json").document["bases"]
    assert shown == {
        "name": BASE_NAME,
        "revision": None,
        "path": str(package_factory.base_dir),
        "copied": False,
        "engine": "native",
        "size": user_home.bases.find(BASE_NAME).size,
        "routed_experts": None,
        "arch": str(identity.arch),
        "weights": str(identity.weights),
        "tokenizer": str(identity.tokenizer),
        "canonical_tokenizer": str(identity.canonical_tokenizer),
        "state": "ok",
    }


def test_routed_experts_are_shown_where_a_base_has_some(
    expertctl: CommandRunner, package_factory: PackageFactory, tmp_path: Path
) -> None:
    moe = write_base(
        tmp_path / "moe",
        arch="qwen3_moe",
        tie=False,
        layers=3,
        hidden=32,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        mlp_only_layers=[1],
    )
    expertctl("base", "add", package_factory.base_dir)
    said = expertctl("base", "add", moe).out.splitlines()
    assert said[5] == "routed experts 2 of 8 for a token; `expertctl base plan moe`"
    listed = expertctl("base", "list", "--json").document["bases"]
    assert [base["routed_experts"] for base in listed] == [
        {"count": 8, "used": 2, "layers": 2},
        None,
    ]
    rows = [re.split("  +", line) for line in expertctl("base", "list").out.splitlines()]
    assert [row[3] for row in rows] == ["ROUTED EXPERTS", "2 of 8", "-"]
    (moe / "config.json").write_text("[")
    rows = [re.split("  +", line) for line in expertctl("base", "list").out.splitlines()]
    assert [(row[3], row[5]) for row in rows[1:]] == [("-", "changed"), ("-", "ok")]
    shutil.rmtree(moe)
    assert "changed" in expertctl("base", "list").out


def test_a_quantised_base_says_what_it_is_stored_as(
    expertctl: CommandRunner, user_home: HomeFixture, tmp_path: Path
) -> None:
    directory = write_base(tmp_path / "tiny-bnb-4bit", hidden=64, intermediate=64)
    quantise_base(directory, BNB_CONFIG, make_nf4)
    said = expertctl("base", "add", directory)
    line = "stored as F32, NF4 (bitsandbytes); held in float32 by default"
    assert said.out.splitlines()[5] == line
    shown = expertctl("base", "add", directory, "--json").document
    assert shown["storage"] == ["F32", "NF4 (bitsandbytes)"]
    words = ["--base", "tiny-bnb-4bit", "--no-experts", "--greedy", "--max-tokens", "4", "Hello"]
    answers = [expertctl("run", *words, "--dtype", dtype).out for dtype in ("float32", "bf16")]
    assert all(answers)


def test_a_copy_is_named_and_dated(
    expertctl: CommandRunner, user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    words = ("--copy", "--name", "org/base", "--revision", "abc", "--json")
    shown = expertctl("base", "add", package_factory.base_dir, *words).document
    assert (shown["name"], shown["revision"], shown["copied"]) == ("org/base", "abc", True)
    assert Path(shown["path"]).is_relative_to(user_home.home.bases)


def test_a_changed_base_is_listed_as_such(
    expertctl: CommandRunner, user_home: HomeFixture, tmp_path: Path
) -> None:
    directory = write_base(tmp_path / "base", layers=1, hidden=16, heads=2, kv_heads=1)
    expertctl("base", "add", directory)
    (directory / "tokenizer.json").write_text("{}")
    assert expertctl("base", "list").out.splitlines()[1].split()[-2] == "changed"
    assert expertctl("doctor", exit_code=1).out.startswith(
        "broken: base: the base base is not what"
    )


def test_removing_names_who_needs_it(
    expertctl: CommandRunner, user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    expertctl("base", "add", package_factory.base_dir)
    expertctl("install", package_factory.package())
    said = expertctl("base", "remove", BASE_NAME, exit_code=4)
    assert "needed by acme/sql@1.0.0" in said.err
    said = expertctl("base", "remove", BASE_NAME, "--force", "--json")
    assert said.document == {"removed": BASE_NAME}
    assert "warning: acme/sql@1.0.0 needs" in said.err
    expertctl("base", "remove", BASE_NAME, exit_code=3)


@pytest.mark.parametrize(
    ("change", "code", "text"),
    [
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, 4, "'bert' as"),
        ({"model_type": "gpt2", "auto_map": {"AutoConfig": "code.Config"}}, 4, "auto_map"),
        ({"hidden_size": None}, 8, "hidden_size"),
        ({}, 3, "model.safetensors is missing"),
    ],
)
def test_what_is_no_base_is_told(
    change: dict[str, object], code: int, text: str, expertctl: CommandRunner, tmp_path: Path
) -> None:
    directory = write_base(tmp_path / "base", layers=1, hidden=16, heads=2, kv_heads=1)
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    if not change:
        (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    assert text in expertctl("base", "add", directory, exit_code=code).err
    assert expertctl("base", "list", "--json").document == {"bases": []}


def test_a_foreign_base_is_added_with_a_note_on_what_runs_it(
    expertctl: CommandRunner, user_home: HomeFixture, tmp_path: Path
) -> None:
    said = expertctl("base", "add", write_gpt2(tmp_path / "gpt2"), "--json")
    assert "only `run --engine transformers` runs gpt2" in said.err
    assert format_install_command("compat") in said.err
    assert said.document["engine"] == "transformers"
    assert expertctl("base", "list").out.splitlines()[1].split()[-3:-1] == ["transformers", "ok"]


def test_kernels_are_compiled_when_a_base_is_added_with_that_option(
    expertctl: CommandRunner,
    user_home: HomeFixture,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EXPERT_DTYPE", "int8")
    sizes = {"hidden": 48, "intermediate": 80, "head_dim": 16}
    directory = write_base(tmp_path / "base", **sizes)
    said = expertctl("base", "add", directory, "--compile", "--json")
    assert said.document["compiled"] is True
    assert said.err.splitlines()[-1] == (
        "the kernels of `run` and `serve` are compiled, for the base and the experts installed now"
    )
    assert "the budget is" not in said.err
    assert user_home.catalogue.history.list_runs() == []
    again = expertctl("run", "x", "--max-tokens", "2", "--base", "base")
    assert "compiling" not in again.err
    assert "compiled" not in expertctl("base", "add", directory, "--json").document


@pytest.mark.all
def test_after_compiling_in_advance_a_server_compiles_nothing(
    user_home: HomeFixture, tmp_path: Path
) -> None:
    """Each step is a process of its own: compiled code belongs to the process."""
    sizes = {"hidden": 48, "intermediate": 80, "head_dim": 16}
    directory = write_base(tmp_path / "base", **sizes)
    environment = {**os.environ, "EXPERT_HOME": str(user_home.root), "EXPERT_DTYPE": "int8"}
    add = [sys.executable, "-m", "expertctl", "base", "add", str(directory), "--compile"]
    subprocess.run(add, check=True, env=environment, capture_output=True)
    kept = sorted(user_home.home.kernels.rglob("*.code"))
    served = subprocess.run(
        [sys.executable, "-c", _SERVE], check=True, env=environment, capture_output=True, text=True
    )
    assert "compiling" not in served.stdout
    assert sorted(user_home.home.kernels.rglob("*.code")) == kept != []


_SERVE = """
from expertctl.engine.serving.engine import ServingEngine
from expertctl.engine_config import EngineConfig
from expertctl.routing.planner import Planner
from expertctl.settings import load_settings

settings = EngineConfig(base="base", dtype="int8")
engine = ServingEngine(Planner.open(load_settings()), settings, tell=print)
engine.start()
engine.close()
"""


def test_a_base_that_torch_runs_has_no_kernels_to_compile(
    expertctl: CommandRunner, user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    said = expertctl("base", "add", package_factory.base_dir, "--compile", "--json")
    assert said.document["compiled"] is False
    assert "runs without compiled kernels" in said.err
