"""The agent's own place: on the reserved CPUs, and ahead of the rest there, without ever being able to hog them.

All errors are told, none is raised: an agent that cannot have its priority still does its work.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final, Literal

from enforcer.core.cpuset import CPUSet

NICE: Final = -19
FIFO_PRIORITY: Final = 1  # the lowest real-time one: before all ordinary tasks, behind every other real-time task

_TASKS: Final = "/proc/self/task"
_PASSES: Final = 8
_REAL_TIME: Final = frozenset({os.SCHED_FIFO, os.SCHED_RR})
_KILL_AFTER: Final = 10  # times the run-time limit


@dataclass(frozen=True, slots=True)
class PriorityReport:
    """What the calling thread got, and what was refused, with the reason, for a person."""

    policy: Literal["fifo", "nice", "normal"]
    problems: tuple[str, ...] = ()


def pin_self(cpus: CPUSet) -> tuple[str, ...]:
    """Put every thread of this process on `cpus`; returns what did not work, nothing when all did.

    Threads made later inherit it from their maker. The kernel keeps a thread within its cpuset: where `cpus` is not
    a part of that, the thread gets what both have in common, and the difference is told.
    """
    if not cpus:
        return ("cannot keep the agent on its own CPUs: the set of them is empty",)
    problems: dict[int, str] = {}
    done: set[int] = set()
    # a thread not yet pinned may make another while we go through them: until a pass finds no new one
    for _ in range(_PASSES):
        new = [tid for tid in _own_threads() if tid not in done]
        if not new:
            break
        done.update(new)
        problems |= {tid: problem for tid in new if (problem := _pin(tid, cpus))}
    return tuple(sorted(set(problems.values())))


def raise_priority(fifo: bool, *, limit: float = 0.5, on_demotion: Callable[[], None] | None = None) -> PriorityReport:
    """Put the calling thread ahead: SCHED_FIFO 1 if `fifo`, else, or where that is refused, nice -19.

    A real-time thread that runs `limit` seconds without once going to sleep is taken for a runaway and demoted to an
    ordinary one; `on_demotion` is then called in the main thread, between two of its instructions: let it only set a
    flag. Neither FIFO nor nice goes over to threads and processes that the calling thread makes (SCHED_RESET_ON_FORK).
    For FIFO this has to be called in the main thread, as only there Python runs signal handlers.
    """
    problems = []
    if fifo:
        refused = _guard(limit, on_demotion) or _set_fifo()
        if not refused:
            return PriorityReport("fifo")
        problems.append(f"SCHED_FIFO {refused}; nice {NICE} instead")
    refused = _set_nice()
    if not refused:
        return PriorityReport("nice", tuple(problems))
    return PriorityReport("normal", (*problems, f"nice {NICE} {refused}"))


def demote() -> tuple[str, ...]:
    """Make every real-time thread of this process an ordinary one; returns what did not work."""
    problems = []
    for tid in _own_threads():
        try:
            if _policy(tid) in _REAL_TIME:
                os.sched_setscheduler(tid, os.SCHED_OTHER | os.SCHED_RESET_ON_FORK, os.sched_param(0))
        except ProcessLookupError:
            continue
        except OSError as error:
            problems.append(f"thread {tid} stays real-time: {error.strerror}")
    return tuple(problems)


def _pin(tid: int, cpus: CPUSet) -> str | None:
    try:
        os.sched_setaffinity(tid, cpus)
        got = CPUSet(os.sched_getaffinity(tid))
    except ProcessLookupError:
        return None
    except OSError as error:
        why = "none of them is online and in its cpuset" if error.errno == errno.EINVAL else error.strerror
        return f"cannot keep the agent on CPUs {cpus}: {why}; its cpuset is wrong for the reserved CPUs"
    return (
        None if got == cpus else f"the agent is on CPUs {got}, not {cpus}: its cpuset or offline CPUs forbid the rest"
    )


def _own_threads() -> list[int]:
    return [int(entry.name) for entry in Path(_TASKS).iterdir()]


def _policy(tid: int) -> int:
    return os.sched_getscheduler(tid) & ~os.SCHED_RESET_ON_FORK


def _set_fifo() -> str | None:
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(FIFO_PRIORITY))
    except OSError as error:
        # sched(7): besides CAP_SYS_NICE, CONFIG_RT_GROUP_SCHED with no budget in cpu.rt_runtime_us answers EPERM too
        return f"refused: {error.strerror} (needs CAP_SYS_NICE, and on cgroup v1 a cpu.rt_runtime_us above 0)"
    return None


def _set_nice() -> str | None:
    """For the calling thread: on Linux `who` 0 is the thread, not the process (setpriority(2))."""
    try:
        os.sched_setscheduler(0, os.SCHED_OTHER | os.SCHED_RESET_ON_FORK, os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, 0, NICE)
    except OSError as error:
        return f"refused: {error.strerror} (needs CAP_SYS_NICE)"
    return None


def _guard(limit: float, on_demotion: Callable[[], None] | None) -> str | None:
    """See to it that a runaway real-time thread is stopped; returns why that cannot be done.

    RLIMIT_RTTIME (getrlimit(2)) counts the time that a real-time thread runs between two sleeps. At the soft limit
    the kernel sends SIGXCPU, again for each further second, and our handler makes all our threads ordinary ones. Python
    runs it in the main thread at its next instruction: a thread that loops in C, or the interpreter's lock held by
    it, is not reached that way, and for those the hard limit's SIGKILL is left, and the service manager's restart.
    Without the handler SIGXCPU would end the process, so no handler, no FIFO.
    """
    if threading.current_thread() is not threading.main_thread():
        return "not asked for: only the main thread can be watched for running away"
    soft, hard = _rttime(limit)
    try:
        signal.signal(signal.SIGXCPU, _demoter(on_demotion))
        resource.setrlimit(resource.RLIMIT_RTTIME, (soft, hard))
    except (OSError, ValueError) as error:
        return f"not asked for: its run-time limit cannot be set: {error}"
    return None


def _rttime(limit: float) -> tuple[int, int]:
    """(soft, hard) in microseconds, never above the limits we have: raising a hard limit needs CAP_SYS_RESOURCE."""
    wanted = int(limit * 1_000_000)
    had_hard = resource.getrlimit(resource.RLIMIT_RTTIME)[1]
    hard = wanted * _KILL_AFTER
    if had_hard != resource.RLIM_INFINITY:
        hard = min(hard, had_hard)
    return min(wanted, hard), hard


def _demoter(on_demotion: Callable[[], None] | None) -> Callable[[int, FrameType | None], None]:
    def handler(_signal: int, _frame: FrameType | None) -> None:
        demote()
        if on_demotion is not None:
            on_demotion()

    return handler
