"""plan(): from what the node looks like and what was decided before, to assignments and the ordered list of writes.

Pure. enforce applies the writes, audit reports them, simulate and explain print them. The order is the safety: first
those shrink who must give up CPUs, then the owner gets its own, then its pod's slice is widened, then the rest grows.
"""

from __future__ import annotations

from collections.abc import Collection, Generator
from dataclasses import dataclass

from enforcer.core import drift
from enforcer.core.cpuset import EMPTY, CPUSet
from enforcer.core.decide import NEVER, Draft, Note, decide
from enforcer.core.node import NodeView, depth_of, parent_of
from enforcer.core.policy import Policy
from enforcer.core.state import State
from enforcer.core.targets import Kind, Target, targets


@dataclass(frozen=True, slots=True)
class Write:
    """One write of cpuset.cpus: `cpus` None = clear it, so that it inherits (v2). `found` is what the plan saw.

    `newborn`: the container's runtime may write at the same time, and its word counts.
    """

    path: str
    cpus: CPUSet | None
    found: CPUSet
    kind: Kind
    why: str
    newborn: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do: `enable` lists cgroups whose children lack the cpuset controller (v2), to be given it first.

    `wake_at`: time at which something is due though nothing happens. `save_first`: the state file must be on disk
    before the first write (it says what cgroups had that were there before us).
    """

    state: State
    writes: tuple[Write, ...] = ()
    enable: tuple[str, ...] = ()
    notes: tuple[Note, ...] = ()
    wake_at: float = NEVER
    save_first: bool = False


def plan(view: NodeView, state: State, policy: Policy, now: float, scope: Collection[str] | None = None) -> Plan:
    """The plan for the pods in `scope` (paths) and for all that must move for them; None = for the whole node.

    `now` is in seconds of the monotonic clock. Calling it again on the node that it made right gives no writes.
    """
    steps = plan_steps(view, state, policy, now, scope)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value if isinstance(end.value, Plan) else Plan(state)


def plan_steps(
    view: NodeView, state: State, policy: Policy, now: float, scope: Collection[str] | None = None
) -> Generator[None, None, Plan]:
    """plan() in pieces: yields every few dozen pods, so that a full pass can be dropped when a hot event comes."""
    draft = Draft(view, state, policy, now)
    if not draft.allowed:
        # No root, or one without CPUs: nothing can be wanted of anybody.
        return Plan(state)
    yield from decide(draft, scope)
    if scope is None:
        _forget(draft)
    writes: list[_Ordered] = []
    enable: set[str] = set()
    for target in targets(draft, None if scope is None else draft.touched.union(scope)):
        if target is None:
            yield
        elif target.group.cpus is None:
            enable.add(parent_of(target.group.path))
        else:
            writes.extend(_writes(draft, target))
    writes.sort(key=lambda w: w.order)
    saves = _remember(draft, [w.write for w in writes])
    return Plan(
        state=draft.to_state(),
        writes=tuple(w.write for w in writes),
        enable=tuple(sorted(enable)),
        notes=tuple(draft.notes),
        wake_at=draft.wake_at,
        save_first=saves,
    )


@dataclass(frozen=True, slots=True)
class _Ordered:
    order: tuple[int, int, str]
    write: Write


_WIDEN, _SHRINK, _OWNER, _SPECIAL, _GROW = range(5)
_TOP = 1000  # before any depth


def _writes(draft: Draft, target: Target) -> list[_Ordered]:
    """The writes that bring one cgroup to its target: none, one, or a shrink now and a growth later."""
    group = target.group
    found = group.cpus or EMPTY
    if drift.blocked(draft, target):
        return []
    if target.cpus is None:
        return [_ordered(draft, target, None, _GROW)] if found else []
    if found == target.cpus:
        return []
    if target.kind is not Kind.ORDINARY:
        phase = {Kind.PARENT: _WIDEN, Kind.OWNER: _OWNER, Kind.SPECIAL: _SPECIAL}[target.kind]
        return _moving(draft, target, target.cpus, phase)
    now = group.effective if draft.view.version == 2 else found
    # v2: one that inherits must have its own set before its parent is widened, whatever it inherits now.
    if target.cpus <= now or not found:
        return [_ordered(draft, target, target.cpus, _SHRINK)]
    both = target.cpus & now
    if both and both != now:
        return [_ordered(draft, target, both, _SHRINK), _ordered(draft, target, target.cpus, _GROW)]
    return _moving(draft, target, target.cpus, _GROW)


def _ordered(draft: Draft, target: Target, cpus: CPUSet | None, phase: int) -> _Ordered:
    """cgroup v1 shrinks from the leaves and grows from the root (EBUSY, EACCES); v2 the other way round.

    On v2 nothing is refused, and a child without a set of its own follows its parent at once: so parents shrink first,
    and children have their sets before the parent grows.
    """
    depth = depth_of(target.group.path)
    growing = cpus is not None and (target.group.cpus or EMPTY) < cpus
    deepest_first = not growing if draft.view.version == 1 else phase != _SHRINK
    write = Write(target.group.path, cpus, target.group.cpus or EMPTY, target.kind, target.why, target.newborn)
    return _Ordered((phase, -depth if deepest_first else depth, target.group.path), write)


def _moving(draft: Draft, target: Target, cpus: CPUSet, phase: int) -> list[_Ordered]:
    """A v1 cgroup with children cannot move in one write: it covers both sets until its children have moved."""
    last = _ordered(draft, target, cpus, phase)
    found = target.group.cpus or EMPTY
    if draft.view.version == 2 or not target.has_nested or cpus <= found or found <= cpus:
        return [last]
    first = Write(target.group.path, cpus | found, found, target.kind, "covers old and new while what is in it moves")
    return [_Ordered((phase, -_TOP, target.group.path), first), last]


def _remember(draft: Draft, writes: list[Write]) -> bool:
    """Notes what cgroups had before our first write to them; True when one of them was there before us with a set."""
    first = False
    for write in writes:
        if write.path in draft.written or write.path in draft.before:
            continue
        if write.found and _was_here_before_us(draft.view, write.path):
            draft.before[write.path] = write.found
            first |= not _is_its_parents(draft.view, write)
    return first


def _is_its_parents(view: NodeView, write: Write) -> bool:
    """cgroup v1: a copy of the parent's set is what un-pinning gives back anyway."""
    parent = view.find_pod(parent_of(write.path)) or view.slices.get(parent_of(write.path))
    return view.version == 1 and parent is not None and parent.group.cpus == write.found


def _was_here_before_us(view: NodeView, path: str) -> bool:
    container = view.find_container(path)
    pod = view.find_pod(path)
    born = container.born if container else pod.born if pod else float("-inf")
    return born == float("-inf")


def _forget(draft: Draft) -> None:
    """Drops what is kept of cgroups that have gone."""
    here = {group.path for group in draft.view.groups()}
    for kept in (draft.written, draft.drift, draft.before):
        for path in kept.keys() - here:
            del kept[path]
