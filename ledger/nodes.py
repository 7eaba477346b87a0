"""Nodes and the capabilities that they brought along.

Nodes and capabilities belong to the mesh, not to a tenant. Must never run anything: a row is what a node said last.
"""

from ledger.settings import LedgerSettings
from ledger.store import Store
from mesh.contract.api import NodeView
from mesh.contract.messages import NodeWelcome, RegisterNode
from mesh.contract.template import Template


class Nodes:
    """The register of nodes and capabilities."""

    def __init__(self, store: Store, settings: LedgerSettings) -> None:
        self._store = store
        self._settings = settings

    async def register(self, request: RegisterNode) -> NodeWelcome:
        """Note a node and its capabilities' templates; the newest template of a name counts."""
        raise NotImplementedError

    async def list(self) -> list[NodeView]:
        """Return all nodes by id, the lost ones too."""
        raise NotImplementedError

    async def drain(self, node_id: str) -> NodeView:
        """Ask a node to take no more work; it hears so at its next heartbeat.

        Raises: MeshError `not_found`.
        """
        raise NotImplementedError

    async def capabilities(self) -> list[tuple[Template, bool]]:
        """Return every known capability by name, each with whether a node that is up can run it."""
        raise NotImplementedError

    async def capability(self, name: str) -> Template | None:
        """Return the template of a capability, None when no node ever brought it."""
        raise NotImplementedError
