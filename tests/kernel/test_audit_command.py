"""`audit` on real cgroups: right about them, and nothing below /sys, /proc or in the state directory is written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from enforcer.core.kubepods import QoSClass
from enforcer.kernel.cgroupfs import CgroupFS
from enforcer.mimic import MimicNode
from tests.kernel.agent_process import AgentProcess, cpus
from tests.kernel.conftest import wait_until

pytestmark = pytest.mark.root

# The command as cli.py calls it, in a process in which opening anything for writing there ends it at once (PEP 578).
PROGRAM = r"""
import argparse, os, sys
from pathlib import Path

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = {"os.mkdir", "os.rmdir", "os.remove", "os.rename", "os.link", "os.symlink", "os.truncate", "os.chmod",
           "os.chown", "os.utime", "os.setxattr", "subprocess.Popen", "os.fork", "os.exec", "os.kill", "os.system",
           "fcntl.flock", "fcntl.lockf", "socket.connect"}
opened = 0

def hook(event, args):
    global opened
    if event == "open":
        opened += str(args[0]).startswith("/sys/fs/cgroup")
        if args[2] & WRITING:
            os.write(2, f"opened for writing: {args[0]!r}\n".encode())
            os._exit(99)
    elif event in CHANGES:
        os.write(2, f"changed: {event} {args!r}\n".encode())
        os._exit(99)

from enforcer.audit import plan_audit
from enforcer.config import load
from enforcer.core.errors import EnforcerError
from enforcer.service import policy_of
from enforcer.status import read_agent

parser = argparse.ArgumentParser()
parser.add_argument("--config", type=Path)
parser.add_argument("--provoke")
plan_audit.add_arguments(parser)
arguments = parser.parse_args()
sys.addaudithook(hook)
if arguments.provoke:
    open(arguments.provoke, "r+").close()
try:
    code = plan_audit.main(arguments, load(arguments.config), policy_of, read_agent)
except EnforcerError as error:
    print(error, file=sys.stderr)
    code = 3
assert opened or code == 3, "the hook saw no cgroup file at all"
sys.exit(code)
"""


@pytest.fixture
def node() -> Iterator[MimicNode]:
    """A node of the CPUs 0 and 1, whatever this machine has."""
    if os.geteuid() != 0:
        pytest.skip("needs root to make cgroups")
    fs = CgroupFS.discover()
    with MimicNode(fs, f"/ce-test-audit-{os.getpid()}/kubepods") as made:
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


def audit(agent: AgentProcess, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-B", "-c", PROGRAM, "--config", str(agent.config), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode in (0, 1, 3), done.stderr
    return done


def found(agent: AgentProcess, *arguments: str) -> dict[str, Any]:
    done = audit(agent, "--json", *arguments)
    document: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == (0 if document["clean"] else 1)
    return document


def test_the_guard_of_this_test_sees_writes(agent: AgentProcess, node: MimicNode) -> None:
    file = f"{CgroupFS.discover().cpuset_dir(node.root)}/cpuset.cpus"
    command = [sys.executable, "-c", PROGRAM, "--config", str(agent.config), "--provoke", file]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 99
    assert f"opened for writing: '{file}'" in done.stderr


def test_node_kept_by_an_agent_then_disturbed(agent: AgentProcess, node: MimicNode) -> None:
    agent.start()
    other = node.pod(QoSClass.BESTEFFORT, "best", milli=None).container(milli=0)
    owner = node.pod(QoSClass.GUARANTEED, "owner", milli=1000).container(milli=1000)
    wait_until(lambda: (owner.affinity(), other.affinity()) == (cpus("1"), cpus("0")), "pinned", 10)
    wait_until(lambda: owner.path in agent.state().assignments, "the agent's state is on disk", 10)
    clean = audit(agent)
    assert (clean.returncode, clean.stderr) == (0, "")
    assert clean.stdout.splitlines()[-1] == "clean: 2 containers in 2 pods, exclusive CPUs 1, shared pool 0"
    agent.end()
    CgroupFS.discover().write_cpus(owner.path, cpus("0-1"))
    (one,) = found(agent, "--settle", "0.1")["findings"]
    assert (one["check"], one["path"], one["container"]) == ("cpuset", owner.path, owner.id)
    assert (one["found"], one["wanted"]) == ("CPUs 0-1", "CPUs 1")
    assert owner.affinity() == cpus("0-1"), "only looked at"


def test_nobody_pins(agent: AgentProcess, node: MimicNode) -> None:
    owner = node.pod(QoSClass.GUARANTEED, "owner", milli=1000).container(milli=1000)
    waiting = node.pod(QoSClass.GUARANTEED, "late", milli=1000).container(milli=1000)
    document = found(agent, "--settle", "0")
    pinned = {owner.path, waiting.path} & {one["path"] for one in document["findings"] if one["wanted"] == "CPUs 1"}
    unsatisfied = {one["path"] for one in document["findings"] if one["check"] == "unsatisfied"}
    assert len(pinned) == 1
    assert unsatisfied == {owner.path, waiting.path} - pinned
    assert any("no agent has left its state" in text for text in document["information"])
    assert not agent.state_dir.exists()


def test_torn_state_file_is_left_where_it_is(agent: AgentProcess, node: MimicNode) -> None:
    agent.state_dir.mkdir()
    file = agent.state_dir / "state.json"
    file.write_text("torn")
    before = file.stat()
    assert any(f"{file} cannot be read" in text for text in found(agent)["information"])
    assert [one.name for one in agent.state_dir.iterdir()] == ["state.json"]
    assert (file.stat().st_mtime_ns, file.stat().st_ino) == (before.st_mtime_ns, before.st_ino)


def test_static_kubelet_is_told(agent: AgentProcess, node: MimicNode, tmp_path: Path) -> None:
    (tmp_path / "kubelet").mkdir()
    (tmp_path / "kubelet/cpu_manager_state").write_text('{"policyName":"static","defaultCpuSet":"0-1","checksum":0}')
    told = found(agent)["information"]
    assert any(text.startswith("mode enforce would be refused: the kubelet gives out CPUs itself") for text in told)


def test_node_without_kubepods_cannot_be_audited(tmp_path: Path) -> None:
    if any(name.startswith("kube") for name in os.listdir(CgroupFS.discover().cpuset_root)):
        pytest.skip("this machine has a kubepods of its own")
    done = audit(AgentProcess(tmp_path, f"/ce-test-none-{os.getpid()}/kubepods"))
    assert done.returncode == 3
    assert "there is no kubepods cgroup with CPUs here" in done.stderr
