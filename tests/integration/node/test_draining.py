"""How a node stops: what runs ends, what does not goes to others, and nothing waits for ever."""

import asyncio
import time
from pathlib import Path

import pytest
from support.node_lab import NodeLab, file_text
from support.process_list import is_alive, processes_of
from support.running_mesh import eventually

from mesh.contract.template import Template

LEASE_TTL_S = 2.0


@pytest.fixture
def sleeper(lab: NodeLab, tmp_path: Path) -> Template:
    """A capability whose first attempt sleeps as long as it is told, and says when it has begun."""
    return lab.capability(
        f"""
        import os, time
        def run(intent, context):
            with open("{tmp_path}/begun-{{0}}".format(intent.payload["name"]), "w") as file:
                file.write(str(os.getpid()))
            time.sleep(intent.payload["for_s"] if intent.attempt == 1 else 0)
            return intent.attempt
        """
    )


async def test_a_draining_node_finishes_what_runs_and_takes_no_more(
    lab: NodeLab, sleeper: Template, tmp_path: Path
) -> None:
    """What was accepted later waits for another node."""
    lab.node()
    running = await lab.submit(sleeper, {"name": "a", "for_s": 0.6})
    await file_text(tmp_path / "begun-a")
    draining = asyncio.create_task(lab.drained())
    await asyncio.sleep(0.1)
    later = await lab.submit(sleeper, {"name": "b", "for_s": 0})
    await draining
    assert (await lab.look(running)).status == "succeeded"
    assert (await lab.look(later)).status == "ready"
    assert [view.status for view in await lab.ledger.nodes.list()] == ["draining"]
    lab.node("node-2")
    assert (await lab.until(later)).node_id == "node-2"


async def test_what_does_not_end_in_time_is_handed_back(lab: NodeLab, sleeper: Template, tmp_path: Path) -> None:
    """Another node runs it at once, and no attempt is counted; no process is left."""
    lab.node(drain_timeout_s=0.3)
    intent = await lab.submit(sleeper, {"name": "a", "for_s": 60})
    pid = int(await file_text(tmp_path / "begun-a"))
    took_s = await lab.drained()
    assert took_s < 3
    assert not is_alive(pid)
    handed_back = await lab.look(intent)
    assert (handed_back.status, handed_back.attempts[0].cause) == ("ready", "node_drained")
    assert handed_back.max_attempts == 4
    assert not processes_of(tmp_path / "node-1")
    lab.node("node-2")
    assert (await lab.until(intent)).result == 2


async def test_draining_ends_while_the_ledger_is_away(lab: NodeLab, sleeper: Template, tmp_path: Path) -> None:
    """An outcome that cannot be told holds a node up for a bounded time only."""
    lab.node(drain_timeout_s=0.3)
    await lab.submit(sleeper, {"name": "a", "for_s": 0.3})
    await file_text(tmp_path / "begun-a")
    await lab.stop_ledger()
    assert await lab.drained() < 5


async def test_a_claim_that_comes_late_is_handed_back(lab: NodeLab, sleeper: Template, tmp_path: Path) -> None:
    """A node that is handing back starts nothing that it would have to kill."""
    held = asyncio.Event()

    def hold(call: str) -> str | None:
        if call.endswith("/claim"):
            held.set()
        return None

    lab.faults.answer = hold
    lab.node(drain_timeout_s=0)
    intent = await lab.submit(sleeper, {"name": "a", "for_s": 60})
    await held.wait()
    await lab.drained()
    view = await lab.look(intent)
    assert view.status == "ready"
    assert [attempt.cause for attempt in view.attempts] in ([], ["node_drained"])


async def test_a_node_stops_while_it_waits_for_its_ledger(lab: NodeLab, sleeper: Template) -> None:
    """One signal is enough, also before the node has begun."""
    await lab.stop_ledger()
    lab.node()
    await asyncio.sleep(0.2)
    assert await lab.drained() < 3


async def test_an_operator_drains_a_node(lab: NodeLab, sleeper: Template) -> None:
    """The node hears so at its next heartbeat, and its run ends."""
    lab.node()
    await lab.up()
    await lab.ledger.nodes.drain("node-1")
    await asyncio.wait_for(lab.runs["node-1"], 5)
    assert [view.status for view in await lab.ledger.nodes.list()] == ["draining"]


async def test_a_cancelled_node_leaves_no_process(lab: NodeLab, sleeper: Template, tmp_path: Path) -> None:
    """The second signal: at once, without waiting for anybody; the lease runs out and another node goes on."""
    lab.node()
    intent = await lab.submit(sleeper, {"name": "a", "for_s": 60})
    await file_text(tmp_path / "begun-a")
    began_s = time.monotonic()
    lab.runs["node-1"].cancel()
    with pytest.raises(asyncio.CancelledError):
        await lab.runs.pop("node-1")
    assert time.monotonic() - began_s < 3
    assert not processes_of(tmp_path / "node-1")
    lab.node("node-2")
    assert (await lab.until(intent)).result == 2


async def test_a_node_that_may_not_join_says_so(lab: NodeLab, sleeper: Template, tmp_path: Path) -> None:
    """A refusal for good ends the node, and leaves nothing behind."""
    lab.faults.answer = lambda call: "fail" if call.startswith("PUT") else None
    lab.node()
    await eventually(lambda: lab.runs["node-1"].done(), timeout_s=10, what="the node has given up")
    assert "scripted failure" in str(lab.runs.pop("node-1").exception())
    assert not processes_of(tmp_path / "node-1")
