"""The node's end of a zygote's control socket: datagrams out in order, datagrams with descriptors in.

Must never block the event loop, and never lose a descriptor that came in.
"""

import asyncio
import json
import os
import socket
from collections import deque
from collections.abc import Callable
from typing import Any

_DATAGRAM_BYTES_MAX = 128 * 1024
_DESCRIPTORS_MAX = 8

OnMessage = Callable[[dict[str, Any], list[int]], None]


class ControlSocket:
    """Owns `connection`. `on_message` takes over the descriptors; `on_end` is called once, at the other side's end."""

    def __init__(self, connection: socket.socket, *, on_message: OnMessage, on_end: Callable[[], None]) -> None:
        connection.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._connection = connection
        self._on_message = on_message
        self._on_end = on_end
        self._outgoing: deque[bytes] = deque()
        self._is_open = True
        self._loop.add_reader(connection.fileno(), self._read)

    def send(self, message: dict[str, Any]) -> None:
        """Send a message, now or as soon as the zygote has room; nothing happens after the end."""
        if self._is_open:
            self._outgoing.append(json.dumps(message).encode())
            self._flush()

    def close(self) -> None:
        """Close this side: the zygote then ends its workers and itself. `on_end` is not called."""
        if not self._is_open:
            return
        self._is_open = False
        self._loop.remove_reader(self._connection.fileno())
        self._loop.remove_writer(self._connection.fileno())
        self._connection.close()

    def _flush(self) -> None:
        try:
            while self._outgoing:
                self._connection.send(self._outgoing[0])
                self._outgoing.popleft()
        except BlockingIOError:
            self._loop.add_writer(self._connection.fileno(), self._flush)
            return
        except OSError:
            self._outgoing.clear()  # the reader sees the end
        self._loop.remove_writer(self._connection.fileno())

    def _read(self) -> None:
        while self._is_open:
            try:
                datagram, descriptors, _, _ = socket.recv_fds(
                    self._connection, _DATAGRAM_BYTES_MAX, _DESCRIPTORS_MAX, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return
            except OSError:
                datagram, descriptors = b"", []
            if not datagram:
                close_all(descriptors)
                self.close()
                self._on_end()
                return
            self._on_message(json.loads(datagram), descriptors)


def close_all(descriptors: list[int]) -> None:
    """Close descriptors."""
    for descriptor in descriptors:
        os.close(descriptor)
