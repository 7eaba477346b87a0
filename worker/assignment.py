"""What a worker is told when it is activated, as one line for its frame socket.

Must never carry the ledger's receipt whole, nor anything that names a secret, a URL or a setting of the mesh.
"""

import json
from dataclasses import dataclass
from typing import Any

from mesh.contract.errors import ErrorCode, MeshError
from mesh.contract.messages import Claim
from worker.capability_folder import CapabilityFolder

_TOLD = frozenset(
    {
        "intent_id",
        "thread_id",
        "capability",
        "payload",
        "metadata",
        "attempt",
        "max_attempts",
        "deadline_ms",
        "supports_multi_turn",
        "messages",
        "turn_number_next",
        "tool_records",
    }
)


@dataclass(frozen=True)
class Assignment:
    """One claim, for a worker of one capability. `remarks` say of each message its turn and what ranking found, where known."""

    claim: Claim
    remarks: tuple[dict[str, int | float], ...] = ()

    @classmethod
    def from_claim(cls, claim: Claim, folder: CapabilityFolder) -> "Assignment":
        """Build the assignment of `claim` for a worker of `folder`: no context unless the template wants it."""
        if not folder.template.supports_multi_turn:
            return cls(claim.model_copy(update={"messages": [], "supports_multi_turn": False}))
        entries = claim.receipt.get("messages")
        remarks = [_remark(entry) for entry in entries] if isinstance(entries, list) else []
        return cls(claim, tuple(remarks) if len(remarks) == len(claim.messages) else ())

    def line(self) -> bytes:
        """Return the line that activates a worker.

        Raises: MeshError `invalid_json` when the claim holds text that no JSON can carry.
        """
        try:
            claim = self.claim.model_dump_json(include=set(_TOLD))
        except ValueError as error:  # a lone surrogate
            raise MeshError(ErrorCode.INVALID_JSON, f"the claim cannot be written as JSON: {error}") from error
        return f'{{"claim":{claim},"remarks":{json.dumps(self.remarks)}}}\n'.encode()


def _remark(entry: Any) -> dict[str, int | float]:
    if not isinstance(entry, dict):
        return {}
    named = {"turn": entry.get("turn_number")} | {name: entry.get(name) for name in ("similarity", "relevance")}
    return {name: value for name, value in named.items() if isinstance(value, int | float)}
