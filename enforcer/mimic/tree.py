"""The cgroups of the mimic: makes them in both hierarchies as the kubelet and runc do, and takes them away again."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Final

from enforcer.core.cpulimits import DEFAULT_PERIOD, milli_to_quota, milli_to_shares, shares_to_weight_linear
from enforcer.core.node import parent_of
from enforcer.kernel.cgroupfs import CgroupFS

_RMDIR_WAIT: Final = 2.0


class Tree:
    """Cgroups below the mount points, by path. All raise OSError with the file's name when the kernel refuses.

    Only what was made here is removed, with everything that others made inside it.
    """

    def __init__(self, fs: CgroupFS) -> None:
        self.fs = fs
        self._made: list[str] = []

    def make_group(self, path: str) -> None:
        """A cgroup in both hierarchies as the kubelet leaves it: on v1 with its parent's CPUs and nodes."""
        self.make_cpuset(path)
        if self.fs.version == 1:
            self.copy_from_parent(path, "cpuset.cpus")
            self.copy_from_parent(path, "cpuset.mems")
        self.make_cpu(path)

    def make_cpuset(self, path: str) -> None:
        """The directory in the cpuset hierarchy; on v2 with the controllers switched on above it."""
        for step in self.fs.enable_cpuset(path):
            if not step.ok:
                raise OSError(step.errno or 0, "cpuset is refused in cgroup.subtree_control", step.path)
        self._enable_cpu(path)
        self._mkdir(self.fs.cpuset_dir(path))

    def make_cpu(self, path: str) -> None:
        """The directory in the cpu hierarchy, where that is another one."""
        self._enable_cpu(path)
        self._mkdir(self.fs.cpu_dir(path))

    def copy_from_parent(self, path: str, file: str) -> None:
        """v1: fills an empty file with the parent's text, as libcontainer does: reads first, then writes."""
        if not _read(f"{self.fs.cpuset_dir(path)}/{file}"):
            write(f"{self.fs.cpuset_dir(path)}/{file}", _read(f"{self.fs.cpuset_dir(parent_of(path))}/{file}"))

    def write_cpus(self, path: str, cpus: str) -> None:
        """cpuset.cpus."""
        write(f"{self.fs.cpuset_dir(path)}/cpuset.cpus", cpus)

    def attach(self, path: str, pid: int, *, cpu: bool) -> None:
        """Puts a process into the cgroup, in the cpu hierarchy or in the one of the cpusets."""
        write(f"{self.fs.cpu_dir(path) if cpu else self.fs.cpuset_dir(path)}/cgroup.procs", str(pid))

    def write_shares(self, path: str, milli: int) -> None:
        """cpu.shares for an amount of CPU, or on v2 the cpu.weight that runc before 1.3.2 makes of them."""
        shares = milli_to_shares(milli)
        if self.fs.cpu_version == 1:
            write(f"{self.fs.cpu_dir(path)}/cpu.shares", str(shares))
        else:
            write(f"{self.fs.cpu_dir(path)}/cpu.weight", str(shares_to_weight_linear(shares)))

    def write_period(self, path: str, period: int) -> None:
        """v1: cpu.cfs_period_us, which runc writes before the quota. Nothing on v2, where one file has both."""
        if self.fs.cpu_version == 1:
            write(f"{self.fs.cpu_dir(path)}/cpu.cfs_period_us", str(period))

    def write_quota(self, path: str, milli: int, period: int = DEFAULT_PERIOD) -> None:
        """The quota for an amount of CPU."""
        quota = milli_to_quota(milli, period)
        if self.fs.cpu_version == 1:
            write(f"{self.fs.cpu_dir(path)}/cpu.cfs_quota_us", str(quota or -1))
        else:
            write(f"{self.fs.cpu_dir(path)}/cpu.max", f"{quota or 'max'} {period}")

    def remove_group(self, path: str) -> None:
        """Removes a cgroup and what is in it; one that has gone is no error."""
        for directory in dict.fromkeys((self.fs.cpuset_dir(path), self.fs.cpu_dir(path))):
            if directory in self._made:
                self._made.remove(directory)
                for error in _remove(directory):
                    raise error

    def close(self) -> None:
        """Removes everything that was made here, the deepest first; goes on after a failure and raises it last."""
        failed: list[OSError] = []
        while self._made:
            failed += _remove(self._made.pop())
        if failed:
            raise failed[0]

    def _enable_cpu(self, path: str) -> None:
        if self.fs.cpu_version != 2:
            return
        here = ""
        for name in path.strip("/").split("/"):
            control = f"{self.fs.cpu_root}{here}/cgroup.subtree_control"
            if "cpu" not in _read(control).split():
                write(control, "+cpu")
            here = f"{here}/{name}"

    def _mkdir(self, directory: str) -> None:
        if not Path(directory).is_dir():
            # Noted first: an exception of a signal handler may come between the two.
            self._made.append(directory)
            Path(directory).mkdir()


def write(filename: str, text: str) -> None:
    """One write(2) as runc does it, without O_TRUNC; raises OSError with what was written and the file's name."""
    fd = os.open(filename, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    except OSError as error:
        raise OSError(error.errno, f"writing {text!r}: {error.strerror}", filename) from error
    finally:
        os.close(fd)


def _read(filename: str) -> str:
    return Path(filename).read_text().strip()


def _remove(directory: str) -> list[OSError]:
    """Removes a cgroup and all below it; answers what could not be done."""
    failed: list[OSError] = []
    for below in Path(directory).glob("*/"):
        failed += _remove(str(below))
    deadline = time.monotonic() + _RMDIR_WAIT
    while not failed:
        try:
            Path(directory).rmdir()
            break
        except FileNotFoundError:
            break
        except OSError as error:
            # A process that has just ended is in its cgroup for a moment longer.
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                failed.append(error)
        time.sleep(0.002)
    return failed
