"""`keys`: who may use the mesh. Needs the mesh token (set, or made by `up` in the data folder).

Must never print a key but once, when it is made.
"""

from typing import Annotated

import typer

from cli.connection import operator_connect
from cli.output import AsJson, age, note, out, print_json, table

app = typer.Typer(help="Add, list and revoke API keys (operators only).", no_args_is_help=True)


@app.command()
def add(
    tenant_id: Annotated[str, typer.Argument(metavar="TENANT", help="Whose key it is; 'local' for a mesh of one.")],
    label: Annotated[str, typer.Option(help="What it is for, for people.")] = "",
    as_json: AsJson = False,
) -> None:
    """Make a key. It is shown once: the mesh keeps only its hash."""
    client = operator_connect()
    answer = client.post("/admin/keys", {"tenant_id": tenant_id, "label": label})
    client.close()
    if as_json:
        print_json(answer)
    else:
        out.print(answer["secret"], soft_wrap=True)
        note("shown once; from now on every call needs a key: export INTENTMESH_API_KEY=…")


@app.command("list")
def list_keys(as_json: AsJson = False) -> None:
    """List the keys, without their secrets."""
    client = operator_connect()
    items = client.pages("/admin/keys", count_max=10_000)
    client.close()
    if as_json:
        print_json(items)
        return
    rows = [
        (
            item["key_id"],
            item["tenant_id"],
            item.get("label") or "",
            age(item.get("created_at")),
            "revoked" if item.get("revoked_at") else "valid",
        )
        for item in items
    ]
    table(("key", "tenant", "label", "age", "state"), rows, empty="no keys: everyone on this machine may call")


@app.command()
def revoke(key_id: Annotated[str, typer.Argument(metavar="KEY", help="As listed by: intentmesh keys list")]) -> None:
    """Make a key worthless at once."""
    client = operator_connect()
    client.delete(f"/admin/keys/{key_id}")
    client.close()
    note(f"revoked {key_id}")
