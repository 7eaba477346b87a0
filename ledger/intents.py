"""Intents as callers see them: submit, look, cancel, replay.

Must never decide by a value read before the thread row's lock was taken, and never change a terminal state
(replay aside, which a person asks for).
"""

from dataclasses import dataclass
from typing import Literal

from mesh.contract.api import IntentView, SubmitIntent
from mesh.contract.states import State
from mesh.contract.template import Template

CancelOutcome = Literal["cancelled", "cancel_requested"]


@dataclass(frozen=True)
class Submitted:
    """What became of a submission. `is_replay`: the idempotency key was known, nothing new was made."""

    intent: IntentView
    is_replay: bool


class Intents:
    """The callers' side of the ledger."""

    async def submit(
        self, tenant_id: str, request: SubmitIntent, *, capability: Template, idempotency_key: str | None = None
    ) -> Submitted:
        """Make an intent durable at the end of its thread's queue.

        Raises: MeshError `thread_busy` (on_busy reject), `idempotency_conflict`, `deadline_passed`,
            `invalid_request`, `not_found` (an unknown parent intent).
        """
        raise NotImplementedError

    async def get(self, tenant_id: str, intent_id: str) -> IntentView:
        """Return one intent.

        Raises: MeshError `not_found`.
        """
        raise NotImplementedError

    async def list(
        self,
        tenant_id: str,
        *,
        status: State | None = None,
        type: str | None = None,
        thread_id: str | None = None,
        cursor: str | None = None,
        limit: int = 50,
    ) -> tuple[list[IntentView], str | None]:
        """Return a page of intents, newest first, and the cursor of the next page (None at the end).

        Raises: MeshError `invalid_request` for a cursor that is none.
        """
        raise NotImplementedError

    async def cancel(self, tenant_id: str, intent_id: str) -> CancelOutcome:
        """Cancel at once what does not run, and ask the node of what does.

        Raises: MeshError `not_found`, `already_terminal` (extra: state).
        """
        raise NotImplementedError

    async def replay(self, tenant_id: str, intent_id: str) -> IntentView:
        """Queue a failed or dead intent again, at the end of its thread, with a new budget of attempts.

        Raises: MeshError `not_found`, `not_replayable` (extra: state), `deadline_passed`.
        """
        raise NotImplementedError
