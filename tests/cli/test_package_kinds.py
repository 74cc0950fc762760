"""``init``, ``build``, ``inspect`` and ``verify`` for every kind of adapter."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from expertctl.cli import app
from tests.factories import (
    make_package,
    write_base,
    write_dora,
    write_ia3,
    write_safetensors,
    write_soft_prompt,
)
from tests.package.forged_packages import (
    make_package_archive,
    read_archive,
    read_packed_files,
    write_frame,
)

KINDS: dict[str, Callable[..., Path]] = {
    "dora": write_dora,
    "ia3": write_ia3,
    "soft_prompt": write_soft_prompt,
}
DESCRIPTIONS = {"dora": "DoRA", "ia3": "IA³", "soft_prompt": "soft prompt"}
TEXTS = {
    "dora": "DoRA of rank 4 on 14 layers, float32",
    "ia3": "IA³ on 6 layers, float32",
    "soft_prompt": "soft prompt of 4 virtual tokens, float32",
}


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a base in it."""
    folder = tmp_path / "work"
    write_base(folder / "base")
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_becomes_a_package_that_says_what_it_is(
    kind: str, work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    KINDS[kind](work / "mine", work / "base")
    assert app.run(["keys", "new", "me"]) == 0
    assert app.run(["init", "mine", "--base", "base"]) == 0
    drafted = json.loads((work / "mine" / "expert.json").read_text())
    assert drafted["description"] == f"{DESCRIPTIONS[kind]} adapter mine"
    assert drafted["adapters"][0]["kind"] == kind
    assert app.run(["build", "mine", "--base", "base", "-o", "x.expert", "--sign", "me"]) == 0
    assert app.run(["verify", "x.expert"]) == 0
    capsys.readouterr()
    assert app.run(["inspect", "x.expert"]) == 0
    assert TEXTS[kind] in capsys.readouterr().out
    assert app.run(["inspect", "x.expert", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["adapters"][0]["kind"] == kind
    assert document["manifest"]["adapters"][0]["kind"] == kind
    assert document["warnings"] == []


def test_inspect_lists_what_each_kind_changes(
    work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = make_package(
        work, base_dir=work / "base", adapters=[(k, {}) for k in ("lora", "ia3", "soft_prompt")]
    )
    assert app.run(["inspect", str(file), "--json"]) == 0
    lora, ia3, prompt = json.loads(capsys.readouterr().out)["adapters"]
    module = "model.layers.0.mlp.down_proj"
    assert lora["modules"][0] == {"name": module, "rank": 4, "scale": 2.0}
    assert ia3["modules"][0] == {"name": module, "on_input": True, "size": 48}
    assert (ia3["rank"], ia3["tokens"]) == (None, None)
    assert (prompt["modules"], prompt["tokens"]) == ([], 4)


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        ("dora", "layer_replication", [[0, 2]]),
        ("ia3", "modules_to_save", ["score"]),
        ("soft_prompt", "tokenizer_kwargs", {"trust_remote_code": True}),
        ("soft_prompt", "peft_type", "PREFIX_TUNING"),
    ],
)
def test_what_is_not_supported_is_refused_with_8(
    kind: str, field: str, value: Any, work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = KINDS[kind](work / "mine", work / "base", **{field: value})
    assert app.run(["build", str(files), "--base", "base", "-o", "x.expert"]) == 8
    assert field in capsys.readouterr().err
    assert not (work / "x.expert").exists()


def test_build_warns_of_numbers_that_no_training_gives(
    work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_ia3(work / "mine", work / "base", scale=1e4)
    assert app.run(["build", "mine", "--base", "base", "-o", "x.expert", "--json"]) == 0
    warnings = json.loads(capsys.readouterr().out)["warnings"]
    numbers = [text for text in warnings if "numbers up to" in text]
    assert len(numbers) == 4, "those with the same numbers are one line"
    assert all("trained adapters stay below 1000" in warning for warning in numbers)


@pytest.mark.parametrize(
    ("value", "said"), [(np.nan, "holds NaN or infinity"), (1e6, "numbers up to 1e+06")]
)
def test_inspect_and_install_warn_of_numbers_whoever_built_the_package(
    value: float, said: str, work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package = make_package(work, base_dir=work / "base", adapters=[("soft_prompt", {})])
    weights = work / "odd.safetensors"
    numbers = np.full((4, 32), value, np.float32)
    write_safetensors(weights, {"prompt_embeddings": numbers}, metadata={"format": "pt"})
    name = "adapter_model.safetensors"
    files = {**read_packed_files(read_archive(package)), name: weights.read_bytes()}
    write_frame(make_package_archive(files), work / "odd.expert")
    assert app.run(["inspect", "odd.expert"]) == 0
    (line,) = [text for text in capsys.readouterr().err.splitlines() if "warning" in text]
    assert said in line
    assert "prompt_embeddings" in line
    assert sorted(path.name for path in work.iterdir() if "expertctl" in path.name) == []
    assert app.run(["install", "odd.expert", "--allow-unsigned"]) == 0
    told = [text for text in capsys.readouterr().err.splitlines() if said in text]
    assert len(told) == 1
    assert told[0].startswith("warning: acme/sql@1.0.0: adapter_model.safetensors: ")
