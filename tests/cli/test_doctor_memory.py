"""``doctor --memory`` as a person reads it, while another process has a base in memory."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from expertctl.engine.adapters.load import READ_SLACK_BYTES
from expertctl.engine.local_engine import LocalEngine
from expertctl.engine.memory.process_registry import (
    ENGINE_MODULES,
    EngineRegistration,
    MemoryAdmission,
)
from expertctl.errors import format_install_command
from tests.cli.command_runner import CommandRunner, expertctl
from tests.engine.package_fixtures import EnginePackages, engine_packages
from tests.engine.process_with_base import read_process_line
from tests.engine.test_local_engine import planner, request, run
from tests.factories import write_base
from tests.store.fixtures import HomeFixture, fast, user_home

__all__ = ["engine_packages", "expertctl", "fast", "user_home"]

pytestmark = pytest.mark.all
ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def other(user_home: HomeFixture) -> Iterator[subprocess.Popen[bytes]]:
    words = [sys.executable, "-m", "tests.engine.process_with_base", str(user_home.home.engines)]
    with subprocess.Popen(
        words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        read_process_line(process)
        yield process
        process.kill()


def test_an_engine_of_another_process_is_shown_with_what_it_holds(
    expertctl: CommandRunner, user_home: HomeFixture, other: subprocess.Popen[bytes]
) -> None:
    lines = expertctl("doctor", "--memory").out.splitlines()
    header, row, named = (lines[n + lines.index("")] for n in (1, 2, 3))
    columns = ["PROCESS", "NOW", "BASE", "EXPERTS", "KV", "BUFFERS", "ALL", "RESIDENT"]
    assert header.split() == columns
    assert row.split()[:2] == [str(other.pid), "answers"]
    assert "60.0 MB" in row
    assert named.strip() == f"{other.pid}: a base, last with acme/sql@1.0.0, acme/dates@2.0.0"
    assert max(map(len, lines)) <= 80
    [engine] = expertctl("doctor", "--memory", "--json").document["engines"]
    assert engine["held"] == {"base": 60_000_000, "experts": 0, "kv": 1_000, "buffers": 0}
    assert (engine["pid"], engine["total"]) == (other.pid, 60_001_000)
    assert sys.platform != "linux" or engine["resident_set"] > 60_000_000


def test_what_an_engine_holds_is_what_its_ledger_says(
    expertctl: CommandRunner, user_home: HomeFixture, engine_packages: EnginePackages
) -> None:
    user_home.bases.add(engine_packages.base_dir)
    user_home.trust_keys("acme")
    user_home.install(engine_packages.package())
    engine = LocalEngine(planner(user_home), budget=8 << 20)
    run(engine, request())
    [seen] = expertctl("doctor", "--memory", "--json").document["engines"]
    assert seen["held"] == {
        p: engine.budget.reserved_bytes(p) for p in ("base", "experts", "kv", "buffers")
    }
    assert (seen["answering"], seen["budget"]) == (False, 8 << 20)
    assert seen["base"] == engine_packages.base.identity.name
    engine.close()
    assert expertctl("doctor", "--memory", "--json").document["engines"] == []


def test_bases_and_experts_are_told_with_what_they_take_in_memory(
    expertctl: CommandRunner, user_home: HomeFixture, engine_packages: EnginePackages
) -> None:
    user_home.bases.add(engine_packages.base_dir)
    user_home.trust_keys("acme")
    [installed] = user_home.install(engine_packages.package())
    document = expertctl("doctor", "--memory", "--json").document
    [base], [expert] = document["bases"], document["experts"]
    engine = LocalEngine(planner(user_home), budget=8 << 20)
    run(engine, request())
    assert base["in_memory"]["float32"] == engine.budget.reserved_bytes("base")
    assert base["in_memory"]["bf16"] < base["in_memory"]["float32"]
    stored = user_home.store.list_experts()[0]
    sizes = [f.size for f in stored.files if f.path.startswith("adapter")]
    assert (expert["ref"], expert["in_memory"]) == (
        stored.ref,
        sum(sizes) + READ_SLACK_BYTES * len(sizes),
    )
    assert installed is not None
    shown = expertctl("doctor", "--memory").out
    assert "BASE" in shown
    assert stored.ref in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_keys_and_values_are_told_as_a_run_keeps_them(
    expertctl: CommandRunner, user_home: HomeFixture, tmp_path: Path
) -> None:
    """Float32 beside a small base; float16 beside one that kernels hold in bfloat16."""
    large: dict[str, Any] = {
        "hidden": 512,
        "vocab": 66_000,
        "layers": 1,
        "head_dim": 16,
        "dtype": "bfloat16",
    }
    for name, config in {"small": {"layers": 3}, "large": large}.items():
        user_home.bases.add(write_base(tmp_path / name, kv_heads=2, **config))
    bases = expertctl("doctor", "--memory", "--json").document["bases"]
    assert {base["name"]: base["kv_per_token"] for base in bases} == {
        "small": 3 * 2 * 2 * 8 * 4,
        "large": 1 * 2 * 2 * 16 * 2,
    }
    rows = {
        line.split()[0]: line for line in expertctl("doctor", "--memory").out.splitlines() if line
    }
    assert rows["large"].endswith(" 128.0 kB")
    assert rows["small"].endswith(" 384.0 kB")


def test_who_waits_for_memory_is_told(expertctl: CommandRunner, user_home: HomeFixture) -> None:
    admission = MemoryAdmission(user_home.store.paths.running, pause=lambda: look())
    seen: list[str] = []

    def look() -> None:
        seen.append(expertctl("doctor", "--memory").out)
        raise KeyboardInterrupt

    with (
        admission.acquire(80_000_000),
        pytest.raises(KeyboardInterrupt),
        admission.wait_in_queue(40_000_000, limit=100_000_000, tell=lambda _: None),
    ):
        pass
    assert "waiting for memory: 1 for 40.0 MB, behind 1 run with 80.0 MB" in seen[0]


def test_limits_and_the_budget_of_the_settings_are_told(
    expertctl: CommandRunner, user_home: HomeFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "the default, four fifths of that" in expertctl("doctor", "--memory").out
    monkeypatch.setenv("EXPERT_MEMORY_BUDGET", "512MB")
    assert "512 MB for each engine: chosen" in expertctl("doctor", "--memory").out
    limits = expertctl("doctor", "--memory", "--json").document["limits"]
    assert (limits["budget"], limits["budget_chosen"]) == (512_000_000, True)
    assert limits["machine"] > limits["budget"]


def test_nothing_is_written_and_an_empty_home_needs_no_torch(tmp_path: Path) -> None:
    program = (
        "import sys; from expertctl.cli import app; code = app.run(sys.argv[1:]); "
        "sys.exit(code or ('torch' in sys.modules and 99) or 0)"
    )
    words = [sys.executable, "-c", program, "doctor", "--memory"]
    environment = {"EXPERT_HOME": str(tmp_path / "home"), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "no engine of this home holds memory" in done.stdout
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("absent", ENGINE_MODULES)
def test_sizes_are_left_out_where_something_of_the_engine_is_absent(
    absent: str, user_home: HomeFixture, engine_packages: EnginePackages
) -> None:
    user_home.bases.add(engine_packages.base_dir)
    program = (
        f"import sys; sys.modules[{absent!r}] = None; "
        "from expertctl.cli import app; sys.exit(app.run(['doctor', '--memory']))"
    )
    environment = {"EXPERT_HOME": str(user_home.home.root), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert engine_packages.base.identity.name in done.stdout
    assert format_install_command("engine") in done.stdout


def test_names_from_elsewhere_cannot_command_the_terminal(
    expertctl: CommandRunner, user_home: HomeFixture
) -> None:
    presence = EngineRegistration(
        user_home.home.engines, LocalEngine(planner(user_home), budget=10).budget
    )
    presence.publish(base="a\x1b[31mbase", experts=())
    assert "\x1b" not in expertctl("doctor", "--memory").out
    presence.close()
