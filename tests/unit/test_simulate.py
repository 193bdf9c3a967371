"""simulate and described nodes: what is asked for is what is planned, and what is wrong is told all at once, by key."""

from __future__ import annotations

import argparse
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from enforcer import describe, record, simulate
from enforcer.config import Config
from enforcer.core.cpuset import CPUSet
from enforcer.core.errors import CannotWorkHereError, ConfigError
from enforcer.core.node import NodeView
from enforcer.describe import parse
from enforcer.record import Recorded
from enforcer.simulate import parse_pod, to_text, with_options
from enforcer.topology import to_json as topology_json
from enforcer.topology import to_text as topology_text

TWO_SOCKETS = {"sockets": 2, "cores": 4, "threads": 2, "numa": 2}


def pod(name: str, *cpus: object, **more: object) -> dict[str, object]:
    return {"name": name, "containers": [{"name": f"c{n}", "cpus": c} for n, c in enumerate(cpus, 1)], **more}


def node(*pods: object, **more: object) -> Recorded:
    return parse({"topology": TWO_SOCKETS, "reserved": "0,8", "pods": list(pods), **more}, "n.json")


def owners(done: simulate.Simulation) -> dict[str, str]:
    """Without the common beginning of the paths."""
    return {p.removeprefix("/kubepods/pod"): str(a.cpus) for p, a in done.after.assignments.items()}


# --- what is planned


def test_pods_get_what_enforce_gives_them() -> None:
    done = simulate.simulate(node(pod("db", 4), pod("web", "500m", qos="burstable"), pod("ml", 8)))
    assert owners(done) == {"db/c1": "1-2,9-10", "ml/c1": "4-7,12-15"}
    assert str(done.after.shared) == "0,3,8,11"
    assert not done.after.unsatisfied


@pytest.mark.parametrize("version", [1, 2])
def test_a_pod_that_comes_moves_the_others_first(version: int) -> None:
    done = simulate.simulate(node(pod("web", "500m", qos="burstable"), cgroup=version), [("add", "new=2+500m")])
    assert owners(done) == {"new/c1": "1,9"}
    writes = [(w.path.rpartition("/")[2], str(w.cpus)) for w in done.stages[1].done.plan.writes]
    moved = writes.index(("burstable" if version == 2 else "c1", "0,2-8,10-15"))
    assert moved < writes.index(("c1", "1,9")), "who must give up CPUs is written before the new owner"


def test_what_comes_free_goes_to_who_waits() -> None:
    full = node(pod("a", 6), pod("b", 8), pod("late", 4))
    done = simulate.simulate(full)
    assert set(done.after.unsatisfied) == {"/kubepods/podlate/c1"}
    done = simulate.simulate(full, [("remove", "b")])
    assert owners(done)["late/c1"] == "4-5,12-13"
    assert not done.after.unsatisfied


def test_changes_happen_in_their_order() -> None:
    full = node(pod("a", 6), pod("b", 8))
    first = simulate.simulate(full, [("add", "new=8"), ("remove", "b")])
    assert owners(first) == {"a/c1": "1-3,9-11", "new/c1": "4-7,12-15"}
    assert [stage.what for stage in first.stages] == [
        "the node as it is", "pod new comes (guaranteed: 8)", "pod b goes",
    ]  # fmt: skip
    second = simulate.simulate(full, [("remove", "b"), ("add", "new=8")])
    assert owners(second) == owners(first)
    assert len(first.stages[1].done.plan.state.unsatisfied) == 1
    assert not second.stages[2].done.plan.state.unsatisfied


def test_running_owners_stay_under_other_options_unless_afresh() -> None:
    running = node(pod("a", 2), pod("b", 2))
    before = simulate.simulate(running)
    pinned = node(
        {"name": "a", "containers": [{"name": "c1", "cpus": 2, "pinned": owners(before)["a/c1"]}]},
        {"name": "b", "containers": [{"name": "c1", "cpus": 2, "pinned": owners(before)["b/c1"]}]},
    )
    spread = with_options(pinned, "distribute-cpus-across-numa", None)
    assert owners(simulate.simulate(spread)) == owners(before)
    # the reserved CPUs have made node 0 the fuller one, and the option evens out what is left
    assert owners(simulate.simulate(spread, afresh=True)) == {"a/c1": "4,12", "b/c1": "1,9"}
    assert owners(before) == {"a/c1": "1,9", "b/c1": "2,10"}


def test_afresh_forgets_pins_on_both_versions() -> None:
    for version in (1, 2):
        moved = node({"name": "a", "containers": [{"name": "c", "cpus": 1, "pinned": "15"}]}, cgroup=version)
        assert owners(simulate.simulate(moved)) == {"a/c": "15"}
        assert owners(simulate.simulate(moved, afresh=True)) == {"a/c": "1"}


def test_somebody_elses_pin_is_left_alone() -> None:
    other = node({"name": "a", "containers": [{"name": "c", "cpus": 2, "pinned": "1-3"}]}, pod("b", 2))
    done = simulate.simulate(other)
    assert {p: str(c) for p, c in done.after.foreign.items()} == {"/kubepods/poda/c": "1-3"}
    assert not done.after.assignments["/kubepods/podb/c1"].cpus & CPUSet([1, 2, 3])


def test_another_reservation_can_be_tried() -> None:
    done = simulate.simulate(with_options(node(pod("a", 2)), None, "0-3"))
    assert owners(done)["a/c1"].startswith("4") or owners(done)["a/c1"].startswith("8")
    assert done.node.policy.reserved == CPUSet.parse("0-3")


def test_strict_reservation_keeps_others_off() -> None:
    done = simulate.simulate(with_options(node(pod("a", 2)), "strict-cpu-reservation", None))
    assert CPUSet([0, 8]).isdisjoint(done.after.shared)


def test_systemd_names_and_new_slices() -> None:
    """On a node with the systemd driver a pod that comes is named as the kubelet names it."""
    from dataclasses import replace

    from enforcer.core.kubepods import QoSClass
    from enforcer.core.node import Group, SliceView
    from enforcer.core.whatif import NewPod, add_pod

    every = CPUSet.parse("0-15")
    view = NodeView(2, node().view.topology, every)
    root = Group("/kubepods.slice", every, every)
    view = view.with_slice(SliceView(root, QoSClass.GUARANTEED, True))
    view, path = add_pod(view, NewPod("a-b", QoSClass.BURSTABLE, ()), 0.0)
    assert path == "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-poda_b.slice"
    view, path = add_pod(view, NewPod("x", QoSClass.GUARANTEED, ()), 0.0)
    assert path == "/kubepods.slice/kubepods-podx.slice"
    assert replace(view).find_pod(path) is not None


# --- --add, --remove, --options, --reserved


@pytest.mark.parametrize(
    ("text", "qos", "milli"),
    [
        ("new=6", "guaranteed", [6000]),
        ("new=2+500m", "guaranteed", [2000, 500]),
        ("new=1.5", "guaranteed", [1500]),
        ("new=500m:burstable", "burstable", [500]),
        ("new:besteffort", "besteffort", [None]),
        ("new=2:Guaranteed", "guaranteed", [2000]),
    ],
)
def test_pods_to_add_are_read(text: str, qos: str, milli: list[int | None]) -> None:
    made = parse_pod(text)
    assert (made.name, made.qos) == ("new", qos)
    assert [c.cpu.request for c in made.containers] == milli


WRONG_PODS = ["", "=", "new", "new=", "=6", "new=six", "new=-1", "new=0", "new=6:gold", "new=1:besteffort", "new=2++2",
              "new=99999999", "new=2:", "a b=2", "../x=2", "new=\x1b[2J"]  # fmt: skip


@pytest.mark.parametrize("text", WRONG_PODS)
def test_a_wrong_pod_is_told(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        simulate.simulate(node(), [("add", text)])
    assert caught.value.message.isprintable()


def test_a_name_that_is_taken_is_refused() -> None:
    with pytest.raises(ConfigError, match="is there already"):
        simulate.simulate(node(pod("db", 2)), [("add", "db=1")])


def test_a_pod_that_is_not_there_cannot_go() -> None:
    with pytest.raises(ConfigError, match="no pod 'bd'") as caught:
        simulate.simulate(node(pod("db", 2)), [("remove", "bd")])
    assert "db" in caught.value.hint


def test_unknown_options_offer_the_nearest() -> None:
    with pytest.raises(ConfigError, match="nearest: full-pcpus-only"):
        with_options(node(), "full-pcpu-only", None)
    with pytest.raises(ConfigError, match="cannot be used together"):
        with_options(node(), "full-pcpus-only,distribute-cpus-across-cores", None)
    with pytest.raises(ConfigError, match="not online"):
        with_options(node(), None, "0-99")
    with pytest.raises(ConfigError, match="--reserved"):
        with_options(node(), None, "all")


def test_no_kubepods_no_pod() -> None:
    from dataclasses import replace

    bare = replace(node(), view=NodeView(2, node().view.topology, node().view.online))
    assert simulate.simulate(bare).stages[0].done.plan.writes == ()
    assert any("no kubepods" in note for note in simulate.simulate(bare).notes)
    with pytest.raises(CannotWorkHereError, match="no kubepods"):
        simulate.simulate(bare, [("add", "a=1")])


def test_who_waited_under_a_root_that_has_gone_is_no_traceback() -> None:
    from dataclasses import replace

    from enforcer.source import enforced

    full = enforced(node(pod("big", 99)))
    bare = replace(full, view=NodeView(2, full.view.topology, full.view.online))
    assert any("nothing to pin" in line for line in to_text(simulate.simulate(bare), 80, coloured=False))


# --- the command


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    parser = argparse.ArgumentParser()
    simulate.add_arguments(parser)
    code = simulate.main(parser.parse_args(words), Config())
    return code, capsys.readouterr().out


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "n.json"
    document = {"topology": TWO_SOCKETS, "reserved": "0,8", "pods": [pod("db", 4), pod("ml", 8)]}
    path.write_text(json.dumps(document))
    return str(path)


def test_the_text_has_the_writes_the_reasons_and_both_maps(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run(capsys, "--node", file, "--add", "new=2")
    assert code == 0
    assert "pod new comes (guaranteed: 2)" in text
    assert "inherits -> 3,11" in text and "its own 2 CPUs" in text
    assert "3,11: whole core 3, wholly free, fits in the 2 CPUs still needed" in " ".join(text.split())
    before, after = text.split("CPUs before:")[1].split("CPUs after:")
    assert "[ 3. 11.]" in before and "[ 3" in after and "[ 3. 11.]" not in after


def test_the_exit_code_says_that_somebody_waits(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run(capsys, "--node", file, "--add", "new=6")
    assert code == 1
    flat = " ".join(text.split())
    assert "pod new container c1 cannot have what it asks for" in flat
    assert "asks for 6 CPUs, has 0 of its own, and 2 are free for it" in flat
    assert "pod ml: if this pod went, there would be room" in flat
    assert "Taken: - CPUs 1-2,9-10 by pod db container c1 - CPUs 4-7,12-15 by pod ml container c1" in flat


def test_json_says_the_same(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run(capsys, "--node", file, "--add", "new=2", "--json")
    document = json.loads(text)
    assert code == 0
    assert document["owners"]["/kubepods/podnew/c1"]["cpus"] == "3,11"
    assert [w["cpus"] for w in document["stages"][1]["writes"] if w["path"].endswith("podnew/c1")] == ["3,11"]
    assert document["cpus"][3] == {
        "cpu": 3, "core": 3, "numa": 0, "l3": 0, "before": None, "after": "/kubepods/podnew/c1",
    }  # fmt: skip
    assert document["reasons"]["/kubepods/podnew/c1"][0]["what"] == "whole core 3"


def test_from_a_record(tmp_path: Path, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    packed = tmp_path / "n.rec"
    record.save(describe.load(Path(file)), packed)
    assert run(capsys, "--from", str(packed), "--json") == run(capsys, "--node", file, "--json")


def test_a_record_given_as_a_description_is_told(tmp_path: Path, file: str) -> None:
    packed = tmp_path / "n.rec"
    record.save(describe.load(Path(file)), packed)
    with pytest.raises(ConfigError, match="not a described one"):
        describe.load(packed)


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_sentences_fit_the_terminal(columns: int) -> None:
    done = simulate.simulate(node(pod("db", 4), pod("ml", 8), pod("late", 6)))
    lines = to_text(done, columns, coloured=False)
    table = {line for line in lines if "->" in line}
    assert all(len(line) <= columns for text in lines for line in text.splitlines() if line not in table)


# --- descriptions that are wrong


def wrong(document: object) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse(document, "n.json")
    lines = caught.value.message.splitlines()
    assert all(line.isprintable() for line in lines)
    return lines


def test_more_pods_than_a_node_can_have_are_refused_at_once() -> None:
    many = [{"name": f"p{number}", "qos": "besteffort"} for number in range(300_000)]
    started = time.monotonic()
    assert wrong({"topology": {"cores": 4}, "pods": many}) == ["n.json: pods: 300000 of them; at most 2000 are taken"]
    in_one = [{"name": f"c{number}", "cpus": 1} for number in range(300_000)]
    lines = wrong({"topology": {"cores": 4}, "pods": [{"name": "p", "containers": in_one}]})
    assert lines == ["n.json: pods[0].containers: 300000 of them; at most 200 are taken"]
    assert time.monotonic() - started < 2


def test_a_thousand_mistakes_are_not_a_thousand_lines() -> None:
    lines = wrong({"topology": {"cores": 4}, "pods": [{"name": "!"} for _ in range(1000)]})
    assert len(lines) < 110
    assert re.fullmatch(r"n\.json: and \d+ more", lines[-1])


def test_everything_is_told_at_once() -> None:
    lines = wrong(
        {
            "cgroup": 3,
            "topology": {"sockets": 2, "cores": 4, "numa": 3, "sibling": "apart"},
            "options": ["full-pcpus-only", "by-moonlight"],
            "cfs-quota": "maybe",
            "pods": [
                {"name": "a", "containers": [{"name": "c"}]},
                {"name": "a", "qos": "gold", "containers": [{"name": "c", "cpus": "many"}]},
                {"name": "b", "qos": "besteffort", "containers": [{"name": "c", "cpus": 1, "pined": "1"}]},
            ],
            "weather": "fine",
        }
    )
    told = "\n".join(lines)
    for words in (
        "n.json: cgroup = 3",
        "topology.numa = 3",
        'topology.sibling = "apart": unknown key; nearest: siblings',
        'options = "by-moonlight"',
        'cfs-quota = "maybe"',
        "pods[0].containers[0].cpus = null: a guaranteed pod's containers all have a CPU limit",
        'pods[1].name = "a": pods[0] has that name already',
        'pods[1].qos = "gold"',
        'pods[1].containers[0].cpus = "many"',
        "pods[2].containers[0].cpus = 1: a besteffort pod's",
        'pods[2].containers[0].pined = "1": unknown key; nearest: pinned',
        'weather = "fine": unknown key',
    ):
        assert words in told


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"reserved": "0-15"}, "nothing is left to give out"),
        ({"reserved": "99"}, "not online here"),
        ({"reserved": "0-"}, 'wanted a CPU list such as "0-3,8"'),
        ({"reserved": "0", "reserved-amount": 1}, "only one of reserved and reserved-amount"),
        ({"reserved-amount": "0"}, "wanted an amount of CPUs above 0"),
        ({"online": "0-31"}, "must be CPUs of the topology"),
        ({"online": ""}, "at least one"),
        ({"allowed": "14-20"}, "must be online CPUs"),
        ({"isolated": "64"}, "are not in the topology"),
        ({"topology": None}, "is missing"),
        ({"topology": []}, "no CPU is listed"),
        ({"topology": [[0, 0, 0, 0, 0], [0, 0, 0, 0, 0]]}, "CPU 0 is listed twice"),
        ({"topology": [[0, 0]]}, "a row needs cpu, core, socket, numa, uncore"),
        ({"topology": [7]}, "a row needs"),
        ({"topology": {"cores": 100000}}, "wanted a whole number from 1 to 8192"),
        ({"topology": {"sockets": 8, "cores": 1024, "threads": 8}}, "at most 8192"),
        ({"topology": {"sockets": 2}}, "how many cores each socket has"),
        ({"topology": {"cores": 6, "l3": 4}}, "cannot be split evenly into 4"),
        ({"topology": {"cores": 4, "siblings": "near"}}, "topology.siblings"),
        ({"topology": {"cores": True}}, "topology.cores = true"),
        ({"options": "full-pcpus-only"}, "wanted a list"),
        ({"options": {"full-pcpus-only": "yes"}}, "options.full-pcpus-only"),
        ({"options": ["full-pcpus-only", "distribute-cpus-across-cores"]}, "cannot be used together"),
        ({"pods": {}}, "wanted a list of objects"),
        ({"pods": [7]}, "wanted an object with the keys"),
        ({"pods": [{"name": "a/b"}]}, "pods[0].name"),
        ({"pods": [{"name": "a", "containers": "c"}]}, "pods[0].containers"),
        ({"pods": [{"name": "a", "containers": [{"name": "pause", "cpus": 1}]}]}, "of that name already"),
        ({"pods": [{"name": "a", "containers": [{"name": "c", "cpus": 1, "pinned": "20"}]}]}, "CPUs 20 are not online"),
        ({"pods": [{"name": "a", "sandbox": 1}]}, "pods[0].sandbox = 1: wanted true or false"),
        ({"pods": [{"name": "\x1b[2J", "containers": []}]}, "pods[0].name"),
    ],
)
def test_what_contradicts_itself_is_told_by_key(change: dict[str, Any], words: str) -> None:
    lines = wrong({"topology": TWO_SOCKETS, **change})
    assert any(words in line for line in lines), lines


@pytest.mark.parametrize("document", [None, 7, "node", [], [[0, 0, 0, 0, 0]], {}])
def test_what_is_no_description(document: object) -> None:
    assert wrong(document)


def test_files_that_are_none(tmp_path: Path) -> None:
    for data, words in ((b"", "not JSON"), (b"[" * 100_000, "not JSON"), (b"\xff\xfe", "not JSON")):
        file = tmp_path / "n.json"
        file.write_bytes(data)
        with pytest.raises(ConfigError, match=words):
            describe.load(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        describe.load(tmp_path / "nothing")


@pytest.mark.parametrize("siblings", ["apart", "adjacent"])
def test_counts_make_the_machine(siblings: str) -> None:
    counts = {"sockets": 2, "cores": 4, "threads": 2, "numa": 4, "l3": 4, "siblings": siblings}
    topology = parse({"topology": counts}, "n").view.topology
    assert [len(units) for units in (topology.sockets, topology.numa_nodes, topology.uncores, topology.cores)] == [
        2, 4, 4, 8,
    ]  # fmt: skip
    assert str(topology.siblings(0)) == ("0,8" if siblings == "apart" else "0-1")
    assert str(CPUSet.from_mask(topology.numa_nodes[1])) == ("2-3,10-11" if siblings == "apart" else "4-7")


def test_fewer_cpus_online_and_allowed() -> None:
    made = parse({"topology": TWO_SOCKETS, "online": "0-14", "allowed": "0-7", "pods": [pod("a", 2)]}, "n")
    done = simulate.simulate(made)
    assert made.machine.online == CPUSet.parse("0-14") and made.machine.present == CPUSet.parse("0-15")
    assert done.after.assignments["/kubepods/poda/c1"].cpus <= CPUSet.parse("0-7")


# --- topology


def test_the_topology_map() -> None:
    counts = {"sockets": 2, "cores": 2, "threads": 2, "numa": 2, "l3": 4}
    made = parse({"topology": counts, "reserved": "0,4", "online": "0-6", "isolated": "2", "allowed": "0-5"}, "n")
    lines = topology_text(made, 100)
    text = "\n".join(lines)
    assert lines[0] == "2 sockets, 2 NUMA nodes, 4 L3 caches, 4 cores, 7 CPUs online"
    assert "  offline              7" in lines
    assert "    L3 0    [0= 4=]" in lines and "    L3 2    [2i 6-]" in lines and "    L3 3    [3.]" in lines
    assert "socket 0" in lines and "  NUMA node 1: CPUs 2-3,6" in lines
    assert "Cores differ in size" in text
    document = topology_json(made)
    assert document["offline"] == "7" and document["reserved"] == "0,4"
    assert document["cpus"][3] == {"cpu": 3, "core": 3, "socket": 1, "numa": 1, "l3": 3, "mark": "."}
    assert [level["level"] for level in document["levels"]] == ["NUMA node", "socket", "L3 cache", "core"]
    assert document["levels"][3]["sizes"] == [1, 2]


@pytest.mark.parametrize("columns", [40, 80])
def test_a_large_machine_fits(columns: int) -> None:
    made = parse({"topology": {"sockets": 2, "cores": 64, "threads": 2, "numa": 8, "l3": 32}}, "n")
    assert all(len(line) <= columns for line in topology_text(made, columns) if "  " not in line.strip())
