"""Map torch's shared libraries in a thread while Python imports other modules.

Mapping them (relocating pointers, registering operators) is a seventh of ``import torch`` and needs
no Python, but an import holds the GIL throughout. A call through ctypes releases it. The system
loader has a lock too: a thread that maps another library meanwhile waits.
"""

import ctypes
import os
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from threading import Thread

LIBRARIES = {"libtorch_global_deps.so": "RTLD_GLOBAL", "libtorch_cpu.so": "RTLD_LOCAL"}
"""In torch's order and with its flags; these libraries do not use Python."""
IMPORT_FIRST = (
    "cryptography.hazmat.bindings._rust",
    "mmap",
    "safetensors",
    "sqlite3",
    "tokenizers",
)
"""Modules with shared libraries that a run imports before torch; later their import would wait."""


def preload_torch() -> None:
    """Start mapping the libraries that ``import torch`` needs; do nothing except on Linux layouts.

    Call it only when torch will certainly be imported: the process cannot exit before the mapping
    ends.
    """
    paths = _find_libraries()
    if "torch" in sys.modules or not paths:
        return
    for module in IMPORT_FIRST:
        import_module(module)
    Thread(target=_map_libraries, args=(paths,), name="torch-library").start()


def _find_libraries() -> list[Path]:
    """Return the paths of torch's libraries; an empty list where one is missing."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return []
    paths = [Path(spec.origin).parent / "lib" / name for name in LIBRARIES]
    return paths if all(path.is_file() for path in paths) else []


def _map_libraries(paths: list[Path]) -> None:
    """Map the libraries; failures are left to ``import torch``, which reports them."""
    dlopen = ctypes.CDLL(None).dlopen  # ctypes.CDLL itself would hold the GIL
    dlopen.restype = ctypes.c_void_p
    for path in paths:
        dlopen(os.fsencode(path), os.RTLD_NOW | getattr(os, LIBRARIES[path.name]))
