"""Reading a capability's folder: every mistake has its file, its line and its words."""

from pathlib import Path

import pytest
from support.capability_files import SHIPPED, write_capability

from mesh.contract.template import TemplateError
from worker.capability_folder import load_capabilities, load_capability, resolve_program

GOOD = "def run(intent, context):\n    return 1\n"


def mistakes_of(folder: Path) -> list[str]:
    """Return the mistakes as a person reads them."""
    with pytest.raises(TemplateError) as error:
        load_capability(folder)
    return [str(mistake) for mistake in error.value.mistakes]


@pytest.mark.parametrize(
    ("handler", "mistake"),
    [
        ("def run(intent):\n    pass\n", "line 1: handler.py: run must take two arguments"),
        ("\n\ndef run(a, b, c):\n    pass\n", "line 3: handler.py: run must take two arguments"),
        ("def run(a, b, *, c):\n    pass\n", "line 1: handler.py: run must take two arguments"),
        ("def go(intent, context):\n    pass\n", "line 1: handler.py: defines no function 'run'"),
        ("def run(intent, context):\n    return (\n", "line 2: handler.py: is not Python"),
        ("x = '\0'\n", "line 1: handler.py: is not Python"),
    ],
)
def test_a_handler_without_a_usable_run(tmp_path: Path, handler: str, mistake: str) -> None:
    """The handler is parsed, not run, and its author is told the line."""
    assert mistakes_of(write_capability(tmp_path, "probe", {"handler.py": handler}))[0].startswith(mistake)


@pytest.mark.parametrize(
    "handler",
    [
        GOOD,
        "async def run(a, b): ...\n",
        "def run(*all): ...\n",
        "def run(a, b, c=1): ...\n",
        "def run(a, /, b, *, d=2): ...\n",
    ],
)
def test_every_run_that_takes_two_arguments_is_fine(tmp_path: Path, handler: str) -> None:
    """Names, defaults and `async` are the author's choice."""
    assert load_capability(write_capability(tmp_path, "probe", {"handler.py": handler})).template.name == "probe"


def test_missing_files_are_named(tmp_path: Path) -> None:
    """template.yaml, handler.py and prompts/user.md each have their own message."""
    (tmp_path / "empty").mkdir()
    assert mistakes_of(tmp_path / "empty") == ["line 1: template.yaml: this file is missing"]
    assert mistakes_of(write_capability(tmp_path, "bare", {})) == ["line 1: handler.py: this file is missing"]
    prompts = mistakes_of(write_capability(tmp_path, "mute", {}, runtime="prompt"))
    assert prompts == ["line 1: prompts/user.md: this file is missing: it holds the message"]


def test_a_prompt_with_a_mistake_is_told_by_its_line(tmp_path: Path) -> None:
    """Jinja's own complaint, with the file."""
    files = {"prompts/user.md": "fine\n{{ payload.text\n", "prompts/system.md": "ok"}
    assert mistakes_of(write_capability(tmp_path, "probe", files, runtime="prompt"))[0].startswith(
        "line 2: prompts/user.md: is not a template"
    )


@pytest.mark.parametrize(
    ("command", "mistake"),
    [
        ("[./missing.sh]", "there is no program './missing.sh'"),
        ("[no-such-program]", "there is no program 'no-such-program'"),
        ("[./plain.txt]", "is not executable: chmod +x probe/plain.txt"),
        ("[/no/such/program]", "there is no program '/no/such/program'"),
    ],
)
def test_a_command_that_cannot_be_run(tmp_path: Path, command: str, mistake: str) -> None:
    """The message says what to do."""
    folder = write_capability(tmp_path, "probe", {"plain.txt": "x"}, runtime="exec", command=command)
    assert mistake in mistakes_of(folder)[0]


def test_a_program_is_found_in_the_folder_before_path(tmp_path: Path) -> None:
    """A name without a slash means the folder's file if there is one, then PATH."""
    folder = write_capability(tmp_path, "probe", {"sh": "#!/bin/sh\n"})
    assert resolve_program(folder, ["sh"]) == str(folder / "sh")
    assert resolve_program(tmp_path, ["sh"]) in {"/bin/sh", "/usr/bin/sh"}
    assert resolve_program(tmp_path, ["/bin/sh"]) == "/bin/sh"
    assert resolve_program(tmp_path, ["sub/sh"]) is None


def test_several_mistakes_are_told_at_once(tmp_path: Path) -> None:
    """The folder's name and the sandbox that there is not."""
    folder = write_capability(tmp_path, "probe", {"handler.py": GOOD}, isolation="sandbox")
    folder = folder.rename(tmp_path / "other")
    assert mistakes_of(folder) == [
        "line 1: name: is 'probe', but the folder is called 'other'",
        "line 2: isolation: 'sandbox' is not available in this version: use 'process'",
    ]


def test_a_broken_folder_never_stops_the_rest(tmp_path: Path) -> None:
    """Good ones are loaded in order, bad ones are reported by name, others are no capabilities."""
    write_capability(tmp_path, "b-good", {"handler.py": GOOD})
    write_capability(tmp_path, "a-good", {"handler.py": GOOD})
    write_capability(tmp_path, "broken", {})
    binary = write_capability(tmp_path, "binary", {})
    (binary / "template.yaml").write_bytes(b"name: \xff")
    (tmp_path / "notes").mkdir()
    good, bad = load_capabilities(tmp_path)
    assert [folder.template.name for folder in good] == ["a-good", "b-good"]
    assert set(bad) == {"broken", "binary"}
    assert "not UTF-8" in str(bad["binary"])


def test_a_root_that_is_not_there_is_an_error_not_a_crash(tmp_path: Path) -> None:
    """Nothing is loaded and the reason is told."""
    good, bad = load_capabilities(tmp_path / "nowhere")
    assert good == []
    assert "No such file" in str(bad["nowhere"])


def test_the_digest_follows_every_file_but_caches(tmp_path: Path) -> None:
    """What a capability would do may change with any of its files."""
    folder = write_capability(tmp_path, "probe", {"handler.py": GOOD, "prompts/a.md": "1"})
    before = load_capability(folder).digest
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "handler.pyc").write_text("x")
    assert load_capability(folder).digest == before
    (folder / "prompts" / "a.md").write_text("2")
    after = load_capability(folder).digest
    assert after != before
    (folder / "prompts" / "a.md").rename(folder / "prompts" / "b.md")
    assert load_capability(folder).digest not in {before, after}


def test_everything_that_ships_can_be_loaded() -> None:
    """No shipped capability is broken."""
    good, bad = load_capabilities(SHIPPED)
    assert bad == {}
    assert {"chat", "echo", "recall", "summarize", "wordcount"} <= {folder.template.name for folder in good}
