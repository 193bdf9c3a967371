"""What hostile containers and unlucky admins do to the agent on this machine's real cgroups."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from enforcer.kernel.cgroupfs import CgroupFS
from enforcer.mimic import MimicNode
from enforcer.mimic.container import MimicContainer
from tests.kernel.agent_process import AgentProcess, cpus
from tests.kernel.conftest import wait_until
from tests.kernel.test_agent import Start, agent, best, fs, node, one_cpu, settles  # noqa: F401 - fixtures

pytestmark = pytest.mark.root


@contextmanager
def inside(folder: str) -> Iterator[None]:
    """Works in a directory, as a process in a container does: no path of it is longer than it has to be."""
    before = os.open(".", os.O_RDONLY)
    os.chdir(folder)
    try:
        yield
    finally:
        os.fchdir(before)
        os.close(before)


@contextmanager
def nest(fs: CgroupFS, where: MimicContainer, *names: str) -> Iterator[None]:  # noqa: F811
    """Cgroups that a container makes, each inside the one before, with a copy of its set on v1."""
    made: list[str] = []
    try:
        with inside(fs.cpuset_dir(where.path)):
            for name in names:
                os.mkdir(name)
                made.append(name)
                os.chdir(name)
                for file in ("cpuset.cpus", "cpuset.mems") if fs.version == 1 else ():
                    Path(file).write_text(Path("..", file).read_text())
        yield
    finally:
        with inside(fs.cpuset_dir(where.path)):
            for name in made:
                os.chdir(name)
            for name in reversed(made):
                os.chdir("..")
                os.rmdir(name)


def test_cgroups_nested_below_the_longest_path_end_nobody(node: MimicNode, agent: Start, fs: CgroupFS) -> None:  # noqa: F811
    """Their paths cannot be given to any call, nor does readlink(2) name them to fanotify's reader."""
    running = agent()
    hostile, other = best(node), best(node)
    with nest(fs, hostile, *["x" * 250] * 20):
        _, owner = one_cpu(node)
        settles(owner, "1", "the owner")
        settles(other, "0", "the others")
        assert running.is_alive()
        assert max(map(len, running.log().splitlines())) < 2000


def test_cgroups_nested_deep_are_narrowed(node: MimicNode, agent: Start, fs: CgroupFS) -> None:  # noqa: F811
    agent()
    deep = best(node)
    with nest(fs, deep, *["n"] * 50):
        _, owner = one_cpu(node)
        settles(owner, "1", "the owner")
        settles(deep, "0", "the one with cgroups inside")


def test_names_do_not_forge_log_lines(node: MimicNode, agent: Start, fs: CgroupFS) -> None:  # noqa: F811
    running = agent()
    hostile = best(node)
    # The kernel takes all but "\n" and "/" in a name, and any 15 bytes for a process.
    with nest(fs, hostile, "\r\x0bERROR leaving enforce: forged\u2028ERROR forged\x1b[2J", *["y" * 250] * 20):
        _, owner = one_cpu(node)
        settles(owner, "1", "the owner")
        writer = subprocess.Popen(
            ["bash", "-c", "printf '\\nERROR forged\\e[31m' >/proc/self/comm; read; echo 0-1 >cpuset.cpus; read"],
            cwd=fs.cpuset_dir(owner.path), stdin=subprocess.PIPE,
        )  # fmt: skip
        try:
            assert writer.stdin is not None
            writer.stdin.write(b"\n")
            writer.stdin.flush()
            running.wait_for("drift pod")
        finally:
            writer.kill()
            writer.communicate()
        time.sleep(0.2)
    lines = running.log().splitlines()
    assert not [line for line in lines if line.startswith("ERROR")]
    assert "\x1b" not in running.log()


def test_thousand_cgroups_in_one_container_delay_no_owner(node: MimicNode, agent: Start, fs: CgroupFS) -> None:  # noqa: F811
    running = agent()
    node.pace = 0
    hostile = best(node)
    names = [f"n{number}" for number in range(1000)]
    try:
        with inside(fs.cpuset_dir(hostile.path)):
            for name in names:
                os.mkdir(name)
                for file in ("cpuset.cpus", "cpuset.mems") if fs.version == 1 else ():
                    Path(name, file).write_text(Path(file).read_text())
        assert running.is_alive()
        _, owner = one_cpu(node)
        wait_until(lambda: owner.affinity() == cpus("1"), "the owner does not wait for the thousand", 2)
        settles(hostile, "0", "the one with a thousand cgroups inside")
    finally:
        with inside(fs.cpuset_dir(hostile.path)):
            for name in names:
                if os.path.isdir(name):
                    os.rmdir(name)


def test_root_that_goes_and_comes_again(fs: CgroupFS, tmp_path: Path) -> None:  # noqa: F811
    """Made level by level after the agent's start, removed with all that is in it, and made again."""
    root = f"/ce-test-attack-{os.getpid()}/deep/kubepods"
    running = AgentProcess(tmp_path, root).start()
    try:
        for _ in range(3):
            with MimicNode(fs, root, pace=0) as made:
                if fs.version == 1:
                    for path in ("/besteffort", "/burstable", "", "/..", "/../.."):
                        fs.write_cpus(os.path.normpath(root + path), cpus("0-1"))
                other, (_, owner) = best(made), one_cpu(made)
                settles(owner, "1", "the owner")
                settles(other, "0", "the other")
        wait_until(lambda: not running.state().assignments and not running.state().held, "nothing is kept")
    finally:
        assert running.end() == 0
    assert "Traceback" not in running.log()


def test_events_lost_while_the_agent_stood_still(node: MimicNode, agent: Start, fs: CgroupFS) -> None:  # noqa: F811
    running = agent()
    node.pace = 0
    noisy = best(node)
    first, owner = one_cpu(node)
    settles(owner, "1", "owner")
    os.kill(running.pid, signal.SIGSTOP)
    try:
        with inside(fs.cpuset_dir(noisy.path)):
            for number in range(10_000):  # more than fs.inotify.max_queued_events, each with a name of its own
                os.mkdir(f"q{number}")
                os.rmdir(f"q{number}")
        late = best(node)
        first.remove()
        _, owner = one_cpu(node, "next")
    finally:
        os.kill(running.pid, signal.SIGCONT)
    settles(owner, "1", "the next owner")
    settles(late, "0", "one that was born meanwhile")


def test_full_disk_under_the_state_file(node: MimicNode, agent: Start, tmp_path: Path) -> None:  # noqa: F811
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare for a small disk of its own")
    state = tmp_path / "state"
    state.mkdir()
    mount = f'mount -t tmpfs -o size=16k none {state} && exec "$@"'
    running = agent(("unshare", "-m", "sh", "-c", mount, "sh"))
    fill = Path(f"/proc/{running.pid}/root{state}/fill")
    with fill.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(512))
    _, owner = one_cpu(node)
    settles(owner, "1", "the owner")
    running.wait_for("No space left on device")
    fill.unlink()
    running.wait_for("is written again")
    assert running.log().count("No space left on device") == 1
