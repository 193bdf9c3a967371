"""The reserved CPUs, resolved against machines."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enforcer.core.allocation import AllocationOptions
from enforcer.core.cpuset import CPUSet
from enforcer.core.errors import CannotWorkHereError, ConfigError
from enforcer.core.reserved import Reservation, resolve_reserved
from enforcer.core.topology import CPUTopology

PLAIN = AllocationOptions()


def machine(cores: int, threads: int, *, adjacent: bool = False) -> CPUTopology:
    """One socket; siblings are `cores` apart (0,4), or side by side (0,1)."""
    return CPUTopology.from_rows(
        (core * threads + thread if adjacent else thread * cores + core, core, 0, 0, 0)
        for core in range(cores)
        for thread in range(threads)
    )


TWO = machine(2, 1)
SMT = machine(4, 2)


def resolve(wanted: Reservation | None, topology: CPUTopology, allowed: str | None = None) -> str:
    usable = topology.cpus if allowed is None else CPUSet.parse(allowed)
    return str(resolve_reserved(wanted, topology, usable, PLAIN))


def listed(cpus: str) -> Reservation:
    return Reservation("c.toml: reserved-cpus", cpus=CPUSet.parse(cpus))


def amount(millicores: int) -> Reservation:
    return Reservation("c.toml: reserved-amount", millicores=millicores)


@pytest.mark.parametrize(
    ("topology", "allowed", "reserved"),
    [
        (TWO, "0-1", "0"),
        (SMT, "0-7", "0,4"),
        (machine(4, 2, adjacent=True), "0-7", "0-1"),
        (machine(1, 2), "0-1", "0"),  # one core: half of it must be left to give out
        (SMT, "2-3,6-7", "2,6"),
        (SMT, "4-7", "4"),  # its sibling 0 is not allowed
        (SMT, "2,6", "2"),
    ],
)
def test_default_is_the_core_of_the_lowest_cpu(topology: CPUTopology, allowed: str, reserved: str) -> None:
    assert resolve(None, topology, allowed) == reserved


@pytest.mark.parametrize(
    ("wanted", "reserved"),
    [("0", "0"), ("0-6", "0-6"), ("3,7", "3,7")],
)
def test_a_list(wanted: str, reserved: str) -> None:
    assert resolve(listed(wanted), SMT) == reserved


def test_a_list_is_narrowed_to_what_containers_may_use() -> None:
    assert resolve(listed("0-2"), SMT, "2-7") == "2"


@pytest.mark.parametrize(
    ("millicores", "reserved"),
    [(1, "0"), (500, "0"), (1000, "0"), (1001, "0,4"), (2000, "0,4"), (4000, "0-1,4-5")],
)
def test_an_amount_is_rounded_up_and_taken_as_for_containers(millicores: int, reserved: str) -> None:
    assert resolve(amount(millicores), SMT) == reserved


def test_the_seed_scenario() -> None:
    assert resolve(amount(500), TWO) == "0"


@pytest.mark.parametrize(
    ("wanted", "allowed", "words"),
    [
        (listed("15"), "0-7", ["c.toml: reserved-cpus = 15", "CPUs 15 are not online", "online: 0-7"]),
        (listed("6-9"), "0-7", ["reserved-cpus = 6-9", "CPUs 8-9 are not online", "online: 0-7"]),
        (listed("0-7"), "0-7", ["reserved-cpus = 0-7", "nothing is left to give out", "0-7"]),
        (listed("0-3"), "2-3", ["nothing is left to give out", "2-3"]),
        (listed("0-1"), "2-7", ["none of them is among", "2-7"]),
        (listed(""), "0-7", ["no CPU is reserved"]),
        (amount(7001), "0-7", ["reserved-amount = 7001m is 8 CPUs", "nothing is left", "0-7"]),
        (amount(8000), "0-7", ["nothing is left to give out"]),
        (amount(0), "0-7", ["at least 1m"]),
    ],
)
def test_what_does_not_fit_the_machine_is_told(wanted: Reservation, allowed: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(wanted, SMT, allowed)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("wanted", [None, listed("0"), amount(500)])
@pytest.mark.parametrize(("allowed", "words"), [("3", "CPU 3 only"), ("", "no CPU only"), ("64", "no CPU only")])
def test_one_cpu_is_too_few(wanted: Reservation | None, allowed: str, words: str) -> None:
    with pytest.raises(CannotWorkHereError, match=words):
        resolve(wanted, SMT, allowed)


wishes = st.one_of(
    st.none(),
    st.builds(amount, st.integers(0, 20000)),
    st.builds(lambda cpus: Reservation("x", cpus=CPUSet(cpus)), st.sets(st.integers(0, 17))),
)


@given(wishes, st.integers(1, 8), st.integers(1, 2), st.sets(st.integers(0, 17)))
def test_never_empty_always_inside_and_something_is_left(
    wanted: Reservation | None, cores: int, threads: int, allowed: set[int]
) -> None:
    topology = machine(cores, threads)
    usable = CPUSet(allowed) & topology.cpus
    try:
        reserved = resolve_reserved(wanted, topology, CPUSet(allowed), PLAIN)
    except CannotWorkHereError:
        assert len(usable) < 2
    except ConfigError:
        assert wanted is not None
    else:
        assert reserved
        assert reserved < usable
