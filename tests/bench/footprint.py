"""What the agent and its exporter cost while nothing happens, and what a scrape costs."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from enforcer.core.kubepods import QoSClass
from enforcer.kernel.cgroupfs import CgroupFS
from enforcer.mimic.tree import Tree
from tests.bench.figures import Size, percentiles, ratio
from tests.bench.load import get_metrics
from tests.bench.made import MadeNode
from tests.bench.running import children, cpu_seconds, free_port, made_agent, memory_mb, quiet_start, wait_for_metrics
from tests.kernel.agent_process import AgentProcess

AIM_MB = 60


def scrape(size: Size) -> dict[str, Any]:
    """Time and size of a scrape with few containers and with many."""
    few, many = (_scrape(count, size.rounds) for count in _counts(size))
    return {
        "by_containers": {str(one.pop("containers")): one for one in (few, many)},
        "bytes_ratio": ratio(many["bytes"], few["bytes"]),
        "p50_ratio": ratio(many["p50_us"], few["p50_us"]),
    }


def _counts(size: Size) -> tuple[int, int]:
    return size.scales[0], min(500, size.scales[-1])


def _scrape(containers: int, rounds: int) -> dict[str, Any]:
    port = free_port()
    times = []
    with MadeNode(2, 64) as node:
        node.fill(containers)
        with made_agent(node, **{"metrics-listen": f"127.0.0.1:{port}"}) as agent:
            wait_for_metrics(port)
            for _ in range(min(100, rounds)):
                began = time.perf_counter()
                page = get_metrics(port)
                times.append(time.perf_counter() - began)
            state = (agent.state_dir / "state.json").stat().st_size
    return {"containers": containers, **percentiles(times), "bytes": len(page), "state_file_bytes": state}


def memory(size: Size) -> dict[str, Any]:
    """Resident memory and idle CPU of the real processes on real cgroups (without processes), with 0 and many
    containers, both at the same time; and how long the agent took from its start to "ready"."""
    if os.geteuid() != 0:
        return {"skipped": "needs root"}
    fs = CgroupFS.discover()
    with ExitStack() as stack:
        running = {count: stack.enter_context(_running(fs, count)) for count in (0, _counts(size)[1])}
        time.sleep(min(3.0, size.idle))  # what a start leaves to do
        pids = {count: (agent.pid, children(agent.pid)[0]) for count, (agent, _ready) in running.items()}
        before = {pid: cpu_seconds(pid) for pair in pids.values() for pid in pair}
        time.sleep(size.idle)
        used = {pid: (cpu_seconds(pid) - spent) / size.idle for pid, spent in before.items()}
        found = {str(count): _costs(pids[count], used, running[count][1]) for count in pids}
    return {"by_containers": found, "aim_agent_rss_mb": AIM_MB, "seconds": size.idle, "cgroup_version": fs.version}


def _costs(pids: tuple[int, int], used: dict[int, float], ready: float) -> dict[str, Any]:
    agent, exporter = (memory_mb(pid) for pid in pids)
    return {
        "agent": agent,
        "exporter": exporter,
        "both_pss_mb": round(agent["pss_mb"] + exporter["pss_mb"], 1),
        "agent_idle_cpu_percent": round(used[pids[0]] * 100, 4),
        "exporter_idle_cpu_percent": round(used[pids[1]] * 100, 4),
        "ready_after_s": round(ready, 2),
    }


@contextmanager
def _running(fs: CgroupFS, containers: int) -> Iterator[tuple[AgentProcess, float]]:
    root = f"/ce-bench-{os.getpid()}-{containers}"
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="ce-bench-") as folder, _cgroups(fs, root, containers):
        agent = AgentProcess(Path(folder), f"{root}/kubepods", **{"metrics-listen": f"127.0.0.1:{port}"})
        try:
            began = time.perf_counter()
            quiet_start(agent)
            ready = time.perf_counter() - began
            wait_for_metrics(port)
            yield agent, ready
        finally:
            agent.end()


@contextmanager
def _cgroups(fs: CgroupFS, root: str, containers: int) -> Iterator[None]:
    tree = Tree(fs)
    try:
        place = f"{root}/kubepods/{QoSClass.BURSTABLE.value}"
        for path in (root, f"{root}/kubepods", place):
            tree.make_group(path)
        for number in range(containers):
            pod = f"{place}/pod5a3e7f0c-1111-4222-8333-{number:012x}"
            tree.make_group(pod)
            tree.make_group(f"{pod}/{number:064x}")
        yield
    finally:
        tree.close()
