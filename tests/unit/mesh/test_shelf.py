"""The shelf looks at folders that come and go."""

from pathlib import Path

from structlog.testing import capture_logs

from mesh.shelf import Shelf


async def test_a_folder_that_is_not_there_yet_is_no_mistake(tmp_path: Path) -> None:
    """`./capabilities` of the current folder need not exist."""
    shelf = Shelf([tmp_path / "absent"], standby=1, scratch_dir=tmp_path / "scratch")
    with capture_logs() as logs:
        assert await shelf.refresh() is False
    assert logs == []
    assert shelf.templates() == []
    await shelf.close()
