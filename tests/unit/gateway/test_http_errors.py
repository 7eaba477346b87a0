"""Every error leaves as RFC 9457 problem details, from one table."""

import json

import pytest

from gateway.http_errors import PROBLEM_TYPE, STATUS, field_path, problem, status_of, unknown_name
from mesh.contract.errors import ErrorCode, MeshError, not_found, unavailable


def test_table_knows_every_code() -> None:
    """No error code is without an HTTP status, and every status is an error's."""
    assert set(STATUS) == set(ErrorCode)
    assert all(400 <= status < 600 for status in STATUS.values())


@pytest.mark.parametrize("code", list(ErrorCode))
def test_problem_has_the_members_of_rfc_9457(code: ErrorCode) -> None:
    """type, title, status, code and detail are always there; hint and field where there is one."""
    response = problem(MeshError(code, "what happened", hint="what next", field="payload.text", extra={"state": "x"}))
    document = json.loads(response.body)
    assert response.media_type == PROBLEM_TYPE
    assert response.status_code == document["status"]
    assert document["type"] == f"urn:intentmesh:problem:{code.value}"
    assert document["title"]
    assert (document["code"], document["detail"]) == (code.value, "what happened")
    assert (document["hint"], document["field"], document["state"]) == ("what next", "payload.text", "x")


def test_extra_members_never_hide_the_standard_ones() -> None:
    """An error's own `status` cannot replace the document's."""
    response = problem(MeshError(ErrorCode.CONFLICT, "x", extra={"status": "succeeded", "code": "y", "state": "dead"}))
    document = json.loads(response.body)
    assert (document["status"], document["code"], document["state"]) == (409, "conflict", "dead")


def test_unreadable_json_is_400_and_an_unkeepable_value_422() -> None:
    """The field's path tells the two apart."""
    assert status_of(MeshError(ErrorCode.INVALID_JSON, "NaN is not JSON")) == 400
    assert status_of(MeshError(ErrorCode.INVALID_JSON, "holds a NUL", field="payload.text")) == 422


def test_unavailable_says_when_to_come_back() -> None:
    """503 and 429 carry Retry-After in whole seconds, at least one."""
    assert problem(unavailable("gone", retry_after_s=0.2)).headers["retry-after"] == "1"
    assert problem(unavailable("gone", retry_after_s=2.5)).headers["retry-after"] == "3"
    assert problem(MeshError(ErrorCode.TOO_MANY_REQUESTS, "x")).headers["retry-after"] == "1"


def test_unauthorized_names_the_scheme() -> None:
    """401 carries WWW-Authenticate."""
    assert problem(MeshError(ErrorCode.UNAUTHORIZED, "x")).headers["www-authenticate"].startswith("Bearer")


def test_detail_may_hold_any_text() -> None:
    """A lone surrogate in a name that a caller sent is no second error."""
    document = json.loads(problem(not_found("thread", "a\ud800b\x00")).body)
    assert "\ud800" not in document["detail"]


@pytest.mark.parametrize(
    ("location", "path"),
    [
        (("body", "payload", "items", 3, "name"), "payload.items[3].name"),
        (("body",), ""),
        (("query", "wait"), "query.wait"),
        (("header", "Idempotency-Key"), "header.Idempotency-Key"),
        (("path", "thread_id"), "path.thread_id"),
    ],
)
def test_field_path_reads_like_code(location: tuple[str | int, ...], path: str) -> None:
    """Members of the body are bare, everything else names its place."""
    assert field_path(location) == path


def test_unknown_name_offers_the_nearest() -> None:
    """A typing error is answered with what was meant."""
    assert "did you mean 'payload'" in unknown_name("field", "paylod", ["payload", "type"])
    assert "known here: payload, type" in unknown_name("field", "zzz", ["type", "payload"])
