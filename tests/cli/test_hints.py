"""Whoever is refused is told the way out."""

import io
import sys
from pathlib import Path

import pytest

from expertctl.user_request import MAX_PROMPT_CHARACTERS
from tests.cli.command_runner import CommandRunner, expertctl
from tests.store.fixtures import HomeFixture, PackageFactory, fast, package_factory, user_home

__all__ = ["expertctl", "fast", "package_factory", "user_home"]

LONG = "x" * 70
HERE = "HERE"


@pytest.fixture(autouse=True)
def here(
    user_home: HomeFixture,
    package_factory: PackageFactory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    user_home.bases.add(package_factory.base_dir)
    user_home.install(
        package_factory.package(
            "acme/one", composition={"conflicts": ["acme/two"], "max_chain": 1}
        ),
        package_factory.package("acme/three"),
    )
    monkeypatch.setenv("EXPERT_ENCODER", "lexical")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"x")))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("words", "code", "hint"),
    [
        (["run", "x", "--max-tokens", "0"], 2, "give a value between these, or leave it out"),
        (["run", "x", "--temperature", "9"], 2, "give a value between these, or leave it out"),
        (["run", "x", "--body", "nowhere.txt"], 3, "name a text file, or - for stdin"),
        (["run", "x", "--body", "."], 3, "name a text file, or - for stdin"),
        (
            ["run", "x", "--plan", "nowhere.json"],
            3,
            "save one with `expertctl route --json PROMPT > plan.json`",
        ),
        (
            ["run", "x", "--engine", "transformers", "--dtype", "int8"],
            2,
            "leave out --engine transformers, or give --dtype float32",
        ),
        (["run", "-", "--body", "-"], 2, "write one of them to a file: --body FILE, --plan FILE"),
        (["run", "-", "--plan", "-"], 2, "write one of them to a file: --body FILE, --plan FILE"),
        (["run", "x", "--template", "{prompt}{prompt}"], 2, "use it only once"),
        (["run", "x", "--template", " "], 2, "put {prompt} into the template"),
        (["run", "x", "--dtype", "int7"], 2, "see `expertctl run --help`"),
        (["route", "x" * (MAX_PROMPT_CHARACTERS + 1)], 2, "shorten it, or ask in several parts"),
        (["route", "x", "--seed", "-1"], 2, "give a value between these, or leave it out"),
        (["route", "x", "--max-experts", "11"], 2, "give a value between these, or leave it out"),
        (["route", "x", "--memory-budget", "0"], 2, "write for example 4GB, or leave it out"),
        (["route", "x", "--memory-budget", "200"], 2, "write for example 200MB, or leave it out"),
        (["route", "x", *["--stop", "y"] * 40], 2, "give fewer, or shorter ones"),
        (
            ["route", "x", "--expert", "acme/one", "--no-experts"],
            2,
            "leave out the one or the other",
        ),
        (
            ["route", "x", "--expert", "acme/one", "--exclude", "acme/one"],
            2,
            "leave out the one or the other",
        ),
        (
            ["route", "x", "--expert", "acme/one", "--expert", "acme/one"],
            2,
            "give it one weight instead",
        ),
        (
            ["route", "x", "--expert", "acme/one", "--expert", "acme/three"],
            4,
            "name fewer, or leave it out",
        ),
        (
            ["route", "x", "--expert", "acme/one@"],
            2,
            "acme/one@1.2.0, acme/one@^1, or acme/one alone",
        ),
        (
            ["route", "x", "--expert", f"acme/{LONG}" * 9],
            2,
            "references look like acme/sql-gen@^1.2",
        ),
        (["chat", "--body", "-"], 2, "write it to a file: --body FILE"),
        (["chat", "--expert", "acme/one", "--no-experts"], 2, "leave out --expert or --no-experts"),
        (
            ["export", "acme/one", "-o", "no where/x.expert"],
            3,
            "create it first: mkdir -p 'HERE/no where'",
        ),
        (["build", "nowhere"], 3, "name the directory that PEFT saved the adapter to"),
        (
            ["base", "add", "nowhere"],
            3,
            "to download a model: `expertctl pull ORG/NAME`",
        ),
        (["install", "--save"], 2, "`expertctl lock` needs an experts.toml, too"),
        (["stats", "acme/one", "--clear"], 2, "expertctl stats --clear"),
        (["eval", "--routing", "nowhere.jsonl"], 3, "there is nothing at HERE/nowhere.jsonl"),
        (
            ["config", "set", "registry", "x\ny"],
            2,
            "write it as registry.example.com, registry.example.com:8443 or https://…",
        ),
    ],
    ids=lambda value: " ".join(value)[:50] if isinstance(value, list) else "",
)
def test_a_refusal_tells_the_way_out(
    expertctl: CommandRunner, words: list[str], code: int, hint: str, tmp_path: Path
) -> None:
    said = expertctl(*words, "--json", exit_code=code)
    assert said.document["error"]["hint"] == hint.replace(HERE, str(tmp_path))
