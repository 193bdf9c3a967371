"""read_topology() on trees made from real machines' rows, on raw dumps where they are, and on broken trees."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from enforcer.core.cpuset import CPUSet
from enforcer.core.errors import TopologyError
from enforcer.core.topology import CPUTopology
from enforcer.kernel.sysfs import Machine, read_topology
from tests.fakefs import sysfs_trees

TOP = Path(__file__).resolve().parents[2]
MACHINES: list[dict[str, Any]] = json.loads((TOP / "tests/data/topologies.json").read_text())["machines"]
DUMPS = Path(os.environ.get("ENFORCER_SYSFS_DUMPS") or TOP.parent / "shared/data/sysfs")
CPU = "devices/system/cpu"
TWO_CORES = [(0, 0, 0, 0, 0), (1, 1, 0, 0, 0), (2, 0, 0, 0, 0), (3, 1, 0, 0, 0)]

by_name = pytest.mark.parametrize("machine", MACHINES, ids=lambda m: m["name"])


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """In memory where there is such a folder, and gone after each test: 60,000 small files in all."""
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="ce-sysfs-", dir=shm if os.access(shm, os.W_OK) else None) as folder:
        yield Path(folder)


def units(topology: CPUTopology) -> dict[str, Any]:
    """All that a topology says; caches by their CPUs, in the order of their ids."""
    return {
        "cores": topology.cores,
        "sockets": topology.sockets,
        "numa": topology.numa_nodes,
        "uncores": list(topology.uncores.values()),
    }


def tree(root: Path, changes: dict[str, str | None], rows: Sequence[sysfs_trees.Row] = TWO_CORES) -> Path:
    """A modern tree with some files changed, or (None) left out."""
    files: dict[str, str | None] = {**sysfs_trees.modern(rows), **changes}
    return sysfs_trees.write(root, {name: text for name, text in files.items() if text is not None})


@by_name
def test_rows_to_modern_tree_and_back(machine: dict[str, Any], tmp_path: Path) -> None:
    possible = CPUSet.parse(machine["possible"] or "") or None
    nodes = machine["numa_without_cpus"]
    sysfs_trees.write(tmp_path, sysfs_trees.modern(machine["rows"], possible=possible, empty_nodes=nodes))
    read = read_topology(tmp_path)
    wanted = CPUTopology.from_rows(machine["rows"])
    assert read.topology.rows() == wanted.rows()
    assert read.online == wanted.cpus
    assert read.possible == (possible or wanted.cpus)


@by_name
def test_rows_to_old_kernels_tree_and_back(machine: dict[str, Any], tmp_path: Path) -> None:
    """No `online` file: offline CPUs are those whose own `online` says 0. L3 caches have no ids there."""
    rows = machine["rows"]
    possible = CPUSet(row[0] for row in rows) | CPUSet((300, 301))
    sysfs_trees.write(tmp_path, sysfs_trees.masks_only(rows, possible=possible))
    read = read_topology(tmp_path)
    wanted = CPUTopology.from_rows(rows)
    assert {**units(read.topology), "uncores": None} == {**units(wanted), "uncores": None}
    assert sorted(read.topology.uncores.values()) == sorted(wanted.uncores.values())
    assert (read.online, read.present, read.possible) == (wanted.cpus, possible, possible)
    assert read.smt_active is None


@pytest.mark.parametrize("machine", [m for m in MACHINES if len(m["rows"]) <= 96], ids=lambda m: m["name"])
def test_offline_cpus_shrink_their_units(machine: dict[str, Any], tmp_path: Path) -> None:
    """Every 5th CPU off, CPU 0 among them: a core is then named by its lowest thread that is left."""
    rows = [row for row in machine["rows"] if row[0] % 5] or machine["rows"]
    threads: dict[int, list[int]] = {}
    for cpu, core, *_ in rows:
        threads.setdefault(core, []).append(cpu)
    sysfs_trees.write(tmp_path, sysfs_trees.modern(rows, possible=CPUSet(row[0] for row in machine["rows"])))
    wanted = [(cpu, min(threads[core]), *rest) for cpu, core, *rest in rows]
    assert read_topology(tmp_path).topology.rows() == CPUTopology.from_rows(wanted).rows()


def dumps() -> list[tuple[Path, dict[str, Any]]]:
    if not DUMPS.is_dir():
        return []
    sources = json.loads((DUMPS / "SOURCES.json").read_text())
    machines = {machine["source"]: machine for machine in MACHINES}
    found = ((DUMPS / f"{name}.json", machines.get(source)) for name, source in sources.items())
    return [(path, machine) for path, machine in found if path.is_file() and machine]


@pytest.mark.skipif(
    not dumps(), reason="no raw sysfs dumps here: set ENFORCER_SYSFS_DUMPS to a folder of them, with its SOURCES.json"
)
@pytest.mark.parametrize(("path", "machine"), dumps(), ids=lambda value: value.stem if isinstance(value, Path) else "")
def test_raw_dump_gives_recorded_topology(path: Path, machine: dict[str, Any], tmp_path: Path) -> None:
    read = read_topology(sysfs_trees.write(tmp_path, json.loads(path.read_text())))
    wanted = CPUTopology.from_rows(machine["rows"])
    if path.stem == "old-kernel-masks-only":  # no cache ids: the record numbers them 0-3, we by lowest CPU
        assert sorted(read.topology.uncores.values()) == sorted(wanted.uncores.values())
        assert read.topology.cores == wanted.cores and read.topology.numa_nodes == wanted.numa_nodes
    else:
        assert units(read.topology) == units(wanted)
    for name in ("online", "possible", "present", "isolated"):
        if machine[name] is not None:
            assert str(getattr(read, name)) == machine[name], name


@pytest.mark.skipif(not (DUMPS / "loongarch-kvm-socket-per-cpu.json").is_file(), reason="this raw dump is not here")
def test_raw_dump_of_a_guest_with_a_socket_for_each_cpu(tmp_path: Path) -> None:
    """The one dump that topologies.json has no rows of: 32 CPUs, each a socket, under one L3 and one node."""
    files = json.loads((DUMPS / "loongarch-kvm-socket-per-cpu.json").read_text())
    topology = read_topology(sysfs_trees.write(tmp_path, files)).topology
    assert topology.rows() == [(cpu, cpu, cpu, 0, 0) for cpu in range(32)]


def test_no_raw_dump_is_left_out() -> None:
    """A dump whose source is not in topologies.json would go untested in silence."""
    if not DUMPS.is_dir():
        pytest.skip("no raw sysfs dumps here: set ENFORCER_SYSFS_DUMPS to a folder of them")
    there = {path.stem for path in DUMPS.glob("*.json")} - {"SOURCES", "loongarch-kvm-socket-per-cpu"}
    assert {path.stem for path, _ in dumps()} == there


@pytest.mark.parametrize(("text", "wanted"), [("1", True), ("0", False), (None, None)])
def test_smt_active(text: str | None, wanted: bool | None, tmp_path: Path) -> None:
    assert read_topology(tree(tmp_path, {f"{CPU}/smt/active": text})).smt_active is wanted


@pytest.mark.parametrize(("text", "wanted"), [("2-3", "2-3"), ("", ""), ("(null)", ""), (None, "")])
def test_nohz_full(text: str | None, wanted: str, tmp_path: Path) -> None:
    assert str(read_topology(tree(tmp_path, {f"{CPU}/nohz_full": text})).nohz_full) == wanted


def test_isolated(tmp_path: Path) -> None:
    assert str(read_topology(tree(tmp_path, {f"{CPU}/isolated": "1,3"})).isolated) == "1,3"


def test_34_numa_nodes_two_with_cpus(tmp_path: Path) -> None:
    """GB200: most nodes have memory only."""
    rows = [(cpu, cpu, cpu // 72, cpu // 72, cpu // 72) for cpu in range(144)]
    sysfs_trees.write(tmp_path, sysfs_trees.modern(rows, empty_nodes=range(2, 34)))
    assert list(read_topology(tmp_path).topology.numa_nodes) == [0, 1]


def test_numa_from_cpu_links_without_node_folder(tmp_path: Path) -> None:
    root = tree(tmp_path, {"devices/system/node/node0/cpulist": None})
    for cpu in range(4):
        (root / f"{CPU}/cpu{cpu}/node{cpu % 2 + 7}").mkdir()
    assert read_topology(root).topology.numa_nodes == {7: 0b0101, 8: 0b1010}


def test_overlapping_nodes_are_not_believed(tmp_path: Path) -> None:
    machine = read_topology(tree(tmp_path, {f"devices/system/node/node{n}/cpulist": "0-3" for n in range(8)}))
    assert machine.topology.numa_nodes == {0: 0b1111}
    assert "nodes [0, 1, 2, 3, 4, 5, 6, 7] all list CPUs 0-3" in "".join(machine.notes)


def test_cpus_of_no_node_are_noted(tmp_path: Path) -> None:
    changes = {"devices/system/node/node0/cpulist": None, "devices/system/node/node1/cpulist": "1,3"}
    machine = read_topology(tree(tmp_path, changes))
    assert machine.topology.numa_nodes == {0: 0b0101, 1: 0b1010}
    assert "no node lists CPUs 0,2: taken as node 0" in "".join(machine.notes)


@pytest.mark.parametrize("package", ["-1", "-7", None])
def test_unknown_socket_is_one_socket_and_noted(package: str | None, tmp_path: Path) -> None:
    machine = read_topology(tree(tmp_path, {f"{CPU}/cpu{n}/topology/physical_package_id": package for n in range(4)}))
    assert machine.topology.sockets == {-1: 0b1111}
    assert "no physical_package_id for CPUs 0-3" in "".join(machine.notes)


def test_cpu_without_topology_is_its_own_core(tmp_path: Path) -> None:
    changes: dict[str, str | None] = {f"{CPU}/cpu{n}/topology/core_cpus_list": None for n in range(4)}
    machine = read_topology(tree(tmp_path, changes))
    assert list(machine.topology.cores) == [0, 1, 2, 3]
    assert "CPUs 0-3" in "".join(machine.notes)


def test_lists_that_name_offline_cpus(tmp_path: Path) -> None:
    """Some kernels leave them in: s390 in its nodes, hypervisors in the lists of threads and caches."""
    changes: dict[str, str | None] = {"devices/system/node/node0/cpulist": "0-7"}
    for cpu in range(4):
        changes[f"{CPU}/cpu{cpu}/topology/core_cpus_list"] = f"{cpu % 2},{cpu % 2 + 2},{cpu % 2 + 4}"
    machine = read_topology(tree(tmp_path, changes | caches(3, id="0", shared_cpu_list="0-7")))
    assert machine.topology.rows() == CPUTopology.from_rows(TWO_CORES).rows()
    assert machine.notes == ()


def caches(n: int, **files: str) -> dict[str, str | None]:
    return {f"{CPU}/cpu{cpu}/cache/index{n}/{name}": text for cpu in range(4) for name, text in files.items()}


def test_l3_wins_over_l4_and_l4_over_nothing(tmp_path: Path) -> None:
    l4 = caches(4, level="4", id="9", shared_cpu_list="0-3")
    assert list(read_topology(tree(tmp_path / "both", l4)).topology.uncores) == [0]
    without_l3 = sysfs_trees.modern([row[:4] + (None,) for row in TWO_CORES]) | caches(
        3, level="4", id="9", shared_cpu_list="0-3"
    )
    sysfs_trees.write(tmp_path / "l4", {name: text for name, text in without_l3.items() if text is not None})
    assert list(read_topology(tmp_path / "l4").topology.uncores) == [9]


def test_l3_at_another_index(tmp_path: Path) -> None:
    root = tree(tmp_path, caches(2, level="3", id="5", shared_cpu_list="0-3") | caches(3, level="2"))
    assert list(read_topology(root).topology.uncores) == [5]


def test_l2_is_never_an_uncore_cache(tmp_path: Path) -> None:
    rows = [(cpu, core, 6, 0, None) for cpu, core, *_ in TWO_CORES]
    assert read_topology(tree(tmp_path, {}, rows)).topology.uncores == {6: 0b1111}


def test_same_id_on_two_caches_is_not_believed(tmp_path: Path) -> None:
    """Guests that number the caches per socket: ids would make one cache of two."""
    rows = [(cpu, cpu, cpu // 2, 0, cpu // 2) for cpu in range(4)]
    machine = read_topology(tree(tmp_path, caches(3, id="0"), rows))
    assert machine.topology.uncores == {0: 0b0011, 2: 0b1100}
    assert "2 L3 caches have ids [0]" in "".join(machine.notes)


def test_l3_lists_that_contradict_are_not_believed(tmp_path: Path) -> None:
    rows = [(cpu, cpu, 4, 0, cpu // 2) for cpu in range(4)]
    machine = read_topology(tree(tmp_path, {f"{CPU}/cpu0/cache/index3/shared_cpu_list": "0-2"}, rows))
    assert machine.topology.uncores == {4: 0b1111}
    assert "contradict" in "".join(machine.notes)


def test_l3_of_only_some_cpus_is_noted(tmp_path: Path) -> None:
    """Low-power cores outside the L3 (Meteor Lake): the socket stands in, as in the kubelet."""
    rows = [(0, 0, 0, 0, 1), (1, 1, 0, 0, 1), (2, 2, 0, 0, None)]
    machine = read_topology(tree(tmp_path, {}, rows))
    assert machine.topology.uncores == {0: 0b100, 1: 0b011}
    assert "CPUs 2 have no L3 cache" in "".join(machine.notes)


def test_quiet_on_a_sound_machine(tmp_path: Path) -> None:
    assert read_topology(tree(tmp_path, {})).notes == ()


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        (f"{CPU}/online", "0-3,x", "'x' is not a CPU id"),
        (f"{CPU}/online", "", "no CPU is online"),
        (f"{CPU}/possible", "4-2", "goes down"),
        (f"{CPU}/cpu2/topology/core_cpus_list", "0-2000000000", "not a CPU id"),
        (f"{CPU}/cpu2/topology/core_cpus_list", "0", "without CPU 2 itself"),
        (f"{CPU}/cpu2/topology/core_cpus_list", "2", "CPU 0 says its threads are 0,2"),
        (f"{CPU}/cpu2/topology/physical_package_id", "three", "wanted a number, found 'three'"),
        (f"{CPU}/cpu2/topology/physical_package_id", "7", "CPU 0 of the same core says 0"),
        (f"{CPU}/cpu2/cache/index3/level", "", "wanted a number, found ''"),
        ("devices/system/node/node0/cpulist", "0-3\x00", "is not a CPU id"),
    ],
)
def test_bad_content_is_told_with_its_path(name: str, text: str, told: str, tmp_path: Path) -> None:
    root = tree(tmp_path, {name: text})
    with pytest.raises(TopologyError) as caught:
        read_topology(root)
    assert told in str(caught.value)
    assert str(root / CPU) in str(caught.value) or name in str(caught.value)


def test_nothing_mounted(tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match="no CPU is online"):
        read_topology(tmp_path)


def test_unreadable_file_is_told(tmp_path: Path) -> None:
    root = tree(tmp_path, {f"{CPU}/isolated": None})
    (root / CPU / "isolated").mkdir()
    with pytest.raises(TopologyError, match=f"{CPU}/isolated: cannot be read: Is a directory"):
        read_topology(root)


class Unplugging:
    """A tree where `online` changes while it is read: the first `times` readings of it say more CPUs than there are."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
        self.left = times
        self.real = os.open
        monkeypatch.setattr(os, "open", self.open)

    def open(self, path: str, flags: int) -> int:
        if path.endswith("cpu/online") and self.left > 0:
            self.left -= 1
            Path(path).write_text("0-3\n" if self.left % 2 else "0-1\n")
        return self.real(path, flags)


def test_hotplug_while_reading_starts_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tree(tmp_path, {})
    with monkeypatch.context() as patch:
        Unplugging(patch, times=3)
        machine = read_topology(root)
    assert str(machine.online) == str(machine.topology.cpus) == "0-1"


def test_hotplug_without_end_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tree(tmp_path, {})
    with monkeypatch.context() as patch:
        Unplugging(patch, times=1000)
        with pytest.raises(TopologyError, match="online changed during each of"):
            read_topology(root)


def test_list_longer_than_a_page(tmp_path: Path) -> None:
    """kernfs hands out at most a page at each read."""
    rows = [(cpu, cpu, 0, 0, None) for cpu in range(0, 4000, 2)]
    online = CPUSet(row[0] for row in rows)
    assert len(str(online)) > 8192
    sysfs_trees.write(tmp_path, {f"{CPU}/online": str(online)})
    assert read_topology(tmp_path).online == online


def test_512_cpus_are_read_quickly(tmp_path: Path) -> None:
    rows = [(cpu, cpu % 256, cpu % 256 // 128, cpu % 256 // 32, cpu % 256 // 8) for cpu in range(512)]
    sysfs_trees.write(tmp_path, sysfs_trees.modern(rows))
    best = min(timed(tmp_path) for _ in range(3))
    assert best < 0.1, f"{best * 1000:.0f} ms for 512 CPUs"


def timed(root: Path) -> float:
    start = time.process_time()
    assert len(read_topology(root).topology.uncores) == 32
    return time.process_time() - start


def test_this_machine() -> None:
    machine: Machine = read_topology()
    assert machine.online == machine.topology.cpus
    assert CPUSet(os.sched_getaffinity(0)) <= machine.online <= machine.present <= machine.possible
