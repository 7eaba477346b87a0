"""Cursors of paged lists: the place after the last row, wrapped so that nobody counts on what is inside.

Must never be trusted: whoever pages may send anything.
"""

import base64
import binascii
import json

from mesh.contract.canonical_json import clean_text
from mesh.contract.errors import ErrorCode, MeshError

CURSOR_CHARS_MAX = 1000
LIMIT_MAX = 200


def wrap(*place: int | str) -> str:
    """Return the cursor of a place."""
    return base64.urlsafe_b64encode(json.dumps(place).encode()).decode().rstrip("=")


def unwrap(cursor: str, *shape: type[int] | type[str]) -> list[int | str]:
    """Return the place of a cursor that has this shape.

    Raises: MeshError `invalid_request`.
    """
    try:
        if len(cursor) > CURSOR_CHARS_MAX:
            raise ValueError("too long")
        place = json.loads(base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True))
    except (ValueError, binascii.Error, RecursionError):
        place = None
    fits = isinstance(place, list) and len(place) == len(shape)
    if (
        not fits
        or not all(type(item) is kind for item, kind in zip(place, shape, strict=True))
        or not _is_storable(place)
    ):
        raise MeshError(
            ErrorCode.INVALID_REQUEST, "this is no cursor", field="cursor", hint="use the `next` of the page before"
        )
    result: list[int | str] = place
    return result


def _is_storable(place: list[int | str]) -> bool:
    return all(-(2**63) <= item < 2**63 if isinstance(item, int) else clean_text(item) == item for item in place)


def bounded(limit: int) -> int:
    """Return a page's size within what one page may hold."""
    return max(1, min(limit, LIMIT_MAX))
