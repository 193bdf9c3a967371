"""topology: the machine as a table and as a map by socket, NUMA node, L3 cache and core; the allocator's units."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import Any, Final

from enforcer import source
from enforcer.config import Config
from enforcer.core.cpuset import CPUSet
from enforcer.core.kubepods import shown
from enforcer.core.topology import CPUTopology
from enforcer.layout import print_json, table, width, wrapped
from enforcer.output import say
from enforcer.record import Recorded
from enforcer.status.model import named

_LEFT: Final = 36  # columns of the table before its last
_MARKS: Final = {"=": "reserved", "i": "isolated (isolcpus)", "-": "not for pods", ".": "can be given out"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `topology`."""
    source.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def main(arguments: argparse.Namespace, config: Config) -> int:
    """Prints the machine; 0, or 1 when something about it is odd. Raises CannotWorkHereError, ConfigError."""
    node = source.read(arguments, config)
    if arguments.json:
        print_json(to_json(node))
    else:
        say("\n".join(to_text(node, width())))
    return 1 if node.machine.notes else 0


def levels(topology: CPUTopology) -> Mapping[str, Mapping[int, int]]:
    """Name of each level -> its units, in the order in which the allocator takes whole ones."""
    numa, sockets = ("NUMA node", topology.numa_nodes), ("socket", topology.sockets)
    first, second = (numa, sockets) if topology.hierarchy.numa_first else (sockets, numa)
    return dict((first, second, ("L3 cache", topology.uncores), ("core", topology.cores)))


def to_json(node: Recorded) -> dict[str, Any]:
    """Every CPU with its units, the sets, and the sizes that the allocator sees."""
    machine, topology = node.machine, node.view.topology
    sets = {name: str(getattr(machine, name)) for name in ("online", "possible", "present", "isolated", "nohz_full")}
    rows = [
        {"cpu": cpu, "core": core, "socket": socket, "numa": numa, "l3": l3, "mark": _mark(node, cpu)}
        for cpu, core, socket, numa, l3 in topology.rows()
    ]
    return {
        **sets,
        "offline": str(machine.present - machine.online),
        "for_pods": str(node.view.allowed),
        "reserved": str(node.policy.reserved),
        "smt_active": machine.smt_active,
        "levels": [
            {"level": name, "units": {str(unit): str(CPUSet.from_mask(mask)) for unit, mask in units.items()},
             "sizes": sorted(_sizes(units))}
            for name, units in levels(topology).items()
        ],
        "cpus": rows,
        "notes": list(machine.notes),
    }  # fmt: skip


def to_text(node: Recorded, columns: int) -> list[str]:
    """For a person."""
    lines = wrapped(_summary(node), columns)
    lines += table(list(_sets(node)), "  ")
    for note in node.machine.notes:
        lines += wrapped(shown(note, 400), columns, "! ")
    lines += ["", *wrapped("Units, in the order in which whole ones are taken:", columns)]
    lines += table(list(_units(node, columns)), "  ")
    lines += wrapped(_core_rule(node.view.topology), columns, "  ")
    lines += ["", *_map(node, columns)]
    used = {_mark(node, cpu) for cpu in node.machine.online}
    return [*lines, *wrapped("   ".join(f"{m} {text}" for m, text in _MARKS.items() if m in used), columns)]


def _summary(node: Recorded) -> str:
    topology = node.view.topology
    counts = ((topology.sockets, "socket"), (topology.numa_nodes, "NUMA node"), (topology.uncores, "L3 cache"),
              (topology.cores, "core"))  # fmt: skip
    told = [f"{len(units)} {name}{'' if len(units) == 1 else 's'}" for units, name in counts]
    smt = {None: "", True: "; SMT is on", False: "; SMT is off or not there"}[node.machine.smt_active]
    return f"{', '.join(told)}, {len(topology.cpus)} CPUs online{smt}"


def _sets(node: Recorded) -> Iterator[tuple[str, str]]:
    machine = node.machine
    rows = {
        "online": machine.online,
        "offline": machine.present - machine.online,
        "isolated (isolcpus)": machine.isolated,
        "nohz_full": machine.nohz_full,
        "for pods": node.view.allowed,
        "reserved": node.policy.reserved,
    }
    for name, cpus in rows.items():
        if cpus or name in ("online", "offline", "reserved"):
            yield name, f"{cpus or 'none'}"


def _units(node: Recorded, columns: int) -> Iterator[tuple[str, ...]]:
    yield "LEVEL", "NUMBER", "CPUS OF EACH", "WHICH"
    for name, units in levels(node.view.topology).items():
        which = "   ".join(f"{unit}: {CPUSet.from_mask(mask)}" for unit, mask in units.items())
        if name == "core" or len(which) > columns - _LEFT:
            which = "see the map"
        elif name == "L3 cache" and not node.policy.options.align_uncore:
            which += "   (as a unit only with prefer-align-cpus-by-uncorecache)"
        yield name, str(len(units)), " or ".join(map(str, sorted(_sizes(units)))), which


def _sizes(units: Mapping[int, int]) -> set[int]:
    return {mask.bit_count() for mask in units.values()}


def _core_rule(topology: CPUTopology) -> str:
    size = topology.hierarchy.core_size
    if size == 1:
        return "A core is one CPU: full-pcpus-only makes no difference here."
    if size:
        return f"With full-pcpus-only a container must ask for a multiple of {size} CPUs."
    return "Cores differ in size: with full-pcpus-only a container must ask for what whole cores add up to."


def _mark(node: Recorded, cpu: int) -> str:
    if cpu in node.policy.reserved:
        return "="
    if node.view.slices and cpu not in node.view.allowed:
        return "-"
    return "i" if cpu in node.machine.isolated else "."


def _map(node: Recorded, columns: int) -> Iterator[str]:
    """Socket, NUMA node in it, cache in that, cores in that; a unit that reaches beyond is told where it is cut."""
    topology = node.view.topology
    for socket, in_socket in topology.sockets.items():
        yield f"socket {socket}"
        for numa, in_numa in _within(topology.numa_nodes, in_socket):
            yield f"  NUMA node {numa}: {named(CPUSet.from_mask(in_numa))}"
            for cache, in_cache in _within(topology.uncores, in_numa):
                cores = " ".join(_core(node, mask) for _core_id, mask in _within(topology.cores, in_cache))
                yield from (line.replace("\xa0", " ") for line in wrapped(cores, columns, f"    L3 {cache:<4} "))


def _within(units: Mapping[int, int], mask: int) -> Iterator[tuple[int, int]]:
    yield from ((unit, inside & mask) for unit, inside in units.items() if inside & mask)


def _core(node: Recorded, mask: int) -> str:
    # a core is one word, so that no line breaks in it
    return "[" + "\xa0".join(f"{cpu}{_mark(node, cpu)}" for cpu in CPUSet.from_mask(mask)) + "]"
