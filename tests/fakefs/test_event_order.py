"""Events only say "look here again": lost, doubled or shuffled, they end where a full pass ends."""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from enforcer.core.state import State
from enforcer.kernel.watch import Event
from tests.fakefs.fake_agent import FakeAgent
from tests.fakefs.test_properties import Course, Step, steps


def feed(agent: FakeAgent, events: list[Event]) -> None:
    """Handles events one by one, each with the plan that follows it."""
    for event in events:
        dirty = agent.observer.handle(event)
        if dirty.pods:
            agent.reconciler.hot(dirty.pods)
        if dirty.everything:
            agent.full()


def disturbed(events: list[Event], seed: int) -> list[Event]:
    """Some lost, some doubled, all shuffled."""
    chance = random.Random(seed)
    kept = [event for event in events if chance.random() > 0.2]
    kept += [event for event in events if chance.random() < 0.3]
    chance.shuffle(kept)
    return kept


def owned(state: State) -> dict[str, str]:
    return {path: str(one.cpus) for path, one in state.assignments.items()}


@pytest.mark.parametrize("version", [1, 2])
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(course=steps, seed=st.integers(0, 2**32))
def test_events_in_any_order(version: int, course: list[Step], seed: int) -> None:
    folder = Path(tempfile.mkdtemp(prefix="ce-fake-"))
    one = Course(folder, version)
    try:
        for number, step in enumerate(course):
            if step[0] not in ("rest", "restart", "lost", "rescan"):
                one.play(step)
                feed(one.agent, disturbed(one.agent.watcher.drain(), seed + number))
                one.check_always()
        one.settle()
        one.check_at_rest()
        before = owned(one.agent.state)
        one.fake.fs.log.clear()
        one.agent.full()
        assert owned(one.agent.state) == before
        assert one.fake.fs.log == []
    finally:
        one.agent.close()
        shutil.rmtree(folder)
