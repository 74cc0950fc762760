"""The environment of alembic: runs migrations on the connection that `migrate` passes."""

from alembic import context

from registry_server.database.tables import METADATA

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=METADATA,
    render_as_batch=True,
    transaction_per_migration=False,
)
context.run_migrations()
