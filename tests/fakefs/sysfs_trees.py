"""Makes sysfs trees from topology rows, in the form of today's kernels and in that of the old ones (masks only)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from enforcer.core.cpuset import CPUSet

Row = Sequence[int | None]


def write(root: Path, files: dict[str, str]) -> Path:
    """Write {path below root: text}, each with the newline the kernel ends a file with. Plain os calls: many files."""
    for folder in {name.rpartition("/")[0] for name in files}:
        os.makedirs(f"{root}/{folder}", exist_ok=True)  # noqa: PTH103
    for name, text in files.items():
        fd = os.open(f"{root}/{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.write(fd, f"{text}\n".encode())
        os.close(fd)
    return root


def modern(rows: Iterable[Row], *, possible: CPUSet | None = None, empty_nodes: Iterable[int] = ()) -> dict[str, str]:
    """The files of a 5.3 or newer kernel for rows (cpu, core, socket, numa, l3); the other possible CPUs are off."""
    rows = list(rows)
    online = CPUSet(_int(row[0]) for row in rows)
    possible = possible or online
    cpu = "devices/system/cpu"
    files = {f"{cpu}/online": str(online), f"{cpu}/possible": str(possible), f"{cpu}/present": str(possible)}
    files |= {f"{cpu}/isolated": "", f"{cpu}/offline": str(possible - online), f"{cpu}/smt/active": "1"}
    files |= {f"{cpu}/cpu{off}/online": "0" for off in possible - online}
    for row in rows:
        files |= _cpu(rows, row)
    for node in {row[3] for row in rows} - {None}:
        files[f"devices/system/node/node{node}/cpulist"] = str(_having(rows, 3, node))
    for node in empty_nodes:
        files[f"devices/system/node/node{node}/cpulist"] = ""
    return files


def masks_only(rows: Iterable[Row], *, possible: CPUSet | None = None) -> dict[str, str]:
    """The same as an old kernel has it: no lists, no ids of caches, no `online`, `possible`, `present`, `smt`."""
    files = {}
    for name, text in modern(rows, possible=possible).items():
        folder, _, last = name.rpartition("/")
        if last in _MASKS:
            files[f"{folder}/{_MASKS[last]}"] = CPUSet.parse(text).to_mask_text()
        elif last == "physical_package_id" or last == "level" or (last == "online" and folder[-1].isdigit()):
            files[name] = text
    return files


_MASKS = {"core_cpus_list": "thread_siblings", "shared_cpu_list": "shared_cpu_map", "cpulist": "cpumap"}


def _cpu(rows: list[Row], row: Row) -> dict[str, str]:
    cpu, core, socket, _, l3 = row
    base = f"devices/system/cpu/cpu{cpu}"
    files = {f"{base}/topology/core_cpus_list": str(_having(rows, 1, core))}
    files[f"{base}/topology/physical_package_id"] = str(socket)
    files |= {f"{base}/cache/index0/level": "1", f"{base}/cache/index1/level": "1"}
    files |= _cache(f"{base}/cache/index2", 2, _int(core), _having(rows, 1, core))
    if l3 is not None:
        files |= _cache(f"{base}/cache/index3", 3, l3, _having(rows, 4, l3))
    return files


def _cache(folder: str, level: int, number: int, shared: CPUSet) -> dict[str, str]:
    return {f"{folder}/level": str(level), f"{folder}/id": str(number), f"{folder}/shared_cpu_list": str(shared)}


def _having(rows: list[Row], column: int, value: int | None) -> CPUSet:
    return CPUSet(_int(row[0]) for row in rows if row[column] == value)


def _int(value: int | None) -> int:
    assert value is not None
    return value
