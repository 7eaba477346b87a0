"""The receipt as a table: each message with its source, scores and reason."""

from typing import Any

import pytest

from cli.context import print_context


def candidate(turn_number: int, role: str, **members: Any) -> dict[str, Any]:
    """One candidate of a receipt."""
    plain = {"turn_number": turn_number, "role": role, "message_id": f"{role}{turn_number}", "tokens": 9}
    return (
        plain
        | {"scores": {"semantic": 1.5, "lexical": 0.25, "length": 0.0}, "included": True, "reason": "chosen by score"}
        | members
    )


def test_each_message_stands_with_its_source_scores_and_reason(capsys: pytest.CaptureFixture[str]) -> None:
    """A pin has no scores; an older message has; what nearly came in is listed too."""
    answer = {
        "messages": [
            {"role": "system", "content": "name: Ada"},
            {"role": "user", "name": "Grace", "content": "the locker is 4711"},
        ],
        "receipt": {
            "tokens": 21,
            "budget": 2000,
            "counting": "estimate",
            "semantic": "used",
            "messages": [{"turn_number": None, "source": "pin"}, {"turn_number": 4, "source": "older"}],
            "candidates": [
                candidate(4, "assistant", reason="wrong one"),
                candidate(4, "user"),
                candidate(2, "user", included=False, reason="does not fit"),
            ],
        },
    }
    print_context(answer)
    captured = capsys.readouterr()
    pin, older = captured.out.splitlines()[1:3]
    assert "pin" in pin
    assert "name: Ada" in pin
    assert older.split()[:3] == ["4", "older", "Grace"]
    assert captured.out.splitlines()[0].split() == [
        "turn",
        "from",
        "who",
        "message",
        "tokens",
        "semantic",
        "lexical",
        "why",
    ]
    assert older.split()[-5:] == ["1.50", "0.25", "chosen", "by", "score"]
    assert "chosen by score" in older
    assert "does not fit" in captured.out
    assert "21 of 2000 tokens" in captured.err
    assert "ranking by meaning: used" in captured.err


def test_an_empty_context_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """A fresh thread has nothing to show."""
    print_context({"messages": [], "receipt": {"tokens": 0, "budget": 2000}})
    assert "no turns yet" in capsys.readouterr().err
