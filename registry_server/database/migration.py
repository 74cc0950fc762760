"""Migrates the tables of a registry by the steps in ``migrations/versions``, with alembic."""

from pathlib import Path

from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util.exc import CommandError
from sqlalchemy import Connection

from expertctl.errors import StoreError
from registry_server.database.tables import METADATA

_MIGRATIONS = Path(__file__).parent / "migrations"


def migrate(connection: Connection) -> None:
    """Run the migrations that the database lacks, in the caller's transaction.

    Raises:
        StoreError: when the database is from a newer version.
    """
    config = _build_config()
    config.attributes["connection"] = connection
    try:
        command.upgrade(config, "head")
    except CommandError as error:
        hint = "run the version of expertctl that last used this folder, or a newer one"
        raise StoreError(f"the database is from another version: {error}", hint=hint) from error


def get_last_revision() -> str | None:
    """Return the revision of the last migration."""
    return ScriptDirectory.from_config(_build_config()).get_current_head()


def list_schema_differences(connection: Connection) -> list[object]:
    """Return the differences between the tables of a database and those of this version."""
    context = MigrationContext.configure(connection, opts={"compare_type": True})
    return list(compare_metadata(context, METADATA))


def _build_config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config
