"""A ledger over SQLite with short leases, served on a socket, and nodes beside it in this process."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.databases import SqliteTemplate
from support.node_lab import NodeLab

from ledger.ledger import open_ledger
from ledger.settings import LedgerSettings
from mesh.contract.ports import SilentPort


@pytest.fixture
async def lab(
    sqlite_template: SqliteTemplate, tmp_path: Path, request: pytest.FixtureRequest
) -> AsyncIterator[NodeLab]:
    """The ledger serves; no node runs yet. An indirect parameter changes its settings."""
    quick = {"retry_backoff_s": 0.1, "sweep_interval_s": 0.05, "announce_again_s": 0.5}
    # Only tests of leases have short ones: elsewhere a busy machine must not use them up.
    quick["lease_ttl_s"] = getattr(request.module, "LEASE_TTL_S", 6.0)
    settings = LedgerSettings(
        database_url=sqlite_template.copy_to(tmp_path).url,
        data_dir=tmp_path,
        **(quick | getattr(request, "param", {})),
    )
    ledger = await open_ledger(settings, port=SilentPort(), embedder=None)
    lab = NodeLab(tmp_path, ledger)
    try:
        await lab.start_ledger()
        ledger.start_background()
        yield lab
    finally:
        await lab.close()
        await ledger.close()
