"""The kit makes what the kubelet and runc make."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from enforcer.core.cpuset import CPUSet

from .kit import Node, QoS, cpus_of, effective_cpus_of, read, wait_until

pytestmark = pytest.mark.guest("plain", "systemd")
ALL = CPUSet.parse("0-7")
QOS: tuple[QoS, ...] = ("guaranteed", "burstable", "besteffort")
UID = "5a3e7f0c-1111-2222-3333-444455556666"


def test_guaranteed_container_has_its_limits_and_sees_all_cpus(node: Node) -> None:
    pod = node.pod(UID, milli_cpu=2000)
    container = node.run(pod, "aaaa", 2000)
    assert read(container.cgroup / "cpu.max") == "200000 100000"
    assert read(container.cgroup / "cpu.weight") == "79"
    assert read(pod.cgroup / "cpu.max") == "200000 100000"
    assert container.first_affinity() == ALL == container.affinity()
    assert read(container.cgroup / "cgroup.procs") == str(container.pid)


def test_container_with_cpus_of_its_runtime_is_born_on_them(node: Node) -> None:
    container = node.run(node.pod(UID, milli_cpu=2000), "bbbb", 2000, cpus="2-3")
    assert container.first_affinity() == CPUSet.parse("2-3") == cpus_of(container.cgroup)


def test_probe_tells_a_change_of_its_affinity(node: Node) -> None:
    container = node.run(node.pod(UID, "burstable"), "cccc")
    assert container.first_affinity() == ALL
    (container.cgroup / "cpuset.cpus").write_text("5-6")
    wait_until(lambda: len(container.moments()) > 1, "the probe saw the new set")
    assert container.moments()[1].cpus == CPUSet.parse("5-6") == effective_cpus_of(container.cgroup)


def test_names_and_places(node: Node) -> None:
    pods = {qos: node.pod(f"{n}{UID[1:]}", qos) for n, qos in enumerate(QOS)}
    root = node.cgroup_of("guaranteed")
    systemd = os.environ["ENFORCER_GUEST"] == "systemd"
    for n, (qos, pod) in enumerate(pods.items()):
        uid = f"{n}{UID[1:]}"
        level = [] if qos == "guaranteed" else [f"kubepods-{qos}.slice" if systemd else qos]
        prefix = "kubepods" if qos == "guaranteed" else f"kubepods-{qos}"
        name = f"{prefix}-pod{uid.replace('-', '_')}.slice" if systemd else f"pod{uid}"
        assert pod.cgroup == Path(root, *level, name)
        assert pod.cgroup.is_dir()


def test_resize_changes_both_limits(node: Node) -> None:
    container = node.run(node.pod(UID, milli_cpu=3000), "dddd", 2000)
    node.resize(container, 3000)
    assert read(container.cgroup / "cpu.max") == "300000 100000"
    assert read(container.cgroup / "cpu.weight") == str(1 + (3072 - 2) * 9999 // 262142)


def test_stopped_container_and_removed_pod_leave_nothing(node: Node) -> None:
    pod = node.pod(UID, "burstable", 500)
    container = node.run(pod, "eeee", 500, program="pause")
    assert read(Path(f"/proc/{container.pid}/comm")) == "pause"
    node.stop(container)
    assert not container.cgroup.exists()
    node.remove(pod)
    assert not pod.cgroup.exists()
