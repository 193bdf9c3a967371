"""Child: keeps one helper process running beside the agent, and started again when it ends."""

from __future__ import annotations

import ctypes
import logging
import os
import select
import signal
import subprocess
from collections.abc import Callable, Sequence
from typing import Final

from enforcer.core.errors import CannotWorkHereError
from enforcer.observe import NOTHING, Dirty

log = logging.getLogger(__name__)

_AGAIN_FIRST: Final = 1.0
_AGAIN_MOST: Final = 60.0
_LIVED_WELL: Final = 60.0
_PR_SET_PDEATHSIG: Final = 1
NEVER: Final = float("inf")


class Child:
    """One process; its end is an event (pidfd), its restart waits longer each time it dies young.

    `fileno` stays the same over restarts. Nothing in here waits.
    """

    def __init__(self, what: str, command: Sequence[str], clock: Callable[[], float]) -> None:
        self._what = what
        self._command = command
        self._clock = clock
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._started = 0.0
        self._again_in = _AGAIN_FIRST
        self._again_at = clock()
        self._epoll = select.epoll()

    def fileno(self) -> int:
        """Readable when the process has ended."""
        return self._epoll.fileno()

    def due(self) -> float:
        """When tick() will start it."""
        return self._again_at

    def tick(self) -> Dirty:
        """Starts it if it is due."""
        if self._clock() >= self._again_at:
            self._again_at = NEVER
            self._start()
        return NOTHING

    def take(self) -> Dirty:
        """To be called when `fileno` is readable."""
        if self._process is not None and self._process.poll() is not None:
            self._ended(self._process.returncode)
        return NOTHING

    def close(self) -> None:
        """Ends it."""
        self._again_at = NEVER
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._forget()

    def _start(self) -> None:
        try:
            process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL)
        except OSError as error:
            self._not_started(error)
            return
        try:
            self._pidfd = os.pidfd_open(process.pid)
        except OSError as error:
            # one whose end cannot be seen would be in the way of the next
            process.kill()
            process.wait()
            self._not_started(error)
            return
        self._process = process
        self._epoll.register(self._pidfd, select.EPOLLIN)
        self._started = self._clock()

    def _not_started(self, error: OSError) -> None:
        log.warning("%s cannot be started: %s", self._what, error)
        self._later()

    def _ended(self, code: int) -> None:
        if self._clock() - self._started > _LIVED_WELL:
            self._again_in = _AGAIN_FIRST
        log.warning("%s ended with %d; started again in %.0f s", self._what, code, self._again_in)
        self._forget()
        self._later()

    def _forget(self) -> None:
        if self._pidfd >= 0:
            self._epoll.unregister(self._pidfd)
            os.close(self._pidfd)
        self._process, self._pidfd = None, -1

    def _later(self) -> None:
        self._again_at = self._clock() + self._again_in
        self._again_in = min(_AGAIN_MOST, self._again_in * 2)


def die_with(parent: int) -> None:
    """In the child: ends this process when its parent does. Raises CannotWorkHereError when that has gone already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        raise CannotWorkHereError("the agent that this process belongs to has gone")
