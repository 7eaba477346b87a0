"""`nodes`: who is in the mesh, and how to take one out of it in order.

Must never stop a node hard: draining lets its workers finish.
"""

from typing import Annotated

import typer

from cli.connection import connect, operator_connect
from cli.output import AsJson, age, note, print_json, status_text, table

app = typer.Typer(help="List nodes; drain one.", invoke_without_command=True)


@app.callback()
def nodes(context: typer.Context, as_json: AsJson = False) -> None:
    """List the nodes of the mesh."""
    if context.invoked_subcommand:
        return
    with connect() as client:
        items = client.pages("/nodes", count_max=10_000)
    if as_json:
        print_json(items)
        return
    rows = [
        (
            item["node_id"],
            status_text(item["status"]),
            f"{item['running']}/{item['slots']}",
            item["host"],
            age(item["started_at"]),
            age(item["seen_at"]),
            ", ".join(item["capabilities"]),
        )
        for item in items
    ]
    table(
        ("node", "status", "running", "host", "started", "seen", "capabilities"),
        rows,
        empty="no nodes: intentmesh node starts one",
    )


@app.command()
def drain(
    node_id: Annotated[str, typer.Argument(help="As listed by: intentmesh nodes")],
    as_json: AsJson = False,
) -> None:
    """Let a node finish what it runs and take nothing new."""
    client = operator_connect()
    answer = client.post(f"/nodes/{node_id}/drain")
    client.close()
    if as_json:
        print_json(answer)
    else:
        note(f"{node_id} is draining")
