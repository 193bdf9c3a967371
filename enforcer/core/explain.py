"""explain: why a container has the CPUs it has or has none, and whose a CPU is. Pure; every answer comes from plan().

Each reason has a stable word (`kind`) and is a fact about the node that can be looked up; a "what if" among them was
tried with plan() itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Final

from enforcer.core.allocation import SMTAlignmentError, take_with_reasons
from enforcer.core.allocation_steps import Step, steps
from enforcer.core.cpulimits import agreement, amount, shares_only_cpus
from enforcer.core.cpuset import EMPTY, CPUSet, union
from enforcer.core.decide import Draft, asked_cpus
from enforcer.core.errors import NotEnoughCPUs
from enforcer.core.node import ContainerView, NodeView, Phase, PodView, Role, parent_of
from enforcer.core.plan import Plan, Write, plan
from enforcer.core.policy import Policy
from enforcer.core.state import Assignment, State, Unsatisfied

MOST_TRIED: Final = 20  # holders whose going is tried out for one that waits


class Verdict(StrEnum):
    """What a container has. PARTLY: fewer CPUs of its own than it asks for."""

    OWN = "own"
    PARTLY = "partly"
    WAITING = "waiting"
    FOREIGN = "foreign"
    SANDBOX = "sandbox"
    SHARED = "shared"


class Hold(StrEnum):
    """How somebody has CPUs. HELD: for the pod of an exited container. CLAIMED: for a pod that is starting (v1)."""

    OWN = "own"
    HELD = "held"
    CLAIMED = "claimed"
    FOREIGN = "foreign"


@dataclass(frozen=True, slots=True)
class Because:
    """One reason. `kind` is a stable word, `text` a sentence for a person, without names of pods; the other fields are
    what it is about, where it has that: CPUs, a number of them, another cgroup."""

    kind: str
    text: str
    cpus: CPUSet = EMPTY
    number: int = 0
    path: str = ""


@dataclass(frozen=True, slots=True)
class Holding:
    """CPUs that a container (OWN, FOREIGN) or a pod (HELD, CLAIMED) has for itself."""

    path: str
    cpus: CPUSet
    how: Hold


@dataclass(frozen=True, slots=True)
class Placement:
    """Why an owner has these CPUs. `now` is what it would get if it were placed at this moment, the others staying;
    None: nothing could be given. `steps` describe the CPUs it has, chosen from `free` (its own included)."""

    steps: tuple[Step, ...]
    free: CPUSet
    now: CPUSet | None


@dataclass(frozen=True, slots=True)
class ContainerAnswer:
    """`asked` in words; `asked_cpus` None = none of its own; `may_run` as the kernel grants it; `pending`: decided by
    this explanation, the agent has not said so yet; `writes` are what is missing for the set to be as decided."""

    path: str
    pod: str
    qos: str
    role: str
    verdict: Verdict
    asked: str
    asked_cpus: int | None
    own: CPUSet
    may_run: CPUSet
    because: tuple[Because, ...]
    pending: bool = False
    placement: Placement | None = None
    waiting: Unsatisfied | None = None
    holders: tuple[Holding, ...] = ()
    after_restart: tuple[Because, ...] = ()
    amiss: tuple[Because, ...] = ()
    writes: tuple[Write, ...] = ()


@dataclass(frozen=True, slots=True)
class CPUAnswer:
    """One CPU. `holder` None = nobody's alone. `may_run`: containers whose tasks may run there now, by path."""

    cpu: int
    online: bool
    allowed: bool
    reserved: bool
    isolated: bool
    shared: bool
    free: bool
    holder: Holding | None
    siblings: CPUSet
    places: Mapping[str, int]
    may_run: tuple[str, ...]
    strangers: tuple[str, ...]
    because: tuple[Because, ...]


@dataclass(frozen=True)
class Explainer:
    """Answers about one node. `state` is what the agent says, or what adopt() makes of the tree where none runs;
    `isolated` are the CPUs of isolcpus=, `conflicts` as in the agent's own figures: cgroup -> (set found, repairs).
    `enforced`: an agent writes the sets, so what the kernel shows otherwise is amiss."""

    view: NodeView
    state: State
    policy: Policy
    now: float
    isolated: CPUSet = EMPTY
    conflicts: Mapping[str, tuple[CPUSet, int]] = field(default_factory=dict)
    enforced: bool = True

    @cached_property
    def plan(self) -> Plan:
        """What the agent would do now."""
        return plan(self.view, self.state, self.policy, self.now)

    @property
    def decided(self) -> State:
        """The state that this plan comes to."""
        return self.plan.state

    @cached_property
    def draft(self) -> Draft:
        """The pools by the decided state."""
        return Draft(self.view, self.decided, self.policy, self.now)

    # containers

    def container(self, path: str) -> ContainerAnswer:
        """Raises KeyError for a path that is no container here."""
        pod, one = self.view.find_pod(parent_of(path)), self.view.find_container(path)
        if pod is None or one is None:
            raise KeyError(path)
        mine, waiting = self.decided.assignments.get(path), self.decided.unsatisfied.get(path)
        answer = ContainerAnswer(
            path=path,
            pod=pod.group.path,
            qos=pod.ref.qos,
            role=one.role,
            verdict=self._verdict(path, one, mine, waiting),
            asked=asked_words(one),
            asked_cpus=asked_cpus(one, self.policy) if pod.guaranteed else None,
            own=mine.cpus & self.view.online if mine else EMPTY,
            may_run=one.group.effective,
            because=(),
            pending=mine is not None and path not in self.state.assignments,
            waiting=waiting,
            writes=tuple(write for write in self.plan.writes if write.path == path),
            amiss=tuple(self._amiss(path, one, mine)),
        )
        return self._with_reasons(answer, pod, one, mine)

    def _verdict(
        self, path: str, one: ContainerView, mine: Assignment | None, waiting: Unsatisfied | None
    ) -> Verdict:
        if mine is not None:
            return Verdict.PARTLY if waiting else Verdict.OWN
        if waiting is not None:
            return Verdict.WAITING
        if path in self.decided.foreign:
            return Verdict.FOREIGN
        return Verdict.SANDBOX if one.role in (Role.SANDBOX, Role.CONMON) else Verdict.SHARED

    def _with_reasons(
        self, answer: ContainerAnswer, pod: PodView, one: ContainerView, mine: Assignment | None
    ) -> ContainerAnswer:
        because: list[Because] = []
        if mine is not None:
            because += self._owner(one, mine)
            answer = replace(answer, placement=self.placement(mine), after_restart=tuple(self._restart(one, mine)))
        if answer.waiting is not None:
            because += self._no_room(answer.waiting, pod)
            answer = replace(answer, holders=self.holders(without=answer.path))
        if answer.verdict is Verdict.FOREIGN:
            cpus = self.decided.foreign[answer.path]
            because.append(Because("foreign", f"somebody else gave it CPUs {cpus}; that is left alone", cpus))
        elif mine is None and answer.waiting is None:
            because += why_shared(pod, one, self.policy)
            if not self.view.allowed:
                because.append(Because("no-cpus", "the kubepods root has no CPU that is online"))
        return replace(answer, because=tuple(because))

    def _owner(self, one: ContainerView, mine: Assignment) -> Iterator[Because]:
        asked = asked_cpus(one, self.policy)
        if asked is not None:
            yield Because("asks", f"it sits in a Guaranteed pod and asks for {_cpus(asked)}: {limits_words(one)}",
                          number=asked)  # fmt: skip
        else:
            text = f"it was given {_cpus(mine.count)}; its limits do not say so any more ({limits_words(one)})"
            yield Because("settling", f"{text}, it keeps them until that has stood for {self.policy.settle:g} s")
        gone = mine.cpus - self.view.allowed
        if gone:
            yield Because("gone", f"CPUs {gone} of its own are offline or not for pods any more", gone)

    def placement(self, mine: Assignment) -> Placement:
        """Why an owner has these CPUs, recomputed against what is free now and its own."""
        own = mine.cpus & self.view.topology.cpus
        free = self.draft.free_for(mine.pod) | own
        try:
            taken = take_with_reasons(self.view.topology, free, mine.count, self.policy.options)
        except (NotEnoughCPUs, SMTAlignmentError):
            taken = None
        if taken is not None and taken.cpus == own:
            return Placement(taken.steps, free, own)
        mine_now = steps(self.view.topology, own, free=free, keep=EMPTY, near=EMPTY)
        return Placement(mine_now, free, taken.cpus if taken else None)

    def _restart(self, one: ContainerView, mine: Assignment) -> Iterator[Because]:
        """Tried with plan(): the container goes, its pod stays, the container comes again with the limits it has."""
        left = self.view.without_container(mine.path)
        gone = plan(left, self.decided, self.policy, self.now, [mine.pod])
        again = replace(one, born=self.now, limits_since=self.now, phase=Phase.RUNNING, populated=True)
        back = plan(left.with_container(again), gone.state, self.policy, self.now, [mine.pod])
        got = back.state.assignments.get(mine.path)
        if got is None:
            yield Because("back-none", "a restart with the limits it has now gets no CPUs of its own")
        elif got.cpus == mine.cpus:
            text = f"a restart gets CPUs {got.cpus} back: they are held for its pod while the pod's cgroup exists"
            yield Because("back", text, got.cpus)
        else:
            yield Because("back-others", f"a restart gets CPUs {got.cpus}, by what its pod holds then", got.cpus)

    # no room

    def _no_room(self, waiting: Unsatisfied, pod: PodView) -> Iterator[Because]:
        free = self.draft.free_for(pod.group.path)
        yield Because("no-room", f"it asks for {_cpus(waiting.asked)}, has {waiting.has} of its own, and "
                      f"{_are(len(free))} free for it: {waiting.why}", free, waiting.asked)  # fmt: skip
        size = self.view.topology.hierarchy.core_size
        if self.policy.options.full_cores and size and waiting.asked % size:
            yield Because("smt", f"full-pcpus-only is on and a core has {size} CPUs: ask for a multiple of {size}",
                          number=size)  # fmt: skip
            return
        # in the order in which free CPUs are offered; a stable sort, as in plan()
        queue = sorted(self.decided.unsatisfied.values(), key=lambda u: u.since)
        for one in queue[: queue.index(waiting)]:
            text = f"comes before it when CPUs come free (asks for {_cpus(one.asked)})"
            yield Because("before-it", text, number=one.asked, path=one.path)
        yield from self._would_help(waiting)

    def _would_help(self, waiting: Unsatisfied) -> Iterator[Because]:
        """Whose going would make room, each tried by itself."""
        pods = list(dict.fromkeys(self._pod_of(h) for h in self.holders(without=waiting.path)))
        tried = [pod for pod in pods if pod != waiting.pod][:MOST_TRIED]
        helping = [pod for pod in tried if self._room_without(pod, waiting)]
        for pod in helping:
            yield Because("would-help", "if this pod went, there would be room", path=pod)
        if not helping:
            some = "other pods that hold CPUs" if len(pods) <= MOST_TRIED else "pods that were tried"
            text = f"none of the {len(tried)} {some} would make room by its going alone"
            yield Because("none-would-help", text, number=len(tried))

    def _pod_of(self, holding: Holding) -> str:
        return holding.path if holding.how in (Hold.HELD, Hold.CLAIMED) else parent_of(holding.path)

    def _room_without(self, pod: str, waiting: Unsatisfied) -> bool:
        # in the scope of the event, as enforce does it: whoever waits longest comes first
        made = plan(self.view.without_pod(pod), self.decided, self.policy, self.now, [pod]).state
        return waiting.path in made.assignments and waiting.path not in made.unsatisfied

    def holders(self, without: str = "") -> tuple[Holding, ...]:
        """Who has CPUs for itself, by the lowest CPU; the container `without` is left out."""
        state = self.decided
        found = [Holding(p, a.cpus, Hold.OWN) for p, a in state.assignments.items() if p != without and a.cpus]
        for pod, holds in state.held.items():
            found += [Holding(pod, h.cpus, Hold.CLAIMED if h.claim else Hold.HELD) for h in holds]
        found += [Holding(p, cpus, Hold.FOREIGN) for p, cpus in state.foreign.items() if p != without]
        return tuple(sorted(found, key=lambda h: (h.cpus.mask & -h.cpus.mask, h.path)))

    # what is not as it should be

    def _amiss(self, path: str, one: ContainerView, mine: Assignment | None) -> Iterator[Because]:
        if not self.enforced:
            return
        found, own = one.group.effective, mine.cpus & self.view.online if mine else EMPTY
        if mine is not None and path in self.state.assignments and found != own:
            text = f"it may run on CPUs {found or 'none'}, its own are {own or 'none'}"
            yield Because("not-there-yet", text, found)
        others = union(a.cpus for p, a in self.decided.assignments.items() if p != path)
        if (strange := found & others) and one.phase is Phase.RUNNING:
            yield Because("on-others", f"it may run on CPUs {strange}, that belong to others", strange)
        if path in self.conflicts:
            cpus, number = self.conflicts[path]
            text = f"somebody else keeps writing CPUs {cpus or 'none'} to its cgroup; {number} repairs did not last"
            yield Because("conflict", text, cpus, number)

    # CPUs

    def cpu(self, cpu: int) -> CPUAnswer:
        """What one CPU is for and who may run there; any number is answered."""
        view, topology = self.view, self.view.topology
        online = cpu in view.online
        holder = next((h for h in self.holders() if cpu in h.cpus), None)
        units = {"socket": topology.socket_of, "numa": topology.numa_of, "l3": topology.uncore_of,
                 "core": topology.core_of}  # fmt: skip
        may_run = [c.group.path for _p, c in view.containers() if c.populated and cpu in c.group.effective]
        answer = CPUAnswer(
            cpu=cpu,
            online=online,
            allowed=cpu in view.allowed,
            reserved=cpu in self.policy.reserved,
            isolated=cpu in self.isolated,
            shared=cpu in self.draft.shared,
            free=cpu in self.draft.free_for(""),
            holder=holder,
            siblings=topology.siblings(cpu) if online else EMPTY,
            places={name: of[cpu] for name, of in units.items()} if online else {},
            may_run=tuple(may_run),
            strangers=tuple(p for p in may_run if self.enforced and holder and not _inside(p, holder)),
            because=(),
        )
        return replace(answer, because=tuple(self._why_cpu(answer)))

    def _why_cpu(self, one: CPUAnswer) -> Iterator[Because]:
        if not one.online:
            yield Because("offline", "it is offline, or there is no such CPU; nobody can run there")
            return
        if not one.allowed:
            inside = f"it is not in the kubepods root's set ({self.view.allowed or 'none'})"
            yield Because("not-for-pods", inside if self.view.slices else "there is no kubepods cgroup on this node")
        if one.reserved:
            yield Because("reserved", "it is reserved: never given out exclusively" + (
                "" if self.policy.strict else ", and part of the shared pool"))  # fmt: skip
        if one.isolated:
            yield Because("isolated", "the kernel does not balance tasks onto it (isolcpus): shared tasks stay off it")
        if one.holder is not None:
            yield Because(f"holder-{one.holder.how}", _HOLDS[one.holder.how], one.holder.cpus, path=one.holder.path)
        elif one.shared and not one.reserved:
            yield Because("shared", f"it is in the shared pool ({self.draft.shared}) and nobody's alone")
        if one.free:
            yield Because("free", "it can be given to the next container that asks for CPUs of its own")


_HOLDS: Final = {
    Hold.OWN: "it belongs to one container alone",
    Hold.HELD: "it is held for a pod whose container has gone, until the pod goes too",
    Hold.CLAIMED: "it is claimed for a pod that is starting",
    Hold.FOREIGN: "somebody else pinned a container to it; that is left alone",
}


def _inside(path: str, holder: Holding) -> bool:
    """Whether a container is the holder, or one of the pod that holds."""
    return path == holder.path or parent_of(path) == holder.path


# --- why a container has no CPUs of its own: each reason that holds, not only the first


def why_shared(pod: PodView, one: ContainerView, policy: Policy) -> Iterator[Because]:
    """All that keeps a container from CPUs of its own, as asked_cpus() looks at it; nothing when nothing does."""
    if not pod.guaranteed:
        yield Because("qos", f"its pod is {pod.ref.qos.capitalize()}; only Guaranteed pods get CPUs of their own")
    if one.role in (Role.SANDBOX, Role.CONMON):
        yield Because("role", f"it is a {one.role}, not a container")
        return
    if one.opted_out:
        yield Because("opted-out", 'its pod says cpuset-enforcer.io/exclusive: "false"')
    yield from _why_limits(one, policy)


def _why_limits(one: ContainerView, policy: Policy) -> Iterator[Because]:
    limits = one.limits
    if limits is None:
        yield Because("limits-unknown", "its CPU limits cannot be read (is the cpu controller on in its pod?)")
    elif limits.quota is None and not policy.cfs_quota:
        if shares_only_cpus(limits) is None:
            yield Because("shares-not-whole", f"its shares stand for no whole number of CPUs ({limits_words(one)})")
        elif one.phase is not Phase.RUNNING or not one.populated:
            yield Because("not-running", "nothing runs in it yet, so its shares may be those of a fresh cgroup")
    elif limits.quota is None:
        yield Because("no-quota", "it has no CPU limit (no quota); without one nothing is derived from its shares")
    elif limits.quota < limits.period or limits.quota % limits.period:
        yield Because("not-whole", f"its limit is {asked_words(one)}, no whole number of CPUs", number=limits.quota)
    elif agreement(limits).cpus is None:
        yield Because("disagree", f"its limits do not agree: {agreement(limits)}", number=limits.quota // limits.period)


def asked_words(one: ContainerView) -> str:
    """What the quota asks for: "2 CPUs", "1500m", "no limit"."""
    limits = one.limits
    if limits is None:
        return "not known"
    return "no limit" if limits.quota is None else amount(-(-limits.quota * 1000 // limits.period))


def limits_words(one: ContainerView) -> str:
    """The limits as they stand in the files."""
    limits = one.limits
    if limits is None:
        return "limits not known"
    quota = "no quota" if limits.quota is None else f"quota {limits.quota}/{limits.period}"
    return f"{quota}, shares {limits.shares}" if limits.shares is not None else f"{quota}, weight {limits.weight}"


def _cpus(number: int) -> str:
    return "1 CPU" if number == 1 else f"{number} CPUs"


def _are(number: int) -> str:
    return {0: "none is", 1: "1 is"}.get(number, f"{number} are")
