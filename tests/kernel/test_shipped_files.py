"""What systemd and Prometheus themselves say of the files in systemd/."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from enforcer.core.kubepods import QoSClass
from enforcer.kernel.cgroupfs import CgroupFS
from enforcer.mimic import MimicNode
from tests import promtool
from tests.kernel.agent_process import AgentProcess, cpus
from tests.kernel.conftest import wait_until

FOLDER = Path(__file__).parents[2] / "systemd"
MOST_EXPOSED = 3.5


def said(*command: str | Path, cwd: Path | None = None) -> tuple[int, str]:
    done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def analyze(tmp_path: Path) -> tuple[str, Path]:
    """systemd-analyze, and the unit with a program that is there on every machine."""
    tool = shutil.which("systemd-analyze")
    if not tool:
        pytest.skip("no systemd-analyze on this machine (Debian: package systemd)")
    text = (FOLDER / "cpuset-enforcer.service").read_text()
    unit = tmp_path / "cpuset-enforcer.service"
    unit.write_text(re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", text, flags=re.M))
    return tool, unit


@pytest.fixture
def rules(tmp_path: Path) -> tuple[Path, Path]:
    """promtool, and a copy of the alert rules with their tests."""
    tool = promtool.find()
    if tool is None:
        pytest.skip("no promtool on this machine: python -m tests.promtool gets it (Debian: package prometheus)")
    shutil.copytree(FOLDER / "alerts", tmp_path / "alerts")
    return tool, tmp_path / "alerts"


def test_systemd_understands_the_unit(analyze: tuple[str, Path]) -> None:
    tool, unit = analyze
    assert said(tool, "verify", unit) == (0, "")
    unit.write_text(unit.read_text() + "\n[Service]\nNoSuchKey=1\n")
    assert "NoSuchKey" in said(tool, "verify", unit)[1]


def test_exposure(analyze: tuple[str, Path]) -> None:
    tool, unit = analyze
    code, text = said(tool, "security", "--offline=yes", "--no-pager", unit)
    figure = re.search(r"Overall exposure level for \S+: ([\d.]+)", text)
    assert code == 0, text
    assert figure, text
    assert float(figure[1]) <= MOST_EXPOSED


@pytest.fixture
def node() -> Iterator[MimicNode]:
    """A node of the CPUs 0 and 1, whatever this machine has."""
    if os.geteuid() != 0:
        pytest.skip("needs root to make cgroups")
    fs = CgroupFS.discover()
    with MimicNode(fs, f"/ce-test-unit-{os.getpid()}/kubepods") as made:
        if fs.version == 1:
            fs.write_cpus(made.root, cpus("0-1"))
        fs.write_cpus(os.path.dirname(made.root), cpus("0-1"))
        yield made


@pytest.mark.root
def test_capabilities_of_the_unit_suffice(node: MimicNode, tmp_path: Path) -> None:
    text = (FOLDER / "cpuset-enforcer.service").read_text()
    names = re.findall(r"^CapabilityBoundingSet=(.+)$", text, re.M)[0].lower().split()
    bounds = ",".join(["-all", *(f"+{name.removeprefix('cap_')}" for name in names)])
    owner = node.pod(QoSClass.GUARANTEED, "owner", milli=1000).container(milli=1000)
    inside = Path(CgroupFS.discover().cpuset_dir(owner.path), "inside")
    inside.mkdir()
    for file in ("cpuset.mems", "cpuset.cpus") if CgroupFS.discover().version == 1 else ():
        (inside / file).write_text((inside.parent / file).read_text())
    for entry in (inside, *inside.iterdir()):
        os.chown(entry, 1000, 1000)  # made by a container in a user namespace
    agent = AgentProcess(tmp_path, node.root, fifo=True)
    try:
        agent.start(("setpriv", f"--bounding-set={bounds}", "--no-new-privs"))
        wait_until(lambda: owner.affinity() == cpus("1"), f"pinned:\n{agent.log()}", 10)
        assert os.sched_getscheduler(agent.pid) & ~os.SCHED_RESET_ON_FORK == os.SCHED_FIFO, agent.log()
        for refused in ("refused", "will not be named", "at the rescan only", "ermission"):
            assert refused not in agent.log()
    finally:
        agent.end()
        inside.rmdir()


def test_prometheus_takes_the_rules(rules: tuple[Path, Path]) -> None:
    tool, folder = rules
    code, text = said(tool, "check", "rules", "--lint=all", "--lint-fatal", folder / "cpuset-enforcer.rules.yml")
    assert code == 0, text


def test_alerts_fire_when_they_must(rules: tuple[Path, Path]) -> None:
    tool, folder = rules
    code, text = said(tool, "test", "rules", "cpuset-enforcer.test.yml", cwd=folder)
    assert code == 0, text


# (rule as it is, as it must not be, what its tests then complain of)
WRONG = [
    ('up{job="cpuset-enforcer"} == 0', "up == 0", "alertname: CpusetEnforcerDown, time: 8m"),
    ("for: 3m", "for: 1m", "time: 6m"),
    ("absent(up{", "absent(upp{", 'alertname="CpusetEnforcerAbsent"'),
    ("> 600 or", "> 60000 or", "time: 15m"),
    ("> 600 or", "> 200 or", "time: 12m"),
    ("or cpuset_enforcer_agent_state_found == 0", "", "time: 12m"),
    ('state="unsatisfied"} > 0', 'state="shared"} > 0', "alertname: CpusetEnforcerUnsatisfied, time: 10m"),
    ('containers{state="unsatisfied"}', "containers", 'state="exclusive"'),
    ("sum without (writer) (increase(", "(increase(", "time: 20m"),
    (")) > 10", ")) > 5", "time: 20m"),
    (")) > 10", ")) > 100", "alertname: CpusetEnforcerDrift, time: 30m"),
    ("conflicts > 0", "conflicts > 3", "alertname: CpusetEnforcerConflict, time: 6m"),
    ("conflicts > 0", "conflicts >= 0", "time: 1h"),
]


@pytest.mark.parametrize(("right", "wrong", "complaint"), WRONG)
def test_a_wrong_rule_is_found(rules: tuple[Path, Path], right: str, wrong: str, complaint: str) -> None:
    tool, folder = rules
    file = folder / "cpuset-enforcer.rules.yml"
    text = file.read_text()
    assert right in text
    file.write_text(text.replace(right, wrong))
    code, output = said(tool, "test", "rules", "cpuset-enforcer.test.yml", cwd=folder)
    assert code == 1
    assert "FAILED" in output
    assert complaint in output
