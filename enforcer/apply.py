"""Does the writes of a plan, in its order, reading each back; in audit mode it only says what it would do.

Where systemd owns a slice or scope it is told as well: a file write into a slice without tasks is lost at the first
scope started in it, and any change of another property writes systemd's own value back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from errno import EBUSY, EIO
from typing import Protocol

from enforcer.core.cpuset import CPUSet
from enforcer.core.errors import EnforcerError
from enforcer.core.plan import Plan, Write
from enforcer.kernel.cgroupfs import CgroupFS, EnableStep, WriteResult

_TRIES = 3
_PAUSE = 0.002  # seconds between tries; the loop waits no longer than _TRIES times this
_RECENT = 4
_FEW = 200


class Units(Protocol):
    """Whoever tells systemd which CPUs a cgroup's unit may use; `cpus` None takes the setting away."""

    def tell(self, path: str, cpus: CPUSet | None) -> None:
        """Queues the value; a newer one replaces one that was not sent yet."""

    def keep_only(self, paths: Set[str]) -> None:
        """Forgets all cgroups but these."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one write; `result` None = audit mode, nothing was written.

    `problem`: a file could not be read, so nobody knows what came of it. `overtaken`: somebody else wrote to it after
    the plan's look, so nothing was written; the event of that write asks for the next look.
    """

    write: Write
    result: WriteResult | None
    tries: int = 1
    problem: str = ""
    overtaken: bool = False


class Applier:
    """The one writer of cgroups in this process."""

    def __init__(
        self, fs: CgroupFS, possible: CPUSet, sleep: Callable[[float], None], units: Units | None, *, dry: bool
    ) -> None:
        self._fs = fs
        self._possible = possible
        self._sleep = sleep
        self.units = units
        self.dry = dry
        self._recent: dict[str, deque[CPUSet]] = {}

    def wrote_lately(self, path: str, cpus: CPUSet) -> bool:
        """Whether a set in the file is one of our own last few; systemd echoes older ones for a moment."""
        return cpus in self._recent.get(path, ())

    def keep_only(self, paths: Set[str]) -> None:
        """Forgets all cgroups but these."""
        for path in self._recent.keys() - paths:
            del self._recent[path]
        if self.units is not None:
            self.units.keep_only(paths)

    def remember(self, path: str, cpus: CPUSet) -> None:
        """A set is ours, though written before this process started."""
        self._recent.setdefault(path, deque(maxlen=_RECENT)).append(cpus)

    def enable(self, plan: Plan) -> list[EnableStep]:
        """Gives the cpuset controller to the children of the cgroups that the plan names (v2)."""
        if self.dry:
            return []
        return [step for path in plan.enable for step in self._enable(path)]

    def _enable(self, path: str) -> list[EnableStep]:
        try:
            return self._fs.enable_cpuset(f"{path.rstrip('/')}/x")
        except EnforcerError:
            return [EnableStep(path, EIO)]

    def apply(self, plan: Plan, patient: Callable[[str], bool] = lambda path: False) -> Iterator[Outcome]:
        """Does the plan's writes, one for each step of the iterator; `patient(path)`: it has failed before."""
        for write in plan.writes:
            yield Outcome(write, None) if self.dry else self._one(write, patient(write.path))

    def _one(self, write: Write, patient: bool) -> Outcome:
        if write.newborn and self._overtaken(write):
            return Outcome(write, None, overtaken=True)
        growing = write.cpus is None or write.found < write.cpus
        self.remember(write.path, write.cpus or self._possible)
        if growing:
            self._tell(write)
        outcome = self._file(write, patient)
        if not growing:
            self._tell(write)
        return outcome

    def _overtaken(self, write: Write) -> bool:
        """A runtime writes its spec's set last (v2): while the pools were narrowed for our decision, say."""
        try:
            now = self._fs.read_cpus(write.path)
        except EnforcerError:
            return False
        return now is not None and now != write.found and not self.wrote_lately(write.path, now)

    def _tell(self, write: Write) -> None:
        if self.units is not None:
            self.units.tell(write.path, write.cpus)

    def _file(self, write: Write, patient: bool) -> Outcome:
        try:
            return self._try(write, patient)
        except EnforcerError as error:
            failed = WriteResult(write.path, write.cpus or self._possible, None, None, EIO, False, self._fs.version)
            return Outcome(write, failed, problem=str(error))

    def _try(self, write: Write, patient: bool) -> Outcome:
        if write.cpus is None:
            return Outcome(write, self._fs.clear_cpus(write.path, self._possible))
        for tried in range(1, _TRIES + 1):
            result = self._fs.write_cpus(write.path, write.cpus)
            if result.errno != EBUSY or tried == _TRIES or not (patient or self._has_few_below(write.path)):
                break
            self._narrow_below(write.path, write.cpus)
            self._sleep(_PAUSE)
        return Outcome(write, result, tried)

    def _has_few_below(self, path: str) -> bool:
        """An owner that waits for these CPUs must not wait for a container with thousands of cgroups inside."""
        found = [path]
        for one in found:
            found.extend(f"{one}/{name}" for name in self._fs.children(one) or ())
            if len(found) > _FEW:
                return False
        return True

    def _narrow_below(self, path: str, cpus: CPUSet) -> None:
        """v1 answers EBUSY while a cgroup inside, perhaps made a moment ago, has more: those shrink first."""
        for below in self._fs.descendants(path):
            has = self._fs.read_cpus(below)
            if has and not has <= cpus:
                self._fs.write_cpus(below, (has & cpus) or cpus)
