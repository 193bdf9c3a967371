"""doctor: what of this node will work and what will not, each with the evidence and the remedy.

Nothing is written; only --probe makes a scratch cgroup for a moment.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator

from enforcer.config import Config
from enforcer.core.errors import EnforcerError
from enforcer.doctor.checks import Examination
from enforcer.doctor.model import Check, Level, Place, fail, ok
from enforcer.kernel.cgroupfs import CgroupFS
from enforcer.kernel.sysfs import read_topology
from enforcer.layout import print_json, width, wrapped
from enforcer.output import say

__all__ = ["Check", "Level", "Place", "add_arguments", "examine", "exit_code", "main", "to_text"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `doctor`."""
    parser.add_argument("--probe", action="store_true", help="also try what needs a scratch cgroup for a moment")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def main(arguments: argparse.Namespace, config: Config) -> int:
    """0 all well, 1 warnings or failures, 3 when nothing can work here."""
    checks = list(examine(config, Place(), probe=arguments.probe))
    if arguments.json:
        print_json({"checks": checks, "exit": exit_code(checks)})
    else:
        say("\n".join(to_text(checks, width())))
    return exit_code(checks)


def exit_code(checks: Iterable[Check]) -> int:
    """The command's exit code."""
    bad = [check for check in checks if check.level is not Level.OK]
    return 3 if any(check.fatal for check in bad) else 1 if bad else 0


def to_text(checks: Iterable[Check], columns: int) -> list[str]:
    """A line for each check, what to do below it, and the sum."""
    lines, counts = [], dict.fromkeys(Level, 0)
    for check in checks:
        counts[check.level] += 1
        lines += wrapped(check.evidence, columns, f"{check.level:<8} {check.name:<12} ", " " * 22)
        if check.remedy:
            lines += wrapped(check.remedy, columns, " " * 22 + "-> ")
    summary = ", ".join(f"{number} {level}" for level, number in counts.items())
    return [*lines, "", summary]


def examine(config: Config, place: Place, *, probe: bool = False) -> Iterator[Check]:
    """All checks, in the order in which one needs the other."""
    yield _root(place)
    try:
        fs = CgroupFS.discover(str(place.proc), place.cgroup_root)
        machine = read_topology(place.sys)
    except EnforcerError as error:
        yield fail("cgroups", error.message, error.hint, fatal=True)
        return
    yield from Examination(config, place, fs, machine).checks(probe=probe)


def _root(place: Place) -> Check:
    if place.root_user():
        return ok("user", "this is root")
    remedy = "run it as root (sudo); without, several checks below cannot tell"
    return fail("user", "this is not root, and mode enforce needs root", remedy)
