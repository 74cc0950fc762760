"""Remember when index documents were signed, apart from when their packages changed."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Add the time; so far a document was signed when its package changed, and only then."""
    signed = sa.Column("signed", sa.Float(), nullable=False, server_default="0")
    op.add_column("packages", signed)
    op.execute("UPDATE packages SET signed = updated")
    op.create_index("ix_packages_signed", "packages", ["signed"])
