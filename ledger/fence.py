"""The fence: what every write of a node asks of the intent's row, and the refusal when the answer is no.

Must never be weakened: without the epoch a node that slept through its lease overwrites its successor's work.
"""

from sqlalchemy import ColumnElement

from ledger.models import intents
from ledger.settling import in_state
from mesh.contract.errors import ErrorCode, MeshError
from mesh.contract.states import State


def held_by(intent_id: str, epoch: int, node_id: str) -> tuple[ColumnElement[bool], ...]:
    """Return the conditions under which a node holds an intent."""
    return (
        intents.c.intent_id == intent_id,
        intents.c.epoch == epoch,
        intents.c.node_id == node_id,
        in_state(State.RUNNING),
    )


def stale(intent_id: str, epoch: int) -> MeshError:
    """Return the error for a write whose claim is no longer the intent's."""
    return MeshError(
        ErrorCode.STALE_EPOCH,
        f"epoch {epoch} of intent {intent_id} is no longer the one that may write",
        hint="stop its worker: the intent was settled, or belongs to another node now",
    )
