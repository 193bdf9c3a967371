"""CPUTopology: rows of real and made-up machines to units."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enforcer.core.cpuset import CPUSet
from enforcer.core.errors import TopologyError
from enforcer.core.topology import CPUTopology
from tests.unit.tables import machines, table

COUNTERS = ("cpus", "cores", "sockets", "numa", "uncore")


def described(machine: dict[str, Any]) -> list[list[int | None]]:
    """Rows from the kubelet's machine description: a core is named by its lowest thread, as our rows are."""
    return [
        [cpu, min(core["threads"]), core["socket"], node["numa"], core["uncore"][0] if core["uncore"] else None]
        for node in machine["nodes"]
        for core in node["cores"]
        for cpu in core["threads"]
    ]


@pytest.mark.parametrize("case", [c for c in table("discover") if "error" not in c], ids=lambda case: case["id"])
def test_discover_table(case: dict[str, Any]) -> None:
    topology = CPUTopology.from_rows(described(case["machine"]))
    expected = case["expected"]
    assert {str(cpu): list(units) for cpu, *units in topology.rows()} == expected["cpu"]
    found = (topology.cpus, topology.cores, topology.sockets, topology.numa_nodes, topology.uncores)
    assert [len(units) for units in found] == [expected["declared"][c] for c in COUNTERS]


@pytest.mark.parametrize("case", [c for c in table("discover") if "error" in c], ids=lambda case: case["id"])
def test_discover_table_refusals(case: dict[str, Any]) -> None:
    with pytest.raises(TopologyError, match="no CPU is listed"):
        CPUTopology.from_rows(described(case["machine"]))


@pytest.mark.parametrize("name", machines())
def test_real_machines(name: str) -> None:
    machine = machines()[name]
    rows = machine["rows"]
    topology = CPUTopology.from_rows(rows)
    expected = [
        (cpu, core, socket, 0 if numa is None else numa, socket if l3 is None else l3)
        for cpu, core, socket, numa, l3 in sorted(rows)
    ]
    assert topology.rows() == expected
    if machine["online"] is not None:
        assert topology.cpus == CPUSet.parse(machine["online"])
    assert not set(machine["numa_without_cpus"]) & set(topology.numa_nodes)


@pytest.mark.parametrize(
    ("name", "cores", "sockets", "nodes", "uncores", "sizes"),
    [
        ("amd-epyc-7451-2s-8node-16l3", 48, 2, 8, 16, {2}),
        ("intel-hybrid-16cpu-4p8e", 12, 1, 1, 1, {1, 2}),
        ("amd-epyc-7742-2s-32node-cpu255-offline", 128, 2, 32, 32, {1, 2}),
        ("power9-ac922-smt4-gpu-nodes", 8, 2, 2, 4, {4}),
        ("intel-4s-64cpu-3nodes", 32, 4, 3, 4, {2}),
        ("s390-20cpu-books", 20, 1, 1, 1, {1}),
        ("ia64-128cpu-17node-one-cpuless", 128, 64, 16, 64, {1}),
    ],
)
def test_units_of_real_machines(
    name: str, cores: int, sockets: int, nodes: int, uncores: int, sizes: set[int]
) -> None:
    topology = CPUTopology.from_rows(machines()[name]["rows"])
    found = (topology.cores, topology.sockets, topology.numa_nodes, topology.uncores)
    assert tuple(map(len, found)) == (cores, sockets, nodes, uncores)
    assert {mask.bit_count() for mask in topology.cores.values()} == sizes


def test_siblings_and_owners() -> None:
    topology = CPUTopology.from_rows(machines()["power9-ac922-smt4-gpu-nodes"]["rows"])
    assert str(topology.siblings(90)) == "88-91"
    assert (topology.core_of[90], topology.socket_of[90], topology.numa_of[90]) == (88, 8, 8)
    with pytest.raises(KeyError):
        topology.siblings(16)


def test_what_is_not_known() -> None:
    topology = CPUTopology.from_rows([(0, 0, 3, None, None), (1, 1, 4, None, 7)])
    assert topology.rows() == [(0, 0, 3, 0, 3), (1, 1, 4, 0, 7)]


def test_hierarchy_follows_the_number_of_sockets_and_nodes() -> None:
    two_nodes_each = CPUTopology.from_rows([(cpu, cpu, cpu // 4, cpu // 2, cpu // 2) for cpu in range(8)]).hierarchy
    assert not two_nodes_each.numa_first
    assert (two_nodes_each.outer, two_nodes_each.sockets) == ((0x0F, 0xF0), (0x0F, 0xF0))
    assert (two_nodes_each.inner, two_nodes_each.numa) == ((0x03, 0x0C, 0x30, 0xC0),) * 2
    assert two_nodes_each.inner_of_outer == ((0, 1), (2, 3))
    two_sockets_each = CPUTopology.from_rows([(cpu, cpu, cpu // 2, cpu // 4, 0) for cpu in range(8)]).hierarchy
    assert two_sockets_each.numa_first and two_sockets_each.numa == (0x0F, 0xF0)


def test_core_size_is_nought_where_cores_differ() -> None:
    same = CPUTopology.from_rows([(cpu, cpu % 2, 0, 0, 0) for cpu in range(4)])
    differ = CPUTopology.from_rows([(cpu, cpu % 2, 0, 0, 0) for cpu in range(3)])
    assert (same.hierarchy.core_size, differ.hierarchy.core_size) == (2, 0)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "no CPU is listed"),
        ([(0, 0, 0, 0, 0), (0, 1, 0, 0, 0)], "CPU 0 is listed twice"),
        ([(0, 0, 0, 0)], "a row needs cpu, core, socket, numa, uncore"),
        ([(0, 0, 0, 0, 0, 0)], "a row needs cpu, core, socket, numa, uncore"),
        ([(None, 0, 0, 0, 0)], "must be numbers"),
        ([(0, None, 0, 0, 0)], "must be numbers"),
        ([(0, 0, None, 0, 0)], "must be numbers"),
        ([(-1, 0, 0, 0, 0)], "CPU -1 is not within 0-65535"),
        ([(0, 0, 0, "0", 0)], "must be numbers"),
        ([(10**9, 0, 0, 0, 0)], "CPU 1000000000 is not within 0-65535"),
    ],
)
def test_rows_that_cannot_be_read(rows: list[Any], message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        CPUTopology.from_rows(rows)


@given(st.sampled_from(list(machines().values())), st.randoms(use_true_random=False))
def test_the_order_of_rows_does_not_matter(machine: dict[str, Any], random: Any) -> None:
    rows = list(machine["rows"])
    random.shuffle(rows)
    topology = CPUTopology.from_rows(rows)
    assert topology.rows() == CPUTopology.from_rows(machine["rows"]).rows()
    for units in (topology.cores, topology.sockets, topology.numa_nodes, topology.uncores):
        assert list(units) == sorted(units)
        assert sum(units.values()) == topology.cpus.mask
