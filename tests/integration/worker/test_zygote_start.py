"""What a zygote refuses to start, and how it says so."""

import asyncio
import shutil
from pathlib import Path

import pytest
from support.process_list import processes_of
from support.worker_lab import Lab

from worker import zygote_process
from worker.spawner import SpawnFailed


@pytest.mark.parametrize(
    ("handler", "detail"),
    [
        (
            "import no_such_library\n\ndef run(i, c):\n    return 1\n",
            "ModuleNotFoundError: No module named 'no_such_library'",
        ),
        ("TABLE = {}['missing']\n\ndef run(i, c):\n    return 1\n", "KeyError: 'missing'"),
        ("raise SystemExit(3)\n\ndef run(i, c):\n    return 1\n", "SystemExit: 3"),
        ("import os\nos._exit(5)\n\ndef run(i, c):\n    return 1\n", "ended with code 5"),
        ("import os\nprint('last words')\nos.abort()\n\ndef run(i, c):\n    return 1\n", "last words"),
        (
            "import threading, time\nthreading.Thread(target=time.sleep, args=(9,), daemon=True).start()\n\n"
            "def run(i, c):\n    return 1\n",
            "starts 1 thread",
        ),
        ("KEPT = bytearray(64 << 20)\n\ndef run(i, c):\n    return 1\n", "limits.memory_mb is too small"),
        ("from worker.sdk import delta\ndelta('too early')\n\ndef run(i, c):\n    return 1\n", "not at import"),
    ],
)
async def test_a_handler_that_cannot_be_imported(lab: Lab, handler: str, detail: str) -> None:
    """It fails for good with a detail that its author understands, and leaves nothing."""
    zygote = lab.zygote(handler, limits="{memory_mb: 48}")
    with pytest.raises(SpawnFailed) as failure:
        await zygote.start()
    assert detail in failure.value.detail
    assert not failure.value.is_retryable
    assert not zygote.is_warm
    assert processes_of(lab.scratch_dir) == []
    with pytest.raises(SpawnFailed):
        await zygote.take()


async def test_the_detail_shows_the_handlers_line(lab: Lab) -> None:
    """The traceback begins in handler.py, not in the machinery."""
    zygote = lab.zygote("def run(i, c):\n    return 1\n\nNUMBER = 1 / 0\n")
    with pytest.raises(SpawnFailed) as failure:
        await zygote.start()
    assert "handler.py" in failure.value.detail.splitlines()[0]
    assert "NUMBER = 1 / 0" in failure.value.detail
    assert "zygote.py" not in failure.value.detail


async def test_an_import_that_never_ends(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """After its time it is killed."""
    monkeypatch.setattr(zygote_process, "START_PATIENCE_S", 0.5)
    zygote = lab.zygote("while True:\n    pass\n\ndef run(i, c):\n    return 1\n")
    with pytest.raises(SpawnFailed, match="took longer"):
        await zygote.start()
    assert processes_of(lab.scratch_dir) == []


async def test_closing_during_the_import(lab: Lab) -> None:
    """`close` does not wait for a handler that is being imported."""
    zygote = lab.zygote("while True:\n    pass\n\ndef run(i, c):\n    return 1\n")
    starting = asyncio.create_task(zygote.start())
    async with asyncio.timeout(10):
        while not processes_of(lab.scratch_dir):
            await asyncio.sleep(0.01)
        await zygote.close()
        with pytest.raises(SpawnFailed):
            await starting


async def test_cancelling_the_start(lab: Lab) -> None:
    """A start that is cancelled leaves no process, and the next one works."""
    zygote = lab.zygote("import time\ntime.sleep(0.3)\n\ndef run(i, c):\n    return 1\n")
    starting = asyncio.create_task(zygote.start())
    while not processes_of(lab.scratch_dir):
        await asyncio.sleep(0.01)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert processes_of(lab.scratch_dir) == []
    assert (await lab.run(zygote)).result == 1


async def test_many_starts_are_one(lab: Lab) -> None:
    """Concurrent calls share one process."""
    zygote = lab.zygote("import os\n\ndef run(i, c):\n    return os.getppid()\n", standby=2)
    await asyncio.gather(*(zygote.start() for _ in range(5)))
    assert zygote.is_warm
    assert len({(await lab.run(zygote)).result for _ in range(3)}) == 1


async def test_a_helper_of_the_import_does_not_live_on(lab: Lab) -> None:
    """A process that handler.py started when it was imported is nobody's: it goes when a worker ends."""
    zygote = lab.zygote(
        "import subprocess\nPID = subprocess.Popen(['/bin/sleep', '600']).pid\n\ndef run(i, c):\n    return PID\n"
    )
    pid = (await lab.run(zygote)).result
    assert not Path(f"/proc/{pid}").exists()


async def test_the_capability_folder_is_not_written_to(lab: Lab) -> None:
    """No cache appears beside the handler: the folder may be read-only."""
    zygote = lab.zygote("def run(i, c):\n    return 1\n")
    await lab.run(zygote)
    assert sorted(path.name for path in zygote.folder.path.iterdir()) == ["handler.py", "template.yaml"]


async def test_a_folder_that_vanished(lab: Lab) -> None:
    """The zygote says that the handler is gone."""
    zygote = lab.zygote("def run(i, c):\n    return 1\n")
    shutil.rmtree(zygote.folder.path)
    with pytest.raises(SpawnFailed, match="FileNotFoundError"):
        await zygote.start()
