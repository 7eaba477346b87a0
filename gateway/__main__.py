"""`python -m gateway`: one gateway. Wiring only.

Over SQLite it is the ledger too: one process writes the file, so it also serves the nodes, sweeps and embeds. Over
PostgreSQL it writes through `ledger.store` itself and asks a ledger for embeddings.
Must never listen beyond loopback without keys, unless it is told so explicitly.
"""

import asyncio
import signal
import sys
from contextlib import AsyncExitStack
from urllib.parse import urlsplit

import structlog
import uvloop

from gateway.app import build_app
from gateway.settings import GatewaySettings, is_loopback
from gateway.wire import Server, bind, server_config
from ledger.app import build_ledger_app
from ledger.client import LedgerClient, RemoteEmbedder
from ledger.embedder.client import EmbedderProcess
from ledger.ledger import Ledger, open_ledger
from mesh.backplane.backplane import Backplane
from mesh.backplane.notice_board import NoticeBoard
from mesh.contract.errors import ErrorCode, MeshError
from mesh.contract.logs import configure_logs
from mesh.contract.ports import Embedder
from mesh.contract.settings import read_settings

log = structlog.get_logger()


def is_on_sqlite(settings: GatewaySettings) -> bool:
    """Whether this process is the ledger too."""
    return settings.effective_database_url.startswith("sqlite")


def internal_address(settings: GatewaySettings) -> tuple[str, int]:
    """Return where nodes reach the ledger in this process: LEDGER_PORT if it is set, else the port of LEDGER_URL.

    Raises: MeshError `forbidden` when other machines could reach it without a token.
    """
    port = settings.ledger_port
    if "ledger_port" not in settings.model_fields_set:
        port = urlsplit(settings.ledger_url).port or port
    if settings.mesh_token is None and not is_loopback(settings.ledger_host):
        raise MeshError(
            ErrorCode.FORBIDDEN,
            f"{settings.ledger_host} is reachable from other machines, and nodes would need no token there",
            hint="set INTENTMESH_MESH_TOKEN, or INTENTMESH_LEDGER_HOST=127.0.0.1",
        )
    return settings.ledger_host, port


async def check_access(settings: GatewaySettings, ledger: Ledger) -> None:
    """Refuse to be open to other machines by accident.

    Raises: MeshError `forbidden`.
    """
    if settings.access == "auto" and not settings.is_loopback and not await ledger.keys.has_any():
        raise MeshError(
            ErrorCode.FORBIDDEN,
            f"{settings.host} is reachable from other machines, and there is no key yet",
            hint="set INTENTMESH_ACCESS=locked and INTENTMESH_MESH_TOKEN, then make a key with `intentmesh keys add`; "
            "or INTENTMESH_ACCESS=open if everybody who reaches it may use it",
        )
    if settings.access == "locked" and settings.mesh_token is None and not await ledger.keys.has_any():
        raise MeshError(
            ErrorCode.FORBIDDEN,
            "a locked gateway without keys needs a mesh token: nobody could make the first key",
            hint="set INTENTMESH_MESH_TOKEN",
        )


async def _open_embedder(settings: GatewaySettings, token: str | None, stack: AsyncExitStack) -> Embedder | None:
    if settings.embedding_model == "none":
        return None
    if is_on_sqlite(settings):
        process = EmbedderProcess(settings.embedding_model)
        stack.push_async_callback(process.close)
        await process.start()
        return process
    client = LedgerClient(settings.ledger_url, token)
    stack.push_async_callback(client.close)
    remote = RemoteEmbedder(client)
    await remote.start()
    return remote


async def _run(servers: list[Server]) -> None:
    """Serve until a signal or until one of the servers ends; the first one ends first, then the others."""
    loop = asyncio.get_running_loop()

    def stop() -> None:
        for server in servers:
            server.force_exit = server.should_exit
        servers[0].should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    tasks = [asyncio.create_task(server.serve()) for server in servers]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for server in servers:
        server.should_exit = True
    await asyncio.gather(*tasks)


async def serve(settings: GatewaySettings) -> None:
    """Run one gateway until SIGTERM or SIGINT; a second signal does not wait for open requests.

    Raises: MeshError when it cannot start: `conflict` (port or file taken), `forbidden`, `unavailable`.
    """
    token = settings.mesh_token.get_secret_value() if settings.mesh_token else None
    with bind(settings.host, settings.port) as public_socket:
        async with AsyncExitStack() as stack:
            backplane = None
            if settings.redis_url is not None:
                backplane = await Backplane.open(settings.redis_url, prefix=settings.redis_prefix)
                stack.push_async_callback(backplane.close)
            board = NoticeBoard(backplane)
            await board.start()
            stack.push_async_callback(board.close)
            embedder = await _open_embedder(settings, token, stack)
            ledger = await open_ledger(settings, port=board, embedder=embedder)
            stack.push_async_callback(ledger.close)
            await check_access(settings, ledger)
            app = build_app(settings, ledger, backplane, board)
            servers = [Server(server_config(app, settings), public_socket, on_shutdown=app.state.gateway.closing.set)]
            if is_on_sqlite(settings):
                host, port = internal_address(settings)
                internal_socket = stack.enter_context(bind(host, port))
                internal = build_ledger_app(ledger, settings.mesh_token)
                servers.append(Server(server_config(internal, settings), internal_socket))
                ledger.start_background()
            log.info("gateway.serving", host=settings.host, port=public_socket.getsockname()[1])
            await _run(servers)


def main() -> int:
    """Read the settings, serve, and return the exit code."""
    settings = read_settings(GatewaySettings)
    configure_logs(level=settings.log_level, is_json=settings.log_json, role="gateway")
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(settings))
    except MeshError as error:
        log.error("gateway.stopped", code=error.code.value, detail=error.detail, hint=error.hint)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
