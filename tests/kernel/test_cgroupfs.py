"""CgroupFS on this machine's real hierarchies: its errnos, and the made kernel of tests/fakefs against the real one."""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from errno import EACCES, EBUSY, EINVAL, ENODEV, ENOENT, ENOSPC, ERANGE
from pathlib import Path

import pytest

from enforcer.core.cpulimits import CPULimits
from enforcer.core.cpuset import EMPTY, CPUSet
from enforcer.core.errors import CannotWorkHereError
from enforcer.kernel.cgroupfs import CgroupFS, describe
from tests.fakefs.cgroup_tree import FakeCgroup, tree
from tests.kernel.conftest import TmpCgroup, wait_until

pytestmark = pytest.mark.root

ONE = CPUSet([0])


@pytest.fixture
def sleeper() -> Iterator[int]:
    """A process that sleeps; its pid."""
    process = subprocess.Popen(["sleep", "60"])
    yield process.pid
    process.kill()
    process.wait()


@pytest.fixture
def v1(tmp_cgroup: TmpCgroup) -> TmpCgroup:
    """The test's cgroup where cpuset is a v1 hierarchy with two CPUs at least."""
    if tmp_cgroup.fs.version != 1:
        pytest.skip("cpuset is not a v1 hierarchy here")
    if len(tmp_cgroup.fs.read_effective("/") or EMPTY) < 2:
        pytest.skip("needs two CPUs")
    return tmp_cgroup


def machine_cpus() -> tuple[str, str]:
    """(online, possible) CPUs as lists."""
    online, possible = (Path("/sys/devices/system/cpu", name).read_text().strip() for name in ("online", "possible"))
    return online, possible


def attach(fs: CgroupFS, path: str, pid: int) -> None:
    Path(fs.cpuset_dir(path), "cgroup.procs").write_text(str(pid))


def test_the_hierarchies_are_found() -> None:
    fs = CgroupFS.discover()
    assert fs.read_effective("/") == CPUSet.parse(machine_cpus()[0])
    assert fs.exists("/")
    assert isinstance(fs.children("/"), list)
    assert os.getpid() in [pid for path in ("/", *fs.descendants("/")) for pid in fs.procs(path)]
    assert fs.populated("/") or fs.version == 2
    assert fs.owner_uid("/") == 0


def test_no_mounts_no_work(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self/mountinfo").write_text("31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755\n")
    with pytest.raises(CannotWorkHereError, match="cpuset controller; found: none"):
        CgroupFS.discover(str(tmp_path))


def test_a_write_reaches_the_tasks(tmp_cgroup: TmpCgroup, sleeper: int) -> None:
    attach(tmp_cgroup.fs, tmp_cgroup.path, sleeper)
    last = CPUSet([max(tmp_cgroup.fs.read_effective("/") or ONE)])
    result = tmp_cgroup.fs.write_cpus(tmp_cgroup.path, last)
    assert result.ok, describe(result)
    assert (result.found, result.effective, result.missing) == (last, last, EMPTY)
    assert os.sched_getaffinity(sleeper) == set(last)
    assert tmp_cgroup.fs.procs(tmp_cgroup.path) == [sleeper]
    assert tmp_cgroup.fs.populated(tmp_cgroup.path)


def test_a_fresh_v1_cgroup_is_filled_from_the_top(v1: TmpCgroup, sleeper: int) -> None:
    fs = v1.fs
    pod, container = v1.path + "/pod", v1.path + "/pod/c"
    os.makedirs(fs.cpuset_dir(container))
    assert (fs.read_cpus(container), fs.read_mems(container), fs.read_effective(container)) == (EMPTY, "", EMPTY)
    assert fs.write_cpus(container, ONE).errno == EACCES, "the pod has none yet"
    assert fs.copy_mems(container).ok
    assert fs.read_mems(pod) == fs.read_mems(container) == fs.read_mems("/")
    for path in (pod, container):
        assert fs.write_cpus(path, ONE).ok
    attach(fs, container, sleeper)
    assert fs.populated(pod), "below it"
    assert fs.procs(pod) == []


def test_v1_errnos(v1: TmpCgroup, sleeper: int) -> None:
    fs = v1.fs
    child = v1.mkdir("/child")
    assert fs.write_cpus(child, ONE).ok
    assert fs.write_cpus(v1.path, CPUSet([1])).errno == EBUSY
    assert fs.write_cpus(child, CPUSet([60_000])).errno == ERANGE
    assert fs.write_cpus("/", ONE).errno == EACCES
    assert fs.set_mems(child, "63").errno == EINVAL, "a node that is not there"
    assert fs.set_mems(child, "60000").errno == ERANGE, "a node that cannot be"
    assert fs.set_mems(child, "x").errno == EINVAL
    assert fs.write_cpus(v1.path, ONE).ok
    refused = fs.write_cpus(child, CPUSet([1]))
    assert refused.errno == EACCES
    assert refused.found == refused.effective == ONE
    assert describe(refused) == (
        f"{child}: cpuset.cpus wanted 1, found 0: refused (EACCES), the parent cgroup does not have all of it;"
        " widen the parents first, from the top"
    )
    attach(fs, child, sleeper)
    assert fs._store(fs.cpuset_dir(child) + "/cpuset.cpus", b"\n") == (ENOSPC, "0\n")


def test_v1_unpinning_gives_the_parent_s_set(v1: TmpCgroup, sleeper: int) -> None:
    child = v1.mkdir("/child")
    attach(v1.fs, child, sleeper)
    v1.fs.write_cpus(child, ONE)
    result = v1.fs.clear_cpus(child, CPUSet.parse(machine_cpus()[1]))
    assert result.ok
    assert result.found == v1.fs.read_cpus(v1.path)
    assert len(os.sched_getaffinity(sleeper)) > 1


def test_narrow_a_subtree_deepest_first(v1: TmpCgroup) -> None:
    container = v1.mkdir("/c")
    for name in ("/kube-proxy", "/kube-proxy/x", "/other"):
        v1.mkdir("/c" + name)
    assert v1.fs.write_cpus(container, ONE).errno == EBUSY
    for path in (*v1.fs.descendants(container), container):
        assert v1.fs.write_cpus(path, ONE).ok


def test_gone_at_each_moment(tmp_cgroup: TmpCgroup, monkeypatch: pytest.MonkeyPatch) -> None:
    fs = tmp_cgroup.fs
    pod = tmp_cgroup.mkdir("/pod")
    tmp_cgroup.rmdir(pod)
    before = fs.write_cpus(pod, ONE)
    assert (before.gone, before.errno) == (True, ENOENT)

    tmp_cgroup.mkdir("/pod")
    real = os.pwrite

    def late(fd: int, data: bytes, offset: int) -> int:
        tmp_cgroup.rmdir(pod)
        return real(fd, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", late)
        between = fs.write_cpus(pod, ONE)
    assert (between.gone, between.errno, between.found) == (True, ENODEV, None)

    tmp_cgroup.mkdir("/pod")

    def early(fd: int, data: bytes, offset: int) -> int:
        written = real(fd, data, offset)
        tmp_cgroup.rmdir(pod)
        return written

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", early)
        after = fs.write_cpus(pod, ONE)
    assert (after.gone, after.found, after.ok) == (True, None, False)


def test_readers_while_cgroups_come_and_go(tmp_cgroup: TmpCgroup) -> None:
    """All readers beside a thread that makes and removes: None or a value, never an error."""
    fs = tmp_cgroup.fs
    pod = tmp_cgroup.path + "/pod"
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            for directory in {fs.cpuset_dir(pod), fs.cpu_dir(pod)}:
                os.mkdir(directory)
                time.sleep(0)
                os.rmdir(directory)

    thread = threading.Thread(target=churn)
    thread.start()
    seen: dict[bool, int] = {True: 0, False: 0}
    deadline = time.monotonic() + 1.0
    try:
        while time.monotonic() < deadline:
            for read in (fs.read_cpus, fs.read_effective, fs.read_limits, fs.children, fs.cgroup_id, fs.read_mems):
                seen[read(pod) is None] += 1
            fs.procs(pod)
            fs.populated(pod)
            fs.descendants(tmp_cgroup.path)
            result = fs.write_cpus(pod, ONE)
            # EACCES: made a moment ago, without its parent's sets
            assert result.ok or result.gone or result.errno in (None, EACCES, ENOENT, ENODEV), describe(result)
    finally:
        stop.set()
        thread.join()
    assert seen[True] > 10
    assert seen[False] > 10


def test_limits_as_the_kernel_shows_them(tmp_cgroup: TmpCgroup) -> None:
    fs = tmp_cgroup.fs
    if fs.cpu_version != 1:
        pytest.skip("cpu is not a v1 hierarchy here")
    assert fs.read_limits(tmp_cgroup.path) == CPULimits(None, 100000, 1024, None), "fresh"
    cpu = Path(fs.cpu_dir(tmp_cgroup.path))
    for name, text in (("cpu.shares", "2048"), ("cpu.cfs_period_us", "50000"), ("cpu.cfs_quota_us", "100000")):
        (cpu / name).write_text(text)
    assert fs.read_limits(tmp_cgroup.path) == CPULimits(100000, 50000, 2048, None)


def test_many_processes_are_all_read(tmp_cgroup: TmpCgroup) -> None:
    """More than one page of cgroup.procs."""
    shell = "read go; for i in $(seq 900); do sleep 60 & done; echo $(jobs -p); read end; kill $(jobs -p)"
    process = subprocess.Popen(["bash", "-c", shell], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout and process.stdin
        attach(tmp_cgroup.fs, tmp_cgroup.path, process.pid)  # its children are born in there
        process.stdin.write("go\n")
        process.stdin.flush()
        expected = sorted([process.pid, *map(int, process.stdout.readline().split())])
        assert len(expected) == 901
        assert sorted(tmp_cgroup.fs.procs(tmp_cgroup.path)) == expected
    finally:
        process.communicate("\n", timeout=20)
    wait_until(lambda: not tmp_cgroup.fs.populated(tmp_cgroup.path), "its processes end")


def test_the_cgroup_id_is_its_inode(tmp_cgroup: TmpCgroup) -> None:
    first = tmp_cgroup.mkdir("/a")
    second = tmp_cgroup.mkdir("/b")
    ids = {tmp_cgroup.fs.cgroup_id(path) for path in (tmp_cgroup.path, first, second)}
    assert len(ids) == 3
    assert None not in ids
    assert tmp_cgroup.fs.cgroup_id(first) == os.stat(tmp_cgroup.fs.cpuset_dir(first)).st_ino


def test_a_write_with_its_reading_back_costs_little_more_than_its_system_calls(tmp_cgroup: TmpCgroup) -> None:
    directory = tmp_cgroup.fs.cpuset_dir(tmp_cgroup.path)
    both = [ONE, tmp_cgroup.fs.read_effective("/") or ONE]

    def bare(cpus: CPUSet) -> None:
        fd = os.open(directory + "/cpuset.cpus", os.O_RDWR)
        os.pwrite(fd, str(cpus).encode(), 0)
        os.pread(fd, 4096, 0)
        os.close(fd)

    def median(write: Callable[[CPUSet], object]) -> float:
        took = []
        for n in range(300):
            started = time.perf_counter()
            write(both[n & 1])
            took.append(time.perf_counter() - started)
        return statistics.median(took)

    assert median(lambda cpus: tmp_cgroup.fs.write_cpus(tmp_cgroup.path, cpus)) < 8 * median(bare)


# the made kernel against the real one


class Pair:
    """The same operations on the real hierarchy and on a made one; each answer and each set is compared."""

    def __init__(self, real: TmpCgroup, fake: FakeCgroup) -> None:
        self.real = real
        self.fake = fake
        self.history: list[str] = []

    def run(self, what: str, real: Callable[[], None], fake: Callable[[], None]) -> None:
        answers = [_errno(real), _errno(fake)]
        self.history.append(f"{what}: {answers[0]}")
        assert answers[0] == answers[1], f"real {answers[0]}, made {answers[1]}; after\n" + "\n".join(self.history)
        assert self.state(self.real.fs) == self.state(self.fake.fs), "after\n" + "\n".join(self.history)

    def state(self, fs: CgroupFS) -> dict[str, tuple[object, ...]]:
        paths = sorted([self.real.path, *fs.descendants(self.real.path)])
        readers = (fs.read_cpus, fs.read_effective, fs.read_mems, fs.read_effective_mems, fs.procs, fs.populated)
        return {path: tuple(str(read(path)) for read in readers) for path in paths}

    def mkdir(self, path: str) -> None:
        self.run(f"mkdir {path}", lambda: os.mkdir(self.real.fs.cpuset_dir(path)), lambda: self.fake.mkdir_cpuset(path))

    def rmdir(self, path: str) -> None:
        self.run(f"rmdir {path}", lambda: os.rmdir(self.real.fs.cpuset_dir(path)), lambda: self.fake.rmdir(path))

    def write(self, path: str, file: str, text: str) -> None:
        def really() -> None:
            fd = os.open(f"{self.real.fs.cpuset_dir(path)}/{file}", os.O_WRONLY)
            try:
                os.write(fd, text.encode())
            finally:
                os.close(fd)

        self.run(f"{path}/{file} <- {text!r}", really, lambda: self.fake.write(path, file, text))


def _errno(act: Callable[[], None]) -> int | None:
    try:
        act()
    except OSError as error:
        return error.errno
    return None


@pytest.fixture
def pair(tmp_cgroup: TmpCgroup, tmp_path: Path, sleeper: int) -> Pair:
    """The test's cgroup, and one like it on a made node with this machine's CPUs; the sleeper is at the top of both."""
    online, possible = machine_cpus()
    fs = tmp_cgroup.fs
    own = {"subtree_control": "cpuset"} if fs.version == 2 else {}
    if fs.version == 2:
        Path(fs.cpuset_dir(tmp_cgroup.path), "cgroup.subtree_control").write_text("+cpuset")
    nodes = fs.read_effective_mems("/") or "0"
    spec = {tmp_cgroup.path.strip("/"): own}
    fake = tree(tmp_path, spec, fs.version, online, possible, nodes, modern=_clears(tmp_cgroup))
    attach(fs, "/", sleeper)
    fake.attach("/", sleeper)
    return Pair(tmp_cgroup, fake)


def _clears(tmp_cgroup: TmpCgroup) -> bool:
    """Whether this kernel lets a set be cleared with tasks inside (v2, from 7.x on)."""
    probe = tmp_cgroup.mkdir("/probe")
    attach(tmp_cgroup.fs, probe, os.getpid())
    tmp_cgroup.fs.write_cpus(probe, ONE)
    code, _ = tmp_cgroup.fs._store(tmp_cgroup.fs.cpuset_dir(probe) + "/cpuset.cpus", b"\n")
    attach(tmp_cgroup.fs, "/", os.getpid())
    tmp_cgroup.rmdir(probe)
    return code is None


@pytest.mark.parametrize("seed", range(4))
def test_the_made_kernel_answers_as_the_real_one(pair: Pair, sleeper: int, seed: int) -> None:
    top = pair.real.path
    rng = random.Random(seed)
    paths = [top + below for below in ("", "/a", "/b", "/a/c", "/a/c/d")]
    texts = ["0", "1", "0-1", "0-1", "0,1", "\n", "", "50000", "1-0", "x", "0-", ",", "1,,0 "]
    actions = ["mkdir", "mkdir", "rmdir", "cpus", "cpus", "cpus", "cpus", "mems", "attach", "leave"]
    for _ in range(250):
        path = rng.choice(paths)
        match rng.choice(actions + ["enable", "enable", "disable"] * (pair.fake.version == 2)):
            case "mkdir" if path != top:
                pair.mkdir(path)
            case "rmdir" if path != top:
                pair.rmdir(path)
            case "cpus":
                pair.write(path, "cpuset.cpus", rng.choice(texts))
            case "mems":
                pair.write(path, "cpuset.mems", rng.choice(["0", "0", "0", "\n", "x"]))
            case "attach":
                pair.write(path, "cgroup.procs", str(sleeper))
            case "leave":
                pair.write("/", "cgroup.procs", str(sleeper))
            case "enable":
                pair.write(path, "cgroup.subtree_control", "+cpuset")
            case "disable":
                pair.write(path, "cgroup.subtree_control", "-cpuset")
    assert sum(": None" in line for line in pair.history) > 30, "most of the run must be more than refusals"
    assert len({line.rsplit(" ", 1)[1] for line in pair.history}) > 5, "and of several kinds"
