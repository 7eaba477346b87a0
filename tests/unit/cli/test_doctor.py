"""`doctor` looks at everything, changes nothing, and says how to mend what is not good."""

import fcntl
import json
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from cli import doctor
from cli.client import MeshClient
from cli.main import app
from cli.scaffold import scaffold
from cli.settings import CliSettings

run = CliRunner().invoke


@pytest.fixture(autouse=True)
def own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty folder and a port on which nobody listens."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("INTENTMESH_URL", "http://127.0.0.1:1")
    for name in ("REDIS_URL", "LLM_BASE_URL", "DATA_DIR", "CAPABILITIES_DIR"):
        monkeypatch.delenv(f"INTENTMESH_{name}", raising=False)


def answer_with(monkeypatch: pytest.MonkeyPatch, status: int, body: object) -> None:
    """Let whatever is asked give this answer."""
    transport = httpx.MockTransport(lambda _: httpx.Response(status, json=body))

    def open_client(url: str, key: str | None) -> MeshClient:
        return MeshClient(url, key, tries=1, transport=transport)

    monkeypatch.setattr(doctor, "open_client", open_client)


def test_every_finding_that_is_not_good_says_how_to_mend_it(tmp_path: Path) -> None:
    """And looking leaves nothing behind."""
    done = run(app, ["doctor", "--json"])
    findings = {finding["name"]: finding for finding in json.loads(done.stdout)}
    assert {"python", "packages", "torch", "embeddings", "redis", "data folder", "disk", "capabilities"} <= set(
        findings
    )
    assert {"model", "mesh", "port"} <= set(findings)
    assert all(finding["mend"] for finding in findings.values() if finding["verdict"] != "good")
    assert list(tmp_path.iterdir()) == []


def test_a_setting_that_cannot_be_read_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its variable, with exit code 1."""
    monkeypatch.setenv("INTENTMESH_PORT", "many")
    done = run(app, ["doctor"])
    assert done.exit_code == 1
    assert "INTENTMESH_PORT" in done.stdout
    assert "mend: change or unset INTENTMESH_PORT" in done.stdout


def test_a_data_folder_in_use_is_recognised(tmp_path: Path) -> None:
    """By the lock that a running mesh holds."""
    settings = CliSettings(data_dir=tmp_path)
    with (tmp_path / "up.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "in use" in doctor.check_data_dir(settings).detail
    assert "in use" not in doctor.check_data_dir(settings).detail


def test_a_broken_capability_is_bad_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The good ones beside it do not hide it."""
    monkeypatch.setenv("INTENTMESH_CAPABILITIES_DIR", str(tmp_path))
    scaffold(tmp_path / "good", "good", "python")
    assert doctor.check_capabilities(CliSettings()).verdict == "good"
    scaffold(tmp_path / "wrong", "other-name", "python")
    finding = doctor.check_capabilities(CliSettings())
    assert finding.verdict == "bad"
    assert finding.detail.startswith("wrong: ")


@pytest.mark.parametrize(
    ("status", "body", "wanted", "verdict"),
    [
        (200, {"data": [{"id": "small"}]}, None, "good"),
        (200, {"data": [{"id": "small"}]}, "small", "good"),
        (200, {"data": [{"id": "small"}]}, "large", "bad"),
        (200, {"object": "list"}, None, "note"),
        (401, {"error": "no"}, None, "bad"),
    ],
)
def test_the_model_server_is_asked(
    monkeypatch: pytest.MonkeyPatch, status: int, body: object, wanted: str | None, verdict: str
) -> None:
    """Whether it answers, and whether it has the model."""
    answer_with(monkeypatch, status, body)
    settings = CliSettings(llm_base_url="http://model.test/v1", llm_model=wanted)
    assert doctor.check_model(settings).verdict == verdict


def test_a_mesh_whose_database_is_away_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the gateway's own words."""
    answer_with(monkeypatch, 503, {"code": "unavailable", "detail": "no answer from: ledger", "hint": None})
    (finding,) = doctor.check_mesh(CliSettings())
    assert finding.verdict == "bad"
    assert "no answer from: ledger" in finding.detail
