"""Tally: what the agent counts and times, as plain numbers that travel in the state file to whoever renders them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

# Seconds; the aim is 1 ms on an idle machine and 5 ms on a busy one, the kubelet's reconcile period is 10 s.
PIN_BUCKETS: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 2.5, 10.0)
LOOP_BUCKETS: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.25, 1.0)
# Different names that one label may take; what comes after them counts as "other".
MOST_LABELS: Final = 20
OTHER: Final = "other"


@dataclass
class Histogram:
    """Counts by upper bound (seconds), the last one without a bound, and the sum."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        if len(self.counts) != len(self.bounds) + 1:
            self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, seconds: float) -> None:
        """Counts one value."""
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.total += seconds

    def to_document(self) -> dict[str, Any]:
        """As JSON values."""
        return {"bounds": list(self.bounds), "counts": self.counts, "sum": round(self.total, 6)}


@dataclass
class Tally:
    """Everything since the agent's start. A counter's key is its label's value."""

    writes: dict[str, int] = field(default_factory=dict)
    write_errors: dict[str, int] = field(default_factory=dict)
    drift: dict[str, int] = field(default_factory=dict)
    decisions: dict[str, int] = field(default_factory=dict)
    passes: dict[str, int] = field(default_factory=dict)
    pin: dict[str, Histogram] = field(default_factory=dict)
    loop: Histogram = field(default_factory=lambda: Histogram(LOOP_BUCKETS))
    systemd: Histogram = field(default_factory=lambda: Histogram(LOOP_BUCKETS))
    systemd_differed: int = 0
    overflows: int = 0

    @staticmethod
    def add(counter: dict[str, int], label: str, amount: int = 1) -> None:
        """Counts under a label; labels that others choose are bounded in number."""
        if label not in counter and len(counter) >= MOST_LABELS:
            label = OTHER
        counter[label] = counter.get(label, 0) + amount

    def pinned(self, trigger: str, seconds: float) -> None:
        """A container got its own set, that long after its limits were seen."""
        if trigger not in self.pin:
            self.pin[trigger] = Histogram(PIN_BUCKETS)
        self.pin[trigger].observe(max(0.0, seconds))

    def to_document(self) -> dict[str, Any]:
        """As JSON values, for the state file."""
        counters: Mapping[str, dict[str, int]] = {
            "writes": self.writes,
            "write_errors": self.write_errors,
            "drift": self.drift,
            "decisions": self.decisions,
            "passes": self.passes,
        }
        return {
            **{name: dict(counter) for name, counter in counters.items()},
            "pin": {trigger: one.to_document() for trigger, one in self.pin.items()},
            "loop": self.loop.to_document(),
            "systemd": self.systemd.to_document(),
            "systemd_differed": self.systemd_differed,
            "overflows": self.overflows,
        }
