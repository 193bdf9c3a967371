"""explain: every "because" is true of the node, looked up here without explain's own code; names find what is meant."""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from enforcer.config import Config
from enforcer.core.allocation import take
from enforcer.core.cpulimits import CPULimits, shares_to_weight_linear, shares_to_weight_new
from enforcer.core.cpuset import EMPTY, CPUSet, union
from enforcer.core.errors import ConfigError, EnforcerError
from enforcer.core.explain import Because, ContainerAnswer, CPUAnswer, Explainer, Verdict
from enforcer.core.node import ContainerView, NodeView, Phase, PodView, Role, parent_of
from enforcer.core.state import State
from enforcer.core.topology import CPUTopology
from enforcer.core.whatif import project, settled
from enforcer.describe import parse
from enforcer.explain import Telling, add_arguments, main
from enforcer.labels import Found, find, find_pod
from enforcer.record import Recorded
from enforcer.simulate import simulate
from enforcer.source import enforced, explainer
from tests.unit.random_nodes import described

NODES = 300


def lived_in(seed: int) -> Explainer:
    """A node as enforce left it, on which things have happened since."""
    chance = random.Random(seed)
    node = parse(described(chance), f"node {seed}")
    node = enforced(replace(node, policy=replace(node.policy, cfs_quota=chance.random() < 0.85)))
    view = node.view
    for _pod, one in list(view.containers()):
        happened = chance.random()
        if happened < 0.1:
            view = view.without_container(one.group.path)
        elif happened < 0.5:
            view = view.with_container(changed(one, chance))
    if chance.random() < 0.2 and len(view.online) > 3:
        view = unplugged(view, CPUSet([max(view.online)]))
    conflicts = {p: (CPUSet([1]), 12) for p in list(node.state.written)[:1]} if chance.random() < 0.2 else {}
    return Explainer(view, node.state, node.policy, 5.0, CPUSet([1]), conflicts)


def changed(one: ContainerView, chance: random.Random) -> ContainerView:
    cpus = chance.choice([1, 2, 3])
    return chance.choice(
        [
            replace(one, limits=None),
            replace(one, role=Role.CONMON),
            replace(one, opted_out=True),
            replace(one, phase=Phase.BIRTH, populated=False),
            replace(one, limits=CPULimits(cpus * 100_000, 100_000, weight=7777), limits_since=4.0),
            replace(one, limits=CPULimits(cpus * 50_000, 50_000, weight=shares_to_weight_new(1024 * cpus))),
            replace(one, limits=CPULimits(None, 100_000, weight=shares_to_weight_linear(1024 * cpus))),
            replace(one, limits=CPULimits(None, 100_000, shares=1500)),
            replace(one, group=replace(one.group, effective=CPUSet([0, 1]))),
        ]
    )


def unplugged(view: NodeView, gone: CPUSet) -> NodeView:
    rows = [row for row in view.topology.rows() if row[0] not in gone]
    view = replace(view, topology=CPUTopology.from_rows(rows), online=view.online - gone)
    for one in view.slices.values():
        if one.is_root:
            group = replace(one.group, effective=one.group.effective - gone)
            view = view.with_slice(replace(one, group=group))
    return project(view, ())


# --- what each reason claims


Claim = Callable[[Explainer, PodView, ContainerView, Because], bool]


def limits_of(one: ContainerView) -> CPULimits:
    assert one.limits is not None
    return one.limits


def says(one: ContainerView, cpus: int) -> bool:
    """Whether shares or weight are those of so many whole CPUs."""
    limits, shares = limits_of(one), 1024 * cpus
    if limits.shares is not None:
        return limits.shares == shares
    return limits.weight in (shares_to_weight_linear(shares), shares_to_weight_new(shares))


def owned_by_others(e: Explainer, path: str) -> CPUSet:
    return union(a.cpus for p, a in e.decided.assignments.items() if p != path)


def free_for(e: Explainer, pod: str) -> CPUSet:
    state = e.decided
    taken = union(a.cpus for a in state.assignments.values())
    held = union(h.cpus for p, holds in state.held.items() for h in holds if p != pod)
    return (e.view.allowed - e.policy.reserved) - taken - held - union(state.foreign.values())


def no_room(e: Explainer, pod: PodView, one: ContainerView, b: Because) -> bool:
    free, waiting = free_for(e, pod.group.path), e.decided.unsatisfied[one.group.path]
    mine = e.decided.assignments.get(one.group.path)
    keep = mine.cpus & e.view.allowed if mine else EMPTY
    try:
        got = take(e.view.topology, free | keep, b.number, e.policy.options, keep=keep)
    except EnforcerError:
        got = EMPTY
    left = e.view.allowed - e.decided.exclusive - got - (e.policy.reserved if e.policy.strict else EMPTY)
    return b.cpus == free and b.number == waiting.asked and (not got or not left)


def would_help(e: Explainer, pod: str, path: str) -> bool:
    view = e.view.without_pod(pod)
    state = settled(view, e.decided, e.policy, e.now, [pod]).state
    mine, waiting = state.assignments.get(path), e.decided.unsatisfied[path]
    return mine is not None and len(mine.cpus & view.allowed) == waiting.asked


def comes_back(e: Explainer, one: ContainerView) -> CPUSet:
    """What the container has after it went and came again, its pod there all the time."""
    path, pod = one.group.path, parent_of(one.group.path)
    gone = settled(e.view.without_container(path), e.decided, e.policy, e.now, [pod])
    fresh = replace(one, ident=one.ident + 1, limits_since=e.now, born=e.now, phase=Phase.RUNNING, populated=True)
    back = settled(gone.view.with_container(fresh), gone.state, e.policy, e.now + 1, [pod])
    mine = back.state.assignments.get(path)
    return mine.cpus if mine else EMPTY


def none_helps(e: Explainer, one: ContainerView) -> bool:
    own = parent_of(one.group.path)
    return not any(would_help(e, p.group.path, one.group.path) for p in e.view.pods() if p.group.path != own)


CLAIMS: dict[str, Claim] = {
    "asks": lambda e, p, c, b: p.guaranteed and (limits_of(c).quota in (None, b.number * limits_of(c).period))
    and says(c, b.number),
    "settling": lambda e, p, c, b: c.group.path in e.state.assignments,
    "gone": lambda e, p, c, b: bool(b.cpus) and b.cpus.isdisjoint(e.view.allowed),
    "foreign": lambda e, p, c, b: c.group.cpus == b.cpus and c.group.path not in e.decided.written,
    "qos": lambda e, p, c, b: p.ref.qos.value in ("burstable", "besteffort") and p.ref.qos.value in b.text.lower(),
    "role": lambda e, p, c, b: c.role in (Role.SANDBOX, Role.CONMON) and c.role in b.text,
    "opted-out": lambda e, p, c, b: c.opted_out,
    "limits-unknown": lambda e, p, c, b: c.limits is None,
    "no-quota": lambda e, p, c, b: limits_of(c).quota is None and e.policy.cfs_quota,
    "not-whole": lambda e, p, c, b: b.number % limits_of(c).period != 0 and limits_of(c).quota == b.number,
    "disagree": lambda e, p, c, b: limits_of(c).quota == b.number * limits_of(c).period and not says(c, b.number),
    "shares-not-whole": lambda e, p, c, b: not e.policy.cfs_quota and limits_of(c).quota is None,
    "not-running": lambda e, p, c, b: c.phase is Phase.BIRTH or not c.populated,
    "no-room": no_room,
    "smt": lambda e, p, c, b: e.policy.options.full_cores
    and {mask.bit_count() for mask in e.view.topology.cores.values()} == {b.number}
    and e.decided.unsatisfied[c.group.path].asked % b.number > 0,
    "before-it": lambda e, p, c, b: e.decided.unsatisfied[b.path].since <= e.decided.unsatisfied[c.group.path].since
    and b.path != c.group.path and b.number == e.decided.unsatisfied[b.path].asked,
    "would-help": lambda e, p, c, b: would_help(e, b.path, c.group.path),
    "none-would-help": lambda e, p, c, b: none_helps(e, c),
    "back": lambda e, p, c, b: comes_back(e, c) == b.cpus == e.decided.assignments[c.group.path].cpus,
    "back-others": lambda e, p, c, b: comes_back(e, c) == b.cpus != e.decided.assignments[c.group.path].cpus,
    "back-none": lambda e, p, c, b: not comes_back(e, c),
    "not-there-yet": lambda e, p, c, b: c.group.effective == b.cpus
    and c.group.effective != e.decided.assignments[c.group.path].cpus & e.view.online,
    "on-others": lambda e, p, c, b: bool(b.cpus) and b.cpus <= c.group.effective & owned_by_others(e, c.group.path),
    "conflict": lambda e, p, c, b: e.conflicts[c.group.path] == (b.cpus, b.number),
}
# Words that no random node brings up; they have tests of their own below.
RARE = {"limits-unknown", "no-cpus", "before-it", "smt"}


def test_every_because_of_a_container_is_true() -> None:
    seen: Counter[str] = Counter()
    for seed in range(NODES):
        e = lived_in(seed)
        for pod, one in e.view.containers():
            answer = e.container(one.group.path)
            check_verdict(e, pod, one, answer)
            for b in (*answer.because, *answer.after_restart, *answer.amiss):
                assert CLAIMS[b.kind](e, pod, one, b), (seed, one.group.path, b)
                seen[b.kind] += 1
    missing = CLAIMS.keys() - seen.keys() - RARE
    assert not missing, f"never said, so never tested: {missing}"


def check_verdict(e: Explainer, pod: PodView, one: ContainerView, answer: ContainerAnswer) -> None:
    path = one.group.path
    mine = e.decided.assignments.get(path)
    assert (answer.verdict in (Verdict.OWN, Verdict.PARTLY)) == (mine is not None)
    assert answer.own == (mine.cpus & e.view.online if mine else EMPTY)
    assert (answer.verdict in (Verdict.WAITING, Verdict.PARTLY)) == (path in e.decided.unsatisfied)
    assert (answer.verdict is Verdict.FOREIGN) == (path in e.decided.foreign and mine is None)
    assert answer.because, "there is always a reason"
    assert answer.may_run == one.group.effective
    if mine is not None:
        check_placement(e, pod, answer, mine.count)
    if answer.waiting is not None:
        others = {p for p, a in e.decided.assignments.items() if p != path} | set(e.decided.foreign)
        assert {h.path for h in answer.holders} == others | set(e.decided.held)


def check_placement(e: Explainer, pod: PodView, answer: ContainerAnswer, count: int) -> None:
    place = answer.placement
    assert place is not None
    own = answer.own & e.view.topology.cpus
    assert place.free == free_for(e, pod.group.path) | own
    assert union(step.cpus for step in place.steps) == own
    assert sum(len(step.cpus) for step in place.steps) == len(own), "steps are disjoint"
    topology = e.view.topology
    levels = {"NUMA node": topology.numa_nodes, "socket": topology.sockets, "L3 cache": topology.uncores,
              "core": topology.cores}  # fmt: skip
    for step in place.steps:
        if step.what.startswith("whole "):
            name, _, number = step.what.removeprefix("whole ").rpartition(" ")
            assert CPUSet.from_mask(levels[name][int(number)]) == step.cpus <= place.free
            assert "wholly free" in step.why
        else:
            core = topology.siblings(step.cpus.first)
            assert step.cpus < core or len(core) == 1 or not core <= own
            assert step.why == f"{len(core & place.free)} of its {len(core)} CPUs were free"
    try:
        expected = take(topology, place.free, count, e.policy.options)
    except EnforcerError:
        expected = None
    assert place.now == expected


CPU_CLAIMS: dict[str, Callable[[Explainer, int, Because], bool]] = {
    "offline": lambda e, cpu, b: cpu not in e.view.online,
    "not-for-pods": lambda e, cpu, b: cpu not in e.view.allowed,
    "reserved": lambda e, cpu, b: cpu in e.policy.reserved and ("shared pool" in b.text) == (not e.policy.strict),
    "isolated": lambda e, cpu, b: cpu in e.isolated,
    "holder-own": lambda e, cpu, b: cpu in e.decided.assignments[b.path].cpus == b.cpus,
    "holder-held": lambda e, cpu, b: any(cpu in h.cpus == b.cpus and not h.claim for h in e.decided.held[b.path]),
    "holder-claimed": lambda e, cpu, b: any(cpu in h.cpus and h.claim for h in e.decided.held[b.path]),
    "holder-foreign": lambda e, cpu, b: cpu in e.decided.foreign[b.path] == b.cpus,
    "shared": lambda e, cpu, b: cpu in e.view.allowed - e.decided.exclusive and str(e.decided.shared) in b.text,
    "free": lambda e, cpu, b: cpu in free_for(e, ""),
}


def test_every_because_of_a_cpu_is_true() -> None:
    seen: Counter[str] = Counter()
    for seed in range(0, NODES, 3):
        e = lived_in(seed)
        for cpu in range(max(e.view.online) + 2):
            answer = e.cpu(cpu)
            assert answer.because or strange(e, cpu), (seed, cpu)
            for b in answer.because:
                assert CPU_CLAIMS[b.kind](e, cpu, b), (seed, cpu, b)
                seen[b.kind] += 1
            check_cpu(e, answer)
    assert not CPU_CLAIMS.keys() - seen.keys() - {"holder-claimed", "not-for-pods"}


def strange(e: Explainer, cpu: int) -> bool:
    """A CPU that is in nobody's hands and in no pool: none must be."""
    return cpu not in e.decided.shared


def check_cpu(e: Explainer, answer: CPUAnswer) -> None:
    may = {c.group.path for _p, c in e.view.containers() if c.populated and answer.cpu in c.group.effective}
    assert set(answer.may_run) == may
    if answer.online:
        assert answer.cpu in answer.siblings
        assert answer.places["numa"] == e.view.topology.numa_of[answer.cpu]
    if answer.holder is not None:
        mine = {answer.holder.path} if answer.holder.how in ("own", "foreign") else set()
        others = {p for p in may if p not in mine and parent_of(p) != answer.holder.path}
        assert set(answer.strangers) == others


# --- the rare ones, by hand


def smt_node(options: list[str], *cpus: object) -> Recorded:
    pods = [{"name": f"p{n}", "containers": [{"name": "c", "cpus": c}]} for n, c in enumerate(cpus)]
    topology = {"sockets": 1, "cores": 4, "threads": 2}
    return enforced(parse({"topology": topology, "options": options, "pods": pods}, "a node"))


def kinds(answer: ContainerAnswer) -> list[str]:
    return [b.kind for b in answer.because]


def test_half_a_core_is_refused_with_the_remedy() -> None:
    e = explainer(smt_node(["full-pcpus-only"], 3))
    answer = e.container("/kubepods/podp0/c")
    assert answer.verdict is Verdict.WAITING
    assert kinds(answer) == ["no-room", "smt"]
    assert "multiple of 2" in answer.because[1].text


def test_who_waits_longer_is_named() -> None:
    node = smt_node([], 4, 4)
    e = explainer(node)
    assert e.container("/kubepods/podp1/c").verdict is Verdict.WAITING
    more = simulate(replace(node, now=50.0), [("add", "late=3")])
    late = Explainer(more.view, more.after, node.policy, 60.0)
    answer = late.container("/kubepods/podlate/c1")
    before = [b for b in answer.because if b.kind == "before-it"]
    assert [b.path for b in before] == ["/kubepods/podp1/c"]
    helping = [b for b in answer.because if b.kind == "would-help"]
    assert helping == [], "what p0 leaves goes to p1, which has waited longer"


def test_limits_that_cannot_be_read() -> None:
    node = smt_node([], 1)
    one = node.view.find_container("/kubepods/podp0/c")
    assert one is not None
    unpinned = replace(node, view=node.view.with_container(replace(one, limits=None)), state=State())
    answer = explainer(unpinned).container("/kubepods/podp0/c")
    assert "limits-unknown" in kinds(answer)


def test_the_last_cpu_is_not_given_away() -> None:
    topology = {"sockets": 1, "cores": 2, "threads": 1}
    strict = {"topology": topology, "options": ["strict-cpu-reservation"], "reserved": "0",
              "pods": [{"name": "p", "containers": [{"name": "c", "cpus": 1}]}]}  # fmt: skip
    answer = explainer(enforced(parse(strict, "a node"))).container("/kubepods/podp/c")
    assert answer.verdict is Verdict.WAITING
    assert "no CPU for the shared pool" in answer.because[0].text


def test_an_unknown_container_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        explainer(smt_node([], 1)).container("/kubepods/nobody/c")


# --- names

UID = "5a3e7f0c-1111-2222-3333-00000000000{}"


def named_node() -> NodeView:
    pods = [
        {"name": UID.format(1), "containers": [{"name": "a" * 64, "cpus": 1}]},
        {"name": UID.format(2), "containers": [{"name": "ab" * 32, "cpus": "500m"}]},
        {"name": "db", "containers": [{"name": "main", "cpus": 1}]},
    ]
    topology = {"sockets": 1, "cores": 8, "threads": 1}
    return enforced(parse({"topology": topology, "pods": pods}, "a node")).view


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("5", Found(cpu=5)),
        ("CPU 5", Found(cpu=5)),
        ("cpu5", Found(cpu=5)),
        (UID.format(1), Found(pod=f"/kubepods/pod{UID.format(1)}")),
        (UID.format(1).replace("-", "_"), Found(pod=f"/kubepods/pod{UID.format(1)}")),
        (UID.format(1).replace("-", ""), Found(pod=f"/kubepods/pod{UID.format(1)}")),
        (f"pod{UID.format(1)}", Found(pod=f"/kubepods/pod{UID.format(1)}")),
        (f"/kubepods/pod{UID.format(1)}", Found(pod=f"/kubepods/pod{UID.format(1)}")),
        (f"/sys/fs/cgroup/cpuset/kubepods/pod{UID.format(1)}/", Found(pod=f"/kubepods/pod{UID.format(1)}")),
        ("aaaa", Found(container=f"/kubepods/pod{UID.format(1)}/{'a' * 64}")),
        ("abab", Found(container=f"/kubepods/pod{UID.format(2)}/{'ab' * 32}")),
        (f"containerd://{'a' * 64}", Found(container=f"/kubepods/pod{UID.format(1)}/{'a' * 64}")),
        ("db", Found(pod="/kubepods/poddb")),
        ("db/main", Found(container="/kubepods/poddb/main")),
        ("5a3e7f0c/abab", Found(container=f"/kubepods/pod{UID.format(2)}/{'ab' * 32}")),
    ],
)
def test_names_find_what_is_meant(text: str, found: Found) -> None:
    assert find(named_node(), text) == found


def test_an_ambiguous_name_lists_them() -> None:
    with pytest.raises(ConfigError) as caught:
        find(named_node(), "5a3e7f0c")
    assert "stands for 2" in caught.value.message
    assert "000000000001" in caught.value.hint and "000000000002" in caught.value.hint


@pytest.mark.parametrize(("text", "near"), [("db/mian", "db/main"), (UID.format(9), UID.format(1)), ("bd", "db")])
def test_an_unknown_name_offers_the_nearest(text: str, near: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find(named_node(), text)
    assert near in caught.value.hint


def test_a_hostile_name_does_not_reach_the_terminal() -> None:
    for text in ("\x1b[2J", "a\nb", "", " ", "x" * 10_000):
        with pytest.raises(ConfigError) as caught:
            find(named_node(), text)
        assert caught.value.message.isprintable() and len(caught.value.message) < 300


def test_only_pods_can_be_removed() -> None:
    assert find_pod(named_node(), "db") == "/kubepods/poddb"
    with pytest.raises(ConfigError):
        find_pod(named_node(), "db/main")


# --- the text


def test_text_answers_the_newcomers_questions() -> None:
    node = parse(
        {
            "topology": {"sockets": 2, "cores": 4, "threads": 2, "numa": 2},
            "reserved": "0,8",
            "pods": [
                {"name": "db", "containers": [{"name": "main", "cpus": 4}]},
                {"name": "big", "containers": [{"name": "main", "cpus": 8}]},
                {"name": "ml", "containers": [{"name": "main", "cpus": 6}]},
                {"name": "web", "qos": "burstable", "containers": [{"name": "nginx", "cpus": "1500m"}]},
            ],
        },
        "a node",
    )
    told = Telling(enforced(node), explainer(enforced(node)))
    cpu = told.text(Found(cpu=5), 200)
    assert "CPU 5: taken by pod big container main" in cpu
    assert any("whole NUMA node 1, wholly free" in line for line in cpu)
    waiting = "\n".join(told.text(Found(container="/kubepods/podml/main"), 200))
    assert "asks for 6 CPUs, has 0 of its own, and 2 are free" in waiting
    assert "pod big: if this pod went, there would be room" in waiting
    assert "CPUs 4-7,12-15 by pod big container main" in waiting
    assert told.findings(Found(container="/kubepods/podml/main"))
    shared = "\n".join(told.text(Found(pod="/kubepods/burstable/podweb"), 200))
    assert "only Guaranteed pods get CPUs of their own" in shared
    assert not told.findings(Found(cpu=5))


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_lines_fit_the_terminal(columns: int) -> None:
    node = enforced(parse(described(random.Random(3)), "a node"))
    told = Telling(node, explainer(node))
    for pod in node.view.pods():
        for line in told.text(Found(pod=pod.group.path), columns):
            assert len(line) <= columns


# --- what the agent's word says of a node that has no kubepods any more


def without_root() -> Recorded:
    db = {"name": "db", "containers": [{"name": "c1", "cpus": 2}]}
    full = enforced(parse({"topology": {"cores": 4}, "pods": [db]}, "test"))
    return replace(full, view=NodeView(2, full.view.topology, full.view.online))


def test_a_root_that_has_gone_leaves_the_owners_cpu_answered() -> None:
    node = without_root()
    cpu = next(iter(node.state.assignments["/kubepods/poddb/c1"].cpus))
    told = Telling(node, explainer(node)).text(Found(cpu=cpu), 80)
    assert "taken by /kubepods/poddb/c1" in told[1]


def ask(node: Recorded, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr("enforcer.source.read", lambda arguments, config: node)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return main(parser.parse_args(words), Config())


def test_a_cpu_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    node = parse({"topology": {"cores": 4}, "online": "0-2"}, "test")
    assert ask(node, monkeypatch, "CPU", "3") == 0  # offline
    with pytest.raises(ConfigError, match="there is no CPU 99 on this node") as caught:
        ask(node, monkeypatch, "99")
    assert caught.value.hint == "it has CPUs 0-3"
