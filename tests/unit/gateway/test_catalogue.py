"""Payloads are checked against the capability's schema before anything is stored."""

from typing import Any, cast

import pytest

from gateway.catalogue import Catalogue
from ledger.nodes import Nodes
from mesh.contract.errors import ErrorCode, MeshError
from mesh.contract.template import Template


class _Nodes:
    """A register with one capability."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self.template = Template(name="echo", input_schema=schema)
        self.looks = 0

    async def capability(self, name: str) -> Template | None:
        self.looks += 1
        return self.template if name == "echo" else None

    async def capabilities(self) -> list[tuple[Template, bool]]:
        return [(self.template, True)]


def _catalogue(schema: dict[str, Any]) -> Catalogue:
    return Catalogue(cast(Nodes, _Nodes(schema)))


async def _refusal(catalogue: Catalogue, payload: dict[str, Any], name: str = "echo") -> MeshError:
    with pytest.raises(MeshError) as caught:
        await catalogue.admit(name, payload)
    return caught.value


async def test_valid_payload_is_admitted() -> None:
    """The template comes back."""
    template = await _catalogue({"type": "object", "required": ["text"]}).admit("echo", {"text": "x"})
    assert template.name == "echo"


async def test_first_mistake_is_named_by_path() -> None:
    """The field's path reads as the caller wrote it, from `payload` on."""
    schema = {"properties": {"items": {"type": "array", "items": {"properties": {"n": {"type": "integer"}}}}}}
    error = await _refusal(_catalogue(schema), {"items": [{"n": 1}, {"n": "two"}]})
    assert (error.code, error.field) == (ErrorCode.PAYLOAD_INVALID, "payload.items[1].n")


async def test_unknown_capability_offers_the_nearest() -> None:
    """The refusal names the field and what was probably meant."""
    error = await _refusal(_catalogue({}), {}, name="ecko")
    assert (error.code, error.field) == (ErrorCode.UNKNOWN_CAPABILITY, "type")
    assert "'echo'" in error.detail


async def test_reference_to_elsewhere_is_never_followed() -> None:
    """A schema that points to another host is a clear refusal and no request."""
    error = await _refusal(_catalogue({"$ref": "http://127.0.0.1:1/schema.json"}), {})
    assert error.code is ErrorCode.PAYLOAD_INVALID
    assert "reference" in error.detail


async def test_reference_in_circles_is_a_clear_refusal() -> None:
    """A schema that refers to itself for ever neither hangs nor is a bug."""
    error = await _refusal(_catalogue({"$ref": "#"}), {})
    assert error.code is ErrorCode.PAYLOAD_INVALID


async def test_huge_value_is_not_echoed() -> None:
    """The refusal stays short, whatever was sent."""
    error = await _refusal(_catalogue({"properties": {"text": {"type": "integer"}}}), {"text": "x" * 100_000})
    assert len(error.detail) < 1000


async def test_large_payload_is_checked_too() -> None:
    """What is validated off the event loop is validated all the same."""
    schema = {"properties": {"items": {"items": {"type": "integer"}}}}
    error = await _refusal(_catalogue(schema), {"items": [*range(5000), "x"]})
    assert error.field == "payload.items[5000]"


async def test_capability_is_looked_up_once_a_second() -> None:
    """A burst of submissions does not read the same template again and again."""
    nodes = _Nodes({})
    catalogue = Catalogue(cast(Nodes, nodes))
    for _ in range(20):
        await catalogue.admit("echo", {})
    assert nodes.looks == 1
