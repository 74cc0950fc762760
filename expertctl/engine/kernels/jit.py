"""Compiling kernels: CPU features, the on-disk cache of compiled code, kernels and programs.

**Cache.** Code is compiled once per machine and source version, then loaded. numba loads it with
pickle, as executable code, so it is kept in folders that belong to this user and that no other user
can write; otherwise nothing is read or stored. The folder name covers everything that the content
depends on: the sources of all kernels (numba checks one file only), numba, llvmlite, Python and the
processor. The cache state is global, because compiled code belongs to the process.

**Kernel.** Compiled code that processes a range of an operation's items. It is called by address
with three int64: the first item, the end of the range and the address of its arguments. One worker
computes an item, always in the same order, so which worker it is never changes a result.

**Program.** A list of operations on preallocated memory: the execution plan of one base, one
adapter plan and one batch size. Running it allocates nothing; runs differ only in the contents of
its inputs.
"""

import hashlib
import itertools
import os
import pickle
import platform
import re
import secrets
import shutil
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import llvmlite
import numba
import numpy as np
from filelock import FileLock
from llvmlite import binding
from numba import types
from numba.core.bytecode import FunctionIdentity
from numba.core.caching import FunctionCache
from numba.core.ccallback import CFunc
from numba.core.codegen import get_host_cpu_features
from numba.core.sigutils import normalize_signature

from expertctl.engine.arrays import AnyArray
from expertctl.files import make_folders
from expertctl.messages import Notify, ignore_notification
from expertctl.settings import Home


@dataclass(frozen=True, slots=True)
class CpuFeatures:
    """The instruction sets and register width of a processor, as far as kernels depend on them.

    All other code uses generic vectors of sixteen lanes, which LLVM lowers to the available
    instructions.
    """

    name: str
    bf16_dot: bool
    """``vdpbf16ps``: thirty-two bfloat16 products summed to sixteen float32."""
    byte_dot: bool
    """``vpdpbusd``: sixty-four byte products summed to sixteen int32."""
    short_dot: bool
    """``vpmaddwd``: sixteen int16 products summed to eight int32, and the same for bytes."""
    has_512_bit_registers: bool
    """Thirty-two registers of 64 bytes."""
    has_float16: bool
    """Conversion between float32 and float16."""

    def without_dot_instructions(self) -> "CpuFeatures":
        """Return these features without the dot-product instructions."""
        return replace(self, bf16_dot=False, byte_dot=False, short_dot=False)


@cache
def get_host_cpu() -> CpuFeatures:
    """Return the processor that numba compiles for: this machine's, or the configured one."""
    features = get_compiled_features()
    wide = {"avx512f", "avx512bw", "avx512vl"} <= features
    return CpuFeatures(
        name=numba.config.CPU_NAME or binding.get_host_cpu_name(),
        bf16_dot=wide and "avx512bf16" in features,
        byte_dot=wide and "avx512vnni" in features,
        short_dot="avx2" in features,
        has_512_bit_registers=wide,
        has_float16=_supports_float16(features, platform.machine().lower()),
    )


def get_compiled_features() -> frozenset[str]:
    """Return the names of the CPU features that code is compiled for.

    If ``NUMBA_CPU_FEATURES`` is set, only the features that it names, whatever the processor.
    """
    features = numba.config.CPU_FEATURES
    listed = get_host_cpu_features() if features is None else features
    there: dict[str, bool] = {}
    for feature in filter(None, (each.strip() for each in listed.split(","))):
        there[feature.lstrip("+-")] = not feature.startswith("-")
    return frozenset(name for name, has in there.items() if has)


def _supports_float16(features: frozenset[str], machine: str) -> bool:
    """Return whether float16 is native: always on AArch64, elsewhere if the features include it.

    Where it is not, the conversion with integers gives the same results.
    """
    if machine in {"aarch64", "arm64"}:
        return True
    return "avx512f" in features or {"avx", "f16c"} <= features


def cpu_model_name() -> str:
    """Return the marketing name of the processor, if the system knows it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(iter(names), platform.processor() or sys.platform)


COMPILING = "compiling kernels for this machine; later runs load them from the cache"
COMPILING_MORE = "compiling kernels for another dtype or mode; later runs load them from the cache"
COMPILING_WITHOUT_CACHE = "compiling kernels, not cached: other users can write to the home"
COMPILING_WITH_UNKNOWN_NUMBA = "compiling kernels, not cached: this version of numba is unknown"

Code = TypeVar("Code")

_LOCK_TIMEOUT = 60.0
"""Seconds to wait for another process that compiles the same code."""
_NUMBER_BITS = 100
"""Bits of the random start of numba's function counter: no two processes collide."""
_UNUSED_DAYS = 30
"""Days without use after which the code of another version is removed."""
_NAME = re.compile(r"[0-9a-f]{32}")
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_CACHE_ERRORS = (
    OSError,
    RuntimeError,
    EOFError,
    pickle.UnpicklingError,
    ValueError,
    ImportError,
    AttributeError,
    LookupError,
    TypeError,
)
"""What numba and pickle raise for a corrupt file or a full disk."""


@dataclass(slots=True)
class _CacheState:
    """The cache folder of this process, its callbacks, and whether `notify` was called."""

    folder: Path | None = None
    notify: Notify = ignore_notification
    notified: bool = True
    check: Callable[[], None] | None = None


_CACHE = _CacheState()
_LOCK = threading.RLock()


def use_kernel_cache(
    home: Home, *, notify: Notify = ignore_notification, check: Callable[[], None] | None = None
) -> Path | None:
    """Cache compiled code below a home from now on; return the folder, or None if it is not safe.

    ``notify`` is called once with a sentence when something must be compiled. ``check`` is called
    before each kernel is compiled or loaded; its exceptions propagate.
    """
    with _LOCK:
        folder = _CACHE.folder = _prepare_folder(home)
        _CACHE.notify, _CACHE.notified, _CACHE.check = notify, False, check
        if folder is not None:
            _remove_stale_folders(folder)
        return folder


def load_or_compile(name: str, compile_code: Callable[[bool], Code]) -> Code:
    """Return the result of a compile function, loaded from the cache if possible.

    The function receives the value to pass to numba as ``cache`` and must declare every signature.
    """
    with _LOCK:
        if _CACHE.check is not None:
            _CACHE.check()
        folder, are_apart = _CACHE.folder, _number_functions_uniquely()
        if folder is None or not are_apart:
            _notify_once(COMPILING_WITH_UNKNOWN_NUMBA if folder else COMPILING_WITHOUT_CACHE)
            return compile_code(False)
        try:
            with FileLock(folder.with_suffix(".lock"), timeout=_LOCK_TIMEOUT, mode=0o600):
                return _load_or_compile_locked(name, compile_code, folder)
        except OSError:  # a hung process holds the lock, or the folder is gone
            return compile_code(False)


def _number_functions_uniquely() -> bool:
    """Start numba's function counter at a random number that no other process uses.

    numba tells functions of the same name apart by a counter that starts at one in each process,
    and loaded code calls the first function of a name and number (numba issue 10486). So a kernel
    that one process cached could call code that another cached, for another scheme. Return False if
    numba counts in another way, which no known version does: then nothing may be cached.
    """
    first = secrets.randbits(_NUMBER_BITS)
    FunctionIdentity._unique_ids = itertools.count(first)
    return bool(FunctionIdentity.from_function(_number_functions_uniquely).unique_id == first)


def _load_or_compile_locked(name: str, compile_code: Callable[[bool], Code], folder: Path) -> Code:
    """Load or compile and cache; requires the lock, because numba numbers its files without one."""
    mark = folder / f"{name}.kept"
    if not mark.exists():
        _notify_once(COMPILING_MORE if any(folder.glob("*.kept")) else COMPILING)
    try:
        with _numba_cache_folder(folder):
            code = compile_code(True)
        mark.touch(mode=0o600)
    except _CACHE_ERRORS:
        # A full disk, or a file truncated by a power cut: the next process starts afresh.
        shutil.rmtree(folder, ignore_errors=True)
        _CACHE.folder = None
        return compile_code(False)
    return code


def _notify_once(sentence: str) -> None:
    if not _CACHE.notified:
        _CACHE.notified = True
        _CACHE.notify(sentence)


@contextmanager
def _numba_cache_folder(folder: Path) -> Iterator[None]:
    """Point numba's cache to a folder, then restore the settings, which other libraries use too."""
    ours = {"CACHE_DIR": str(folder), "CACHE_LOCATOR_CLASSES": "UserProvidedCacheLocator"}
    before = {name: getattr(numba.config, name, "") for name in ours}
    vars(numba.config).update(ours)
    try:
        yield
    finally:
        vars(numba.config).update(before)


def _prepare_folder(home: Home) -> Path | None:
    """Return the folder of these sources, created if necessary, if it is safe to use."""
    if not hasattr(os, "geteuid"):  # pragma: no cover - who may write a folder is not known there
        return None
    folder = home.kernels / _cache_key()
    try:
        make_folders(folder, mode=0o700)
        above = (home.root.resolve(), home.kernels, folder)
        return folder if all(_is_private(each) for each in above) else None
    except OSError:
        return None


def _remove_stale_folders(current: Path) -> None:
    """Remove folders of other versions or processors that have not been used for a while."""
    oldest = time.time() - _UNUSED_DAYS * 86_400
    for folder in sorted(current.parent.iterdir()):
        if folder == current or not _NAME.fullmatch(folder.name):
            continue
        try:
            if _is_private(folder) and _last_use_time(folder) < oldest:
                with FileLock(folder.with_suffix(".lock"), timeout=0, mode=0o600):
                    shutil.rmtree(folder)
                folder.with_suffix(".lock").unlink(missing_ok=True)
        except OSError:
            continue  # another process uses it or removes it, or it cannot be removed


def _last_use_time(folder: Path) -> float:
    """Return the time of the last load or store in a folder; loading touches a marker file."""
    return max(path.lstat().st_mtime for path in (folder, *folder.iterdir()))


def _is_private(folder: Path) -> bool:
    """Return whether only this user can put files there; the target of a link may change."""
    found = folder.lstat()
    is_folder = stat.S_ISDIR(found.st_mode)
    return is_folder and found.st_uid == os.geteuid() and not found.st_mode & _WRITABLE_BY_OTHERS


def _cache_key() -> str:
    digest = _SOURCES.copy()
    features = sorted(get_compiled_features())
    versions = (
        numba.__version__,
        llvmlite.__version__,
        sys.version,
        get_host_cpu().name,
        *features,
    )
    digest.update("\n".join(versions).encode())
    return digest.hexdigest()[:32]


def _hash_sources() -> "hashlib._Hash":
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(hashlib.sha256(source.read_bytes()).digest())
    return digest


_SOURCES = _hash_sources()
"""Hashed at import: a process whose files are updated while it runs still compiles the old sources.
"""


KernelFunction = Callable[[int, int, int], None]

_SIGNATURE = types.void(types.int64, types.int64, types.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    """Compiled code, which lives as long as this object."""

    name: str
    address: int
    _code: Any

    def __call__(self, first: int, last: int, arguments: int) -> None:
        """Process some items now, on this thread, without the interpreter's lock."""
        self._code.ctypes(first, last, arguments)


def compile_kernel(name: str, function: KernelFunction) -> Kernel:
    """Compile a function, or load it from the cache.

    The name identifies the code: two kernels that differ must have different names.
    """
    code = load_or_compile(name, lambda cache: _compile_cfunc(name, function, cache=cache))
    return Kernel(name, code.address, code)


def _compile_cfunc(name: str, function: KernelFunction, *, cache: bool) -> Any:
    """Do the same as `numba.cfunc`, but look up cached code by the name of the kernel."""
    code: Any = CFunc(function, normalize_signature(_SIGNATURE), locals={}, options={})
    if cache:
        code._cache = _NamedFunctionCache(function, name)
    code.compile()
    return code


class _NamedFunctionCache(FunctionCache):
    """The cached code of one kernel.

    numba looks up a function by a hash of everything that it closes over. Functions and intrinsics
    in a closure have a random number in each process, so a kernel made of others would never be
    found. The folder already covers all sources.
    """

    def __init__(self, function: KernelFunction, name: str) -> None:
        super().__init__(function)
        self._name_of_kernel = name

    def _index_key(self, sig: Any, codegen: Any) -> tuple[Any, ...]:
        return sig, codegen.magic_tuple(), self._name_of_kernel


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """``table`` int64 [operations, 4]: kernel, arguments, address of the item count, minimum claim.

    The memory that its addresses point to lives as long as this object, so a thread pool takes the
    program, not the table.
    """

    table: AnyArray
    names: tuple[str, ...]
    """The kernel name of each operation, for telemetry."""
    places: tuple[str, ...]
    """The module that each operation belongs to."""
    _kept: tuple[object, ...]
    """The objects that the addresses in the table point into."""

    def slice_operations(self, begin: int, end: int) -> "Program":
        """Return a range of its operations as a program."""
        names, places = self.names[begin:end], self.places[begin:end]
        return Program(self.table[begin:end], names, places, self._kept)


class ProgramBuilder:
    """Collects operations and keeps their operands alive."""

    def __init__(self) -> None:
        """Start with no operations."""
        self._rows: list[tuple[int, int, int, int]] = []
        self._names: list[str] = []
        self._places: list[str] = []
        self._kept: list[object] = []
        self._place = ""

    def set_place(self, place: str) -> None:
        """Set the module that the following operations belong to."""
        self._place = place

    def add(
        self,
        kernel: Kernel,
        arguments: AnyArray,
        items: AnyArray | int,
        *,
        portion: int = 1,
        part: str = "",
    ) -> None:
        """Add an operation; ``items`` may be an int64 [1] that is read at each run.

        ``part`` names the operation within its module.
        """
        counted = np.array([items], np.int64) if isinstance(items, int) else items
        self._rows.append(
            (kernel.address, arguments.ctypes.data, counted.ctypes.data, max(portion, 1))
        )
        self._names.append(kernel.name)
        self._places.append(f"{self._place}.{part}" if part else self._place)
        self.keep_alive(kernel, arguments, counted)

    def keep_alive(self, *objects: object) -> None:
        """Keep objects that arguments point to alive as long as the program."""
        self._kept.extend(objects)

    def build(self) -> Program:
        """Return the program and start again with no operations."""
        table = np.array(self._rows, np.int64).reshape(len(self._rows), 4)
        built = Program(table, tuple(self._names), tuple(self._places), tuple(self._kept))
        self._rows, self._names, self._places, self._kept = [], [], [], []
        return built
