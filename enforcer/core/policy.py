"""Policy: what the operator chose, resolved against this machine."""

from __future__ import annotations

from dataclasses import dataclass

from enforcer.core.allocation import AllocationOptions
from enforcer.core.cpuset import CPUSet


@dataclass(frozen=True, slots=True)
class Policy:
    """What plan() goes by.

    `settle`: seconds that limits must stand unchanged before an owner loses cores on limits that disagree. `claim_for`:
    seconds that a v1 pod's claim waits for its container. `drift_limit` repairs of one set within `drift_window`
    seconds make a conflict; then the next repairs wait `back_off` seconds, doubled each time up to `back_off_most`.
    `cfs_quota` False: the kubelet runs without CFS quotas, so shares alone say how many CPUs are asked for.
    """

    reserved: CPUSet
    options: AllocationOptions = AllocationOptions()
    strict: bool = False
    cfs_quota: bool = True
    settle: float = 2.0
    claim_for: float = 10.0
    drift_limit: int = 10
    drift_window: float = 60.0
    back_off: float = 1.0
    back_off_most: float = 60.0
