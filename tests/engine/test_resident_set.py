"""The budget against what the operating system counts: RSS of a process with large experts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
LIMIT = 80_000_000
NOISE = 4 << 20
"""What an interpreter allocates on its own: a resident plan or expert is several times as large."""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.all)])
def test_the_resident_set_stays_within_the_budget(tmp_path: Path, seed: int) -> None:
    words = ["-m", "tests.engine.resident_program", str(tmp_path), str(LIMIT), str(seed)]
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert 0.8 * LIMIT < seen["grown"] < LIMIT + NOISE
    assert seen["ledger"] <= LIMIT
    assert seen["refused"] > 0, "the plans must be too much for the budget at times"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("dtype", ["bf16", "int4"])
def test_a_packed_base_takes_what_the_ledger_says(tmp_path: Path, dtype: str) -> None:
    words = ["-m", "tests.engine.packed_resident_program", str(tmp_path), dtype]
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert 0.7 * seen["ledger"] < seen["grown"] < seen["ledger"] + NOISE
