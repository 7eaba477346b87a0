"""How the command line talks to a person: tables, times, errors with a hint; `--json` for programs.

Must never write anything but data to stdout: notes, progress and errors go to stderr.
"""

import json
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

out = Console(soft_wrap=False, highlight=False)
err = Console(stderr=True, highlight=False)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]

STATUS_STYLES = {
    "succeeded": "green",
    "up": "green",
    "running": "cyan",
    "ready": "cyan",
    "accepted": "blue",
    "queued": "blue",
    "waiting": "yellow",
    "draining": "yellow",
    "cancelled": "yellow",
    "expired": "yellow",
    "failed": "red",
    "dead": "red",
    "lost": "red",
}


def print_json(value: Any) -> None:
    """Print data as indented JSON, the same on a terminal and in a pipe."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False, indent=2) + "\n")


def note(text: str) -> None:
    """Say something beside the data."""
    err.print(Text(text, style="dim"), soft_wrap=True)


def fail(detail: str, hint: str | None = None, *, exit_code: int = 1) -> typer.Exit:
    """Say what went wrong and what to do next; the caller raises what this returns."""
    err.print(Text.assemble(("error: ", "bold red"), detail), soft_wrap=True)
    if hint:
        err.print(Text.assemble(("  next: ", "bold"), hint), soft_wrap=True)
    return typer.Exit(exit_code)


def status_text(status: str) -> Text:
    """Return a state in its colour."""
    return Text(status, style=STATUS_STYLES.get(status, ""))


def age(moment: str | None, *, now: datetime | None = None) -> str:
    """Return how long ago an RFC 3339 time was, short: 5 s, 3 min, 2 h, 4 d."""
    if not moment:
        return "-"
    seconds = ((now or datetime.now(UTC)) - datetime.fromisoformat(moment)).total_seconds()
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if abs(seconds) >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def shorten(text: str, length_max: int) -> str:
    """Return `text` on one line, cut with a visible mark."""
    line = " ".join(text.split())
    return line if len(line) <= length_max else line[: length_max - 1] + "…"


def answer_text(result: Any) -> str:
    """Return what a person wants to see of a result: its text when it has one, else JSON."""
    match result:
        case str():
            return result
        case {"text": str() as text}:
            return text
        case _:
            return json.dumps(result, ensure_ascii=False, indent=2)


def table(columns: Sequence[str], rows: Iterable[Sequence[str | Text]], *, empty: str) -> None:
    """Print a table, or say in one line that there is nothing.

    In a pipe the table keeps its natural width, so that no id is cut.
    """
    rows = list(rows)
    if not rows:
        note(empty)
        return
    grid = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for index, column in enumerate(columns):
        grid.add_column(column, overflow="fold", no_wrap=index == 0)
    for row in rows:
        grid.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in row))
    if out.is_terminal:
        out.print(grid)
    else:
        Console(width=10_000, highlight=False).print(grid)
