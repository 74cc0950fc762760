"""Compiled code is kept where nobody else can write, is made once, and damage to it is no harm."""

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numba
import pytest
from filelock import FileLock, Timeout
from numba import types

from expertctl.engine.kernels import jit as module
from expertctl.engine.kernels.jit import (
    COMPILING,
    COMPILING_MORE,
    COMPILING_WITHOUT_CACHE,
    load_or_compile,
    use_kernel_cache,
)
from expertctl.engine.kernels.packed_format import Scheme
from expertctl.messages import ignore_notification
from expertctl.settings import Home

ROOT = Path(__file__).parents[3]


def triple(number: int) -> int:
    return 3 * number


def compile_triple(cache: bool) -> Any:
    return numba.cfunc(types.int64(types.int64), cache=cache)(triple)


@pytest.fixture(autouse=True, scope="module")
def keeps_all_code() -> None:
    """Where code is kept is what is tested here."""


@pytest.fixture(autouse=True)
def keeps_code() -> None:
    """Where code is kept is what is tested here."""


@pytest.fixture
def new_process(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Forget where code is kept, as a process that begins has."""

    def forget() -> None:
        monkeypatch.setattr(module, "_CACHE", module._CacheState())

    forget()
    return forget


@pytest.fixture
def place(tmp_path: Path, new_process: Callable[[], None]) -> Home:
    return Home(tmp_path / "home")


def files(home: Home, suffix: str) -> list[Path]:
    return sorted(home.kernels.rglob(f"*{suffix}"))


def test_code_is_compiled_once_for_all_processes_and_a_person_is_told_that_once(
    place: Home, new_process: Callable[[], None]
) -> None:
    told: list[str] = []
    assert use_kernel_cache(place, notify=told.append) is not None
    assert load_or_compile("triple", compile_triple).cache_hits == 0
    assert load_or_compile("triple again", compile_triple).ctypes(14) == 42
    assert told == [COMPILING]
    new_process()
    use_kernel_cache(place, notify=told.append)
    assert load_or_compile("triple", compile_triple).cache_hits == 1
    assert told == [COMPILING]
    assert load_or_compile("another", compile_triple).ctypes(14) == 42
    assert told == [COMPILING, COMPILING_MORE]


def test_a_check_that_raises_ends_compiling_before_the_next_kernel(place: Home) -> None:
    class StoppedError(Exception):
        pass

    def check() -> None:
        if files(place, ".kept"):
            raise StoppedError

    use_kernel_cache(place, check=check)
    assert load_or_compile("triple", compile_triple).ctypes(14) == 42
    with pytest.raises(StoppedError):
        load_or_compile("another", compile_triple)
    use_kernel_cache(place)
    assert load_or_compile("another", compile_triple).ctypes(14) == 42


def test_nobody_is_told_before_something_is_compiled(place: Home) -> None:
    told: list[str] = []
    use_kernel_cache(place, notify=told.append)
    assert told == []


def test_without_a_home_code_is_compiled_and_not_kept(
    new_process: Callable[[], None], tmp_path: Path
) -> None:
    assert load_or_compile("triple", compile_triple).ctypes(2) == 6
    assert list(tmp_path.iterdir()) == []


def test_the_folders_are_for_their_owner_alone_whatever_the_umask(place: Home) -> None:
    before = os.umask(0)
    try:
        folder = use_kernel_cache(place)
        load_or_compile("triple", compile_triple)
    finally:
        os.umask(before)
    assert folder is not None
    assert [each.stat().st_mode & 0o777 for each in (place.kernels, folder)] == [0o700, 0o700]
    assert files(place, ".nbc")


def open_home(home: Home) -> None:
    home.root.chmod(0o770)


def open_kernels(home: Home) -> None:
    home.kernels.chmod(0o702)


def link_kernels(home: Home) -> None:
    home.kernels.rename(home.root / "elsewhere")
    home.kernels.symlink_to(home.root / "elsewhere")


def put_a_file_there(home: Home) -> None:
    home.kernels.rmdir()
    home.kernels.touch()


@pytest.mark.parametrize(
    "spoil", [open_home, open_kernels, link_kernels, put_a_file_there], ids=lambda f: f.__name__
)
def test_nothing_is_kept_where_others_may_write(spoil: Callable[[Home], None], place: Home) -> None:
    place.kernels.mkdir(parents=True, mode=0o700)
    spoil(place)
    told: list[str] = []
    assert use_kernel_cache(place, notify=told.append) is None
    assert load_or_compile("triple", compile_triple).ctypes(5) == 15
    assert load_or_compile("triple", compile_triple).ctypes(6) == 18
    assert told == [COMPILING_WITHOUT_CACHE]
    assert files(place, ".nbc") == []


def test_nothing_is_kept_in_the_home_of_another_user(
    place: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert use_kernel_cache(place) is not None
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    assert use_kernel_cache(place) is None


def test_a_home_behind_a_link_is_the_home(place: Home, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir(mode=0o755)
    place.root.symlink_to(tmp_path / "disk")
    assert use_kernel_cache(place) is not None


class Planted:
    """Leaves a trace when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Callable[..., None], tuple[Path]]:
        return Path.touch, (self.trace,)


def test_code_that_another_user_planted_is_not_loaded(
    place: Home, new_process: Callable[[], None], tmp_path: Path
) -> None:
    use_kernel_cache(place)
    load_or_compile("triple", compile_triple)
    trace = tmp_path / "trace"
    for index in files(place, ".nbi"):
        index.write_bytes(pickle.dumps(Planted(trace)))
    new_process()
    place.kernels.chmod(0o777)
    use_kernel_cache(place)
    assert load_or_compile("triple", compile_triple).ctypes(2) == 6
    assert not trace.exists()
    place.kernels.chmod(0o700)
    use_kernel_cache(place)
    load_or_compile("triple", compile_triple)
    assert trace.exists()  # so the test would have seen it


@pytest.mark.parametrize("suffix", [".nbi", ".nbc"])
@pytest.mark.parametrize(
    "content",
    [b"", bytes(100), b"\x80\x04\x95", b"garbage\n", b"cno_such_module\nname\n.", b"."],
    ids=["empty", "zeros", "cut", "garbage", "no module", "no stack"],
)
def test_files_that_a_power_cut_damaged_are_made_again(
    place: Home, new_process: Callable[[], None], suffix: str, content: bytes
) -> None:
    use_kernel_cache(place)
    load_or_compile("triple", compile_triple)
    for damaged in files(place, suffix):
        damaged.write_bytes(content)
    new_process()
    folder = use_kernel_cache(place)
    assert load_or_compile("triple", compile_triple).ctypes(3) == 9
    assert folder is not None
    assert not folder.exists()
    for hits in (0, 1):
        new_process()
        use_kernel_cache(place)
        assert load_or_compile("triple", compile_triple).cache_hits == hits


MULTIPLY = """
import sys
import numpy as np
from pathlib import Path
from expertctl.engine.kernels.jit import use_kernel_cache
from expertctl.engine.kernels.packed_matrix import pack_matrix
from expertctl.engine.kernels.packed_format import Scheme
from expertctl.settings import Home
from tests.engine.kernels.reference_gemm import multiply_exactly, run_gemm, make_random_numbers

told = []
assert use_kernel_cache(Home(Path(sys.argv[1])), notify=told.append)
for name in sys.argv[2:]:
    matrix = pack_matrix(make_random_numbers(1, 80, 256), Scheme(name))
    tokens = make_random_numbers(2, 7, 256)
    expected, reach = multiply_exactly(matrix, tokens)
    assert (np.abs(run_gemm(matrix, tokens) - expected) <= reach).all(), name
print(len(told))
"""


@pytest.mark.all
def test_code_that_different_processes_kept_calls_its_own(tmp_path: Path) -> None:
    """A helper of each has one name: what the first brings along is not for all."""
    schemes = [scheme.value for scheme in Scheme]

    def multiply(*some: str) -> str:
        words = [sys.executable, "-c", MULTIPLY, str(tmp_path / "home"), *some]
        return subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True).stdout

    for scheme in schemes:
        assert multiply(scheme) == "1\n"
    assert multiply(*schemes) == multiply(*reversed(schemes)) == "0\n"


def test_nothing_is_kept_where_numba_counts_otherwise(
    place: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert use_kernel_cache(place) is not None
    identity = SimpleNamespace(unique_id=1)
    counting = SimpleNamespace(from_function=lambda _: identity)
    monkeypatch.setattr(module, "FunctionIdentity", counting)
    assert load_or_compile("triple", compile_triple).ctypes(3) == 9
    assert files(place, ".nbc") == []


def test_one_process_at_a_time_compiles_for_numba_gives_two_the_same_file(place: Home) -> None:
    folder = use_kernel_cache(place)
    assert folder is not None
    others = FileLock(folder.with_suffix(".lock"), timeout=0)
    refused: list[bool] = []

    def compile_and_look(cache: bool) -> bool:
        with pytest.raises(Timeout):
            others.acquire()
        refused.append(cache)
        return cache

    assert load_or_compile("looked at", compile_and_look)
    assert refused == [True]
    others.acquire()
    others.release()


def test_nobody_waits_for_ever_for_a_process_that_stands_still(
    place: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LOCK_TIMEOUT", 0.0)
    folder = use_kernel_cache(place)
    assert folder is not None
    with FileLock(folder.with_suffix(".lock")):
        assert load_or_compile("triple", compile_triple).ctypes(3) == 9
    assert folder.exists()
    assert files(place, ".nbc") == []


def test_a_folder_that_went_away_is_no_harm(place: Home) -> None:
    folder = use_kernel_cache(place)
    assert folder is not None
    folder.rmdir()
    place.kernels.rmdir()
    place.kernels.touch()
    assert load_or_compile("triple", compile_triple).ctypes(3) == 9


def test_other_users_of_numba_in_this_process_keep_their_folder(
    place: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", "theirs")
    use_kernel_cache(place)
    load_or_compile("triple", compile_triple)
    assert numba.config.CACHE_DIR == "theirs"


def test_another_numba_keeps_its_code_apart(place: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    before = use_kernel_cache(place, notify=ignore_notification)
    monkeypatch.setattr(numba, "__version__", "0.0")
    assert use_kernel_cache(place) not in (None, before)


def old_folder(home: Home, name: str, *, days: float) -> Path:
    """A folder of another version, last used so many days ago."""
    folder = home.kernels / name
    folder.mkdir(parents=True, mode=0o700)
    for path in (folder / "triple.kept", folder):
        path.touch()
        os.utime(path, (time.time() - days * 86_400,) * 2)
    return folder


def test_code_of_other_versions_goes_when_nobody_has_used_it_for_a_month(place: Home) -> None:
    place.kernels.mkdir(parents=True, mode=0o700)
    gone, kept = (old_folder(place, c * 32, days=d) for c, d in (("a", 31), ("b", 29)))
    (gone.with_suffix(".lock")).touch(0o600)
    folder = use_kernel_cache(place)
    assert folder is not None
    assert sorted(place.kernels.iterdir()) == sorted([kept, folder])


def test_what_is_used_or_is_nothing_of_ours_stays(place: Home, tmp_path: Path) -> None:
    place.kernels.mkdir(parents=True, mode=0o700)
    names = ["a" * 32, "b" * 32, "c" * 31, "D" * 32, "notes"]
    used, open_to_others, *others = (old_folder(place, name, days=99) for name in names)
    open_to_others.chmod(0o770)
    outside = tmp_path / "outside"
    outside.mkdir()
    (place.kernels / ("e" * 32)).symlink_to(outside)
    with FileLock(used.with_suffix(".lock"), mode=0o600):
        use_kernel_cache(place)
    for folder in (used, open_to_others, *others):
        assert (folder / "triple.kept").exists()
    assert outside.is_dir()
    use_kernel_cache(place)
    assert not used.exists()


def test_loading_kept_code_counts_as_using_it(
    place: Home, new_process: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = use_kernel_cache(place)
    assert folder is not None
    load_or_compile("triple", compile_triple)
    for path in (*folder.iterdir(), folder):
        os.utime(path, (time.time() - 99 * 86_400,) * 2)
    new_process()
    use_kernel_cache(place)
    assert load_or_compile("triple", compile_triple).cache_hits == 1
    monkeypatch.setattr(module, "_cache_key", lambda: "f" * 32)
    use_kernel_cache(place)
    assert folder.exists()
