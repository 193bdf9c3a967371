"""The stage of the demo: pods with real processes, what is said about them, and checks by the kernel's own word."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from enforcer.core.cpulimits import amount
from enforcer.core.cpuset import EMPTY, CPUSet, union
from enforcer.core.kubepods import QoSClass
from enforcer.core.node import NodeView
from enforcer.core.state import State
from enforcer.demo.process import AgentProcess
from enforcer.kernel import procfs
from enforcer.kernel.cgroupfs import CgroupFS
from enforcer.kernel.sysfs import Machine
from enforcer.mimic import MimicContainer, MimicNode, MimicPod
from enforcer.observe import Observer
from enforcer.status import cpu_map
from enforcer.status.model import named

_CLASSES: Final = {
    QoSClass.GUARANTEED: "Guaranteed", QoSClass.BURSTABLE: "Burstable", QoSClass.BESTEFFORT: "BestEffort",
}  # fmt: skip
_PATIENCE: Final = 4.0
_LASTING: Final = 0.3
_FILE_DELAY: Final = 2.0

# None: it is so. Else what is found instead.
Condition = Callable[[], str | None]


@dataclass(frozen=True, slots=True)
class Check:
    """What was claimed and what came of it; `found` "" when it held, `ms` until it did."""

    what: str
    held: bool
    found: str
    ms: float


@dataclass
class Actor:
    """A pod with its sandbox and one container. `own`: the CPUs it was seen to have for itself."""

    name: str
    pod: MimicPod
    sandbox: MimicContainer
    app: MimicContainer
    own: CPUSet = EMPTY

    @property
    def asked(self) -> str:
        """For a person: "2 CPUs", "500m", "-"."""
        return amount(self.app.spec.milli) if self.app.spec.milli else "-"


class Stage:
    """What the scenes play on. `say` prints one line, `breathe` pauses for a moment and raises to end the demo."""

    def __init__(
        self, fs: CgroupFS, machine: Machine, node: MimicNode, agent: AgentProcess, checks: list[Check],
        say: Callable[[str], None], breathe: Callable[[], None], *, width: int, colour: bool,
    ) -> None:  # fmt: skip
        self.fs = fs
        self.node = node
        self.agent = agent
        self.checks = checks
        self.actors: list[Actor] = []
        self.allowed = fs.read_effective(node.root) or EMPTY
        self.reserved = EMPTY
        self.breathe = breathe
        self._machine = machine
        self._say = say
        self._width = width
        self._colour = colour

    # words

    def title(self, number: int, text: str) -> None:
        """The head of a scene."""
        self._say("")
        for line in self._wrapped(f"{number}. {text}", "", "   "):
            self._say(f"\x1b[1m{line}\x1b[0m" if self._colour else line)

    def tell(self, text: str) -> None:
        """Plain words, wrapped."""
        self.breathe()
        for line in self._wrapped(text, "   ", "   "):
            self._say(line)

    def _wrapped(self, text: str, first: str, later: str) -> list[str]:
        return textwrap.wrap(text, self._width, initial_indent=first, subsequent_indent=later, break_on_hyphens=False)

    def show(self) -> None:
        """The CPU map as the agent and the kernel have it, and each pod's process by the kernel's word."""
        deadline = time.monotonic() + _FILE_DELAY
        # Its state file is written a moment after the cgroups.
        while self._behind(self.agent.says()[0]) and time.monotonic() < deadline:
            self.breathe()
        view, (state, info) = self.view(), self.agent.says()
        for line in cpu_map(view, state, info, width=self._width - 5, colour=self._colour).splitlines():
            self._say(f"     {line}")
        for actor in self.actors:
            kind = _CLASSES[actor.pod.qos]
            words = f"{actor.name:<5}  {kind:<10}  pod {actor.pod.uid[:8]}  asks {actor.asked:<6}"
            for line in self._wrapped(f"{words}  on {actor.app.affinity()}", "     ", " " * 12):
                self._say(line)

    def _behind(self, state: State) -> bool:
        """Whether it names other owners than were seen, or pods that are gone."""
        owners = {actor.app.path: actor.own for actor in self.actors if actor.own}
        pods = {actor.pod.path for actor in self.actors}
        return {path: a.cpus for path, a in state.assignments.items()} != owners or not state.held.keys() <= pods

    def view(self) -> NodeView:
        """The demo's tree as it is now."""
        observer = Observer(self.fs, self._machine, time.monotonic, procfs.comm, roots=(self.node.root,))
        for _ in observer.scan():
            pass
        return observer.view

    # pods

    def enter(self, name: str, qos: QoSClass, milli: int, *, limited: bool = True) -> Actor:
        """A pod comes: sandbox first, then its container."""
        pod = self.node.pod(qos, name, milli=milli)
        actor = Actor(name, pod, pod.sandbox(), pod.container(milli=milli, limited=limited))
        self.actors.append(actor)
        return actor

    def leave(self, actor: Actor) -> None:
        """A pod goes."""
        self.actors.remove(actor)
        actor.pod.remove()

    def owned(self) -> CPUSet:
        """All CPUs that somebody was seen to have alone."""
        return union(actor.own for actor in self.actors)

    @property
    def pool(self) -> CPUSet:
        """Where everybody else belongs."""
        return self.allowed - self.owned()

    # checks

    def check(self, what: str, condition: Condition, seconds: float = _PATIENCE) -> bool:
        """Waits until it is so, and says whether it was, and after how long."""
        began = time.monotonic()
        found = condition()
        while found is not None and time.monotonic() < began + seconds:
            self.breathe()
            found = condition()
        self.record(what, found, time.monotonic() - began)
        return found is None

    def check_lasts(self, what: str, condition: Condition, seconds: float = _LASTING) -> None:
        """It is so, and is still so at every look for some time."""
        end = time.monotonic() + seconds
        found = condition()
        while found is None and time.monotonic() < end:
            self.breathe()
            found = condition()
        self.record(what, found, seconds)

    def record(self, what: str, found: str | None, seconds: float = 0.0) -> None:
        """Notes a check that was made elsewhere; `found` None = it held."""
        self.checks.append(Check(what, found is None, found or "", 1000 * seconds))
        text = f"ok      {what}" if found is None else f"FAILED  {what}: {found}"
        for line in self._wrapped(text, "   ", " " * 11):
            self._say(line)

    def check_owner(self, actor: Actor, count: int, *, keeps: CPUSet = EMPTY, within: CPUSet | None = None) -> None:
        """It has `count` CPUs of its own, with those of `keeps` among them, all of `within`; and nobody else has."""
        taken = union(a.own for a in self.actors if a is not actor) | self.reserved

        def owns() -> str | None:
            now = actor.app.affinity()
            fits = len(now) == count and now.isdisjoint(taken) and keeps <= now and (within is None or now <= within)
            return None if fits else f"it may run on {now}"

        if self.check(f"{actor.name} has {amount(1000 * count)} of its own", owns):
            actor.own = actor.app.affinity()
        self.check_alone()

    def check_alone(self, *, lasting: bool = False) -> None:
        """No process may run on a CPU that another one owns."""
        owned = self.owned()
        check = self.check_lasts if lasting else self.check
        check(f"no other process may run on {named(owned)}", lambda: self._stranger(owned))

    def check_pool(self) -> None:
        """Every container without CPUs of its own has exactly the shared pool."""
        names = ", ".join(a.name for a in self.actors if not a.own)
        self.check(f"{names} may run on the whole shared pool, {self.pool}", self._out_of_pool)

    def _stranger(self, owned: CPUSet) -> str | None:
        for actor in self.actors:
            for name, one in ((actor.name, actor.app), (f"the sandbox of {actor.name}", actor.sandbox)):
                mine = actor.own if one is actor.app else EMPTY
                if one.pid and not one.affinity().isdisjoint(owned - mine):
                    return f"{name} may run on {one.affinity()}"
        return None

    def _out_of_pool(self) -> str | None:
        for actor in self.actors:
            if not actor.own and actor.app.affinity() != self.pool:
                return f"{actor.name} may run on {actor.app.affinity()}"
        return None
