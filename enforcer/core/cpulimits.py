"""CPU quota, period, shares, weight: what the kubelet writes for an amount of CPU, and what may be read back from it.

Amounts are milli-CPU as in a pod's spec, quotas and periods microseconds. The kubelet's side is
pkg/kubelet/cm/helpers_linux.go and pkg/kubelet/kuberuntime/kuberuntime_container_linux.go.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from enforcer.core.errors import EnforcerError
from enforcer.core.kubepods import shown

DEFAULT_PERIOD: Final = 100_000
MIN_QUOTA: Final = 1_000
MIN_SHARES: Final = 2
MAX_SHARES: Final = 262_144
MAX_WEIGHT: Final = 10_000
SHARES_PER_CPU: Final = 1024


class CPULimitsError(EnforcerError, ValueError):
    """A text is not what the kernel shows in a cgroup's CPU files."""


@dataclass(frozen=True, slots=True)
class CPULimits:
    """The CPU limits of one cgroup. quota None is no limit; shares are v1's, weight is v2's, None where not known.

    Raises CPULimitsError for a period under 1.
    """

    quota: int | None
    period: int = DEFAULT_PERIOD
    shares: int | None = None
    weight: int | None = None

    def __post_init__(self) -> None:
        if self.period < 1:
            raise CPULimitsError(f"CPU period: wanted at least 1 us, found {self.period}")

    @property
    def milli(self) -> int | None:
        """The quota as milli-CPU; None without a quota, or when it is no whole number of them."""
        if self.quota is None:
            return None
        milli, rest = divmod(self.quota * 1000, self.period)
        return None if rest else milli


@dataclass(frozen=True, slots=True)
class Agreement:
    """What a cgroup's figures say, each for itself.

    quota_milli: from the quota, rounded up; None without one. shares_milli: from shares or weight, one value for each
    formula that may have made the weight. agree: one amount of CPU explains them all. cpus: whole_cpus().
    """

    quota_milli: int | None
    shares_milli: tuple[int, ...]
    agree: bool
    cpus: int | None

    def __str__(self) -> str:
        quota = "no quota" if self.quota_milli is None else f"quota says {amount(self.quota_milli)}"
        shares = " or ".join(map(amount, self.shares_milli)) or "nothing"
        return f"{quota}, shares say {shares}"


def amount(milli: int) -> str:
    """An amount of CPU for a person: "1 CPU", "3 CPUs", "1500m"."""
    cpus, rest = divmod(milli, 1000)
    return f"{milli}m" if rest else f"{cpus} CPU" if cpus == 1 else f"{cpus} CPUs"


# --- texts of the cgroup files


def parse_v1(shares: str, quota: str, period: str) -> CPULimits:
    """From cpu.shares, cpu.cfs_quota_us (-1 = no limit) and cpu.cfs_period_us; raises CPULimitsError."""
    limit = None if quota.strip() == "-1" else _number("cpu.cfs_quota_us", quota, 1)
    return CPULimits(limit, _number("cpu.cfs_period_us", period, 1), shares=_number("cpu.shares", shares, 0))


def parse_v2(cpu_max: str, weight: str) -> CPULimits:
    """From cpu.max and cpu.weight; raises CPULimitsError."""
    quota, period = parse_cpu_max(cpu_max)
    return CPULimits(quota, period, weight=parse_weight(weight))


def parse_cpu_max(text: str) -> tuple[int | None, int]:
    """(quota or None, period) from cpu.max: "200000 100000" or "max 100000"; raises CPULimitsError."""
    fields = text.split()
    if len(fields) != 2:
        raise CPULimitsError(f"cpu.max: wanted a quota or 'max' and a period, found '{shown(text.strip())}'")
    quota = None if fields[0] == "max" else _number("cpu.max", fields[0], 1)
    return quota, _number("cpu.max", fields[1], 1)


def parse_weight(text: str) -> int:
    """cpu.weight: 1-10000, and 0 as the kernel shows it while cpu.idle is 1; raises CPULimitsError."""
    weight = _number("cpu.weight", text, 0)
    if weight > MAX_WEIGHT:
        raise CPULimitsError(f"cpu.weight: wanted 0-{MAX_WEIGHT}, found {weight}")
    return weight


_DIGITS: Final = re.compile(r"\d{1,19}", re.ASCII)


def _number(file: str, text: str, least: int) -> int:
    text = text.strip()
    if not _DIGITS.fullmatch(text) or int(text) < least:
        raise CPULimitsError(f"{file}: wanted a whole number of at least {least}, found '{shown(text)}'")
    return int(text)


# --- conversions


def milli_to_shares(milli: int) -> int:
    """The kubelet's cpu.shares for an amount of CPU."""
    return min(max(milli * SHARES_PER_CPU // 1000, MIN_SHARES), MAX_SHARES)


def shares_to_milli(shares: int) -> int:
    """The least amount of CPU whose shares these can be."""
    return -(-shares * 1000 // SHARES_PER_CPU)


def milli_to_quota(milli: int, period: int) -> int:
    """The kubelet's quota for an amount of CPU, never under 1 ms; 0 (not set) for 0."""
    return max(milli * period // 1000, MIN_QUOTA) if milli else 0


def shares_to_weight_linear(shares: int) -> int:
    """cpu.weight by the old formula: the kubelet for its own cgroups, runc before 1.3.2, crun before 1.23."""
    return 1 + (max(shares, MIN_SHARES) - 2) * 9999 // 262142 if shares else 0


def weight_to_shares_linear(weight: int) -> int:
    """The kubelet's cpu.shares for a cpu.weight. Loses: 1024 -> 39 -> 998."""
    return 2 + (weight - 1) * 262142 // 9999


def shares_to_weight_new(shares: int) -> int:
    """cpu.weight by the formula of newer runtimes (opencontainers/cgroups ConvertCPUSharesToCgroupV2Value), which maps
    2, 1024, 262144 to 1, 100, 10000."""
    if shares <= MIN_SHARES:
        return min(shares, 1)
    if shares >= MAX_SHARES:
        return MAX_WEIGHT
    log = math.log2(shares)
    return math.ceil(10 ** (log * (log + 125) / 612 - 7 / 34))


def weight_to_shares_new(weight: int) -> int:
    """The shares that come nearest to a weight by the newer formula (its inverse, rounded)."""
    exponent = 612 * (math.log10(max(weight, 1)) + 7 / 34)
    return round(2 ** ((math.sqrt(125 * 125 + 4 * exponent) - 125) / 2))


def systemd_quota(quota: int, period: int) -> tuple[int, int]:
    """(CPUQuotaPerSecUSec, the quota that remains) as runc's systemd driver makes them of a quota; period 0 = default.

    systemd counts in percent, so the driver rounds up to 10 ms in a second (opencontainers/cgroups systemd/common.go).
    """
    period = period or DEFAULT_PERIOD
    per_second = -(-(quota * 1_000_000 // period) // 10_000) * 10_000
    return per_second, per_second * period // 1_000_000


# --- whole CPUs


def whole_cpus(limits: CPULimits) -> int | None:
    """N when the cgroup asks for N >= 1 whole CPUs, else None.

    The quota must be N periods, whatever the period is, and the shares or the weight those of N CPUs; the weight by
    either formula, as runtimes differ. Shares end at 256 CPUs, above it the quota alone counts. Without a quota the
    answer is always None: a fresh cgroup has the shares and the weight of one CPU.

    Known blur: with the systemd driver on cgroup v2 an amount less than 10m under a whole number (1995m) can end with
    the very same figures as the whole one, and with a period of 1 ms, which the least quota equals, 976m as well; only
    the runtime's or the kubelet's word tells them apart.
    """
    if limits.quota is None or limits.quota < limits.period or limits.quota % limits.period:
        return None
    cpus = limits.quota // limits.period
    return cpus if _fits(limits, 1000 * cpus, 1000 * cpus) else None


def _fits(limits: CPULimits, low: int, high: int) -> bool:
    """Whether shares and weight (one of them at least) are those of some amount in low..high milli-CPU."""
    if limits.shares is None and limits.weight is None:
        return False
    least, most = milli_to_shares(low), milli_to_shares(high)
    if limits.shares is not None and not least <= limits.shares <= most:
        return False
    return limits.weight is None or any(
        formula(least) <= limits.weight <= formula(most) for formula in (shares_to_weight_linear, shares_to_weight_new)
    )


def agreement(limits: CPULimits) -> Agreement:
    """What quota and shares say and whether they agree, for limits that arrive in several writes.

    They agree when one amount of CPU explains both: the systemd driver's rounding (less than 10m up) and the least
    quota of 1 ms are allowed for. `agree` with cpus None is a fractional amount. Without a quota nothing agrees.
    """
    said = _said_by_shares(limits)
    if limits.quota is None:
        return Agreement(None, said, False, None)
    high = -(-limits.quota * 1000 // limits.period)
    least_quota = max(MIN_QUOTA, systemd_quota(MIN_QUOTA, limits.period)[1])
    low = 0 if limits.quota <= least_quota else max(high - 9, 0)
    return Agreement(high, said, _fits(limits, low, high), whole_cpus(limits))


def _said_by_shares(limits: CPULimits) -> tuple[int, ...]:
    if limits.shares is not None:
        return (shares_to_milli(limits.shares),)
    if limits.weight is None:
        return ()
    if whole := _CPUS_OF_WEIGHT.get(limits.weight):
        return tuple(1000 * cpus for cpus in whole)
    either = weight_to_shares_linear(limits.weight), weight_to_shares_new(limits.weight)
    return tuple(sorted({shares_to_milli(max(shares, 0)) for shares in either}))


def shares_only_cpus(limits: CPULimits) -> int | None:
    """N from shares or weight alone, for nodes whose kubelet runs with --cpu-cfs-quota=false.

    A weight stands for many shares, so amounts a little under N read as N (39 is 976m to 1000m by the old formula), and
    a fresh cgroup reads as 1. None where two whole numbers are possible: at the greatest shares and weight (256 CPUs or
    more), and at the five weights which the two formulas give to different numbers of CPUs.
    """
    if limits.shares is not None:
        cpus, rest = divmod(limits.shares, SHARES_PER_CPU)
        return cpus if cpus and not rest and limits.shares < MAX_SHARES else None
    if limits.weight is None or limits.weight >= MAX_WEIGHT:
        return None
    whole = _CPUS_OF_WEIGHT.get(limits.weight, ())
    return whole[0] if len(whole) == 1 else None


def _cpus_of_weight() -> dict[int, tuple[int, ...]]:
    found: dict[int, set[int]] = {}
    for cpus in range(1, MAX_SHARES // SHARES_PER_CPU + 1):
        for formula in (shares_to_weight_linear, shares_to_weight_new):
            found.setdefault(formula(SHARES_PER_CPU * cpus), set()).add(cpus)
    return {weight: tuple(sorted(cpus)) for weight, cpus in found.items()}


_CPUS_OF_WEIGHT: Final = _cpus_of_weight()


# --- what the kubelet gives a container and a pod


@dataclass(frozen=True, slots=True)
class ContainerCPU:
    """A container's CPU request and limit in milli-CPU (None = absent); restartable: an init container that stays."""

    request: int | None = None
    limit: int | None = None
    restartable: bool = False

    @property
    def asked(self) -> int:
        """The request; a limit alone is one, too (API defaulting)."""
        return self.request if self.request is not None else self.limit or 0


def container_figures(
    container: ContainerCPU, *, pod_limit: int | None = None, unlimited: bool = False, period: int = DEFAULT_PERIOD
) -> CPULimits:
    """What the kubelet has the runtime set for a container.

    pod_limit is that of pod-level resources, used when the container has none. unlimited: no quota, because of
    exclusive CPUs (gate DisableCPUQuotaWithExclusiveCPUs) or --cpu-cfs-quota=false.
    """
    limit = container.limit or pod_limit or 0
    quota = None if unlimited else milli_to_quota(limit, period) or None
    return CPULimits(quota, period, shares=milli_to_shares(container.asked))


def pod_figures(
    containers: Sequence[ContainerCPU],
    init: Sequence[ContainerCPU] = (),
    *,
    pod_request: int | None = None,
    pod_limit: int | None = None,
    unlimited: bool = False,
    period: int = DEFAULT_PERIOD,
) -> CPULimits:
    """What the kubelet writes into a pod's cgroup; pod_request and pod_limit are pod-level resources.

    A quota comes only with a pod-level limit, or when every container, init containers included, has a limit.
    """
    request = pod_request if pod_request is not None else pod_limit
    if request is None:
        request = _whole_pod((c.asked for c in containers), ((c.asked, c.restartable) for c in init))
    limit = pod_limit or 0
    if not limit and all(c.limit for c in (*containers, *init)):
        limit = _whole_pod((c.limit or 0 for c in containers), ((c.limit or 0, c.restartable) for c in init))
    quota = None if unlimited else milli_to_quota(limit, period) or None
    return CPULimits(quota, period, shares=milli_to_shares(request))


def _whole_pod(containers: Iterable[int], init: Iterable[tuple[int, bool]]) -> int:
    """The most that runs at one time: an init container beside the sidecars before it, or all apps and sidecars."""
    sidecars = peak = 0
    for milli, restartable in init:
        if restartable:
            sidecars += milli
        else:
            peak = max(peak, sidecars + milli)
    return max(peak, sidecars + sum(containers))
