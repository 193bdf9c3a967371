"""Why an allocation looks as it does: the units it consists of, for `explain`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from enforcer.core.cpuset import CPUSet
from enforcer.core.topology import CPUTopology


@dataclass(frozen=True, slots=True)
class Step:
    """One part of an allocation: `what` ("whole NUMA node 1") and `why` ("wholly free, fits in the 16 CPUs needed")."""

    cpus: CPUSet
    what: str
    why: str

    def __str__(self) -> str:
        return f"{self.cpus}: {self.what}, {self.why}"


def steps(topology: CPUTopology, taken: CPUSet, *, free: CPUSet, keep: CPUSet, near: CPUSet) -> tuple[Step, ...]:
    """The parts of `taken`, chosen from `free`: kept, had before, whole units from large to small, single CPUs.

    The CPUs of the steps are disjoint and together are `taken`.
    """
    found = [Step(taken & keep, "kept", "it has them now"), Step((taken & near) - keep, "had before", "still free")]
    rest = taken - keep - near
    for name, units in _levels(topology):
        for unit, mask in units.items():
            whole = CPUSet.from_mask(mask)
            if whole <= rest and (name == "core" or len(whole) > _core_size(topology, whole)):
                why = f"wholly free, fits in the {len(rest)} CPUs still needed"
                found.append(Step(whole, f"whole {name} {unit}", why))
                rest = rest - whole
    found.extend(_singles(topology, rest, free))
    return tuple(step for step in found if step.cpus)


def _levels(topology: CPUTopology) -> Iterator[tuple[str, Mapping[int, int]]]:
    nodes, sockets = ("NUMA node", topology.numa_nodes), ("socket", topology.sockets)
    yield from (nodes, sockets) if topology.hierarchy.numa_first else (sockets, nodes)
    yield "L3 cache", topology.uncores
    yield "core", topology.cores


def _core_size(topology: CPUTopology, cpus: CPUSet) -> int:
    return len(topology.siblings(cpus.first))


def _singles(topology: CPUTopology, cpus: CPUSet, free: CPUSet) -> Iterator[Step]:
    """A step for each core that gives only some of its CPUs."""
    while cpus:
        siblings = topology.siblings(cpus.first)
        here = cpus & siblings
        what = "single CPU" if len(here) == 1 else "some CPUs"
        why = f"{len(siblings & free)} of its {len(siblings)} CPUs were free"
        yield Step(here, f"{what} of core {topology.core_of[here.first]}", why)
        cpus = cpus - siblings

