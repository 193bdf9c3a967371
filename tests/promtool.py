"""Gets promtool, which checks and tests the alert rules: `python -m tests.promtool` from the repository's root.

Debian has it in the package prometheus only, which starts a server and brings 96 MB; so the package is downloaded and
promtool alone taken out of it, into the cache of the tests.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

from tests.vm.apt import PrepareError, checked
from tests.vm.artifacts import default_cache

PACKAGE = "prometheus"


def find(cache: Path | None = None) -> Path | None:
    """promtool on the PATH or in the cache; None when there is none."""
    on_path = shutil.which("promtool")
    if on_path:
        return Path(on_path)
    cached = (cache or default_cache()) / "promtool"
    if not cached.exists():
        return None
    if os.access(cached, os.W_OK):
        cached.touch()  # what nobody uses is removed from the cache
    return cached


def fetch(cache: Path) -> Path:
    """Takes promtool out of the machine's own Debian or Ubuntu package; raises PrepareError."""
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="cpuset-enforcer-promtool.") as folder:
        work = Path(folder)
        try:
            _download(work)
        except PrepareError:
            checked(["apt-get", "-qq", "update"])
            _download(work)
        (package,) = work.glob("*.deb")
        checked(["dpkg-deb", "-x", package.name, "files"], cwd=work)
        half = cache / "promtool.half"
        shutil.move(work / "files/usr/bin/promtool", half)
        return half.rename(cache / "promtool")


def _download(work: Path) -> None:
    checked(["apt-get", "-qq", "-o", "APT::Sandbox::User=root", "download", PACKAGE], cwd=work)


def main() -> int:
    """The command; exit code 1 with one clear message when it cannot be had."""
    try:
        found = find() or fetch(default_cache())
    except PrepareError as problem:
        print(f"promtool: {problem}", file=sys.stderr)
        return 1
    print(f"promtool: {found}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
