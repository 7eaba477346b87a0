"""Vectors of messages, message counts on threads (filled in for the threads that exist), batch numbers on attempts.

Revision: 0002, after 0001.
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "message_vectors",
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("thread_id", sa.Text(), nullable=False),
        sa.Column("message_id", sa.Text(), nullable=False),
        sa.Column("chunk", sa.Integer(), nullable=False),
        sa.Column("model_id", sa.Text(), nullable=False),
        sa.Column("dimension", sa.Integer(), nullable=False),
        sa.Column("recipe", sa.Text(), nullable=False),
        sa.Column("vector", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(
            ["message_id"], ["messages.message_id"], name=op.f("fk_message_vectors_message_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("message_id", "model_id", "recipe", "chunk", name=op.f("pk_message_vectors")),
    )
    op.create_index(
        op.f("ix_message_vectors_tenant_id_thread_id"), "message_vectors", ["tenant_id", "thread_id"], unique=False
    )
    op.create_index(op.f("ix_threads_updated_at_ms"), "threads", ["updated_at_ms"], unique=False)
    op.add_column("threads", sa.Column("message_count", sa.BigInteger(), server_default=sa.text("0"), nullable=False))
    op.add_column("attempts", sa.Column("batch_number", sa.BigInteger(), server_default=sa.text("0"), nullable=False))
    op.execute(
        "UPDATE threads SET message_count = (SELECT count(*) FROM messages "
        "WHERE messages.tenant_id = threads.tenant_id AND messages.thread_id = threads.thread_id)"
    )


def downgrade() -> None:
    op.drop_column("attempts", "batch_number")
    op.drop_column("threads", "message_count")
    op.drop_index(op.f("ix_threads_updated_at_ms"), table_name="threads")
    op.drop_table("message_vectors")
