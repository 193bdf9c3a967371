"""What `status` shows, gathered from the node as the kernel shows it and from the agent's state. No layout here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from enforcer.core.cpulimits import CPULimits, amount, whole_cpus
from enforcer.core.cpuset import EMPTY, CPUSet, union
from enforcer.core.kubepods import shown
from enforcer.core.node import ContainerView, NodeView, PodView, Role
from enforcer.core.state import State

_OWNER_MARKS: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwyz"
_TOO_MANY: Final = "#"
_MOST_NAMED: Final = 3


@dataclass(frozen=True, slots=True)
class AgentInfo:
    """What the agent says beside its State. `mode` "": there is no word of an agent. `present`: CPUs of the machine,
    offline ones included. `conflicts`: cgroup -> (the set somebody else writes, how often it was repaired).
    `left_enforce`: why it gave everything back and only audits now."""

    mode: str = ""
    running: bool = False
    pid: int = 0
    reserved: CPUSet = EMPTY
    strict: bool = False
    present: CPUSet = EMPTY
    conflicts: Mapping[str, tuple[CPUSet, int]] = field(default_factory=dict)
    drift_repairs: int = 0
    retrying: int = 0
    would_write: int = 0
    left_enforce: str = ""
    notes: tuple[str, ...] = ()


def agent_info(document: Mapping[str, Any], *, running: bool, present: CPUSet, notes: Iterable[str] = ()) -> AgentInfo:
    """From the state file's document; wrong types in it raise AttributeError, KeyError, TypeError or ValueError."""
    state = document.get("state", {})
    return AgentInfo(
        mode=str(document.get("mode", "")),
        running=running,
        pid=int(document.get("pid", 0)),
        reserved=CPUSet.parse(document.get("reserved", "")),
        strict=bool(document.get("strict", False)),
        present=present,
        conflicts={p: (CPUSet.parse(c["found"]), int(c["repairs"])) for p, c in state.get("conflicts", {}).items()},
        drift_repairs=int(state.get("drift_repairs", 0)),
        retrying=int(document.get("retrying", 0)),
        would_write=len(document.get("would_write", {})),
        left_enforce=str(document.get("left_enforce") or ""),
        notes=tuple(notes),
    )


class CPUClass(StrEnum):
    """What a CPU is for. OUTSIDE: online, but not in the kubepods root's set."""

    EXCLUSIVE = "exclusive"
    HELD = "held"
    CLAIMED = "claimed"
    FOREIGN = "foreign"
    OUTSIDE = "outside"
    RESERVED = "reserved"
    SHARED = "shared"
    OFFLINE = "offline"


# In order of precedence: a CPU is the first of these that it is.
CLASS_MARKS: Final = {
    CPUClass.OFFLINE: "x",
    CPUClass.EXCLUSIVE: "A",
    CPUClass.HELD: "+",
    CPUClass.CLAIMED: "~",
    CPUClass.FOREIGN: "%",
    CPUClass.OUTSIDE: "-",
    CPUClass.RESERVED: "=",
    CPUClass.SHARED: ".",
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One CPU: its class, the one character that stands for it, and the cgroup that has it ("" = nobody alone)."""

    cpu: int
    kind: CPUClass
    mark: str
    owner: str = ""


class RowKind(StrEnum):
    OWNER = "owner"
    UNSATISFIED = "unsatisfied"
    FOREIGN = "foreign"
    HELD = "held"
    SHARED = "shared"
    SANDBOX = "sandbox"


_ROW_MARKS: Final = {RowKind.UNSATISFIED: "!", RowKind.FOREIGN: CLASS_MARKS[CPUClass.FOREIGN]}


@dataclass(frozen=True, slots=True)
class Row:
    """One container: `asked` for a person ("2 CPUs", "500m", "-"), `got` as the kernel grants it, `why` in words.

    HELD: CPUs without a running owner; path and names are the pod's, there is no container.
    """

    kind: RowKind
    mark: str
    path: str
    pod: str
    container: str
    qos: str
    asked: str
    got: CPUSet
    why: str


@dataclass(frozen=True, slots=True)
class Figures:
    """Sets of CPUs. `free` can be given out now; `shared` is where everything without CPUs of its own runs."""

    online: CPUSet
    allowed: CPUSet
    reserved: CPUSet
    allocatable: CPUSet
    exclusive: CPUSet
    held: CPUSet
    foreign: CPUSet
    free: CPUSet
    shared: CPUSet


class Names:
    """Short names of pods and containers, fit for a terminal: the first 8 characters of a UID, more where two pods
    have these in common."""

    def __init__(self, view: NodeView) -> None:
        uids = {pod.ref.uid for pod in view.pods()}
        length = 8
        while len({uid[:length] for uid in uids}) < len(uids):
            length += 4
        self._length = length
        self._view = view

    def pod(self, uid: str) -> str:
        return shown(uid[: self._length])

    @staticmethod
    def container(container_id: str) -> str:
        return shown(container_id[:12])

    def of(self, path: str) -> str:
        """A cgroup in words: "pod 0a1b2c3d container 0123456789ab", or its path when it is neither."""
        if pod := self._view.find_pod(path):
            return f"pod {self.pod(pod.ref.uid)}"
        if container := self._view.find_container(path):
            ref = container.ref
            return f"pod {self.pod(ref.pod_uid)} container {self.container(ref.id)}"
        return shown(path)


@dataclass(frozen=True)
class Model:
    """Everything that is shown of one node."""

    view: NodeView
    state: State
    info: AgentInfo
    names: Names
    figures: Figures
    cells: Mapping[int, Cell]
    rows: tuple[Row, ...]
    problems: tuple[str, ...]

    @property
    def enforced(self) -> bool:
        """What the state says is so in the kernel too; in audit mode it is only what would be."""
        return self.info.mode == "enforce"


def gather(view: NodeView, state: State, info: AgentInfo) -> Model:
    """The model of a node. Pure."""
    names = Names(view)
    figures = figures_of(view, state, info)
    marks = _owner_marks(state)
    cells = {cell.cpu: cell for cell in _cells(view, state, info, figures, marks)}
    enforced = info.mode == "enforce"
    rows = [*_rows(view, state, names, marks, enforced), *_hold_rows(view, state, names)]
    rows.sort(key=lambda row: (list(RowKind).index(row.kind), _lowest(row.got) if row.mark else 0, row.path))
    problems = (*_unsatisfied(state, figures, names), *_conflicts(info, names))
    if enforced:
        problems += (*_stopped(info), *_broken(view, state, names), *_retrying(info))
    return Model(view, state, info, names, figures, cells, tuple(rows), problems)


def figures_of(view: NodeView, state: State, info: AgentInfo) -> Figures:
    """Who may use what, as sets."""
    # Before there is a kubepods root, pods may be given any CPU.
    allowed = view.allowed or view.online
    exclusive = union(a.cpus for a in state.assignments.values()) & view.online
    held = union(h.cpus for holds in state.held.values() for h in holds) & view.online
    foreign = union(state.foreign.values()) & view.online
    allocatable = allowed - info.reserved
    return Figures(
        online=view.online,
        allowed=allowed,
        reserved=info.reserved & allowed,
        allocatable=allocatable,
        exclusive=exclusive,
        held=held,
        foreign=foreign,
        free=allocatable - exclusive - held - foreign,
        shared=state.shared & allowed if state.shared else allowed - exclusive - held,
    )


def holders(state: State, figures: Figures, names: Names, *, without: str = "") -> list[str]:
    """Who has which CPUs, in words ("CPU 3 by pod 0a1b2c3d container ..."); the cgroup `without` is left out."""
    found = [(a.cpus, f"by {names.of(path)}") for path, a in state.assignments.items() if path != without and a.cpus]
    for pod, holds in state.held.items():
        found += [(h.cpus, _hold_text(names.of(pod), claim=h.claim)) for h in holds]
    found += [(cpus, f"by {names.of(path)}, pinned by somebody else") for path, cpus in state.foreign.items()]
    found.sort(key=lambda pair: _lowest(pair[0]))
    texts = [f"{named(cpus)} {who}" for cpus, who in found]
    return [*texts, *([f"{named(figures.reserved)} reserved"] if figures.reserved else [])]


def named(cpus: CPUSet) -> str:
    """"CPU 1", "CPUs 2-3", "no CPU"."""
    return f"CPU{'s' if len(cpus) > 1 else ''} {cpus}" if cpus else "no CPU"


def _lowest(cpus: CPUSet) -> int:
    return cpus.mask & -cpus.mask


def _hold_text(pod: str, *, claim: bool) -> str:
    return f"claimed for the coming containers of {pod}" if claim else f"held for {pod}, whose container has gone"


# --- CPUs


def _owner_marks(state: State) -> dict[str, str]:
    """Owners by their lowest CPU; from the 52nd on they share one mark."""
    paths = sorted(state.assignments, key=lambda path: (_lowest(state.assignments[path].cpus), path))
    return {path: _OWNER_MARKS[i] if i < len(_OWNER_MARKS) else _TOO_MANY for i, path in enumerate(paths)}


def _cells(
    view: NodeView, state: State, info: AgentInfo, figures: Figures, marks: Mapping[str, str]
) -> Iterator[Cell]:
    owner_of = {cpu: path for path, a in state.assignments.items() for cpu in a.cpus}
    claimed = union(h.cpus for holds in state.held.values() for h in holds if h.claim)
    holder = {cpu: pod for pod, holds in state.held.items() for h in holds for cpu in h.cpus}
    pinned = {cpu: path for path, cpus in state.foreign.items() for cpu in cpus}
    members = {
        CPUClass.OFFLINE: info.present - view.online,
        CPUClass.EXCLUSIVE: figures.exclusive,
        CPUClass.HELD: figures.held - claimed,
        CPUClass.CLAIMED: figures.held & claimed,
        CPUClass.FOREIGN: figures.foreign,
        CPUClass.OUTSIDE: view.online - figures.allowed,
        CPUClass.RESERVED: figures.reserved,
    }
    for cpu in info.present | view.online:
        kind = next((kind for kind, cpus in members.items() if cpu in cpus), CPUClass.SHARED)
        owner = owner_of.get(cpu) or holder.get(cpu) or pinned.get(cpu) or ""
        yield Cell(cpu, kind, marks[owner] if kind is CPUClass.EXCLUSIVE else CLASS_MARKS[kind], owner)


# --- containers


def _rows(view: NodeView, state: State, names: Names, marks: Mapping[str, str], enforced: bool) -> Iterator[Row]:
    for pod, container in view.containers():
        path = container.group.path
        kind = _kind(state, container)
        yield Row(
            kind=kind,
            mark=marks.get(path) or _ROW_MARKS.get(kind, ""),
            path=path,
            pod=names.pod(pod.ref.uid),
            container=names.container(container.ref.id),
            qos=pod.ref.qos,
            asked=_asked(container.limits),
            got=container.group.effective,
            why=_why(state, pod, container, kind, enforced),
        )


def _hold_rows(view: NodeView, state: State, names: Names) -> Iterator[Row]:
    for path, holds in state.held.items():
        pod = view.find_pod(path)
        for one in holds if pod else ():
            kind = CPUClass.CLAIMED if one.claim else CPUClass.HELD
            why = "claimed for its coming containers" if one.claim else "its container has gone, the next one gets them"
            name = names.pod(pod.ref.uid) if pod else ""
            yield Row(RowKind.HELD, CLASS_MARKS[kind], path, name, "-", pod.ref.qos if pod else "", "-", one.cpus, why)


def _kind(state: State, container: ContainerView) -> RowKind:
    path = container.group.path
    if path in state.unsatisfied:
        return RowKind.UNSATISFIED
    if path in state.assignments:
        return RowKind.OWNER
    if path in state.foreign:
        return RowKind.FOREIGN
    return RowKind.SANDBOX if container.role in (Role.SANDBOX, Role.CONMON) else RowKind.SHARED


def _asked(limits: CPULimits | None) -> str:
    if limits is None or limits.quota is None:
        return "-"
    return amount(-(-limits.quota * 1000 // limits.period))


def _why(state: State, pod: PodView, container: ContainerView, kind: RowKind, enforced: bool) -> str:
    path = container.group.path
    if kind is RowKind.UNSATISFIED:
        waiting = state.unsatisfied[path]
        return f"unsatisfied: asks for {_cpus(waiting.asked)}, {_are(waiting.free)} free" + (
            f", keeps {waiting.has}" if waiting.has else ""
        )
    if kind is RowKind.OWNER:
        mine = state.assignments[path]
        return f"{_cpus(len(mine.cpus))}: {mine.why}" if enforced else f"would get {mine.cpus}: {mine.why}"
    if kind is RowKind.FOREIGN:
        return f"pinned to {state.foreign[path]} by somebody else, left alone"
    if kind is RowKind.SANDBOX:
        return f"{container.role}: reserved CPUs"
    return f"shared pool: {_why_shared(pod, container)}"


def _why_shared(pod: PodView, container: ContainerView) -> str:
    if not pod.guaranteed:
        return f"{pod.ref.qos} pod"
    if container.opted_out:
        return "opted out by its pod's annotation"
    limits = container.limits
    if limits is None or limits.quota is None:
        return "no CPU limit"
    milli = limits.milli
    if milli is None or milli % 1000:
        return f"{_asked(limits)} is no whole number of CPUs"
    if whole_cpus(limits):
        return f"asks for {amount(milli)}, has none of its own"
    return f"its quota says {amount(milli)}, its shares do not"


# --- what is not as it should be


def _unsatisfied(state: State, figures: Figures, names: Names) -> Iterator[str]:
    for path, waiting in sorted(state.unsatisfied.items(), key=lambda pair: pair[1].since):
        taken = "; ".join(holders(state, figures, names, without=path)) or "none"
        # The figures say it already where CPUs are simply too few.
        why = f" ({waiting.why})" if waiting.why and not waiting.why.startswith("not enough CPUs") else ""
        yield (
            f"{names.of(path)} asks for {_cpus(waiting.asked)}, has {waiting.has} of its own, "
            f"{_are(waiting.free)} free for it{why}. Taken: {taken}"
        )


def _conflicts(info: AgentInfo, names: Names) -> Iterator[str]:
    for path, (found, repairs) in sorted(info.conflicts.items()):
        yield (
            f"conflict: somebody else keeps writing CPUs {found or 'none'} to {names.of(path)}; "
            f"{repairs} repairs did not last"
        )


def _stopped(info: AgentInfo) -> Iterator[str]:
    if not info.running:
        yield "the agent does not run: nobody gets CPUs of its own, and no foreign write is repaired"


def _retrying(info: AgentInfo) -> Iterator[str]:
    if info.retrying:
        yield f"{info.retrying} writes were refused by the kernel or had no effect, and are tried again (see the log)"


def _broken(view: NodeView, state: State, names: Names) -> Iterator[str]:
    """Where the kernel's sets are not what the agent decided: it is at work on that, or does not run."""
    owned = union(a.cpus for a in state.assignments.values())
    for _pod, container in view.containers():
        path, may = container.group.path, container.group.effective
        mine = state.assignments.get(path)
        own = mine.cpus & view.online if mine else EMPTY
        if mine and may != own:
            yield f"{names.of(path)} may run on {may or 'no CPU'}, its own are {mine.cpus}"
        if strangers := (may - own) & owned & view.online:
            owners = sorted(names.of(p) for p, a in state.assignments.items() if not a.cpus.isdisjoint(strangers))
            more = f" and {len(owners) - _MOST_NAMED} more" if len(owners) > _MOST_NAMED else ""
            yield f"{names.of(path)} may run on {strangers}, that belongs to {', '.join(owners[:_MOST_NAMED])}{more}"


def _cpus(number: int) -> str:
    return "1 CPU" if number == 1 else f"{number} CPUs"


def _are(number: int) -> str:
    return {0: "none is", 1: "1 is"}.get(number, f"{number} are")
