"""The documents: every command in them runs, what is generated is fresh, every link leads somewhere."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.running_mesh import RunningMesh

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Lines of sh blocks that this test does not run, and why.
NOT_RUN = {
    "./intentmesh up": "the fixture is the running mesh; test_up.py starts one this way",
    "./intentmesh test": "it would run this test",
    "export PATH": "the fixture sets it",
    "export INTENTMESH_LLM_BASE_URL": "test_chat.py runs with a model",
    "intentmesh chat": "it reads from a terminal; tests of the command line drive it",
}


def sh_blocks() -> list[tuple[str, str]]:
    """(document, commands) of every block that is marked as `sh`."""
    blocks = []
    for document in DOCUMENTS:
        for block in re.findall(r"^```sh\n(.*?)^```", document.read_text(), re.DOTALL | re.MULTILINE):
            lines = [line for line in block.splitlines() if not line.strip().startswith(tuple(NOT_RUN))]
            if any(line.strip() for line in lines):
                blocks.append((document.name, "\n".join(lines)))
    return blocks


@pytest.mark.timeout(300)
async def test_every_command_in_the_documents_runs(tmp_path: Path) -> None:
    """In reading order, against one mesh, each block exits 0."""
    blocks = sh_blocks()
    assert len(blocks) >= 5
    places = f"{ROOT / 'capabilities'}:{tmp_path / 'capabilities-of-mine'}"
    async with RunningMesh(tmp_path, environment={"INTENTMESH_CAPABILITIES_DIR": places}) as mesh:
        environment = mesh.environment() | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "INTENTMESH_URL": mesh.url,
        }
        for document, commands in blocks:
            script = "set -e\n" + commands.replace("http://127.0.0.1:8080", mesh.url).replace("curl -s", "curl -sf")
            done = subprocess.run(
                ["bash", "-c", script],
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
            assert done.returncode == 0, f"{document}:\n{commands}\n{done.stdout}\n{done.stderr}"


def test_what_is_not_run_still_stands_in_the_documents() -> None:
    """The list of exceptions holds nothing that is gone."""
    text = "\n".join(document.read_text() for document in DOCUMENTS)
    assert [line for line in NOT_RUN if line not in text] == []


def test_generated_documents_are_fresh() -> None:
    """docs/SETTINGS.md and docs/STATES.md say what the code says."""
    done = subprocess.run(
        [sys.executable, "scripts/generate_docs.py", "--check"], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    """Every relative link names a file that exists."""
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text()):
        assert (document.parent / target).exists(), f"{document.name}: {target}"
