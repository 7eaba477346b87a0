"""The house style that a program can check, over every file of the repository.

Must never check taste: each rule here has one right answer. Its own examples are put together from pieces, so
that this file passes too.
"""

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("gateway", "mesh", "worker", "ledger", "cli", "capabilities")
FILE_LINES_MAX = 500
FUNCTION_LINES_MAX = 60
TEXT_BYTES_MAX = 4 * 1024 * 1024

# What says where or how this tree was made, and not what it is.
FOREIGN = {
    "a path of one machine": re.compile("|".join(["/" + "work/", "/opt/" + "wheels", "/opt/" + "pypi", "/ro" + "ot/"])),
    "the host of a package registry": re.compile(
        "|".join(["pypi" + r"\.org", "python" + r"hosted\.org", "registry" + r"\.npmjs", "deb" + r"\.debian\.org"])
    ),
    "an unfinished thought": re.compile(r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "XX" + "X"]) + r")\b"),
}
# The glossary's words are written out; these are the ones that people shorten.
ABBREVIATIONS = re.compile(
    r"addr|arr|btn|buf|cb|cfg|cnt|conf|conn|ctx|curr|desc|dest|dst|ent|evt|fn|func|idx|impl|lst|mgr|msgs?|num|obj|opts"
    r"|param|pkg|prev|proc|ptr|pwd|qty|rec|reqs?|res|resp|ret|sess|sig|src|stmt|tbl|tmp|tok|txn?|usr|utils?|vals?|ver|wf"
)
# Names that a library gives to what we override.
GIVEN_NAMES = {("gateway/wire.py", "msg"), ("ledger/models.py", "impl"), ("ledger/models.py", "process_bind_param")}


@cache
def tracked_files() -> tuple[Path, ...]:
    """Every file that is, or would be, in the repository."""
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout.decode()
    return tuple(path for name in names.split("\0") if name and (path := ROOT / name).is_file())


def python_files(*folders: str) -> list[Path]:
    """The Python files in these top-level folders; revisions of the schema are records, not code that is edited."""
    files = [path for path in tracked_files() if path.suffix == ".py" and path.relative_to(ROOT).parts[0] in folders]
    return [path for path in files if not path.match("migrations/versions/*.py")]


@cache
def tree_of(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def where(path: Path, line: int = 1) -> str:
    """A place as an editor understands it."""
    return f"{path.relative_to(ROOT)}:{line}"


def listed(wrong: list[str]) -> str:
    """Every offence on a line of its own."""
    return "\n".join(["", *wrong])


def functions_of(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function, however deep."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_there_is_something_to_check() -> None:
    """A wall around nothing would always stand."""
    assert len(python_files(*ROOMS)) > 50
    assert len(python_files("tests")) > 10


def test_a_package_is_one_docstring() -> None:
    """`__init__.py` holds no code, so that importing a room costs nothing and does nothing."""
    wrong = []
    for path in (path for path in tracked_files() if path.name == "__init__.py"):
        body = tree_of(path).body
        if len(body) != 1 or ast.get_docstring(tree_of(path)) is None:
            wrong.append(where(path))
    assert not wrong, listed(wrong)


def test_tests_are_no_package() -> None:
    """Importlib mode: two test files may have one name."""
    wrong = [where(path) for path in tracked_files() if path.match("tests/**/__init__.py")]
    assert not wrong, listed(wrong)


def test_every_file_says_its_purpose() -> None:
    """A module without a docstring is a riddle."""
    wrong = [where(path) for path in tracked_files() if path.suffix == ".py" and not ast.get_docstring(tree_of(path))]
    assert not wrong, listed(wrong)


def documented_nodes(tree: ast.Module) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """The public classes and functions of a module, and the public methods of these classes."""
    for node in tree.body:
        inner = node.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_") else []
        for each in (node, *inner):
            if not isinstance(each, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or each.name.startswith("_"):
                continue
            # The docstring stands at the implementation, and at the getter.
            if not any(ast.unparse(decorator).endswith(("overload", ".setter")) for decorator in each.decorator_list):
                yield each


def test_public_names_are_documented() -> None:
    """Every public class, function and method of the product has a docstring (nested ones aside)."""
    wrong = [
        f"{where(path, node.lineno)} {node.name}"
        for path in python_files(*ROOMS)
        for node in documented_nodes(tree_of(path))
        if not ast.get_docstring(node)
    ]
    assert not wrong, listed(wrong)


def test_every_test_states_its_fact() -> None:
    """The docstring says what is true when the test passes."""
    wrong = [
        f"{where(path, function.lineno)} {function.name}"
        for path in python_files("tests")
        for function in functions_of(tree_of(path))
        if function.name.startswith("test_") and not ast.get_docstring(function)
    ]
    assert not wrong, listed(wrong)


def test_files_can_be_read_in_one_sitting() -> None:
    """No file of the product is longer than 500 lines."""
    lengths = {where(path): len(path.read_text(encoding="utf-8").splitlines()) for path in python_files(*ROOMS)}
    wrong = [f"{place} {length} lines" for place, length in lengths.items() if length > FILE_LINES_MAX]
    assert not wrong, listed(wrong)


def test_functions_fit_on_a_screen() -> None:
    """No function of the product is longer than 60 lines."""
    wrong = []
    for path in python_files(*ROOMS):
        for function in functions_of(tree_of(path)):
            length = (function.end_lineno or function.lineno) - function.lineno + 1
            if length > FUNCTION_LINES_MAX:
                wrong.append(f"{where(path, function.lineno)} {function.name}: {length} lines")
    assert not wrong, listed(wrong)


def names_in(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every name that a file gives to something, with its line."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name, node.lineno
            case ast.arg():
                yield node.arg, node.lineno
            case ast.Name(ctx=ast.Store()):
                yield node.id, node.lineno
            case ast.Attribute(ctx=ast.Store()):
                yield node.attr, node.lineno
            case ast.alias(asname=str() as name):
                yield name, node.lineno if hasattr(node, "lineno") else 1


def words_of(name: str) -> list[str]:
    """The words of a name: parted by underscores and capitals."""
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)]


def test_names_are_words() -> None:
    """No abbreviations: who reads a name should not have to guess."""
    wrong = [
        f"{where(path, line)} {name}"
        for path in python_files(*ROOMS, "scripts", "benchmarks")
        for name, line in names_in(tree_of(path))
        if any(ABBREVIATIONS.fullmatch(word) for word in words_of(name))
        and (str(path.relative_to(ROOT)), name) not in GIVEN_NAMES
    ]
    assert not wrong, listed(wrong)


@pytest.mark.parametrize("kind", FOREIGN)
def test_nothing_tells_where_it_was_made(kind: str) -> None:
    """The tree means the same on every machine."""
    wrong = []
    for path in tracked_files():
        if path.stat().st_size > TEXT_BYTES_MAX:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        wrong += [
            f"{where(path, number)} {found[0]}"
            for number, line in enumerate(text.splitlines(), 1)
            if (found := FOREIGN[kind].search(line))
        ]
    assert not wrong, listed(wrong)


def test_scripts_can_be_run() -> None:
    """A file that begins with #! is executable, and says so in the repository too."""
    wrong = [
        where(path) for path in tracked_files() if path.read_bytes()[:2] == b"#!" and not path.stat().st_mode & 0o100
    ]
    assert not wrong, listed(wrong)
