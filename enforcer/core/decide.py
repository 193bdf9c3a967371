"""Who gets which CPUs: from what pods ask for and what was decided before, to assignments, holds and refusals.

The first half of plan(). A Draft is the state under decision, mutable for the length of one plan() and never seen
outside of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from enforcer.core.allocation import SMTAlignmentError, take
from enforcer.core.cpulimits import shares_only_cpus, whole_cpus
from enforcer.core.cpuset import EMPTY, CPUSet, union
from enforcer.core.errors import NotEnoughCPUs
from enforcer.core.node import ContainerView, NodeView, Phase, PodView, Role, parent_of
from enforcer.core.policy import Policy
from enforcer.core.state import Assignment, Drift, Held, State, Unsatisfied, taken

NEVER = float("inf")
_STEP = 20  # pods that a full pass decides about before it lets go


@dataclass(frozen=True, slots=True)
class Note:
    """One line for the log: `kind` is a short stable word, `path` the cgroup it is about."""

    kind: str
    path: str
    text: str


class Draft:
    """The state under decision."""

    def __init__(self, view: NodeView, state: State, policy: Policy, now: float) -> None:
        self.view = view
        self.policy = policy
        self.now = now
        self.old = state
        self.assignments = dict(state.assignments)
        self.held = dict(state.held)
        self.unsatisfied = dict(state.unsatisfied)
        self.foreign = dict(state.foreign)
        self.written = dict(state.written)
        self.drift: dict[str, Drift] = dict(state.drift)
        self.before = dict(state.before)
        self.notes: list[Note] = []
        self.touched: set[str] = set()  # pods whose owners changed, in scope or not
        self.wake_at = NEVER
        self.allowed = view.allowed

    def note(self, kind: str, path: str, text: str) -> None:
        """Adds a line for the log."""
        self.notes.append(Note(kind, path, text))

    def look_again(self, when: float) -> None:
        """Asks for another plan at that time."""
        if self.now < when < self.wake_at:
            self.wake_at = when

    @property
    def exclusive(self) -> CPUSet:
        """CPUs owned or held."""
        return taken(self.assignments.values(), self.held.values())

    @property
    def pinned_elsewhere(self) -> CPUSet:
        """CPUs that somebody else pinned containers to."""
        return union(self.foreign.values())

    @property
    def shared(self) -> CPUSet:
        """The shared pool, never empty while one CPU is allowed.

        Someone else's pins are left out as far as a CPU remains; without one the reserved CPUs are shared, then all.
        """
        pool = self.allowed - self.exclusive
        if self.policy.strict:
            pool = (pool - self.policy.reserved) or pool
        return (pool - self.pinned_elsewhere) or pool or (self.allowed & self.policy.reserved) or self.allowed

    @property
    def reserved(self) -> CPUSet:
        """Where sandboxes go: the reserved CPUs that are there, else the shared pool."""
        return (self.policy.reserved & self.allowed) - self.exclusive or self.shared

    def free_for(self, pod: str) -> CPUSet:
        """CPUs that may be given to a container of the pod: assignable, not owned, not held for another."""
        others = taken(self.assignments.values(), (h for p, h in self.held.items() if p != pod))
        return self.view.allowed_in(pod) - self.policy.reserved - others - self.pinned_elsewhere

    def to_state(self) -> State:
        """The state that this draft has come to."""
        return State(
            assignments=self.assignments,
            held=self.held,
            unsatisfied=self.unsatisfied,
            foreign=self.foreign,
            written=self.written,
            drift=self.drift,
            before=self.before,
            shared=self.shared,
        )


def decide(draft: Draft, scope: Iterable[str] | None) -> Iterator[None]:
    """Brings the draft's assignments up to date for the pods in `scope` (paths; None = all); yields between pods."""
    free_before = draft.allowed - draft.exclusive
    full = scope is None
    pods = [pod for path in scope if (pod := draft.view.find_pod(path))] if scope is not None else draft.view.pods()
    _sweep(draft, None if scope is None else set(scope))
    _expire(draft)
    guaranteed = []
    for number, pod in enumerate(pods):
        if number % _STEP == _STEP - 1:
            yield
        _learn_foreign(draft, pod)
        if pod.guaranteed:
            guaranteed.append(pod)
    if full:
        # What came free without an event goes to the longest waiting, not to the first path.
        _retry(draft)
    for number, pod in enumerate(sorted(guaranteed, key=lambda p: p.group.path)):
        if number % _STEP == _STEP - 1:
            yield
        _decide_pod(draft, pod)
    if full or (draft.allowed - draft.exclusive) - free_before:
        _retry(draft)


def asked_cpus(container: ContainerView, policy: Policy) -> int | None:
    """How many CPUs of its own a container asks for; None: none, or nothing that can be relied on yet."""
    limits = container.limits
    if limits is None or container.role in (Role.SANDBOX, Role.CONMON) or container.opted_out:
        return None
    if not policy.cfs_quota and limits.quota is None:
        # A fresh cgroup reads as 1 CPU by its shares; only a running process says that they were written.
        return shares_only_cpus(limits) if container.phase is Phase.RUNNING and container.populated else None
    return whole_cpus(limits)


def _sweep(draft: Draft, scope: set[str] | None) -> None:
    """Takes back what belongs to containers and pods that have gone."""
    for path, mine in list(draft.assignments.items()):
        if (scope is None or mine.pod in scope) and draft.view.find_container(path) is None:
            _container_gone(draft, mine)
    for pod in list(draft.held) if scope is None else scope & draft.held.keys():
        if draft.view.find_pod(pod) is None:
            freed = draft.held.pop(pod)
            draft.note("freed", pod, f"pod has gone, CPUs {union(h.cpus for h in freed)} are free")
    for path, waiting in list(draft.unsatisfied.items()):
        if (scope is None or waiting.pod in scope) and draft.view.find_container(path) is None:
            del draft.unsatisfied[path]
    for path in list(draft.foreign):
        if (scope is None or parent_of(path) in scope) and draft.view.find_container(path) is None:
            del draft.foreign[path]


def _container_gone(draft: Draft, mine: Assignment) -> None:
    """An owner has gone: its CPUs are held for its pod while the pod's cgroup exists (a restart gets them back)."""
    del draft.assignments[mine.path]
    draft.unsatisfied.pop(mine.path, None)
    pod = draft.view.find_pod(mine.pod)
    if pod is None:
        draft.note("freed", mine.path, f"container and pod have gone, CPUs {mine.cpus} are free")
        return
    draft.held[mine.pod] = (*draft.held.get(mine.pod, ()), Held(mine.cpus, draft.now))
    draft.note("held", mine.path, f"container has gone, CPUs {mine.cpus} are held for its pod")
    _cap_holds(draft, pod)


def _cap_holds(draft: Draft, pod: PodView) -> None:
    """A pod never keeps more than its own quota allows it to use: the oldest holds go first."""
    limits = pod.limits
    if limits is None or limits.quota is None:
        return
    most = limits.quota // limits.period
    owned = sum(len(a.cpus) for a in draft.assignments.values() if a.pod == pod.group.path)
    holds = list(draft.held.get(pod.group.path, ()))
    while holds and owned + sum(len(h.cpus) for h in holds) > most:
        holds.pop(0)
    _set_holds(draft, pod.group.path, holds)


def _set_holds(draft: Draft, pod: str, holds: Iterable[Held]) -> None:
    kept = tuple(h for h in holds if h.cpus)
    if kept:
        draft.held[pod] = kept
    else:
        draft.held.pop(pod, None)


def _expire(draft: Draft) -> None:
    for pod, holds in list(draft.held.items()):
        live = [h for h in holds if h.until > draft.now]
        for one in live:
            draft.look_again(one.until)
        if len(live) < len(holds):
            draft.note("claim-over", pod, "no container took the CPUs that were claimed for it, they are free again")
            _set_holds(draft, pod, live)


def _learn_foreign(draft: Draft, pod: PodView) -> None:
    """A set given at birth by somebody else is not ours to write; its CPUs are neither assigned nor shared.

    runc writes the spec's set after the limits (v2): then the container has been given cores already, and gives way.
    """
    for path, container in pod.containers.items():
        given, mine = container.given, draft.assignments.get(path)
        if not given or draft.foreign.get(path) == given:
            continue
        if mine is None or container.phase is Phase.BIRTH:
            if mine is not None:
                del draft.assignments[path]
                draft.touched.add(pod.group.path)
            draft.foreign[path] = given
            draft.unsatisfied.pop(path, None)
            both = given & taken(draft.assignments.values(), ())
            text = f"was born with CPUs {given} given by somebody else; left alone"
            draft.note("foreign", path, f"{text}, though of them CPUs {both} are owned by others" if both else text)


def _decide_pod(draft: Draft, pod: PodView) -> None:
    for container in sorted(pod.containers.values(), key=lambda c: (c.born, c.group.path)):
        if container.group.path not in draft.foreign:
            _decide_container(draft, pod, container)
    if draft.view.version == 1:
        _claim(draft, pod)


def _decide_container(draft: Draft, pod: PodView, container: ContainerView) -> None:
    path = container.group.path
    mine = draft.assignments.get(path)
    asked = asked_cpus(container, draft.policy)
    if mine is None:
        if asked is None:
            draft.unsatisfied.pop(path, None)
        else:
            _allocate(draft, pod, path, asked, _why(container))
    elif asked is None:
        _owner_asks_for_none(draft, container, mine)
    elif asked != mine.count or len(mine.cpus) != asked or not mine.cpus <= draft.allowed:
        _resize(draft, mine, asked, _why(container))
    else:
        draft.unsatisfied.pop(path, None)


def _owner_asks_for_none(draft: Draft, container: ContainerView, mine: Assignment) -> None:
    """Limits arrive in several writes: an owner keeps its cores until they have stood for a while as they are."""
    if container.limits is None:
        return
    due = container.limits_since + draft.policy.settle
    if draft.now < due:
        draft.look_again(due)
        return
    del draft.assignments[mine.path]
    draft.touched.add(mine.pod)
    draft.unsatisfied.pop(mine.path, None)
    draft.note("released", mine.path, f"asks for no whole CPUs any more ({_why(container)}), CPUs {mine.cpus} are free")


def _allocate(draft: Draft, pod: PodView, path: str, count: int, why: str) -> None:
    hold = _best_hold(draft.held.get(pod.group.path, ()), count)
    got = _take(draft, pod.group.path, path, count, near=hold.cpus if hold else EMPTY)
    if got is None:
        return
    draft.touched.add(pod.group.path)
    _use_holds(draft, pod, got, hold)
    draft.unsatisfied.pop(path, None)
    draft.assignments[path] = Assignment(path, pod.group.path, got, count, draft.now, why)
    draft.note("assigned", path, f"gets CPUs {got} of its own ({why})")


def _best_hold(holds: Iterable[Held], count: int) -> Held | None:
    """The hold that a container of that size most likely comes back for: the same size, else the smallest that fits."""
    return min(holds, key=lambda h: (len(h.cpus) < count, abs(len(h.cpus) - count), -h.since), default=None)


def _use_holds(draft: Draft, pod: PodView, got: CPUSet, used: Held | None) -> None:
    """Takes `got` out of the pod's holds. What is left of the hold that was used goes; of a claim it stays."""
    path = pod.group.path
    holds = [h for h in draft.held.get(path, ()) if h is not used or h.claim]
    _set_holds(draft, path, [replace(h, cpus=h.cpus - got) for h in holds])
    _cap_holds(draft, pod)


def _take(
    draft: Draft, pod: str, path: str, count: int, *, keep: CPUSet = EMPTY, near: CPUSet = EMPTY
) -> CPUSet | None:
    """The CPUs for a container, or None with the refusal written down."""
    free = draft.free_for(pod)
    try:
        got = take(draft.view.topology, free | keep, count, draft.policy.options, keep=keep, near=near)
    except (NotEnoughCPUs, SMTAlignmentError) as error:
        _refuse(draft, pod, path, count, len(keep), len(free), str(error))
        return None
    rest = draft.allowed - draft.exclusive - got
    if not (rest - draft.policy.reserved if draft.policy.strict else rest):
        _refuse(draft, pod, path, count, len(keep), len(free), "it would leave no CPU for the shared pool")
        return None
    return got


def _refuse(draft: Draft, pod: str, path: str, asked: int, has: int, free: int, why: str) -> None:
    before = draft.unsatisfied.get(path)
    since = before.since if before and before.asked == asked else draft.now
    draft.unsatisfied[path] = Unsatisfied(path, pod, asked, has, free, since, why)
    if before is None or (before.asked, before.has) != (asked, has):
        draft.note("unsatisfied", path, f"asks for {asked} CPUs, has {has} of its own, {free} are free: {why}")


def _resize(draft: Draft, mine: Assignment, asked: int, why: str) -> None:
    """Growth keeps the old CPUs and adds near them, shrink keeps a subset; a CPU that has gone is replaced."""
    draft.touched.add(mine.pod)
    keep = mine.cpus & draft.allowed
    got = _take(draft, mine.pod, mine.path, asked, keep=keep)
    if got is None:
        # What is left of its own stays its own; only where nothing is left does it live in the shared pool.
        draft.assignments[mine.path] = replace(mine, count=asked, cpus=mine.cpus)
        return
    draft.unsatisfied.pop(mine.path, None)
    if got != mine.cpus:
        draft.note("resized", mine.path, f"asks for {asked} CPUs: {mine.cpus} becomes {got} ({why})")
    _set_holds(draft, mine.pod, [replace(h, cpus=h.cpus - got) for h in draft.held.get(mine.pod, ())])
    draft.assignments[mine.path] = replace(mine, cpus=got, count=asked, why=why)


def _claim(draft: Draft, pod: PodView) -> None:
    """cgroup v1: CPUs are claimed when the pod's quota appears, for its pod is not there to hold the others off.

    The kubelet writes the pod's quota before the sandbox, some 100 ms before the container's; meanwhile the shared
    containers are moved away, one write each.
    """
    path = pod.group.path
    wanted = _claimable(draft, pod)
    claims = [h for h in draft.held.get(path, ()) if h.claim]
    if claims and not wanted:
        _set_holds(draft, path, [h for h in draft.held.get(path, ()) if not h.claim])
        return
    if claims or wanted < 1 or draft.now >= pod.born + draft.policy.claim_for:
        return
    try:
        got = take(draft.view.topology, draft.free_for(path), wanted, draft.policy.options)
    except (NotEnoughCPUs, SMTAlignmentError):
        return
    if draft.allowed - draft.exclusive - got - (draft.policy.reserved if draft.policy.strict else EMPTY):
        until = max(pod.born, draft.now) + draft.policy.claim_for
        draft.held[path] = (*draft.held.get(path, ()), Held(got, draft.now, claim=True, until=until))
        draft.look_again(until)
        draft.note("claimed", path, f"CPUs {got} are claimed for the pod's coming containers")


def _claimable(draft: Draft, pod: PodView) -> int:
    """How many CPUs the pod's own limits promise to containers that are still to come; 0: nothing to claim."""
    total = whole_cpus(pod.limits) if pod.limits else None
    if total is None:
        return 0
    owned = 0
    for path, container in pod.containers.items():
        mine = draft.assignments.get(path)
        if mine is not None:
            owned += len(mine.cpus)
        elif path in draft.foreign or path in draft.unsatisfied or _has_own_limit(container):
            return 0
    held = sum(len(h.cpus) for h in draft.held.get(pod.group.path, ()) if not h.claim)
    return max(0, total - owned - held)


def _has_own_limit(container: ContainerView) -> bool:
    return container.role is not Role.SANDBOX and container.limits is not None and container.limits.quota is not None


def _retry(draft: Draft) -> None:
    """CPUs have come free: those who wait get their turn, the longest waiting first."""
    free = draft.free_for("")
    for waiting in sorted(draft.unsatisfied.values(), key=lambda u: u.since):
        if waiting.asked - waiting.has > len(free) and waiting.pod not in draft.held:
            # Looked at one by one, hundreds that wait would cost the hot path milliseconds.
            draft.unsatisfied[waiting.path] = replace(waiting, free=len(free))
            continue
        pod = draft.view.find_pod(waiting.pod)
        container = draft.view.find_container(waiting.path)
        before = draft.assignments.get(waiting.path)
        if pod is not None and container is not None:
            _decide_container(draft, pod, container)
        if draft.assignments.get(waiting.path) is not before:
            free = draft.free_for("")


def _why(container: ContainerView) -> str:
    limits = container.limits
    if limits is None:
        return "limits not known"
    quota = "no quota" if limits.quota is None else f"quota {limits.quota}/{limits.period}"
    return f"{quota}, shares {limits.shares}" if limits.shares is not None else f"{quota}, weight {limits.weight}"
