"""doctor on made nodes: each check sees what it is about, with the evidence and the remedy, and nothing is written."""

from __future__ import annotations

import argparse
import errno
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from enforcer import checkpoint, doctor
from enforcer.config import Config, PolicyOptions
from enforcer.core.cpuset import CPUSet
from enforcer.core.errors import CannotWorkHereError
from enforcer.core.reserved import Reservation
from enforcer.doctor import Check, Level, Place, examine, exit_code, to_text
from enforcer.kernel import procfs
from tests.fakefs.cgroup_tree import FakeCgroup, create_like_runc
from tests.fakefs.fake_agent import container, pod
from tests.fakefs.sysfs_trees import modern, write
from tests.fakefs.test_reconcile import make_pod, node


def fine(*_: object) -> None:
    pass


def refuse(code: int = errno.EPERM) -> Callable[..., None]:
    def attempt(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    return attempt


@dataclass
class Node:
    """A made node on which all is well; a test spoils one thing."""

    folder: Path
    version: int = 2
    rows: list[tuple[int, int, int, int, int]] = field(
        default_factory=lambda: [(cpu, cpu % 4, 0, 0, 0) for cpu in range(8)]
    )

    def __post_init__(self) -> None:
        self.fake: FakeCgroup = node(self.folder / "cgroup", self.version)
        write(self.folder / "sys", {**modern(self.rows), "kernel/btf/vmlinux": "BTF"})
        write(self.folder / "proc", {"sys/fs/inotify/max_user_watches": "100000", "self/mountinfo": ""})
        (self.folder / "run" / "systemd" / "system").mkdir(parents=True)
        (self.folder / "state").mkdir()
        self.mounts(state="tmpfs")
        self.config = Config(state_dir=self.folder / "state", kubelet_root=self.folder / "kubelet")
        self.place = Place(
            proc=self.folder / "proc", sys=self.folder / "sys", run=self.folder / "run",
            cgroup_root=str(self.folder / "cgroup"), root_user=lambda: True, writers=fine, uevents=fine, inotify=fine,
            systemd=fine, fifo=fine, user_masks=lambda fs, machine: True,
        )  # fmt: skip

    def mounts(self, state: str, options: str = "rw", root: str = "/") -> None:
        cgroup = f"{self.folder}/cgroup" + ("/cpuset" if self.version == 1 else "")
        lines = [
            "20 1 8:1 / / rw - ext4 /dev/vda rw",
            f"21 20 0:40 / {self.folder}/state rw - {state} {state} rw",
            f"22 20 0:41 {root} {cgroup} {options} - {'cgroup2' if self.version == 2 else 'cgroup'} x rw",
        ]
        write(self.folder / "proc", {"self/mountinfo": "\n".join(lines)})

    def checks(self, *, probe: bool = False) -> list[Check]:
        return list(examine(self.config, self.place, probe=probe))

    def check(self, name: str, *, probe: bool = False) -> Check:
        return next(check for check in self.checks(probe=probe) if check.name == name)

    def run(self, path: str, pid: int, milli: int = 1000, cpus: str = "") -> None:
        shares = milli * 1024 // 1000
        for _ in create_like_runc(
            self.fake, path, pid, cpus=cpus, quota=milli * 100, shares=shares, weight=1 + (shares - 2) * 9999 // 262142
        ):
            pass


@pytest.fixture(params=[1, 2])
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Node:
    return Node(tmp_path, request.param)


@pytest.fixture
def v2(tmp_path: Path) -> Node:
    return Node(tmp_path, 2)


def tree_of(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_all_well(made: Node) -> None:
    make_pod(made.fake, pod(1), 2000)
    made.run(container(pod(1), 1), 100, 2000)
    before = tree_of(made.folder)
    checks = made.checks(probe=True)
    assert [check for check in checks if check.level is not Level.OK] == []
    assert exit_code(checks) == 0
    assert tree_of(made.folder) == before, "doctor writes nothing"
    told = {check.name: check.evidence for check in checks}
    assert told["kubepods"] == "/kubepods: 1 pods, 1 containers, CPUs 0-7"
    assert told["CPUs"] == "8 CPUs for pods, reserved 0,4, 6 can be given out"
    assert f"cpuset is in cgroup v{made.version}" in told["cgroups"]


def spoiled(made: Node, **more: object) -> Node:
    made.place = replace(made.place, **more)  # type: ignore[arg-type]
    return made


def expect(check: Check, level: Level, *words: str) -> None:
    assert check.level is level, check
    for word in words:
        assert word in f"{check.evidence} -> {check.remedy}", check
    if level is not Level.OK:
        assert check.remedy, "a finding without a remedy"


def test_not_root(made: Node) -> None:
    expect(spoiled(made, root_user=lambda: False).check("user"), Level.FAIL, "not root", "sudo")


def test_no_cgroups_is_the_end(v2: Node) -> None:
    (v2.folder / "empty").mkdir()
    checks = spoiled(v2, cgroup_root=str(v2.folder / "empty")).checks()
    assert exit_code(checks) == 3
    expect(checks[-1], Level.FAIL, "no cgroup hierarchy here has the cpuset controller", "CONFIG_CPUSETS")


def test_no_sysfs_is_the_end(v2: Node) -> None:
    assert exit_code(spoiled(v2, sys=v2.folder / "nothing").checks()) == 3


def test_one_cpu_is_the_end(tmp_path: Path) -> None:
    small = Node(tmp_path, 2, [(0, 0, 0, 0, 0)])
    checks = small.checks()
    assert exit_code(checks) == 3
    expect(next(c for c in checks if c.name == "CPUs"), Level.FAIL, "two are needed")


def test_cgroups_mounted_read_only(made: Node) -> None:
    made.mounts("tmpfs", options="ro,nosuid")
    expect(made.check("cgroups"), Level.FAIL, "read-only", "ProtectControlGroups=no")


def test_only_a_part_of_the_cgroups_is_seen(made: Node) -> None:
    made.mounts("tmpfs", root="/docker/abc")
    expect(made.check("cgroups"), Level.WARNING, "/docker/abc", "cgroup namespace")


def test_no_kubepods(v2: Node) -> None:
    for qos in ("burstable", "besteffort"):
        v2.fake.vanish(f"/kubepods/{qos}")
    v2.fake.vanish("/kubepods")
    expect(v2.check("kubepods"), Level.WARNING, "no kubepods cgroup", "start the kubelet")


def test_a_kubepods_that_is_not_roots(v2: Node) -> None:
    os.chown(v2.fake.file("/kubepods", "x").parent, 12345, -1)
    expect(v2.check("kubepods"), Level.WARNING, "does not belong to root")


def test_cpuset_is_not_handed_on(v2: Node) -> None:
    v2.fake._fill("/kubepods", {"cgroup.subtree_control": "cpu memory"})
    expect(v2.check("controllers"), Level.WARNING, "/kubepods/cgroup.subtree_control", "enforce turns it on")


def test_cpuset_is_not_there_at_all(v2: Node) -> None:
    v2.fake._fill("/kubepods", {"cgroup.controllers": "cpu memory"})
    expect(v2.check("controllers"), Level.FAIL, "/kubepods is not given the cpuset controller", "above")


def test_no_cpu_controller(v2: Node) -> None:
    for name in ("cpu.max", "cpu.weight"):
        v2.fake.file("/kubepods", name).unlink()
    expect(v2.check("controllers"), Level.FAIL, "no cpu controller")


def test_a_reservation_that_does_not_fit(made: Node) -> None:
    made.config = replace(made.config, reservation=Reservation("c.toml: reserved-cpus", cpus=CPUSet([99])))
    expect(made.check("CPUs"), Level.FAIL, "99", "not online here")
    assert exit_code(made.checks()) == 1


def test_reserved_cpus_that_split_a_core(made: Node) -> None:
    options = PolicyOptions(full_pcpus_only=True)
    reservation = Reservation("c.toml: reserved-cpus", cpus=CPUSet([0]))
    made.config = replace(made.config, options=options, reservation=reservation)
    expect(made.check("CPUs"), Level.WARNING, "split the core 0,4", "whole cores")


def test_isolated_cpus(made: Node) -> None:
    write(made.folder / "sys", {"devices/system/cpu/isolated": "6-7"})
    expect(made.check("isolcpus"), Level.WARNING, "6-7", "stay on one of them")


def test_an_odd_machine(made: Node) -> None:
    for cpu in range(8):
        (made.folder / f"sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id").unlink()
    expect(made.check("topology"), Level.WARNING, "no physical_package_id")


def test_a_static_kubelet(made: Node) -> None:
    (made.folder / "kubelet").mkdir()
    (made.folder / "kubelet/config.yaml").write_text("cpuManagerPolicy: static\n")
    expect(made.check("kubelet"), Level.FAIL, "cpuManagerPolicy is static", "enforce refuses", "mode audit")


def test_a_kubelets_left_over_state(made: Node) -> None:
    (made.folder / "kubelet").mkdir()
    (made.folder / "kubelet/config.yaml").write_text("cpuManagerPolicy: none\n")
    (made.folder / "kubelet/cpu_manager_state").write_text('{"policyName":"static"}')
    expect(made.check("kubelet"), Level.WARNING, "left over", "remove the file")
    (made.folder / "kubelet/cpu_manager_state").write_text('{"policyName":"none"}')
    expect(made.check("kubelet"), Level.OK, "policy none")


def test_a_kubelet_config_that_cannot_be_read(made: Node) -> None:
    (made.folder / "kubelet").mkdir()
    (made.folder / "kubelet/config.yaml").write_text("{{{")
    expect(made.check("kubelet"), Level.WARNING, "not YAML")


def test_another_cpu_manager(made: Node) -> None:
    make_pod(made.fake, pod(1), 2000)
    made.run(container(pod(1), 1), 100, 2000, cpus="5-7")
    expect(made.check("pins"), Level.FAIL, "somebody else gives out whole CPUs", "5-7", "mode audit")


def test_a_single_foreign_pin(made: Node) -> None:
    make_pod(made.fake, pod(1), 500)
    made.run(container(pod(1), 1), 100, 500, cpus="5-7")
    expect(made.check("pins"), Level.WARNING, "1 containers were pinned by somebody else", "5-7")


def test_what_an_agent_left_narrow(v2: Node) -> None:
    v2.fake.write("/kubepods/burstable", "cpuset.cpus", "0-3")
    expect(v2.check("agent"), Level.WARNING, "no agent runs", "1 cgroups are still narrow", "reset")


def test_a_state_file_of_another_kind(made: Node) -> None:
    file = made.folder / "state" / "state.json"
    file.write_text("{}")
    checkpoint.load(file, procfs.boot_id())
    expect(made.check("state file"), Level.WARNING, "state.json.aside.1", "remove it")


def test_state_on_a_disk(made: Node) -> None:
    made.mounts(state="ext4")
    expect(made.check("state dir"), Level.WARNING, "on ext4", "/run")


def test_state_where_nobody_may_write(made: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    expect(made.check("state dir"), Level.FAIL, "not writable")


def test_systemd_that_does_not_answer(v2: Node) -> None:
    def away() -> None:
        raise CannotWorkHereError("systemd does not answer over D-Bus: refused", hint="let it")

    expect(spoiled(v2, systemd=away).check("systemd"), Level.FAIL, "does not answer", "let it")
    (v2.folder / "run/systemd/system").rmdir()
    expect(v2.check("systemd"), Level.OK, "not PID 1")


def test_systemd_is_not_asked_on_v1(tmp_path: Path) -> None:
    expect(spoiled(Node(tmp_path, 1), systemd=refuse()).check("systemd"), Level.OK, "cgroup v1")


@pytest.mark.parametrize(
    ("name", "key", "level", "words"),
    [
        ("fanotify", "writers", Level.WARNING, "nobody is named"),
        ("uevents", "uevents", Level.WARNING, "next rescan"),
        ("SCHED_FIFO", "fifo", Level.WARNING, "CAP_SYS_NICE"),
        ("inotify", "inotify", Level.FAIL, "max_user_instances"),
    ],
)
def test_what_the_kernel_refuses(made: Node, name: str, key: str, level: Level, words: str) -> None:
    expect(spoiled(made, **{key: refuse()}).check(name), level, "Operation not permitted", words)


def test_too_few_watches(made: Node) -> None:
    write(made.folder / "proc", {"sys/fs/inotify/max_user_watches": "20"})
    expect(made.check("inotify"), Level.WARNING, "max_user_watches is 20", "sysctl fs.inotify.max_user_watches=65536")
    need = int(made.check("inotify").evidence.split()[1])
    make_pod(made.fake, pod(1), 2000)
    made.run(container(pod(1), 1), 100, 2000)
    more = int(made.check("inotify").evidence.split()[1])
    assert more - need == 2 * (2 if made.version == 1 else 1), "a pod and a container, on v1 in two hierarchies"


def test_no_btf(made: Node) -> None:
    (made.folder / "sys/kernel/btf/vmlinux").unlink()
    expect(made.check("BTF"), Level.WARNING, "not there", "CONFIG_DEBUG_INFO_BTF")


def test_user_masks_are_only_tried_when_asked(made: Node) -> None:
    asked: list[bool] = []

    def tried(*_: object) -> bool | None:
        asked.append(True)
        return [False, None][len(asked) - 1]

    spoiled(made, user_masks=tried)
    expect(made.check("user masks"), Level.OK, "--probe")
    assert asked == []
    expect(made.check("user masks", probe=True), Level.WARNING, "erases", "6.2")
    expect(made.check("user masks", probe=True), Level.WARNING, "could not be tried")


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_the_text_fits(made: Node, columns: int) -> None:
    spoiled(made, fifo=refuse())
    lines = to_text(made.checks(), columns)
    assert all(len(line) <= columns or str(made.folder) in line for line in lines)
    assert lines[-1].endswith("1 warning, 0 fail")
    assert any(line.startswith("warning  SCHED_FIFO") for line in lines)


def test_the_command(made: Node, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "Place", lambda: made.place)
    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    assert doctor.main(parser.parse_args([]), made.config) == 0
    assert "ok       cgroups" in capsys.readouterr().out
    spoiled(made, root_user=lambda: False)
    assert doctor.main(parser.parse_args(["--json"]), made.config) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["exit"] == 1
    assert document["checks"][0] == {
        "name": "user", "level": "fail", "evidence": "this is not root, and mode enforce needs root",
        "remedy": "run it as root (sudo); without, several checks below cannot tell", "fatal": False,
    }  # fmt: skip
