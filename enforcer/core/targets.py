"""What every cgroup's cpuset should be, given who owns what. The second half of plan().

One rule by level: a cgroup with special sets below it (own CPUs of a container, or somebody else's pin) holds all that
its children need, and each child has a set of its own; any other cgroup gets the shared pool and its children inherit.
The kubepods root counts as special and is never written. On cgroup v1 nothing inherits: every container has its own
set, and the levels above stay wide (a narrow parent makes a runtime that brings its own set fail with EACCES).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import IntEnum

from enforcer.core.cpuset import EMPTY, CPUSet
from enforcer.core.decide import Draft
from enforcer.core.node import ContainerView, Group, Phase, PodView, Role, SliceView, parent_of


class Kind(IntEnum):
    """What a target is, in the order in which things are handed over."""

    PARENT = 0  # v1: a level above that is too narrow for what is needed below
    ORDINARY = 1
    OWNER = 2
    SPECIAL = 3  # a slice that holds owners: widened only after everything in it has a set of its own


@dataclass(frozen=True, slots=True)
class Target:
    """What one cgroup should have; `cpus` None = no set of its own (v2). `newborn`: the runtime still sets it up."""

    group: Group
    cpus: CPUSet | None
    kind: Kind
    why: str
    newborn: bool = False
    has_nested: bool = False


@dataclass(frozen=True, slots=True)
class _Pools:
    shared: CPUSet
    reserved: CPUSet
    allowed: CPUSet
    special: dict[str, int]  # pod path -> mask of own and foreign CPUs below it

    def within(self, allowed: CPUSet) -> _Pools:
        """The part that one of several roots may use."""
        if allowed == self.allowed:
            return self
        return _Pools(self.shared & allowed or allowed, self.reserved & allowed or allowed, allowed, self.special)


def targets(draft: Draft, scope: Collection[str] | None) -> Iterator[Target | None]:
    """The target of every cgroup that may need a write; None between pods is a place to pause.

    When the shared pool is what it was, only the pods in `scope` (paths; None = all) can need one.
    """
    pools = _Pools(draft.shared, draft.reserved, draft.allowed, _special(draft))
    every = scope is None or pools.shared != draft.old.shared
    of_slice = _slice_v2 if draft.view.version == 2 else _slice_v1
    for one in draft.view.slices.values():
        yield from of_slice(draft, pools.within(draft.view.allowed_in(one.group.path)), one, None if every else scope)


def _special(draft: Draft) -> dict[str, int]:
    masks: dict[str, int] = {}
    for mine in draft.assignments.values():
        masks[mine.pod] = masks.get(mine.pod, 0) | (mine.cpus & draft.allowed).mask
    for path, cpus in draft.foreign.items():
        masks[parent_of(path)] = masks.get(parent_of(path), 0) | cpus.mask
    return masks


def _slice_v2(draft: Draft, pools: _Pools, one: SliceView, scope: Collection[str] | None) -> Iterator[Target | None]:
    mask = 0
    if not one.is_root:
        for pod_path, below in pools.special.items():
            mask |= below if parent_of(pod_path) == one.group.path else 0
        kind = Kind.SPECIAL if mask else Kind.ORDINARY
        yield Target(one.group, pools.shared | CPUSet.from_mask(mask), kind, f"shared pool of the {one.qos} pods")
    if one.is_root or mask:
        chosen = one.pods if scope is None else {p: one.pods[p] for p in scope if p in one.pods}
        for number, pod in enumerate(chosen.values()):
            if number % 50 == 49:
                yield None
            yield from _pod_v2(draft, pools, pod)
    else:
        for path in one.pods.keys() & draft.written.keys() if scope is None else ():
            yield Target(one.pods[path].group, None, Kind.ORDINARY, "inherits from its slice again")


def _pod_v2(draft: Draft, pools: _Pools, pod: PodView) -> Iterator[Target]:
    mask = pools.special.get(pod.group.path, 0)
    if not mask:
        yield Target(pod.group, pools.shared, Kind.ORDINARY, "shared pool")
        for path, container in pod.containers.items():
            if path in draft.written and container.group.configured:
                yield Target(container.group, None, Kind.ORDINARY, "inherits from its pod again")
        return
    wide = CPUSet.from_mask(mask) | pools.reserved
    for path, container in pod.containers.items():
        if path in draft.foreign:
            continue
        target = _container(draft, pools, container)
        wide |= target.cpus if target.kind is Kind.ORDINARY and target.cpus else EMPTY
        yield target
    yield Target(pod.group, wide, Kind.SPECIAL, "what its containers need")


def _slice_v1(draft: Draft, pools: _Pools, one: SliceView, scope: Collection[str] | None) -> Iterator[Target | None]:
    chosen = one.pods if scope is None else {p: one.pods[p] for p in scope if p in one.pods}
    slice_told = one.is_root
    for number, pod in enumerate(chosen.values()):
        if number % 50 == 49:
            yield None
        found = list(_pod_v1(draft, pools, pod))
        if found and not slice_told and _too_narrow(one.group, pools.allowed):
            slice_told = True
            yield Target(one.group, pools.allowed, Kind.PARENT, "a level above containers stays wide on cgroup v1")
        if found and _too_narrow(pod.group, pools.allowed):
            yield Target(pod.group, pools.allowed, Kind.PARENT, "a level above containers stays wide on cgroup v1")
        yield from found


def _too_narrow(group: Group, allowed: CPUSet) -> bool:
    # An empty one is being made just now: whoever makes it copies the parent's set within microseconds.
    return group.configured and not allowed <= (group.cpus or EMPTY)


def _pod_v1(draft: Draft, pools: _Pools, pod: PodView) -> Iterator[Target]:
    for path, container in pod.containers.items():
        # No task can be attached to a v1 cpuset that is still empty, and a write before the runtime copied the
        # parent's set can be lost in its read-then-write. Later the kernel empties one whose last CPU goes offline.
        unfilled = not container.group.configured and container.phase is Phase.BIRTH
        if path in draft.foreign or unfilled:
            continue
        target = _container(draft, pools, container)
        yield target
        for nested in container.nested:
            yield from _nested_v1(container, nested, target)


def _nested_v1(container: ContainerView, nested: Group, target: Target) -> Iterator[Target]:
    """A cgroup that the container made inside itself binds it: EBUSY while the child is wider (runc#1635)."""
    if not nested.configured or target.cpus is None or nested.cpus is None:
        return
    follows = nested.cpus == container.group.cpus
    wanted = target.cpus if follows else (nested.cpus & target.cpus) or target.cpus
    yield Target(nested, wanted, target.kind, "follows the container that made it", target.newborn)


def _container(draft: Draft, pools: _Pools, container: ContainerView) -> Target:
    mine = draft.assignments.get(container.group.path)
    own = mine.cpus & draft.allowed if mine else EMPTY
    if own:
        cpus, kind, why = own, Kind.OWNER, f"its own {len(own)} CPUs"
    elif container.role in (Role.SANDBOX, Role.CONMON):
        cpus, kind, why = pools.reserved, Kind.ORDINARY, f"{container.role}: reserved CPUs"
    else:
        cpus, kind, why = pools.shared, Kind.ORDINARY, "shared pool"
    newborn = container.phase is Phase.BIRTH
    return Target(container.group, cpus, kind, why, newborn, bool(container.nested))
