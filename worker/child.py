"""One worker: a forked child that stands by, takes one assignment, runs it once and ends.

Must never return to the zygote's code, keep a descriptor of the zygote's, or leave but by os._exit.
Must never import more than the standard library's smallest modules.
"""

# pathlib would cost every worker memory.
# ruff: noqa: PTH118, PTH123

import gc
import io
import json
import os
import resource
import signal
import sys
import types
from collections.abc import Callable
from typing import Any, NoReturn

from worker import kernel, sdk
from worker.channel import Channel, FrameTooBig, NodeGone
from worker.exit_codes import EXIT_HANDLER_FAILED, EXIT_OK, EXIT_OUT_OF_MEMORY, EXIT_SPAWN_FAILED
from worker.wire import (
    ENVIRONMENT_VALUE_BYTES_MAX,
    INTENT_PAYLOAD_FD,
    MESH_FD,
    THREAD_CONTEXT_FD,
    encode_frame,
)

Handler = Callable[[sdk.Intent, sdk.Context], Any]

_DETAIL_CHARACTERS_MAX = 2000
_CUT_MARK = "[cut] "
# Built ahead: when it is needed, there may be no memory to build it.
_OUT_OF_MEMORY_LINE = encode_frame(
    {"kind": "error", "cause": "oom_killed", "detail": "the worker ran out of memory (limits.memory_mb)"}
)


def stand_by(config: dict[str, Any], handler: Handler | None, scratch: str, zygote_pid: int) -> NoReturn:
    """Wait for the assignment on MESH_FD and carry it out. Descriptors 0 to 3 are in place, all else is closed."""
    kernel.die_with_parent(zygote_pid)
    os.setsid()
    kernel.adopt_orphans()
    kernel.set_process_name(f"worker:{config['name']}")
    os.chdir(scratch)
    _set_limits(config["limits"])
    _reseed()
    channel = Channel(MESH_FD)
    line = channel.read_line()
    if line is None:
        os._exit(EXIT_OK)
    assignment = json.loads(line)
    environment = _environment(config, assignment, scratch)
    _limit_processes(config["limits"]["processes"])
    if handler is None:
        _execute(channel, config, environment)
    _apply(environment)
    _run(channel, handler, sdk.Intent(assignment["claim"]), _context(assignment))


def _set_limits(limits: dict[str, int]) -> None:
    memory_bytes = limits["memory_mb"] * 1024 * 1024
    for kind, soft, hard in (
        (resource.RLIMIT_DATA, memory_bytes, memory_bytes),
        # SIGXCPU first, which can be told from a kill for want of memory; SIGKILL for whoever ignores it.
        (resource.RLIMIT_CPU, limits["cpu_s"], limits["cpu_s"] + 2),
        (resource.RLIMIT_NOFILE, limits["open_files"], limits["open_files"]),
        (resource.RLIMIT_CORE, 0, 0),
    ):
        ceiling = resource.getrlimit(kind)[1]
        if ceiling != resource.RLIM_INFINITY:
            soft, hard = min(soft, ceiling), min(hard, ceiling)
        resource.setrlimit(kind, (soft, hard))


def _limit_processes(count: int) -> None:
    """Bound the processes of this user, not of this worker: the kernel has no finer limit. The zygote counts those."""
    if os.geteuid() == 0:
        return  # the kernel does not hold root to it
    with open("/proc/loadavg", "rb") as file:
        threads_now = int(file.read().split()[3].partition(b"/")[2])
    ceiling = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    bound = threads_now + count
    if ceiling == resource.RLIM_INFINITY or bound < ceiling:
        resource.setrlimit(resource.RLIMIT_NPROC, (bound, bound))


def _reseed() -> None:
    """Give each child its own chance: numpy's was seeded before the fork. Python's `random` does so by itself."""
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()
    if (tempfile := sys.modules.get("tempfile")) is not None:
        vars(tempfile)["tempdir"] = None


def _messages(assignment: dict[str, Any]) -> list[dict[str, Any]]:
    messages = assignment["claim"]["messages"]
    return [{key: value for key, value in message.items() if value is not None} for message in messages]


def _context(assignment: dict[str, Any]) -> sdk.Context:
    """The conversation as a handler gets it: each message with its turn and ranking where those are known."""
    remarks = assignment["remarks"]
    context = _messages(assignment)
    if len(remarks) == len(context):
        for message, remark in zip(context, remarks, strict=True):
            message.update(remark)
    return context


def _environment(config: dict[str, Any], assignment: dict[str, Any], scratch: str) -> dict[str, str]:
    """Build the worker's whole environment; long values travel by descriptor too."""
    claim = assignment["claim"]
    environment = dict(config["environment"])
    environment |= {
        "HOME": scratch,
        "TMPDIR": scratch,
        "CAPABILITY_DIR": config["folder"],
        "INTENT_ID": claim["intent_id"],
        "INTENT_TYPE": claim["capability"],
        "THREAD_ID": claim["thread_id"],
        "TURN_ATTEMPT": str(claim["attempt"]),
        "MESH_FD": str(MESH_FD),
        "THREAD_CONTEXT_FD": str(THREAD_CONTEXT_FD),
        "INTENT_PAYLOAD_FD": str(INTENT_PAYLOAD_FD),
    }
    if claim["deadline_ms"] is not None:
        environment["DEADLINE_UNIX_MS"] = str(claim["deadline_ms"])
    payload = _text(claim["payload"])
    _place(payload, INTENT_PAYLOAD_FD)
    if _fits("INTENT_PAYLOAD", payload):
        environment["INTENT_PAYLOAD"] = payload
    else:
        environment["INTENT_PAYLOAD_TRUNCATED"] = "1"
    messages = _messages(assignment)
    context = _text(messages)
    _place(context, THREAD_CONTEXT_FD)
    if not _fits("THREAD_CONTEXT_JSON", context):
        context = newest_that_fits(messages)
        environment["THREAD_CONTEXT_TRUNCATED"] = "1"
    environment["THREAD_CONTEXT_JSON"] = context
    return environment


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _room(name: str) -> int:
    return ENVIRONMENT_VALUE_BYTES_MAX - len(name) - 2  # "=" and the final NUL


def _fits(name: str, value: str) -> bool:
    return len(value) <= _room(name) and len(value.encode()) <= _room(name)


def newest_that_fits(messages: list[dict[str, Any]]) -> str:
    """Return the newest messages that one environment value can hold, as a JSON array.

    When not even the newest fits, its content is cut at the front, behind a visible mark.
    """
    room = _room("THREAD_CONTEXT_JSON") - len("[]")
    kept: list[str] = []
    for message in reversed(messages):
        text = _text(message)
        size = len(text.encode()) + 1
        if size > room + 1:
            break
        room -= size
        kept.append(text)
    if not kept and messages:
        newest = {"role": messages[-1]["role"], "content": messages[-1]["content"]}
        low, high = 0, min(len(newest["content"]), room)
        while low < high:  # the longest end of the content whose JSON fits
            middle = (low + high + 1) // 2
            cut = {**newest, "content": _CUT_MARK + newest["content"][-middle:]}
            low, high = (middle, high) if len(_text(cut).encode()) <= room else (low, middle - 1)
        end = newest["content"][-low:] if low else ""
        kept.append(_text({**newest, "content": _CUT_MARK + end}))
    return "[" + ",".join(reversed(kept)) + "]"


def _place(text: str, descriptor: int) -> None:
    """Make `text` readable at `descriptor`, from its beginning, also across exec."""
    memory = os.memfd_create("intent", 0)
    view = memoryview(text.encode())
    while view:
        view = view[os.write(memory, view) :]
    os.lseek(memory, 0, os.SEEK_SET)
    if memory != descriptor:
        os.dup2(memory, descriptor)
        os.close(memory)


def _apply(environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)


def _execute(channel: Channel, config: dict[str, Any], environment: dict[str, str]) -> NoReturn:
    """Become the program that the template names; say so on the frame socket when that cannot be."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    command = [_in_folder(config["folder"], word) for word in config["command"]]
    try:
        os.execve(config["program"], [config["command"][0], *command[1:]], environment)  # noqa: S606 - the point of it
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        detail = f"cannot start the program {config['program']!r}: {reason}"
        channel.send({"kind": "error", "cause": "spawn_failed", "detail": detail[:_DETAIL_CHARACTERS_MAX]})
    os._exit(EXIT_SPAWN_FAILED)


def _in_folder(folder: str, word: str) -> str:
    """Resolve an argument such as ./rules.txt against the capability's folder: the working directory is empty."""
    return os.path.join(folder, word[2:]) if word.startswith("./") else word


def _run(channel: Channel, handler: Handler, intent: sdk.Intent, context: sdk.Context) -> NoReturn:
    pid = os.getpid()
    sdk.connect(channel, intent)
    gc.enable()
    try:
        result = handler(intent, context)
        if isinstance(result, types.CoroutineType):
            import asyncio  # only for handlers that are coroutines

            result = asyncio.run(result)
        if os.getpid() != pid:  # the handler forked, and its child came back here
            _leave(EXIT_OK)
        _flush()
        _send_result(channel, result)
        _leave(EXIT_OK)
    except MemoryError:
        _give_up_for_memory(channel)
    except NodeGone:
        _leave(EXIT_HANDLER_FAILED)
    except SystemExit as error:
        _leave(_exit_code(error))
    except BaseException as error:
        try:
            # The log first: the node may end this process as soon as it has the frame.
            _print_traceback(error)
            _flush()
            if os.getpid() == pid:
                _send_error(channel, error)
        except MemoryError:
            _give_up_for_memory(channel)
        except NodeGone:
            pass
        _leave(EXIT_HANDLER_FAILED)


def _send_result(channel: Channel, result: Any) -> None:
    try:
        channel.send({"kind": "result", "result": result})
    except FrameTooBig as error:
        channel.send({"kind": "error", "cause": "frame_too_large", "detail": str(error)})
        _leave(EXIT_HANDLER_FAILED)
    except (TypeError, ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        detail = f"the handler's result is not JSON: {reason}"
        channel.send({"kind": "error", "cause": "result_invalid", "detail": detail[:_DETAIL_CHARACTERS_MAX]})
        _leave(EXIT_HANDLER_FAILED)


def _send_error(channel: Channel, error: BaseException) -> None:
    frame: dict[str, Any] = {"kind": "error", "cause": "handler_failed"}
    match error:
        case sdk.Refused():
            frame |= {"cause": "handler_refused", "detail": str(error) or "the handler refused the intent"}
        case sdk.ModelFailed():
            frame |= {"cause": error.cause, "detail": error.detail, "hint": error.hint}
        case sdk.UncertainToolCall():
            hint = "look whether its effect happened; the handler may allow a repeat with repeat_uncertain=True"
            frame |= {"detail": str(error), "is_retryable": False, "hint": hint}
        case _:
            frame |= {"detail": f"{type(error).__name__}: {error}" if str(error) else type(error).__name__}
    frame["detail"] = frame["detail"][:_DETAIL_CHARACTERS_MAX]
    channel.send(frame)


def _print_traceback(error: BaseException) -> None:
    if isinstance(error, sdk.Refused):
        return
    import traceback  # only for the attempt that fails

    # The first step is this file's own call of the handler.
    trace = error.__traceback__.tb_next if error.__traceback__ is not None else None
    traceback.print_exception(type(error), error, trace or error.__traceback__)


def _give_up_for_memory(channel: Channel) -> NoReturn:
    try:
        channel.send_line(_OUT_OF_MEMORY_LINE)
    except BaseException:
        os._exit(EXIT_OUT_OF_MEMORY)
    _leave(EXIT_OUT_OF_MEMORY)


def _exit_code(error: SystemExit) -> int:
    if isinstance(error.code, int):
        return error.code & 0xFF
    if error.code is None:
        return EXIT_OK
    sys.stderr.write(f"{error.code}\n")
    return 1


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            if isinstance(stream, io.TextIOBase):
                stream.flush()
        except Exception:  # noqa: S112 - the log is not worth a wrong exit code
            continue


def _leave(exit_code: int) -> NoReturn:
    _flush()
    os._exit(exit_code)
