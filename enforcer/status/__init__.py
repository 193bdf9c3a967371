"""status: a map of the CPUs, the containers and what each has and why, the figures, and what is not as it should be."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from enforcer.checkpoint import FORMAT, VERSION
from enforcer.config import Config
from enforcer.core.errors import EnforcerError
from enforcer.core.kubepods import shown
from enforcer.core.node import NodeView
from enforcer.core.state import State, from_document
from enforcer.kernel import procfs
from enforcer.kernel.sysfs import read_topology
from enforcer.observe import Observer
from enforcer.status.cpumap import coloured, draw, legend, plain
from enforcer.status.model import AgentInfo, CPUClass, Figures, Model, Row, RowKind, agent_info, gather

__all__ = ["NO_ROOT", "AgentInfo", "agent_info", "cpu_map", "read_agent", "render", "show", "to_json"]

NO_ROOT: Final = "there is no kubepods cgroup here, nor any of the `roots` in the config"

_LEAST_WIDTH: Final = 40
_MOST_SHARED: Final = 20
_MOST_PROBLEMS: Final = 20
_LEAST_WHY: Final = 24
_HEADS: Final = ("", "POD", "CONTAINER", "CLASS", "ASKED", "CPUS", "WHY")


def render(view: NodeView, state: State, info: AgentInfo, *, width: int, colour: bool) -> str:
    """For a person, at most `width` columns (not fewer than 40)."""
    width = max(width, _LEAST_WIDTH)
    model = gather(view, state, info)
    parts = [_head(model, width), _map(model, width, colour), _figures(model, width)]
    parts.append(list(_table(model, width, colour)))
    if model.problems:
        parts.append(_problems(model, width))
    return "\n\n".join("\n".join(part) for part in parts if part)


def cpu_map(view: NodeView, state: State, info: AgentInfo, *, width: int, colour: bool) -> str:
    """The map alone, with its legend."""
    return "\n".join(_map(gather(view, state, info), max(width, _LEAST_WIDTH), colour))


def to_json(view: NodeView, state: State, info: AgentInfo) -> dict[str, Any]:
    """For programs: every CPU, every container, the figures and the problems."""
    model = gather(view, state, info)
    figures = model.figures
    return {
        "agent": {
            "mode": info.mode or None,
            "running": info.running,
            "pid": info.pid or None,
            "left_enforce": info.left_enforce or None,
        },
        "cgroup_version": view.version,
        "figures": {name: str(getattr(figures, name)) for name in Figures.__slots__},
        "counts": {name: len(getattr(figures, name)) for name in Figures.__slots__},
        "strict_cpu_reservation": info.strict,
        "cpus": [_cpu_json(view, model, cpu) for cpu in model.cells],
        "containers": [_row_json(model, row) for row in model.rows],
        "unsatisfied": len(state.unsatisfied),
        "conflicts": {p: {"found": str(c), "repairs": n} for p, (c, n) in info.conflicts.items()},
        "drift_repairs": info.drift_repairs,
        "retrying": info.retrying,
        "would_write": info.would_write,
        "problems": list(model.problems),
        "notes": list(info.notes),
    }


def show(observer: Observer, config: Config, *, as_json: bool, width: int, colour: bool) -> tuple[str, bool]:
    """The node as the observer has scanned it, with what the agent says in its state file; and whether all is well."""
    notes = [f"{shown(p)}: {text}" for p, text in observer.problems.items()]
    if not observer.view.slices:
        notes.append(NO_ROOT)
    missing = [shown(r) for r in config.roots if r not in observer.view.slices and r not in observer.problems]
    if missing and observer.view.slices:
        notes.append(f"`roots` in the config: there is no cgroup {', '.join(missing)}")
    state, info = read_agent(config.state_dir, notes)
    well = not gather(observer.view, state, info).problems
    if as_json:
        return json.dumps(to_json(observer.view, state, info), indent=2), well
    return render(observer.view, state, info, width=width, colour=colour), well


# --- the agent's word


def read_agent(folder: Path, notes: list[str]) -> tuple[State, AgentInfo]:
    """What the agent with this state directory says, and the notes with what is to be said about that.

    The newer of the two state files counts (enforce and audit mode write one each); it is looked at, never moved.
    """
    present = read_topology().present
    before = len(notes)
    found = [one for name in ("state.json", "audit.json") if (one := _peek(folder / name, notes)) is not None]
    if not found:
        why = "" if len(notes) > before else f"no agent has left its state in {folder}: "
        notes.append(f"{why}this is what the cgroups alone say")
        return State(), AgentInfo(present=present, notes=tuple(notes))
    # One that changed its mode left a file of either: the later one is what it does now.
    _, document = max(found, key=lambda one: (_runs(one[1]), one[0]))
    try:
        state = from_document(document.get("state", {}))
        return state, agent_info(document, running=_runs(document), present=present, notes=notes)
    except (EnforcerError, AttributeError, KeyError, TypeError, ValueError) as error:
        notes.append(f"the agent's state in {folder} cannot be used: {error}")
        return State(), AgentInfo(present=present, notes=tuple(notes))


def _peek(path: Path, notes: list[str]) -> tuple[int, Mapping[str, Any]] | None:
    """(when it was written, its document); None and a note where it cannot be used."""
    try:
        written, whole = path.stat().st_mtime_ns, json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except PermissionError:
        if (note := f"what the agent says in {path.parent} is for root only: try sudo") not in notes:
            notes.append(note)
        return None
    except (OSError, ValueError) as error:
        notes.append(f"{path} cannot be read: {error}")
        return None
    ours = isinstance(whole, dict) and whole.get("format") == FORMAT and isinstance(whole.get("document"), dict)
    if not ours or whole.get("version") != VERSION or whole.get("boot_id") != procfs.boot_id():
        notes.append(f"{path} is not used: it is of another version, of another boot, or not ours")
        return None
    return written, whole["document"]


def _runs(document: Mapping[str, Any]) -> bool:
    """Whether the process that wrote it is still an agent of ours, as far as its name tells."""
    pid = document.get("pid")
    if not isinstance(pid, int) or pid <= 0:
        return False
    try:
        return b"enforcer" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False


# --- text


def _head(model: Model, width: int) -> list[str]:
    info = model.info
    if not info.mode:
        first = "no word of an agent"
    elif info.running:
        first = f"mode {info.mode}, running, pid {info.pid}"
    else:
        first = f"mode {info.mode}, NOT running" + (": what it pinned stays as it is" if model.enforced else "")
    lines = [f"{first}; cgroup v{model.view.version}"]
    if info.left_enforce:
        lines.append(f"it has left enforce: {info.left_enforce}")
    if info.mode == "audit":
        lines.append(f"audit: nothing is written; owners are what enforce would make ({info.would_write} writes)")
    return [line for text in (*lines, *info.notes) for line in _wrapped(text, width, "")]


def _map(model: Model, width: int, colour: bool) -> list[str]:
    lines = draw(model.view.topology, model.cells, width, coloured if colour else plain)
    return [*lines, *_wrapped("   ".join(legend(model.cells.values())), width, "")]


def _figures(model: Model, width: int) -> list[str]:
    f, info = model.figures, model.info
    named = [
        ("capacity", f.online), ("for pods", f.allowed), ("reserved", f.reserved), ("allocatable", f.allocatable),
        ("exclusive", f.exclusive), ("held", f.held), ("pinned by others", f.foreign), ("free", f.free),
        ("shared pool", f.shared),
    ]  # fmt: skip
    always = ("capacity", "reserved", "allocatable", "exclusive", "free", "shared pool")
    texts = [f"{name} {len(cpus)}{f' ({cpus})' if cpus else ''}" for name, cpus in named if cpus or name in always]
    if info.strict:
        texts.append("reserved CPUs are not shared (strict-cpu-reservation)")
    if info.drift_repairs:
        texts.append(f"{info.drift_repairs} foreign writes repaired")
    # A figure stays on one line with its name.
    whole = (text.replace(" ", "\xa0") for text in texts)
    return [line.replace("\xa0", " ") for line in _wrapped(";  ".join(whole), width, "")]


def _problems(model: Model, width: int) -> list[str]:
    texts = list(model.problems[:_MOST_PROBLEMS])
    if len(model.problems) > _MOST_PROBLEMS:
        texts.append(f"and {len(model.problems) - _MOST_PROBLEMS} more (--json has them all)")
    return ["not as it should be:", *(line for text in texts for line in _wrapped(text, width, "- "))]


def _table(model: Model, width: int, colour: bool) -> Iterator[str]:
    chosen = _chosen(model)
    texts = [_columns(row) for row in chosen]
    if not model.rows:
        yield "no containers"
        return
    # A long list of CPUs must not push all other rows apart.
    sizes = [min(24, max(len(text[at]) for text in (_HEADS, *texts))) for at in range(len(_HEADS) - 1)]
    yield from _line(_HEADS, sizes, width)
    for row, text in zip(chosen, texts, strict=True):
        red = colour and row.kind is RowKind.UNSATISFIED
        yield from (f"\x1b[31m{line}\x1b[0m" if red else line for line in _line(text, sizes, width))
    yield from (line for text in _left_out(model) for line in _wrapped(text, width, ""))


def _chosen(model: Model) -> list[Row]:
    """Owners and everything odd in full, the first few of the shared, no sandboxes."""
    shared = [row for row in model.rows if row.kind is RowKind.SHARED]
    return [r for r in model.rows if r.kind not in (RowKind.SHARED, RowKind.SANDBOX)] + shared[:_MOST_SHARED]


def _left_out(model: Model) -> Iterator[str]:
    shared = [row for row in model.rows if row.kind is RowKind.SHARED][_MOST_SHARED:]
    for name, rows in (
        ("more in the shared pool", shared),
        ("sandboxes and conmons", [row for row in model.rows if row.kind is RowKind.SANDBOX]),
    ):
        places = {str(row.got): 0 for row in rows}
        for row in rows:
            places[str(row.got)] += 1
        if rows:
            yield f"{name}: " + ", ".join(f"{number} on {cpus or 'no CPU'}" for cpus, number in places.items())


def _columns(row: Row) -> tuple[str, ...]:
    return (row.mark, row.pod, row.container, row.qos, row.asked, str(row.got) or "none", row.why)


def _line(row: Sequence[str], sizes: Sequence[int], width: int) -> Iterator[str]:
    """One row; its last column is wrapped beside the others, or below them where there is no room."""
    *cells, why = row
    left = "  ".join(f"{cell:<{size}}" for cell, size in zip(cells, sizes, strict=True))
    room = width - len(left) - 2
    if room >= _LEAST_WHY:
        first, *more = textwrap.wrap(why, room) or [""]
        yield f"{left}  {first}".rstrip()
        yield from (" " * (len(left) + 2) + line for line in more)
        return
    if len(left) <= width:
        yield left.rstrip()
    else:
        yield from textwrap.wrap("  ".join(cell for cell in cells if cell), width, subsequent_indent="    ")
    yield from textwrap.wrap(why, width, initial_indent="    ", subsequent_indent="    ")


def _wrapped(text: str, width: int, bullet: str) -> list[str]:
    return textwrap.wrap(text, width, initial_indent=bullet, subsequent_indent=" " * len(bullet)) or []


def _cpu_json(view: NodeView, model: Model, cpu: int) -> dict[str, Any]:
    cell, topology = model.cells[cpu], view.topology
    places = {"core": topology.core_of, "socket": topology.socket_of, "numa": topology.numa_of}
    return {
        "cpu": cpu,
        "class": str(cell.kind),
        "owner": cell.owner or None,
        "shared": cell.kind is not CPUClass.OFFLINE and cpu in model.figures.shared,
        **{name: of.get(cpu) for name, of in places.items()},
    }


def _row_json(model: Model, row: Row) -> dict[str, Any]:
    container = model.view.find_container(row.path)
    mine = model.state.assignments.get(row.path)
    return {
        "path": row.path,
        "pod_uid": container.ref.pod_uid if container else "",
        "id": container.ref.id if container else "",
        "qos": row.qos,
        "kind": str(row.kind),
        "asked": row.asked,
        "cpus": str(row.got),
        "own_cpus": str(mine.cpus) if mine else None,
        "why": row.why,
    }
