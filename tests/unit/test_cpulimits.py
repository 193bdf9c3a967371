"""CPU limits: the kubelet's own figures, and what is read back from them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from enforcer.core.cpulimits import (
    Agreement,
    ContainerCPU,
    CPULimits,
    CPULimitsError,
    agreement,
    amount,
    container_figures,
    milli_to_quota,
    milli_to_shares,
    parse_cpu_max,
    parse_v1,
    parse_v2,
    parse_weight,
    pod_figures,
    shares_only_cpus,
    shares_to_milli,
    shares_to_weight_linear,
    shares_to_weight_new,
    systemd_quota,
    weight_to_shares_linear,
    weight_to_shares_new,
    whole_cpus,
)

TABLES: dict[str, list[dict[str, Any]]] = json.loads(
    (Path(__file__).parent.parent / "data" / "kubelet_tables.json").read_text()
)["tables"]
FORMULAS = [shares_to_weight_linear, shares_to_weight_new]
PERIODS = st.integers(1_000, 1_000_000)
# The least quota of 1 ms, rounded or not, is one whole period of these: fractions of a CPU look like 1 by the quota.
TINY_PERIODS = range(1_000, 1_011)


def rows(table: str) -> list[Any]:
    return [pytest.param(row, id=row.get("id", str(number))) for number, row in enumerate(TABLES[table])]


# --- the kubelet's tables


@pytest.mark.parametrize("row", rows("numbers"))
def test_conversions_of_the_kubelet_and_the_runtimes(row: dict[str, Any]) -> None:
    conversions: dict[str, Callable[[int], int]] = {
        "weight_to_shares_linear": weight_to_shares_linear,
        "shares_to_weight_new": shares_to_weight_new,
        "milli_to_quota": lambda milli: milli_to_quota(milli, row["period"]),
    }
    assert conversions[row["kind"]](row["in"]) == row["out"]


@pytest.mark.parametrize("row", rows("systemd_quota"))
def test_the_systemd_driver_rounds_up_to_a_percent(row: dict[str, Any]) -> None:
    expected = row["cpu_quota_per_sec_usec"], row["quota_after_rounding"]
    assert systemd_quota(row["quota"], row["period"]) == expected


@pytest.mark.parametrize("row", rows("container_quota"))
def test_a_containers_figures(row: dict[str, Any]) -> None:
    unlimited = bool(row["exclusive_cpus"] and row["disable_quota_gate"])
    found = container_figures(
        ContainerCPU(row["request"], row["limit"]), pod_limit=row["pod_limit"], unlimited=unlimited
    )
    expected = row["expected"]
    assert found == CPULimits(expected["cpu_quota"] or None, expected["cpu_period"], expected["cpu_shares"])


def _containers(specs: list[dict[str, Any]]) -> list[ContainerCPU]:
    return [ContainerCPU(spec.get("request"), spec.get("limit"), spec.get("restartable", False)) for spec in specs]


@pytest.mark.parametrize("row", rows("pod_cgroup"))
def test_a_pods_figures(row: dict[str, Any]) -> None:
    pod, expected, level = row["pod"], row["expected"], row["pod"].get("pod_level", {})
    found = pod_figures(
        _containers(pod["containers"]),
        _containers(pod["init"]),
        pod_request=level.get("request"),
        pod_limit=level.get("limit"),
        unlimited=not row["enforce_cpu_limits"],
        period=row["period"],
    )
    quota = expected["cpu_quota"]
    assert found == CPULimits(None if quota in (None, -1) else quota, row["period"], expected["cpu_shares"])


def test_exclusive_cpus_lift_the_quota() -> None:
    assert container_figures(ContainerCPU(2000, 2000), unlimited=True) == CPULimits(None, shares=2048)
    assert pod_figures([ContainerCPU(2000, 2000), ContainerCPU(500, 500)], unlimited=True).quota is None


def test_a_pod_asks_for_the_most_that_runs_at_one_time() -> None:
    app, init = ContainerCPU(1000, 1000), ContainerCPU(4000, 4000)
    sidecar = ContainerCPU(500, 500, restartable=True)
    assert pod_figures([app, app]).milli == 2000
    assert pod_figures([app], [init]).milli == 4000
    assert pod_figures([app], [init, sidecar]).milli == 4000
    assert pod_figures([app], [sidecar, init]).milli == 4500
    assert pod_figures([app, app], [sidecar]).milli == 2500
    assert pod_figures([ContainerCPU(100, 100)], [sidecar]).milli == 600
    assert pod_figures([app], [ContainerCPU(100)]) == CPULimits(None, shares=1024)
    assert pod_figures([ContainerCPU(limit=3000)]) == CPULimits(300_000, shares=3072)


SHARES = [2, 10, 102, 204, 512, 1000, 1024, 2048, 4096, 8192, 10240, 32768, 65536, 262144]
LINEAR = [1, 1, 4, 8, 20, 39, 39, 79, 157, 313, 391, 1250, 2500, 10000]
NEW = [1, 4, 17, 29, 59, 99, 100, 174, 303, 532, 639, 1681, 3023, 10000]


def test_weights_by_both_formulas() -> None:
    assert [shares_to_weight_linear(shares) for shares in SHARES] == LINEAR
    assert [shares_to_weight_new(shares) for shares in SHARES] == NEW
    assert shares_to_weight_linear(0) == shares_to_weight_new(0) == 0


@pytest.mark.parametrize("weight", [1, 2, 39, 100, 174, 303, 5000, 10000])
def test_the_new_weight_goes_back_to_near_shares(weight: int) -> None:
    shares = weight_to_shares_new(weight)
    assert shares_to_weight_new(shares) in (weight, weight + 1)


@given(st.integers(0, 256_000))
def test_shares_go_back_to_an_amount_with_the_same_shares(milli: int) -> None:
    assert milli_to_shares(shares_to_milli(milli_to_shares(milli))) == milli_to_shares(milli)


# --- texts


def test_texts_of_the_kernel() -> None:
    assert parse_v1("2048\n", "200000\n", "100000\n") == CPULimits(200_000, 100_000, shares=2048)
    assert parse_v1("1024", "-1", "100000") == CPULimits(None, 100_000, shares=1024)
    assert parse_v2("200000 100000\n", "79\n") == CPULimits(200_000, 100_000, weight=79)
    assert parse_cpu_max("max 100000\n") == (None, 100_000)
    assert parse_weight("0\n") == 0


@pytest.mark.parametrize(
    "text", ["", "max", "100000", "1 2 3", "-1 100000", "0 100000", "100000 0", "x 100000", "max\u0663 1", "1e5 100000"]
)
def test_garbage_in_cpu_max_is_named(text: str) -> None:
    with pytest.raises(CPULimitsError, match=r"^cpu\.max: wanted .*, found '"):
        parse_cpu_max(text)


@pytest.mark.parametrize("text", ["", "-1", "10001", "\u0661", "max", "1.5", "9" * 5000])
def test_garbage_in_a_weight_is_named(text: str) -> None:
    with pytest.raises(CPULimitsError, match=r"^cpu\.weight: wanted .*, found ") as caught:
        parse_weight(text)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("texts", "file"),
    [
        (("x", "-1", "100000"), "cpu.shares"),
        (("1024", "-2", "100000"), "cpu.cfs_quota_us"),
        (("1024", "0", "100000"), "cpu.cfs_quota_us"),
        (("1024", "-1", "0"), "cpu.cfs_period_us"),
        (("1024", "a\nb", "1"), "cpu.cfs_quota_us"),
    ],
)
def test_garbage_in_v1_files_is_named(texts: tuple[str, str, str], file: str) -> None:
    with pytest.raises(CPULimitsError) as caught:
        parse_v1(*texts)
    assert str(caught.value).startswith(file + ": ")
    assert "\n" not in str(caught.value)


FIELDS = st.one_of(st.text(), st.integers(-2, 10**20).map(str), st.sampled_from(["max 100000", "1 1", "9 0", "-1"]))


@given(FIELDS, FIELDS)
def test_any_text_gives_limits_or_our_error(first: str, second: str) -> None:
    for parse, texts in ((parse_v2, (first, second)), (parse_v1, (first, second, first))):
        try:
            limits: CPULimits = parse(*texts)
        except CPULimitsError:
            continue
        assert limits.period >= 1
        agreement(limits)


def test_a_period_of_nothing_is_refused() -> None:
    with pytest.raises(CPULimitsError, match="period"):
        CPULimits(100_000, 0, 1024)


# --- whole CPUs


@pytest.mark.parametrize(
    ("limits", "cpus"),
    [
        (CPULimits(200_000, 100_000, shares=2048), 2),
        (CPULimits(10_000, 5_000, shares=2048), 2),
        (CPULimits(200_000, 100_000, weight=79), 2),
        (CPULimits(200_000, 100_000, weight=174), 2),
        (CPULimits(100_000, 100_000, weight=39), 1),
        (CPULimits(100_000, 100_000, weight=100), 1),
        # pieces of an update
        (CPULimits(200_000, 100_000, weight=118), None),
        (CPULimits(300_000, 100_000, shares=2048), None),
        (CPULimits(200_000, 100_000, shares=1024), None),
        # fresh cgroups, and those of a static kubelet: no quota, nothing derived
        (CPULimits(None, shares=1024), None),
        (CPULimits(None, weight=100), None),
        (CPULimits(None, shares=4096), None),
        # fractions
        (CPULimits(250_000, 100_000, shares=2560), None),
        (CPULimits(250_000, 100_000, shares=2048), None),
        (CPULimits(50_000, 100_000, shares=1024), None),
        (CPULimits(1_000, 1_000, shares=102), None),
        # shares and weight end at 256 CPUs
        (CPULimits(300 * 100_000, 100_000, shares=262_144), 300),
        (CPULimits(300 * 100_000, 100_000, weight=10_000), 300),
        (CPULimits(255 * 100_000, 100_000, shares=262_144), None),
        (CPULimits(300 * 100_000 + 1, 100_000, shares=262_144), None),
        # the quota alone says nothing, and both figures must fit where both are known
        (CPULimits(200_000, 100_000), None),
        (CPULimits(200_000, 100_000, shares=2048, weight=79), 2),
        (CPULimits(200_000, 100_000, shares=2048, weight=100), None),
        (CPULimits(200_000, 100_000, shares=1024, weight=79), None),
        # cpu.idle
        (CPULimits(200_000, 100_000, weight=0), None),
    ],
)
def test_whole_cpus(limits: CPULimits, cpus: int | None) -> None:
    assert whole_cpus(limits) == cpus


def test_milli() -> None:
    assert CPULimits(150_000, 100_000).milli == 1500
    assert CPULimits(1, 100_000).milli is None
    assert CPULimits(None).milli is None


def written(milli: int, period: int, rounded: bool, formula: Callable[[int], int] | None) -> CPULimits:
    """What a runtime leaves in the files for the kubelet's figures of a Guaranteed container."""
    figures = container_figures(ContainerCPU(milli, milli), period=period)
    assert figures.quota is not None and figures.shares is not None
    quota = systemd_quota(figures.quota, period)[1] if rounded else figures.quota
    if formula is None:
        return CPULimits(quota, period, figures.shares)
    return CPULimits(quota, period, weight=formula(figures.shares))


WAYS = st.sampled_from([None, *FORMULAS])


@given(st.integers(1, 1024), PERIODS, st.booleans(), WAYS)
@example(256, 100_000, True, shares_to_weight_new)
@example(257, 1_000_000, True, None)
def test_a_container_of_whole_cpus_is_read_as_such(
    cpus: int, period: int, rounded: bool, formula: Callable[[int], int] | None
) -> None:
    limits = written(1000 * cpus, period, rounded, formula)
    assert whole_cpus(limits) == cpus
    assert limits.milli == 1000 * cpus
    found = agreement(limits)
    assert (found.quota_milli, found.agree, found.cpus) == (1000 * cpus, True, cpus)


FRACTIONS = st.one_of(
    st.integers(1, 256_000), st.builds(lambda n, d: 1000 * n + d, st.integers(1, 255), st.integers(-9, 9))
).filter(lambda milli: milli % 1000)


@given(FRACTIONS, PERIODS, WAYS)
@example(999, 100_000, shares_to_weight_linear)
@example(1999, 100_000, shares_to_weight_new)
@example(999, 1_000, None)
@example(100, 1_000, None)
def test_a_fraction_is_never_whole(milli: int, period: int, formula: Callable[[int], int] | None) -> None:
    assume(formula is None or period not in TINY_PERIODS)
    limits = written(milli, period, False, formula)
    assert whole_cpus(limits) is None
    assert agreement(limits).cpus is None


@given(FRACTIONS, PERIODS, WAYS)
@example(1999, 100_000, None)
def test_a_fraction_that_systemd_rounded_is_whole_only_in_the_last_10m_of_v2(
    milli: int, period: int, formula: Callable[[int], int] | None
) -> None:
    assume(formula is None or period not in TINY_PERIODS)
    found = whole_cpus(written(milli, period, True, formula))
    assert found is None or (formula is not None and milli % 1000 > 990 and found == milli // 1000 + 1)


def test_the_known_blur_of_systemd_on_v2() -> None:
    assert written(1995, 100_000, True, None) == CPULimits(200_000, 100_000, shares=2042)
    for formula in FORMULAS:
        same = written(995, 100_000, True, formula), written(1000, 100_000, True, formula)
        assert same[0] == same[1]


def test_the_known_blur_of_a_period_of_1_ms_on_v2() -> None:
    same = written(976, 1_000, False, shares_to_weight_linear), written(1000, 1_000, False, shares_to_weight_linear)
    assert same[0] == same[1]
    for formula in FORMULAS:
        assert whole_cpus(written(900, 1_000, False, formula)) is None


# --- agreement


@given(st.integers(1, 256_000), PERIODS, st.booleans(), WAYS)
@example(5, 100_000, False, None)
@example(1999, 100_000, True, None)
@example(1, 1_001, True, None)
def test_what_was_written_for_one_amount_agrees(
    milli: int, period: int, rounded: bool, formula: Callable[[int], int] | None
) -> None:
    assert agreement(written(milli, period, rounded, formula)).agree


@given(st.integers(1, 255), st.integers(1, 255), WAYS)
def test_half_an_update_does_not_agree(old: int, new: int, formula: Callable[[int], int] | None) -> None:
    assume(old != new)
    before, after = (written(1000 * cpus, 100_000, False, formula) for cpus in (old, new))
    half = CPULimits(after.quota, 100_000, before.shares, before.weight)
    found = agreement(half)
    # five weights are one number of CPUs by the old formula and another by the new
    if before.weight not in (586, 1367, 5625, 7109, 7500):
        assert not found.agree and found.cpus is None
    assert found.quota_milli == 1000 * new


def test_agreement_tells_both_sides() -> None:
    half = agreement(CPULimits(300_000, 100_000, shares=2048))
    assert half == Agreement(3000, (2000,), False, None)
    assert str(half) == "quota says 3 CPUs, shares say 2 CPUs"
    assert str(agreement(CPULimits(None, weight=100))) == "no quota, shares say 1 CPU"
    assert str(agreement(CPULimits(150_000))) == "quota says 1500m, shares say nothing"
    assert agreement(CPULimits(150_000, shares=1536)) == Agreement(1500, (1500,), True, None)
    assert agreement(CPULimits(200_000, weight=586)).shares_milli == (9000, 15000)
    assert agreement(CPULimits(None, shares=2048)) == Agreement(None, (2000,), False, None)
    assert not agreement(CPULimits(200_000)).agree


def test_an_odd_weight_gives_both_readings() -> None:
    linear, new = agreement(CPULimits(None, weight=59)).shares_milli[::-1]
    assert 1450 < linear < 1550
    assert 490 < new < 510


@pytest.mark.parametrize(("milli", "text"), [(1000, "1 CPU"), (0, "0 CPUs"), (12000, "12 CPUs"), (1500, "1500m")])
def test_amounts_for_a_person(milli: int, text: str) -> None:
    assert amount(milli) == text


# --- without a quota at all


@pytest.mark.parametrize(
    ("limits", "cpus"),
    [
        (CPULimits(None, shares=1024), 1),
        (CPULimits(None, shares=3072), 3),
        (CPULimits(None, shares=1000), None),
        (CPULimits(None, shares=512), None),
        (CPULimits(None, shares=0), None),
        (CPULimits(None, shares=255 * 1024), 255),
        (CPULimits(None, shares=262_144), None),
        (CPULimits(None, weight=39), 1),
        (CPULimits(None, weight=100), 1),
        (CPULimits(None, weight=174), 2),
        (CPULimits(None, weight=99), None),
        (CPULimits(None, weight=586), None),
        (CPULimits(None, weight=10_000), None),
        (CPULimits(None, weight=0), None),
        (CPULimits(None), None),
    ],
)
def test_shares_alone(limits: CPULimits, cpus: int | None) -> None:
    assert shares_only_cpus(limits) == cpus


@given(st.integers(1, 255), WAYS)
def test_shares_alone_never_read_another_number(cpus: int, formula: Callable[[int], int] | None) -> None:
    limits = written(1000 * cpus, 100_000, False, formula)
    found = shares_only_cpus(CPULimits(None, 100_000, limits.shares, limits.weight))
    assert found == cpus or (found is None and limits.weight in (586, 1367, 5625, 7109, 7500))
