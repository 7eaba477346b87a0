"""What a worker's exit code means, and the cause of an attempt that ended without a result.

Must never import more than the standard library and the contract's causes: the child process imports it.
"""

import signal

from mesh.contract.errors import Cause

EXIT_OK = 0
EXIT_HANDLER_FAILED = 70  # the error frame said why
EXIT_OUT_OF_MEMORY = 137  # as a shell reports a child that SIGKILL took
EXIT_SPAWN_FAILED = 126  # the program could not be started; the error frame said why

REASON_KILLED = "killed"
REASON_PROCESSES = "processes"
REASON_ZYGOTE_DIED = "zygote_died"


def cause_of_exit(
    *, exit_code: int | None, signal_number: int | None, reason: str | None = None, cpu_ms: int = 0, cpu_limit_s: int
) -> tuple[Cause, str]:
    """Return cause and detail for a worker that ended without a result and without an error frame.

    A SIGKILL that the node did not send is the kernel's, and that is taken for want of memory, unless the
    worker had used up its CPU time.
    """
    if reason == REASON_PROCESSES:
        return Cause.WORKER_CRASHED, "the worker started more processes than limits.processes allows"
    if reason == REASON_ZYGOTE_DIED:
        return Cause.WORKER_CRASHED, "the capability's zygote died, and the worker with it"
    if reason == REASON_KILLED:
        return Cause.WORKER_CRASHED, "the node ended the worker"
    is_killed = signal_number == signal.SIGKILL or exit_code == 128 + signal.SIGKILL
    if signal_number == signal.SIGXCPU or (is_killed and cpu_ms >= cpu_limit_s * 1000):
        return Cause.TIMED_OUT, f"the worker used its {cpu_limit_s} s of CPU time (limits.cpu_s)"
    if is_killed:
        return Cause.OOM_KILLED, "the worker ran out of memory (limits.memory_mb)"
    if signal_number is not None:
        return Cause.WORKER_CRASHED, f"the worker was ended by {_signal_name(signal_number)}"
    if exit_code == EXIT_OK:
        return Cause.NO_RESULT, "the worker ended well but sent no result"
    return Cause.WORKER_CRASHED, f"the worker ended with exit code {exit_code}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
