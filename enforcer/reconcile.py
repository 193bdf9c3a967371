"""Reconcile: observe, plan, apply. The body of the loop, in one thread; nothing in here waits for an event."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Generator, Iterator
from dataclasses import dataclass, replace
from errno import errorcode

from enforcer.apply import Applier, Outcome
from enforcer.core.decide import NEVER, Note
from enforcer.core.kubepods import parse_path, shown
from enforcer.core.node import parent_of
from enforcer.core.plan import Plan, Write, plan, plan_steps
from enforcer.core.policy import Policy
from enforcer.core.state import State
from enforcer.core.targets import Kind
from enforcer.core.unpin import plan_unpin
from enforcer.kernel.cgroupfs import describe
from enforcer.observe import Observer
from enforcer.tally import Tally

log = logging.getLogger(__name__)

_RESTARTS = 5  # of a full pass by hot events; then it is carried to its end
_RETRY_FIRST = 0.05
_RETRY_MOST = 5.0
_NOW = float("-inf")
_CONTROL = "subtree_control:"
_MOST_PROBLEMS = 1000
_TIMED = frozenset({"assigned", "resized"})
_WARN = frozenset({"unsatisfied", "drift", "conflict", "foreign", "not-adopted"})


@dataclass(frozen=True, slots=True)
class _Retry:
    """A write that failed, as it was planned; `due` is when it is tried again, _NOW while it is."""

    write: Write
    due: float
    delay: float
    text: str


class Reconciler:
    """Holds the node as seen and the state as decided; every pass brings the two together.

    `who(path)` names the last foreign writer of a cgroup's cpuset, as far as it is known; `save()` puts the state on
    disk before it returns.
    """

    def __init__(
        self,
        observer: Observer,
        applier: Applier,
        policy: Policy,
        clock: Callable[[], float],
        *,
        state: State | None = None,
        who: Callable[[str], str | None] = lambda path: None,
        save: Callable[[], None] = lambda: None,
        tally: Tally | None = None,
    ) -> None:
        self.observer = observer
        self.applier = applier
        self.policy = policy
        self.state = state or State()
        self.wake_at = NEVER
        self.would_write: dict[str, str] = {}
        self.tally = tally or Tally()
        self._clock = clock
        self._who = who
        self._save = save
        self._fresh: dict[str, Outcome] = {}
        self._retries: dict[str, _Retry] = {}
        self._pass = 0
        self._decided: dict[str, str] = {}  # container -> what its first write is timed as
        self._problems: dict[str, str] = {}

    # passes

    def hot(self, pods: Collection[str]) -> None:
        """The hot path: only these pods (paths), and what must move for them."""
        self._pass += 1
        self.observer.catch_up()
        made = plan(self.observer.view, self._current(), self.policy, self._clock(), pods)
        if self._enable(made):
            for path in pods:
                self.observer.look(path)
            made = plan(self.observer.view, self._current(), self.policy, self._clock(), pods)
        self._accept(made, pods)
        self._save_first(made)
        # Whatever only tells of it comes after the last write: a slow journal must not delay a pin.
        done = [(o, self._clock()) for o in self.applier.apply(self._without_waiting(made), self._retries.__contains__)]
        good = [o.result for o, _ in done if o.result is not None and self._took(o)]
        self.observer.wrote(*((r.path, r.found, r.effective) for r in good))
        for outcome, when in done:
            self._record(outcome, when)
        self._tell_all(made)
        self._end_tries(pods)

    def full(self) -> Iterator[None]:
        """A full pass: looks at everything, then brings everything right; yields wherever a hot event may come in."""
        yield from self.observer.scan()
        yield
        self.applier.keep_only({group.path for group in self.observer.view.groups()})
        self._tell_problems()
        yield
        yield from self.settle()

    def settle(self) -> Iterator[None]:
        """Brings everything as it was last seen right. Starts afresh when a hot event came in between."""
        for attempt in range(_RESTARTS + 1):
            done = yield from self._settle(may_drop=attempt < _RESTARTS)
            if done:
                return

    def _settle(self, *, may_drop: bool) -> Generator[None, None, bool]:
        self._pass += 1
        mine = self._pass
        steps = plan_steps(self.observer.view, self._current(), self.policy, self._clock())
        made: Plan | None = None
        while made is None:
            try:
                next(steps)
            except StopIteration as end:
                made = end.value
                break
            if may_drop:
                yield
                if self._pass != mine:
                    return False
        if made is None or self._enable(made):
            yield from self.observer.scan()
            return False
        self._accept(made, None)
        self._tell_all(made)
        self._save_first(made)
        for outcome in self.applier.apply(self._without_waiting(made), self._retries.__contains__):
            if outcome.result is not None and self._took(outcome):
                self.observer.wrote((outcome.result.path, outcome.result.found, outcome.result.effective))
            self._record(outcome, self._clock())
            if may_drop:
                yield
                if self._pass != mine:
                    return False
        self._end_tries(None)
        return True

    def unpin(self) -> None:
        """Gives back all that is ours and forgets it."""
        self._pass += 1
        for outcome in self.applier.apply(plan_unpin(self.observer.view, self._current())):
            self._record(outcome, self._clock())
        self.state = State()
        self._fresh.clear()
        self._retries.clear()
        self._decided.clear()
        self.wake_at = NEVER

    # what is due without an event

    def next_due(self) -> float:
        """When something is due though nothing happens (monotonic seconds)."""
        return min(self.wake_at, min((r.due for r in self._retries.values()), default=NEVER))

    def due_pods(self) -> frozenset[str]:
        """Pods whose failed writes are due for another try; each has been looked at again."""
        now = self._clock()
        pods = frozenset(self._place_of(path) for path, retry in self._retries.items() if retry.due <= now)
        for path in [p for p, retry in self._retries.items() if retry.due <= now]:
            self._retries[path] = replace(self._retries[path], due=_NOW)
        for path in pods:
            self.observer.look(path)
        return pods

    def retrying(self) -> int:
        """How many cgroups have a write that the kernel refused or that did not take effect."""
        return len(self._retries)

    # helpers

    def _save_first(self, made: Plan) -> None:
        if made.save_first and not self.applier.dry:
            self._save()

    def _without_waiting(self, made: Plan) -> Plan:
        """Without what has failed already and waits for its next try: else every event in a cgroup that keeps
        answering EBUSY, which its tenant can raise at will, would cost the loop three tries and their pauses."""
        if not self._retries:
            return made
        return replace(made, writes=tuple(write for write in made.writes if not self._waits(write)))

    def _waits(self, write: Write) -> bool:
        retry = self._retries.get(write.path)
        return retry is not None and self._clock() < retry.due and retry.write == write

    def _end_tries(self, pods: Collection[str] | None) -> None:
        """After all of a plan's writes: tries that came to nothing (what failed has gone, or is wanted no more), and
        decisions that needed no write, lest a repair hours later be taken for a slow pin."""
        for path in [p for p in self._decided if p not in self._retries]:
            if pods is None or parent_of(path) in pods:
                del self._decided[path]
        for path in [p for p, retry in self._retries.items() if retry.due == _NOW]:
            if pods is None or self._place_of(path) in pods:
                del self._retries[path]

    def _place_of(self, path: str) -> str:
        """The pod that a cgroup belongs to, or the slice, for one that holds pods: what a plan can be about."""
        view = self.observer.view
        while path != "/" and path not in view.slices and view.find_pod(path) is None:
            path = parent_of(path)
        return path

    def _current(self) -> State:
        """The state with what was written since the last plan."""
        if self._fresh:
            written = dict(self.state.written)
            for path, outcome in self._fresh.items():
                if outcome.write.cpus is None:
                    written.pop(path, None)
                else:
                    written[path] = outcome.write.cpus
            self._fresh.clear()
            self.state = replace(self.state, written=written)
        return self.state

    def current_state(self) -> State:
        """The state as it is to be saved."""
        return self._current()

    def _accept(self, made: Plan, pods: Collection[str] | None) -> None:
        """Takes a plan's decisions; `pods` None = it was about everything."""
        full = pods is None
        self.tally.add(self.tally.passes, "full" if full else "hot")
        self.state = made.state
        self.wake_at = made.wake_at if full else min(self.wake_at, made.wake_at)
        for note in made.notes:
            self.tally.add(self.tally.decisions, note.kind)
            if note.kind in _TIMED and not self.applier.dry:
                self._decided[note.path] = "full" if pods is None else "event" if parent_of(note.path) in pods else ""
        if self.applier.dry and full:
            wanted = {w.path for w in made.writes}
            for path in self.would_write.keys() - wanted:
                del self.would_write[path]

    def _tell_all(self, made: Plan) -> None:
        for note in made.notes:
            self._tell(note)

    def _enable(self, made: Plan) -> bool:
        """True when cpuset was switched on somewhere: what is below has to be looked at again."""
        steps = self.applier.enable(made) if made.enable else []
        for step in steps:
            self._say_once(f"{_CONTROL}{step.path}", describe(step), warn=not step.ok)
        return any(step.ok for step in steps)

    @staticmethod
    def _took(outcome: Outcome) -> bool:
        """The kernel has what was wanted."""
        write, result = outcome.write, outcome.result
        if result is None or result.gone or result.errno is not None:
            return False
        return write.cpus is None or result.found == write.cpus

    def _record(self, outcome: Outcome, when: float) -> None:
        write, result = outcome.write, outcome.result
        if outcome.overtaken:
            self.tally.add(self.tally.writes, "overtaken")
            return
        if result is None:
            text = f"{write.found or 'none'} -> {write.cpus or 'inherit'} ({write.why})"
            if self.would_write.get(write.path) != text:
                self.would_write[write.path] = text
                log.info("would write %s: %s", label(write.path), text)
            return
        if result.gone:
            self.tally.add(self.tally.writes, "gone")
            self._retries.pop(write.path, None)
        elif self._took(outcome):
            self.tally.add(self.tally.writes, "ok")
            self._fresh[write.path] = outcome
            self._retries.pop(write.path, None)
            self._time(write, when)
            if log.isEnabledFor(logging.DEBUG):
                log.debug("wrote %s: %s -> %s (%s)", label(write.path), write.found, write.cpus, write.why)
        else:
            self.tally.add(self.tally.writes, "error")
            self.tally.add(self.tally.write_errors, errorcode.get(result.errno or 0, "no effect"))
            self._failed(write, _printable(outcome.problem or describe(result)))

    def _time(self, write: Write, when: float) -> None:
        """From limits seen to own set written; not for one that had to wait until CPUs came free."""
        trigger = self._decided.pop(write.path, "") if write.kind is Kind.OWNER else ""
        container = self.observer.view.find_container(write.path) if trigger else None
        if container is not None and container.limits_since > float("-inf"):
            self.tally.pinned(trigger, when - container.limits_since)

    def _failed(self, write: Write, text: str) -> None:
        before = self._retries.get(write.path)
        delay = min(_RETRY_MOST, before.delay * 2) if before else _RETRY_FIRST
        self._retries[write.path] = _Retry(write, self._clock() + delay, delay, text)
        if before is None or before.text != text:
            log.warning("%s; tried again in %.2f s", text, delay)

    def _tell(self, note: Note) -> None:
        text = note.text
        if note.kind in ("drift", "conflict"):
            writer = _printable(self._who(note.path) or "a writer that cannot be named")
            self.tally.add(self.tally.drift, writer.partition("(")[2].rstrip(")") or "unknown")
            text = f"{text} (written by {writer})"
        level = logging.WARNING if note.kind in _WARN else logging.INFO
        prefix = "audit: would be " if self.applier.dry and level == logging.INFO else ""
        log.log(level, "%s%s %s: %s", prefix, note.kind, label(note.path), text)

    def _tell_problems(self) -> None:
        for key in self._problems.keys() - self.observer.problems.keys():
            if not self._still_concerns(key):
                del self._problems[key]
        for path, text in self.observer.problems.items():
            self._say_once(path, text, warn=True)

    def _still_concerns(self, key: str) -> bool:
        path = key.removeprefix(_CONTROL)
        return path != key and (path in self.observer.view.slices or self.observer.view.find_pod(path) is not None)

    def _say_once(self, key: str, text: str, *, warn: bool) -> None:
        if self._problems.get(key) != text and len(self._problems) < _MOST_PROBLEMS:
            self._problems[key] = text
            log.log(logging.WARNING if warn else logging.INFO, "%s", _printable(text))


def _printable(text: str) -> str:
    """For a line that names what containers may have named: cgroups inside them, processes."""
    return shown(text, 600)


def label(path: str) -> str:
    """A cgroup for a log line: the pod's UID and the first 12 digits of a container's id, else the path."""
    pod = parse_path(path)
    if pod.pod_uid is None:
        return shown(path)
    container = f" container {pod.container_id[:12]}" if pod.container_id else ""
    return f"pod {shown(pod.pod_uid)}{container}"
