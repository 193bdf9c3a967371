"""take() gives the kubelet's answers: 2386 recorded ones, those of the benchmark, and the kubelet's own tables."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from enforcer.core.allocation import SMTAlignmentError, take, validate_options
from enforcer.core.cpuset import EMPTY, CPUSet, union
from enforcer.core.distributing import distributed
from enforcer.core.errors import NotEnoughCPUs
from enforcer.core.packing import core_order, numa_order, socket_order
from tests.unit.tables import cases, kubelet_options, kubelet_topology, table


def cpus(text: str) -> CPUSet:
    return CPUSet.parse(text)


@pytest.mark.parametrize("distribute", [False, True], ids=["packed", "distributed"])
def test_oracle(distribute: bool) -> None:
    chosen = [case for case in cases("allocation_oracle") if case.options.distribute_numa is distribute]
    right = [case for case in chosen if case.expected is not None]
    assert [(case.name, str(case.answer())) for case in right if case.answer() != case.expected] == []
    assert len(right) == (1237 if distribute else 1108)


def test_oracle_refusals() -> None:
    refused = [case for case in cases("allocation_oracle") if case.error]
    for case in refused:
        with pytest.raises(NotEnoughCPUs) as raised:
            take(case.topology, case.available, case.count, replace(case.options, full_cores=False))
        assert case.error.endswith(f"requested={raised.value.requested}, available={raised.value.available}")
    assert len(refused) == 41


def test_groups_of_the_oracle_on_whole_cores_go_through_take() -> None:
    grouped = [case for case in cases("allocation_oracle") if case.group > 1 and case.expected is not None]
    assert sum(case.by_options for case in grouped) == 85


def test_answers_of_the_benchmark() -> None:
    found = {case.name: str(case.answer()) for case in cases("allocation_bench")}
    assert found == {case.name: str(case.expected) for case in cases("allocation_bench")}
    assert len(found) == 96


@pytest.mark.parametrize("case", table("take"), ids=lambda case: case["id"])
def test_take_table(case: dict[str, Any]) -> None:
    topology, available = kubelet_topology(case["topology"]), cpus(case["available"])
    options = replace(kubelet_options(case["options"]), distribute_numa=case["algorithm"] == "distributed")
    if case.get("cpu_group_size", 1) > 1:
        mask = distributed(topology.hierarchy, available.mask, case["wanted"], case["cpu_group_size"])
        assert str(CPUSet.from_mask(mask)) == case["expected"]
    elif "error" in case:
        with pytest.raises(NotEnoughCPUs) as raised:
            take(topology, available, case["wanted"], options)
        assert raised.value.requested == case["error"]["requested"]
        assert raised.value.available == case["error"]["available"]
    else:
        assert str(take(topology, available, case["wanted"], options)) == case["expected"]


@pytest.mark.parametrize("case", table("free_order"), ids=lambda case: case["id"])
def test_free_order_table(case: dict[str, Any]) -> None:
    topology, free = kubelet_topology(case["topology"]), cpus(case["available"]).mask
    units = topology.hierarchy
    whole_cores = {mask: core for core, mask in topology.cores.items()}
    found = {
        "sockets": [list(topology.sockets)[i] for i in socket_order(units, free) if not units.sockets[i] & ~free],
        "numa": [list(topology.numa_nodes)[i] for i in numa_order(units, free) if not units.numa[i] & ~free],
        "cores": [whole_cores[part] for part in core_order(units, free) if part in whole_cores],
        "cpus": [cpu for part in core_order(units, free) for cpu in CPUSet.from_mask(part)],
    }[case["level"]]
    if "free_in_order" in case:
        assert found == case["free_in_order"]
    else:
        assert sorted(found) == sorted(case["free_any_order"])


def exclusive(container: dict[str, Any]) -> int:
    """How many CPUs of its own a container of a Guaranteed pod gets (kubelet.md guaranteedCPUs)."""
    same = container["request"] == container["limit"]
    return container["request"] // 1000 if same and container["request"] % 1000 == 0 else 0


def admitted(case: dict[str, Any]) -> dict[str, CPUSet]:
    """Gives the pod's containers their CPUs as the kubelet does at admission."""
    topology, options = kubelet_topology(case["topology"]), kubelet_options(case["options"])
    # the amount reserved is chosen by the same options, but odd amounts are no error there
    reserved = take(topology, topology.cpus, case["num_reserved"], replace(options, full_cores=False))
    if case["reserved"] is not None:
        reserved = cpus(case["reserved"])
    found = {name: cpus(text) for name, text in case["assigned"].get(case["pod"]["uid"], {}).items()}
    free = cpus(case["default"]) - reserved
    for container in case["pod"]["containers"]:
        if container["name"] not in found and (count := exclusive(container)):
            found[container["name"]] = take(topology, free, count, options, hint=case.get("numa_hint"))
            free = free - found[container["name"]]
    return {c["name"]: found[c["name"]] for c in case["pod"]["containers"] if c["name"] in found}


@pytest.mark.parametrize("case", [c for c in table("allocate") if "error" not in c], ids=lambda case: case["id"])
def test_allocate_table(case: dict[str, Any]) -> None:
    found = admitted(case)
    if "expected" in case:
        assert {name: str(taken) for name, taken in found.items()} == case["expected"]
    else:
        uncore_of = kubelet_topology(case["topology"]).uncore_of
        assert sorted({uncore_of[cpu] for cpu in union(found.values())}) == case["expected_uncore"]


@pytest.mark.parametrize("case", [c for c in table("allocate") if "error" in c], ids=lambda case: case["id"])
def test_allocate_table_refusals(case: dict[str, Any]) -> None:
    error = case["error"]
    kind = SMTAlignmentError if error["kind"] == "smt-not-multiple" else NotEnoughCPUs
    with pytest.raises(kind) as raised:
        admitted(case)
    assert isinstance(raised.value, SMTAlignmentError | NotEnoughCPUs)
    assert raised.value.requested == error["requested"]
    if isinstance(raised.value, NotEnoughCPUs):
        assert raised.value.available == error.get("available_physical", error.get("available"))
    else:
        assert raised.value.core_size == error["cpus_per_core"]


@pytest.mark.parametrize("case", table("numa_affinity"), ids=lambda case: case["id"])
def test_numa_affinity_table(case: dict[str, Any]) -> None:
    taken = take(kubelet_topology(case["topology"]), cpus(case["default"]), case["wanted"], hint=case["numa_hint"])
    assert str(taken) == case["expected"]


@pytest.mark.parametrize("case", table("pod_sequences"), ids=lambda case: case["id"])
def test_pod_sequences_table(case: dict[str, Any]) -> None:
    """Init containers run one after the other: what they had is used again; a sidecar keeps it."""
    topology, pod = kubelet_topology(case["topology"]), case["pod"]
    reserved = take(topology, topology.cpus, case.get("num_reserved", 0))
    default, reusable = cpus(case["default"]), EMPTY
    found: dict[str, CPUSet] = {}
    for container in pod["init"] + pod["containers"]:
        if count := exclusive(container):
            taken = take(topology, (default - reserved) | reusable, count)
            found[container["name"]] = taken
            default = default - taken
            ends = container in pod["init"] and not container.get("restartable")
            reusable = reusable | taken if ends else reusable - taken
    for name, expected in case.get("expected", {}).items():
        assert str(found[name]) == expected
    assert str(default) == case["default_after_all_allocated"]
    if "then_remove" in case:
        released = found.pop(case["then_remove"]) - union(found.values())
        assert str(default | released) == case["default_after_remove"]


@pytest.mark.parametrize("case", [c for c in table("options") if c["kind"] in ("together", "with-machine")])
def test_options_table(case: dict[str, Any]) -> None:
    topology = kubelet_topology(case.get("topology", "topoDualSocketMultiNumaPerSocketHT"))
    assert (validate_options(kubelet_options(case["options"]), topology) == ()) is case["ok"]
