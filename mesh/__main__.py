"""`python -m mesh`: one node. Wiring only.

Must never hold a database URL: a node knows the ledger's address, Redis and the mesh token.
"""

import asyncio
import contextlib
import signal
import sys

import structlog

from ledger.client import LedgerClient
from mesh.backplane.backplane import Backplane
from mesh.contract.errors import MeshError
from mesh.contract.logs import configure_logs
from mesh.contract.settings import read_settings
from mesh.node import Node
from mesh.settings import NodeSettings
from worker.kernel import hide_from_others

log = structlog.get_logger()


async def serve(settings: NodeSettings) -> None:
    """Run one node until SIGTERM or SIGINT; a second signal ends it at once.

    Raises: MeshError when the ledger or Redis refuses this node.
    """
    token = settings.mesh_token.get_secret_value() if settings.mesh_token else ""
    async with contextlib.AsyncExitStack() as stack:
        ledger = LedgerClient(settings.ledger_url, token)
        stack.push_async_callback(ledger.close)
        backplane = (
            await Backplane.open(settings.redis_url, prefix=settings.redis_prefix) if settings.redis_url else None
        )
        if backplane is not None:
            stack.push_async_callback(backplane.close)
        node = Node(settings, ledger=ledger, backplane=backplane)
        running = asyncio.create_task(node.run())
        loop = asyncio.get_running_loop()
        is_signalled = False

        def stop() -> None:
            nonlocal is_signalled
            if is_signalled:
                running.cancel()
            is_signalled = True
            node.drain()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop)
        with contextlib.suppress(asyncio.CancelledError):
            await running


def main() -> int:
    """Read the settings and serve."""
    # Workers run as the same user, and the mesh token and the model's key stand in this process.
    hide_from_others()
    settings = read_settings(NodeSettings)
    configure_logs(level=settings.log_level, is_json=settings.log_json, role="node")
    structlog.contextvars.bind_contextvars(node_id=settings.node_id)
    try:
        asyncio.run(serve(settings))
    except MeshError as error:
        log.error("node_cannot_serve", code=error.code, detail=error.detail, hint=error.hint)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
