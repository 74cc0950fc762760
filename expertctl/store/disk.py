"""What the disk refuses, in the words of the error tree."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from expertctl.durable import NO_SPACE
from expertctl.errors import DiskFullError, ExpertError, StoreError

READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}
_FULL = NO_SPACE | {errno.EFBIG}


@contextmanager
def disk_errors(what: object) -> Iterator[None]:
    """Turn an OSError of the body into an error that names the file, else ``what``.

    Raises:
        DiskFullError: when there is no space, no quota or no room in one file.
        StoreError: when the place cannot be written, or for any other reason.
    """
    try:
        yield
    except OSError as error:
        raise _told(error, str(error.filename or what)) from error


def _told(error: OSError, what: str) -> ExpertError:
    if error.errno in _FULL:
        hint = "free some space (`expertctl gc` removes what nothing needs), then repeat"
        return DiskFullError(f"{what}: {error.strerror}", hint=hint)
    if error.errno in READ_ONLY:
        hint = "this user may not write there; set EXPERT_HOME to a folder of your own"
        return StoreError(f"{what} is read-only: {error.strerror}", hint=hint)
    return StoreError(f"{what}: {error.strerror or error}")
