"""``bench`` from the outside, on bases that are small; what it measures is in tests/engine."""

import struct
from pathlib import Path

import pytest

from expertctl.cli.plot import _format_number
from expertctl.engine import bench_subject
from expertctl.engine.memory.host import count_usable_cores
from tests.cli.command_runner import CommandRunner, expertctl
from tests.factories import write_base, write_lora

__all__ = ["expertctl"]

pytestmark = pytest.mark.all

TWO = pytest.mark.skipif(count_usable_cores() < 2, reason="bench has no more threads than cores")
QUICK = ("--tokens", 2, "--context", 3, "--prompt-tokens", 4, "--rounds", 1)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a base of 16 numbers a head and a LoRA for it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EXPERT_ENCODER", "lexical")
    base = write_base(tmp_path / "my-base", head_dim=16)
    write_lora(tmp_path / "my-lora", base)
    return tmp_path


@pytest.fixture
def added(folder: Path, expertctl: CommandRunner) -> Path:
    """The base added, the LoRA built."""
    expertctl("base", "add", "my-base")
    words = ("-o", "mine.expert", "--base", "my-base", "--name", "acme/mine", "--license", "MIT")
    expertctl("build", "my-lora", *words)
    return folder


def test_it_has_an_example(expertctl: CommandRunner) -> None:
    text = expertctl("bench", "--help").out
    assert "expertctl bench --dtype int8 --plot roofline.png" in text.split("Example")[1]


def test_a_shape_is_drawn_and_measured_and_nothing_is_installed(
    folder: Path, home: Path, expertctl: CommandRunner
) -> None:
    said = expertctl("bench", "--shape", "my-base", "--dtype", "int4", "--threads", 1, *QUICK)
    lines = said.out.splitlines()
    assert lines[0] == "random weights in the shape of my-base, int4"
    header = next(line for line in lines if line.startswith("WHAT"))
    assert header.split() == ["WHAT", "THREADS", "MEDIAN", "QUARTILES", "ROOF", "SHARE", "LIMIT"]
    rows = [line.split(",")[0] for line in lines if ", " in line and line[0] in "mawr"]
    assert {"memory", "arithmetic", "write", "read 4"} <= set(rows)
    assert max(map(len, lines)) <= 80
    assert "fit into the caches" in said.err
    assert not (home / "bases").exists()
    assert not (home / "store").exists()


@TWO
def test_the_document_says_what_was_measured(added: Path, expertctl: CommandRunner) -> None:
    document = expertctl("bench", "--threads", 1, "--threads", 2, "--json", *QUICK).document
    assert document["measured"]["what"] == "base my-base alone"
    assert (document["measured"]["dtype"], document["measured"]["context"]) == ("float32", 3)
    cases = [row["case"] for row in document["rows"]]
    threads = [
        f"{what}, threads: {n}" for what in ("memory", "arithmetic", "write") for n in (1, 2)
    ]
    assert cases == [*threads, "read 4, threads: 2"]
    assert all(row["ours"] > 0 for row in document["rows"])
    assert [row["rival"] is None for row in document["rows"]] == [True] * 4 + [False] * 3
    assert document["measured"]["token_bytes"]["experts"] == 0


def test_experts_are_measured_with_their_bytes(added: Path, expertctl: CommandRunner) -> None:
    words = ("--base", "my-base", "--expert", "./mine.expert", "--threads", 1)
    said = expertctl("bench", *words, "--json", *QUICK)
    measured = said.document["measured"]
    assert measured["what"] == "base my-base with acme/mine@0.1.0"
    assert measured["token_bytes"]["experts"] > 0
    alone = expertctl("bench", "--base", "my-base", "--threads", 1, "--json", *QUICK).document
    assert alone["measured"]["token_bytes"]["weights"] == measured["token_bytes"]["weights"]
    assert "unsigned" in said.err


@TWO
def test_the_roofline_is_drawn(folder: Path, expertctl: CommandRunner) -> None:
    words = ("--shape", "my-base", "--threads", 1, "--threads", 2)
    expertctl("bench", *words, "--plot", "roof.png", *QUICK)
    data = (folder / "roof.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert struct.unpack(">II", data[16:24]) == (1600, 1080)
    expertctl("bench", *words, "--plot", "roof.svg", *QUICK)
    drawn = (folder / "roof.svg").read_text()
    for told in (
        "roof, 1 thread: ",
        "roof, 2 threads: ",
        "write, 2 threads: ",
        "read 4, 2 threads: ",
    ):
        assert told in drawn
    assert "e+0" not in drawn, "people write 1,370"


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (1370.4, "1,370"),
        (52.4, "52"),
        (12.0, "12"),
        (4.71, "4.7"),
        (0.1, "0.1"),
        (1e6, "1,000,000"),
    ],
)
def test_figures_of_the_picture_are_written_as_people_do(value: float, written: str) -> None:
    assert _format_number(value) == written


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["--shape", "gpt-5"], 2, "'gpt-5' is neither a known shape nor a folder"),
        (["--shape", "my-base", "--base", "my-base"], 2, "--base has no effect"),
        (["--shape", "my-base", "--expert", "acme/x"], 2, "--expert has no effect"),
        (["--shape", "my-base", "--prompt-tokens", "600"], 2, "a sequence of 600 tokens exceeds"),
        (["--shape", "my-base", "--memory-budget", "1MB"], 7, "needed, but only"),
        (["--base", "nobody"], 3, "no base is called 'nobody'"),
        (["--shape", "my-base", "--plot", "roof.gif"], 2, "unsupported plot format"),
        (["--rounds", "0"], 2, "--rounds"),
        (["--threads", "1024"], 2, "--threads 1024: only "),
        (["--plot", "roof.gif"], 2, "--plot roofline.svg, or roofline.png"),
    ],
)  # fmt: skip
def test_what_cannot_be_measured_is_refused_before(
    words: list[str], code: int, told: str, folder: Path, expertctl: CommandRunner
) -> None:
    err = expertctl("bench", *words, exit_code=code).err
    assert told in err
    assert "hint: " in err


def test_a_shape_asks_for_no_base_so_the_setting_is_not_looked_up(
    added: Path, expertctl: CommandRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXPERT_BASE", "gone")
    assert "the setting base" in expertctl("bench", *QUICK, exit_code=3).err
    words = ("--shape", "my-base", "--memory-budget", "1MB", *QUICK)
    assert "needed, but only" in expertctl("bench", *words, exit_code=7).err


def test_what_the_machine_cannot_hold_now_is_refused_before_anything_is_drawn(
    folder: Path, expertctl: CommandRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_subject, "find_unused_bytes", lambda: 9_000_000_000)
    monkeypatch.setattr(bench_subject, "create_random_base", None)
    words = ("--shape", "llama-3.1-8b", "--memory-budget", "64GB", *QUICK)
    err = expertctl("bench", *words, exit_code=7).err
    assert "a base like llama-3.1-8b in bf16: 16." in err
    assert "only 9.0 GB of this machine's memory is unused" in err
    assert "hint: end other programs, or choose a smaller --shape, or --dtype int8 or int4" in err


def test_a_base_that_kernels_cannot_run_is_no_subject(
    folder: Path, expertctl: CommandRunner
) -> None:
    write_base(folder / "odd", head_dim=8)
    expertctl("base", "add", "odd")
    err = expertctl("bench", "--base", "odd", *QUICK, exit_code=4).err
    assert "head_dim is 8, not a multiple of 16" in err
    assert "hint: choose another --base, or a --shape" in err
    shaped = expertctl("bench", "--shape", "odd", *QUICK, exit_code=4).err
    assert "head_dim is 8, not a multiple of 16" in shaped
    assert "hint: choose another --shape: qwen3-0.6b, " in shaped
    assert "transformers" not in err + shaped, "bench knows no such option"
    quantised = expertctl("bench", "--base", "odd", "--dtype", "int8", *QUICK, exit_code=4).err
    assert "transformers" not in quantised


def test_that_a_copy_cannot_be_kept_is_told_once(
    added: Path, home: Path, expertctl: CommandRunner
) -> None:
    place = home / "bases" / "my-base" / "quantised"
    place.write_text("in the way")
    words = ("--base", "my-base", "--dtype", "int8", "--threads", 1)
    said = expertctl("bench", *words, *QUICK)
    assert said.err.count("tried again") == 1
    assert f"cannot be written ({place}: it is no folder): tried again next time" in said.err


def test_a_shape_with_biases_is_measured(folder: Path, expertctl: CommandRunner) -> None:
    write_base(folder / "biased", arch="qwen2", head_dim=16)
    said = expertctl("bench", "--shape", "biased", "--threads", 1, *QUICK)
    assert "random weights in the shape of biased, bfloat16" in said.out
