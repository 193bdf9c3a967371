"""Makes each test of tests/vm/inside an item of this run that is executed in a guest.

A module says where it runs: `pytestmark = pytest.mark.guest("plain", "systemd")`. Its tests show up here once for each
kind, as `test_name@plain`. In a guest (ENFORCER_GUEST is set) they are ordinary tests.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .artifacts import Artifacts, default_cache
from .fleet import Fleet
from .guest import KINDS, GuestError, GuestSpec, Kind, missing, run

INSIDE = Path(__file__).parent / "inside"
IN_GUEST = "ENFORCER_GUEST" in os.environ
# Decided inside the guest, about the guest.
_MARKS_OF_THE_GUEST = {"skip", "skipif", "xfail", "usefixtures", "parametrize", "filterwarnings"}

_fleet = pytest.StashKey[Fleet]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "guest(kind, ...): runs inside guests of these kinds: plain, systemd")
    config.stash[_fleet] = Fleet(Artifacts(default_cache()))


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[_fleet].close()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if IN_GUEST:
        return
    inside = [item for item in items if item.path.is_relative_to(INSIDE)]
    items[:] = [item for item in items if item not in inside]
    for kind in KINDS:
        items += [_guest_item(item, kind) for item in inside if kind in _kinds(item)]


def pytest_collection_finish(session: pytest.Session) -> None:
    for item in session.items:
        if isinstance(item, GuestItem):
            item.fleet.expect(item.kind, item.inside_id)


def _kinds(item: pytest.Item) -> tuple[str, ...]:
    mark = item.get_closest_marker("guest")
    if not mark or not mark.args or not set(mark.args) <= set(KINDS):
        raise pytest.UsageError(f"{item.nodeid}: mark it with pytest.mark.guest and one or more of {', '.join(KINDS)}")
    return mark.args


def _guest_item(item: pytest.Item, kind: Kind) -> GuestItem:
    assert item.parent
    made = GuestItem.from_parent(item.parent, name=f"{item.name}@{kind}", original=item, kind=kind)
    assert isinstance(made, GuestItem)
    return made


class GuestItem(pytest.Item):
    """One test, run in a guest of one kind."""

    def __init__(self, *, original: pytest.Item, kind: Kind, **rest: object) -> None:
        super().__init__(**rest)  # type: ignore[arg-type]
        self.kind = kind
        self.inside_id = original.nodeid
        self.fleet = self.config.stash[_fleet]
        self._location = original.reportinfo()
        self.add_marker("vm")
        for mark in original.own_markers:
            if mark.name not in _MARKS_OF_THE_GUEST:
                self.add_marker(pytest.MarkDecorator(mark, _ispytest=True))

    def setup(self) -> None:
        _need(self.kind, self.fleet.artifacts)

    def runtest(self) -> None:
        result = self.fleet.result(self.kind, self.inside_id)
        if result.outcome == "skipped":
            pytest.skip(f"in the {self.kind} guest: {result.text}")
        if result.outcome != "passed":
            raise FailedInGuest(result.text)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: object = None) -> str:
        if isinstance(excinfo.value, FailedInGuest | GuestError):
            return f"in the {self.kind} guest: {excinfo.value}"
        return str(super().repr_failure(excinfo))

    def reportinfo(self) -> tuple[os.PathLike[str] | str, int | None, str]:
        return self._location


class FailedInGuest(Exception):
    """A test failed inside; the text is pytest's own report from there."""


def _need(kind: Kind, artifacts: Artifacts) -> None:
    if reason := missing(kind, artifacts):
        if os.environ.get("ENFORCER_REQUIRE_VM") == "1":
            pytest.fail(f"ENFORCER_REQUIRE_VM=1, but no {kind} guest: {reason}", pytrace=False)
        pytest.skip(f"no {kind} guest: {reason}")


GuestRunner = Callable[[GuestSpec, str], tuple[int, str]]


@pytest.fixture
def guest(pytestconfig: pytest.Config) -> Iterator[GuestRunner]:
    """A function that boots a guest of its own for a shell command: (GuestSpec, command) -> (exit code, output)."""
    fleet = pytestconfig.stash[_fleet]

    def boot_and_run(spec: GuestSpec, command: str) -> tuple[int, str]:
        _need(spec.kind, fleet.artifacts)
        fleet.close()
        return run(spec, command, artifacts=fleet.artifacts)

    yield boot_and_run
