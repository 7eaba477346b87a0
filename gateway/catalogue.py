"""The capabilities as the gateway needs them: known or not, and whether a payload is valid for one.

Must never fetch a schema from anywhere: a `$ref` reaches only into its own schema.
"""

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError, best_match
from referencing import Registry
from referencing.exceptions import Unresolvable

from gateway.http_errors import field_path, unknown_name
from ledger.nodes import Nodes
from mesh.contract.errors import ErrorCode, MeshError
from mesh.contract.template import Template

# A template changes when a node registers; so long may a gateway go by the older one.
KEPT_S = 1.0
_KEPT_MAX = 1024
# Payloads with more values than this are validated off the event loop.
_INLINE_VALUES_MAX = 1000
_SHOWN_MAX = 300


@dataclass(frozen=True)
class _Entry:
    template: Template
    validator: Draft202012Validator
    read_at: float


def _has_many_values(payload: dict[str, Any]) -> bool:
    count = 0
    stack: list[Any] = [payload]
    while stack and count <= _INLINE_VALUES_MAX:
        item = stack.pop()
        if isinstance(item, dict | list):
            count += len(item)
            stack.extend(item.values() if isinstance(item, dict) else item)
    return count > _INLINE_VALUES_MAX


def _first_mistake(validator: Draft202012Validator, payload: dict[str, Any]) -> ValidationError | None:
    mistake = best_match(validator.iter_errors(payload))
    assert mistake is None or isinstance(mistake, ValidationError)
    return mistake


def _say(mistake: ValidationError) -> str:
    """Return what is wrong by the schema's word alone: jsonschema's messages show the value, which may be long."""
    if len(mistake.message) <= _SHOWN_MAX:
        return mistake.message
    return f"does not satisfy {mistake.validator!r}: {str(mistake.validator_value)[:_SHOWN_MAX]}"


class Catalogue:
    """Looks capabilities up at the ledger, and remembers them for a second."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._entries: dict[str, _Entry] = {}

    async def _entry(self, name: str) -> _Entry:
        entry = self._entries.get(name)
        now = time.monotonic()
        if entry is not None and now - entry.read_at < KEPT_S:
            return entry
        template = await self._nodes.capability(name)
        if template is None:
            self._entries.pop(name, None)
            known = [template.name for template, _ in await self._nodes.capabilities()]
            raise MeshError(
                ErrorCode.UNKNOWN_CAPABILITY,
                unknown_name("capability", name, known),
                field="type",
                hint="GET /capabilities lists what can run; a capability appears when a node that has it starts",
            )
        if entry is not None and entry.template == template:
            entry = _Entry(entry.template, entry.validator, now)
        else:
            entry = _Entry(template, Draft202012Validator(template.input_schema, registry=Registry()), now)
        if len(self._entries) >= _KEPT_MAX:
            self._entries.clear()
        self._entries[name] = entry
        return entry

    async def admit(self, name: str, payload: dict[str, Any]) -> Template:
        """Return the template of capability `name` once `payload` has proved valid for it.

        Raises: MeshError `unknown_capability`, `payload_invalid` with the path of the first mistake.
        """
        entry = await self._entry(name)
        try:
            if _has_many_values(payload):
                mistake = await asyncio.to_thread(_first_mistake, entry.validator, payload)
            else:
                mistake = _first_mistake(entry.validator, payload)
        except (Unresolvable, RecursionError) as error:
            raise MeshError(
                ErrorCode.PAYLOAD_INVALID,
                f"the input_schema of {name!r} cannot be applied: a reference in it leads nowhere or in circles",
                field="payload",
                hint="mend the capability's template: intentmesh capability check",
            ) from error
        if mistake is not None:
            raise MeshError(
                ErrorCode.PAYLOAD_INVALID,
                _say(mistake),
                field=field_path(["body", "payload", *mistake.absolute_path]),
                hint=f"the input_schema of {name!r} stands in GET /capabilities",
            )
        return entry.template
