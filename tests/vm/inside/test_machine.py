"""The guest is the machine that the other tests here take it for."""

from __future__ import annotations

from pathlib import Path

import pytest

from .kit import CGROUPS, read

pytestmark = pytest.mark.guest("plain", "systemd")
CPU = Path("/sys/devices/system/cpu")


def test_eight_cpus_are_online() -> None:
    assert read(CPU / "online") == "0-7"


def test_two_numa_nodes_of_one_socket_each() -> None:
    nodes = Path("/sys/devices/system/node")
    assert [read(nodes / f"node{node}/cpulist") for node in (0, 1)] == ["0-3", "4-7"]
    assert [read(CPU / f"cpu{cpu}/topology/physical_package_id") for cpu in (0, 3, 4, 7)] == ["0", "0", "1", "1"]
    assert read(nodes / "node0/distance").split() == ["10", "21"]


@pytest.mark.parametrize("cpu", range(8))
def test_every_core_has_two_threads(cpu: int) -> None:
    assert read(CPU / f"cpu{cpu}/topology/thread_siblings_list") == f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}"


def test_cgroup_v2_has_the_cpuset_controller() -> None:
    assert {"cpuset", "cpu"} <= set(read(CGROUPS / "cgroup.controllers").split())


def test_hotplug_can_be_played() -> None:
    assert (CPU / "cpu5/online").exists()


def test_kernel_tells_its_types() -> None:
    assert Path("/sys/kernel/btf/vmlinux").stat().st_size > 1 << 20
