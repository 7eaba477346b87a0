"""The command `intentmesh`: every command in one place, and how its errors look.

Must never import a role: gateway, ledger and nodes are started as processes or asked over HTTP.
"""

import os
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer
from pydantic import ValidationError

from cli import capability, chat, context, doctor, intents, keys, nodes, roles, threads, up
from cli.failures import CallFailed
from cli.output import fail, out
from mesh.contract.settings import bad_settings

app = typer.Typer(
    name="intentmesh",
    help="A distributed intent mesh: submit intents, talk in threads, see why which node ran what.",
    epilog="First steps: intentmesh up, then in a second terminal: intentmesh chat --capability recall",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
)

app.command()(up.up)
app.command()(chat.chat)
app.command()(intents.submit)
app.add_typer(intents.app, name="intents")
app.add_typer(threads.app, name="threads")
app.command()(context.context)
app.add_typer(nodes.app, name="nodes")
app.add_typer(capability.app, name="capability")
app.add_typer(keys.app, name="keys")
app.command()(doctor.doctor)
app.command()(roles.gateway)
app.command()(roles.ledger)
app.command()(roles.node)
app.add_typer(roles.database_app, name="db")


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        try:
            out.print(version("intentmesh"))
        except PackageNotFoundError:
            out.print("not installed: runs from its source tree")
        raise typer.Exit


@app.callback()
def options(
    url: Annotated[str | None, typer.Option(help="The gateway. [INTENTMESH_URL]")] = None,
    api_key: Annotated[str | None, typer.Option(help="Key for the gateway. [INTENTMESH_API_KEY]")] = None,
    is_version_wanted: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """A distributed intent mesh: submit intents, talk in threads, see why which node ran what."""
    if url:
        os.environ["INTENTMESH_URL"] = url
    if api_key:
        os.environ["INTENTMESH_API_KEY"] = api_key


def main() -> None:
    """Run the command line; an operating error becomes one line and a hint, never a traceback."""
    try:
        app()
    except CallFailed as error:
        sys.exit(fail(error.detail, error.hint).exit_code)
    except ValidationError as error:
        for name, text in bad_settings(error):
            fail(f"{name}: {text}")
        sys.exit(2)
    except BrokenPipeError:
        # The reader of our output went away, as in `intentmesh intents | head`.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


if __name__ == "__main__":
    main()
