"""All benchmarks: `python -m tests.bench [--quick] [NAME...]` prints one JSON object; what is being done, to stderr.

Nothing in here passes or fails by a time: the machine may be shared. Compare figures of one run, best by their ratios.
Needs root where real agents run. Everything made is taken away again, also at Ctrl-C and SIGTERM.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.bench import allocation, footprint, passes, pins, pins_v1, writes
from tests.bench.figures import FULL, QUICK, TINY, Size

BENCHES: dict[str, Callable[[Size], dict[str, Any]]] = {
    "allocation": lambda size: allocation.report(50 if size is FULL else 5),
    "pin_latency_v2": pins.report,
    "pin_latency_v1": pins_v1.report,
    "full_pass_v2": lambda size: passes.report(size, 2),
    "full_pass_v1": lambda size: passes.report(size, 1),
    "writes_per_taken_core": writes.report,
    "scrape": footprint.scrape,
    "memory": footprint.memory,
}


def main(words: Sequence[str]) -> int:
    """Runs what was asked for, each name or its beginning; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description="Measure the agent; JSON on stdout.")
    parser.add_argument("--quick", action="store_const", const=QUICK, dest="size", help="at most a minute")
    parser.add_argument("--tiny", action="store_const", const=TINY, dest="size", help="only to see that it works")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"all of: {', '.join(BENCHES)}")
    asked = parser.parse_args(words)
    unknown = [name for name in asked.names if not _chosen([name])]
    if unknown:
        parser.error(f"there is no {', '.join(unknown)}; there are {', '.join(BENCHES)}")
    size: Size = asked.size or FULL
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    before = _ticks()
    try:
        found = {name: _run(name, size) for name in _chosen(asked.names)}
    except KeyboardInterrupt:
        print("stopped; everything was taken away", file=sys.stderr)
        return 130
    json.dump({"machine": _machine(size, before), **found}, sys.stdout, indent=1)
    print()
    return 0


def _chosen(names: Sequence[str]) -> list[str]:
    return [bench for bench in BENCHES if not names or any(bench.startswith(name) for name in names)]


def _run(name: str, size: Size) -> dict[str, Any]:
    print(f"{name} ...", end=" ", file=sys.stderr, flush=True)
    began = time.perf_counter()
    found = BENCHES[name](size)
    took = time.perf_counter() - began
    print(f"{took:.1f} s", file=sys.stderr, flush=True)
    return {**found, "took_s": round(took, 1)}


def _ticks() -> list[int]:
    """proc_stat(5): user, nice, system, idle, iowait, irq, softirq, steal of all CPUs together."""
    return [int(one) for one in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]


def _machine(size: Size, before: list[int]) -> dict[str, Any]:
    """A hypervisor that takes the CPU away, or is slow to wake it, shows in the largest values first."""
    spent = [now - then for then, now in zip(before, _ticks(), strict=True)]
    return {
        "stolen_percent": round(100 * spent[-1] / (sum(spent) or 1), 2),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "cpus": len(os.sched_getaffinity(0)),
        "load_average": [round(one, 2) for one in os.getloadavg()],
        "size": {id(FULL): "full", id(QUICK): "quick", id(TINY): "tiny"}[id(size)],
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
