"""Which CPUs a container gets: the kubelet's static allocation, plus keeping, preferring and whole cores.

Without `keep` and `near` the answers are those of the kubelet's static CPU Manager with the options of the same names
(kubernetes v1.36 pkg/kubelet/cm/cpumanager), except where it hands out CPUs that are not free or halves of cores.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from math import gcd
from operator import or_

from enforcer.core.allocation_steps import Step, steps
from enforcer.core.cpuset import EMPTY, CPUSet
from enforcer.core.distributing import distributed
from enforcer.core.errors import EnforcerError, NotEnoughCPUs
from enforcer.core.packing import core_order, lowest, packed
from enforcer.core.topology import CPUTopology, Hierarchy


@dataclass(frozen=True, slots=True)
class AllocationOptions:
    """The kubelet's policy options that steer the choice of CPUs; `validate_options` says which exclude each other."""

    distribute_numa: bool = False  # distribute-cpus-across-numa
    distribute_cores: bool = False  # distribute-cpus-across-cores
    full_cores: bool = False  # full-pcpus-only
    align_socket: bool = False  # align-by-socket
    align_uncore: bool = False  # prefer-align-cpus-by-uncorecache


@dataclass(frozen=True, slots=True)
class Taken:
    """An allocation and the steps that explain it; the steps' CPUs are disjoint and together are `cpus`."""

    cpus: CPUSet
    steps: tuple[Step, ...]


class SMTAlignmentError(EnforcerError):
    """With `full_cores`: the count is no multiple of the number of CPUs of a core; carries both figures."""

    def __init__(self, requested: int, core_size: int) -> None:
        super().__init__(
            f"{requested} CPUs are no whole number of cores: a core of this machine has {core_size} CPUs",
            hint=f"ask for a multiple of {core_size}, or switch full-pcpus-only off",
        )
        self.requested = requested
        self.core_size = core_size


def take(
    topology: CPUTopology,
    available: CPUSet,
    count: int,
    options: AllocationOptions = AllocationOptions(),  # noqa: B008 (frozen)
    *,
    keep: CPUSet = EMPTY,
    near: CPUSet = EMPTY,
    hint: Collection[int] | None = None,
) -> CPUSet:
    """`count` CPUs of `available` and `keep`.

    `keep` (a running container's CPUs) is in the answer and counts; the rest lies as near to it as possible. With
    count < len(keep) the answer is the part of `keep` that spans the fewest units. `near` (CPUs it had before) is taken
    first where available, then what lies nearest. `hint` is a set of NUMA node ids: their CPUs come first (with
    `align_socket` those of their sockets), then the others (kubelet policy_static.go allocateCPUs).
    With `full_cores` the answer consists of whole cores, also where cores differ in size.

    CPUs that are not in the topology are kept but never taken.

    Raises NotEnoughCPUs (its `available` counts what could be used: with `full_cores` only whole cores) and, with
    `full_cores`, SMTAlignmentError; ValueError for a negative count.
    """
    machine = topology.hierarchy
    if count < 0:
        raise ValueError(f"cannot take {count} CPUs")
    if options.full_cores:
        _check_alignment(machine, count)
    if not keep and not near and hint is None:
        return CPUSet.from_mask(_take_free(machine, available.mask, count, options))
    hinted = -1 if hint is None else _hinted(topology, hint, options)
    request = _Request(machine, options, near.mask, hinted)
    if count < len(keep):
        return CPUSet.from_mask(request.shrunk(keep.mask, count))
    return CPUSet.from_mask(request.grown(keep.mask, available.mask, count))


def take_with_reasons(
    topology: CPUTopology,
    available: CPUSet,
    count: int,
    options: AllocationOptions = AllocationOptions(),  # noqa: B008 (frozen)
    *,
    keep: CPUSet = EMPTY,
    near: CPUSet = EMPTY,
    hint: Collection[int] | None = None,
) -> Taken:
    """The same as `take`, with the steps for a person to read; raises the same errors."""
    cpus = take(topology, available, count, options, keep=keep, near=near, hint=hint)
    return Taken(cpus, steps(topology, cpus, free=available | keep, keep=keep, near=near))


def validate_options(options: AllocationOptions, topology: CPUTopology) -> tuple[str, ...]:
    """What the kubelet refuses about these options on this machine, a sentence each (policy_options.go); () = fine."""
    on = {name for field, name in _NAMES.items() if getattr(options, field)}
    messages = [f"{one} cannot be used together with {other}" for one, other in _EXCLUDED if {one, other} <= on]
    sockets, nodes = len(topology.sockets), len(topology.numa_nodes)
    if options.align_socket and sockets > nodes:
        messages.append(f"align-by-socket cannot be used on a machine with {sockets} sockets and {nodes} NUMA nodes")
    return tuple(messages)


_NAMES = {
    "distribute_numa": "distribute-cpus-across-numa",
    "distribute_cores": "distribute-cpus-across-cores",
    "full_cores": "full-pcpus-only",
    "align_uncore": "prefer-align-cpus-by-uncorecache",
}
_EXCLUDED = (
    ("full-pcpus-only", "distribute-cpus-across-cores"),
    ("distribute-cpus-across-numa", "distribute-cpus-across-cores"),
    ("prefer-align-cpus-by-uncorecache", "distribute-cpus-across-cores"),
    ("prefer-align-cpus-by-uncorecache", "distribute-cpus-across-numa"),
)


def _check_alignment(machine: Hierarchy, count: int) -> None:
    size = machine.core_size or reduce(gcd, map(int.bit_count, machine.cores))
    if count % size:
        raise SMTAlignmentError(count, size)


def _hinted(topology: CPUTopology, hint: Collection[int], options: AllocationOptions) -> int:
    nodes = reduce(or_, (topology.numa_nodes.get(node, 0) for node in hint), 0)
    return _touched(topology.hierarchy.sockets, nodes) if options.align_socket else nodes


def _touched(units: Sequence[int], mask: int) -> int:
    """All CPUs of the units that share a CPU with the mask."""
    return reduce(or_, (unit for unit in units if unit & mask), 0)


def _whole_cores_in(machine: Hierarchy, mask: int) -> int:
    return sum([core for core in machine.cores if core & mask == core])


def _take_free(machine: Hierarchy, available: int, count: int, options: AllocationOptions) -> int:
    free = available & machine.cpus
    if options.full_cores:
        free = _whole_cores_in(machine, free)
    if count > free.bit_count():
        raise NotEnoughCPUs(count, free.bit_count())
    return _choose(machine, free, count, options)


def _choose(machine: Hierarchy, free: int, count: int, options: AllocationOptions) -> int:
    """By the kubelet's rules; with full_cores `free` must consist of whole cores."""
    full = options.full_cores
    spread = options.distribute_cores and not full
    if options.distribute_numa:
        group = machine.core_size if full and machine.core_size else 1
        chosen = distributed(machine, free, count, group, spread=spread, one_socket=options.align_socket)
    else:
        chosen = packed(machine, free, count, spread=spread, uncore=options.align_uncore)
    if full and not machine.core_size and _whole_cores_in(machine, chosen) != chosen:
        return _exact(core_order(machine, free), count)
    return chosen


def _exact(cores: Sequence[int], count: int, have: int = 0) -> int:
    """Cores of unequal size that make exactly `count` CPUs, early ones preferred; `have` CPUs are there already.

    Bit n of sums[i] says whether some of the cores from i on have n CPUs together.
    """
    sums = [1] * (len(cores) + 1)
    for i in range(len(cores) - 1, -1, -1):
        sums[i] = sums[i + 1] | sums[i + 1] << cores[i].bit_count()
    if not sums[0] >> count & 1:
        raise NotEnoughCPUs(count + have, (sums[0] & (1 << count) - 1).bit_length() - 1 + have)
    taken = 0
    for i, core in enumerate(cores):
        size = core.bit_count()
        if size <= count and sums[i + 1] >> count - size & 1:
            taken |= core
            count -= size
    return taken


def _compact(machine: Hierarchy, mask: int, count: int) -> int:
    """`count` CPUs of the mask in as few units as possible, on each level; never a half core where a whole one fits."""
    taken = 0
    for units in (machine.outer, machine.inner, machine.uncores, machine.cores):
        while True:
            parts = [part for unit in units if (part := unit & mask)]
            enough = [part for part in parts if part.bit_count() >= count]
            if enough:
                mask = min(enough, key=int.bit_count)
                break
            biggest = max(parts, key=int.bit_count)
            taken |= biggest
            mask &= ~biggest
            count -= biggest.bit_count()
    return taken | lowest(mask, count)


def _spread(machine: Hierarchy, mask: int) -> tuple[int, ...]:
    """How many units a set touches, the outer ones first."""
    levels = (machine.outer, machine.inner, machine.uncores, machine.cores)
    return tuple(sum(1 for unit in units if unit & mask) for units in levels)


@dataclass(frozen=True, slots=True)
class _Request:
    """An allocation that is bound to CPUs it has, had or is hinted at. All masks; `hinted` is -1 without a hint."""

    machine: Hierarchy
    options: AllocationOptions
    near: int
    hinted: int

    def shrunk(self, keep: int, count: int) -> int:
        inside = keep & self.machine.cpus
        if self.options.full_cores:
            inside = _whole_cores_in(self.machine, inside)
            if count > inside.bit_count():
                raise NotEnoughCPUs(count, inside.bit_count())
        offline = keep & ~self.machine.cpus
        missing = max(0, count - inside.bit_count())
        return self._part(inside, count - missing) | (lowest(offline, missing) if missing else 0)

    def grown(self, keep: int, available: int, count: int) -> int:
        pool = available & self.machine.cpus & ~keep
        if self.options.full_cores:
            return self._grown_by_cores(keep, pool, count)
        missing = count - keep.bit_count()
        if missing > pool.bit_count():
            raise NotEnoughCPUs(count, (pool | keep).bit_count())
        return keep | self._added(pool, missing, keep)

    def _grown_by_cores(self, keep: int, pool: int, count: int) -> int:
        """The cores of `keep` are made whole first; NotEnoughCPUs counts the whole cores that are possible."""
        machine = self.machine
        whole = _whole_cores_in(machine, pool | keep)
        have = _touched(machine.cores, keep) | keep
        missing = count - have.bit_count()
        if have & ~whole or missing < 0:
            raise NotEnoughCPUs(count, _whole_cores_in(machine, keep).bit_count())
        if missing > (whole & ~have).bit_count():
            raise NotEnoughCPUs(count, whole.bit_count())
        if machine.core_size:
            return have | self._added(whole & ~have, missing, have)
        zones = (zone for domain in self._domains(whole & ~have) for zone in self._zones(domain, have))
        return have | _exact([core for zone in zones for core in core_order(machine, zone)], missing, have.bit_count())

    def _added(self, pool: int, missing: int, have: int) -> int:
        added = 0
        for domain in self._domains(pool):
            wanted = min(missing - added.bit_count(), domain.bit_count())
            nearest = self._evened if self.options.distribute_numa else self._nearest
            added |= nearest(domain, wanted, have)
        return added

    def _domains(self, pool: int) -> tuple[int, int]:
        return pool & self.hinted, pool & ~self.hinted

    def _evened(self, domain: int, count: int, have: int) -> int:
        """What it had, then from the nodes that it is on, so that each gives as much in all, then from any node."""
        taken = self._near_in(domain)
        if taken.bit_count() >= count:
            return self._part(taken, count)
        group = (self.options.full_cores and self.machine.core_size) or 1
        nodes = [node for node in self.machine.numa if node & (have | self.near) and node & domain]
        while nodes and count - taken.bit_count() >= group:
            node = min(nodes, key=lambda node: (node & (have | taken)).bit_count())
            if (node & domain & ~taken).bit_count() >= group:
                taken |= self._nearest(node & domain & ~taken, group, have | taken)
            else:
                nodes.remove(node)
        return taken | self._chosen(domain & ~taken, count - taken.bit_count())

    def _nearest(self, domain: int, count: int, have: int) -> int:
        taken = 0
        for zone in self._zones(domain, have):
            missing = count - taken.bit_count()
            if zone.bit_count() >= missing:
                own = zone & ~self.near == 0
                return taken | (self._part if own else self._chosen)(zone, missing)
            taken |= zone
        return taken

    def _zones(self, domain: int, have: int) -> Iterator[int]:
        """The domain in disjoint parts, the nearest to what it has and had first."""
        for ring in self._rings(self._near_in(domain), have):
            part = ring & domain
            if part:
                yield part
                domain &= ~part
        if domain:
            yield domain

    def _rings(self, near: int, have: int) -> Iterator[int]:
        machine, anchor = self.machine, have | self.near
        yield near
        if not self.options.distribute_cores:
            # only siblings of its own threads: the other half of somebody else's core is no good place
            yield _touched(machine.cores, have | near)
        for units in (machine.uncores, machine.inner, machine.outer):
            yield _touched(units, anchor)

    def _near_in(self, domain: int) -> int:
        near = self.near & domain
        return _whole_cores_in(self.machine, near) if self.options.full_cores else near

    def _chosen(self, mask: int, count: int) -> int:
        return _choose(self.machine, mask, count, self.options)

    def _part(self, mask: int, count: int) -> int:
        """Some of its own CPUs."""
        if self.options.full_cores and not self.machine.core_size:
            return _exact(core_order(self.machine, mask), count)
        if self.options.distribute_numa or self.options.distribute_cores:
            return self._chosen(mask, count)
        if not count:
            return 0
        # Neither is best on every set: greed by level splits cores, the kubelet's order spans more units.
        parts = (_compact(self.machine, mask, count), self._chosen(mask, count))
        return min(parts, key=lambda part: _spread(self.machine, part))
