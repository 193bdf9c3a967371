"""The one process of a mimicked container: runc's init first, the user's program later."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import warnings
from typing import Final

from enforcer.core.cpuset import CPUSet
from enforcer.core.errors import EnforcerError

_PR_SET_PDEATHSIG: Final = 1
_INIT_COMM: Final = "runc:[2:INIT]"
_libc: Final = ctypes.CDLL(None)


class Process:
    """A forked child that waits under runc's name until start_user_code(), then sleeps or spins under its own.

    It runs nothing else of this program, ignores what the terminal sends, and dies with the thread that made it.
    """

    def __init__(self, comm: str, *, spin: bool) -> None:
        go, self._go = os.pipe()
        self._record, record = os.pipe()
        self._recorded: CPUSet | None = None
        self.pid = _fork(go, record, comm, spin)
        os.close(go)
        os.close(record)
        # Nobody may see it in the cgroup before it has runc's name.
        os.read(self._record, 1)

    def start_user_code(self) -> None:
        """The exec of the user's binary."""
        os.write(self._go, b"g")

    def recorded(self, timeout: float) -> CPUSet:
        """What its own sched_getaffinity said at its first instruction; raises EnforcerError when it did not run."""
        if self._recorded is None:
            ready, _, _ = select.select([self._record], [], [], timeout)
            text = os.read(self._record, 65536).decode() if ready else ""
            if not text:
                raise EnforcerError(f"process {self.pid} did not come to its first instruction within {timeout:g} s")
            self._recorded = CPUSet.parse(text)
        return self._recorded

    def end(self) -> None:
        """Kills it and waits until it has gone."""
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._go)
        os.close(self._record)


def _fork(go: int, record: int, comm: str, spin: bool) -> int:
    parent = os.getpid()
    with warnings.catch_warnings():
        # Python 3.12 warns of a fork beside threads; the child takes no locks, it makes a few system calls.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        try:
            _child(go, record, parent, comm, spin)
        finally:
            os._exit(1)
    return pid


def _child(go: int, record: int, parent: int, comm: str, spin: bool) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        return
    # Others' pipes and sockets must not stay open through us.
    go, record = os.dup(go), os.dup(record)
    os.dup2(go, 0)
    os.dup2(record, 1)
    os.closerange(2, 1 << 20)
    _rename(_INIT_COMM)
    os.write(1, b"i")
    if os.read(0, 1) != b"g":
        return
    _rename(comm)
    os.write(1, str(CPUSet(os.sched_getaffinity(0))).encode())
    while spin:
        pass
    os.read(0, 1)


def _rename(comm: str) -> None:
    fd = os.open("/proc/self/comm", os.O_WRONLY)
    os.write(fd, comm.encode())
    os.close(fd)
