"""The configuration file: defaults, every key, and errors that say what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enforcer.config import EXAMPLE, KEYS, Config, DriftLimits, Mode, PolicyOptions, load, parse, parse_millicores
from enforcer.core.allocation import AllocationOptions
from enforcer.core.cpuset import CPUSet
from enforcer.core.errors import ConfigError


def problems(text: str) -> list[str]:
    """The lines of the one error that a text gives, without the source that each starts with."""
    with pytest.raises(ConfigError) as caught:
        parse(text, "c.toml")
    lines = str(caught.value).split("\n")
    assert all(line.startswith("c.toml: ") for line in lines)
    return [line.removeprefix("c.toml: ") for line in lines]


def test_nothing_must_be_configured() -> None:
    config = parse("", "c.toml")
    assert config == Config()
    assert config.mode is Mode.AUDIT
    assert config.reservation is None
    assert config.kubelet_config_path == Path("/var/lib/kubelet/config.yaml")
    assert (config.rescan, config.hold, config.fifo, config.cfs_quota) == (60, 10, True, True)


EVERY_KEY = """
mode = "enforce"
reserved-cpus = "0-1,8"
roots = ["/nested/kubepods", "/nested/kubepods", "/b"]
cfs-quota = "off"
rescan-seconds = 5
hold-seconds = 2.5
fifo = false
metrics-listen = "[::1]:80"
state-dir = "/run/x"
kubelet-root = "/k"
kubelet-config = "/etc/k.yaml"
[options]
full-pcpus-only = true
distribute-cpus-across-numa = true
distribute-cpus-across-cores = false
align-by-socket = true
prefer-align-cpus-by-uncorecache = false
strict-cpu-reservation = true
[drift]
repairs = 3
within-seconds = 30
back-off-seconds = 0.5
back-off-limit-seconds = 20
"""


def test_every_key() -> None:
    config = parse(EVERY_KEY, "c.toml")
    reservation = config.reservation
    assert reservation is not None
    assert reservation.cpus == CPUSet([0, 1, 8])
    assert reservation.millicores is None
    assert reservation.source == "c.toml: reserved-cpus"
    assert config == Config(
        mode=Mode.ENFORCE,
        reservation=reservation,
        roots=("/nested/kubepods", "/b"),
        cfs_quota=False,
        rescan=5,
        hold=2.5,
        fifo=False,
        metrics_listen="[::1]:80",
        state_dir=Path("/run/x"),
        kubelet_root=Path("/k"),
        kubelet_config=Path("/etc/k.yaml"),
        options=PolicyOptions(
            full_pcpus_only=True, distribute_cpus_across_numa=True, align_by_socket=True, strict_cpu_reservation=True
        ),
        drift=DriftLimits(repairs=3, within=30, back_off=0.5, back_off_limit=20),
    )
    assert config.kubelet_config_path == Path("/etc/k.yaml")


def test_the_every_key_text_and_the_example_leave_no_key_out() -> None:
    said = [line.lstrip("#").split(" = ")[0] for line in EXAMPLE.splitlines() if " = " in line and line[1] != " "]
    assert sorted(said) == sorted(key.rpartition(".")[2] for key in KEYS)
    given_keys = [line.split(" = ")[0] for line in EVERY_KEY.splitlines() if " = " in line]
    assert sorted([*given_keys, "reserved-amount"]) == sorted(said)


def test_the_example_is_the_default_as_it_stands_and_when_its_lines_are_put_in_force() -> None:
    assert parse(EXAMPLE, "c.toml") == Config()
    examples = ("#reserved-", "#roots", "#kubelet-config")
    lines = [line for line in EXAMPLE.splitlines() if not line.startswith(examples)]
    live = "\n".join(line[1:] if line[:1] == "#" and line[1:2].isalpha() else line for line in lines)
    assert "mode" in live.split()
    assert parse(live, "c.toml") == Config()
    wishes = [line[1:] for line in EXAMPLE.splitlines() if line.startswith(examples)]
    assert len(wishes) == 4
    for wish in wishes:
        parse(wish, "c.toml")


@pytest.mark.parametrize(("value", "millicores"), [('"500m"', 500), ("1.5", 1500), ('"2"', 2000), ("2", 2000)])
def test_reserved_amount(value: str, millicores: int) -> None:
    reservation = parse(f"reserved-amount = {value}", "c.toml").reservation
    assert reservation is not None
    assert (reservation.millicores, reservation.cpus) == (millicores, None)


def test_options_reach_the_allocator_by_its_names() -> None:
    for option, name in {
        "full_pcpus_only": "full_cores",
        "distribute_cpus_across_numa": "distribute_numa",
        "distribute_cpus_across_cores": "distribute_cores",
        "align_by_socket": "align_socket",
        "prefer_align_cpus_by_uncorecache": "align_uncore",
    }.items():
        assert PolicyOptions(**{option: True}).allocation() == AllocationOptions(**{name: True})
    assert PolicyOptions(strict_cpu_reservation=True).allocation() == AllocationOptions()


@pytest.mark.parametrize(
    ("line", "nearest"),
    [
        ('reservedCpus = "0-4"', "reserved-cpus"),
        ('reserved_cpus = "0-4"', "reserved-cpus"),
        ('reserved-cpu = "0-4"', "reserved-cpus"),
        ('reservedSystemCPUs = "0-4"', "reserved-cpus"),
        ('mod = "audit"', "mode"),
        ("rescan = 3", "rescan-seconds"),
        ('cfsQuota = "on"', "cfs-quota"),
        ("full-pcpus-only = true", "full-pcpus-only in the table [options]"),
        ("fullPCPUsOnly = true", "full-pcpus-only in the table [options]"),
        ("[options]\nalign-socket = true", "align-by-socket in the table [options]"),
        ('[options]\nmode = "audit"', "mode at the top of the file, before any table"),
        ("[drift]\nrepair = 3", "repairs in the table [drift]"),
    ],
)
def test_an_unknown_key_is_an_error_that_names_the_nearest(line: str, nearest: str) -> None:
    (problem,) = problems(line)
    assert "unknown key; nearest: " + nearest + " (" in problem


def test_an_unknown_key_like_no_other_lists_the_known() -> None:
    (problem,) = problems("wibble = 3")
    assert problem.startswith("wibble = 3: unknown key; known are mode, reserved-cpus, ")
    assert problem.endswith("and the tables [options], [drift]")


def test_an_unknown_table() -> None:
    assert problems("[option]\nfull-pcpus-only = true") == ["[option]: unknown table; nearest: [options]"]
    assert problems("drift = 3") == ["drift = 3: drift is a table; write [drift] and its keys below it"]


def test_a_quoted_dotted_key_is_not_a_key_of_a_table() -> None:
    (problem,) = problems('"options.full-pcpus-only" = true')
    assert "unknown key" in problem


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('mode = "enfroce"', 'mode = "enfroce": allowed: "audit" or "enforce" (did you mean "enforce"?)'),
        ("mode = true", 'mode = true: allowed: "audit" or "enforce"'),
        ("cfs-quota = false", 'cfs-quota = false: allowed: "on" or "off"'),
        ("fifo = 1", "fifo = 1: allowed: true or false"),
        ('fifo = "true"', 'fifo = "true": allowed: true or false'),
        ("hold-seconds = true", "hold-seconds = true: allowed: a number from 0.1 to 60"),
        ("hold-seconds = 0", "hold-seconds = 0: allowed: a number from 0.1 to 60"),
        ("rescan-seconds = nan", "rescan-seconds = NaN: allowed: a number from 1 to 3600"),
        ("rescan-seconds = inf", "rescan-seconds = Infinity: allowed: a number from 1 to 3600"),
        ("[drift]\nrepairs = 1.5", "drift.repairs = 1.5: allowed: a whole number from 1 to 1000"),
        ('state-dir = "run"', 'state-dir = "run": allowed: an absolute path such as "/run/cpuset-enforcer"'),
    ],
)
def test_a_wrong_value_is_told_with_key_value_and_what_is_allowed(line: str, problem: str) -> None:
    assert problems(line) == [problem]


@pytest.mark.parametrize("value", ['""', '" "', "3", "[0, 1]", '"0-1,x"', '"3-1"', '"0-99999"', '"0,,1"', "true"])
def test_a_wrong_cpu_list(value: str) -> None:
    (problem,) = problems(f"reserved-cpus = {value}")
    assert 'allowed: a CPU list such as "0-1" or "0,8"' in problem


@pytest.mark.parametrize("value", ["0", '"0"', '"0m"', "-1", '"-500m"', '"500mi"', "nan", "true", '""', "[1]"])
def test_a_wrong_amount(value: str) -> None:
    (problem,) = problems(f"reserved-amount = {value}")
    assert 'allowed: an amount of CPUs above 0 such as "500m", 1.5 or 2' in problem


@pytest.mark.parametrize("value", ['"/kubepods"', '["/"]', '["//"]', '["kubepods"]', '["/a/../b"]', "[3]"])
def test_a_wrong_root(value: str) -> None:
    (problem,) = problems(f"roots = {value}")
    assert "allowed: a list of cgroup paths" in problem


def test_a_list_and_an_amount_exclude_each_other() -> None:
    assert problems('reserved-cpus = "0"\nreserved-amount = 1') == [
        "reserved-cpus and reserved-amount: only one of the two may be set"
    ]


# kubelet policy_options.go; every other pair is allowed.
EXCLUSIVE = {
    frozenset(("full-pcpus-only", "distribute-cpus-across-cores")),
    frozenset(("distribute-cpus-across-numa", "distribute-cpus-across-cores")),
    frozenset(("prefer-align-cpus-by-uncorecache", "distribute-cpus-across-cores")),
    frozenset(("prefer-align-cpus-by-uncorecache", "distribute-cpus-across-numa")),
}
OPTIONS = sorted(key.removeprefix("options.") for key in KEYS if key.startswith("options."))


@pytest.mark.parametrize("first", OPTIONS)
@pytest.mark.parametrize("second", OPTIONS)
def test_options_exclude_each_other_as_in_the_kubelet(first: str, second: str) -> None:
    text = "[options]\n" + "".join(f"{name} = true\n" for name in sorted({first, second}))
    if frozenset((first, second)) not in EXCLUSIVE:
        parse(text, "c.toml")
        return
    (problem,) = problems(text)
    assert first in problem
    assert second in problem
    assert "exclude each other" in problem


def test_an_option_set_to_false_excludes_nothing() -> None:
    parse("[options]\nfull-pcpus-only = true\ndistribute-cpus-across-cores = false", "c.toml")


def test_back_off_above_its_limit() -> None:
    (problem,) = problems("[drift]\nback-off-seconds = 90")
    assert problem == "drift.back-off-seconds = 90: must not be above back-off-limit-seconds, which is 60"


def test_all_errors_are_reported_at_once() -> None:
    text = 'mode = "x"\nfifo = 3\nreservedCpus = "0"\n[options]\nalign = true\n[drift]\nrepairs = 0'
    assert [problem.split(" = ")[0] for problem in problems(text)] == [
        "mode",
        "fifo",
        "reservedCpus",
        "options.align",
        "drift.repairs",
    ]


def test_not_toml_says_where() -> None:
    (problem,) = problems('mode = "audit"\nfifo = \n')
    assert "not TOML: " in problem
    assert "line 2" in problem


@given(st.text())
def test_any_text_is_a_config_or_a_config_error(text: str) -> None:
    try:
        parse(text, "c.toml")
    except ConfigError as error:
        assert "c.toml: " in str(error)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def toml(value: object) -> str:
    """A value in TOML; null becomes a text, as TOML has none."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml(key)} = {toml(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return '"' + "".join(f"\\U{ord(char):08x}" for char in value) + '"'
    return str(value) if value is not None else '"None"'


@given(st.sampled_from(sorted(KEYS)), json_values)
def test_any_value_of_any_key_is_taken_or_told(key: str, value: object) -> None:
    try:
        parse(f"{key} = {toml(value)}", "c.toml")
    except ConfigError as error:
        assert str(error).startswith(f"c.toml: {key} = ")
        assert "allowed: " in str(error) or "must not be above" in str(error)


def test_the_default_file_may_be_absent_a_named_one_may_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("enforcer.config.DEFAULT_PATH", tmp_path / "absent.toml")
    assert load() == Config()
    with pytest.raises(ConfigError, match="absent.toml: there is no such file"):
        load(tmp_path / "absent.toml")


def test_a_file_is_read_and_named_in_errors(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('mode = "enforce"')
    assert load(file).mode is Mode.ENFORCE
    file.write_text("mode = 3")
    with pytest.raises(ConfigError, match="config.toml: mode = 3: "):
        load(file)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path)
    (tmp_path / "config.toml").write_bytes(b'mode = "\xff"')
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path / "config.toml")


@pytest.mark.parametrize(
    ("text", "millicores"),
    [
        ("500m", 500), ("2", 2000), ("1.5", 1500), ("0.1", 100), (".5", 500), ("2.", 2000), ("+1", 1000), ("0", 0),
        ("1500000u", 1500), ("1n", 1), ("100500u", 101), ("0.0001", 1), ("1k", 1000000), ("1e-1", 100), ("2E0", 2000),
        (" 1 ", 1000),
    ],
)  # fmt: skip
def test_millicores(text: str, millicores: int) -> None:
    assert parse_millicores(text) == millicores


@pytest.mark.parametrize("text", ["", "m", "-1", "1 m", "1mm", "1,5", "0x1", "nan", "1e", "1e999", "1" * 16, "١", "."])
def test_not_an_amount(text: str) -> None:
    with pytest.raises(ValueError, match="is not an amount of CPUs"):
        parse_millicores(text)
