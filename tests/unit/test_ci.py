"""What .ci/run builds on: the check of skips, and the choice of tests."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[2]
REPORT = '<testsuites><testsuite name="pytest">{}</testsuite></testsuites>'
PASSED = '<testcase classname="tests.unit.test_x" name="test_good"/>'
SKIPPED = (
    '<testcase classname="tests.vm.test_y" name="test_boot">'
    '<skipped type="pytest.skip" message="no qemu">file</skipped></testcase>'
)
XFAILED = SKIPPED.replace("pytest.skip", "pytest.xfail")

Check = Callable[..., int]


@pytest.fixture
def check(tmp_path: Path) -> Check:
    main = runpy.run_path(str(ROOT / ".ci" / "check_skips.py"))["main"]

    def run(cases: str, allowed: str) -> int:
        (tmp_path / "junit.xml").write_text(REPORT.format(cases))
        (tmp_path / "allowed").write_text(allowed)
        code: int = main(str(tmp_path / "junit.xml"), str(tmp_path / "allowed"))
        return code

    return run


def test_a_skip_that_is_not_listed_fails_and_is_named(check: Check, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(PASSED + SKIPPED, "# why\n\n.*other reason\n") == 1
    assert "tests.vm.test_y::test_boot: no qemu" in capsys.readouterr().out


def test_a_listed_skip_passes_only_when_the_whole_of_it_fits(check: Check) -> None:
    assert check(PASSED + SKIPPED, "tests.vm.*: no qemu\n") == 0
    assert check(PASSED + SKIPPED, "no qemu\n") == 1


def test_an_expected_failure_is_no_skip(check: Check) -> None:
    assert check(PASSED + XFAILED, "") == 0


def test_a_run_without_tests_or_report_fails(check: Check, tmp_path: Path) -> None:
    assert check("", "") == 1
    main = runpy.run_path(str(ROOT / ".ci" / "check_skips.py"))["main"]
    assert main(str(tmp_path / "absent.xml"), str(tmp_path / "allowed")) == 1


def test_the_allowed_list_of_this_repository_can_be_read(check: Check) -> None:
    assert check(PASSED, (ROOT / "tests" / "allowed_skips.txt").read_text()) == 0


def test_long_tests_run_only_when_asked_for(pytester: pytest.Pytester) -> None:
    pytester.makeconftest((ROOT / "tests" / "conftest.py").read_text())
    pytester.makeini("[pytest]\nmarkers =\n    long\n    root\n")
    pytester.makepyfile("import pytest\n@pytest.mark.long\ndef test_a(): pass\ndef test_b(): pass\n")
    pytester.runpytest_inprocess().assert_outcomes(passed=1, deselected=1)
    pytester.runpytest_inprocess("--long").assert_outcomes(passed=2)
    pytester.runpytest_inprocess("-m", "long").assert_outcomes(passed=1, deselected=1)
