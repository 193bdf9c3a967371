"""The benchmarks run, print one JSON object, and leave nothing behind. No time is judged here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from enforcer.kernel.cgroupfs import CgroupFS
from tests.bench.figures import growth, percentiles, slope
from tests.bench.made import ALL_GUARANTEED, ROOT, MadeNode
from tests.bench.writes import owner_writes

pytestmark = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="needs root for the real agent")]

COMMAND = [sys.executable, "-m", "tests.bench", "--tiny"]


def run(*names: str) -> dict[str, Any]:
    done = subprocess.run([*COMMAND, *names], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def left_behind() -> list[str]:
    fs = CgroupFS.discover()
    places = {Path(fs.cpuset_dir("/")), Path(fs.cpu_dir("/")), Path("/dev/shm"), Path("/tmp")}
    return sorted(str(one) for place in places for one in place.glob("ce-bench-*"))


def test_every_part_gives_figures_and_takes_its_things_away() -> None:
    before = left_behind()
    found = run("pin_latency_v1", "full_pass", "writes", "scrape", "memory")
    assert set(found) == {
        "machine", "pin_latency_v1", "full_pass_v1", "full_pass_v2", "writes_per_taken_core", "scrape", "memory",
    }  # fmt: skip
    assert found["full_pass_v2"]["by_containers"]["4"]["full_pass_ms"] > 0
    assert found["scrape"]["by_containers"]["4"]["bytes"] > 1000
    if "skipped" not in found["pin_latency_v1"]:
        assert found["pin_latency_v1"]["by_shared_containers"]["1"]["resize"]["n"] == 2
    assert found["memory"]["by_containers"]["4"]["agent"]["rss_mb"] > 1
    assert left_behind() == before


def test_ctrl_c_takes_everything_away() -> None:
    before = left_behind()
    bench = subprocess.Popen([*COMMAND[:-1], "pin_latency_v2"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 20
    while left_behind() == before and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(1)
    agents = Path(f"/proc/{bench.pid}/task/{bench.pid}/children").read_text().split()
    bench.send_signal(signal.SIGINT)
    out, told = bench.communicate(timeout=30)
    assert (bench.returncode, out) == (130, b""), told
    assert agents
    assert not [pid for pid in agents if Path(f"/proc/{pid}").exists()]
    assert left_behind() == before


def test_an_unknown_name_is_told_with_those_that_there_are() -> None:
    done = subprocess.run([*COMMAND, "pin_latency", "latence"], capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 2
    assert "there is no latence; there are allocation, pin_latency_v2" in done.stderr


def test_writes_are_those_that_the_rules_of_each_version_ask_for() -> None:
    with MadeNode(1, 8) as node:
        node.fill(6)
        # six containers shrink, the owner gets the shared pool at birth and its own CPU later
        assert owner_writes(node, 1) == (8, 6)
    with MadeNode(2, 8) as node:
        node.fill(6, ALL_GUARANTEED)
        # two slices and six pods shrink, the new pod joins them; it and its container come to the new CPU. Back: the
        # pod without its container goes to the shared pool in two steps, then all eight grow
        assert owner_writes(node, 1) == (11, 10)


def test_a_made_node_has_each_class_where_the_kubelet_puts_it() -> None:
    with MadeNode(2, 8) as node:
        node.fill(40)
        counts = {place: len(node.fs.children(place) or ()) for place in (ROOT, *(f"{ROOT}/{q}" for q in QOS))}
    assert counts == {ROOT: 3 + len(QOS), f"{ROOT}/burstable": 30, f"{ROOT}/besteffort": 7}


QOS = ("burstable", "besteffort")


def test_percentiles_growth_and_slope_of_known_rows() -> None:
    row = percentiles([n / 1e6 for n in range(1, 201)])
    assert row == {"n": 200, "p50_us": 100.0, "p99_us": 198.0, "max_us": 200.0}
    assert percentiles([]) == {"n": 0}
    assert growth({10: 5.0, 100: 500.0, 1000: 50000.0}) == 2.0
    assert growth({10: 7.0, 100: 7.0}) == 0.0
    assert growth({10: 7.0}) is None
    assert slope({0: 100.0, 10: 900.0, 50: 4100.0}) == 80.0
    assert slope({0: 100.0}) is None
