"""Made cgroup trees: declared in one expression, answering writes as the kernel does, failing when told to.

    fake = tree(tmp_path, {"kubepods": {"cpus": "0-7", "pod1": {"quota": 200000, "c1": {"procs": [10]}}}}, version=1)
    fake.fs.write_cpus("/kubepods/pod1/c1", CPUSet([2, 3]))     # a CgroupFS on the tree
    fake.write("/kubepods/pod1/c1", "cpuset.cpus", "0-7")       # what somebody else does; raises OSError as write(2)
    assert fake.read("/kubepods/pod1/c1", "cpuset.effective_cpus") == "0-7"

The rules are those measured on real kernels (v1: 6.1; v2: 6.1 and 6.12, `modern` = 7.3); tests/kernel compares the v1
rules with the kernel it runs on. Partitions and exclusive sets are not modelled.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from enforcer.core.cpuset import EMPTY, CPUSet
from enforcer.core.errors import CPUSetSyntaxError
from enforcer.kernel.cgroupfs import CgroupFS

Spec = Mapping[str, Any]
V1_SHORT = {"quota": "cpu.cfs_quota_us", "period": "cpu.cfs_period_us", "shares": "cpu.shares"}
V2_SHORT = {"weight": "cpu.weight", "max": "cpu.max", "subtree_control": "cgroup.subtree_control"}
SHORT = {"cpus": "cpuset.cpus", "mems": "cpuset.mems"}
V1_CPU_FILES = {"cpu.shares": "1024", "cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "-1"}
V2_CPU_FILES = {"cpu.weight": "100", "cpu.max": "max 100000"}
CONTROLLERS = "cpuset cpu memory"
THREADED = {"cpuset", "cpu"}  # cgroup-v2 "Threads": those that can divide the threads of one process


def tree(
    tmp_path: Path, spec: Spec, version: int = 2, online: str = "0-7", possible: str = "", nodes: str = "0",
    modern: bool = False,
) -> FakeCgroup:  # fmt: skip
    """A tree of cgroups below `tmp_path`. A dict in `spec` is a cgroup; other values are its files, by their full name
    or in short: cpus, mems, procs (a list), owner (a uid), v1 quota, period, shares, v2 max, weight, quota with period,
    subtree_control. What is not said is as a running node has it: v1 the parent's set, v2 none, all controllers on.
    """
    fake = FakeCgroup(tmp_path, version, CPUSet.parse(online), CPUSet.parse(possible or online), nodes, modern)
    fake.build("/", spec)
    fake.settle()
    fake._note_tasks()
    return fake


class FakeCgroup:
    """One made node. `fs` reads and writes it as the product does; the methods are what kernel and others do to it."""

    def __init__(
        self, top: Path, version: int, online: CPUSet, possible: CPUSet, nodes: str, modern: bool
    ) -> None:
        self.top = top
        self.version = version
        self.online = online
        self.possible = possible
        self.nodes = CPUSet.parse(nodes)
        self.modern = modern
        self.effective = "cpuset.effective_{}" if version == 1 else "cpuset.{}.effective"
        for folder in ("cpuset", "cpu") if version == 1 else ("",):
            (top / folder).mkdir(exist_ok=True)
        self._make("/")
        self.fs = RuleWriter(self)

    # looking

    def file(self, path: str, name: str) -> Path:
        """Where a file of a cgroup is."""
        folder = "" if self.version == 2 else "cpu" if name.startswith("cpu.") else "cpuset"
        return self.top / folder / path.strip("/") / name

    def read(self, path: str, name: str) -> str:
        """A file's content without the newline; raises FileNotFoundError."""
        return self.file(path, name).read_text().strip()

    def cpus(self, path: str, name: str = "cpuset.cpus") -> CPUSet:
        """A file's content as a set; empty when the file is not there."""
        return CPUSet.parse(self.read(path, name)) if self.file(path, name).exists() else EMPTY

    def where(self, path: str) -> CPUSet:
        """The CPUs that the tasks in there may run on."""
        return self.cpus(path, self.effective.format("cpus"))

    def procs(self, path: str) -> list[int]:
        """The processes in the cgroup itself."""
        return [int(pid) for pid in self.read(path, "cgroup.procs").split()]

    def paths(self, below: str = "/") -> list[str]:
        """All cgroups from there on, parents first."""
        folder = self.file(below, "x").parent
        found = [Path(directory) for directory, _, _ in os.walk(folder)]
        return sorted("/" + str(one.relative_to(self.file("/", "x").parent)).strip(".") for one in found)

    # what happens on a node

    def mkdir(self, path: str) -> None:
        """A fresh cgroup as the kernel makes it: on v1 without CPUs and nodes, in both hierarchies."""
        self.mkdir_cpuset(path)
        if self.version == 1:
            self.mkdir_cpu(path)

    def mkdir_cpuset(self, path: str) -> None:
        """In the cpuset hierarchy only (v2: the only one)."""
        self.file(path, "x").parent.mkdir()
        self._make(path)
        self.settle(path)

    def mkdir_cpu(self, path: str) -> None:
        """v1: in the cpu hierarchy only."""
        self.file(path, "cpu.x").parent.mkdir()
        self._fill(path, {**V1_CPU_FILES})

    def rmdir(self, path: str) -> None:
        """As rmdir(2): EBUSY with tasks or children inside."""
        if self._populated(path) or len(self.paths(path)) > 1:
            raise _error(errno.EBUSY)
        self.vanish(path)

    def vanish(self, path: str) -> None:
        """The cgroup is gone with all that is in it."""
        shutil.rmtree(self.file(path, "x").parent)
        if self.version == 1:
            shutil.rmtree(self.file(path, "cpu.x").parent, ignore_errors=True)
        self._note_tasks()

    def write(self, path: str, name: str, text: str) -> None:
        """One write(2) by anybody; raises OSError as the kernel does."""
        if not self.file(path, name).exists():
            raise _error(errno.ENOENT)
        if name in ("cpuset.cpus", "cpuset.mems"):
            self._write_set(path, name, text)
        elif name == "cgroup.procs":
            self.attach(path, int(text))
        elif name == "cgroup.subtree_control":
            self._write_control(path, text)
        elif name.startswith("cpu."):
            self._fill(path, {name: f"{text} 100000" if name == "cpu.max" and len(text.split()) == 1 else text})
        else:
            raise _error(errno.EINVAL)

    def attach(self, path: str, *pids: int) -> None:
        """Moves processes into the cgroup, out of wherever they were."""
        if self.version == 1 and not (self.cpus(path) and self.cpus(path, "cpuset.mems")):
            raise _error(errno.ENOSPC)
        if self.version == 2:
            self._check_valid(path)
            if self.read(path, "cgroup.subtree_control") and not self._may_mix(path):
                raise _error(errno.EBUSY)
        for one in self.paths():
            kept = [pid for pid in self.procs(one) if pid not in pids]
            self._put_procs(one, sorted({*kept, *pids}) if one == path else kept)
        self._note_tasks()

    def exit(self, *pids: int) -> None:
        """Processes end."""
        for path in self.paths():
            self._put_procs(path, [pid for pid in self.procs(path) if pid not in pids])
        self._note_tasks()

    def hotplug(self, online: str) -> None:
        """CPUs go or come. v1 takes those that go out of every cpuset.cpus for good, and moves the tasks of a cgroup
        that has none left to the nearest one above that has; v2 leaves cpuset.cpus alone."""
        self.online = CPUSet.parse(online)
        for path in self.paths()[1:] if self.version == 1 else ():
            left = self.cpus(path) & self.online
            self._fill(path, {"cpuset.cpus": str(left)})
            if not left and self.procs(path):
                above = _parent(path)
                while above != "/" and not self.cpus(above):
                    above = _parent(above)
                self._put_procs(above, sorted({*self.procs(above), *self.procs(path)}))
                self._put_procs(path, [])
        self.settle()

    # the parts

    def build(self, path: str, spec: Spec) -> None:
        """Makes what `spec` says below a cgroup that is there, without asking the rules."""
        self._fill(path, self._files(spec))
        if "procs" in spec:
            self._put_procs(path, list(spec["procs"]))
        if "owner" in spec:
            os.chown(self.file(path, "x").parent, int(spec["owner"]), -1)
        for name, inner in spec.items():
            if isinstance(inner, Mapping):
                below = path.rstrip("/") + "/" + name
                self.mkdir(below)
                if self.version == 1:
                    self._fill(below, {file: self.read(path, file) for file in ("cpuset.cpus", "cpuset.mems")})
                elif any(isinstance(value, Mapping) for value in inner.values()):
                    self._fill(below, {"cgroup.subtree_control": self.read(below, "cgroup.controllers")})
                self.build(below, inner)

    def _files(self, spec: Spec) -> dict[str, str]:
        short = {**SHORT, **(V1_SHORT if self.version == 1 else V2_SHORT)}
        plain = {key: value for key, value in spec.items() if not isinstance(value, Mapping)}
        files = {short.get(key, key): str(value) for key, value in plain.items() if key not in ("procs", "owner")}
        if self.version == 2 and "quota" in files:
            files["cpu.max"] = f"{files.pop('quota')} {files.pop('period', 100000)}"
        unknown = [name for name in files if "." not in name]
        if unknown:
            raise ValueError(f"cgroup v{self.version} has no {unknown}; a dict makes a cgroup")
        return files

    def _make(self, path: str) -> None:
        root = path == "/"
        files = {"cgroup.procs": ""}
        if self.version == 1:
            files |= {"cpuset.cpus": str(self.online) if root else "", "cpuset.mems": str(self.nodes) if root else ""}
            self._fill(path, {**files, **V1_CPU_FILES} if root else files)
            return
        controllers = CONTROLLERS if root else self.read(_parent(path), "cgroup.subtree_control")
        files |= {"cgroup.controllers": controllers, "cgroup.subtree_control": CONTROLLERS if root else ""}
        self._fill(path, files)
        if not root:
            self._fill(path, {"cgroup.events": "populated 0\nfrozen 0"})
            self._controller_files(path)

    def _controller_files(self, path: str) -> None:
        """v2: what the controllers enabled in the parent put into a cgroup; what others put goes."""
        on = self.read(path, "cgroup.controllers").split()
        wanted = V2_CPU_FILES if "cpu" in on else {}
        wanted = {**wanted, **({"cpuset.cpus": "", "cpuset.mems": ""} if "cpuset" in on else {})}
        self._fill(path, {name: text for name, text in wanted.items() if not self.file(path, name).exists()})
        for file in self.file(path, "x").parent.glob("cpuset.*"):
            if "cpuset" not in on:
                file.unlink()

    def _fill(self, path: str, files: Mapping[str, str]) -> None:
        for name, text in files.items():
            self.file(path, name).write_text(text + "\n" if text else "\n")

    def _put_procs(self, path: str, pids: list[int]) -> None:
        self.file(path, "cgroup.procs").write_text("".join(f"{pid}\n" for pid in pids))

    def _populated(self, path: str) -> bool:
        return any(self.procs(one) for one in self.paths(path))

    def settle(self, below: str = "/") -> None:
        """Brings the effective sets from there on up to date."""
        for path in self.paths(below):
            for kind, top in (("cpus", self.online), ("mems", self.nodes)):
                self._settle(path, kind, top if path == "/" else self._granted_above(path, kind))

    def _granted_above(self, path: str, kind: str) -> CPUSet:
        """The effective set of the nearest cgroup above that has the file (v2: the controller may be off between)."""
        name = self.effective.format(kind)
        above = _parent(path)
        while above != "/" and not self.file(above, name).exists():
            above = _parent(above)
        return self.cpus(above, name)

    def _note_tasks(self) -> None:
        for path in self.paths()[1:] if self.version == 2 else ():
            self._fill(path, {"cgroup.events": f"populated {int(self._populated(path))}\nfrozen 0"})

    def _settle(self, path: str, kind: str, above: CPUSet) -> None:
        granted = self.cpus(path, f"cpuset.{kind}") & above
        if self.version == 2:
            granted = granted or above
            if path != "/" and not self.file(path, f"cpuset.{kind}").exists():
                return
        self._fill(path, {self.effective.format(kind): str(granted)})

    def _write_set(self, path: str, name: str, text: str) -> None:
        if path == "/":
            raise _error(errno.EACCES)
        if not text:  # a write of no bytes does nothing
            return
        most, now = (self.possible, self.online) if name == "cpuset.cpus" else (self.nodes, self.nodes)
        wanted = _parse(text, most, name)
        if self.version == 1:
            self._check_v1(path, name, wanted, now)
        busy = self._populated(path) and not (self.version == 2 and self.modern)
        if not wanted and busy and self.cpus(path, name):
            raise _error(errno.ENOSPC)
        self._fill(path, {name: str(wanted)})
        self.settle(path)

    def _check_v1(self, path: str, name: str, wanted: CPUSet, now: CPUSet) -> None:
        if not wanted <= now:
            raise _error(errno.EINVAL)
        children = [one for one in self.paths(path) if _parent(one) == path and one != path]
        if any(not self.cpus(child, name) <= wanted for child in children):
            raise _error(errno.EBUSY)
        if not wanted <= self.cpus(_parent(path), name):
            raise _error(errno.EACCES)

    def _write_control(self, path: str, text: str) -> None:
        on = self.read(path, "cgroup.subtree_control").split()
        children = [one for one in self.paths(path)[1:] if _parent(one) == path]
        for word in text.split():
            controller = word[1:]
            if (word[0] == "+") == (controller in on):
                continue
            if word[0] == "+":
                self._check_enable(path, controller)
                on.append(controller)
            elif any(controller in self.read(child, "cgroup.subtree_control").split() for child in children):
                raise _error(errno.EBUSY)
            else:
                on = [one for one in on if one != controller]
        self._fill(path, {"cgroup.subtree_control": " ".join(on)})
        for child in children:
            self._fill(child, {"cgroup.controllers": " ".join(on)})
            self._controller_files(child)
            self.settle(child)

    def _check_enable(self, path: str, controller: str) -> None:
        if controller not in self.read(path, "cgroup.controllers").split():
            raise _error(errno.ENOENT)
        self._check_valid(path)
        if self.procs(path) and not (self._may_mix(path) and (path == "/" or controller in THREADED)):
            raise _error(errno.EBUSY)

    def _may_mix(self, path: str) -> bool:
        """Whether tasks may sit beside children with controllers: in the root, and in a cgroup that can become the
        root of a threaded subtree (cgroup_can_be_thread_root()): only threaded controllers on, and no child in use."""
        if path == "/":
            return True
        on = set(self.read(path, "cgroup.subtree_control").split())
        return on <= THREADED and not any(self.procs(one) for one in self.paths(path)[1:])

    def _check_valid(self, path: str) -> None:
        """A cgroup below one that mixes is "domain invalid": nothing can be done in there."""
        for above in _above(path)[1:]:
            if self.procs(above) and THREADED & set(self.read(above, "cgroup.subtree_control").split()):
                raise _error(errno.EOPNOTSUPP)


class RuleWriter(CgroupFS):
    """The product's CgroupFS whose writes go to the made kernel. `log` has each one: (path, file, text).

    To be told to fail: `fail` (an errno for a while), `at` (something happens at the nth write from now).
    """

    def __init__(self, fake: FakeCgroup) -> None:
        cpuset, cpu = ("/cpuset", "/cpu") if fake.version == 1 else ("", "")
        super().__init__(fake.version, f"{fake.top}{cpuset}", fake.version, f"{fake.top}{cpu}")
        self.fake = fake
        self.log: list[tuple[str, str, str]] = []
        self._failures: list[tuple[int, str | None, list[int]]] = []
        self._planned: dict[tuple[int, bool], Callable[[], None]] = {}

    def fail(self, code: int, path: str | None = None, times: int = 1_000_000) -> None:
        """The next `times` writes (to this cgroup) are refused with this errno."""
        self._failures.append((code, path, [times]))

    def at(self, step: int, action: Callable[[], None], after: bool = False) -> None:
        """`action` at the `step`th write from now (1 = the next): when its file is open, or just `after` it."""
        self._planned[len(self.log) + step, after] = action

    def vanish_at(self, step: int, path: str) -> None:
        """The cgroup goes at the `step`th write from now, when its file is open already: ENODEV."""
        self.at(step, lambda: self.fake.vanish(path))

    def _store(self, filename: str, data: bytes) -> tuple[int | None, str | None]:
        directory, _, name = filename.rpartition("/")
        path = self.path_of(directory.rstrip("/")) or "/"
        self.log.append((path, name, data.decode()))
        code = self._attempt(filename, path, name, data.decode())
        self._planned.pop((len(self.log), True), lambda: None)()
        return code, self._read(filename)

    def _attempt(self, filename: str, path: str, name: str, text: str) -> int | None:
        opened = os.path.exists(filename)
        self._planned.pop((len(self.log), False), lambda: None)()
        if opened and not os.path.exists(filename):
            return errno.ENODEV
        for code, where, times in self._failures:
            if opened and times[0] and where in (None, path):
                times[0] -= 1
                return code
        try:
            self.fake.write(path, name, text)
        except OSError as error:
            return error.errno
        return None


def create_like_runc(
    fake: FakeCgroup, path: str, pid: int, cpus: str = "", quota: int | None = 200000, period: int = 100000,
    shares: int = 2048, weight: int = 79, racy: bool = False, systemd: bool = False,
) -> Iterator[str]:  # fmt: skip
    """A container is made as runc does it; each step is yielded, by name, after it was done. `cpus` as in the spec.

    v1 (measured, runc 1.1): mkdir cpus mems attach mkdir-cpu [cpus-again] shares period quota exec. Without cpus in the
    spec the parent's are copied if there are none yet; `racy`: it looked before our write and copies after it.
    v2 (from its source): mkdir attach weight max [cpus] exec; `systemd` has written weight and max itself before.
    """
    steps = _runc_v1 if fake.version == 1 else _runc_v2
    yield from steps(fake, path, pid, cpus, quota, period, shares if fake.version == 1 else weight, racy or systemd)


def _runc_v1(
    fake: FakeCgroup, path: str, pid: int, cpus: str, quota: int | None, period: int, shares: int, racy: bool
) -> Iterator[str]:
    fake.mkdir_cpuset(path)
    yield "mkdir"
    if cpus or racy or not fake.cpus(path):
        fake.write(path, "cpuset.cpus", cpus or fake.read(_parent(path), "cpuset.cpus"))
    yield "cpus"
    if racy or not fake.cpus(path, "cpuset.mems"):
        fake.write(path, "cpuset.mems", fake.read(_parent(path), "cpuset.mems"))
    yield "mems"
    fake.attach(path, pid)
    yield "attach"
    fake.mkdir_cpu(path)
    yield "mkdir-cpu"
    if cpus:
        fake.write(path, "cpuset.cpus", cpus)
        yield "cpus-again"
    limits = {"shares": shares, "period": period, "quota": -1 if quota is None else quota}
    for name, value in limits.items():
        fake.write(path, V1_SHORT[name], str(value))
        yield name
    yield "exec"


def _runc_v2(
    fake: FakeCgroup, path: str, pid: int, cpus: str, quota: int | None, period: int, weight: int, systemd: bool
) -> Iterator[str]:
    for above in _above(path):
        if "cpuset" not in fake.read(above, "cgroup.subtree_control").split():
            fake.write(above, "cgroup.subtree_control", " ".join(f"+{one}" for one in CONTROLLERS.split()))
    fake.mkdir(path)
    yield "mkdir"
    limits = (("weight", str(weight)), ("max", f"{'max' if quota is None else quota} {period}"))
    for name, text in limits if systemd else ():
        fake.write(path, f"cpu.{name}", text)
        yield f"systemd-{name}"
    fake.attach(path, pid)
    yield "attach"
    for name, text in limits:
        fake.write(path, f"cpu.{name}", text)
        yield name
    if cpus:
        fake.write(path, "cpuset.cpus", cpus)
        yield "cpus"
    yield "exec"


def _parse(text: str, most: CPUSet, name: str) -> CPUSet:
    # bitmap_parselist() takes any number of commas and white space between two pieces
    pieces = text.replace(",", " ").split()
    try:
        wanted = CPUSet.parse(",".join(pieces))
    except (CPUSetSyntaxError, ValueError) as error:
        raise _error(errno.EINVAL) from error
    if not wanted <= most:
        raise _error(errno.ERANGE if name == "cpuset.cpus" else errno.EINVAL)
    return wanted


def _parent(path: str) -> str:
    return path.rpartition("/")[0] or "/"


def _above(path: str) -> list[str]:
    names = path.strip("/").split("/")
    return ["/" + "/".join(names[:depth]) for depth in range(len(names))]


def _error(code: int) -> OSError:
    return OSError(code, os.strerror(code))
