"""explain, simulate, record and doctor about a node on which the agent is at work, on this machine's real cgroups."""

from __future__ import annotations

import argparse
import json
import os
import stat
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from enforcer.config import load
from enforcer.core.cpuset import CPUSet
from enforcer.core.kubepods import QoSClass
from enforcer.kernel.cgroupfs import CgroupFS
from enforcer.kernel.sysfs import read_topology
from enforcer.kernel.usermask import keeps_user_masks
from enforcer.mimic import MimicNode
from tests.kernel.agent_process import AgentProcess, cpus
from tests.kernel.conftest import wait_until

pytestmark = pytest.mark.root


@pytest.fixture
def node() -> Iterator[MimicNode]:
    """A node of the CPUs 0 and 1, whatever this machine has."""
    if os.geteuid() != 0:
        pytest.skip("needs root to make cgroups")
    fs = CgroupFS.discover()
    with MimicNode(fs, f"/ce-test-ask-{os.getpid()}/kubepods") as made:
        for path in ("/burstable", "/besteffort", "", "/.."):
            if fs.version == 1:
                fs.write_cpus(os.path.normpath(made.root + path), cpus("0-1"))
        fs.write_cpus(os.path.dirname(made.root), cpus("0-1"))
        yield made


@pytest.fixture
def agent(tmp_path: Path, node: MimicNode) -> Iterator[AgentProcess]:
    """Not yet started."""
    one = AgentProcess(tmp_path, node.root)
    yield one
    one.end()


class Asked:
    """One command, run here with the agent's config."""

    def __init__(self, agent: AgentProcess, capsys: pytest.CaptureFixture[str]) -> None:
        self.agent = agent
        self.capsys = capsys

    def text(self, command: str, *words: str) -> tuple[int, str]:
        module = import_module(f"enforcer.{command}")
        parser = argparse.ArgumentParser()
        module.add_arguments(parser)
        self.capsys.readouterr()
        code = module.main(parser.parse_args(words), load(self.agent.config))
        return code, " ".join(self.capsys.readouterr().out.split())

    def json(self, command: str, *words: str) -> tuple[int, dict[str, Any]]:
        code, text = self.text(command, *words, "--json")
        document: dict[str, Any] = json.loads(text)
        return code, document


@pytest.fixture
def ask(agent: AgentProcess, capsys: pytest.CaptureFixture[str]) -> Asked:
    return Asked(agent, capsys)


def test_a_newcomers_questions(ask: Asked, agent: AgentProcess, node: MimicNode, tmp_path: Path) -> None:
    agent.start()
    other = node.pod(QoSClass.BURSTABLE, "web", milli=500).container(milli=500)
    owner = node.pod(QoSClass.GUARANTEED, "owner", milli=1000).container(milli=1000)
    wait_until(lambda: (owner.affinity(), other.affinity()) == (cpus("1"), cpus("0")), "pinned", 10)
    late = node.pod(QoSClass.GUARANTEED, "late", milli=1000).container(milli=1000)
    wait_until(lambda: late.path in agent.state().unsatisfied, "the second one waits", 10)

    code, answer = ask.json("explain", "CPU", "1")
    assert (code, answer["holder"]["path"], answer["may_run"]) == (0, owner.path, [owner.path])
    code, answer = ask.json("explain", owner.id[:12])
    assert (code, answer["verdict"], answer["own"], answer["may_run"]) == (0, "own", "1", "1")
    assert answer["pending"] is False and answer["amiss"] == [] and answer["writes"] == []
    code, answer = ask.json("explain", late.path)
    assert (code, answer["verdict"]) == (1, "waiting")
    assert [h["path"] for h in answer["holders"]] == [owner.path]
    assert [b["path"] for b in answer["because"] if b["kind"] == "would-help"] == [os.path.dirname(owner.path)]
    code, text = ask.text("explain", other.id)
    assert code == 0 and "only Guaranteed pods get CPUs of their own" in text

    code, plan = ask.json("simulate", "--add", "new=1")
    assert code == 1 and plan["stages"][0]["writes"] == [], "the running node is as it must be"
    assert len(plan["unsatisfied"]) == 2
    code, plan = ask.json("simulate", "--remove", os.path.dirname(owner.path))
    assert (code, plan["owners"][late.path]["cpus"]) == (0, "1")

    file = tmp_path / "node.rec"
    assert ask.text("record", str(file))[0] == 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    live, packed = ask.json("simulate", "--add", "new=1"), ask.json("simulate", "--from", str(file), "--add", "new=1")
    assert unsaid(live[1]) == unsaid(packed[1])
    assert os.path.realpath("/proc/self/exe") not in file.read_bytes().decode("latin1")

    code, found = ask.json("doctor")
    levels = {check["name"]: check["level"] for check in found["checks"]}
    assert (levels["agent"], levels["pins"], levels["CPUs"], levels["kubepods"]) == ("ok", "ok", "ok", "ok")
    drift(ask, agent, owner.path)


def unsaid(plan: dict[str, Any]) -> dict[str, Any]:
    """Without the moment: what waits has a time."""
    for waiting in plan["unsatisfied"].values():
        waiting.pop("since")
    return plan


def drift(ask: Asked, agent: AgentProcess, path: str) -> None:
    """With the agent gone a foreign write stays, and is told; so is that no agent runs."""
    agent.end()
    CgroupFS.discover().write_cpus(path, cpus("0-1"))
    code, text = ask.text("explain", path)
    assert code == 1
    assert "NOT running" in text and "it may run on CPUs 0-1, its own are 1" in text
    assert "0-1 -> 1" in text, "what the next start would write"


def test_without_an_agent_it_says_what_would_be(ask: Asked, node: MimicNode) -> None:
    owner = node.pod(QoSClass.GUARANTEED, "owner", milli=1000).container(milli=1000)
    code, text = ask.text("explain", owner.id)
    assert code == 0
    assert "no agent's word" in text and "will get CPU 1 of its own" in text
    code, plan = ask.json("simulate")
    assert (code, plan["owners"][owner.path]["cpus"]) == (0, "1")
    assert owner.affinity() == cpus("0-1"), "only looked at"


def test_this_kernels_user_masks() -> None:
    """What the probe says is what this kernel does; it leaves nothing behind."""
    fs, online = CgroupFS.discover(), read_topology().online
    before = set(fs.children("/") or ())
    first, second = keeps_user_masks(fs, online), keeps_user_masks(fs, online)
    assert first == second
    release = tuple(int(part) for part in os.uname().release.split(".")[:2])
    if first is not None and release >= (6, 2):
        assert first is True, "Linux 6.2 keeps them (kernel.md)"
    assert set(fs.children("/") or ()) == before
    assert keeps_user_masks(fs, CPUSet([0])) is None


def test_doctor_on_this_machine(ask: Asked) -> None:
    code, found = ask.json("doctor", "--probe")
    levels = {check["name"]: check["level"] for check in found["checks"]}
    assert code == found["exit"] in (0, 1)
    assert levels["user"] == "ok" and levels["cgroups"] == "ok" and levels["inotify"] == "ok"
    assert os.sched_getscheduler(0) == os.SCHED_OTHER, "the try is undone"
