"""`context`: what a worker would be shown of a thread for a query, and why each message is in or out.

Must never rank anything itself: it prints the ledger's receipt.
"""

from typing import Annotated, Any

import typer
from rich.text import Text

from cli.connection import connect
from cli.output import AsJson, note, print_json, shorten, table

CONTENT_SHOWN = 70
OUT_SHOWN = 5


def context(
    thread_id: Annotated[str, typer.Argument(metavar="THREAD")],
    query: Annotated[str, typer.Argument(help="The message that a worker would have to answer.")],
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Budget in tokens.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show the context for a query: each message, where it comes from, its scores."""
    with connect() as client:
        answer = client.get(f"/threads/{thread_id}/context", query=query, max_tokens=max_tokens)
    if as_json:
        print_json(answer)
    else:
        print_context(answer)


def print_context(answer: dict[str, Any]) -> None:
    """Print the answer of `GET /threads/{id}/context` as a table, then what nearly came in."""
    receipt = answer["receipt"]
    candidates = receipt.get("candidates") or []
    places = receipt.get("messages") or [{}] * len(answer["messages"])
    table(
        ("turn", "from", "who", "message", "tokens", "scores", "why"),
        [_row(message, place, candidates) for message, place in zip(answer["messages"], places, strict=True)],
        empty="the context is empty: this thread has no turns yet",
    )
    left_out = [candidate for candidate in candidates if not candidate["included"]]
    if left_out:
        note(f"\nleft out: {len(left_out)}, the nearest first")
        table(
            ("turn", "who", "tokens", "scores", "why"),
            [
                (
                    str(candidate["turn_number"]),
                    candidate.get("role", ""),
                    str(candidate["tokens"]),
                    _scores(candidate),
                    candidate["reason"],
                )
                for candidate in left_out[:OUT_SHOWN]
            ],
            empty="",
        )
    note(
        f"\n{receipt['tokens']} of {receipt['budget']} tokens ({receipt.get('counting', 'estimate')}); "
        f"ranking by meaning: {receipt.get('semantic', 'unknown')}"
    )


def _row(message: dict[str, Any], place: dict[str, Any] | None, candidates: list[dict[str, Any]]) -> tuple[Text, ...]:
    place = place or {}
    candidate = _candidate_of(message, place, candidates)
    return (
        Text(str(place.get("turn_number") or "-")),
        Text(place.get("source", "")),
        Text(message.get("name") or message["role"]),
        Text(shorten(message["content"], CONTENT_SHOWN)),
        Text(str(place.get("tokens") or candidate.get("tokens", ""))),
        Text(_scores(candidate)),
        Text(candidate.get("reason", "")),
    )


def _candidate_of(message: dict[str, Any], place: dict[str, Any], candidates: list[dict[str, Any]]) -> dict[str, Any]:
    """Find the candidate that a message was: by its id when the receipt gives one, else by turn and role."""
    for candidate in candidates:
        if place.get("message_id"):
            if place["message_id"] in (candidate.get("message_id"), *candidate.get("message_ids", ())):
                return candidate
        elif (
            place.get("turn_number")
            and candidate["turn_number"] == place["turn_number"]
            and candidate.get("role") == message["role"]
        ):
            return candidate
    return {}


def _scores(candidate: dict[str, Any]) -> str:
    scores = candidate.get("scores") or {}
    return " ".join(f"{name} {value:.2f}" for name, value in scores.items() if isinstance(value, int | float))
