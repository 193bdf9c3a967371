"""Adoption: what the agent takes over at its start, so that a restart moves no running pod.

Truth is the kernel: the tree says who is pinned to what. The state file says what the tree cannot: which pins are
ours, what is held, what was there before us. Where the file is lost, a pin that looks like ours in every respect is
taken over; any other narrow set is somebody else's and is left alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from enforcer.core.cpuset import EMPTY, CPUSet
from enforcer.core.decide import Note, asked_cpus
from enforcer.core.node import ContainerView, NodeView, PodView, Role
from enforcer.core.policy import Policy
from enforcer.core.state import Assignment, State


@dataclass
class _Adoption:
    view: NodeView
    recorded: State
    policy: Policy
    now: float
    assignments: dict[str, Assignment] = field(default_factory=dict)
    foreign: dict[str, CPUSet] = field(default_factory=dict)
    written: dict[str, CPUSet] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    used: CPUSet = EMPTY


def adopt(view: NodeView, recorded: State, policy: Policy, now: float) -> tuple[State, tuple[Note, ...]]:
    """The state to start from and what there is to say about it.

    `recorded` is the state file's content (an empty State when there is none). Owners first: a pin in the file, then
    one that only the tree shows (Guaranteed pod, whole CPUs asked, set of that size, disjoint from all others, inside
    the assignable CPUs). Whatever narrow set is left over is foreign, unless it is a pool of an agent before us.
    """
    work = _Adoption(view, recorded, policy, now)
    owners = [(p, c) for p, c in view.containers() if p.guaranteed]
    # Those that the tree shows pinned first: a recorded owner whose set was changed meanwhile must not take their CPUs.
    for pod, container in sorted(owners, key=lambda pc: not _shown(pc[1], recorded)):
        _adopt_recorded(work, pod, container)
    for pod, container in owners:
        _adopt_seen(work, pod, container)
    for _pod, container in view.containers():
        _find_foreign(work, container)
    kept = {p: h for p, h in recorded.held.items() if view.find_pod(p)}
    held = {p: tuple(h for h in holds if h.cpus.isdisjoint(work.used)) for p, holds in kept.items()}
    state = State(
        assignments=work.assignments,
        held={p: holds for p, holds in held.items() if holds},
        unsatisfied={
            p: u for p, u in recorded.unsatisfied.items() if view.find_container(p) and p not in work.foreign
        },
        foreign=work.foreign,
        written={**_still_there(view, recorded), **work.written},
        before=recorded.before,
        shared=recorded.shared,
    )
    return state, tuple(work.notes)


def foreign_owners(view: NodeView, state: State, policy: Policy) -> tuple[str, ...]:
    """Containers of Guaranteed pods that ask for whole CPUs and were pinned by somebody else: another CPU manager."""
    found = []
    for path in state.foreign:
        container = view.find_container(path)
        pod = view.find_pod(path.rpartition("/")[0])
        if container and pod and pod.guaranteed and asked_cpus(container, policy):
            found.append(path)
    return tuple(sorted(found))


def _shown(container: ContainerView, recorded: State) -> bool:
    mine = recorded.assignments.get(container.group.path)
    return mine is not None and container.group.cpus == mine.cpus


def _adopt_recorded(work: _Adoption, pod: PodView, container: ContainerView) -> None:
    mine = work.recorded.assignments.get(container.group.path)
    if mine is None or container.opted_out or container.role in (Role.SANDBOX, Role.CONMON):
        return
    if not mine.cpus or not mine.cpus.isdisjoint(work.used):
        work.notes.append(Note("not-adopted", mine.path, f"CPUs {mine.cpus} of the state file have another owner"))
        return
    _take_over(work, Assignment(mine.path, pod.group.path, mine.cpus, mine.count, mine.since, mine.why))


def _adopt_seen(work: _Adoption, pod: PodView, container: ContainerView) -> None:
    path = container.group.path
    cpus = container.group.cpus or EMPTY
    asked = asked_cpus(container, work.policy)
    if path in work.assignments or path in work.recorded.foreign or asked is None or len(cpus) != asked:
        return
    assignable = work.view.allowed_in(path) - work.policy.reserved
    if not cpus <= assignable or not cpus.isdisjoint(work.used) or _also_elsewhere(work.view, container, cpus):
        return
    # Ours from now on, as if we had written it: else nobody would take it away when its owner lets go.
    work.written[path] = cpus
    _take_over(work, Assignment(path, pod.group.path, cpus, asked, work.now, "found pinned at the start"))


def _also_elsewhere(view: NodeView, container: ContainerView, cpus: CPUSet) -> bool:
    """Another container has a narrow set of its own over these CPUs: then they are nobody's alone."""
    for _pod, other in view.containers():
        theirs = other.group.cpus
        if other is container or not theirs or theirs.isdisjoint(cpus):
            continue
        if theirs < view.allowed_in(other.group.path):
            return True
    return False


def _take_over(work: _Adoption, one: Assignment) -> None:
    work.assignments[one.path] = one
    work.used |= one.cpus
    work.notes.append(Note("adopted", one.path, f"keeps CPUs {one.cpus}"))


def _find_foreign(work: _Adoption, container: ContainerView) -> None:
    path = container.group.path
    cpus = container.group.cpus or EMPTY
    if not cpus or path in work.assignments or work.view.allowed_in(path) <= cpus:
        return
    if path in work.recorded.foreign:
        work.foreign[path] = cpus
    elif path in work.recorded.written:
        return
    elif _looks_like_our_pool(work, path, cpus):
        work.written[path] = cpus
    else:
        work.foreign[path] = cpus
        work.notes.append(Note("foreign", path, f"has CPUs {cpus} that are not ours; left alone"))


def _looks_like_our_pool(work: _Adoption, path: str, cpus: CPUSet) -> bool:
    """Left behind by an agent whose file is lost: a pool holds the reserved CPUs and nobody's own."""
    reserved = work.policy.reserved & work.view.allowed_in(path)
    return bool(reserved) and reserved <= cpus and cpus.isdisjoint(work.used)


def _still_there(view: NodeView, recorded: State) -> dict[str, CPUSet]:
    """What we last wrote, of cgroups that show it still: a difference made while we were away is not drift."""
    seen = _configured(view)
    return {path: cpus for path, cpus in recorded.written.items() if seen.get(path) == cpus}


def _configured(view: NodeView) -> dict[str, CPUSet]:
    groups: list[Iterable[tuple[str, CPUSet | None]]] = []
    for one in view.slices.values():
        groups.append([(one.group.path, one.group.cpus)])
        for pod in one.pods.values():
            groups.append([(pod.group.path, pod.group.cpus)])
            groups.append([(c.group.path, c.group.cpus) for c in pod.containers.values()])
    return {path: cpus for several in groups for path, cpus in several if cpus}
