"""What systemd and Prometheus themselves say of the files in systemd/."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests import promtool

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
