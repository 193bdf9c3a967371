"""How long start and full pass take with 10 to 1000 containers, and how long at most they keep a hot event waiting."""

from __future__ import annotations

import statistics
from typing import Any

from tests.bench.figures import Size, growth
from tests.bench.made import MadeNode
from tests.bench.rig import rig, timed

CPUS = 64


def report(size: Size, version: int) -> dict[str, Any]:
    """By number of containers, in milliseconds, each the median of some runs; the growth exponents beside them."""
    found = {scale: _scale(version, scale, size.repeat) for scale in size.scales}
    names = next(iter(found.values()))
    return {
        "by_containers": {str(scale): one for scale, one in found.items()},
        "growth_exponent": {name: growth({s: one[name] for s, one in found.items()}) for name in names},
    }


def _scale(version: int, containers: int, repeat: int) -> dict[str, float]:
    with MadeNode(version, CPUS) as node:
        node.fill(containers)
        runs = [_once(node, first=number == 0) for number in range(repeat)]
    # every run after the first finds the sets of the one before: its start has nothing to write
    medians = {name: statistics.median(run[name] for run in runs if name in run) for name in runs[0]}
    return {name: round(value * 1e3, 2) for name, value in medians.items()}


def _once(node: MadeNode, *, first: bool) -> dict[str, float]:
    found = {}
    with rig(node) as made:
        scan, scan_step = timed(made.observer.scan())
        full, step = timed(made.reconciler.full())
        if first:
            found = {"start_ms": scan + full, "start_longest_step_ms": max(scan_step, step)}
        made.settle()
        made.start()
        full, step = timed(made.reconciler.full())
        found |= {"full_pass_ms": full, "full_pass_longest_step_ms": step}
    return found
