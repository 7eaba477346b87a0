"""A worker goes with everything that it started, however that was detached; nothing outlives a zygote or a node."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.capability_files import claim_of, python_capability
from support.process_list import is_alive, processes_of, until
from support.worker_lab import Lab

from worker.frames import Delta, Progress
from worker.scratch import birth_mark
from worker.spawner import SpawnFailed, Worker

# A child, a child in a session of its own, and a daemon by the book: setsid, double fork, environment cleared,
# standing in /, its pipes still open.
FAMILY = """
    import os, subprocess, sys, time
    from worker.sdk import delta

    def run(intent, context):
        sleep = ["/bin/sleep", "600"]
        pids = [subprocess.Popen(sleep).pid, subprocess.Popen(sleep, start_new_session=True).pid]
        read_end, write_end = os.pipe()
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.chdir("/")
                os.write(write_end, str(os.getpid()).encode())
                os.execve("/bin/sleep", sleep, {})
            os._exit(0)
        pids.append(int(os.read(read_end, 20)))
        delta(",".join(map(str, pids)))
        if intent.payload.get("wait"):
            time.sleep(600)
        return "done"
"""


async def family_of(worker: Worker) -> list[int]:
    """Return the worker and its descendants as it told them."""
    async for frame in worker.frames():
        assert isinstance(frame, Delta)
        return [worker.pid, *map(int, frame.text.split(","))]
    raise AssertionError("the worker said nothing")


@pytest.mark.parametrize("ending", ["by itself", "kill", "terminate"])
async def test_the_whole_tree_ends_with_the_worker(lab: Lab, ending: str) -> None:
    """When `wait`, `kill` or `terminate` returns, no descendant is left, and nothing waited for their pipes."""
    zygote = lab.zygote(FAMILY)
    worker = await lab.begin(zygote, claim_of({"wait": ending != "by itself"}))
    async with asyncio.timeout(20):
        pids = await family_of(worker)
        match ending:
            case "kill":
                status = await worker.kill()
                assert status.reason == "killed"
            case "terminate":
                status = await worker.terminate(5.0)
                assert (status.signal, status.reason) == (signal.SIGTERM, "killed")
            case _:
                status = await worker.wait()
                assert status.exit_code == 0
    assert [pid for pid in pids if is_alive(pid)] == []


async def test_the_neighbour_lives_on(lab: Lab) -> None:
    """Killing one worker's tree leaves another worker of the same zygote, and its children, alone."""
    zygote = lab.zygote(FAMILY, standby=2)
    first = await lab.begin(zygote, claim_of({"wait": True}))
    second = await lab.begin(zygote, claim_of({"wait": True}))
    first_family, second_family = await family_of(first), await family_of(second)
    await first.kill()
    assert not any(map(is_alive, first_family))
    assert all(map(is_alive, second_family))
    await second.kill()


async def test_sigterm_ignored_is_followed_by_sigkill(lab: Lab) -> None:
    """After the grace the worker is killed."""
    handler = """
        import signal, time
        from worker.sdk import progress

        def run(intent, context):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            progress(0.5)
            time.sleep(600)
    """
    worker = await lab.begin(lab.zygote(handler))
    async for frame in worker.frames():
        assert isinstance(frame, Progress)
        break
    status = await worker.terminate(0.2)
    assert (status.signal, status.reason) == (signal.SIGKILL, "killed")


async def test_a_fork_bomb_is_stopped(lab: Lab) -> None:
    """A worker with more processes than it may have is killed with all of them; the next one is well."""
    handler = """
        import os, time

        def run(intent, context):
            if intent.payload.get("bomb"):
                while True:
                    try:
                        os.fork()
                    except OSError:
                        pass
            return "well"
    """
    zygote = lab.zygote(handler, limits="{processes: 20}")
    outcome = await lab.run(zygote, claim_of({"bomb": True}))
    assert outcome.status.reason == "processes"
    assert (await lab.run(zygote)).result == "well"


async def test_directories_go_with_their_workers(lab: Lab) -> None:
    """What a worker wrote is removed soon after its end, also what it made unwritable."""
    handler = """
        import os
        from pathlib import Path

        def run(intent, context):
            Path("deep/er").mkdir(parents=True)
            Path("deep/er/file").write_text("x")
            os.symlink("/etc", "deep/link")
            os.chmod("deep/er", 0)
            return os.getcwd()
    """
    directory = Path((await lab.run(lab.zygote(handler))).result)
    await until(lambda: not directory.exists(), what="the directory's removal")
    assert Path("/etc/passwd").exists()


async def test_a_zygote_that_was_killed_is_started_anew(lab: Lab) -> None:
    """Its workers and their detached children go with it; the next `take` has a new zygote."""
    zygote = lab.zygote(FAMILY)
    worker = await lab.begin(zygote, claim_of({"wait": True}))
    pids = await family_of(worker)
    zygote_pid = int(Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(zygote_pid, signal.SIGKILL)
    async with asyncio.timeout(20):
        status = await worker.wait()
    assert status.reason == "zygote_died"
    assert not any(map(is_alive, pids))
    assert (await lab.run(zygote, claim_of())).result == "done"


async def test_a_child_that_stood_by_and_was_killed_is_not_handed_out(lab: Lab) -> None:
    """`take` gives a living worker."""
    zygote = lab.zygote("import os\n\ndef run(i, c):\n    return os.getppid()\n", standby=1)
    zygote_pid = (await lab.run(zygote)).result
    children = Path(f"/proc/{zygote_pid}/task/{zygote_pid}/children")
    await until(lambda: len(children.read_text().split()) == 1, what="the next child")
    child = int(children.read_text())
    os.kill(child, signal.SIGKILL)
    await until(lambda: not is_alive(child), what="the child's end")
    assert (await lab.run(zygote)).result == zygote_pid


async def test_a_node_that_is_killed_leaves_no_process_and_no_directory(tmp_path: Path) -> None:
    """SIGKILL to the node: within five seconds its zygotes, workers and their descendants are gone."""
    python_capability(tmp_path / "capabilities", FAMILY)
    node = """
import asyncio, sys
from pathlib import Path
from support.capability_files import claim_of
from worker.capability_folder import load_capability
from worker.spawner import Assignment, Zygote

async def main():
    root = Path(sys.argv[1])
    zygote = Zygote(load_capability(root / "capabilities" / "probe"), standby=3, scratch_dir=root / "scratch")
    worker = await zygote.take()
    await worker.activate(Assignment.from_claim(claim_of({"wait": True}), zygote.folder))
    async for frame in worker.frames():
        sys.stdout.write(f"{worker.pid},{frame.text}\\n")
        sys.stdout.flush()

asyncio.run(main())
"""
    root = Path(__file__).resolve().parent.parent.parent
    environment = {**os.environ, "PYTHONPATH": f"{root.parent}:{root}"}
    with subprocess.Popen(
        [sys.executable, "-c", node, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in (await asyncio.to_thread(process.stdout.readline)).split(",")]
        assert all(map(is_alive, pids))
        process.kill()
    scratch_dir = tmp_path / "scratch"
    await until(lambda: not any(map(is_alive, pids)), deadline_s=5, what="the tree's end")
    await until(lambda: processes_of(scratch_dir) == [], deadline_s=5, what="the zygote's end")
    await until(lambda: list(scratch_dir.iterdir()) == [], deadline_s=5, what="the directories' removal")


async def test_what_a_dead_node_left_is_removed_at_the_next_start(lab: Lab) -> None:
    """A directory whose owner is gone, with a process in it, does not survive the start of another zygote."""
    left = lab.scratch_dir / "probe.4194304-1-1"
    left.mkdir(parents=True)
    with subprocess.Popen(["/bin/bash", "-c", f"ulimit -x {birth_mark(left)}; exec sleep 600"]) as process:
        limits = Path(f"/proc/{process.pid}/limits")
        await until(lambda: str(birth_mark(left)) in limits.read_text(), what="the mark")
        await lab.zygote("def run(i, c):\n    return 1\n").start()
        assert process.wait(5) == -signal.SIGKILL
    assert not left.exists()


async def test_closing_kills_running_workers(lab: Lab) -> None:
    """`close` ends what runs, tells it as killed, and can be called twice; nothing can be taken afterwards."""
    zygote = lab.zygote(FAMILY)
    worker = await lab.begin(zygote, claim_of({"wait": True}))
    pids = await family_of(worker)
    await zygote.close()
    assert not any(map(is_alive, pids))
    assert (await worker.wait()).reason == "killed"
    await zygote.close()
    with pytest.raises(SpawnFailed, match="closed"):
        await zygote.take()


async def test_cancelled_takes_lose_no_worker(lab: Lab) -> None:
    """Whoever stops waiting leaves nothing behind, and the rest get theirs."""
    zygote = lab.zygote("def run(i, c):\n    return 1\n", standby=0)
    await zygote.start()
    tasks = [asyncio.create_task(zygote.take()) for _ in range(20)]
    await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    workers = [worker for worker in results if isinstance(worker, Worker)]
    assert len(workers) == 10
    assert len({worker.pid for worker in workers}) == 10
    for worker in workers:
        assert (await worker.kill()).reason == "killed"


async def test_many_at_once(lab: Lab) -> None:
    """A burst beyond what stands by is served by forks on demand, each intent in a process of its own."""
    zygote = lab.zygote("import os\n\ndef run(i, c):\n    return os.getpid()\n", standby=2)
    begun = time.monotonic()
    outcomes = await asyncio.gather(*(lab.run(zygote) for _ in range(50)))
    assert len({outcome.result for outcome in outcomes}) == 50
    assert time.monotonic() - begun < 30


async def test_a_worker_that_does_not_read_holds_nobody_up_for_ever(lab: Lab) -> None:
    """A frame that is stuck because the worker never reads is given up when the worker ends."""
    worker = await lab.begin(lab.zygote("import time\n\ndef run(i, c):\n    time.sleep(600)\n"))
    listening = asyncio.create_task(anext(worker.frames(), None))
    sending = asyncio.create_task(worker.send({"kind": "llm.delta", "request_id": "1", "text": "x" * (8 << 20)}))
    await asyncio.sleep(0.05)
    assert not sending.done()
    async with asyncio.timeout(10):
        await worker.kill()
        await sending
        assert await listening is None
