"""Un-pinning: what leaving enforce (reset, mode change, a static kubelet that appears) has to write."""

from __future__ import annotations

from enforcer.core.cpuset import EMPTY, CPUSet
from enforcer.core.node import NodeView, depth_of
from enforcer.core.plan import Plan, Write
from enforcer.core.state import State
from enforcer.core.targets import Kind


def plan_unpin(view: NodeView, state: State) -> Plan:
    """Gives back every set of ours: slices and pods first, then containers, so that nobody is left without room.

    A cgroup that had a set before us gets that one, as far as its CPUs are still allowed; any other loses its own (v2)
    or gets its parent's (v1). What somebody else has written over ours since is left alone.
    """
    here = _sets(view)
    writes = []
    for path in sorted(state.written.keys() & here.keys(), key=lambda p: (depth_of(p), p)):
        if here[path] != state.written[path]:
            continue
        before = state.before.get(path, EMPTY) & view.allowed
        writes.append(Write(path, before or None, here[path], Kind.ORDINARY, "given back"))
    return Plan(State(), tuple(writes))


def _sets(view: NodeView) -> dict[str, CPUSet]:
    sets = {one.group.path: one.group.cpus for one in view.slices.values()}
    for pod in view.pods():
        sets[pod.group.path] = pod.group.cpus
        for container in pod.containers.values():
            sets[container.group.path] = container.group.cpus
            sets.update({nested.path: nested.cpus for nested in container.nested})
    return {path: cpus for path, cpus in sets.items() if cpus}
