"""Tells the ledger how an attempt ended.

Must never send anything that the epoch does not fence, and never go on for ever: what the ledger does not take is
given up, and the lease runs out.
"""

import structlog

from ledger.client import LedgerClient
from mesh.contract.errors import Cause, ErrorCode, MeshError
from mesh.contract.messages import Claim, CommitResult, FailAttempt
from mesh.event_pump import until_accepted

Outcome = CommitResult | FailAttempt

SETTLE_PATIENCE_S = 120.0
# What the ledger says of an outcome that it can never store.
UNSTORABLE = frozenset({ErrorCode.INVALID_JSON, ErrorCode.INVALID_REQUEST, ErrorCode.TOO_LARGE})

log = structlog.get_logger()


async def settle(ledger: LedgerClient, claim: Claim, outcome: Outcome) -> None:
    """Tell the ledger, again and again while it is away: the same outcome twice is one."""
    try:
        await _tell(ledger, claim.intent_id, outcome)
    except MeshError as error:
        facts = {"intent_id": claim.intent_id, "epoch": claim.epoch}
        if error.code in (ErrorCode.STALE_EPOCH, ErrorCode.NOT_FOUND):
            log.warning("stale_lease", **facts)
        elif isinstance(outcome, CommitResult) and error.code in UNSTORABLE:
            await settle(ledger, claim, _refused(outcome, error))
        else:
            log.error("outcome_given_up", **facts, code=error.code, detail=error.detail)


async def _tell(ledger: LedgerClient, intent_id: str, outcome: Outcome) -> None:
    async for retry in until_accepted(patience_s=SETTLE_PATIENCE_S):
        with retry:
            if isinstance(outcome, CommitResult):
                await ledger.commit(intent_id, outcome)
            else:
                await ledger.fail(intent_id, outcome)


def _refused(outcome: CommitResult, error: MeshError) -> FailAttempt:
    """What the ledger can never commit will not get better by trying again."""
    return FailAttempt(
        node_id=outcome.node_id,
        epoch=outcome.epoch,
        cause=Cause.RESULT_INVALID,
        detail=f"the ledger refused the result: {error.detail}",
        is_retryable=False,
        usage=outcome.usage,
        log=outcome.log,
    )
