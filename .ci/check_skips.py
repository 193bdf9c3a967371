"""check_skips.py JUNIT_XML ALLOWED: fails when a test was skipped for a reason that ALLOWED does not list.

ALLOWED holds one regular expression on a line, matched against the whole of "test id: reason"; lines that start with
# say why. A run of which no test is recorded fails too.
"""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path


def allowed(text: str) -> list[re.Pattern[str]]:
    lines = (line.strip() for line in text.splitlines())
    return [re.compile(line, re.DOTALL) for line in lines if line and not line.startswith("#")]


def skips(report: ElementTree.Element) -> list[str]:
    """Each skipped test as "class::name: reason"; expected failures (xfail) are not skips."""
    found = []
    for case in report.iter("testcase"):
        for skip in case.iter("skipped"):
            if skip.get("type") != "pytest.xfail":
                found.append(f"{case.get('classname')}::{case.get('name')}: {skip.get('message')}")
    return found


def main(junit: str, allow_file: str) -> int:
    try:
        report = ElementTree.parse(junit).getroot()
    except (OSError, ElementTree.ParseError) as error:
        print(f"check_skips: no test report to look at: {error}")
        return 1
    if report.find(".//testcase") is None:
        print("check_skips: the test report holds no test")
        return 1
    patterns = allowed(Path(allow_file).read_text())
    wrong = [skip for skip in skips(report) if not any(pattern.fullmatch(skip) for pattern in patterns)]
    for skip in wrong:
        print(f"check_skips: skipped, and not listed in {allow_file}: {skip}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
