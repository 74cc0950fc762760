"""Opening a file that the user named: a regular one, or a clear refusal."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from expertctl.errors import InvalidPackageError, NotFoundError


@contextmanager
def open_regular(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file, without waiting for a pipe or a device; unbuffered, for large reads.

    Raises:
        NotFoundError: when there is no such file.
        InvalidPackageError: when it is something else.
    """
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError as error:
        hint = f"there is nothing at {path.absolute()}"
        raise NotFoundError(f"{path}: no such file", hint=hint) from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise InvalidPackageError(str(path), ["not a regular file"], hint=_folder_hint(path))
    with os.fdopen(handle, "rb", buffering=0) as stream:
        yield stream


def _folder_hint(path: Path) -> str:
    if (path / "adapter_config.json").is_file():
        return f"that is a folder with an adapter: `expertctl build {path}` packs it"
    return ""
