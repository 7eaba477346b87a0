"""`intentmesh up` as a person uses it: one command starts a mesh, Ctrl-C ends all of it, a second start is quick."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.process_list import processes_in
from support.running_mesh import ROOT, eventually, free_port

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0


class Up:
    """`python -m cli.main up` in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[str] | None = None
        self.said = ""

    def environment(self) -> dict[str, str]:
        """No setting but the address."""
        plain = {name: value for name, value in os.environ.items() if not name.startswith("INTENTMESH_")}
        return plain | {
            "PYTHONPATH": str(ROOT),
            "INTENTMESH_URL": self.url,
            "INTENTMESH_EMBEDDING_MODEL": "none",
            # Names the folder, so that whoever outlives the test is found by it.
            "UP_FOLDER": str(self.folder),
        }

    def command(self, *arguments: str) -> list[str]:
        """A command line as the person's own."""
        return [sys.executable, "-m", "cli.main", *arguments]

    def start(self, *arguments: str) -> float:
        """Start it, wait until it says that it is ready, and return the seconds that it took."""
        begun_at = time.monotonic()
        self.process = subprocess.Popen(
            self.command("up", "--port", str(self.port), *arguments),
            cwd=self.folder,
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.said = ""
        self.read_until("Ctrl-C stops it.")
        return time.monotonic() - begun_at

    def read_until(self, text: str) -> None:
        """Read what it says until a line holds `text`; it ends by itself when it cannot go on."""
        assert self.process is not None
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said += line
            if text in line:
                return
        raise AssertionError(f"up ended before it said {text!r}:\n{self.said}")

    def stop(self, number: int = signal.SIGINT) -> int:
        """Send a signal and return the exit code."""
        assert self.process is not None
        self.process.send_signal(number)
        rest, _ = self.process.communicate(timeout=STOP_TIMEOUT_S)
        self.said += rest
        return self.process.returncode

    def run(self, *arguments: str, said: str = "") -> subprocess.CompletedProcess[str]:
        """Another command, against this mesh; `said` is what a person types."""
        try:
            return subprocess.run(
                self.command(*arguments),
                cwd=self.folder,
                env=self.environment(),
                input=said,
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            said_so_far = f"{error.stdout!r} {error.stderr!r}"
            raise AssertionError(f"{arguments} did not end: {said_so_far}{self.logs()}") from error

    def logs(self) -> str:
        """The end of every role's log, for whoever reads a failure."""
        paths = self.folder.glob(".intentmesh/logs/*")
        return "".join(f"\n--- {path.name}\n{path.read_text()[-6000:]}" for path in paths)

    def printed(self, *arguments: str) -> Any:
        """What another command prints as JSON."""
        done = self.run(*arguments, "--json")
        assert done.returncode == 0, done.stderr + self.logs()
        return json.loads(done.stdout)


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    """A mesh that is ended whatever happens."""
    mesh = Up(tmp_path)
    yield mesh
    if mesh.process is not None and mesh.process.poll() is None:
        mesh.process.kill()
        mesh.process.communicate()


async def nothing_left(folder: Path) -> None:
    """No process of this mesh lives on."""
    await eventually(
        lambda: not processes_in(folder), timeout_s=8, what=f"no process left, but there is {processes_in(folder)}"
    )


async def test_one_command_starts_a_mesh_and_ctrl_c_ends_it(up: Up) -> None:
    """Intents run, threads remember, every command answers, nothing is left; the second start is quick."""
    up.start()
    assert f"The mesh listens on {up.url}" in up.said
    assert "curl -s " in up.said

    echoed = up.printed("submit", "echo", '{"text": "hello"}', "--thread", "first")
    assert (echoed["status"], echoed["turn_number"]) == ("succeeded", 1)
    assert [thread["thread_id"] for thread in up.printed("threads")] == ["first"]
    assert up.printed("intents")[0]["intent_id"] == echoed["intent_id"]
    assert up.printed("nodes")[0]["status"] == "up"
    assert "echo" in [capability["name"] for capability in up.printed("capability", "list")]
    assert "award" in up.run("intents", "show", echoed["intent_id"]).stdout
    assert up.run("doctor").returncode == 0

    assert up.stop() == 0
    await nothing_left(up.folder)

    assert up.start() < START_TIMEOUT_S / 3
    assert up.printed("intents", "show", echoed["intent_id"])["result"] == echoed["result"]
    assert up.stop(signal.SIGTERM) == 0
    await nothing_left(up.folder)


async def test_a_conversation_is_remembered_over_a_restart(up: Up) -> None:
    """`chat` reads lines, `recall` answers from the thread, `context` says why."""
    up.start()
    lines = "My locker number is 4711.\nThe weather is fine.\n/pin name Ada\n"
    chat = up.run("chat", "--capability", "recall", "--thread", "locker", said=lines)
    assert chat.returncode == 0, chat.stderr
    assert up.stop() == 0
    up.start()
    asked = up.printed("submit", "recall", '{"text": "What is my locker number?"}', "--thread", "locker")
    assert "4711" in asked["result"]["text"]
    context = up.run("context", "locker", "What is my locker number?")
    assert "My locker number is 4711." in context.stdout
    assert "Ada" in context.stdout
    assert up.stop() == 0
    await nothing_left(up.folder)


async def test_a_crashed_role_comes_back(up: Up) -> None:
    """The node is killed; the mesh runs intents again. A node that was drained stays away."""
    up.start()
    (node,) = [pid for pid, command in processes_in(up.folder).items() if command.rstrip().endswith("-m mesh")]
    os.kill(node, signal.SIGKILL)
    again = up.printed("submit", "echo", '{"text": "still there?"}', "--wait", "40")
    assert again["status"] == "succeeded"
    assert up.run("nodes", "drain", "node-1").returncode == 0
    up.read_until("node-1 has finished, as it was asked to")
    assert "node-1 was killed by signal 9" in up.said
    assert up.stop() == 0
    await nothing_left(up.folder)


async def test_kill_9_leaves_no_process(up: Up) -> None:
    """And the next start finds everything as it was."""
    up.start()
    submitted = up.printed("submit", "echo", '{"text": "kept"}')
    assert up.process is not None
    up.process.kill()
    up.process.communicate()
    await nothing_left(up.folder)
    up.start()
    assert up.printed("intents", "show", submitted["intent_id"])["status"] == "succeeded"
    assert up.stop() == 0


async def test_a_second_mesh_on_the_same_folder_is_refused(up: Up) -> None:
    """With the way out: another folder and port; a taken port is named too."""
    up.start()
    same_folder = up.run("up", "--port", str(free_port()))
    assert same_folder.returncode == 1
    assert f"another mesh (process {up.process and up.process.pid}) uses" in same_folder.stderr
    assert "--data-dir" in same_folder.stderr
    same_port = up.run("up", "--port", str(up.port), "--data-dir", str(up.folder / "other"))
    assert same_port.returncode == 1
    assert f"port {up.port}" in same_port.stderr
    assert httpx.get(f"{up.url}/readyz").status_code == 200
    assert up.stop() == 0


async def test_a_capability_of_ones_own_is_taken_up_while_the_mesh_runs(up: Up) -> None:
    """`capability new` in a second terminal, then submit: no restart, no setting."""
    up.start()
    assert up.run("capability", "new", "my-own").returncode == 0
    assert up.run("capability", "new", "my-script", "--runtime", "exec").returncode == 0
    await eventually(
        lambda: {"my-own", "my-script"} <= {each["name"] for each in up.printed("capability", "list")},
        timeout_s=20,
        what="the new capabilities are offered",
    )
    folder = up.folder / "capabilities"
    first = up.printed("submit", "my-own", f"@{folder}/my-own/payload.json", "--thread", "own")
    assert first["result"] == {"text": "You said: hello"}
    second = up.printed("submit", "my-own", '{"text": "again"}', "--thread", "own")
    assert "before that: hello" in second["result"]["text"]
    third = up.printed("submit", "my-script", '{"text": "count"}', "--thread", "own")
    assert "after 4 earlier messages" in third["result"]["text"]
    assert up.stop() == 0
    await nothing_left(up.folder)


async def test_keys_lock_the_mesh(up: Up) -> None:
    """After `keys add` a call without a key is refused, with the hint; with the key it works."""
    up.start()
    key = up.run("keys", "add", "local", "--label", "laptop").stdout.strip()
    refused = up.run("threads")
    assert refused.returncode == 1
    assert "INTENTMESH_API_KEY" in refused.stderr
    assert up.run("--api-key", key, "threads").returncode == 0
    (listed,) = up.printed("keys", "list")
    assert key not in json.dumps(listed)
    assert up.run("keys", "revoke", listed["key_id"]).returncode == 0
    assert up.run("--api-key", key, "threads").returncode == 1
    assert up.stop() == 0
