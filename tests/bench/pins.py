"""From the quota write to the set written, with 200 pods on a made v2 node, idle, with every core busy, and while
other work of the agent goes on.

`quota_to_set`: from the quota write by one process to the set written by the agent, by one clock. `own`: the agent's
part, from limits seen to set written. It writes about 20 sets for each pin (two slices, 15 Guaranteed pods, the pod and
its container); `own_without_writes` leaves the time in the file system out, which on a real node is the kernel's.
"""

from __future__ import annotations

import select
import time
from contextlib import ExitStack
from typing import Any

from enforcer.core.kubepods import QoSClass
from enforcer.kernel.watch import Watcher
from enforcer.mimic.process import Process
from tests.bench.figures import Size, percentiles, ratio
from tests.bench.load import busy_cores, resizes, scrapes
from tests.bench.made import MadeNode
from tests.bench.running import free_port, made_agent, wait_for_metrics

PODS = 200
CPUS = 32
AIMS = {"idle": 1000, "busy": 5000}  # microseconds, p99 of the agent's own time
_BEFORE = 0.012  # runc takes 14 ms on v2 between the process's attachment and its limits
_AFTER = 0.005
_TIMEOUT = 10.0
_RESCAN = 0.1  # a pass takes about half of it: without a pause the agent would be taken for a runaway and demoted


def report(size: Size) -> dict[str, Any]:
    """By CPUs and by what goes on; `aim_us` is for the p99 of the agent's own time."""
    by_cpus = {str(n): _case(size, cpus=n) for n in size.machines}
    cases = {
        "idle": _case(size),
        "while_full_pass": _case(size, full_pass=True),
        "while_scrapes": _case(size, scrape=True),
        "while_resizes": _case(size, resize=True),
        "busy": _case(size, busy=True),
        "busy_without_fifo": _case(size, busy=True, fifo=False),
        "busy_while_all_three": _case(size, busy=True, full_pass=True, scrape=True, resize=True),
    }
    idle = cases["idle"]["own"]["p99_us"]
    for name, case in cases.items():
        case["aim_us"] = AIMS["busy" if name.startswith("busy") else "idle"]
        case["p99_to_idle"] = ratio(case["own"]["p99_us"], idle)
    return {"pods": PODS, "cpus": CPUS, "by_what_goes_on": cases, "idle_by_cpus": by_cpus}


def _case(
    size: Size, *, cpus: int = CPUS, busy: bool = False, fifo: bool = True, full_pass: bool = False,
    scrape: bool = False, resize: bool = False,
) -> dict[str, Any]:  # fmt: skip
    port = free_port() if scrape else 0
    listen = f"127.0.0.1:{port}" if scrape else ""
    with ExitStack() as stack:
        init = Process("app", spin=False)  # never started: every new container is held under runc's name
        stack.callback(init.end)
        node = stack.enter_context(MadeNode(2, cpus))
        node.fill(PODS)
        others = [node.container(node.pod(QoSClass.GUARANTEED, 3000), 2000, quota=True) for _ in range(2 * resize)]
        rescan = _RESCAN if full_pass else None
        agent = stack.enter_context(made_agent(node, fifo=fifo, rescan=rescan, **{"metrics-listen": listen}))
        if scrape:
            wait_for_metrics(port)
            stack.enter_context(scrapes(port))
        if resize:
            stack.enter_context(resizes(node, others))
        stack.enter_context(busy_cores(busy))
        began = [_pin(node, init.pid) for _ in range(size.rounds)]
        is_fifo = agent.is_fifo()
        agent.end()
        found = [next(pin for pin in agent.pins if pin[0] >= start) for start in began]
    return {
        "own": percentiles([own for _, own, _ in found]),
        "own_without_writes": percentiles([own - writing for _, own, writing in found]),
        "quota_to_set": percentiles([end - start for start, (end, _, _) in zip(began, found, strict=True)]),
        "fifo_at_the_end": is_fifo,
    }


def _pin(node: MadeNode, pid: int) -> float:
    """Makes a container as runc does, and removes it when it has its set; answers when its quota was written."""
    pod = node.pod(QoSClass.GUARANTEED, 1000)
    container = node.container(pod, 0, pid=pid)
    seen = Watcher({"cpuset.cpus"})
    try:
        seen.add(node.fs.cpuset_dir(container))
        time.sleep(_BEFORE)
        node.write_weight(container, 1000)
        began = time.monotonic()
        node.write_quota(container, 1000)
        wait_for(seen)
    finally:
        seen.close()
    time.sleep(_AFTER)
    node.remove(container)
    node.remove(pod)
    time.sleep(_AFTER)
    return began


def wait_for(seen: Watcher) -> float:
    """Until something is written where `seen` looks: when that was seen (monotonic). Raises AssertionError if never."""
    poll = select.poll()
    poll.register(seen.fileno(), select.POLLIN)
    deadline = time.monotonic() + _TIMEOUT
    while time.monotonic() < deadline:
        if poll.poll(1000):
            now = time.monotonic()
            if seen.drain():
                return now
    raise AssertionError(f"no set was written within {_TIMEOUT:g} s of the quota")
