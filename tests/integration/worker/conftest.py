"""The lab in which each test runs real workers."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.worker_lab import Lab


@pytest.fixture
async def lab(tmp_path: Path) -> AsyncIterator[Lab]:
    """A place for zygotes; nothing of them is left after the test."""
    place = Lab(tmp_path)
    yield place
    await place.close()
