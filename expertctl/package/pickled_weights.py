"""Reading ``adapter_model.bin``: a pickle, so only in a process of its own, and only its tensors.

A pickle is a program. `convert_pickle` starts a process that imports nothing from the current
folder, limits its memory, its time and the size of its output, leaves the network where the system
allows that, and then interprets the pickle with six names: a dictionary, two functions that put a
tensor together, and three types of floats. None of them runs code of the file, and any other name
ends the process. So tensors of float32, float16 and bfloat16 are read, in the archives that PyTorch
has written since 1.6; PyTorch itself is not needed.

The result is a safetensors file, which is then checked like any other.
"""

import errno
import math
import os
import pickle
import subprocess
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from expertctl.errors import IncompatibleError, InvalidPackageError
from expertctl.package.adapter_weights import encode_header, lay_out_tensors
from expertctl.package.directory import SourceFile
from expertctl.package.tensor_file import ADAPTER_LIMITS, TensorInfo, TensorTable

MAX_SECONDS = 120
"""Processor time of the process; it may take twice as long."""
_MAX_PICKLE_BYTES = 16 << 20
_MEMORY_BYTES = 1 << 30
"""Memory of the process on top of three times the file: Python and numpy reserve most of it."""
_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000
_REFUSED = 3
_HINT = "convert it where it was trained: model.save_pretrained(DIR, safe_serialization=True)"
_DTYPES = {"FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16"}
_WORDS: Mapping[str, type[np.generic]] = {"F32": np.uint32, "F16": np.uint16, "BF16": np.uint16}
_MAX_DIMENSIONS = 8


def convert_pickle(source: SourceFile, output: Path) -> None:
    """Write the tensors of a pickle to a safetensors file, in a process of its own.

    Raises:
        DigestError: when the file was replaced meanwhile.
        IncompatibleError: on a system where a process cannot be limited.
        InvalidPackageError: when it holds anything else than tensors, or exceeds a limit.
    """
    if sys.platform == "win32":
        raise IncompatibleError(
            f"{source.name}: pickles are not read on Windows, which cannot limit the process",
            hint=_HINT,
        )
    command = [sys.executable, "-P", "-s", "-m", __name__, output.name]
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    threads = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
    kept |= dict.fromkeys(threads, "1")  # threads reserve memory, and keep the network
    try:
        with source.open() as stream:
            done = subprocess.run(  # noqa: S603  # our own module, with the name of a file
                command,
                env=kept,
                cwd=output.parent,
                stdin=stream,
                capture_output=True,
                timeout=2 * MAX_SECONDS,
                check=False,
            )
    except subprocess.TimeoutExpired as error:
        problem = f"reading the pickle took more than {2 * MAX_SECONDS} s"
        raise InvalidPackageError(source.name, [problem], hint=_HINT) from error
    if done.returncode == 0:
        return
    problem = "the process that read the pickle ended at a limit of memory, time or output"
    if done.returncode == _REFUSED:
        problem = done.stderr.decode(errors="replace").strip()[:300]
    raise InvalidPackageError(source.name, [problem], hint=_HINT)


class _UnreadableError(Exception):
    """Why a pickle is refused."""


class _Storage(NamedTuple):
    """Has no attributes that a pickle could set, as `_Tensor` has none."""

    key: str
    dtype: str
    length: int


class _Tensor(NamedTuple):
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _TensorUnpickler(pickle.Unpickler):
    """Knows the names that ``torch.save`` needs for a dictionary of tensors."""

    def find_class(self, module: str, name: str) -> Any:
        match module, name:
            case "collections", "OrderedDict":
                return OrderedDict
            case "torch._utils", "_rebuild_tensor_v2":
                return _rebuild_tensor
            case "torch._utils", "_rebuild_parameter":
                return _rebuild_parameter
            case "torch", ("FloatStorage" | "HalfStorage" | "BFloat16Storage"):
                return _DTYPES[name]
            case _:
                pass
        raise _UnreadableError(f"the pickle names {module[:60]}.{name[:60]}, which is no tensor")

    def persistent_load(self, pid: Any) -> _Storage:
        match pid:
            case ("storage", str(dtype), str(key), _, int(count)):
                if dtype in _WORDS and key.isdecimal() and count >= 0:
                    return _Storage(key, dtype, count)
            case _:
                pass
        raise _UnreadableError("the pickle refers to something that is no storage of a tensor")


def _rebuild_tensor(storage: Any, offset: Any, shape: Any, strides: Any, *others: Any) -> _Tensor:
    made = _Tensor(storage, offset, tuple(shape), tuple(strides))
    if len(others) > 2 and others[2]:
        raise _UnreadableError("the pickle holds a tensor with a conjugated or negated view")
    _check_tensor(made)
    return made


def _check_tensor(tensor: _Tensor) -> None:
    storage, offset, shape, strides = tensor
    numbers = (offset, *shape, *strides)
    is_valid = type(storage) is _Storage and len(shape) == len(strides) <= _MAX_DIMENSIONS
    if not is_valid or any(type(each) is not int or each < 0 for each in numbers):
        raise _UnreadableError("the pickle holds a malformed tensor")
    reach = offset + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
    if 0 not in shape and reach >= storage.length:
        raise _UnreadableError("the pickle holds a tensor that exceeds its storage")


def _rebuild_parameter(tensor: Any, *_: Any) -> _Tensor:
    if type(tensor) is not _Tensor:
        raise _UnreadableError("the pickle holds a malformed parameter")
    return tensor


class _Archive:
    """The archive that ``torch.save`` wrote."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive, names = archive, [info.filename for info in archive.infolist()]
        found = [name for name in names if name.endswith("/data.pkl")]
        if len(found) != 1 or len(set(names)) != len(names):
            raise _UnreadableError("not an archive that torch.save wrote")
        self._folder = found[0].removesuffix("data.pkl")
        order = f"{self._folder}byteorder"
        if order in names and self._read(order, max_bytes=16) != b"little":
            raise _UnreadableError("the archive is big-endian")
        self._storages: dict[str, bytes] = {}

    def _read(self, name: str, *, max_bytes: int) -> bytes:
        info = self._archive.getinfo(name)
        if info.file_size > max_bytes:
            raise _UnreadableError("the archive holds an entry that is too large")
        return self._archive.read(info)

    def read_tensors(self) -> dict[str, _Tensor]:
        """Return the tensors by name."""
        with self._archive.open(f"{self._folder}data.pkl") as stream:
            if self._archive.getinfo(stream.name).file_size > _MAX_PICKLE_BYTES:
                raise _UnreadableError("the pickle is too large")
            found = _TensorUnpickler(stream).load()
        tensors = dict(dict.items(found)) if isinstance(found, dict) else {}
        is_named = all(type(n) is str and type(t) is _Tensor for n, t in tensors.items())
        if not is_named or not 0 < len(tensors) <= ADAPTER_LIMITS.tensors:
            raise _UnreadableError("the pickle is not a dictionary of tensors")
        return tensors

    def read_numbers(self, tensor: _Tensor) -> bytes:
        """Return the bytes of a tensor in the order of its rows."""
        _check_tensor(tensor)
        storage, word = tensor.storage, np.dtype(_WORDS[tensor.storage.dtype])
        if storage.key not in self._storages:
            info = self._archive.getinfo(f"{self._folder}data/{storage.key}")
            if info.compress_type != zipfile.ZIP_STORED:
                raise _UnreadableError("the archive holds a compressed storage")
            self._storages[storage.key] = self._archive.read(info)
        data = self._storages[storage.key]
        if len(data) != storage.length * word.itemsize:
            raise _UnreadableError("the archive holds a storage of another size")
        if not math.prod(tensor.shape):
            return b""
        words = np.frombuffer(data, word)[tensor.offset :]
        strides = tuple(word.itemsize * step for step in tensor.strides)
        return np.lib.stride_tricks.as_strided(words, tensor.shape, strides).tobytes()


def _write_tensors(source: BinaryIO, output: BinaryIO) -> None:
    with zipfile.ZipFile(source) as opened:
        archive = _Archive(opened)
        tensors = archive.read_tensors()
        infos = {n: TensorInfo(t.storage.dtype, t.shape, 0, 0) for n, t in tensors.items()}
        output.write(encode_header(lay_out_tensors(TensorTable(infos, 0, 0), None)))
        for tensor in tensors.values():
            output.write(archive.read_numbers(tensor))


def _limit_process(size: int) -> None:
    """Limit what this process may use, and leave the network if that is possible."""
    import ctypes
    import resource

    limits = {
        resource.RLIMIT_AS: 3 * size + _MEMORY_BYTES,
        resource.RLIMIT_CPU: MAX_SECONDS,
        resource.RLIMIT_FSIZE: size + ADAPTER_LIMITS.header_bytes,
        resource.RLIMIT_CORE: 0,
    }
    for limit, wanted in limits.items():
        hard = resource.getrlimit(limit)[1]
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(limit, (most, most))
    if sys.platform == "linux":
        ctypes.CDLL(None).unshare(_NEW_USER | _NEW_NETWORK)


def main() -> int:
    """Convert the pickle on stdin to a file in the current folder, which is created."""
    try:
        source = sys.stdin.buffer
        _limit_process(os.fstat(source.fileno()).st_size)
        with Path(sys.argv[1]).open("xb") as stream:
            _write_tensors(source, stream)
    except _UnreadableError as error:
        sys.stderr.write(str(error))
    except MemoryError:
        sys.stderr.write("the pickle takes more memory than its process may use")
    except OSError as error:
        is_limit = error.errno == errno.EFBIG
        sys.stderr.write("its tensors exceed the file" if is_limit else f"cannot be read: {error}")
    except Exception as error:  # noqa: BLE001  # whatever a hostile file does ends here
        sys.stderr.write(f"not a readable pickle: {type(error).__name__}")
    else:
        return 0
    return _REFUSED


if __name__ == "__main__":
    sys.exit(main())
