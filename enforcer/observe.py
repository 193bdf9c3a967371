"""Observe: from the cgroup tree and what happens in it, to the NodeView. Reads only, the same for enforce and audit.

An event says "look here again"; what is read then is the truth. So missed, doubled and reordered events do no harm,
and a scan of everything ends where all the events would have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from enforcer.core import hold
from enforcer.core.cpulimits import CPULimits
from enforcer.core.cpuset import EMPTY, CPUSet
from enforcer.core.errors import EnforcerError
from enforcer.core.kubepods import ContainerRef, Kind, Parsed, PodRef, QoSClass, classify, is_root_candidate, shown
from enforcer.core.node import ContainerView, Group, NodeView, Phase, PodView, Role, SliceView, parent_of
from enforcer.kernel.cgroupfs import CgroupFS
from enforcer.kernel.sysfs import Machine
from enforcer.kernel.watch import Event, Watcher
from enforcer.kernel.watch import Kind as Happened

# The files whose change matters; everything else that is written in a cgroup is passed over in the watcher.
FILES: Final = frozenset(
    {
        "cpuset.cpus", "cpuset.mems", "cgroup.procs", "cgroup.subtree_control",
        "cpu.max", "cpu.weight", "cpu.shares", "cpu.cfs_quota_us", "cpu.cfs_period_us",
    }
)  # fmt: skip
_LIMIT_FILES: Final = frozenset(f for f in FILES if f.startswith("cpu."))
_ROLES: Final = {Kind.CONTAINER: Role.CONTAINER, Kind.SANDBOX: Role.SANDBOX, Kind.CONMON: Role.CONMON}
# The kubelet's and the runtimes' shares of a cgroup that asks for nothing; weight 1 is the same on v2.
_IDLE_SHARES: Final = 2
_MOST_PROBLEMS: Final = 100
# Containers make as many cgroups as they like: their number must not decide how long one look takes.
_MOST_NESTED: Final = 100
_STEP: Final = 100  # names that a scan goes through before it lets go


@dataclass(frozen=True, slots=True)
class Dirty:
    """What an event concerns: paths of pods, or everything."""

    pods: frozenset[str] = frozenset()
    everything: bool = False


NOTHING: Final = Dirty()
EVERYTHING: Final = Dirty(everything=True)


class Observer:
    """The node as last seen, and how to look again.

    `ours(path, cpus)` says whether a set is one that we wrote there lately, `lags(path)` whether systemd may still be
    writing one; `comm(pid)` names a process, None when it has gone; `clock` is monotonic, in seconds. `watcher` None:
    only scans (status, audit, simulate).
    """

    def __init__(
        self,
        fs: CgroupFS,
        machine: Machine,
        clock: Callable[[], float],
        comm: Callable[[int], str | None],
        *,
        watcher: Watcher | None = None,
        roots: tuple[str, ...] = (),
        ours: Callable[[str, CPUSet], bool] = lambda path, cpus: False,
        lags: Callable[[str], bool] = lambda path: False,
        hold_seconds: float = 10.0,
    ) -> None:
        self._fs = fs
        self._clock = clock
        self._comm = comm
        self._watcher = watcher
        # "//kubepods" would be the same cgroups under a second name
        self._roots = tuple(f"/{'/'.join(part for part in root.split('/') if part)}" for root in roots)
        self._ours = ours
        self._lags = lags
        self._hold_seconds = hold_seconds
        self._first = True
        self._births: dict[str, float] = {}
        self._stale: set[str] = set()
        self.problems: dict[str, str] = {}
        self.view = NodeView(fs.version, machine.topology, machine.online)

    def machine_changed(self, machine: Machine) -> None:
        """CPUs came or went."""
        self.view = replace(self.view, topology=machine.topology, online=machine.online)

    # the whole tree

    def scan(self) -> Iterator[None]:
        """Looks at everything again; yields between pods so that hot events get their turn."""
        self.problems.clear()
        yield from self._prune()
        found = set()
        for root in self._find_roots():
            found.add(root)
            yield from self._scan_slice(root, QoSClass.GUARANTEED, is_root=True)
            yield
            for number, name in enumerate(self._list(root)):
                if number % _STEP == _STEP - 1:
                    yield
                parsed = classify(Kind.ROOT, None, name)
                if parsed.kind is Kind.QOS and parsed.qos is not None:
                    found.add(f"{root}/{name}")
                    yield from self._scan_slice(f"{root}/{name}", parsed.qos, is_root=False)
        for path in self.view.slices.keys() - found:
            self.view = self.view.without_slice(path)
        self._first = False

    def _find_roots(self) -> list[str]:
        """kubepods at the top of the hierarchy or where the config says, below nothing that root does not own."""
        found = []
        for top in ("/", "/kubelet", "/kubelet.slice"):
            for name in self._list(top) if top == "/" or self._fs.exists(top) else ():
                path = f"{top.rstrip('/')}/{name}"
                if is_root_candidate(path):
                    found.append(path)
        for path in self._roots:
            self._watch_above(path)
            if path not in found and self._fs.exists(path) and not self._crosses(path, found):
                found.append(path)
        return [path for path in found if self._is_trusted(path)]

    def _crosses(self, path: str, others: list[str]) -> bool:
        """A QoS slice or a pod of one root, taken for a root of its own, would be planned by two rules."""
        other = next((o for o in others if f"{path}/".startswith(f"{o}/") or o.startswith(f"{path}/")), None)
        if other is not None:
            self._problem(path, f"is not taken for a root: it is inside the root {shown(other)}, or holds it")
        return other is not None

    def _watch_above(self, path: str) -> None:
        """All that is there on the way to a configured root, which may be made level by level."""
        while path != "/":
            path = parent_of(path)
            self._watch(path)

    def _is_trusted(self, path: str) -> bool:
        """A kubepods that a user's session or a container made would take all cores."""
        here = path
        while here != "/":
            if self._fs.owner_uid(here) not in (0, None):
                self._problem(path, f"is not taken for a kubepods root: {shown(here)} does not belong to root")
                return False
            here = parent_of(here)
        return True

    def _scan_slice(self, path: str, qos: QoSClass, *, is_root: bool) -> Iterator[None]:
        names = self._list(path)
        group = self._group(path)
        if group is None:
            self.view = self.view.without_slice(path)
            return
        before = self.view.slices.get(path)
        self.view = self.view.with_slice(SliceView(group, qos, is_root, before.pods if before else {}))
        here = set()
        for name in names:
            if classify(Kind.ROOT if is_root else Kind.QOS, None if is_root else qos, name).kind is Kind.POD:
                here.add(f"{path}/{name}")
                self._look_at_pod(f"{path}/{name}", qos, name)
                yield
        for gone in self.view.slices[path].pods.keys() - here if path in self.view.slices else ():
            self._look_at_pod(gone, qos, gone.rpartition("/")[2])

    # one pod, one container

    def _look_at_pod(self, path: str, qos: QoSClass, name: str) -> None:
        names = self._list(path)
        group = self._group(path)
        if group is None:
            self._drop(path)
            self.view = self.view.without_pod(path)
            return
        parsed = classify(Kind.ROOT if qos is QoSClass.GUARANTEED else Kind.QOS, self._place(qos), name)
        before = self.view.find_pod(path)
        pod = PodView(
            ref=PodRef(parsed.pod_uid or name, qos, path),
            group=group,
            limits=self._limits(path),
            born=before.born if before else self._birth(),
            containers=before.containers if before else {},
        )
        self.view = self.view.with_pod(pod)
        for gone in pod.containers.keys() - {f"{path}/{one}" for one in names}:
            self._forget(gone)
            self.view = self.view.without_container(gone)
        for one in names:
            self._look_at_container(f"{path}/{one}", pod, one)

    @staticmethod
    def _place(qos: QoSClass) -> QoSClass | None:
        return None if qos is QoSClass.GUARANTEED else qos

    def _look_at_container(self, path: str, pod: PodView, name: str) -> None:
        nested = self._list(path)
        group = self._group(path)
        if group is None:
            self._forget(path)
            self.view = self.view.without_container(path)
            return
        before = self.view.find_container(path)
        ident = self._fs.cgroup_id(path) or 0
        if before is not None and before.ident != ident:
            # docker restart makes the same path anew: a birth, not drift
            before = None
        parsed = classify(Kind.POD, pod.ref.qos, name, pod_uid=pod.ref.uid, systemd=parent_of(path).endswith(".slice"))
        container = before or ContainerView(
            ref=ContainerRef(pod.ref.uid, parsed.container_id or shown(name), parsed.runtime, path),
            group=Group(path),
            role=_ROLES.get(parsed.kind, Role.UNSURE),
            phase=Phase.RUNNING if self._first else Phase.BIRTH,
            born=self._birth(),
            ident=ident,
        )
        self.view = self.view.with_container(self._seen(container, pod, group, parsed, bool(nested)))

    def _seen(
        self, container: ContainerView, pod: PodView, group: Group, parsed: Parsed, has_nested: bool
    ) -> ContainerView:
        """The container with everything read anew."""
        path = group.path
        limits = self._limits(path)
        comm, populated = self._first_comm(path)
        role = hold.role(_ROLES.get(parsed.kind, Role.UNSURE), comm, idle_limits=_idle(limits))
        changed = limits != container.limits
        return replace(
            container,
            group=group,
            role=role,
            limits=limits,
            limits_since=self._clock() if changed and not self._first else container.limits_since,
            populated=populated,
            phase=self._phase(container, comm),
            given=self._given(container, pod, group),
            nested=self._nested(path) if has_nested and self._fs.version == 1 else (),
        )

    def _phase(self, container: ContainerView, comm: str | None) -> Phase:
        path = container.group.path
        if container.phase is Phase.RUNNING:
            return Phase.RUNNING
        now = self._clock()
        found = hold.phase(comm, now - container.born, self._hold_seconds)
        if found is Phase.RUNNING:
            self._births.pop(path, None)
        else:
            self._births[path] = container.born + hold.next_look(now - container.born, self._hold_seconds)
        return found

    def _given(self, container: ContainerView, pod: PodView, group: Group) -> CPUSet:
        # Only a set that is new says something: the parent's is widened meanwhile when its root's is.
        if container.phase is Phase.RUNNING or not group.cpus or group.cpus == container.group.cpus:
            return container.given
        parent = (pod.group.cpus or EMPTY) if self._fs.version == 1 else self.view.allowed_in(group.path)
        return hold.given_set(group.cpus, parent, ours=self._ours(group.path, group.cpus)) or container.given

    def _first_comm(self, path: str) -> tuple[str | None, bool]:
        """The name of the cgroup's first process and whether there is any."""
        try:
            pids = self._fs.procs(path)
            return (self._comm(pids[0]), True) if pids else (None, False)
        except (EnforcerError, OSError) as error:
            self._problem(path, str(error))
            return None, True

    def _nested(self, path: str) -> tuple[Group, ...]:
        """The first few, deepest first; the rest is seen to when a write is refused because of them (apply)."""
        found = [path]
        try:
            for one in found:
                found.extend(f"{one}/{name}" for name in self._fs.children(one) or ())
                if len(found) > _MOST_NESTED:
                    self._problem(path, f"{shown(path)}: more than {_MOST_NESTED} cgroups inside, not all are followed")
                    break
        except EnforcerError as error:
            self._problem(path, str(error))
        groups = (self._group(one) for one in reversed(found[1 : _MOST_NESTED + 1]))
        return tuple(group for group in groups if group is not None)

    # events

    def handle(self, event: Event) -> Dirty:
        """Looks again where an event points; says which pods the next plan must be about."""
        if event.kind in (Happened.OVERFLOW, Happened.LOST):
            return EVERYTHING
        path = self._fs.path_of(event.path)
        if path is None:
            return NOTHING
        if event.kind is not Happened.MODIFIED:
            return self._directory(path, f"{path.rstrip('/')}/{event.name}", event)
        return self._file(path, event.name)

    def look(self, pod_path: str) -> None:
        """Looks at one pod again, or for it; at a slice of pods its own set only."""
        if pod_path in self.view.slices:
            self._slice_file(pod_path)
            return
        holder = self.view.slices.get(parent_of(pod_path))
        if holder is not None:
            self._look_at_pod(pod_path, holder.qos, pod_path.rpartition("/")[2])

    def catch_up(self) -> None:
        """Looks at containers in which cgroups came or went: once, however many, for a tenant makes them at will."""
        for path in self._stale:
            if self.view.find_container(path) is not None:
                self.look_at(path)
        self._stale.clear()

    def due_births(self) -> tuple[float, frozenset[str]]:
        """When a birth is to be looked at next (monotonic; inf = none), and the pods of those that are due now."""
        now = self._clock()
        due = frozenset(parent_of(path) for path, when in self._births.items() if when <= now)
        for path in [p for p, when in self._births.items() if when <= now and self.view.find_container(p) is None]:
            del self._births[path]
        return min(self._births.values(), default=float("inf")), due

    def wrote(self, *writes: tuple[str, CPUSet | None, CPUSet | None]) -> None:
        """What writes of our own left in cgroups, as read back: (path, cpus, effective)."""
        self.view = self.view.with_groups(Group(path, cpus, e or EMPTY) for path, cpus, e in writes if cpus is not None)

    def _directory(self, path: str, child: str, event: Event) -> Dirty:
        if self._holds_pods(path):
            return self._slice_child(path, child, event.name)
        if self.view.find_pod(path) is not None:
            if event.kind is Happened.DELETED:
                self._forget(child)
                self.view = self.view.without_container(child)
            self.look_at(child)
            return Dirty(frozenset({path}))
        if self.view.find_container(path) is not None:
            self._stale.add(path)
            return Dirty(frozenset({parent_of(path)}))
        return EVERYTHING if is_root_candidate(child) or self._leads_to_root(child) else NOTHING

    def _slice_child(self, path: str, child: str, name: str) -> Dirty:
        holder = self.view.slices[path]
        kind = classify(Kind.ROOT if holder.is_root else Kind.QOS, None if holder.is_root else holder.qos, name).kind
        if kind is Kind.POD:
            self._look_at_pod(child, holder.qos, name)
            return Dirty(frozenset({child}))
        return EVERYTHING if kind is Kind.QOS else NOTHING

    def look_at(self, container_path: str) -> None:
        """Looks at one container again; one that has gone is dropped."""
        pod = self.view.find_pod(parent_of(container_path))
        if pod is not None:
            self._look_at_container(container_path, pod, container_path.rpartition("/")[2])

    def _file(self, path: str, name: str) -> Dirty:
        if self.view.find_container(path) is not None:
            self.look_at(path)
            return Dirty(frozenset({parent_of(path)}))
        if name == "cgroup.subtree_control":
            return EVERYTHING if self._lost_controller(path) else NOTHING
        pod = self.view.find_pod(path)
        if pod is not None:
            self._pod_file(pod, name)
            return Dirty(frozenset({path}))
        if path in self.view.slices and name == "cpuset.cpus":
            return self._slice_file(path)
        return NOTHING

    def _pod_file(self, pod: PodView, name: str) -> None:
        group = self._group(pod.group.path) if name == "cpuset.cpus" else pod.group
        limits = self._limits(pod.group.path) if name in _LIMIT_FILES else pod.limits
        if group is None:
            self.look(pod.group.path)
        else:
            self.view = self.view.with_pod(replace(pod, group=group, limits=limits))

    def _slice_file(self, path: str) -> Dirty:
        one = self.view.slices[path]
        group = self._group(path)
        if group is None:
            return EVERYTHING
        self.view = self.view.with_slice(replace(one, group=group))
        # A root's own set decides what is allowed at all; a QoS slice's is looked at by every plan.
        return EVERYTHING if one.is_root and group != one.group else Dirty(frozenset({path}))

    def _lost_controller(self, path: str) -> bool:
        """systemd takes cpuset away below slices where no unit asks for it (kubernetes#131567)."""
        groups = (self._group(f"{path}/{name}") for name in self._list(path))
        return any(group is not None and group.cpus is None for group in groups)

    def _holds_pods(self, path: str) -> bool:
        return path in self.view.slices

    def _leads_to_root(self, path: str) -> bool:
        return any(root == path or root.startswith(f"{path}/") for root in self._roots)

    # small readers; what cannot be read is told once and the rest goes on

    def _list(self, path: str) -> list[str]:
        self._watch(path)
        try:
            return self._fs.children(path) or []
        except EnforcerError as error:
            self._problem(path, str(error))
            return self._known(path)

    def _known(self, path: str) -> list[str]:
        """What was there at the last look: a directory that cannot be listed (EMFILE, ENOMEM) is not an empty one."""
        holder, pod = self.view.slices.get(path), self.view.find_pod(path)
        paths = (*self.view.slices, *(holder.pods if holder else ()), *(pod.containers if pod else ()))
        return [one.rpartition("/")[2] for one in paths if one != path and parent_of(one) == path]

    def _prune(self) -> Iterator[None]:
        try:
            for _ in self._watcher.prune() if self._watcher is not None else ():
                yield
        except EnforcerError as error:
            self._problem("/", str(error))

    def _watch(self, path: str) -> None:
        if self._watcher is None:
            return
        try:
            self._watcher.add(self._fs.cpuset_dir(path))
            if self._fs.cpu_root != self._fs.cpuset_root:
                self._watcher.add(self._fs.cpu_dir(path))
        except EnforcerError as error:
            self._problem(path, str(error))

    def _group(self, path: str) -> Group | None:
        try:
            cpus = self._fs.read_cpus(path)
            effective = self._fs.read_effective(path)
        except EnforcerError as error:
            # Not an end: an owner taken for gone would see its CPUs given to another.
            self._problem(path, str(error))
            return self._known_group(path)
        if cpus is None and not self._fs.exists(path):
            return None
        return Group(path, cpus, effective or EMPTY, bool(cpus) and self._is_echo(path, cpus or EMPTY))

    def _known_group(self, path: str) -> Group | None:
        one = self.view.slices.get(path) or self.view.find_pod(path) or self.view.find_container(path)
        return one.group if one is not None else None

    def _is_echo(self, path: str, cpus: CPUSet) -> bool:
        return self._lags(path) and self._ours(path, cpus)

    def _limits(self, path: str) -> CPULimits | None:
        try:
            return self._fs.read_limits(path)
        except EnforcerError as error:
            self._problem(path, str(error))
            return None

    def _problem(self, path: str, text: str) -> None:
        if len(self.problems) < _MOST_PROBLEMS:
            self.problems[path] = shown(text, 600)
        else:
            self.problems[""] = f"more than {_MOST_PROBLEMS} problems; those above are the first"

    def _birth(self) -> float:
        return float("-inf") if self._first else self._clock()

    def _drop(self, pod_path: str) -> None:
        pod = self.view.find_pod(pod_path)
        for path in pod.containers if pod else ():
            self._forget(path)

    def _forget(self, path: str) -> None:
        self._births.pop(path, None)


def _idle(limits: CPULimits | None) -> bool:
    if limits is None or limits.quota is not None:
        return False
    return limits.shares is not None and limits.shares <= _IDLE_SHARES or limits.weight == 1
