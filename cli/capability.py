"""`capability`: write a new one, check one, list what the mesh offers.

Must never run what it checks: reading is enough (worker.capability_folder).
"""

import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from cli.connection import connect
from cli.output import AsJson, fail, note, out, print_json, shorten, table
from cli.scaffold import Runtime, scaffold
from cli.settings import CliSettings

if TYPE_CHECKING:
    from mesh.contract.template import TemplateError
    from worker.capability_folder import CapabilityFolder

app = typer.Typer(help="Write, check and list capabilities.", no_args_is_help=True)

TO_CHANGE: dict[Runtime, str] = {"python": "handler.py", "exec": "run.sh", "prompt": "prompts"}
NAME = re.compile(r"^[a-z][a-z0-9_-]{0,63}$")


@app.command()
def new(
    name: Annotated[str, typer.Argument(help="Small letters, digits, - and _.")],
    runtime: Annotated[
        Runtime, typer.Option(help="python: a function; exec: any program; prompt: no code.")
    ] = "python",
    directory: Annotated[
        Path | None,
        typer.Option("--dir", help="Where the folder is made. [INTENTMESH_CAPABILITIES_DIR, ./capabilities]"),
    ] = None,
) -> None:
    """Write a working multi-turn capability to start from."""
    if not NAME.match(name):
        raise fail(
            f"{name!r} cannot name a capability: small letters, digits, - and _, a letter first, at most 64",
            f"intentmesh capability new {re.sub(r'[^a-z0-9_-]+', '-', name.lower()).strip('-_0123456789') or 'my-own'}",
            exit_code=2,
        )
    root = directory or CliSettings().new_capability_root()
    folder = root / name
    try:
        files = scaffold(folder, name, runtime)
    except FileExistsError as error:
        raise fail(f"{error.filename or folder} exists already", "another name, or --dir FOLDER") from error
    except OSError as error:
        raise fail(f"{folder} cannot be written: {error}", "--dir FOLDER") from error
    for file in files:
        out.print(Text(str(file)), soft_wrap=True)
    where = shlex.quote(str(folder))
    roots = [path.resolve() for path in CliSettings().capability_roots() if path.exists()]
    all_roots = shlex.quote(":".join(map(str, [*roots, root.resolve()])))
    environment = "" if root.resolve() in roots else f"INTENTMESH_CAPABILITIES_DIR={all_roots} "
    steps = [
        f"change      {folder / TO_CHANGE[runtime]}",
        f"check       intentmesh capability check {where}",
        f"start       {environment}intentmesh up      (a running node takes it up by itself within seconds)",
        f"try         intentmesh submit {name} @{where}/payload.json",
        f"talk        intentmesh chat --capability {name}",
    ]
    if runtime == "python":
        steps.insert(1, f"test        {shlex.quote(sys.executable)} {where}/test_handler.py")
    note("\nnext steps:\n  " + "\n  ".join(steps))


@app.command()
def check(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A capability's folder, or a folder of them.")],
    as_json: AsJson = False,
) -> None:
    """Check a capability's folder and say every mistake with its file and line."""
    if not directory.is_dir():
        raise fail(f"{directory} is not a folder", "intentmesh capability new NAME writes one", exit_code=2)
    folders = [directory]
    if not (directory / "template.yaml").exists():
        found = sorted(entry.parent for entry in directory.glob("*/template.yaml"))
        folders = found or folders
    findings = [(folder, _examine(folder)) for folder in folders]
    if as_json:
        print_json([_finding(*finding) for finding in findings])
    else:
        for finding in findings:
            _print_finding(*finding)
    if any(isinstance(outcome, Exception) for _, outcome in findings):
        raise typer.Exit(1)


def _examine(folder: Path) -> "CapabilityFolder | TemplateError":
    # Loaded here: it brings a YAML reader, a JSON Schema validator and Jinja, which no other command needs.
    from mesh.contract.template import TemplateError
    from worker.capability_folder import load_capability

    try:
        return load_capability(folder)
    except TemplateError as error:
        return error


def _finding(folder: Path, outcome: "CapabilityFolder | TemplateError") -> dict[str, object]:
    if isinstance(outcome, Exception):
        return {"folder": str(folder), "name": None, "mistakes": [vars(mistake) for mistake in outcome.mistakes]}
    return {"folder": str(folder), "name": outcome.template.name, "mistakes": []}


def _print_finding(folder: Path, outcome: "CapabilityFolder | TemplateError") -> None:
    if isinstance(outcome, Exception):
        out.print(Text.assemble(("bad   ", "red"), str(folder)), soft_wrap=True)
        for mistake in outcome.mistakes:
            out.print(Text(f"      {mistake}"), soft_wrap=True)
        return
    template = outcome.template
    turns = "multi-turn" if template.supports_multi_turn else "single-turn"
    limits = f"{template.limits.timeout_s:g} s, {template.limits.memory_mb} MB"
    out.print(Text.assemble(("good  ", "green"), f"{folder}: {template.runtime}, {turns}, {limits}"), soft_wrap=True)


@app.command("list")
def list_capabilities(as_json: AsJson = False) -> None:
    """List what the mesh can run now."""
    with connect() as client:
        answer = client.get("/capabilities")
    items = answer["items"] if isinstance(answer, dict) else answer
    if as_json:
        print_json(items)
        return
    rows = [
        (
            item["name"],
            item["version"],
            item["runtime"],
            "yes" if item["supports_multi_turn"] else "no",
            "yes" if item.get("is_available", True) else "no node is up",
            shorten(item["description"], 70),
        )
        for item in items
    ]
    table(("capability", "version", "runtime", "multi-turn", "available", ""), rows, empty="none: is a node running?")
