"""From the quota write to the set written, on this machine's real v1 cgroups with the real agent process.

`birth`: a container made in runc's order and at its pace; the pod's quota has claimed the cores before. `resize`: a
container goes from half a CPU to a whole one, so that all shared containers shrink between its quota and its set.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from enforcer.core.cpuset import CPUSet
from enforcer.core.kubepods import QoSClass
from enforcer.kernel.cgroupfs import CgroupFS
from enforcer.kernel.watch import Watcher
from enforcer.mimic import MimicNode, Step
from tests.bench.figures import Size, percentiles, slope
from tests.bench.pins import wait_for
from tests.bench.running import quiet_start
from tests.kernel.agent_process import AgentProcess

AIM_PER_SHARED_US = 80
_QUIET = 0.02


def report(size: Size) -> dict[str, Any]:
    """By number of shared containers, with the slope of the medians; says why where there is no cgroup v1."""
    if os.geteuid() != 0:
        return {"skipped": "needs root"}
    fs = CgroupFS.discover()
    if fs.version != 1:
        return {"skipped": "the cpuset controller of this machine is on cgroup v2"}
    found = {shared: _scale(fs, shared, size.births) for shared in size.shared}
    slopes = {way: slope({shared: one[way]["p50_us"] for shared, one in found.items()}) for way in ("birth", "resize")}
    return {
        "by_shared_containers": {str(shared): one for shared, one in found.items()},
        "us_per_shared_container": slopes,
        "aim_us_per_shared_container": AIM_PER_SHARED_US,
    }


def _scale(fs: CgroupFS, shared: int, births: int) -> dict[str, Any]:
    with _node(fs, shared) as node, tempfile.TemporaryDirectory(prefix="ce-bench-") as folder:
        agent = AgentProcess(Path(folder), node.root, fifo=True)
        try:
            quiet_start(agent)
            found = {way: [run(node) for _ in range(births)] for way, run in _WAYS.items()}
        finally:
            agent.end()
        kernel = _bare_writes(node)
        tally = agent.document()["tally"]
    return {
        **{way: percentiles(values) for way, values in found.items()},
        "bare_write_us": round(statistics.median(kernel) * 1e6, 1),
        "agents_own_histogram": {trigger: _shown(one) for trigger, one in tally["pin"].items()},
    }


@contextmanager
def _node(fs: CgroupFS, shared: int) -> Iterator[MimicNode]:
    top = f"/ce-bench-{os.getpid()}"
    with MimicNode(fs, f"{top}/kubepods", pace=0) as node:
        for number in range(shared):
            node.pod(QoSClass.BURSTABLE, f"shared-{number}", milli=250).container(milli=250, limited=False)
        yield node


def _birth(node: MimicNode) -> float:
    node.pace = 1.0
    pod = node.pod(QoSClass.GUARANTEED, "owner", milli=1000)
    node.pace = 0.0
    time.sleep(_QUIET)
    steps = pod.container_steps(milli=1000)
    for step, made in steps:
        time.sleep(_PAUSES.get(step, 0.0))
        if step is Step.PERIOD:
            took = _timed(node, made.path, lambda: next(steps))
    for container in pod.containers:
        container.first_affinity()
    return _removed(pod.remove, took)


_PAUSES = {Step.MKDIR: 0.0005, Step.CPUS: 0.0003, Step.MEMS: 0.011, Step.ATTACH: 0.0004, Step.CPU_MKDIR: 0.0139}


def _resize(node: MimicNode) -> float:
    pod = node.pod(QoSClass.GUARANTEED, "owner", milli=500)
    made = pod.container(milli=500)
    time.sleep(_QUIET)
    return _removed(pod.remove, _timed(node, made.path, lambda: pod.resize(made, 1000)))


_WAYS: dict[str, Callable[[MimicNode], float]] = {"birth": _birth, "resize": _resize}


def _timed(node: MimicNode, path: str, quota: Callable[[], object]) -> float:
    seen = Watcher({"cpuset.cpus"})
    try:
        seen.add(node.tree.fs.cpuset_dir(path))
        seen.drain()
        with _ahead():
            began = time.monotonic()
            quota()
            return wait_for(seen) - began
    finally:
        seen.close()


@contextmanager
def _ahead() -> Iterator[None]:
    """Who waits for the set must not itself wait for a CPU; where that is refused it may."""
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def _removed(remove: Callable[[], None], took: float) -> float:
    remove()
    time.sleep(_QUIET)
    return took


def _bare_writes(node: MimicNode) -> list[float]:
    """What the write of a set with its reading back takes by itself, for a cgroup with one sleeping task."""
    made = node.pod(QoSClass.BURSTABLE, "bare", milli=250).container(milli=250, limited=False)
    fs = node.tree.fs
    wide = fs.read_cpus("/")
    if not wide:
        raise AssertionError("the top cgroup has no cpuset.cpus")
    times = []
    for number in range(40):
        began = time.perf_counter()
        fs.write_cpus(made.path, wide if number % 2 else CPUSet([wide.first]))
        times.append(time.perf_counter() - began)
    return times


def _shown(histogram: dict[str, Any]) -> dict[str, int]:
    """Counts by upper bound in milliseconds, those that are not 0."""
    bounds = [*(f"<={bound * 1e3:g}ms" for bound in histogram["bounds"]), "more"]
    return {bound: count for bound, count in zip(bounds, histogram["counts"], strict=True) if count}
