"""An attempt that gets no worker."""

from pathlib import Path

import pytest
from support.capability_files import claim_of

from mesh.attempt import Attempt
from mesh.contract.errors import Cause
from mesh.contract.messages import FailAttempt
from mesh.contract.template import Template
from mesh.llm.broker import Broker
from mesh.settings import NodeSettings
from worker.capability_folder import CapabilityFolder
from worker.spawner import SpawnFailed, Worker, Zygote

PROBE = CapabilityFolder(Template(name="probe"), Path("probe"), "digest")


class NoLedger:
    """Nothing is said, so nothing is sent."""


class NoWorkers(Zygote):
    """A zygote that has no worker to give."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.asked = 0

    async def take(self) -> Worker:
        """Raise."""
        self.asked += 1
        raise self.error


def attempt_of(**claim: object) -> Attempt:
    """An attempt at the probe."""
    return Attempt(claim_of(**claim), PROBE, ledger=NoLedger(), broker=Broker(NodeSettings()), node_id="n")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("error", "cause", "is_retryable"),
    [
        (SpawnFailed("no module"), Cause.SPAWN_FAILED, False),
        (SpawnFailed("too many processes", is_retryable=True), Cause.WORKER_CRASHED, True),
        (OSError("disk full"), Cause.WORKER_CRASHED, True),
        (KeyError("a bug"), Cause.WORKER_CRASHED, True),
    ],
)
async def test_bad_luck_is_tried_again_and_a_bad_folder_is_not(
    error: Exception, cause: Cause, is_retryable: bool
) -> None:
    """`spawn_failed` is dead at once, so it is only said of what fails the same way every time."""
    outcome = await attempt_of().run(NoWorkers(error))
    assert isinstance(outcome, FailAttempt)
    assert (outcome.cause, outcome.is_retryable) == (cause, is_retryable)


async def test_an_award_under_a_wrong_name_runs_no_handler() -> None:
    """Redis is a hint: the handler of another capability must not see the intent."""
    zygote = NoWorkers(AssertionError())
    outcome = await attempt_of(capability="other").run(zygote)
    assert isinstance(outcome, FailAttempt)
    assert (outcome.cause, outcome.is_retryable, zygote.asked) == (Cause.WORKER_CRASHED, True, 0)


async def test_what_is_stopped_before_it_began_takes_no_worker() -> None:
    """A lease that was lost while the worker was on its way must not begin anything; the first cause counts."""
    attempt = attempt_of()
    attempt.stop(Cause.LEASE_LOST)
    attempt.stop(Cause.CANCELLED)
    zygote = NoWorkers(AssertionError())
    outcome = await attempt.run(zygote)
    assert isinstance(outcome, FailAttempt)
    assert (outcome.cause, zygote.asked) == (Cause.LEASE_LOST, 0)
