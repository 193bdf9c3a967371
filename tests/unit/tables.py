"""Loads the allocation data in tests/data: made-up and real machines, the kubelet's tables, and its answers."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from enforcer.core.allocation import AllocationOptions, take
from enforcer.core.cpuset import CPUSet
from enforcer.core.distributing import distributed
from enforcer.core.topology import CPUTopology

DATA = Path(__file__).parent.parent / "data"

KUBELET_NAMES = {
    "full-pcpus-only": "full_cores",
    "distribute-cpus-across-numa": "distribute_numa",
    "distribute-cpus-across-cores": "distribute_cores",
    "align-by-socket": "align_socket",
    "prefer-align-cpus-by-uncorecache": "align_uncore",
}


@dataclass(frozen=True)
class Case:
    """One allocation of the oracle or the benchmark; `expected` is None where `error` says why there is none."""

    name: str
    topology: CPUTopology
    available: CPUSet
    count: int
    options: AllocationOptions
    group: int
    expected: CPUSet | None
    error: str
    kubelet_ns: int

    @cached_property
    def by_options(self) -> bool:
        """Whether `take` can express the case: groups of CPUs exist there only as whole cores, all of them free."""
        if self.group == 1:
            return True
        free = self.topology.hierarchy.cpus & self.available.mask
        whole = all(core & free in (0, core) for core in self.topology.hierarchy.cores)
        return whole and self.group == self.topology.hierarchy.core_size and self.count % self.group == 0

    def answer(self) -> CPUSet:
        """Ours, from `take` where that can express the case; raises what it raises."""
        if self.by_options:
            return take(self.topology, self.available, self.count, self.options)
        units, one_socket = self.topology.hierarchy, self.options.align_socket
        return CPUSet.from_mask(distributed(units, self.available.mask, self.count, self.group, one_socket=one_socket))


@cache
def cases(name: str) -> tuple[Case, ...]:
    """All cases of a *.jsonl.gz file in tests/data."""
    topologies: dict[str, CPUTopology] = {}
    found = []
    with gzip.open(DATA / f"{name}.jsonl.gz", "rt", encoding="ascii") as lines:
        for line in lines:
            entry = json.loads(line)
            if entry.get("kind") == "topology":
                topologies[entry["id"]] = CPUTopology.from_rows(entry["cpus"])
            elif "want" in entry:
                found.append(_case(entry, topologies[entry["topology"]]))
    return tuple(found)


def _case(entry: dict[str, Any], topology: CPUTopology) -> Case:
    given = entry["options"]
    expected = entry.get("expected", entry.get("result"))
    group = given.get("cpu_group_size", 1)
    options = AllocationOptions(
        distribute_numa=entry["algorithm"] == "distributed",
        distribute_cores=given.get("sorting") == "spread",
        full_cores=group > 1,
        align_socket=given.get("align_by_socket", False),
        align_uncore=given.get("prefer_align_uncore", False),
    )
    return Case(
        name=str(entry.get("name", entry.get("id"))),
        topology=topology,
        available=CPUSet.parse(entry["available"]),
        count=entry["want"],
        options=options,
        group=group,
        expected=None if expected is None else CPUSet.parse(expected),
        error=entry.get("error", ""),
        kubelet_ns=entry.get("kubelet_go_ns", {}).get("median", 0),
    )


@cache
def _kubelet() -> dict[str, Any]:
    return json.loads((DATA / "kubelet_tables.json").read_text())


def table(name: str) -> list[dict[str, Any]]:
    """A table of kubelet_tables.json; its `format` entry explains the fields."""
    return _kubelet()["tables"][name]


@cache
def kubelet_topology(name: str) -> CPUTopology:
    """A topology of the kubelet's tests, from its map; the counters that it declares are not used."""
    cpus = _kubelet()["topologies"][name]["cpu"]
    return CPUTopology.from_rows([int(cpu), *units] for cpu, units in cpus.items())


def kubelet_options(names: dict[str, str] | list[str]) -> AllocationOptions:
    """From the kubelet's option names, as a list of those that are on or with values "true" and "false"."""
    on = [name for name, value in names.items() if value == "true"] if isinstance(names, dict) else names
    return AllocationOptions(**{KUBELET_NAMES[name]: True for name in on if name in KUBELET_NAMES})


@cache
def machines() -> dict[str, dict[str, Any]]:
    """The real machines of topologies.json, by name."""
    return {machine["name"]: machine for machine in json.loads((DATA / "topologies.json").read_text())["machines"]}
