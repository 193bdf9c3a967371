"""Service: what `cpuset-enforcer run` puts together, and the checks before and while it enforces."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from enforcer import __version__
from enforcer.agent import Agent
from enforcer.apply import Applier
from enforcer.audit.kubelet import KubeletView
from enforcer.checkpoint import Checkpointer, load
from enforcer.child import Child
from enforcer.config import Config, Mode
from enforcer.core.adopt import adopt, foreign_owners
from enforcer.core.cpuset import CPUSet
from enforcer.core.errors import CannotWorkHereError, ConfigError, EnforcerError
from enforcer.core.kubepods import shown
from enforcer.core.node import NodeView
from enforcer.core.policy import Policy
from enforcer.core.reserved import resolve_reserved
from enforcer.core.state import State, from_document, to_document
from enforcer.figures import figures
from enforcer.guard import KubeletGuard
from enforcer.journal import sd_notify
from enforcer.kernel import affinity, procfs
from enforcer.kernel.cgroupfs import CgroupFS
from enforcer.kernel.hotplug import HotplugMonitor
from enforcer.kernel.sysfs import Machine, read_topology
from enforcer.kernel.watch import Kind as Happened
from enforcer.kernel.watch import Watcher
from enforcer.kernel.writers import WriterWatch
from enforcer.observe import EVERYTHING, FILES, NOTHING, Dirty, Observer
from enforcer.reconcile import Reconciler, label
from enforcer.sources import Source, Ticker
from enforcer.tally import Tally
from enforcer.units import UnitSync

log = logging.getLogger(__name__)

STATE_FILE: Final = "state.json"
AUDIT_FILE: Final = "audit.json"
_MOST_WOULD_WRITE: Final = 1000
# What is used once, at the start.
_AT_START: Final = ("state_dir", "roots", "kubelet_root", "kubelet_config", "hold", "fifo", "metrics_listen")
_WRITER_SEEN: Final = 5.0  # seconds back in which the writer of a drift is looked for


def policy_of(config: Config, machine: Machine, allowed: CPUSet, kubelet: KubeletView) -> Policy:
    """The config on this machine; raises ConfigError or CannotWorkHereError when it does not fit."""
    options = config.options.allocation()
    wish = config.reservation or kubelet.reservation
    return Policy(
        reserved=resolve_reserved(wish, machine.topology, allowed, options),
        options=options,
        strict=config.options.strict_cpu_reservation,
        cfs_quota=config.cfs_quota,
        drift_limit=config.drift.repairs,
        drift_window=config.drift.within,
        back_off=config.drift.back_off,
        back_off_most=config.drift.back_off_limit,
    )


def load_state(config: Config, boot_id: str) -> tuple[State, str | None]:
    """The state file's content, and a line about what was wrong with it."""
    loaded = load(config.state_dir / STATE_FILE, boot_id)
    if loaded.document is None:
        return State(), loaded.problem
    try:
        return from_document(loaded.document.get("state", {})), None
    except EnforcerError as error:
        return State(), str(error)


def connect_units(fs: CgroupFS, clock: Callable[[], float], tally: Tally | None = None) -> UnitSync | None:
    """The bridge to systemd, where it may write cpusets itself (v2); None where there is no systemd."""
    if fs.version == 1:
        return None
    # jeepney costs memory that a node on v1 need not spend
    from enforcer.kernel.systemd import UnitProperties

    try:
        return UnitSync(UnitProperties.connect(), fs.read_cpus, clock, tally)
    except CannotWorkHereError as error:
        log.info("cpusets are written to the files only: %s", error)
        return None


def left_behind(view: NodeView, recorded: State) -> str:
    """What an agent before us left narrow, for whoever takes over: "" for nothing.

    A kubelet's own exclusive set has no effect where a slice above it is narrower (v2).
    """
    narrow = [one.group for one in view.slices.values()] + [pod.group for pod in view.pods()]
    sets = {g.path: g.cpus for g in narrow if g.cpus and g.cpus < view.allowed}
    for _pod, container in view.containers():
        cpus, path = container.group.cpus, container.group.path
        if cpus and cpus == recorded.written.get(path):
            sets[path] = cpus
    if not sets:
        return ""
    named = ", ".join(f"{label(path)} ({cpus})" for path, cpus in list(sets.items())[:5])
    return f"{len(sets)} cgroups are still narrow, among them {named}: `cpuset-enforcer reset` gives them back"


class Service:
    """Everything of one `run`. `load_config` reads the config again (SIGHUP).

    Raises CannotWorkHereError or ConfigError before the first write where it must not or cannot do its work.
    """

    def __init__(self, config: Config, load_config: Callable[[], Config]) -> None:
        self.config = config
        self._load_config = load_config
        self._clock = time.monotonic
        self._started = time.time()
        self._boot_id = procfs.boot_id()
        self._fs = CgroupFS.discover()
        self._machine = read_topology()
        self._guard = KubeletGuard(config.kubelet_root, config.kubelet_config_path)
        self._enforcing = config.mode is Mode.ENFORCE
        self._left = ""
        self._demoted = False
        self._tally = Tally()
        self._units: UnitSync | None = None
        self._writers: WriterWatch | None = None
        self._hotplug: HotplugMonitor | None = None
        self._sources: list[Source] = []
        self._build()

    def run(self) -> None:
        """Runs until it is told to stop; the pins stay."""
        self._keep_to_ourselves()
        self._agent.run()
        log.info("stopped; all pins stay as they are")

    # putting together

    def _build(self) -> None:
        self._watcher = Watcher(FILES)
        self._applier = Applier(self._fs, self._machine.possible, time.sleep, None, dry=not self._enforcing)
        self._observer = self._make_observer()
        for _ in self._observer.scan():
            pass
        if self._enforcing:
            self._refuse(self._guard.reason())
        policy = self._policy(self.config)
        state = self._start_state(policy)
        self._open_sources(state)
        self._resolved_for = self._observer.view.allowed
        self._reconciler = self._make_reconciler(policy, state)
        self._agent = self._make_agent()

    def _make_observer(self) -> Observer:
        return Observer(
            self._fs,
            self._machine,
            self._clock,
            procfs.comm,
            watcher=self._watcher,
            roots=self.config.roots,
            ours=self._applier.wrote_lately,
            lags=lambda path: self._units is not None and self._units.lags(path),
            hold_seconds=self.config.hold,
        )

    def _make_reconciler(self, policy: Policy, state: State) -> Reconciler:
        return Reconciler(
            self._observer,
            self._applier,
            policy,
            self._clock,
            state=state,
            who=self._who,
            save=self._save_now,
            tally=self._tally,
        )

    def _make_agent(self) -> Agent:
        tickers: list[Ticker] = [*self._exporter(), *([self._units] if self._units else [])]
        return Agent(
            self._reconciler,
            self._clock,
            self._sources,
            self._checkpointer(),
            self._document,
            self.config.rescan,
            reload=self._reload,
            check=self._check,
            notify=self._ready,
            tickers=tickers,
            tally=self._tally,
        )

    def _policy(self, config: Config) -> Policy:
        return policy_of(config, self._machine, self._observer.view.allowed or self._machine.online, self._guard.view)

    def _start_state(self, policy: Policy) -> State:
        recorded, problem = load_state(self.config, self._boot_id)
        if problem:
            log.warning("%s", problem)
        state, notes = adopt(self._observer.view, recorded, policy, self._clock())
        for note in notes:
            log.info("%s %s: %s", note.kind, label(note.path), note.text)
        if self._enforcing:
            self._refuse(self._other_manager(state, policy))
        for path, cpus in state.written.items():
            self._applier.remember(path, cpus)
        return state

    def _open_sources(self, state: State) -> None:
        self._sources.append(Source(self._watcher.fileno(), self._tree_events))
        self._sources.append(Source(self._guard.fileno(), self._kubelet_events))
        try:
            self._writers = WriterWatch(self._fs.cpuset_root)
            self._sources.append(Source(self._writers.fileno(), self._writer_events))
        except CannotWorkHereError as error:
            log.info("foreign writers will not be named: %s", error)
        try:
            self._hotplug = HotplugMonitor.open()
            self._sources.append(Source(self._hotplug.fileno(), self._hotplug_events))
        except CannotWorkHereError as error:
            log.info("CPU hotplug is seen at the rescan only: %s", error)
        self._open_units(state)

    def _open_units(self, state: State) -> None:
        self._units = connect_units(self._fs, self._clock, self._tally)
        if self._units is None:
            return
        self._applier.units = self._units
        self._sources.append(Source(self._units.fileno(), self._units.take))
        # An agent that died between a file and its unit's value left the two apart.
        for path, cpus in state.written.items() if self._enforcing else ():
            self._units.tell(path, cpus)

    def _exporter(self) -> list[Child]:
        """The process that answers scrapes; none when metrics-listen is empty."""
        if not self.config.metrics_listen:
            return []
        # -P: nothing is imported from the folder that the agent was started in
        command = [sys.executable, "-P", "-m", "enforcer", "metrics", "--listen", self.config.metrics_listen]
        command += ["--state-dir", str(self.config.state_dir), "--parent", str(os.getpid())]
        child = Child("the exporter of the metrics", command, self._clock)
        self._sources.append(Source(child.fileno(), child.take))
        return [child]

    def _keep_to_ourselves(self) -> None:
        for problem in affinity.pin_self(self._reconciler.policy.reserved):
            log.info("%s", problem)
        self._go_ahead()

    def _go_ahead(self) -> None:
        self._demoted = False
        report = affinity.raise_priority(self.config.fifo, on_demotion=self._note_demotion)
        for problem in report.problems:
            log.info("%s", problem)

    def _note_demotion(self) -> None:
        # Runs between any two instructions of this thread: nothing but a flag.
        self._demoted = True

    # sources

    def _tree_events(self) -> Dirty:
        pods: frozenset[str] = frozenset()
        everything = False
        for event in self._watcher.drain():
            dirty = self._observer.handle(event)
            self._tally.overflows += event.kind is Happened.OVERFLOW
            pods |= dirty.pods
            everything |= dirty.everything
        return Dirty(pods, everything)

    def _writer_events(self) -> Dirty:
        if self._writers is not None:
            self._writers.drain()
        return NOTHING

    def _hotplug_events(self) -> Dirty:
        if self._hotplug is None or not self._hotplug.drain():
            return NOTHING
        try:
            self._machine = read_topology()
        except EnforcerError as error:
            log.warning("the machine's CPUs cannot be read, going on with what was known: %s", error)
            return EVERYTHING
        self._observer.machine_changed(self._machine)
        log.info("CPUs online: %s", self._machine.online)
        return EVERYTHING

    def _kubelet_events(self) -> Dirty:
        self._look_at_kubelet()
        return NOTHING

    def _look_at_kubelet(self) -> None:
        if self._guard.look_again() and self._enforcing:
            self._leave(self._guard.reason())

    def _who(self, path: str) -> str | None:
        return self._writers.who(path, self._clock() - _WRITER_SEEN) if self._writers is not None else None

    # what must not be fought

    def _refuse(self, reason: str | None) -> None:
        if reason:
            left = left_behind(self._observer.view, load_state(self.config, self._boot_id)[0])
            raise CannotWorkHereError(f"refusing to enforce: {reason}", hint=left)

    def _other_manager(self, state: State, policy: Policy) -> str | None:
        others = foreign_owners(self._observer.view, state, policy)
        if not others:
            return None
        return (
            f"somebody else gives out CPUs on this node: {label(others[0])} asks for whole CPUs and was given CPUs "
            f"{state.foreign[others[0]]} that are not ours; two CPU managers would fight: use mode audit here, or stop "
            f"the other one and restart its pods"
        )

    def _check(self) -> None:
        """After every pass: what was learnt in it may forbid to enforce, or show a root that was not there before."""
        if self._observer.view.allowed != self._resolved_for:
            self._root_changed()
        if self._demoted:
            log.warning("lost its real-time priority: it ran half a second without a pause; takes it up again")
            self._go_ahead()
        if self._enforcing and self._reconciler.state.foreign:
            self._leave(self._other_manager(self._reconciler.state, self._reconciler.policy))

    def _root_changed(self) -> None:
        """Reserved CPUs stay what they are while containers may use one of them: sandboxes live there."""
        allowed = self._resolved_for = self._observer.view.allowed
        if not allowed or self._reconciler.policy.reserved & allowed:
            return
        try:
            self._reconciler.policy = self._policy(self.config)
        except (ConfigError, CannotWorkHereError) as error:
            log.error("no CPU can be reserved now: %s", error)
            return
        log.warning("containers may use CPUs %s only: reserved are %s now", allowed, self._reconciler.policy.reserved)
        self._agent.want_full()

    def _leave(self, reason: str | None) -> None:
        """Gives every set back and goes on as an auditor; nothing without a reason."""
        if not reason or not self._enforcing:
            return
        log.error("leaving enforce: %s", reason)
        self._reconciler.unpin()
        self._save_now()
        self._switch(enforcing=False, left=reason)

    def _enter(self) -> None:
        reason = self._guard.reason() or self._other_manager(self._reconciler.state, self._reconciler.policy)
        if reason:
            log.error("not enforcing: %s", reason)
            return
        log.info("enforcing from now on")
        self._switch(enforcing=True, left="")

    def _switch(self, *, enforcing: bool, left: str) -> None:
        self._enforcing, self._left = enforcing, left
        self._applier.dry = not enforcing
        self._reconciler.would_write.clear()
        self._agent.checkpointer = self._checkpointer()
        self._agent.want_full()

    # the state file, reload

    def _checkpointer(self) -> Checkpointer:
        name = STATE_FILE if self._enforcing else AUDIT_FILE
        return Checkpointer(self.config.state_dir / name, self._boot_id)

    def _save_now(self) -> None:
        self._agent.checkpointer.offer(self._document, self._clock())
        self._agent.save(force=True)

    def _document(self) -> dict[str, Any]:
        """What the state file holds: enough for status, and for the next start."""
        return {
            "state": to_document(self._reconciler.current_state()),
            "mode": str(Mode.ENFORCE if self._enforcing else Mode.AUDIT),
            "left_enforce": self._left,
            "reserved": str(self._reconciler.policy.reserved),
            "strict": self._reconciler.policy.strict,
            "pid": os.getpid(),
            "started": self._started,
            "version": __version__,
            "roots": list(self.config.roots),
            "would_write": dict(list(self._reconciler.would_write.items())[:_MOST_WOULD_WRITE]),
            "retrying": self._reconciler.retrying(),
            "figures": self._figures(),
            "tally": self._tally.to_document(),
            "problems": {shown(path): text for path, text in self._observer.problems.items()},
        }

    def _figures(self) -> dict[str, Any]:
        counts = figures(self._observer.view, self._reconciler.state, self._reconciler.policy)
        return {
            **counts,
            "retrying": self._reconciler.retrying(),
            "would_write": len(self._reconciler.would_write),
            "enforcing": int(self._enforcing),
        }

    def _reload(self) -> None:
        try:
            config = self._load_config()
            policy = self._policy(config)
        except (ConfigError, CannotWorkHereError) as error:
            log.error("the config was not taken, going on with the old one: %s", error)
            return
        late = [name for name in _AT_START if getattr(config, name) != getattr(self.config, name)]
        self.config = replace(config, **{name: getattr(self.config, name) for name in _AT_START})
        self._reconciler.policy = policy
        self._agent.rescan = config.rescan
        self._guard.look_again()
        log.info("config read again: mode %s, reserved CPUs %s", config.mode, policy.reserved)
        if late:
            log.warning("these take effect at the next start only: %s", ", ".join(late).replace("_", "-"))
        if config.mode is Mode.AUDIT:
            self._leave("the config says mode audit now")
        elif not self._enforcing:
            self._enter()

    def _ready(self, text: str) -> None:
        mode = Mode.ENFORCE if self._enforcing else Mode.AUDIT
        log.info("ready: %s, reserved CPUs %s", mode, self._reconciler.policy.reserved)
        if not self._observer.view.slices:
            asked = ", ".join(map(shown, self.config.roots))
            log.warning(
                "there is no kubepods cgroup: nothing to pin until one appears; looked for /kubepods and /kubelet (or "
                ".slice)%s", f" and {asked}" if asked else "",
            )  # fmt: skip
        sd_notify(text)
