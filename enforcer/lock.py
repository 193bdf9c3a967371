"""The lock of a state directory: two agents on one node would fight over every set."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import IO

from enforcer.core.errors import CannotWorkHereError


def take_lock(folder: Path) -> IO[str]:
    """Holds the directory's lock until the returned file is closed; makes the directory where it is missing.

    Raises CannotWorkHereError when another process holds it, or the directory cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o755)
        file = (folder / "lock").open("a")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise CannotWorkHereError(
            f"another cpuset-enforcer runs with the state directory {folder}", hint="stop it first"
        ) from error
    except OSError as error:
        raise CannotWorkHereError(f"state directory {folder}: {error.strerror}", hint="is this root?") from error
    return file
