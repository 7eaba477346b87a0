"""What follows from the end of an attempt."""

import itertools

import pytest

from ledger.decisions import Backoff, judge
from mesh.contract.errors import DETERMINISTIC_CAUSES, Cause
from mesh.contract.states import State, advance

BACKOFF = Backoff(1.0, 60.0)


def _judge(cause: Cause, **changes: object):  # type: ignore[no-untyped-def]
    facts = {
        "is_retryable": True,
        "cancel_cause": None,
        "attempt": 1,
        "max_attempts": 3,
        "attempts_per_run": 3,
        "backoff": BACKOFF,
    }
    return judge(cause=cause, **(facts | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(("cause", "is_retryable", "attempt"), list(itertools.product(Cause, (True, False), (1, 3))))
def test_every_ending_is_a_transition_of_a_running_intent(cause: Cause, is_retryable: bool, attempt: int) -> None:
    """No cause is without a rule, and no last attempt is tried again (a drained node's aside)."""
    state = advance(State.RUNNING, _judge(cause, is_retryable=is_retryable, attempt=attempt).event)
    if attempt == 3 and cause is not Cause.NODE_DRAINED:
        assert state is not State.READY
    if cause in DETERMINISTIC_CAUSES:
        assert state is not State.READY


@pytest.mark.parametrize("cause", list(Cause))
def test_a_cancel_request_goes_before_every_cause(cause: Cause) -> None:
    """What the caller asked for is what happens, and is what is shown."""
    verdict = _judge(cause, cancel_cause=Cause.INTERRUPTED)
    assert (verdict.event, verdict.cause, verdict.mark) == ("cancel", Cause.INTERRUPTED, "interrupted")


def test_a_rollback_has_no_mark() -> None:
    """It leaves nothing to be marked."""
    assert _judge(Cause.ROLLED_BACK).mark is None
    assert _judge(Cause.CANCELLED).mark == "cancelled"
    assert _judge(Cause.WORKER_CRASHED).mark is None


def test_the_wait_doubles_up_to_its_bound() -> None:
    """Seconds become milliseconds; no number of failures overflows."""
    delays = [
        _judge(Cause.WORKER_CRASHED, attempt=attempt, max_attempts=99, attempts_per_run=99).delay_ms
        for attempt in range(1, 9)
    ]
    assert delays == [1000, 2000, 4000, 8000, 16000, 32000, 60000, 60000]
    assert BACKOFF.delay_ms(10_000) == 60_000


def test_a_replayed_intent_begins_with_the_first_wait_again() -> None:
    """Only failures of this run count."""
    assert _judge(Cause.WORKER_CRASHED, attempt=4, max_attempts=6).delay_ms == 1000
    assert _judge(Cause.WORKER_CRASHED, attempt=5, max_attempts=6).delay_ms == 2000


@pytest.mark.parametrize("cause", [Cause.LEASE_LOST, Cause.NODE_DRAINED])
def test_what_was_not_the_attempts_fault_is_tried_again_at_once(cause: Cause) -> None:
    """Nothing says that it would fail again."""
    assert _judge(cause).delay_ms == 0
