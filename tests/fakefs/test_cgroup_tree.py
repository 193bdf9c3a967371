"""The made kernel and the made runtime themselves, as others' tests stand on them."""

from __future__ import annotations

from errno import EACCES, EBUSY, EINVAL, ENOENT, ENOSPC, EOPNOTSUPP
from pathlib import Path
from typing import Any

import pytest

from enforcer.core.cpulimits import CPULimits
from enforcer.core.cpuset import EMPTY, CPUSet
from tests.fakefs.cgroup_tree import FakeCgroup, create_like_runc, tree

ALL = CPUSet(range(8))
POD = "/kubepods/pod1"
C1 = "/kubepods/pod1/c1"


def node(tmp_path: Path, version: int, pod: dict[str, Any] | None = None, **more: Any) -> FakeCgroup:
    """A node with one pod of two containers."""
    inner = {"c1": {"procs": [11]}, "c2": {"procs": [12]}}
    return tree(tmp_path, {"kubepods": {"pod1": inner if pod is None else pod}}, version, **more)


def cpus(text: str) -> CPUSet:
    return CPUSet.parse(text)


V1_STEPS = ["mkdir", "cpus", "mems", "attach", "mkdir-cpu", "shares", "period", "quota", "exec"]


def test_a_v1_container_is_born_in_the_measured_order(tmp_path: Path) -> None:
    fake = tree(tmp_path, {"kubepods": {"pod1": {"cpus": "0-5"}}}, 1)
    seen = []
    for step in create_like_runc(fake, C1, 77):
        limits = fake.fs.read_limits(C1)
        seen.append((step, str(fake.cpus(C1)), fake.procs(C1), limits and (limits.shares, limits.quota)))
    assert [step for step, *_ in seen] == V1_STEPS
    assert seen[0] == ("mkdir", "", [], None)
    assert seen[1] == ("cpus", "0-5", [], None)
    assert seen[3] == ("attach", "0-5", [77], None)
    assert seen[4] == ("mkdir-cpu", "0-5", [77], (1024, None))
    assert seen[5] == ("shares", "0-5", [77], (2048, None))
    assert seen[8] == ("exec", "0-5", [77], (2048, 200000))


def test_a_v1_container_with_cpus_in_its_spec_writes_them_twice(tmp_path: Path) -> None:
    fake = tree(tmp_path, {"kubepods": {"pod1": {}}}, 1)
    steps = []
    for step in create_like_runc(fake, C1, 77, cpus="0-7"):
        steps.append(step)
        if step == "cpus":
            assert fake.fs.write_cpus(C1, cpus("2-3")).ok
    assert steps == [*V1_STEPS[:5], "cpus-again", *V1_STEPS[5:]]
    assert fake.cpus(C1) == ALL, "ours was undone"


@pytest.mark.parametrize(("racy", "end"), [(False, "2-3"), (True, "0-7")])
def test_v1_a_write_at_the_bare_mkdir_may_be_overwritten(tmp_path: Path, racy: bool, end: str) -> None:
    fake = tree(tmp_path, {"kubepods": {"pod1": {}}}, 1)
    for step in create_like_runc(fake, C1, 77, racy=racy):
        if step == "mkdir":
            assert fake.fs.write_cpus(C1, cpus("2-3")).ok
    assert fake.cpus(C1) == cpus(end)


def test_v1_a_container_whose_spec_leaves_its_pod_cannot_start(tmp_path: Path) -> None:
    fake = tree(tmp_path, {"kubepods": {"pod1": {"cpus": "0-3"}}}, 1)
    with pytest.raises(PermissionError):
        list(create_like_runc(fake, C1, 77, cpus="0-7"))


@pytest.mark.parametrize(
    ("more", "steps"),
    [
        ({}, ["mkdir", "attach", "weight", "max", "exec"]),
        ({"cpus": "1-2"}, ["mkdir", "attach", "weight", "max", "cpus", "exec"]),
        ({"systemd": True}, ["mkdir", "systemd-weight", "systemd-max", "attach", "weight", "max", "exec"]),
    ],
)
def test_a_v2_container_is_born(tmp_path: Path, more: dict[str, Any], steps: list[str]) -> None:
    fake = tree(tmp_path, {"kubepods": {"pod1": {}}}, 2)
    assert list(create_like_runc(fake, C1, 77, **more)) == steps
    assert fake.fs.read_limits(C1) == CPULimits(200000, 100000, None, 79)
    assert fake.cpus(C1) == cpus(more.get("cpus", ""))
    assert fake.fs.procs(C1) == [77]
    assert fake.fs.populated(POD)


def test_v1_offline_takes_a_cpu_for_good_and_moves_the_tasks_up(tmp_path: Path) -> None:
    fake = node(tmp_path, 1, {"c1": {"cpus": "4-5", "procs": [5]}, "c2": {"cpus": "5-6", "procs": [6]}})
    fake.hotplug("0-3,6-7")
    assert fake.cpus(C1) == EMPTY
    assert fake.procs(C1) == []
    assert fake.procs(POD) == [5]
    assert fake.cpus(POD + "/c2") == cpus("6")
    fake.hotplug("0-7")
    assert fake.fs.write_cpus(C1, cpus("4-5")).errno == EACCES, "the parents lack it still"
    assert fake.fs.read_cpus("/") == ALL


def test_v2_offline_is_left_out_and_comes_back(tmp_path: Path) -> None:
    fake = node(tmp_path, 2, {"c1": {"cpus": "4-5", "procs": [5]}})
    sets = []
    for online in ("0-4,6-7", "0-3,6-7", "0-7"):
        fake.hotplug(online)
        sets.append(str(fake.fs.read_effective(C1)))
    assert sets == ["4", "0-3,6-7", "4-5"]
    assert fake.fs.read_cpus(C1) == cpus("4-5")


def test_the_made_kernel_refuses_as_the_real_one(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "2").mkdir()
    v1 = node(tmp_path / "1", 1)
    v2 = node(tmp_path / "2", 2)
    for fake, code in ((v1, EACCES), (v2, ENOENT)):
        with pytest.raises(OSError) as caught:
            fake.write("/", "cpuset.cpus", "0")
        assert caught.value.errno == code
    v1.mkdir("/fresh")
    (tmp_path / "3").mkdir()
    mixed = tree(tmp_path / "3", {"a": {"subtree_control": "cpuset", "b": {}}}, 2)
    mixed.attach("/a", 8)  # taken, as no controller but threaded ones is on; makes b "domain invalid"
    for act, expected in (
        (lambda: v1.attach("/fresh", 9), ENOSPC),
        (lambda: v2.attach(POD, 9), EBUSY),
        (lambda: mixed.attach("/a/b", 9), EOPNOTSUPP),
        (lambda: v1.rmdir(C1), EBUSY),
        (lambda: v2.rmdir("/kubepods"), EBUSY),
        (lambda: v1.write(C1, "cpuset.cpus", "3-1"), EINVAL),
        (lambda: v2.write("/kubepods", "cgroup.subtree_control", "-cpuset"), EBUSY),
        (lambda: v2.write(C1, "cpuset.cpus.effective", "1"), EINVAL),
    ):
        with pytest.raises(OSError) as caught:
            act()
        assert caught.value.errno == expected
    with pytest.raises(ValueError, match="cgroup v2 has no"):
        tree(tmp_path, {"a": {"shares": 2}}, 2)
