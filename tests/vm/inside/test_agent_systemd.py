"""The agent where systemd owns the slices and real runc makes the scopes (systemd cgroup driver)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from enforcer.core.cpuset import CPUSet
from tests.kernel.agent_process import AgentProcess

from .kit import Container, Pod, SystemdNode, cpus_of, effective_cpus_of, wait_until

pytestmark = pytest.mark.guest("systemd")

UID = "5a3e7f0c-1111-2222-3333-{:012x}"
ALLOWED = "AllowedCPUs"


def named(number: int) -> str:
    return f"{number:064x}"


@pytest.fixture
def two_cpus(node: SystemdNode) -> SystemdNode:
    """A node of the CPUs 0 and 1, as its administrator would make it."""
    node.bus.set_properties("kubepods.slice", {ALLOWED: ("ay", b"\x03")})
    wait_until(lambda: effective_cpus_of(node.cgroup_of("guaranteed")) == CPUSet([0, 1]), "kubepods has two CPUs")
    return node


@pytest.fixture
def start(tmp_path: Path) -> Iterator[AgentProcess]:
    one = AgentProcess(tmp_path, "/kubepods.slice", fifo=True)
    yield one
    one.end()


def set_of(node: SystemdNode, unit: str) -> CPUSet:
    return CPUSet.parse(node.bus.unit_property(unit, ALLOWED).replace(" ", ","))


def slices_agree(node: SystemdNode, wanted: str, *units: tuple[str, Path]) -> None:
    """File, effective set and systemd's property of each are the set wanted."""
    for unit, cgroup in units:
        cpus = CPUSet.parse(wanted)
        wait_until(lambda g=cgroup, c=cpus: cpus_of(g) == effective_cpus_of(g) == c, f"{unit} has {wanted}")
        wait_until(lambda u=unit, c=cpus: set_of(node, u) == c, f"systemd knows that {unit} has {wanted}")


def qos_slices(node: SystemdNode) -> list[tuple[str, Path]]:
    return [(f"kubepods-{qos}.slice", node.cgroup_of(qos)) for qos in ("burstable", "besteffort")]  # type: ignore[arg-type]


def best(node: SystemdNode, number: int) -> Container:
    return node.run(node.pod(UID.format(number), "besteffort"), named(number))


def owner(node: SystemdNode, number: int) -> tuple[Pod, Container]:
    pod = node.pod(UID.format(number), milli_cpu=1000)
    return pod, node.run(pod, named(number), 1000)


def test_seed_scenario(two_cpus: SystemdNode, start: AgentProcess) -> None:
    node = two_cpus
    start.start()
    slices_agree(node, "0-1", *qos_slices(node))
    other = best(node, 9)
    assert other.first_affinity() == CPUSet([0, 1])
    pod, first = owner(node, 1)
    assert first.first_affinity() == CPUSet([1]), f"from its first instruction\n{start.log()}"
    wait_until(lambda: other.affinity() == CPUSet([0]), "the BestEffort pod is off the core")
    slices_agree(node, "0", *qos_slices(node))
    slices_agree(node, "0-1", (pod.unit, pod.cgroup))
    slices_agree(node, "1", (first.unit, first.cgroup))
    late = best(node, 8)
    assert late.first_affinity() == CPUSet([0]), "born off the core"
    _, second = owner(node, 2)
    assert second.first_affinity() == CPUSet([0]), "no room: the shared pool from the first instruction"
    start.wait_for("asks for 1 CPUs, has 0 of its own, 0 are free")
    node.stop(first)
    node.remove(pod)
    wait_until(lambda: second.affinity() == CPUSet([1]), "the second gets the core")
    assert late.affinity() == CPUSet([0])


def test_sets_last_through_what_systemd_does(node: SystemdNode, start: AgentProcess) -> None:
    start.start()
    pod = node.pod(UID.format(1), milli_cpu=2500)
    first = node.run(pod, named(1), 2000)
    own = first.first_affinity()
    assert len(own) == 2
    others = CPUSet(range(8)) - own
    other = best(node, 9)
    assert other.first_affinity() == others
    node.bus.reload()
    node.bus.set_properties("kubepods-besteffort.slice", {"CPUWeight": ("t", 3)})
    node.bus.set_properties(pod.unit, {"CPUWeight": ("t", 80)})
    sidecar = node.run(pod, named(2), 500)
    assert sidecar.first_affinity() == others, "a sidecar in the owner's pod is born off its cores"
    node.resize(first, 2000)
    node.bus.reload()
    late = best(node, 8)
    assert late.first_affinity() == others
    assert (first.affinity(), other.affinity(), sidecar.affinity()) == (own, others, others)
    assert {moment.cpus for moment in first.moments()} == {own}, "it never ran anywhere else"


def test_restart_of_the_agent_and_reset(node: SystemdNode, start: AgentProcess) -> None:
    start.start()
    pod = node.pod(UID.format(1), milli_cpu=1000)
    first = node.run(pod, named(1), 1000)
    own = first.first_affinity()
    other = best(node, 9)
    start.end()
    start.start()
    assert "wrote" not in start.log()
    assert {moment.cpus for moment in first.moments()} == {own}
    start.end()
    assert start.command("reset").returncode == 0
    assert (first.affinity(), other.affinity()) == (CPUSet(range(8)), CPUSet(range(8)))
    assert [node.bus.unit_property(unit, ALLOWED) for unit, _ in qos_slices(node)] == ["", ""]
    assert best(node, 8).first_affinity() == CPUSet(range(8))
