"""audit on made trees: clean where the agent has been, and exactly the fault that was made."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from enforcer.audit import plan_audit
from enforcer.audit.plan_audit import Finding, Report, examine, lasting, render, to_json
from enforcer.config import Config
from enforcer.core.cpuset import CPUSet
from enforcer.core.policy import Policy
from enforcer.core.state import State
from enforcer.observe import Observer
from tests.fakefs.cgroup_tree import FakeCgroup
from tests.fakefs.fake_agent import FakeAgent, container, machine, pod
from tests.fakefs.test_reconcile import limits, make_pod, node, run

POLICY = Policy(CPUSet([0]))
OWNER = container(pod(1), 1)
BEST = container(pod(2, "besteffort"), 2)


@pytest.fixture(params=[1, 2])
def fake(request: pytest.FixtureRequest, tmp_path: Path) -> FakeCgroup:
    return node(tmp_path, request.param, online="0-3")


@pytest.fixture
def agent(fake: FakeCgroup) -> Iterator[FakeAgent]:
    """An agent at work, an owner of two CPUs and a BestEffort container."""
    one = FakeAgent(fake)
    for path, milli in ((pod(1), 2000), (pod(2, "besteffort"), None)):
        make_pod(fake, path, milli)
        one.pump()
    run(one, OWNER, 11, 2000)
    run(one, BEST, 12, None)
    one.later(11)
    yield one
    one.close()


def audit(fake: FakeCgroup, state: State | None = None, policy: Policy = POLICY) -> Report:
    observer = Observer(fake.fs, machine(fake.online), lambda: 2000.0, lambda pid: "app")
    for _ in observer.scan():
        pass
    return examine(observer.view, state or State(), policy, 2000.0, observer.problems)


def checks(report: Report) -> list[tuple[str, str]]:
    return [(one.check, one.path) for one in report.findings]


def test_what_an_agent_keeps_right_is_clean(agent: FakeAgent) -> None:
    report = audit(agent.fake, agent.state)
    assert (report.clean, report.information) == (True, ())
    assert render(report) == "clean: 2 containers in 2 pods, exclusive CPUs 1-2, shared pool 0,3"


def test_pins_alone_are_believed_where_the_state_is_lost(agent: FakeAgent) -> None:
    assert audit(agent.fake).findings == ()


def test_node_without_pods_is_clean(fake: FakeCgroup) -> None:
    assert audit(fake).clean


def test_owner_moved_by_hand(agent: FakeAgent) -> None:
    agent.fake.write(OWNER, "cpuset.cpus", "1,3")
    report = audit(agent.fake, agent.state)
    (one,) = report.findings
    may = "CPUs 1,3" if agent.fake.version == 1 else f"CPUs 1,3, runs on {agent.runs_on(OWNER)}"
    assert one == Finding(
        "cpuset", OWNER, pod(1)[-36:], f"{1:064x}", may, "CPUs 1-2",
        "its own 2 CPUs: quota 200000/100000, " + ("shares 2048" if agent.fake.version == 1 else "weight 79"),
    )  # fmt: skip


def test_neighbour_widened_by_hand(agent: FakeAgent) -> None:
    place = BEST if agent.fake.version == 1 else "/kubepods/besteffort"
    agent.fake.write(place, "cpuset.cpus", "0-3")
    (one,) = audit(agent.fake, agent.state).findings
    assert (one.check, one.path, one.found, one.wanted) == ("cpuset", place, "CPUs 0-3", "CPUs 0,3")


def test_without_an_agent_all_that_it_would_change_is_found_and_then_it_is_clean(fake: FakeCgroup) -> None:
    for path, name, milli in ((pod(1), OWNER, 2000), (pod(2, "besteffort"), BEST, None)):
        make_pod(fake, path, milli)
        fake.mkdir(name)
        if fake.version == 1:
            fake.write(name, "cpuset.cpus", "0-3")
        limits(fake, name, milli)
    before = {path: fake.read(path, "cpuset.cpus") for path in (OWNER, BEST, "/kubepods/besteffort")}
    report = audit(fake)
    found = {one.path: (one.found, one.wanted) for one in report.findings}
    everywhere = "CPUs 0-3" if fake.version == 1 else "CPUs none set, runs on 0-3"
    assert found[OWNER] == (everywhere, "CPUs 1-2")
    assert found[BEST if fake.version == 1 else "/kubepods/besteffort"] == (everywhere, "CPUs 0,3")
    assert {path: fake.read(path, "cpuset.cpus") for path in before} == before, "nothing was written"
    agent = FakeAgent(fake)
    assert all(agent.cpus(path) for path in found)
    assert audit(fake, agent.state).clean
    agent.close()


def test_unsatisfied_is_a_finding(agent: FakeAgent) -> None:
    make_pod(agent.fake, pod(3), 3000)
    agent.pump()
    waiting = container(pod(3), 3)
    run(agent, waiting, 13, 3000)
    report = audit(agent.fake, agent.state)
    (one,) = report.findings
    assert (one.check, one.path, one.wanted) == ("unsatisfied", waiting, "3 CPUs of its own")
    assert "has 0 of its own, 1 are free for it: not enough CPUs available" in one.why
    assert render(report).endswith("1 finding: 3 containers in 3 pods; nothing was written")


def test_what_somebody_else_pinned_is_information(agent: FakeAgent) -> None:
    make_pod(agent.fake, pod(3, "burstable"), 500)
    agent.pump()
    theirs = container(pod(3, "burstable"), 3)
    run(agent, theirs, 13, 500, cpus="3")
    agent.pump()
    report = audit(agent.fake, agent.state)
    assert report.clean
    assert [text for text in report.information if "was given CPUs 3 by somebody else" in text]


def test_another_cpu_manager_is_named(agent: FakeAgent) -> None:
    make_pod(agent.fake, pod(3), 2000)
    agent.pump()
    run(agent, container(pod(3), 3), 13, 2000, cpus="3")
    report = audit(agent.fake, agent.state)
    assert any("somebody else gives out whole CPUs on this node" in text for text in report.information)


def test_controller_that_was_taken_away(tmp_path: Path) -> None:
    fake = node(tmp_path, 2, online="0-3")
    make_pod(fake, pod(1), 1000)
    fake.write(pod(1), "cgroup.subtree_control", "-cpuset")
    fake.mkdir(OWNER)
    limits(fake, OWNER, 1000)
    assert ("controller", pod(1)) in checks(audit(fake))


def test_unreadable_cgroups_below_the_root_are_no_clean_node(fake: FakeCgroup) -> None:
    observer = Observer(fake.fs, machine(fake.online), lambda: 2000.0, lambda pid: "app")
    for _ in observer.scan():
        pass
    problems = {"/kubepods/burstable/podx": "Permission denied", "/user.slice/kubepods": "does not belong to root"}
    report = examine(observer.view, State(), POLICY, 2000.0, problems)
    assert checks(report) == [("unreadable", "/kubepods/burstable/podx")]
    assert report.information == ("/user.slice/kubepods: does not belong to root",)


def finding(path: str, check: str = "cpuset") -> Finding:
    return Finding(check, path, "", "", "CPUs 0-1", "CPUs 0", "shared pool")


def test_only_what_lasts_is_a_finding() -> None:
    first = Report((finding("/a"), finding("/b"), finding("/c", "unsatisfied")))
    second = Report((finding("/b"), finding("/c"), finding("/d")), ("note",), {"pods": 1})
    assert lasting(first, second) == Report((finding("/b"),), ("note",), {"pods": 1})


def test_names_that_others_chose_do_no_harm_in_a_terminal() -> None:
    report = Report((finding("/kubepods/\x1b[2J"),), (), {"containers": 0, "pods": 0})
    assert "\x1b" not in render(report)


def test_json_has_it_all(agent: FakeAgent) -> None:
    agent.fake.write(OWNER, "cpuset.cpus", "1")
    document = json.loads(json.dumps(to_json(audit(agent.fake, agent.state))))
    assert document["clean"] is False
    assert document["findings"][0]["pod"] == pod(1)[-36:]
    assert document["findings"][0]["check"] == "cpuset"
    assert (document["exclusive"], document["reserved"], document["pods"]) == ("1-2", "0", 2)


# --- the command


def run_main(monkeypatch: pytest.MonkeyPatch, looks: list[Report], *arguments: str) -> tuple[int, list[float]]:
    """main() on looks made beforehand: its exit code and how long it slept."""
    slept: list[float] = []
    monkeypatch.setattr(plan_audit, "_look", lambda *rest: looks.pop(0))
    monkeypatch.setattr(plan_audit.time, "sleep", slept.append)
    parser = argparse.ArgumentParser()
    plan_audit.add_arguments(parser)
    never = pytest.fail
    return plan_audit.main(parser.parse_args(arguments), Config(), never, never), slept


FIGURES = {"containers": 1, "pods": 1, "exclusive": "1", "shared": "0"}
BAD, FINE = Report((finding("/a"),), (), FIGURES), Report((), (), FIGURES)


def test_exit_codes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main(monkeypatch, [FINE]) == (0, [])
    assert capsys.readouterr().out == "clean: 1 containers in 1 pods, exclusive CPUs 1, shared pool 0\n"
    assert run_main(monkeypatch, [BAD, BAD]) == (1, [1.0])
    assert run_main(monkeypatch, [BAD, FINE]) == (0, [1.0])
    assert run_main(monkeypatch, [BAD], "--settle", "0") == (1, [])
    capsys.readouterr()
    assert run_main(monkeypatch, [BAD], "--settle", "0", "--json") == (1, [])
    assert json.loads(capsys.readouterr().out)["findings"][0]["path"] == "/a"


@pytest.mark.parametrize("text", ["nan", "-1", "x", "1e9", ""])
def test_wrong_settle(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    with pytest.raises(SystemExit) as told:
        run_main(monkeypatch, [], "--settle", text)
    assert told.value.code == 2
