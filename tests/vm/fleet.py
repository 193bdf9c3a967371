"""Runs the tests of tests/vm/inside in guests: one boot for each kind, results brought out one by one as they come."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import tempfile
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from .artifacts import REPOSITORY, Artifacts
from .guest import SHARE, Guest, GuestError, GuestSpec, Kind, boot

RESULT_LINE: Final = "@@test "
# Of the repository, what tests in a guest need.
_TREES: Final = ("enforcer", "bpf", "systemd", "tests")
_HIDDEN: Final = ("/run", "/dev", "/proc", "/sys")
_MOVED: Final = {"/tmp/": "/run/host/tmp/"}  # by guest-init


@dataclass(frozen=True, slots=True)
class InsideResult:
    """How one test ended in the guest. `outcome` is passed, failed or skipped; `text` says why."""

    outcome: str
    text: str

    @classmethod
    def from_line(cls, line: str) -> tuple[str, InsideResult]:
        """The test's id and its result, from what inside/conftest.py wrote after RESULT_LINE."""
        said = json.loads(line.removeprefix(RESULT_LINE))
        return said["id"], cls(said["outcome"], said["text"])


@dataclass(slots=True)
class _Run:
    guest: Guest
    lines: Iterator[str]
    results: dict[str, InsideResult] = field(default_factory=dict)
    said: deque[str] = field(default_factory=lambda: deque(maxlen=80))


class Fleet:
    """The guests of one pytest run. Not more than one runs at a time: they share one core of the host."""

    def __init__(self, artifacts: Artifacts) -> None:
        self.artifacts = artifacts
        self._wanted: dict[Kind, list[str]] = {}
        self._runs: dict[Kind, _Run] = {}
        self._broken: dict[Kind, str] = {}

    def expect(self, kind: Kind, test_id: str) -> None:
        """Adds a test to those that the kind's guest will run; to be called before the first result() of the kind."""
        self._wanted.setdefault(kind, []).append(test_id)

    def result(self, kind: Kind, test_id: str) -> InsideResult:
        """Waits for one test's result, booting its guest first if need be; raises GuestError when none will come."""
        run = self._runs.get(kind)
        if run and test_id in run.results:
            return run.results[test_id]
        if kind in self._broken:
            raise GuestError(f"this guest failed earlier: {self._broken[kind]}")
        try:
            run = run or self._start(kind)
            while test_id not in run.results:
                self._read(run)
            return run.results[test_id]
        except GuestError as problem:
            self._broken[kind] = str(problem).splitlines()[0]
            raise

    def close(self) -> None:
        """Ends all guests."""
        while self._runs:
            self._runs.popitem()[1].guest.close()

    def _start(self, kind: Kind) -> _Run:
        self.close()
        with tempfile.TemporaryDirectory(prefix="cpuset-enforcer-share.") as folder:
            share = Path(folder)
            stage_share(share, self._wanted[kind], self.artifacts)
            guest = boot(GuestSpec(kind=kind), inside_command(kind), share, artifacts=self.artifacts)
        self._runs[kind] = run = _Run(guest, guest.lines())
        return run

    @staticmethod
    def _read(run: _Run) -> None:
        line = next(run.lines, None)
        if line is None:
            raise GuestError("the guest ended without this test's result; it said:\n" + "\n".join(run.said))
        if line.startswith(RESULT_LINE):
            test_id, result = InsideResult.from_line(line)
            run.results[test_id] = result
        elif line:
            run.said.append(line)


def stage_share(share: Path, test_ids: list[str], artifacts: Artifacts) -> None:
    """What a guest finds at /run/share: repo/ (our sources), rootfs/ (of its containers), tests.txt (what to run)."""
    for tree in _TREES:
        if (REPOSITORY / tree).is_dir():
            # bytecode files in the making have gone when their turn comes
            unfinished = shutil.ignore_patterns("*.pyc.[0-9]*")
            shutil.copytree(REPOSITORY / tree, share / "repo" / tree, symlinks=True, ignore=unfinished)
    shutil.copy(REPOSITORY / "pyproject.toml", share / "repo/pyproject.toml")
    for folder in ("proc", "sys", "dev", "etc", "out", "tmp"):
        (share / "rootfs" / folder).mkdir(parents=True)
    for program in ("probe", "pause"):
        shutil.copy(artifacts.probe, share / "rootfs" / program)
        (share / "rootfs" / program).chmod(0o755)
    (share / "tests.txt").write_text("".join(f"{test_id}\n" for test_id in test_ids))


def inside_command(kind: Kind) -> str:
    """The shell command that runs pytest in a guest on the tests named in tests.txt."""
    python = "/usr/bin/python3" if kind == "systemd" else _visible_python()
    environment = {
        "ENFORCER_GUEST": kind,
        "ENFORCER_GUEST_REPORT": "/dev/ttyS1",
        "PYTHONPATH": f"{SHARE}/repo",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    }
    settings = " ".join(f"{key}={shlex.quote(value)}" for key, value in environment.items())
    # the conftest of tests/ may want packages that a guest lacks
    pytest = "pytest -q -p no:cacheprovider --confcutdir=tests/vm -o faulthandler_timeout=100"
    return f"cd {SHARE}/repo && env {settings} {shlex.quote(python)} -m {pytest} @{SHARE}/tests.txt"


def _visible_python() -> str:
    """This interpreter, as a plain guest sees it in the host's root."""
    if sys.executable.startswith(tuple(f"{folder}/" for folder in _HIDDEN)):
        raise GuestError(f"a guest cannot see {sys.executable}: it has its own {', '.join(_HIDDEN)}")
    for here, there in _MOVED.items():
        if sys.executable.startswith(here):
            return there + sys.executable.removeprefix(here)
    return sys.executable
