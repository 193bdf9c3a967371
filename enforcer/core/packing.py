"""The kubelet's packed allocation on bit masks: whole units first, and of each kind the fullest one first.

Source of the rules: kubernetes pkg/kubelet/cm/cpumanager/cpu_assignment.go (v1.36). Where that divides totals to get
the size of a unit, this asks the unit's mask, and a unit is whole only when each of its CPUs is free: a division calls
half a core whole on hybrid machines and next to offline CPUs (kubernetes#124066, #140495).

All functions take and return masks (bit n = CPU n). Callers make sure that `free` holds only CPUs of the machine.
"Order" always means: fewest free CPUs first, then the lowest id; a lower level is listed by walking the upper one.
"""

from __future__ import annotations

from collections.abc import Sequence

from enforcer.core.topology import Hierarchy


def packed(machine: Hierarchy, free: int, need: int, *, spread: bool = False, uncore: bool = False) -> int:
    """`need` CPUs of `free`, which must hold as many (takeByTopologyNUMAPacked).

    Whole outer units, whole inner units, L3 caches (only with `uncore`), whole cores (not with `spread`), single CPUs.
    """
    if need == free.bit_count():
        return free
    taken = _whole_outer(machine, free, need)
    left = need - taken.bit_count()
    if left:
        taken |= _whole_inner(machine, free & ~taken, left)
        left = need - taken.bit_count()
    if left and uncore:
        taken |= _in_uncores(machine, free & ~taken, left)
        left = need - taken.bit_count()
    if left and not spread:
        taken |= _whole_cores(machine, free & ~taken, left)
        left = need - taken.bit_count()
    if left:
        taken |= (_spread_cpus if spread else _packed_cpus)(machine, free & ~taken, left)
    return taken


def lowest(mask: int, count: int) -> int:
    """The `count` lowest CPUs of a mask that holds at least as many."""
    if count == 1:
        return mask & -mask
    low, high = count, mask.bit_length()
    while low < high:
        middle = (low + high) // 2
        if (mask & (1 << middle) - 1).bit_count() < count:
            low = middle + 1
        else:
            high = middle
    return mask & (1 << low) - 1


def outer_order(machine: Hierarchy, free: int) -> list[int]:
    """Indexes of the outer units with free CPUs, in order."""
    counts = [(unit & free).bit_count() for unit in machine.outer]
    return sorted([i for i, count in enumerate(counts) if count], key=counts.__getitem__)


def inner_order(machine: Hierarchy, free: int) -> list[int]:
    """Indexes of the inner units with free CPUs, in order."""
    return _nested(outer_order(machine, free), machine.outer, machine.inner_of_outer, machine.inner, free)


def numa_order(machine: Hierarchy, free: int) -> list[int]:
    """Indexes of the NUMA nodes with free CPUs, in order."""
    return outer_order(machine, free) if machine.numa_first else inner_order(machine, free)


def socket_order(machine: Hierarchy, free: int) -> list[int]:
    """Indexes of the sockets with free CPUs, in order."""
    return inner_order(machine, free) if machine.numa_first else outer_order(machine, free)


def uncore_order(machine: Hierarchy, free: int) -> list[int]:
    """Indexes of the L3 caches with free CPUs, in order."""
    return _nested(numa_order(machine, free), machine.numa, machine.uncores_of_numa, machine.uncores, free)


def core_order(machine: Hierarchy, free: int) -> list[int]:
    """The free part of each core that has one, in order."""
    parts: dict[int, None] = {}
    for i in inner_order(machine, free):
        here = [part for core in machine.cores_of_inner[i] if (part := core & free)]
        parts.update(dict.fromkeys(sorted(here, key=int.bit_count)))
    return list(parts)


def _nested(
    order: list[int], parents: Sequence[int], nested: Sequence[tuple[int, ...]], units: Sequence[int], free: int
) -> list[int]:
    """Walks the parents in their order and sorts the units in each; a unit seen twice counts at its first place."""
    found: dict[int, None] = {}
    for i in order:
        here = parents[i] & free
        inside = [((units[j] & free).bit_count(), j) for j in nested[i] if units[j] & here]
        inside.sort()
        found.update((j, None) for _, j in inside)
    return list(found)


def _whole_outer(machine: Hierarchy, free: int, need: int) -> int:
    whole = [unit for unit in machine.outer if unit & free == unit]
    whole.sort(key=int.bit_count)
    return _that_fit(whole, need)


def _whole_inner(machine: Hierarchy, free: int, need: int) -> int:
    whole = {unit for unit in machine.inner if unit & free == unit and unit.bit_count() <= need}
    if not whole:
        return 0
    return _that_fit([unit for i in inner_order(machine, free) if (unit := machine.inner[i]) in whole], need)


def _that_fit(units: Sequence[int], need: int) -> int:
    """Each of these disjoint units that still fits."""
    taken = 0
    for unit in units:
        size = unit.bit_count()
        if size <= need:
            taken |= unit
            need -= size
    return taken


def _in_uncores(machine: Hierarchy, free: int, need: int) -> int:
    """Whole caches that fit, then the first cache that can hold all the rest; may give fewer than `need`."""
    taken = 0
    for i in uncore_order(machine, free):
        cache = machine.uncores[i]
        if need >= cache.bit_count() and not taken:
            taken = _whole_uncores(machine, free, need)
            free &= ~taken
            need -= taken.bit_count()
        if not need:
            break
        if (cache & free).bit_count() >= need and (part := _part_of_uncore(machine, i, free, need)):
            return taken | part
    return taken


def _whole_uncores(machine: Hierarchy, free: int, need: int) -> int:
    caches = [machine.uncores[i] for i in uncore_order(machine, free)]
    return _that_fit([cache for cache in caches if cache & free == cache], need)


def _part_of_uncore(machine: Hierarchy, cache: int, free: int, need: int) -> int:
    """The free CPUs of the cache's first cores, if that makes exactly `need` (takePartialUncore)."""
    size = machine.cpus.bit_count() // len(machine.cores)
    parts = [part for core in machine.cores_of_uncore[cache] if (part := core & free)]
    part = sum(parts[: -(-need // size)])
    if need % 2 and size > 1 and part.bit_count() == need + 1:
        part ^= 1 << part.bit_length() - 1
    return part if part.bit_count() == need else 0


def _whole_cores(machine: Hierarchy, free: int, need: int) -> int:
    size = machine.core_size
    if need < size:
        return 0
    taken = 0
    for i in inner_order(machine, free):
        whole = [core for core in machine.cores_of_inner[i] if core & free == core]
        part = sum(whole[: need // size]) if size else _that_fit(sorted(whole, key=int.bit_count), need)
        taken |= part
        free &= ~part
        need -= part.bit_count()
        if need < size or not need:
            break
    return taken


def _packed_cpus(machine: Hierarchy, free: int, need: int) -> int:
    taken = 0
    for i in inner_order(machine, free):
        parts = [part for core in machine.cores_of_inner[i] if (part := core & free & ~taken)]
        parts.sort(key=int.bit_count)
        for part in parts:
            size = part.bit_count()
            if size >= need:
                return taken | lowest(part, need)
            taken |= part
            need -= size
    return taken


def _spread_cpus(machine: Hierarchy, free: int, need: int) -> int:
    taken = 0
    for i in socket_order(machine, free):
        part = machine.sockets[i] & free
        size = part.bit_count()
        if size >= need:
            return taken | lowest(part, need)
        taken |= part
        need -= size
    return taken
