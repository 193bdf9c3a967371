"""Sources: what wakes the loop, and what has a time of its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from enforcer.observe import NOTHING, Dirty


@dataclass(frozen=True, slots=True)
class Source:
    """Something that wakes the loop: `take` is called when `fileno` is readable and says what has to be looked at."""

    fileno: int
    take: Callable[[], Dirty]


class Ticker(Protocol):
    """Something that has to be done at a time of its own."""

    def due(self) -> float:
        """When, in seconds of the loop's clock."""

    def tick(self) -> Dirty:
        """Does it, if it is due; says what has to be looked at then."""


def wake_up(fd: int) -> Source:
    """A pipe's end whose bytes say only that a signal came."""
    return Source(fd, lambda: _emptied(fd))


def _emptied(fd: int) -> Dirty:
    try:
        os.read(fd, 4096)
    except BlockingIOError:
        return NOTHING
    return NOTHING
