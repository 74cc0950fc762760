"""Compiled code is kept where nobody else can write, is made once, and damage to it is no harm."""

import builtins
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock, Timeout

from expertctl.engine.kernels import jit as module
from expertctl.engine.kernels import machine_code
from expertctl.engine.kernels.compiled import compiler
from expertctl.engine.kernels.jit import (
    COMPILING,
    COMPILING_MORE,
    COMPILING_WITHOUT_CACHE,
    load_functions,
    use_kernel_cache,
)
from expertctl.engine.kernels.machine_code import CompiledFunction
from expertctl.engine.kernels.packed_format import PACKED_SCHEMES
from expertctl.errors import IncompatibleError, KernelsUnavailableError, format_install_command
from expertctl.settings import Home

ROOT = Path(__file__).parents[3]
COMPILE = compiler.compile_function


def triple(number: int) -> int:  # pragma: no cover (compiled)
    return 3 * number


def make_multiple(factor: int) -> Callable[[int], int]:
    def multiply(number: int) -> int:  # pragma: no cover (compiled)
        return factor * number

    return multiply


def load_function(
    name: str, module: str, function: str, *, arity: int, **parameters: object
) -> CompiledFunction:
    [loaded] = load_functions(
        {name: machine_code.FunctionSource(module, function, arity, parameters)}
    )
    return loaded


def load_triple(name: str = "triple") -> Callable[..., int]:
    return load_function(name, __name__, "triple", arity=1).call


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[Callable[..., object]]:
    """The functions that are compiled, in their order."""
    found: list[Callable[..., object]] = []

    def compile_function(function: Callable[..., object], *, arity: int) -> bytes:
        found.append(function)
        return COMPILE(function, arity=arity)

    monkeypatch.setattr(compiler, "compile_function", compile_function)
    return found


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


def files(home: Home) -> list[Path]:
    """The files with code that are kept."""
    return sorted(home.kernels.rglob("*.code"))


def test_code_is_compiled_once_for_all_processes_and_a_person_is_told_that_once(
    place: Home, new_process: Callable[[], None], compilations: list[Callable[..., object]]
) -> None:
    told: list[str] = []
    assert use_kernel_cache(place, notify=told.append) is not None
    assert load_triple()(14) == load_triple("triple again")(14) == 42
    assert told == [COMPILING]
    assert compilations == [triple, triple]
    new_process()
    use_kernel_cache(place, notify=told.append)
    assert load_triple()(14) == 42
    assert told == [COMPILING]
    assert load_triple("another")(14) == 42
    assert told == [COMPILING, COMPILING_MORE]
    assert compilations == [triple] * 3


def test_a_check_that_raises_ends_compiling_before_the_next_kernel(place: Home) -> None:
    class StoppedError(Exception):
        pass

    def check(done: int, total: int) -> None:
        if done < total and files(place):
            raise StoppedError

    use_kernel_cache(place, progress=check)
    assert load_triple()(14) == 42
    with pytest.raises(StoppedError):
        load_triple("another")
    use_kernel_cache(place)
    assert load_triple("another")(14) == 42


def test_progress_counts_the_functions_that_are_compiled(place: Home) -> None:
    seen: list[tuple[int, int]] = []
    use_kernel_cache(place, progress=lambda *counts: seen.append(counts))
    names = ("one", "two", "three")
    wanted = dict.fromkeys(names, machine_code.FunctionSource(__name__, "triple", 1, {}))
    load_functions(wanted)
    counted = [counts for counts in seen if counts[1]]
    assert (counted[0], counted[-1]) == ((0, 3), (3, 3))
    assert {total for _, total in counted} == {3}
    assert [done for done, _ in counted] == sorted(done for done, _ in counted)
    seen.clear()
    load_functions(wanted)
    assert set(seen) == {(0, 0)}, "nothing is compiled again"


def test_nobody_is_told_before_something_is_compiled(place: Home) -> None:
    told: list[str] = []
    use_kernel_cache(place, notify=told.append)
    assert told == []


def test_without_a_home_code_is_compiled_and_not_kept(
    new_process: Callable[[], None], tmp_path: Path
) -> None:
    assert load_triple()(2) == 6
    assert list(tmp_path.iterdir()) == []


def test_the_folders_are_for_their_owner_alone_whatever_the_umask(place: Home) -> None:
    before = os.umask(0)
    try:
        folder = use_kernel_cache(place)
        load_triple()
    finally:
        os.umask(before)
    assert folder is not None
    assert [each.stat().st_mode & 0o777 for each in (place.kernels, folder)] == [0o700, 0o700]
    assert [each.stat().st_mode & 0o777 for each in files(place)] == [0o600]


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
    assert load_triple()(5) == 15
    assert load_triple()(6) == 18
    assert told == [COMPILING_WITHOUT_CACHE]
    assert files(place) == []


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


def test_code_that_another_user_planted_is_not_loaded(
    place: Home, new_process: Callable[[], None]
) -> None:
    folder = use_kernel_cache(place)
    assert folder is not None
    module._write_code(folder, "triple", COMPILE(make_multiple(7), arity=1))
    new_process()
    place.kernels.chmod(0o777)
    use_kernel_cache(place)
    assert load_triple()(2) == 6
    place.kernels.chmod(0o700)
    use_kernel_cache(place)
    assert load_triple()(2) == 14  # so the test would have seen it


def flip_last_bit(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: bytes(len(data)),
        lambda data: data[: len(data) // 2],
        lambda data: data[:32],
        lambda data: data + b"\0",
        flip_last_bit,
    ],
    ids=["empty", "zeros", "cut", "digest alone", "longer", "one bit"],
)
def test_files_that_a_power_cut_damaged_are_made_again(
    place: Home,
    new_process: Callable[[], None],
    compilations: list[Callable[..., object]],
    damage: Callable[[bytes], bytes],
) -> None:
    use_kernel_cache(place)
    load_triple()
    [path] = files(place)
    path.write_bytes(damage(path.read_bytes()))
    for compiled in (2, 2):
        new_process()
        use_kernel_cache(place)
        assert load_triple()(3) == 9
        assert len(compilations) == compiled


def test_code_under_the_name_of_another_function_is_not_loaded(
    place: Home, new_process: Callable[[], None]
) -> None:
    use_kernel_cache(place)
    load_function("seven times", __name__, "make_multiple", arity=1, factor=7)
    [path] = files(place)
    path.rename(path.with_stem("triple"))
    new_process()
    use_kernel_cache(place)
    assert load_triple()(3) == 9


def test_a_function_of_parameters_is_compiled_as_it_is_for_them(place: Home) -> None:
    use_kernel_cache(place)
    found = [
        load_function(f"{factor} times", __name__, "make_multiple", arity=1, factor=factor)
        for factor in (5, -7)
    ]
    assert [function.call(6) for function in found] == [30, -42]


MULTIPLY = """
import sys
import numpy as np
from pathlib import Path
from expertctl.engine.kernels.jit import use_kernel_cache
from expertctl.engine.kernels.packed_matrix import pack_matrix
from expertctl.engine.kernels.packed_format import PACKED_SCHEMES, Scheme
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
    schemes = [scheme.value for scheme in PACKED_SCHEMES]

    def multiply(*some: str) -> str:
        words = [sys.executable, "-c", MULTIPLY, str(tmp_path / "home"), *some]
        return subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True).stdout

    for scheme in schemes:
        assert multiply(scheme) == "1\n"
    assert multiply(*schemes) == multiply(*reversed(schemes)) == "0\n"


def test_one_process_at_a_time_compiles_and_another_loads_what_it_made(
    place: Home, monkeypatch: pytest.MonkeyPatch, new_process: Callable[[], None]
) -> None:
    folder = use_kernel_cache(place)
    assert folder is not None
    others = FileLock(folder.with_suffix(".lock"), timeout=0)
    refused: list[int] = []

    def compile_and_look(function: Callable[..., object], *, arity: int) -> bytes:
        with pytest.raises(Timeout):
            others.acquire()
        refused.append(arity)
        return COMPILE(function, arity=arity)

    monkeypatch.setattr(compiler, "compile_function", compile_and_look)
    assert load_triple("looked at")(2) == 6
    assert refused == [1]
    others.acquire()
    others.release()


def test_code_that_another_process_made_meanwhile_is_not_compiled_again(
    place: Home, monkeypatch: pytest.MonkeyPatch, compilations: list[Callable[..., object]]
) -> None:
    folder = use_kernel_cache(place)
    assert folder is not None
    acquire = FileLock.acquire

    def acquire_late(lock: FileLock, *words: Any, **options: Any) -> Any:
        module._write_code(folder, "triple", COMPILE(triple, arity=1))
        return acquire(lock, *words, **options)

    monkeypatch.setattr(FileLock, "acquire", acquire_late)
    assert load_triple()(2) == 6
    assert compilations == []


def test_nobody_waits_for_ever_for_a_process_that_stands_still(
    place: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LOCK_TIMEOUT", 0.0)
    folder = use_kernel_cache(place)
    assert folder is not None
    with FileLock(folder.with_suffix(".lock")):
        assert load_triple()(3) == 9
    assert folder.exists()
    assert files(place) == []


def test_a_folder_that_went_away_is_no_harm(place: Home) -> None:
    folder = use_kernel_cache(place)
    assert folder is not None
    folder.rmdir()
    place.kernels.rmdir()
    place.kernels.touch()
    assert load_triple()(3) == 9


@pytest.mark.parametrize(
    ("attribute", "value"),
    [
        ("_get_version", lambda name: "0.0"),
        ("SOURCES_DIGEST", "other"),
        ("identify_processor", lambda: "other"),
        ("_read_configuration", lambda: "opt: 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_whatever_code_depends_on_keeps_it_apart(
    place: Home, monkeypatch: pytest.MonkeyPatch, attribute: str, value: object
) -> None:
    before = use_kernel_cache(place)
    assert before == use_kernel_cache(place)
    monkeypatch.setattr(module, attribute, value)
    assert use_kernel_cache(place) not in (None, before)


def test_variables_and_the_file_that_configure_numba_keep_its_code_apart(
    place: Home, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    found = [use_kernel_cache(place)]
    monkeypatch.setenv("NUMBA_CPU_NAME", "haswell")
    found.append(use_kernel_cache(place))
    Path(".numba_config.yaml").write_text("cpu_name: haswell\n", encoding="utf-8")
    found.append(use_kernel_cache(place))
    assert len(set(found)) == 3


def test_without_numba_code_is_loaded_and_none_is_compiled(
    place: Home, new_process: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_kernel_cache(place)
    load_triple()
    real = builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        if name.split(".")[0] in {"numba", "llvmlite"}:
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real(name, *rest)

    new_process()
    for name in [each for each in sys.modules if each.startswith(compiler.__package__ or "")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", refuse)
    use_kernel_cache(place)
    assert load_triple()(2) == 6
    with pytest.raises(KernelsUnavailableError, match="No module named 'numba'") as caught:
        load_triple("another")
    assert caught.value.hint == format_install_command("engine")


def test_code_is_not_compiled_from_sources_that_were_replaced_since_the_start(
    place: Home, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "later.py").write_text("def double(number: int) -> int:\n    return 2 * number\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(machine_code, "_hash_sources", lambda: "other")
    use_kernel_cache(place)
    assert load_triple()(2) == 6  # its module was imported before
    with pytest.raises(IncompatibleError, match="changed") as caught:
        load_function("double", "later", "double", arity=1)
    assert "start" in caught.value.hint
    assert "later" not in sys.modules


def old_folder(home: Home, name: str, *, days: float) -> Path:
    """A folder of another version, last used so many days ago."""
    folder = home.kernels / name
    folder.mkdir(parents=True, mode=0o700)
    for path in (folder / "triple.code", folder):
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
        assert (folder / "triple.code").exists()
    assert outside.is_dir()
    use_kernel_cache(place)
    assert not used.exists()


def test_loading_kept_code_counts_as_using_it(
    place: Home,
    new_process: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    compilations: list[Callable[..., object]],
) -> None:
    folder = use_kernel_cache(place)
    assert folder is not None
    load_triple()
    for path in (*folder.iterdir(), folder):
        os.utime(path, (time.time() - 99 * 86_400,) * 2)
    new_process()
    use_kernel_cache(place)
    assert load_triple()(2) == 6
    assert compilations == [triple]
    monkeypatch.setattr(module, "_cache_key", lambda: "f" * 32)
    use_kernel_cache(place)
    assert folder.exists()
