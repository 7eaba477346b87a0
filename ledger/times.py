"""Milliseconds of the database and times of the contract, both ways.

Must never read a clock.
"""

from datetime import UTC, datetime, timedelta
from typing import overload

from mesh.contract.errors import ErrorCode, MeshError

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MS = timedelta(milliseconds=1)
_LAST_MS = (datetime(9999, 12, 31, tzinfo=UTC) - _EPOCH) // _MS


def to_ms(moment: datetime, *, field: str) -> int:
    """Return an aware time in milliseconds since the epoch.

    Raises: MeshError `invalid_request` beyond the years that can be shown again.
    """
    value = (moment - _EPOCH) // _MS
    if not 0 <= value <= _LAST_MS:
        raise MeshError(ErrorCode.INVALID_REQUEST, "the time lies outside the years 1970 to 9999", field=field)
    return value


@overload
def to_time(value: int) -> datetime: ...
@overload
def to_time(value: None) -> None: ...
def to_time(value: int | None) -> datetime | None:
    """Return milliseconds since the epoch as an aware time."""
    return None if value is None else _EPOCH + value * _MS


def to_text(value: int) -> str:
    """Return milliseconds since the epoch as RFC 3339."""
    return to_time(value).isoformat(timespec="milliseconds").replace("+00:00", "Z")
