"""The demo and the mimic on cgroup v2, with 8 CPUs, SMT and two NUMA nodes: the demo's richer scenes."""

from __future__ import annotations

import argparse

import pytest

from enforcer import demo
from tests.kernel.test_mimic import (  # noqa: F401
    fs,
    node,
    test_close_leaves_nothing,
    test_cpus_in_the_spec_are_there_from_the_start,
    test_failed_start_is_cleaned_up,
    test_figures_are_the_kubelets,
    test_first_instruction_tells_where_it_ran,
    test_names_are_the_kubelets,
    test_resize_restart_and_removal,
)

pytestmark = pytest.mark.guest("plain")


def test_demo_holds_on_8_cpus(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """At a pace for an emulated machine, in which runc would be slower too."""
    monkeypatch.setattr(demo, "PACE", 15.0)
    monkeypatch.setattr("enforcer.demo.stage._PATIENCE", 20.0)
    monkeypatch.setattr("enforcer.demo.scenes._REPAIRED_WITHIN", 10.0)
    code = demo.run_demo(argparse.Namespace(json=False))
    said = capsys.readouterr().out
    assert "FAILED" not in said
    assert code == 0, said
    for words in (
        "db has 2 CPUs of its own", "queue has 1 CPU of its own", "late has 4 CPUs of its own", "late grows from",
        "And it shrinks again", "checks, all held",
    ):  # fmt: skip
        assert words in said, said
