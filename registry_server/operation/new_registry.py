"""Making a registry: its folder, key, database, first admin and, last, its settings.

``registry.toml`` is the mark of a finished registry. Whatever an interrupted ``init`` left without
one is finished by the next; every step looks first at what is there.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from expertctl.durable import make_folders
from expertctl.errors import NotFoundError, UsageError
from registry_server.access import audit, tokens, users
from registry_server.access.identity import ANONYMOUS, Action, Scope
from registry_server.operation.data_lock import LOCK_NAME, serving
from registry_server.publishing.index_key import create_index_key
from registry_server.registry import Registry, open_registry
from registry_server.settings import ServerSettings
from registry_server.settings_file import (
    SETTINGS_NAME,
    check_settings,
    read_settings,
    settings_path,
    write_settings,
)

OWN_NAMES = {"blobs", "uploads", "keys", LOCK_NAME, SETTINGS_NAME}
"""What lies in a data folder, beside the files of the database."""

_ADMIN = (Scope(Action.ADMIN),)


@dataclass(frozen=True, slots=True)
class NewRegistry:
    """A registry that was just made; ``token`` is shown once and nowhere kept."""

    settings: ServerSettings
    fingerprint: str
    token: str = field(repr=False)


def init_registry(settings: ServerSettings) -> NewRegistry:
    """Make a registry, or finish one whose making was interrupted.

    Raises:
        UsageError: when there is a registry already, or something else is in the folder.
        InvalidPackageError: when the settings are impossible.
    """
    check_settings(settings)
    _demand_free(settings)
    make_folders(settings.data, mode=0o700)
    settings.data.chmod(0o700)
    with serving(settings.data):
        _demand_free(settings)
        if not settings.index_key.exists():
            create_index_key(settings.index_key)
        with _opened(settings) as registry:
            secret = _new_admin_token(registry, "registry.init")
            fingerprint = registry.index_key.public.key_id
        write_settings(settings)
    return NewRegistry(settings, fingerprint, secret)


def new_admin_token(data: Path) -> str:
    """Make another token for the first admin, for whoever may write the data folder.

    Raises:
        NotFoundError: when there is no registry.
    """
    with _opened(read_settings(data)) as registry:
        return _new_admin_token(registry, "registry.new_admin_token")


def _demand_free(settings: ServerSettings) -> None:
    data = settings.data
    if settings_path(data).exists():
        hint = "serve it with `expertctl registry serve`; --new-admin-token makes another token"
        raise UsageError(f"{data}: there is a registry here already", hint=hint)
    if data.exists() and not data.is_dir():
        raise UsageError(f"{data} is not a folder")
    names = [path.name for path in data.iterdir()] if data.exists() else []
    foreign = sorted(name for name in names if not _is_own(name, settings))
    if foreign:
        message = f"{data} is not empty: it holds {', '.join(foreign[:3])}"
        raise UsageError(message, hint="name a new folder")


def _is_own(name: str, settings: ServerSettings) -> bool:
    begun = (settings.database.name, f".{SETTINGS_NAME}.")
    return name in OWN_NAMES or name.startswith(begun)


@contextmanager
def _opened(settings: ServerSettings) -> Iterator[Registry]:
    registry = open_registry(settings)
    try:
        yield registry
    finally:
        registry.close()


def _new_admin_token(registry: Registry, action: str) -> str:
    """Make a token that may do everything; its user is made when there is none yet."""
    with registry.database.write() as connection:
        try:
            user = users.get(connection, users.FIRST_ADMIN)
        except NotFoundError:
            user = users.create(connection, users.FIRST_ADMIN, admin=True)
        minted = tokens.create(connection, user, name=action, scopes=_ADMIN)
        audit.record(connection, ANONYMOUS, action, user.name, minted.token.id)
    return minted.secret
