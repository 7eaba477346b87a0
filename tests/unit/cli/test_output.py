"""What the command line prints: short, whole in a pipe, and the same for programs everywhere."""

from datetime import UTC, datetime

import pytest

from cli.output import age, answer_text, print_json, shorten, table

NOW = datetime(2026, 1, 31, 12, 0, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("moment", "said"),
    [
        (None, "-"),
        ("2026-01-31T11:59:30Z", "30 s"),
        ("2026-01-31T11:30:00Z", "30 min"),
        ("2026-01-31T05:00:00+00:00", "7 h"),
        ("2026-01-28T12:00:00Z", "3 d"),
    ],
)
def test_age_in_the_largest_unit(moment: str | None, said: str) -> None:
    """One number and one unit."""
    assert age(moment, now=NOW) == said


def test_shorten_keeps_to_one_line_and_marks_the_cut() -> None:
    """White space collapses; a cut is visible."""
    assert shorten("a\n b", 10) == "a b"
    assert shorten("abcdef", 4) == "abc…"


@pytest.mark.parametrize(
    ("result", "said"), [("plain", "plain"), ({"text": "inner", "n": 1}, "inner"), ([1], "[\n  1\n]"), (None, "null")]
)
def test_the_answer_is_the_text_where_there_is_one(result: object, said: str) -> None:
    """Everything else is JSON."""
    assert answer_text(result) == said


def test_a_table_in_a_pipe_cuts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """Ids stay whole for the next program."""
    table(("id", "text"), [("x" * 300, "[bold]not markup[/bold]")], empty="nothing")
    captured = capsys.readouterr()
    assert "x" * 300 in captured.out
    assert "[bold]not markup[/bold]" in captured.out


def test_an_empty_table_is_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    """On stderr, so that a pipe gets nothing."""
    table(("id",), [], empty="no intents")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "no intents" in captured.err


def test_json_keeps_letters(capsys: pytest.CaptureFixture[str]) -> None:
    """No escapes for what a person can read."""
    print_json({"text": "Grüße"})
    assert '"Grüße"' in capsys.readouterr().out
