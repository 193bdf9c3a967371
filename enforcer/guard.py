"""Guard: keeps the agent from enforcing beside a kubelet that gives out CPUs itself, at the start and later."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from enforcer.audit.kubelet import KubeletView, read_kubelet, static_policy_reason
from enforcer.core.errors import EnforcerError
from enforcer.kernel.watch import Watcher

log = logging.getLogger(__name__)

_Signature = tuple[tuple[int, int, int] | None, ...]


class KubeletGuard:
    """The kubelet's files as last read; `fileno` becomes readable when one of them is written or replaced."""

    def __init__(self, root: Path, config_path: Path) -> None:
        self._files = (root / "cpu_manager_state", config_path)
        self._root = root
        self._config_path = config_path
        self._watcher = Watcher({file.name for file in self._files})
        self.view = self._read()

    def fileno(self) -> int:
        """For the loop's selector."""
        return self._watcher.fileno()

    def close(self) -> None:
        """Ends the watch."""
        self._watcher.close()

    def look_again(self) -> bool:
        """Reads the files again if they are not what they were; True when they said something new."""
        self._watcher.drain()
        if self._signature == self._look():
            return False
        before = self.view
        self.view = self._read()
        return self.view != before

    def reason(self) -> str | None:
        """Why we must not enforce here; None when we may."""
        return static_policy_reason(self.view)

    def _read(self) -> KubeletView:
        for folder in {str(file.parent) for file in self._files}:
            try:
                self._watcher.add(folder)
            except EnforcerError as error:
                log.info("the kubelet's files are looked at by the rescan only: %s", error)
        self._signature = self._look()
        view = read_kubelet(self._root, self._config_path)
        for problem in view.problems:
            log.warning("kubelet: %s", problem)
        return view

    def _look(self) -> _Signature:
        return tuple(_stat(file) for file in self._files)


def _stat(file: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
