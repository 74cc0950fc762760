"""Files that the user names for a command to write."""

from pathlib import Path

from expertctl.durable import NO_SPACE, write_named
from expertctl.errors import DiskFullError, NotFoundError


def write_file(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Write to the path that the user named, through links and into pipes.

    Raises:
        DiskFullError: when there is no room.
        NotFoundError: when it cannot be written there for any other reason.
    """
    try:
        write_named(path, data, mode=mode)
    except OSError as error:
        if error.errno in NO_SPACE:
            hint = "free some space, or name a file elsewhere"
            raise DiskFullError(f"{path}: no space left", hint=hint) from error
        message = f"{path} cannot be written: {error.strerror or error}"
        raise NotFoundError(message, hint="name a file in a folder that you may write") from error
