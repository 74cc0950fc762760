"""``bench moe`` from the outside; what it measures is in tests/engine."""

import json
import struct
from pathlib import Path

import pytest
import torch

from expertctl.engine.memory.host import count_usable_cores
from expertctl.engine.torch import devices
from tests.cli.command_runner import CommandRunner, expertctl
from tests.engine.moe.test_routed_bench import write_routed
from tests.factories import write_base

__all__ = ["expertctl"]

pytestmark = pytest.mark.all
QUICK = ("--rounds", 2, "--tokens", 8, "--prompt-tokens", 4, "--memory-budget", "128MiB")


@pytest.fixture
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expertctl: CommandRunner) -> Path:
    """A folder beside a home with a base of routed experts, and a dense one that is newer."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EXPERT_ENCODER", "lexical")
    expertctl("base", "add", write_routed(tmp_path / "routed"))
    expertctl("base", "add", write_base(tmp_path / "dense", head_dim=16))
    return tmp_path


def test_it_has_an_example_and_bench_names_it(expertctl: CommandRunner) -> None:
    assert "expertctl bench moe --resident 1.0,0.6,0.4" in expertctl("bench", "moe", "--help").out
    assert "moe" in expertctl("bench", "--help").out.split("Commands")[1]


def test_the_newest_base_with_routed_experts_is_measured(
    added: Path, expertctl: CommandRunner
) -> None:
    lines = expertctl("bench", "moe", "--resident", "1.0,0.5", *QUICK).out.splitlines()
    assert lines[:2] == [
        "base routed, float32",
        "3 layers of 8 routed experts, of which a token uses 2",
    ]
    header = next(number for number, line in enumerate(lines) if line.startswith("RESIDENT"))
    rows = lines[header + 1 : header + 4]
    assert [row.split("  ")[0] for row in rows] == ["8 of 8", "4 of 8", "4 of 8"]
    assert "100.0 %" in rows[0]
    assert "skips up to 0.25 of a token's router weight" in lines
    assert [row.split()[3] for row in rows[1:]] == ["exact", "skip"]
    assert max(map(len, lines)) <= 80


def test_the_document_has_a_row_for_each_way(added: Path, expertctl: CommandRunner) -> None:
    words = ("--resident", "0.5,1", "--moe-miss", "exact", "--prompt", "Sort these: 3, 1")
    document = expertctl("bench", "moe", *words, "--json", *QUICK).document
    assert document["name"] == "bench moe"
    assert document["measured"]["texts"] == "a prompt, then 8 tokens more, 2 times"
    assert (document["measured"]["seed"], document["measured"]["skip_cap"]) == (None, None)
    whole, half = document["rows"]
    assert half["waited_reading_ms"] <= half["waited_ms"]
    assert (whole["case"], half["case"]) == ("all resident", "50 % resident, exact")
    assert half["ratio"] == pytest.approx(half["ours"] / whole["ours"], abs=2e-3)
    assert half["memory"] < whole["memory"]
    assert [layer["layer"] for layer in half["by_layer"]] == [0, 1, 2]
    assert len(half["timeline"]["hit_rates"]) == 3
    assert all(0 <= rate <= 1 for row in half["timeline"]["hit_rates"] for rate in row)


def test_hit_rates_are_drawn(added: Path, expertctl: CommandRunner) -> None:
    words = ("--resident", "0.75,0.5")
    expertctl("bench", "moe", *words, "--plot", "hits.png", *QUICK)
    data = (added / "hits.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert struct.unpack(">II", data[16:24])[0] == 1600
    expertctl("bench", "moe", *words, "--plot", "hits.svg", *QUICK)
    drawn = (added / "hits.svg").read_text()
    for told in ("75 % resident, exact (6 of 8 slots): ", "50 % resident, skip (4 of 8 slots): "):
        assert told in drawn
    assert "tokens generated; the figures count only what is right of the line" in drawn


def test_it_begins_with_a_profile_and_says_so(added: Path, expertctl: CommandRunner) -> None:
    counts = {"activation_counts": {"6": 9, "7": 8}}
    profile = {"num_prompts": 9, "num_experts": 8, "layers": {"0": counts, "2": counts}}
    (added / "profile.json").write_text(json.dumps(profile))
    words = ("--resident", "0.5", "--moe-profile", "profile.json", "--moe-pin", "50%")
    more = ("--moe-warmup", "full", "--moe-cold", "read", "--moe-exchange", "0.2")
    lines = expertctl("bench", "moe", *words, *more, *QUICK).out.splitlines()
    told = "starts with profile.json; pins 50%; exchanges 0.2; all slots filled first; "
    assert told + "skips up to 0.25 of a token's router weight; cold experts: read" in lines
    document = expertctl("bench", "moe", *words, "--json", *QUICK).document
    start = document["measured"]["start"]
    assert (start["profile"], start["pin"], start["warmup"]) == ("profile.json", "50%", "hybrid")
    assert all(row["cold"] in {"read", "map", "direct"} for row in document["rows"])


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["--resident", "0"], 2, "--resident '0': must be up to 16 numbers above 0, up to 1"),
        (["--resident", "1.5"], 2, "--resident '1.5'"),
        (["--resident", "nan"], 2, "--resident 'nan'"),
        (["--resident", "half"], 2, "--resident 'half'"),
        (["--resident", ",".join(f"0.{n}" for n in range(10, 30))], 2, "must be up to 16 numbers"),
        (["--moe-miss", "guess"], 2, "--moe-miss 'guess'"),
        (["--moe-skip-cap", "2"], 2, "--moe-skip-cap 2.0 is not between"),
        (["--moe-skip-cap", "nan"], 2, "--moe-skip-cap nan is not between"),
        (["--moe-pin", "2"], 2, "--moe-pin needs a profile"),
        (["--moe-exchange", "0.5"], 2, "--moe-exchange needs a profile"),
        (["--moe-pin", "some"], 2, "'some' is neither a number of experts to pin"),
        (["--moe-exchange", "2"], 2, "--moe-exchange 2.0 is not a share"),
        (["--moe-cold", "warm"], 2, "--moe-cold"),
        (["--moe-profile", "nothing.json"], 3, "nothing.json"),
        (["--base", "dense"], 4, "dense has no routed experts"),
        (["--base", "nobody"], 3, "no base is called 'nobody'"),
        (["--memory-budget", "100KB"], 7, "the budget of 100 kB"),
        (["--plot", "hits.gif"], 2, "unsupported plot format"),
        (["--plot", "hits.png", "--resident", "1"], 2, "with all resident none is"),
        (["--threads", str(count_usable_cores() + 1)], 2, "can be used"),
        (["--prompt-tokens", "600"], 2, "exceed the context of the base, 512 tokens"),
    ],
)  # fmt: skip
def test_what_cannot_be_measured_is_refused(
    words: list[str], code: int, told: str, added: Path, expertctl: CommandRunner
) -> None:
    err = expertctl("bench", "moe", *words, exit_code=code).err
    assert told in err
    assert "hint: " in err


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        ([], 3, "--device cpu"),
        (["--dtype", "int8"], 2, "--device cuda does not support --dtype int8"),
        (["--moe-cold", "map"], 2, "--moe-cold map"),
    ],
)
def test_a_device_is_refused_as_run_does(
    words: list[str],
    code: int,
    told: str,
    added: Path,
    expertctl: CommandRunner,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(devices, "is_cuda_available", lambda: code != 3)
    err = expertctl("bench", "moe", "--device", "cuda", *words, exit_code=code).err
    assert told in err
    assert "hint: " in err
    monkeypatch.setattr(devices, "is_cuda_available", lambda: False)
    monkeypatch.setenv("EXPERT_DEVICE", "cuda")
    assert "CUDA" in expertctl("bench", "moe", exit_code=3).err


def test_it_is_told_what_computed(
    added: Path, expertctl: CommandRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processor stands in the place of a device."""
    monkeypatch.setattr(devices, "CUDA", torch.device("cpu"))
    monkeypatch.setattr(devices, "is_cuda_available", lambda: True)
    monkeypatch.setattr(devices, "find_free_bytes", lambda: 1 << 30)
    words = ("--resident", "0.5", "--moe-miss", "exact", "--device", "auto")
    assert "on cpu" in expertctl("bench", "moe", *words, *QUICK).out.splitlines()
    document = expertctl("bench", "moe", *words, "--json", *QUICK).document
    assert document["machine"]["device"] == "cpu"
    assert document["rows"][0]["loads"] > 0


def test_without_a_base_of_routed_experts_there_is_a_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expertctl: CommandRunner
) -> None:
    monkeypatch.setenv("EXPERT_ENCODER", "lexical")
    expertctl("base", "add", write_base(tmp_path / "dense", head_dim=16))
    err = expertctl("bench", "moe", exit_code=3).err
    assert "no registered base has routed experts" in err
    assert "expertctl base add DIR" in err
