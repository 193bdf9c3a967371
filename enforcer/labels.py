"""Names of pods and containers as people write and read them: to print one, and to find what somebody means by one."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from enforcer.core.errors import ConfigError
from enforcer.core.explain import Hold, Holding
from enforcer.core.kubepods import shown
from enforcer.core.node import NodeView
from enforcer.status.model import Names, named

_UUID: Final = re.compile(r"[0-9a-f]{8}-?[0-9a-f]{4}-?[0-9a-f]{4}-?[0-9a-f]{4}-?[0-9a-f]{12}")
_HEX64: Final = re.compile(r"[0-9a-f]{64}")
_CPU: Final = re.compile(r"cpu\s*(\d{1,5})", re.IGNORECASE | re.ASCII)
_BARE_CPU: Final = re.compile(r"\d{1,5}", re.ASCII)
_MOST: Final = 10


class Labels(Names):
    """As status names them; a name that a person gave, in a described node or by --add, is shown whole."""

    def pod(self, uid: str) -> str:
        return super().pod(uid) if _UUID.fullmatch(uid) else shown(uid, 64)

    @staticmethod
    def container(container_id: str) -> str:
        return Names.container(container_id) if _HEX64.fullmatch(container_id) else shown(container_id, 64)


def held_by(one: Holding, names: Names) -> str:
    """How and by whom: "by pod 0a1b2c3d container 0123456789ab"."""
    who = names.of(one.path)
    return {
        Hold.OWN: f"by {who}",
        Hold.HELD: f"held for {who}, whose container has gone",
        Hold.CLAIMED: f"claimed for the coming containers of {who}",
        Hold.FOREIGN: f"by {who}, pinned by somebody else",
    }[one.how]


def holding(one: Holding, names: Names) -> str:
    """The CPUs first: "CPUs 2-3 by pod 0a1b2c3d container 0123456789ab"."""
    return f"{named(one.cpus)} {held_by(one, names)}"


@dataclass(frozen=True, slots=True)
class Found:
    """What somebody means: a CPU, or the cgroup of a pod or container."""

    cpu: int | None = None
    pod: str = ""
    container: str = ""


def find(view: NodeView, text: str) -> Found:
    """From "CPU 5", "5", a pod's UID or container's id or the beginning of one, POD/CONTAINER, or a cgroup's path.

    Raises ConfigError with a list where more than one is meant, and with the nearest names where none is.
    """
    text = text.strip()
    if match := _CPU.fullmatch(text) or _BARE_CPU.fullmatch(text):
        return Found(cpu=int(match[match.lastindex or 0]))
    candidates = _candidates(view)
    chosen = _chosen(candidates, text)
    if len(chosen) == 1:
        return chosen[0]
    if chosen:
        raise ConfigError(f"'{shown(text, 80)}' stands for {len(chosen)} of them", hint=_listed(view, chosen))
    near = _near(candidates, text)
    raise ConfigError(f"there is no pod, container or CPU '{shown(text, 80)}' on this node", hint=near)


def find_pod(view: NodeView, text: str) -> str:
    """The path of the pod that somebody means; raises ConfigError as find(), also for a container or a CPU."""
    candidates = [(name, found) for name, found in _candidates(view) if found.pod]
    chosen = _chosen(candidates, text.strip())
    if len(chosen) == 1:
        return chosen[0].pod
    if chosen:
        raise ConfigError(f"'{shown(text, 80)}' stands for {len(chosen)} pods", hint=_listed(view, chosen))
    raise ConfigError(f"there is no pod '{shown(text, 80)}' on this node", hint=_near(candidates, text))


def _chosen(candidates: list[tuple[str, Found]], text: str) -> list[Found]:
    """Those of exactly that name, else those whose name begins with it."""
    text = text.rpartition("://")[2]  # containerd://0123..., as kubectl has it
    if not text:
        return []
    exact = [found for name, found in candidates if name == text or _is_path_of(name, text)]
    begun = [found for name, found in candidates if name.startswith(text) and ("/" in name) == ("/" in text)]
    return list(dict.fromkeys(exact or begun))


def _is_path_of(path: str, text: str) -> bool:
    """A path below a mount point, or the last name of a path, stands for the cgroup too."""
    return path.startswith("/") and (text.rstrip("/").endswith(path) or path.endswith(f"/{text}"))


def _as_pod(path: str) -> Found:
    return Found(pod=path)


def _candidates(view: NodeView) -> list[tuple[str, Found]]:
    """Every name that something goes by. UIDs stand with underscores in the names of slices."""
    found: list[tuple[str, Found]] = []
    for pod in view.pods():
        here, uid = _as_pod(pod.group.path), pod.ref.uid
        uids = dict.fromkeys((uid, uid.replace("-", "_"), uid.replace("-", "")))
        found += [(name, here) for name in (*uids, pod.group.path)]
        for container in pod.containers.values():
            one = Found(container=container.group.path)
            found += [(container.ref.id, one), (container.group.path, one)]
            # the short form of tables and log lines, too
            found += [(f"{name}/{container.ref.id}", one) for name in (*uids, uid[:8])]
    return found


def _listed(view: NodeView, chosen: Iterable[Found]) -> str:
    names = Labels(view)
    told = sorted(names.of(one.container or one.pod) for one in chosen)
    more = f" and {len(told) - _MOST} more" if len(told) > _MOST else ""
    return ", ".join(told[:_MOST]) + more


def _near(candidates: Iterable[tuple[str, Found]], text: str) -> str:
    known: Mapping[str, None] = {name: None for name, _ in candidates if not name.startswith("/")}
    near = difflib.get_close_matches(text, known, 3, cutoff=0.5)
    near = near or [name for name in known if text[:4] and name.startswith(text[:4])][:3]
    if near:
        return f"nearest: {', '.join(shown(name, 80) for name in near)}"
    return "`cpuset-enforcer status` lists them" if known else "there are no pods here"
