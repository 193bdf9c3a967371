"""The CPU map: every CPU by NUMA node and core, one character for what it is; ids beside it where there is room."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from enforcer.core.cpuset import CPUSet
from enforcer.core.topology import CPUTopology
from enforcer.status.model import CLASS_MARKS, Cell, CPUClass

# A text and the cell it stands for; gives the text with colour, or as it is.
Paint = Callable[[str, Cell], str]

_MOST_LINES: Final = 24
_GROUP: Final = 8

_COLOURS: Final = {
    CPUClass.HELD: "33", CPUClass.CLAIMED: "33", CPUClass.FOREIGN: "35", CPUClass.OUTSIDE: "2", CPUClass.RESERVED: "36",
    CPUClass.SHARED: "32", CPUClass.OFFLINE: "2",
}  # fmt: skip
_OWNER_COLOURS: Final = ("30;42", "30;43", "30;46", "30;45", "97;44", "97;41")

_MEANINGS: Final = {
    CPUClass.EXCLUSIVE: "a letter: CPUs of one container alone",
    CPUClass.HELD: "held for a pod",
    CPUClass.CLAIMED: "claimed for a pod that is starting",
    CPUClass.FOREIGN: "pinned by somebody else",
    CPUClass.OUTSIDE: "not for pods",
    CPUClass.RESERVED: "reserved",
    CPUClass.SHARED: "shared pool",
    CPUClass.OFFLINE: "offline",
}


def plain(text: str, cell: Cell) -> str:
    """A Paint without colour."""
    return text


def coloured(text: str, cell: Cell) -> str:
    """A Paint for terminals: each owner on a background of its own, as far as there are colours."""
    code = _COLOURS.get(cell.kind) or _OWNER_COLOURS[ord(cell.mark) % len(_OWNER_COLOURS)]
    return f"\x1b[{code}m{text}\x1b[0m"


def draw(topology: CPUTopology, cells: Mapping[int, Cell], width: int, paint: Paint) -> list[str]:
    """The lines of the map: each core in brackets with its CPUs' ids where that takes at most 24 lines, else a strip
    of one character for each core, with a line for each of its threads."""
    for style in (_detailed, _strips):
        lines = [line for node in topology.numa_nodes for line in _node(topology, node, cells, width, paint, style)]
        if len(lines) <= _MOST_LINES:
            break
    offline = CPUSet(cpu for cpu, cell in cells.items() if cell.kind is CPUClass.OFFLINE)
    return [*lines, *([f"offline: {offline}"] if offline else [])]


def legend(cells: Iterable[Cell]) -> list[str]:
    """What the characters mean, of those that occur."""
    kinds = {cell.kind for cell in cells}
    return [
        _MEANINGS[kind] if kind is CPUClass.EXCLUSIVE else f"{mark} {_MEANINGS[kind]}"
        for kind, mark in CLASS_MARKS.items()
        if kind in kinds
    ]


_Style = Callable[[list[list[Cell]], int, Paint], Iterator[str]]


def _node(
    topology: CPUTopology, node: int, cells: Mapping[int, Cell], width: int, paint: Paint, style: _Style
) -> list[str]:
    cpus = CPUSet.from_mask(topology.numa_nodes[node])
    cores = [
        [cells[cpu] for cpu in CPUSet.from_mask(mask)] for mask in topology.cores.values() if mask & cpus.mask
    ]
    head = [f"NUMA node {node}"] if len(topology.numa_nodes) > 1 else []
    indent = "  " if head else ""
    return head + [indent + line for line in style(cores, max(1, width - len(indent)), paint)]


def _detailed(cores: list[list[Cell]], width: int, paint: Paint) -> Iterator[str]:
    digits = max(len(str(cell.cpu)) for core in cores for cell in core)
    sizes = [(digits + 2) * len(core) + 2 for core in cores]
    line: list[str] = []
    used = 0
    for core, size in zip(cores, sizes, strict=True):
        if line and used + size > width:
            yield " ".join(line)
            line, used = [], 0
        line.append("[" + " ".join(paint(f"{cell.cpu:>{digits}}{cell.mark}", cell) for cell in core) + "]")
        used += size
    yield " ".join(line)


def _strips(cores: list[list[Cell]], width: int, paint: Paint) -> Iterator[str]:
    digits = max(len(str(cell.cpu)) for core in cores for cell in core)
    label = 2 * digits + 2
    groups = max(1, (width - label + 1) // (_GROUP + 1))
    for start in range(0, len(cores), groups * _GROUP):
        yield from _strip(cores[start : start + groups * _GROUP], digits, paint)


def _strip(cores: list[list[Cell]], digits: int, paint: Paint) -> Iterator[str]:
    for thread in range(max(len(core) for core in cores)):
        row = [core[thread] if thread < len(core) else None for core in cores]
        ids = [cell.cpu for cell in row if cell is not None]
        marks = [" " if cell is None else paint(cell.mark, cell) for cell in row]
        groups = ["".join(marks[at : at + _GROUP]) for at in range(0, len(marks), _GROUP)]
        yield f"{min(ids):>{digits}}-{max(ids):<{digits}} " + " ".join(groups)
