"""What alembic runs to take the steps: on the connection that `migrate` lends, and nothing else."""

from alembic import context

from registry_server.database.tables import METADATA

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=METADATA,
    render_as_batch=True,
    transaction_per_migration=False,
)
context.run_migrations()
