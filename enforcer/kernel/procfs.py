"""What /proc says about processes, threads, mounts and cgroups (proc(5)).

A process that is gone is a normal answer, None: it may go at any moment, also between open() and read(). `root` is
where procfs is mounted. The functions for a pid are for hot paths: plain os calls, a few microseconds each.
"""

from __future__ import annotations

import errno
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from enforcer.core.cpuset import CPUSet
from enforcer.core.errors import EnforcerError

PROC: Final = "/proc"

_GONE: Final = frozenset({errno.ENOENT, errno.ESRCH, errno.ENOTDIR})
_CHUNK: Final = 16384
_ESCAPE: Final = re.compile(rb"\\([0-7]{3})")
_START_TIME: Final = 19  # field 22 of stat, counted from the one behind the name


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of mountinfo: `root` is the directory of the file system that is seen at `mount_point`."""

    mount_id: int
    parent_id: int
    device: str
    root: str
    mount_point: str
    options: tuple[str, ...]
    fstype: str
    source: str
    super_options: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CgroupMembership:
    """One line of /proc/<pid>/cgroup: v2 has hierarchy 0 and no controllers; `path` is as seen in our namespace."""

    hierarchy: int
    controllers: tuple[str, ...]
    path: str


def read_mountinfo(root: str | Path = PROC) -> list[Mount]:
    """The mounts of our mount namespace in mount order; a later one may hide an earlier at the same mount point.

    Raises EnforcerError when it cannot be read and, with the line, for a line that is not mountinfo.
    """
    path = Path(root) / "self" / "mountinfo"
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise EnforcerError(f"{path}: cannot be read: {error.strerror}", hint="is procfs mounted there?") from error
    return [_mount(path, line) for line in lines if line]


def own_cgroups(root: str | Path = PROC) -> list[CgroupMembership]:
    """The cgroups of this process; raises EnforcerError for a line that is not of that file's form."""
    found = _cgroups(f"{root}/self/cgroup")
    if found is None:
        raise EnforcerError(f"{root}/self/cgroup: not there", hint="is procfs mounted there?")
    return found


def cgroups(pid: int, root: str | Path = PROC) -> list[CgroupMembership] | None:
    """The cgroups of a process, as own_cgroups(); a removed cgroup's path ends in " (deleted)"."""
    return _cgroups(f"{root}/{pid}/cgroup")


def boot_id(root: str | Path = PROC) -> str:
    """The random id of this boot; raises EnforcerError when it cannot be read."""
    data = _read(f"{root}/sys/kernel/random/boot_id")
    if not data:
        raise EnforcerError(f"{root}/sys/kernel/random/boot_id: not there", hint="is procfs mounted there?")
    return data.decode("ascii", "replace").strip()


def comm(pid: int, root: str | Path = PROC) -> str | None:
    """The name of the main thread, at most 15 bytes for user tasks; bytes that are no text are kept (os.fsdecode)."""
    data = _read(f"{root}/{pid}/comm")
    return None if data is None else os.fsdecode(data.removesuffix(b"\n"))


def exe_name(pid: int, root: str | Path = PROC) -> str | None:
    """The last part of the executable's path; None for kernel threads too, and where we may not look."""
    try:
        target = os.readlink(f"{root}/{pid}/exe")  # noqa: PTH115 - hot
    except OSError as error:
        if error.errno in _GONE or isinstance(error, PermissionError):
            return None
        raise
    return target.removesuffix(" (deleted)").rpartition("/")[2]


def threads(pid: int, root: str | Path = PROC) -> list[int] | None:
    """The thread ids of a process, as the kernel lists them."""
    try:
        return [int(name) for name in os.listdir(f"{root}/{pid}/task")]  # noqa: PTH208 - hot
    except OSError as error:
        if error.errno in _GONE:
            return None
        raise


def cpus_allowed(pid: int, tid: int | None = None, root: str | Path = PROC) -> CPUSet | None:
    """The CPUs a thread (the main one by default) may use: its own mask within its cpuset.

    It may name CPUs that are offline or do not exist (a fresh task on v1 has the whole possible mask): take what is
    online before writing it anywhere.
    """
    value = _status(pid, tid, b"\nCpus_allowed:\t", root)
    return None if value is None else CPUSet.from_mask(int(value.replace(b",", b""), 16))


def uid(pid: int, root: str | Path = PROC) -> int | None:
    """The effective user id."""
    # of all in /proc, only the pid's own directory belongs to the effective user whether or not the process is
    # dumpable (fs/proc/base.c task_dump_owner); status says the same in four times the time
    try:
        return os.stat(f"{root}/{pid}").st_uid  # noqa: PTH116 - hot
    except OSError as error:
        if error.errno in _GONE:
            return None
        raise


def start_time(pid: int, root: str | Path = PROC) -> int | None:
    """When the process started, in clock ticks since boot: with the pid, it names a process once and for all."""
    data = _read(f"{root}/{pid}/stat")
    # the name stands in parentheses and may hold spaces and parentheses itself
    return None if not data else int(data.rpartition(b")")[2].split()[_START_TIME])


def _status(pid: int, tid: int | None, key: bytes, root: str | Path) -> bytes | None:
    data = _read(f"{root}/{pid}/status" if tid is None else f"{root}/{pid}/task/{tid}/status")
    if not data:
        return None
    start = data.find(key)
    return None if start < 0 else data[start + len(key) : data.find(b"\n", start + len(key))]


def _read(path: str) -> bytes | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in _GONE:
            return None
        raise
    try:
        # these files hand out all of themselves at once, unlike mountinfo, so a short read is the end
        data = chunk = os.read(fd, _CHUNK)
        while len(chunk) == _CHUNK:
            chunk = os.read(fd, _CHUNK)
            data += chunk
    except OSError as error:
        if error.errno in _GONE:
            return None
        raise
    finally:
        os.close(fd)
    return data


def _cgroups(path: str) -> list[CgroupMembership] | None:
    data = _read(path)
    return None if data is None else [_membership(path, line) for line in os.fsdecode(data).split("\n") if line]


def _membership(path: str, line: str) -> CgroupMembership:
    # only the path may hold colons: cgroup names may, controllers and names of hierarchies may not
    hierarchy, _, rest = line.partition(":")
    controllers, colon, cgroup = rest.partition(":")
    if not (hierarchy.isascii() and hierarchy.isdigit() and colon and cgroup.startswith("/")):
        raise EnforcerError(f"{path}: wanted hierarchy:controllers:path, found {line[:200]!r}")
    return CgroupMembership(int(hierarchy), tuple(controllers.split(",")) if controllers else (), cgroup)


def _mount(path: Path, line: bytes) -> Mount:
    # optional fields, any number of them, stand between the options and the lone dash
    before, dash, after = line.partition(b" - ")
    fields = before.split(b" ")
    tail = after.split(b" ")
    if not dash or len(fields) < 6 or len(tail) < 3:
        raise EnforcerError(f"{path}: not a line of mountinfo: {line[:200]!r}")
    try:
        mount_id, parent_id = int(fields[0]), int(fields[1])
    except ValueError as error:
        raise EnforcerError(f"{path}: not a line of mountinfo: {line[:200]!r}") from error
    device, root, mount_point = os.fsdecode(fields[2]), _unescaped(fields[3]), _unescaped(fields[4])
    options, super_options = (tuple(os.fsdecode(text).split(",")) for text in (fields[5], tail[2]))
    fstype, source = os.fsdecode(tail[0]), _unescaped(tail[1])
    return Mount(mount_id, parent_id, device, root, mount_point, options, fstype, source, super_options)


def _unescaped(field: bytes) -> str:
    """Space, tab, newline, backslash and # are written as \\040 and so on."""
    return os.fsdecode(_ESCAPE.sub(lambda match: bytes((int(match[1], 8) & 0xFF,)), field))
