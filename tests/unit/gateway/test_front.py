"""Targets, resume points, settings and slots: the small rules of the gateway."""

import pytest
from pydantic import ValidationError

from gateway.front import check_target
from gateway.settings import GatewaySettings
from gateway.sse import resume_point
from gateway.state import Slots
from mesh.contract.errors import ErrorCode, MeshError


@pytest.mark.parametrize(
    ("path", "query"),
    [(b"/threads/%00", b""), (b"/threads/%ff", b""), (b"/threads/%ed%a0%80", b""), (b"/", b"a=%00"), (b"/", b"a=%c3")],
)
def test_target_that_is_not_utf8_or_holds_nul_is_refused(path: bytes, query: bytes) -> None:
    """The server would replace such bytes silently, so that another thing was asked for than was meant."""
    with pytest.raises(MeshError) as caught:
        check_target({"raw_path": path, "query_string": query})
    assert caught.value.code is ErrorCode.INVALID_REQUEST


def test_target_in_utf8_passes() -> None:
    """Ids in any script are fine."""
    check_target({"raw_path": b"/threads/%E4%BD%A0", "query_string": b"query=%E4%BD%A0+a%20b"})


@pytest.mark.parametrize("header", ["-1", "1.5", "abc", "1e3", "٣", str(2**63), "9" * 40])
def test_last_event_id_that_is_no_number_is_refused(header: str) -> None:
    """Neither a bug nor a silent start from the beginning."""
    with pytest.raises(MeshError) as caught:
        resume_point(header, 0)
    assert caught.value.field == "header.Last-Event-ID"


def test_last_event_id_wins_over_after() -> None:
    """A browser that reconnects sends the header and repeats the address."""
    assert resume_point("7", 3) == (7, True)
    assert resume_point(None, 3) == (3, False)
    assert resume_point("", 3) == (3, False)


@pytest.mark.parametrize(
    ("host", "is_loopback"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("db", False)],
)
def test_loopback_is_known(host: str, is_loopback: bool) -> None:
    """Only addresses that no other machine reaches count."""
    assert GatewaySettings(host=host).is_loopback is is_loopback


def test_settings_are_bounded() -> None:
    """A limit of nothing is refused when it is read."""
    with pytest.raises(ValidationError):
        GatewaySettings(body_bytes_max=0)


def test_slots_are_counted_for_each_tenant_and_given_back() -> None:
    """One tenant's crowd does not touch another's, and nothing is remembered of who has left."""
    slots = Slots("requests", 1)
    with slots.take("a"):
        with slots.take("b"):
            pass
        with pytest.raises(MeshError) as caught, slots.take("a"):
            pass
        assert caught.value.code is ErrorCode.TOO_MANY_REQUESTS
    with slots.take("a"):
        pass
    assert not slots._open
