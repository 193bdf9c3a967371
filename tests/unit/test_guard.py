"""The guard of tests/conftest.py itself: each way out is shut, and what is allowed works."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

BREACHES: dict[str, Callable[[], object]] = {
    "write_text": lambda: Path("/proc/self/comm").write_text("x"),
    "os.open": lambda: os.open("/proc/self/comm", os.O_WRONLY),
    "read and write": lambda: os.open(b"/proc/self/comm", os.O_RDWR),
    "touch": lambda: Path("/sys/fs/cgroup/ce-test-guard").touch(),
    "mkdir": lambda: Path("/sys/fs/cgroup/ce-test-guard").mkdir(),
    "rmdir": lambda: Path("/sys/fs/cgroup/ce-test-guard").rmdir(),
    "run": lambda: subprocess.run(["true"], check=True),
    "system": lambda: os.system("true"),
    "fork": os.fork,
}


@pytest.mark.parametrize("breach", BREACHES.values(), ids=BREACHES.keys())
def test_breach_is_stopped_and_no_handler_eats_it(
    machine_guard: type[BaseException], breach: Callable[[], object]
) -> None:
    with pytest.raises(machine_guard), contextlib.suppress(Exception):
        breach()


def test_through_a_symlink(machine_guard: type[BaseException], tmp_path: Path) -> None:
    (tmp_path / "fake").symlink_to("/proc/self")
    with pytest.raises(machine_guard):
        (tmp_path / "fake" / "comm").write_text("x")


def test_reading_the_kernel_and_writing_elsewhere_are_allowed(tmp_path: Path) -> None:
    (tmp_path / "sys").mkdir()
    (tmp_path / "sys" / "cpuset.cpus").write_text("0-3")
    (tmp_path / "sys" / "link").symlink_to("/proc/self/comm")
    assert (tmp_path / "sys" / "link").read_text()
    (tmp_path / "sys" / "link").unlink()
