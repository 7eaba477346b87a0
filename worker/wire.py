"""The numbers and names that node, zygote, child and handler share, and how a frame becomes bytes.

Must never import anything but the standard library's smallest modules: every worker carries what stands here.
"""

import json
from typing import Any

FRAME_BYTES_MAX = 1024 * 1024
# One environment value may have 131,072 bytes, with its name, the "=" and the final NUL (Linux: MAX_ARG_STRLEN).
ENVIRONMENT_VALUE_BYTES_MAX = 131_072
# Single digits on purpose: dash, Debian's sh, can redirect to no other descriptor.
MESH_FD = 3
THREAD_CONTEXT_FD = 4
INTENT_PAYLOAD_FD = 5


def encode_frame(frame: dict[str, Any]) -> bytes:
    """Return `frame` as one line. Lone surrogates are kept as escapes; the reader mends them.

    Raises: ValueError, TypeError or RecursionError when the frame is not JSON.
    """
    text = json.dumps(frame, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    try:
        return text.encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(frame, allow_nan=False, separators=(",", ":")).encode() + b"\n"
