"""The grammar of cgroup names on a Kubernetes node: what a directory is, from its name and its parents alone.

The kubelet names its slices and pod directories (pkg/kubelet/cm/cgroup_manager_linux.go), the runtime names what is
below a pod. The grammar reads any prefix; whether a tree is really this node's is for discovery to say.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from enforcer.core.errors import EnforcerError


class CgroupNameError(EnforcerError, ValueError):
    """A text cannot be a cgroup name of the kubelet."""


class QoSClass(StrEnum):
    GUARANTEED = "guaranteed"
    BURSTABLE = "burstable"
    BESTEFFORT = "besteffort"


class Kind(StrEnum):
    """What a cgroup is.

    CONTAINER: a container or a pause sandbox, most runtimes name both alike. SANDBOX: by its name a sandbox for
    certain. VM: the host's side of a Kata sandbox, its vCPUs included. INSIDE_CONTAINER: made by the container itself,
    belongs to it. OTHER: anything else, also an unknown name below a pod (then with the pod's class and UID).
    """

    ROOT = "root"
    QOS = "qos"
    POD = "pod"
    CONTAINER = "container"
    SANDBOX = "sandbox"
    CONMON = "conmon"
    VM = "vm"
    INSIDE_CONTAINER = "inside-container"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class PodRef:
    """A pod's cgroup. `uid` has dashes, or is 32 hexadecimal digits for a static pod; `path` starts at the hierarchy's
    top."""

    uid: str
    qos: QoSClass
    path: str


@dataclass(frozen=True, slots=True)
class ContainerRef:
    """A container's cgroup; `runtime` is None where the name does not tell (the cgroupfs driver's bare ids)."""

    pod_uid: str
    id: str
    runtime: str | None
    path: str


@dataclass(frozen=True, slots=True)
class Parsed:
    """How a path or name reads; what it does not tell is None."""

    kind: Kind
    qos: QoSClass | None = None
    pod_uid: str | None = None
    container_id: str | None = None
    runtime: str | None = None


_RUNTIMES: Final = {"cri-containerd": "containerd", "crio": "cri-o", "docker": "docker", "libpod": "podman"}
_PREFIX: Final = "|".join(_RUNTIMES)
_HEX64: Final = "[0-9a-f]{64}"
_UUID: Final = "[0-9a-f]{8}(?:[-_]?[0-9a-f]{4}){3}[-_]?[0-9a-f]{12}"

# A static pod's manifest may set any UID and the kubelet takes it, so other texts than a UUID are read too.
_SLICE: Final = re.compile(
    rf"(?:[\w.:@\\-]+-)?kubepods(?:-(burstable|besteffort))?(?:-pod({_UUID}|[0-9A-Za-z]\w*))?(?:\.slice){{1,2}}",
    re.ASCII,
)
_POD_DIRECTORY: Final = re.compile(r"pod([0-9A-Za-z][\w-]*)", re.ASCII)
# containerd with SystemdCgroup = false below a systemd kubelet: the OCI cgroupsPath becomes a directory's name.
_COLON_FORM: Final = re.compile(r"([^:]+):([^:]+):(.+)")
_CONTAINER: Final = re.compile(rf"(?:({_PREFIX})-)?({_HEX64})(\.scope)?|({_UUID})")
_CONMON: Final = re.compile(rf"(crio|libpod)-conmon-({_HEX64})(?:\.scope)?")
_ID: Final = re.compile(_HEX64)
_OUTSIDE: Final = re.compile(rf"(?:({_PREFIX})-(?:conmon-|payload-)?)?({_HEX64})(?:\.scope)?")

_QOS_DIRECTORIES: Final = {"burstable": QoSClass.BURSTABLE, "besteffort": QoSClass.BESTEFFORT}
_OTHER: Final = Parsed(Kind.OTHER)
_LEAVES: Final = frozenset({Kind.CONTAINER, Kind.SANDBOX, Kind.CONMON, Kind.VM, Kind.INSIDE_CONTAINER})


def parse_path(path: str | bytes) -> Parsed:
    """What the cgroup at a path is; never raises.

    Any prefix is read over (a mount point, the scope of a node that is itself a container, `..` of a cgroup namespace),
    as are a trailing slash and the kernel's " (deleted)". The outermost pod counts: whatever a container builds below
    itself is INSIDE_CONTAINER with that container's ids.
    """
    text = path.decode("utf-8", "surrogateescape") if isinstance(path, bytes) else path
    here, parent_name = _OTHER, ""
    for name in text.removesuffix(" (deleted)").split("/"):
        if name:
            here = _step(here, parent_name, name)
            parent_name = name
    return here


def _step(parent: Parsed, parent_name: str, name: str) -> Parsed:
    systemd = parent_name.endswith(".slice")
    found = classify(parent.kind, parent.qos, name, pod_uid=parent.pod_uid, systemd=systemd)
    if found.kind is Kind.INSIDE_CONTAINER:
        return replace(parent, kind=Kind.INSIDE_CONTAINER)
    return found


def classify(
    parent: Kind, qos: QoSClass | None, name: str, *, pod_uid: str | None = None, systemd: bool = False
) -> Parsed:
    """What the directory `name` is below a cgroup of kind `parent`: one level, a few microseconds, never raises.

    qos and pod_uid are the parent's; systemd says that the parent's own name ends in ".slice". A name that contradicts
    its place (a burstable pod's slice outside the burstable slice) is OTHER. A container's result has its own id; the
    one of INSIDE_CONTAINER is the parent's, which is not known here.
    """
    if parent is Kind.POD:
        return _below_pod(qos, pod_uid, name, systemd)
    if parent is Kind.ROOT or parent is Kind.QOS:
        return _below_root(parent, qos, name)
    if parent is Kind.VM and _ID.fullmatch(name):
        return Parsed(Kind.VM, qos, pod_uid, name)
    if parent in _LEAVES:
        return Parsed(Kind.INSIDE_CONTAINER, qos, pod_uid)
    if qos is not None:
        return Parsed(Kind.OTHER, qos, pod_uid)
    return _outside(name)


def _below_root(parent: Kind, qos: QoSClass | None, name: str) -> Parsed:
    found = _kubelet_slice(name) or _kubelet_directory(qos, name)
    place = qos or QoSClass.GUARANTEED
    if found is None or (parent is Kind.QOS and found.kind is not Kind.POD):
        return Parsed(Kind.OTHER, qos)
    if found.kind is Kind.POD and found.qos is not place:
        return Parsed(Kind.OTHER, qos)
    return found


def _kubelet_slice(name: str) -> Parsed | None:
    match = _SLICE.fullmatch(name)
    if match is None:
        return None
    qos, uid = match.groups()
    if uid is not None:
        return Parsed(Kind.POD, QoSClass(qos or QoSClass.GUARANTEED), uid.replace("_", "-"))
    return Parsed(Kind.QOS, QoSClass(qos)) if qos else Parsed(Kind.ROOT)


def _kubelet_directory(qos: QoSClass | None, name: str) -> Parsed | None:
    if match := _POD_DIRECTORY.fullmatch(name):
        return Parsed(Kind.POD, qos or QoSClass.GUARANTEED, match[1].replace("_", "-"))
    if name in _QOS_DIRECTORIES:
        return Parsed(Kind.QOS, _QOS_DIRECTORIES[name])
    return Parsed(Kind.ROOT) if name == "kubepods" else None


def _below_pod(qos: QoSClass | None, uid: str | None, name: str, systemd: bool) -> Parsed:
    if match := _CONTAINER.fullmatch(name):
        prefix, hex_id, scope, uuid = match.groups()
        # Without an infra container CRI-O makes an empty `crio-<sandbox id>` by mkdir, so that cAdvisor finds the pod.
        kind = Kind.SANDBOX if systemd and prefix == "crio" and not scope else Kind.CONTAINER
        return Parsed(kind, qos, uid, hex_id or uuid, _RUNTIMES.get(prefix))
    if match := _CONMON.fullmatch(name):
        return Parsed(Kind.CONMON, qos, uid, match[2], _RUNTIMES[match[1]])
    if name == "conmon":
        return Parsed(Kind.CONMON, qos, uid, None, "podman")
    if name.startswith("kata_"):
        sandbox = _ID.fullmatch(name.removesuffix(".scope")[-64:])
        return Parsed(Kind.VM, qos, uid, sandbox and sandbox[0])
    return Parsed(Kind.OTHER, qos, uid)


def _outside(name: str) -> Parsed:
    if name == "kubepods":
        return Parsed(Kind.ROOT)
    if found := _kubelet_slice(name):
        return found
    if match := _COLON_FORM.fullmatch(name):
        return _colon_form(*match.groups())
    if (match := _CONMON.fullmatch(name)) and match[1] == "crio":
        return Parsed(Kind.CONMON, container_id=match[2], runtime=_RUNTIMES["crio"])
    return Parsed(Kind.VM) if name == "kata_overhead" else _OTHER


def _colon_form(slice_name: str, prefix: str, last: str) -> Parsed:
    pod = _kubelet_slice(slice_name)
    if pod is None or pod.kind is not Kind.POD:
        return _OTHER
    container_id = last if _ID.fullmatch(last) else None
    return replace(pod, kind=Kind.CONTAINER, container_id=container_id, runtime=_RUNTIMES.get(prefix))


def outside_container(path: str) -> tuple[str, str] | None:
    """(runtime, id) of the outermost container of a path that is not below a pod, to name an intruder by; else None.

    A bare id is docker's, unless podman's directory is above it.
    """
    parent = ""
    for name in path.split("/"):
        if match := _OUTSIDE.fullmatch(name):
            return _RUNTIMES[match[1] or ("libpod" if parent == "libpod" else "docker")], match[2]
        parent = name
    return None


def is_root_candidate(path: str) -> bool:
    """Whether discovery may take this path, from the hierarchy's top, for the root of this node's pods.

    Only `/kubepods[.slice]` and the same below `/kubelet[.slice]` (kind's `--cgroup-root`): a user's session or a
    container can make a kubepods of its own further down and would take all cores with it.
    """
    match [name for name in path.split("/") if name]:
        case ["kubepods" | "kubepods.slice"]:
            return True
        case ["kubelet" | "kubelet.slice", "kubepods" | "kubepods.slice" | "kubelet-kubepods.slice"]:
            return True
    return False


# What systemd allows in a unit's name (systemd.unit(5)).
_UNIT: Final = re.compile(r"[\w:.@\\-]{1,249}\.(?:slice|scope|service)", re.ASCII)


def unit_name(path: str) -> str | None:
    """The unit of the host's systemd whose cgroup this is, or None.

    Below a scope or service another manager rules (a container's own systemd, user@.service): an `init.scope` there is
    not PID 1's, so every parent must be a slice in its right place. A leading "_" is systemd's escape for names that
    look like a cgroup file (cg_escape() in systemd's cgroup-util.c).
    """
    names = [name.removeprefix("_") for name in path.split("/") if name]
    if not names or not all(_UNIT.fullmatch(name) for name in names):
        return None
    slices = names if names[-1].endswith(".slice") else names[:-1]
    if slices and slice_path(slices[-1]) != "/" + "/".join(slices):
        return None
    return names[-1]


def slice_path(unit: str) -> str | None:
    """The cgroup path of a slice unit ("a-b.slice" -> "/a.slice/a-b.slice", "-.slice" -> "/"); None for other names."""
    if unit == "-.slice":
        return "/"
    stem = unit.removesuffix(".slice")
    parts = stem.split("-")
    if stem == unit or not all(parts):
        return None
    return "".join(f"/{'-'.join(parts[:end])}.slice" for end in range(1, len(parts) + 1))


def _checked(parts: Sequence[str]) -> Sequence[str]:
    for part in parts:
        if not part or "/" in part or "_" in part:
            raise CgroupNameError(f"cgroup name part '{shown(part)}': must not be empty and holds neither '/' nor '_'")
    return parts


def systemd_name(parts: Sequence[str]) -> str:
    """The slice unit of a kubelet's cgroup name (["kubepods", "burstable"] -> "kubepods-burstable.slice"); [] is "/".

    Raises CgroupNameError for a part that is empty or holds "/" or "_" (it could not be read back).
    """
    return "-".join(part.replace("-", "_") for part in _checked(parts)) + ".slice" if parts else "/"


def systemd_path(parts: Sequence[str]) -> str:
    """The path of a kubelet's cgroup name with the systemd driver; raises as systemd_name()."""
    return slice_path(systemd_name(parts)) or "/"


def cgroupfs_path(parts: Sequence[str]) -> str:
    """The path of a kubelet's cgroup name with the cgroupfs driver; raises as systemd_name()."""
    return "/" + "/".join(_checked(parts))


def parts_of_systemd(path: str) -> list[str]:
    """The kubelet's name of a slice's path or unit; systemd_path() backwards."""
    stem = path.rstrip("/").rpartition("/")[2].removesuffix(".slice")
    return [part.replace("_", "-") for part in stem.split("-")] if stem else []


def parts_of_cgroupfs(path: str) -> list[str]:
    """The kubelet's name of a cgroupfs path; cgroupfs_path() backwards."""
    return [name for name in path.split("/") if name]


def pod_parts(root: Sequence[str], qos: QoSClass, uid: str) -> list[str]:
    """The kubelet's name of a pod's cgroup; `root` is that of its --cgroup-root ([] or ["kubelet"])."""
    level = [] if qos is QoSClass.GUARANTEED else [qos.value]
    return [*root, "kubepods", *level, f"pod{uid}"]


_UNPRINTABLE: Final = re.compile(r"[^ -~]")


def shown(name: str | bytes, limit: int = 200) -> str:
    """A name or path fit for a log line: printable ASCII, the rest escaped, and the middle cut out above `limit`."""
    text = name.decode("utf-8", "surrogateescape") if isinstance(name, bytes) else name
    text = _UNPRINTABLE.sub(_escaped, text)
    if len(text) <= limit:
        return text
    tail = (limit - 3) // 2
    return f"{text[: limit - 3 - tail]}...{text[len(text) - tail :]}"


def _escaped(match: re.Match[str]) -> str:
    code = ord(match[0])
    if 0xDC80 <= code <= 0xDCFF:
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
