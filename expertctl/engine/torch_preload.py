"""Torch's library, mapped by a thread while Python imports other modules.

Mapping it (moving pointers, registering operators) is a seventh of ``import torch`` and needs no
Python, but an import holds Python's lock all the time. A call by ctypes lets go of it. The loader
of the system has a lock too: a thread that maps another library meanwhile waits.
"""

import ctypes
import os
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from threading import Thread

LIBRARIES = {"libtorch_global_deps.so": "RTLD_GLOBAL", "libtorch_cpu.so": "RTLD_LOCAL"}
"""In the order and in the way in which torch maps them; they know nothing of Python."""
IMPORT_FIRST = (
    "cryptography.hazmat.bindings._rust",
    "mmap",
    "safetensors",
    "sqlite3",
    "tokenizers",
)
"""Modules with libraries of their own that a run imports before torch: later it would wait."""


def preload_torch() -> None:
    """Begin to map what ``import torch`` then finds mapped; do nothing unless it is as on Linux.

    Only when torch is certain to be imported next: until it is mapped, the process does not end.
    """
    paths = _find_libraries()
    if "torch" in sys.modules or not paths:
        return
    for module in IMPORT_FIRST:
        import_module(module)
    Thread(target=_map_libraries, args=(paths,), name="torch-library").start()


def _find_libraries() -> list[Path]:
    """Return where torch's libraries are; nothing where one of them is not."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return []
    paths = [Path(spec.origin).parent / "lib" / name for name in LIBRARIES]
    return paths if all(path.is_file() for path in paths) else []


def _map_libraries(paths: list[Path]) -> None:
    """Map them; what cannot be is left to ``import torch``, which says why."""
    dlopen = ctypes.CDLL(None).dlopen  # ctypes.CDLL itself would hold Python's lock
    dlopen.restype = ctypes.c_void_p
    for path in paths:
        dlopen(os.fsencode(path), os.RTLD_NOW | getattr(os, LIBRARIES[path.name]))
