"""Affinity and priority on this kernel; always in a process of its own, so that nothing has to be put back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

TOP = Path(__file__).resolve().parents[2]
LOWEST = min(os.sched_getaffinity(0))
NO_SUCH_CPU = 4000
root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: a real-time policy or a nice below 0")

PRELUDE = """
import json, os, resource, signal, subprocess, sys, threading, time
from enforcer.core.cpuset import CPUSet
from enforcer.kernel.affinity import demote, pin_self, raise_priority
FIFO, OTHER, RESET = os.SCHED_FIFO, os.SCHED_OTHER, os.SCHED_RESET_ON_FORK
def tell(**said):
    print(json.dumps(said, default=list), flush=True)
def threads():
    return [int(tid) for tid in os.listdir("/proc/self/task")]
def nice(tid=0):
    return os.getpriority(os.PRIO_PROCESS, tid)
def spin(seconds, until=lambda: False):
    end = time.perf_counter() + seconds
    while time.perf_counter() < end and not until():
        pass
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    program = PRELUDE + textwrap.dedent(code)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, cwd=TOP)


def told(code: str) -> dict[str, Any]:
    """What the program tells; it must not die nor complain."""
    done = run(code)
    assert (done.returncode, done.stderr) == (0, "")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_pin_self_takes_all_threads_and_those_to_come() -> None:
    said = told(f"""
        release = threading.Event()
        workers = [threading.Thread(target=release.wait) for _ in range(4)]
        for worker in workers[:3]: worker.start()
        problems = pin_self(CPUSet([{LOWEST}]))
        workers[3].start()
        tell(problems=problems, sets=[sorted(os.sched_getaffinity(tid)) for tid in threads()])
        release.set()
    """)
    assert said == {"problems": [], "sets": [[LOWEST]] * 5}


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs to tell a pinned thread from another")
def test_pin_self_takes_a_thread_that_starts_meanwhile() -> None:
    """Made by a thread that is not pinned yet, after the threads were listed."""
    said = told(f"""
        release, real, late = threading.Event(), os.sched_setaffinity, []
        def slow(tid, cpus):
            if not late:
                late.append(threading.Thread(target=release.wait))
                late[0].start()
            real(tid, cpus)
        os.sched_setaffinity = slow
        pin_self(CPUSet([{LOWEST}]))
        tell(cpus=sorted(os.sched_getaffinity(late[0].native_id)))
        release.set()
    """)
    assert said == {"cpus": [LOWEST]}


def test_pin_self_where_it_cannot_is_told_once_and_changes_nothing() -> None:
    said = told(f"""
        release = threading.Event()
        threading.Thread(target=release.wait).start()
        before = os.sched_getaffinity(0)
        problems = pin_self(CPUSet([{NO_SUCH_CPU}]))
        tell(problems=problems, same=os.sched_getaffinity(0) == before)
        release.set()
    """)
    assert said["same"]
    assert len(said["problems"]) == 1
    assert f"on CPUs {NO_SUCH_CPU}: none of them is online and in its cpuset" in said["problems"][0]


def test_pin_self_in_part_is_told() -> None:
    said = told(f"tell(problems=pin_self(CPUSet([{LOWEST}, {NO_SUCH_CPU}])), now=sorted(os.sched_getaffinity(0)))")
    assert said["now"] == [LOWEST]
    assert len(said["problems"]) == 1
    assert f"is on CPUs {LOWEST}, not {LOWEST},{NO_SUCH_CPU}" in said["problems"][0]


def test_pin_self_on_no_cpus_is_told() -> None:
    assert "is empty" in told("tell(problems=pin_self(CPUSet()))")["problems"][0]


@root
@pytest.mark.root
def test_fifo_is_for_the_calling_thread_only() -> None:
    said = told("""
        release = threading.Event()
        before = threading.Thread(target=release.wait); before.start()
        report = raise_priority(True)
        after = threading.Thread(target=release.wait); after.start()
        child = subprocess.run([sys.executable, "-c", "import os; print(os.sched_getscheduler(0))"],
                               capture_output=True, text=True)
        tell(policy=report.policy, problems=report.problems, own=os.sched_getscheduler(0) == FIFO | RESET,
             priority=os.sched_getparam(0).sched_priority, child=int(child.stdout) == OTHER,
             others=[os.sched_getscheduler(t.native_id) == OTHER for t in (before, after)])
        release.set()
    """)
    assert said == {
        "policy": "fifo",
        "problems": [],
        "own": True,
        "priority": 1,
        "child": True,
        "others": [True, True],
    }


@root
@pytest.mark.root
def test_nice_is_for_the_calling_thread_only() -> None:
    said = told("""
        release = threading.Event()
        had = resource.getrlimit(resource.RLIMIT_RTTIME)
        before = threading.Thread(target=release.wait); before.start()
        report = raise_priority(False)
        after = threading.Thread(target=release.wait); after.start()
        child = subprocess.run([sys.executable, "-c", "import os; print(os.nice(0))"], capture_output=True, text=True)
        tell(policy=report.policy, problems=report.problems, own=nice(), child=int(child.stdout),
             others=[nice(t.native_id) for t in (before, after)],
             same=resource.getrlimit(resource.RLIMIT_RTTIME) == had)
        release.set()
    """)
    assert said == {"policy": "nice", "problems": [], "own": -19, "child": 0, "others": [0, 0], "same": True}


@root
@pytest.mark.root
def test_fifo_outside_the_main_thread_is_nice() -> None:
    said = told("""
        def work():
            report = raise_priority(True)
            tell(policy=report.policy, problems=report.problems, own=nice(), main=nice(os.getpid()))
        thread = threading.Thread(target=work); thread.start(); thread.join()
    """)
    assert (said["policy"], said["own"], said["main"]) == ("nice", -19, 0)
    assert "only the main thread can be watched" in said["problems"][0]


@root
@pytest.mark.root
def test_without_the_capability_all_is_refused_and_told() -> None:
    said = told("""
        for limit in (resource.RLIMIT_RTPRIO, resource.RLIMIT_NICE):
            resource.setrlimit(limit, (0, 0))
        os.setuid(12345)
        report = raise_priority(True)
        tell(policy=report.policy, problems=report.problems, own=os.sched_getscheduler(0) & ~RESET, nice=nice())
    """)
    assert (said["policy"], said["own"], said["nice"]) == ("normal", os.SCHED_OTHER, 0)
    fifo, nice = said["problems"]
    assert fifo.startswith("SCHED_FIFO refused: Operation not permitted (needs CAP_SYS_NICE")
    assert nice.startswith("nice -19 refused: Permission denied")


@root
@pytest.mark.root
def test_a_runaway_is_demoted_and_told_and_lives_on() -> None:
    said = told("""
        hits = []
        report = raise_priority(True, limit=0.03, on_demotion=lambda: hits.append(1))
        start = time.perf_counter()
        spin(2, until=lambda: bool(hits))
        took = time.perf_counter() - start
        spin(0.05)
        tell(policy=report.policy, took=took, hits=len(hits), own=os.sched_getscheduler(0) & ~RESET)
    """)
    assert said["policy"] == "fifo"
    assert 0.02 < said["took"] < 1
    assert (said["hits"], said["own"]) == (1, os.SCHED_OTHER)


@root
@pytest.mark.root
def test_one_that_sleeps_now_and_then_is_no_runaway() -> None:
    said = told("""
        hits = []
        raise_priority(True, limit=0.03, on_demotion=lambda: hits.append(1))
        for _ in range(10):
            spin(0.01)
            time.sleep(0.001)
        tell(hits=len(hits), own=os.sched_getscheduler(0) & ~RESET)
    """)
    assert said == {"hits": 0, "own": os.SCHED_FIFO}


@root
@pytest.mark.root
def test_a_runaway_that_python_cannot_reach_is_killed() -> None:
    """A loop in C never comes to the signal handler; 10 times the limit is the end of it."""
    done = run("""
        import itertools
        raise_priority(True, limit=0.02)
        sum(itertools.repeat(1, 10**10))
    """)
    assert done.returncode == -signal.SIGKILL


@root
@pytest.mark.root
@pytest.mark.parametrize(("had", "wanted"), [((40_000, 60_000), (60_000, 60_000)), ((-1, -1), (200_000, 2_000_000))])
def test_hard_limit_is_never_raised(had: tuple[int, int], wanted: tuple[int, int]) -> None:
    said = told(f"""
        resource.setrlimit(resource.RLIMIT_RTTIME, {had})
        report = raise_priority(True, limit=0.2)
        tell(policy=report.policy, limit=resource.getrlimit(resource.RLIMIT_RTTIME))
    """)
    assert said == {"policy": "fifo", "limit": list(wanted)}


@root
@pytest.mark.root
def test_raised_again_after_a_demotion() -> None:
    said = told("""
        first = raise_priority(True)
        problems = demote()
        between = os.sched_getscheduler(0) & ~RESET
        again = raise_priority(True)
        tell(policies=[first.policy, again.policy], problems=problems, between=between,
             now=os.sched_getscheduler(0) & ~RESET)
    """)
    assert said == {"policies": ["fifo", "fifo"], "problems": [], "between": os.SCHED_OTHER, "now": os.SCHED_FIFO}


def test_demote_without_real_time_threads_leaves_all_alone() -> None:
    said = told("""
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        tell(problems=demote(), policy=os.sched_getscheduler(0))
    """)
    assert said == {"problems": [], "policy": os.SCHED_BATCH}
