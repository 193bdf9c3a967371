"""simulate is enforce without the writes: on the same node both end with the same owners and the same sets."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from enforcer.apply import Applier
from enforcer.config import Config, PolicyOptions
from enforcer.core.adopt import adopt
from enforcer.core.cpulimits import CPULimits
from enforcer.core.cpuset import EMPTY, CPUSet
from enforcer.core.node import Group, NodeView
from enforcer.core.plan import plan
from enforcer.core.policy import Policy
from enforcer.core.state import State, from_document, to_document
from enforcer.core.whatif import settled
from enforcer.describe import parse
from enforcer.kernel.cgroupfs import CgroupFS, WriteResult
from enforcer.observe import Observer
from enforcer.reconcile import Reconciler
from enforcer.record import Recorded, archive, scanned
from enforcer.record.document import from_json, to_json
from enforcer.simulate import Simulation, simulate
from tests.fakefs.cgroup_tree import FakeCgroup, create_like_runc
from tests.fakefs.fake_agent import FakeAgent, container, machine, pod
from tests.fakefs.test_reconcile import make_pod, node
from tests.unit.random_nodes import QOS, described

PURE = 500
TREES = 40


# --- 1. pure views: the other side is enforce's own Reconciler over a kernel kept in two dictionaries


class DictKernel(CgroupFS):
    """cpuset.cpus and what each cgroup may run on, in dictionaries: the writes of an Applier go there."""

    def __init__(self, view: NodeView) -> None:
        super().__init__(view.version, "/nowhere", view.version, "/nowhere")
        self.cpus: dict[str, CPUSet] = {}
        self.log: list[tuple[str, str]] = []
        self.top: dict[str, CPUSet] = {}
        for path, group in groups(view).items():
            self.cpus[path] = group.cpus or EMPTY
            if path in view.slices and view.slices[path].is_root:
                self.top[path] = group.effective

    def effective(self, path: str) -> CPUSet:
        if path in self.top:
            return self.top[path]
        above = self.effective(path.rpartition("/")[0])
        mine = self.cpus[path] & above
        return (mine or above) if self.version == 2 else mine

    def write_cpus(self, path: str, cpus: CPUSet) -> WriteResult:
        assert path in self.cpus and cpus, "an unknown cgroup or an empty set is never written"
        if self.version == 1:
            assert cpus <= self.cpus.get(path.rpartition("/")[0], cpus), "EACCES: wider than the parent"
            below = [c for p, c in self.cpus.items() if p.rpartition("/")[0] == path]
            assert all(c <= cpus for c in below), "EBUSY: a child is wider"
        return self.wrote(path, cpus)

    def clear_cpus(self, path: str, possible: CPUSet) -> WriteResult:
        return self.wrote(path, EMPTY)

    def wrote(self, path: str, cpus: CPUSet) -> WriteResult:
        self.cpus[path] = cpus
        self.log.append((path, str(cpus)))
        return WriteResult(path, cpus, cpus, self.effective(path), None, False, self.version)


def groups(view: NodeView) -> dict[str, Group]:
    found: dict[str, Group] = {}
    for one in view.slices.values():
        found[one.group.path] = one.group
        for each in one.pods.values():
            found[each.group.path] = each.group
            found |= {path: c.group for path, c in each.containers.items()}
    return found


class Still(Observer):
    """An Observer that sees nothing by itself: its view is the one it was given, and what we wrote ourselves."""

    def __init__(self, view: NodeView, fs: CgroupFS) -> None:
        shape = machine(view.online)
        super().__init__(fs, shape, lambda: 0.0, lambda pid: None)
        self.view = view


def enforced(recorded: Recorded, running: State | None = None) -> tuple[State, DictKernel]:
    """What enforce makes of the node: its own adopt(), Reconciler and Applier."""
    fs = DictKernel(recorded.view)
    state = running or adopt(recorded.view, recorded.state, recorded.policy, recorded.now)[0]
    applier = Applier(fs, recorded.machine.possible, lambda seconds: None, None, dry=False)
    reconciler = Reconciler(
        Still(recorded.view, fs), applier, recorded.policy, lambda: recorded.now, state=state
    )  # fmt: skip
    for _ in reconciler.settle():
        pass
    return reconciler.current_state(), fs


def decided(state: State) -> dict[str, object]:
    return {
        "owners": {path: str(one.cpus) for path, one in state.assignments.items()},
        "waiting": {path: (one.asked, one.has) for path, one in state.unsatisfied.items()},
        "held": {path: [str(h.cpus) for h in holds] for path, holds in state.held.items()},
        "foreign": {path: str(cpus) for path, cpus in state.foreign.items()},
        "written": {path: str(cpus) for path, cpus in state.written.items()},
        "shared": str(state.shared),
    }


def test_the_same_on_500_random_nodes() -> None:
    owners = waiting = foreign = 0
    for seed in range(PURE):
        recorded = parse(described(random.Random(seed)), f"node {seed}")
        simulated = simulate(recorded)
        state, kernel = enforced(recorded)
        assert decided(simulated.after) == decided(state), seed
        assert [(w.path, str(w.cpus or EMPTY)) for w in simulated.stages[0].done.plan.writes] == kernel.log, seed
        for path, group in groups(simulated.view).items():
            assert (group.cpus or EMPTY) == kernel.cpus[path], (seed, path)
            assert group.effective == kernel.effective(path), (seed, path)
        again = plan(simulated.view, simulated.after, recorded.policy, recorded.now)
        assert again.writes == (), f"node {seed}: a plan on the node that it made right writes nothing"
        owners += len(state.assignments)
        waiting += len(state.unsatisfied)
        foreign += len(state.foreign)
    assert min(owners, waiting, foreign) > 50, "the nodes are no test of anything"


def test_the_same_when_owners_let_go() -> None:
    """Limits that are whole no more: sets of single containers are taken away again, which no start does."""
    cleared = 0
    for seed in range(100):
        recorded = parse(described(random.Random(seed)), f"node {seed}")
        before = simulate(recorded)
        view = before.view
        for path in before.after.assignments:
            one = view.find_container(path)
            assert one is not None
            view = view.with_container(replace(one, limits=CPULimits(150_000, 100_000, shares=1536)))
        changed = replace(recorded, view=view, state=before.after, now=50.0)
        done = settled(view, before.after, recorded.policy, changed.now)
        state, kernel = enforced(changed, before.after)
        assert decided(done.state) == decided(state), seed
        assert not state.assignments.keys() & before.after.assignments.keys()
        assert {p: g.effective for p, g in groups(done.view).items()} == {p: kernel.effective(p) for p in kernel.cpus}
        cleared += sum(write.cpus is None for write in done.plan.writes)
    assert cleared > 20


def test_the_same_from_a_file() -> None:
    for seed in range(60):
        recorded = parse(described(random.Random(seed)), f"node {seed}")
        packed = archive.pack(to_json(recorded))
        back = from_json(archive.unpack(packed, "f"), "f")
        assert to_json(back) == to_json(recorded)
        assert decided(simulate(back).after) == decided(simulate(recorded).after)


# --- 2. made trees, with a real inotify agent on the other side


@dataclass
class Tree:
    """A made node with pods, and the same node as `record` sees it."""

    fake: FakeCgroup
    threads: int
    policy: dict[str, object]
    comms: dict[int, str]

    def recorded(self, state: State | None = None, now: float = 1000.0) -> Recorded:
        found = scanned(
            self.fake.fs, machine(self.fake.online, self.threads), Config(), lambda: now,
            lambda pid: self.comms.get(pid, "app"),
        )  # fmt: skip
        policy = replace(Policy(CPUSet([0])), **self.policy)  # type: ignore[arg-type]
        return replace(found, policy=policy, state=state or State())

    def agent(self, state: State | None = None) -> FakeAgent:
        names = self.comms

        class Informed(FakeAgent):
            """Knows the processes' names from the start on."""

            @property
            def comms(self) -> dict[int, str]:
                return names

            @comms.setter
            def comms(self, empty: dict[int, str]) -> None:
                pass

        return Informed(self.fake, state=state, threads=self.threads, **self.policy)


def grown(folder: Path, seed: int) -> Tree:
    """Pods and containers of all kinds, made by a kubelet and a runtime while no agent was there."""
    chance = random.Random(seed)
    fake = node(folder, chance.choice([1, 2]), online=f"0-{chance.choice([3, 7, 15])}")
    options = PolicyOptions(full_pcpus_only=chance.random() < 0.2).allocation()
    made = Tree(fake, chance.choice([1, 2]), {"options": options, "strict": chance.random() < 0.2}, {})
    for number in range(chance.randrange(6)):
        grow_pod(made, number, chance)
    return made


def grow_pod(made: Tree, number: int, chance: random.Random) -> str:
    qos = chance.choice(QOS)
    path = pod(number, "" if qos == "guaranteed" else qos)
    sizes = [None if qos == "besteffort" else chance.choice([500, 1000, 2000, 2000, 3000, 6000]) for _ in range(2)]
    sizes = sizes[: chance.choice([1, 1, 2])]
    make_pod(made.fake, path, None if qos == "besteffort" else sum(size or 0 for size in sizes))
    grow_container(made, container(path, 1), 1000 + 10 * number, None, comm="pause")
    for place, milli in enumerate(sizes):
        grow_container(made, container(path, 2 + place), 1001 + 10 * number + place, milli)
    return path


def grow_container(made: Tree, path: str, pid: int, milli: int | None, comm: str = "app") -> None:
    made.comms[pid] = comm
    shares = 2 if milli is None else milli * 1024 // 1000
    quota = None if milli is None else milli * 100
    weight = 1 + (shares - 2) * 9999 // 262142
    for _ in create_like_runc(made.fake, path, pid, quota=quota, shares=shares, weight=weight):
        pass


@pytest.fixture
def folder() -> Iterator[Path]:
    # in memory where there is such a place: thousands of small writes
    memory = Path("/dev/shm")
    made = Path(tempfile.mkdtemp(prefix="ce-fake-", dir=memory if memory.is_dir() else None))
    yield made
    shutil.rmtree(made)


def same_sets(simulated: NodeView, fake: FakeCgroup) -> None:
    for path, group in groups(simulated).items():
        assert group.effective == fake.where(path), path


@pytest.mark.parametrize("seed", range(TREES))
def test_the_same_on_made_trees(folder: Path, seed: int) -> None:
    made = grown(folder, seed)
    simulated = simulate(made.recorded())
    made.fake.fs.log.clear()
    agent = made.agent()
    try:
        written = [(path, text) for path, name, text in made.fake.fs.log if name == "cpuset.cpus" and text.strip()]
        assert [(w.path, str(w.cpus)) for w in simulated.stages[0].done.plan.writes if w.cpus] == written
        assert decided(simulated.after) == decided(agent.state)
        same_sets(simulated.view, made.fake)
        comes_and_goes(made, agent, seed)
    finally:
        agent.close()


def comes_and_goes(made: Tree, agent: FakeAgent, seed: int) -> None:
    """The what-if of one pod that comes, and then of one that goes, beside the same done to the running agent."""
    chance = random.Random(1000 + seed)
    sizes = [chance.choice([500, 1000, 2000, 4000]) for _ in range(chance.choice([1, 2]))]
    new = pod(99)
    uid = new.removeprefix("/kubepods/pod")
    recorded = made.recorded(agent.state)
    running = replace(recorded, info=replace(recorded.info, running=True, mode="enforce"))
    simulated = simulate(running, [("add", f"{uid}={'+'.join(f'{size}m' for size in sizes)}")])
    make_pod(made.fake, new, sum(sizes))
    grow_container(made, container(new, 1), 9000, None, comm="pause")
    for place, milli in enumerate(sizes):
        grow_container(made, container(new, 2 + place), 9001 + place, milli)
    rested(agent)
    names = {f"{new}/c{place + 1}": container(new, 2 + place) for place in range(len(sizes))}
    owners = {names.get(path, path): str(one.cpus) for path, one in simulated.after.assignments.items()}
    assert owners == {path: str(one.cpus) for path, one in agent.state.assignments.items()}
    waiting = {names.get(path, path) for path in simulated.after.unsatisfied}
    assert waiting == set(agent.state.unsatisfied)
    assert str(simulated.after.shared) == str(agent.state.shared)
    gone = next(iter(sorted(p.group.path for p in running.view.pods())), None)
    if gone is not None:
        goes(made, agent, gone, simulated)


def goes(made: Tree, agent: FakeAgent, path: str, before: Simulation) -> None:
    recorded = made.recorded(agent.state)
    running = replace(recorded, info=replace(recorded.info, running=True, mode="enforce"))
    simulated = simulate(running, [("remove", path)])
    made.fake.vanish(path)
    rested(agent)
    assert decided(simulated.after)["owners"] == decided(agent.state)["owners"]
    assert set(simulated.after.unsatisfied) == set(agent.state.unsatisfied)
    same_sets(simulated.view, made.fake)


def rested(agent: FakeAgent) -> None:
    agent.pump()
    for _ in range(3):
        agent.later(15)
        agent.full()


def test_a_recorded_tree_is_the_tree(folder: Path) -> None:
    made = grown(folder, 7)
    recorded = made.recorded()
    agent = made.agent()
    agent.close()
    live = made.recorded(from_document(to_document(agent.state)))
    back = from_json(archive.unpack(archive.pack(to_json(live)), "f"), "f")
    assert decided(simulate(back).after) == decided(agent.state)
    assert simulate(back).stages[0].done.plan.writes == (), "the running node is as it must be"
    assert recorded.processes and set(recorded.processes.values()) == {1}
