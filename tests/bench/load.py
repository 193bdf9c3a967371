"""What goes on beside a measurement: cores that are kept busy, scrapes, resizes. Each is ended by its own pid."""

from __future__ import annotations

import http.client
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from enforcer.mimic.process import Process
from tests.bench.made import MadeNode

_PAUSE = 0.005


@contextmanager
def busy_cores(on: bool) -> Iterator[None]:
    """One process on every CPU of this machine that eats it, at nice 0."""
    with ExitStack() as stack:
        for cpu in os.sched_getaffinity(0) if on else ():
            spinner = Process("spin", spin=True)
            stack.callback(spinner.end)
            os.sched_setaffinity(spinner.pid, {cpu})
            spinner.start_user_code()
            spinner.recorded(5)
        yield


@contextmanager
def beside(*arguments: str) -> Iterator[None]:
    """Another process of this module, started and ended."""
    child = subprocess.Popen([sys.executable, "-m", "tests.bench.load", *arguments], stdin=subprocess.PIPE)
    try:
        yield
    finally:
        child.terminate()
        child.communicate()


@contextmanager
def resizes(node: MadeNode, containers: Sequence[str]) -> Iterator[None]:
    """Owners get one CPU more and one less, all the time."""
    files = [str(Path(node.fs.cpu_dir(path), "cpu.max")) for path in containers]
    with beside("resize", *files):
        yield


@contextmanager
def scrapes(port: int) -> Iterator[None]:
    """/metrics is asked for again as soon as it has answered."""
    with beside("scrape", str(port)):
        yield


def get_metrics(port: int) -> bytes:
    """One scrape; raises OSError where nobody listens."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/metrics")
        return connection.getresponse().read()
    finally:
        connection.close()


def _resize(files: Sequence[str]) -> None:
    for milli in _for_ever((300000, 200000)):
        for file in files:
            with Path(file).open("r+") as out:
                out.write(f"{milli} 100000\n")
            time.sleep(_PAUSE)


def _for_ever(values: Sequence[int]) -> Iterator[int]:
    while True:
        yield from values


def _main(what: str, *arguments: str) -> None:
    if what == "resize":
        _resize(arguments)
    while True:
        with suppress(OSError, http.client.HTTPException):
            get_metrics(int(arguments[0]))
        time.sleep(_PAUSE)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        _main(*sys.argv[1:])
