"""Hold: the birth of a container, from its directory's appearance until user code runs.

runc writes a new cgroup's cpuset once or twice and its limits about 26 ms after the mkdir; user code starts about 11 ms
later (measured, containerd 1.7 with runc 1.1). Until then the runtime's writes are not drift, and the set is kept right
against them: the shared pool until the limits are known, then the container's own.
"""

from __future__ import annotations

from enforcer.core.cpuset import EMPTY, CPUSet
from enforcer.core.node import Phase, Role

# Names of a process that has not become the user's yet. A user's program of that name stays in birth for
# `hold_seconds`, which only means that foreign writes to its set are put right without being counted.
_SET_UP = frozenset({"crun", "youki", "exe"})
_SET_UP_PREFIX = "runc"

# Ages in seconds at which a birth is looked at once more though no event came: exec raises none in a cgroup.
_LOOKS = (0.05, 0.2, 1.0, 3.0)


def phase(comm: str | None, age: float, hold_seconds: float) -> Phase:
    """Whether the runtime is still at work: `comm` is the name of the cgroup's first process, None = no process."""
    if age >= hold_seconds:
        return Phase.RUNNING
    return Phase.BIRTH if comm is None or comm in _SET_UP or comm.startswith(_SET_UP_PREFIX) else Phase.RUNNING


def next_look(age: float, hold_seconds: float) -> float:
    """The age at which a container in birth is to be looked at again."""
    return next((look for look in _LOOKS if age < look < hold_seconds), max(hold_seconds, age + hold_seconds))


def given_set(found: CPUSet, parent: CPUSet, *, ours: bool) -> CPUSet:
    """The set that somebody else gave a container at birth, or the empty set.

    cgroup v1: runtimes without a set in the spec copy the parent's, so only a narrower one is a decision. A spec that
    carries all the CPUs there are is no pin either.
    """
    return found if found and not ours and parent and not parent <= found else EMPTY


def role(kind_role: Role, comm: str | None, *, idle_limits: bool) -> Role:
    """A cgroup's role once its process is known.

    The pause process of a sandbox has no limits of its own (shares 2); a container that calls its process "pause"
    must not get what is a sandbox's.
    """
    if kind_role is Role.CONTAINER and comm == "pause" and idle_limits:
        return Role.SANDBOX
    return kind_role
