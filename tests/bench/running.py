"""The agent as a process: on a made tree, and what its processes use."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any

from tests.bench.load import get_metrics
from tests.bench.made import ROOT, MadeNode
from tests.kernel.agent_process import AgentProcess


class MadeAgent(AgentProcess):
    """The service on a made node (tests.bench.agent).

    After end(), `pins` has of every pin its end (monotonic), the agent's own time, and that in writes, in seconds.
    """

    def __init__(self, folder: Path, node: MadeNode, *, rescan: float | None = None, **config: object) -> None:
        super().__init__(folder, ROOT, **{"fifo": True, **config})
        self._tree = folder / "tree.json"
        node.describe(self._tree, **({} if rescan is None else {"rescan": rescan}))

    def launch(self, prefix: Sequence[str] = (), *, verbose: bool = True) -> None:
        """Starts it and does not wait."""
        command = [*prefix, sys.executable, "-m", "tests.bench.agent", str(self.config), str(self._tree)]
        with self.log_file.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def is_fifo(self) -> bool:
        """Whether it still has the priority that it was given: who never sleeps is demoted."""
        return os.sched_getscheduler(self.pid) & ~os.SCHED_RESET_ON_FORK == os.SCHED_FIFO

    @property
    def pins(self) -> list[tuple[float, float, float]]:
        found: list[tuple[float, float, float]] = json.loads(self._tree.with_name("pins.json").read_text())
        return found


def quiet_start(agent: AgentProcess) -> None:
    """As start(), without a log line for every write, which would be timed as well."""
    agent.launch(verbose=False)
    agent.wait_for("ready:", 60)


@contextmanager
def made_agent(node: MadeNode, **options: Any) -> Iterator[MadeAgent]:
    """Runs until the block ends; ready when it begins."""
    with tempfile.TemporaryDirectory(prefix="ce-bench-") as folder:
        agent = MadeAgent(Path(folder), node, **options)
        try:
            agent.start()
            yield agent
        except AssertionError as error:
            raise AssertionError(f"{error}\nthe agent's log ends with:\n{agent.log()[-2000:]}") from error
        finally:
            agent.end()


def free_port() -> int:
    """A TCP port that nobody has just now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def wait_for_metrics(port: int, seconds: float = 20) -> None:
    """Until the exporter answers."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with suppress(OSError, HTTPException):
            get_metrics(port)
            return
        time.sleep(0.05)
    raise AssertionError(f"no exporter on port {port} within {seconds} s")


def children(pid: int) -> list[int]:
    """Its direct children."""
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def cpu_seconds(pid: int) -> float:
    """What all threads of a process have run, to the nanosecond."""
    tasks = [Path(f"/proc/{pid}/task/{tid}/schedstat") for tid in os.listdir(f"/proc/{pid}/task")]
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def memory_mb(pid: int) -> dict[str, float]:
    """Resident, and the proportional part of it (pages shared with others count by their share)."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    kb = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    return {"rss_mb": round(kb["Rss"] / 1024, 1), "pss_mb": round(kb["Pss"] / 1024, 1)}
