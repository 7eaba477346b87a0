"""What a node offers, while folders appear, change, break and go."""

import asyncio
import os
import shutil
import time
from pathlib import Path

import pytest
from support.capability_files import write_capability
from support.node_lab import NodeLab, file_text
from support.process_list import processes_of
from support.running_mesh import eventually

from mesh import shelf as shelf_module

ONE = "def run(intent, context):\n    return 1\n"
TWO = "def run(intent, context):\n    return 2\n"


async def offers(lab: NodeLab, *names: str) -> None:
    """Wait until the node offers exactly these."""

    async def has_come() -> bool:
        views = await lab.ledger.nodes.list()
        return [sorted(view.capabilities) for view in views] == [sorted(names)]

    await eventually(has_come, timeout_s=10, what=f"the node offers {names}")


async def test_a_changed_handler_is_used(lab: NodeLab) -> None:
    """Without a restart; the old zygote is gone."""
    probe = lab.capability(ONE)
    lab.node()
    assert (await lab.run(probe)).result == 1
    before = processes_of(lab.folder / "node-1")
    probe = lab.capability(TWO)

    async def is_two() -> bool:
        return (await lab.run(probe)).result == 2

    await eventually(is_two, timeout_s=10, what="the new handler answers")
    await eventually(
        lambda: not set(before) & set(processes_of(lab.folder / "node-1")), timeout_s=5, what="the old zygote's end"
    )


async def test_what_runs_is_finished_by_the_version_that_began(lab: NodeLab, tmp_path: Path) -> None:
    """A newer version ends no worker of the older one."""
    slow = f"""
        import time
        def run(intent, context):
            open("{tmp_path}/begun", "w").write("yes")
            time.sleep(0.8)
            return "old"
        """
    probe = lab.capability(slow)
    lab.node()
    running = await lab.submit(probe)
    await file_text(tmp_path / "begun")
    probe = lab.capability("def run(intent, context):\n    return 'new'\n")

    async def is_new() -> bool:
        return (await lab.run(probe)).result == "new"

    await eventually(is_new, timeout_s=10, what="the new handler answers")
    done = await lab.until(running)
    assert (done.result, len(done.attempts)) == ("old", 1)


@pytest.mark.parametrize(
    "broken",
    [
        "def run(intent, context)\n    return 1\n",
        "raise RuntimeError('at import')\n\ndef run(intent, context):\n    return 1\n",
        "import os\nos._exit(1)\n\ndef run(intent, context):\n    return 1\n",
    ],
    ids=["syntax", "import", "exit"],
)
async def test_a_broken_handler_takes_no_other_down(lab: NodeLab, broken: str) -> None:
    """Not at the start, not while the node runs; the last good version goes on; mended, it is used."""
    good = lab.capability(ONE, name="good")
    write_capability(lab.capabilities, "bad", {"handler.py": broken})
    lab.node()
    await offers(lab, "good")
    assert (await lab.run(good)).result == 1
    lab.capability(TWO, name="bad")
    await offers(lab, "good", "bad")
    write_capability(lab.capabilities, "good", {"handler.py": broken})
    await asyncio.sleep(0.3)
    assert (await lab.run(good)).result == 1
    assert not lab.runs["node-1"].done()


async def test_an_import_that_never_ends_keeps_nobody_waiting(lab: NodeLab, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others serve; a mended folder replaces the one that hangs; draining does not wait for it."""
    monkeypatch.setattr(shelf_module, "START_TOGETHER_S", 0.2)
    good = lab.capability(ONE, name="good")
    stuck = "import time\ntime.sleep(600)\n\ndef run(intent, context):\n    return 1\n"
    write_capability(lab.capabilities, "stuck", {"handler.py": stuck})
    write_capability(lab.capabilities, "other", {"handler.py": stuck})
    began_s = time.monotonic()
    lab.node()
    assert (await lab.run(good)).result == 1
    assert time.monotonic() - began_s < 5
    mended = lab.capability(TWO, name="stuck")
    await offers(lab, "good", "stuck")
    assert (await lab.run(mended)).result == 2
    assert await lab.drained() < 5
    assert not processes_of(lab.folder / "node-1")


async def test_a_folder_that_is_gone_is_offered_no_more(lab: NodeLab) -> None:
    """And one that cannot be read keeps its last good version."""
    lab.capability(ONE, name="one")
    two = lab.capability(TWO, name="two")
    lab.node()
    await offers(lab, "one", "two")
    shutil.rmtree(lab.capabilities / "one")
    await offers(lab, "two")
    (lab.capabilities / "two" / "template.yaml").write_text("name: [\n")
    await asyncio.sleep(0.3)
    assert (await lab.run(two)).result == 2


async def test_bad_luck_at_the_start_is_tried_again(lab: NodeLab, tmp_path: Path) -> None:
    """A machine that refuses a folder or a process now does not cost the node its capability for good."""
    probe = lab.capability(ONE)
    (tmp_path / "node-1").mkdir()
    in_the_way = tmp_path / "node-1" / "scratch"
    in_the_way.write_text("a file where a folder must be")
    lab.node()
    await offers(lab)
    in_the_way.unlink()
    await offers(lab, "probe")
    assert (await lab.run(probe)).result == 1


async def test_the_later_of_two_roots_has_the_word(lab: NodeLab, tmp_path: Path) -> None:
    """Even while what it says cannot be understood: another's handler must not answer in its stead."""
    probe = lab.capability(ONE)
    mine = tmp_path / "mine"
    write_capability(mine, "probe", {"handler.py": TWO})
    lab.node(capabilities_dir=f"{lab.capabilities}:{mine}")
    assert (await lab.run(probe)).result == 2
    (mine / "probe" / "handler.py").write_text("def run(\n")
    await asyncio.sleep(0.3)
    assert (await lab.run(probe)).result == 2


async def test_a_change_that_the_ledger_did_not_hear_of_is_told_again(lab: NodeLab) -> None:
    """A registration that fails is repeated, and costs neither node nor leases."""
    lab.capability(ONE, name="one")
    lab.node()
    await offers(lab, "one")
    failures: list[str] = []

    def twice(call: str) -> str | None:
        if call.startswith("PUT") and len(failures) < 2:
            failures.append(call)
            return "fail"
        return None

    lab.faults.answer = twice
    lab.capability(TWO, name="two")
    await offers(lab, "one", "two")
    assert len(failures) == 2


async def test_a_dead_zygote_is_replaced(lab: NodeLab) -> None:
    """Whoever kills it."""
    probe = lab.capability(ONE)
    lab.node()
    assert (await lab.run(probe)).result == 1
    for pid in processes_of(lab.folder / "node-1"):
        os.kill(pid, 9)
    assert (await lab.run(probe)).result == 1
