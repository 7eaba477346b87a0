"""What follows from the end of an attempt: a pure table, so that every case can be read and tested.

Must never do I/O or look at a clock.

Rule: what a caller asked for (cancel) goes first; then the deadline; what fails the same way every time is not tried
again; the rest is tried again with a doubling wait until the attempts of this run are used up. A drained node is
nobody's fault: it costs no attempt. A lost lease is tried again at once, since nothing says that it would fail again.
"""

from dataclasses import dataclass

from mesh.contract.errors import DETERMINISTIC_CAUSES, Cause
from mesh.contract.states import Event

# The handler or the operator said no, in so many words: an answer, not an accident that a person must look at.
ANSWERS = frozenset({Cause.HANDLER_REFUSED, Cause.MODEL_NOT_CONFIGURED})
# What a caller reads of a turn that was stopped, whoever stopped it.
STOPPED = {
    Cause.CANCELLED: "cancelled on request",
    Cause.INTERRUPTED: "interrupted by a newer intent of its thread",
    Cause.ROLLED_BACK: "rolled back for a newer intent of its thread",
}
CANCELS = frozenset(STOPPED)
IMMEDIATE = frozenset({Cause.LEASE_LOST, Cause.NODE_DRAINED})
# How the partial text of a turn that was stopped is marked; a rolled back one leaves nothing.
MARKS = {Cause.CANCELLED: "cancelled", Cause.INTERRUPTED: "interrupted"}


@dataclass(frozen=True)
class Backoff:
    """Units: seconds."""

    first_s: float
    longest_s: float

    def delay_ms(self, failures: int) -> int:
        """Return the wait after so many failures (at least 1) of the same run."""
        return int(1000 * min(self.longest_s, self.first_s * 2.0 ** min(failures - 1, 62)))


@dataclass(frozen=True)
class Verdict:
    """What to do with the intent. `cause` is the one to show; `delay_ms` and `extra_attempts` belong to a retry."""

    event: Event
    cause: Cause
    delay_ms: int = 0
    extra_attempts: int = 0

    @property
    def mark(self) -> str | None:
        """The mark of the partial turn that may be kept."""
        return MARKS.get(self.cause) if self.event is Event.CANCEL else None


def judge(
    *,
    cause: Cause,
    is_retryable: bool,
    cancel_cause: Cause | None,
    attempt: int,
    max_attempts: int,
    attempts_per_run: int,
    backoff: Backoff,
) -> Verdict:
    """Decide what becomes of an intent whose attempt ended without a result."""
    if cancel_cause is not None:
        return Verdict(Event.CANCEL, cancel_cause)
    if cause in CANCELS:
        return Verdict(Event.CANCEL, cause)
    if cause is Cause.DEADLINE_PASSED:
        return Verdict(Event.EXPIRE, cause)
    if cause in ANSWERS:
        return Verdict(Event.FAIL, cause)
    if cause in DETERMINISTIC_CAUSES:
        return Verdict(Event.BURY, cause)
    if cause is Cause.NODE_DRAINED:
        return Verdict(Event.RETRY, cause, extra_attempts=1)
    if not is_retryable:
        return Verdict(Event.FAIL, cause)
    if attempt >= max_attempts:
        return Verdict(Event.BURY, cause)
    failures = max(1, attempt - (max_attempts - attempts_per_run))
    return Verdict(Event.RETRY, cause, delay_ms=0 if cause in IMMEDIATE else backoff.delay_ms(failures))
