"""The life of an intent as one table; the database and the documents repeat it and tests compare them.

Must never be changed by anything but `advance`: an unknown pair raises and changes nothing.
"""

from enum import StrEnum


class State(StrEnum):
    """Where an intent stands. `READY` is the head of its thread; `ACCEPTED` waits behind a head."""

    ACCEPTED = "accepted"
    READY = "ready"
    RUNNING = "running"
    WAITING = "waiting"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    DEAD = "dead"


class Event(StrEnum):
    """What can happen to an intent."""

    REACH_HEAD = "reach_head"
    CLAIM = "claim"
    RETRY = "retry"
    ASK = "ask"
    ANSWER = "answer"
    SUCCEED = "succeed"
    FAIL = "fail"
    CANCEL = "cancel"
    EXPIRE = "expire"
    BURY = "bury"
    REPLAY = "replay"


TERMINAL = frozenset({State.SUCCEEDED, State.FAILED, State.CANCELLED, State.EXPIRED, State.DEAD})
# At most one intent of a thread is in one of these: the head.
HEAD = frozenset({State.READY, State.RUNNING, State.WAITING})

TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.ACCEPTED, Event.REACH_HEAD): State.READY,
    (State.ACCEPTED, Event.CANCEL): State.CANCELLED,
    (State.ACCEPTED, Event.EXPIRE): State.EXPIRED,
    (State.READY, Event.CLAIM): State.RUNNING,
    (State.READY, Event.CANCEL): State.CANCELLED,
    (State.READY, Event.EXPIRE): State.EXPIRED,
    (State.RUNNING, Event.SUCCEED): State.SUCCEEDED,
    (State.RUNNING, Event.FAIL): State.FAILED,
    (State.RUNNING, Event.BURY): State.DEAD,
    (State.RUNNING, Event.RETRY): State.READY,
    (State.RUNNING, Event.ASK): State.WAITING,
    (State.RUNNING, Event.CANCEL): State.CANCELLED,
    (State.RUNNING, Event.EXPIRE): State.EXPIRED,
    (State.WAITING, Event.ANSWER): State.READY,
    (State.WAITING, Event.CANCEL): State.CANCELLED,
    (State.WAITING, Event.EXPIRE): State.EXPIRED,
    # Only a person replays: the one way out of a terminal state (docs/adr/0002).
    (State.FAILED, Event.REPLAY): State.ACCEPTED,
    (State.DEAD, Event.REPLAY): State.ACCEPTED,
}


class UnknownTransition(Exception):
    """The event does not exist in this state: a bug in the caller, never an operating error."""


def advance(state: State, event: Event) -> State:
    """Return the state after `event`.

    Raises: UnknownTransition when the table holds no such pair.
    """
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise UnknownTransition(f"{event} cannot happen to an intent that is {state}") from None


def sources(event: Event) -> tuple[State, ...]:
    """Return the states in which `event` can happen, for the WHERE of a compare-and-set."""
    return tuple(state for (state, known) in TRANSITIONS if known is event)
