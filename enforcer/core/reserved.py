"""Which CPUs are reserved: never given out exclusively, and the home of everything that has no core of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace

from enforcer.core.allocation import AllocationOptions, take
from enforcer.core.cpuset import CPUSet
from enforcer.core.errors import CannotWorkHereError, ConfigError
from enforcer.core.topology import CPUTopology


@dataclass(frozen=True, slots=True)
class Reservation:
    """What somebody wants reserved: a list, or an amount in millicores (exactly one is not None).

    `source` names who says so, for messages: "reserved-cpus in /etc/cpuset-enforcer/config.toml".
    """

    source: str
    cpus: CPUSet | None = None
    millicores: int | None = None


def resolve_reserved(
    wanted: Reservation | None, topology: CPUTopology, allowed: CPUSet, options: AllocationOptions
) -> CPUSet:
    """The reserved CPUs on this machine: never empty, inside `allowed`, and with at least one CPU left to give out.

    `allowed` is the effective set of the kubepods root. A list is narrowed to it; an amount is rounded up to whole CPUs
    and taken by the same algorithm and options as containers, as in the kubelet (cm/cpumanager NewManager). Without a
    wish: the whole core of the lowest CPU, or that CPU alone where no other core is left.

    Raises ConfigError for a wish that does not fit the machine, CannotWorkHereError when there are not two CPUs.
    """
    usable = allowed & topology.cpus
    if len(usable) < 2:
        raise CannotWorkHereError(
            f"containers may run on {_shown(usable)} only: two are needed, one reserved and one to give out",
            hint=f"online: {topology.cpus}; effective set of the kubepods root: {_shown(allowed)}",
        )
    if wanted is None:
        return _default(topology, usable)
    if wanted.cpus is not None:
        return _listed(wanted.source, wanted.cpus, topology.cpus, usable)
    return _amount(wanted.source, wanted.millicores or 0, topology, usable, options)


def _default(topology: CPUTopology, usable: CPUSet) -> CPUSet:
    core = topology.siblings(usable.first) & usable
    return core if usable - core else CPUSet([usable.first])


def _listed(source: str, wanted: CPUSet, online: CPUSet, usable: CPUSet) -> CPUSet:
    if not wanted:
        raise ConfigError(f"{source}: no CPU is reserved", hint="leave the key out for the default")
    if not wanted <= online:
        raise ConfigError(f"{source} = {wanted}: CPUs {wanted - online} are not online here; online: {online}")
    reserved = wanted & usable
    if not reserved:
        raise ConfigError(f"{source} = {wanted}: none of them is among the CPUs that containers may use: {usable}")
    if reserved == usable:
        raise ConfigError(f"{source} = {wanted}: nothing is left to give out; containers may use: {usable}")
    return reserved


def _amount(source: str, millicores: int, topology: CPUTopology, usable: CPUSet, options: AllocationOptions) -> CPUSet:
    count = -(-millicores // 1000)
    if count < 1:
        raise ConfigError(f"{source} = {millicores}m: at least 1m must be reserved")
    if count >= len(usable):
        raise ConfigError(
            f"{source} = {millicores}m is {count} CPUs: nothing is left to give out; containers may use: {usable}"
        )
    # The kubelet checks for full cores at admission only (kubernetes policy_static.go), not when it reserves.
    return take(topology, usable, count, replace(options, full_cores=False))


def _shown(cpus: CPUSet) -> str:
    return f"CPU {cpus}" if cpus else "no CPU"
