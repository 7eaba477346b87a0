"""The command line's settings say the same as the roles' and find the right capabilities."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from cli.connection import operator_connect
from cli.settings import CliSettings, shipped_capabilities
from gateway.settings import GatewaySettings
from mesh.contract.settings import bad_settings
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


def test_operators_calls_find_the_token_or_fall_back_to_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Set, else of the mesh in the data folder, else the caller's own key."""
    shown: list[str | None] = []
    monkeypatch.setattr("cli.connection.open_client", lambda _url, key: shown.append(key))
    monkeypatch.setenv("INTENTMESH_API_KEY", "the key")
    operator_connect()
    (tmp_path / ".intentmesh").mkdir()
    (tmp_path / ".intentmesh" / "mesh_token").write_text("of the folder\n")
    operator_connect()
    monkeypatch.setenv("INTENTMESH_MESH_TOKEN", "as set")
    operator_connect()
    assert shown == ["the key", "of the folder", "as set"]


def test_an_address_without_a_scheme_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node would else ask for ever and never say why."""
    monkeypatch.setenv("INTENTMESH_LEDGER_URL", "127.0.0.1:8081")
    with pytest.raises(ValidationError) as refused:
        NodeSettings()
    assert bad_settings(refused.value) == [("INTENTMESH_LEDGER_URL", "write an address such as http://host:port")]
