"""Cgroups of a test's own at the top of the real hierarchies, taken away again whatever happens."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from enforcer.kernel.cgroupfs import CgroupFS

_number = itertools.count()


class TmpCgroup:
    """A cgroup in the real cpuset and cpu hierarchies, with CPUs and nodes; `path` is its name below both."""

    def __init__(self, fs: CgroupFS, path: str) -> None:
        self.fs = fs
        self.path = path
        self.harmless = ("notify_on_release", "0") if fs.version == 1 else ("cgroup.max.depth", "max")
        """A file of every cgroup, and a text that changes nothing when written to it."""

    def mkdir(self, name: str = "") -> str:
        """A cgroup below (or itself), in both hierarchies; on v1 filled with its parent's set. Answers its path."""
        path = self.path + name
        self.fs.enable_cpuset(path)
        for directory in {self.fs.cpuset_dir(path), self.fs.cpu_dir(path)}:
            os.mkdir(directory)
        self.fs.copy_mems(path)
        parent = self.fs.read_cpus(os.path.dirname(path))
        if self.fs.version == 1 and parent:
            self.fs.write_cpus(path, parent)
        return path

    def rmdir(self, path: str) -> None:
        """Takes a cgroup and all below it away; tasks still in there move to the top first."""
        for one in (*self.fs.descendants(path), path):
            self._evict(one)
            for directory in {self.fs.cpuset_dir(one), self.fs.cpu_dir(one)}:
                if os.path.isdir(directory):
                    os.rmdir(directory)

    def write(self, path: str, file: str, text: str) -> None:
        """One write(2) as a shell or a runtime does it, O_TRUNC included."""
        with Path(self.fs.cpuset_dir(path), file).open("w") as out:
            out.write(text)

    def _evict(self, path: str) -> None:
        for pid in self.fs.procs(path):
            try:
                Path(self.fs.cpuset_root, "cgroup.procs").write_text(str(pid))
            except ProcessLookupError:
                continue
        deadline = time.monotonic() + 2
        while self.fs.procs(path) and time.monotonic() < deadline:
            time.sleep(0.01)


@pytest.fixture
def tmp_cgroup() -> Iterator[TmpCgroup]:
    """A fresh cgroup "/ce-test-<pid>-<n>" in the real hierarchies. Skips, with the reason, where there are none."""
    if os.geteuid() != 0:
        pytest.skip("needs root to make cgroups")
    fs = CgroupFS.discover()
    made = TmpCgroup(fs, f"/ce-test-{os.getpid()}-{next(_number)}")
    try:
        made.mkdir()
        yield made
    finally:
        made.rmdir(made.path)


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 5) -> None:
    """Waits, without eating a core, until the condition holds; fails with `what` when it does not in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {seconds} s: {what}")
        time.sleep(0.002)
