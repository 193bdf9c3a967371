"""Which hierarchies CgroupFS finds on made machines, and what it says where there are none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from enforcer.core.cpulimits import CPULimits
from enforcer.core.cpuset import CPUSet
from enforcer.core.errors import CannotWorkHereError
from enforcer.kernel.cgroupfs import CgroupFS
from enforcer.kernel.cgroupmounts import Hierarchy
from tests.fakefs.cgroup_tree import FakeCgroup, tree

ALL = CPUSet(range(8))
POD = "/kubepods/pod1"

both = pytest.mark.parametrize("version", [1, 2])


def node(tmp_path: Path, version: int, pod: dict[str, Any] | None = None, **more: Any) -> FakeCgroup:
    """A node with one pod of two containers."""
    inner = {"c1": {"procs": [11]}, "c2": {"procs": [12]}}
    return tree(tmp_path, {"kubepods": {"pod1": inner if pod is None else pod}}, version, **more)


@both
def test_a_folder_is_recognised(tmp_path: Path, version: int) -> None:
    node(tmp_path, version)
    fs = CgroupFS.discover(cgroup_root=str(tmp_path))
    assert (fs.version, fs.cpu_version) == (version, version)
    assert fs.cpuset_root == str(tmp_path) + ("/cpuset" if version == 1 else "")
    assert fs.cpu_root == str(tmp_path) + ("/cpu" if version == 1 else "")
    assert fs.children(POD) and sorted(fs.children(POD) or ()) == ["c1", "c2"]


def mountinfo(tmp_path: Path, *mounts: tuple[str, str, str, str]) -> str:
    """A made /proc whose mountinfo has (root, mount point, type, super options)."""
    lines = [
        f"{n} 1 0:{n} {root} {point} rw,relatime shared:1 - {fstype} {fstype} {options}\n"
        for n, (root, point, fstype, options) in enumerate(mounts, 30)
    ]
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "self/mountinfo").write_text("".join(lines))
    return str(proc)


def test_v1_controllers_mounted_together(tmp_path: Path) -> None:
    for name, file in (("cpuset", "cpuset.cpus"), ("cpu,cpuacct", "cpu.shares")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text("0\n")
    (tmp_path / "unified").mkdir()
    (tmp_path / "unified/cgroup.controllers").write_text("\n")
    proc = mountinfo(
        tmp_path,
        ("/", str(tmp_path), "tmpfs", "rw,mode=755"),
        ("/", f"{tmp_path}/unified", "cgroup2", "rw,nsdelegate"),
        ("/", f"{tmp_path}/cpuset", "cgroup", "rw,cpuset"),
        ("/", f"{tmp_path}/cpu,cpuacct", "cgroup", "rw,cpu,cpuacct"),
    )
    for fs in (CgroupFS.discover(proc), CgroupFS.discover(cgroup_root=str(tmp_path))):
        assert (fs.version, fs.cpuset_root) == (1, f"{tmp_path}/cpuset")
        assert (fs.cpu_version, fs.cpu_root) == (1, f"{tmp_path}/cpu,cpuacct")


def test_hybrid_with_cpu_in_the_unified_hierarchy(tmp_path: Path) -> None:
    (tmp_path / "cpuset").mkdir()
    (tmp_path / "cpuset/cpuset.cpus").write_text("0-7\n")
    (tmp_path / "unified/pod").mkdir(parents=True)
    for name, text in {"cgroup.controllers": "cpu io\n", "cgroup.procs": ""}.items():
        (tmp_path / "unified" / name).write_text(text)
    for name, text in {"cpu.max": "200000 100000\n", "cpu.weight": "79\n"}.items():
        (tmp_path / "unified/pod" / name).write_text(text)
    fs = CgroupFS.discover(cgroup_root=str(tmp_path))
    assert (fs.version, fs.cpu_version, fs.cpu_root) == (1, 2, f"{tmp_path}/unified")
    assert fs.read_limits("/pod") == CPULimits(200000, 100000, None, 79)
    assert fs.path_of(f"{tmp_path}/unified/pod") == fs.path_of(f"{tmp_path}/cpuset/pod") == "/pod"


def test_the_whole_hierarchy_is_better_than_a_container_s_part(tmp_path: Path) -> None:
    for name in ("a", "mnt/whole", "hidden"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("a", "mnt/whole"):
        (tmp_path / name / "cgroup.controllers").write_text("cpuset cpu\n")
        (tmp_path / name / "cgroup.procs").write_text("")
    proc = mountinfo(
        tmp_path,
        ("/", f"{tmp_path}/hidden", "cgroup2", "rw"),
        ("/docker/x", f"{tmp_path}/a", "cgroup2", "rw"),
        ("/", f"{tmp_path}/mnt/whole", "cgroup2", "rw"),
    )
    assert CgroupFS.discover(proc).cpuset_root == f"{tmp_path}/mnt/whole"


def test_a_mount_point_with_a_blank(tmp_path: Path) -> None:
    (tmp_path / "a b").mkdir()
    node(tmp_path / "a b", 2)
    proc = mountinfo(tmp_path, ("/", str(tmp_path / "a b").replace(" ", "\\040"), "cgroup2", "rw"))
    assert CgroupFS.discover(proc).read_effective(POD) == ALL


def test_no_cpuset_anywhere_says_what_there_is(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpu io memory pids\n")
    (tmp_path / "cgroup.procs").write_text("")
    with pytest.raises(CannotWorkHereError) as caught:
        CgroupFS.discover(cgroup_root=str(tmp_path))
    assert f"no cgroup hierarchy here has the cpuset controller; found: v2 at {tmp_path} (cpu io memory pids)" in str(
        caught.value
    )
    assert "cgroup_disable=" in caught.value.hint
    with pytest.raises(CannotWorkHereError, match="found: none"):
        CgroupFS.of([])


def test_a_noprefix_mount_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "cpus").write_text("0-7\n")
    with pytest.raises(CannotWorkHereError, match="cpuset controller"):
        CgroupFS.of([Hierarchy(str(tmp_path), 1, ("cpuset",))])


def test_a_cgroup_root_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(CannotWorkHereError, match=f"{tmp_path}/nobody: No such file"):
        CgroupFS.discover(cgroup_root=f"{tmp_path}/nobody")
