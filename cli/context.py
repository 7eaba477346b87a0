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
    names = _score_names(candidates)
    table(
        ("turn", "from", "who", "message", "tokens", *names, "why"),
        [_row(message, place, candidates, names) for message, place in zip(answer["messages"], places, strict=True)],
        empty="the context is empty: this thread has no turns yet",
    )
    left_out = [candidate for candidate in candidates if not candidate["included"]]
    if left_out:
        note(f"\nleft out: {len(left_out)}, the nearest first")
        table(
            ("turn", "who", "tokens", *names, "why"),
            [
                (
                    str(candidate["turn_number"]),
                    candidate.get("role", ""),
                    str(candidate["tokens"]),
                    *_scores(candidate, names),
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


def _row(
    message: dict[str, Any], place: dict[str, Any] | None, candidates: list[dict[str, Any]], names: list[str]
) -> tuple[Text, ...]:
    place = place or {}
    candidate = _candidate_of(message, place, candidates)
    cells = (
        str(place.get("turn_number") or "-"),
        place.get("source", ""),
        message.get("name") or message["role"],
        shorten(message["content"], CONTENT_SHOWN),
        str(place.get("tokens") or candidate.get("tokens", "")),
        *_scores(candidate, names),
        candidate.get("reason", ""),
    )
    return tuple(Text(cell) for cell in cells)


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


def _score_names(candidates: list[dict[str, Any]]) -> list[str]:
    """The parts of a score that say something here: one that is 0 everywhere gets no column."""
    names: dict[str, None] = {}
    for candidate in candidates:
        names |= dict.fromkeys(name for name, value in (candidate.get("scores") or {}).items() if value)
    return list(names)


def _scores(candidate: dict[str, Any], names: list[str]) -> list[str]:
    scores = candidate.get("scores") or {}
    return [f"{scores[name]:.2f}" if name in scores else "" for name in names]
