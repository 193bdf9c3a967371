"""The demo on this machine: every check holds, nothing is left behind, also after Ctrl-C; and it does not flatter."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from enforcer.demo import process, run_demo
from enforcer.kernel.cgroupfs import CgroupFS
from tests.kernel.conftest import wait_until

pytestmark = pytest.mark.root


@pytest.fixture
def roots() -> set[Path]:
    if os.geteuid() != 0:
        pytest.skip("needs root to make cgroups")
    fs = CgroupFS.discover()
    return {Path(fs.cpuset_root), Path(fs.cpu_root)}


def left_over(roots: set[Path], pid: int) -> list[Path]:
    """Cgroups of the demo with this pid."""
    return [found for root in roots for found in root.glob(f"cpuset-enforcer-demo-{pid}*")]


def folders(pid: int) -> list[Path]:
    """Temporary folders of the demo with this pid, wherever it may make them."""
    places = {Path(place) for place in ("/run", "/dev/shm", tempfile.gettempdir())}
    return [found for place in places for found in place.glob(f"cpuset-enforcer-demo-{pid}-*")]


def start(*arguments: str, stdout: int = subprocess.PIPE) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "enforcer", "demo", *arguments]
    environment = {**os.environ, "COLUMNS": "60"}
    return subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE, text=True, env=environment)


def test_every_check_holds_and_nothing_is_left(roots: set[Path]) -> None:
    demo = start()
    out, err = demo.communicate(timeout=60)
    assert (demo.returncode, err) == (0, ""), out
    assert out.endswith(f"\ndemo: {out.count('   ok      ')} checks, all held\n")
    assert out.count("   ok      ") >= 25
    held = [line for line in out.splitlines() if line.strip().startswith("[") and "+" in line]
    assert held == [], "each map is drawn when all is settled"
    assert [line for line in out.splitlines() if len(line) > 60] == []
    assert left_over(roots, demo.pid) + folders(demo.pid) == []


def test_a_full_disk_is_told(roots: set[Path]) -> None:
    with Path("/dev/full").open("w") as full:
        demo = start("--json", stdout=full.fileno())
        _, err = demo.communicate(timeout=60)
    assert err == "cpuset-enforcer: standard output cannot be written: No space left on device\n"
    assert demo.returncode == 3
    assert left_over(roots, demo.pid) + folders(demo.pid) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_leaves_nothing(roots: set[Path], number: signal.Signals) -> None:
    demo = start()
    wait_until(lambda: len(left_over(roots, demo.pid)) == len(roots), "the demo has made its cgroups", 10)
    demo.send_signal(number)
    out, err = demo.communicate(timeout=20)
    assert (demo.returncode, err) == (130, "")
    assert out.endswith("demo: interrupted; everything it made is removed\n")
    assert left_over(roots, demo.pid) + folders(demo.pid) == []


def test_an_agent_that_does_nothing_fails_the_demo(
    roots: set[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In audit mode nobody is pinned: the first owner is not one, and the demo says so."""
    monkeypatch.setattr(process, "MODE", "audit")
    monkeypatch.setattr("enforcer.demo.stage._PATIENCE", 0.2)
    assert run_demo(argparse.Namespace(json=True)) == 1
    found = json.loads(capsys.readouterr().out)
    failed = {check["what"]: check["found"] for check in found["checks"] if not check["held"]}
    owner = next(found for what, found in failed.items() if what.startswith("db has ") and what.endswith(" of its own"))
    assert owner.startswith("it may run on ")
    assert found["ok"] is False
    assert left_over(roots, os.getpid()) == []


def test_what_a_killed_demo_left_is_swept(roots: set[Path]) -> None:
    """Its processes died with it; the next demo removes its empty cgroups."""
    killed = start()
    wait_until(lambda: len(left_over(roots, killed.pid)) == len(roots), "the demo has made its cgroups", 10)
    killed.kill()
    killed.communicate(timeout=20)
    assert left_over(roots, killed.pid)
    following = start()
    wait_until(lambda: left_over(roots, killed.pid) == [], "the next demo has removed them", 10)
    following.send_signal(signal.SIGINT)
    following.communicate(timeout=20)
    assert left_over(roots, following.pid) == []
    assert folders(killed.pid) == []
