"""What becomes of a row of measured values: percentiles, and how something grows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured: FULL for figures to be told, QUICK to compare two versions, TINY to see that it works."""

    rounds: int  # pins for a percentile
    births: int  # containers made at runc's real pace
    scales: tuple[int, ...]  # numbers of containers
    machines: tuple[int, ...]  # numbers of CPUs
    shared: tuple[int, ...]  # shared containers beside an owner, on real v1 cgroups
    repeat: int
    idle: float  # seconds


FULL = Size(250, 60, (10, 100, 300, 1000), (8, 64), (0, 10, 50), 3, 20.0)
QUICK = Size(40, 10, (10, 100, 300), (8, 64), (0, 20), 1, 2.0)
TINY = Size(3, 2, (2, 4), (8,), (0, 1), 1, 0.2)


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """In microseconds; p99 of fewer than 100 values is their largest."""
    found = sorted(seconds)
    if not found:
        return {"n": 0}
    at = [(name, found[min(len(found) - 1, math.ceil(len(found) * part) - 1)]) for name, part in _PARTS]
    return {"n": len(found), **{name: round(value * 1e6, 1) for name, value in at}}


_PARTS = (("p50_us", 0.5), ("p99_us", 0.99), ("max_us", 1.0))


def growth(by_size: Mapping[int, float]) -> float | None:
    """The exponent e of value ~ size**e, by least squares on the logarithms: 0 = constant, 1 = linear, 2 = quadratic.

    None where there are no two sizes with values above 0.
    """
    points = [(math.log(size), math.log(value)) for size, value in by_size.items() if size > 0 and value > 0]
    if len(points) < 2:
        return None
    return round(statistics.linear_regression(*zip(*points, strict=True)).slope, 2)


def slope(by_size: Mapping[int, float]) -> float | None:
    """What each one more adds, by least squares; None for less than two sizes."""
    if len(by_size) < 2:
        return None
    return round(statistics.linear_regression([*by_size], [*by_size.values()]).slope, 2)


def ratio(one: float | None, other: float | None) -> float | None:
    """one / other, to two places; None where there is nothing to divide."""
    return round(one / other, 2) if one is not None and other else None
