"""Plays the kubelet and runc on this machine's real cgroups with real processes, for the demo and the kernel tests.

It knows nothing of the agent. Only the cpuset and cpu hierarchies are touched, and in them only what is made here.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator
from types import TracebackType

from enforcer.core.cpulimits import DEFAULT_PERIOD
from enforcer.core.errors import EnforcerError
from enforcer.core.kubepods import QoSClass
from enforcer.core.node import parent_of
from enforcer.kernel.cgroupfs import CgroupFS
from enforcer.mimic.container import PAUSES, MimicContainer, Spec, Step
from enforcer.mimic.tree import Tree

__all__ = ["MimicContainer", "MimicNode", "MimicPod", "Spec", "Step"]


class MimicNode:
    """A kubepods tree of its own at `root`, a path below the hierarchies' mount points that must not exist yet.

    `pace` stretches the measured pauses; 0 leaves them out. Raises EnforcerError when the root exists, OSError with the
    file's name when the kernel refuses a write. close() ends all processes and takes everything away again.
    """

    def __init__(self, fs: CgroupFS, root: str, *, pace: float = 1.0) -> None:
        self.root = root.rstrip("/")
        self.pace = pace
        self.tree = Tree(fs)
        self.pods: list[MimicPod] = []
        if any(os.path.lexists(d) for d in (fs.cpuset_dir(self.root), fs.cpu_dir(self.root))):
            raise EnforcerError(f"{self.root}: this cgroup exists already", hint="choose another name for this tree")
        try:
            self._make_root()
        except BaseException:
            self.close()
            raise

    def pod(self, qos: QoSClass, name: str, *, milli: int | None) -> MimicPod:
        """A pod's cgroup as the kubelet makes it: `milli` is the sum of its containers' CPU, None = none asked for.

        Only a Guaranteed pod gets a quota (the kubelet sets one when every container has a limit).
        """
        made = MimicPod(self.tree, self.place(qos), qos, name, milli or 0, self.pace)
        self.pods.append(made)
        return made

    def place(self, qos: QoSClass) -> str:
        """The cgroup that holds the pods of a class."""
        return self.root if qos is QoSClass.GUARANTEED else f"{self.root}/{qos.value}"

    def close(self) -> None:
        """Ends the processes and removes the cgroups, the deepest first; can be called again."""
        for pod in self.pods:
            for one in pod.containers:
                one.kill()
        self.pods.clear()
        self.tree.close()

    def __enter__(self) -> MimicNode:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _make_root(self) -> None:
        levels = [self.root]
        while parent_of(levels[-1]) != "/":
            levels.append(parent_of(levels[-1]))
        for path in reversed(levels):
            self.tree.make_group(path)
        for qos in (QoSClass.BURSTABLE, QoSClass.BESTEFFORT):
            self.tree.make_group(self.place(qos))
            self.tree.write_shares(self.place(qos), 0)


class MimicPod:
    """A pod; `milli` is what its containers ask for together. `containers` are those that were not stopped."""

    def __init__(self, tree: Tree, place: str, qos: QoSClass, name: str, milli: int, pace: float) -> None:
        self.qos = qos
        self.name = name
        self.uid = str(uuid.uuid4())
        self.path = f"{place}/pod{self.uid}"
        self.milli = milli
        self._tree = tree
        self._pace = pace
        self._all: list[MimicContainer] = []
        tree.make_group(self.path)
        self._write_limits()

    @property
    def containers(self) -> list[MimicContainer]:
        return [one for one in self._all if not one.stopped]

    def sandbox(self) -> MimicContainer:
        """The pause container: shares 2, no quota."""
        return self._run(Spec(0, comm="pause"))

    def container(
        self,
        *,
        milli: int,
        spec_cpus: str | None = None,
        spin: bool = False,
        period: int = DEFAULT_PERIOD,
        limited: bool = True,
    ) -> MimicContainer:
        """A running container, at runc's pace; returns once its first instruction has run.

        One that cannot be made is cleaned up, as by runc. `milli` 0: nothing is asked for; `limited` False: a request
        without a limit.
        """
        return self._run(Spec(milli, spec_cpus, spin, period, limited))

    def container_steps(
        self,
        *,
        milli: int,
        spec_cpus: str | None = None,
        spin: bool = False,
        period: int = DEFAULT_PERIOD,
        limited: bool = True,
    ) -> Iterator[tuple[Step, MimicContainer]]:
        """The same one step at a time, without pauses: yields after each step."""
        return self._steps(Spec(milli, spec_cpus, spin, period, limited))

    def resize(self, container: MimicContainer, milli: int) -> None:
        """An in-place resize: the pod grows before its container, and shrinks after it."""
        growing = milli > container.spec.milli
        self.milli += milli - container.spec.milli
        if growing:
            self._write_limits()
        container.update(milli)
        if not growing:
            self._write_limits()

    def restart(self, container: MimicContainer) -> MimicContainer:
        """The container ends and comes again under a new id, as after a crash."""
        container.stop()
        return self._run(container.spec)

    def remove(self) -> None:
        """The containers end, the sandbox last, then the kubelet removes the pod's cgroup."""
        for one in sorted(self.containers, key=lambda c: c.spec.comm == "pause"):
            one.stop()
        self._tree.remove_group(self.path)

    def _write_limits(self) -> None:
        self._tree.write_shares(self.path, self.milli)
        if self.qos is QoSClass.GUARANTEED:
            self._tree.write_period(self.path, DEFAULT_PERIOD)
            self._tree.write_quota(self.path, self.milli)

    def _steps(self, spec: Spec) -> Iterator[tuple[Step, MimicContainer]]:
        made = MimicContainer(self._tree, self.path, spec)
        self._all.append(made)
        for step in made.steps():
            yield step, made

    def _run(self, spec: Spec) -> MimicContainer:
        pauses = PAUSES[self._tree.fs.version]
        try:
            for step, _made in self._steps(spec):
                time.sleep(self._pace * pauses.get(step, 0.0))
            self._all[-1].first_affinity()
        except (OSError, EnforcerError):
            self._all[-1].stop()
            raise
        return self._all[-1]
