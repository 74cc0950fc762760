"""Which step the tables of a database are at, told without loading alembic."""

from sqlalchemy import Connection, text

HEAD = "0003"
"""The last step in ``migrations/versions``."""


def current_revision(connection: Connection) -> str | None:
    """Return the last step that was taken, None for an empty database."""
    known = text("SELECT 1 FROM sqlite_master WHERE name = 'alembic_version'")
    if connection.execute(known).first() is None:
        return None
    found: str | None = connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
    return found
