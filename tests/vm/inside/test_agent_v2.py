"""The agent's tests on real cgroups, in a guest with cgroup v2, 8 CPUs, SMT and two NUMA nodes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from enforcer.core.cpuset import CPUSet
from enforcer.core.kubepods import QoSClass
from enforcer.kernel.cgroupfs import CgroupFS
from enforcer.mimic import MimicNode
from tests.kernel.agent_process import AgentProcess
from tests.kernel.conftest import wait_until
from tests.kernel.test_agent import (  # noqa: F401
    PACE,
    agent,
    fs,
    node,
    test_drift_is_repaired_and_the_writer_named,
    test_other_cpu_manager_is_not_fought,
    test_seed_scenario,
    test_stop_leaves_pins_and_start_adopts_them,
)

pytestmark = pytest.mark.guest("plain")

GUARANTEED, BURSTABLE, BESTEFFORT = QoSClass.GUARANTEED, QoSClass.BURSTABLE, QoSClass.BESTEFFORT


@pytest.fixture
def whole(fs: CgroupFS) -> Iterator[MimicNode]:  # noqa: F811
    """A node of all CPUs."""
    with MimicNode(fs, f"/ce-test-whole-{os.getpid()}/kubepods", pace=PACE) as made:
        yield made


@pytest.fixture
def running(tmp_path: Path, whole: MimicNode) -> Iterator[AgentProcess]:
    one = AgentProcess(tmp_path, whole.root).start()
    yield one
    one.end()


def test_whole_cores_of_one_numa_node(whole: MimicNode, running: AgentProcess) -> None:
    other = whole.pod(BURSTABLE, "other", milli=500).container(milli=500, limited=False)
    owner = whole.pod(GUARANTEED, "four", milli=4000).container(milli=4000)
    assert owner.first_affinity() == CPUSet.parse("4-7"), "the node that is wholly free"
    wait_until(lambda: other.affinity() == CPUSet.parse("0-3"), "the others are off it", 20)
    pair = whole.pod(GUARANTEED, "two", milli=2000).container(milli=2000)
    assert pair.first_affinity() == CPUSet.parse("2-3"), "both threads of a core"
    wait_until(lambda: other.affinity() == CPUSet.parse("0-1"), "the others are off it", 20)


def test_mixed_pod(whole: MimicNode, running: AgentProcess) -> None:
    pod = whole.pod(GUARANTEED, "mixed", milli=2500)
    sandbox = pod.sandbox()
    owner = pod.container(milli=2000)
    sidecar = pod.container(milli=500)
    assert len(owner.first_affinity()) == 2
    own = owner.affinity()
    assert sidecar.first_affinity().isdisjoint(own)
    wait_until(lambda: sandbox.affinity() == CPUSet([0]), "the sandbox is on the reserved CPU", 20)
    assert sidecar.affinity() == CPUSet(range(8)) - own
