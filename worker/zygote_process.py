"""One life of a capability's zygote, as the node sees it: started, asked for children, buried.

Must never start the process from another thread than the event loop's: the kernel ties its life to that thread.
"""

import asyncio
import contextlib
import itertools
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from worker import scratch
from worker.capability_folder import CapabilityFolder, resolve_program
from worker.control import ControlSocket, close_all
from worker.exit_codes import REASON_KILLED, REASON_ZYGOTE_DIED
from worker.worker_process import ExitStatus, OutputPipe, Worker

START_PATIENCE_S = 60.0
_END_PATIENCE_S = 6.0
_LOG_CHARACTERS_MAX = 2000
_WORKER_DESCRIPTORS = 4
_ROOT = Path(__file__).resolve().parent.parent
_sequence = itertools.count(1)


class SpawnFailed(Exception):
    """No worker could be had. `detail` is fit for the intent's error; `is_retryable` tells bad luck from a cause.

    Not retryable: the handler cannot be imported, the program is missing. Retryable: the machine refused a
    process, the zygote died.
    """

    def __init__(self, detail: str, *, is_retryable: bool = False) -> None:
        super().__init__(detail)
        self.detail = detail
        self.is_retryable = is_retryable


class ZygoteProcess:
    """A zygote process with its workers. `on_change` is called when a child came, failed to come, or all is over."""

    def __init__(self, folder: CapabilityFolder, *, scratch_dir: Path, on_change: Callable[[], None]) -> None:
        self._folder = folder
        self._scratch = scratch_dir.resolve() / f"{folder.template.name}.{scratch.owner_name(next(_sequence))}"
        self._on_change = on_change
        self._process: subprocess.Popen[bytes] | None = None
        self._control: ControlSocket | None = None
        self._output: OutputPipe | None = None
        self._workers: dict[int, Worker] = {}
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._burial: asyncio.Task[None] | None = None
        self._cleanings: set[asyncio.Task[None]] = set()
        self.idle: list[Worker] = []
        self.requested = 0
        self.refusals: list[str] = []

    @property
    def is_alive(self) -> bool:
        """Whether it can be asked for children."""
        return self._burial is None and self._ready.done() and self._ready.exception() is None

    # ---- begin

    async def start(self) -> None:
        """Start the process and wait for the handler's import.

        Raises: SpawnFailed; nothing is left behind then.
        """
        try:
            self._execute()
            async with asyncio.timeout(START_PATIENCE_S):
                await asyncio.shield(self._ready)
        except TimeoutError:
            await self.bury()
            raise SpawnFailed(f"the handler's import took longer than {START_PATIENCE_S:.0f} s") from None
        except OSError as error:
            await self.bury()
            raise SpawnFailed(f"the zygote cannot be started: {error}", is_retryable=True) from error
        except BaseException:
            await self.bury()
            raise

    def _execute(self) -> None:
        self._scratch.mkdir(mode=0o700, parents=True)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        output, their_output = os.pipe()
        try:
            with theirs:
                # One exec of a small program by the event loop's thread; the node itself is never copied.
                self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                    [sys.executable, "-P", "-m", "worker.zygote", str(theirs.fileno()), self._folder.template.name],
                    stdin=subprocess.DEVNULL,
                    stdout=their_output,
                    stderr=their_output,
                    pass_fds=[theirs.fileno()],
                    env={
                        **_plain_environment(),
                        "PYTHONPATH": str(_ROOT),
                        "HOME": str(self._scratch),
                        "TMPDIR": str(self._scratch),
                    },
                    cwd=self._scratch,
                    start_new_session=True,
                )
        except BaseException:
            ours.close()
            os.close(output)
            raise
        finally:
            os.close(their_output)
        self._output = OutputPipe(output)
        self._control = ControlSocket(ours, on_message=self._hear, on_end=self._on_end)
        self._control.send(self._config())

    def _config(self) -> dict[str, Any]:
        template = self._folder.template
        command = template.command or []
        program = resolve_program(self._folder.path, command) if command else None
        return {
            "name": template.name,
            "runtime": template.runtime,
            "folder": str(self._folder.path),
            "command": command,
            # A program that has gone since the folder was read fails in the worker, with its name.
            "program": program or (str(self._folder.path / command[0]) if command else None),
            "limits": template.limits.model_dump(include={"memory_mb", "cpu_s", "open_files", "processes"}),
            "scratch": str(self._scratch),
            "birth_mark": scratch.birth_mark(self._scratch),
            "environment": {**_plain_environment(), "PYTHONDONTWRITEBYTECODE": "1"},
            "node_pid": os.getpid(),
        }

    # ---- children

    def request(self, count: int) -> None:
        """Ask for `count` more children; they turn up in `idle`, or in `refusals`."""
        if count > 0 and self._control is not None:
            self.requested += count
            self._control.send({"fork": count})

    def take(self) -> Worker | None:
        """Return the oldest child that stands by, if there is one."""
        while self.idle:
            worker = self.idle.pop(0)
            if worker.is_alive and self._control is not None:
                self._control.send({"taken": worker.pid})
                return worker
        return None

    def _hear(self, message: dict[str, Any], descriptors: list[int]) -> None:
        if "forked" in message:
            self.requested -= 1
            self._welcome(message["forked"], descriptors)
        elif "exited" in message:
            self._on_exit(message)
        elif "fork_failed" in message:
            self.requested -= 1
            self.refusals.append(message["fork_failed"])
        elif not self._ready.done():
            if "ready" in message:
                self._ready.set_result(None)
            else:
                self._ready.set_exception(SpawnFailed(message["failed"]))
        self._on_change()

    def _welcome(self, pid: int, descriptors: list[int]) -> None:
        if len(descriptors) < _WORKER_DESCRIPTORS:
            # The kernel drops what does not fit under RLIMIT_NOFILE. The child sees its socket's end, and ends.
            close_all(descriptors)
            self.refusals.append("the node has no file descriptor left for another worker")
            return
        worker = Worker(pid, descriptors, terminate=self._terminate, abandon=self._abandon)
        self._workers[pid] = worker
        self.idle.append(worker)

    def _on_exit(self, message: dict[str, Any]) -> None:
        if (left := message["scratch"]) is not None:
            task = asyncio.create_task(asyncio.to_thread(scratch.remove_tree, left))
            self._cleanings.add(task)
            task.add_done_callback(self._cleanings.discard)
        worker = self._workers.pop(message["exited"], None)
        if worker is None:
            return
        if worker in self.idle:
            self.idle.remove(worker)
            self.refusals.append("a worker that stood by ended before it had anything to do")
        worker.settle(
            ExitStatus(
                exit_code=message["exit_code"],
                signal=message["signal"],
                cpu_ms=message["cpu_ms"],
                memory_peak_kb=message["memory_peak_kb"],
                reason=message["reason"],
            )
        )

    def _terminate(self, pid: int) -> None:
        if self._control is not None:
            self._control.send({"terminate": pid})

    def _abandon(self) -> None:
        if self._process is not None:
            self._process.kill()
        self._begin_burial(REASON_KILLED)

    # ---- end

    def _on_end(self) -> None:
        self._begin_burial(REASON_ZYGOTE_DIED)
        self._on_change()

    def _begin_burial(self, reason: str) -> asyncio.Task[None]:
        if self._burial is None:
            self._burial = asyncio.create_task(self._bury(reason))
        return self._burial

    async def bury(self) -> None:
        """Kill all workers and the process; return when no process and no directory is left."""
        await asyncio.shield(self._begin_burial(REASON_KILLED))

    async def _bury(self, reason: str) -> None:
        if self._control is not None:
            self._control.close()  # the zygote kills its tree, removes its directory and ends
        if self._process is not None:
            if not self._ready.done():
                self._process.kill()  # it runs the capability's code, and does not listen
            await asyncio.to_thread(self._see_off, self._process)
        for worker in self._workers.values():
            worker.settle(ExitStatus(exit_code=None, signal=9, cpu_ms=0, memory_peak_kb=0, reason=reason))
        self._workers.clear()
        self.idle.clear()
        self.requested = 0
        if self._output is not None:
            self._output.finish()
        if not self._ready.done():
            self._ready.set_exception(SpawnFailed(self._last_words(), is_retryable=False))
        self._ready.exception()  # looked at, so that asyncio does not complain when nobody waits
        if self._cleanings:
            await asyncio.gather(*self._cleanings, return_exceptions=True)
        await asyncio.to_thread(scratch.remove_tree, self._scratch)
        self._on_change()

    def _see_off(self, process: subprocess.Popen[bytes]) -> None:
        """Wait for the zygote's end and kill what a zygote that died by force has left. Runs in a thread."""
        try:
            code = process.wait(_END_PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        if code != 0:
            scratch.kill_leftovers(self._scratch)

    def _last_words(self) -> str:
        code = self._process.returncode if self._process is not None else None
        said = self._output.tail.text().strip()[-_LOG_CHARACTERS_MAX:] if self._output is not None else ""
        return f"the zygote ended with code {code} while it imported the handler" + (f": {said}" if said else "")


def _plain_environment() -> dict[str, str]:
    """Return what a zygote and its workers may know of the node's environment: nothing that names a secret."""
    environment = {"PATH": os.environ.get("PATH", os.defpath), "LANG": os.environ.get("LANG", "C.UTF-8")}
    with contextlib.suppress(KeyError):
        environment["TZ"] = os.environ["TZ"]
    # Libraries that would start threads at import, which forbids forking.
    return environment | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
