"""State: what is assigned to whom, what is held, what was there before us. Immutable; plan() returns the next one.

Times are seconds of the monotonic clock, which runs on across restarts of the agent within one boot; the file is keyed
by the boot id (design: one small file under the runtime directory).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from enforcer.core.cpuset import EMPTY, CPUSet, union
from enforcer.core.errors import EnforcerError


@dataclass(frozen=True, slots=True)
class Assignment:
    """Exclusive CPUs of one container: `count` is what it asks for, `cpus` what it has (they differ when CPUs went)."""

    path: str
    pod: str
    cpus: CPUSet
    count: int
    since: float
    why: str = ""


@dataclass(frozen=True, slots=True)
class Held:
    """CPUs kept for a pod without a running owner.

    Either those of an exited container (a restart gets them back), or a `claim`: on cgroup v1 the pod's own quota is
    written before its first container, so the others can be off the cores before that one starts. A claim ends at
    `until`.
    """

    cpus: CPUSet
    since: float
    name: str = ""
    claim: bool = False
    until: float = float("inf")


@dataclass(frozen=True, slots=True)
class Unsatisfied:
    """A container that asks for more than is free; it stays where it is and is tried again when CPUs come free."""

    path: str
    pod: str
    asked: int
    has: int
    free: int
    since: float
    why: str = ""


@dataclass(frozen=True, slots=True)
class Drift:
    """How often others wrote to a set of ours: the times of late repairs, all repairs ever, and no write before."""

    repairs: tuple[float, ...] = ()
    total: int = 0
    quiet_until: float = float("-inf")
    conflict: bool = False
    found: CPUSet = EMPTY


@dataclass(frozen=True, slots=True)
class State:
    """Everything that is decided. Keys are cgroup paths below the mount point; `held` is keyed by the pod's path.

    `written` is what was last written and read back (audit mode: what would have been), `before` what a cgroup that
    was there before us had, `shared` the pool the last plan aimed at.
    """

    assignments: Mapping[str, Assignment] = field(default_factory=dict)
    held: Mapping[str, tuple[Held, ...]] = field(default_factory=dict)
    unsatisfied: Mapping[str, Unsatisfied] = field(default_factory=dict)
    foreign: Mapping[str, CPUSet] = field(default_factory=dict)
    written: Mapping[str, CPUSet] = field(default_factory=dict)
    drift: Mapping[str, Drift] = field(default_factory=dict)
    before: Mapping[str, CPUSet] = field(default_factory=dict)
    shared: CPUSet = EMPTY

    @property
    def exclusive(self) -> CPUSet:
        """All CPUs that somebody owns or that are held for a pod."""
        return taken(self.assignments.values(), self.held.values())


def taken(assignments: Iterable[Assignment], held: Iterable[tuple[Held, ...]]) -> CPUSet:
    """The CPUs of assignments and holds together."""
    mask = 0
    for one in assignments:
        mask |= one.cpus.mask
    for several in held:
        for each in several:
            mask |= each.cpus.mask
    return CPUSet.from_mask(mask)


def to_document(state: State) -> dict[str, Any]:
    """The state as JSON values; `from_document` reads it back."""
    return {
        "assignments": {
            p: {"pod": a.pod, "cpus": str(a.cpus), "count": a.count, "since": a.since, "why": a.why}
            for p, a in state.assignments.items()
        },
        "held": {p: [_held_document(h) for h in several] for p, several in state.held.items()},
        "unsatisfied": {
            p: {"pod": u.pod, "asked": u.asked, "has": u.has, "free": u.free, "since": u.since, "why": u.why}
            for p, u in state.unsatisfied.items()
        },
        "conflicts": {p: {"found": str(d.found), "repairs": d.total} for p, d in state.drift.items() if d.conflict},
        "drift_repairs": sum(d.total for d in state.drift.values()),
        **{key: _sets(getattr(state, key)) for key in ("foreign", "written", "before")},
        "shared": str(state.shared),
    }


def from_document(document: Mapping[str, Any]) -> State:
    """Reads what `to_document` made; raises EnforcerError when it is not that (a missing part is an empty part)."""
    try:
        return State(
            assignments={p: _assignment(p, a) for p, a in document.get("assignments", {}).items()},
            held={p: tuple(_held(h) for h in several) for p, several in document.get("held", {}).items()},
            unsatisfied={p: _unsatisfied(p, u) for p, u in document.get("unsatisfied", {}).items()},
            foreign=_parsed(document.get("foreign", {})),
            written=_parsed(document.get("written", {})),
            before=_parsed(document.get("before", {})),
            shared=CPUSet.parse(document.get("shared", "")),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise EnforcerError(f"state file: the content is not what this version writes: {error!r}") from error


def overlapping(assignments: Iterable[Assignment]) -> CPUSet:
    """CPUs that more than one assignment has; empty in every sound state."""
    seen = EMPTY
    twice = []
    for one in assignments:
        twice.append(seen & one.cpus)
        seen |= one.cpus
    return union(twice)


def _held_document(held: Held) -> dict[str, Any]:
    until = None if held.until == float("inf") else held.until
    return {"cpus": str(held.cpus), "since": held.since, "name": held.name, "claim": held.claim, "until": until}


def _held(one: Mapping[str, Any]) -> Held:
    until = one.get("until")
    return Held(
        cpus=CPUSet.parse(one["cpus"]),
        since=float(one["since"]),
        name=str(one.get("name", "")),
        claim=bool(one.get("claim", False)),
        until=float("inf") if until is None else float(until),
    )


def _assignment(path: str, one: Mapping[str, Any]) -> Assignment:
    return Assignment(
        path=path,
        pod=str(one["pod"]),
        cpus=CPUSet.parse(one["cpus"]),
        count=int(one["count"]),
        since=float(one["since"]),
        why=str(one.get("why", "")),
    )


def _unsatisfied(path: str, one: Mapping[str, Any]) -> Unsatisfied:
    return Unsatisfied(
        path=path,
        pod=str(one["pod"]),
        asked=int(one["asked"]),
        has=int(one["has"]),
        free=int(one["free"]),
        since=float(one["since"]),
        why=str(one.get("why", "")),
    )


def _sets(sets: Mapping[str, CPUSet]) -> dict[str, str]:
    return {path: str(cpus) for path, cpus in sets.items()}


def _parsed(sets: Mapping[str, str]) -> dict[str, CPUSet]:
    return {path: CPUSet.parse(text) for path, text in sets.items()}
