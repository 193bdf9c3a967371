"""NodeView: what the node looks like, as last observed. Immutable; every change makes a new view by copying one level.

The tree has four levels: kubepods root, slice (a QoS slice, or the root itself for Guaranteed pods), pod, container.
Paths are those below the hierarchy's mount point ("/kubepods/pod.../..."), the same on every v1 hierarchy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from enforcer.core.cpulimits import CPULimits
from enforcer.core.cpuset import EMPTY, CPUSet
from enforcer.core.kubepods import ContainerRef, PodRef, QoSClass
from enforcer.core.topology import CPUTopology


class Role(StrEnum):
    """What a cgroup in a pod is. UNSURE is treated as a container: it gets the shared pool, never a core of its own."""

    CONTAINER = "container"
    SANDBOX = "sandbox"
    CONMON = "conmon"
    UNSURE = "unsure"


class Phase(StrEnum):
    """BIRTH: the runtime is still setting the container up, its writes are not drift. RUNNING: user code runs."""

    BIRTH = "birth"
    RUNNING = "running"


@dataclass(frozen=True, slots=True)
class Group:
    """One cpuset cgroup.

    `cpus` is the content of cpuset.cpus: None when the file is not there (v2 without the controller), empty when
    nothing is set (v2: inherits; v1: not filled yet). `effective` is what the kernel grants (v1: the same as cpus).
    `echo`: systemd is still writing what we told it a moment ago, so an older set of ours in there is no drift.
    """

    path: str
    cpus: CPUSet | None = None
    effective: CPUSet = EMPTY
    echo: bool = False

    @property
    def configured(self) -> bool:
        """A set of its own is written there."""
        return bool(self.cpus)


@dataclass(frozen=True, slots=True)
class ContainerView:
    """One container, sandbox or conmon of a pod.

    `born` is the monotonic time of the first sight (seconds; -inf when it was there before the agent), `limits_since`
    when its limits were first seen as they are now. `given` is a set narrower than its parent's that somebody else
    wrote at birth. `ident` tells a cgroup from one made later under the same name. `nested` are cgroups made inside it,
    deepest first (filled on v1 only, where they bind the parent).
    """

    ref: ContainerRef
    group: Group
    role: Role = Role.UNSURE
    phase: Phase = Phase.RUNNING
    limits: CPULimits | None = None
    limits_since: float = float("-inf")
    born: float = float("-inf")
    given: CPUSet = EMPTY
    populated: bool = True
    opted_out: bool = False
    ident: int = 0
    nested: tuple[Group, ...] = ()


@dataclass(frozen=True, slots=True)
class PodView:
    """One pod's cgroup and what is in it, containers by path."""

    ref: PodRef
    group: Group
    limits: CPULimits | None = None
    born: float = float("-inf")
    containers: Mapping[str, ContainerView] = field(default_factory=dict)

    @property
    def guaranteed(self) -> bool:
        return self.ref.qos is QoSClass.GUARANTEED


@dataclass(frozen=True, slots=True)
class SliceView:
    """A directory that holds pods: a QoS slice, or a kubepods root (which holds the Guaranteed ones)."""

    group: Group
    qos: QoSClass
    is_root: bool = False
    pods: Mapping[str, PodView] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NodeView:
    """The whole node. `version` is that of the hierarchy that carries cpuset (1 or 2)."""

    version: int
    topology: CPUTopology
    online: CPUSet
    slices: Mapping[str, SliceView] = field(default_factory=dict)

    @property
    def allowed(self) -> CPUSet:
        """CPUs that pods may use at all: the effective sets of the roots, within what is online."""
        mask = 0
        for one in self.slices.values():
            if one.is_root:
                mask |= one.group.effective.mask
        return CPUSet.from_mask(mask & self.online.mask)

    def allowed_in(self, path: str) -> CPUSet:
        """CPUs that the pods of the root at or above a path may use; all that any root allows where there is none."""
        for one in self.slices.values():
            if one.is_root and f"{path}/".startswith(f"{one.group.path}/"):
                return one.group.effective & self.online
        return self.allowed

    def pods(self) -> Iterator[PodView]:
        """Every pod."""
        for one in self.slices.values():
            yield from one.pods.values()

    def containers(self) -> Iterator[tuple[PodView, ContainerView]]:
        """Every container with its pod."""
        for pod in self.pods():
            for container in pod.containers.values():
                yield pod, container

    def groups(self) -> Iterator[Group]:
        """Every cgroup, those nested in containers included."""
        for one in self.slices.values():
            yield one.group
            for pod in one.pods.values():
                yield pod.group
                for container in pod.containers.values():
                    yield container.group
                    yield from container.nested

    def find_pod(self, path: str) -> PodView | None:
        """The pod at a path, or None."""
        holder = self.slices.get(parent_of(path))
        return holder.pods.get(path) if holder else None

    def find_container(self, path: str) -> ContainerView | None:
        """The container at a path, or None."""
        pod = self.find_pod(parent_of(path))
        return pod.containers.get(path) if pod else None

    def with_slice(self, one: SliceView) -> NodeView:
        """The view with a slice added or replaced."""
        return replace(self, slices={**self.slices, one.group.path: one})

    def without_slice(self, path: str) -> NodeView:
        """The view without a slice and all below it."""
        return replace(self, slices={p: s for p, s in self.slices.items() if p != path})

    def with_pod(self, pod: PodView) -> NodeView:
        """The view with a pod added or replaced; a pod whose slice is not known is left out (its removal won)."""
        holder = self.slices.get(parent_of(pod.group.path))
        if holder is None:
            return self
        return self.with_slice(replace(holder, pods={**holder.pods, pod.group.path: pod}))

    def without_pod(self, path: str) -> NodeView:
        """The view without a pod and all below it."""
        holder = self.slices.get(parent_of(path))
        if holder is None or path not in holder.pods:
            return self
        return self.with_slice(replace(holder, pods={p: v for p, v in holder.pods.items() if p != path}))

    def with_container(self, container: ContainerView) -> NodeView:
        """The view with a container added or replaced; one whose pod is not known is left out."""
        pod = self.find_pod(parent_of(container.group.path))
        if pod is None:
            return self
        return self.with_pod(replace(pod, containers={**pod.containers, container.group.path: container}))

    def with_groups(self, groups: Iterable[Group]) -> NodeView:
        """The view with the cgroups of slices, pods, containers and those nested in them replaced; one copy for all."""
        slices = dict(self.slices)
        pods: dict[str, dict[str, PodView]] = {}
        for group in groups:
            if group.path in slices:
                slices[group.path] = replace(slices[group.path], group=group)
            else:
                _put(slices, pods, group)
        for path, mine in pods.items():
            slices[path] = replace(slices[path], pods=mine)
        return replace(self, slices=slices)

    def without_container(self, path: str) -> NodeView:
        """The view without a container."""
        pod = self.find_pod(parent_of(path))
        if pod is None or path not in pod.containers:
            return self
        return self.with_pod(replace(pod, containers={p: c for p, c in pod.containers.items() if p != path}))


def parent_of(path: str) -> str:
    """The parent's path; "/" for a top-level one."""
    return path.rpartition("/")[0] or "/"


def depth_of(path: str) -> int:
    """How many levels below the mount point."""
    return path.count("/")


def _put(slices: Mapping[str, SliceView], pods: dict[str, dict[str, PodView]], group: Group) -> None:
    """Puts a group into the pod that it is of or in; `pods` has the copies made so far (slice -> its pods)."""
    pod_path = group.path
    while pod_path != "/" and parent_of(pod_path) not in slices:
        pod_path = parent_of(pod_path)
    holder = parent_of(pod_path)
    if pod_path == "/" or pod_path not in slices[holder].pods:
        return
    if holder not in pods:
        pods[holder] = dict(slices[holder].pods)
    pods[holder][pod_path] = _with_group(pods[holder][pod_path], group)


def _with_group(pod: PodView, group: Group) -> PodView:
    if group.path == pod.group.path:
        return replace(pod, group=group)
    path = group.path
    while parent_of(path) != pod.group.path:
        path = parent_of(path)
    container = pod.containers.get(path)
    if container is None:
        return pod
    if path == group.path:
        changed = replace(container, group=group)
    else:
        nested = tuple(group if one.path == group.path else one for one in container.nested)
        changed = replace(container, nested=nested)
    return replace(pod, containers={**pod.containers, path: changed})
