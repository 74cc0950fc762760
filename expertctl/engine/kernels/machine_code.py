"""Machine code: what it is compiled from, loading it, and the processor that it is for.

Code has one of two formats. An *image* is the bytes of all sections, as they lie in memory, after a
header that says which words hold addresses. It is loaded by copying it, without any library, and
becomes executable only when nothing can write to it any more. An *object file* is what LLVM wrote,
and LLVM links it. Images exist for Linux on x86-64; `compiled.compiler` makes both.

Loaded code stays until the process ends, because threads may be anywhere in it.
"""

import ctypes
import hashlib
import json
import mmap
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Self

from expertctl.errors import IncompatibleError, KernelsUnavailableError, format_install_command

_COMPILER = "expertctl.engine.kernels.compiled.compiler"
"""Imported by name, because it imports numba and what numba compiles."""
ENTRY_POINT = "entry"
"""The only symbol that an object file defines for others."""
_MAGIC, _LENGTH_BYTES = b"image\n", 4
_CPU_INFO = Path("/proc/cpuinfo")
_CPU_FIELDS = frozenset(
    {
        *("vendor_id", "cpu family", "model", "model name", "stepping", "flags"),
        *("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "Features"),
    }
)
"""What ``/proc/cpuinfo`` says of the kind of a processor, on x86 and on ARM."""


@dataclass(frozen=True, slots=True, eq=False)
class CompiledFunction:
    """Machine code that takes int64s.

    A call does not hold the interpreter's lock. It returns an int64, which means nothing if the
    compiled function returns nothing.
    """

    address: int
    """Address of the entry point."""
    call: Callable[..., int]
    """Calls it."""


@dataclass(frozen=True, slots=True)
class CodeImage:
    """Machine code as it lies in memory, from the beginning of a page; offsets are in bytes."""

    entry: int
    """Offset of the entry point."""
    addresses: Sequence[tuple[int, int]]
    """Offsets of words, and the offset in the image whose address each holds."""
    functions: Sequence[tuple[int, str]]
    """Offsets of words, and the function of the C library whose address each holds."""
    content: bytes

    def to_bytes(self) -> bytes:
        """Return the image in its format."""
        fields = asdict(self)
        del fields["content"]
        header = json.dumps(fields).encode()
        return _MAGIC + len(header).to_bytes(_LENGTH_BYTES, "little") + header + self.content

    @classmethod
    def from_bytes(cls, code: bytes) -> Self:
        """Return the image that `to_bytes` wrote."""
        start = len(_MAGIC) + _LENGTH_BYTES
        end = start + int.from_bytes(code[len(_MAGIC) : start], "little")
        return cls(**json.loads(code[start:end]), content=code[end:])


def load_code(code: bytes, *, arity: int) -> CompiledFunction:
    """Load code in either format whose entry point takes ``arity`` int64s.

    Raises:
        KernelsUnavailableError: when the system does not let this process run it.
    """
    is_image = code.startswith(_MAGIC)
    address = _map_image(CodeImage.from_bytes(code)) if is_image else _link_object(code)
    kind = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * arity)
    return CompiledFunction(address, kind(address))


def _map_image(image: CodeImage) -> int:
    """Copy an image into memory; return the address of its entry point."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    library.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    size, kind = len(image.content), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    start = library.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, kind, -1, 0)
    if start == ctypes.c_void_p(-1).value:
        raise _make_refusal()
    ctypes.memmove(start, image.content, size)
    for offset, target in image.addresses:
        ctypes.c_uint64.from_address(start + offset).value = start + target
    for offset, name in image.functions:
        ctypes.c_uint64.from_address(start + offset).value = find_library_function(name)
    if library.mprotect(start, size, mmap.PROT_READ | mmap.PROT_EXEC) != 0:
        raise _make_refusal()
    return int(start) + image.entry


def _make_refusal() -> KernelsUnavailableError:
    reason = os.strerror(ctypes.get_errno())
    return KernelsUnavailableError(
        f"this process may not run compiled kernels: {reason}",
        hint="allow the process to make memory executable",
    )


def find_library_function(name: str) -> int:
    """Return the address of a function of the C library.

    Raises:
        KernelsUnavailableError: when the process does not have it.
    """
    try:
        function = getattr(ctypes.CDLL(None), name)
    except AttributeError as error:
        raise KernelsUnavailableError(
            f"compiled kernels need {name}, which this C library does not have",
            hint="use another EXPERT_HOME for this machine",
        ) from error
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address


_ENGINES: list[Any] = []
"""What keeps linked object files in memory."""


def _link_object(code: bytes) -> int:
    """Link an object file with LLVM; return the address of its entry point."""
    binding = _import_llvm()
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_default_triple().create_target_machine(jit=True)
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), machine)
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _ENGINES.append(engine)
    return int(engine.get_function_address(ENTRY_POINT))


def identify_processor() -> str:
    """Return a text that is the same on processors for which compiled code is the same.

    Raises:
        KernelsUnavailableError: when only llvmlite could say it, and cannot be imported.
    """
    found = [platform.machine(), *(f"{k}: {v}" for k, v in _read_cpu_info() if k in _CPU_FIELDS)]
    if len(found) == 1:  # not Linux
        binding = _import_llvm()
        found += [binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()]
    return "\n".join(found)


def _import_llvm() -> Any:
    """Return LLVM, which only some machines need to load code."""
    try:
        return import_module("llvmlite.binding")
    except ImportError as error:
        raise KernelsUnavailableError(
            f"kernels cannot be loaded without LLVM: {error}",
            hint=format_install_command("engine"),
        ) from error


def cpu_model_name() -> str:
    """Return the marketing name of the processor, if the system knows it."""
    names = [value for field, value in _read_cpu_info() if field == "model name"]
    return next(iter(names), platform.processor() or sys.platform)


def _read_cpu_info() -> Iterator[tuple[str, str]]:
    """Yield what Linux says of the first processor."""
    if not _CPU_INFO.exists():
        return
    with _CPU_INFO.open(encoding="utf-8") as lines:
        for line in lines:
            if not line.strip():
                return
            field, _, value = line.partition(":")
            yield field.strip(), value.strip()


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
            hint=format_install_command("engine"),
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
