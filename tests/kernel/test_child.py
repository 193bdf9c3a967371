"""The helper process beside the agent: it never keeps the loop, leaves no zombie, and ends with the agent."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from enforcer.child import Child

SLEEP = (sys.executable, "-c", "import time; time.sleep(600)")


class Clock:
    """Monotonic seconds that a test moves on."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def child(clock: Clock) -> Iterator[Child]:
    one = Child("the helper", SLEEP, clock)
    yield one
    one.close()


def helpers() -> list[int]:
    """Our children: running ones and zombies."""
    found = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [int(pid) for pid in found]


def wait_readable(child: Child) -> None:
    assert select.select([child.fileno()], [], [], 10)[0]


def test_killed_again_and_again_it_comes_back_later_each_time(child: Child, clock: Clock) -> None:
    before = helpers()
    waits = []
    for _ in range(9):
        clock.now = child.due()
        child.tick()
        (pid,) = set(helpers()) - set(before)
        os.kill(pid, signal.SIGKILL)
        wait_readable(child)
        began = time.monotonic()
        child.take()
        assert time.monotonic() - began < 0.1
        assert helpers() == before, "a zombie is left"
        waits.append(child.due() - clock.now)
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_one_that_lived_well_comes_back_soon(child: Child, clock: Clock) -> None:
    for lived, wait in ((0, 1), (0, 2), (61, 1)):
        before = set(helpers())
        clock.now = child.due()
        child.tick()
        (pid,) = set(helpers()) - before
        clock.now += lived
        os.kill(pid, signal.SIGKILL)
        wait_readable(child)
        child.take()
        assert child.due() - clock.now == wait


def test_without_pidfds_nothing_is_left_running(
    child: Child, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(pid: int) -> int:
        raise OSError(38, "Function not implemented")

    before = helpers()
    monkeypatch.setattr(os, "pidfd_open", refused)
    for wait in (1, 2):
        clock.now = child.due()
        child.tick()
        assert helpers() == before
        assert child.due() - clock.now == wait
    assert "cannot be started" in caplog.text


def test_a_program_that_is_not_there(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    one = Child("the helper", ("/nowhere/at/all",), clock)
    one.tick()
    assert "cannot be started" in caplog.text
    assert one.due() == clock.now + 1


def test_it_leaves_no_descriptor_behind(child: Child, clock: Clock) -> None:
    count = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        before = set(helpers())
        clock.now = child.due()
        child.tick()
        (pid,) = set(helpers()) - before
        os.kill(pid, signal.SIGKILL)
        wait_readable(child)
        child.take()
    assert len(os.listdir("/proc/self/fd")) == count


def test_it_ends_with_its_parent_though_that_is_killed() -> None:
    inner = (
        "import sys, time; from enforcer.child import die_with; "
        "die_with(int(sys.argv[1])); print('up', flush=True); time.sleep(600)"
    )
    script = (
        f"import os, subprocess, sys, time; command = [sys.executable, '-c', {inner!r}, str(os.getpid())]; "
        "print(subprocess.Popen(command).pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        lines = {parent.stdout.readline().strip(), parent.stdout.readline().strip()}
        (pid,) = (int(line) for line in lines if line != "up")
        pidfd = os.pidfd_open(pid)
        parent.kill()
        assert select.select([pidfd], [], [], 10)[0], "it outlived its parent"
        os.close(pidfd)
