"""How fast take() is next to the kubelet: `python -m tests.bench.allocation` prints one JSON object.

For each case of tests/data/allocation_bench.jsonl.gz: the median nanoseconds of our answer (without parsing and
printing sets, which the kubelet's figures do not have either), the kubelet's recorded median, and their ratio; first
the geometric mean and the smallest ratio, and whether all answers were right.
"""

from __future__ import annotations

import json
import statistics
import sys
from time import perf_counter_ns
from typing import Any

from tests.unit.tables import Case, cases


def measure(case: Case, repeat: int) -> dict[str, Any]:
    right = case.answer() == case.expected
    times = []
    for _ in range(repeat):
        start = perf_counter_ns()
        case.answer()
        times.append(perf_counter_ns() - start)
    median = statistics.median(times)
    ratio = round(case.kubelet_ns / median, 1)
    return {"case": case.name, "ns": median, "kubelet_ns": case.kubelet_ns, "ratio": ratio, "right": right}


def report(repeat: int = 50) -> dict[str, Any]:
    found = [measure(case, repeat) for case in cases("allocation_bench")]
    ratios = [one["ratio"] for one in found]
    return {
        "geometric_mean": round(statistics.geometric_mean(ratios), 1),
        "minimum": min(ratios),
        "all_right": all(one["right"] for one in found),
        "cases": found,
    }


if __name__ == "__main__":
    json.dump(report(*map(int, sys.argv[1:2])), sys.stdout, indent=1)
    print()
