"""Compiled code on disk: made once for a machine and these sources, then only loaded.

What is kept is loaded as code, by numba with pickle. So it lies in folders that belong to this user
and that no other user may write; where that is not so, nothing is read or kept. A folder is named
after all that its content depends on: the sources of every kernel (numba looks at one file only),
numba, llvmlite, Python and the processor. Compiled code belongs to the process; so does this state.
"""

import hashlib
import itertools
import os
import pickle
import re
import secrets
import shutil
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import llvmlite
import numba
from filelock import FileLock
from numba.core.bytecode import FunctionIdentity

from expertctl.durable import make_folders
from expertctl.engine.kernels.cpu import compiled_features, host_cpu
from expertctl.settings import Home
from expertctl.telling import Tell, tell_nobody

COMPILING = "compiling kernels for this machine; later runs of this kind load them"
COMPILING_MORE = "compiling kernels for another dtype or way of running; later runs load them"
COMPILING_AGAIN = "compiling kernels; they are not kept: the home is not yours alone to write"
COMPILING_BY_ANOTHER = (
    "compiling kernels; they are not kept: this numba is newer than what is known"
)

Code = TypeVar("Code")

_PATIENCE = 60.0
"""Seconds to wait for another process that compiles the same."""
_NUMBER_BITS = 100
"""Bits of the number that functions are counted from: no two processes collide."""
_UNUSED_DAYS = 30
"""After so many days without use the code of another version is removed."""
_NAME = re.compile(r"[0-9a-f]{32}")
_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_DAMAGE = (
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
"""What numba and pickle raise for a file with other bytes than were kept, or for a full disk."""


@dataclass(slots=True)
class _Keeping:
    """Where this process keeps code, and whether `tell` was told that it takes a while."""

    folder: Path | None = None
    tell: Tell = tell_nobody
    told: bool = True
    check: Callable[[], None] | None = None


_KEEPING = _Keeping()
_LOCK = threading.RLock()


def compiled_cache(
    home: Home, *, tell: Tell = tell_nobody, check: Callable[[], None] | None = None
) -> Path | None:
    """Keep below a home what is compiled from now on; return where, None if it is not safe there.

    ``tell`` gets a sentence, once, when something has to be compiled. ``check`` is called before
    each kernel is compiled or loaded; what it raises is raised there.
    """
    with _LOCK:
        folder = _KEEPING.folder = _folder(home)
        _KEEPING.tell, _KEEPING.told, _KEEPING.check = tell, False, check
        if folder is not None:
            _remove_unused(folder)
        return folder


def compiled(name: str, compile_code: Callable[[bool], Code]) -> Code:
    """Return what a function compiles, loaded if it was kept.

    The function gets what it has to pass to numba as ``cache``, and must name every signature.
    """
    with _LOCK:
        if _KEEPING.check is not None:
            _KEEPING.check()
        folder, are_apart = _KEEPING.folder, _are_numbered_apart()
        if folder is None or not are_apart:
            _tell(COMPILING_AGAIN if folder is None else COMPILING_BY_ANOTHER)
            return compile_code(False)
        try:
            with FileLock(folder.with_suffix(".lock"), timeout=_PATIENCE, mode=0o600):
                return _kept(name, compile_code, folder)
        except OSError:  # a stuck process holds the lock, or the folder is gone
            return compile_code(False)


def _are_numbered_apart() -> bool:
    """Number the functions that are compiled from here on as no other process does.

    numba tells functions of one name apart by a count that begins at one in each process, and what
    is loaded calls the first function of a name and number (numba issue 10486). So a kernel that
    one process kept would call what another kept, for a scheme that is not its own. Where numba
    counts in another way, as no known version does, nothing may be kept: return False.
    """
    first = secrets.randbits(_NUMBER_BITS)
    FunctionIdentity._unique_ids = itertools.count(first)
    return bool(FunctionIdentity.from_function(_are_numbered_apart).unique_id == first)


def _kept(name: str, compile_code: Callable[[bool], Code], folder: Path) -> Code:
    """Load, or compile and keep; alone, for numba numbers its files as if no other process did."""
    mark = folder / f"{name}.kept"
    if not mark.exists():
        _tell(COMPILING_MORE if any(folder.glob("*.kept")) else COMPILING)
    try:
        with _numba_keeps_in(folder):
            code = compile_code(True)
        mark.touch(mode=0o600)
    except _DAMAGE:
        # A full disk, or a file that a power cut left empty: the next process starts anew.
        shutil.rmtree(folder, ignore_errors=True)
        _KEEPING.folder = None
        return compile_code(False)
    return code


def _tell(sentence: str) -> None:
    if not _KEEPING.told:
        _KEEPING.told = True
        _KEEPING.tell(sentence)


@contextmanager
def _numba_keeps_in(folder: Path) -> Iterator[None]:
    """Point numba there and nowhere else, then back: other libraries use it too."""
    ours = {"CACHE_DIR": str(folder), "CACHE_LOCATOR_CLASSES": "UserProvidedCacheLocator"}
    before = {name: getattr(numba.config, name, "") for name in ours}
    vars(numba.config).update(ours)
    try:
        yield
    finally:
        vars(numba.config).update(before)


def _folder(home: Home) -> Path | None:
    """Return the folder of these sources, made if need be, if it and those above are ours alone."""
    if not hasattr(os, "geteuid"):  # pragma: no cover - who may write a folder is not known there
        return None
    folder = home.kernels / _identity()
    try:
        make_folders(folder, mode=0o700)
        above = (home.root.resolve(), home.kernels, folder)
        return folder if all(_is_ours(each) for each in above) else None
    except OSError:
        return None


def _remove_unused(current: Path) -> None:
    """Remove folders of other versions, or other processors, that were not used for a while."""
    oldest = time.time() - _UNUSED_DAYS * 86_400
    for folder in sorted(current.parent.iterdir()):
        if folder == current or not _NAME.fullmatch(folder.name):
            continue
        try:
            if _is_ours(folder) and _last_used(folder) < oldest:
                with FileLock(folder.with_suffix(".lock"), timeout=0, mode=0o600):
                    shutil.rmtree(folder)
                folder.with_suffix(".lock").unlink(missing_ok=True)
        except OSError:
            continue  # another process uses it or removes it, or it cannot be removed


def _last_used(folder: Path) -> float:
    """Return when something of it was last loaded or kept; loading touches a mark."""
    return max(path.lstat().st_mtime for path in (folder, *folder.iterdir()))


def _is_ours(folder: Path) -> bool:
    """Tell whether only this user may put files there; a link may be changed later."""
    found = folder.lstat()
    is_folder = stat.S_ISDIR(found.st_mode)
    return is_folder and found.st_uid == os.geteuid() and not found.st_mode & _OTHERS


def _identity() -> str:
    digest = _SOURCES.copy()
    features = sorted(compiled_features())
    versions = (numba.__version__, llvmlite.__version__, sys.version, host_cpu().name, *features)
    digest.update("\n".join(versions).encode())
    return digest.hexdigest()[:32]


def _sources() -> "hashlib._Hash":
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(hashlib.sha256(source.read_bytes()).digest())
    return digest


_SOURCES = _sources()
"""As they are at import: a process whose files are updated while it runs still compiles these."""
