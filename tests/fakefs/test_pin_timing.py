"""What is timed as a pin, on made trees: from the limits seen to the own set written, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakefs.cgroup_tree import FakeCgroup
from tests.fakefs.fake_agent import FakeAgent, pod
from tests.fakefs.test_reconcile import Made, gone, guaranteed, node, start


@pytest.fixture
def agents() -> Iterator[Made]:
    made: Made = []
    yield made
    for one in made:
        one.close()


@pytest.fixture(params=[1, 2])
def fake(request: pytest.FixtureRequest, tmp_path: Path) -> FakeCgroup:
    return node(tmp_path, request.param)


def pin_seconds(agent: FakeAgent) -> float:
    """The sum of all pin latencies timed so far."""
    return sum(one.total for one in agent.reconciler.tally.pin.values())


def test_a_repair_is_not_timed_as_a_pin(fake: FakeCgroup, agents: Made) -> None:
    """An owner that was decided in audit mode, or needed no write, has no pin latency of hours later."""
    agent = start(fake, agents, dry=True)
    owner = guaranteed(agent, 1, 2000)
    agent.now += 7200
    agent.applier.dry = False
    agent.full()
    assert agent.runs_on(owner) == "1-2"
    assert pin_seconds(agent) < 1
    agent.now += 7200
    fake.write(owner, "cpuset.cpus", "1-3")
    agent.pump()
    assert agent.runs_on(owner) == "1-2"
    assert pin_seconds(agent) < 1


@pytest.mark.parametrize("dry", [True, False])
def test_pods_that_come_and_go_leave_nothing_to_be_timed(fake: FakeCgroup, agents: Made, dry: bool) -> None:
    agent = start(fake, agents, dry=dry)
    for number in range(1, 5):
        path = guaranteed(agent, number, 1000)
        gone(agent, path, 100 + number)
        fake.rmdir(pod(number))
        agent.pump()
    agent.full()
    assert agent.reconciler._decided == {}


def test_a_pin_is_timed_once_by_what_began_it(fake: FakeCgroup, agents: Made) -> None:
    agent = start(fake, agents)
    guaranteed(agent, 1, 2000)
    assert [(trigger, sum(one.counts)) for trigger, one in agent.reconciler.tally.pin.items()] == [("event", 1)]
    assert pin_seconds(agent) < 1
