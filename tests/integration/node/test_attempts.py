"""How attempts end on a node, as the ledger tells it afterwards."""

import asyncio
import time
from pathlib import Path

import pytest
from support.capability_files import write_capability
from support.node_lab import NodeLab, file_text
from support.process_list import is_alive, until

from mesh import attempt as attempt_module
from worker.capability_folder import load_capability


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    """A folder into which handlers write what the product does not see."""
    folder = tmp_path / "notes"
    folder.mkdir()
    return folder


async def test_a_result_is_committed_with_what_was_said_before(lab: NodeLab) -> None:
    """All text reaches the ledger in order, and before the result."""
    probe = lab.capability(
        """
        from worker.sdk import delta, progress
        def run(intent, context):
            for number in range(300):
                delta(f"{number} ")
                if number % 100 == 0:
                    progress(fraction=number / 300)
            return {"text": "done"}
        """
    )
    lab.node()
    done = await lab.run(probe)
    assert (done.status, done.result) == ("succeeded", {"text": "done"})
    assert await lab.said(done) == "".join(f"{number} " for number in range(300))
    kinds = await lab.kinds(done)
    assert kinds[-2:] == ["result.committed", "thread.updated"]
    assert kinds.count("progress") == 3


async def test_failures_are_tried_again_with_a_pause(lab: NodeLab, notes: Path) -> None:
    """Each attempt keeps its own cause; the pause doubles; the last success counts."""
    probe = lab.capability(
        f"""
        import os, time
        def run(intent, context):
            with open("{notes}/starts", "a") as file:
                file.write(f"{{time.time()}}\\n")
            if intent.attempt == 1:
                raise ValueError("first")
            if intent.attempt == 2:
                os._exit(3)
            return intent.attempt
        """
    )
    lab.node()
    done = await lab.run(probe)
    assert (done.status, done.result) == ("succeeded", 3)
    assert [attempt.cause for attempt in done.attempts] == ["handler_failed", "worker_crashed", None]
    starts = [float(line) for line in (notes / "starts").read_text().split()]
    assert starts[1] - starts[0] >= 0.1
    assert starts[2] - starts[1] >= 0.2


async def test_what_always_fails_is_dead_after_its_attempts(lab: NodeLab) -> None:
    """The node survives, and the cause is the last one."""
    probe = lab.capability(
        "import os\ndef run(intent, context):\n    os.kill(os.getpid(), 11)\n", limits="{max_attempts: 2}"
    )
    lab.node()
    dead = await lab.run(probe)
    assert dead.status == "dead"
    assert [attempt.cause for attempt in dead.attempts] == ["worker_crashed"] * 2


async def test_a_time_out_ends_the_whole_tree(lab: NodeLab, notes: Path) -> None:
    """A grandchild in a session of its own ends with its worker."""
    probe = lab.capability(
        f"""
        import os, subprocess, time
        def run(intent, context):
            child = subprocess.Popen(["sleep", "60"], start_new_session=True)
            with open("{notes}/pids", "w") as file:
                file.write(f"{{os.getpid()}} {{child.pid}}")
            time.sleep(60)
        """,
        limits="{timeout_s: 0.5, max_attempts: 1}",
    )
    lab.node()
    dead = await lab.run(probe)
    assert dead.attempts[0].cause == "timed_out"
    pids = [int(pid) for pid in (notes / "pids").read_text().split()]
    await until(lambda: not any(is_alive(pid) for pid in pids), what="no process is left")


async def test_a_cancelled_turn_keeps_what_was_said(lab: NodeLab, notes: Path) -> None:
    """The worker is killed at the next heartbeat; the partial text is kept and marked."""
    probe = lab.capability(
        f"""
        import os, time
        from worker.sdk import delta
        def run(intent, context):
            delta("so far")
            with open("{notes}/pid", "w") as file:
                file.write(str(os.getpid()))
            time.sleep(60)
        """
    )
    lab.node()
    intent = await lab.submit(probe, {"text": "question"})
    pid = int(await file_text(notes / "pid"))
    assert await lab.ledger.intents.cancel("local", intent.intent_id) == "cancel_requested"
    assert (await lab.until(intent)).status == "cancelled"
    assert not is_alive(pid)
    turns = await lab.ledger.threads.turns("local", intent.thread_id, cursor=None, limit=10)
    contents = [message.content for turn in turns[0] for message in turn.messages]
    assert contents == ["question", "so far"]


@pytest.mark.parametrize(("policy", "status", "turns"), [("interrupt", "cancelled", 2), ("rollback", "cancelled", 1)])
async def test_a_newer_intent_may_end_the_one_that_runs(
    lab: NodeLab, notes: Path, policy: str, status: str, turns: int
) -> None:
    """`interrupt` leaves a marked turn, `rollback` leaves none; the newer one runs next."""
    probe = lab.capability(
        f"""
        import time
        from worker.sdk import delta
        def run(intent, context):
            if intent.payload["text"] == "first":
                delta("half an answer")
                with open("{notes}/begun", "w") as file:
                    file.write("yes")
                time.sleep(60)
            return {{"text": "second answer"}}
        """
    )
    lab.node()
    first = await lab.submit(probe, {"text": "first"}, thread_id="t")
    await file_text(notes / "begun")
    second = await lab.submit(probe, {"text": "second"}, thread_id="t", on_busy=policy)
    assert (await lab.until(second)).turn_number == turns
    assert (await lab.look(first)).status == status
    assert (await lab.ledger.threads.get("local", "t")).turn_count == turns


@pytest.mark.parametrize("lab", [{"lease_ttl_s": 6}], indirect=True)
async def test_a_flood_of_frames_keeps_nobody_from_his_turn(lab: NodeLab) -> None:
    """A program that writes without end must not keep the node from its leases, or from its time limit."""
    folder = write_capability(
        lab.capabilities,
        "flood",
        {"flood.sh": """#!/bin/sh\nexec yes '{"kind":"progress","fraction":0.5}' >&"$MESH_FD"\n"""},
        runtime="exec",
        command="[./flood.sh]",
        limits="{timeout_s: 2.5, max_attempts: 1}",
    )
    flood = load_capability(folder).template
    probe = lab.capability("def run(intent, context):\n    return intent.payload\n")
    lab.node()
    flooding = await lab.submit(flood)
    await lab.until(flooding, "running")
    began_s = time.monotonic()
    gap_s = 0.0

    async def watch() -> None:
        nonlocal gap_s
        while True:
            before_s = time.monotonic()
            await asyncio.sleep(0.01)
            gap_s = max(gap_s, time.monotonic() - before_s)

    watching = asyncio.create_task(watch())
    assert (await lab.run(probe, {"n": 1})).status == "succeeded"
    dead = await lab.until(flooding)
    watching.cancel()
    assert dead.attempts[0].cause == "timed_out"
    assert time.monotonic() - began_s < 10
    assert gap_s < 2.0


async def test_blank_lines_without_end_keep_nobody_from_his_turn(lab: NodeLab) -> None:
    """What is no frame at all is no way around it."""
    folder = write_capability(
        lab.capabilities,
        "blank",
        {"blank.sh": """#!/bin/sh\nexec yes '' >&"$MESH_FD"\n"""},
        runtime="exec",
        command="[./blank.sh]",
        limits="{timeout_s: 1, max_attempts: 1}",
    )
    lab.node()
    dead = await lab.run(load_capability(folder).template)
    assert dead.attempts[0].cause == "timed_out"


async def test_a_lingering_worker_keeps_its_result(lab: NodeLab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the grace nor the time limit takes back a result that was said."""
    monkeypatch.setattr(attempt_module, "EXIT_GRACE_S", 5.0)
    folder = write_capability(
        lab.capabilities,
        "linger",
        {"linger.sh": """#!/bin/sh\necho '{"kind":"result","result":7}' >&"$MESH_FD"\nsleep 60\n"""},
        runtime="exec",
        command="[./linger.sh]",
        limits="{timeout_s: 0.5}",
    )
    lab.node()
    done = await lab.run(load_capability(folder).template)
    assert (done.status, done.result) == ("succeeded", 7)


async def test_a_bad_exit_after_a_result_is_a_failure(lab: NodeLab) -> None:
    """A program says by its exit code that it failed."""
    folder = write_capability(
        lab.capabilities,
        "sorry",
        {"sorry.sh": """#!/bin/sh\necho '{"kind":"result","result":7}' >&"$MESH_FD"\nexit 4\n"""},
        runtime="exec",
        command="[./sorry.sh]",
        limits="{max_attempts: 1}",
    )
    lab.node()
    dead = await lab.run(load_capability(folder).template)
    assert dead.attempts[0].detail == "after its result, the worker ended with exit code 4"


async def test_thread_updates_have_a_bound(lab: NodeLab, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker cannot fill the node's memory with patches."""
    monkeypatch.setattr(attempt_module, "UPDATE_CHARS_MAX", 10_000)
    probe = lab.capability(
        """
        from worker.sdk import update_thread
        def run(intent, context):
            for number in range(100_000):
                update_thread(contextual_memory={str(number): "x" * 500})
            return 1
        """
    )
    lab.node()
    assert (await lab.run(probe)).attempts[0].cause == "frame_too_large"


async def test_what_a_handler_logs_is_in_the_nodes_log_and_bounded(
    lab: NodeLab, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An author's line is shown; a thousand of them are not."""
    monkeypatch.setattr(attempt_module, "LOG_LINES_MAX", 3)
    probe = lab.capability(
        """
        from worker.sdk import log
        def run(intent, context):
            for number in range(50):
                log(f"line {number}", level="warning")
            return 1
        """
    )
    lab.node()
    assert (await lab.run(probe)).status == "succeeded"
    lines = [line for line in capsys.readouterr().out.splitlines() if "worker_says" in line]
    assert len(lines) == 3
    assert "line 2" in lines[2]
