"""The scenes of the demo, in their order. Each changes something, says what, and checks what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from enforcer.core.cpulimits import amount
from enforcer.core.cpuset import EMPTY, CPUSet
from enforcer.core.kubepods import QoSClass
from enforcer.demo.stage import Actor, Stage
from enforcer.status.model import Names, figures_of, holders, named

_REPAIRED_WITHIN: Final = 1.0


@dataclass
class Play:
    """The scenes and who is in them. `spare`: CPUs that can be given out and are not."""

    stage: Stage
    first: Actor | None = None
    second: Actor | None = None

    @property
    def spare(self) -> int:
        return len(self.stage.allowed - self.stage.reserved - self.stage.owned())

    def run(self) -> None:
        """All scenes, up to the first in which a check does not hold: the others build on it."""
        scenes: list[tuple[str, Callable[[], None]]] = [
            ("Pods without whole CPUs share all CPUs", self.start),
            ("A Guaranteed pod that asks for whole CPUs gets them, for itself", self.whole),
            ("A Guaranteed pod that asks for a fraction shares", self.fraction),
            ("Too much is asked for: it waits, and is told for whom", self.no_room),
            ("A pod goes, the one that waits gets its CPUs", self.handed_over),
            ("A resize in place", self.resize),
            ("A container crashes and comes back to the CPUs it had", self.restart),
            ("Somebody writes to a cpuset by hand", self.disturb),
            ("The agent is killed, and started again", self.killed),
            ("All owners go", self.end),
        ]
        for number, (title, scene) in enumerate(scenes, 1):
            self.stage.title(number, title)
            scene()
            if failed := [check for check in self.stage.checks if not check.held]:
                self.stage.tell(f"The demo ends here: {len(failed)} checks failed, and the rest builds on them.")
                return

    def start(self) -> None:
        """Burstable and BestEffort pods are there before the agent."""
        stage = self.stage
        stage.enter("web", QoSClass.BURSTABLE, 500, limited=False)
        stage.enter("batch", QoSClass.BESTEFFORT, 0)
        seconds = stage.agent.start(stage.breathe)
        stage.reserved = stage.agent.says()[1].reserved
        stage.tell(f"The agent is ready after {_ms(seconds)}. Reserved, shared but never given out: {stage.reserved}.")
        stage.check_pool()
        stage.show()

    def whole(self) -> None:
        """One owner; a second beside it where the machine has the CPUs."""
        stage = self.stage
        size = 1 if self.spare < 4 else 2
        self.first = self._owner("db", size)
        if self.spare > 1:
            self._owner("queue", 1)
        stage.check_pool()
        stage.show()

    def _owner(self, name: str, size: int) -> Actor:
        stage = self.stage
        actor = stage.enter(name, QoSClass.GUARANTEED, 1000 * size)
        stage.check_owner(actor, size)
        born = actor.app.first_affinity()
        wrong = None if born == actor.own else f"it might run on {born}"
        stage.record(f"{name} was there from its very first instruction on", wrong)
        return actor

    def fraction(self) -> None:
        """500m is not exclusive, Guaranteed or not."""
        self.stage.enter("cache", QoSClass.GUARANTEED, 500)
        self.stage.check_pool()
        self.stage.check_alone()
        self.stage.show()

    def no_room(self) -> None:
        """One CPU more than there is."""
        stage = self.stage
        size = self.spare + 1
        self.second = stage.enter("late", QoSClass.GUARANTEED, 1000 * size)
        stage.tell(f"late asks for {amount(1000 * size)}; {self.spare or 'none'} can be given out.")
        stage.check("the agent says that late is unsatisfied, and who has the CPUs", self._told_so)
        stage.check_pool()
        stage.check_alone()
        stage.show()

    def _told_so(self) -> str | None:
        assert self.second is not None
        stage = self.stage
        state, info = stage.agent.says()
        if self.second.app.path not in state.unsatisfied:
            return "it does not say so"
        view = stage.view()
        stage.tell("Taken: " + "; ".join(holders(state, figures_of(view, state, info), Names(view))) + ".")
        return None

    def handed_over(self) -> None:
        """Nothing is asked of the one that waits: its limits are as they were."""
        assert self.first is not None and self.second is not None
        stage = self.stage
        stage.leave(self.first)
        began = time.monotonic()
        stage.check_owner(self.second, self.second.app.spec.milli // 1000)
        stage.tell(f"From the end of db's pod to here: {_ms(time.monotonic() - began)}.")
        stage.check_pool()
        stage.show()

    def resize(self) -> None:
        """Grown: the old CPUs and more. Shrunk: some of the old. A fraction: none."""
        assert self.second is not None
        if self.spare:
            self._grow_and_shrink(self.second)
        self._fraction_and_back(self.second)
        self.stage.show()

    def _grow_and_shrink(self, actor: Actor) -> None:
        stage, had, size = self.stage, actor.own, len(actor.own)
        actor.pod.resize(actor.app, 1000 * (size + 1))
        stage.tell(f"{actor.name} grows from {amount(1000 * size)} to {actor.asked}: it keeps what it has.")
        stage.check_owner(actor, size + 1, keeps=had)
        actor.pod.resize(actor.app, 1000 * size)
        stage.tell(f"And it shrinks again to {actor.asked}.")
        stage.check_owner(actor, size, within=actor.own)

    def _fraction_and_back(self, actor: Actor) -> None:
        stage, size = self.stage, len(actor.own)
        actor.pod.resize(actor.app, 1000 * size + 500)
        stage.tell(f"{actor.name} asks for {actor.asked}, no whole number. After 2 s like that, its CPUs go to all.")
        actor.own = EMPTY
        stage.check_pool()
        actor.pod.resize(actor.app, 1000 * size)
        stage.tell(f"{actor.name} asks for {actor.asked} again.")
        stage.check_owner(actor, size)

    def restart(self) -> None:
        """Held while it is away, back from its first instruction."""
        assert self.second is not None
        stage, late = self.stage, self.second
        late.app.stop()
        stage.tell(f"late's container has gone, its pod has not: {named(late.own)} held for it.")
        stage.check_alone(lasting=True)
        late.app = late.pod.container(milli=late.app.spec.milli)
        stage.check_owner(late, len(late.own), keeps=late.own)
        born = late.app.first_affinity()
        wrong = None if born == late.own else f"it might run on {born}"
        stage.record("late had them back from its first instruction on", wrong)
        stage.show()

    def disturb(self) -> None:
        """The owner is let out, and a stranger let in."""
        assert self.second is not None
        stage = self.stage
        everything = stage.allowed
        for actor in (self.second, stage.actors[0]):
            stage.tell(f"echo {everything} > cpuset.cpus of {actor.name}")
            self._disturbed(actor, actor.own or stage.pool)
        stage.check_alone()
        stage.check_pool()

    def _disturbed(self, actor: Actor, right: CPUSet) -> None:
        fs, path = self.stage.fs, actor.app.path
        began = time.monotonic()
        fs.write_cpus(path, self.stage.allowed)
        written = time.monotonic()
        while fs.read_effective(path) != right and time.monotonic() < written + _REPAIRED_WITHIN:
            time.sleep(0.0002)
        took = time.monotonic() - began
        now = fs.read_effective(path)
        self.stage.record(
            f"{actor.name} is back on {right} after {_ms(took)}", None if now == right else f"it is on {now}", took
        )

    def killed(self) -> None:
        """Neither the death nor the new start moves a process."""
        stage = self.stage
        before = self._places()
        stage.agent.kill()
        stage.check_lasts("the agent is killed (SIGKILL): every process stays", lambda: self._moved(before))
        moved: set[str] = set()

        def look() -> None:
            stage.breathe()
            moved.update(filter(None, [self._moved(before)]))

        seconds = stage.agent.start(look)
        stage.tell(f"It is ready again after {_ms(seconds)}.")
        stage.record("no process was moved while it started", "; ".join(moved) or None)
        stage.check_lasts("nor is one after that", lambda: self._moved(before))
        assert self.second is not None
        path, own = self.second.app.path, self.second.own
        stage.check("it knows whose the CPUs are", lambda: self._knows(path, own))
        stage.show()

    def _places(self) -> dict[str, CPUSet]:
        return {actor.name: actor.app.affinity() for actor in self.stage.actors}

    def _moved(self, before: dict[str, CPUSet]) -> str | None:
        moved = [f"{name} may run on {now}" for name, now in self._places().items() if now != before[name]]
        return ", ".join(moved) or None

    def _knows(self, path: str, own: CPUSet) -> str | None:
        mine = self.stage.agent.says()[0].assignments.get(path)
        return None if mine and mine.cpus == own else f"it says {mine.cpus if mine else 'nothing'}"

    def end(self) -> None:
        """Everything is shared again."""
        stage = self.stage
        for actor in [a for a in stage.actors if a.own]:
            stage.leave(actor)
        stage.check_pool()
        stage.show()


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 0.01 else f"{seconds * 1000:.0f} ms"
