"""Where the Python code of compiled functions is, and how it is compiled in this process."""

import hashlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from expertctl.errors import IncompatibleError, KernelsUnavailableError

_COMPILER = "expertctl.engine.kernels.compiled.compiler"
"""Imported by name, because it imports numba and what numba compiles."""


@dataclass(frozen=True, slots=True)
class FunctionSource:
    """Where the Python code of a function of ``arity`` int64s is."""

    module: str
    function: str
    arity: int
    parameters: Mapping[str, object]
    """If there are any, ``function`` returns what is compiled for them."""


def compile_source(source: FunctionSource) -> bytes:
    """Compile a function for this machine, in this process.

    Raises:
        KernelsUnavailableError: when numba cannot be imported.
        IncompatibleError: when its sources have changed since the start.
    """
    is_imported = {_COMPILER, source.module} <= set(sys.modules)
    if not is_imported and _hash_sources() != SOURCES_DIGEST:
        raise IncompatibleError(
            "kernels must be compiled, and the installed version has changed meanwhile",
            hint="start the process again",
        )
    try:
        compiler = import_module(_COMPILER)
        function = getattr(import_module(source.module), source.function)
    except (ImportError, OSError) as error:  # OSError: a library cannot be loaded
        raise KernelsUnavailableError(
            f"kernels must be compiled for this machine, and numba cannot be imported: {error}",
            hint="pip install 'expertctl[engine]'",
        ) from error
    if source.parameters:
        function = function(**source.parameters)
    code: bytes = compiler.compile_function(function, arity=source.arity)
    return code


def _hash_sources() -> str:
    """Hash all that compiled code depends on: kernels, and the layout of arrays."""
    digest, folder = hashlib.sha256(), Path(__file__).parent
    for source in (*sorted(folder.rglob("*.py")), folder.parent / "arrays.py"):
        digest.update(hashlib.sha256(source.read_bytes()).digest())
    return digest.hexdigest()


SOURCES_DIGEST = _hash_sources()
"""Hashed at import, so that code is stored under the sources that it was compiled from."""
