"""Store the base and the adapter kinds of packages, for browsing, and logins of the web pages."""

# ruff: noqa: S608  # the statements are built from constants of this module only

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"

_LATEST = """SELECT CAST(releases.manifest AS TEXT) FROM releases
    WHERE releases.package_id = packages.id AND releases.version = packages.latest"""
_KINDS = f"""SELECT ' ' || group_concat(DISTINCT json_extract(entry.value, '$.kind')) || ' '
    FROM json_each(({_LATEST}), '$.adapters') AS entry"""


def upgrade() -> None:
    """Add the columns, fill them from the leading versions, and add the table of logins."""
    base = sa.Column("base", sa.String(length=200), nullable=False, server_default="")
    kinds = sa.Column("kinds", sa.String(length=100), nullable=False, server_default="")
    op.add_column("packages", base)
    op.add_column("packages", kinds)
    op.execute(
        f"UPDATE packages SET base = json_extract(({_LATEST}), '$.base.name'), "
        f"kinds = replace(({_KINDS}), ',', ' ') WHERE latest IS NOT NULL"
    )
    op.drop_index("ix_packages_search", "packages")
    op.create_index(
        "ix_packages_search",
        "packages",
        ["namespace_id", "latest", "base", "kinds", "search_text", "name"],
    )
    op.create_table(
        "browser_sessions",
        sa.Column("hash", sa.String(length=64), primary_key=True),
        sa.Column("token_id", sa.String(length=32), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.Column("expires", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(
            ["token_id"], ["tokens.id"], name="fk_browser_sessions_token_id_tokens"
        ),
    )
    for column in ("token_id", "expires"):
        op.create_index(f"ix_browser_sessions_{column}", "browser_sessions", [column])
