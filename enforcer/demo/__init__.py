"""`cpuset-enforcer demo`: the agent at work on this machine's real cgroups, with real processes and no Kubernetes."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import stat
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Final

from enforcer.core.cpuset import EMPTY
from enforcer.core.errors import CannotWorkHereError, EnforcerError
from enforcer.core.kubepods import is_root_candidate
from enforcer.demo.process import AgentProcess
from enforcer.demo.scenes import Play
from enforcer.demo.stage import Check, Stage
from enforcer.kernel.cgroupfs import CgroupFS
from enforcer.kernel.sysfs import read_topology
from enforcer.mimic import MimicNode
from enforcer.output import say

__all__ = ["run_demo"]

# How many times slower than the measured runc the containers are made; more than 1 in an emulated machine.
PACE = 1.0

_TOP: Final = "cpuset-enforcer-demo-"
_BREATH: Final = 0.002
_LEAST_WIDTH: Final = 45
_HELD, _FAILED, _INTERRUPTED = 0, 1, 130


def run_demo(arguments: argparse.Namespace) -> int:
    """Plays the demo: 0 when every check held, 1 when not, 130 when it was interrupted. Leaves nothing behind.

    Raises CannotWorkHereError before anything is made: without root, without two CPUs, beside real pods.
    """
    fs = _this_machine()
    out = _silent if arguments.json else say
    checks: list[Check] = []
    trouble = ""
    try:
        with _interruptible() as breathe:
            _play(fs, out, breathe, checks)
    except _InterruptedError:
        out("\ndemo: interrupted; everything it made is removed")
        return _INTERRUPTED
    except (EnforcerError, OSError) as error:
        trouble = str(error)
    if arguments.json:
        found = {"ok": _good(checks, trouble), "error": trouble or None, "checks": [asdict(c) for c in checks]}
        say(json.dumps(found, indent=2))
    else:
        out(f"\n{_verdict(checks, trouble)}")
    return _HELD if _good(checks, trouble) else _FAILED


def _this_machine() -> CgroupFS:
    if os.geteuid() != 0:
        raise CannotWorkHereError("the demo makes cgroups and must run as root", hint="try: sudo cpuset-enforcer demo")
    fs = CgroupFS.discover()
    usable = fs.read_effective("/") or EMPTY
    if len(usable) < 2:
        raise CannotWorkHereError(f"the demo needs two CPUs, one reserved and one to give out; here is {usable}")
    for top in ("/", "/kubelet", "/kubelet.slice"):
        for name in fs.children(top) or () if fs.exists(top) else ():
            if is_root_candidate(path := f"{top.rstrip('/')}/{name}"):
                raise CannotWorkHereError(
                    f"this node has pods of its own below {path}: the demo's agent would pin them too",
                    hint="run the demo on a machine without Kubernetes",
                )
    return fs


class _InterruptedError(Exception):
    """Ctrl-C, SIGTERM or a closed terminal."""


def _play(fs: CgroupFS, out: Callable[[str], None], breathe: Callable[[], None], checks: list[Check]) -> None:
    _sweep(fs)
    machine = read_topology()
    width = min(max(shutil.get_terminal_size().columns, _LEAST_WIDTH), 120)
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    with ExitStack() as stack:
        prefix = f"{_TOP}{os.getpid()}-"
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=prefix, dir=_in_memory())))
        node = stack.enter_context(MimicNode(fs, f"/{_TOP}{os.getpid()}/kubepods", pace=PACE))
        # On a few CPUs the default, a whole core, would leave little to show.
        reserved = 'reserved-amount = "500m"' if len(machine.online) <= 4 else ""
        agent = AgentProcess(folder, node.root, reserved)
        stack.callback(agent.stop)
        stage = Stage(fs, machine, node, agent, checks, out, breathe, width=width, colour=colour)
        where = f"{len(stage.allowed)} CPUs, cgroup v{fs.version}; the demo's pods are below {node.root}"
        out(textwrap.fill(where, width, break_on_hyphens=False))
        Play(stage).run()
        if not all(check.held for check in checks):
            out(f"\nthe agent's last words:\n{agent.last_words()}")


def _in_memory() -> str | None:
    """A tmpfs, as /run is on a node: syncing the state file to a busy disk would hold the agent up at a birth."""
    return next((folder for folder in ("/run", "/dev/shm") if os.path.ismount(folder)), None)


def _sweep(fs: CgroupFS) -> None:
    """Removes the empty cgroups and the files of a demo that was killed."""
    for parent in {Path(fs.cpuset_root), Path(fs.cpu_root)}:
        for top in filter(_abandoned, parent.glob(f"{_TOP}*")):
            for below in sorted(top.rglob("*/"), key=lambda p: -len(p.parts)):
                below.rmdir()
            top.rmdir()
    for folder in filter(_abandoned, Path(_in_memory() or tempfile.gettempdir()).glob(f"{_TOP}*")):
        shutil.rmtree(folder)


def _abandoned(made: Path) -> bool:
    """Root's own, and named after a process that is no more."""
    pid = re.fullmatch(r"(\d+)(-.*)?", made.name.removeprefix(_TOP))
    here = made.lstat()
    return bool(pid and stat.S_ISDIR(here.st_mode) and here.st_uid == 0 and not Path(f"/proc/{pid[1]}").exists())


@contextmanager
def _interruptible() -> Iterator[Callable[[], None]]:
    """Gives a function that pauses for a moment, and raises when somebody wants the demo to end.

    Signals are only noted, so that nothing is interrupted halfway, and the tidying up not at all.
    """
    asked: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        asked.append(number)

    def breathe() -> None:
        time.sleep(_BREATH)
        if asked:
            raise _InterruptedError

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    # One that is ignored stays so: nohup.
    old = {n: signal.signal(n, note) for n in numbers if signal.getsignal(n) is not signal.SIG_IGN}
    try:
        yield breathe
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _good(checks: list[Check], trouble: str) -> bool:
    return bool(checks) and not trouble and all(check.held for check in checks)


def _verdict(checks: list[Check], trouble: str) -> str:
    failed = [check for check in checks if not check.held]
    if trouble:
        return f"demo: stopped after {len(checks)} checks, {len(failed)} failed: {trouble}"
    if failed:
        return f"demo: {len(failed)} of {len(checks)} checks FAILED: " + "; ".join(c.what for c in failed)
    return f"demo: {len(checks)} checks, all held"


def _silent(text: str) -> None:
    pass
