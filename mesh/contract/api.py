"""The bodies of the public HTTP API, in and out.

Must never drop or rename a field: clients outside this repository rely on them. Times are RFC 3339 UTC.
"""

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import AwareDatetime, BaseModel, BeforeValidator, ConfigDict, Field

from mesh.contract.ids import CapabilityName, ThreadId
from mesh.contract.messages import ContextMessage, PriceParts
from mesh.contract.states import State

OnBusy = Literal["enqueue", "reject", "interrupt", "rollback"]
PRIORITY_MIN, PRIORITY_MAX = -100, 100


class Body(BaseModel):
    """What a caller sends: unknown fields are refused, so that a typing error is not silently ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class View(BaseModel):
    """What a caller gets."""

    model_config = ConfigDict(frozen=True)


def _only_text(value: object) -> object:
    if not isinstance(value, str | datetime):
        raise ValueError("write the time as RFC 3339 text, for example 2026-01-31T12:00:00Z")
    return value


# In strict mode pydantic would refuse text for a time, so this field alone is lax, and takes nothing but text.
Moment = Annotated[AwareDatetime, Field(strict=False), BeforeValidator(_only_text)]


class SubmitIntent(Body):
    """`POST /intent`."""

    type: CapabilityName = Field(description="Name of the capability that shall run")
    payload: dict[str, Any] = Field(description="Input, valid against the capability's input_schema")
    thread_id: ThreadId | None = Field(None, description="Conversation; a new one is made when absent")
    budget: float | None = Field(None, ge=0, le=1e9, description="Highest price that this intent pays")
    priority: int = Field(0, ge=PRIORITY_MIN, le=PRIORITY_MAX, description="Higher goes first")
    not_before: Moment | None = Field(None, description="Do not start earlier")
    deadline: Moment | None = Field(None, description="Expire when not finished by then")
    on_busy: OnBusy = Field("enqueue", description="What to do when the thread has an unfinished intent")
    metadata: dict[str, Any] = Field(default_factory=dict, description="Kept with the intent, never interpreted")
    parent_intent_id: str | None = Field(None, max_length=64, description="The intent that caused this one")


class AttemptView(View):
    """One attempt. `cause` and `detail` are null while it runs and after success."""

    attempt: int
    epoch: int
    node_id: str
    started_at: datetime
    ended_at: datetime | None = None
    cause: str | None = None
    detail: str | None = None
    stdout: str = ""
    stderr: str = ""
    is_log_truncated: bool = False


class LoserView(View):
    """A bid that did not win, and why."""

    node_id: str
    price: float
    reason: str


class AwardView(View):
    """Why this node."""

    node_id: str
    price: float
    parts: PriceParts
    losers: list[LoserView]
    awarded_at: datetime


class ErrorView(View):
    """Why there is no result."""

    code: str
    detail: str
    hint: str | None = None


class IntentView(View):
    """An intent as `GET /intents/{id}` shows it. `status` is its state."""

    intent_id: str
    thread_id: str
    type: str
    status: State
    seq: int
    payload: dict[str, Any]
    metadata: dict[str, Any]
    priority: int
    budget: float | None
    on_busy: str
    parent_intent_id: str | None
    attempt: int
    max_attempts: int
    epoch: int
    is_cancel_requested: bool
    node_id: str | None
    award: AwardView | None
    attempts: list[AttemptView]
    result: Any = None
    error: ErrorView | None = None
    turn_number: int | None = None
    usage: dict[str, Any] | None = None
    receipt: dict[str, Any] | None = None
    not_before: datetime | None
    deadline: datetime | None
    next_attempt_at: datetime | None = None
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    links: dict[str, str]


class PinBody(Body):
    """`PUT /threads/{id}/pins/{key}`."""

    text: str = Field(min_length=1, max_length=4000)


class PinView(View):
    """A fact that every context of the thread carries word for word."""

    key: str
    text: str
    source_turn: int | None
    created_at: datetime
    updated_at: datetime


class OwnerBody(Body):
    """`PUT /threads`: get or create by owner."""

    channel: str = Field(min_length=1, max_length=128)
    external_id: str = Field(min_length=1, max_length=256)
    url: str | None = Field(None, max_length=2000)
    title: str | None = Field(None, max_length=500)


class ThreadView(View):
    """A conversation. `status` is derived from its intents: idle, queued, running or waiting."""

    thread_id: str
    channel: str | None
    external_id: str | None
    url: str | None
    title: str | None
    status: str
    message_count: int
    turn_count: int
    last_plan: dict[str, Any] | None
    last_tool_calls: dict[str, Any]
    contextual_memory: dict[str, Any]
    pins: list[PinView]
    summary: str | None
    boundaries: list[dict[str, Any]]
    last_node_id: str | None
    created_at: datetime
    updated_at: datetime


class MessageView(ContextMessage):
    """One stored message. Units: `tokens` in o200k."""

    message_id: str
    at: datetime
    tokens: int


class TurnView(View):
    """One turn as it was committed; compaction never rewrites it. `mark` is set for a partial turn."""

    turn_number: int
    intent_id: str | None
    mark: str | None
    created_at: datetime
    messages: list[MessageView]


class ImportMessage(Body):
    """One message of `POST /threads/{id}/messages`."""

    role: Literal["user", "assistant", "system", "tool"]
    content: str = Field(max_length=1_000_000)
    name: str | None = Field(None, min_length=1, max_length=200)
    at: Moment | None = None
    id: str | None = Field(None, min_length=1, max_length=200, description="Makes the import repeatable")


class ImportMessages(Body):
    """`POST /threads/{id}/messages`."""

    messages: list[ImportMessage] = Field(min_length=1, max_length=200)


class EventView(View):
    """One row of a thread's event log. `number` counts from 1 in each thread, without gaps."""

    number: int
    kind: str
    thread_id: str
    intent_id: str | None
    data: dict[str, Any]
    at: datetime


class NodeView(View):
    """A node as the ledger knows it."""

    node_id: str
    host: str
    status: Literal["up", "draining", "lost"]
    slots: int
    free_slots: int
    capabilities: list[str]
    running: int
    started_at: datetime
    seen_at: datetime
