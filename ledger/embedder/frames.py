"""The pipe between the ledger and its embedder: one JSON header with its length before it, then raw vectors.

Must never import the model's libraries: both ends read this file.
Frame: 4 bytes little endian with the header's length, the header (JSON), and `header["bytes"]` bytes of float32.
"""

import json
import struct
from typing import Any

_LENGTH = struct.Struct("<I")
LENGTH_BYTES = _LENGTH.size
HEADER_BYTES_MAX = 32 * 1024 * 1024
BODY_BYTES_MAX = 256 * 1024 * 1024


def pack_frame(header: dict[str, Any], body: bytes = b"") -> bytes:
    """Return a frame as it travels."""
    raw = json.dumps(header | {"bytes": len(body)}).encode("ascii")
    return _LENGTH.pack(len(raw)) + raw + body


def header_length(raw: bytes) -> int:
    """Return the length that the first bytes of a frame announce.

    Raises: ValueError when no frame is that long.
    """
    (length,) = _LENGTH.unpack(raw)
    if length > HEADER_BYTES_MAX:
        raise ValueError(f"a header of {length} bytes is no frame of the embedder")
    return int(length)


def parse_header(raw: bytes) -> dict[str, Any]:
    """Return a frame's header, with `bytes` verified.

    Raises: ValueError when it is none.
    """
    header = json.loads(raw)
    if not isinstance(header, dict) or not 0 <= header.get("bytes", -1) <= BODY_BYTES_MAX:
        raise ValueError("no header of the embedder")
    return header
