"""The systemd guest has what the tests of the systemd driver need."""

from __future__ import annotations

from pathlib import Path

import pytest

from .kit import SystemdNode, read

pytestmark = pytest.mark.guest("systemd")


def test_systemd_is_pid_1() -> None:
    assert read(Path("/proc/1/comm")) == "systemd"


def test_runc_container_is_a_scope_below_the_pods_slice(node: SystemdNode) -> None:
    pod = node.pod("5a3e7f0c-1111-2222-3333-444455556666", milli_cpu=1000)
    container = node.run(pod, "f" * 12, 1000)
    assert container.cgroup == pod.cgroup / f"cri-containerd-{'f' * 12}.scope"
    assert node.bus.unit_property(container.unit, "Slice") == pod.unit
    assert node.bus.unit_property(container.unit, "CPUQuotaPerSecUSec") == "1s"


def test_daemon_reload_works(node: SystemdNode) -> None:
    node.bus.reload()
    assert node.bus.unit_property("kubepods.slice", "ActiveState") == "active"
