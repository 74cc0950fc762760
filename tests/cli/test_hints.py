"""Whoever is refused is told the way out."""

import io
import json
import sys
from pathlib import Path

import pytest

from expertctl.routing.presets import MAX_PROMPT_CHARACTERS
from tests.cli.commands import Commands, expertctl
from tests.store.shop import House, Shop, fast, house, shop

__all__ = ["expertctl", "fast", "house", "shop"]

LONG = "x" * 70


@pytest.fixture(autouse=True)
def here(house: House, shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    house.bases.add(shop.base_dir)
    house.install(
        shop.package("acme/one", composition={"conflicts": ["acme/two"], "max_chain": 1}),
        shop.package("acme/three"),
    )
    monkeypatch.setenv("EXPERT_ENCODER", "lexical")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"x")))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["run", "x", "--max-tokens", "0"], 2),
        (["run", "x", "--temperature", "9"], 2),
        (["run", "x", "--body", "nowhere.txt"], 3),
        (["run", "x", "--body", "."], 3),
        (["run", "x", "--plan", "nowhere.json"], 3),
        (["run", "-", "--body", "-"], 2),
        (["run", "-", "--plan", "-"], 2),
        (["run", "x", "--template", "{prompt}{prompt}"], 2),
        (["run", "x", "--template", " "], 2),
        (["run", "x", "--dtype", "int8"], 2),
        (["route", "x" * (MAX_PROMPT_CHARACTERS + 1)], 2),
        (["route", "x", "--seed", "-1"], 2),
        (["route", "x", "--max-experts", "11"], 2),
        (["route", "x", "--memory-budget", "0"], 2),
        (["route", "x", *["--stop", "y"] * 40], 2),
        (["route", "x", "--expert", "acme/one", "--no-experts"], 2),
        (["route", "x", "--expert", "acme/one", "--exclude", "acme/one"], 2),
        (["route", "x", "--expert", "acme/one", "--expert", "acme/one"], 2),
        (["route", "x", "--expert", "acme/one", "--expert", "acme/three"], 4),
        (["route", "x", "--expert", "acme/one@"], 2),
        (["route", "x", "--expert", f"acme/{LONG}" * 9], 2),
        (["chat", "--body", "-"], 2),
        (["chat", "--expert", "acme/one", "--no-experts"], 2),
        (["export", "acme/one", "-o", "no where/x.expert"], 3),
        (["build", "nowhere"], 3),
        (["base", "add", "nowhere"], 3),
        (["install", "--save"], 2),
        (["stats", "acme/one", "--clear"], 2),
        (["eval", "--routing", "nowhere.jsonl"], 3),
        (["config", "set", "registry", "x\ny"], 2),
    ],
    ids=lambda value: " ".join(value)[:50] if isinstance(value, list) else "",
)
def test_a_refusal_has_a_hint(expertctl: Commands, words: list[str], code: int) -> None:
    said = expertctl(*words, "--json", code=code)
    assert json.loads(said.out)["error"]["hint"] != ""
