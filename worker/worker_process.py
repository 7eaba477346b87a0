"""The node's handle of one worker: its frames, its output, its end.

Must never wait for the end of a pipe (a grandchild can hold it), or signal a process id that may have been
given to another process: a pidfd names the worker.
"""

import asyncio
import contextlib
import os
import select
import signal
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from mesh.contract.messages import AttemptLog
from worker.assignment import Assignment
from worker.exit_codes import REASON_KILLED
from worker.frames import FRAME_BYTES_MAX, Frame, FrameInvalid, FrameTooLarge, parse_frame
from worker.log_tail import LogTail
from worker.wire import encode_frame

LOG_BYTES_MAX = 64 * 1024
KILL_PATIENCE_S = 5.0
_CHUNK_BYTES = 256 * 1024
_LAST_READS_MAX = 64


@dataclass(frozen=True)
class ExitStatus:
    """How a worker ended; exactly one of `exit_code` and `signal` is set.

    `reason` is set when the mesh itself ended it: `killed` (Worker.kill, Worker.terminate, Zygote.close),
    `processes` (more than limits.processes), `zygote_died`. `worker.exit_codes.cause_of_exit` reads all of it.
    Units: `cpu_ms` is user and system time of the worker and of the children that it waited for.
    """

    exit_code: int | None
    signal: int | None
    cpu_ms: int
    memory_peak_kb: int
    reason: str | None = None


class OutputPipe:
    """Drains one pipe into a LogTail for as long as it is open."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self._loop = asyncio.get_running_loop()
        self._descriptor: int | None = descriptor
        self.tail = LogTail(LOG_BYTES_MAX)
        self._loop.add_reader(descriptor, self._read)

    def _read(self) -> bool:
        """Read once; False when nothing is there now."""
        if self._descriptor is None:
            return False
        try:
            data = os.read(self._descriptor, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._close()
            return False
        self.tail.append(data)
        return True

    def finish(self) -> None:
        """Take what is in the pipe now, and close it."""
        for _ in range(_LAST_READS_MAX):
            if not self._read():
                break
        self._close()

    def _close(self) -> None:
        if self._descriptor is not None:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None


class Worker:
    """One operating-system process for one intent. Made by `Zygote.take`."""

    def __init__(
        self,
        pid: int,
        descriptors: list[int],
        *,
        terminate: Callable[[int], None],
        abandon: Callable[[], None],
    ) -> None:
        """Take over `descriptors`: frame socket, stdout, stderr, pidfd."""
        frames, stdout, stderr, pidfd = descriptors
        self.pid = pid
        self._socket = socket.socket(fileno=frames)
        self._socket.setblocking(False)
        self._stdout = OutputPipe(stdout)
        self._stderr = OutputPipe(stderr)
        self._pidfd: int | None = pidfd
        self._terminate = terminate
        self._abandon = abandon
        self._loop = asyncio.get_running_loop()
        self._exit: asyncio.Future[ExitStatus] = self._loop.create_future()
        self._reason: str | None = None
        self._received = bytearray()
        self._is_at_end = False
        self._wakes: set[asyncio.Future[None]] = set()
        self._send_lock = asyncio.Lock()

    def __repr__(self) -> str:
        state = f"ended: {self._exit.result()}" if self._exit.done() else "alive"
        return f"Worker({self.pid}, {state})"

    @property
    def has_ended(self) -> bool:
        """Whether `wait` returns at once."""
        return self._exit.done()

    @property
    def is_alive(self) -> bool:
        """Whether the process runs, as the kernel says: it may have ended before the zygote's word is here."""
        if self._pidfd is None:
            return False
        # A pidfd is readable once its process has ended, reaped or not.
        ended = select.poll()
        ended.register(self._pidfd, select.POLLIN)
        return not ended.poll(0)

    async def activate(self, assignment: Assignment) -> None:
        """Hand over the intent; the worker begins at once. Call exactly once.

        A worker that died meanwhile raises nothing here: `frames` ends and `wait` tells how it ended.

        Raises: MeshError when the claim holds text that no JSON can carry.
        """
        await self._write(assignment.line())

    async def send(self, frame: dict[str, Any]) -> None:
        """Send one frame (worker.frames: ack, llm_delta, llm_result, llm_error); silent when the worker has ended.

        Waits while the worker does not read: bound it with a time-out, or call it from a task of its own.
        """
        await self._write(encode_frame(frame))

    async def _write(self, line: bytes) -> None:
        view = memoryview(line)
        async with self._send_lock:
            while view and not self._is_at_end:
                try:
                    view = view[self._socket.send(view) :]
                except BlockingIOError:
                    await self._until(self._loop.add_writer, self._loop.remove_writer)
                except OSError:  # it has ended; `frames` and `wait` tell how
                    return

    async def frames(self) -> AsyncIterator[Frame]:
        """Yield what the worker says until it ends. A last line that was cut off by its death is dropped.

        Raises: FrameInvalid, FrameTooLarge (both carry `cause` and `detail`); then kill the worker.
        """
        searched = 0
        while True:
            end = self._received.find(b"\n", searched)
            if end < 0:
                if len(self._received) > FRAME_BYTES_MAX:
                    raise FrameTooLarge
                searched = len(self._received)
                if await self._receive():
                    continue
                break
            line = bytes(self._received[:end])
            del self._received[: end + 1]
            searched = 0
            # A worker that writes without end is always readable: the node's other tasks have their turn all the same.
            await asyncio.sleep(0)
            if line.strip():
                yield parse_frame(line)
        rest = bytes(self._received)
        self._received.clear()
        if rest.strip():
            # A program may leave out the last line's end; half a frame never parses, and its exit tells more.
            with contextlib.suppress(FrameInvalid):
                yield parse_frame(rest)

    async def _receive(self) -> bool:
        """Wait until the buffer has grown; False at the end."""
        length_before = len(self._received)
        while not self._is_at_end:
            try:
                data = self._socket.recv(_CHUNK_BYTES)
            except BlockingIOError:
                await self._until(self._loop.add_reader, self._loop.remove_reader)
                continue
            except OSError:
                data = b""
            if not data:
                self._close_socket()
                break
            self._received += data
            break
        # `settle` may have taken the last frames in while this waited.
        return len(self._received) > length_before

    async def _until(self, add: Callable[..., object], remove: Callable[[int], object]) -> None:
        """Wait until the socket can be read or written, as `add` says, or is closed."""
        descriptor = self._socket.fileno()
        wake = self._loop.create_future()
        self._wakes.add(wake)
        add(descriptor, _resolve, wake)
        try:
            await wake
        finally:
            self._wakes.discard(wake)
            if not self._is_at_end:  # else the number may be another file's by now
                remove(descriptor)

    def _close_socket(self) -> None:
        if not self._is_at_end:
            self._is_at_end = True
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_writer(self._socket.fileno())
            self._socket.close()
            for wake in self._wakes:
                _resolve(wake)

    async def kill(self) -> ExitStatus:
        """SIGKILL the worker and every process that descends from it; return when none is left."""
        self.begin_kill()
        try:
            async with asyncio.timeout(KILL_PATIENCE_S):
                return await self.wait()
        except TimeoutError:
            self._abandon()  # the zygote is stuck: it and all below it must go
            return await self.wait()

    def begin_kill(self) -> None:
        """SIGKILL the worker without waiting; its zygote ends what it leaves behind."""
        if self._exit.done() or self._pidfd is None:
            return
        self._reason = self._reason or REASON_KILLED
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def terminate(self, grace_s: float) -> ExitStatus:
        """SIGTERM the worker's process group, and `kill` what is left after `grace_s`."""
        if not self._exit.done():
            self._reason = self._reason or REASON_KILLED
            self._terminate(self.pid)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    return await self.wait()
        return await self.kill()

    async def wait(self) -> ExitStatus:
        """Return how the worker ended, once its whole process tree is gone."""
        return await asyncio.shield(self._exit)

    def log(self) -> AttemptLog:
        """Return the newest part of stdout and stderr so far; complete after `wait`."""
        out, err = self._stdout.tail, self._stderr.tail
        return AttemptLog(stdout=out.text(), stderr=err.text(), is_truncated=out.is_truncated or err.is_truncated)

    def settle(self, status: ExitStatus) -> None:
        """The zygote's word that the worker has ended: take what it left in its pipes and close them."""
        if self._exit.done():
            return
        while not self._is_at_end:
            try:
                data = self._socket.recv(_CHUNK_BYTES)
            except OSError:
                data = b""
            if data:
                self._received += data
            else:
                self._close_socket()
        self._stdout.finish()
        self._stderr.finish()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
        if self._reason is not None and status.reason is None:
            status = ExitStatus(
                status.exit_code, status.signal, status.cpu_ms, status.memory_peak_kb, reason=self._reason
            )
        self._exit.set_result(status)


def _resolve(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)
