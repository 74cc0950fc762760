"""The packages that a GPU machine without a network lacks: downloaded elsewhere, installed there.

Only the standard library is used, because this runs before anything is installed. The GPU machine
has Python 3.12 on x86-64 Linux with torch, transformers, numba, numpy, safetensors and tokenizers,
and their dependencies, but possibly in versions that are too old for expertctl.
"""

import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYTHON_VERSION = "3.12"
MAX_BYTES = 60 << 20
"""Maximum bytes of all wheels: machines without a network often have slow access."""
PROVIDED = ("numba", "numpy", "pip", "safetensors", "tokenizers", "torch", "transformers")
"""Distributions that the GPU machine has, with their dependencies."""
CARRIED = (
    *("annotated-doc", "annotated-types", "anyio", "cffi", "click", "click-default-group"),
    *("cryptography", "filelock", "h11", "httpcore2", "httpx2", "hypothesis", "idna", "iniconfig"),
    *("jinja2", "jsonschema-rs", "markdown-it-py", "markupsafe", "mdurl", "msgspec", "packaging"),
    *("pluggy", "pycparser", "pydantic", "pydantic-core", "pygments", "pytest", "python-dateutil"),
    *("rfc8785", "rich", "shellingham", "sortedcontainers", "sqlite-fts4", "sqlite-utils"),
    *("tabulate", "truststore", "typer", "typing-extensions", "typing-inspection", "tzdata"),
    "zstandard",
)
"""The other dependencies of the extra ``engine``, pytest and hypothesis."""
_GLIBC_MINORS = (5, 12, 17, 24, 26, 27, 28, 31, 34, 35)
_PLATFORMS = (
    *("manylinux1_x86_64", "manylinux2010_x86_64", "manylinux2014_x86_64"),
    *(f"manylinux_2_{minor}_x86_64" for minor in _GLIBC_MINORS),
)
"""Platform tags in pip's order of preference; pip does not add older ones."""


class PackagesError(Exception):
    """Packages could not be downloaded or installed; the message says why."""


def download_packages(folder: Path) -> list[Path]:
    """Download the wheels of `CARRIED` into a folder, in the versions of ``constraints.txt``.

    Existing wheels in the folder are deleted: two versions could not be installed together.

    Raises:
        PackagesError: when pip fails, or when the wheels are larger than `MAX_BYTES`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for wheel in folder.glob("*.whl"):
        wheel.unlink()
    command = [
        *("download", "--quiet", "--no-deps", "--only-binary=:all:", "--implementation", "cp"),
        *("--python-version", PYTHON_VERSION, "--dest", str(folder)),
        *("--constraint", str(ROOT / "constraints.txt")),
    ]
    for platform in _PLATFORMS:
        command += ["--platform", platform]
    _run_pip([*command, *CARRIED])
    wheels = list_wheels(folder)
    if (size := sum(wheel.stat().st_size for wheel in wheels)) > MAX_BYTES:
        raise PackagesError(f"{folder}: {size / 2**20:.0f} MiB, more than {MAX_BYTES >> 20} MiB")
    return wheels


def list_wheels(folder: Path) -> list[Path]:
    """Return the wheels of a folder, sorted.

    Raises:
        PackagesError: when there is none.
    """
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        raise PackagesError(f"{folder}: no wheels; make them with scripts/gpu_check --prepare")
    return wheels


def create_environment(packages: Path, folder: Path) -> Path:
    """Create a virtual environment with the wheels of a folder; return its interpreter.

    The packages of the running interpreter stay importable, after those of the wheels, even if it
    belongs to a virtual environment itself. The environment has no pip: that of the running
    interpreter installs the wheels.

    Raises:
        PackagesError: when pip fails.
    """
    wheels = list_wheels(packages)
    shutil.rmtree(folder, ignore_errors=True)
    venv.EnvBuilder(with_pip=False, symlinks=True).create(folder)
    paths = {"base": str(folder), "platbase": str(folder)}
    site = Path(sysconfig.get_path("purelib", "venv", vars=paths))
    lines = "".join(f"{path}\n" for path in _list_outer_sites())
    (site / "outer.pth").write_text(lines, encoding="utf-8")
    install = ("install", "--quiet", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir")
    _run_pip([*install, "--target", str(site), *map(str, wheels)])
    return Path(sysconfig.get_path("scripts", "venv", vars=paths)) / "python"


def _list_outer_sites() -> list[str]:
    """Return the folders of installed packages of the running interpreter, in their order."""
    return [path for path in sys.path if Path(path).name in {"site-packages", "dist-packages"}]


def _run_pip(arguments: Sequence[str]) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise PackagesError(f"pip {arguments[0]} failed:\n{(done.stdout + done.stderr).strip()}")
