"""Plays the kubelet and the runtime in a guest: pods, containers with a probe inside, resizes, exits.

`SystemdNode` does it with systemd over D-Bus and runc (systemd cgroup driver), `PlainNode` by hand in runc's order and
timing (cgroupfs driver). Both are cgroup v2.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from enforcer.core.cpuset import CPUSet

CGROUPS: Final = Path("/sys/fs/cgroup")
ROOTFS: Final = Path("/run/share/rootfs")
WORK: Final = Path("/run/kit")
PERIOD: Final = 100_000
CONTROLLERS: Final = ("cpuset", "cpu", "io", "memory", "hugetlb", "pids", "rdma", "misc")

QoS = Literal["guaranteed", "burstable", "besteffort"]
T = TypeVar("T")


def wait_until(condition: Callable[[], T], what: str, seconds: float = 30) -> T:
    """The first true answer of `condition`; fails with `what` when there is none in time."""
    deadline = time.monotonic() + seconds
    while not (answer := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s: {what}")
        time.sleep(0.005)
    return answer


def read(file: Path) -> str:
    """A small file's text without the newline."""
    return file.read_text().strip()


def cpus_of(cgroup: Path) -> CPUSet:
    """`cpuset.cpus` of a cgroup; empty when nothing is set."""
    return CPUSet.parse(read(cgroup / "cpuset.cpus"))


def effective_cpus_of(cgroup: Path) -> CPUSet:
    """`cpuset.cpus.effective` of a cgroup."""
    return CPUSet.parse(read(cgroup / "cpuset.cpus.effective"))


def enable_controllers(cgroup: Path) -> None:
    """What runc and the kubelet do on the way down to `cgroup`: all controllers on in every directory above it."""
    for directory in reversed(cgroup.parents):
        if directory.is_relative_to(CGROUPS):
            for controller in CONTROLLERS:
                with contextlib.suppress(OSError):
                    (directory / "cgroup.subtree_control").write_text(f"+{controller}")


def shares_of(milli_cpu: int) -> int:
    """cpu.shares for a CPU request, as the kubelet computes it."""
    return max(2, milli_cpu * 1024 // 1000)


def weight_of(shares: int) -> int:
    """cpu.weight for cpu.shares by runc's linear formula."""
    return 1 + (shares - 2) * 9999 // 262142


@dataclass(frozen=True, slots=True)
class Moment:
    """A line of the probe's log: CLOCK_MONOTONIC seconds, the CPU it ran on, its affinity."""

    seconds: float
    cpu: int
    cpus: CPUSet


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod's cgroup. `unit` is its slice with the systemd driver, else ""."""

    uid: str
    cgroup: Path
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Container:
    """A running container. `unit` is its scope with the systemd driver, else ""; `pid` its first process."""

    id: str
    cgroup: Path
    log: Path
    pid: int
    unit: str = ""

    def moments(self) -> list[Moment]:
        """All of the probe's affinities so far, oldest first."""
        text = self.log.read_text() if self.log.exists() else ""
        lines = [line.split() for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return [Moment(float(seconds), int(cpu), CPUSet.parse(cpus)) for seconds, cpu, cpus in lines]

    def first_affinity(self) -> CPUSet:
        """The affinity that the container's first own instruction saw."""
        return wait_until(self.moments, f"first line of the probe of {self.id}")[0].cpus

    def affinity(self) -> CPUSet:
        """The affinity now."""
        return CPUSet(os.sched_getaffinity(self.pid))


class Node(ABC):
    """A Kubernetes node as its cgroup tree shows it. The kubepods root and the QoS levels are there from the start."""

    def __init__(self) -> None:
        self.pods: list[Pod] = []
        self.containers: list[Container] = []
        (WORK / "out").mkdir(parents=True, exist_ok=True)

    @abstractmethod
    def cgroup_of(self, qos: QoS) -> Path:
        """The QoS level's directory; for "guaranteed" the kubepods root itself."""

    @abstractmethod
    def pod(self, uid: str, qos: QoS = "guaranteed", milli_cpu: int | None = None) -> Pod:
        """Makes a pod's cgroup as the kubelet does; `milli_cpu` is request and limit, None = neither."""

    @abstractmethod
    def run(
        self, pod: Pod, name: str, milli_cpu: int | None = None, *, cpus: str = "", program: str = "probe"
    ) -> Container:
        """Starts a container and waits for its program; `cpus` as a runtime that pins by itself would give them."""

    @abstractmethod
    def resize(self, container: Container, milli_cpu: int) -> None:
        """Another request and limit for a running container."""

    @abstractmethod
    def stop(self, container: Container) -> None:
        """Kills a container; its cgroup is gone afterwards."""

    @abstractmethod
    def remove(self, pod: Pod) -> None:
        """Removes the cgroup of a pod without containers."""

    def close(self) -> None:
        """Stops and removes all that is left."""
        for container in self.containers[::-1]:
            self.stop(container)
        for pod in self.pods[::-1]:
            self.remove(pod)


def make_node(kind: str) -> Node:
    """The node for a guest of this kind."""
    return SystemdNode() if kind == "systemd" else PlainNode()


class PlainNode(Node):
    """The cgroupfs driver by hand: /kubepods/<qos>/pod<uid>/<64 hex digits>."""

    # runc 1.1: limits come about 14 ms after `runc init` was attached, user code about 11 ms after them
    ATTACH_TO_LIMITS = 0.014
    LIMITS_TO_EXEC = 0.011

    def __init__(self) -> None:
        super().__init__()
        for qos in ("guaranteed", "burstable", "besteffort"):
            self._make(self.cgroup_of(qos))

    def cgroup_of(self, qos: QoS) -> Path:
        root = CGROUPS / "kubepods"
        return root if qos == "guaranteed" else root / qos

    def pod(self, uid: str, qos: QoS = "guaranteed", milli_cpu: int | None = None) -> Pod:
        pod = Pod(uid, self.cgroup_of(qos) / f"pod{uid}")
        self._make(pod.cgroup)
        self.pods.append(pod)
        self._limit(pod.cgroup, milli_cpu)
        return pod

    def run(
        self, pod: Pod, name: str, milli_cpu: int | None = None, *, cpus: str = "", program: str = "probe"
    ) -> Container:
        cgroup = pod.cgroup / name.encode().hex().ljust(64, "0")[:64]
        log = WORK / "out" / name
        log.unlink(missing_ok=True)
        self._make(cgroup)
        go, pid = _forked_init(ROOTFS / program, log)
        container = Container(name, cgroup, log, pid)
        self.containers.append(container)
        (cgroup / "cgroup.procs").write_text(str(pid))
        time.sleep(self.ATTACH_TO_LIMITS)
        self._limit(cgroup, milli_cpu)
        if cpus:
            (cgroup / "cpuset.cpus").write_text(cpus)
        time.sleep(self.LIMITS_TO_EXEC)
        os.close(go)
        wait_until(lambda: read(Path(f"/proc/{pid}/comm")) == program, f"{program} of {name} runs")
        return container

    def resize(self, container: Container, milli_cpu: int) -> None:
        self._limit(container.cgroup, milli_cpu)

    def stop(self, container: Container) -> None:
        os.kill(container.pid, signal.SIGKILL)
        os.waitpid(container.pid, 0)
        wait_until(lambda: _removed(container.cgroup), f"rmdir of {container.cgroup}")
        self.containers.remove(container)

    def remove(self, pod: Pod) -> None:
        wait_until(lambda: _removed(pod.cgroup), f"rmdir of {pod.cgroup}")
        self.pods.remove(pod)

    def close(self) -> None:
        super().close()
        for qos in ("besteffort", "burstable", "guaranteed"):
            _removed(self.cgroup_of(qos))

    @staticmethod
    def _make(cgroup: Path) -> None:
        cgroup.mkdir(exist_ok=True)
        enable_controllers(cgroup)

    @staticmethod
    def _limit(cgroup: Path, milli_cpu: int | None) -> None:
        """runc's order: weight first, then the quota."""
        (cgroup / "cpu.weight").write_text(str(weight_of(shares_of(milli_cpu or 2))))
        quota = "max" if milli_cpu is None else milli_cpu * PERIOD // 1000
        (cgroup / "cpu.max").write_text(f"{quota} {PERIOD}")


def _forked_init(program: Path, log: Path) -> tuple[int, int]:
    """A child named like runc's that becomes `program` when the returned descriptor is closed; descriptor and pid."""
    wait, go = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(go)
        Path("/proc/self/comm").write_text("runc:[2:INIT]")
        os.read(wait, 1)
        os.execv(program, [str(program), str(log)])
    os.close(wait)
    wait_until(lambda: read(Path(f"/proc/{pid}/comm")).startswith("runc:["), "the child has runc's name")
    return go, pid


def _removed(cgroup: Path) -> bool:
    with contextlib.suppress(OSError):
        cgroup.rmdir()
    return not cgroup.exists()


class SystemdNode(Node):
    """The systemd driver: kubepods.slice, kubepods-burstable-pod<uid>.slice, cri-containerd-<id>.scope by runc."""

    def __init__(self) -> None:
        super().__init__()
        self.bus = SystemdBus()
        if not (WORK / "rootfs").exists():
            shutil.copytree(ROOTFS, WORK / "rootfs")
        # the kubelet (policy none) gives the root all CPUs, so that systemd keeps the cpuset controller there
        all_cpus = CPUSet.parse(read(Path("/sys/devices/system/cpu/online"))).mask.to_bytes(1, "little")
        self.bus.start_slice("kubepods.slice", {"CPUWeight": ("t", 200), "AllowedCPUs": ("ay", all_cpus)})
        for qos in ("burstable", "besteffort"):
            self.bus.start_slice(f"kubepods-{qos}.slice", {"CPUWeight": ("t", 1)})
            enable_controllers(self.cgroup_of(qos))

    def cgroup_of(self, qos: QoS) -> Path:
        root = CGROUPS / "kubepods.slice"
        return root if qos == "guaranteed" else root / f"kubepods-{qos}.slice"

    def pod(self, uid: str, qos: QoS = "guaranteed", milli_cpu: int | None = None) -> Pod:
        level = "kubepods" if qos == "guaranteed" else f"kubepods-{qos}"
        unit = f"{level}-pod{uid.replace('-', '_')}.slice"
        pod = Pod(uid, self.cgroup_of(qos) / unit, unit)
        self.pods.append(pod)
        self.bus.start_slice(unit, _cpu_properties(milli_cpu))
        enable_controllers(pod.cgroup)
        return pod

    def run(
        self, pod: Pod, name: str, milli_cpu: int | None = None, *, cpus: str = "", program: str = "probe"
    ) -> Container:
        log = WORK / "out" / name
        log.unlink(missing_ok=True)
        bundle = WORK / "bundles" / name
        bundle.mkdir(parents=True, exist_ok=True)
        spec = _runc_spec(bundle, f"{pod.unit}:cri-containerd:{name}", [f"/{program}", f"/out/{name}"], milli_cpu, cpus)
        (bundle / "config.json").write_text(json.dumps(spec))
        _runc("run", "--detach", "--bundle", str(bundle), name)
        scope = f"cri-containerd-{name}.scope"
        pid = int(json.loads(_runc("state", name))["pid"])
        container = Container(name, pod.cgroup / scope, log, pid, scope)
        self.containers.append(container)
        return container

    def resize(self, container: Container, milli_cpu: int) -> None:
        quota = milli_cpu * PERIOD // 1000
        _runc("update", "--cpu-quota", str(quota), "--cpu-share", str(shares_of(milli_cpu)), container.id)

    def stop(self, container: Container) -> None:
        _runc("delete", "--force", container.id)
        wait_until(lambda: not container.cgroup.exists(), f"{container.cgroup} is gone")
        self.containers.remove(container)

    def remove(self, pod: Pod) -> None:
        self.bus.stop(pod.unit)
        wait_until(lambda: not pod.cgroup.exists(), f"{pod.cgroup} is gone")
        self.pods.remove(pod)

    def close(self) -> None:
        super().close()
        self.bus.stop("kubepods.slice")
        wait_until(lambda: not self.cgroup_of("guaranteed").exists(), "kubepods.slice is gone")
        self.bus.close()


def _cpu_properties(milli_cpu: int | None) -> dict[str, tuple[str, Any]]:
    """As opencontainers/cgroups tells systemd; it rounds the quota up to 10 ms."""
    weight: dict[str, tuple[str, Any]] = {"CPUWeight": ("t", weight_of(shares_of(milli_cpu or 2)))}
    if milli_cpu is None:
        return weight
    quota = -(-milli_cpu * 1000 // 10_000) * 10_000
    return weight | {"CPUQuotaPerSecUSec": ("t", quota), "CPUQuotaPeriodUSec": ("t", PERIOD)}


def _runc(*arguments: str) -> str:
    output = WORK / "runc.out"
    # not a pipe: the container keeps runc's standard output open
    with output.open("w") as file:
        command = ["runc", "--root", str(WORK / "runc"), "--systemd-cgroup", *arguments]
        code = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, check=False).returncode
    if code:
        raise AssertionError(f"{' '.join(command)}: exit code {code}: {output.read_text()}")
    return output.read_text()


def _runc_spec(bundle: Path, cgroups_path: str, args: list[str], milli_cpu: int | None, cpus: str) -> dict[str, Any]:
    (bundle / "config.json").unlink(missing_ok=True)
    _runc("spec", "--bundle", str(bundle))
    spec: dict[str, Any] = json.loads((bundle / "config.json").read_text())
    spec["process"] |= {"terminal": False, "args": args}
    spec["root"] = {"path": str(WORK / "rootfs"), "readonly": True}
    out = {"destination": "/out", "type": "bind", "source": str(WORK / "out"), "options": ["rbind", "rw"]}
    spec["mounts"].append(out)
    cpu: dict[str, Any] = {"shares": shares_of(milli_cpu or 2), "period": PERIOD}
    cpu |= {"quota": milli_cpu * PERIOD // 1000} if milli_cpu else {}
    cpu |= {"cpus": cpus} if cpus else {}
    spec["linux"]["cgroupsPath"] = cgroups_path
    spec["linux"]["resources"]["cpu"] = cpu
    return spec


class SystemdBus:
    """Calls of the kubelet's and an administrator's to systemd's manager, one after the other."""

    def __init__(self) -> None:
        from jeepney import DBusAddress  # type: ignore[import-untyped]
        from jeepney.io.blocking import open_dbus_connection  # type: ignore[import-untyped]

        self._connection = open_dbus_connection("unix:path=/run/dbus/system_bus_socket")
        self._manager = DBusAddress(
            "/org/freedesktop/systemd1", "org.freedesktop.systemd1", "org.freedesktop.systemd1.Manager"
        )

    def call(self, method: str, signature: str = "", *body: Any) -> tuple[Any, ...]:
        """One method of org.freedesktop.systemd1.Manager; raises jeepney's DBusErrorResponse."""
        from jeepney import DBusErrorResponse, MessageType, new_method_call

        message = new_method_call(self._manager, method, signature or None, body)
        reply = self._connection.send_and_get_reply(message, timeout=60)
        if reply.header.message_type is MessageType.error:
            raise DBusErrorResponse(reply)
        return tuple(reply.body)

    def start_slice(self, unit: str, properties: dict[str, tuple[str, Any]]) -> None:
        """StartTransientUnit as opencontainers/cgroups asks for it; returns when the slice is active."""
        accounting = {f"{what}Accounting": ("b", True) for what in ("CPU", "Memory", "Tasks", "IO")}
        wanted = accounting | {"DefaultDependencies": ("b", False)} | properties
        self.call("StartTransientUnit", "ssa(sv)a(sa(sv))", unit, "replace", list(wanted.items()), [])
        wait_until(lambda: self.unit_property(unit, "ActiveState") == "active", f"{unit} is active")

    def set_properties(self, unit: str, properties: dict[str, tuple[str, Any]]) -> None:
        """SetUnitProperties, runtime: `systemctl set-property --runtime`."""
        self.call("SetUnitProperties", "sba(sv)", unit, True, list(properties.items()))

    def unit_property(self, unit: str, name: str) -> str:
        """As `systemctl show` prints it."""
        command = ["systemctl", "show", "--value", "--property", name, unit]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    def stop(self, unit: str) -> None:
        """StopUnit; a unit that is not there is fine."""
        from jeepney import DBusErrorResponse

        with contextlib.suppress(DBusErrorResponse):
            self.call("StopUnit", "ss", unit, "replace")

    def reload(self) -> None:
        """daemon-reload."""
        self.call("Reload")

    def close(self) -> None:
        """Leaves the bus."""
        self._connection.close()
