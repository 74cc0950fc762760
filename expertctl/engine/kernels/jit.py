"""Kernels: compiled functions, and the cache of their machine code.

**Cache.** Code is compiled once per machine and source version; later processes load it as machine
code, without importing numba. So it is kept in folders that belong to this user and that no other
user can write; otherwise nothing is read or stored. A file starts with a digest of its name and
content: what a power cut or a full disk damaged is compiled again. The folder name covers
everything that the content depends on: the sources of all kernels, numba and its configuration,
llvmlite, Python and the processor. The cache state is global, because compiled code belongs to the
process.

**Kernel.** Compiled code that processes a range of an operation's items. It is called by address
with three int64: the first item, the end of the range and the address of its arguments. One worker
computes an item, always in the same order, so which worker it is never changes a result.
"""

import hashlib
import os
import re
import shutil
import stat
import sys
import threading
import time
from collections.abc import Generator, Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from filelock import FileLock, Timeout

from expertctl.engine.kernels.machine_code import (
    SOURCES_DIGEST,
    CompiledFunction,
    FunctionSource,
    compile_source,
    identify_processor,
    load_code,
)
from expertctl.errors import CountProgress, Notify, ignore_count, ignore_notification
from expertctl.files import make_folders, write_atomic
from expertctl.settings import Home

COMPILING = "compiling kernels for this machine; later runs load them from the cache"
COMPILING_MORE = "compiling more kernels, for a dtype, mode or kind of expert that is new here"
COMPILING_WITHOUT_CACHE = "compiling kernels, not cached: other users can write to the home"

_SUFFIX = ".code"
_LOCK_TIMEOUT = 60.0
"""Seconds to wait for another process that compiles code for the same folder."""
_LOCK_POLL = 1.0
"""Seconds between two looks whether waiting goes on."""
_UNUSED_DAYS = 30
"""Days without use after which the code of another version is removed."""
_NAME = re.compile(r"[0-9a-f]{32}")
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_DIGEST_BYTES = hashlib.sha256().digest_size


@dataclass(slots=True)
class _CacheState:
    """The cache folder of this process, its callbacks, and whether `notify` was called."""

    folder: Path | None = None
    notify: Notify = ignore_notification
    notified: bool = True
    progress: CountProgress = ignore_count


_CACHE = _CacheState()
_LOCK = threading.RLock()


def has_stored_code(home: Home) -> bool:
    """Return whether code is stored below a home, whatever it was compiled from."""
    return any(home.kernels.glob(f"*/*{_SUFFIX}"))


def use_kernel_cache(
    home: Home, *, notify: Notify = ignore_notification, progress: CountProgress = ignore_count
) -> Path | None:
    """Cache compiled code below a home from now on; return the folder, or None if it is not safe.

    ``notify`` is called once with a sentence when something must be compiled. ``progress``
    is called with the numbers of functions compiled and to compile, and with zeros before each that
    is loaded; its exceptions propagate.
    """
    with _LOCK:
        folder = _CACHE.folder = _prepare_folder(home)
        _CACHE.notify, _CACHE.notified, _CACHE.progress = notify, False, progress
        if folder is not None:
            _remove_stale_folders(folder)
        return folder


class Kernel:
    """Compiled code, which is loaded when it is first needed and then lives as long as this."""

    def __init__(self, name: str, source: FunctionSource) -> None:
        """Load nothing yet."""
        self.name, self.source = name, source
        self.code: CompiledFunction | None = None

    @property
    def address(self) -> int:
        """The address of the code; errors as `load_functions`."""
        return self._require_code().address

    def __call__(self, first: int, last: int, arguments: int) -> None:
        """Process some items now, on this thread, without the interpreter's lock."""
        self._require_code().call(first, last, arguments)

    def _require_code(self) -> CompiledFunction:
        if self.code is None:
            [self.code] = load_functions({self.name: self.source})
        return self.code


def load_kernel(name: str, module: str, function: str, **parameters: object) -> Kernel:
    """Return a kernel that is loaded or compiled when it is needed; see `load_functions`."""
    return Kernel(name, FunctionSource(module, function, 3, parameters))


def load_kernels(kernels: Iterable[Kernel]) -> None:
    """Load several kernels; missing ones are compiled at the same time.

    Raises as `load_functions` does.
    """
    wanted = {kernel.name: kernel for kernel in kernels if kernel.code is None}
    loaded = load_functions({name: kernel.source for name, kernel in wanted.items()})
    for kernel, code in zip(wanted.values(), loaded, strict=True):
        kernel.code = code


def load_functions(sources: Mapping[str, FunctionSource]) -> list[CompiledFunction]:
    """Return functions by their names, in order; missing ones are compiled at the same time.

    The name identifies the code: two functions that differ must have different names. The modules
    of the sources are imported only to compile.

    Raises:
        KernelsUnavailableError: when one must be compiled and numba cannot be imported.
        IncompatibleError: when one must be compiled and its sources have changed since the start.
    """
    if not sources:  # what is loaded needs no lock, which is held while others are compiled
        return []
    with _LOCK:
        codes = _find_or_compile(sources)
        return [load_code(codes[name], arity=source.arity) for name, source in sources.items()]


def compile_missing(sources: Mapping[str, FunctionSource]) -> None:
    """Compile functions that are needed soon, all at the same time, if they are not stored.

    Raises as `load_functions` does.
    """
    with _LOCK:
        folder = _CACHE.folder
        if folder is None:  # then they are compiled when they are needed
            return
        missing = {n: s for n, s in sources.items() if not (folder / f"{n}{_SUFFIX}").exists()}
        if missing:
            _find_or_compile(missing)


def _find_or_compile(sources: Mapping[str, FunctionSource]) -> dict[str, bytes]:
    """Return the machine code of functions; several processes may do so at once."""
    folder = _CACHE.folder
    if folder is None:
        _notify_once(COMPILING_WITHOUT_CACHE)
        return dict(_compile(sources))
    found = _read_all(folder, sources)
    missing = {name: source for name, source in sources.items() if name not in found}
    if not missing:
        return found
    _notify_once(COMPILING_MORE if any(folder.glob(f"*{_SUFFIX}")) else COMPILING)
    lock = FileLock(folder.with_suffix(".lock"), mode=0o600)
    is_held = _acquire(lock)
    try:
        found |= _read_all(folder, missing)  # another process may have compiled them meanwhile
        left = {n: s for n, s in missing.items() if n not in found}
        with closing(_compile(left)) as compiled:  # whatever interrupts this ends the workers
            for name, code in compiled:
                if is_held:
                    _write_code(folder, name, code)
                found[name] = code
        return found
    finally:
        if is_held:
            lock.release()


def _acquire(lock: FileLock) -> bool:
    """Wait for the lock of a folder; False if a hung process holds it, or the folder is gone."""
    deadline = time.monotonic() + _LOCK_TIMEOUT
    while True:
        left = deadline - time.monotonic()
        try:
            lock.acquire(timeout=max(0.0, min(_LOCK_POLL, left)))
        except Timeout:
            if left <= 0:
                return False
            _CACHE.progress(0, 0)
        except OSError:
            return False
        else:
            return True


def _read_all(folder: Path, names: Iterable[str]) -> dict[str, bytes]:
    """Return the code that is stored, by name."""
    found = dict[str, bytes]()
    for name in names:
        _CACHE.progress(0, 0)
        if (stored := _read_code(folder, name)) is not None:
            found[name] = stored
    return found


def _compile(sources: Mapping[str, FunctionSource]) -> Generator[tuple[str, bytes]]:
    """Yield the name and the code of functions as they are compiled, on all usable cores."""
    from expertctl.engine.kernels.compile_workers import choose_worker_count, compile_in_workers

    left, total = dict(sources), len(sources)
    _CACHE.progress(0, total)
    with closing(compile_in_workers(sources, workers=choose_worker_count(total))) as compiled:
        for name, code in compiled:
            del left[name]
            _CACHE.progress(total - len(left), total)
            yield name, code
    for done, (name, source) in enumerate(left.items(), start=total - len(left)):
        _CACHE.progress(done, total)
        yield name, compile_source(source)
    if left:
        _CACHE.progress(total, total)


def _read_code(folder: Path, name: str) -> bytes | None:
    """Return stored code, or None if there is none or it is damaged."""
    try:
        data = (folder / f"{name}{_SUFFIX}").read_bytes()
    except OSError:
        return None
    code = data[_DIGEST_BYTES:]
    return code if data[:_DIGEST_BYTES] == _seal(name, code) else None


def _write_code(folder: Path, name: str, code: bytes) -> None:
    """Store code; where the disk is full, the next process compiles it again."""
    with suppress(OSError):
        write_atomic(folder / f"{name}{_SUFFIX}", _seal(name, code) + code, mode=0o600)


def _seal(name: str, code: bytes) -> bytes:
    return hashlib.sha256(name.encode() + b"\0" + code).digest()


def _notify_once(sentence: str) -> None:
    if not _CACHE.notified:
        _CACHE.notified = True
        _CACHE.notify(sentence)


def _prepare_folder(home: Home) -> Path | None:
    """Return the folder of these sources, created if necessary, if it is safe to use."""
    if not hasattr(os, "geteuid"):  # pragma: no cover - who may write a folder is not known there
        return None
    folder = home.kernels / _cache_key()
    try:
        make_folders(folder, mode=0o700)
        above = (home.root.resolve(), home.kernels, folder)
        if not all(_is_private(each) for each in above):
            return None
    except OSError:
        return None
    with suppress(OSError):  # where nothing can be written, code may be read all the same
        os.utime(folder)
    return folder


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
    """Return the time of the last use of a folder, or of the last file in it."""
    return max(path.lstat().st_mtime for path in (folder, *folder.iterdir()))


def _is_private(folder: Path) -> bool:
    """Return whether only this user can put files there; the target of a link may change."""
    found = folder.lstat()
    is_folder = stat.S_ISDIR(found.st_mode)
    return is_folder and found.st_uid == os.geteuid() and not found.st_mode & _WRITABLE_BY_OTHERS


def _cache_key() -> str:
    """Return the name of the folder: a digest of everything that machine code depends on."""
    parts = (
        SOURCES_DIGEST,
        *(f"{name} {_get_version(name)}" for name in ("numba", "llvmlite")),
        *(
            f"{name}={value}"
            for name, value in sorted(os.environ.items())
            if name.startswith("NUMBA_")
        ),
        _read_configuration(),
        sys.version,
        identify_processor(),
    )
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _get_version(distribution: str) -> str:
    """Return the version of an installed library, without importing it, or nothing."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


def _read_configuration() -> str:
    """Return the file in the working directory that numba reads its configuration from."""
    try:
        return Path(".numba_config.yaml").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
