"""What hostile containers, careless tenants, broken kernels and unlucky admins do, on made trees."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from enforcer.audit.kubelet import read_kubelet
from enforcer.core.cpuset import CPUSet
from enforcer.core.errors import EnforcerError
from enforcer.observe import Observer
from tests.fakefs.cgroup_tree import FakeCgroup, create_like_runc
from tests.fakefs.fake_agent import container, machine, pod
from tests.fakefs.test_reconcile import Made, besteffort, gone, guaranteed, make_pod, node, run, start


@pytest.fixture
def agents() -> Iterator[Made]:
    made: Made = []
    yield made
    for one in made:
        one.close()


@pytest.fixture(params=[1, 2])
def fake(request: pytest.FixtureRequest, tmp_path: Path) -> FakeCgroup:
    return node(tmp_path, request.param)


def make_unreadable(fake: FakeCgroup, path: str, name: str) -> None:
    """Reading answers ELOOP: stands for EMFILE, ENOMEM, EIO and whatever else a read can fail with."""
    fake.file(path, name).unlink()
    fake.file(path, name).symlink_to(name)


@pytest.mark.parametrize("what", ["container", "pod", "root"])
@pytest.mark.parametrize("how", ["unreadable", "garbage"])
def test_a_set_that_cannot_be_read_is_no_end_of_its_cgroup(fake: FakeCgroup, agents: Made, what: str, how: str) -> None:
    agent = start(fake, agents)
    owner = guaranteed(agent, 1, 2000)
    path = {"container": owner, "pod": pod(1), "root": "/kubepods"}[what]
    if how == "garbage":
        fake.file(path, "cpuset.cpus").write_text("3-1,,x\n")
    else:
        make_unreadable(fake, path, "cpuset.cpus")
    agent.pump()
    agent.full()
    assert agent.state.assignments[owner].cpus == CPUSet.parse("1-2")
    assert "cpuset.cpus" in str(agent.observer.problems)
    assert agent.state.exclusive == CPUSet.parse("1-2")


def test_a_directory_that_cannot_be_listed_is_not_empty(
    fake: FakeCgroup, agents: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = start(fake, agents)
    owner = guaranteed(agent, 1, 2000)
    for broken in ("/", "/kubepods", pod(1), owner):

        def children(path: str, broken: str = broken) -> list[str] | None:
            if path == broken:
                raise EnforcerError(f"cannot read {path}: Too many open files")
            return type(fake.fs).children(fake.fs, path)

        monkeypatch.setattr(fake.fs, "children", children)
        agent.full()
        agent.observer.look(pod(1))
        agent.reconciler.hot([pod(1)])
        assert agent.state.assignments[owner].cpus == CPUSet.parse("1-2"), broken
        assert agent.state.held == {}, broken
        assert "Too many open files" in str(agent.observer.problems)


def test_no_more_watches_is_told_and_the_rest_goes_on(
    fake: FakeCgroup, agents: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = start(fake, agents)

    def refused(path: str) -> bool:
        raise EnforcerError(f"cannot watch {path}: the limit fs.inotify.max_user_watches is used up")

    monkeypatch.setattr(agent.watcher, "add", refused)
    make_pod(fake, pod(1), 2000)
    for _ in create_like_runc(fake, container(pod(1), 1), 101):
        pass
    agent.full()
    assert agent.runs_on(container(pod(1), 1)) == "1-2"
    assert "max_user_watches" in str(agent.observer.problems)


def test_processes_that_cannot_be_read_stop_nothing(
    fake: FakeCgroup, agents: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = start(fake, agents)
    owner, other = guaranteed(agent, 1, 2000), besteffort(agent, 9)

    def procs(path: str) -> list[int]:
        if path == other:
            raise EnforcerError(f"cannot read {path}/cgroup.procs: Too many open files")
        return type(fake.fs).procs(fake.fs, path)

    monkeypatch.setattr(fake.fs, "procs", procs)
    agent.full()
    third = guaranteed(agent, 3, 1000)
    assert (agent.runs_on(owner), agent.runs_on(third), agent.runs_on(other)) == ("1-2", "3", "0,4-7")


def test_write_whose_outcome_cannot_be_read_stops_nothing(fake: FakeCgroup, agents: Made) -> None:
    agent = start(fake, agents)
    stuck, other = besteffort(agent, 8), besteffort(agent, 9)
    where = stuck if fake.version == 1 else "/kubepods/besteffort"
    make_unreadable(fake, where, fake.effective.format("cpus"))
    owner = guaranteed(agent, 1, 2000)
    assert agent.runs_on(owner) == "1-2"
    if fake.version == 1:
        assert agent.runs_on(other) == "0,3-7"


def test_retries_of_what_has_gone_are_forgotten(fake: FakeCgroup, agents: Made) -> None:
    agent = start(fake, agents)
    if fake.version == 2:
        make_pod(fake, pod(1), 2500)
        agent.pump()
        run(agent, container(pod(1), 1), 101, 2000)
        run(agent, container(pod(1), 2), 102, 500)
        stuck = container(pod(1), 2)
        pid = 102
    else:
        stuck, pid = besteffort(agent, 8), 108
    fake.fs.fail(errno.EBUSY, stuck)
    owner = guaranteed(agent, 3, 2000)
    assert agent.runs_on(owner) == ("3-4" if fake.version == 2 else "1-2")
    assert agent.reconciler.retrying() == 1
    gone(agent, stuck, pid)
    agent.later(6)
    agent.full()
    assert agent.reconciler.retrying() == 0


def test_events_in_a_cgroup_that_answers_ebusy_do_not_stall_the_loop(tmp_path: Path, agents: Made) -> None:
    fake = node(tmp_path, 1)
    agent = start(fake, agents)
    stuck = besteffort(agent, 8)
    fake.fs.fail(errno.EBUSY, stuck)
    guaranteed(agent, 1, 2000)
    agent.later(10)
    fake.fs.log.clear()
    for _ in range(20):
        fake.write(stuck, "cpu.shares", "2")
        agent.pump()
    assert [path for path, _, _ in fake.fs.log if path == stuck] == []
    fake.fs._failures.clear()
    agent.later(6)
    assert agent.runs_on(stuck) == "0,3-7"


def test_many_problems_do_not_hide_those_that_come_later(
    fake: FakeCgroup, agents: Made, caplog: pytest.LogCaptureFixture
) -> None:
    agent = start(fake, agents)
    for number in range(1100):
        agent.reconciler._say_once(f"/gone/{number}", "cannot be read", warn=True)
    make_pod(fake, pod(1), 2000)
    make_unreadable(fake, pod(1), "cpuset.cpus")
    with caplog.at_level(logging.WARNING):
        agent.full()
        agent.full()
    assert sum("cpuset.cpus" in line for line in caplog.messages) == 1


def test_one_that_waits_and_is_then_pinned_by_its_spec_gets_nothing_of_ours(tmp_path: Path, agents: Made) -> None:
    """runc writes the spec's set after the limits on v2: by then the container may be waiting for room."""
    agent = start(node(tmp_path, 2), agents)
    big = guaranteed(agent, 1, 5000)
    make_pod(agent.fake, pod(2), 4000)
    agent.pump()
    theirs = container(pod(2), 2)
    run(agent, theirs, 102, 4000, cpus="6-7")
    assert agent.state.unsatisfied == {}
    gone(agent, big, 101)
    gone(agent, pod(1))
    agent.full()
    assert agent.state.assignments == {}
    assert agent.runs_on(theirs) == "6-7"


def test_what_was_there_before_us_is_on_disk_before_it_is_written(tmp_path: Path, agents: Made) -> None:
    """Also in the hot path: an agent that is killed between two writes could give nothing back.

    On v2, where a slice may have had a set; a narrow set of a container is foreign, or a pool that we left behind.
    """
    fake = node(tmp_path, 2)
    first = start(fake, agents)
    guaranteed(first, 1, 2000)
    other = besteffort(first, 9)
    agent = start(fake, agents)  # the state file is lost: these sets are what was there before
    where = "/kubepods/besteffort"
    saved: list[tuple[CPUSet | None, list[str]]] = []

    def save() -> None:
        saved.append((agent.state.before.get(where), [path for path, _, _ in fake.fs.log]))

    agent.reconciler._save = save
    fake.fs.log.clear()
    guaranteed(agent, 2, 2000)
    assert (agent.runs_on(other), len(saved)) == ("0,5-7", 1)
    before, written = saved[0]
    assert before == CPUSet.parse("0,3-7")
    assert where not in written


def test_root_that_is_widened_makes_no_pin_of_a_birth(tmp_path: Path, agents: Made) -> None:
    """v1: a container has a copy of its pod's set; when that is widened, the copy is narrower and nobody's choice."""
    fake = node(tmp_path, 1)
    for path in ("/kubepods/burstable", "/kubepods/besteffort", "/kubepods"):
        fake.write(path, "cpuset.cpus", "0-3")
    agent = start(fake, agents)
    make_pod(fake, pod(1), 1500)
    agent.pump()
    agent.comms[101] = "runc:[2:INIT]"
    born = container(pod(1), 1)
    for step in create_like_runc(fake, born, 101, quota=150000, shares=1536):
        agent.pump()
        if step == "attach":
            fake.write("/kubepods", "cpuset.cpus", "0-7")
            fake.write(pod(1), "cpuset.cpus", "0-7")
            agent.full()
    agent.later(0.3)
    assert agent.state.foreign == {}
    assert agent.runs_on(born) == "0-7"


def test_nothing_is_kept_of_cgroups_that_have_gone(fake: FakeCgroup, agents: Made) -> None:
    agent = start(fake, agents)
    for number in range(1, 6):
        owner = guaranteed(agent, number, 2000)
        gone(agent, owner, 100 + number)
        gone(agent, pod(number))
    agent.full()
    assert not [path for path in agent.applier._recent if "/pod" in path]
    assert not [path for path in agent.state.written if "/pod" in path]
    assert (agent.state.assignments, agent.state.held, agent.state.unsatisfied) == ({}, {}, {})
    assert not [path for path in agent.watcher._wd if "pod5a3e" in path]


def test_v1_owner_whose_last_cpu_went_gets_another(tmp_path: Path, agents: Made) -> None:
    """The kernel empties its set and moves its tasks to the pod's cgroup; an empty set is no birth then."""
    fake = node(tmp_path, 1)
    agent = start(fake, agents)
    owner, second = guaranteed(agent, 1, 1000), guaranteed(agent, 2, 1000)
    assert (agent.runs_on(owner), agent.runs_on(second)) == ("1", "2")
    fake.hotplug("0,2-7")
    agent.observer.machine_changed(machine(fake.online))
    agent.full()
    agent.pump()
    assert agent.state.assignments[owner].cpus == CPUSet.parse("3")
    assert agent.cpus(owner) == "3"
    assert agent.runs_on(second) == "2"


def test_a_root_inside_a_root_is_refused(fake: FakeCgroup, agents: Made) -> None:
    agent = start(fake, agents)
    agent.observer._roots = ("/kubepods/besteffort", pod(1))
    other = besteffort(agent, 9)
    agent.full()
    assert not agent.observer.view.slices["/kubepods/besteffort"].is_root
    assert pod(1) not in agent.observer.view.slices
    assert agent.observer.view.find_container(other) is not None
    assert "inside" in str(agent.observer.problems)


def test_cgroups_made_in_a_container_cost_one_look(
    tmp_path: Path, agents: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenant makes them at will, thousands of them: neither their number nor their events may starve the rest."""
    fake = node(tmp_path, 1)
    agent = start(fake, agents)
    busy = besteffort(agent, 9)
    for number in range(300):
        fake.mkdir(f"{busy}/n{number}")
        for name in ("cpuset.cpus", "cpuset.mems"):
            fake.write(f"{busy}/n{number}", name, fake.read(busy, name))
    reads: list[str] = []

    def read_cpus(path: str) -> CPUSet | None:
        reads.append(path)
        return type(fake.fs).read_cpus(fake.fs, path)

    monkeypatch.setattr(fake.fs, "read_cpus", read_cpus)
    agent.pump()
    assert 0 < len(reads) < 300
    owner = guaranteed(agent, 1, 2000)
    assert agent.runs_on(owner) == "1-2"
    agent.later(0.1)
    assert agent.runs_on(busy) == "0,3-7"
    assert {agent.runs_on(f"{busy}/n{number}") for number in range(300)} == {"0,3-7"}


def test_a_root_has_one_name_however_it_is_written(fake: FakeCgroup) -> None:
    observer = Observer(
        fake.fs, machine(fake.online), lambda: 0.0, lambda pid: "app", roots=("//kubepods", "/kubepods/")
    )
    for _ in observer.scan():
        pass
    assert sorted(observer.view.slices) == ["/kubepods", "/kubepods/besteffort", "/kubepods/burstable"]


def test_kubelet_files_that_are_pipes_or_huge_do_not_stop_the_loop(tmp_path: Path) -> None:
    config, state = tmp_path / "config.yaml", tmp_path / "cpu_manager_state"
    os.mkfifo(state)
    config.write_text("k: v\n" * 200_000)
    began = time.monotonic()
    view = read_kubelet(tmp_path, config)
    assert time.monotonic() - began < 5
    assert (view.policy, view.state_policy) == (None, None)
    assert "too large" in str(view.problems)


def test_our_own_write_to_a_nested_cgroup_is_no_drift(tmp_path: Path, agents: Made) -> None:
    fake = node(tmp_path, 1)
    agent = start(fake, agents)
    other = besteffort(agent, 9)
    fake.mkdir(f"{other}/inner")
    for name in ("cpuset.cpus", "cpuset.mems"):
        fake.write(f"{other}/inner", name, fake.read(other, name))
    agent.pump()
    agent.later(20)
    make_pod(fake, pod(1), 2000)
    for _ in create_like_runc(fake, container(pod(1), 1), 101):
        pass
    agent.observer.look(pod(1))
    agent.reconciler.hot([pod(1)])
    assert agent.runs_on(f"{other}/inner") == "0,3-7"
    fake.fs.log.clear()
    for _ in agent.reconciler.settle():  # before the events of what was just written have been read
        pass
    assert fake.fs.log == []
    assert agent.state.drift == {}


def test_a_pin_over_an_owners_cpus_is_told(fake: FakeCgroup, agents: Made, caplog: pytest.LogCaptureFixture) -> None:
    agent = start(fake, agents)
    owner = guaranteed(agent, 1, 2000)
    path = pod(5, "burstable")
    make_pod(fake, path, 500)
    agent.pump()
    with caplog.at_level(logging.WARNING):
        run(agent, container(path, 5), 105, 500, cpus="2-4")
    assert (agent.runs_on(owner), agent.runs_on(container(path, 5))) == ("1-2", "2-4")
    assert "CPUs 2 are owned" in " ".join(caplog.messages)
    assert agent.runs_on(besteffort(agent, 9)) == "0,5-7"


@pytest.mark.parametrize("level", ["/kubepods/besteffort", pod(9)])
def test_a_refused_write_is_tried_again_at_every_level(tmp_path: Path, agents: Made, level: str) -> None:
    fake = node(tmp_path, 2)
    agent = start(fake, agents)
    make_pod(fake, pod(9), 500)
    agent.pump()
    run(agent, container(pod(9), 9), 109, 500)
    owner = guaranteed(agent, 1, 2000)
    fake.fs.fail(errno.EINVAL, level)
    gone(agent, owner, 101)
    gone(agent, pod(1))
    assert agent.cpus(level) == "0,3-7"
    assert agent.reconciler.retrying() == 1
    fake.fs._failures.clear()
    agent.later(6)
    assert agent.cpus(level) == "0-7"
    assert agent.reconciler.retrying() == 0


def test_spec_set_written_between_look_and_write_is_not_lost(tmp_path: Path, agents: Made) -> None:
    """v2: runc writes the spec's own set last, perhaps just when the pools are narrowed for our decision."""
    fake = node(tmp_path, 2)
    agent = start(fake, agents)
    path = pod(1)
    make_pod(fake, path, 2000)
    agent.pump()
    theirs = container(path, 1)
    agent.comms[101] = "runc:[2:INIT]"
    for _step in create_like_runc(fake, theirs, 101, quota=200000, shares=2048, weight=79):
        if fake.read(theirs, "cpu.max").startswith("200000"):
            break
        agent.pump()
    fake.fs.at(1, lambda: fake.write(theirs, "cpuset.cpus", "5-6"))
    agent.pump()
    agent.comms[101] = "app"
    agent.later(20)
    agent.full()
    assert agent.runs_on(theirs) == "5-6"
    assert agent.state.foreign == {theirs: CPUSet.parse("5-6")}
    assert agent.state.assignments == {}
