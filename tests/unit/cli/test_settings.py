"""The command line's settings say the same as the roles' and find the right capabilities."""

from pathlib import Path

import pytest

from cli.settings import CliSettings, shipped_capabilities
from gateway.settings import GatewaySettings
from mesh.settings import NodeSettings


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No setting, and a folder without capabilities."""
    monkeypatch.delenv("INTENTMESH_CAPABILITIES_DIR", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("role", [GatewaySettings, NodeSettings])
def test_a_setting_means_the_same_everywhere(role: type[GatewaySettings] | type[NodeSettings]) -> None:
    """One name, one description, whoever reads it."""
    mine = CliSettings.model_fields
    for name, field in role.model_fields.items():
        if name in mine:
            assert mine[name].description == field.description, name


def test_shipped_capabilities_come_first_and_the_callers_own_win(tmp_path: Path) -> None:
    """./capabilities is searched even before it exists."""
    assert CliSettings().capability_roots() == [shipped_capabilities(), tmp_path / "capabilities"]


def test_in_the_source_tree_the_folder_is_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """There ./capabilities is the shipped one."""
    monkeypatch.chdir(shipped_capabilities().parent)
    assert CliSettings().capability_roots() == [shipped_capabilities()]


def test_a_list_of_folders_replaces_both(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Relative ones are the caller's; a role may run elsewhere, so they become absolute."""
    monkeypatch.setenv("INTENTMESH_CAPABILITIES_DIR", "/a:b::~/c")
    assert CliSettings().capability_roots() == [Path("/a"), tmp_path / "b", Path.home() / "c"]
