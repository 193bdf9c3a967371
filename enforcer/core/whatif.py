"""What if: pods put into a node's view or taken out of it, and the view after a plan's writes. Nothing is decided here.

`settled` is what enforce does in one pass: plan(), the writes as the kernel takes them, the state after them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from enforcer.core.cpulimits import ContainerCPU, CPULimits, container_figures, pod_figures, shares_to_weight_linear
from enforcer.core.cpuset import EMPTY, CPUSet
from enforcer.core.errors import CannotWorkHereError, ConfigError
from enforcer.core.kubepods import ContainerRef, PodRef, QoSClass, shown
from enforcer.core.node import ContainerView, Group, NodeView, PodView, Role, SliceView, depth_of, parent_of
from enforcer.core.plan import Plan, Write, plan
from enforcer.core.policy import Policy
from enforcer.core.state import State

SANDBOX: Final = "pause"
_NAME: Final = re.compile(r"[0-9A-Za-z][\w.-]{0,127}", re.ASCII)
_MOST_ENABLES: Final = 5


@dataclass(frozen=True, slots=True)
class NewContainer:
    """A container to be: `cpu` is what its pod's spec asks for, `pinned` a set that its cgroup has already."""

    name: str
    cpu: ContainerCPU
    pinned: CPUSet = EMPTY
    opted_out: bool = False


@dataclass(frozen=True, slots=True)
class NewPod:
    """A pod to be; its name serves as its UID. `sandbox`: it has a pause container, as all but a few runtimes make."""

    name: str
    qos: QoSClass
    containers: tuple[NewContainer, ...]
    sandbox: bool = True


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass of the agent: the plan, where cpuset was switched on before it (v2), and the node and state after."""

    plan: Plan
    enabled: tuple[str, ...]
    view: NodeView
    state: State


def settled(
    view: NodeView, state: State, policy: Policy, now: float, scope: Collection[str] | None = None
) -> Pass:
    """One pass of enforce on the view; `scope` and `now` as for plan()."""
    enabled: list[str] = []
    made = plan(view, state, policy, now, scope)
    for _ in range(_MOST_ENABLES):
        if not made.enable:
            break
        enabled.extend(made.enable)
        view = with_cpuset(view, made.enable)
        made = plan(view, state, policy, now, scope)
    return Pass(made, tuple(enabled), project(view, made.writes), after(made))


def after(made: Plan) -> State:
    """The state once all of the plan's writes were done."""
    written = dict(made.state.written)
    for write in made.writes:
        if write.cpus is None:
            written.pop(write.path, None)
        else:
            written[write.path] = write.cpus
    return replace(made.state, written=written)


def project(view: NodeView, writes: Iterable[Write]) -> NodeView:
    """The view after the writes. Cleared means: v2 inherits, v1 has its parent's set (cpuset(7), cgroup-v2)."""
    last = {write.path: write.cpus for write in writes}
    for one in sorted(view.slices.values(), key=lambda s: depth_of(s.group.path)):
        above = view.slices.get(parent_of(one.group.path))
        group = _written(view.version, one.group, last, above.group if above and not one.is_root else None)
        pods = {path: _pod_after(view.version, pod, last, group) for path, pod in one.pods.items()}
        view = view.with_slice(replace(one, group=group, pods=pods))
    return view


def _pod_after(version: int, pod: PodView, last: Mapping[str, CPUSet | None], above: Group) -> PodView:
    group = _written(version, pod.group, last, above)
    containers = {}
    for path, container in pod.containers.items():
        inner = _written(version, container.group, last, group)
        nested = tuple(_written(version, one, last, inner) for one in container.nested)
        containers[path] = replace(container, group=inner, nested=nested)
    return replace(pod, group=group, containers=containers)


def _written(version: int, group: Group, last: Mapping[str, CPUSet | None], above: Group | None) -> Group:
    cpus = group.cpus
    if group.path in last:
        cleared = EMPTY if version == 2 or above is None else above.cpus or EMPTY
        cpus = last[group.path] or cleared
    if above is None or cpus is None:
        return replace(group, cpus=cpus)
    granted = cpus & above.effective
    return replace(group, cpus=cpus, effective=(granted or above.effective) if version == 2 else granted)


def with_cpuset(view: NodeView, parents: Iterable[str]) -> NodeView:
    """The view once the children of these cgroups have the cpuset controller (v2)."""
    chosen = set(parents)

    def given(group: Group, above: Group) -> Group:
        missing = group.cpus is None and parent_of(group.path) in chosen
        return replace(group, cpus=EMPTY, effective=above.effective) if missing else group

    for one in sorted(view.slices.values(), key=lambda s: depth_of(s.group.path)):
        above = view.slices.get(parent_of(one.group.path))
        group = given(one.group, above.group) if above else one.group
        pods = {}
        for path, pod in one.pods.items():
            inner = given(pod.group, group)
            below = {p: replace(c, group=given(c.group, inner)) for p, c in pod.containers.items()}
            pods[path] = replace(pod, group=inner, containers=below)
        view = view.with_slice(replace(one, group=group, pods=pods))
    return view


# --- pods that are not there yet


def limits_for(version: int, figures: CPULimits) -> CPULimits:
    """The kubelet's figures (shares) as a cgroup of that version shows them."""
    if version == 1 or figures.shares is None:
        return figures
    return replace(figures, shares=None, weight=shares_to_weight_linear(figures.shares))


def add_pod(view: NodeView, pod: NewPod, now: float) -> tuple[NodeView, str]:
    """The view with the pod, all its containers running, and the pod's path.

    Raises ConfigError for a name that is no cgroup name or is taken, CannotWorkHereError without a kubepods root.
    """
    _check_names(view, pod)
    view, holder = _holder(view, pod.qos)
    path = _pod_path(holder.group.path, pod.name)
    figures = pod_figures([c.cpu for c in pod.containers]) if pod.containers else CPULimits(None, shares=2)
    made = PodView(
        PodRef(pod.name, pod.qos, path), _inherits(view.version, path, holder.group),
        limits_for(view.version, figures), now,
    )  # fmt: skip
    rows = [_container(view.version, made, one, now) for one in pod.containers]
    if pod.sandbox:
        rows.insert(0, _sandbox(view.version, made, now))
    return view.with_pod(replace(made, containers={c.group.path: c for c in rows})), path


def _check_names(view: NodeView, pod: NewPod) -> None:
    names = [c.name for c in pod.containers] + ([SANDBOX] if pod.sandbox else [])
    for name in (pod.name, *names):
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"'{shown(name)}' is no name for a pod or container",
                hint="a letter or digit, then at most 127 letters, digits, dots, dashes and underscores",
            )
    if len(set(names)) < len(names):
        raise ConfigError(f"pod '{pod.name}': two of its containers have the same name ({', '.join(names)})")
    if any(one.ref.uid == pod.name for one in view.pods()):
        raise ConfigError(f"a pod '{pod.name}' is there already", hint="take another name, or remove it first")


def _holder(view: NodeView, qos: QoSClass) -> tuple[NodeView, SliceView]:
    """The slice that holds pods of this class; a QoS slice is made where it is not there."""
    root = next((one for one in view.slices.values() if one.is_root), None)
    if root is None:
        raise CannotWorkHereError(
            "there is no kubepods cgroup on this node, so no pod can be put there",
            hint="describe a node in a file (--node), or take a recorded one (--from)",
        )
    if qos is QoSClass.GUARANTEED:
        return view, root
    for one in view.slices.values():
        if one.qos is qos and parent_of(one.group.path) == root.group.path:
            return view, one
    path = f"{root.group.path}/{_prefix(root.group.path)}{qos.value}{_suffix(root.group.path)}"
    made = SliceView(_inherits(view.version, path, root.group), qos)
    return view.with_slice(made), made


def _pod_path(holder: str, name: str) -> str:
    uid = name.replace("-", "_") if _suffix(holder) else name
    return f"{holder}/{_prefix(holder)}pod{uid}{_suffix(holder)}"


def _suffix(path: str) -> str:
    return ".slice" if path.endswith(".slice") else ""


def _prefix(path: str) -> str:
    """The systemd driver repeats the parent's name: kubepods-burstable-pod...slice."""
    return f"{path.rpartition('/')[2].removesuffix('.slice')}-" if _suffix(path) else ""


def _inherits(version: int, path: str, above: Group) -> Group:
    """A new cgroup without a set of its own; on v1 kubelet and runtime copy the parent's."""
    return Group(path, EMPTY if version == 2 else above.cpus, above.effective)


def _container(version: int, pod: PodView, one: NewContainer, now: float) -> ContainerView:
    path = f"{pod.group.path}/{one.name}"
    group = _inherits(version, path, pod.group)
    if one.pinned:
        group = replace(group, cpus=one.pinned, effective=one.pinned & pod.group.effective or group.effective)
    return ContainerView(
        ref=ContainerRef(pod.ref.uid, one.name, None, path),
        group=group,
        role=Role.CONTAINER,
        limits=limits_for(version, container_figures(one.cpu)),
        limits_since=now,
        born=now,
        opted_out=one.opted_out,
    )


def _sandbox(version: int, pod: PodView, now: float) -> ContainerView:
    path = f"{pod.group.path}/{SANDBOX}"
    group = _inherits(version, path, pod.group)
    limits = limits_for(version, CPULimits(None, shares=2))
    return ContainerView(ContainerRef(pod.ref.uid, SANDBOX, None, path), group, Role.SANDBOX, limits=limits, born=now)
