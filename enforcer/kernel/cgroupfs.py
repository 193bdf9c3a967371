"""One node's cpuset and cpu cgroup hierarchies, v1, v2 or hybrid: reads them, and writes sets and what came of it.

A cgroup is named by its path below the mount ("/kubepods/pod1"), the same in both hierarchies. A cgroup can go at any
moment: readers answer None for that, writers `gone`. Rules of the kernel: cpuset(7), admin-guide/cgroup-v2 "Cpuset".
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from errno import (
    EACCES,
    EBUSY,
    EINVAL,
    ENAMETOOLONG,
    ENODEV,
    ENOENT,
    ENOSPC,
    ENOTDIR,
    EOPNOTSUPP,
    EPERM,
    ERANGE,
    EROFS,
)
from typing import Final

from enforcer.core.cpulimits import CPULimits, CPULimitsError, parse_v1, parse_v2
from enforcer.core.cpuset import EMPTY, CPUSet
from enforcer.core.errors import CPUSetSyntaxError, EnforcerError
from enforcer.kernel.cgroupmounts import Hierarchy, carrier, of_folder, of_mounts
from enforcer.kernel.procfs import read_mountinfo

_GONE: Final = frozenset((ENOENT, ENODEV))  # ENOENT at open; ENODEV at a write through a descriptor opened before
# No cgroup that could be named: a file on the way, or cgroups nested below PATH_MAX (mkdir(2) by relative paths).
_NO_PATH: Final = frozenset((ENOTDIR, ENAMETOOLONG))
_CHUNK: Final = 4096


@dataclass(frozen=True, slots=True)
class WriteResult:
    """What came of one write to cpuset.cpus. `wanted` empty = cleared, so that the parent's set counts (v2)."""

    path: str
    wanted: CPUSet
    found: CPUSet | None  # cpuset.cpus, read back
    effective: CPUSet | None  # where its tasks may run now
    errno: int | None
    gone: bool
    version: int = 2

    @property
    def ok(self) -> bool:
        """The kernel took the set and no task in there may run outside it."""
        if self.errno is not None or self.gone or self.found != self.wanted:
            return False
        return not self.wanted or EMPTY < (self.effective or EMPTY) <= self.wanted

    @property
    def missing(self) -> CPUSet:
        """CPUs that were asked for and cannot be used: offline, or withheld by an ancestor (v2)."""
        return self.wanted - (self.effective or EMPTY)


@dataclass(frozen=True, slots=True)
class MemsResult:
    """What came of one write to cpuset.mems; `wanted` and `found` are lists of NUMA nodes ("0-1")."""

    path: str
    wanted: str
    found: str | None
    errno: int | None
    gone: bool
    version: int = 1

    @property
    def ok(self) -> bool:
        """The kernel took the nodes."""
        if self.errno is not None or self.gone or self.found is None:
            return False
        return CPUSet.parse(self.found) == CPUSet.parse(self.wanted)


@dataclass(frozen=True, slots=True)
class EnableStep:
    """One level where cpuset was missing in cgroup.subtree_control; `procs` are those that stand in the way (EBUSY)."""

    path: str
    errno: int | None
    procs: tuple[int, ...] = ()

    @property
    def ok(self) -> bool:
        """The controller is on at this level now, as read back."""
        return self.errno is None


class CgroupFS:
    """The cpuset and the cpu hierarchy of one node; on v2, or when mounted together, they are the same.

    `version` and `cpu_version` are 1 or 2, of the hierarchy that carries cpuset and cpu; the roots are mount points.
    """

    def __init__(self, version: int, cpuset_root: str, cpu_version: int, cpu_root: str) -> None:
        self.version = version
        self.cpuset_root = cpuset_root
        self.cpu_version = cpu_version
        self.cpu_root = cpu_root
        kind = "effective_{}" if version == 1 else "{}.effective"
        self._effective_cpus = "/cpuset." + kind.format("cpus")
        self._effective_mems = "/cpuset." + kind.format("mems")

    # finding the hierarchies

    @classmethod
    def discover(cls, proc_root: str = "/proc", cgroup_root: str | None = None) -> CgroupFS:
        """The hierarchies of the mounts in `proc_root`/self/mountinfo, or of what lies below the folder `cgroup_root`.

        Raises CannotWorkHereError when no cpuset or no cpu controller is to be had.
        """
        return cls.of(of_mounts(read_mountinfo(proc_root)) if cgroup_root is None else of_folder(cgroup_root))

    @classmethod
    def of(cls, hierarchies: Iterable[Hierarchy]) -> CgroupFS:
        """As `discover`, from the hierarchies given."""
        seen = list(hierarchies)
        cpuset = carrier("cpuset", seen)
        cpu = carrier("cpu", seen)
        return cls(cpuset.version, cpuset.point, cpu.version, cpu.point)

    def cpuset_dir(self, path: str) -> str:
        """The directory of a cgroup in the cpuset hierarchy."""
        return self.cpuset_root if path == "/" else self.cpuset_root + path

    def cpu_dir(self, path: str) -> str:
        """The directory of a cgroup in the cpu hierarchy; on v2 the same as `cpuset_dir`."""
        return self.cpu_root if path == "/" else self.cpu_root + path

    def path_of(self, directory: str) -> str | None:
        """The cgroup whose directory, in either hierarchy, this is; None for a directory elsewhere."""
        for root in (self.cpuset_root, self.cpu_root):
            if directory == root:
                return "/"
            if directory.startswith(root) and directory[len(root)] == "/":
                return directory[len(root) :]
        return None

    # reading; None = the cgroup, or the file in it, has gone

    def exists(self, path: str) -> bool:
        """Whether the cgroup is there, in the cpuset hierarchy."""
        return _stat(self.cpuset_root + path) is not None

    def children(self, path: str) -> list[str] | None:
        """The names of the cgroups directly below, in no order; bytes that are not UTF-8 come as surrogates."""
        try:
            with os.scandir(self.cpuset_root + path) as entries:
                return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        except OSError as error:
            if error.errno not in _GONE and error.errno not in _NO_PATH:
                raise _unreadable(self.cpuset_root + path, error) from error
            return None

    def descendants(self, path: str) -> list[str]:
        """All cgroups below, deepest first: each stands before its parent. Empty when there is none, or it has gone.

        Without those whose path is longer than PATH_MAX: no call takes it.
        """
        base = "" if path == "/" else path
        found = [f"{base}/{name}" for name in self.children(path) or ()]
        for one in found:  # grows while it is walked: parents before children, hence reversed below
            found.extend(f"{one}/{name}" for name in self.children(one) or ())
        found.reverse()
        return found

    def read_cpus(self, path: str) -> CPUSet | None:
        """cpuset.cpus: the set asked for; empty on v2 = the parent's counts."""
        return self._read_set(self.cpuset_root + path + "/cpuset.cpus")

    def read_effective(self, path: str) -> CPUSet | None:
        """The set in force: cpuset.cpus.effective, on v1 cpuset.effective_cpus."""
        return self._read_set(self.cpuset_root + path + self._effective_cpus)

    def read_mems(self, path: str) -> str | None:
        """cpuset.mems: a list of NUMA nodes."""
        return _stripped(self._read(self.cpuset_root + path + "/cpuset.mems"))

    def read_effective_mems(self, path: str) -> str | None:
        """The NUMA nodes in force."""
        return _stripped(self._read(self.cpuset_root + path + self._effective_mems))

    def read_limits_texts(self, path: str) -> tuple[str, ...] | None:
        """The CPU limits as the kernel writes them: (cpu.max, cpu.weight), on v1 (shares, cfs_quota_us, cfs_period_us).

        None also where the cpu controller is not enabled. v1: three reads, a change may be seen halfway.
        """
        names = _V1_LIMITS if self.cpu_version == 1 else _V2_LIMITS
        texts = []
        for name in names:
            text = self._read(self.cpu_root + path + name)
            if text is None:
                return None
            texts.append(text.strip())
        return tuple(texts)

    def read_limits(self, path: str) -> CPULimits | None:
        """The CPU limits, in microseconds; raises CPULimitsError when the files say what no kernel says."""
        texts = self.read_limits_texts(path)
        if texts is None:
            return None
        try:
            return parse_v1(*texts) if self.cpu_version == 1 else parse_v2(*texts)
        except CPULimitsError as error:
            raise CPULimitsError(f"{self.cpu_root + path}: {error.message}") from error

    def procs(self, path: str) -> list[int]:
        """The processes in this cgroup itself (0: outside our PID namespace); of a threaded cgroup its threads."""
        directory = self.cpuset_root + path
        try:
            text = self._read(directory + "/cgroup.procs")
        except EnforcerError as error:
            # cgroup-v2 "Threads": cgroup.procs of a threaded cgroup cannot be read
            if not isinstance(error.__cause__, OSError) or error.__cause__.errno != EOPNOTSUPP:
                raise
            text = self._read(directory + "/cgroup.threads")
        return [int(pid) for pid in (text or "").split()]

    def populated(self, path: str) -> bool:
        """Whether any process is in this cgroup or below it."""
        if self.version == 2:
            text = self._read(self.cpuset_root + path + "/cgroup.events")
            return text is not None and "populated 1" in text
        return bool(self.procs(path)) or any(self.procs(below) for below in self.descendants(path))

    def owner_uid(self, path: str) -> int | None:
        """The user who owns the directory: what is not root's may have been made by anyone."""
        found = _stat(self.cpuset_root + path)
        return found.st_uid if found else None

    def cgroup_id(self, path: str) -> int | None:
        """The kernel's id of the cgroup, as eBPF sees it (kernfs node id = inode number)."""
        found = _stat(self.cpuset_root + path)
        return found.st_ino if found else None

    # writing

    def write_cpus(self, path: str, cpus: CPUSet) -> WriteResult:
        """Gives the cgroup a set and reads back what came of it. Raises ValueError for the empty set."""
        if not cpus:
            raise ValueError(f"{path}: an empty set is never written to cpuset.cpus")
        return self._write_cpus(path, cpus, str(cpus).encode())

    def clear_cpus(self, path: str, possible: CPUSet) -> WriteResult:
        """Takes the set away again: v2 clears it, so that the parent's counts; v1 gives it the parent's.

        v2 before 7.x refuses to clear while tasks are inside (ENOSPC); all `possible` CPUs then mean the same.
        """
        if self.version == 1:
            parent = self.read_cpus(_parent(path))
            return self.write_cpus(path, parent or possible)
        result = self._write_cpus(path, EMPTY, b"\n")
        return self.write_cpus(path, possible) if result.errno == ENOSPC else result

    def set_mems(self, path: str, text: str) -> MemsResult:
        """Gives the cgroup NUMA nodes ("0-1"). Raises ValueError for an empty text."""
        if not text.strip():
            raise ValueError(f"{path}: an empty list is never written to cpuset.mems")
        code, found = self._store(self.cpuset_root + path + "/cpuset.mems", text.encode())
        return MemsResult(path, text, _stripped(found), code, self._is_gone(path, code, found), self.version)

    def copy_mems(self, path: str) -> MemsResult:
        """v1: a new cgroup takes no CPUs' tasks before it has nodes: gives it its parent's, if it has none yet.

        An ancestor without any gets its own parent's first.
        """
        mems = self.read_mems(path)
        if mems is None:
            return MemsResult(path, "", None, ENOENT, True, self.version)
        if mems or self.version == 2 or path == "/":
            return MemsResult(path, mems, mems, None, False, self.version)
        above = self.copy_mems(_parent(path))
        return self.set_mems(path, above.found) if above.ok and above.found else above

    def enable_cpuset(self, path: str) -> list[EnableStep]:
        """v2: switches cpuset on in cgroup.subtree_control of all ancestors, from the root down, where it is missing.

        Answers the levels that were written, empty when nothing was to do; stops at the first that refused, which is
        then the last. Never takes a controller away: the kubelet takes a pod without one for lost (kubernetes#131567).
        """
        steps: list[EnableStep] = []
        if self.version == 1:
            return steps
        for level in _ancestors(path):
            step = self._enable_one(level)
            if step is not None:
                steps.append(step)
                if not step.ok:
                    break
        return steps

    def _enable_one(self, level: str) -> EnableStep | None:
        filename = self.cpuset_root + level + "/cgroup.subtree_control"
        if "cpuset" in (self._read(filename) or "").split():
            return None
        # cgroup-v2 "No Internal Process Constraint". With threaded controllers only the kernel may take it all the
        # same, and makes every child "domain invalid", so that no container can start in there: ask first.
        if level != "/" and (procs := self.procs(level)):
            return EnableStep(level, EBUSY, tuple(procs))
        code, found = self._store(filename, b"+cpuset")
        if code is None and "cpuset" not in (found or "").split():
            code = ENODEV if found is None else EINVAL
        return EnableStep(level, code, tuple(self.procs(level)) if code == EBUSY else ())

    def _write_cpus(self, path: str, wanted: CPUSet, data: bytes) -> WriteResult:
        directory = self.cpuset_root + path
        code, found = self._store(directory + "/cpuset.cpus", data)
        effective = self._read_set(directory + self._effective_cpus)
        gone = self._is_gone(path, code, found)
        read_back = None if found is None else CPUSet.parse(found)
        return WriteResult(path, wanted, read_back, effective, code, gone, self.version)

    def _is_gone(self, path: str, code: int | None, found: str | None) -> bool:
        # v2: the directory is there, its file is not = the controller is not enabled above: an error, not an end
        return (code in _GONE or found is None) and not self.exists(path)

    # the two places that touch a file's content

    def _read(self, filename: str) -> str | None:
        try:
            fd = os.open(filename, os.O_RDONLY | os.O_CLOEXEC)
            try:
                return _slurp(fd)
            finally:
                os.close(fd)
        except OSError as error:
            if error.errno not in _GONE and error.errno not in _NO_PATH:
                raise _unreadable(filename, error) from error
            return None

    def _store(self, filename: str, data: bytes) -> tuple[int | None, str | None]:
        """One write and the content after it: (errno of a refusal, text; None when it has gone)."""
        try:
            # Without O_TRUNC: that would be a second IN_MODIFY for all who watch, before the value is in.
            fd = os.open(filename, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            return error.errno, None if error.errno in _GONE else self._read(filename)
        code = None
        try:
            os.pwrite(fd, data, 0)
        except OSError as error:
            code = error.errno
        try:
            return code, _slurp(fd)
        except OSError as error:
            return code or error.errno, None
        finally:
            os.close(fd)

    def _read_set(self, filename: str) -> CPUSet | None:
        text = self._read(filename)
        if text is None:
            return None
        try:
            return CPUSet.parse(text)
        except CPUSetSyntaxError as error:
            raise CPUSetSyntaxError(f"{filename}: {error.message}") from error


def describe(result: WriteResult | MemsResult | EnableStep) -> str:
    """What came of a write, for a log line: path, wanted, found, why, what to do."""
    if isinstance(result, EnableStep):
        return _describe_enable(result)
    if result.gone:
        return f"{result.path}: has gone; nothing to do"
    file = "cpuset.cpus" if isinstance(result, WriteResult) else "cpuset.mems"
    wanted = f"{result.path}: {file} wanted {_shown(result.wanted)}, found {_shown(result.found)}"
    if result.errno is not None:
        why = _WHY.get((result.version, result.errno)) or _WHY_ANY.get(result.errno) or os.strerror(result.errno)
        return f"{wanted}: {why}"
    if isinstance(result, WriteResult):
        return wanted + _describe_effect(result)
    return wanted if result.ok else f"{wanted}: another writer was faster"


def _describe_effect(result: WriteResult) -> str:
    if result.found != result.wanted:
        return ": another writer was faster; see who it is, two managers of one set will fight"
    if not result.ok:
        return (
            f", without effect: its tasks run on {_shown(result.effective)} (none of its CPUs is online and allowed by"
            " every cgroup above it: widen those, or bring the CPUs online)"
        )
    if result.missing:
        return f", of which {result.missing} cannot be used (offline, or not in the set of a cgroup above it)"
    return ""


def _describe_enable(step: EnableStep) -> str:
    what = f"{step.path}: cpuset in cgroup.subtree_control"
    if step.ok:
        return f"{what}: switched on"
    if step.errno == EBUSY and step.procs:
        pids = ", ".join(map(str, step.procs[:10])) + (", ..." if len(step.procs) > 10 else "")
        return f"{what}: refused (EBUSY), processes sit in this cgroup itself: {pids}; move them into a child of it"
    if step.errno == ENOENT:
        return f"{what}: refused (ENOENT), cgroup.controllers here lacks cpuset; it must be enabled or delegated above"
    if step.errno == ENODEV:
        return f"{what}: has gone"
    return f"{what}: refused ({os.strerror(step.errno or 0)})"


def _shown(value: CPUSet | str | None) -> str:
    return "nothing" if value is None else str(value) or "none"


# by version and errno; the table "illegal write" is measured on 6.1 (v1) and 6.1, 6.12, 7.3 (v2)
_WHY: Final = {
    (1, EACCES): "refused (EACCES), the parent cgroup does not have all of it; widen the parents first, from the top",
    (1, EBUSY): "refused (EBUSY), a cgroup below it has more; narrow those first, the deepest first",
    (1, EINVAL): "refused (EINVAL), a CPU or node is offline, or a neighbour has it with cpuset.cpu_exclusive=1",
    (1, ENOSPC): "refused (ENOSPC), tasks inside would be left without a CPU or node; cpuset.mems must be set first",
    (2, EINVAL): "refused (EINVAL), the kernel does not take it as a list, or it takes CPUs of an exclusive partition",
    (2, ENOSPC): "refused (ENOSPC), it cannot be cleared while tasks are inside; write all possible CPUs instead",
    (2, ENOENT): "no such file: the cpuset controller is not enabled in cgroup.subtree_control of a cgroup above it",
    (2, EBUSY): "refused (EBUSY), tasks or a partition below need what it would lose",
}
_WHY_ANY: Final = {
    ERANGE: "refused (ERANGE), there can be no such CPU or node here; compare /sys/devices/system/cpu/possible",
    EACCES: "refused (EACCES); run as root, with write access to the cgroup file system",
    EPERM: "refused (EPERM); run as root, with write access to the cgroup file system",
    EROFS: "refused (EROFS), cgroups are mounted read-only here; mount them writable (ProtectControlGroups=no)",
}

_V1_LIMITS: Final = ("/cpu.shares", "/cpu.cfs_quota_us", "/cpu.cfs_period_us")
_V2_LIMITS: Final = ("/cpu.max", "/cpu.weight")


def _parent(path: str) -> str:
    return path.rpartition("/")[0] or "/"


def _ancestors(path: str) -> list[str]:
    """From "/" down to the parent."""
    pieces = path.strip("/").split("/")
    return ["/", *("/" + "/".join(pieces[:depth]) for depth in range(1, len(pieces)))] if path != "/" else []


def _stripped(text: str | None) -> str | None:
    return None if text is None else text.strip()


def _stat(name: str) -> os.stat_result | None:
    try:
        return os.stat(name)
    except OSError as error:
        if error.errno in _GONE or error.errno in _NO_PATH:
            return None
        raise _unreadable(name, error) from error


def _slurp(fd: int) -> str:
    piece = data = os.pread(fd, _CHUNK, 0)
    # A seq_file ends a read early only when its next record (a pid) would not fit: much shorter means the end.
    while len(piece) > _CHUNK - 64:
        piece = os.pread(fd, _CHUNK, len(data))
        data += piece
    return data.decode("utf-8", "surrogateescape")


def _unreadable(filename: str, error: OSError) -> EnforcerError:
    return EnforcerError(f"cannot read {filename}: {error.strerror}", hint="run as root on the node itself")
