"""Where this node's cgroup hierarchies are mounted: v1, v2 or hybrid, each controller in one of them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from enforcer.core.errors import CannotWorkHereError
from enforcer.kernel.procfs import Mount


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """One mounted cgroup hierarchy; `whole` = its top is what is seen at the mount point, not a directory in it."""

    point: str
    version: int
    controllers: tuple[str, ...]
    whole: bool = True

    def __str__(self) -> str:
        return f"v{self.version} at {self.point} ({' '.join(self.controllers)})"


def of_mounts(mounts: Iterable[Mount]) -> list[Hierarchy]:
    """The cgroup hierarchies among the mounts, in the same order."""
    found = []
    for mount in mounts:
        if mount.fstype in ("cgroup", "cgroup2"):
            version = 2 if mount.fstype == "cgroup2" else 1
            controllers = unified_controllers(mount.mount_point) if version == 2 else mount.super_options
            found.append(Hierarchy(mount.mount_point, version, controllers, mount.root == "/"))
    return found


def of_folder(folder: str) -> list[Hierarchy]:
    """The hierarchies below a folder as they are usually laid out: unified itself, or "cpuset", "cpu,cpuacct", ...

    Raises CannotWorkHereError when the folder cannot be read.
    """
    if os.path.exists(folder + "/cgroup.controllers"):
        return [Hierarchy(folder, 2, unified_controllers(folder))]
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir())
    except OSError as error:
        raise CannotWorkHereError(f"cannot read the cgroup root {folder}: {error.strerror}") from error
    found = []
    for name in names:
        point = f"{folder}/{name}"
        if os.path.exists(point + "/cgroup.controllers"):
            found.append(Hierarchy(point, 2, unified_controllers(point)))
        else:
            found.append(Hierarchy(point, 1, tuple(name.split(","))))
    return found


def unified_controllers(point: str) -> tuple[str, ...]:
    """What the unified hierarchy mounted there carries; on a hybrid node often nothing."""
    try:
        return tuple(Path(point, "cgroup.controllers").read_text(encoding="ascii").split())
    except OSError:
        return ()


def carrier(controller: str, hierarchies: Iterable[Hierarchy]) -> Hierarchy:
    """The one that carries "cpuset" or "cpu"; raises CannotWorkHereError when none does.

    A whole hierarchy is better than a part of it, a short mount point better than a long one.
    """
    seen = list(hierarchies)
    found = [one for one in seen if controller in one.controllers and _usable(controller, one)]
    if found:
        return min(found, key=lambda one: (not one.whole, len(one.point)))
    raise CannotWorkHereError(
        f"no cgroup hierarchy here has the {controller} controller; found: {', '.join(map(str, seen)) or 'none'}",
        hint="the kernel needs CONFIG_CPUSETS, CONFIG_CGROUP_SCHED and no cgroup_disable= on its command line; without"
        " CONFIG_CPUSETS_V1 it has cpuset in the unified hierarchy only (systemd.unified_cgroup_hierarchy=1)",
    )


def _usable(controller: str, one: Hierarchy) -> bool:
    # not when hidden by a later mount, nor a v1 mount with "noprefix", whose files are named otherwise
    v1 = {"cpuset": "cpuset.cpus", "cpu": "cpu.shares"}
    return os.path.exists(f"{one.point}/{v1[controller] if one.version == 1 else 'cgroup.procs'}")
