"""The checks, in the order in which one needs the other."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from enforcer.audit.kubelet import KubeletView, left_over_state, read_kubelet, static_policy_reason
from enforcer.config import Config
from enforcer.core.adopt import adopt, foreign_owners
from enforcer.core.errors import CannotWorkHereError, ConfigError, EnforcerError
from enforcer.core.kubepods import shown
from enforcer.core.node import NodeView
from enforcer.core.policy import Policy
from enforcer.core.state import State
from enforcer.doctor.model import Check, Level, Place, fail, ok, tried, warning
from enforcer.kernel import procfs
from enforcer.kernel.cgroupfs import CgroupFS
from enforcer.kernel.procfs import Mount, read_mountinfo
from enforcer.kernel.sysfs import Machine
from enforcer.labels import Labels
from enforcer.observe import Observer
from enforcer.service import left_behind, policy_of
from enforcer.status import AgentInfo, read_agent

_MOST_NAMED: Final = 3


@dataclass
class Examination:
    """The checks of a node that has cgroups and CPUs."""

    config: Config
    place: Place
    fs: CgroupFS
    machine: Machine
    agent: AgentInfo = field(init=False)
    kubelet: KubeletView = field(init=False)
    recorded: State = field(init=False)
    policy: Policy | None = field(init=False, default=None)
    observer: Observer = field(init=False)

    def __post_init__(self) -> None:
        self._notes: list[str] = []
        self.recorded, self.agent = read_agent(self.config.state_dir, self._notes)
        self.kubelet = read_kubelet(self.config.kubelet_root, self.config.kubelet_config_path)
        self.observer = Observer(self.fs, self.machine, lambda: 0.0, self._comm, roots=self.config.roots)
        for _ in self.observer.scan():
            pass

    def _comm(self, pid: int) -> str | None:
        return procfs.comm(pid, self.place.proc)

    @property
    def view(self) -> NodeView:
        """The node as found."""
        return self.observer.view

    def checks(self, *, probe: bool) -> Iterator[Check]:
        """All of them."""
        yield self._cgroups()
        yield from self._roots()
        yield from self._controllers()
        yield self._reserved()
        yield from self._topology()
        yield from self._kubelet()
        yield from self._others()
        yield from self._state()
        yield from self._systemd()
        yield from self._tries()
        yield self._btf()
        yield (
            self._masks() if probe else ok("user masks", "not tried; --probe does, with a scratch cgroup for a moment")
        )

    # cgroups

    def _cgroups(self) -> Check:
        fs = self.fs
        text = f"cpuset is in cgroup v{fs.version} at {fs.cpuset_root}, cpu in v{fs.cpu_version} at {fs.cpu_root}"
        mount = _mount_at(self._mounts(), fs.cpuset_root)
        if mount is not None and "ro" in mount.options:
            return fail(
                "cgroups",
                f"{text}; it is mounted read-only",
                "mount it writable (in a unit: ProtectControlGroups=no; in a container: privileged)",
            )
        if mount is not None and mount.root != "/":
            return warning(
                "cgroups",
                f"{text}; only {shown(mount.root)} of it is seen here",
                "run it in the host's cgroup namespace (hostPID alone is not enough)",
            )
        return ok("cgroups", text)

    def _mounts(self) -> list[Mount]:
        try:
            return read_mountinfo(self.place.proc)
        except EnforcerError:
            return []

    def _roots(self) -> Iterator[Check]:
        for path, text in list(self.observer.problems.items())[:_MOST_NAMED]:
            yield warning("kubepods", f"{shown(path)}: {text}", "see the path; nothing below it is pinned")
        roots = [one.group.path for one in self.view.slices.values() if one.is_root]
        if not roots:
            yield warning(
                "kubepods",
                "there is no kubepods cgroup: nothing to pin (yet)",
                "start the kubelet; where its cgroup root is elsewhere, set `roots` in the config",
            )
            return
        pods, containers = sum(1 for _ in self.view.pods()), sum(1 for _ in self.view.containers())
        yield ok(
            "kubepods",
            f"{', '.join(map(shown, roots))}: {pods} pods, {containers} containers, CPUs {self.view.allowed or 'none'}",
        )

    def _controllers(self) -> Iterator[Check]:
        for path in [one.group.path for one in self.view.slices.values() if one.is_root]:
            if self.fs.read_limits_texts(path) is None:
                yield fail(
                    "controllers",
                    f"{path} has no cpu controller: limits cannot be read",
                    "the kubelet turns it on; see its log",
                )
                return
            missing = self._first_missing(path) if self.fs.version == 2 else None
            if missing is not None:
                yield missing
                return
        if self.view.slices:
            yield ok("controllers", "cpuset and cpu reach the kubepods cgroups")

    def _first_missing(self, path: str) -> Check | None:
        """The first level from the top that does not hand cpuset on."""
        parts = path.strip("/").split("/")
        for level in ["/", *("/" + "/".join(parts[:depth]) for depth in range(1, len(parts) + 1))]:
            folder = Path(self.fs.cpuset_dir(level))
            if "cpuset" not in _words(folder / "cgroup.controllers"):
                return fail(
                    "controllers",
                    f"{level} is not given the cpuset controller",
                    f"it must be delegated or enabled above {level} (kernel: no cgroup_disable=cpuset)",
                )
            if "cpuset" not in _words(folder / "cgroup.subtree_control"):
                return warning(
                    "controllers",
                    f"cpuset is not on in {level}/cgroup.subtree_control",
                    "mode enforce turns it on where pods need it, and never off",
                )
        return None

    # CPUs

    def _reserved(self) -> Check:
        allowed = self.view.allowed or self.machine.online
        try:
            self.policy = policy_of(self.config, self.machine, allowed, self.kubelet)
        except ConfigError as error:
            return fail("CPUs", error.message, error.hint or "correct the config")
        except CannotWorkHereError as error:
            return fail("CPUs", error.message, error.hint, fatal=True)
        reserved = self.policy.reserved
        text = f"{len(allowed)} CPUs for pods, reserved {reserved}, {len(allowed - reserved)} can be given out"
        cores = (self.machine.topology.siblings(cpu) & allowed for cpu in reserved)
        split = next((core for core in cores if not core <= reserved), None)
        if split is not None and self.policy.options.full_cores:
            return warning(
                "CPUs",
                f"{text}; the reserved CPUs split the core {split}",
                "with full-pcpus-only half a core is never given out: reserve whole cores",
            )
        return ok("CPUs", text)

    def _topology(self) -> Iterator[Check]:
        for note in self.machine.notes:
            yield warning("topology", shown(note, 400), "the allocator goes by what is shown by `topology`")
        isolated = self.machine.isolated & (self.view.allowed or self.machine.online)
        if isolated:
            yield warning(
                "isolcpus",
                f"the kernel balances no task onto CPUs {isolated} (isolcpus)",
                "all threads of a container may stay on one of them, unless it places them itself; "
                "keep them out of the kubepods root, or boot without isolcpus",
            )
        else:
            yield ok("isolcpus", "no CPU for pods is isolated from the scheduler")

    # others who pin

    def _kubelet(self) -> Iterator[Check]:
        for problem in self.kubelet.problems:
            yield warning("kubelet", shown(problem, 400), "the kubelet's word is not known there")
        if reason := static_policy_reason(self.kubelet):
            said, _, remedy = reason.partition("; ")
            yield fail("kubelet", f"{said}; enforce refuses beside it", remedy)
            return
        if left := left_over_state(self.kubelet):
            yield warning("kubelet", left, "drain the node and remove the file")
            return
        policy = self.kubelet.policy or self.kubelet.state_policy
        yield ok(
            "kubelet",
            f"its CPU Manager has policy {policy}"
            if policy
            else f"its files ({self.kubelet.config_path}) do not say that it gives out CPUs",
        )

    def _others(self) -> Iterator[Check]:
        if self.policy is None or not self.view.slices:
            return
        state = self.recorded if self.agent.running else adopt(self.view, self.recorded, self.policy, 0.0)[0]
        names = Labels(self.view)
        owners = foreign_owners(self.view, state, self.policy)
        told = ", ".join(f"{names.of(path)} ({state.foreign[path]})" for path in list(state.foreign)[:_MOST_NAMED])
        if owners:
            yield fail(
                "pins",
                f"somebody else gives out whole CPUs here: {told}; enforce refuses",
                "stop the other CPU manager and restart its pods, or stay in mode audit",
            )
        elif state.foreign:
            yield warning(
                "pins",
                f"{len(state.foreign)} containers were pinned by somebody else: {told}",
                "they are left alone; their CPUs are neither given out nor shared",
            )
        else:
            yield ok("pins", "nobody else has pinned a container")

    # our own state

    def _state(self) -> Iterator[Check]:
        folder = self.config.state_dir
        yield self._state_dir(folder)
        if self.agent.running:
            yield ok("agent", f"it runs in mode {self.agent.mode}, pid {self.agent.pid}")
        elif left := left_behind(self.view, self.recorded):
            text, _, remedy = left.rpartition(": ")
            yield warning("agent", f"no agent runs, and {text}", remedy)
        else:
            yield ok("agent", "none runs, and none has left anything behind")
        aside = sorted(folder.glob("*.aside.*")) if os.access(folder, os.R_OK | os.X_OK) else []
        if aside:
            yield warning(
                "state file",
                f"one that could not be used was kept: {shown(str(aside[0]))}",
                "look at it (torn? another version?) and remove it",
            )

    def _state_dir(self, folder: Path) -> Check:
        there = next(path for path in (folder, *folder.parents) if os.path.exists(path))
        mount = max(
            (m for m in self._mounts() if there.is_relative_to(m.mount_point)),
            key=lambda m: (len(m.mount_point), m.mount_id),
            default=None,
        )
        kind = mount.fstype if mount else "an unknown file system"
        if not os.access(there, os.W_OK):
            return fail("state dir", f"{folder}: {there} is not writable", "sudo, or another `state-dir`")
        if kind not in ("tmpfs", "ramfs"):
            return warning(
                "state dir",
                f"{folder} is on {kind}, not on tmpfs",
                "a slow disk delays pinning: leave `state-dir` below /run",
            )
        return ok("state dir", f"{folder} is on {kind}")

    # what the kernel and systemd let us do

    def _systemd(self) -> Iterator[Check]:
        if self.fs.version == 1:
            yield ok("systemd", "not needed: on cgroup v1 the files are enough")
        elif not (self.place.run / "systemd" / "system").is_dir():
            yield ok("systemd", "it is not PID 1 here: the files are enough")
        else:
            yield tried(
                "systemd",
                self.place.systemd,
                "it answers on D-Bus and knows AllowedCPUs",
                Level.FAIL,
                "without it systemd puts its own, wide sets back; let the agent reach /run/dbus and "
                "/run/systemd/private",
            )

    def _tries(self) -> Iterator[Check]:
        yield self._watches()
        place = self.place
        yield tried(
            "fanotify",
            lambda: place.writers(self.fs.cpuset_root),
            "foreign writers of cpusets can be named",
            Level.WARNING,
            "foreign writes are repaired all the same, but nobody is named",
        )
        yield tried(
            "uevents",
            place.uevents,
            "CPUs that go off and on are told at once",
            Level.WARNING,
            "hotplug is then seen at the next rescan",
        )
        yield tried(
            "SCHED_FIFO",
            place.fifo,
            "the thread that pins can go before all ordinary tasks",
            Level.WARNING,
            "needs CAP_SYS_NICE, on cgroup v1 a cpu.rt_runtime_us above 0; else nice is used",
        )

    def _watches(self) -> Check:
        attempt = tried("inotify", self.place.inotify, "", Level.FAIL, "raise fs.inotify.max_user_instances (sysctl)")
        if attempt.level is not Level.OK:
            return attempt
        groups = len(self.view.slices) + sum(1 + len(pod.containers) for pod in self.view.pods())
        need = groups * (1 if self.fs.cpu_root == self.fs.cpuset_root else 2) + 10
        words = _words(self.place.proc / "sys/fs/inotify/max_user_watches")
        most = int(words[0]) if words and words[0].isdigit() else None
        if most is None:
            return ok("inotify", f"about {need} watches are needed; the limit is not known")
        text = f"about {need} watches are needed, fs.inotify.max_user_watches is {most} (for all that root runs)"
        if 2 * need > most:
            return warning("inotify", text, f"sysctl fs.inotify.max_user_watches={max(65536, 8 * need)}")
        return ok("inotify", text)

    def _btf(self) -> Check:
        file = self.place.sys / "kernel/btf/vmlinux"
        if file.exists():
            return ok("BTF", f"{file} is there: eBPF programs need no compiler here")
        return warning(
            "BTF",
            f"{file} is not there",
            "pinning does not need it; watching by eBPF does (CONFIG_DEBUG_INFO_BTF), or kernel headers",
        )

    def _masks(self) -> Check:
        kept = self.place.user_masks(self.fs, self.machine)
        if kept is None:
            return warning(
                "user masks",
                "it could not be tried whether threads' own masks survive",
                "needs root, two CPUs and a writable cpuset hierarchy",
            )
        if kept:
            return ok("user masks", "threads keep their own CPU masks when their cpuset changes")
        return warning(
            "user masks",
            "this kernel erases threads' own CPU masks when their cpuset changes",
            "pods in the shared pool that pin their own threads lose that when it changes (Linux 6.2 does not)",
        )


def _mount_at(mounts: Iterable[Mount], point: str) -> Mount | None:
    found = [mount for mount in mounts if mount.mount_point == point]
    return found[-1] if found else None


def _words(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="ascii", errors="replace").split()
    except OSError:
        return []
