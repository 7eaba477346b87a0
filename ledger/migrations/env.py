"""How Alembic reaches the database: by the connection, already in a transaction, that `ledger.schema` hands in.

Must never open a connection of its own: the ledger's file has one owner.
"""

from alembic import context

from ledger.models import metadata

connection = context.config.attributes.get("connection")
if connection is None:
    raise RuntimeError("run it as: python -m ledger upgrade")
context.configure(connection=connection, target_metadata=metadata)
with context.begin_transaction():
    context.run_migrations()
