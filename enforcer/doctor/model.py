"""What a check says, and where doctor looks and how it tries things."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from enforcer.core.errors import EnforcerError
from enforcer.core.kubepods import shown
from enforcer.kernel.cgroupfs import CgroupFS
from enforcer.kernel.hotplug import HotplugMonitor
from enforcer.kernel.sysfs import Machine
from enforcer.kernel.usermask import keeps_user_masks
from enforcer.kernel.watch import Watcher
from enforcer.kernel.writers import WriterWatch
from enforcer.observe import FILES


class Level(StrEnum):
    """OK: will work. WARNING: will work with less, or may surprise. FAIL: this will not work, or enforce refuses."""

    OK = "ok"
    WARNING = "warning"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at. `fatal`: without it nothing works here at all."""

    name: str
    level: Level
    evidence: str
    remedy: str = ""
    fatal: bool = False


def ok(name: str, evidence: str) -> Check:
    """What works."""
    return Check(name, Level.OK, evidence)


def warning(name: str, evidence: str, remedy: str) -> Check:
    """What works with less."""
    return Check(name, Level.WARNING, evidence, remedy)


def fail(name: str, evidence: str, remedy: str, *, fatal: bool = False) -> Check:
    """What does not work."""
    return Check(name, Level.FAIL, evidence, remedy, fatal)


def _open_writers(root: str) -> None:
    WriterWatch(root).close()


def _open_uevents() -> None:
    HotplugMonitor.open()


def _open_inotify() -> None:
    Watcher(FILES).close()


def _ask_systemd() -> None:
    # jeepney is only loaded where it is asked for
    from enforcer.kernel.systemd import UnitProperties

    UnitProperties.connect(timeout=2.0).close()


def _try_fifo() -> None:
    """For a moment, and back."""
    before, parameter = os.sched_getscheduler(0), os.sched_getparam(0)
    os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    os.sched_setscheduler(0, before, parameter)


@dataclass(frozen=True)
class Place:
    """Where to look, and how to try what only trying tells; a test gives its own. The tries raise OSError or one of
    our errors when refused."""

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    run: Path = Path("/run")
    cgroup_root: str | None = None
    root_user: Callable[[], bool] = lambda: os.geteuid() == 0
    writers: Callable[[str], None] = _open_writers
    uevents: Callable[[], None] = _open_uevents
    inotify: Callable[[], None] = _open_inotify
    systemd: Callable[[], None] = _ask_systemd
    fifo: Callable[[], None] = _try_fifo
    user_masks: Callable[[CgroupFS, Machine], bool | None] = lambda fs, machine: keeps_user_masks(fs, machine.online)


def tried(name: str, attempt: Callable[[], None], good: str, level: Level, remedy: str) -> Check:
    """`good` when the attempt succeeds, else why it was refused."""
    try:
        attempt()
    except EnforcerError as error:
        return Check(name, level, shown(error.message, 400), error.hint or remedy)
    except OSError as error:
        return Check(name, level, f"refused: {error.strerror}", remedy)
    return Check(name, Level.OK, good)
