"""AllowedCPUs through systemd for real: what it does to containers, and what UnitProperties tells of it."""

from __future__ import annotations

import select
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from enforcer.core.cpuset import CPUSet
from enforcer.core.errors import CannotWorkHereError
from enforcer.kernel.systemd import (
    PRIVATE,
    SYSTEM_BUS,
    Disconnected,
    Event,
    Reloading,
    Reply,
    UnitProperties,
    read_allowed_cpus,
)

from .kit import SystemdNode, cpus_of, effective_cpus_of, wait_until

pytestmark = pytest.mark.guest("systemd")

UID = "5a3e7f0c-1111-2222-3333-444455556666"
ALL, POOL, OWN = CPUSet.parse("0-7"), CPUSet.parse("0-1,4-7"), CPUSet.parse("2-3")
BURSTABLE = "kubepods-burstable.slice"


@pytest.fixture(params=[SYSTEM_BUS, PRIVATE], ids=["bus", "private"])
def any_units(request: pytest.FixtureRequest) -> Iterator[UnitProperties]:
    units = UnitProperties.connect([request.param])
    yield units
    units.close()


@pytest.fixture
def units() -> Iterator[UnitProperties]:
    units = UnitProperties.connect()
    yield units
    units.close()


def events(units: UnitProperties, count: int, seconds: float = 30) -> list[Event]:
    """At least `count` events, as a loop would get them."""
    found: list[Event] = []
    deadline = time.monotonic() + seconds
    while len(found) < count:
        left = deadline - time.monotonic()
        assert left > 0, f"{count} events wanted, only these came: {found}"
        writes = [units] if units.wants_write() else []
        readable, writable, _ = select.select([units], writes, [], left)
        if writable:
            units.on_writable()
        if readable:
            found += units.on_readable()
    return found


def set_and_wait(units: UnitProperties, unit: str, cpus: CPUSet | None) -> None:
    units.set_allowed_cpus(unit, cpus)
    assert events(units, 1) == [Reply(unit, cpus)]


def test_file_alone_is_lost_in_a_slice_without_tasks(node: SystemdNode) -> None:
    """Why AllowedCPUs must be set first: should this fail, a newer systemd has become kinder."""
    pod = node.pod(UID, milli_cpu=2000)
    (pod.cgroup / "cpuset.cpus").write_text(str(POOL))
    assert node.run(pod, "lost", 2000).first_affinity() == ALL


def test_first_instruction_runs_inside_the_pods_slice(node: SystemdNode, any_units: UnitProperties) -> None:
    pod = node.pod(UID, milli_cpu=2000)
    set_and_wait(any_units, pod.unit, POOL)
    container = node.run(pod, "born", 2000)
    assert container.first_affinity() == POOL == container.affinity()
    assert [moment.cpus for moment in container.moments()] == [POOL]


def test_first_instruction_runs_inside_the_qos_slice(node: SystemdNode, units: UnitProperties) -> None:
    set_and_wait(units, BURSTABLE, POOL)
    assert node.run(node.pod(UID, "burstable", 500), "born", 500).first_affinity() == POOL
    assert effective_cpus_of(node.cgroup_of("burstable")) == POOL


def test_running_scope_moves_and_keeps_its_set(node: SystemdNode, units: UnitProperties) -> None:
    pod = node.pod(UID, milli_cpu=2000)
    container = node.run(pod, "moved", 2000)
    set_and_wait(units, container.unit, OWN)
    wait_until(lambda: container.affinity() == OWN, "the container is on its own CPUs")
    node.resize(container, 1000)
    node.bus.reload()
    node.bus.set_properties(pod.unit, {"CPUWeight": ("t", 39)})
    assert cpus_of(container.cgroup) == OWN == container.affinity()


def test_reset_takes_the_property_away(node: SystemdNode, units: UnitProperties) -> None:
    pod = node.pod(UID)
    set_and_wait(units, pod.unit, POOL)
    assert read_allowed_cpus([pod.unit, BURSTABLE]) == {pod.unit: POOL, BURSTABLE: None}
    set_and_wait(units, pod.unit, None)
    assert read_allowed_cpus([pod.unit, "no-such.scope"]) == {pod.unit: None}


def test_burst_ends_with_the_newest_value_and_few_calls(node: SystemdNode, units: UnitProperties) -> None:
    pod = node.pod(UID)
    for number in range(1, 201):
        units.set_allowed_cpus(pod.unit, CPUSet.from_mask(number))
    replies = events(units, 2)
    assert [reply.cpus for reply in replies if isinstance(reply, Reply)] == [CPUSet([0]), CPUSet.from_mask(200)]
    assert (units.in_flight(), units.pending()) == ({}, {})
    assert read_allowed_cpus([pod.unit]) == {pod.unit: CPUSet.from_mask(200)}
    wait_until(lambda: cpus_of(pod.cgroup) == CPUSet.from_mask(200), "the file follows")


def test_scope_that_has_gone(node: SystemdNode, units: UnitProperties) -> None:
    container = node.run(node.pod(UID), "gone")
    node.stop(container)
    wait_until(lambda: not read_allowed_cpus([container.unit]), "systemd has forgotten the scope")
    units.set_allowed_cpus(container.unit, OWN)
    [reply] = events(units, 1)
    assert isinstance(reply, Reply)
    assert (reply.ok, reply.unit_gone) == (False, True), reply


def test_slice_that_has_gone_is_not_made_again(node: SystemdNode, units: UnitProperties) -> None:
    pod = node.pod(UID)
    node.remove(pod)
    wait_until(lambda: not read_allowed_cpus([pod.unit]), "systemd has forgotten the slice")
    units.set_allowed_cpus(pod.unit, OWN)
    [reply] = events(units, 1)
    assert isinstance(reply, Reply)
    assert reply.unit_gone, reply
    assert not pod.cgroup.exists()
    assert not [path for path in Path("/run/systemd").rglob("*AllowedCPUs*") if UID.replace("-", "_") in str(path)]


def test_reload_is_told(any_units: UnitProperties, node: SystemdNode) -> None:
    any_units.on_readable()
    node.bus.reload()
    assert events(any_units, 2) == [Reloading(True), Reloading(False)]


def test_call_during_a_reload_is_carried_out(any_units: UnitProperties, node: SystemdNode) -> None:
    pod = node.pod(UID)
    any_units.on_readable()
    with subprocess.Popen(["systemctl", "daemon-reload"]) as reload:
        assert events(any_units, 1)[0] == Reloading(True)
        any_units.set_allowed_cpus(pod.unit, OWN)
        assert Reply(pod.unit, OWN) in events(any_units, 2)
        assert reload.wait(60) == 0
    assert read_allowed_cpus([pod.unit]) == {pod.unit: OWN}


def test_bus_connection_outlives_a_reexecution_of_systemd(node: SystemdNode) -> None:
    units = UnitProperties.connect([SYSTEM_BUS])
    pod = node.pod(UID)
    subprocess.run(["systemctl", "daemon-reexec"], check=True)
    units.set_allowed_cpus(pod.unit, OWN)
    replies: list[Event] = []
    while not replies:
        replies = [event for event in events(units, 1) if isinstance(event, Reply)]
    assert replies == [Reply(pod.unit, OWN)]
    units.close()


def test_systemds_own_socket_needs_a_reconnect_after_a_reexecution(node: SystemdNode) -> None:
    units = UnitProperties.connect([PRIVATE])
    pod = node.pod(UID)
    subprocess.run(["systemctl", "daemon-reexec"], check=True)
    while not any(isinstance(event, Disconnected) for event in events(units, 1)):
        pass
    units.set_allowed_cpus(pod.unit, OWN)
    assert units.pending() == {pod.unit: OWN}
    units.reconnect(timeout=20)
    assert events(units, 1) == [Reply(pod.unit, OWN)]
    units.close()


@pytest.mark.guest("plain")
def test_without_systemd_it_says_so() -> None:
    with pytest.raises(CannotWorkHereError, match="bus_socket: No such file or directory; .*private: No such file"):
        UnitProperties.connect()
