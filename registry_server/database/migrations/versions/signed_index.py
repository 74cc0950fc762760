"""Store the time of signing of index documents, separate from that of package changes."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Add the column; until now a document was signed only when its package changed."""
    signed = sa.Column("signed", sa.Float(), nullable=False, server_default="0")
    op.add_column("packages", signed)
    op.execute("UPDATE packages SET signed = updated")
    op.create_index("ix_packages_signed", "packages", ["signed"])
