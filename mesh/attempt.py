"""One attempt: a claimed intent, one worker, and the outcome that goes to the ledger.

Must never end without an outcome, and never leave a process of the worker's tree behind.
"""

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import structlog

from ledger.client import LedgerClient
from mesh.contract.errors import DETERMINISTIC_CAUSES, Cause, ErrorCode, MeshError
from mesh.contract.messages import AttemptLog, Claim, CommitResult, EventKind, FailAttempt, ThreadUpdate, Usage
from mesh.event_pump import EventPump
from mesh.llm.broker import Broker, Meter
from mesh.llm.provider import ModelError
from mesh.outcome import Outcome
from worker import frames as wire
from worker.capability_folder import CapabilityFolder
from worker.exit_codes import EXIT_OK, cause_of_exit
from worker.spawner import Assignment, ExitStatus, SpawnFailed, Worker, Zygote

# A worker that has said its result may tidy up this long before it is killed; the result counts all the same.
EXIT_GRACE_S = 2.0
PARTIAL_TEXT_CHARS_MAX = 200_000
DETAIL_CHARS_MAX = 2000
# All `thread.updated` frames of one attempt together; the ledger's own bounds are smaller.
UPDATE_CHARS_MAX = 4 * 1024 * 1024
# Lines that one attempt may write to the node's log.
LOG_LINES_MAX = 100
LOG_LINE_CHARS_MAX = 500

log = structlog.get_logger()

T = TypeVar("T")


class _Failed(Exception):
    """The attempt is over without a result."""

    def __init__(self, cause: Cause, detail: str, *, is_retryable: bool | None = None, hint: str | None = None) -> None:
        super().__init__(detail)
        self.cause = cause
        self.detail = detail
        self.hint = hint
        self.is_retryable = cause not in DETERMINISTIC_CAUSES if is_retryable is None else is_retryable


class Attempt:
    """Drives one worker. `stop` may be called at any time by the node."""

    def __init__(
        self, claim: Claim, folder: CapabilityFolder, *, ledger: LedgerClient, broker: Broker, node_id: str
    ) -> None:
        self.claim = claim
        self._folder = folder
        self._broker = broker
        self._node_id = node_id
        self._pump = EventPump(ledger, claim, node_id)
        self._meter = Meter()
        self._model_error: ModelError | None = None
        self._update = ThreadUpdate()
        self._update_chars = 0
        self._log_lines = 0
        self._result: wire.Result | None = None
        self._partial: list[str] = []
        self._partial_chars = 0
        self._stopped = asyncio.Event()
        self.stop_cause: Cause | None = None
        self._started_s = time.monotonic()

    def stop(self, cause: Cause) -> None:
        """End the attempt; the first cause counts."""
        if self.stop_cause is None:
            self.stop_cause = cause
            self._stopped.set()

    async def run(self, zygote: Zygote) -> Outcome:
        """Run the worker to its end and return what to tell the ledger."""
        worker: Worker | None = None
        status: ExitStatus | None = None
        failure: _Failed | None = None
        try:
            worker = await self._take(zygote)
            timeout_s = self._folder.template.limits.timeout_s
            await self._unless_stopped(self._drive(worker), timeout_s=timeout_s)
        except _Failed as error:
            # A worker that has said its result and lingers: the result counts all the same.
            is_late = self._result is not None and error.cause in (Cause.TIMED_OUT, Cause.NODE_DRAINED)
            failure = None if is_late else error
        except Exception as error:
            # A bug here must not cost the thread its turn: the attempt fails like any other.
            log.exception("attempt_broke", intent_id=self.claim.intent_id)
            failure = _Failed(Cause.WORKER_CRASHED, f"the node failed at this attempt: {type(error).__name__}")
        finally:
            if worker is not None:
                status = await worker.kill()
            await self._pump.close()
        return self._outcome(failure, status, AttemptLog() if worker is None else worker.log())

    def _outcome(self, failure: _Failed | None, status: ExitStatus | None, attempt_log: AttemptLog) -> Outcome:
        usage = Usage(
            input_tokens=self._meter.input_tokens,
            output_tokens=self._meter.output_tokens,
            model_calls=self._meter.calls,
            wall_ms=int((time.monotonic() - self._started_s) * 1000),
            cpu_ms=status.cpu_ms if status is not None else 0,
            memory_peak_kb=status.memory_peak_kb if status is not None else 0,
        )
        if failure is not None:
            return self._failure(failure, usage, attempt_log)
        assert self._result is not None
        return CommitResult(
            node_id=self._node_id,
            epoch=self.claim.epoch,
            result=self._result.result,
            thread_update=self._update,
            usage=usage,
            log=attempt_log,
        )

    def _failure(self, failed: _Failed, usage: Usage, attempt_log: AttemptLog) -> FailAttempt:
        return FailAttempt(
            node_id=self._node_id,
            epoch=self.claim.epoch,
            cause=failed.cause,
            detail=failed.detail[:DETAIL_CHARS_MAX],
            is_retryable=failed.is_retryable,
            hint=failed.hint,
            partial_text="".join(self._partial),
            usage=usage,
            log=attempt_log,
        )

    async def _unless_stopped(self, work: Coroutine[Any, Any, T], *, timeout_s: float | None = None) -> T:
        """Return what `work` returns.

        Raises: _Failed when the attempt is stopped before, or the time is over; `work` has ended then.
        """
        if self.stop_cause is not None:
            work.close()
            raise self._stop_failure(self.stop_cause)
        task = asyncio.create_task(work)
        stopped = asyncio.create_task(self._stopped.wait())
        try:
            await asyncio.wait({task, stopped}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            if self.stop_cause is not None:
                raise self._stop_failure(self.stop_cause)
            raise _Failed(Cause.TIMED_OUT, f"no result within {timeout_s:g} s (limits.timeout_s in template.yaml)")
        finally:
            for each in (task, stopped):
                each.cancel()
            await asyncio.gather(task, stopped, return_exceptions=True)

    @staticmethod
    def _stop_failure(cause: Cause) -> _Failed:
        return _Failed(cause, f"stopped by the node: {cause}")

    async def _take(self, zygote: Zygote) -> Worker:
        if self.claim.capability != self._folder.template.name:  # the award named another one
            detail = f"the intent is a {self.claim.capability}, and was awarded as a {self._folder.template.name}"
            raise _Failed(Cause.WORKER_CRASHED, detail)
        try:
            return await self._unless_stopped(zygote.take())
        except SpawnFailed as error:
            # `spawn_failed` is what fails the same way every time; what the machine refused now is not that.
            cause = Cause.WORKER_CRASHED if error.is_retryable else Cause.SPAWN_FAILED
            raise _Failed(cause, f"no worker could be started: {error.detail}") from error
        except OSError as error:
            raise _Failed(Cause.WORKER_CRASHED, f"no worker could be started: {error}") from error

    async def _drive(self, worker: Worker) -> None:
        """Return when the result is there and the process has ended well.

        Raises: _Failed for every other end.
        """
        await worker.activate(Assignment.from_claim(self.claim, self._folder))
        try:
            async for frame in worker.frames():
                await self._handle(frame, worker)
                if self._result is not None:
                    break
        except wire.FrameError as error:
            raise _Failed(error.cause, error.detail) from error
        except MeshError as error:
            if error.code is ErrorCode.STALE_EPOCH:
                raise _Failed(Cause.LEASE_LOST, error.detail) from error
            raise _Failed(Cause.WORKER_CRASHED, f"an event was refused: {error.detail}", is_retryable=False) from error
        try:
            async with asyncio.timeout(EXIT_GRACE_S if self._result is not None else None):
                status = await worker.wait()
        except TimeoutError:
            log.info("worker_lingers", intent_id=self.claim.intent_id, pid=worker.pid)
            return
        if self._result is None or status.exit_code != EXIT_OK:
            cause, detail = cause_of_exit(
                exit_code=status.exit_code,
                signal_number=status.signal,
                reason=status.reason,
                cpu_ms=status.cpu_ms,
                cpu_limit_s=self._folder.template.limits.cpu_s,
            )
            raise _Failed(cause, detail if self._result is None else f"after its result, {detail}")

    async def _handle(self, frame: wire.Frame, worker: Worker) -> None:
        match frame:
            case wire.Delta():
                await self._say(frame.text)
            case wire.Progress():
                await self._pump.put(EventKind.PROGRESS, frame.model_dump(exclude={"kind"}, exclude_none=True))
            case wire.Log():
                self._write_log(frame)
            case wire.ToolStarted():
                await self._pump.put_and_wait(EventKind.TOOL_STARTED, frame.model_dump(exclude={"kind"}))
                await worker.send(wire.ack(frame.call_id))
            case wire.ToolFinished():
                await self._pump.put_and_wait(EventKind.TOOL_FINISHED, frame.model_dump(exclude={"kind"}))
                await worker.send(wire.ack(frame.call_id))
            case wire.LlmChat():
                await self._call_model(frame, worker)
            case wire.ThreadUpdated():
                self._merge(frame.update())
            case wire.Result():
                self._result = frame
            case wire.Error():
                raise _Failed(frame.cause, frame.detail, is_retryable=self._is_retryable(frame), hint=frame.hint)

    async def _call_model(self, call: wire.LlmChat, worker: Worker) -> None:
        async def on_delta(text: str) -> None:
            if call.stream_to_caller:
                await self._say(text)
            await worker.send(wire.llm_delta(call.request_id, text))

        try:
            reply = await self._broker.chat(call, self._folder.template.model, self._meter, on_delta)
        except ModelError as error:
            self._model_error = error
            answer = wire.llm_error(call.request_id, cause=error.cause, detail=error.detail, hint=error.hint)
        else:
            usage = Usage(input_tokens=reply.input_tokens, output_tokens=reply.output_tokens)
            answer = wire.llm_result(call.request_id, reply.text, usage=usage, finish_reason=reply.finish_reason)
        await worker.send(answer)

    def _is_retryable(self, frame: wire.Error) -> bool | None:
        """What the worker says counts; of a model's error that it passes on, the node knows better than the cause."""
        if frame.is_retryable is None and self._model_error is not None and frame.cause is self._model_error.cause:
            return self._model_error.is_retryable
        return frame.is_retryable

    async def _say(self, text: str) -> None:
        """Keep a piece of the answer, and send it to whoever streams."""
        if not text:
            return
        room = PARTIAL_TEXT_CHARS_MAX - self._partial_chars
        if room > 0:
            self._partial.append(text[:room])
            self._partial_chars += len(text[:room])
        await self._pump.put(EventKind.DELTA, {"text": text})

    def _merge(self, update: ThreadUpdate) -> None:
        self._update_chars += len(update.model_dump_json())
        if self._update_chars > UPDATE_CHARS_MAX:
            raise _Failed(Cause.FRAME_TOO_LARGE, f"thread.updated: more than {UPDATE_CHARS_MAX} characters in all")
        self._update = wire.merge_updates(self._update, update)

    def _write_log(self, frame: wire.Log) -> None:
        """Write a line of the handler's author to the node's log; not without end."""
        self._log_lines += 1
        if self._log_lines <= LOG_LINES_MAX:
            write = getattr(log, frame.level)
            write("worker_says", intent_id=self.claim.intent_id, text=frame.text[:LOG_LINE_CHARS_MAX])
