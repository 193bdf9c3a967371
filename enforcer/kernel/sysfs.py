"""The machine's CPUs as sysfs shows them: online sets, cores, sockets, NUMA nodes and L3 (uncore) caches.

Files and their meaning: the kernel's Documentation/admin-guide/cputopology.rst and
Documentation/ABI/testing/sysfs-devices-system-cpu. Old kernels have only the mask form of some lists, and no
`online`, `possible` or `present` at all; both are read.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from enforcer.core.cpuset import EMPTY, MAX_CPU, CPUSet
from enforcer.core.errors import CPUSetSyntaxError, TopologyError
from enforcer.core.topology import CPUTopology

UNKNOWN_SOCKET: Final = -1

# What the kernel answers for a file of a CPU that is offline, or goes offline while we read.
_ABSENT: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ENODEV, errno.ENXIO})
_CHUNK: Final = 4096
_TRIES: Final = 4
_NUMBER: Final = re.compile(r"-?\d{1,19}", re.ASCII)
_MAX_CACHES: Final = 16

_CORE: Final = ("core_cpus_list", "thread_siblings_list", "core_cpus", "thread_siblings")
_CACHE: Final = ("shared_cpu_list", "shared_cpu_map")
_NODE: Final = ("cpulist", "cpumap")


@dataclass(frozen=True, slots=True)
class Machine:
    """A node's CPUs. `topology` has the online ones only; `notes` say, for a person, what was missing or odd."""

    topology: CPUTopology
    online: CPUSet
    possible: CPUSet
    present: CPUSet
    isolated: CPUSet
    nohz_full: CPUSet
    smt_active: bool | None  # None: this kernel does not say
    notes: tuple[str, ...]


def read_topology(root: Path = Path("/sys")) -> Machine:
    """Read the machine below `root` (where sysfs is mounted).

    core = lowest online thread of the core; socket = physical_package_id, UNKNOWN_SOCKET where the kernel has none;
    NUMA nodes without CPUs are left out; uncore = L3 cache: its `id`, or its lowest CPU. A CPU that goes on or off
    meanwhile starts the reading over. Raises TopologyError, with the file and what it said, for a file that cannot be
    read or parsed, for cores that contradict each other, and for CPUs that never stop changing.
    """
    base = os.fspath(root)
    for _ in range(_TRIES):
        before = _online(base)
        try:
            machine = _Reader(base, before).machine()
        except TopologyError:
            if _online(base) == before:
                raise
            continue
        if _online(base) == before:
            return machine
    raise TopologyError(
        f"{base}/devices/system/cpu/online changed during each of {_TRIES} readings",
        hint="CPUs go on and off all the time: find who does it; the next rescan tries again",
    )


class _Reader:
    """One pass over sysfs for one set of online CPUs."""

    def __init__(self, base: str, online: CPUSet) -> None:
        self.base = base
        self.cpus = f"{base}/devices/system/cpu"
        self.nodes = f"{base}/devices/system/node"
        self.online = online
        self.notes: list[str] = []
        self.last_index = 3  # where L3 was found last; nearly always the same for the next CPU

    def machine(self) -> Machine:
        if not self.online:
            raise TopologyError(f"{self.cpus}: no CPU is online", hint="is sysfs mounted there?")
        cores, sockets, nodes, caches = self._cores(), self._sockets(), self._numa(), self._uncores()
        self._check_core_sockets(cores, sockets)
        rows = [(cpu, cores[cpu], sockets[cpu], nodes.get(cpu), caches.get(cpu)) for cpu in self.online]
        present = self._list("present") or CPUSet(_cpu_dirs(self.cpus)) | self.online
        return Machine(
            topology=CPUTopology.from_rows(rows),
            online=self.online,
            possible=self._list("possible") or present,
            present=present,
            isolated=self._list("isolated") or EMPTY,
            nohz_full=self._list("nohz_full") or EMPTY,
            smt_active=self._smt_active(),
            notes=tuple(self.notes),
        )

    def _list(self, name: str) -> CPUSet | None:
        return _list_file(f"{self.cpus}/{name}")

    def _smt_active(self) -> bool | None:
        number = _number_file(f"{self.cpus}/smt/active")
        return None if number is None else number > 0

    # cores

    def _cores(self) -> dict[int, int]:
        found = {cpu: self._threads(cpu) for cpu in self.online}
        if missing := CPUSet(cpu for cpu, threads in found.items() if threads is None):
            self.notes.append(f"no topology/core_cpus_list for CPUs {missing}: each is taken as a core of its own")
        threads = {cpu: siblings or CPUSet((cpu,)) for cpu, siblings in found.items()}
        for cpu, siblings in threads.items():
            for other in siblings:
                if threads[other] != siblings:
                    raise TopologyError(
                        f"{self.cpus}: the cores contradict each other: CPU {cpu} says its threads are {siblings}, "
                        f"CPU {other} says {threads[other]}",
                        hint="the firmware or hypervisor describes the cores wrongly",
                    )
        return {cpu: siblings.first for cpu, siblings in threads.items()}

    def _threads(self, cpu: int) -> CPUSet | None:
        found = _set_file(f"{self.cpus}/cpu{cpu}/topology", _CORE)
        if found is None:
            return None
        path, siblings = found
        if cpu not in siblings:
            raise TopologyError(f"{path}: says {str(siblings)!r}, which is without CPU {cpu} itself")
        return siblings & self.online

    # sockets

    def _sockets(self) -> dict[int, int]:
        """By CPU. CPUs without a package id form one socket, UNKNOWN_SOCKET, as for cAdvisor and so the kubelet."""
        sockets = {}
        for cpu in self.online:
            number = _number_file(f"{self.cpus}/cpu{cpu}/topology/physical_package_id")
            sockets[cpu] = UNKNOWN_SOCKET if number is None or number < 0 else number
        if unknown := CPUSet(cpu for cpu, socket in sockets.items() if socket == UNKNOWN_SOCKET):
            self.notes.append(f"no physical_package_id for CPUs {unknown}: taken as one socket, {UNKNOWN_SOCKET}")
        return sockets

    def _check_core_sockets(self, cores: Mapping[int, int], sockets: Mapping[int, int]) -> None:
        for cpu, core in cores.items():
            if sockets[cpu] != sockets[core]:
                raise TopologyError(
                    f"{self.cpus}/cpu{cpu}/topology/physical_package_id: says {sockets[cpu]}, but CPU {core} of the "
                    f"same core says {sockets[core]}",
                    hint="the firmware or hypervisor describes the sockets wrongly",
                )

    # NUMA nodes

    def _numa(self) -> dict[int, int]:
        """By CPU; without an entry where no node, or more than one, claims the CPU."""
        claims: dict[int, list[int]] = {}
        for node, cpus in self._node_cpus():
            for cpu in cpus & self.online:
                claims.setdefault(cpu, []).append(node)
        if twice := CPUSet(cpu for cpu, nodes in claims.items() if len(nodes) > 1):
            named = sorted({node for cpu in twice for node in claims[cpu]})
            self.notes.append(f"{self.nodes}: nodes {named} all list CPUs {twice}: their NUMA node is not known")
        found = {cpu: nodes[0] for cpu, nodes in claims.items() if len(nodes) == 1}
        if claims and (lost := self.online - CPUSet(claims)):
            self.notes.append(f"{self.nodes}: no node lists CPUs {lost}: taken as node 0")
        return found

    def _node_cpus(self) -> Iterable[tuple[int, CPUSet]]:
        """(node, its CPUs) from nodeN/cpulist, else from the links cpuN/nodeM."""
        nodes = _numbered(self.nodes, "node")
        for node in nodes:
            if found := _set_file(f"{self.nodes}/node{node}", _NODE):
                yield node, found[1]
        if not nodes:
            for cpu in self.online:
                for node in _numbered(f"{self.cpus}/cpu{cpu}", "node"):
                    yield node, CPUSet((cpu,))

    # L3 caches

    def _uncores(self) -> dict[int, int]:
        """By CPU; without an entry where there is no cache above level 2."""
        shared: dict[int, CPUSet] = {}
        ids: dict[int, int | None] = {}
        for cpu in self.online:
            if (folder := self._cache_folder(cpu)) is not None:
                found = _set_file(folder, _CACHE)
                shared[cpu] = (found[1] & self.online if found else EMPTY) | CPUSet((cpu,))
                ids[cpu] = _number_file(f"{folder}/id")
        if shared and (without := self.online - CPUSet(shared)):
            self.notes.append(f"CPUs {without} have no L3 cache, others have: their socket stands in for it")
        odd = CPUSet(cpu for cpu, group in shared.items() if any(shared.get(other) != group for other in group))
        if odd:
            self.notes.append(f"the L3 caches of CPUs {odd} contradict each other: no L3 is taken as known")
            return {}
        return self._cache_ids(shared, ids)

    def _cache_folder(self, cpu: int) -> str | None:
        """The folder of the CPU's L3 cache, or of its deepest cache above level 2 (cAdvisor's rule)."""
        deepest, chosen = 2, None
        folder = f"{self.cpus}/cpu{cpu}/cache/index"
        for index in (self.last_index, *(i for i in range(_MAX_CACHES) if i != self.last_index)):
            level = _number_file(f"{folder}{index}/level")
            if level == 3:
                self.last_index = index
                return f"{folder}{index}"
            if level is None and index != self.last_index:
                break
            if level is not None and level > deepest:
                deepest, chosen = level, f"{folder}{index}"
        return chosen

    def _cache_ids(self, shared: Mapping[int, CPUSet], ids: Mapping[int, int | None]) -> dict[int, int]:
        """The kernel's ids where each stands for exactly one cache, else the lowest CPU of each cache."""
        pairs = {(ids[cpu], group) for cpu, group in shared.items()}
        caches = len({group for _, group in pairs})
        known = {number for number, _ in pairs if number is not None}
        if len(pairs) == len(known) == caches:
            return {cpu: number for cpu in shared if (number := ids[cpu]) is not None}
        if known:
            self.notes.append(f"{caches} L3 caches have ids {sorted(known)}: each is named by its lowest CPU instead")
        return {cpu: group.first for cpu, group in shared.items()}


def _online(base: str) -> CPUSet:
    """The online CPUs; on kernels without that file, those with a topology and not switched off."""
    folder = f"{base}/devices/system/cpu"
    listed = _list_file(f"{folder}/online")
    if listed is not None:
        return listed
    dirs = (cpu for cpu in _cpu_dirs(folder) if _number_file(f"{folder}/cpu{cpu}/online") != 0)
    return CPUSet(dirs)


def _cpu_dirs(folder: str) -> list[int]:
    return [cpu for cpu in _numbered(folder, "cpu") if cpu <= MAX_CPU]


def _numbered(folder: str, prefix: str) -> list[int]:
    """n of each entry "<prefix>n" of a folder, ascending; nothing when there is no such folder."""
    try:
        names = os.listdir(folder)  # noqa: PTH208 - names are all we need
    except OSError as error:
        if error.errno in _ABSENT:
            return []
        raise _unreadable(folder, error) from error
    found = (re.fullmatch(rf"{prefix}(\d{{1,6}})", name, re.ASCII) for name in names)
    return sorted(int(match[1]) for match in found if match)


def _set_file(folder: str, names: Iterable[str]) -> tuple[str, CPUSet] | None:
    """(path, CPUs) from the first file that is there; names that end in "list" are lists, the others masks."""
    for name in names:
        path = f"{folder}/{name}"
        text = _read(path)
        if text is not None:
            return path, _parsed(path, text, CPUSet.parse if name.endswith("list") else CPUSet.parse_mask)
    return None


def _list_file(path: str) -> CPUSet | None:
    text = _read(path)
    # nohz_full prints a null mask so, on kernels booted without the option
    if text is None or text == "(null)":
        return None
    return _parsed(path, text, CPUSet.parse)


def _parsed(path: str, text: str, parse: Callable[[str], CPUSet]) -> CPUSet:
    try:
        return parse(text)
    except CPUSetSyntaxError as error:
        raise TopologyError(f"{path}: {error.message}") from error


def _number_file(path: str) -> int | None:
    text = _read(path)
    if text is None:
        return None
    if not _NUMBER.fullmatch(text):
        raise TopologyError(f"{path}: wanted a number, found {text[:60]!r}")
    return int(text)


def _read(path: str) -> str | None:
    """A file's text without the white space around it; None when it is not there. Plain os calls: 512 CPUs < 100 ms."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in _ABSENT:
            return None
        raise _unreadable(path, error) from error
    try:
        data = chunk = os.read(fd, _CHUNK)
        while len(chunk) == _CHUNK and len(data) < 64 * _CHUNK:
            chunk = os.read(fd, _CHUNK)
            data += chunk
    except OSError as error:
        if error.errno in _ABSENT:
            return None
        raise _unreadable(path, error) from error
    finally:
        os.close(fd)
    return data.decode("ascii", "replace").strip()


def _unreadable(path: str, error: OSError) -> TopologyError:
    return TopologyError(f"{path}: cannot be read: {error.strerror}", hint="is sysfs mounted there and readable?")
