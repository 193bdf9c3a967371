"""CPUTopology: which CPU sits on which core, socket, NUMA node and L3 (uncore) cache."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from enforcer.core.cpuset import MAX_CPU, CPUSet
from enforcer.core.errors import TopologyError

Row = Sequence[int | None]


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """A topology as nested lists of CPU masks, for walks that must be fast. Units stand in the order of their ids.

    `numa_first` says which of NUMA nodes and sockets is the outer level: NUMA nodes where there are at least as many
    sockets (kubelet cpumanager/cpu_assignment.go, newCPUAccumulator). A unit belongs to every unit it shares a CPU
    with. `core_size` is the number of CPUs of each core, 0 when the cores differ (hybrid machines, offline CPUs).
    """

    numa_first: bool
    cpus: int
    outer: tuple[int, ...]
    inner: tuple[int, ...]
    uncores: tuple[int, ...]
    cores: tuple[int, ...]
    inner_of_outer: tuple[tuple[int, ...], ...]
    cores_of_inner: tuple[tuple[int, ...], ...]
    uncores_of_numa: tuple[tuple[int, ...], ...]
    cores_of_uncore: tuple[tuple[int, ...], ...]
    core_size: int

    @property
    def numa(self) -> tuple[int, ...]:
        """The masks of the NUMA nodes."""
        return self.outer if self.numa_first else self.inner

    @property
    def sockets(self) -> tuple[int, ...]:
        """The masks of the sockets."""
        return self.inner if self.numa_first else self.outer


@dataclass(frozen=True, eq=False)
class CPUTopology:
    """A machine's online CPUs by unit.

    Each map goes from a unit's id to the bit mask of its CPUs, ids ascending. Unit sizes always come from these masks,
    never from a division of totals: hybrid machines and offline CPUs make units of unequal size
    (kubernetes#124066, #140495 are what a division does). `core` ids are unique over the machine.
    """

    cores: Mapping[int, int]
    sockets: Mapping[int, int]
    numa_nodes: Mapping[int, int]
    uncores: Mapping[int, int]
    cpus: CPUSet = field(default=CPUSet())

    @classmethod
    def from_rows(cls, rows: Iterable[Row]) -> CPUTopology:
        """From rows (cpu, core, socket, numa, uncore); numa or uncore None = not known.

        A machine without NUMA information is one node 0; an unknown uncore cache falls back to the socket, as in the
        kubelet (cpumanager/topology getUncoreCacheID). Raises TopologyError for no rows, a CPU twice, ids that are
        not numbers, or a CPU above MAX_CPU.
        """
        units: tuple[dict[int, int], ...] = ({}, {}, {}, {})
        seen = 0
        for row in rows:
            cpu, core, socket, numa, uncore = _checked(row)
            bit = 1 << cpu
            if seen & bit:
                raise TopologyError(f"topology: CPU {cpu} is listed twice")
            seen |= bit
            for masks, unit in zip(units, (core, socket, numa, uncore), strict=True):
                masks[unit] = masks.get(unit, 0) | bit
        if not seen:
            raise TopologyError("topology: no CPU is listed")
        cores, sockets, nodes, uncores = (dict(sorted(masks.items())) for masks in units)
        return cls(cores, sockets, nodes, uncores, CPUSet.from_mask(seen))

    @cached_property
    def core_of(self) -> Mapping[int, int]:
        """cpu -> core id."""
        return _owners(self.cores)

    @cached_property
    def socket_of(self) -> Mapping[int, int]:
        """cpu -> socket id."""
        return _owners(self.sockets)

    @cached_property
    def numa_of(self) -> Mapping[int, int]:
        """cpu -> NUMA node id."""
        return _owners(self.numa_nodes)

    @cached_property
    def uncore_of(self) -> Mapping[int, int]:
        """cpu -> L3 (uncore) cache id."""
        return _owners(self.uncores)

    @cached_property
    def hierarchy(self) -> Hierarchy:
        """The nested lists of masks."""
        numa, sockets = tuple(self.numa_nodes.values()), tuple(self.sockets.values())
        uncores, cores = tuple(self.uncores.values()), tuple(self.cores.values())
        numa_first = len(sockets) >= len(numa)
        outer, inner = (numa, sockets) if numa_first else (sockets, numa)
        sizes = {mask.bit_count() for mask in cores}
        return Hierarchy(
            numa_first=numa_first,
            cpus=self.cpus.mask,
            outer=outer,
            inner=inner,
            uncores=uncores,
            cores=cores,
            inner_of_outer=_indexes(outer, inner),
            cores_of_inner=_masks(inner, cores),
            uncores_of_numa=_indexes(numa, uncores),
            cores_of_uncore=_masks(uncores, cores),
            core_size=sizes.pop() if len(sizes) == 1 else 0,
        )

    def siblings(self, cpu: int) -> CPUSet:
        """All CPUs on the core of `cpu`, itself included; raises KeyError for a CPU that is not in the topology."""
        return CPUSet.from_mask(self.cores[self.core_of[cpu]])

    def rows(self) -> list[tuple[int, int, int, int, int]]:
        """The rows (cpu, core, socket, numa, uncore) again, by CPU id."""
        return [(c, self.core_of[c], self.socket_of[c], self.numa_of[c], self.uncore_of[c]) for c in self.cpus]


def _owners(units: Mapping[int, int]) -> dict[int, int]:
    return {cpu: unit for unit, mask in units.items() for cpu in CPUSet.from_mask(mask)}


def _indexes(parents: Sequence[int], children: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(i for i, child in enumerate(children) if child & parent) for parent in parents)


def _masks(parents: Sequence[int], children: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(child for child in children if child & parent) for parent in parents)


def _checked(row: Row) -> tuple[int, int, int, int, int]:
    try:
        cpu, core, socket, numa, uncore = row
    except ValueError as error:
        raise TopologyError(f"topology: a row needs cpu, core, socket, numa, uncore; found {row!r}") from error
    if not (isinstance(cpu, int) and isinstance(core, int) and isinstance(socket, int)):
        raise TopologyError(f"topology: cpu, core and socket must be numbers; found {row!r}")
    if not isinstance(numa, int | None) or not isinstance(uncore, int | None):
        raise TopologyError(f"topology: numa and uncore must be numbers or None; found {row!r}")
    if not 0 <= cpu <= MAX_CPU:
        raise TopologyError(f"topology: CPU {cpu} is not within 0-{MAX_CPU}; found {row!r}")
    return cpu, core, socket, 0 if numa is None else numa, socket if uncore is None else uncore
