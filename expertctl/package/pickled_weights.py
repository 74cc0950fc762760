"""Reading ``adapter_model.bin``: a pickle, so only in a process of its own, and only its tensors.

A pickle is a program. `convert_pickle` starts a process that limits its memory, its time and the
size of its output, leaves the network where the system allows that, and then interprets the pickle
with seven names. None of them runs code of the file: a dictionary, two functions that put a tensor
together, and the types of floats. Any other name ends it. This accepts what ``torch.load`` accepts
with ``weights_only``, for tensors of float32, float16 and bfloat16 in the archives that PyTorch has
written since 1.6, and needs no PyTorch.

The result is a safetensors file, which is then checked like any other.
"""

import math
import os
import pickle
import subprocess
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from expertctl.errors import InvalidPackageError
from expertctl.package.adapter_weights import encode_header, lay_out_tensors
from expertctl.package.tensor_file import ADAPTER_LIMITS, DTYPE_BYTES, TensorInfo, TensorTable

MAX_SECONDS = 120
"""Processor time of the process; it may take twice as long."""
_MAX_PICKLE_BYTES = 16 << 20
_MEMORY_BYTES = 1 << 30
"""Memory of the process on top of twice the file: Python and numpy reserve most of it."""
_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000
_REFUSED = 3
_DTYPES = {"FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16"}
_WORDS: Mapping[int, type[np.generic]] = {2: np.uint16, 4: np.uint32}


def convert_pickle(path: Path, output: Path) -> None:
    """Write the tensors of a pickle to a safetensors file, in a process of its own.

    Raises:
        InvalidPackageError: when it holds anything else than tensors, or exceeds a limit.
    """
    command = [sys.executable, "-m", __name__, str(path), str(output)]
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    kept["OPENBLAS_NUM_THREADS"] = "1"  # each of its threads reserves memory
    hint = "convert it where it was trained: model.save_pretrained(DIR, safe_serialization=True)"
    try:
        done = subprocess.run(  # noqa: S603  # our own module, with two paths
            command, env=kept, capture_output=True, timeout=2 * MAX_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        problem = f"reading the pickle took more than {2 * MAX_SECONDS} s"
        raise InvalidPackageError(path.name, [problem], hint=hint) from error
    if done.returncode == 0:
        return
    problem = "the process that read the pickle ended at a limit of memory, time or output"
    if done.returncode == _REFUSED:
        problem = done.stderr.decode(errors="replace").strip()[:300]
    raise InvalidPackageError(path.name, [problem], hint=hint)


class _UnreadableError(Exception):
    """Why a pickle is refused."""


@dataclass(frozen=True, slots=True)
class _Storage:
    key: str
    dtype: str
    count: int


@dataclass(frozen=True, slots=True)
class _Tensor:
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def is_contiguous(self) -> bool:
        expected, step = list[int](), 1
        for size in reversed(self.shape):
            expected.insert(0, step)
            step *= size
        pairs = zip(self.shape, self.strides, expected, strict=True)
        return all(size == 1 or own == wanted for size, own, wanted in pairs)


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
            case ("storage", str(dtype), str(key), _, int(count)) if key.isdecimal() and count >= 0:
                return _Storage(key, dtype, count)
        raise _UnreadableError("the pickle refers to something that is no storage of a tensor")


def _rebuild_tensor(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> _Tensor:
    numbers = (offset, *shape, *strides)
    is_valid = isinstance(storage, _Storage) and len(shape) == len(strides) <= 8
    if not is_valid or any(type(each) is not int or each < 0 for each in numbers):
        raise _UnreadableError("the pickle holds a malformed tensor")
    reach = offset + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
    if 0 not in shape and reach >= storage.count:
        raise _UnreadableError("the pickle holds a tensor that exceeds its storage")
    return _Tensor(storage, offset, tuple(shape), tuple(strides))


def _rebuild_parameter(tensor: Any, *_: Any) -> _Tensor:
    if not isinstance(tensor, _Tensor):
        raise _UnreadableError("the pickle holds a malformed parameter")
    return tensor


def _read_tensors(archive: zipfile.ZipFile) -> tuple[str, dict[str, _Tensor]]:
    """Return the folder within the archive, and the tensors by name."""
    found = [info for info in archive.infolist() if info.filename.endswith("/data.pkl")]
    if len(found) != 1 or found[0].file_size > _MAX_PICKLE_BYTES:
        raise _UnreadableError("not an archive that torch.save wrote")
    with archive.open(found[0]) as stream:
        tensors = _TensorUnpickler(stream).load()
    is_named = isinstance(tensors, dict) and all(
        isinstance(name, str) and isinstance(tensor, _Tensor) for name, tensor in tensors.items()
    )
    if not is_named or not 0 < len(tensors) <= ADAPTER_LIMITS.tensors:
        raise _UnreadableError("the pickle is not a dictionary of tensors")
    return found[0].filename.removesuffix("data.pkl"), dict(tensors)


def _read_numbers(archive: zipfile.ZipFile, folder: str, tensor: _Tensor) -> bytes:
    storage, size = tensor.storage, DTYPE_BYTES[tensor.storage.dtype]
    info = archive.getinfo(f"{folder}data/{storage.key}")
    if info.compress_type != zipfile.ZIP_STORED or info.file_size != storage.count * size:
        raise _UnreadableError("the archive holds a storage of another size")
    begin, count = tensor.offset * size, math.prod(tensor.shape)
    with archive.open(info) as stream:
        if tensor.is_contiguous:
            stream.seek(begin)
            return stream.read(count * size)
        words = np.frombuffer(stream.read(), _WORDS[size])
    strides = tuple(size * step for step in tensor.strides)
    view = np.lib.stride_tricks.as_strided(words[tensor.offset :], tensor.shape, strides)
    return view.tobytes()


def _write_tensors(path: Path, output: BinaryIO) -> None:
    with zipfile.ZipFile(path) as archive:
        folder, tensors = _read_tensors(archive)
        names = {info.filename: info for info in archive.infolist()}
        order = names.get(f"{folder}byteorder")
        if order is not None and archive.read(order) != b"little":
            raise _UnreadableError("the archive is big-endian")
        infos = {n: TensorInfo(t.storage.dtype, t.shape, 0, 0) for n, t in tensors.items()}
        output.write(encode_header(lay_out_tensors(TensorTable(infos, 0, 0), None)))
        for tensor in tensors.values():
            output.write(_read_numbers(archive, folder, tensor))


def _limit_process(size: int) -> None:
    """Limit what this process may use, and leave the network if that is possible."""
    import ctypes
    import resource

    limits = {
        resource.RLIMIT_AS: 2 * size + _MEMORY_BYTES,
        resource.RLIMIT_CPU: MAX_SECONDS,
        resource.RLIMIT_FSIZE: size + ADAPTER_LIMITS.header_bytes,
        resource.RLIMIT_CORE: 0,
    }
    for limit, most in limits.items():
        resource.setrlimit(limit, (most, most))
    if sys.platform == "linux":
        ctypes.CDLL(None).unshare(_NEW_USER | _NEW_NETWORK)


def main() -> int:
    """Convert the first file to the second, which is created."""
    path, output = Path(sys.argv[1]), Path(sys.argv[2])
    try:
        _limit_process(path.stat().st_size)
        with output.open("xb") as stream:
            _write_tensors(path, stream)
    except _UnreadableError as error:
        sys.stderr.write(str(error))
    except Exception as error:  # noqa: BLE001  # whatever a hostile file does ends here
        sys.stderr.write(f"not a readable pickle: {type(error).__name__}")
    else:
        return 0
    return _REFUSED


if __name__ == "__main__":
    sys.exit(main())
