"""`runtime: exec`: any program in any language is a worker."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.capability_files import SHIPPED, claim_of, messages_of, write_capability
from support.worker_lab import Lab

from mesh.contract.errors import Cause
from worker import frames as wire
from worker.capability_folder import CapabilityFolder, load_capability
from worker.exit_codes import EXIT_SPAWN_FAILED
from worker.frames import Delta, ToolStarted
from worker.spawner import Zygote


def script(root: Path, text: str, *, command: str = "[./run.sh]", **template: Any) -> CapabilityFolder:
    """Return an exec capability whose run.sh is `text`."""
    folder = write_capability(root, "probe", {"run.sh": text}, runtime="exec", command=command, **template)
    return load_capability(folder)


async def test_a_shell_script_speaks_with_echo(lab: Lab, tmp_path: Path) -> None:
    """dash can write frames, print a log, and read its context from the environment and from the descriptor."""
    text = """#!/bin/sh
    echo "to the log"
    echo '{"kind":"delta","text":"working"}' >&$MESH_FD
    whole=$(cat <&$THREAD_CONTEXT_FD)
    [ "$whole" = "$THREAD_CONTEXT_JSON" ] || exit 9
    echo "{\\"kind\\":\\"result\\",\\"result\\":{\\"context\\":$THREAD_CONTEXT_JSON,\\"home\\":\\"$HOME\\",\\"cwd\\":\\"$(pwd)\\"}}" >&$MESH_FD
    """
    text = "\n".join(line.strip() for line in text.splitlines()) + "\n"
    folder = script(tmp_path, text, supports_multi_turn="true")
    outcome = await lab.run(folder, claim_of(messages=messages_of("one", "two")))
    assert outcome.frames[0] == Delta(kind="delta", text="working")
    assert outcome.result["context"] == [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    assert outcome.result["home"] == outcome.result["cwd"]
    assert outcome.log.stdout == "to the log\n"


async def test_a_last_frame_without_an_end_of_line_counts(lab: Lab, tmp_path: Path) -> None:
    """`printf` without a newline is a whole frame when the program has ended."""
    folder = script(tmp_path, '#!/bin/sh\nprintf \'{"kind":"result","result":1}\' >&3\n')
    assert (await lab.run(folder)).result == 1


async def test_a_program_waits_for_an_answer(lab: Lab, tmp_path: Path) -> None:
    """The node's frames are lines that `read` reads."""
    text = """#!/bin/sh
echo '{"kind":"tool.started","call_id":"c1","name":"mail","arguments":{"to":"a"}}' >&3
read -r answer <&3
case $answer in *'"ref":"c1"'*) echo '{"kind":"result","result":"acknowledged"}' >&3 ;; *) exit 9 ;; esac
"""
    zygote = lab.zygote(script(tmp_path, text))
    worker = await lab.begin(zygote)
    results = []
    async for frame in worker.frames():
        if isinstance(frame, ToolStarted):
            await worker.send(wire.ack(frame.call_id))
        else:
            results.append(frame)
    assert [frame.result for frame in results if isinstance(frame, wire.Result)] == ["acknowledged"]
    assert (await worker.wait()).exit_code == 0


async def test_an_exit_code_is_told(lab: Lab, tmp_path: Path) -> None:
    """What the program says at its end is what the node is told."""
    outcome = await lab.run(script(tmp_path, "#!/bin/sh\necho sorry >&2\nexit 7\n"))
    assert outcome.status.exit_code == 7
    assert outcome.log.stderr == "sorry\n"


async def test_a_program_that_went_away(lab: Lab, tmp_path: Path) -> None:
    """It existed when the folder was read; the attempt fails with spawn_failed and the program's name."""
    folder = script(tmp_path, "#!/bin/sh\n")
    (folder.path / "run.sh").unlink()
    outcome = await lab.run(folder)
    assert outcome.error.cause is Cause.SPAWN_FAILED
    assert "run.sh" in outcome.error.detail
    assert "No such file" in outcome.error.detail
    assert outcome.status.exit_code == EXIT_SPAWN_FAILED


@pytest.mark.parametrize(
    ("text", "reason"), [("no shebang\n", "Exec format error"), ("#!/no/such/interpreter\n", "No such file")]
)
async def test_a_file_that_is_no_program(lab: Lab, tmp_path: Path, text: str, reason: str) -> None:
    """The kernel's reason is in the detail."""
    folder = script(tmp_path, "#!/bin/sh\n")
    (folder.path / "run.sh").write_text(text)
    outcome = await lab.run(folder)
    assert outcome.error.cause is Cause.SPAWN_FAILED
    assert reason in outcome.error.detail


async def test_a_program_from_path_with_a_file_of_the_folder(lab: Lab, tmp_path: Path) -> None:
    """`sh ./run.sh` finds both, although the working directory is empty; the file needs no execute bit."""
    folder = script(tmp_path, '#!/bin/sh\necho \'{"kind":"result","result":true}\' >&3\n', command="[sh, ./run.sh]")
    (folder.path / "run.sh").chmod(0o644)
    assert (await lab.run(folder)).result is True


async def test_limits_hold_for_programs(lab: Lab, tmp_path: Path) -> None:
    """Files and memory are bounded as for Python; a broken pipe ends a program, as it does in a shell."""
    text = """#!/bin/sh
    yes 2>/dev/null | head -n 1 >/dev/null
    echo "{\\"kind\\":\\"result\\",\\"result\\":[$(ulimit -n),$(ulimit -d),$(ulimit -c),$(ulimit -t)]}" >&3
    """
    text = "\n".join(line.strip() for line in text.splitlines()) + "\n"
    outcome = await lab.run(script(tmp_path, text, limits="{open_files: 99, memory_mb: 64, cpu_s: 77}"))
    assert outcome.result == [99, 64 * 1024, 0, 77]


@pytest.fixture
async def wordcount(lab: Lab) -> Zygote:
    """The shipped shell capability."""
    return lab.zygote(load_capability(SHIPPED / "wordcount"))


@pytest.mark.parametrize(
    ("text", "words", "lines", "characters"),
    [
        ("", 0, 0, 0),
        ("one", 1, 1, 3),
        ("one two\nthree\n", 3, 2, 14),
        ("héllo wörld", 2, 1, 11),
        ("日本語 テキスト", 2, 1, 8),
        ('a "quoted" \\ word\ttab', 5, 1, 21),
        ("back\\nslash", 1, 1, 11),
        ("ends with a backslash\\", 4, 1, 22),
        ("bell\u0007 and \u001b escape", 3, 1, 18),
        ("\\", 1, 1, 1),
        ("\\\\ \n\n", 1, 2, 5),
        ("x " * 200_000, 200_000, 1, 400_000),
        ('"\n' * 200_000, 200_000, 200_000, 400_000),
    ],
)
async def test_wordcount_counts(
    lab: Lab, wordcount: Zygote, text: str, words: int, lines: int, characters: int
) -> None:
    """Escapes are undone, characters are not bytes, and long texts come by descriptor."""
    outcome = await lab.run(wordcount, claim_of({"text": text}))
    assert outcome.result == {"words": words, "lines": lines, "characters": characters}, json.dumps(outcome.log.stderr)
