"""The ledger's tables, in SQLAlchemy Core, the same on SQLite and PostgreSQL.

Every table that holds a tenant's data has `tenant_id`; nodes and capabilities belong to the mesh.
Must never differ from what the migrations build: a test compares both.
Units: every `_ms` is milliseconds since the Unix epoch, UTC, by the database's clock.
"""

import json
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Dialect,
    Float,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import TypeDecorator

from mesh.contract.states import HEAD, State


class now_ms(FunctionElement[int]):
    """The database clock in milliseconds: the only clock that judges leases, deadlines and retries."""

    type = BigInteger()
    inherit_cache = True


@compiles(now_ms, "sqlite")
def _now_ms_on_sqlite(element: now_ms, compiler: SQLCompiler, **_: Any) -> str:
    return "CAST(round((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER)"


@compiles(now_ms, "postgresql")
def _now_ms_on_postgres(element: now_ms, compiler: SQLCompiler, **_: Any) -> str:
    return "CAST(extract(epoch FROM clock_timestamp()) * 1000 AS BIGINT)"


class JsonText(TypeDecorator[Any]):
    """JSON as text, so that both databases keep it to the letter. SQL NULL is Python's None, never JSON null."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        """Write compact JSON; NaN raises ValueError, which the store maps."""
        if value is None:
            return None
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:
        """Read it back."""
        return None if value is None else json.loads(value)


def _one_of(column: str, values: "list[str]") -> str:
    return f"{column} IN ({', '.join(repr(value) for value in values)})"


_STATES = [str(state) for state in State]
_HEAD_STATES = [str(state) for state in State if state in HEAD]

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

tenants = Table(
    "tenants",
    metadata,
    Column("tenant_id", Text, primary_key=True),
    Column("weight", Float, nullable=False, server_default=text("1.0")),
    Column("created_at_ms", BigInteger, nullable=False),
    CheckConstraint("weight > 0", name="weight_positive"),
)

api_keys = Table(
    "api_keys",
    metadata,
    Column("key_id", Text, primary_key=True),
    Column("tenant_id", Text, nullable=False),
    Column("label", Text, nullable=False),
    Column("secret_sha256", Text, nullable=False, unique=True),
    Column("created_at_ms", BigInteger, nullable=False),
    Column("revoked_at_ms", BigInteger),
    ForeignKeyConstraint(["tenant_id"], ["tenants.tenant_id"]),
)

capabilities = Table(
    "capabilities",
    metadata,
    Column("name", Text, primary_key=True),
    Column("template", Text, nullable=False),
    Column("updated_at_ms", BigInteger, nullable=False),
)

nodes = Table(
    "nodes",
    metadata,
    Column("node_id", Text, primary_key=True),
    Column("host", Text, nullable=False),
    Column("slots", Integer, nullable=False),
    Column("free_slots", Integer, nullable=False),
    Column("capabilities", JsonText, nullable=False),
    # Asked for by an operator, and reported by the node itself: either makes it draining.
    Column("is_drain_requested", Boolean, nullable=False),
    Column("is_draining", Boolean, nullable=False),
    Column("started_at_ms", BigInteger, nullable=False),
    Column("seen_at_ms", BigInteger, nullable=False),
)

threads = Table(
    "threads",
    metadata,
    Column("tenant_id", Text, nullable=False),
    Column("thread_id", Text, nullable=False),
    Column("channel", Text),
    Column("external_id", Text),
    Column("url", Text),
    Column("title", Text),
    # Counters, only ever moved under this row's lock: accept order, event numbers, turn numbers.
    Column("seq_count", BigInteger, nullable=False, server_default=text("0")),
    Column("event_count", BigInteger, nullable=False, server_default=text("0")),
    Column("turn_count", BigInteger, nullable=False, server_default=text("0")),
    Column("message_count", BigInteger, nullable=False, server_default=text("0")),
    # The intent that is ready, running or waiting; the partial index on intents enforces that there is one at most.
    Column("head_intent_id", Text),
    Column("last_node_id", Text),
    Column("last_plan", JsonText),
    Column("last_tool_calls", JsonText),
    Column("contextual_memory", JsonText),
    Column("summary", Text),
    Column("boundaries", JsonText),
    Column("created_at_ms", BigInteger, nullable=False),
    Column("updated_at_ms", BigInteger, nullable=False),
    PrimaryKeyConstraint("tenant_id", "thread_id"),
    UniqueConstraint("tenant_id", "channel", "external_id"),
    Index(None, "tenant_id", "created_at_ms", "thread_id"),
    Index(None, "updated_at_ms"),
)


def _thread_key(*, cascade: str | None = None) -> ForeignKeyConstraint:
    return ForeignKeyConstraint(
        ["tenant_id", "thread_id"], ["threads.tenant_id", "threads.thread_id"], ondelete=cascade
    )


intents = Table(
    "intents",
    metadata,
    Column("intent_id", Text, primary_key=True),
    Column("tenant_id", Text, nullable=False),
    Column("thread_id", Text, nullable=False),
    Column("seq", BigInteger, nullable=False),
    Column("type", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("payload", JsonText, nullable=False),
    Column("metadata", JsonText, nullable=False),
    Column("priority", Integer, nullable=False),
    Column("budget", Float),
    Column("on_busy", Text, nullable=False),
    Column("parent_intent_id", Text),
    Column("idempotency_key", Text),
    Column("request_sha256", Text, nullable=False),
    # What the template said when the intent was accepted; no share means that the worker gets no context.
    Column("context_share", JsonText),
    Column("attempts_per_run", Integer, nullable=False),
    Column("attempt", Integer, nullable=False, server_default=text("0")),
    Column("max_attempts", Integer, nullable=False),
    # The fence. Minted by the claim; every later write must carry it.
    Column("epoch", BigInteger, nullable=False, server_default=text("0")),
    Column("node_id", Text),
    Column("lease_until_ms", BigInteger),
    Column("cancel_cause", Text),
    Column("available_at_ms", BigInteger, nullable=False),
    Column("announce_after_ms", BigInteger, nullable=False),
    Column("not_before_ms", BigInteger),
    Column("deadline_ms", BigInteger),
    Column("award", JsonText),
    Column("receipt", JsonText),
    Column("error", JsonText),
    Column("created_at_ms", BigInteger, nullable=False),
    Column("started_at_ms", BigInteger),
    Column("finished_at_ms", BigInteger),
    CheckConstraint(_one_of("state", _STATES), name="state_known"),
    CheckConstraint("state <> 'running' OR lease_until_ms IS NOT NULL", name="running_has_lease"),
    _thread_key(),
    UniqueConstraint("tenant_id", "idempotency_key"),
    UniqueConstraint("tenant_id", "thread_id", "seq"),
    Index(None, "tenant_id", "created_at_ms", "intent_id"),
    Index(
        "one_active_intent_per_thread",
        "tenant_id",
        "thread_id",
        unique=True,
        sqlite_where=text(_one_of("state", _HEAD_STATES)),
        postgresql_where=text(_one_of("state", _HEAD_STATES)),
    ),
    Index(
        "ix_intents_ready",
        "type",
        "tenant_id",
        "priority",
        "created_at_ms",
        sqlite_where=text("state = 'ready'"),
        postgresql_where=text("state = 'ready'"),
    ),
    Index(
        "ix_intents_unannounced",
        "announce_after_ms",
        sqlite_where=text("state = 'ready'"),
        postgresql_where=text("state = 'ready'"),
    ),
    Index(
        "ix_intents_leases",
        "lease_until_ms",
        sqlite_where=text("state = 'running'"),
        postgresql_where=text("state = 'running'"),
    ),
    Index(
        "ix_intents_deadlines",
        "deadline_ms",
        sqlite_where=text("finished_at_ms IS NULL AND deadline_ms IS NOT NULL"),
        postgresql_where=text("finished_at_ms IS NULL AND deadline_ms IS NOT NULL"),
    ),
    Index(
        "ix_intents_queued",
        "tenant_id",
        "thread_id",
        "seq",
        sqlite_where=text("state = 'accepted'"),
        postgresql_where=text("state = 'accepted'"),
    ),
)

results = Table(
    "results",
    metadata,
    Column("intent_id", Text, primary_key=True),
    Column("tenant_id", Text, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("turn_number", BigInteger, nullable=False),
    # JSON text, so that a result that is JSON null differs from none.
    Column("result", Text, nullable=False),
    Column("usage", JsonText, nullable=False),
    Column("created_at_ms", BigInteger, nullable=False),
    ForeignKeyConstraint(["intent_id"], ["intents.intent_id"], ondelete="CASCADE"),
)

attempts = Table(
    "attempts",
    metadata,
    Column("intent_id", Text, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("tenant_id", Text, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("node_id", Text, nullable=False),
    Column("started_at_ms", BigInteger, nullable=False),
    Column("ended_at_ms", BigInteger),
    Column("cause", Text),
    Column("detail", Text),
    Column("stdout", Text, nullable=False, server_default=""),
    Column("stderr", Text, nullable=False, server_default=""),
    Column("is_log_truncated", Boolean, nullable=False),
    Column("usage", JsonText),
    # The newest batch of events that was stored: one that is sent again after a lost reply is not stored again.
    Column("batch_number", BigInteger, nullable=False, server_default=text("0")),
    # How the attempt was settled: the answer to a node that asks again after a lost reply.
    Column("settled_state", Text),
    Column("settled_turn_number", BigInteger),
    PrimaryKeyConstraint("intent_id", "epoch"),
    ForeignKeyConstraint(["intent_id"], ["intents.intent_id"], ondelete="CASCADE"),
)

turns = Table(
    "turns",
    metadata,
    Column("tenant_id", Text, nullable=False),
    Column("thread_id", Text, nullable=False),
    Column("turn_number", BigInteger, nullable=False),
    Column("intent_id", Text),
    Column("mark", Text),
    Column("created_at_ms", BigInteger, nullable=False),
    PrimaryKeyConstraint("tenant_id", "thread_id", "turn_number"),
    _thread_key(cascade="CASCADE"),
)

messages = Table(
    "messages",
    metadata,
    Column("message_id", Text, primary_key=True),
    Column("tenant_id", Text, nullable=False),
    Column("thread_id", Text, nullable=False),
    Column("turn_number", BigInteger, nullable=False),
    Column("position", Integer, nullable=False),
    Column("role", Text, nullable=False),
    Column("name", Text),
    Column("content", Text, nullable=False),
    Column("tool_calls", JsonText),
    Column("tool_call_id", Text),
    # What the message costs in a context: o200k of "name: content", tool calls, and its frame.
    Column("tokens", Integer, nullable=False),
    Column("at_ms", BigInteger, nullable=False),
    Column("import_id", Text),
    ForeignKeyConstraint(
        ["tenant_id", "thread_id", "turn_number"],
        ["turns.tenant_id", "turns.thread_id", "turns.turn_number"],
        ondelete="CASCADE",
    ),
    UniqueConstraint("tenant_id", "thread_id", "turn_number", "position"),
    UniqueConstraint("tenant_id", "thread_id", "import_id"),
)

message_vectors = Table(
    "message_vectors",
    metadata,
    Column("tenant_id", Text, nullable=False),
    Column("thread_id", Text, nullable=False),
    Column("message_id", Text, nullable=False),
    Column("chunk", Integer, nullable=False),
    Column("model_id", Text, nullable=False),
    Column("dimension", Integer, nullable=False),
    Column("recipe", Text, nullable=False),
    # float32, little endian, unit length.
    Column("vector", LargeBinary, nullable=False),
    PrimaryKeyConstraint("message_id", "model_id", "recipe", "chunk"),
    ForeignKeyConstraint(["message_id"], ["messages.message_id"], ondelete="CASCADE"),
    Index(None, "tenant_id", "thread_id"),
)

events = Table(
    "events",
    metadata,
    Column("tenant_id", Text, nullable=False),
    Column("thread_id", Text, nullable=False),
    Column("number", BigInteger, nullable=False),
    Column("intent_id", Text),
    Column("kind", Text, nullable=False),
    Column("data", JsonText, nullable=False),
    Column("at_ms", BigInteger, nullable=False),
    PrimaryKeyConstraint("tenant_id", "thread_id", "number"),
    _thread_key(cascade="CASCADE"),
    Index(None, "intent_id", "number"),
)

pins = Table(
    "pins",
    metadata,
    Column("tenant_id", Text, nullable=False),
    Column("thread_id", Text, nullable=False),
    Column("key", Text, nullable=False),
    Column("text", Text, nullable=False),
    Column("source_turn", BigInteger),
    Column("created_at_ms", BigInteger, nullable=False),
    Column("updated_at_ms", BigInteger, nullable=False),
    PrimaryKeyConstraint("tenant_id", "thread_id", "key"),
    _thread_key(cascade="CASCADE"),
)

# The write-ahead log of tool effects. A row that is `started` when a new attempt begins becomes `uncertain`.
tool_calls = Table(
    "tool_calls",
    metadata,
    Column("intent_id", Text, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("call_id", Text, nullable=False),
    Column("tenant_id", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("arguments", Text, nullable=False),
    Column("status", Text, nullable=False),
    Column("result", Text),
    Column("started_at_ms", BigInteger, nullable=False),
    Column("finished_at_ms", BigInteger),
    CheckConstraint(_one_of("status", ["started", "finished", "uncertain"]), name="status_known"),
    PrimaryKeyConstraint("intent_id", "attempt", "call_id"),
    ForeignKeyConstraint(["intent_id"], ["intents.intent_id"], ondelete="CASCADE"),
)
