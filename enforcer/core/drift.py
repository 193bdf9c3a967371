"""Drift: somebody else wrote to a set of ours. Repaired at once; after repeated fights a conflict, with back-off."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from enforcer.core.cpuset import EMPTY
from enforcer.core.policy import Policy
from enforcer.core.state import Drift

if TYPE_CHECKING:
    from enforcer.core.decide import Draft
    from enforcer.core.targets import Target


def blocked(draft: Draft, target: Target) -> bool:
    """Counts a foreign write if the target's cgroup shows one; True when its repair has to wait.

    The last value that we wrote and read back is the yardstick, so it does not matter which event told of the write,
    or whether one did. Not drift: a birth (the runtime still writes), an echo (systemd still writes an older set of
    ours), a CPU that the kernel took (cgroup v1 removes an offline CPU for good), and a set that we never wrote.
    """
    path = target.group.path
    ours = draft.written.get(path)
    found = target.group.cpus or EMPTY
    record = draft.drift.get(path)
    if record is not None and record.conflict and draft.now < record.quiet_until:
        draft.look_again(record.quiet_until)
        return found != target.cpus
    if ours is None or target.newborn or target.group.echo or found == ours or found == ours & draft.view.online:
        if record is not None and record.conflict and draft.now > record.quiet_until + draft.policy.drift_window:
            draft.drift[path] = replace(record, conflict=False, repairs=())
            draft.note("conflict-over", path, "nobody else has written to it for a while")
        return False
    del draft.written[path]
    if found == target.cpus:
        return False
    after = repaired(record or Drift(), draft.policy, draft.now)
    draft.drift[path] = replace(after, found=found)
    kind = "conflict" if after.conflict else "drift"
    draft.note(kind, path, f"CPUs {ours} became {found or 'none'} by somebody else's write; {_what_now(after, draft)}")
    if after.conflict:
        draft.look_again(after.quiet_until)
    return after.conflict


def repaired(record: Drift, policy: Policy, now: float) -> Drift:
    """The record after one more foreign write at `now`: a conflict when there were too many of late.

    Each conflict waits twice as long as the one before; a window without a foreign write starts afresh.
    """
    late = tuple(t for t in record.repairs if t > now - policy.drift_window)
    calm = not late and now > record.quiet_until + policy.drift_window
    if len(late) + 1 <= policy.drift_limit and (not record.conflict or calm):
        return Drift((*late, now), record.total + 1)
    waited = record.quiet_until - max(record.repairs, default=record.quiet_until) if record.conflict else 0.0
    wait = min(policy.back_off_most, max(policy.back_off, 2 * waited))
    return Drift((*late, now)[-policy.drift_limit :], record.total + 1, now + wait, True)


def _what_now(record: Drift, draft: Draft) -> str:
    if not record.conflict:
        return "put right"
    return f"left for {record.quiet_until - draft.now:.0f} s, the {record.total} repairs so far did not last"
