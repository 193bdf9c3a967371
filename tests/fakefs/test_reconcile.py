"""Observe, plan, apply on made trees, v1 and v2, with containers created in the measured order."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from enforcer.core.allocation import AllocationOptions
from enforcer.core.cpuset import CPUSet
from enforcer.core.state import from_document, to_document
from tests.fakefs.cgroup_tree import FakeCgroup, create_like_runc, tree
from tests.fakefs.fake_agent import FakeAgent, container, pod

ALL = "cpuset cpu memory"
Made = list[FakeAgent]


@pytest.fixture
def agents() -> Iterator[Made]:
    made: Made = []
    yield made
    for one in made:
        one.close()


def node(folder: Path, version: int, **options: str) -> FakeCgroup:
    """A node without pods, its controllers on down to the QoS level as the kubelet leaves them."""
    folder.mkdir(exist_ok=True)
    level = {"subtree_control": ALL} if version == 2 else {}
    spec = {"kubepods": {**level, "burstable": {**level}, "besteffort": {**level}}}
    return tree(folder, spec, version, **options)  # type: ignore[arg-type]


@pytest.fixture(params=[1, 2])
def fake(request: pytest.FixtureRequest, tmp_path: Path) -> FakeCgroup:
    return node(tmp_path, request.param)


def start(fake: FakeCgroup, agents: Made, **options: object) -> FakeAgent:
    agent = FakeAgent(fake, **options)  # type: ignore[arg-type]
    agents.append(agent)
    return agent


def make_pod(fake: FakeCgroup, path: str, milli: int | None) -> None:
    """The kubelet: directory, parent's set (v1), shares or weight, then the quota."""
    fake.mkdir(path)
    if fake.version == 1:
        parent = path.rpartition("/")[0]
        for name in ("cpuset.cpus", "cpuset.mems"):
            fake.write(path, name, fake.read(parent, name))
    else:
        fake.write(path, "cgroup.subtree_control", "+cpuset +cpu")
    limits(fake, path, milli)


def limits(fake: FakeCgroup, path: str, milli: int | None) -> None:
    shares = 2 if milli is None else milli * 1024 // 1000
    if fake.version == 1:
        fake.write(path, "cpu.shares", str(shares))
        if milli is not None:
            fake.write(path, "cpu.cfs_quota_us", str(milli * 100))
    else:
        fake.write(path, "cpu.weight", str(1 + (shares - 2) * 9999 // 262142))
        if milli is not None:
            fake.write(path, "cpu.max", f"{milli * 100} 100000")


def run(agent: FakeAgent, path: str, pid: int, milli: int | None, *, cpus: str = "", pump: bool = True) -> None:
    """A runtime makes a container; the agent gets its turn after every step."""
    shares = 2 if milli is None else milli * 1024 // 1000
    weight = 1 + (shares - 2) * 9999 // 262142
    quota = None if milli is None else milli * 100
    agent.comms[pid] = "runc:[2:INIT]"
    for step in create_like_runc(agent.fake, path, pid, cpus=cpus, quota=quota, shares=shares, weight=weight):
        if step == "exec":
            agent.comms[pid] = "app"
        if pump:
            agent.pump()
    agent.later(0.06)


def gone(agent: FakeAgent, path: str, *pids: int) -> None:
    agent.fake.exit(*pids)
    agent.fake.rmdir(path)
    agent.pump()


def guaranteed(agent: FakeAgent, number: int, milli: int) -> str:
    path = pod(number)
    make_pod(agent.fake, path, milli)
    agent.pump()
    run(agent, container(path, number), 100 + number, milli)
    return container(path, number)


def besteffort(agent: FakeAgent, number: int) -> str:
    path = pod(number, "besteffort")
    make_pod(agent.fake, path, None)
    agent.pump()
    run(agent, container(path, number), 100 + number, None)
    return container(path, number)


def test_seed_scenario(tmp_path: Path, agents: Made) -> None:
    for version in (1, 2):
        folder = tmp_path / str(version)
        agent = start(node(folder, version, online="0-1"), agents)
        other = besteffort(agent, 9)
        first = guaranteed(agent, 1, 1000)
        assert (agent.runs_on(first), agent.runs_on(other)) == ("1", "0")
        second = guaranteed(agent, 2, 1000)
        assert agent.runs_on(second) == "0"
        assert agent.state.unsatisfied[second].asked == 1
        gone(agent, first, 101)
        assert agent.runs_on(second) == "0", "held for the first pod while its cgroup is there"
        gone(agent, pod(1))
        assert (agent.runs_on(second), agent.runs_on(other)) == ("1", "0")
        assert not agent.state.unsatisfied


def test_owner_gets_whole_cpus_and_others_are_kept_off(fake: FakeCgroup, agents: Made) -> None:
    agent = start(fake, agents)
    other = besteffort(agent, 9)
    assert agent.runs_on(other) == "0-7"
    owner = guaranteed(agent, 1, 2000)
    assert (agent.cpus(owner), agent.runs_on(owner)) == ("1-2", "1-2")
    assert agent.runs_on(other) == "0,3-7"
    assert agent.runs_on(besteffort(agent, 8)) == "0,3-7"


def test_fraction_in_guaranteed_pod_stays_shared(fake: FakeCgroup, agents: Made) -> None:
    agent = start(fake, agents)
    owner = guaranteed(agent, 1, 2000)
    fraction = guaranteed(agent, 2, 1500)
    assert (agent.runs_on(owner), agent.runs_on(fraction)) == ("1-2", "0,3-7")


def test_v2_writes_by_level_not_by_pod(tmp_path: Path, agents: Made) -> None:
    agent = start(node(tmp_path, 2), agents)
    for number in range(20, 40):
        besteffort(agent, number)
    agent.fake.fs.log.clear()
    guaranteed(agent, 1, 1000)
    written = [path for path, name, _ in agent.fake.fs.log if name == "cpuset.cpus"]
    assert sum("besteffort/pod" in path for path in written) == 0
    assert len(written) <= 6


def test_mixed_pod_keeps_sidecar_and_sandbox_off_the_owners_cores(fake: FakeCgroup, agents: Made) -> None:
    agent = start(fake, agents)
    path = pod(1)
    make_pod(fake, path, 2500)
    agent.pump()
    sandbox, owner, sidecar = (container(path, n) for n in (1, 2, 3))
    run(agent, sandbox, 101, None)
    agent.comms[101] = "pause"
    agent.later(0.3)
    run(agent, owner, 102, 2000)
    run(agent, sidecar, 103, 500)
    assert agent.runs_on(owner) == "1-2"
    assert agent.runs_on(sidecar) == "0,3-7"
    assert agent.runs_on(sandbox) == "0"
    gone(agent, owner, 102)
    assert agent.runs_on(sidecar) == "0,3-7", "the owner's cores are held for its restart"
    run(agent, container(path, 4), 104, 2000)
    assert agent.runs_on(container(path, 4)) == "1-2"


def test_restart_and_crash_loop_keep_the_cores(fake: FakeCgroup, agents: Made) -> None:
    agent = start(fake, agents)
    first = guaranteed(agent, 1, 2000)
    second = guaranteed(agent, 2, 2000)
    assert (agent.runs_on(first), agent.runs_on(second)) == ("1-2", "3-4")
    gone(agent, first, 101)
    third = guaranteed(agent, 3, 2000)
    assert agent.runs_on(third) == "5-6"
    for number in range(10, 14):
        again = container(pod(1), number)
        run(agent, again, 200 + number, 2000)
        assert agent.runs_on(again) == "1-2"
        gone(agent, again, 200 + number)
    assert agent.runs_on(second) == "3-4"


def test_resize_grows_around_and_shrinks_within(fake: FakeCgroup, agents: Made) -> None:
    agent = start(fake, agents)
    first, second = guaranteed(agent, 1, 2000), guaranteed(agent, 2, 1000)
    assert (agent.runs_on(first), agent.runs_on(second)) == ("1-2", "3")
    limits(fake, first, 4000)
    agent.pump()
    agent.later(3)
    grown = CPUSet.parse(agent.runs_on(first))
    assert len(grown) == 4
    assert CPUSet.parse("1-2") <= grown
    assert 3 not in grown
    limits(fake, first, 1000)
    agent.pump()
    agent.later(3)
    shrunk = CPUSet.parse(agent.runs_on(first))
    assert len(shrunk) == 1
    assert shrunk <= grown
    assert agent.runs_on(second) == "3"


def test_limits_in_pieces_do_not_move_an_owner(fake: FakeCgroup, agents: Made) -> None:
    agent = start(fake, agents)
    owner = guaranteed(agent, 1, 2000)
    name, text = ("cpu.shares", "3072") if fake.version == 1 else ("cpu.weight", "118")
    fake.write(owner, name, text)
    agent.pump()
    agent.later(1.0)
    assert agent.runs_on(owner) == "1-2"
    limits(fake, owner, 3000)
    agent.pump()
    assert agent.runs_on(owner) == "1-3"


def test_owner_that_asks_for_a_fraction_loses_its_cores_after_two_seconds(fake: FakeCgroup, agents: Made) -> None:
    agent = start(fake, agents)
    owner = guaranteed(agent, 1, 2000)
    limits(fake, owner, 1500)
    agent.pump()
    agent.later(1.9)
    assert agent.runs_on(owner) == "1-2"
    agent.later(0.2)
    assert agent.runs_on(owner) == "0-7"


def test_drift_is_repaired_counted_and_becomes_a_conflict(fake: FakeCgroup, agents: Made) -> None:
    agent = start(fake, agents)
    owner = guaranteed(agent, 1, 2000)
    for number in range(1, 11):
        fake.write(owner, "cpuset.cpus", "0-7")
        agent.pump()
        assert agent.cpus(owner) == "1-2"
        assert agent.state.drift[owner].total == number
    fake.write(owner, "cpuset.cpus", "0-7")
    agent.pump()
    assert agent.cpus(owner) == "0-7", "the eleventh in a minute is a conflict: left for a while"
    assert agent.state.drift[owner].conflict
    agent.later(1.1)
    assert agent.cpus(owner) == "1-2"
    for wait in (2.0, 4.0):
        fake.write(owner, "cpuset.cpus", "0-7")
        agent.pump()
        agent.later(wait - 0.5)
        assert agent.cpus(owner) == "0-7"
        agent.later(0.6)
        assert agent.cpus(owner) == "1-2"
    agent.later(200)
    agent.full()
    assert not agent.state.drift[owner].conflict


def test_foreign_pinned_container_is_left_alone(fake: FakeCgroup, agents: Made) -> None:
    agent = start(fake, agents)
    path = pod(5, "burstable")
    make_pod(fake, path, 500)
    agent.pump()
    theirs = container(path, 5)
    run(agent, theirs, 105, 500, cpus="6-7")
    assert agent.runs_on(theirs) == "6-7"
    other = besteffort(agent, 9)
    neighbour = container(path, 6)
    run(agent, neighbour, 106, 500)
    assert agent.runs_on(other) == "0-5"
    assert agent.runs_on(neighbour) == "0-5"
    owners = [guaranteed(agent, n, 2000) for n in (1, 2)]
    assert [agent.runs_on(o) for o in owners] == ["1-2", "3-4"]
    assert agent.runs_on(guaranteed(agent, 3, 2000)) == "0,5", "6 and 7 are not ours to give"
    assert agent.runs_on(theirs) == "6-7"


def test_owner_whose_spec_brings_a_set_gives_way(fake: FakeCgroup, agents: Made) -> None:
    """runc writes the spec's set after the limits on v2, so it may come after our own."""
    agent = start(fake, agents)
    path = pod(1)
    make_pod(fake, path, 2000)
    agent.pump()
    theirs = container(path, 1)
    run(agent, theirs, 101, 2000, cpus="5-6")
    assert agent.runs_on(theirs) == "5-6"
    assert agent.state.foreign == {theirs: CPUSet.parse("5-6")}
    assert agent.state.assignments == {}
    assert agent.runs_on(guaranteed(agent, 2, 3000)) == "1-3"
    assert agent.runs_on(besteffort(agent, 9)) == "0,4,7"


def test_container_made_anew_under_the_same_path_is_a_birth(fake: FakeCgroup, agents: Made) -> None:
    """docker restart: the same path again, with whatever the runtime writes into it."""
    agent = start(fake, agents)
    owner = guaranteed(agent, 1, 2000)
    fake.exit(101)
    fake.rmdir(owner)
    run(agent, owner, 201, 2000, cpus="0-7")
    assert agent.runs_on(owner) == "1-2"
    assert agent.state.drift == {}


@pytest.mark.parametrize("racy", [False, True])
def test_birth_is_held_against_the_runtimes_own_writes(fake: FakeCgroup, agents: Made, racy: bool) -> None:
    agent = start(fake, agents)
    besteffort(agent, 9)
    path = pod(1)
    make_pod(fake, path, 2000)
    agent.pump()
    agent.comms[101] = "runc:[2:INIT]"
    born = container(path, 1)
    for step in create_like_runc(fake, born, 101, cpus="0-7", weight=79, racy=racy):
        agent.pump()
        if step in ("quota", "cpus", "exec"):
            assert 0 < len(fake.where(born)) < 8 or step == "cpus"
    assert agent.runs_on(born) == "1-2"
    assert not agent.state.drift


def test_every_prefix_of_a_birth_leaves_owners_alone(tmp_path: Path, agents: Made) -> None:
    for version in (1, 2):
        for most in range(1, 11):
            folder = tmp_path / f"{version}-{most}"
            agent = start(node(folder, version), agents)
            owner = guaranteed(agent, 1, 2000)
            make_pod(agent.fake, pod(2), 3000)
            agent.pump()
            steps = create_like_runc(agent.fake, container(pod(2), 2), 102, quota=300000, shares=3072, weight=118)
            for _, _step in zip(range(most), steps, strict=False):
                agent.pump()
            agent.later(11)
            agent.full()
            assert agent.runs_on(owner) == "1-2"
            agent.close()
            agents.remove(agent)


def test_restart_adopts_everything_and_writes_nothing(fake: FakeCgroup, agents: Made) -> None:
    agent = start(fake, agents)
    owners = [guaranteed(agent, n, 2000) for n in (1, 2)]
    other = besteffort(agent, 9)
    gone(agent, owners[0], 101)
    document = to_document(agent.state)
    fake.fs.log.clear()
    again = start(fake, agents, state=from_document(document))
    assert fake.fs.log == []
    assert again.runs_on(owners[1]) == "3-4"
    assert again.runs_on(other) == "0,5-7"
    run(again, container(pod(1), 11), 111, 2000)
    assert again.runs_on(container(pod(1), 11)) == "1-2", "held over the restart"


def test_lost_state_file_moves_no_owner(fake: FakeCgroup, agents: Made) -> None:
    agent = start(fake, agents)
    owners = [guaranteed(agent, n, 2000) for n in (1, 2)]
    other = besteffort(agent, 9)
    fake.fs.log.clear()
    again = start(fake, agents)
    assert [again.runs_on(o) for o in owners] == ["1-2", "3-4"]
    assert again.runs_on(other) == "0,5-7"
    assert again.state.foreign == {}
    assert guaranteed(again, 3, 2000) and again.runs_on(other) == "0,7"


def test_owner_adopted_from_the_tree_alone_lets_go(fake: FakeCgroup, agents: Made) -> None:
    """What an agent before us wrote is ours to take away, though the file that said so is lost."""
    first = start(fake, agents)
    owner = guaranteed(first, 1, 1000)
    again = start(fake, agents)
    assert again.runs_on(owner) == "1"
    limits(fake, owner, 500)
    again.pump()
    again.later(3)
    again.full()
    assert again.runs_on(owner) == "0-7"
    kept = start(fake, agents, state=from_document(to_document(again.state)))
    assert kept.state.foreign == {}
    assert kept.runs_on(owner) == "0-7"


def test_audit_decides_and_writes_nothing(fake: FakeCgroup, agents: Made) -> None:
    agent = start(fake, agents, dry=True)
    fake.fs.log.clear()
    owner = guaranteed(agent, 1, 2000)
    besteffort(agent, 9)
    agent.full()
    assert fake.fs.log == []
    assert agent.state.assignments[owner].cpus == CPUSet.parse("1-2")
    assert any(path.startswith(pod(1)) for path in agent.reconciler.would_write)


def test_unpin_gives_everything_back(fake: FakeCgroup, agents: Made) -> None:
    agent = start(fake, agents)
    owner, other = guaranteed(agent, 1, 2000), besteffort(agent, 9)
    agent.reconciler.unpin()
    assert (agent.runs_on(owner), agent.runs_on(other)) == ("0-7", "0-7")
    assert agent.state.assignments == {}


def test_no_room_is_told_and_cured(fake: FakeCgroup, agents: Made) -> None:
    agent = start(fake, agents)
    first = guaranteed(agent, 1, 5000)
    second = guaranteed(agent, 2, 4000)
    waiting = agent.state.unsatisfied[second]
    assert (waiting.asked, waiting.free) == (4, 2)
    third = guaranteed(agent, 3, 2000)
    assert agent.runs_on(third) == "6-7"
    assert agent.runs_on(second) == "0"
    gone(agent, first, 101)
    gone(agent, pod(1))
    assert agent.runs_on(second) == "1-4"


def test_strict_reservation_never_empties_the_pool(fake: FakeCgroup, agents: Made) -> None:
    agent = start(fake, agents, strict=True)
    other = besteffort(agent, 9)
    assert agent.runs_on(other) == "1-7"
    big = guaranteed(agent, 1, 7000)
    assert big in agent.state.unsatisfied
    assert agent.runs_on(guaranteed(agent, 2, 6000)) == "1-6"
    assert agent.runs_on(other) == "7"


def test_full_cores_when_asked(fake: FakeCgroup, agents: Made) -> None:
    agent = start(fake, agents, reserved="0", threads=2, options=AllocationOptions(full_cores=True))
    owners = [guaranteed(agent, n, 2000) for n in (1, 2, 3)]
    assert [agent.runs_on(one) for one in owners] == ["2-3", "4-5", "6-7"]
    single = guaranteed(agent, 4, 1000)
    assert "multiple" in agent.state.unsatisfied[single].why
    assert agent.runs_on(single) == "0-1"
    assert guaranteed(agent, 5, 2000) in agent.state.unsatisfied, "CPU 1 alone is no core"


def test_ebusy_nested_child_is_narrowed_first(tmp_path: Path, agents: Made) -> None:
    fake = node(tmp_path, 1)
    agent = start(fake, agents)
    other = besteffort(agent, 9)
    fake.mkdir(f"{other}/kube-proxy")
    for name, text in (("cpuset.cpus", "0-7"), ("cpuset.mems", "0")):
        fake.write(f"{other}/kube-proxy", name, text)
    owner = guaranteed(agent, 1, 2000)
    assert (agent.runs_on(owner), agent.runs_on(other)) == ("1-2", "0,3-7")
    assert agent.runs_on(f"{other}/kube-proxy") == "0,3-7"
    gone(agent, owner, 101)
    gone(agent, pod(1))
    assert agent.runs_on(f"{other}/kube-proxy") == "0-7"


def test_one_that_keeps_answering_ebusy_does_not_stop_the_rest(fake: FakeCgroup, agents: Made) -> None:
    agent = start(fake, agents)
    stuck, other = besteffort(agent, 8), besteffort(agent, 9)
    where = stuck if fake.version == 1 else "/kubepods/besteffort"
    fake.fs.fail(errno.EBUSY, where)
    owner = guaranteed(agent, 1, 2000)
    assert agent.runs_on(owner) == "1-2"
    if fake.version == 1:
        assert agent.runs_on(other) == "0,3-7"
    assert agent.reconciler.retrying() == 1
    fake.fs._failures.clear()
    agent.later(6)
    assert agent.runs_on(stuck) == "0,3-7"
    assert agent.reconciler.retrying() == 0


def test_cgroup_that_vanishes_at_any_write(tmp_path: Path, agents: Made) -> None:
    for version in (1, 2):
        for step in range(1, 8):
            folder = tmp_path / f"{version}-{step}"
            fake = node(folder, version)
            agent = start(fake, agents)
            victim, keeper = guaranteed(agent, 1, 1000), guaranteed(agent, 2, 2000)
            fake.fs.at(step, lambda fake=fake, victim=victim: fake.vanish(victim))  # type: ignore[misc]
            guaranteed(agent, 3, 2000)
            limits(fake, keeper, 3000)
            agent.pump()
            assert agent.runs_on(keeper).startswith("2-3")
            agent.full()
            assert agent.reconciler.retrying() == 0
            agent.close()
            agents.remove(agent)


def test_kubepods_that_root_does_not_own_is_no_root(tmp_path: Path, agents: Made) -> None:
    fake = tree(tmp_path, {"kubepods": {"owner": 1000, pod(1).rpartition("/")[2]: {"cpus": ""}}}, 2)
    agent = start(fake, agents)
    assert agent.observer.view.slices == {}
    assert "does not belong to root" in str(agent.observer.problems)


def test_missed_events_are_made_good_by_a_full_pass(fake: FakeCgroup, agents: Made) -> None:
    agent = start(fake, agents)
    path = pod(1)
    make_pod(fake, path, 2000)
    run(agent, container(path, 1), 101, 2000, pump=False)
    agent.watcher.drain()
    agent.full()
    assert agent.runs_on(container(path, 1)) == "1-2"
