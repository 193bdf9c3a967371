"""In a guest: sends each test's result out by the serial line as soon as it is there, and gives tests their node."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from .kit import Node, make_node

_results: dict[str, list[pytest.TestReport]] = {}


@pytest.fixture
def node() -> Iterator[Node]:
    """An empty Kubernetes node of the guest's kind; what the test made on it is gone afterwards."""
    made = make_node(os.environ["ENFORCER_GUEST"])
    yield made
    made.close()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if "ENFORCER_GUEST_REPORT" not in os.environ:
        return
    _results.setdefault(report.nodeid, []).append(report)
    if report.when == "teardown":
        _send({"id": report.nodeid, **_verdict(_results.pop(report.nodeid))})


def _verdict(phases: list[pytest.TestReport]) -> dict[str, str]:
    for outcome in ("failed", "skipped"):
        if told := [phase for phase in phases if phase.outcome == outcome]:
            return {"outcome": outcome, "text": "\n".join(map(_text, told))}
    return {"outcome": "passed", "text": ""}


def _text(phase: pytest.TestReport) -> str:
    """The reason in the first line, then the rest of pytest's report."""
    if phase.skipped and isinstance(phase.longrepr, tuple):
        return phase.longrepr[2].removeprefix("Skipped: ")
    if phase.skipped:
        return f"expected to fail: {getattr(phase, 'wasxfail', '')}"
    crash = getattr(phase.longrepr, "reprcrash", None)
    reason = crash.message.splitlines()[0] if crash and crash.message else "failed"
    sections = "".join(f"\n--- {name}\n{content}" for name, content in phase.sections)
    return f"{reason} ({phase.when})\n{phase.longreprtext}{sections}"


def _send(message: dict[str, str]) -> None:
    # the newline before: pytest's own dots go the same way
    with Path(os.environ["ENFORCER_GUEST_REPORT"]).open("w") as line:
        line.write(f"\n@@test {json.dumps(message)}\n")
