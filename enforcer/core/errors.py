"""The errors of this project, by what the caller can do about them.

Every message is for the person who reads it: what, where, wanted, found, what to do.
"""

from __future__ import annotations


class EnforcerError(Exception):
    """Base of all our errors. `hint` says what the reader can do next; it is shown on a line of its own."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class ConfigError(EnforcerError):
    """The configuration is wrong: exit code 2. One error may carry several lines, one for each key."""


class CannotWorkHereError(EnforcerError):
    """This node lacks something we cannot do without: exit code 3."""


class CPUSetSyntaxError(EnforcerError, ValueError):
    """A text is not a CPU list or mask of the kernel's formats."""


class TopologyError(EnforcerError):
    """The machine's CPU topology cannot be read or contradicts itself."""


class NotEnoughCPUs(EnforcerError):
    """An allocation asks for more CPUs than are available; carries both figures."""

    def __init__(self, requested: int, available: int) -> None:
        super().__init__(f"not enough CPUs available: requested {requested}, available {available}")
        self.requested = requested
        self.available = available
