"""One folder of capabilities/: read, verified and fingerprinted.

Must never import or run what it finds there: a handler is parsed, not executed.
"""

import ast
import hashlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import jinja2

from mesh.contract.template import Mistake, Template, TemplateError, load_template
from worker.prompt_files import REQUIRED_PROMPT, prompt_environment

TEMPLATE_FILE = "template.yaml"
HANDLER_FILE = "handler.py"
PROMPTS_FOLDER = "prompts"
_FILE_BYTES_MAX = 4 * 1024 * 1024


@dataclass(frozen=True)
class CapabilityFolder:
    """A capability that can be run. `digest` changes whenever what it would do may change."""

    template: Template
    path: Path
    digest: str


def load_capability(path: Path) -> CapabilityFolder:
    """Read and verify the folder at `path`.

    Raises: TemplateError with every mistake found; mistakes outside template.yaml have the file as their path.
    """
    path = path.resolve()
    text = _read(path / TEMPLATE_FILE)
    template = load_template(text)
    mistakes = []
    if template.name != path.name:
        mistakes.append(
            Mistake(_line_of("name", text), "name", f"is {template.name!r}, but the folder is called {path.name!r}")
        )
    if template.isolation == "sandbox":
        line = _line_of("isolation", text)
        mistakes.append(Mistake(line, "isolation", "'sandbox' is not available in this version: use 'process'"))
    match template.runtime:
        case "python":
            mistakes += _check_handler(path / HANDLER_FILE)
        case "exec":
            mistakes += _check_command(path, template.command or [], _line_of("command", text))
        case "prompt":
            mistakes += _check_prompts(path / PROMPTS_FOLDER)
    if mistakes:
        raise TemplateError(mistakes)
    return CapabilityFolder(template, path, _digest(path))


def load_capabilities(root: Path) -> tuple[list[CapabilityFolder], dict[str, TemplateError]]:
    """Read every folder below `root` that holds a template.yaml; a broken one never stops the rest.

    Returns what can be run, in the order of names, and the errors by the folder's name.
    """
    good: list[CapabilityFolder] = []
    bad: dict[str, TemplateError] = {}
    try:
        folders = sorted(entry for entry in root.iterdir() if (entry / TEMPLATE_FILE).exists())
    except OSError as error:
        return [], {root.name: TemplateError([Mistake(1, "", f"cannot list {root}: {error.strerror}")])}
    for folder in folders:
        try:
            good.append(load_capability(folder))
        except TemplateError as error:
            bad[folder.name] = error
    return good, bad


def resolve_program(folder: Path, command: list[str]) -> str | None:
    """Return the path of the program that `command` names: in the folder first, then on PATH; None when absent."""
    inside = folder / command[0]  # an absolute command[0] stays what it is
    if inside.is_file():
        return str(inside) if os.access(inside, os.X_OK) else None
    return None if "/" in command[0] else shutil.which(command[0])


def _read(file: Path) -> str:
    try:
        if file.stat().st_size > _FILE_BYTES_MAX:
            raise TemplateError([Mistake(1, file.name, f"larger than {_FILE_BYTES_MAX} bytes")])
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise TemplateError([Mistake(1, file.name, "this file is missing")]) from None
    except OSError as error:
        raise TemplateError([Mistake(1, file.name, f"cannot be read: {error.strerror}")]) from error
    except UnicodeDecodeError as error:
        raise TemplateError([Mistake(1, file.name, f"is not UTF-8 (at byte {error.start})")]) from error


def _line_of(key: str, template: str) -> int:
    """Return the line of a key at the top of a template that has been read without mistakes."""
    return next((number for number, line in enumerate(template.splitlines(), 1) if line.startswith(f"{key}:")), 1)


def _check_handler(file: Path) -> list[Mistake]:
    try:
        tree = ast.parse(_read(file))
    except TemplateError as error:
        return error.mistakes
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None) or 1
        return [Mistake(line, file.name, f"is not Python: {getattr(error, 'msg', error)}")]
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == "run":
            return _check_parameters(file, node)
    return [Mistake(1, file.name, "defines no function 'run': write def run(intent, context)")]


def _check_parameters(file: Path, function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[Mistake]:
    arguments = function.args
    positional = len(arguments.posonlyargs) + len(arguments.args)
    required = positional - len(arguments.defaults)
    needs_keywords = any(default is None for default in arguments.kw_defaults)
    takes_two = required <= 2 and (positional >= 2 or arguments.vararg is not None)
    if takes_two and not needs_keywords:
        return []
    return [Mistake(function.lineno, file.name, "run must take two arguments: def run(intent, context)")]


def _check_command(folder: Path, command: list[str], line: int) -> list[Mistake]:
    if resolve_program(folder, command) is not None:
        return []
    if (folder / command[0]).is_file():
        shown = Path(folder.name) / command[0]
        return [Mistake(line, "command", f"{command[0]!r} is not executable: chmod +x {shown}")]
    return [Mistake(line, "command", f"there is no program {command[0]!r}, neither in the folder nor on PATH")]


def _check_prompts(folder: Path) -> list[Mistake]:
    mistakes = []
    if not (folder / REQUIRED_PROMPT).is_file():
        mistakes.append(Mistake(1, f"{folder.name}/{REQUIRED_PROMPT}", "this file is missing: it holds the message"))
    environment = prompt_environment()
    for file in sorted(folder.glob("*.md")):
        name = f"{folder.name}/{file.name}"
        try:
            environment.parse(_read(file))
        except TemplateError as error:
            mistakes += [Mistake(mistake.line, name, mistake.text) for mistake in error.mistakes]
        except jinja2.TemplateSyntaxError as error:
            mistakes.append(Mistake(error.lineno, name, f"is not a template: {error.message}"))
    return mistakes


def _digest(folder: Path) -> str:
    """Hash every file of the folder with its name, caches aside."""
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*")):
        if not file.is_file() or "__pycache__" in file.parts:
            continue
        name = str(file.relative_to(folder)).encode("utf-8", "surrogateescape")
        try:
            with file.open("rb") as stream:
                content = hashlib.file_digest(stream, "sha256").digest()
        except OSError as error:
            raise TemplateError([Mistake(1, file.name, f"cannot be read: {error.strerror}")]) from error
        digest.update(len(name).to_bytes(4, "big") + name + content)
    return digest.hexdigest()
