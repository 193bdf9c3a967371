"""The alert rules: what each must carry, and that they ask for metrics which the agent has.

tests/kernel/test_shipped_files.py runs promtool on them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from enforcer.cli import CANNOT, USAGE
from enforcer.metrics import families
from enforcer.tally import Tally

FOLDER = Path(__file__).parents[2] / "systemd" / "alerts"
SERIES = re.compile(r"\bcpuset_enforcer_\w+")


def rules(name: str = "cpuset-enforcer.rules.yml") -> dict[str, dict[str, Any]]:
    document = yaml.safe_load((FOLDER / name).read_text())
    return {rule["alert"]: rule for group in document["groups"] for rule in group["rules"]}


RULES = rules()


def exported() -> set[str]:
    """The names of all series that a running agent can have."""
    tally = Tally()
    for counter in (tally.writes, tally.write_errors, tally.drift, tally.decisions, tally.passes):
        tally.add(counter, "x")
    figures = {"cpus": {"shared": 1}, "containers": {"unsatisfied": 1}, "pods": {"guaranteed": 1}}
    document = {"figures": figures, "tally": tally.to_document()}
    return {sample.name for family in families(document, 1.0) for sample in family.samples}


def test_what_is_watched() -> None:
    assert set(RULES) == {
        "CpusetEnforcerDown", "CpusetEnforcerAbsent", "CpusetEnforcerSilent", "CpusetEnforcerUnsatisfied",
        "CpusetEnforcerDrift", "CpusetEnforcerConflict",
    }  # fmt: skip


@pytest.mark.parametrize("name", RULES)
def test_each_says_how_bad_it_is_and_what_to_do(name: str) -> None:
    rule = RULES[name]
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert set(rule["annotations"]) == {"summary", "description", "action"}
    assert all(text.strip() for text in rule["annotations"].values())
    assert re.fullmatch(r"\d+m", rule["for"]), "one bad scrape is no alert"
    if name != "CpusetEnforcerAbsent":
        assert "{{ $labels.instance }}" in rule["annotations"]["summary"], "which node?"


@pytest.mark.parametrize("name", RULES)
def test_each_asks_for_what_the_agent_exports(name: str) -> None:
    used = set(SERIES.findall(RULES[name]["expr"]))
    assert used <= exported()
    assert used or 'up{job="cpuset-enforcer"}' in RULES[name]["expr"]


def test_the_tests_of_the_rules_feed_what_the_agent_exports() -> None:
    text = (FOLDER / "cpuset-enforcer.test.yml").read_text()
    assert set(SERIES.findall(text)) <= exported()
    tested = set(re.findall(r"CpusetEnforcer\w+", text))
    assert tested == set(RULES)


def test_exit_codes_in_the_advice() -> None:
    assert f"Exit code {USAGE}: mend the config" in RULES["CpusetEnforcerDown"]["annotations"]["action"]
    assert f"Exit code {CANNOT}: it must not or cannot" in RULES["CpusetEnforcerDown"]["annotations"]["action"]
