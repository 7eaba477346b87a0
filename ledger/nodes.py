"""Nodes and the capabilities that they brought along.

Nodes and capabilities belong to the mesh, not to a tenant. Must never run anything: a row is what a node said last.
"""

import builtins
import functools
from typing import Any

from sqlalchemy import case, func, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from ledger.models import capabilities, intents, nodes, now_ms
from ledger.settings import LedgerSettings
from ledger.settling import in_state
from ledger.store import Row, Store
from ledger.times import to_time
from mesh.contract import canonical_json
from mesh.contract.api import NodeView
from mesh.contract.errors import ErrorCode, MeshError, not_found
from mesh.contract.messages import NodeWelcome, RegisterNode
from mesh.contract.states import State
from mesh.contract.template import Template

CAPABILITIES_MAX = 1000


@functools.lru_cache(maxsize=1024)
def _template(text: str) -> Template:
    """Parse a stored template; its schema is checked each time, which costs a millisecond, hence the cache."""
    return Template.model_validate_json(text)


class Nodes:
    """The register of nodes and capabilities."""

    def __init__(self, store: Store, settings: LedgerSettings) -> None:
        self._store = store
        self._lease_ttl_s = settings.lease_ttl_s
        self._lost_after_ms = int(settings.node_lost_after_s * 1000)

    async def register(self, request: RegisterNode) -> NodeWelcome:
        """Note a node and its capabilities' templates; the newest template of a name counts.

        An operator's wish that the node drain holds until it did: one that was draining and registers again has
        been started anew.
        Raises: MeshError `invalid_request`.
        """
        if len(request.capabilities) > CAPABILITIES_MAX:
            raise MeshError(
                ErrorCode.INVALID_REQUEST, f"more than {CAPABILITIES_MAX} capabilities", field="capabilities"
            )
        canonical_json.check([request.node_id, request.host])
        names = sorted({template.name for template in request.capabilities})

        async def work(connection: AsyncConnection) -> bool:
            dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
            node = dialect.insert(nodes).values(
                node_id=request.node_id,
                host=request.host,
                slots=request.slots,
                free_slots=request.slots,
                capabilities=names,
                is_drain_requested=False,
                is_draining=False,
                started_at_ms=now_ms(),
                seen_at_ms=now_ms(),
            )
            said = {name: node.excluded[name] for name in ("host", "slots", "free_slots", "capabilities", "seen_at_ms")}
            anew = {
                "is_draining": False,
                "is_drain_requested": case((nodes.c.is_draining, False), else_=nodes.c.is_drain_requested),
                "started_at_ms": case((nodes.c.is_draining, now_ms()), else_=nodes.c.started_at_ms),
            }
            node = node.on_conflict_do_update(index_elements=[nodes.c.node_id], set_={**said, **anew})
            is_draining: bool = (await connection.execute(node.returning(nodes.c.is_drain_requested))).scalar_one()
            if request.capabilities:
                # In one order, so that two nodes that register at once do not wait for each other.
                rows = [
                    {"name": template.name, "template": template.model_dump_json()}
                    for template in sorted(request.capabilities, key=lambda template: template.name)
                ]
                brought = dialect.insert(capabilities).values(updated_at_ms=now_ms())
                brought = brought.on_conflict_do_update(
                    index_elements=[capabilities.c.name],
                    set_={"template": brought.excluded.template, "updated_at_ms": now_ms()},
                    where=capabilities.c.template != brought.excluded.template,
                )
                await connection.execute(brought, rows)
            return is_draining

        is_draining = await self._store.write(work, is_repeatable=True)
        return NodeWelcome(lease_ttl_s=self._lease_ttl_s, is_draining=is_draining)

    async def _rows(self, *conditions: Any) -> builtins.list[Row]:
        running = (
            select(intents.c.node_id, func.count().label("running"))
            .where(in_state(State.RUNNING))
            .group_by(intents.c.node_id)
            .subquery()
        )
        statement = (
            select(nodes, func.coalesce(running.c.running, 0).label("running"), now_ms().label("now_ms"))
            .join_from(nodes, running, nodes.c.node_id == running.c.node_id, isouter=True)
            .where(*conditions)
            .order_by(nodes.c.node_id)
        )

        async def work(connection: AsyncConnection) -> builtins.list[Row]:
            return list((await connection.execute(statement)).mappings())

        return await self._store.read(work)

    def _is_lost(self, row: Row) -> bool:
        return bool(row["now_ms"] - row["seen_at_ms"] > self._lost_after_ms)

    def _view(self, row: Row) -> NodeView:
        is_draining = row["is_draining"] or row["is_drain_requested"]
        return NodeView(
            node_id=row["node_id"],
            host=row["host"],
            status="lost" if self._is_lost(row) else "draining" if is_draining else "up",
            slots=row["slots"],
            free_slots=row["free_slots"],
            capabilities=row["capabilities"],
            running=row["running"],
            started_at=to_time(row["started_at_ms"]),
            seen_at=to_time(row["seen_at_ms"]),
        )

    async def list(self) -> builtins.list[NodeView]:
        """Return all nodes by id, the lost ones too."""
        return [self._view(row) for row in await self._rows()]

    async def drain(self, node_id: str) -> NodeView:
        """Ask a node to take no more work; it hears so at its next heartbeat.

        Raises: MeshError `not_found`.
        """

        async def work(connection: AsyncConnection) -> int:
            statement = update(nodes).where(nodes.c.node_id == node_id).values(is_drain_requested=True)
            return (await connection.execute(statement)).rowcount

        if not await self._store.write(work, is_repeatable=True):
            raise not_found("node", node_id)
        found = await self._rows(nodes.c.node_id == node_id)
        if not found:
            raise not_found("node", node_id)
        return self._view(found[0])

    async def capabilities(self) -> builtins.list[tuple[Template, bool]]:
        """Return every known capability by name, each with whether a node that is up can run it."""

        async def work(connection: AsyncConnection) -> builtins.list[str]:
            statement = select(capabilities.c.template).order_by(capabilities.c.name)
            return list((await connection.execute(statement)).scalars())

        texts = await self._store.read(work)
        up = [view for view in await self.list() if view.status == "up"]
        runnable = {name for view in up for name in view.capabilities}
        return [(template, template.name in runnable) for template in map(_template, texts)]

    async def capability(self, name: str) -> Template | None:
        """Return the template of a capability, None when no node ever brought it."""

        async def work(connection: AsyncConnection) -> str | None:
            statement = select(capabilities.c.template).where(capabilities.c.name == name)
            return (await connection.execute(statement)).scalar_one_or_none()

        text = await self._store.read(work)
        return None if text is None else _template(text)
