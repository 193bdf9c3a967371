"""Agent: the loop. It joins the sources of events to the reconciler and knows nothing of either.

One thread owns the model, the plan and every cgroup write. Two time scales: the hot path answers an event at once; a
full pass is a generator that lets hot events in at least every millisecond.
"""

from __future__ import annotations

import gc
import logging
import os
import selectors
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType

from enforcer.checkpoint import Checkpointer, Document
from enforcer.core.errors import EnforcerError
from enforcer.core.kubepods import shown
from enforcer.observe import EVERYTHING, Dirty
from enforcer.reconcile import Reconciler
from enforcer.sources import Source, Ticker, wake_up
from enforcer.tally import Tally

log = logging.getLogger(__name__)

_SLICE = 0.001  # seconds of a full pass at a time
_NEVER = float("inf")
_ROUNDS = 100  # of hot events in a row, before timers and full pass get a turn


@dataclass
class Agent:
    """`document` gives the state to be saved; `reload` is called on SIGHUP; `rescan` in seconds.

    `check` is called after every pass: it may leave enforce.
    """

    reconciler: Reconciler
    clock: Callable[[], float]
    sources: list[Source]
    checkpointer: Checkpointer
    document: Callable[[], Document]
    rescan: float
    reload: Callable[[], None] = lambda: None
    check: Callable[[], None] = lambda: None
    tickers: Sequence[Ticker] = ()
    tally: Tally = field(default_factory=Tally)
    notify: Callable[[str], None] = lambda text: None
    stopping: bool = False
    _full: Iterator[None] | None = None
    _wanted: bool = True
    _plan_all: bool = False
    _due_full: float = 0.0
    _ready: bool = False
    _reload_asked: bool = False
    _trouble: str = ""

    def run(self) -> None:
        """Runs until SIGTERM or SIGINT; the pins stay."""
        wake, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        selector = selectors.EpollSelector()
        old = signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        for number, handler in self._handlers().items():
            signal.signal(number, handler)
        try:
            for source in (*self.sources, wake_up(wake)):
                selector.register(source.fileno, selectors.EVENT_READ, source)
            while not self.stopping:
                self._round(selector)
        finally:
            signal.set_wakeup_fd(old)
            selector.close()
            os.close(wake)
            os.close(wake_write)
            self.save(force=True)

    def want_full(self) -> None:
        """Asks for a full pass."""
        self._wanted = True

    def save(self, *, force: bool = False) -> None:
        """Writes the state file if it is due."""
        line = self.checkpointer.flush(self.clock(), force=force)
        if line:
            log.warning("%s", line)

    # one turn

    def _round(self, selector: selectors.BaseSelector) -> None:
        timeout = self._timeout()
        for _ in range(_ROUNDS):
            ready = selector.select(timeout)
            began = self.clock()
            timeout = 0
            if not ready:
                break
            dirty = self._take(key.data for key, _ in ready)
            if dirty.pods:
                self._hot(dirty.pods)
            self.tally.loop.observe(self.clock() - began)
        began = self.clock()
        self._timers()
        self._advance()
        self.save()
        self.tally.loop.observe(self.clock() - began)

    def _take(self, sources: Iterator[Source]) -> Dirty:
        pods: frozenset[str] = frozenset()
        for source in sources:
            dirty = self._taken(source)
            self._wanted |= dirty.everything
            pods |= dirty.pods
        return Dirty(pods)

    def _taken(self, source: Source) -> Dirty:
        """What a source that fails had to say is made good by a full pass; the failure is told when it is a new one."""
        try:
            return source.take()
        except (EnforcerError, OSError) as error:
            if str(error) != self._trouble:
                log.warning("events were lost, looking at everything: %s", shown(str(error), 500))
            self._trouble = str(error)
            return EVERYTHING

    def _hot(self, pods: frozenset[str]) -> None:
        self.reconciler.hot(pods)
        self._offer()
        self.check()

    def _offer(self) -> None:
        self.checkpointer.offer(self.document, self.clock())

    def _timers(self) -> None:
        now = self.clock()
        ticked: frozenset[str] = frozenset()
        for ticker in self.tickers:
            ticked |= ticker.tick().pods
        if self._reload_asked:
            self._reload_asked = False
            self.reload()
            self._wanted = True
        _, births = self.reconciler.observer.due_births()
        for pod in births | ticked:
            self.reconciler.observer.look(pod)
        due = births | ticked | self.reconciler.due_pods()
        if due:
            self._hot(due)
        if now >= self.reconciler.wake_at:
            self.reconciler.wake_at = _NEVER
            self._plan_all = True

    def _advance(self) -> None:
        """A slice of the full pass that is under way, or the start of one that is due."""
        now = self.clock()
        if self._full is None:
            if self._wanted or now >= self._due_full:
                self._wanted, self._plan_all = False, False
                self._due_full = now + self.rescan
                self._full = self.reconciler.full()
            elif self._plan_all:
                self._plan_all = False
                self._full = self.reconciler.settle()
            else:
                return
        end = now + _SLICE
        for _ in self._full:
            if self.clock() >= end:
                return
        self._full = None
        self._offer()
        self.check()
        if not self._ready and not self._wanted:
            self._ready = True
            # What is here now stays: the collector need not go through it in the middle of a pin.
            gc.freeze()
            self.save(force=True)
            self.notify("READY=1")

    def _timeout(self) -> float:
        if self._full is not None or self._wanted or self._plan_all:
            return 0.0
        births, _ = self.reconciler.observer.due_births()
        saving = self.checkpointer.due
        ticks = min((ticker.due() for ticker in self.tickers), default=_NEVER)
        due = min(self._due_full, births, self.reconciler.next_due(), ticks, _NEVER if saving is None else saving)
        return max(0.0, due - self.clock())

    def _handlers(self) -> dict[signal.Signals, Callable[[int, FrameType | None], None]]:
        def stop(number: int, frame: FrameType | None) -> None:
            self.stopping = True

        def reload(number: int, frame: FrameType | None) -> None:
            self._reload_asked = True

        return {signal.SIGTERM: stop, signal.SIGINT: stop, signal.SIGHUP: reload}
