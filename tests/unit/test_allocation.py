"""take(): kubelet defects that are not copied, and what we add (keep, near, whole cores, reasons)."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace
from itertools import product
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from enforcer.core.allocation import AllocationOptions, SMTAlignmentError, take, take_with_reasons, validate_options
from enforcer.core.cpuset import EMPTY, CPUSet, union
from enforcer.core.distributing import distributed
from enforcer.core.errors import NotEnoughCPUs
from enforcer.core.topology import CPUTopology
from tests.unit.tables import kubelet_topology, machines

FULL = AllocationOptions(full_cores=True)
NUMA = AllocationOptions(distribute_numa=True)
ALL_OPTIONS = [AllocationOptions(*on) for on in product((False, True), repeat=len(fields(AllocationOptions)))]


def cpus(text: str) -> CPUSet:
    return CPUSet.parse(text)


def machine(*, sockets: int = 1, nodes: int = 1, caches: int = 1, cores: int = 4, threads: int = 2) -> CPUTopology:
    """Sizes per parent; siblings stand a whole round apart (Intel's numbering)."""
    total = sockets * nodes * caches * cores
    rows = []
    for cpu in range(total * threads):
        core = cpu % total
        cache, node = core // cores, core // (cores * caches)
        rows.append((cpu, core, node // nodes, node, cache))
    return CPUTopology.from_rows(rows)


# CPUs 0-3 siblings 8-11 on node 0, 4-7 and 12-15 on node 1; one socket and one L3 for each node
TWO_NODES = machine(sockets=2, cores=4)
# 2 P cores (0,1) (2,3) and 3 E cores 4, 5, 6
HYBRID = CPUTopology.from_rows([(cpu, min(cpu // 2, 2) + max(0, cpu - 4), 0, 0, 0) for cpu in range(7)])


def whole(topology: CPUTopology, taken: CPUSet) -> bool:
    return all(core & taken.mask in (0, core) for core in topology.cores.values())


# ---- options on this machine


def test_options_that_exclude_each_other_are_named() -> None:
    everything = AllocationOptions(True, True, True, True, True)
    many_sockets = kubelet_topology("fakeTopoMultiSocketDualSocketPerNumaHT")
    assert validate_options(everything, many_sockets) == (
        "full-pcpus-only cannot be used together with distribute-cpus-across-cores",
        "distribute-cpus-across-numa cannot be used together with distribute-cpus-across-cores",
        "prefer-align-cpus-by-uncorecache cannot be used together with distribute-cpus-across-cores",
        "prefer-align-cpus-by-uncorecache cannot be used together with distribute-cpus-across-numa",
        "align-by-socket cannot be used on a machine with 4 sockets and 2 NUMA nodes",
    )


# ---- the kubelet's defects, from field reports


def test_an_offline_sibling_does_not_make_half_cores_whole() -> None:
    """kubernetes#124066: 7 CPUs / 4 cores = 1 CPU for each core, and it gives `0,4` although 0 is reserved."""
    topology = CPUTopology.from_rows([(cpu, cpu % 4, 0, 0, 0) for cpu in range(7)])
    reserved = take(topology, topology.cpus, 2)
    assert str(reserved) == "0,3"
    assert str(take(topology, topology.cpus - reserved, 2)) == "1,5"


def test_full_cores_never_gives_the_sibling_of_a_reserved_cpu() -> None:
    """kubernetes#113537."""
    topology = machine(cores=4)
    assert str(take(topology, cpus("1-7"), 2, FULL)) == "1,5"
    with pytest.raises(NotEnoughCPUs) as raised:
        take(topology, cpus("1-7"), 8, FULL)
    assert (raised.value.requested, raised.value.available) == (8, 6)


def test_distributing_uneven_left_overs_in_groups_ends() -> None:
    """kubernetes PR 140730: groups of 2 from nodes with 3 free CPUs each."""
    topology = machine(sockets=2, cores=2)
    mask = distributed(topology.hierarchy, cpus("0-1,2-3,4,6").mask, 4, 2)
    assert CPUSet.from_mask(mask).isdisjoint(cpus("5,7")) and mask.bit_count() == 4


def test_four_of_eight_nodes_stay_in_one_socket() -> None:
    """kubernetes#141237: 126 CPUs free in each socket, 120 asked; the walk overwrote the nodes it had chosen."""
    topology = machine(sockets=2, nodes=4, cores=16)
    busy = cpus("62,126,127,63")
    options = AllocationOptions(distribute_numa=True, align_socket=True)
    taken = take(topology, topology.cpus - busy, 120, options)
    assert {topology.socket_of[cpu] for cpu in taken} == {0}
    assert sorted(Counter(topology.numa_of[cpu] for cpu in taken).values()) == [30, 30, 30, 30]


def test_many_numa_nodes_end_the_search() -> None:
    """siderolabs/talos#9121: 2^32 sets of nodes, all with another number of free CPUs."""
    topology = machine(nodes=32, cores=33, threads=1)
    free = CPUSet(cpu for cpu in topology.cpus if cpu % 33 <= topology.numa_of[cpu])
    for options in (NUMA, replace(NUMA, align_socket=True)):
        taken = take(topology, free, 400, options)
        assert len(taken) == 400 and taken <= free


# ---- whole cores


def test_full_cores_wants_a_multiple() -> None:
    with pytest.raises(SMTAlignmentError) as raised:
        take(TWO_NODES, TWO_NODES.cpus, 3, FULL)
    assert (raised.value.requested, raised.value.core_size) == (3, 2)
    assert "ask for a multiple of 2" in str(raised.value)


@pytest.mark.parametrize(
    ("free", "count", "expected"),
    [
        ("0-6", 1, "4"),
        ("0-6", 2, "4-5"),
        ("0-6", 5, "0-1,4-6"),
        ("0-3", 2, "0-1"),
        ("0-4", 3, "0-1,4"),
        ("0-3,5-6", 4, "0-1,5-6"),
        ("1-4", 3, "2-4"),
    ],
)
def test_full_cores_on_a_hybrid_machine_adds_up_cores_of_both_kinds(free: str, count: int, expected: str) -> None:
    taken = take(HYBRID, cpus(free), count, FULL)
    assert str(taken) == expected and whole(HYBRID, taken)


@pytest.mark.parametrize(("free", "count", "possible"), [("0-3", 3, 2), ("0,2,4", 2, 1), ("0-3", 1, 0), ("0-4", 6, 5)])
def test_full_cores_on_a_hybrid_machine_may_not_add_up(free: str, count: int, possible: int) -> None:
    with pytest.raises(NotEnoughCPUs) as raised:
        take(HYBRID, cpus(free), count, FULL)
    assert (raised.value.requested, raised.value.available) == (count, possible)


def test_full_cores_goes_before_distribute_cores() -> None:
    assert str(take(TWO_NODES, TWO_NODES.cpus, 4, replace(FULL, distribute_cores=True))) == "0-1,8-9"


# ---- keep: growth and shrink


@pytest.mark.parametrize(
    ("keep", "free", "count", "expected"),
    [
        ("4", "0-3,5-15", 2, "4,12"),  # the other half of its core
        ("4", "0-3,5-11,13-15", 2, "4-5"),  # no sibling: another core of its node (fuller cores first is id order here)
        ("4,12", "0-3,5,8-11,13", 4, "4-5,12-13"),
        ("4-7,12-15", "0-3,8-11", 10, "0,4-8,12-15"),
        ("4,12", "0-15", 2, "4,12"),
        ("4,12", "", 2, "4,12"),
    ],
)
def test_growth_keeps_and_stays_near(keep: str, free: str, count: int, expected: str) -> None:
    assert str(take(TWO_NODES, cpus(free), count, keep=cpus(keep))) == expected


def test_growth_prefers_the_same_cache_node_and_socket_in_this_order() -> None:
    topology = machine(sockets=2, nodes=2, caches=2, cores=2, threads=1)  # caches 0-1, 2-3 | 4-5, 6-7 || 8-...
    keep, free = cpus("6"), topology.cpus
    order = []
    while len(keep) < 9:
        grown = take(topology, free - keep, len(keep) + 1, keep=keep)
        order.append(str(grown - keep))
        keep = grown
    assert order == ["7", "4", "5", "0", "1", "2", "3", "8"]
    assert str(take(topology, cpus("0,4-5,8"), 2, keep=cpus("6"))) == "4,6"  # 0 is the fullest node's


def test_growth_with_full_cores_completes_its_halves_first() -> None:
    assert str(take(TWO_NODES, cpus("0-3,5-15"), 4, FULL, keep=cpus("4"))) == "4-5,12-13"
    with pytest.raises(NotEnoughCPUs):
        take(TWO_NODES, cpus("0-3,5-11"), 4, FULL, keep=cpus("4"))
    with pytest.raises(NotEnoughCPUs) as raised:
        take(TWO_NODES, TWO_NODES.cpus, 2, FULL, keep=cpus("4-5"))
    assert (raised.value.requested, raised.value.available) == (2, 0)


def test_growth_on_a_hybrid_machine_adds_up_the_nearest_cores() -> None:
    """P cores (0,1) and (2,3), E cores 4 and 5; nodes 0,1,4 and 2,3,5."""
    topology = CPUTopology.from_rows([(0, 0, 0, 0, 0), (1, 0, 0, 0, 0), (4, 4, 0, 0, 0)] + [
        (2, 2, 0, 1, 1), (3, 2, 0, 1, 1), (5, 5, 0, 1, 1)
    ])  # fmt: skip
    assert str(take(topology, topology.cpus, 3, FULL, hint=[1])) == "2-3,5"
    assert str(take(topology, topology.cpus, 3, FULL, keep=cpus("5"))) == "2-3,5"
    assert str(take(topology, topology.cpus, 4, FULL, keep=cpus("4"))) == "0-1,4-5"
    assert str(take(topology, topology.cpus, 1, FULL, near=cpus("5"))) == "5"


@pytest.mark.parametrize(
    ("keep", "free", "count", "expected"),
    [
        ("0,4", "0-15", 4, "0,4,8,12"),  # each node gives as much in all, nearest first
        ("0,4-5", "0-15", 4, "0,4-5,8"),
        ("0,4", "1-3,5-7", 4, "0-1,4-5"),
        ("0", "0-15", 3, "0-1,8"),  # as few nodes as it is on now
        ("0,4", "1,5-7,12-15", 6, "0-1,4-5,12-13"),  # one node has no more
        ("0", "0,4-7", 3, "0,4-5"),
    ],
)
def test_growth_over_the_nodes_when_distributing(keep: str, free: str, count: int, expected: str) -> None:
    assert str(take(TWO_NODES, cpus(free), count, NUMA, keep=cpus(keep))) == expected


def test_growth_over_the_nodes_by_whole_cores() -> None:
    options = replace(NUMA, full_cores=True)
    assert str(take(TWO_NODES, TWO_NODES.cpus, 6, options, keep=cpus("0,4,8,12"))) == "0-1,4,8-9,12"
    assert str(take(TWO_NODES, TWO_NODES.cpus, 8, options, keep=cpus("0,4,8,12"))) == "0-1,4-5,8-9,12-13"


def test_growth_over_the_cores_when_distributing() -> None:
    assert str(take(TWO_NODES, TWO_NODES.cpus, 3, AllocationOptions(distribute_cores=True), keep=cpus("4"))) == "4-6"


def test_not_enough_to_grow_counts_what_it_has() -> None:
    with pytest.raises(NotEnoughCPUs) as raised:
        take(TWO_NODES, cpus("0-1"), 5, keep=cpus("4,12"))
    assert (raised.value.requested, raised.value.available) == (5, 4)


def test_cpus_that_the_machine_does_not_have_are_never_taken() -> None:
    assert str(take(TWO_NODES, cpus("0,8,16-99"), 2)) == "0,8"
    with pytest.raises(NotEnoughCPUs) as raised:
        take(TWO_NODES, cpus("0,8,16-99"), 3)
    assert (raised.value.requested, raised.value.available) == (3, 2)


def test_a_kept_cpu_that_went_offline_is_kept() -> None:
    assert str(take(TWO_NODES, TWO_NODES.cpus, 3, keep=cpus("4,99"))) == "4,12,99"
    assert str(take(TWO_NODES, TWO_NODES.cpus, 1, keep=cpus("4,99"))) == "4"


@pytest.mark.parametrize(
    ("keep", "count", "expected"),
    [
        ("0-1,8-9,4", 4, "0-1,8-9"),  # the lone CPU on the other node goes
        ("0-1,8,4,12", 2, "4,12"),  # the smallest place that has room for all of them
        ("0-1,8-9", 2, "0,8"),  # a whole core, not two halves
        ("0-1,8-9", 3, "0-1,8"),
        ("0-2,8", 1, "1"),  # a half core, so that the whole one stays for whom it serves
        ("0-7", 0, ""),
    ],
)
def test_shrink_gives_up_the_farthest_and_keeps_cores_whole(keep: str, count: int, expected: str) -> None:
    assert str(take(TWO_NODES, TWO_NODES.cpus, count, keep=cpus(keep))) == expected


def test_shrink_with_full_cores_keeps_whole_cores_only() -> None:
    assert str(take(TWO_NODES, EMPTY, 2, FULL, keep=cpus("0-1,9"))) == "1,9"
    with pytest.raises(NotEnoughCPUs):
        take(TWO_NODES, EMPTY, 2, FULL, keep=cpus("0-2"))


def test_shrink_by_the_distributing_options() -> None:
    assert str(take(TWO_NODES, EMPTY, 2, AllocationOptions(distribute_cores=True), keep=cpus("0-3,8-11"))) == "0-1"
    spread = take(TWO_NODES, EMPTY, 10, NUMA, keep=TWO_NODES.cpus)
    assert Counter(TWO_NODES.numa_of[cpu] for cpu in spread) == {0: 5, 1: 5}


# ---- near


@pytest.mark.parametrize(
    ("near", "free", "count", "expected"),
    [
        ("5,13", "0-15", 2, "5,13"),  # all of what it had
        ("13", "0-15", 1, "13"),  # that very CPU
        ("5,13", "0-12,14-15", 2, "4-5"),  # half of it is in use: then the next CPU of that node
        ("5,13", "0-4,6-12,14-15", 2, "4,12"),  # none of it is free: another core of that node
        ("5", "0-4,6-15", 2, "4,12"),  # a whole core, not the other half of somebody's
        ("5,13", "0-3,8-11", 2, "0,8"),  # nothing near
        ("4-7,12-15", "0-15", 2, "4,12"),  # more than it needs now
        ("0-2,4,8", "0-15", 3, "0-1,8"),  # the lone CPU on the other node goes
        ("77", "0-15", 1, "0"),
    ],
)
def test_near_goes_first_where_free(near: str, free: str, count: int, expected: str) -> None:
    assert str(take(TWO_NODES, cpus(free), count, near=cpus(near))) == expected


def test_near_with_full_cores_takes_the_whole_cores_of_it() -> None:
    assert str(take(TWO_NODES, cpus("0-12,14-15"), 2, FULL, near=cpus("5,7,13,15"))) == "7,15"
    assert str(take(TWO_NODES, cpus("0-15"), 2, FULL, near=cpus("13"))) == "4,12"


# ---- hint


def test_hint_comes_first_and_does_not_bind() -> None:
    assert str(take(TWO_NODES, TWO_NODES.cpus, 2, hint=[1])) == "4,12"
    assert str(take(TWO_NODES, TWO_NODES.cpus, 10, hint={1})) == "0,4-8,12-15"
    assert str(take(TWO_NODES, TWO_NODES.cpus, 2, hint=[])) == "0,8"
    assert str(take(TWO_NODES, TWO_NODES.cpus, 2, hint=[42])) == "0,8"


def test_hint_and_near() -> None:
    assert str(take(TWO_NODES, TWO_NODES.cpus, 2, near=cpus("3,7"), hint=[1])) == "7,15"


def test_hint_is_widened_to_sockets_by_align_socket() -> None:
    topology = machine(sockets=2, nodes=2, cores=2, threads=1)
    free = cpus("1,5-7")
    assert str(take(topology, free, 2, hint=[2])) == "1,5"
    assert str(take(topology, free, 2, AllocationOptions(align_socket=True), hint=[2])) == "6-7"


# ---- reasons


def test_reasons_name_the_units_and_cover_the_answer() -> None:
    taken = take_with_reasons(TWO_NODES, TWO_NODES.cpus - cpus("0"), 11)
    assert [str(step) for step in taken.steps] == [
        "4-7,12-15: whole NUMA node 1, wholly free, fits in the 11 CPUs still needed",
        "1,9: whole core 1, wholly free, fits in the 3 CPUs still needed",
        "8: single CPU of core 0, 1 of its 2 CPUs were free",
    ]


def test_reasons_of_growth_and_return() -> None:
    grown = take_with_reasons(TWO_NODES, cpus("5-7,12-15"), 4, keep=cpus("4"), near=cpus("13"))
    assert [(str(step.cpus), step.what) for step in grown.steps] == [
        ("4", "kept"),
        ("13", "had before"),
        ("5", "single CPU of core 5"),
        ("12", "single CPU of core 4"),
    ]


# ---- properties


@st.composite
def topologies(draw: st.DrawFn) -> CPUTopology:
    if draw(st.booleans()):
        return CPUTopology.from_rows(draw(st.sampled_from(list(machines().values())))["rows"])
    sizes = st.integers(1, 3)
    made = machine(
        sockets=draw(sizes), nodes=draw(sizes), caches=draw(sizes), cores=draw(sizes), threads=draw(st.integers(1, 4))
    )
    rows = made.rows()
    offline = draw(st.sets(st.integers(0, len(rows) - 1), max_size=min(4, len(rows) - 1)))
    return CPUTopology.from_rows(row for i, row in enumerate(rows) if i not in offline)


@st.composite
def requests(draw: st.DrawFn) -> tuple[CPUTopology, dict[str, Any]]:
    topology = draw(topologies())
    everything = list(topology.cpus)

    def some(**limits: int) -> CPUSet:
        return CPUSet(draw(st.sets(st.sampled_from(everything), **limits)))

    available = topology.cpus - some(max_size=8) if draw(st.booleans()) else some()
    keep = some(max_size=6) if draw(st.booleans()) else EMPTY
    return topology, {
        "available": available,
        "count": draw(st.integers(0, len(available | keep))),
        "options": draw(st.sampled_from(ALL_OPTIONS)),
        "keep": keep,
        "near": some(max_size=6) if draw(st.booleans()) else EMPTY,
        "hint": draw(st.none() | st.sets(st.sampled_from(list(topology.numa_nodes)))),
    }


def attempt(topology: CPUTopology, request: dict[str, Any]) -> CPUSet | None:
    try:
        return take(topology, **request)
    except (SMTAlignmentError, NotEnoughCPUs):
        assert request["options"].full_cores, "without full_cores there were CPUs enough"
        return None


@given(requests())
def test_any_answer_is_within_bounds(given_: tuple[CPUTopology, dict[str, Any]]) -> None:
    topology, request = given_
    taken = attempt(topology, request)
    if taken is None:
        return
    assert len(taken) == request["count"]
    assert taken <= request["available"] | request["keep"]
    assert request["keep"] <= taken if request["count"] >= len(request["keep"]) else taken <= request["keep"]
    assert not request["options"].full_cores or whole(topology, taken)


@given(requests(), st.randoms(use_true_random=False))
def test_the_same_question_has_the_same_answer_whatever_the_order_of_rows(
    given_: tuple[CPUTopology, dict[str, Any]], random: Any
) -> None:
    topology, request = given_
    rows = topology.rows()
    random.shuffle(rows)
    assert attempt(CPUTopology.from_rows(rows), request) == attempt(topology, request)


@given(requests())
def test_reasons_are_disjoint_and_cover_the_answer(given_: tuple[CPUTopology, dict[str, Any]]) -> None:
    topology, request = given_
    assume(attempt(topology, request) is not None)
    taken = take_with_reasons(topology, **request)
    assert union(step.cpus for step in taken.steps) == taken.cpus
    assert sum(len(step.cpus) for step in taken.steps) == len(taken.cpus)


@given(topologies(), st.data())
@example(HYBRID, None)
def test_full_cores_fails_only_where_no_cores_add_up(topology: CPUTopology, data: st.DataObject | None) -> None:
    free = CPUSet(data.draw(st.sets(st.sampled_from(list(topology.cpus))))) if data else cpus("0-3,6")
    sums = {0}
    for core in topology.cores.values():
        if not core & ~free.mask:
            sums |= {size + core.bit_count() for size in sums}
    for count in range(len(free) + 1):
        taken = attempt(topology, {"available": free, "count": count, "options": FULL})
        assert (taken is not None) is (count in sums)


@pytest.mark.parametrize("name", machines())
def test_every_count_with_every_option_on_a_real_machine(name: str) -> None:
    topology = CPUTopology.from_rows(machines()[name]["rows"])
    sizes = {core.bit_count() for core in topology.cores.values()}
    for options in ALL_OPTIONS:
        # what the kubelet refuses together is no common question: every 8th count of a big machine has to do
        step = 8 if len(topology.cpus) > 128 and validate_options(options, topology) else 1
        for count in range(0, len(topology.cpus) + 1, step):
            if options.full_cores and len(sizes) == 1 and count % min(sizes):
                with pytest.raises(SMTAlignmentError):
                    take(topology, topology.cpus, count, options)
                continue
            taken = take(topology, topology.cpus, count, options)
            assert len(taken) == count and taken <= topology.cpus
            assert not options.full_cores or whole(topology, taken)


def test_a_negative_count_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match="cannot take -1 CPUs"):
        take(TWO_NODES, TWO_NODES.cpus, -1)


def test_shrink_keeps_whole_cores_together() -> None:
    """Two nodes are spanned either way; then two whole cores are better than three touched ones."""
    topology = CPUTopology.from_rows((cpu, cpu // 2 * 2, cpu // 4, cpu // 4, cpu // 4) for cpu in range(8))
    keep = CPUSet.parse("2-3,5-7")
    assert take(topology, keep, 4, keep=keep) == CPUSet.parse("2-3,6-7")
    assert take(topology, keep, 3, keep=keep) == CPUSet.parse("5-7")
    assert take(topology, keep, 2, keep=keep) in (CPUSet.parse("2-3"), CPUSet.parse("6-7"))
