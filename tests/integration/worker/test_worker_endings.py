"""Every way in which a worker can end, and what the node is told."""

import os
import signal

import pytest
from support.capability_files import claim_of
from support.worker_lab import Lab, Outcome

from mesh.contract.errors import Cause
from worker.exit_codes import EXIT_HANDLER_FAILED, EXIT_OUT_OF_MEMORY, cause_of_exit
from worker.frames import Delta, Error, FrameInvalid, FrameTooLarge


def cause_of(outcome: Outcome, *, cpu_limit_s: int = 300) -> Cause:
    """Return the cause that the exit alone tells."""
    status = outcome.status
    return cause_of_exit(
        exit_code=status.exit_code,
        signal_number=status.signal,
        reason=status.reason,
        cpu_ms=status.cpu_ms,
        cpu_limit_s=cpu_limit_s,
    )[0]


async def test_a_result_and_a_clean_exit(lab: Lab) -> None:
    """The result arrives before the end, output is the log, usage is measured."""
    handler = "import sys\n\ndef run(intent, context):\n    print('héllo')\n    print('oops', file=sys.stderr)\n    return 7\n"
    outcome = await lab.run(handler)
    assert outcome.result == 7
    assert outcome.status.exit_code == 0
    assert outcome.status.reason is None
    assert outcome.status.memory_peak_kb > 1000
    assert (outcome.log.stdout, outcome.log.stderr, outcome.log.is_truncated) == ("héllo\n", "oops\n", False)


async def test_an_exception_is_an_error_frame_with_its_traceback_in_the_log(lab: Lab) -> None:
    """The detail names type and text; the log shows the handler's own lines only."""
    outcome = await lab.run("def run(intent, context):\n    raise ValueError('no such order')\n")
    assert outcome.error.cause is Cause.HANDLER_FAILED
    assert outcome.error.is_retryable is None
    assert outcome.error.detail == "ValueError: no such order"
    assert outcome.status.exit_code == EXIT_HANDLER_FAILED
    assert "raise ValueError('no such order')" in outcome.log.stderr
    assert "child.py" not in outcome.log.stderr


async def test_the_log_is_there_before_the_error_frame(lab: Lab) -> None:
    """A node that kills the worker at its error frame still has the traceback and what was printed."""
    worker = await lab.begin(lab.zygote("def run(i, c):\n    print('so far', end='')\n    raise KeyError('gone')\n"))
    async for frame in worker.frames():
        assert isinstance(frame, Error)
        await worker.kill()
    assert worker.log().stdout == "so far"
    assert "KeyError: 'gone'" in worker.log().stderr


async def test_a_refusal_is_not_a_failure(lab: Lab) -> None:
    """Refused says no once and for all, without a traceback."""
    outcome = await lab.run("from worker.sdk import Refused\n\ndef run(i, c):\n    raise Refused('not for you')\n")
    assert (outcome.error.cause, outcome.error.detail) == (Cause.HANDLER_REFUSED, "not for you")
    assert outcome.log.stderr == ""


@pytest.mark.parametrize(
    ("body", "exit_code"),
    [("os._exit(3)", 3), ("sys.exit(4)", 4), ("sys.exit('bye')", 1), ("os._exit(0)", 0), ("sys.exit()", 0)],
)
async def test_leaving_without_a_result(lab: Lab, body: str, exit_code: int) -> None:
    """The exit code is told as it was; leaving well without a result is a cause of its own."""
    outcome = await lab.run(f"import os, sys\n\ndef run(intent, context):\n    {body}\n")
    assert outcome.frames == []
    assert outcome.status.exit_code == exit_code
    assert cause_of(outcome) is (Cause.WORKER_CRASHED if exit_code else Cause.NO_RESULT)


async def test_a_crash_by_signal(lab: Lab) -> None:
    """A segmentation fault is told by its name."""
    outcome = await lab.run("import os, signal\n\ndef run(i, c):\n    os.kill(os.getpid(), signal.SIGSEGV)\n")
    assert outcome.status.signal == signal.SIGSEGV
    assert cause_of(outcome) is Cause.WORKER_CRASHED


async def test_too_much_memory_in_python(lab: Lab) -> None:
    """The limit strikes as MemoryError; cause and exit code both say so."""
    handler = "def run(intent, context):\n    kept = []\n    while True:\n        kept.append(bytearray(1 << 20))\n"
    outcome = await lab.run(handler, limits="{memory_mb: 64}")
    assert outcome.error.cause is Cause.OOM_KILLED
    assert outcome.status.exit_code == EXIT_OUT_OF_MEMORY
    assert cause_of(outcome) is Cause.OOM_KILLED
    assert outcome.status.memory_peak_kb < 128 * 1024


async def test_a_kill_that_nobody_here_sent_is_taken_for_want_of_memory(lab: Lab) -> None:
    """That is what the kernel's out-of-memory killer looks like."""
    outcome = await lab.run("import os\n\ndef run(i, c):\n    os.kill(os.getpid(), 9)\n")
    assert outcome.status.reason is None
    assert cause_of(outcome) is Cause.OOM_KILLED


async def test_too_much_processor_time(lab: Lab) -> None:
    """The CPU limit ends an endless loop, and is not mistaken for want of memory."""
    outcome = await lab.run("def run(i, c):\n    while True:\n        pass\n", limits="{cpu_s: 1}")
    assert outcome.status.signal == signal.SIGXCPU
    assert cause_of(outcome, cpu_limit_s=1) is Cause.TIMED_OUT


async def test_too_much_processor_time_with_the_warning_ignored(lab: Lab) -> None:
    """SIGKILL follows, and the time used tells it from want of memory."""
    handler = "import signal\n\ndef run(i, c):\n    signal.signal(signal.SIGXCPU, signal.SIG_IGN)\n    while True:\n        pass\n"
    outcome = await lab.run(handler, limits="{cpu_s: 1}")
    assert outcome.status.signal == signal.SIGKILL
    assert cause_of(outcome, cpu_limit_s=1) is Cause.TIMED_OUT


async def test_a_frame_of_eight_megabytes(lab: Lab) -> None:
    """It fails with its own cause; the node reads no more than it must, and the next worker is well."""
    zygote = lab.zygote(
        """
        import os

        def run(intent, context):
            if intent.payload.get("large"):
                os.write(3, b'{"kind":"delta","text":"' + b"x" * (8 << 20) + b'"}\\n')
            return "well"
        """
    )
    worker = await lab.begin(zygote, claim_of({"large": True}))
    with pytest.raises(FrameTooLarge):
        async for _ in worker.frames():
            pass
    status = await worker.kill()
    assert status.reason == "killed"
    assert (await lab.run(zygote)).result == "well"


async def test_a_result_beyond_one_frame(lab: Lab) -> None:
    """The SDK says so instead of breaking the protocol."""
    outcome = await lab.run("def run(i, c):\n    return 'x' * (2 << 20)\n")
    assert outcome.error.cause is Cause.FRAME_TOO_LARGE
    assert "2097" in outcome.error.detail


async def test_a_result_of_almost_one_frame(lab: Lab) -> None:
    """One megabyte less the envelope is fine."""
    outcome = await lab.run("def run(i, c):\n    return 'x' * ((1 << 20) - 100)\n")
    assert len(outcome.result) == (1 << 20) - 100


@pytest.mark.parametrize(
    "value",
    ["float('nan')", "object()", "{1, 2}", "(lambda x: x.append(x) or x)([])", "b'bytes'", "{'a': float('inf')}"],
)
async def test_a_result_that_is_not_json(lab: Lab, value: str) -> None:
    """The cause is deterministic and the detail says what is wrong."""
    outcome = await lab.run(f"def run(i, c):\n    return {value}\n")
    assert outcome.error.cause is Cause.RESULT_INVALID


async def test_a_result_nested_too_deeply(lab: Lab) -> None:
    """The node's reader bounds the depth; the worker cannot take it down."""
    handler = "def run(i, c):\n    value = []\n    for _ in range(500):\n        value = [value]\n    return value\n"
    with pytest.raises(FrameInvalid, match="nested deeper than 64"):
        await lab.run(handler)


async def test_bad_text_in_frames_is_mended(lab: Lab) -> None:
    """Bytes that are not UTF-8, NUL and lone surrogates become U+FFFD."""
    handler = r"""
        import os

        def run(intent, context):
            os.write(3, b'{"kind":"delta","text":"a\xff\xfeb"}\n')
            return "\ud800 and \0"
    """
    outcome = await lab.run(handler)
    assert outcome.frames[0] == Delta(kind="delta", text="a\ufffd\ufffdb")
    assert outcome.result == "\ufffd and \ufffd"


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (b"hello", "not JSON"),
        (b"[1]", "kind"),
        (b'{"kind":"shout"}', "kind"),
        (b'{"kind":"delta"}', "text"),
        (b'{"kind":"delta","text":"a","colour":"red"}', "colour"),
        (b'{"kind":"error","detail":"x","cause":"cancelled"}', "a worker may name one of"),
        (b'{"kind":"result","result":NaN}', "NaN"),
        (b'{"kind":"result","result":1,"result":2}', "twice"),
    ],
)
async def test_a_line_that_is_no_frame(lab: Lab, line: bytes, what: str) -> None:
    """The detail says what is wrong with it."""
    handler = f"import os\n\ndef run(i, c):\n    os.write(3, {line!r} + b'\\n')\n    return 1\n"
    with pytest.raises(FrameInvalid, match=what):
        await lab.run(handler)


async def test_half_a_frame_is_dropped(lab: Lab) -> None:
    """A death in the middle of a frame is a crash, not a protocol error."""
    handler = """
        import os

        def run(intent, context):
            os.write(3, b'{"kind":"delta","text":"whole"}\\n{"kind":"result","res')
            os._exit(9)
    """
    outcome = await lab.run(handler)
    assert outcome.frames == [Delta(kind="delta", text="whole")]
    assert cause_of(outcome) is Cause.WORKER_CRASHED


async def test_a_gigabyte_of_output_is_drained_and_capped(lab: Lab) -> None:
    """The worker is not held up, the log keeps the newest part and says that it is not all."""
    handler = """
        import os

        def run(intent, context):
            block = b"x" * (1 << 20)
            for _ in range(1024):
                view = memoryview(block)
                while view:
                    view = view[os.write(1, view):]
            os.write(1, "the énd".encode())
            return "done"
    """
    outcome = await lab.run(handler)
    assert outcome.result == "done"
    assert outcome.log.is_truncated
    assert outcome.log.stdout.endswith("xthe énd")
    assert len(outcome.log.stdout) <= 64 * 1024


async def test_output_that_is_not_text(lab: Lab) -> None:
    """Bad bytes and NUL are replaced: the log can be stored."""
    outcome = await lab.run("import os\n\ndef run(i, c):\n    os.write(1, b'a\\xff\\0b')\n    return 1\n")
    assert outcome.log.stdout == "a\ufffd\ufffdb"


async def test_a_coroutine_works_too(lab: Lab) -> None:
    """`async def run` is run to its end."""
    handler = "import asyncio\n\nasync def run(i, c):\n    await asyncio.sleep(0)\n    return 'later'\n"
    assert (await lab.run(handler)).result == "later"


async def test_a_handler_that_forks_sends_one_result(lab: Lab) -> None:
    """The copy that comes back from `run` is not the worker."""
    handler = "import os\n\ndef run(i, c):\n    child = os.fork()\n    if child:\n        os.waitpid(child, 0)\n    return os.getpid()\n"
    outcome = await lab.run(handler)
    assert outcome.result != os.getpid()


async def test_threads_of_a_handler_may_speak_at_once(lab: Lab) -> None:
    """Frames from several threads never mix, and what still runs at the end goes with the process."""
    handler = """
        import threading, time
        from worker.sdk import delta

        def speak(name):
            for _ in range(200):
                delta(name * 500)

        def run(intent, context):
            threads = [threading.Thread(target=speak, args=(name,)) for name in "abcd"]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            threading.Thread(target=time.sleep, args=(600,)).start()
            return "done"
    """
    outcome = await lab.run(handler)
    assert outcome.result == "done"
    texts = [frame.text for frame in outcome.frames if isinstance(frame, Delta)]
    assert len(texts) == 800
    assert all(len(set(text)) == 1 and len(text) == 500 for text in texts)
