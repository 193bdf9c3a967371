"""status: what a person reads about a node is what the kernel and the agent say, at every width and size."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from enforcer.checkpoint import FORMAT, VERSION
from enforcer.config import Config
from enforcer.core.cpulimits import CPULimits
from enforcer.core.cpuset import EMPTY, CPUSet
from enforcer.core.kubepods import ContainerRef, PodRef, QoSClass
from enforcer.core.node import ContainerView, Group, NodeView, PodView, Role, SliceView
from enforcer.core.state import Assignment, Held, State, Unsatisfied, to_document
from enforcer.core.topology import CPUTopology
from enforcer.kernel import procfs
from enforcer.observe import Observer
from enforcer.status import AgentInfo, agent_info, cpu_map, read_agent, render, show, to_json

ANSI = re.compile(r"\x1b\[[0-9;]*m")


def cpus(text: str) -> CPUSet:
    return CPUSet.parse(text)


def machine(count: int, nodes: int = 1, threads: int = 1) -> CPUTopology:
    """Threads of a core are count/threads apart, as on x86."""
    cores = count // threads
    places = [(cpu, cpu % cores, cpu % cores * nodes // cores) for cpu in range(count)]
    return CPUTopology.from_rows([(cpu, core, node, node, None) for cpu, core, node in places])


def uid(number: int) -> str:
    return f"{number:08x}-0000-4000-8000-000000000000"


def pod_path(number: int) -> str:
    return f"/kubepods/pod{uid(number)}"


def hex_id(number: int) -> str:
    return f"{number:012x}" + "f" * 52


def container_path(number: int) -> str:
    return f"{pod_path(number)}/{hex_id(number)}"


def with_pod(view: NodeView, name: str, path: str) -> NodeView:
    return view.with_pod(PodView(PodRef(name, QoSClass.GUARANTEED, path), Group(path)))


def quota(milli: int) -> CPULimits:
    return CPULimits(milli * 100, 100000, shares=milli * 1024 // 1000)


def node(topology: CPUTopology, pods: Iterable[tuple[int, str, int]], allowed: str = "") -> NodeView:
    """Guaranteed pods as (number, effective set of its one container, milli-CPU; 0 = a sandbox)."""
    group = Group("/kubepods", topology.cpus, cpus(allowed) if allowed else topology.cpus)
    view = NodeView(1, topology, topology.cpus).with_slice(SliceView(group, QoSClass.GUARANTEED, True))
    for number, may, milli in pods:
        view = with_pod(view, uid(number), pod_path(number))
        ref = ContainerRef(uid(number), hex_id(number), None, container_path(number))
        limits = quota(milli) if milli else CPULimits(None, 100000, shares=2)
        role = Role.CONTAINER if milli else Role.SANDBOX
        view = view.with_container(ContainerView(ref, Group(ref.path, cpus(may), cpus(may)), role, limits=limits))
    return view


def owner(number: int, own: str, why: str = "quota 100000/100000, shares 1024") -> Assignment:
    return Assignment(container_path(number), pod_path(number), cpus(own), len(cpus(own)), 0.0, why)


def state(*owners: Assignment, **more: Any) -> State:
    return State(assignments={a.path: a for a in owners}, **more)


def info(reserved: str = "0", **more: Any) -> AgentInfo:
    return AgentInfo(**{"mode": "enforce", "running": True, "pid": 7, "reserved": cpus(reserved), **more})


TWO = node(machine(2), [(1, "1", 1000), (2, "0", 1000), (3, "0", 0)])
TWO_STATE = state(
    owner(1, "1"),
    unsatisfied={container_path(2): Unsatisfied(container_path(2), pod_path(2), 1, 0, 0, 0.0, "not enough CPUs")},
    shared=cpus("0"),
)


def test_two_cpus_whole() -> None:
    text = render(TWO, TWO_STATE, info(), width=100, colour=False)
    assert text.splitlines() == [
        "mode enforce, running, pid 7; cgroup v1",
        "",
        "[0=] [1A]",
        "a letter: CPUs of one container alone   = reserved",
        "",
        "capacity 2 (0-1);  for pods 2 (0-1);  reserved 1 (0);  allocatable 1 (1);  exclusive 1 (1);  free 0;",
        "shared pool 1 (0)",
        "",
        "   POD       CONTAINER     CLASS       ASKED  CPUS  WHY",
        "A  00000001  000000000001  guaranteed  1 CPU  1     1 CPU: quota 100000/100000, shares 1024",
        "!  00000002  000000000002  guaranteed  1 CPU  0     unsatisfied: asks for 1 CPU, none is free",
        "sandboxes and conmons: 1 on 0",
        "",
        "not as it should be:",
        "- pod 00000002 container 000000000002 asks for 1 CPU, has 0 of its own, none is free for it. Taken:",
        "  CPU 1 by pod 00000001 container 000000000001; CPU 0 reserved",
    ]


def test_each_class_has_its_mark() -> None:
    view = replace(node(machine(8), [(1, "2", 1000), (4, "5", 1000)], allowed="0-6"), online=cpus("0-7"))
    held = {
        pod_path(1): (Held(cpus("3"), 0.0),),
        pod_path(4): (Held(cpus("4"), 0.0, claim=True, until=9.0),),
    }
    made = state(owner(1, "2"), held=held, foreign={container_path(4): cpus("5")}, shared=cpus("0-1,6"))
    lines = cpu_map(view, made, info(present=cpus("0-8")), width=100, colour=False).splitlines()
    assert lines[0] == "[0=] [1.] [2A] [3+] [4~] [5%] [6.] [7-]"
    assert lines[1] == "offline: 8"
    for words in ("x offline", "+ held", "~ claimed", "% pinned by somebody else", "- not for pods", ". shared"):
        assert words in " ".join(lines[2:])


def test_without_a_root_any_cpu_is_for_pods() -> None:
    view = NodeView(1, machine(2), cpus("0-1"))
    text = render(view, State(), info(mode="audit"), width=100, colour=False)
    assert "[0=] [1.]" in text
    assert "allocatable 1 (1);  exclusive 0;  free 1 (1);" in text


def test_holds_are_named() -> None:
    made = state(held={pod_path(2): (Held(cpus("1"), 0.0),)}, shared=cpus("0"))
    text = render(TWO, made, info(), width=120, colour=False)
    assert re.search(r"^\+  00000002  - .* 1 +its container has gone, the next one gets them$", text, re.M)


def test_cores_and_numa_nodes_stay_together() -> None:
    text = cpu_map(node(machine(8, nodes=2, threads=2), []), State(), info(), width=80, colour=False)
    assert text.splitlines()[:4] == ["NUMA node 0", "  [0= 4.] [1. 5.]", "NUMA node 1", "  [2. 6.] [3. 7.]"]


def test_512_cpus_are_a_strip() -> None:
    view = node(machine(512, nodes=8, threads=2), [(1, "1-2,257-258", 4000)])
    text = cpu_map(view, state(owner(1, "1-2,257-258")), info("0,256"), width=80, colour=False)
    lines = text.splitlines()
    assert lines[:3] == [
        "NUMA node 0",
        "    0-31  =AA..... ........ ........ ........",
        "  256-287 =AA..... ........ ........ ........",
    ]
    assert len(lines) <= 26
    marks = "".join(re.findall(r"^ +\d+-\d+ +([=A. ]+)$", text, re.M))
    assert (marks.count("A"), marks.count("="), marks.count(".")) == (4, 2, 506)


@pytest.mark.parametrize("count", [2, 16, 96, 512])
@pytest.mark.parametrize("width", [1, 40, 80, 200])
def test_nothing_is_wider_than_the_terminal(count: int, width: int) -> None:
    view = node(machine(count, nodes=2, threads=1), [(n, str(n % count), 1000) for n in range(1, 60)])
    made = state(*(owner(n, str(n)) for n in range(1, min(count, 60))))
    for line in render(view, made, info(), width=width, colour=False).splitlines():
        assert len(line) <= max(width, 40)


@pytest.mark.parametrize("count", [2, 64, 512])
def test_colour_only_adds_colour(count: int) -> None:
    """The same characters with and without: nothing is said by colour alone."""
    view = node(machine(count), [(1, "1", 1000), (2, "0", 1000)])
    made = state(owner(1, "1"), unsatisfied=TWO_STATE.unsatisfied)
    plain, coloured = (render(view, made, info(), width=100, colour=colour) for colour in (False, True))
    assert "\x1b" not in plain
    assert coloured != plain
    assert ANSI.sub("", coloured) == plain


def test_more_owners_than_letters() -> None:
    view = node(machine(64), [(n, str(n), 1000) for n in range(1, 64)])
    text = cpu_map(view, state(*(owner(n, str(n)) for n in range(1, 64))), info(), width=100, colour=False)
    assert "[ 1A]" in text
    assert "[26Z]" in text
    assert "[51z]" in text
    assert "[52#]" in text


def test_why_the_shared_share() -> None:
    view = node(machine(4), [(1, "0-3", 1500), (2, "0-3", 2000)])
    odd = view.find_container(container_path(2))
    assert odd is not None
    view = view.with_container(replace(odd, limits=CPULimits(200000, 100000, shares=512)))
    text = render(view, State(), info(), width=120, colour=False)
    assert "shared pool: 1500m is no whole number of CPUs" in text
    assert "shared pool: its quota says 2 CPUs, its shares do not" in text


def test_many_shared_are_counted() -> None:
    view = node(machine(4), [(n, "0-3", 500) for n in range(1, 101)])
    text = render(view, State(), info(), width=120, colour=False)
    assert text.count("no whole number") == 20
    assert "more in the shared pool: 80 on 0-3" in text
    assert len(to_json(view, State(), info())["containers"]) == 100


def test_kernel_contradicts_the_agent() -> None:
    view = node(machine(4), [(1, "2", 1000), (2, "0-3", 500), (3, "0,3", 500)])
    text = " ".join(render(view, state(owner(1, "1")), info(), width=200, colour=False).split())
    assert "pod 00000001 container 000000000001 may run on 2, its own are 1" in text
    assert "pod 00000002 container 000000000002 may run on 1, that belongs to pod 00000001" in text
    assert "pod 00000003 container 000000000003 may run" not in text


def test_audit_is_told_as_what_would_be() -> None:
    """In audit mode nothing is written: that the kernel shows no pins is no finding."""
    view = node(machine(2), [(1, "0-1", 1000)])
    text = render(view, state(owner(1, "1")), info(mode="audit", would_write=3), width=120, colour=False)
    assert "owners are what enforce would make (3 writes)" in text
    assert "would get 1: quota" in text
    assert "not as it should be" not in text


def test_no_agent() -> None:
    text = render(TWO, State(), AgentInfo(notes=("no agent has left its state",)), width=100, colour=False)
    assert text.startswith("no word of an agent; cgroup v1\nno agent has left its state\n")
    assert "asks for 1 CPU, has none of its own" in text
    assert "[0.] [1.]" in text


def leave_state(file: Path, written: float, **more: Any) -> None:
    document = {"state": to_document(State()), "pid": 0, "reserved": "0", **more}
    whole = {"format": FORMAT, "version": VERSION, "boot_id": procfs.boot_id(), "document": document}
    file.write_text(json.dumps(whole))
    os.utime(file, (written, written))


@pytest.mark.parametrize(("state_written", "audit_written", "mode"), [(1, 2, "audit"), (2, 1, "enforce")])
def test_the_later_of_two_state_files_counts(
    tmp_path: Path, state_written: float, audit_written: float, mode: str
) -> None:
    """An agent that left or entered enforce has written both."""
    leave_state(tmp_path / "state.json", state_written, mode="enforce", pid=os.getpid())
    leave_state(tmp_path / "audit.json", audit_written, mode="audit", pid=os.getpid())
    assert read_agent(tmp_path, [])[1].mode == mode


def test_why_enforce_was_left(tmp_path: Path) -> None:
    leave_state(tmp_path / "audit.json", 1, mode="audit", left_enforce="the kubelet's policy is static")
    notes = ["a note"]
    told = read_agent(tmp_path, notes)[1]
    lines = render(TWO, State(), told, width=100, colour=False).splitlines()
    assert lines[:2] == ["mode audit, NOT running; cgroup v1", "it has left enforce: the kubelet's policy is static"]
    assert to_json(TWO, State(), told)["agent"]["left_enforce"] == "the kubelet's policy is static"
    assert notes == ["a note"]


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize(
    ("more", "well"),
    [
        ({"mode": "audit"}, True),
        ({"mode": "enforce", "pid": os.getpid(), "running": True}, True),
        ({"mode": "enforce"}, False),
        ({"mode": "audit", "state": to_document(TWO_STATE)}, False),
    ],
    ids=["audit", "enforcing", "stopped", "unsatisfied"],
)
def test_whether_all_is_well(
    tmp_path: Path, more: dict[str, Any], well: bool, as_json: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = more.get("running", False)
    monkeypatch.setattr("enforcer.status._runs", lambda document: running)
    leave_state(tmp_path / "state.json", 1, **more)
    node_now = cast(Observer, SimpleNamespace(view=TWO, problems={}))
    text, told = show(node_now, Config(state_dir=tmp_path), as_json=as_json, width=80, colour=False)
    assert told is well
    assert ("not as it should be" in text or '"problems": [\n' in text) is not well


def test_roots_that_are_not_there_are_named(tmp_path: Path) -> None:
    now = cast(Observer, SimpleNamespace(view=TWO, problems={}))
    config = Config(state_dir=tmp_path, roots=("/kubepods", "/nested/kubepod"))
    text, _ = show(now, config, as_json=False, width=100, colour=False)
    assert "`roots` in the config: there is no cgroup /nested/kubepod\n" in text


def test_state_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text("{")
    notes: list[str] = []
    assert read_agent(tmp_path, notes)[1].mode == ""
    assert notes[0].startswith(f"{tmp_path}/state.json cannot be read: ")
    assert notes[1:] == ["this is what the cgroups alone say"]


def test_state_that_only_root_may_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    leave_state(tmp_path / "state.json", 1)
    leave_state(tmp_path / "audit.json", 1)
    monkeypatch.setattr(Path, "read_bytes", refuse)
    told = read_agent(tmp_path, [])[1]
    assert told.notes == (
        f"what the agent says in {tmp_path} is for root only: try sudo",
        "this is what the cgroups alone say",
    )


def test_a_narrow_terminal_keeps_columns_and_figures_whole() -> None:
    lines = render(TWO, TWO_STATE, info(), width=60, colour=False).splitlines()
    for line in (
        "allocatable 1 (1);  exclusive 1 (1);  free 0;",
        "shared pool 1 (0)",
        "   POD       CONTAINER     CLASS       ASKED  CPUS",
        "A  00000001  000000000001  guaranteed  1 CPU  1",
        "    1 CPU: quota 100000/100000, shares 1024",
    ):
        assert line in lines


def test_conflicts_and_retries_of_the_document() -> None:
    document = {
        "mode": "enforce", "pid": 9, "reserved": "0", "strict": True, "retrying": 2,
        "state": {**to_document(TWO_STATE), "conflicts": {container_path(1): {"found": "0-1", "repairs": 12}}},
    }  # fmt: skip
    told = agent_info(document, running=False, present=EMPTY)
    text = " ".join(render(TWO, TWO_STATE, told, width=200, colour=False).split())
    assert "NOT running: what it pinned stays as it is" in text
    assert "- the agent does not run: nobody gets CPUs of its own, and no foreign write is repaired" in text
    assert "somebody else keeps writing CPUs 0-1 to pod 00000001 container 000000000001; 12 repairs" in text
    assert "2 writes were refused" in text
    assert "strict-cpu-reservation" in text


def test_hostile_names_stay_on_their_line() -> None:
    evil = "\x1b[2J\n" + "x" * 60
    view = node(machine(2), [(1, "0-1", 500)])
    pod = view.find_pod(pod_path(1))
    assert pod is not None
    ref = ContainerRef(evil, evil, None, pod_path(1) + "/" + evil)
    view = view.with_container(ContainerView(ref, Group(ref.path, cpus("0-1"), cpus("0-1")), limits=quota(500)))
    waiting = Unsatisfied(ref.path, pod_path(1), 2, 0, 1, 0.0)
    made = state(foreign={ref.path: cpus("1")}, unsatisfied={ref.path: waiting})
    text = render(view, made, info(), width=100, colour=False)
    assert "\x1b" not in text
    assert "\\x1b[2J\\x0a" in text
    assert "\x1b" not in json.dumps(to_json(view, made, info()))


def test_equal_beginnings_are_told_apart() -> None:
    view = node(machine(2), [])
    for name in ("static-pod-one", "static-pod-two"):
        view = with_pod(view, name, f"/kubepods/pod{name}")
        ref = ContainerRef(name, hex_id(1), None, f"/kubepods/pod{name}/{hex_id(1)}")
        view = view.with_container(ContainerView(ref, Group(ref.path), limits=quota(500)))
    text = render(view, State(), info(), width=120, colour=False)
    assert "static-pod-o" in text
    assert "static-pod-t" in text


def test_json_has_it_all() -> None:
    found = json.loads(json.dumps(to_json(TWO, TWO_STATE, info(present=cpus("0-2")))))
    assert found["agent"] == {"mode": "enforce", "running": True, "pid": 7, "left_enforce": None}
    assert found["figures"]["exclusive"] == "1"
    assert found["counts"] == {
        "online": 2, "allowed": 2, "reserved": 1, "allocatable": 1, "exclusive": 1, "held": 0, "foreign": 0, "free": 0,
        "shared": 1,
    }  # fmt: skip
    assert [(c["cpu"], c["class"], c["owner"], c["shared"], c["core"]) for c in found["cpus"]] == [
        (0, "reserved", None, True, 0),
        (1, "exclusive", container_path(1), False, 1),
        (2, "offline", None, False, None),
    ]
    rows = {row["path"]: (row["kind"], row["asked"], row["cpus"], row["own_cpus"]) for row in found["containers"]}
    assert rows == {
        container_path(1): ("owner", "1 CPU", "1", "1"),
        container_path(2): ("unsatisfied", "1 CPU", "0", None),
        container_path(3): ("sandbox", "-", "0", None),
    }
    assert found["unsatisfied"] == 1
    assert found["problems"][0].startswith("pod 00000002 container 000000000002 asks for 1 CPU")


def test_refusal_says_why_when_it_is_not_for_want_of_cpus() -> None:
    waiting = Unsatisfied(container_path(2), pod_path(2), 1, 0, 1, 0.0, "it would leave no CPU for the shared pool")
    made = replace(TWO_STATE, unsatisfied={waiting.path: waiting})
    assert "1 is free for it (it would leave no CPU for the shared pool)" in to_json(TWO, made, info())["problems"][0]
