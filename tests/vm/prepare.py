"""Makes what the guests of the tests are booted from: `python -m tests.vm.prepare` from the repository's root.

Needs root on Debian with the packages in HOST_PACKAGES and network access to the machine's own Debian mirror.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from .apt import PrepareError
from .artifacts import Artifacts, build_image, build_kernel, build_probe, default_cache

# Debian packages of the host; virtiofsd comes with bookworm's qemu-system-common.
HOST_PACKAGES: Final = (
    *("qemu-system-x86", "qemu-system-common", "seabios", "mmdebstrap", "e2fsprogs", "gcc", "libc6-dev"),
)
_TOOLS: Final = ("mmdebstrap", "mkfs.ext4", "gcc", "dpkg", "apt-get")


def missing_tools() -> list[str]:
    """The programs that preparing needs and this machine lacks."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    return [tool for tool in _TOOLS if not shutil.which(tool, path=path)]


def prepare(artifacts: Artifacts, *, refresh: bool = False, say: Callable[[str], None] = print) -> None:
    """Builds every artifact that is not in the cache (`refresh`: all of them); raises PrepareError."""
    _check_machine()
    artifacts.cache.mkdir(parents=True, exist_ok=True)
    steps: list[tuple[str, Path, Callable[[Path, Path], object]]] = [
        ("kernel", artifacts.kernel, build_kernel),
        ("probe", artifacts.probe, build_probe),
        ("systemd image (about a minute)", artifacts.image, build_image),
    ]
    with _only_one(artifacts.cache):
        for name, target, build in steps:
            if target.exists() and not refresh:
                say(f"{name}: {target} is up to date")
            else:
                _build(name, target, build, say)
        artifacts.touch()
        for old in artifacts.stale(time.time()):
            say(f"removing {old}: not used for a long time")
            old.unlink()


def _check_machine() -> None:
    if os.geteuid() != 0:
        raise PrepareError("preparing the guests needs root: mmdebstrap makes a root file system with its owners")
    if missing := missing_tools():
        raise PrepareError(f"not installed: {', '.join(missing)}. Run: apt-get install {' '.join(HOST_PACKAGES)}")


def _build(name: str, target: Path, build: Callable[[Path, Path], object], say: Callable[[str], None]) -> None:
    say(f"{name}: making {target}")
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="cpuset-enforcer-prepare.") as work:
        Path(work).chmod(0o755)
        half = target.with_name(target.name + ".half")
        result = build(half, Path(work))
        for file in (half, half.with_name(half.name + ".release")):
            if file.exists():
                file.rename(file.with_name(file.name.replace(".half", "")))
    detail = f" ({result})" if result else ""
    say(f"{name}: done in {time.monotonic() - started:.0f} s{detail}")


@contextlib.contextmanager
def _only_one(cache: Path) -> Iterator[None]:
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main() -> int:
    """The command; exit code 1 with one clear message when something cannot be made."""
    parser = argparse.ArgumentParser(prog="python -m tests.vm.prepare", description=__doc__)
    parser.add_argument("--cache", type=Path, default=default_cache(), help="default: %(default)s")
    parser.add_argument("--refresh", action="store_true", help="make all anew, with the mirror's newest packages")
    options = parser.parse_args()
    try:
        prepare(Artifacts(options.cache), refresh=options.refresh)
    except PrepareError as problem:
        print(f"prepare: {problem}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
