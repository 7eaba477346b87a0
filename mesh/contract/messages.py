"""What rooms say to each other: frozen, versioned, and only ever extended by a kind or a defaulted field.

Must never change the meaning of a field, and never carry work on the backplane: a notice wakes, the row is
the truth.
Units: every `_ms` is milliseconds since the Unix epoch, UTC, unless the name says otherwise.
"""

from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from mesh.contract.errors import Cause
from mesh.contract.ids import CapabilityName
from mesh.contract.states import State
from mesh.contract.template import Template


class Part(BaseModel):
    """A frozen value inside a message."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Message(Part):
    """A frozen message; children set `kind`."""

    version: Literal[1] = 1
    sent_at: AwareDatetime = Field(default_factory=lambda: datetime.now(UTC))


# ---- bidding (node <-> backplane)


class PriceParts(Part):
    """A price is the sum of these; stored with the award so that "why this node?" is a query."""

    base: float = 1.0
    load: float = 0.0
    cold_start: float = 0.0
    memory_pressure: float = 0.0
    recent_failures: float = 0.0
    affinity: float = 0.0

    @property
    def total(self) -> float:
        """The price itself, never below zero."""
        sum_of_parts = (
            self.base + self.load + self.cold_start + self.memory_pressure + self.recent_failures + self.affinity
        )
        return max(0.0, sum_of_parts)


class Bid(Message):
    """One node's standing offer for one capability. `affinity_discount` is taken off for threads it ran last."""

    kind: Literal["bid"] = "bid"
    node_id: str
    capability: CapabilityName
    parts: PriceParts
    affinity_discount: float = Field(0.0, ge=0)

    @property
    def parts_with_affinity(self) -> PriceParts:
        """The price for a thread whose last turn this node ran."""
        return self.parts.model_copy(update={"affinity": self.parts.affinity - self.affinity_discount})


class Announcement(Message):
    """A ready intent, as far as matching needs to know it. `budget` is the highest price that it pays.

    `attempt` counts the attempts made so far: a retry is announced with a higher one, so that it is not taken for
    a repetition of the announcement that was awarded a moment ago.
    """

    kind: Literal["announcement"] = "announcement"
    tenant_id: str
    tenant_weight: float = Field(1.0, gt=0)
    intent_id: str
    thread_id: str
    capability: CapabilityName
    priority: int = 0
    accepted_at_ms: int
    budget: float | None = None
    attempt: int = 0


class Loser(Part):
    """A bid that did not win. `reason`: outbid, over_budget, excluded, no_slot."""

    node_id: str
    price: float
    reason: str


class Award(Message):
    """The match of one intent with one node."""

    kind: Literal["award"] = "award"
    tenant_id: str
    intent_id: str
    thread_id: str
    capability: CapabilityName
    node_id: str
    price: float
    parts: PriceParts
    losers: list[Loser] = Field(default_factory=list)
    awarded_at_ms: int


class Notice(Message):
    """Something was committed for a thread: look at the ledger. `number` is the thread's newest event number."""

    kind: Literal["notice"] = "notice"
    tenant_id: str
    thread_id: str
    intent_id: str | None = None
    number: int = 0
    is_terminal: bool = False
    cancel_on_node: str | None = None


# ---- the ledger's face to nodes


class EventKind(StrEnum):
    """Kinds of rows in a thread's event log."""

    INTENT_DISCOVERED = "intent.discovered"
    INTENT_AWARDED = "intent.awarded"
    INTENT_CLAIMED = "intent.claimed"
    INTENT_RETRYING = "intent.retrying"
    INTENT_CANCEL_REQUESTED = "intent.cancel_requested"
    DELTA = "delta"
    PROGRESS = "progress"
    TOOL_STARTED = "tool.started"
    TOOL_FINISHED = "tool.finished"
    RESULT_COMMITTED = "result.committed"
    THREAD_UPDATED = "thread.updated"
    INTENT_FAILED = "intent.failed"
    INTENT_CANCELLED = "intent.cancelled"
    INTENT_EXPIRED = "intent.expired"
    INTENT_DEAD = "intent.dead"
    INTENT_REPLAYED = "intent.replayed"


class RegisterNode(Message):
    """A node says who it is and what it can run; repeated whenever that changes."""

    kind: Literal["node.register"] = "node.register"
    node_id: str
    host: str
    slots: int = Field(ge=1)
    capabilities: list[Template]


class NodeWelcome(Message):
    """The ledger's terms. Units: seconds."""

    kind: Literal["node.welcome"] = "node.welcome"
    lease_ttl_s: float
    is_draining: bool = False


class LeaseRef(Part):
    """A claim that the node believes it holds."""

    intent_id: str
    epoch: int


class Heartbeat(Message):
    """One call renews every lease of a node and reports its load."""

    kind: Literal["node.heartbeat"] = "node.heartbeat"
    node_id: str
    leases: list[LeaseRef] = Field(default_factory=list)
    free_slots: int = 0
    is_draining: bool = False


class CancelOrder(Part):
    """Stop this attempt. `cause` is cancelled, interrupted or rolled_back."""

    intent_id: str
    cause: Cause


class HeartbeatReply(Message):
    """Leases not in `renewed` are lost: kill their workers. `drain` asks the node to stop bidding."""

    kind: Literal["node.heartbeat_reply"] = "node.heartbeat_reply"
    renewed: list[str] = Field(default_factory=list)
    cancel: list[CancelOrder] = Field(default_factory=list)
    drain: bool = False
    is_known: bool = True


class ClaimRequest(Message):
    """Take a ready intent. `award` is absent when the node found it by polling.

    `is_repeat`: the node asked before, got no answer, and runs nothing for this intent. If the claim is its own
    already, and nothing was said under it, it gets that claim once more.
    """

    kind: Literal["intent.claim"] = "intent.claim"
    node_id: str
    award: Award | None = None
    is_repeat: bool = False


class ContextMessage(Part):
    """One message as a worker gets it."""

    role: str
    content: str
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None

    def wire(self) -> dict[str, Any]:
        """The message as JSON, without absent fields."""
        return self.model_dump(exclude_none=True)


class ToolRecord(Part):
    """A tool call of this or an earlier attempt. `status`: started, finished or uncertain."""

    call_id: str
    name: str
    arguments: Any = None
    status: Literal["started", "finished", "uncertain"]
    result: Any = None
    attempt: int


class Claim(Message):
    """Everything that a worker needs, and the fence: every later write carries `epoch`."""

    kind: Literal["intent.claimed"] = "intent.claimed"
    tenant_id: str
    intent_id: str
    thread_id: str
    capability: CapabilityName
    payload: dict[str, Any]
    metadata: dict[str, Any] = Field(default_factory=dict)
    epoch: int
    attempt: int
    max_attempts: int
    lease_ttl_s: float
    deadline_ms: int | None = None
    budget: float | None = None
    supports_multi_turn: bool
    messages: list[ContextMessage] = Field(default_factory=list)
    receipt: dict[str, Any] = Field(default_factory=dict)
    turn_number_next: int
    tool_records: list[ToolRecord] = Field(default_factory=list)


class WorkerEvent(Part):
    """Something that a running worker said. `kind`: delta, progress, tool.started or tool.finished."""

    kind: EventKind
    data: dict[str, Any]


class EmitEvents(Message):
    """A batch of a running worker's events, refused when the epoch is stale.

    `batch_number` counts an attempt's batches from 1, so that one that is sent again is stored once; 0: not counted.
    """

    kind: Literal["intent.events"] = "intent.events"
    node_id: str
    epoch: int
    events: list[WorkerEvent]
    batch_number: int = 0


class ThreadUpdate(Part):
    """`thread.updated` as a worker emits it: what the turn adds to the thread.

    `messages` replaces the default pair (payload's text, result's text). The other fields are patches: None
    leaves a field alone; `contextual_memory` is merged key by key, a null value removes the key; a pin with a
    null text is removed.
    """

    messages: list[ContextMessage] | None = None
    plan: dict[str, Any] | None = None
    contextual_memory: dict[str, Any] | None = None
    tool_calls: dict[str, Any] | None = None
    pins: dict[str, str | None] | None = None
    title: str | None = None


class Usage(Part):
    """What an attempt consumed."""

    input_tokens: int = 0
    output_tokens: int = 0
    model_calls: int = 0
    wall_ms: int = 0
    cpu_ms: int = 0
    memory_peak_kb: int = 0


class AttemptLog(Part):
    """The worker's stdout and stderr: the newest part that fits, bad bytes replaced."""

    stdout: str = ""
    stderr: str = ""
    is_truncated: bool = False


class CommitResult(Message):
    """The outcome of a successful attempt."""

    kind: Literal["intent.commit"] = "intent.commit"
    node_id: str
    epoch: int
    result: Any
    thread_update: ThreadUpdate = Field(default_factory=ThreadUpdate)
    usage: Usage = Field(default_factory=Usage)
    log: AttemptLog = Field(default_factory=AttemptLog)


class FailAttempt(Message):
    """An attempt that ended without a result. The ledger decides between retry, failed, dead and cancelled.

    `hint` is the next step as the worker knows it; None leaves it to the ledger.
    """

    kind: Literal["intent.fail"] = "intent.fail"
    node_id: str
    epoch: int
    cause: Cause
    detail: str
    is_retryable: bool
    hint: str | None = None
    partial_text: str = ""
    usage: Usage = Field(default_factory=Usage)
    log: AttemptLog = Field(default_factory=AttemptLog)


class Settled(Message):
    """How the ledger settled an attempt. `state` is ready when it will be tried again."""

    kind: Literal["intent.settled"] = "intent.settled"
    intent_id: str
    state: State
    turn_number: int | None = None


class Claimable(Message):
    """Ready intents that a polling node may try to claim, best first."""

    kind: Literal["intents.claimable"] = "intents.claimable"
    intents: list[Announcement] = Field(default_factory=list)
