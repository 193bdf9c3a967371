"""The agent's parts in this process, on a made tree: for counts, and for times of what has no event to wait for."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from enforcer.apply import Applier
from enforcer.core.cpuset import CPUSet
from enforcer.core.policy import Policy
from enforcer.kernel import procfs
from enforcer.kernel.watch import Watcher
from enforcer.observe import FILES, Observer
from enforcer.reconcile import Reconciler
from tests.bench.made import MadeNode, machine


class Rig:
    """Observer, reconciler and watcher of one made node."""

    def __init__(self, node: MadeNode) -> None:
        found = machine(node.cpus)
        self.applier = Applier(node.fs, found.possible, time.sleep, None, dry=False)
        self.watcher = Watcher(FILES)
        self.observer = Observer(
            node.fs, found, time.monotonic, procfs.comm, watcher=self.watcher, ours=self.applier.wrote_lately
        )
        reserved = CPUSet([0, node.cpus // 2])
        self.reconciler = Reconciler(self.observer, self.applier, Policy(reserved), time.monotonic)

    def start(self) -> None:
        """What the service does before it is ready."""
        for _ in self.observer.scan():
            pass
        for _ in self.reconciler.full():
            pass
        gc.collect()
        gc.freeze()

    def settle(self) -> None:
        """Answers events until there are none."""
        while events := self.watcher.drain():
            pods: frozenset[str] = frozenset()
            for event in events:
                pods |= self.observer.handle(event).pods
            if pods:
                self.reconciler.hot(pods)


@contextmanager
def rig(node: MadeNode) -> Iterator[Rig]:
    """A rig without log lines, which would be timed as well; its memory is the collector's again afterwards."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    made = Rig(node)
    try:
        yield made
    finally:
        made.watcher.close()
        logging.disable(before)
        gc.unfreeze()


def timed(steps: Iterator[object]) -> tuple[float, float]:
    """(total, longest uninterrupted step) of a generator, in seconds."""
    began = last = time.perf_counter()
    longest = 0.0
    while True:
        end = next(steps, steps)
        now = time.perf_counter()
        longest = max(longest, now - last)
        last = now
        if end is steps:
            return now - began, longest
