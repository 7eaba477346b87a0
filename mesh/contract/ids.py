"""Identifiers: how they are made and which ones a caller may choose.

Must never carry meaning that a reader relies on: to everyone else an id is an opaque string.
"""

import os
import re
import time
import uuid
from typing import Annotated

from pydantic import AfterValidator, Field

ID_LENGTH_MAX = 128
# Anything printable that survives a URL path segment and a log line unharmed.
_FORBIDDEN = re.compile(r"[\s\x00-\x1f\x7f-\x9f/\\?#%]")


def new_id() -> str:
    """Return a time-ordered UUID (version 7), so that rows made together lie together.

    Source: RFC 9562, section 5.7.
    """
    unix_ms = time.time_ns() // 1_000_000
    value = (unix_ms << 80) | int.from_bytes(os.urandom(10), "big")
    value = value & ~(0xF << 76) | (0x7 << 76)
    value = value & ~(0x3 << 62) | (0x2 << 62)
    return str(uuid.UUID(int=value))


def check_thread_id(value: str) -> str:
    """Return `value` when it can name a thread.

    Raises: ValueError for white space, control characters, or one of / \\ ? # %.
    """
    if _FORBIDDEN.search(value) or value in {".", ".."}:
        raise ValueError("may not hold white space, control characters, or any of / \\ ? # %")
    return value


ThreadId = Annotated[str, Field(min_length=1, max_length=ID_LENGTH_MAX), AfterValidator(check_thread_id)]
CapabilityName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]*$", max_length=64)]
