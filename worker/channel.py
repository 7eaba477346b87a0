"""The worker's end of its frame socket: send a frame, wait for the answers to one request.

May be used from several threads of a handler at once.
Must never import more than the standard library, and never print: stdout belongs to the handler.
"""

import json
import os
import threading
from collections import deque
from typing import Any

from worker.wire import FRAME_BYTES_MAX, encode_frame

_CHUNK_BYTES = 65536


class NodeGone(ConnectionError):
    """The node has closed the frame socket: nobody waits for this worker any more."""


class FrameTooBig(ValueError):
    """The frame would exceed FRAME_BYTES_MAX."""


class Channel:
    """One frame socket. `descriptor` is a connected, blocking stream socket."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._buffer = bytearray()
        self._write_lock = threading.Lock()
        self._changed = threading.Condition()
        self._is_read_by_someone = False
        self._inboxes: dict[str, deque[dict[str, Any]]] = {}

    def read_line(self) -> bytes | None:
        """Return the next line without its end, or None when the node has closed its end."""
        searched = 0
        while (end := self._buffer.find(b"\n", searched)) < 0:
            searched = len(self._buffer)
            try:
                chunk = os.read(self._descriptor, _CHUNK_BYTES)
            except ConnectionError:
                return None
            if not chunk:
                return None
            self._buffer += chunk
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line

    def send(self, frame: dict[str, Any]) -> None:
        """Send one frame.

        Raises: FrameTooBig; ValueError, TypeError or RecursionError when the frame is not JSON; NodeGone.
        """
        line = encode_frame(frame)
        if len(line) > FRAME_BYTES_MAX:
            raise FrameTooBig(f"a {frame['kind']} of {len(line)} bytes is more than the {FRAME_BYTES_MAX} of one frame")
        self.send_line(line)

    def send_line(self, line: bytes) -> None:
        """Send a frame that is encoded already. Raises: NodeGone."""
        view = memoryview(line)
        with self._write_lock:
            try:
                while view:
                    view = view[os.write(self._descriptor, view) :]
            except ConnectionError as error:
                raise NodeGone("the node has closed the frame socket") from error

    def open_inbox(self, ref: str) -> None:
        """Keep the answers for `ref` from now on; call before sending the request."""
        with self._changed:
            self._inboxes[ref] = deque()

    def close_inbox(self, ref: str) -> None:
        """Forget the answers for `ref`."""
        with self._changed:
            self._inboxes.pop(ref, None)

    def receive(self, ref: str) -> dict[str, Any]:
        """Wait for the next answer for `ref`. Raises: NodeGone."""
        while True:
            with self._changed:
                inbox = self._inboxes[ref]
                while not inbox and self._is_read_by_someone:
                    self._changed.wait()
                if inbox:
                    return inbox.popleft()
                self._is_read_by_someone = True
            # One thread reads for all; it wakes the others after each line.
            line = None
            try:
                line = self.read_line()
            finally:
                with self._changed:
                    self._is_read_by_someone = False
                    if line is not None:
                        self._deliver(line)
                    self._changed.notify_all()
            if line is None:
                raise NodeGone("the node has closed the frame socket")

    def _deliver(self, line: bytes) -> None:
        answer = json.loads(line)
        ref = answer.get("ref") or answer.get("request_id")
        if (inbox := self._inboxes.get(ref)) is not None:
            inbox.append(answer)
