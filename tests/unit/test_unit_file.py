"""The systemd unit says the same as the program: paths, exit codes, limits; and forbids nothing that it needs.

tests/kernel/test_shipped_files.py lets systemd-analyze look at it, tests/vm/inside/test_service_unit.py runs it.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from enforcer import cli
from enforcer.config import Config
from enforcer.kernel import affinity

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "systemd" / "cpuset-enforcer.service").read_text()


def parsed(text: str) -> dict[tuple[str, str], str]:
    """(section, key) -> value; a key that comes twice is an error here."""
    found: dict[tuple[str, str], str] = {}
    section = ""
    for line in text.splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line and not line.startswith("#"):
            key, _, value = line.partition("=")
            assert (section, key) not in found, f"{key} is there twice"
            found[section, key] = value
    return found


UNIT = parsed(TEXT)
SERVICE = {key: value for (section, key), value in UNIT.items() if section == "Service"}


def test_it_runs_what_bootstrap_installs() -> None:
    prefix = re.search(r"^prefix=(\S+)$", (ROOT / "bootstrap").read_text(), re.M)
    assert prefix
    assert SERVICE["ExecStart"] == f"{prefix[1]}/bin/cpuset-enforcer run"


def test_state_is_kept_over_stop_and_restart_where_the_program_looks_for_it() -> None:
    assert f"/run/{SERVICE['RuntimeDirectory']}" == str(Config().state_dir)
    assert SERVICE["RuntimeDirectoryPreserve"] == "yes"
    assert not {"ExecStopPost", "ExecStop"} & SERVICE.keys(), "a stop leaves the pins"


def test_restarts_for_ever_but_not_what_cannot_mend_itself() -> None:
    assert SERVICE["Restart"] == "always"
    assert UNIT["Unit", "StartLimitIntervalSec"] == "0"
    assert set(SERVICE["RestartPreventExitStatus"].split()) == {str(cli.USAGE), str(cli.CANNOT)}
    assert 1 <= int(SERVICE["RestartSec"]) <= 5


def test_reload_is_sighup() -> None:
    assert SERVICE["ExecReload"] == "/bin/sh -c 'kill -HUP $MAINPID'"


def test_real_time_limits_are_those_that_the_agent_sets_itself() -> None:
    soft = inspect.signature(affinity.raise_priority).parameters["limit"].default
    assert SERVICE["LimitRTPRIO"] == str(affinity.FIFO_PRIORITY)
    assert SERVICE["LimitRTTIME"] == f"{soft * affinity._KILL_AFTER:g}s"


@pytest.mark.parametrize("capability", SERVICE["CapabilityBoundingSet"].split())
def test_each_capability_has_its_reason(capability: str) -> None:
    assert re.search(rf"^# {capability}: \w", TEXT, re.M)


def test_nothing_that_it_needs_is_forbidden() -> None:
    assert "/sys/fs/cgroup" in SERVICE["ReadWritePaths"].split()
    forbidding = {
        "ProtectControlGroups", "RestrictRealtime", "ProcSubset", "ProtectProc", "MemoryDenyWriteExecute",
        "PrivateNetwork", "PrivateUsers", "User", "DynamicUser", "Delegate", "MemoryHigh", "CPUQuota", "AllowedCPUs",
        "RootDirectory",
    }  # fmt: skip
    assert not forbidding & SERVICE.keys()
    families = {"AF_UNIX", "AF_NETLINK", "AF_INET", "AF_INET6"}  # D-Bus and sd_notify, hotplug, metrics
    assert families <= set(SERVICE["RestrictAddressFamilies"].split())


def test_order_at_boot() -> None:
    assert {"containerd.service", "crio.service", "docker.service"} <= set(UNIT["Unit", "After"].split())
    assert "kubelet.service" in UNIT["Unit", "Before"].split()
    assert not {("Unit", "Requires"), ("Unit", "BindsTo"), ("Unit", "Requisite")} & UNIT.keys(), "order, no need"
