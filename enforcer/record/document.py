"""A recorded node as JSON values, and back. Lenient in what it does not know, strict in what would mislead."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, Final, TypeVar

from enforcer import __version__
from enforcer.core.allocation import AllocationOptions
from enforcer.core.cpulimits import CPULimits
from enforcer.core.cpuset import EMPTY, CPUSet
from enforcer.core.errors import ConfigError, EnforcerError
from enforcer.core.kubepods import ContainerRef, PodRef, QoSClass, shown
from enforcer.core.node import ContainerView, Group, NodeView, Phase, PodView, Role, SliceView, parent_of
from enforcer.core.policy import Policy
from enforcer.core.state import State, from_document, to_document
from enforcer.core.topology import CPUTopology
from enforcer.kernel.sysfs import Machine
from enforcer.status.model import AgentInfo

_LONGEST_PATH: Final = 4096
_GREATEST: Final = 1 << 63
_NEVER: Final = float("-inf")
_E = TypeVar("_E", bound=StrEnum)


@dataclass(frozen=True, slots=True)
class Recorded:
    """A node as it was at one moment, with all that plan() reads.

    `state` and `info` are the agent's word (empty where there was none); `now` is the monotonic clock of that moment in
    seconds; `processes` says how many each container's cgroup had; `kubelet_policy` is that of the kubelet's CPU
    Manager, None where its files do not say; `made_by` is the version of the program that recorded it.
    """

    view: NodeView
    state: State
    policy: Policy
    machine: Machine
    now: float
    info: AgentInfo = AgentInfo()  # noqa: RUF009 (frozen)
    processes: Mapping[str, int] = field(default_factory=dict)
    kubelet_policy: str | None = None
    made_by: str = __version__
    notes: tuple[str, ...] = ()
    described: bool = False


# --- writing


def to_json(node: Recorded) -> dict[str, Any]:
    """The document: names of cgroups, sets, limits and numbers. No environment, command line or process name."""
    return {
        "made_by": node.made_by,
        "now": node.now,
        "machine": _machine_json(node.machine),
        "cgroup_version": node.view.version,
        "slices": [_slice_json(one, node.processes) for one in node.view.slices.values()],
        "state": to_document(node.state),
        "agent": _agent_json(node.info),
        "policy": {**asdict(node.policy), "reserved": str(node.policy.reserved)},
        "kubelet_policy": node.kubelet_policy,
        "notes": list(node.notes),
    }


def _machine_json(machine: Machine) -> dict[str, Any]:
    sets = {name: str(getattr(machine, name)) for name in _MACHINE_SETS}
    rows = [list(row) for row in machine.topology.rows()]
    return {"rows": rows, **sets, "smt_active": machine.smt_active, "notes": list(machine.notes)}


_MACHINE_SETS: Final = ("online", "possible", "present", "isolated", "nohz_full")


def _agent_json(info: AgentInfo) -> dict[str, Any]:
    return {
        "mode": info.mode,
        "running": info.running,
        "reserved": str(info.reserved),
        "strict": info.strict,
        "conflicts": {path: [str(cpus), number] for path, (cpus, number) in info.conflicts.items()},
        "drift_repairs": info.drift_repairs,
        "retrying": info.retrying,
        "would_write": info.would_write,
        "left_enforce": info.left_enforce,
    }


def _slice_json(one: SliceView, processes: Mapping[str, int]) -> dict[str, Any]:
    pods = [_pod_json(pod, processes) for pod in one.pods.values()]
    return {**_group_json(one.group), "qos": one.qos.value, "root": one.is_root, "pods": pods}


def _pod_json(pod: PodView, processes: Mapping[str, int]) -> dict[str, Any]:
    rows = [_container_json(c, processes) for c in pod.containers.values()]
    times = {"born": _time(pod.born)}
    return {**_group_json(pod.group), "uid": pod.ref.uid, "limits": _limits_json(pod.limits), **times, "cgroups": rows}


def _container_json(container: ContainerView, processes: Mapping[str, int]) -> dict[str, Any]:
    path = container.group.path
    return {
        **_group_json(container.group),
        "id": container.ref.id,
        "runtime": container.ref.runtime,
        "role": container.role.value,
        "phase": container.phase.value,
        "limits": _limits_json(container.limits),
        "limits_since": _time(container.limits_since),
        "born": _time(container.born),
        "given": str(container.given),
        "processes": processes.get(path, int(container.populated)),
        "opted_out": container.opted_out,
        "nested": [_group_json(one) for one in container.nested],
    }


def _group_json(group: Group) -> dict[str, Any]:
    return {
        "path": group.path,
        "cpus": None if group.cpus is None else str(group.cpus),
        "effective": str(group.effective),
    }


def _limits_json(limits: CPULimits | None) -> dict[str, int | None] | None:
    if limits is None:
        return None
    return {"quota": limits.quota, "period": limits.period, "shares": limits.shares, "weight": limits.weight}


def _time(seconds: float) -> float | None:
    return None if seconds == _NEVER else seconds


# --- reading


def from_json(document: Mapping[str, Any], source: str) -> Recorded:
    """Reads what to_json() made, of this or a later program: unknown keys are passed over, missing ones have defaults.

    Raises ConfigError, with the place in the document, for what has the wrong type, and for a node that contradicts
    itself. `source` names the file.
    """
    notes: list[str] = []
    try:
        return _recorded(_Part(document, source, notes), notes)
    except ConfigError:
        raise
    except EnforcerError as error:
        raise ConfigError(f"{source}: {error.message}", hint=error.hint) from error
    except OverflowError as error:
        raise ConfigError(f"{source}: a number in it is too large: {error}") from error


def _recorded(whole: _Part, notes: list[str]) -> Recorded:
    machine = _machine(whole.part("machine"))
    slices, processes = _slices(whole)
    version = whole.number("cgroup_version", 2)
    if version not in (1, 2):
        raise whole.wrong("cgroup_version", "1 or 2")
    info = _agent(whole.part("agent"), machine.present)
    state = _printable(from_document(whole.part("state").values))
    policy = _policy(whole.part("policy"))
    now = whole.time("now") or 0.0
    return Recorded(
        view=NodeView(version, machine.topology, machine.online, slices),
        state=state,
        policy=policy,
        machine=machine,
        now=now if now != _NEVER else 0.0,
        info=info,
        processes=processes,
        kubelet_policy=whole.text("kubelet_policy", "") or None,
        made_by=shown(whole.text("made_by", "unknown"), 40),
        notes=(*(shown(str(note)) for note in whole.rows("notes", str)), *notes),
    )


def _printable(state: State) -> State:
    """Its sentences are shown as they are, so nothing in them may move a terminal's cursor."""
    return replace(
        state,
        assignments={p: replace(a, why=shown(a.why)) for p, a in state.assignments.items()},
        unsatisfied={p: replace(u, why=shown(u.why)) for p, u in state.unsatisfied.items()},
    )


class _Part:
    """One object of the document, with its place for errors; each reader raises ConfigError for a wrong type."""

    def __init__(self, values: Mapping[str, Any], place: str, notes: list[str]) -> None:
        self.values = values
        self.place = place
        self.notes = notes

    def wrong(self, key: str, wanted: str) -> ConfigError:
        found = shown(repr(self.values.get(key)), 60)
        return ConfigError(f"{self.place}: {key}: wanted {wanted}, found {found}")

    def text(self, key: str, default: str | None = None) -> str:
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise self.wrong(key, "a text")
        return value

    def number(self, key: str, default: int) -> int:
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or abs(value) > _GREATEST:
            raise self.wrong(key, "a whole number")
        return value

    def maybe_number(self, key: str) -> int | None:
        return None if self.values.get(key) is None else self.number(key, 0)

    def time(self, key: str) -> float:
        """Monotonic seconds; nothing stands for "before all that is known"."""
        value = self.values.get(key)
        if value is None:
            return _NEVER
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _GREATEST:
            raise self.wrong(key, "seconds")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def cpus(self, key: str) -> CPUSet:
        try:
            return CPUSet.parse(self.text(key, ""))
        except EnforcerError as error:
            raise ConfigError(f"{self.place}: {key}: {error.message}") from error

    def one_of(self, key: str, kind: type[_E], default: _E) -> _E:
        """A word this program knows; another one is noted and stands for the default."""
        text = self.text(key, default.value)
        try:
            return kind(text)
        except ValueError:
            self.notes.append(f"{self.place}: {key} '{shown(text, 40)}' is not known here, taken as {default.value}")
            return default

    def part(self, key: str) -> _Part:
        value = self.values.get(key, {})
        if not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return _Part(value, f"{self.place}: {key}", self.notes)

    def rows(self, key: str, kind: type[Any]) -> list[Any]:
        value = self.values.get(key, [])
        if not isinstance(value, list) or not all(isinstance(one, kind) for one in value):
            raise self.wrong(key, f"a list of {'objects' if kind is dict else 'texts' if kind is str else 'rows'}")
        return value

    def parts(self, key: str) -> Iterator[_Part]:
        for number, value in enumerate(self.rows(key, dict)):
            yield _Part(value, f"{self.place}: {key}[{number}]", self.notes)


def _machine(part: _Part) -> Machine:
    topology = CPUTopology.from_rows(part.rows("rows", list))
    sets = {name: part.cpus(name) for name in _MACHINE_SETS}
    online = sets["online"] or topology.cpus
    if online != topology.cpus:
        raise ConfigError(f"{part.place}: online is {online}, the rows describe CPUs {topology.cpus}")
    smt = part.values.get("smt_active")
    return Machine(
        topology=topology,
        online=online,
        possible=sets["possible"] | online,
        present=sets["present"] | online,
        isolated=sets["isolated"],
        nohz_full=sets["nohz_full"],
        smt_active=smt if isinstance(smt, bool) else None,
        notes=tuple(shown(note) for note in part.rows("notes", str)),
    )


def _agent(part: _Part, present: CPUSet) -> AgentInfo:
    conflicts = {}
    for path, pair in part.part("conflicts").values.items():
        match pair:
            case [str() as cpus, int() as number]:
                conflicts[path] = (CPUSet.parse(cpus), number)
            case _:
                raise ConfigError(f"{part.place}: conflicts: wanted a set and a number, found {shown(repr(pair), 60)}")
    mode = part.text("mode", "")
    return AgentInfo(
        mode=mode if mode in ("audit", "enforce") else "",
        running=part.flag("running", False),
        reserved=part.cpus("reserved"),
        strict=part.flag("strict", False),
        present=present,
        conflicts=conflicts,
        drift_repairs=part.number("drift_repairs", 0),
        retrying=part.number("retrying", 0),
        would_write=part.number("would_write", 0),
        left_enforce=shown(part.text("left_enforce", "")),
    )


def _policy(part: _Part) -> Policy:
    options = part.part("options")
    known = {one.name for one in fields(AllocationOptions)}
    for name in options.values.keys() - known:
        part.notes.append(f"{options.place}: '{shown(name, 40)}' is not known here, left out")
    default = Policy(EMPTY)
    seconds = ("settle", "claim_for", "drift_window", "back_off", "back_off_most")
    times = {name: part.time(name) for name in seconds if part.values.get(name) is not None}
    return Policy(
        reserved=part.cpus("reserved"),
        options=AllocationOptions(**{name: options.flag(name, False) for name in known}),
        strict=part.flag("strict", False),
        cfs_quota=part.flag("cfs_quota", True),
        drift_limit=part.number("drift_limit", default.drift_limit),
        **times,
    )


def _slices(whole: _Part) -> tuple[dict[str, SliceView], dict[str, int]]:
    processes: dict[str, int] = {}
    return _by_path(whole, "slices", lambda part: _slice(part, processes), lambda s: s.group.path), processes


def _slice(part: _Part, processes: dict[str, int]) -> SliceView:
    group = _group(part)
    qos = part.one_of("qos", QoSClass, QoSClass.BURSTABLE)
    pods = _by_path(part, "pods", lambda one: _pod(one, qos, group.path, processes), lambda p: p.group.path)
    return SliceView(group, qos, part.flag("root", False), pods)


_T = TypeVar("_T")


def _by_path(part: _Part, key: str, read: Callable[[_Part], _T], path_of: Callable[[_T], str]) -> dict[str, _T]:
    """The objects of a list by their paths; a path that is there twice contradicts itself."""
    found: dict[str, _T] = {}
    for inner in part.parts(key):
        one = read(inner)
        if path_of(one) in found:
            raise ConfigError(f"{inner.place}: contradicts the rest: {shown(path_of(one))} is there already")
        found[path_of(one)] = one
    return found


def _pod(part: _Part, qos: QoSClass, above: str, processes: dict[str, int]) -> PodView:
    group = _group(part, above)
    ref = PodRef(part.text("uid"), qos, group.path)
    rows = _by_path(part, "cgroups", lambda one: _container(one, ref, processes), lambda c: c.group.path)
    return PodView(ref, group, _limits(part), part.time("born"), rows)


def _container(part: _Part, pod: PodRef, processes: dict[str, int]) -> ContainerView:
    group = _group(part, pod.path)
    processes[group.path] = part.number("processes", 1)
    return ContainerView(
        ref=ContainerRef(pod.uid, part.text("id"), part.text("runtime", "") or None, group.path),
        group=group,
        role=part.one_of("role", Role, Role.UNSURE),
        phase=part.one_of("phase", Phase, Phase.RUNNING),
        limits=_limits(part),
        limits_since=part.time("limits_since"),
        born=part.time("born"),
        given=part.cpus("given"),
        populated=processes[group.path] > 0,
        opted_out=part.flag("opted_out", False),
        nested=tuple(_group(one) for one in part.parts("nested")),
    )


def _group(part: _Part, above: str | None = None) -> Group:
    path = part.text("path")
    plain = path.startswith("/") and len(path) <= _LONGEST_PATH and "\0" not in path
    if not plain or any(name in ("", ".", "..") for name in path[1:].split("/")):
        raise part.wrong("path", "a cgroup's path below the top")
    if above is not None and parent_of(path) != above:
        raise part.wrong("path", f"a cgroup directly below {shown(above)}")
    return Group(path, None if part.values.get("cpus") is None else part.cpus("cpus"), part.cpus("effective"))


def _limits(part: _Part) -> CPULimits | None:
    if part.values.get("limits") is None:
        return None
    limits = part.part("limits")
    quota, period = limits.maybe_number("quota"), limits.number("period", 100_000)
    return CPULimits(quota, period, limits.maybe_number("shares"), limits.maybe_number("weight"))
