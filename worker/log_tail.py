"""The newest part of a byte stream, kept within a bound, as text that can be stored. Pure.

Must never grow beyond twice its bound, whatever a worker prints.
"""

from mesh.contract.canonical_json import clean_text


class LogTail:
    """Append bytes; read the end as text. Units: bytes."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = bytearray()
        self._is_cut = False

    def append(self, data: bytes) -> None:
        """Add what was printed."""
        self._bytes += data
        if len(self._bytes) > 2 * self._bytes_max:
            del self._bytes[: -self._bytes_max]
            self._is_cut = True

    @property
    def is_truncated(self) -> bool:
        """Whether something older is missing from `text`."""
        return self._is_cut or len(self._bytes) > self._bytes_max

    def text(self) -> str:
        """Return the newest bytes as text; bad UTF-8, NUL and surrogates become U+FFFD."""
        newest = bytes(self._bytes[-self._bytes_max :])
        if self.is_truncated:
            start = 0  # a cut inside a character leaves up to three bytes of its rest
            while start < min(3, len(newest)) and newest[start] & 0xC0 == 0x80:
                start += 1
            newest = newest[start:]
        return clean_text(newest.decode("utf-8", "replace"))
