"""The exporter beside a real agent: it comes back, goes with the agent, and its page is as promtool wants it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import promtool
from tests.kernel.agent_process import AgentProcess
from tests.kernel.conftest import wait_until

pytestmark = pytest.mark.root


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


class Served:
    """An agent in mode audit with its metrics on a port of its own."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        metrics = {"metrics-listen": f"127.0.0.1:{self.port}"}
        self.agent = AgentProcess(folder, f"/ce-test-{os.getpid()}/kubepods", mode="audit", **metrics)

    def page(self) -> str:
        """The page; "" while nobody answers."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=5) as answer:
                return str(answer.read().decode())
        except (urllib.error.URLError, ConnectionError):
            return ""

    def wait(self) -> str:
        """The page, once it tells the agent's state."""
        wait_until(lambda: "agent_state_found 1.0" in self.page(), "the metrics are served", 20)
        return self.page()

    def helpers(self) -> list[int]:
        """The agent's children, zombies among them."""
        return [int(pid) for pid in Path(f"/proc/{self.agent.pid}/task/{self.agent.pid}/children").read_text().split()]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    one = Served(tmp_path)
    one.agent.start()
    yield one
    one.agent.end()


def test_promtool_has_nothing_to_say_about_the_page(served: Served) -> None:
    tool = promtool.find()
    if tool is None:
        pytest.skip("no promtool on this machine: python -m tests.promtool gets it (Debian: package prometheus)")
    page = served.wait()
    checked = subprocess.run([tool, "check", "metrics"], input=page, capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


def test_it_comes_back_and_leaves_no_zombie(served: Served) -> None:
    served.wait()
    for _ in range(2):
        (pid,) = served.helpers()
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda pid=pid: pid not in served.helpers(), "the dead one is reaped", 1)  # type: ignore[misc]
        served.wait()
    assert served.agent.log().count("the exporter of the metrics ended with -9") == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_it_goes_with_the_agent_and_the_next_one_has_the_port(served: Served, number: signal.Signals) -> None:
    served.wait()
    (pid,) = served.helpers()
    served.agent.end(number)
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), "the exporter ends", 5)
    served.agent.start()
    served.wait()
    assert "cannot listen" not in served.agent.log()


def test_a_port_that_somebody_has_is_told_and_taken_later(tmp_path: Path) -> None:
    served = Served(tmp_path)
    with socket.create_server(("127.0.0.1", served.port)):
        served.agent.start()
        served.agent.wait_for("cannot listen on 127.0.0.1", 20)
        served.agent.wait_for("ended with 3; started again in 1 s", 20)
    try:
        served.wait()
    finally:
        served.agent.end()


def test_it_is_an_ordinary_process_and_imports_nothing_from_where_it_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sudo cpuset-enforcer run, in a folder of anybody's."""
    for name in ("enforcer.py", "prometheus_client.py"):
        (tmp_path / name).write_text(f"open({str(tmp_path / 'imported')!r}, 'w')\n")
    monkeypatch.chdir(tmp_path)
    served = Served(tmp_path)
    served.agent.launch(("sh", "-c", 'exec "$0" -P "$@"'))
    try:
        served.wait()
        (pid,) = served.helpers()
        assert os.sched_getscheduler(pid) == os.SCHED_OTHER
        assert not (tmp_path / "imported").exists()
    finally:
        served.agent.end()


def test_a_scrape_that_never_ends_does_not_keep_the_agent_from_stopping(served: Served) -> None:
    served.wait()
    idle = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(50)]
    began = time.monotonic()
    assert served.agent.end() == 0
    assert time.monotonic() - began < 2
    for one in idle:
        one.close()
