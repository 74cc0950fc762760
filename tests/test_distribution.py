"""The wheel: complete, small, and usable on a machine without a compiler or a checkout."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAX_WHEEL_BYTES = 12_000_000

pytestmark = pytest.mark.all


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(folder), "."]
    subprocess.run(command, cwd=ROOT, check=True)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel in a new environment, made with no compiler on the PATH."""
    folder = tmp_path_factory.mktemp("venv")
    tools = folder / "tools"
    tools.mkdir()
    for name in ("sh", "env", "uname", "cat"):
        (tools / name).symlink_to(shutil.which(name) or f"/bin/{name}")
    environment = {**os.environ, "PATH": str(tools), "HOME": str(folder)}
    assert not any(shutil.which(c, path=environment["PATH"]) for c in ("cc", "gcc", "g++", "c++"))
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    python = folder / "venv" / "bin" / "python"
    subprocess.run(
        [
            python,
            "-m",
            "pip",
            "install",
            "--quiet",
            "-c",
            ROOT / "constraints.txt",
            f"{wheel}[engine]",
        ],
        env=environment,
        check=True,
    )
    return folder


def test_the_wheel_is_small_and_ships_schemas_and_starter_pack(wheel: Path) -> None:
    assert wheel.stat().st_size < MAX_WHEEL_BYTES
    names = set(zipfile.ZipFile(wheel).namelist())
    schemas = {f"expertctl/_schemas/{p.name}" for p in (ROOT / "schemas").glob("*.json")}
    assert schemas <= names
    assert sum(name.endswith(".expert") for name in names) >= 4
    pages = (ROOT / "registry_server" / "web").rglob("*.*")
    beside = {str(p.relative_to(ROOT)) for p in pages if p.suffix in {".html", ".css", ".svg"}}
    assert len(beside) > 5
    assert beside <= names
    assert "expertctl/_starter/base/model.safetensors" in names
    assert not [n for n in names if n.startswith(("tests/", "benchmarks/", "examples/"))]


def test_a_new_machine_without_a_compiler_answers_a_prompt(installed: Path) -> None:
    program = installed / "venv" / "bin" / "expertctl"
    result = subprocess.run(
        [program, "run", "Sort these numbers: 41, 17, 23, 15", "--json"],
        cwd=installed,
        env={"HOME": str(installed), "PATH": str(installed / "tools")},
        capture_output=True,
        check=True,
    )
    document = json.loads(result.stdout)
    assert document["text"] == "15, 17, 23, 41"
    assert [e["ref"].split("@")[0] for e in document["plan"]["experts"]] == ["starter/sorting"]
    assert (installed / ".expert" / "store" / "refs" / "local" / "starter").is_dir()


def test_the_package_manager_works_without_torch(installed: Path) -> None:
    python = installed / "venv" / "bin" / "python"
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from expertctl.cli.app import run\n"
        "sys.exit(run(['list']) or run(['route', 'Sort these numbers: 41, 17, 23']))"
    )
    result = subprocess.run(
        [python, "-c", program],
        env={"HOME": str(installed)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, "starter/sorting" in result.stdout) == (0, True), result.stderr
