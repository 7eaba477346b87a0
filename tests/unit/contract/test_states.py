"""The transition table is the whole truth about an intent's life."""

import itertools

import pytest

from mesh.contract.states import HEAD, TERMINAL, TRANSITIONS, Event, State, UnknownTransition, advance, sources


@pytest.mark.parametrize(("state", "event"), list(itertools.product(State, Event)))
def test_an_unknown_pair_raises(state: State, event: Event) -> None:
    """`advance` answers from the table or raises; there is no third way."""
    if (state, event) in TRANSITIONS:
        assert advance(state, event) is TRANSITIONS[state, event]
    else:
        with pytest.raises(UnknownTransition):
            advance(state, event)


def test_only_a_replay_leaves_a_terminal_state() -> None:
    """What is over stays over, unless a person asks for it again."""
    assert {event for (state, event) in TRANSITIONS if state in TERMINAL} == {Event.REPLAY}


def test_every_state_is_reached_and_every_live_one_can_be_left() -> None:
    """No state is a dead end or a fiction."""
    reached = set(TRANSITIONS.values())
    assert reached | {State.ACCEPTED} == set(State)
    assert {state for (state, _) in TRANSITIONS} >= set(State) - TERMINAL


def test_every_live_state_can_be_cancelled_and_expire() -> None:
    """A person and a deadline can always end an intent."""
    live = set(State) - TERMINAL
    assert set(sources(Event.CANCEL)) == live
    assert set(sources(Event.EXPIRE)) == live


def test_heads_are_live() -> None:
    """A thread's head is never terminal, and never merely accepted."""
    assert not HEAD & TERMINAL
    assert State.ACCEPTED not in HEAD
