"""Standard output: what a person or a program reads."""

from __future__ import annotations

import os
import sys

from enforcer.core.errors import CannotWorkHereError


def say(text: str) -> None:
    """Prints at once. Raises BrokenPipeError when the reader has gone, CannotWorkHereError when there is no room."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        drop()
        raise CannotWorkHereError(f"standard output cannot be written: {error.strerror}") from error


def drop() -> None:
    """What is still buffered must not fail once more at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), sys.stdout.fileno())
