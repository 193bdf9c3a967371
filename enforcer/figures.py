"""Figures: the counts of a node for metrics, from the view and the state; bounded in number, whatever a node holds."""

from __future__ import annotations

from typing import Any

from enforcer.core.cpuset import union
from enforcer.core.node import NodeView
from enforcer.core.policy import Policy
from enforcer.core.state import State, taken


def figures(view: NodeView, state: State, policy: Policy) -> dict[str, Any]:
    """Counts by state as JSON values: `cpus`, `containers`, `pods` (by QoS class) and `conflicts`."""
    return {
        "cpus": _cpus(view, state, policy),
        "containers": _containers(view, state),
        "pods": _pods(view),
        "conflicts": sum(1 for one in state.drift.values() if one.conflict),
    }


def _cpus(view: NodeView, state: State, policy: Policy) -> dict[str, int]:
    """Not exclusive of each other: reserved CPUs are shared, too, unless the reservation is strict."""
    allowed = view.allowed
    owned = union(one.cpus for one in state.assignments.values())
    foreign = union(state.foreign.values())
    given = taken(state.assignments.values(), state.held.values()) | foreign
    return {
        "online": len(view.online),
        "allowed": len(allowed),
        "reserved": len(policy.reserved & allowed),
        "exclusive": len(owned),
        "held": len(taken((), state.held.values())),
        "foreign": len(foreign),
        "shared": len(state.shared),
        "free": len(allowed - policy.reserved - given),
    }


def _containers(view: NodeView, state: State) -> dict[str, int]:
    total = sum(len(pod.containers) for pod in view.pods())
    special = {"exclusive": len(state.assignments), "foreign": len(state.foreign)}
    waiting = len(state.unsatisfied.keys() - state.assignments.keys())
    return {**special, "unsatisfied": len(state.unsatisfied), "shared": max(0, total - sum(special.values()) - waiting)}


def _pods(view: NodeView) -> dict[str, int]:
    counts: dict[str, int] = {}
    for one in view.slices.values():
        counts[str(one.qos)] = counts.get(str(one.qos), 0) + len(one.pods)
    return counts
