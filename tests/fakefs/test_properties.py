"""Properties of the whole, under any course of events on a made node: what is promised holds after every step."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from enforcer.core.cpuset import CPUSet
from enforcer.core.state import from_document, overlapping, to_document
from tests.fakefs.cgroup_tree import create_like_runc
from tests.fakefs.fake_agent import FakeAgent, container, pod
from tests.fakefs.test_reconcile import limits, make_pod, node

QOS = ["", "burstable", "besteffort"]
MILLI = [500, 1000, 1500, 2000, 3000, 5000]
Step = tuple[str, int, int]

steps = st.lists(
    st.tuples(
        st.sampled_from(["pod", "container", "resize", "stop", "remove", "drift", "rest", "restart", "lost", "rescan"]),
        st.integers(0, 11),
        st.integers(0, 5),
    ),
    max_size=25,
)


class Course:
    """A node on which things happen; pods by number, the containers in them by path."""

    def __init__(self, folder: Path, version: int) -> None:
        self.fake = node(folder, version)
        self.agent = FakeAgent(self.fake)
        self.pods: dict[str, int] = {}
        self.containers: dict[str, tuple[int, int]] = {}  # path -> (pid, milli)
        self.pids = itertools.count(100)
        self.moved_on_purpose: set[str] = set()

    def play(self, step: Step) -> None:
        name, which, value = step
        getattr(self, f"do_{name}")(which, value)

    def do_pod(self, which: int, value: int) -> None:
        path = pod(which, QOS[which % 3])
        if path not in self.pods:
            self.pods[path] = MILLI[value] * 2
            make_pod(self.fake, path, None if which % 3 == 2 else MILLI[value] * 2)

    def do_container(self, which: int, value: int) -> None:
        path = pod(which, QOS[which % 3])
        if path not in self.pods or sum(p.startswith(path) for p in self.containers) > 2:
            return
        pid, milli = next(self.pids), MILLI[value]
        new = container(path, pid)
        self.containers[new] = (pid, milli)
        shares = milli * 1024 // 1000
        for _ in create_like_runc(
            self.fake, new, pid, quota=milli * 100, shares=shares, weight=1 + (shares - 2) * 9999 // 262142
        ):
            pass

    def pick(self, which: int) -> str | None:
        return sorted(self.containers)[which % len(self.containers)] if self.containers else None

    def do_resize(self, which: int, value: int) -> None:
        path = self.pick(which)
        if path:
            self.containers[path] = (self.containers[path][0], MILLI[value])
            self.moved_on_purpose.add(path)
            limits(self.fake, path, MILLI[value])

    def do_stop(self, which: int, value: int) -> None:
        path = self.pick(which)
        if path:
            self.fake.exit(self.containers.pop(path)[0])
            self.fake.rmdir(path)

    def do_remove(self, which: int, value: int) -> None:
        path = pod(which, QOS[which % 3])
        if path in self.pods:
            del self.pods[path]
            for one in [c for c in self.containers if c.startswith(path)]:
                self.fake.exit(self.containers.pop(one)[0])
                self.fake.rmdir(one)
            self.fake.rmdir(path)

    def do_drift(self, which: int, value: int) -> None:
        path = self.pick(which)
        if path:
            self.fake.write(path, "cpuset.cpus", "0-7" if value % 2 else "0-3")

    def do_rest(self, which: int, value: int) -> None:
        self.agent.pump()
        self.agent.later(value)

    def do_rescan(self, which: int, value: int) -> None:
        self.agent.watcher.drain()
        self.agent.full()

    def do_restart(self, which: int, value: int) -> None:
        self.again(keep=True)

    def do_lost(self, which: int, value: int) -> None:
        self.agent.pump()
        self.settle()
        self.again(keep=False)

    def again(self, *, keep: bool) -> None:
        document = to_document(self.agent.state)
        now = self.agent.now
        self.agent.close()
        self.agent = FakeAgent(self.fake, state=from_document(document) if keep else None, now=now)

    def settle(self) -> None:
        """Until nothing is due: births over, back-offs waited out, claims lapsed."""
        self.agent.pump()
        for _ in range(3):
            self.agent.later(200)
            self.agent.full()
            self.agent.pump()

    def owners(self) -> dict[str, CPUSet]:
        return {path: one.cpus for path, one in self.agent.state.assignments.items()}

    def check_always(self) -> None:
        state = self.agent.state
        assert not overlapping(state.assignments.values())
        assert CPUSet([0]).isdisjoint(state.exclusive), "the reserved CPU is nobody's"
        assert state.exclusive < self.fake.online

    def check_at_rest(self) -> None:
        owners = self.owners()
        for path, cpus in owners.items():
            assert self.fake.where(path) == cpus
        taken = CPUSet(cpu for cpus in owners.values() for cpu in cpus)
        for path in self.containers:
            if path not in owners and path not in self.agent.state.foreign:
                assert self.fake.where(path).isdisjoint(taken), path
                assert self.fake.where(path)
        asked = {p for p, (_, milli) in self.containers.items() if milli % 1000 == 0 and "burst" not in p}
        asked = {p for p in asked if "best" not in p and p not in self.agent.state.foreign}
        waiting = set(self.agent.state.unsatisfied)
        assert asked <= owners.keys() | waiting
        free = len(self.fake.online - self.agent.state.exclusive - CPUSet([0]))
        for path in waiting & asked - owners.keys():
            assert self.containers[path][1] // 1000 > free or self.agent.state.foreign


@pytest.mark.parametrize("version", [1, 2])
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(course=steps)
def test_any_course_of_events(version: int, course: list[Step]) -> None:
    folder = Path(tempfile.mkdtemp(prefix="ce-fake-"))
    one = Course(folder, version)
    try:
        for step in course:
            before = one.owners()
            one.play(step)
            one.check_always()
            for path, cpus in one.owners().items():
                if path in before and path not in one.moved_on_purpose:
                    assert cpus == before[path], f"{step} moved a running owner"
        one.settle()
        one.check_always()
        one.check_at_rest()
        one.fake.fs.log.clear()
        one.agent.full()
        assert one.fake.fs.log == [], "a plan on the node that it made right writes nothing"
        one.again(keep=True)
        assert one.fake.fs.log == [], "a restart writes nothing"
    finally:
        one.agent.close()
        shutil.rmtree(folder)
