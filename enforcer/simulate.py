"""simulate: what enforce would do on a node, with pods that are not there yet or other options; nothing is written.

The plan is the very plan() of enforce; only the writes are done on a copy of the node's view.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from enforcer import source
from enforcer.config import Config, parse_millicores
from enforcer.core.cpuset import EMPTY, CPUSet
from enforcer.core.errors import ConfigError, CPUSetSyntaxError
from enforcer.core.explain import Explainer, Placement
from enforcer.core.kubepods import QoSClass, shown
from enforcer.core.node import NodeView, PodView
from enforcer.core.plan import Write
from enforcer.core.policy import Policy
from enforcer.core.reserved import Reservation, resolve_reserved
from enforcer.core.state import State
from enforcer.core.topology import CPUTopology
from enforcer.core.whatif import NewContainer, NewPod, Pass, add_pod, settled
from enforcer.describe import cpu_of, options_of
from enforcer.explain import reason
from enforcer.labels import Labels, find_pod, holding
from enforcer.layout import colour, jsonable, print_json, table, width, wrapped
from enforcer.output import say
from enforcer.record import Recorded
from enforcer.status import cpu_map
from enforcer.status.model import named

_MOST_WRITES: Final = 40
_MOST_WAITING: Final = 8
_POD: Final = re.compile(r"(?P<name>[^=:]+)(?:=(?P<cpus>[^:]*))?(?::(?P<qos>.+))?", re.DOTALL)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `simulate`."""
    source.add_arguments(parser)
    parser.add_argument(
        "--add", action=_Change, metavar="POD=CPUS[:QOS]",
        help="a pod comes: new=6, new=2+500m (two containers), new=500m:burstable, new:besteffort; can be repeated",
    )  # fmt: skip
    parser.add_argument("--remove", action=_Change, metavar="POD", help="a pod goes; in the order given with --add")
    parser.add_argument("--options", metavar="NAMES", help="the kubelet's policy options to try, with commas")
    parser.add_argument("--reserved", metavar="CPUS", help="the reserved CPUs to try, such as 0-1")
    parser.add_argument("--afresh", action="store_true", help="place all pods anew, as after a drain of the node")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def main(arguments: argparse.Namespace, config: Config) -> int:
    """Prints what would be done: 0, or 1 when somebody's CPUs cannot be had.

    Raises ConfigError for a node or change that cannot be, CannotWorkHereError where there is nothing to read.
    """
    node = with_options(source.read(arguments, config), arguments.options, arguments.reserved)
    done = simulate(node, getattr(arguments, "changes", None) or (), afresh=arguments.afresh)
    if arguments.json:
        print_json(to_json(done))
    else:
        say("\n".join(to_text(done, width(), coloured=colour())))
    return 1 if done.after.unsatisfied else 0


class _Change(argparse.Action):
    """--add and --remove in one list, in their order: one frees what the other needs."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        namespace.changes = [*(getattr(namespace, "changes", None) or ()), ((option or "")[2:], values)]


@dataclass(frozen=True, slots=True)
class Stage:
    """One thing that happens to the node, the view before it, and the pass of the agent that follows it."""

    what: str
    view: NodeView
    done: Pass


@dataclass(frozen=True, slots=True)
class Simulation:
    """The node it began with, what enforce goes on from there, and each stage; there is at least one."""

    node: Recorded
    start: State
    stages: tuple[Stage, ...]
    notes: tuple[str, ...] = ()

    @property
    def view(self) -> NodeView:
        """The node at the end."""
        return self.stages[-1].done.view

    @property
    def after(self) -> State:
        """The state at the end."""
        return self.stages[-1].done.state


def simulate(node: Recorded, changes: Sequence[tuple[str, str]] = (), *, afresh: bool = False) -> Simulation:
    """What enforce does on the node as it is, then after each change: ("add", "POD=6") or ("remove", "POD").

    Raises ConfigError for a change that cannot be, CannotWorkHereError for a pod on a node without a kubepods root.
    """
    if afresh:
        node = _drained(node)
    start = source.start_state(node)
    first = settled(node.view, start, node.policy, node.now)
    stages = [Stage("all pods placed anew" if afresh else "the node as it is", node.view, first)]
    for kind, value in changes:
        last = stages[-1].done
        view, path, what = _changed(last.view, kind, value, node.now)
        # as the agent does on the event: a plan for this pod and for all that must move for it
        stages.append(Stage(what, last.view, settled(view, last.state, node.policy, node.now, [path])))
    return Simulation(node, start, tuple(stages), tuple(_notes(node, start)))


def with_options(node: Recorded, options: str | None, reserved: str | None) -> Recorded:
    """The node under other policy options (names with commas) and other reserved CPUs (a list); None = as they are."""
    policy = node.policy
    if options is not None:
        chosen = options_of([o for o in re.split(r"[,\s]+", options) if o], "--options", node.view.topology)
        policy = replace(policy, options=chosen.allocation(), strict=chosen.strict_cpu_reservation)
    if reserved is not None:
        policy = replace(policy, reserved=_reserved(reserved, node, policy))
    info = replace(node.info, reserved=policy.reserved, strict=policy.strict)
    return replace(node, policy=policy, info=info)


def _reserved(text: str, node: Recorded, policy: Policy) -> CPUSet:
    try:
        wanted = Reservation("--reserved", cpus=CPUSet.parse(text))
    except CPUSetSyntaxError as error:
        raise ConfigError(f"--reserved: {error.message}", hint="a CPU list such as 0-1 or 0,8") from error
    allowed = node.view.allowed or node.machine.online
    return resolve_reserved(wanted, node.view.topology, allowed, policy.options)


def _drained(node: Recorded) -> Recorded:
    """The same pods with no CPUs given out yet, on a node without a memory."""
    view = node.view
    bare = view.allowed if view.version == 1 else EMPTY
    for one in node.view.slices.values():
        group = one.group if one.is_root else replace(one.group, cpus=bare, effective=view.allowed)
        pods = {path: _bare(pod, view, bare) for path, pod in one.pods.items()}
        view = view.with_slice(replace(one, group=group, pods=pods))
    return replace(node, view=view, state=State(), info=replace(node.info, running=False, conflicts={}))


def _bare(pod: PodView, view: NodeView, bare: CPUSet) -> PodView:
    containers = {}
    for path, one in pod.containers.items():
        nested = tuple(replace(group, cpus=bare, effective=view.allowed) for group in one.nested)
        group = replace(one.group, cpus=bare, effective=view.allowed)
        containers[path] = replace(one, group=group, given=EMPTY, nested=nested)
    return replace(pod, group=replace(pod.group, cpus=bare, effective=view.allowed), containers=containers)


def _changed(view: NodeView, kind: str, value: str, now: float) -> tuple[NodeView, str, str]:
    """The view after the change, the pod's path, and the change in words."""
    if kind == "remove":
        path = find_pod(view, value)
        return view.without_pod(path), path, f"{Labels(view).of(path)} goes"
    pod = parse_pod(value)
    view, path = add_pod(view, pod, now)
    cpus = value.partition("=")[2].partition(":")[0] or "no CPU limit"
    return view, path, f"pod {pod.name} comes ({pod.qos}: {cpus})"


def parse_pod(text: str) -> NewPod:
    """From "NAME=6", "NAME=2+500m" (two containers), "NAME=500m:burstable", "NAME:besteffort"; raises ConfigError."""
    match = _POD.fullmatch(text)
    parts = (match["cpus"] or "").split("+") if match and match["cpus"] else []
    try:
        qos = QoSClass(((match and match["qos"]) or "guaranteed").lower())
    except ValueError:
        raise ConfigError(f"--add {shown(text, 80)}: the class is one of {', '.join(QoSClass)}") from None
    if match is None or not match["name"] or (qos is QoSClass.GUARANTEED) > bool(parts):
        raise ConfigError(f"--add {shown(text, 80)}: wanted NAME=CPUS, such as new=6 or new=2+500m:burstable")
    if qos is QoSClass.BESTEFFORT and parts:
        raise ConfigError(f"--add {shown(text, 80)}: a besteffort pod has no CPU request or limit")
    amounts: list[int | None] = [_milli(part, text) for part in parts]
    rows = (NewContainer(f"c{number}", cpu_of(qos, milli)) for number, milli in enumerate(amounts or [None], 1))
    return NewPod(match["name"], qos, tuple(rows))


def _milli(part: str, text: str) -> int:
    try:
        milli = parse_millicores(part)
    except ValueError as error:
        raise ConfigError(f"--add {shown(text, 80)}: {shown(str(error), 80)}") from error
    if not 0 < milli <= 10_000_000:
        raise ConfigError(f"--add {shown(text, 80)}: '{shown(part, 40)}' is not an amount of CPUs of a node")
    return milli


def _notes(node: Recorded, start: State) -> Iterator[str]:
    yield from node.notes
    if node.kubelet_policy == "static":
        yield "the kubelet gives out CPUs itself here (policy static): enforce refuses to start on this node"
    if not node.view.slices:
        yield "there is no kubepods cgroup on this node, so there is nothing to pin"
    off = [p for p, a in start.assignments.items() if not a.cpus.isdisjoint(node.policy.reserved)]
    if off:
        yield f"{len(off)} owners have CPUs that are reserved here; running owners are not moved (--afresh shows it)"


# --- what is printed


def placements(simulation: Simulation) -> Mapping[str, Placement]:
    """Why each owner that this simulation placed has the CPUs it has, by path."""
    end = Explainer(simulation.view, simulation.after, simulation.node.policy, simulation.node.now)
    found = {}
    for path, mine in simulation.after.assignments.items():
        before = simulation.start.assignments.get(path)
        if before is None or before.cpus != mine.cpus:
            found[path] = end.placement(mine)
    return found


def to_json(done: Simulation) -> dict[str, Any]:
    """Stages with their writes in order, the end with its owners, and the CPUs before and after."""
    state, explainer = done.after, Explainer(done.view, done.after, done.node.policy, done.node.now)
    return {
        "reserved": str(done.node.policy.reserved),
        "options": jsonable(done.node.policy.options),
        "strict_cpu_reservation": done.node.policy.strict,
        "notes": list(done.notes),
        "stages": [
            {
                "what": one.what,
                "enabled": list(one.done.enabled),
                "decided": jsonable(one.done.plan.notes),
                "writes": jsonable(one.done.plan.writes),
            }
            for one in done.stages
        ],
        "owners": {p: {"cpus": str(a.cpus), "asked": a.count, "why": a.why} for p, a in state.assignments.items()},
        "reasons": {path: jsonable(place.steps) for path, place in placements(done).items()},
        "unsatisfied": jsonable(state.unsatisfied),
        "held": jsonable(state.held),
        "foreign": jsonable(state.foreign),
        "holders": jsonable(explainer.holders()),
        "shared": str(state.shared),
        "shared_before": str(done.start.shared or done.node.view.allowed),
        "cpus": [_cpu_json(done, cpu) for cpu in done.view.online],
    }


def _cpu_json(done: Simulation, cpu: int) -> dict[str, Any]:
    topology = done.view.topology
    return {
        "cpu": cpu, "core": topology.core_of[cpu], "numa": topology.numa_of[cpu], "l3": topology.uncore_of[cpu],
        "before": _owner(done.start, cpu), "after": _owner(done.after, cpu),
    }  # fmt: skip


def _owner(state: State, cpu: int) -> str | None:
    return next((path for path, a in state.assignments.items() if cpu in a.cpus), None)


def to_text(done: Simulation, columns: int, *, coloured: bool) -> list[str]:
    """For a person: the stages, what cannot be satisfied, why these CPUs, the map before and after."""
    lines = ["a simulation: nothing is written"]
    for note in done.notes[:_MOST_WRITES]:
        lines += wrapped(shown(note), columns, "note: ")
    for number, stage in enumerate(done.stages, 1):
        lines += ["", f"{number}. {stage.what}", *_stage(stage, columns)]
    lines += [*_unsatisfied(done, columns), *_why(done, columns)]
    info = replace(done.node.info, mode="enforce")
    for title, view, state in (("before", done.node.view, done.start), ("after", done.view, done.after)):
        lines += ["", f"CPUs {title}:", cpu_map(view, state, info, width=columns, colour=coloured)]
    return [*lines, *_caches(done.view.topology, columns)]


def _stage(stage: Stage, columns: int) -> Iterator[str]:
    names, gone = Labels(stage.done.view), Labels(stage.view)
    told = [f"{n.kind} {_named(n.path, names, gone)}: {n.text}" for n in stage.done.plan.notes]
    for text in _cut(told):
        yield from wrapped(text, columns, "   ")
    for path in stage.done.enabled:
        yield from wrapped(f"the cpuset controller is switched on in {shown(path)}", columns, "   ")
    writes = stage.done.plan.writes
    yield f"   {len(writes)} writes, in this order:" if writes else "   nothing has to be written"
    yield from table([_write(number, one, names) for number, one in enumerate(writes[:_MOST_WRITES], 1)], "   ")
    if len(writes) > _MOST_WRITES:
        yield f"   and {len(writes) - _MOST_WRITES} more (--json has them all)"


def _named(path: str, names: Labels, gone: Labels) -> str:
    """By the view before it where it is in the one after no more."""
    told = names.of(path)
    return gone.of(path) if told == shown(path) else told


def _write(number: int, one: Write, names: Labels) -> tuple[str, ...]:
    return (f"{number:>3}", names.of(one.path), f"{one.found or 'inherits'} -> {one.cpus or 'inherits'}", one.why)


def _unsatisfied(done: Simulation, columns: int) -> Iterator[str]:
    names = Labels(done.view)
    explainer = Explainer(done.view, done.after, done.node.policy, done.node.now)
    # without a kubepods root a plan forgets nothing
    here = [path for path in done.after.unsatisfied if done.view.find_container(path) is not None]
    for path in here[:_MOST_WAITING]:
        yield ""
        yield from wrapped(f"{names.of(path)} cannot have what it asks for", columns, "! ")
        for one in explainer.container(path).because[:_MOST_WAITING]:
            yield from wrapped(reason(one, names), columns, "  - ")
    if len(here) > _MOST_WAITING:
        yield f"! and {len(here) - _MOST_WAITING} more (--json has them all)"
    if here:
        taken = [holding(holder, names) for holder in explainer.holders()]
        yield from ("", "Taken:")
        for text in [*_cut(taken), f"{named(done.node.policy.reserved)} reserved: never given out"]:
            yield from wrapped(text, columns, "  - ")


def _why(done: Simulation, columns: int) -> Iterator[str]:
    names, topology = Labels(done.view), done.view.topology
    owners = done.after.assignments
    # by the lowest CPU
    placed = sorted(placements(done).items(), key=lambda pair: owners[pair[0]].cpus.mask & -owners[pair[0]].cpus.mask)
    for path, place in placed[:_MOST_WRITES]:
        mine = owners[path]
        yield ""
        yield from wrapped(f"{names.of(path)} has {named(mine.cpus)} ({units(topology, mine.cpus)}):", columns)
        for step in place.steps:
            yield from wrapped(str(step), columns, "  - ")
    if len(placed) > _MOST_WRITES:
        yield f"and {len(placed) - _MOST_WRITES} more (--json has them all)"


def _cut(texts: list[str]) -> list[str]:
    more = len(texts) - _MOST_WRITES
    return [*texts[:_MOST_WRITES], f"and {more} more (--json has them all)"] if more > 0 else texts


def units(topology: CPUTopology, cpus: CPUSet) -> str:
    """Where CPUs lie: "NUMA node 0, L3 cache 1, 2 cores"; CPUs that are offline lie nowhere."""
    here = cpus & topology.cpus
    nodes, caches, cores = (
        sorted({of[cpu] for cpu in here}) for of in (topology.numa_of, topology.uncore_of, topology.core_of)
    )
    return (
        f"NUMA node {', '.join(map(str, nodes))}; L3 cache {', '.join(map(str, caches))}; "
        f"{len(cores)} core{'' if len(cores) == 1 else 's'}"
    )


def _caches(topology: CPUTopology, columns: int) -> Iterator[str]:
    """The map shows NUMA nodes and cores; caches are told where they are something else than nodes or sockets."""
    caches = set(topology.uncores.values())
    if caches not in (set(topology.numa_nodes.values()), set(topology.sockets.values())):
        told = "   ".join(f"{number}: {CPUSet.from_mask(mask)}" for number, mask in topology.uncores.items())
        yield from wrapped(told, columns, "L3 caches  ")
