"""The agent on real cgroups with real processes, v1 or v2, whichever this machine has."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from enforcer.core.cpuset import CPUSet
from enforcer.core.kubepods import QoSClass
from enforcer.core.state import overlapping
from enforcer.kernel import procfs
from enforcer.kernel.cgroupfs import CgroupFS
from enforcer.mimic import MimicNode, MimicPod
from enforcer.mimic.container import MimicContainer, Step
from tests.kernel.agent_process import AgentProcess, cpus
from tests.kernel.conftest import wait_until

pytestmark = pytest.mark.root

GUARANTEED, BURSTABLE, BESTEFFORT = QoSClass.GUARANTEED, QoSClass.BURSTABLE, QoSClass.BESTEFFORT
Start = Callable[..., AgentProcess]
# An emulated machine runs everything on one core of its host: runc's pace is stretched by as much.
PACE = 30.0 if "ENFORCER_GUEST" in os.environ else 1.0


@pytest.fixture
def fs() -> CgroupFS:
    if os.geteuid() != 0:
        pytest.skip("needs root to make cgroups")
    return CgroupFS.discover()


@pytest.fixture
def node(fs: CgroupFS) -> Iterator[MimicNode]:
    """A node of the CPUs 0 and 1, whatever this machine has."""
    with MimicNode(fs, f"/ce-test-agent-{os.getpid()}/kubepods", pace=PACE) as made:
        for path in ("/burstable", "/besteffort", "", "/.."):
            group = os.path.normpath(made.root + path)
            if fs.version == 1:
                fs.write_cpus(group, cpus("0-1"))
        fs.write_cpus(os.path.dirname(made.root), cpus("0-1"))
        yield made


@pytest.fixture
def agent(tmp_path: Path, node: MimicNode) -> Iterator[Start]:
    made: list[AgentProcess] = []

    def start(prefix: tuple[str, ...] = (), *, launch: bool = False, **config: object) -> AgentProcess:
        one = AgentProcess(tmp_path, node.root, **config)
        made.append(one)
        if launch:
            one.launch(prefix)
        else:
            one.start(prefix)
        return one

    yield start
    for one in made:
        one.end()


def settles(where: MimicContainer, wanted: str, what: str) -> None:
    wait_until(lambda: where.affinity() == cpus(wanted), f"{what}: wanted {wanted}, has {where.affinity()}", 10)


def best(node: MimicNode) -> MimicContainer:
    return node.pod(BESTEFFORT, "best", milli=None).container(milli=0)


def one_cpu(node: MimicNode, name: str = "owner") -> tuple[MimicPod, MimicContainer]:
    pod = node.pod(GUARANTEED, name, milli=1000)
    return pod, pod.container(milli=1000)


def test_seed_scenario(node: MimicNode, agent: Start) -> None:
    running = agent()
    other = best(node)
    assert other.affinity() == cpus("0-1"), "nobody owns a core yet"
    pod, owner = one_cpu(node, "first")
    settles(owner, "1", "the first pod's container")
    assert owner.first_affinity() == cpus("1"), "from its first instruction"
    settles(other, "0", "the BestEffort pod")
    _, second = one_cpu(node, "second")
    settles(second, "0", "no room for the second")
    running.wait_for("asks for 1 CPUs, has 0 of its own, 0 are free")
    pod.remove()
    settles(second, "1", "the second gets the core of the first")
    settles(other, "0", "the BestEffort pod")


def test_first_instruction_is_inside_for_all(node: MimicNode, agent: Start) -> None:
    agent()
    other = best(node)
    _, owner = one_cpu(node)
    late = [best(node) for _ in range(3)]
    fraction = node.pod(GUARANTEED, "half", milli=500).container(milli=500)
    assert owner.first_affinity() == cpus("1")
    assert [one.first_affinity() for one in (*late, fraction)] == [cpus("0")] * 4
    settles(other, "0", "the BestEffort pod")


def test_runtime_that_brings_a_wide_set_is_held(node: MimicNode, agent: Start) -> None:
    agent()
    pod = node.pod(GUARANTEED, "wide", milli=1000)
    owner = pod.container(milli=1000, spec_cpus="0-1")
    settles(owner, "1", "a set over all CPUs in the spec is no pin")
    assert owner.first_affinity() == cpus("1")


def test_restart_in_the_pod_and_resize(node: MimicNode, agent: Start) -> None:
    agent()
    other = best(node)
    pod, owner = one_cpu(node)
    settles(owner, "1", "owner")
    owner.stop()
    again = pod.container(milli=1000)
    assert again.first_affinity() == cpus("1")
    settles(other, "0", "the core was held between the two")
    pod.resize(again, 1500)
    time.sleep(0.5)
    assert again.affinity() == cpus("1"), "limits that it may grow out of"
    settles(again, "0-1", "after two seconds it asks for no whole CPU")
    settles(other, "0-1", "the core is free")
    pod.resize(again, 1000)
    settles(again, "1", "whole again")


def test_drift_is_repaired_and_the_writer_named(node: MimicNode, agent: Start, fs: CgroupFS) -> None:
    running = agent()
    _, owner = one_cpu(node)
    settles(owner, "1", "owner")
    Path(fs.cpuset_dir(owner.path), "cpuset.cpus").write_text("0-1")
    settles(owner, "1", "repaired")
    running.wait_for("drift pod")
    assert re.search(rf"written by pid {os.getpid()} \(", running.log())


def test_audit_writes_nothing(node: MimicNode, agent: Start, fs: CgroupFS) -> None:
    running = agent(mode="audit")
    other = best(node)
    _, owner = one_cpu(node)
    running.wait_for("would write")
    time.sleep(0.3)
    assert (other.affinity(), owner.affinity()) == (cpus("0-1"), cpus("0-1"))
    assert running.state("audit.json").assignments[owner.path].cpus == cpus("1")


def test_stop_leaves_pins_and_start_adopts_them(node: MimicNode, agent: Start) -> None:
    running = agent()
    other = best(node)
    _, owner = one_cpu(node)
    settles(owner, "1", "owner")
    settles(other, "0", "other")
    assert running.end() == 0
    assert (owner.affinity(), other.affinity()) == (cpus("1"), cpus("0"))
    running.start()
    assert "wrote" not in running.log()
    (running.state_dir / "state.json").write_text("torn")
    assert running.end(signal.SIGKILL) == -signal.SIGKILL
    (running.state_dir / "state.json").write_text("torn")
    running.start()
    assert "is torn" in running.log()
    assert (owner.affinity(), other.affinity()) == (cpus("1"), cpus("0"))


def test_reset_gives_everything_back(node: MimicNode, agent: Start) -> None:
    running = agent()
    other = best(node)
    _, owner = one_cpu(node)
    settles(owner, "1", "owner")
    refused = running.command("reset")
    assert refused.returncode == 3
    assert "stop it first" in refused.stderr
    running.end()
    assert running.command("reset").returncode == 0
    assert (owner.affinity(), other.affinity()) == (cpus("0-1"), cpus("0-1"))


def test_static_kubelet_is_not_fought(node: MimicNode, agent: Start, tmp_path: Path) -> None:
    kubelet = tmp_path / "kubelet"
    kubelet.mkdir()
    state = kubelet / "cpu_manager_state"
    state.write_text('{"policyName":"static","defaultCpuSet":"0-1","checksum":0}')
    refused = agent(launch=True)
    assert refused.wait() == 3
    assert "policyName is static" in refused.log()
    state.unlink()
    running = agent()
    other = best(node)
    _, owner = one_cpu(node)
    settles(owner, "1", "owner")
    new = kubelet / ".new"
    new.write_text('{"policyName":"static","defaultCpuSet":"0-1","checksum":0}')
    new.rename(state)
    running.wait_for("leaving enforce")
    settles(owner, "0-1", "given back")
    settles(other, "0-1", "given back")
    state.unlink()


def test_refused_start_names_what_was_left_narrow(node: MimicNode, agent: Start, tmp_path: Path) -> None:
    running = agent()
    _, owner = one_cpu(node)
    settles(owner, "1", "owner")
    running.end()
    (tmp_path / "kubelet").mkdir()
    (tmp_path / "kubelet/cpu_manager_state").write_text('{"policyName":"static","defaultCpuSet":"0-1","checksum":0}')
    running.launch()
    assert running.wait() == 3
    assert f"container {owner.id[:12]} (1)" in running.log()
    assert "`cpuset-enforcer reset` gives them back" in running.log()
    assert owner.affinity() == cpus("1")


def test_other_cpu_manager_is_not_fought(node: MimicNode, agent: Start) -> None:
    # Two CPUs asked for and one given: nothing that an agent of ours could have left behind.
    pod = node.pod(GUARANTEED, "theirs", milli=2000)
    theirs = pod.container(milli=2000, spec_cpus="1")
    refused = agent(launch=True)
    assert refused.wait() == 3
    assert "somebody else gives out CPUs" in refused.log()
    assert theirs.affinity() == cpus("1")
    pod.remove()
    running = agent()
    theirs = node.pod(GUARANTEED, "theirs", milli=1000).container(milli=1000, spec_cpus="0")
    running.wait_for("leaving enforce")
    assert theirs.affinity() == cpus("0")


def test_reload_takes_a_new_config_and_keeps_the_old_on_an_error(node: MimicNode, agent: Start) -> None:
    running = agent()
    _, owner = one_cpu(node)
    settles(owner, "1", "owner")
    good = running.config.read_text()
    running.config.write_text(good + "reserved-cpu = 0\n")
    running.hup()
    running.wait_for("unknown key; nearest: reserved-cpus")
    running.config.write_text(good.replace("enforce", "audit"))
    running.hup()
    running.wait_for("leaving enforce")
    settles(owner, "0-1", "given back")
    running.config.write_text(good)
    running.hup()
    settles(owner, "1", "enforced again")


def test_agent_keeps_to_the_reserved_cpus(node: MimicNode, agent: Start) -> None:
    running = agent()
    tids = procfs.threads(running.pid) or []
    assert tids
    assert {procfs.cpus_allowed(running.pid, tid) for tid in tids} == {cpus("0")}


def test_second_agent_is_refused(node: MimicNode, agent: Start, tmp_path: Path) -> None:
    running = agent()
    again = running.command("run")
    assert again.returncode == 3
    assert "another cpuset-enforcer runs" in again.stderr


def test_storm_of_pods_ends_right(node: MimicNode, agent: Start) -> None:
    running = agent()
    node.pace = 0
    keeper_pod, keeper = one_cpu(node, "keeper")
    settles(keeper, "1", "owner")
    for number in range(10):
        pods = [node.pod(qos, f"{qos}{number}", milli=milli) for qos, milli in ((BESTEFFORT, None), (GUARANTEED, 1000))]
        for pod in pods:
            pod.container(milli=pod.milli)
        for pod in pods:
            pod.remove()
        assert keeper.affinity() == cpus("1")
    last = best(node)
    settles(last, "0", "the last one")
    wait_until(lambda: len(running.state().assignments) == 1, "nothing is left of those that went")


@pytest.mark.parametrize("lost", [False, True], ids=["state-kept", "state-lost"])
def test_killed_at_every_write_and_started_again(node: MimicNode, agent: Start, lost: bool, fs: CgroupFS) -> None:
    """strace kills the agent in its nth write; the next start moves no running owner and overlaps no two."""
    if shutil.which("strace") is None:
        pytest.skip("needs strace to kill the agent at a chosen write")
    running = agent(launch=True)
    running.end()
    node.pace = 0
    keeper_pod, keeper = one_cpu(node, "keeper")
    running.start()
    settles(keeper, "1", "owner")
    running.end()
    kills = 0
    for number in range(1, 60):
        inject = f"--inject=write,pwrite64:signal=KILL:when={number}"
        # -D: the agent is our child and the tracer its own, so that an end is the agent's end
        running.launch(("strace", "-D", "-o", "/dev/null", "-e", "trace=write,pwrite64", inject), verbose=False)
        wait_until(lambda: not running.is_alive() or "ready:" in running.log(), "ready or killed", 20)
        pods = _bustle(node)
        deadline = time.monotonic() + 0.5
        while running.is_alive() and time.monotonic() < deadline:
            time.sleep(0.02)
        killed = running.end() != 0
        kills += killed
        assert keeper.affinity() == cpus("1"), f"killed at write {number}: a running owner was moved"
        if lost:
            (running.state_dir / "state.json").unlink(missing_ok=True)
        running.start()
        _check_after(running, keeper, pods, number)
        for pod in pods:
            pod.remove()
        running.end()
        if not killed:
            break
    assert not killed, "it was still killed: the last writes were not reached"
    assert kills >= 5, "the agent was killed too seldom for this to mean anything"


def _bustle(node: MimicNode) -> list[MimicPod]:
    """A new BestEffort pod, and a second owner that does not fit."""
    pods = [node.pod(BESTEFFORT, "bustle", milli=None), node.pod(GUARANTEED, "second", milli=1000)]
    for pod in pods:
        pod.container(milli=pod.milli)
    return pods


def _check_after(running: AgentProcess, keeper: MimicContainer, pods: list[MimicPod], number: int) -> None:
    for pod in pods:
        for one in pod.containers:
            settles(one, "0", f"killed at write {number}: {pod.name}")
    assert keeper.affinity() == cpus("1"), f"after write {number}: a running owner was moved"
    state = running.state()
    assert not overlapping(state.assignments.values())
    assert state.assignments[keeper.path].cpus == cpus("1")


def test_container_is_never_without_cpus(node: MimicNode, agent: Start, fs: CgroupFS) -> None:
    """At every step of a birth the set holds at least one CPU once a process is inside."""
    agent()
    pod = node.pod(GUARANTEED, "steps", milli=1000)
    for step, one in pod.container_steps(milli=1000):
        time.sleep(0.02)
        if step is Step.ATTACH or one.pid:
            assert fs.read_effective(one.path) or CPUSet()
    settles(pod.containers[0], "1", "owner")
