"""Who may write: leases that are lost, answers that are lost, a ledger that is away or fails."""

import asyncio
from pathlib import Path

import pytest
from sqlalchemy import delete, update
from sqlalchemy.ext.asyncio import AsyncConnection
from support.node_lab import NodeLab, file_text
from support.process_list import is_alive, until
from support.running_mesh import eventually

from ledger.models import intents, nodes
from mesh import outcome as outcome_module
from mesh.contract.template import Template

LEASE_TTL_S = 2.0


@pytest.fixture
def sleeper(lab: NodeLab, tmp_path: Path) -> Template:
    """A capability that writes its pid, works for a while, and answers with its attempt."""
    return lab.capability(
        f"""
        import os, time
        def run(intent, context):
            with open("{tmp_path}/pid-{{0}}".format(intent.attempt), "w") as file:
                file.write(str(os.getpid()))
            time.sleep(intent.payload.get("for_s", 60) if intent.attempt == 1 else 0)
            return {{"attempt": intent.attempt}}
        """
    )


async def pid_of(folder: Path, attempt: int = 1) -> int:
    """The worker of an attempt."""
    return int(await file_text(folder / f"pid-{attempt}"))


async def test_a_lease_that_moved_ends_its_worker(lab: NodeLab, sleeper: Template, tmp_path: Path) -> None:
    """The next heartbeat tells; the worker is killed, nothing of it is committed, and the new owner's result counts."""
    lab.node()
    intent = await lab.submit(sleeper)
    pid = await pid_of(tmp_path)

    async def move(connection: AsyncConnection) -> None:
        await connection.execute(
            update(intents).values(node_id="node-2", epoch=intents.c.epoch + 1, lease_until_ms=2**50)
        )

    await lab.ledger.store.write(move)
    await until(lambda: not is_alive(pid), deadline_s=3, what="the worker's end")
    view = await lab.look(intent)
    assert (view.status, view.node_id, view.epoch) == ("running", "node-2", 2)


async def test_a_late_result_of_a_lost_lease_is_not_committed(lab: NodeLab, sleeper: Template, tmp_path: Path) -> None:
    """A worker that is quicker than the heartbeat meets the fence."""
    lab.node()
    intent = await lab.submit(sleeper, {"for_s": 0.3})
    await pid_of(tmp_path)

    async def move(connection: AsyncConnection) -> None:
        await connection.execute(
            update(intents).values(node_id="node-2", epoch=intents.c.epoch + 1, lease_until_ms=2**50)
        )

    await lab.ledger.store.write(move)
    await eventually(
        lambda: any(call.endswith("/commit") for call in lab.faults.seen), timeout_s=5, what="the commit is tried"
    )
    await asyncio.sleep(0.1)
    view = await lab.look(intent)
    assert (view.status, view.result) == ("running", None)
    assert "delta" not in await lab.kinds(intent)


async def test_a_worker_ends_before_its_lease_does(lab: NodeLab, sleeper: Template, tmp_path: Path) -> None:
    """A node that cannot renew kills by its own clock; when the ledger is back, the intent is tried again."""
    lab.node()
    intent = await lab.submit(sleeper)
    pid = await pid_of(tmp_path)
    await lab.stop_ledger()
    await until(lambda: not is_alive(pid), deadline_s=2.0, what="the worker's end before the lease's")
    await lab.start_ledger()
    done = await lab.until(intent)
    assert (done.status, done.result) == ("succeeded", {"attempt": 2})
    assert done.attempts[0].cause == "lease_lost"


async def test_one_lost_heartbeat_costs_nothing(lab: NodeLab, sleeper: Template, tmp_path: Path) -> None:
    """A renewal that fails, or hangs, is repeated while there is time."""
    lab.node()
    intent = await lab.submit(sleeper, {"for_s": 4})
    await pid_of(tmp_path)
    count = 0

    def every_other(call: str) -> str | None:
        nonlocal count
        if not call.endswith("/heartbeat"):
            return None
        count += 1
        return "fail" if count % 2 else None

    lab.faults.answer = every_other
    done = await lab.until(intent)
    assert (done.result, len(done.attempts)) == ({"attempt": 1}, 1)
    assert count > 4


async def test_a_hanging_heartbeat_leaves_time_for_another(lab: NodeLab, sleeper: Template, tmp_path: Path) -> None:
    """A call is given up before it has used up the lease."""
    lab.node(lease_margin_s=0.05)
    intent = await lab.submit(sleeper, {"for_s": 3})
    await pid_of(tmp_path)
    hung: list[str] = []

    def first(call: str) -> str | None:
        if call.endswith("/heartbeat") and not hung:
            hung.append(call)
            return "hang"
        return None

    lab.faults.answer = first
    done = await lab.until(intent)
    assert (hung, done.result) == (["POST /nodes/node-1/heartbeat"], {"attempt": 1})


async def test_a_result_outlives_a_restart_of_the_ledger(lab: NodeLab, sleeper: Template, tmp_path: Path) -> None:
    """A worker that ends while the ledger is away is not run again: the node keeps the result."""
    lab.node()
    intent = await lab.submit(sleeper, {"for_s": 0.2})
    await pid_of(tmp_path)
    await lab.stop_ledger()
    await asyncio.sleep(0.4)
    await lab.start_ledger()
    done = await lab.until(intent)
    assert (done.status, done.result, len(done.attempts)) == ("succeeded", {"attempt": 1}, 1)


async def test_a_claim_whose_answer_was_lost_is_made_once(lab: NodeLab, sleeper: Template) -> None:
    """The node asks again, and gets the same claim: no second attempt, no lease that must run out first."""
    lost: list[str] = []

    def first(call: str) -> str | None:
        if call.endswith("/claim") and not lost:
            lost.append(call)
            return "lose"
        return None

    lab.faults.answer = first
    lab.node()
    done = await lab.until(await lab.submit(sleeper, {"for_s": 0}), within_s=5)
    assert (done.status, done.epoch, len(done.attempts), len(lost)) == ("succeeded", 1, 1, 1)
    assert (await lab.kinds(done)).count("intent.claimed") == 1


@pytest.mark.parametrize("verb", ["commit", "fail"])
async def test_an_outcome_whose_answer_was_lost_counts_once(lab: NodeLab, verb: str) -> None:
    """The same outcome again gets the same answer."""
    probe = lab.capability(
        "from worker.sdk import Refused\ndef run(intent, context):\n"
        "    if intent.payload['verb'] == 'fail':\n        raise Refused('no')\n    return 1\n"
    )
    lost: list[str] = []

    def first(call: str) -> str | None:
        if call.endswith(f"/{verb}") and not lost:
            lost.append(call)
            return "lose"
        return None

    lab.faults.answer = first
    lab.node()
    done = await lab.run(probe, {"verb": verb})
    assert (done.status, len(done.attempts)) == ({"commit": "succeeded", "fail": "failed"}[verb], 1)
    await eventually(lambda: sum(f"/{verb}" in call for call in lab.faults.seen) == 2, timeout_s=5, what="two calls")


async def test_a_ledger_that_fails_in_itself_is_asked_again(lab: NodeLab, sleeper: Template) -> None:
    """A 500 says nothing about the result."""
    failures: list[str] = []

    def twice(call: str) -> str | None:
        if call.endswith("/commit") and len(failures) < 2:
            failures.append(call)
            return "fail"
        return None

    lab.faults.answer = twice
    lab.node()
    done = await lab.run(sleeper, {"for_s": 0})
    assert (done.status, len(done.attempts)) == ("succeeded", 1)


@pytest.mark.parametrize("fault", ["fail", "lose"])
async def test_an_outcome_that_is_never_taken_is_given_up(
    lab: NodeLab, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """No lease is renewed for ever: the slot is freed, the attempt is lost, and its number is limited."""
    monkeypatch.setattr(outcome_module, "SETTLE_PATIENCE_S", 0.3)
    probe = lab.capability("def run(intent, context):\n    return 1\n", limits="{max_attempts: 1}")

    def always(call: str) -> str | None:
        return "fail" if call.endswith("/commit") else None

    def blackhole(call: str) -> str | None:
        return "hang" if call.endswith("/commit") else None

    lab.faults.answer = always if fault == "fail" else blackhole
    node = lab.node(timeout_s=0.3)
    dead = await lab.run(probe)
    assert (dead.status, dead.attempts[0].cause) == ("dead", "lease_lost")
    assert node.free_slots == 4


async def test_a_node_that_the_ledger_forgot_registers_again(lab: NodeLab, sleeper: Template) -> None:
    """So does one whose ledger came back without it."""
    lab.node()
    await lab.up()

    async def forget(connection: AsyncConnection) -> None:
        await connection.execute(delete(nodes))

    await lab.ledger.store.write(forget)
    await lab.up()
    assert (await lab.run(sleeper, {"for_s": 0})).status == "succeeded"


async def test_a_node_waits_for_its_ledger(lab: NodeLab, sleeper: Template) -> None:
    """The order in which roles start does not matter."""
    await lab.stop_ledger()
    lab.node()
    await asyncio.sleep(0.3)
    await lab.start_ledger()
    assert (await lab.run(sleeper, {"for_s": 0})).status == "succeeded"
