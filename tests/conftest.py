"""For all tests: what a pure test may not do to the machine, and which tests run by default."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Only tests in these folders may write to the kernel or start processes; all others are pure or work on made trees.
REAL_MACHINE = ("kernel", "vm", "runtimes", "bench")

_TESTS = Path(__file__).parent
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = {"os.mkdir", "os.rmdir", "os.remove", "os.rename", "os.link", "os.symlink", "os.truncate", "os.chmod"}
_SPAWNS = {"subprocess.Popen", "os.system", "os.posix_spawn", "os.exec", "os.spawn", "os.fork", "os.forkpty"}
_guarded = False


class TouchedTheMachine(BaseException):
    """A pure test wrote below /sys or /proc or started a process; not an Exception, so that no handler eats it."""


def _on_the_kernel(path: Any) -> bool:
    """An open descriptor (int) was looked at when it was opened; a path relative to a directory descriptor is not
    told by the audit event, and counts as relative to the current directory."""
    if isinstance(path, int) or path is None:
        return False
    return os.path.realpath(os.fsdecode(path)).startswith(("/sys/", "/proc/"))


def _watch(event: str, args: tuple[Any, ...]) -> None:
    if not _guarded:
        return
    if event in _SPAWNS:
        raise TouchedTheMachine(f"a pure test started a process ({event} {args[:2]!r})")
    if event == "open" and args[2] & _WRITING and _on_the_kernel(args[0]):
        raise TouchedTheMachine(f"a pure test opened {args[0]!r} for writing")
    if event in _CHANGES:
        for name in args[1:2] if event == "os.symlink" else args[:2]:
            if not isinstance(name, int) and _on_the_kernel(Path(os.fsdecode(name)).parent / "entry"):
                raise TouchedTheMachine(f"a pure test changed {name!r} ({event})")


# An audit hook (PEP 578) sees every way to open and to spawn, which patched functions do not. It cannot be taken away
# again, hence the switch.
sys.addaudithook(_watch)


@pytest.fixture(autouse=True)
def machine_guard(request: pytest.FixtureRequest) -> Iterator[type[BaseException]]:
    """Guards the machine during every test outside REAL_MACHINE; gives the error that a breach raises."""
    global _guarded
    folder = request.node.path.relative_to(_TESTS).parts[0] if request.node.path.is_relative_to(_TESTS) else ""
    _guarded = folder not in REAL_MACHINE
    yield TouchedTheMachine
    _guarded = False


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the tests marked `long` too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if os.geteuid() != 0:
        for item in items:
            if item.get_closest_marker("root"):
                item.add_marker(pytest.mark.skip(reason="needs root"))
    if config.getoption("--long") or "long" in (config.getoption("markexpr") or ""):
        return
    long = [item for item in items if item.get_closest_marker("long")]
    config.hook.pytest_deselected(items=long)
    items[:] = [item for item in items if item not in long]
