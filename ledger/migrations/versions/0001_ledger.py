"""Threads, intents, turns, events, pins, nodes, keys.

Revision: 0001, after nothing.
"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "capabilities",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("template", sa.Text(), nullable=False),
        sa.Column("updated_at_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_capabilities")),
    )
    op.create_table(
        "nodes",
        sa.Column("node_id", sa.Text(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("slots", sa.Integer(), nullable=False),
        sa.Column("free_slots", sa.Integer(), nullable=False),
        sa.Column("capabilities", sa.Text(), nullable=False),
        sa.Column("is_drain_requested", sa.Boolean(), nullable=False),
        sa.Column("is_draining", sa.Boolean(), nullable=False),
        sa.Column("started_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("seen_at_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("node_id", name=op.f("pk_nodes")),
    )
    op.create_table(
        "tenants",
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("weight", sa.Float(), server_default=sa.text("1.0"), nullable=False),
        sa.Column("created_at_ms", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("weight > 0", name=op.f("ck_tenants_weight_positive")),
        sa.PrimaryKeyConstraint("tenant_id", name=op.f("pk_tenants")),
    )
    op.create_table(
        "threads",
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("thread_id", sa.Text(), nullable=False),
        sa.Column("channel", sa.Text(), nullable=True),
        sa.Column("external_id", sa.Text(), nullable=True),
        sa.Column("url", sa.Text(), nullable=True),
        sa.Column("title", sa.Text(), nullable=True),
        sa.Column("seq_count", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("event_count", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("turn_count", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("head_intent_id", sa.Text(), nullable=True),
        sa.Column("last_node_id", sa.Text(), nullable=True),
        sa.Column("last_plan", sa.Text(), nullable=True),
        sa.Column("last_tool_calls", sa.Text(), nullable=True),
        sa.Column("contextual_memory", sa.Text(), nullable=True),
        sa.Column("summary", sa.Text(), nullable=True),
        sa.Column("boundaries", sa.Text(), nullable=True),
        sa.Column("created_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("updated_at_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", "thread_id", name=op.f("pk_threads")),
        sa.UniqueConstraint(
            "tenant_id", "channel", "external_id", name=op.f("uq_threads_tenant_id_channel_external_id")
        ),
    )
    op.create_index(
        op.f("ix_threads_tenant_id_created_at_ms_thread_id"),
        "threads",
        ["tenant_id", "created_at_ms", "thread_id"],
        unique=False,
    )
    op.create_table(
        "api_keys",
        sa.Column("key_id", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("label", sa.Text(), nullable=False),
        sa.Column("secret_sha256", sa.Text(), nullable=False),
        sa.Column("created_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("revoked_at_ms", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.tenant_id"], name=op.f("fk_api_keys_tenant_id")),
        sa.PrimaryKeyConstraint("key_id", name=op.f("pk_api_keys")),
        sa.UniqueConstraint("secret_sha256", name=op.f("uq_api_keys_secret_sha256")),
    )
    op.create_table(
        "events",
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("thread_id", sa.Text(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("intent_id", sa.Text(), nullable=True),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("data", sa.Text(), nullable=False),
        sa.Column("at_ms", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant_id", "thread_id"],
            ["threads.tenant_id", "threads.thread_id"],
            name=op.f("fk_events_tenant_id_thread_id"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("tenant_id", "thread_id", "number", name=op.f("pk_events")),
    )
    op.create_index(op.f("ix_events_intent_id_number"), "events", ["intent_id", "number"], unique=False)
    op.create_table(
        "intents",
        sa.Column("intent_id", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("thread_id", sa.Text(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("type", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("payload", sa.Text(), nullable=False),
        sa.Column("metadata", sa.Text(), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("budget", sa.Float(), nullable=True),
        sa.Column("on_busy", sa.Text(), nullable=False),
        sa.Column("parent_intent_id", sa.Text(), nullable=True),
        sa.Column("idempotency_key", sa.Text(), nullable=True),
        sa.Column("request_sha256", sa.Text(), nullable=False),
        sa.Column("context_share", sa.Text(), nullable=True),
        sa.Column("attempts_per_run", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("max_attempts", sa.Integer(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("node_id", sa.Text(), nullable=True),
        sa.Column("lease_until_ms", sa.BigInteger(), nullable=True),
        sa.Column("cancel_cause", sa.Text(), nullable=True),
        sa.Column("available_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("announce_after_ms", sa.BigInteger(), nullable=False),
        sa.Column("not_before_ms", sa.BigInteger(), nullable=True),
        sa.Column("deadline_ms", sa.BigInteger(), nullable=True),
        sa.Column("award", sa.Text(), nullable=True),
        sa.Column("receipt", sa.Text(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("created_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("started_at_ms", sa.BigInteger(), nullable=True),
        sa.Column("finished_at_ms", sa.BigInteger(), nullable=True),
        sa.CheckConstraint(
            "state <> 'running' OR lease_until_ms IS NOT NULL", name=op.f("ck_intents_running_has_lease")
        ),
        sa.CheckConstraint(
            "state IN ('accepted', 'ready', 'running', 'waiting', 'succeeded', 'failed', 'cancelled', 'expired', 'dead')",
            name=op.f("ck_intents_state_known"),
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id", "thread_id"],
            ["threads.tenant_id", "threads.thread_id"],
            name=op.f("fk_intents_tenant_id_thread_id"),
        ),
        sa.PrimaryKeyConstraint("intent_id", name=op.f("pk_intents")),
        sa.UniqueConstraint("tenant_id", "idempotency_key", name=op.f("uq_intents_tenant_id_idempotency_key")),
        sa.UniqueConstraint("tenant_id", "thread_id", "seq", name=op.f("uq_intents_tenant_id_thread_id_seq")),
    )
    op.create_index(
        "ix_intents_deadlines",
        "intents",
        ["deadline_ms"],
        unique=False,
        sqlite_where=sa.text("finished_at_ms IS NULL AND deadline_ms IS NOT NULL"),
        postgresql_where=sa.text("finished_at_ms IS NULL AND deadline_ms IS NOT NULL"),
    )
    op.create_index(
        "ix_intents_leases",
        "intents",
        ["lease_until_ms"],
        unique=False,
        sqlite_where=sa.text("state = 'running'"),
        postgresql_where=sa.text("state = 'running'"),
    )
    op.create_index(
        "ix_intents_queued",
        "intents",
        ["tenant_id", "thread_id", "seq"],
        unique=False,
        sqlite_where=sa.text("state = 'accepted'"),
        postgresql_where=sa.text("state = 'accepted'"),
    )
    op.create_index(
        "ix_intents_ready",
        "intents",
        ["type", "tenant_id", "priority", "created_at_ms"],
        unique=False,
        sqlite_where=sa.text("state = 'ready'"),
        postgresql_where=sa.text("state = 'ready'"),
    )
    op.create_index(
        op.f("ix_intents_tenant_id_created_at_ms_intent_id"),
        "intents",
        ["tenant_id", "created_at_ms", "intent_id"],
        unique=False,
    )
    op.create_index(
        "ix_intents_unannounced",
        "intents",
        ["announce_after_ms"],
        unique=False,
        sqlite_where=sa.text("state = 'ready'"),
        postgresql_where=sa.text("state = 'ready'"),
    )
    op.create_index(
        "one_active_intent_per_thread",
        "intents",
        ["tenant_id", "thread_id"],
        unique=True,
        sqlite_where=sa.text("state IN ('ready', 'running', 'waiting')"),
        postgresql_where=sa.text("state IN ('ready', 'running', 'waiting')"),
    )
    op.create_table(
        "pins",
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("thread_id", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("source_turn", sa.BigInteger(), nullable=True),
        sa.Column("created_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("updated_at_ms", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant_id", "thread_id"],
            ["threads.tenant_id", "threads.thread_id"],
            name=op.f("fk_pins_tenant_id_thread_id"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("tenant_id", "thread_id", "key", name=op.f("pk_pins")),
    )
    op.create_table(
        "turns",
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("thread_id", sa.Text(), nullable=False),
        sa.Column("turn_number", sa.BigInteger(), nullable=False),
        sa.Column("intent_id", sa.Text(), nullable=True),
        sa.Column("mark", sa.Text(), nullable=True),
        sa.Column("created_at_ms", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant_id", "thread_id"],
            ["threads.tenant_id", "threads.thread_id"],
            name=op.f("fk_turns_tenant_id_thread_id"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("tenant_id", "thread_id", "turn_number", name=op.f("pk_turns")),
    )
    op.create_table(
        "attempts",
        sa.Column("intent_id", sa.Text(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("node_id", sa.Text(), nullable=False),
        sa.Column("started_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("ended_at_ms", sa.BigInteger(), nullable=True),
        sa.Column("cause", sa.Text(), nullable=True),
        sa.Column("detail", sa.Text(), nullable=True),
        sa.Column("stdout", sa.Text(), server_default="", nullable=False),
        sa.Column("stderr", sa.Text(), server_default="", nullable=False),
        sa.Column("is_log_truncated", sa.Boolean(), nullable=False),
        sa.Column("usage", sa.Text(), nullable=True),
        sa.Column("settled_state", sa.Text(), nullable=True),
        sa.Column("settled_turn_number", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(
            ["intent_id"], ["intents.intent_id"], name=op.f("fk_attempts_intent_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("intent_id", "epoch", name=op.f("pk_attempts")),
    )
    op.create_table(
        "messages",
        sa.Column("message_id", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("thread_id", sa.Text(), nullable=False),
        sa.Column("turn_number", sa.BigInteger(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("role", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=True),
        sa.Column("content", sa.Text(), nullable=False),
        sa.Column("tool_calls", sa.Text(), nullable=True),
        sa.Column("tool_call_id", sa.Text(), nullable=True),
        sa.Column("tokens", sa.Integer(), nullable=False),
        sa.Column("at_ms", sa.BigInteger(), nullable=False),
        sa.Column("import_id", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(
            ["tenant_id", "thread_id", "turn_number"],
            ["turns.tenant_id", "turns.thread_id", "turns.turn_number"],
            name=op.f("fk_messages_tenant_id_thread_id_turn_number"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("message_id", name=op.f("pk_messages")),
        sa.UniqueConstraint(
            "tenant_id", "thread_id", "import_id", name=op.f("uq_messages_tenant_id_thread_id_import_id")
        ),
        sa.UniqueConstraint(
            "tenant_id",
            "thread_id",
            "turn_number",
            "position",
            name=op.f("uq_messages_tenant_id_thread_id_turn_number_position"),
        ),
    )
    op.create_table(
        "results",
        sa.Column("intent_id", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("turn_number", sa.BigInteger(), nullable=False),
        sa.Column("result", sa.Text(), nullable=False),
        sa.Column("usage", sa.Text(), nullable=False),
        sa.Column("created_at_ms", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["intent_id"], ["intents.intent_id"], name=op.f("fk_results_intent_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("intent_id", name=op.f("pk_results")),
    )
    op.create_table(
        "tool_calls",
        sa.Column("intent_id", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("call_id", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("arguments", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("result", sa.Text(), nullable=True),
        sa.Column("started_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("finished_at_ms", sa.BigInteger(), nullable=True),
        sa.CheckConstraint("status IN ('started', 'finished', 'uncertain')", name=op.f("ck_tool_calls_status_known")),
        sa.ForeignKeyConstraint(
            ["intent_id"], ["intents.intent_id"], name=op.f("fk_tool_calls_intent_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("intent_id", "attempt", "call_id", name=op.f("pk_tool_calls")),
    )


def downgrade() -> None:
    for table in (
        "pins",
        "tool_calls",
        "results",
        "attempts",
        "events",
        "messages",
        "turns",
        "intents",
        "threads",
        "api_keys",
        "tenants",
        "nodes",
        "capabilities",
    ):
        op.drop_table(table)
