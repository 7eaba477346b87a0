"""The one door for JSON from outside: requests, worker output and templates.

Accepts what every JSON reader reads the same way, and refuses the rest with the path of the offence:
no NaN or Infinity, no NUL, no lone surrogates, depth at most 64, unique keys, integers within 64 bits.
Must never recurse over input, and never change a value that it accepts (`sanitise` is for worker output).
"""

import json
import math
import re
from typing import Any, cast

from mesh.contract.errors import ErrorCode, MeshError

Json = dict[str, "Json"] | list["Json"] | str | int | float | bool | None

DEPTH_MAX = 64
INTEGER_MIN, INTEGER_MAX = -(2**63), 2**63 - 1
_SURROGATE_OR_NUL = re.compile("[\x00\ud800-\udfff]")
# A string as a whole, or one bracket: so that brackets inside strings are not counted.
_STRUCTURE = re.compile(rb'"(?:[^"\\]|\\.)*+"|[\[\]{}]', re.DOTALL)
_KEY_SHOWN_MAX = 40


def _bad(detail: str, path: str = "") -> MeshError:
    return MeshError(
        ErrorCode.INVALID_JSON,
        detail,
        field=path or None,
        hint="send JSON as RFC 8259 defines it, without NaN, NUL, lone surrogates or repeated keys",
    )


def _check_depth(raw: bytes, depth_max: int) -> None:
    depth = 0
    for match in _STRUCTURE.finditer(raw):
        mark = raw[match.start()]
        if mark in b"[{":
            depth += 1
            if depth > depth_max:
                raise _bad(f"nested deeper than {depth_max} levels (at byte {match.start()})")
        elif mark in b"]}":
            depth -= 1


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _bad(f"the key {key[:_KEY_SHOWN_MAX]!r} stands twice in one object", key[:_KEY_SHOWN_MAX])
            seen.add(key)
    return members


def _refuse_constant(name: str) -> float:
    raise _bad(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _bad(f"the number {text[:_KEY_SHOWN_MAX]} is out of range")
    return value


def _integer(text: str) -> int:
    if len(text) > 20 or not INTEGER_MIN <= (value := int(text)) <= INTEGER_MAX:
        raise _bad(f"the integer {text[:_KEY_SHOWN_MAX]} does not fit into 64 bits (send it as a string)")
    return value


def _parse(text: str) -> Json:
    """Parse text whose depth was checked."""
    try:
        value = json.loads(
            text,
            object_pairs_hook=_unique,
            parse_constant=_refuse_constant,
            parse_float=_finite,
            parse_int=_integer,
        )
    except json.JSONDecodeError as error:
        raise _bad(f"not JSON: {error.msg} (line {error.lineno}, column {error.colno})") from error
    except RecursionError as error:  # unreachable behind the depth check; kept so that a bug there is no 500
        raise _bad("nested too deeply") from error
    return cast(Json, value)


def loads(raw: bytes, *, bytes_max: int, depth_max: int = DEPTH_MAX) -> Json:
    """Parse `raw` strictly.

    Raises: MeshError `too_large` or `invalid_json`, the latter with the offending path in `field`.
    """
    if len(raw) > bytes_max:
        raise MeshError(
            ErrorCode.TOO_LARGE,
            f"{len(raw)} bytes are more than the {bytes_max} allowed",
            hint="send less at a time",
        )
    _check_depth(raw, depth_max)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _bad(f"not UTF-8 (at byte {error.start})") from error
    value = _parse(text)
    # Only an escape can bring either in: a raw one is refused by the UTF-8 decoder or by json.loads.
    if "\\u" in text:
        check(value, depth_max=depth_max)
    return value


def check(value: Any, *, depth_max: int = DEPTH_MAX) -> None:
    """Verify that a Python value is canonical JSON.

    Raises: MeshError `invalid_json` with the path of the first offence in `field`.
    """
    stack: list[tuple[Any, str, int]] = [(value, "", 1)]
    while stack:
        item, path, depth = stack.pop()
        match item:
            case None | bool():
                pass
            case str():
                if _SURROGATE_OR_NUL.search(item):
                    raise _bad("the text holds a NUL or a lone surrogate", path)
            case int():
                if not INTEGER_MIN <= item <= INTEGER_MAX:
                    raise _bad("the integer does not fit into 64 bits", path)
            case float():
                if not math.isfinite(item):
                    raise _bad("NaN and Infinity are not JSON", path)
            case dict():
                if depth > depth_max:
                    raise _bad(f"nested deeper than {depth_max} levels", path)
                for key, child in item.items():
                    if not isinstance(key, str):
                        raise _bad(f"the key {key!r} is not a string", path)
                    if _SURROGATE_OR_NUL.search(key):
                        raise _bad("a key holds a NUL or a lone surrogate", path)
                    stack.append((child, f"{path}.{key}" if path else key, depth + 1))
            case list() | tuple():
                if depth > depth_max:
                    raise _bad(f"nested deeper than {depth_max} levels", path)
                stack.extend((child, f"{path}[{index}]", depth + 1) for index, child in enumerate(item))
            case _:
                raise _bad(f"a {type(item).__name__} is not JSON", path)


def clean_text(text: str) -> str:
    """Return `text` with NUL and lone surrogates replaced by U+FFFD."""
    return _SURROGATE_OR_NUL.sub("\ufffd", text)


def sanitise(value: Json) -> Json:
    """Return worker output that can be stored: NUL and lone surrogates become U+FFFD, all else is kept.

    The caller has bounded the depth: the value came from a frame that was read with a depth limit.
    """
    match value:
        case str():
            return clean_text(value)
        case dict():
            return {clean_text(key): sanitise(child) for key, child in value.items()}
        case list():
            return [sanitise(child) for child in value]
        case _:
            return value


def loads_frame(raw: bytes, *, bytes_max: int) -> Json:
    """Parse worker output: as strict as `loads`, except that bad text is mended rather than refused."""
    if len(raw) > bytes_max:
        raise MeshError(ErrorCode.TOO_LARGE, f"a frame of {len(raw)} bytes is more than the {bytes_max} allowed")
    text = raw.decode("utf-8", errors="replace")
    _check_depth(text.encode(), DEPTH_MAX)
    return sanitise(_parse(text))


def dumps(value: Any) -> str:
    """Return the one canonical text of `value`: sorted keys, no white space, no ASCII escapes.

    Raises: MeshError `invalid_json` when the value is not canonical.
    """
    check(value)
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
