"""Thread counts are chosen by the size of the model and given back afterwards."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from expertctl.engine.memory import host
from expertctl.engine.memory.host import SMALL_MODEL, choose_thread_count, count_usable_cores
from expertctl.engine.torch.devices import use_torch_threads

VARIABLE = "OMP_NUM_THREADS"


def test_a_small_model_gets_one_thread() -> None:
    assert choose_thread_count(SMALL_MODEL - 1) == 1


def test_a_large_model_gets_no_more_threads_than_there_are_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(VARIABLE, "512")
    assert 1 <= choose_thread_count(SMALL_MODEL) <= count_usable_cores()
    monkeypatch.setenv(VARIABLE, "1")
    assert choose_thread_count(1 << 40) == 1


@pytest.mark.parametrize("value", [None, "1", "+1 ,3", "1,0", "512"])
def test_as_many_threads_are_chosen_as_torch_would_take(value: str | None) -> None:
    environment = {name: text for name, text in os.environ.items() if name != VARIABLE}
    program = (
        "import torch\n"
        "from expertctl.engine.memory.host import choose_thread_count\n"
        "print(torch.get_num_threads(), choose_thread_count(1 << 40))"
    )
    found = subprocess.run(
        [sys.executable, "-c", program],
        env={**environment, **({} if value is None else {VARIABLE: value})},
        capture_output=True,
        text=True,
        check=True,
    )
    theirs, ours = map(int, found.stdout.split())
    assert ours == min(theirs, count_usable_cores())


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("", 4),
        ("2", 2),
        (" 3 ", 3),
        ("03", 3),
        ("2,1", 2),
        ("9", 4),
        ("0", 4),
        ("-1", 4),
        ("2x", 4),
        ("1_0", 4),
        ("2,", 4),
    ],
)
def test_the_first_number_counts_and_what_is_not_a_list_of_numbers_is_ignored(
    value: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 5}, raising=False)
    monkeypatch.setattr(host, "_CPUS", Path("/nowhere"))
    monkeypatch.setenv(VARIABLE, value)
    assert choose_thread_count(SMALL_MODEL) == expected


def test_two_threads_of_a_core_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(8):
        folder = tmp_path / f"cpu{number}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{number % 4},{number % 4 + 4}\n")
    monkeypatch.setattr(host, "_CPUS", tmp_path)
    monkeypatch.delenv(VARIABLE, raising=False)
    for usable, expected in ((range(8), 4), ((0, 4), 1), ((1, 2, 6), 2)):
        monkeypatch.setattr(
            os, "sched_getaffinity", lambda _, usable=usable: set(usable), raising=False
        )
        assert choose_thread_count(SMALL_MODEL) == expected


def test_the_thread_count_is_given_back_also_after_a_failure() -> None:
    before = torch.get_num_threads()
    try:
        with use_torch_threads(before + 1):
            assert torch.get_num_threads() == before + 1
            raise KeyError
    except KeyError:
        assert torch.get_num_threads() == before
