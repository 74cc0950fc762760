"""The lock of a data folder: one server at a time.

The operating system drops it with the process that holds it, so a killed server leaves nothing to
repair. Worker processes share the lock of the server that started them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from expertctl.errors import StoreError

LOCK_NAME = "serve.lock"
WAIT_SECONDS = 3.0
"""How long workers of a killed server may take to notice."""


@contextmanager
def serving(data: Path, *, seconds: float = WAIT_SECONDS) -> Iterator[None]:
    """Hold the data folder for a server, or for work during which none may run.

    Raises:
        StoreError: when a server runs on it, or this user may not write there.
    """
    try:
        with FileLock(data / LOCK_NAME, timeout=seconds, mode=0o600, thread_local=False):
            yield
    except Timeout as error:
        message = f"{data}: a server runs on this registry already"
        raise StoreError(message, hint="end it, or serve another data folder") from error
    except PermissionError as error:
        raise StoreError(
            f"{data}: {error.strerror}", hint="run it as the folder's owner"
        ) from error
