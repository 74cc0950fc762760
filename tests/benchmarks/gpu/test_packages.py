"""What is carried to a GPU machine without a network, and the environment made of it."""

import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from benchmarks.gpu import packages
from benchmarks.gpu.packages import (
    CARRIED,
    PROVIDED,
    PackagesError,
    create_environment,
    download_packages,
)

NEEDED = ("expertctl[engine]", "pytest", "hypothesis")


def iterate_requirements(names: Sequence[str]) -> Iterator[str]:
    """What distributions need on the GPU machine, by name, without what it provides."""
    left, seen = [Requirement(name) for name in names], set[tuple[str, str]]()
    while left:
        wanted = left.pop()
        name = wanted.name.lower().replace("_", "-")
        for extra in {"", *wanted.extras}:
            if name in PROVIDED or (name, extra) in seen:
                continue
            seen.add((name, extra))
            there = {"extra": extra, "python_version": packages.PYTHON_VERSION}
            for line in metadata.requires(name) or []:
                each = Requirement(line)
                if each.marker is None or each.marker.evaluate(there):
                    left.append(each)
            yield name


def make_wheel(folder: Path, name: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path, info = folder / f"{name}-1.0-py3-none-any.whl", f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}.py", "VALUE = 3\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return path


def test_all_that_engine_and_tests_need_is_carried_and_nothing_else() -> None:
    assert set(CARRIED) == set(iterate_requirements(NEEDED)) - {"expertctl"}
    assert list(CARRIED) == sorted(CARRIED)


def test_an_environment_has_the_wheels_and_the_packages_of_who_made_it(tmp_path: Path) -> None:
    make_wheel(tmp_path / "wheels", "carried_along")
    python = create_environment(tmp_path / "wheels", tmp_path / "environment")
    code = (
        "import carried_along, sys, torch; print(carried_along.VALUE, sys.prefix, torch.__name__)"
    )
    done = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["3", str(tmp_path / "environment"), "torch"]


def test_a_folder_without_wheels_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PackagesError, match="--prepare"):
        create_environment(tmp_path, tmp_path / "environment")


def test_what_pip_says_of_a_bad_wheel_is_passed_on(tmp_path: Path) -> None:
    (tmp_path / "bad-1.0-py3-none-any.whl").write_bytes(b"no archive")
    with pytest.raises(PackagesError, match=r"pip install failed:\n.*"):
        create_environment(tmp_path, tmp_path / "environment")


def test_old_wheels_are_deleted_and_too_many_bytes_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_wheel(tmp_path, "old")
    asked: list[str] = []

    def download(arguments: Sequence[str]) -> None:
        asked.extend(arguments)
        make_wheel(tmp_path, "new")

    monkeypatch.setattr(packages, "_run_pip", download)
    assert [path.name for path in download_packages(tmp_path)] == ["new-1.0-py3-none-any.whl"]
    assert set(CARRIED) < set(asked)
    monkeypatch.setattr(packages, "MAX_BYTES", 10)
    with pytest.raises(PackagesError, match="more than 0 MiB"):
        download_packages(tmp_path)


def test_the_interpreter_that_checks_imports_nothing_that_must_be_installed() -> None:
    code = (
        "import benchmarks.gpu.check, sys; print(*{name.partition('.')[0] for name in sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], check=True, capture_output=True, text=True,
        cwd=packages.ROOT,
    )  # fmt: skip
    assert set(done.stdout.split()) - sys.stdlib_module_names - {"benchmarks", "__main__"} == set()
