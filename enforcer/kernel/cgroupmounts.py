"""Where this node's cgroup hierarchies are mounted: v1, v2 or hybrid, each controller in one of them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from enforcer.core.errors import CannotWorkHereError


class Mount(NamedTuple):
    """One cgroup mount, as in proc(5) mountinfo: root inside the file system, mount point, type, super options."""

    root: str
    point: str
    fstype: str
    options: str

    @property
    def version(self) -> int:
        """2 for the unified hierarchy, else 1."""
        return 2 if self.fstype == "cgroup2" else 1


def carrier(controller: str, mounts: Iterable[Mount]) -> Mount:
    """The mount that carries "cpuset" or "cpu"; raises CannotWorkHereError when none does.

    A whole hierarchy is better than a part of it, a short path better than a long one.
    """
    seen = [mount for mount in mounts if mount.fstype in ("cgroup", "cgroup2")]
    found = [mount for mount in seen if controller in _controllers(mount) and _usable(controller, mount)]
    if found:
        return min(found, key=lambda mount: (mount.root != "/", len(mount.point)))
    shown = ", ".join(f"{mount.fstype} at {mount.point} ({' '.join(_controllers(mount))})" for mount in seen)
    raise CannotWorkHereError(
        f"no cgroup hierarchy here has the {controller} controller; mounted: {shown or 'no cgroup file system at all'}",
        hint="the kernel needs CONFIG_CPUSETS, CONFIG_CGROUP_SCHED and no cgroup_disable= on its command line; without"
        " CONFIG_CPUSETS_V1 it has cpuset in the unified hierarchy only (systemd.unified_cgroup_hierarchy=1)",
    )


def read_mounts(proc_root: str) -> list[Mount]:
    """All mounts of our mount namespace; raises CannotWorkHereError when they cannot be read."""
    filename = Path(proc_root, "self/mountinfo")
    try:
        lines = filename.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError as error:
        raise CannotWorkHereError(f"cannot read {filename}: {error.strerror}", hint="is /proc mounted?") from error
    return [mount for line in lines if (mount := _parse_mount(line)) is not None]


def layout(folder: str) -> list[Mount]:
    """The hierarchies below a folder as they are usually laid out: unified itself, or "cpuset", "cpu,cpuacct", ..."""
    if os.path.exists(folder + "/cgroup.controllers"):
        return [Mount("/", folder, "cgroup2", "")]
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir())
    except OSError as error:
        raise CannotWorkHereError(f"cannot read the cgroup root {folder}: {error.strerror}") from error
    unified = {name for name in names if os.path.exists(f"{folder}/{name}/cgroup.controllers")}
    return [Mount("/", f"{folder}/{name}", "cgroup2" if name in unified else "cgroup", name) for name in names]


def _controllers(mount: Mount) -> list[str]:
    if mount.fstype == "cgroup":
        return mount.options.split(",")
    try:
        return Path(mount.point, "cgroup.controllers").read_text(encoding="ascii").split()
    except OSError:
        return []


def _usable(controller: str, mount: Mount) -> bool:
    # hidden by a later mount, or a v1 mount with "noprefix", whose files are named otherwise
    v1 = {"cpuset": "cpuset.cpus", "cpu": "cpu.shares"}
    return os.path.exists(f"{mount.point}/{v1[controller] if mount.version == 1 else 'cgroup.procs'}")


def _parse_mount(line: str) -> Mount | None:
    left, _, right = line.partition(" - ")
    before, after = left.split(" "), right.split(" ")
    if len(before) < 6 or len(after) < 3:
        return None
    return Mount(_unescape(before[3]), _unescape(before[4]), after[0], after[2])


def _unescape(text: str) -> str:
    """proc(5): blank, tab, newline and backslash stand as three octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
