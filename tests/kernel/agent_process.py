"""The agent as an operator starts it: its own process, a config file, no hooks for tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from enforcer.core.cpuset import CPUSet
from enforcer.core.state import State, from_document


class AgentProcess:
    """`python -m enforcer run` on one kubepods root; start() returns when it says that it is ready."""

    def __init__(self, folder: Path, root: str, **config: object) -> None:
        self.folder = folder
        self.state_dir = folder / "state"
        self.config = folder / "config.toml"
        self.log_file = folder / "agent.log"
        keys: dict[str, object] = {
            "mode": "enforce",
            "roots": [root],
            "reserved-amount": "500m",
            "state-dir": str(self.state_dir),
            "kubelet-root": str(folder / "kubelet"),
            "fifo": False,
            "metrics-listen": "",
            **config,
        }
        self.config.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items()))
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self, prefix: Sequence[str] = (), *, seconds: float = 60) -> AgentProcess:
        """Starts it, under another command if one is given, and waits until it is ready."""
        self.launch(prefix)
        self.wait_for("ready:", seconds)
        return self

    def launch(self, prefix: Sequence[str] = (), *, verbose: bool = True) -> None:
        """Starts it and does not wait."""
        command = [*prefix, sys.executable, "-m", "enforcer", "run", "--config", str(self.config)]
        command += ["--verbose"] if verbose else []
        with self.log_file.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def log(self) -> str:
        """All that it has logged since its start."""
        return self.log_file.read_text(errors="replace")

    def wait_for(self, text: str, seconds: float = 60) -> None:
        """Waits until its log holds a text; fails with the log when it ends or does not come."""
        deadline = time.monotonic() + seconds
        while text not in self.log():
            assert self._process is not None
            code = self._process.poll()
            if code is not None and text not in self.log():
                raise AssertionError(f"the agent ended with {code} before {text!r}:\n{self.log()}")
            if time.monotonic() > deadline:
                raise AssertionError(f"no {text!r} within {seconds} s:\n{self.log()}")
            time.sleep(0.01)

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Ends it; its exit code (negative: by a signal)."""
        if self._process is None:
            return 0
        if self._process.poll() is None:
            self._process.send_signal(number)
        try:
            return self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def is_alive(self) -> bool:
        """Whether it still runs."""
        return self._process is not None and self._process.poll() is None

    def wait(self, seconds: float = 60) -> int:
        """Waits until it ends by itself."""
        assert self._process is not None
        return self._process.wait(seconds)

    def hup(self) -> None:
        """systemctl reload."""
        os.kill(self.pid, signal.SIGHUP)

    def document(self, name: str = "state.json") -> dict[str, Any]:
        """What the state file holds."""
        document: dict[str, Any] = json.loads((self.state_dir / name).read_text())["document"]
        return document

    def state(self, name: str = "state.json") -> State:
        """The state in the state file."""
        return from_document(self.document(name)["state"])

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Another of its commands with the same config."""
        command = [sys.executable, "-m", "enforcer", *arguments, "--config", str(self.config)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def cpus(text: str) -> CPUSet:
    """Short for tests."""
    return CPUSet.parse(text)
