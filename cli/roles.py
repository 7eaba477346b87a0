"""`gateway`, `ledger`, `node` and `db upgrade`: one role each, in this process's place.

Must never set what a role decides itself: settings reach it by the environment.
"""

import os
import sys
from typing import Annotated, NoReturn

import typer

from cli.settings import ROOT, CliSettings

database_app = typer.Typer(help="The ledger's database.", no_args_is_help=True)


def role_command(*words: str) -> list[str]:
    """Return the command line of a role.

    -P keeps the caller's folder out of the import path: a folder `mesh` there is not ours.
    """
    return [sys.executable, "-P", "-m", *words]


def role_environment(settings: dict[str, str]) -> dict[str, str]:
    """Return the environment of a role: ours, its settings, and the way to the code where it is not installed."""
    environment = os.environ | settings
    if not ROOT.name.endswith("-packages"):
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
    return environment


def _become(*words: str, **settings: object) -> NoReturn:
    given = {f"INTENTMESH_{name.upper()}": str(value) for name, value in settings.items() if value is not None}
    command = role_command(*words)
    os.execve(command[0], command, role_environment(given))  # noqa: S606 - that is what it is for


def gateway(
    host: Annotated[str | None, typer.Option(help="Address to listen on. [INTENTMESH_HOST]")] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65_535, help="Port. [INTENTMESH_PORT]")] = None,
) -> None:
    """Run a gateway; on SQLite it holds the ledger too."""
    _become("gateway", host=host, port=port)


def ledger() -> None:
    """Run a ledger over PostgreSQL (INTENTMESH_DATABASE_URL)."""
    _become("ledger", "serve")


def node(
    slots: Annotated[int | None, typer.Option(min=1, help="Intents at once. [INTENTMESH_NODE_SLOTS]")] = None,
) -> None:
    """Run a node: shipped capabilities and ./capabilities, unless INTENTMESH_CAPABILITIES_DIR says otherwise."""
    roots = CliSettings().capability_roots()
    _become("mesh", node_slots=slots, capabilities_dir=":".join(str(root) for root in roots))


@database_app.command()
def upgrade() -> None:
    """Bring the database to this version's schema."""
    _become("ledger", "upgrade")
