"""`threads`: list conversations; look at, pin facts to, or erase one.

Must never erase without having been told twice.
"""

from typing import Annotated, Any

import typer
from rich.text import Text

from cli.connection import connect
from cli.output import AsJson, age, answer_text, note, out, print_json, status_text, table

app = typer.Typer(help="List threads; show, pin facts to, or erase one.", invoke_without_command=True)


@app.callback()
def threads(
    context: typer.Context,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="How many at most.")] = 20,
    as_json: AsJson = False,
) -> None:
    """List threads, the most recently used first."""
    if context.invoked_subcommand:
        return
    with connect() as client:
        items = client.pages("/threads", count_max=limit)
    if as_json:
        print_json(items)
        return
    rows = [
        (
            item["thread_id"],
            status_text(item["status"]),
            str(item["turn_count"]),
            str(item["message_count"]),
            f"{item['channel']}/{item['external_id']}" if item["channel"] else "-",
            age(item["updated_at"]),
            item["title"] or "",
        )
        for item in items
    ]
    table(("thread", "status", "turns", "messages", "owner", "used", "title"), rows, empty="no threads")


@app.command()
def show(thread_id: str, as_json: AsJson = False) -> None:
    """Show a thread's state: plan, pins, memory, summary."""
    with connect() as client:
        thread = client.get(f"/threads/{thread_id}")
    if as_json:
        print_json(thread)
        return
    out.print(Text.assemble("status    ", status_text(thread["status"])))
    for name in ("thread_id", "title", "url", "turn_count", "message_count", "created_at", "updated_at", "summary"):
        if thread.get(name):
            out.print(Text(f"{name:<14}{thread[name]}"), soft_wrap=True)
    for pin in thread["pins"]:
        out.print(Text(f"pin           {pin['key']}: {pin['text']}"), soft_wrap=True)
    for name in ("last_plan", "contextual_memory", "last_tool_calls"):
        if thread.get(name):
            out.print(Text(f"{name}:\n{answer_text(thread[name])}"), soft_wrap=True)


def print_turns(turns: list[dict[str, Any]]) -> None:
    """Print turns as a person reads a conversation."""
    for turn in turns:
        mark = f" ({turn['mark']})" if turn.get("mark") else ""
        for message in turn["messages"]:
            speaker = message.get("name") or {"user": "you", "assistant": "mesh"}.get(message["role"], message["role"])
            style = "bold" if message["role"] == "user" else "green"
            out.print(
                Text.assemble((f"{turn['turn_number']:>3} {speaker}{mark}: ", style), message["content"]),
                soft_wrap=True,
            )


@app.command()
def turns(
    thread_id: str,
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="How many at most.")] = 1000,
    as_json: AsJson = False,
) -> None:
    """Print a thread's turns as they were said."""
    with connect() as client:
        items = client.pages(f"/threads/{thread_id}/turns", count_max=limit)
    if as_json:
        print_json(items)
    elif items:
        print_turns(items)
    else:
        note("no turns yet")


@app.command()
def pin(thread_id: str, key: str, text: str) -> None:
    """Pin a fact that every context of the thread carries word for word."""
    with connect() as client:
        client.put(f"/threads/{thread_id}/pins/{key}", {"text": text})
    note(f"pinned {key}")


@app.command()
def unpin(thread_id: str, key: str) -> None:
    """Remove a pinned fact."""
    with connect() as client:
        client.delete(f"/threads/{thread_id}/pins/{key}")
    note(f"unpinned {key}")


@app.command()
def erase(
    thread_id: str,
    is_sure: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Erase a thread with all that was said in it, for good."""
    if not is_sure:
        typer.confirm(f"Erase thread {thread_id} for good?", abort=True, err=True)
    with connect() as client:
        client.delete(f"/threads/{thread_id}")
    note(f"erased {thread_id}")
