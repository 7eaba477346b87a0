"""A running gateway over the ledger under test, with one simulated node."""

from collections.abc import AsyncIterator

import pytest
from support.running_gateway import RunningGateway, SimulatedNode, run_gateway

from ledger.ledger import Ledger


@pytest.fixture
async def node(ledger: Ledger) -> SimulatedNode:
    """A node that has echo and chat."""
    node = SimulatedNode(ledger)
    await node.register()
    return node


@pytest.fixture
async def running(ledger: Ledger, node: SimulatedNode) -> AsyncIterator[RunningGateway]:
    """A gateway without keys on loopback."""
    async with run_gateway(ledger) as running:
        yield running
