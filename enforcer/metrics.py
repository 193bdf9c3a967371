"""Metrics: the state file's document as Prometheus metric families, computed at each scrape.

Rendered by a process of its own (`cpuset-enforcer metrics`), so that a scrape cannot delay a pin. Labels are bounded:
no pod, no container, no CPU number.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

log = logging.getLogger(__name__)

PREFIX: Final = "cpuset_enforcer_"

# (key of the document's tally, metric, label, help)
_COUNTERS: Final = (
    ("writes", "writes", "result", "Writes of cpuset.cpus by what came of them"),
    ("write_errors", "write_errors", "errno", "Writes of cpuset.cpus that the kernel refused"),
    ("drift", "drift_repairs", "writer", "Sets of ours that somebody else had changed, by the writer's name"),
    ("decisions", "decisions", "kind", "Decisions about containers and pods"),
    ("passes", "passes", "kind", "Passes over one pod (hot) and over the whole node (full)"),
)
_GAUGES: Final = (
    ("conflicts", "Sets that somebody else keeps changing and that are left alone for a while"),
    ("retrying", "Cgroups with a write that was refused or had no effect"),
    ("would_write", "Writes that enforce mode would do now (audit mode)"),
    ("enforcing", "1 in mode enforce, 0 in mode audit"),
)


def families(document: Mapping[str, Any] | None, age: float | None) -> Iterator[Metric]:
    """The metric families of one document; None: there is no agent's state, then only that is said.

    `age` is the seconds since the agent last wrote its state file.
    """
    state = GaugeMetricFamily(f"{PREFIX}agent_state_found", "1 when the agent's state file is there and readable")
    state.add_metric([], 0 if document is None else 1)
    yield state
    if age is not None:
        yield _gauge("state_file_age_seconds", "Seconds since the agent last wrote its state file", age)
    if document is not None:
        yield from _of_document(document)


def _of_document(document: Mapping[str, Any]) -> Iterator[Metric]:
    build = GaugeMetricFamily(f"{PREFIX}build_info", "The agent's version", labels=["version"])
    build.add_metric([str(document.get("version", ""))], 1)
    yield build
    yield _gauge("start_time_seconds", "When the agent started, Unix time", document.get("started", 0))
    figures = document.get("figures", {})
    for name, label, text in (
        ("cpus", "state", "CPUs by what they are used for"),
        ("containers", "state", "Containers by what they run on"),
        ("pods", "qos", "Pods by QoS class"),
    ):
        yield _labelled(GaugeMetricFamily(f"{PREFIX}{name}", text, labels=[label]), figures.get(name, {}))
    for name, text in _GAUGES:
        yield _gauge(name, text, figures.get(name, 0))
    yield from _of_tally(document.get("tally", {}))


def _of_tally(tally: Mapping[str, Any]) -> Iterator[Metric]:
    for key, name, label, text in _COUNTERS:
        yield _labelled(CounterMetricFamily(f"{PREFIX}{name}", text, labels=[label]), tally.get(key, {}))
    for key, text in (
        ("systemd_differed", "Times that a cgroup's file was not what its unit had just been told"),
        ("overflows", "Times that events were lost and everything was looked at again"),
    ):
        counter = CounterMetricFamily(f"{PREFIX}{key}", text)
        counter.add_metric([], float(tally.get(key, 0)))
        yield counter
    pin = HistogramMetricFamily(
        f"{PREFIX}pin_latency_seconds", "From limits seen to own set written", labels=["trigger"]
    )
    for trigger, one in tally.get("pin", {}).items():
        pin.add_metric([trigger], _buckets(one), sum_value=float(one["sum"]))
    yield pin
    for key, name, text in (
        ("loop", "loop_delay_seconds", "How long one turn of the loop kept new events waiting"),
        ("systemd", "systemd_lag_seconds", "From a unit being told its CPUs to systemd's answer"),
    ):
        one = tally.get(key)
        if one:
            family = HistogramMetricFamily(f"{PREFIX}{name}", text)
            family.add_metric([], _buckets(one), sum_value=float(one["sum"]))
            yield family


def _buckets(one: Mapping[str, Any]) -> list[tuple[str, float]]:
    """(upper bound, cumulative count) as Prometheus wants them."""
    made = []
    so_far = 0
    for bound, count in zip([*map(str, one["bounds"]), "+Inf"], one["counts"], strict=True):
        so_far += count
        made.append((bound, float(so_far)))
    return made


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"{PREFIX}{name}", text, value=float(value))


def _labelled(family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[str, float]) -> Metric:
    for label, value in sorted(values.items()):
        family.add_metric([label], float(value))
    return family


class StateCollector:
    """A prometheus_client collector: `read` gives the document (None without one) and its age in seconds."""

    def __init__(self, read: Any) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        """Computed anew at each scrape; a document of another shape counts as none."""
        document, age = self._read()
        try:
            return list(families(document, age))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            log.warning("the agent's state is of another version: %r", error)
            return families(None, age)
