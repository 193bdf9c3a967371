"""The lock of a state directory: two agents on one node would fight over every set."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import IO, Final

from enforcer.core.errors import CannotWorkHereError

# flock(2) needs no more than to read: anybody who may could keep the agent from starting.
_OWNER_ONLY: Final = 0o600


def take_lock(folder: Path) -> IO[str]:
    """Holds the directory's lock until the returned file is closed; makes the directory where it is missing.

    Raises CannotWorkHereError when another process holds it, or the directory cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o755)
        descriptor = os.open(folder / "lock", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, _OWNER_ONLY)
        return _locked(os.fdopen(descriptor, "w"), folder)
    except OSError as error:
        raise CannotWorkHereError(f"state directory {folder}: {error.strerror}", hint="is this root?") from error


def _locked(file: IO[str], folder: Path) -> IO[str]:
    try:
        os.fchmod(file.fileno(), _OWNER_ONLY)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise CannotWorkHereError(
            f"another cpuset-enforcer runs with the state directory {folder}", hint="stop it first"
        ) from error
    return file
