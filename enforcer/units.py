"""Units: keeps systemd's own value of a cgroup's CPUs equal to the file, for slices and scopes that it owns (v2).

The file is written at once, the unit's AllowedCPUs right behind it; after each answer the file is read back, since
systemd writes it too.
"""

from __future__ import annotations

import logging
import select
from collections.abc import Callable, Set

from enforcer.core.cpuset import CPUSet
from enforcer.core.errors import CannotWorkHereError
from enforcer.core.kubepods import unit_name
from enforcer.core.node import parent_of
from enforcer.kernel.systemd import Disconnected, Event, Reloading, Reply, UnitProperties
from enforcer.observe import EVERYTHING, NOTHING, Dirty
from enforcer.tally import Tally

log = logging.getLogger(__name__)

NEVER = float("inf")
_AGAIN_FIRST = 0.2
_AGAIN_MOST = 10.0
_FLUSH = 0.005
# systemd answers first and writes the file 12 to 45 ms later (measured, 257 in an emulated guest)
_SETTLES = 0.25


class UnitSync:
    """The bridge to systemd for the loop. `read` reads a cgroup's cpuset.cpus, `clock` is monotonic.

    `fileno` stays the same over reconnects. Nothing in here waits, but for a reconnect's fraction of a second.
    """

    def __init__(
        self,
        units: UnitProperties,
        read: Callable[[str], CPUSet | None],
        clock: Callable[[], float],
        tally: Tally | None = None,
    ) -> None:
        self._units = units
        self._read = read
        self._clock = clock
        self._path: dict[str, str] = {}
        self._wished: dict[str, CPUSet | None] = {}
        self._again_at = NEVER
        self._again_in = _AGAIN_FIRST
        self._retell: set[str] = set()
        self._told: set[str] = set()
        self._answered_at: dict[str, float] = {}  # unit -> when; until the file was read back
        self._asked_at: dict[str, float] = {}
        self._tally = tally or Tally()
        self._epoll = select.epoll()
        self._epoll.register(units.fileno(), select.EPOLLIN)

    def fileno(self) -> int:
        """Readable when systemd has said something."""
        return self._epoll.fileno()

    def tell(self, path: str, cpus: CPUSet | None) -> None:
        """Gives the unit of a cgroup a set, or takes it away; nothing for a cgroup that is no unit's."""
        unit = unit_name(path)
        if unit is not None:
            self._path[unit] = path
            self._wished[unit] = cpus
            self._asked_at.setdefault(unit, self._clock())
            self._units.set_allowed_cpus(unit, cpus)

    def keep_only(self, paths: Set[str]) -> None:
        """Forgets the units of all cgroups but these."""
        for unit in [unit for unit, path in self._path.items() if path not in paths]:
            self._forget(unit)

    def lags(self, path: str) -> bool:
        """Whether systemd may still write an older set of ours into this cgroup's file."""
        unit = unit_name(path)
        if unit is None or unit not in self._wished:
            return False
        return unit in self._answered_at or unit in self._units.in_flight() or unit in self._units.pending()

    def take(self) -> Dirty:
        """What the answers since the last call ask to be looked at."""
        pods: set[str] = set()
        everything = False
        for event in self._units.on_readable():
            dirty = self._event(event)
            pods |= dirty.pods
            everything |= dirty.everything
        return Dirty(frozenset(pods), everything)

    def finish(self, seconds: float) -> bool:
        """Waits until systemd has answered everything; for commands that end. False when it did not in time."""
        end = self._clock() + seconds
        while self._units.in_flight() or self._units.pending():
            left = end - self._clock()
            if left <= 0:
                return False
            self._units.on_writable()
            self._epoll.poll(min(left, 0.1))
            self.take()
        return True

    def due(self) -> float:
        """When tick() has something to do."""
        settled = min(self._answered_at.values(), default=NEVER) + _SETTLES
        return min(self._again_at, settled, self._clock() + _FLUSH if self._units.wants_write() else NEVER)

    def tick(self) -> Dirty:
        """What is due: bytes that wait for the socket, a reconnect, values that systemd was not there to take.

        Says which cgroups' files are not what systemd was told last.
        """
        self._units.on_writable()
        if self._clock() >= self._again_at:
            self._again_at = NEVER
            self._once_more()
        return self._read_back()

    def _once_more(self) -> None:
        if not self._units.connected:
            self._reconnect()
        else:
            for unit in self._retell:
                self._units.set_allowed_cpus(unit, self._wished.get(unit))
            self._retell.clear()

    def _event(self, event: Event) -> Dirty:
        if isinstance(event, Reloading):
            return NOTHING if event.active else EVERYTHING
        if isinstance(event, Reply):
            self._answered(event)
        else:
            self._lost(event)
        return NOTHING

    def _answered(self, reply: Reply) -> None:
        asked = self._asked_at.pop(reply.unit, None)
        if reply.ok and asked is not None:
            self._tally.systemd.observe(self._clock() - asked)
        if reply.unit_gone:
            self._forget(reply.unit)
        elif reply.manager_away:
            self._retell.add(reply.unit)
            self._try_again()
        elif not reply.ok:
            self._complain(reply)
        else:
            self._answered_at[reply.unit] = self._clock()

    def _read_back(self) -> Dirty:
        before = self._clock() - _SETTLES
        pods: set[str] = set()
        for unit in [unit for unit, when in self._answered_at.items() if when <= before]:
            del self._answered_at[unit]
            path, wished = self._path.get(unit), self._wished.get(unit)
            found = self._read(path) if path and wished else None
            if path and found is not None and found != wished:
                self._tally.systemd_differed += 1
                pods |= {path, parent_of(path)}
        return Dirty(frozenset(pods))

    def _complain(self, reply: Reply) -> None:
        if reply.unit not in self._told and len(self._told) < 1000:
            self._told.add(reply.unit)
            log.warning(
                "systemd does not take AllowedCPUs=%s for %s: %s (%s); the file alone may be written over by it",
                reply.cpus, reply.unit, reply.message, reply.error,
            )  # fmt: skip

    def _forget(self, unit: str) -> None:
        for kept in (self._path, self._wished, self._answered_at, self._asked_at):
            kept.pop(unit, None)

    def _lost(self, event: Disconnected) -> None:
        log.warning("connection to systemd lost (%s); file writes go on, units are told when it is back", event.reason)
        self._try_again()

    def _try_again(self) -> None:
        self._again_at = min(self._again_at, self._clock() + self._again_in)

    def _reconnect(self) -> None:
        try:
            self._units.reconnect()
        except CannotWorkHereError as error:
            self._again_in = min(_AGAIN_MOST, self._again_in * 2)
            self._try_again()
            log.info("systemd is not back yet: %s", error)
            return
        self._again_in = _AGAIN_FIRST
        self._epoll.register(self._units.fileno(), select.EPOLLIN)
        log.info("connected to systemd again")
