"""Standard output: what a person or a program reads."""

from __future__ import annotations

import os
import sys

from enforcer.core.errors import CannotWorkHereError


def say(text: str) -> None:
    """Prints at once; what the locale cannot write is escaped. Raises BrokenPipeError when the reader has gone,
    CannotWorkHereError when there is no room or no standard output."""
    if sys.stdout is None:
        raise CannotWorkHereError("standard output is closed")
    encoding = sys.stdout.encoding or "utf-8"
    text = text.encode(encoding, "backslashreplace").decode(encoding)
    try:
        print(text, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise no_room(error) from error


def say_bytes(data: bytes) -> None:
    """Writes at once; raises as say()."""
    if sys.stdout is None:
        raise CannotWorkHereError("standard output is closed")
    try:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise no_room(error) from error


def no_room(error: OSError) -> CannotWorkHereError:
    """The error to raise for one of standard output; what is still buffered is dropped."""
    drop()
    return CannotWorkHereError(f"standard output cannot be written: {error.strerror}")


def is_terminal() -> bool:
    """Whether a person looks at it."""
    return sys.stdout is not None and sys.stdout.isatty()


def drop() -> None:
    """What is still buffered must not fail once more at exit."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), sys.stdout.fileno())
