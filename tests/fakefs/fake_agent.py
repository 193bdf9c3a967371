"""The agent's own parts on a made cgroup tree: real inotify, a clock that the test turns, no process of its own."""

from __future__ import annotations

from dataclasses import replace

from enforcer.apply import Applier
from enforcer.core.adopt import adopt
from enforcer.core.cpuset import CPUSet
from enforcer.core.policy import Policy
from enforcer.core.state import State
from enforcer.core.topology import CPUTopology
from enforcer.kernel.sysfs import Machine
from enforcer.kernel.watch import Watcher
from enforcer.observe import FILES, Observer
from enforcer.reconcile import Reconciler
from tests.fakefs.cgroup_tree import FakeCgroup

UID = "5a3e7f0c-1111-2222-3333-{:012x}"


def pod(number: int, qos: str = "") -> str:
    """A pod's path with the cgroupfs driver; qos "" = Guaranteed."""
    return f"/kubepods/{qos + '/' if qos else ''}pod{UID.format(number)}"


def container(pod_path: str, number: int) -> str:
    """A container's path in a pod."""
    return f"{pod_path}/{number:064x}"


def machine(online: CPUSet, threads: int = 1) -> Machine:
    """One socket, `threads` neighbouring CPUs to a core."""
    topology = CPUTopology.from_rows((cpu, cpu // threads * threads, 0, 0, 0) for cpu in online)
    return Machine(topology, online, online, online, CPUSet(), CPUSet(), threads > 1, ())


class FakeAgent:
    """What `cpuset-enforcer run` is made of, turned by hand: `pump()` handles what has happened."""

    def __init__(
        self, fake: FakeCgroup, *, reserved: str = "0", state: State | None = None, dry: bool = False,
        now: float = 1000.0, threads: int = 1, **policy: object,
    ) -> None:
        self.fake = fake
        self.now = now
        self.comms: dict[int, str] = {}
        self.policy = replace(Policy(CPUSet.parse(reserved)), **policy)  # type: ignore[arg-type]
        self.applier = Applier(fake.fs, fake.possible, lambda seconds: None, None, dry=dry)
        self.watcher = Watcher(FILES)
        self.observer = Observer(
            fake.fs, machine(fake.online, threads), lambda: self.now, lambda pid: self.comms.get(pid, "app"),
            watcher=self.watcher, ours=self.applier.wrote_lately,
        )  # fmt: skip
        for _ in self.observer.scan():
            pass
        adopted, self.notes = adopt(self.observer.view, state or State(), self.policy, self.now)
        for path, cpus in adopted.written.items():
            self.applier.remember(path, cpus)
        self.reconciler = Reconciler(self.observer, self.applier, self.policy, lambda: self.now, state=adopted)
        self.full()

    @property
    def state(self) -> State:
        return self.reconciler.current_state()

    def full(self) -> None:
        """A full pass, as at the start and at each rescan."""
        for _ in self.reconciler.full():
            pass

    def pump(self, most: int = 50) -> None:
        """Handles events until there are none."""
        for _ in range(most):
            events = self.watcher.drain()
            if not events:
                return
            everything = False
            pods: frozenset[str] = frozenset()
            for event in events:
                dirty = self.observer.handle(event)
                everything |= dirty.everything
                pods |= dirty.pods
            if pods:
                self.reconciler.hot(pods)
            if everything:
                self.full()
        raise AssertionError("the agent keeps writing: it does not come to rest")

    def later(self, seconds: float) -> None:
        """Time goes by, and what is due is done."""
        self.now += seconds
        _, births = self.observer.due_births()
        for path in births:
            self.observer.look(path)
        due = births | self.reconciler.due_pods()
        if due:
            self.reconciler.hot(due)
        if self.now >= self.reconciler.wake_at:
            self.reconciler.wake_at = float("inf")
            for _ in self.reconciler.settle():
                pass
        self.pump()

    def cpus(self, path: str) -> str:
        """cpuset.cpus as it stands in the tree."""
        return self.fake.read(path, "cpuset.cpus")

    def runs_on(self, path: str) -> str:
        """Where its tasks may run."""
        return str(self.fake.where(path))

    def close(self) -> None:
        """Ends the watches."""
        self.watcher.close()
