"""HotplugMonitor on this kernel's netlink, with uevents that the kernel makes on request; no CPU changes its state."""

from __future__ import annotations

import os
import selectors
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from enforcer.core.errors import CannotWorkHereError
from enforcer.kernel.hotplug import LOST, HotplugEvent, HotplugMonitor

TOP = Path(__file__).resolve().parents[2]
CPU = max(os.sched_getaffinity(0))
UEVENT = Path(f"/sys/devices/system/cpu/cpu{CPU}/uevent")
CHANGE = HotplugEvent(CPU, "change")
real = pytest.mark.skipif(not os.access(UEVENT, os.W_OK), reason=f"{UEVENT} is not writable: needs root and sysfs")


@dataclass
class Device:
    sys_name: str
    action: str | None


@dataclass
class FakeMonitor:
    waiting: list[Device]

    def fileno(self) -> int:
        raise AssertionError("no socket here")

    def poll(self, timeout: float | None = None) -> Device | None:
        assert timeout == 0, "drain() must never block"
        return self.waiting.pop(0) if self.waiting else None


@pytest.fixture
def monitor() -> Iterator[HotplugMonitor]:
    yield HotplugMonitor.open()


@real
@pytest.mark.root
def test_event_wakes_a_selector_and_is_drained(monitor: HotplugMonitor) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(monitor.fileno(), selectors.EVENT_READ)
        assert not selector.select(timeout=0)
        UEVENT.write_text("change")
        assert selector.select(timeout=2)
        assert monitor.drain() == [CHANGE]
        assert not selector.select(timeout=0)
    assert (monitor.skipped, monitor.lost) == (0, 0)


@real
@pytest.mark.root
def test_drain_without_events_returns_at_once(monitor: HotplugMonitor) -> None:
    assert monitor.drain() == []


@real
@pytest.mark.root
def test_other_subsystems_are_not_reported(monitor: HotplugMonitor) -> None:
    other = next((path for path in Path("/sys/class/mem").glob("*/uevent") if os.access(path, os.W_OK)), None)
    if other is None:
        pytest.skip("no other device here whose uevent file can be written")
    other.write_text("change")
    UEVENT.write_text("change")
    # the filter may use up one drain() on the foreign message
    assert monitor.drain() + monitor.drain() == [CHANGE]


@real
@pytest.mark.root
def test_overflow_is_told_once_and_the_monitor_goes_on(monitor: HotplugMonitor) -> None:
    with socket.socket(fileno=os.dup(monitor.fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    for _ in range(50):
        UEVENT.write_text("change")
    events = monitor.drain()
    assert events[0] == HotplugEvent(None, LOST)
    assert monitor.lost == 1
    rest = monitor.drain()
    assert rest and len(rest) < 50 and set(rest) == {CHANGE}
    UEVENT.write_text("change")
    assert monitor.drain() == [CHANGE]


def test_messages_about_no_cpu_are_skipped_and_counted() -> None:
    bad = [Device("cpufreq", "add"), Device("cpu", "add"), Device("cpu3", None), Device("cpu999999", "offline")]
    monitor = HotplugMonitor(FakeMonitor([*bad, Device("cpu5", "offline"), Device("cpu5", "online")]))
    assert monitor.drain() == [HotplugEvent(5, "offline"), HotplugEvent(5, "online")]
    assert monitor.skipped == 4


def test_a_storm_leaves_the_loop_its_turn() -> None:
    monitor = HotplugMonitor(FakeMonitor([Device("cpu1", "online")] * 1500))
    assert len(monitor.drain()) == 1024
    assert len(monitor.drain()) == 476


@pytest.mark.parametrize("error", [OSError("netlink refused"), ImportError("no library named udev")])
def test_refused_netlink_says_what_still_works(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyudev

    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(pyudev.Monitor, "from_netlink", refuse)
    with pytest.raises(CannotWorkHereError, match=f"{error}.*timed rescan"):
        HotplugMonitor.open()


def test_pyudev_is_not_loaded_before_it_is_used() -> None:
    code = "import sys, enforcer.kernel.hotplug; sys.exit('pyudev' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=30, cwd=TOP).returncode == 0
