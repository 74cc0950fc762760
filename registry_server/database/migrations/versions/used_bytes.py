"""Store the used bytes of a namespace, instead of adding up its blobs each time."""

# ruff: noqa: S608  # the statements are built from constants of this module only

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

_OF_LINK = "(SELECT namespace_id FROM repositories WHERE id = {row}.repository_id)"
_ONLY_LINK = f"""NOT EXISTS (
    SELECT 1 FROM repository_blobs AS other
    JOIN repositories ON repositories.id = other.repository_id
    WHERE other.digest = {{row}}.digest AND other.repository_id <> {{row}}.repository_id
    AND repositories.namespace_id = {_OF_LINK}
)"""
_BLOB_SIZE = "(SELECT size FROM blobs WHERE digest = {row}.digest)"


def upgrade() -> None:
    """Add the column, fill it, and add the triggers that keep it up to date."""
    count = sa.Column("used", sa.Integer(), nullable=False, server_default="0")
    op.add_column("namespaces", count)
    _count_once()
    _trigger("used_link", "INSERT ON repository_blobs", "NEW", "+", _BLOB_SIZE, _ONLY_LINK)
    _trigger("used_unlink", "DELETE ON repository_blobs", "OLD", "-", _BLOB_SIZE, _ONLY_LINK)
    for table in ("manifests", "uploads"):
        _trigger(f"used_{table}_new", f"INSERT ON {table}", "NEW", "+", "{row}.size")
        _trigger(f"used_{table}_gone", f"DELETE ON {table}", "OLD", "-", "{row}.size")
        more = "NEW.size - OLD.size"
        _trigger(f"used_{table}_grown", f"UPDATE OF size ON {table}", "NEW", "+", f"({more})")


def _count_once() -> None:
    own = "SELECT id FROM repositories WHERE namespace_id = namespaces.id"
    linked = f"SELECT digest FROM repository_blobs WHERE repository_id IN ({own})"
    parts = (
        f"(SELECT coalesce(sum(size), 0) FROM blobs WHERE digest IN ({linked}))",
        f"(SELECT coalesce(sum(size), 0) FROM manifests WHERE repository_id IN ({own}))",
        f"(SELECT coalesce(sum(size), 0) FROM uploads WHERE repository_id IN ({own}))",
    )
    op.execute(f"UPDATE namespaces SET used = {' + '.join(parts)}")


def _trigger(
    name: str, event: str, row: str, sign: str, size: str, condition: str | None = None
) -> None:
    when = f"WHEN {condition}" if condition else ""
    text = (
        f"CREATE TRIGGER {name} AFTER {event} {when} BEGIN "
        f"UPDATE namespaces SET used = used {sign} {size} WHERE id = {_OF_LINK}; END"
    )
    op.execute(text.format(row=row))
