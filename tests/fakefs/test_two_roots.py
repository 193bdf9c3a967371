"""Two kubepods roots with different sets: each root's pods get CPUs of their own root only."""

from __future__ import annotations

from pathlib import Path

from enforcer.core.adopt import adopt
from enforcer.core.cpuset import CPUSet
from enforcer.core.node import NodeView
from enforcer.core.plan import plan
from enforcer.core.policy import Policy
from enforcer.core.state import State
from enforcer.kernel.procfs import comm
from enforcer.observe import Observer
from tests.fakefs.cgroup_tree import tree
from tests.fakefs.fake_agent import machine

ALL = "cpuset cpu memory"
UID = "5a3e7f0c-1111-2222-3333-{:012x}"


def view(folder: Path, version: int) -> NodeView:
    """/kubepods may use 0-3, /other/kubepods 4-7; each has a Guaranteed pod of 3 CPUs and a BestEffort pod."""
    level = {"subtree_control": ALL} if version == 2 else {}
    whole = {"quota": 300000, **({"shares": 3072} if version == 1 else {"weight": 118})}
    made = {}
    for number, cpus in enumerate(("0-3", "4-7")):
        owner = {f"pod{UID.format(number)}": {**level, f"{number:064x}": {**whole, "procs": [100 + number]}}}
        other = {f"pod{UID.format(10 + number)}": {**level, f"{10 + number:064x}": {"procs": [200 + number]}}}
        made[number] = {"cpus": cpus, **level, **owner, "burstable": {**level}, "besteffort": {**level, **other}}
    fake = tree(folder, {"kubepods": made[0], "other": {**level, "kubepods": made[1]}}, version)
    observer = Observer(fake.fs, machine(fake.online), lambda: 0.0, comm, roots=("/other/kubepods",))
    for _ in observer.scan():
        pass
    return observer.view


def test_owners_and_pools_stay_within_their_root(tmp_path: Path) -> None:
    for version in (1, 2):
        folder = tmp_path / str(version)
        folder.mkdir()
        seen = view(folder, version)
        policy = Policy(CPUSet([0, 4]))
        made = plan(seen, adopt(seen, State(), policy, 0.0)[0], policy, 0.0)
        owned = {one.pod.rpartition("/")[0]: str(one.cpus) for one in made.state.assignments.values()}
        assert owned == {"/kubepods": "1-3", "/other/kubepods": "5-7"}
        for write in made.writes:
            root = CPUSet.parse("0-3" if write.path.startswith("/kubepods") else "4-7")
            assert write.cpus is not None
            assert write.cpus <= root, write
