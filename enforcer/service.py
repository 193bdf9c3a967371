"""Service: what `cpuset-enforcer run` puts together, and the checks before and while it enforces."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from enforcer import __version__
from enforcer.agent import Agent, Source
from enforcer.apply import Applier
from enforcer.audit.kubelet import KubeletView, read_kubelet, static_policy_reason
from enforcer.checkpoint import Checkpointer, load
from enforcer.config import Config, Mode
from enforcer.core.adopt import adopt, foreign_owners
from enforcer.core.cpuset import CPUSet
from enforcer.core.errors import CannotWorkHereError, ConfigError, EnforcerError
from enforcer.core.kubepods import shown
from enforcer.core.policy import Policy
from enforcer.core.reserved import resolve_reserved
from enforcer.core.state import State, from_document, to_document
from enforcer.kernel import affinity, procfs
from enforcer.kernel.cgroupfs import CgroupFS
from enforcer.kernel.hotplug import HotplugMonitor
from enforcer.kernel.sysfs import Machine, read_topology
from enforcer.kernel.watch import Watcher
from enforcer.kernel.writers import WriterWatch
from enforcer.observe import EVERYTHING, FILES, NOTHING, Dirty, Observer
from enforcer.reconcile import Reconciler

log = logging.getLogger(__name__)

STATE_FILE = "state.json"
AUDIT_FILE = "audit.json"
_KUBELET_FILES = frozenset({"cpu_manager_state", "config.yaml"})


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


@dataclass
class Service:
    """Everything of one `run`. `load_config` reads the config again (SIGHUP)."""

    config: Config
    load_config: Callable[[], Config]
    clock: Callable[[], float] = time.monotonic
    _watcher: Watcher | None = None
    _writers: WriterWatch | None = None
    _lock: Any = None
    _sources: list[Source] = field(default_factory=list)

    def run(self) -> None:
        """Runs until told to stop. Raises CannotWorkHereError before the first write where it must not enforce."""
        self._take_lock()
        self.boot_id = procfs.boot_id()
        self.fs = CgroupFS.discover()
        self.machine = read_topology()
        self._build()
        self._keep_to_ourselves()
        self.agent.run()

    def document(self) -> dict[str, Any]:
        """What the state file holds: enough for status, and for the next start."""
        return {
            "state": to_document(self.reconciler.current_state()),
            "mode": str(self.config.mode),
            "reserved": str(self.reconciler.policy.reserved),
            "strict": self.reconciler.policy.strict,
            "pid": os.getpid(),
            "started": self.started,
            "version": __version__,
            "roots": list(self.config.roots),
            "would_write": dict(list(self.reconciler.would_write.items())[:1000]),
            "retrying": self.reconciler.retrying(),
            "problems": dict(self.observer.problems),
        }

    # putting together

    def _build(self) -> None:
        self.started = time.time()
        enforcing = self.config.mode is Mode.ENFORCE
        self.kubelet = self._read_kubelet()
        if enforcing:
            self._refuse_static()
        self.applier = Applier(self.fs, self.machine.possible, time.sleep, None, dry=not enforcing)
        self._watcher = Watcher(FILES)
        self.observer = Observer(
            self.fs,
            self.machine,
            self.clock,
            procfs.comm,
            watcher=self._watcher,
            roots=self.config.roots,
            ours=self.applier.wrote_lately,
            hold_seconds=self.config.hold,
        )
        for _ in self.observer.scan():
            pass
        policy = self._policy()
        state = self._start_state(policy, enforcing=enforcing)
        path = self.config.state_dir / (STATE_FILE if enforcing else AUDIT_FILE)
        self.checkpointer = Checkpointer(path, self.boot_id)
        self.reconciler = Reconciler(
            self.observer, self.applier, policy, self.clock, state=state, who=self._who, save=self._save_now
        )
        self._open_sources()
        self.agent = Agent(
            self.reconciler,
            self.clock,
            self._sources,
            self.checkpointer,
            self.document,
            self.config.rescan,
            reload=self._reload,
            notify=self._notify,
        )

    def _policy(self) -> Policy:
        allowed = self.observer.view.allowed or self.machine.online
        return policy_of(self.config, self.machine, allowed, self.kubelet)

    def _start_state(self, policy: Policy, *, enforcing: bool) -> State:
        recorded, problem = load_state(self.config, self.boot_id)
        if problem:
            log.warning("%s", problem)
        state, notes = adopt(self.observer.view, recorded, policy, self.clock())
        for note in notes:
            log.info("%s %s: %s", note.kind, shown(note.path), note.text)
        others = foreign_owners(self.observer.view, state, policy)
        if others and enforcing:
            raise CannotWorkHereError(
                f"somebody else gives out CPUs on this node: {shown(others[0])} asks for whole CPUs and was born with "
                f"CPUs {state.foreign[others[0]]} that are not ours",
                hint="two CPU managers would fight; use mode audit here, or stop the other one and restart its pods",
            )
        for path, cpus in state.written.items():
            self.applier.remember(path, cpus)
        return state

    def _open_sources(self) -> None:
        assert self._watcher is not None
        self._sources.append(Source(self._watcher.fileno(), self._tree_events))
        try:
            self._writers = WriterWatch(self.fs.cpuset_root)
            self._sources.append(Source(self._writers.fileno(), self._writer_events))
        except CannotWorkHereError as error:
            log.info("foreign writers will not be named: %s", error)
        try:
            self._hotplug = HotplugMonitor.open()
            self._sources.append(Source(self._hotplug.fileno(), self._hotplug_events))
        except CannotWorkHereError as error:
            log.info("CPU hotplug is seen at the rescan only: %s", error)

    def _keep_to_ourselves(self) -> None:
        for problem in affinity.pin_self(self.reconciler.policy.reserved):
            log.info("%s", problem)
        report = affinity.raise_priority(self.config.fifo, on_demotion=lambda: log.warning("demoted: ran too long"))
        for problem in report.problems:
            log.info("%s", problem)

    # sources

    def _tree_events(self) -> Dirty:
        assert self._watcher is not None
        pods: frozenset[str] = frozenset()
        everything = False
        for event in self._watcher.drain():
            dirty = self.observer.handle(event)
            pods |= dirty.pods
            everything |= dirty.everything
        return Dirty(pods, everything)

    def _writer_events(self) -> Dirty:
        if self._writers is not None:
            self._writers.drain()
        return NOTHING

    def _hotplug_events(self) -> Dirty:
        if not self._hotplug.drain():
            return NOTHING
        try:
            self.machine = read_topology()
        except EnforcerError as error:
            log.warning("the machine's CPUs cannot be read, going on with what was known: %s", error)
            return EVERYTHING
        self.observer.machine_changed(self.machine)
        log.info("CPUs online: %s", self.machine.online)
        return EVERYTHING

    def _who(self, path: str) -> str | None:
        return self._writers.who(path, self.clock() - 5.0) if self._writers is not None else None

    # while it runs

    def _read_kubelet(self) -> KubeletView:
        return read_kubelet(self.config.kubelet_root, self.config.kubelet_config_path)

    def _refuse_static(self) -> None:
        reason = static_policy_reason(self.kubelet)
        if reason:
            raise CannotWorkHereError(f"refusing to enforce: {reason}")

    def leave_enforce(self, reason: str) -> None:
        """Gives every set back and goes on as an auditor."""
        log.error("leaving enforce: %s", reason)
        self.reconciler.unpin()
        self.applier.dry = True

    def _save_now(self) -> None:
        self.checkpointer.offer(self.document, self.clock())
        self.agent.save(force=True)

    def _reload(self) -> None:
        try:
            config = self.load_config()
            kubelet = read_kubelet(config.kubelet_root, config.kubelet_config_path)
            allowed = self.observer.view.allowed or self.machine.online
            policy = policy_of(config, self.machine, allowed, kubelet)
        except (ConfigError, CannotWorkHereError) as error:
            log.error("the config was not taken, going on with the old one:\n%s", error)
            return
        self.config, self.kubelet, self.reconciler.policy = config, kubelet, policy
        self.agent.rescan = config.rescan
        log.info("config read again: mode %s, reserved CPUs %s", config.mode, policy.reserved)

    def _notify(self, text: str) -> None:
        log.info("ready: %s, reserved CPUs %s", self.config.mode, self.reconciler.policy.reserved)
        sd_notify(text)

    def _take_lock(self) -> None:
        """Two agents on one node would fight over every set."""
        folder = self.config.state_dir
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o755)
            self._lock = (folder / "lock").open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CannotWorkHereError(
                f"another cpuset-enforcer runs with the state directory {folder}", hint="stop it first"
            ) from error
        except OSError as error:
            raise CannotWorkHereError(f"state directory {folder}: {error.strerror}", hint="is this root?") from error


def sd_notify(text: str) -> None:
    """Tells systemd (sd_notify(3)); nothing happens where it does not listen."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        try:
            sock.connect("\0" + address[1:] if address.startswith("@") else address)
            sock.send(text.encode())
        except OSError as error:
            log.warning("systemd cannot be told %r: %s", text, error)


def set_up_logging(verbose: bool) -> None:
    """To standard error; under systemd the journal adds time and unit, and reads the level from the prefix."""
    journal = "JOURNAL_STREAM" in os.environ
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JournalFormatter() if journal else logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.DEBUG if verbose else logging.INFO, handlers=[handler])


class _JournalFormatter(logging.Formatter):
    _PRIORITY = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}

    def format(self, record: logging.LogRecord) -> str:
        return f"<{self._PRIORITY.get(record.levelno, 6)}>{super().format(record)}"


def state_path(config: Config) -> Path:
    """Where the state of enforce mode is."""
    return config.state_dir / STATE_FILE
