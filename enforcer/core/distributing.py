"""The kubelet's allocation spread evenly over NUMA nodes (`distribute-cpus-across-numa`), on bit masks.

Source of the rules: kubernetes pkg/kubelet/cm/cpumanager/cpu_assignment.go takeByTopologyNUMADistributed (v1.36; the
preference for one socket as of PR 139778). Not taken over: the chosen nodes overwritten by the walk that goes on
(kubernetes#141237) and the endless loop over groups that do not fit (PR 140730).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, combinations
from math import comb, sqrt
from typing import Final, NamedTuple

from enforcer.core.packing import numa_order, packed
from enforcer.core.topology import Hierarchy

# 2^34 sets of nodes hang a kubelet (siderolabs/talos#9121). Where one size has more sets than this, only those of the
# emptiest nodes are compared, and after so many ways to place the remainder the best one so far stands. 8 nodes, the
# kubelet's own bound, have at most 70 sets of a size with 256 ways each: up to there the search is complete.
_MAX_SETS: Final = 5_000
_MAX_WAYS: Final = 18_000
_INFINITE: Final = 1 << 62


class _Choice(NamedTuple):
    """`each` CPUs of every chosen node, then groups in turn from `rest`; nodes are positions in the node order."""

    nodes: tuple[int, ...]
    each: int
    rest: tuple[int, ...]


def distributed(
    machine: Hierarchy, free: int, need: int, group: int = 1, *, spread: bool = False, one_socket: bool = False
) -> int:
    """`need` CPUs of `free`, which must hold as many, evenly from as few NUMA nodes as can give them.

    Every node gives a multiple of `group` CPUs. `one_socket` prefers nodes of one socket. Packed over everything when
    `need` is no multiple of `group` or no set of nodes fits.
    """
    order = numa_order(machine, free) if need and need % group == 0 else []
    counts = [(machine.numa[i] & free).bit_count() for i in order]
    groups = need // group
    search = _Search(counts, need, group)
    sockets = _nodes_by_socket(machine, order) if one_socket else ()
    for k in range(_fewest_nodes(machine, need, group), min(groups, len(order)) + 1):
        if choice := search.choose(k, sockets):
            return _hand_out(machine, free, need, group, choice, order, spread)
    return packed(machine, free, need, spread=spread)


def _fewest_nodes(machine: Hierarchy, need: int, group: int) -> int:
    groups_per_node = _up(_up(machine.cpus.bit_count(), group), len(machine.numa))
    return max(1, _up(_up(need, group), groups_per_node))


def _up(number: int, unit: int) -> int:
    return -(-number // unit)


def _nodes_by_socket(machine: Hierarchy, order: Sequence[int]) -> list[tuple[int, ...]]:
    """For each socket the positions in `order` of the nodes that lie on it alone."""
    nodes = [machine.numa[i] for i in order]
    groups = [tuple(p for p, node in enumerate(nodes) if node & socket == node) for socket in machine.sockets]
    return sorted(group for group in groups if group)


def _hand_out(
    machine: Hierarchy, free: int, need: int, group: int, choice: _Choice, order: Sequence[int], spread: bool
) -> int:
    taken = 0
    for position in choice.nodes if choice.each else ():
        taken |= packed(machine, machine.numa[order[position]] & free, choice.each, spread=spread)
    left = need - choice.each * len(choice.nodes)
    while left > 0:
        for position in choice.rest:
            here = machine.numa[order[position]] & free & ~taken
            if left and here.bit_count() >= group:
                taken |= packed(machine, here, group, spread=spread)
                left -= group
    return taken


class _Search:
    """The sets of nodes that leave the machine's nodes most evenly free; of equals the first in the kubelet's order.

    The score is the standard deviation of the free CPUs left per node, to 3 decimals. What is left is the same in sum
    for every set, so the sum of the squares orders the sets, and a score is computed only for a smaller sum.
    """

    def __init__(self, counts: Sequence[int], need: int, group: int) -> None:
        self.counts = counts
        self.need = need
        self.group = group
        self.squares = sum(count * count for count in counts)
        self.ways = 0

    def choose(self, k: int, sockets: Sequence[Sequence[int]]) -> _Choice | None:
        """The best set of k nodes; with `sockets`, any set within one socket goes before all others."""
        each = self.need // k // self.group * self.group
        if sockets:
            within = chain.from_iterable(self._sets(nodes, k) for nodes in sockets)
            everywhere = self._sets(range(len(self.counts)), k)
            bound = self._bound(range(len(self.counts)), k, 0)
            return self._best(within, k, each, bound) or self._best(everywhere, k, each, bound)
        pool = [position for position, count in enumerate(self.counts) if count >= each]
        if len(pool) < k:
            return None
        return self._best(self._sets(pool, k), k, each, self._bound(pool, k, each))

    def _sets(self, pool: Sequence[int], k: int) -> Iterator[tuple[int, ...]]:
        """All sets of k of these nodes; of the emptiest ones only where that would be too many."""
        emptiest = sorted(pool, key=self.counts.__getitem__)
        while comb(len(emptiest), k) > _MAX_SETS:
            del emptiest[0]
        return combinations(sorted(emptiest), k)

    def _bound(self, pool: Sequence[int], k: int, each: int) -> int:
        """A sum of squares that no set of k nodes gets below: the k emptiest give `each`, the emptiest the rest."""
        left = sorted(self.counts[position] for position in pool)[-k:]
        taken = [count - each for count in left]
        base = self.squares + sum(after * after - before * before for before, after in zip(left, taken, strict=True))
        return base - self._most_gain(taken, (self.need - k * each) // self.group)

    def _best(self, sets: Iterator[tuple[int, ...]], k: int, each: int, bound: int) -> _Choice | None:
        """Every node gives `each` or, if one of the set has less, as much as that one can."""
        best: _Choice | None = None
        least, score = _INFINITE, _INFINITE
        for nodes in sets:
            free = [self.counts[position] for position in nodes]
            fullest, total = min(free), sum(free)
            if total < self.need or (self.group > 1 and self._groups(free) * self.group < self.need):
                continue
            even = min(each, fullest // self.group * self.group)
            squares = self.squares + k * even * even - 2 * even * total
            groups = (self.need - k * even) // self.group
            # no way to place the remainder saves more than taking all of it from the emptiest node, as it is now
            if squares - groups * self.group * (2 * (max(free) - even) - self.group) >= least:
                continue
            squares, rest = self._place(nodes, even, groups, squares)
            if squares < least and self._score(squares) < score:
                best, least, score = _Choice(nodes, even, rest), squares, self._score(squares)
                if score == 0 or least <= bound:
                    break
        return best

    def _place(self, nodes: tuple[int, ...], each: int, groups: int, squares: int) -> tuple[int, tuple[int, ...]]:
        """Where the remainder goes: the squares then left, and the nodes that give a group in turn."""
        if not groups:
            return squares, ()
        able = [position for position in nodes if self.counts[position] - each >= self.group]
        most = self._most_gain([self.counts[position] - each for position in able], groups)
        least, score = _INFINITE, _INFINITE
        rest: tuple[int, ...] = ()
        for size in range(len(able), 0, -1):
            for some in combinations(able, size):
                gain = self._gain([self.counts[position] - each for position in some], groups)
                self.ways += 1
                if gain >= 0 and squares - gain < least and self._score(squares - gain) < score:
                    least, score, rest = squares - gain, self._score(squares - gain), some
                if gain == most or self.ways > _MAX_WAYS:
                    return least, rest
        return least, rest

    def _gain(self, left: list[int], groups: int) -> int:
        """What the sum of squares loses by taking groups from these nodes in turn; -1 when they cannot give them."""
        if self._groups(left) < groups:
            return -1
        gain = 0
        while groups:
            for i, count in enumerate(left):
                if groups and count >= self.group:
                    gain += self.group * (2 * count - self.group)
                    left[i] -= self.group
                    groups -= 1
        return gain

    def _most_gain(self, left: list[int], groups: int) -> int:
        """The same when each group comes from the node that is the emptiest by then."""
        gain = 0
        while groups:
            top = max(left)
            for i, count in enumerate(left):
                if groups and count == top:
                    gain += self.group * (2 * top - self.group)
                    left[i] -= self.group
                    groups -= 1
        return gain

    def _groups(self, free: Sequence[int]) -> int:
        return sum(count // self.group for count in free)

    def _score(self, squares: int) -> int:
        nodes, rest = len(self.counts), sum(self.counts) - self.need
        mean = int(rest / nodes * 1000 + 0.5) / 1000
        variance = (squares - 2 * mean * rest) / nodes + mean * mean
        return int(sqrt(max(variance, 0.0)) * 1000 + 0.5)
