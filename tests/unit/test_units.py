"""UnitSync: what systemd is told, what its answers lead to, and what happens when it is away."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from enforcer.core.cpuset import CPUSet
from enforcer.core.errors import CannotWorkHereError
from enforcer.kernel.systemd import Disconnected, Event, Reloading, Reply
from enforcer.tally import Tally
from enforcer.units import UnitSync

SLICE = "/kubepods.slice/kubepods-burstable.slice"
UNIT = "kubepods-burstable.slice"
AB, C = CPUSet([0, 1]), CPUSet([2])


class Systemd:
    """Stands for UnitProperties: the test says what it answers."""

    def __init__(self) -> None:
        self.read_end, self.write_end = os.pipe()
        self.asked: list[tuple[str, CPUSet | None]] = []
        self.answers: list[Event] = []
        self.connected = True
        self.refuse_reconnect = False
        self.flying: dict[str, CPUSet | None] = {}

    def fileno(self) -> int:
        return self.read_end

    def wants_write(self) -> bool:
        return False

    def on_writable(self) -> None:
        return

    def pending(self) -> dict[str, CPUSet | None]:
        return {}

    def in_flight(self) -> dict[str, CPUSet | None]:
        return self.flying

    def set_allowed_cpus(self, unit: str, cpus: CPUSet | None) -> None:
        self.asked.append((unit, cpus))
        self.flying[unit] = cpus

    def on_readable(self) -> list[Event]:
        answers, self.answers = self.answers, []
        for one in answers:
            if isinstance(one, Reply):
                self.flying.pop(one.unit, None)
        return answers

    def reconnect(self) -> None:
        if self.refuse_reconnect:
            raise CannotWorkHereError("still away")
        self.connected = True


class World:
    def __init__(self) -> None:
        self.systemd = Systemd()
        self.now = 10.0
        self.files: dict[str, CPUSet] = {}
        self.tally = Tally()
        self.sync = UnitSync(self.systemd, self.files.get, lambda: self.now, self.tally)  # type: ignore[arg-type]


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    os.close(made.systemd.read_end)
    os.close(made.systemd.write_end)


def test_tells_units_only(world: World) -> None:
    world.sync.tell(SLICE, AB)
    world.sync.tell("/kubepods/burstable", AB)
    assert world.systemd.asked == [(UNIT, AB)]


def test_file_is_read_back_after_the_answer(world: World) -> None:
    world.files[SLICE] = C
    world.sync.tell(SLICE, AB)
    assert world.sync.lags(SLICE)
    world.systemd.answers = [Reply(UNIT, AB)]
    world.sync.take()
    assert world.sync.lags(SLICE), "systemd writes the file a moment after it has answered"
    assert world.sync.tick().pods == frozenset()
    assert world.now < world.sync.due() <= world.now + 0.3
    world.now += 0.3
    assert SLICE in world.sync.tick().pods
    assert not world.sync.lags(SLICE)
    assert world.tally.systemd_differed == 1


def test_file_that_is_right_asks_for_nothing(world: World) -> None:
    world.files[SLICE] = AB
    world.sync.tell(SLICE, AB)
    world.systemd.answers = [Reply(UNIT, AB)]
    world.sync.take()
    world.now += 0.3
    assert world.sync.tick().pods == frozenset()
    assert world.tally.systemd_differed == 0
    assert world.sync.due() == float("inf")


def test_gone_unit_is_forgotten(world: World) -> None:
    world.sync.tell(SLICE, AB)
    world.systemd.answers = [Reply(UNIT, AB, "org.freedesktop.systemd1.NoSuchUnit", "gone")]
    world.sync.take()
    assert not world.sync.lags(SLICE)
    assert world.sync.due() == float("inf")


def test_refusal_is_told_once(world: World, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        world.sync.tell(SLICE, AB)
        world.systemd.answers = [Reply(UNIT, AB, "org.freedesktop.DBus.Error.AccessDenied", "no")]
        world.sync.take()
    assert caplog.text.count("does not take AllowedCPUs=0-1") == 1


def test_manager_that_reexecutes_is_told_again(world: World) -> None:
    world.sync.tell(SLICE, AB)
    world.systemd.answers = [Reply(UNIT, AB, "org.freedesktop.DBus.Error.NoReply", "")]
    world.sync.take()
    world.now = world.sync.due()
    world.sync.tick()
    assert world.systemd.asked == [(UNIT, AB), (UNIT, AB)]


def test_lost_connection_comes_back_with_back_off(world: World) -> None:
    world.systemd.connected = False
    world.systemd.refuse_reconnect = True
    world.systemd.answers = [Disconnected("gone")]
    world.sync.take()
    waits = []
    for _ in range(8):
        waits.append(world.sync.due() - world.now)
        world.now = world.sync.due()
        world.sync.tick()
    assert waits[0] == pytest.approx(0.2)
    assert waits == sorted(waits)
    assert max(waits) == pytest.approx(10.0)
    world.systemd.refuse_reconnect = False
    world.systemd.read_end, old = os.dup(world.systemd.read_end), world.systemd.read_end
    os.close(old)
    world.now = world.sync.due()
    world.sync.tick()
    assert world.sync.due() == float("inf")


def test_end_of_a_reload_asks_for_a_look_at_everything(world: World) -> None:
    world.systemd.answers = [Reloading(True)]
    assert not world.sync.take().everything
    world.systemd.answers = [Reloading(False)]
    assert world.sync.take().everything
