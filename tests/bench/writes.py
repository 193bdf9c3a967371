"""How many sets are written when one container takes cores of its own, and when it gives them back."""

from __future__ import annotations

from typing import Any

from enforcer.core.kubepods import QoSClass
from tests.bench.figures import Size, growth
from tests.bench.made import ALL_GUARANTEED, MIX, MadeNode
from tests.bench.rig import Rig, rig

CPUS = 64
MIXES = {"mixed": MIX, "all_guaranteed": ALL_GUARANTEED}


def report(size: Size) -> dict[str, Any]:
    """By version, mix and number of pods: writes for an owner of 1 CPU and of 4, and for its going."""
    return {f"v{version}": {name: _mix(size, version, mix) for name, mix in MIXES.items()} for version in (1, 2)}


def _mix(size: Size, version: int, mix: tuple[QoSClass, ...]) -> dict[str, Any]:
    found = {scale: _scale(version, scale, mix) for scale in size.scales}
    return {
        "by_pods": {str(scale): one for scale, one in found.items()},
        "growth_exponent": growth({scale: one["take_1"] for scale, one in found.items()}),
    }


def _scale(version: int, pods: int, mix: tuple[QoSClass, ...]) -> dict[str, int]:
    with MadeNode(version, CPUS) as node:
        node.fill(pods, mix)
        counts = {}
        for cpus in (1, 4):
            counts[f"take_{cpus}"], counts[f"give_back_{cpus}"] = owner_writes(node, cpus)
    return {**counts, "take_4_per_core": round(counts["take_4"] / 4)}


def owner_writes(node: MadeNode, cpus: int) -> tuple[int, int]:
    """How many sets are written for a container that asks for `cpus`, and for its going.

    Raises AssertionError when it did not get them.
    """
    with rig(node) as made:
        made.start()
        made.settle()
        return _owner(node, made, cpus)


def _owner(node: MadeNode, made: Rig, cpus: int) -> tuple[int, int]:
    before = node.fs.writes
    pod = node.pod(QoSClass.GUARANTEED, cpus * 1000)
    container = node.container(pod, cpus * 1000)
    made.settle()
    node.write_quota(container, cpus * 1000)
    made.settle()
    taken = node.fs.writes - before
    own = made.reconciler.state.assignments.get(container)
    if own is None or len(own.cpus) != cpus:
        raise AssertionError(f"a container that asks for {cpus} CPUs has {own}: what was counted means nothing")
    node.remove(container)
    made.settle()
    node.remove(pod)
    made.settle()
    return taken, node.fs.writes - before - taken
