"""A node that a person describes in JSON, for `simulate --node`. All that is wrong in it is told at once, by key.

    {"topology": {"sockets": 2, "cores": 8, "threads": 2, "numa": 2}, "reserved": "0,16",
     "options": ["full-pcpus-only"],
     "pods": [{"name": "db", "containers": [{"name": "main", "cpus": 4}]},
              {"name": "web", "qos": "burstable", "containers": [{"name": "nginx", "cpus": "500m"}]}]}

The counts are lscpu's: cores of a socket, threads of a core; sockets, NUMA nodes and L3 caches of the machine.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from enforcer.config import PolicyOptions, parse_millicores
from enforcer.core.allocation import validate_options
from enforcer.core.cpulimits import ContainerCPU
from enforcer.core.cpuset import EMPTY, MAX_CPU, CPUSet
from enforcer.core.errors import ConfigError, EnforcerError, TopologyError
from enforcer.core.kubepods import QoSClass, shown
from enforcer.core.node import Group, NodeView, SliceView
from enforcer.core.policy import Policy
from enforcer.core.reserved import Reservation, resolve_reserved
from enforcer.core.state import State
from enforcer.core.topology import CPUTopology
from enforcer.core.whatif import SANDBOX, NewContainer, NewPod, add_pod
from enforcer.kernel.sysfs import Machine
from enforcer.record import Recorded
from enforcer.status import AgentInfo

_MOST_CPUS: Final = 8192
_MOST_BYTES: Final = 16 << 20
_MOST_TOLD: Final = 100
_MOST_PODS: Final = 2000  # four times what the largest nodes run; each one that waits costs the plan a search
_MOST_CONTAINERS: Final = 200  # of one pod
_NEVER: Final = float("-inf")
_ROOT: Final = "/kubepods"
_NAME: Final = re.compile(r"[0-9A-Za-z][\w.-]{0,127}", re.ASCII)

_TOP: Final = ("cgroup", "topology", "online", "isolated", "allowed", "reserved", "reserved-amount", "options",
               "cfs-quota", "pods")  # fmt: skip
_COUNTS: Final = ("sockets", "cores", "threads", "numa", "l3")
_SHORTHAND: Final = (*_COUNTS, "siblings")
_POD: Final = ("name", "qos", "containers", "sandbox")
_CONTAINER: Final = ("name", "cpus", "pinned", "opted-out")
OPTIONS: Final = (
    "full-pcpus-only", "distribute-cpus-across-numa", "distribute-cpus-across-cores", "align-by-socket",
    "prefer-align-cpus-by-uncorecache", "strict-cpu-reservation",
)  # fmt: skip


@dataclass
class _Reading:
    """The problems found so far; readers give a harmless value for what is wrong, so that all is looked at."""

    source: str
    problems: list[str] = field(default_factory=list)

    def wrong(self, key: str, value: object, wanted: str) -> None:
        self.problems.append(f"{self.source}: {key} = {_shown(value)}: {wanted}")

    def known(self, values: object, place: str, keys: tuple[str, ...]) -> Mapping[str, Any]:
        """The object itself; unknown keys in it are problems."""
        if not isinstance(values, dict):
            self.wrong(place or "the top", values, f"wanted an object with the keys {', '.join(keys)}")
            return {}
        for key in values.keys() - set(keys):
            near = difflib.get_close_matches(str(key), keys, 1)
            hint = f"nearest: {near[0]}" if near else f"known are {', '.join(keys)}"
            self.wrong(f"{place}.{shown(key, 40)}".lstrip("."), values[key], f"unknown key; {hint}")
        return values

    def cpus(self, values: Mapping[str, Any], key: str, place: str = "") -> CPUSet | None:
        value = values.get(key)
        if value is None:
            return None
        try:
            return CPUSet.parse(str(value) if isinstance(value, int) and not isinstance(value, bool) else value)
        except (EnforcerError, AttributeError):
            self.wrong(f"{place}{key}", value, 'wanted a CPU list such as "0-3,8"')
            return None

    def count(self, values: Mapping[str, Any], key: str, place: str, default: int) -> int:
        value = values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST_CPUS:
            self.wrong(f"{place}{key}", value, f"wanted a whole number from 1 to {_MOST_CPUS}")
            return default
        return value

    def flag(self, values: Mapping[str, Any], key: str, place: str, default: bool) -> bool:
        value = values.get(key, default)
        if not isinstance(value, bool):
            self.wrong(f"{place}{key}", value, "wanted true or false")
            return default
        return value

    def stop(self) -> None:
        if more := self.problems[_MOST_TOLD:]:
            self.problems[_MOST_TOLD:] = [f"{self.source}: and {len(more)} more"]
        if self.problems:
            raise ConfigError("\n".join(self.problems))


def load(path: Path) -> Recorded:
    """Reads a described node; raises ConfigError with a line for each thing that is wrong."""
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    if data[:2] == b"\x1f\x8b":
        raise ConfigError(f"{path}: this is a recorded node, not a described one", hint=f"use --from {path}")
    if len(data) > _MOST_BYTES:
        raise ConfigError(f"{path}: more than {_MOST_BYTES >> 20} MiB are no description of a node")
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON: {str(error)[:200]}") from error
    return parse(document, str(path))


def parse(document: object, source: str) -> Recorded:
    """The described node, nothing decided yet; raises one ConfigError with all that is wrong."""
    reading = _Reading(source)
    top = reading.known(document, "", _TOP)
    version = top.get("cgroup", 2)
    if version not in (1, 2) or isinstance(version, bool):
        reading.wrong("cgroup", version, "wanted 1 or 2")
    machine = _machine(reading, top)
    pods = _pods(reading, top, machine)
    options = parse_options(reading, top.get("options", []))
    cfs_quota = _on_off(reading, top)
    allowed = _allowed(reading, top, machine)
    if machine is None:
        reading.stop()
        raise AssertionError("a machine that cannot be made is a problem")
    reserved = _reserved(reading, top, machine, allowed, options)
    reading.stop()
    policy = Policy(reserved, options.allocation(), options.strict_cpu_reservation, cfs_quota)
    view = _view(version, machine, allowed, pods)
    info = AgentInfo(reserved=reserved, strict=policy.strict, present=machine.present)
    return Recorded(view, State(), policy, machine, 0.0, info, described=True)


# --- the machine


def _machine(reading: _Reading, top: Mapping[str, Any]) -> Machine | None:
    described = top.get("topology")
    before = len(reading.problems)
    if isinstance(described, list):
        rows = [tuple(row) if isinstance(row, list) else (row,) for row in described]
    elif described is None:
        reading.wrong("topology", None, "is missing; wanted rows [cpu, core, socket, numa, l3] or counts")
        return None
    else:
        rows = _counted(reading, described)
    if len(reading.problems) > before:
        return None
    try:
        topology = CPUTopology.from_rows(rows)
    except TopologyError as error:
        reading.problems.append(f"{reading.source}: {error.message}")
        return None
    return _online(reading, top, topology)


def _counted(reading: _Reading, described: object) -> list[tuple[int, ...]]:
    """Rows of a machine of equal units. Threads of a core stand far apart (0, n) as on most x86, or side by side."""
    values = reading.known(described, "topology", _SHORTHAND)
    sockets, cores, threads = (
        reading.count(values, key, "topology.", default) for key, default in zip(_COUNTS[:3], (1, 1, 1), strict=True)
    )
    if "cores" not in values:
        reading.wrong("topology.cores", None, "is missing: how many cores each socket has")
    total = sockets * cores
    if total * threads > _MOST_CPUS:
        reading.wrong("topology", values, f"{total * threads} CPUs; at most {_MOST_CPUS}")
        return []
    numa = reading.count(values, "numa", "topology.", sockets)
    l3 = reading.count(values, "l3", "topology.", sockets)
    _check_split(reading, "numa", numa, sockets, cores)
    _check_split(reading, "l3", l3, sockets, cores)
    siblings = values.get("siblings", "apart")
    if siblings not in ("apart", "adjacent"):
        reading.wrong("topology.siblings", siblings, '"apart" (0 and n are one core) or "adjacent" (0 and 1)')
    return [
        (
            core * threads + thread if siblings == "adjacent" else thread * total + core,
            core, core // cores, core * numa // total, core * l3 // total,
        )
        for core in range(total)
        for thread in range(threads)
    ]  # fmt: skip


def _check_split(reading: _Reading, key: str, units: int, sockets: int, cores: int) -> None:
    inside = units >= sockets and units % sockets == 0 and cores % (units // sockets) == 0
    across = key == "numa" and units < sockets and sockets % units == 0
    if not inside and not across:
        reading.wrong(
            f"topology.{key}", units,
            f"{sockets} sockets of {cores} cores cannot be split evenly into {units}; give rows instead",
        )  # fmt: skip


def _online(reading: _Reading, top: Mapping[str, Any], topology: CPUTopology) -> Machine:
    present = topology.cpus
    online = reading.cpus(top, "online")
    isolated = reading.cpus(top, "isolated") or EMPTY
    if online is not None and (not online or not online <= present):
        reading.wrong("online", top["online"], f"must be CPUs of the topology, {present}, at least one")
        online = None
    if not isolated <= present:
        reading.wrong("isolated", top["isolated"], f"CPUs {isolated - present} are not in the topology ({present})")
    if online is not None and online != present:
        topology = CPUTopology.from_rows(row for row in topology.rows() if row[0] in online)
    return Machine(topology, topology.cpus, present, present, isolated, EMPTY, None, ())


def _allowed(reading: _Reading, top: Mapping[str, Any], machine: Machine | None) -> CPUSet:
    allowed = reading.cpus(top, "allowed")
    if machine is None:
        return EMPTY
    if allowed is not None and (not allowed or not allowed <= machine.online):
        reading.wrong("allowed", top["allowed"], f"must be online CPUs, {machine.online}, at least one")
        allowed = None
    return allowed or machine.online


# --- the policy


def parse_options(reading: _Reading, value: object) -> PolicyOptions:
    """The kubelet's option names: a list of those that are on, or an object of booleans."""
    if isinstance(value, dict):
        wrong = [name for name, on in value.items() if not isinstance(on, bool)]
        for name in wrong:
            reading.wrong(f"options.{shown(name, 40)}", value[name], "wanted true or false")
        value = [name for name, on in value.items() if on is True]
    if not isinstance(value, list):
        reading.wrong("options", value, f"wanted a list of some of {', '.join(OPTIONS)}")
        return PolicyOptions()
    on = {}
    for name in value:
        if name in OPTIONS:
            on[name.replace("-", "_")] = True
        else:
            near = difflib.get_close_matches(str(name), OPTIONS, 1)
            reading.wrong("options", name, f"unknown option; {f'nearest: {near[0]}' if near else ', '.join(OPTIONS)}")
    return PolicyOptions(**on)


def options_of(names: Iterable[str], source: str, topology: CPUTopology) -> PolicyOptions:
    """The options of these names; raises ConfigError for unknown ones and for those that exclude each other."""
    reading = _Reading(source)
    options = parse_options(reading, list(names))
    reading.problems += [f"{source}: {text}" for text in validate_options(options.allocation(), topology)]
    reading.stop()
    return options


def _on_off(reading: _Reading, top: Mapping[str, Any]) -> bool:
    value = top.get("cfs-quota", "on")
    if value not in ("on", "off"):
        reading.wrong("cfs-quota", value, 'wanted "on" or "off"')
    return bool(value != "off")


def _reserved(
    reading: _Reading, top: Mapping[str, Any], machine: Machine, allowed: CPUSet, options: PolicyOptions
) -> CPUSet:
    listed, amount = reading.cpus(top, "reserved"), top.get("reserved-amount")
    wanted = None
    if top.get("reserved") is not None and amount is not None:
        reading.wrong("reserved-amount", amount, "only one of reserved and reserved-amount may be set")
    if listed is not None:
        wanted = Reservation(f"{reading.source}: reserved", cpus=listed)
    elif amount is not None:
        milli = _milli(reading, "reserved-amount", amount)
        wanted = Reservation(f"{reading.source}: reserved-amount", millicores=milli or 1)
    problems = validate_options(options.allocation(), machine.topology)
    reading.problems += [f"{reading.source}: options: {text}" for text in problems]
    try:
        return resolve_reserved(wanted, machine.topology, allowed, options.allocation())
    except EnforcerError as error:
        reading.problems.append(error.message if wanted else f"{reading.source}: {error.message}")
        return EMPTY


# --- pods


def _pods(reading: _Reading, top: Mapping[str, Any], machine: Machine | None) -> list[NewPod]:
    value = top.get("pods", [])
    if not isinstance(value, list):
        reading.wrong("pods", value, "wanted a list of objects")
        return []
    if len(value) > _MOST_PODS:
        reading.problems.append(f"{reading.source}: pods: {len(value)} of them; at most {_MOST_PODS} are taken")
        return []
    pods = [_pod(reading, one, f"pods[{number}]", machine) for number, one in enumerate(value)]
    for number, first in _twice([pod.name for pod in pods]):
        reading.wrong(f"pods[{number}].name", pods[number].name, f"pods[{first}] has that name already")
    return pods


def _twice(names: Iterable[str]) -> Iterator[tuple[int, int]]:
    """The places of names that were there before, and where each was first."""
    first: dict[str, int] = {}
    for number, name in enumerate(names):
        if name in first:
            yield number, first[name]
        first.setdefault(name, number)


def _pod(reading: _Reading, value: object, place: str, machine: Machine | None) -> NewPod:
    values = reading.known(value, place, _POD)
    qos = _qos(reading, values, place)
    listed = values.get("containers", [])
    if not isinstance(listed, list):
        reading.wrong(f"{place}.containers", listed, "wanted a list of objects")
        listed = []
    if len(listed) > _MOST_CONTAINERS:
        wanted = f"at most {_MOST_CONTAINERS} are taken"
        reading.problems.append(f"{reading.source}: {place}.containers: {len(listed)} of them; {wanted}")
        listed = []
    rows = [_container(reading, one, f"{place}.containers[{n}]", qos, machine) for n, one in enumerate(listed)]
    name = _name(reading, values, f"{place}.")
    sandbox = reading.flag(values, "sandbox", f"{place}.", True)
    names = [SANDBOX] * sandbox + [one.name for one in rows]
    for number, _ in _twice(names):
        key = f"{place}.containers[{number - sandbox}].name"
        reading.wrong(key, names[number], "the pod has a container of that name already")
    return NewPod(name, qos, tuple(rows), sandbox)


def _qos(reading: _Reading, values: Mapping[str, Any], place: str) -> QoSClass:
    value = values.get("qos", "guaranteed")
    try:
        return QoSClass(str(value).lower())
    except ValueError:
        reading.wrong(f"{place}.qos", value, f"wanted {', '.join(QoSClass)}")
        return QoSClass.GUARANTEED


def _name(reading: _Reading, values: Mapping[str, Any], place: str) -> str:
    name = values.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        reading.wrong(f"{place}name", name, "wanted a name of letters, digits, dots, dashes and underscores")
        return place
    return name


def _container(
    reading: _Reading, value: object, place: str, qos: QoSClass, machine: Machine | None
) -> NewContainer:
    values = reading.known(value, place, _CONTAINER)
    amount = values.get("cpus")
    milli = None if amount is None else _milli(reading, f"{place}.cpus", amount)
    if qos is QoSClass.GUARANTEED and amount is None:
        reading.wrong(f"{place}.cpus", amount, "a guaranteed pod's containers all have a CPU limit")
    if qos is QoSClass.BESTEFFORT and amount is not None:
        reading.wrong(f"{place}.cpus", amount, "a besteffort pod's containers have no CPU request or limit")
    pinned = reading.cpus(values, "pinned", f"{place}.") or EMPTY
    if machine is not None and not pinned <= machine.online:
        reading.wrong(f"{place}.pinned", values["pinned"], f"CPUs {pinned - machine.online} are not online here")
    opted_out = reading.flag(values, "opted-out", f"{place}.", False)
    return NewContainer(_name(reading, values, f"{place}."), cpu_of(qos, milli), pinned, opted_out)


def cpu_of(qos: QoSClass, milli: int | None) -> ContainerCPU:
    """A container's request and limit: both for a Guaranteed pod, the request alone for a Burstable one."""
    return ContainerCPU(milli, milli if qos is QoSClass.GUARANTEED else None) if milli else ContainerCPU()


def _milli(reading: _Reading, key: str, amount: object) -> int | None:
    try:
        milli = 0 if isinstance(amount, bool) else parse_millicores(str(amount))
    except ValueError:
        milli = 0
    if not 0 < milli <= 1000 * (MAX_CPU + 1):
        reading.wrong(key, amount, 'wanted an amount of CPUs above 0 such as 2, 1.5 or "500m"')
        return None
    return milli


def _view(version: int, machine: Machine, allowed: CPUSet, pods: Iterable[NewPod]) -> NodeView:
    root = Group(_ROOT, allowed, allowed)
    view = NodeView(version, machine.topology, machine.online)
    view = view.with_slice(SliceView(root, QoSClass.GUARANTEED, True))
    for qos in (QoSClass.BURSTABLE, QoSClass.BESTEFFORT):
        path = f"{_ROOT}/{qos.value}"
        view = view.with_slice(SliceView(replace(root, path=path, cpus=allowed if version == 1 else EMPTY), qos))
    for pod in pods:
        view, _ = add_pod(view, pod, _NEVER)
    return view


def _shown(value: object) -> str:
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = str(type(value))
    return shown(text, 60)
