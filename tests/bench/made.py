"""A node of plain files on tmpfs: writes cost what an open and a write cost, so that what is timed is the agent.

Nothing in here follows the kernel's rules (tests/fakefs/cgroup_tree.py does, at a price that grows with the tree): a
set that is written takes effect, and that is all. Cgroups are made aside and moved into place with all their files.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from enforcer.core.cpulimits import DEFAULT_PERIOD, milli_to_quota, milli_to_shares, shares_to_weight_linear
from enforcer.core.cpuset import CPUSet
from enforcer.core.kubepods import QoSClass
from enforcer.core.topology import CPUTopology
from enforcer.kernel.cgroupfs import CgroupFS
from enforcer.kernel.sysfs import Machine

ROOT = "/kubepods"
MIX = (QoSClass.BURSTABLE,) * 30 + (QoSClass.BESTEFFORT,) * 7 + (QoSClass.GUARANTEED,) * 3  # 150/35/15 of 200
ALL_GUARANTEED = (QoSClass.GUARANTEED,)
_SHARED_MILLI = {QoSClass.BURSTABLE: 250, QoSClass.BESTEFFORT: 0, QoSClass.GUARANTEED: 500}
_MEMORY = "/dev/shm"


class PlainFS(CgroupFS):
    """The product's CgroupFS on plain files: what is written is whole, and is in force. `writes` counts sets."""

    writes = 0

    def _store(self, filename: str, data: bytes) -> tuple[int | None, str | None]:
        directory, _, name = filename.rpartition("/")
        try:
            found = _overwrite(filename, data)
            if name == "cpuset.cpus":
                self.writes += 1
                _overwrite(directory + self._effective_cpus, data)
        except OSError as error:
            return error.errno, None
        return None, found


def _overwrite(filename: str, data: bytes) -> str:
    fd = os.open(filename, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.pwrite(fd, data, 0)
        os.ftruncate(fd, len(data))
        return os.pread(fd, 4096, 0).decode()
    finally:
        os.close(fd)


def machine(cpus: int) -> Machine:
    """Two threads to a core, eight cores to an L3 cache, two sockets from 16 CPUs on."""
    cores, sockets = cpus // 2, 2 if cpus >= 16 else 1
    rows = ((cpu, cpu % cores, cpu % cores * sockets // cores) for cpu in range(cpus))
    online = CPUSet(range(cpus))
    topology = CPUTopology.from_rows((cpu, core, socket, socket, core // 8) for cpu, core, socket in rows)
    return Machine(topology, online, online, online, CPUSet(), CPUSet(), True, ())


class MadeNode:
    """A node's tree; close() takes it away. `pid` is the process that sits in every container."""

    def __init__(self, version: int, cpus: int, pid: int = 0) -> None:
        self.version, self.cpus, self.pid = version, cpus, pid or os.getpid()
        self.folder = Path(tempfile.mkdtemp(prefix="ce-bench-", dir=_MEMORY if Path(_MEMORY).is_dir() else None))
        self._made = 0
        self.top = self.folder / "top"
        self._aside = self.folder / "aside"
        for one in (self.top, self._aside, *((self.top / n for n in ("cpuset", "cpu")) if version == 1 else ())):
            one.mkdir()
        for name, files in self._files(0, 0, 0, root=True).items():
            self._fill(self.top / name, files)
        found = PlainFS.discover(cgroup_root=str(self.top))
        assert isinstance(found, PlainFS)
        self.fs = found
        self.group(ROOT)
        for qos in (QoSClass.BURSTABLE, QoSClass.BESTEFFORT):
            self.group(self.place(qos))

    def place(self, qos: QoSClass) -> str:
        """The cgroup that holds the pods of a class."""
        return ROOT if qos is QoSClass.GUARANTEED else f"{ROOT}/{qos.value}"

    def group(self, path: str, milli: int = 0, *, quota: bool = False, pid: int = 0) -> str:
        """A cgroup with limits for an amount of CPU. Answers its path."""
        for name, files in self._files(milli, milli if quota else 0, pid).items():
            made = self._aside / str(self._made)
            self._made += 1
            made.mkdir()
            self._fill(made, files)
            made.rename(self.top / name / path.strip("/"))
        return path

    def pod(self, qos: QoSClass, milli: int) -> str:
        """A pod's cgroup; a Guaranteed one has its quota. Answers its path."""
        self._made += 1
        uid = f"5a3e7f0c-1111-4222-8333-{self._made:012x}"
        return self.group(f"{self.place(qos)}/pod{uid}", milli, quota=qos is QoSClass.GUARANTEED)

    def container(self, pod: str, milli: int, *, quota: bool = False, pid: int = 0) -> str:
        """A container's cgroup with the given process in it. Answers its path."""
        self._made += 1
        return self.group(f"{pod}/{self._made:064x}", milli, quota=quota, pid=pid or self.pid)

    def fill(self, pods: int, mix: tuple[QoSClass, ...] = MIX) -> None:
        """That many pods with one shared container each, the classes spread as in the mix."""
        for number in range(pods):
            qos = mix[number * 17 % len(mix)]
            self.container(self.pod(qos, _SHARED_MILLI[qos]), _SHARED_MILLI[qos], quota=qos is QoSClass.GUARANTEED)

    def write_weight(self, path: str, milli: int) -> None:
        """v2: what a runtime writes just before the quota."""
        _overwrite(f"{self.fs.cpu_dir(path)}/cpu.weight", str(shares_to_weight_linear(milli_to_shares(milli))).encode())

    def write_quota(self, path: str, milli: int) -> None:
        """The write that makes a container an owner."""
        name, text = _quota(self.version, milli)
        directory = self.fs.cpu_dir(path)
        _overwrite(f"{directory}/{name}", text.encode())

    def cpus_file(self, path: str) -> Path:
        """Where a cgroup's set is."""
        return Path(self.fs.cpuset_dir(path), "cpuset.cpus")

    def remove(self, path: str) -> None:
        """A cgroup goes with all that is in it, at once, as a cgroup does: its files are not deleted one by one."""
        for directory in {self.fs.cpuset_dir(path), self.fs.cpu_dir(path)}:
            gone = self._aside / str(self._made)
            self._made += 1
            Path(directory).rename(gone)
            shutil.rmtree(gone)

    def describe(self, file: Path, **more: object) -> None:
        """For tests.bench.agent in another process."""
        file.write_text(json.dumps({"top": str(self.top), "cpus": self.cpus, **more}))

    def close(self) -> None:
        """Takes everything away; can be called again."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> MadeNode:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _files(self, milli: int, limit: int, pid: int, *, root: bool = False) -> Mapping[str, dict[str, str]]:
        every = f"0-{self.cpus - 1}"
        shares = milli_to_shares(milli)
        quota = dict([_quota(self.version, limit)])
        procs = {"cgroup.procs": str(pid) if pid else "", "cpuset.mems": "0" if self.version == 1 else ""}
        if self.version == 1:
            cpu = {"cpu.shares": str(shares), "cpu.cfs_period_us": str(DEFAULT_PERIOD), **quota}
            return {"cpuset": {**procs, "cpuset.cpus": every, "cpuset.effective_cpus": every}, "cpu": cpu}
        control = {"cgroup.controllers": "cpuset cpu", "cgroup.subtree_control": "cpuset cpu"}
        if root:
            return {"": {**control, "cgroup.procs": ""}}
        weight = {"cpu.weight": str(shares_to_weight_linear(shares)), **quota}
        return {"": {**procs, **control, **weight, "cpuset.cpus": "", "cpuset.cpus.effective": every}}

    @staticmethod
    def _fill(directory: Path, files: Mapping[str, str]) -> None:
        for name, text in files.items():
            (directory / name).write_text(f"{text}\n")


def _quota(version: int, milli: int) -> tuple[str, str]:
    quota = milli_to_quota(milli, DEFAULT_PERIOD) if milli else 0
    if version == 1:
        return "cpu.cfs_quota_us", str(quota or -1)
    return "cpu.max", f"{quota or 'max'} {DEFAULT_PERIOD}"
