"""The mimic makes what the kubelet and runc make: names, files, order, processes; and leaves nothing behind."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from enforcer.core.cpuset import CPUSet
from enforcer.core.errors import EnforcerError
from enforcer.core.kubepods import Kind, QoSClass, parse_path
from enforcer.kernel import procfs
from enforcer.kernel.cgroupfs import CgroupFS
from enforcer.mimic import MimicNode, Step
from tests.kernel.conftest import wait_until

pytestmark = pytest.mark.root

GUARANTEED, BURSTABLE, BESTEFFORT = QoSClass.GUARANTEED, QoSClass.BURSTABLE, QoSClass.BESTEFFORT


@pytest.fixture
def fs() -> CgroupFS:
    if os.geteuid() != 0:
        pytest.skip("needs root to make cgroups")
    return CgroupFS.discover()


@pytest.fixture
def node(fs: CgroupFS) -> Iterator[MimicNode]:
    with MimicNode(fs, f"/ce-test-mimic-{os.getpid()}/kubepods", pace=0) as made:
        yield made


def directories(fs: CgroupFS, path: str) -> list[Path]:
    return [Path(d) for d in dict.fromkeys((fs.cpuset_dir(path), fs.cpu_dir(path)))]


def limits(fs: CgroupFS, path: str) -> tuple[int | None, int, int | None]:
    """(quota, period, shares), the shares only where the hierarchy has them (v1)."""
    found = fs.read_limits(path)
    assert found is not None
    return found.quota, found.period, found.shares if fs.cpu_version == 1 else None


def shares(fs: CgroupFS, number: int) -> int | None:
    return number if fs.cpu_version == 1 else None


def test_names_are_the_kubelets(node: MimicNode) -> None:
    found = [parse_path(node.pod(qos, "p", milli=500).sandbox().path) for qos in QoSClass]
    assert [(one.kind, one.qos) for one in found] == [(Kind.CONTAINER, qos) for qos in QoSClass]
    assert len({one.pod_uid for one in found}) == 3


def test_figures_are_the_kubelets(node: MimicNode, fs: CgroupFS) -> None:
    whole, burst = node.pod(GUARANTEED, "p", milli=2000), node.pod(BURSTABLE, "p", milli=500)
    best = node.pod(BESTEFFORT, "p", milli=None)
    assert limits(fs, whole.path) == (200000, 100000, shares(fs, 2048))
    assert limits(fs, burst.path) == (None, 100000, shares(fs, 512))
    assert limits(fs, best.path) == (None, 100000, shares(fs, 2))
    assert limits(fs, whole.sandbox().path) == (None, 100000, shares(fs, 2))
    assert limits(fs, whole.container(milli=1000, period=50000).path) == (50000, 50000, shares(fs, 1024))
    assert limits(fs, burst.container(milli=500, limited=False).path) == (None, 100000, shares(fs, 512))
    assert limits(fs, best.container(milli=0).path) == (None, 100000, shares(fs, 2))


def test_order_is_runcs(node: MimicNode, fs: CgroupFS) -> None:
    """What is there after each step, on v1: the limits come long after the directory and the process."""
    if fs.version != 1 or fs.cpu_root == fs.cpuset_root:
        pytest.skip("needs cpuset and cpu as two v1 hierarchies")
    pod = node.pod(GUARANTEED, "p", milli=1000)
    all_cpus = fs.read_cpus(pod.path)
    seen = []
    for step, made in pod.container_steps(milli=1000):
        seen.append(step)
        assert (fs.read_cpus(made.path) == all_cpus) == (step is not Step.MKDIR)
        assert bool(fs.read_mems(made.path)) == (step not in (Step.MKDIR, Step.CPUS))
        assert bool(fs.procs(made.path)) == (step not in (Step.MKDIR, Step.CPUS, Step.MEMS))
        assert Path(fs.cpu_dir(made.path)).exists() == (Step.CPU_MKDIR in seen)
        if Step.CPU_MKDIR in seen:
            expected = (100000 if Step.QUOTA in seen else None, 100000, 1024)
            assert limits(fs, made.path) == expected
        if Step.ATTACH in seen and step is not Step.EXEC:
            assert procfs.comm(made.pid) == "runc:[2:INIT]"
    assert seen == [
        Step.MKDIR, Step.CPUS, Step.MEMS, Step.ATTACH, Step.CPU_MKDIR, Step.SHARES, Step.PERIOD, Step.QUOTA, Step.START,
        Step.EXEC,
    ]  # fmt: skip


def test_first_instruction_tells_where_it_ran(node: MimicNode, fs: CgroupFS) -> None:
    """A set written before the start counts at the first instruction; one written after it only for `affinity`."""
    one, two = list(fs.read_effective("/") or ())[:2]
    for step, made in node.pod(GUARANTEED, "p", milli=1000).container_steps(milli=1000):
        if step is Step.START:
            assert fs.write_cpus(made.path, CPUSet([two])).ok
    assert made.first_affinity() == CPUSet([two])
    assert fs.write_cpus(made.path, CPUSet([one])).ok
    assert (made.first_affinity(), made.affinity()) == (CPUSet([two]), CPUSet([one]))
    wait_until(lambda: procfs.comm(made.pid) == "app", "the process has the user's name")


def test_cpus_in_the_spec_are_there_from_the_start(node: MimicNode, fs: CgroupFS) -> None:
    cpu = (fs.read_effective("/") or CPUSet()).first
    made = node.pod(GUARANTEED, "p", milli=1000).container(milli=1000, spec_cpus=str(cpu))
    assert made.first_affinity() == CPUSet([cpu])
    assert fs.read_cpus(made.path) == CPUSet([cpu])


def test_failed_start_is_cleaned_up(node: MimicNode, fs: CgroupFS) -> None:
    """CPUs that do not exist: the kernel refuses, the error names file and text, no cgroup and no process stay."""
    pod = node.pod(GUARANTEED, "p", milli=1000)
    with pytest.raises(OSError, match="writing '8000'") as caught:
        pod.container(milli=1000, spec_cpus="8000")
    assert caught.value.errno == errno.ERANGE
    assert str(caught.value.filename).endswith("/cpuset.cpus")
    assert pod.containers == []
    assert fs.children(pod.path) == []


def test_pace_is_the_measured_one(fs: CgroupFS) -> None:
    """28-55 ms from the directory to user code with runc; the upper bound is wide, the cores are shared."""
    with MimicNode(fs, f"/ce-test-mimic-{os.getpid()}/kubepods") as node:
        pod = node.pod(GUARANTEED, "p", milli=1000)
        start = time.monotonic()
        pod.container(milli=1000)
        assert 0.028 <= time.monotonic() - start < 1


def test_resize_restart_and_removal(node: MimicNode, fs: CgroupFS) -> None:
    pod = node.pod(GUARANTEED, "p", milli=1500)
    pause, app = pod.sandbox(), pod.container(milli=1500)
    pod.resize(app, 1000)
    assert limits(fs, app.path) == limits(fs, pod.path) == (100000, 100000, shares(fs, 1024))
    pod.resize(app, 2500)
    assert limits(fs, app.path) == limits(fs, pod.path) == (250000, 100000, shares(fs, 2560))
    again = pod.restart(app)
    assert again.id != app.id
    assert limits(fs, again.path) == (250000, 100000, shares(fs, 2560))
    assert sorted(fs.children(pod.path) or ()) == sorted((pause.id, again.id))
    pod.remove()
    assert not any(d.exists() for d in directories(fs, pod.path))
    with pytest.raises(EnforcerError, match="has no process"):
        again.affinity()


def test_close_leaves_nothing(fs: CgroupFS) -> None:
    """Neither cgroups, also those that others made inside, nor processes; and it can be done again."""
    top = f"/ce-test-mimic-{os.getpid()}"
    node = MimicNode(fs, f"{top}/kubepods", pace=0)
    pids = [node.pod(qos, "p", milli=500).container(milli=500).pid for qos in QoSClass]
    for directory in directories(fs, node.pods[1].containers[0].path):
        (directory / "nested").mkdir()
    steps = node.pod(GUARANTEED, "halfway", milli=1000).container_steps(milli=1000)
    pids.append(next(made.pid for step, made in steps if step is Step.ATTACH))
    node.close()
    node.close()
    assert not any(d.exists() for d in directories(fs, top))
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []


def test_existing_tree_is_left_alone(node: MimicNode, fs: CgroupFS) -> None:
    with pytest.raises(EnforcerError, match="exists already"):
        MimicNode(fs, node.root)
    assert fs.exists(node.root)


def test_processes_die_with_their_maker(fs: CgroupFS) -> None:
    """A demo that is killed leaves no process behind (its cgroups do stay; they are removed here)."""
    top = f"/ce-test-mimic-killed-{os.getpid()}"
    program = f"""
        import os, signal
        from enforcer.core.kubepods import QoSClass
        from enforcer.kernel.cgroupfs import CgroupFS
        from enforcer.mimic import MimicNode
        node = MimicNode(CgroupFS.discover(), "{top}/kubepods", pace=0)
        print(node.pod(QoSClass.GUARANTEED, "p", milli=500).container(milli=500).pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    try:
        ended = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True)
        pid = int(ended.stdout)
        wait_until(lambda: not Path(f"/proc/{pid}").exists() or state(pid) == "Z", "the container's process is dead")
    finally:
        for path in (*fs.descendants(top), top):
            for directory in directories(fs, path):
                if directory.exists():
                    wait_until(lambda d=directory: removed(d), f"{directory} is removed")


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"


def removed(directory: Path) -> bool:
    try:
        directory.rmdir()
    except OSError as error:
        assert error.errno == errno.EBUSY
        return False
    return True
