"""CPUs that go offline and come online, told by the kernel's uevents (pyudev).

No cpuset file tells of hotplug (no inotify event, on v1 nor v2), so this is the only source that does. It listens to
the kernel's own multicast group, which has the events also where no udevd runs, and before udevd's rules have run.
"""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass
from typing import Any, Final, Protocol

from enforcer.core.cpuset import MAX_CPU
from enforcer.core.errors import CannotWorkHereError

LOST: Final = "lost"

_CPU: Final = re.compile(r"cpu(\d{1,6})", re.ASCII)
_BUFFER: Final = 1 << 20  # bytes; a CPU's uevent is about 200, a hotplug of 512 CPUs sends 3 for each
_MOST: Final = 1024  # messages in one drain(): a storm must not keep the loop from its other sources
_HINT: Final = "the timed rescan finds changes of the online CPUs, only later"


@dataclass(frozen=True, slots=True)
class HotplugEvent:
    """`action` is the kernel's word: "offline", "online", "add", "remove", "change".

    LOST, with cpu None, stands for messages that were dropped because nobody read them in time: any CPU may have
    changed. An event carries no state: read the online CPUs again.
    """

    cpu: int | None
    action: str


class Device(Protocol):
    """What is used of a pyudev.Device."""

    @property
    def action(self) -> str | None: ...
    @property
    def sys_name(self) -> str: ...


class Monitor(Protocol):
    """What is used of a pyudev.Monitor that listens already."""

    def fileno(self) -> int: ...
    def poll(self, timeout: float | None = None) -> Device | None: ...


class HotplugMonitor:
    """For a selectors loop: when fileno() is readable, call drain(). Not safe for use by two threads at a time."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor
        self.skipped = 0  # messages that are about no CPU we know how to name
        self.lost = 0  # times that the socket overflowed

    @classmethod
    def open(cls, context: object | None = None) -> HotplugMonitor:
        """Listen from now on; `context` is a pyudev.Context, made when None.

        Raises CannotWorkHereError where libudev is missing or the netlink socket is refused; the caller goes on
        without, as the timed rescan sees the same changes.
        """
        try:
            # late: pyudev and libudev are memory that the commands which do not listen need not pay for
            import pyudev

            untyped: Any = pyudev
            monitor = untyped.Monitor.from_netlink(context or untyped.Context(), source="kernel")
            monitor.filter_by("cpu")
            monitor.start()
        except (ImportError, OSError) as error:
            told = f"CPU hotplug: cannot listen to the kernel's uevents: {error}"
            raise CannotWorkHereError(told, hint=_HINT) from error
        _widen(monitor.fileno())
        return cls(monitor)

    def fileno(self) -> int:
        """The netlink socket, for a selector."""
        return self._monitor.fileno()

    def drain(self) -> list[HotplugEvent]:
        """The events that wait, oldest first; never blocks, never raises for a bad message.

        Stops after 1024 messages or a loss; what is left keeps fileno() readable.
        """
        events: list[HotplugEvent] = []
        for _ in range(_MOST):
            try:
                device = self._monitor.poll(timeout=0)
            except OSError:
                events.append(self._overflow())
                break
            if device is None:
                break
            event = _event(device)
            if event is None:
                self.skipped += 1
            else:
                events.append(event)
        return events

    def _overflow(self) -> HotplugEvent:
        """Take ENOBUFS off the socket. pyudev's poll() sees POLLERR and raises before it would read the error away."""
        with socket.socket(fileno=os.dup(self.fileno())) as same:
            same.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        self.lost += 1
        return HotplugEvent(None, LOST)


def _event(device: Device) -> HotplugEvent | None:
    match = _CPU.fullmatch(device.sys_name)
    if match is None or not device.action or int(match[1]) > MAX_CPU:
        return None
    return HotplugEvent(int(match[1]), device.action)


def _widen(fd: int) -> None:
    """A best effort: SO_RCVBUF stops at net.core.rmem_max, and a loss is seen and told in any case."""
    with socket.socket(fileno=os.dup(fd)) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
