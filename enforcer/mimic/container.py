"""A mimicked container, made step by step in runc's order."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from enforcer.core.cpulimits import DEFAULT_PERIOD
from enforcer.core.cpuset import CPUSet
from enforcer.core.errors import EnforcerError
from enforcer.kernel import procfs
from enforcer.mimic.process import Process
from enforcer.mimic.tree import Tree


class Step(StrEnum):
    """What runc does to make a container.

    v1 goes through them in this order; CPUS_AGAIN only with CPUs in the spec, PERIOD and QUOTA only with a limit.
    v2: MKDIR, ATTACH, SHARES (cpu.weight), QUOTA (cpu.max), CPUS with CPUs in the spec, START, EXEC.
    """

    MKDIR = "mkdir"
    CPUS = "cpus"
    MEMS = "mems"
    ATTACH = "attach"
    CPU_MKDIR = "cpu-mkdir"
    CPUS_AGAIN = "cpus-again"
    SHARES = "shares"
    PERIOD = "period"
    QUOTA = "quota"
    START = "start"
    EXEC = "exec"


# Seconds between a step and the next, as measured: containerd 1.7.24 with runc 1.1.5, an idle machine.
PAUSES: Final = {
    1: {
        Step.MKDIR: 0.0005, Step.CPUS: 0.0003, Step.MEMS: 0.011, Step.ATTACH: 0.0004, Step.CPU_MKDIR: 0.0139,
        Step.START: 0.0107,
    },
    2: {Step.MKDIR: 0.0118, Step.ATTACH: 0.0143, Step.START: 0.0107},
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Spec:
    """What the kubelet asks the runtime for: milli-CPU, a set for the OCI spec, the quota's period in microseconds.

    `limited` False: a request without a limit. `spin`: the user's program eats its CPU instead of sleeping.
    """

    milli: int
    spec_cpus: str | None = None
    spin: bool = False
    period: int = DEFAULT_PERIOD
    limited: bool = True
    comm: str = "app"


class MimicContainer:
    """A container or sandbox. `path` is that below the mount points, `pid` 0 while there is no process."""

    def __init__(self, tree: Tree, pod_path: str, spec: Spec) -> None:
        self.spec = spec
        self.id = os.urandom(32).hex()
        self.path = f"{pod_path}/{self.id}"
        self.stopped = False
        self._tree = tree
        self._process: Process | None = None

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    def first_affinity(self, timeout: float = 5.0) -> CPUSet:
        """Where the process was allowed to run at its first instruction, by its own sched_getaffinity."""
        if self._process is None:
            raise EnforcerError(f"{self.path}: has no process")
        return self._process.recorded(timeout)

    def affinity(self) -> CPUSet:
        """Where the process may run now, by the kernel's word (Cpus_allowed)."""
        allowed = procfs.cpus_allowed(self.pid) if self.pid else None
        if allowed is None:
            raise EnforcerError(f"{self.path}: has no process")
        return allowed

    def stop(self) -> None:
        """The process ends and the runtime removes the cgroup; nothing to do when that was done before."""
        self.kill()
        self.stopped = True
        self._tree.remove_group(self.path)

    def kill(self) -> None:
        """Ends the process and leaves the cgroup."""
        process, self._process = self._process, None
        if process is not None:
            process.end()

    def update(self, milli: int) -> None:
        """Writes the figures of another amount, as `runc update` does."""
        self.spec = replace(self.spec, milli=milli)
        for _step in self._limits():
            pass

    def steps(self) -> Iterator[Step]:
        """Makes the container; yields after each step, without a pause."""
        yield from self._set_up_v1() if self._tree.fs.version == 1 else self._set_up_v2()
        yield Step.START
        if self._process is None:
            raise EnforcerError(f"{self.path}: was stopped before its program was started")
        self._process.start_user_code()
        yield Step.EXEC

    def _set_up_v1(self) -> Iterator[Step]:
        tree, given = self._tree, self.spec.spec_cpus
        tree.make_cpuset(self.path)
        yield Step.MKDIR
        tree.write_cpus(self.path, given) if given else tree.copy_from_parent(self.path, "cpuset.cpus")
        yield Step.CPUS
        tree.copy_from_parent(self.path, "cpuset.mems")
        yield Step.MEMS
        self._attach(cpu=False)
        yield Step.ATTACH
        tree.make_cpu(self.path)
        self._attach(cpu=True)
        yield Step.CPU_MKDIR
        if given:
            tree.write_cpus(self.path, given)
            yield Step.CPUS_AGAIN
        yield from self._limits()

    def _set_up_v2(self) -> Iterator[Step]:
        self._tree.make_cpuset(self.path)
        self._tree.make_cpu(self.path)
        yield Step.MKDIR
        self._attach(cpu=False)
        if self._tree.fs.cpu_root != self._tree.fs.cpuset_root:
            self._attach(cpu=True)
        yield Step.ATTACH
        yield from self._limits()
        if self.spec.spec_cpus:
            self._tree.write_cpus(self.path, self.spec.spec_cpus)
            yield Step.CPUS

    def _attach(self, *, cpu: bool) -> None:
        if self._process is None:
            self._process = Process(self.spec.comm, spin=self.spec.spin)
        self._tree.attach(self.path, self.pid, cpu=cpu)

    def _limits(self) -> Iterator[Step]:
        spec = self.spec
        self._tree.write_shares(self.path, spec.milli)
        yield Step.SHARES
        if spec.milli and spec.limited:
            self._tree.write_period(self.path, spec.period)
            yield Step.PERIOD
            self._tree.write_quota(self.path, spec.milli, spec.period)
            yield Step.QUOTA
