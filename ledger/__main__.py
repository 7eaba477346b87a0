"""`python -m ledger serve` runs the ledger as a role of its own; `python -m ledger upgrade` brings its schema up to date.

Wiring only. Must never serve beyond loopback without a mesh token.
"""

import argparse
import asyncio
import contextlib
import ipaddress
import signal
import sys
from collections.abc import Iterator

import structlog
import uvicorn

from ledger.app import build_ledger_app
from ledger.embedder.client import EmbedderProcess
from ledger.ledger import open_ledger
from ledger.schema import upgrade_schema
from ledger.settings import LedgerSettings
from ledger.store import open_store
from mesh.backplane.backplane import Backplane
from mesh.contract.errors import MeshError
from mesh.contract.logs import configure_logs
from mesh.contract.ports import MeshPort, SilentPort
from mesh.contract.settings import read_settings

log = structlog.get_logger()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _Server(uvicorn.Server):
    """Leaves signals to the role: uvicorn would end the process by the same signal after a clean shutdown."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield

    def stop(self) -> None:
        """Finish open requests; asked twice, do not wait for them."""
        self.force_exit = self.should_exit
        self.should_exit = True


async def _serve(settings: LedgerSettings) -> int:
    if settings.mesh_token is None and not _is_loopback(settings.ledger_host):
        log.error("ledger.token_missing", hint="set INTENTMESH_MESH_TOKEN, or listen on 127.0.0.1 only")
        return 2
    backplane = None
    port: MeshPort = SilentPort()
    if settings.redis_url is not None:
        port = backplane = await Backplane.open(settings.redis_url, prefix=settings.redis_prefix)
    embedder = None if settings.embedding_model == "none" else EmbedderProcess(settings.embedding_model)
    try:
        ledger = await open_ledger(settings, port=port, embedder=embedder)
        try:
            if embedder is not None:
                await embedder.start()
            ledger.start_background()
            app = build_ledger_app(ledger, settings.mesh_token)
            config = uvicorn.Config(
                app,
                host=settings.ledger_host,
                port=settings.ledger_port,
                log_level="warning",
                access_log=False,
                timeout_graceful_shutdown=10,
            )
            server = _Server(config)
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, server.stop)
            log.info("ledger.serving", host=settings.ledger_host, port=settings.ledger_port)
            await server.serve()
        finally:
            await ledger.close()
    finally:
        if embedder is not None:
            await embedder.close()
        if backplane is not None:
            await backplane.close()
    return 0


async def _upgrade(settings: LedgerSettings) -> int:
    store = await open_store(settings)
    try:
        await upgrade_schema(store)
    finally:
        await store.close()
    log.info("ledger.schema_is_current")
    return 0


def main() -> int:
    """Run a command and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m ledger", description="The ledger of the intent mesh")
    parser.add_argument("command", choices=("serve", "upgrade"))
    command = parser.parse_args().command
    settings = read_settings(LedgerSettings)
    configure_logs(level=settings.log_level, is_json=settings.log_json, role="ledger")
    try:
        return asyncio.run(_serve(settings) if command == "serve" else _upgrade(settings))
    except MeshError as error:
        log.error("ledger.stopped", code=str(error.code), detail=error.detail, hint=error.hint)
        return 1


if __name__ == "__main__":
    sys.exit(main())
