"""Whether this kernel keeps the CPU masks that threads set for themselves when their cpuset changes.

Kernels before 6.2 overwrite them at each change (commit 8f9ea86fdf99, "sched: Always preserve the user requested
cpumask"). Nothing in /proc or /sys tells, and distributions carry the change back, so it has to be tried out.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from enforcer.core.cpuset import CPUSet
from enforcer.kernel.cgroupfs import CgroupFS


def keeps_user_masks(fs: CgroupFS, online: CPUSet) -> bool | None:
    """Tried with a sleeping child of ours in a cgroup made for it, both gone afterwards; None = it cannot be tried.

    The child asks for one CPU, its cpuset is narrowed to another one and widened to both: what is left of its wish?
    """
    if len(online) < 2:
        return None
    wished, other = sorted(online)[:2]
    path = f"/cpuset-enforcer-probe-{os.getpid()}"
    try:
        with _cgroup(fs, path), _sleeper(wished) as pid:
            return _tried(fs, path, pid, wished, other)
    except OSError:
        return None


def _tried(fs: CgroupFS, path: str, pid: int, wished: int, other: int) -> bool | None:
    both = CPUSet((wished, other))
    if not (fs.write_cpus(path, both).ok and fs.copy_mems(path).ok):
        return None
    Path(fs.cpuset_dir(path), "cgroup.procs").write_text(str(pid))
    if os.sched_getaffinity(pid) != {wished}:
        return None if os.sched_getaffinity(pid) != {wished, other} else False
    if not (fs.write_cpus(path, CPUSet((other,))).ok and fs.write_cpus(path, both).ok):
        return None
    return os.sched_getaffinity(pid) == {wished}


@contextmanager
def _cgroup(fs: CgroupFS, path: str) -> Iterator[None]:
    folder = Path(fs.cpuset_dir(path))
    folder.mkdir()
    try:
        yield
    finally:
        folder.rmdir()


@contextmanager
def _sleeper(cpu: int) -> Iterator[int]:
    pid = os.fork()
    if pid == 0:
        try:
            signal.pause()
        finally:
            os._exit(0)
    try:
        os.sched_setaffinity(pid, {cpu})
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
