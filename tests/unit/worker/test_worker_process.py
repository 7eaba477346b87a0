"""The node's handle of a worker at the moments that a real process reaches only by chance."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator

import pytest

from worker.frames import Delta
from worker.worker_process import ExitStatus, Worker

ENDED = ExitStatus(exit_code=0, signal=None, cpu_ms=1, memory_peak_kb=1)


class Pretended:
    """A worker whose process is played by the test: `speak` is its end of the frame socket."""

    def __init__(self) -> None:
        node_end, self.speak = socket.socketpair()
        outputs, self.inputs = zip(*(os.pipe() for _ in range(2)), strict=True)
        descriptors = [node_end.detach(), *outputs, os.pidfd_open(os.getpid())]
        self.worker = Worker(os.getpid(), descriptors, terminate=lambda _: None, abandon=lambda: None)


@pytest.fixture
async def pretended() -> AsyncIterator[Pretended]:
    """A pretended worker, closed after the test."""
    one = Pretended()
    yield one
    one.worker.settle(ENDED)
    one.speak.close()
    for descriptor in one.inputs:
        os.close(descriptor)


async def test_frames_that_come_with_the_end_are_not_lost(pretended: Pretended) -> None:
    """The zygote's word may overtake the frames: all of them are still told, the cut one aside."""

    async def listen() -> list[object]:
        return [frame async for frame in pretended.worker.frames()]

    listening = asyncio.create_task(listen())
    await asyncio.sleep(0)
    pretended.speak.sendall(b'{"kind":"delta","text":"1"}\n{"kind":"delta","text":"2"}\n{"kind":"resu')
    pretended.worker.settle(ENDED)
    assert await listening == [Delta(kind="delta", text="1"), Delta(kind="delta", text="2")]


async def test_frames_can_be_read_after_the_end(pretended: Pretended) -> None:
    """Whoever listens late hears everything."""
    pretended.speak.sendall(b'{"kind":"delta","text":"1"}\n{"kind":"delta","text":"2"}')
    pretended.worker.settle(ENDED)
    frames = [frame async for frame in pretended.worker.frames()]
    assert frames == [Delta(kind="delta", text="1"), Delta(kind="delta", text="2")]


async def test_the_end_frees_a_sender(pretended: Pretended) -> None:
    """A frame that the worker never read does not hold the node up."""
    sending = asyncio.create_task(pretended.worker.send({"kind": "ack", "ref": "x" * (4 << 20)}))
    await asyncio.sleep(0)
    pretended.worker.settle(ENDED)
    await asyncio.wait_for(sending, 5)
    await pretended.worker.send({"kind": "ack", "ref": "later"})


async def test_output_is_taken_without_waiting_for_the_pipes_end(pretended: Pretended) -> None:
    """The writing end is still open somewhere; what was written is in the log."""
    os.write(pretended.inputs[0], b"out")
    os.write(pretended.inputs[1], b"err")
    pretended.worker.settle(ENDED)
    log = pretended.worker.log()
    assert (log.stdout, log.stderr) == ("out", "err")
    assert await pretended.worker.wait() == ENDED


async def test_settling_twice_keeps_the_first_word(pretended: Pretended) -> None:
    """The first report counts, and a kill afterwards changes nothing."""
    pretended.worker.settle(ENDED)
    pretended.worker.settle(ExitStatus(exit_code=None, signal=9, cpu_ms=0, memory_peak_kb=0))
    assert await pretended.worker.kill() == ENDED
    assert "ended" in repr(pretended.worker)
