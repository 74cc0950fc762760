"""Write the next migration of the registry: the difference of `tables` from the last migration.

Run ``python -m scripts.new_migration NAME`` in the root of the checkout. Review the result: data
migrations and triggers must be added by hand. Released migrations are never changed.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from alembic.autogenerate import produce_migrations, render_python_code
from alembic.operations.ops import UpgradeOps
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Connection, MetaData, create_engine

from registry_server.database import tables
from registry_server.database.connection import migrate
from registry_server.database.tables import METADATA

STEPS = Path(tables.__file__).parent / "migrations" / "versions"
TEMPLATE = '''"""{title}."""

import sqlalchemy as sa
from alembic import op

revision = "{new}"
down_revision = "{last}"


def upgrade() -> None:
    """{title}."""
{body}
'''


def main(words: Sequence[str]) -> int:
    """Write the migration and make it the last one; return the exit code."""
    if len(words) != 1 or not re.fullmatch(r"[a-z][a-z0-9_]{1,60}", words[0]):
        sys.stderr.write("error: give one name, such as add_mirrors\n")
        return 2
    text = make_step(words[0], METADATA)
    if text is None:
        sys.stderr.write("the steps make these tables already\n")
        return 1
    (STEPS / f"{words[0]}.py").write_text(text)
    source = Path(tables.__file__)
    last = f'HEAD = "{tables.HEAD}"'
    source.write_text(source.read_text().replace(last, f'HEAD = "{_next_revision(tables.HEAD)}"'))
    sys.stdout.write(f"{STEPS / words[0]}.py\n")
    return 0


def make_step(name: str, metadata: MetaData) -> str | None:
    """Return the source of a migration to ``metadata``; None if nothing changed."""
    with create_engine("sqlite://").begin() as connection:
        migrate(connection)
        body = "\n".join(_make_body(connection, metadata))
    if not body:
        return None
    title = name.replace("_", " ").capitalize()
    return TEMPLATE.format(
        title=title, new=_next_revision(tables.HEAD), last=tables.HEAD, body=body
    )


def _make_body(connection: Connection, metadata: MetaData) -> Iterator[str]:
    context = MigrationContext.configure(
        connection,
        opts={"compare_type": True, "target_metadata": metadata, "render_as_batch": True},
    )
    changes = produce_migrations(context, metadata).upgrade_ops
    assert isinstance(changes, UpgradeOps)
    if changes.is_empty():
        return
    for line in render_python_code(changes, migration_context=context).splitlines():
        if line.strip() and not line.strip().startswith("#"):
            yield line if line.startswith("    ") else f"    {line}"


def _next_revision(last: str) -> str:
    return f"{int(last) + 1:04}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
