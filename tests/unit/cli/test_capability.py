"""`capability new` writes what `capability check` accepts, and both say what a person should do next."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.main import app
from cli.scaffold import Runtime, scaffold
from cli.settings import ROOT, shipped_capabilities
from worker.capability_folder import load_capability

run = CliRunner().invoke


@pytest.mark.parametrize("runtime", ["python", "exec", "prompt"])
def test_a_new_capability_is_valid_and_multi_turn(tmp_path: Path, runtime: Runtime) -> None:
    """Each runtime's files can be run as they are."""
    scaffold(tmp_path / "my-own", "my-own", runtime)
    template = load_capability(tmp_path / "my-own").template
    assert (template.name, template.runtime, template.supports_multi_turn) == ("my-own", runtime, True)
    assert json.loads((tmp_path / "my-own" / "payload.json").read_text()) == {"text": "hello"}


def test_the_test_of_a_new_capability_passes(tmp_path: Path) -> None:
    """With the standard library alone."""
    scaffold(tmp_path / "my-own", "my-own", "python")
    path = str(tmp_path / "my-own" / "test_handler.py")
    done = subprocess.run(
        [sys.executable, path], env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Ran 2 tests" in done.stderr


def test_the_program_of_a_new_capability_writes_frames(tmp_path: Path) -> None:
    """It counts the messages of the conversation, whatever they say."""
    scaffold(tmp_path / "my-own", "my-own", "exec")
    context = [{"role": "user", "content": 'a "role" in quotes'}, {"role": "assistant", "content": "b"}]
    done = subprocess.run(
        ["sh", "-c", 'exec "$0" 3>frames', str(tmp_path / "my-own" / "run.sh")],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "MESH_FD": "3", "THREAD_CONTEXT_JSON": json.dumps(context)},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    frames = [json.loads(line) for line in (tmp_path / "frames").read_text().splitlines()]
    assert [frame["kind"] for frame in frames] == ["progress", "delta", "result"]
    assert "after 2 earlier messages" in frames[-1]["result"]["text"]


def test_new_writes_beside_the_caller_and_says_what_comes_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """./capabilities unless a folder is named; a second time is refused."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("INTENTMESH_CAPABILITIES_DIR", raising=False)
    done = run(app, ["capability", "new", "my-own"])
    assert done.exit_code == 0
    assert (tmp_path / "capabilities" / "my-own" / "handler.py").exists()
    assert "intentmesh capability check capabilities/my-own" in done.stderr
    again = run(app, ["capability", "new", "my-own"])
    assert again.exit_code == 1
    assert "exists already" in again.stderr


def test_new_writes_into_the_last_folder_that_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """INTENTMESH_CAPABILITIES_DIR may list several; --dir goes before it."""
    monkeypatch.setenv("INTENTMESH_CAPABILITIES_DIR", f"{tmp_path / 'one'}:{tmp_path / 'two'}")
    assert run(app, ["capability", "new", "first"]).exit_code == 0
    assert run(app, ["capability", "new", "second", "--dir", str(tmp_path / "three")]).exit_code == 0
    assert (tmp_path / "two" / "first").is_dir()
    assert (tmp_path / "three" / "second").is_dir()


def test_starting_with_the_new_folder_keeps_the_shipped_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line to copy lists both."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("INTENTMESH_CAPABILITIES_DIR", raising=False)
    done = run(app, ["capability", "new", "mine", "--dir", "elsewhere"])
    assert f"INTENTMESH_CAPABILITIES_DIR={shipped_capabilities()}:{tmp_path / 'elsewhere'} intentmesh up" in done.stderr


def test_a_name_that_cannot_be_one_gets_a_proposal(tmp_path: Path) -> None:
    """Nothing is written."""
    done = run(app, ["capability", "new", "My Own!", "--dir", str(tmp_path)])
    assert done.exit_code == 2
    assert "intentmesh capability new my-own" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_check_names_file_and_line_of_every_mistake(tmp_path: Path) -> None:
    """A folder of capabilities is checked one by one; one bad one fails the check."""
    scaffold(tmp_path / "good", "good", "python")
    scaffold(tmp_path / "bad", "bad", "python")
    template = tmp_path / "bad" / "template.yaml"
    template.write_text(template.read_text().replace("runtime:", "runtim:"))
    done = run(app, ["capability", "check", str(tmp_path)])
    assert done.exit_code == 1
    assert "did you mean 'runtime'?" in done.stdout
    assert "good" in done.stdout
    as_json = run(app, ["capability", "check", str(tmp_path), "--json"])
    bad, good = json.loads(as_json.stdout)
    assert good["mistakes"] == []
    assert bad["mistakes"][0]["line"] > 1


def test_check_of_nothing_says_how_to_write_one(tmp_path: Path) -> None:
    """A path that is no folder is an error, not an empty success."""
    done = run(app, ["capability", "check", str(tmp_path / "absent")])
    assert done.exit_code == 2
    assert "capability new" in done.stderr
    assert run(app, ["capability", "check", str(tmp_path)]).exit_code == 1
