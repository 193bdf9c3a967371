"""The agent as a process of its own, with a config and a state directory that are gone after the demo."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Final

import enforcer
from enforcer.core.errors import EnforcerError
from enforcer.core.state import State
from enforcer.status import AgentInfo, read_agent

MODE = "enforce"

_READY_WITHIN: Final = 60.0
_STOP_WITHIN: Final = 5.0
_PR_SET_PDEATHSIG: Final = 1
_libc: Final = ctypes.CDLL(None)


class AgentProcess:
    """`cpuset-enforcer run` on the kubepods tree `root`; its files are below `folder`."""

    def __init__(self, folder: Path, root: str, reserved: str) -> None:
        self.state_dir = folder / "state"
        self.log = folder / "agent.log"
        self._config = folder / "config.toml"
        lines = (
            f'mode = "{MODE}"',
            f'roots = ["{root}"]',
            reserved,
            f'state-dir = "{self.state_dir}"',
            'metrics-listen = ""',
            # The demo's pods are no kubelet's, whatever one has configured here.
            f'kubelet-root = "{folder}"',
        )
        self._config.write_text("\n".join(line for line in lines if line) + "\n")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, meanwhile: Callable[[], None]) -> float:
        """Starts it and waits until it is ready; seconds. `meanwhile` is called again and again until then and pauses.

        Raises EnforcerError with its last words if it does not get ready.
        """
        began = time.monotonic()
        with self.log.open("ab") as log:
            self._process = self._spawn(log)
        while self._process.poll() is None and time.monotonic() < began + _READY_WITHIN:
            if self.says()[1].pid == self._process.pid:
                return time.monotonic() - began
            meanwhile()
        self.stop()
        raise EnforcerError(f"the agent did not get ready; its last words:\n{self.last_words()}")

    def says(self) -> tuple[State, AgentInfo]:
        """What it wrote to its state file last."""
        return read_agent(self.state_dir, [])

    def kill(self) -> None:
        """SIGKILL: it cannot tidy up."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def stop(self) -> None:
        """SIGTERM, and SIGKILL when that is not enough. Nothing to do when it does not run."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(_STOP_WITHIN)
        except subprocess.TimeoutExpired:
            self.kill()

    def last_words(self, lines: int = 15) -> str:
        """The end of its log."""
        try:
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        except FileNotFoundError:
            return ""

    def _spawn(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        # Neither systemd nor the journal of whoever started the demo is the demo agent's.
        environment = {k: v for k, v in os.environ.items() if k not in ("NOTIFY_SOCKET", "JOURNAL_STREAM")}
        above = str(Path(enforcer.__file__).parent.parent)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (above, os.environ.get("PYTHONPATH"))))
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "enforcer", "run", "--config", str(self._config)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
            preexec_fn=_die_with_the_demo,
        )


def _die_with_the_demo() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
