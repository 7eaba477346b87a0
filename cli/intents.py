"""`submit` and `intents`: hand work to the mesh and see what became of it.

Must never wait without a bound.
"""

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from cli.connection import connect
from cli.output import AsJson, age, answer_text, fail, note, out, print_json, shorten, status_text, table
from mesh.contract.states import TERMINAL, State

if TYPE_CHECKING:
    from cli.client import MeshClient

app = typer.Typer(help="List intents; look at, cancel or replay one.", invoke_without_command=True)

# The gateway bounds how long one call may wait; beyond that the client asks again.
WAIT_PER_CALL_MAX_S = 20.0
POLL_INTERVAL_S = 0.5


def _read_payload(text: str) -> dict[str, Any]:
    """Read a JSON object from the argument, from stdin (-) or from a file (@name)."""
    source = text
    try:
        if text == "-":
            source = sys.stdin.read()
        elif text.startswith("@"):
            source = Path(text[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise fail(f"the payload cannot be read: {error}", exit_code=2) from error
    try:
        payload = json.loads(source)
    except json.JSONDecodeError as error:
        raise fail(
            f"the payload is not JSON: {error.msg} (line {error.lineno}, column {error.colno})",
            'put it in single quotes, as in: intentmesh submit echo \'{"text": "hello"}\'',
            exit_code=2,
        ) from error
    if not isinstance(payload, dict):
        raise fail("the payload must be a JSON object", 'write {"text": …}', exit_code=2)
    return payload


def _is_finished(intent: dict[str, Any]) -> bool:
    return State(intent["status"]) in TERMINAL


def wait_for(client: "MeshClient", intent_id: str, *, deadline: float) -> dict[str, Any]:
    """Ask until the intent is finished or the monotonic `deadline` has passed; return it as it then is."""
    while True:
        intent: dict[str, Any] = client.get(f"/intents/{intent_id}")
        if _is_finished(intent) or time.monotonic() >= deadline:
            return intent
        time.sleep(min(POLL_INTERVAL_S, max(0.0, deadline - time.monotonic())))


def submit(
    type_: Annotated[str, typer.Argument(metavar="TYPE", help="Capability that shall run.")],
    payload: Annotated[str, typer.Argument(metavar="JSON", help="Its input: a JSON object, @file, or - for stdin.")],
    thread: Annotated[str | None, typer.Option(help="Conversation; a new one when absent.")] = None,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for the result; 0 returns at once.")] = 10.0,
    priority: Annotated[int, typer.Option(help="Higher goes first.")] = 0,
    budget: Annotated[float | None, typer.Option(min=0, help="Highest price that it pays.")] = None,
    on_busy: Annotated[
        str, typer.Option(help="When the thread is busy: enqueue, reject, interrupt or rollback.")
    ] = "enqueue",
    not_before: Annotated[str | None, typer.Option(help="Do not start before this time (RFC 3339).")] = None,
    deadline: Annotated[str | None, typer.Option(help="Expire when not finished by then (RFC 3339).")] = None,
    key: Annotated[str | None, typer.Option(help="Idempotency key: the same key never runs twice.")] = None,
    as_json: AsJson = False,
) -> None:
    """Submit an intent and print its result."""
    body: dict[str, Any] = {"type": type_, "payload": _read_payload(payload), "on_busy": on_busy, "priority": priority}
    options = {"thread_id": thread, "budget": budget, "not_before": not_before, "deadline": deadline}
    body |= {name: value for name, value in options.items() if value is not None}
    give_up_at = time.monotonic() + wait
    with connect() as client:
        accepted = client.submit(body, wait_s=min(wait, WAIT_PER_CALL_MAX_S), key=key)
        intent = accepted
        if wait:
            intent = wait_for(client, accepted["intent_id"], deadline=give_up_at)
    if as_json:
        print_json(intent)
    else:
        _print_outcome(intent)
    if _is_finished(intent) and intent["status"] != State.SUCCEEDED:
        raise typer.Exit(1)


def _print_outcome(intent: dict[str, Any]) -> None:
    where = f"intent {intent['intent_id']} · thread {intent['thread_id']}"
    if not _is_finished(intent):
        out.print(intent["intent_id"])
        note(f"{intent['status']} · {where}\nlook again with: intentmesh intents show {intent['intent_id']}")
    elif intent["status"] == State.SUCCEEDED:
        out.print(Text(answer_text(intent["result"])), soft_wrap=True)
        turn = f" · turn {intent['turn_number']}" if intent.get("turn_number") else ""
        note(f"succeeded{turn} · node {intent.get('node_id')} · {where}")
    else:
        error = intent.get("error") or {}
        fail(f"{intent['status']}: {error.get('detail', 'no reason was given')}", error.get("hint"))
        note(where)


@app.callback()
def intents(
    context: typer.Context,
    status: Annotated[str | None, typer.Option(help="Only in this state, for example running or dead.")] = None,
    type_: Annotated[str | None, typer.Option("--type", help="Only of this capability.")] = None,
    thread: Annotated[str | None, typer.Option(help="Only of this thread.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="How many at most.")] = 20,
    as_json: AsJson = False,
) -> None:
    """List intents, newest first."""
    if context.invoked_subcommand:
        return
    with connect() as client:
        items = client.pages("/intents", count_max=limit, status=status, type=type_, thread_id=thread)
    if as_json:
        print_json(items)
        return
    rows = [
        (
            item["intent_id"],
            item["type"],
            status_text(item["status"]),
            f"{item['attempt']}/{item['max_attempts']}",
            item["node_id"] or "-",
            item["thread_id"],
            age(item["created_at"]),
            shorten((item.get("error") or {}).get("detail") or answer_text(item["payload"]), 60),
        )
        for item in items
    ]
    table(("intent", "type", "status", "tries", "node", "thread", "age", ""), rows, empty="no intents")


@app.command()
def show(intent_id: str, as_json: AsJson = False) -> None:
    """Show one intent: state, attempts, why this node, result or error."""
    with connect() as client:
        intent = client.get(f"/intents/{intent_id}")
    if as_json:
        print_json(intent)
        return
    _print_facts(intent)
    _print_award(intent.get("award"))
    for attempt in intent["attempts"]:
        outcome = attempt["cause"] or ("running" if attempt["ended_at"] is None else "done")
        out.print(Text(f"attempt {attempt['attempt']}  {outcome}  node {attempt['node_id']}"))
        if attempt["detail"]:
            out.print(Text(f"  {attempt['detail']}"), soft_wrap=True)
        for name in ("stdout", "stderr"):
            for line in attempt[name].splitlines():
                out.print(Text(f"  {name}: {line}", style="dim"), soft_wrap=True)
    if intent["status"] == State.SUCCEEDED:
        out.print(Text(answer_text(intent["result"])), soft_wrap=True)
    elif intent.get("error"):
        fail(intent["error"]["detail"], intent["error"].get("hint"))


def _print_facts(intent: dict[str, Any]) -> None:
    facts = {
        "intent": intent["intent_id"],
        "type": intent["type"],
        "thread": intent["thread_id"],
        "turn": intent.get("turn_number"),
        "priority": intent["priority"] or None,
        "created": intent["created_at"],
        "started": intent["started_at"],
        "finished": intent["finished_at"],
        "not before": intent["not_before"],
        "deadline": intent["deadline"],
        "usage": ", ".join(f"{name} {value}" for name, value in (intent.get("usage") or {}).items() if value),
    }
    out.print(Text.assemble("status    ", status_text(intent["status"])))
    for name, value in facts.items():
        if value:
            out.print(Text(f"{name:<10}{value}"), soft_wrap=True)


def _print_award(award: dict[str, Any] | None) -> None:
    if not award:
        return
    parts = ", ".join(f"{name} {value:g}" for name, value in award["parts"].items() if value)
    out.print(Text(f"award     node {award['node_id']} for {award['price']:g} ({parts or 'all parts 0'})"))
    for loser in award["losers"]:
        out.print(Text(f"  lost    node {loser['node_id']} at {loser['price']:g}: {loser['reason']}"))


@app.command()
def cancel(intent_id: str, as_json: AsJson = False) -> None:
    """Cancel an intent; a running one is asked to stop."""
    with connect() as client:
        answer = client.post(f"/intents/{intent_id}/cancel")
    if as_json:
        print_json(answer)
    else:
        out.print(answer["status"])


@app.command()
def replay(intent_id: str, as_json: AsJson = False) -> None:
    """Run a failed or dead intent again, at the end of its thread."""
    with connect() as client:
        answer = client.post(f"/intents/{intent_id}/replay")
    if as_json:
        print_json(answer)
    else:
        out.print(answer["status"])
        note(f"look again with: intentmesh intents show {intent_id}")


@app.command()
def events(
    intent_id: str,
    after: Annotated[int, typer.Option(min=0, help="Only events with a higher number.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Follow an intent's events until it is finished."""
    with connect() as client:
        for event in client.events(f"/intents/{intent_id}/events", after=after):
            if as_json:
                line = {"number": event.number, "kind": event.kind, "data": event.data}
                sys.stdout.write(json.dumps(line, ensure_ascii=False) + "\n")
                sys.stdout.flush()
            else:
                out.print(
                    Text(f"{event.number:>4}  {event.kind:<24}{shorten(json.dumps(event.data), 120)}"), soft_wrap=True
                )
