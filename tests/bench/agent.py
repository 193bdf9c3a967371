"""The real service on a made tree, as a process: `python -m tests.bench.agent CONFIG TREE`.

Only what it would find out about this machine (cgroups, CPUs, systemd) is replaced; the loop, the sources, the
exporter, its place and its priority are the product's. At its end it writes to pins.json beside TREE of every pin when
it was done (monotonic), how long it took, and how much of that was spent in writes, all in seconds: the agent's own
histogram has buckets only.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from enforcer import service
from enforcer.config import Config, load
from enforcer.journal import set_up_logging
from enforcer.lock import take_lock
from enforcer.tally import Tally
from tests.bench.made import PlainFS, machine


class TimedFS(PlainFS):
    """Keeps when its last writes began (monotonic seconds), and how long each took."""

    times: deque[tuple[float, float]] = deque(maxlen=2000)

    def _store(self, filename: str, data: bytes) -> tuple[int | None, str | None]:
        began = time.monotonic()
        try:
            return super()._store(filename, data)
        finally:
            self.times.append((began, time.monotonic() - began))


@dataclass
class Recorder(Tally):
    """A tally that keeps of each pin its end, its time, and the part of it that was spent in writes."""

    pins: list[tuple[float, float, float]] = field(default_factory=list)

    def pinned(self, trigger: str, seconds: float) -> None:
        super().pinned(trigger, seconds)
        now = time.monotonic()
        self.pins.append((now, seconds, sum(took for began, took in TimedFS.times if began >= now - seconds)))


def main(config_file: Path, tree_file: Path) -> None:
    tree: dict[str, Any] = json.loads(tree_file.read_text())
    recorder = Recorder()
    replaced: dict[str, Any] = {
        "CgroupFS": _Found(Path(tree["top"])),
        "read_topology": lambda: machine(tree["cpus"]),
        "connect_units": lambda *_: None,
        "Tally": lambda: recorder,
    }
    vars(service).update(replaced)
    config = load(config_file)
    if "rescan" in tree:
        config = replace(config, rescan=tree["rescan"])
    try:
        _run(config)
    finally:
        tree_file.with_name("pins.json").write_text(json.dumps(recorder.pins))


def _run(config: Config) -> None:
    set_up_logging(False)
    with take_lock(config.state_dir):
        service.Service(config, lambda: config).run()


@dataclass(frozen=True)
class _Found:
    top: Path

    def discover(self) -> Any:
        """In the place of CgroupFS.discover()."""
        return TimedFS.discover(cgroup_root=str(self.top))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
