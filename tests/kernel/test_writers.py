"""WriterWatch on this machine's real cpuset hierarchy: it names the process that wrote, and only others."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from enforcer.core.cpuset import CPUSet
from enforcer.core.errors import CannotWorkHereError
from enforcer.kernel.writers import Write, WriterWatch
from tests.kernel.conftest import TmpCgroup

pytestmark = pytest.mark.root

# A writer that stays until its standard input ends, so that its name can be looked up.
WRITER = (
    "import os, sys; open('/proc/self/comm', 'w').write('rival')\n"
    "for line in sys.stdin:\n"
    "    file, _, text = line.strip().partition('=')\n"
    "    fd = os.open(file, os.O_WRONLY); os.write(fd, text.encode()); os.close(fd); print('done', flush=True)\n"
)


class Rival:
    """Another process that writes when told to."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-S", "-c", WRITER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self.process.pid

    def write(self, file: str, text: str) -> None:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(f"{file}={text}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    def leave(self) -> None:
        self.process.communicate(timeout=10)


@pytest.fixture
def rival() -> Iterator[Rival]:
    made = Rival()
    yield made
    if made.process.returncode is None:
        made.leave()


@pytest.fixture
def writers(tmp_cgroup: TmpCgroup) -> Iterator[WriterWatch]:
    with closing(WriterWatch(tmp_cgroup.fs.cpuset_root)) as made:
        yield made


def drained(writers: WriterWatch, tmp_cgroup: TmpCgroup) -> list[Write]:
    """What was written below the test's own cgroup; others may be at work on this machine."""
    return [write for write in writers.drain() if (write.path or "").startswith(tmp_cgroup.path)]


def descriptors() -> list[str]:
    return sorted(os.listdir("/proc/self/fd"))


def test_the_writer_is_named(writers: WriterWatch, tmp_cgroup: TmpCgroup, rival: Rival) -> None:
    before = time.monotonic()
    # in a cgroup made after the mark was set
    pod = tmp_cgroup.mkdir("/pod")
    rival.write(tmp_cgroup.fs.cpuset_dir(pod) + "/cpuset.cpus", "0")
    assert select.select([writers], [], [], 5)[0]
    (write,) = drained(writers, tmp_cgroup)
    assert write.path == pod
    assert (write.file, write.pid, write.comm) == ("cpuset.cpus", rival.pid, "rival")
    assert before <= write.when <= time.monotonic()
    assert writers.who(pod, before) == f"pid {rival.pid} (rival)"


def test_who_asks_for_the_last_writer_of_this_cgroup_since_then(
    writers: WriterWatch, tmp_cgroup: TmpCgroup, rival: Rival
) -> None:
    start = time.monotonic()
    pods = [tmp_cgroup.mkdir("/pod1"), tmp_cgroup.mkdir("/pod2")]
    directories = [tmp_cgroup.fs.cpuset_dir(pod) for pod in pods]
    other = Rival()
    try:
        rival.write(directories[0] + "/cpuset.cpus", "0")
        assert writers.who(pods[0], start) == f"pid {rival.pid} (rival)"  # takes it from the queue by itself
        assert writers.who(pods[1], start) is None
        other.write(directories[0] + "/cpuset.cpus", "0")
        assert writers.who(pods[0], start) == f"pid {other.pid} (rival)"
        assert writers.who(pods[0], time.monotonic()) is None
        assert writers.who(pods[0], start, "cpuset.mems") is None
        assert [write.pid for write in drained(writers, tmp_cgroup)] == [rival.pid, other.pid], "still to be drained"
    finally:
        other.leave()


def test_a_writer_that_has_exited_is_still_a_pid(writers: WriterWatch, tmp_cgroup: TmpCgroup, rival: Rival) -> None:
    start = time.monotonic()
    rival.write(tmp_cgroup.fs.cpuset_dir(tmp_cgroup.path) + "/cpuset.cpus", "0")
    rival.leave()
    assert writers.who(tmp_cgroup.path, start) == f"pid {rival.pid} (exited)"


def test_own_writes_and_other_files_are_passed_over(
    writers: WriterWatch, tmp_cgroup: TmpCgroup, rival: Rival
) -> None:
    directory = tmp_cgroup.fs.cpuset_dir(tmp_cgroup.path)
    tmp_cgroup.fs.write_cpus(tmp_cgroup.path, CPUSet([0]))
    file, text = tmp_cgroup.harmless
    rival.write(f"{directory}/{file}", text)
    assert drained(writers, tmp_cgroup) == []


def test_a_cgroup_that_goes_before_the_drain_is_no_error(
    writers: WriterWatch, tmp_cgroup: TmpCgroup, rival: Rival
) -> None:
    start = time.monotonic()
    pods = [tmp_cgroup.mkdir(f"/pod{n}") for n in range(3)]
    for pod in pods:
        rival.write(tmp_cgroup.fs.cpuset_dir(pod) + "/cpuset.cpus", "0")
    tmp_cgroup.rmdir(pods[1])
    assert writers.who(pods[2], start) == f"pid {rival.pid} (rival)", "what stands behind it in the queue is seen"
    assert [write.path for write in drained(writers, tmp_cgroup)] == [pods[0], pods[2]]
    assert writers.who(pods[1], start) is None


def test_a_write_is_remembered_after_its_cgroup_has_gone(
    writers: WriterWatch, tmp_cgroup: TmpCgroup, rival: Rival
) -> None:
    start = time.monotonic()
    pod = tmp_cgroup.mkdir("/pod")
    rival.write(tmp_cgroup.fs.cpuset_dir(pod) + "/cpuset.cpus", "0")
    writers.drain()
    tmp_cgroup.rmdir(pod)
    assert writers.who(pod, start) == f"pid {rival.pid} (rival)"


def test_descriptors_are_closed(writers: WriterWatch, tmp_cgroup: TmpCgroup, rival: Rival) -> None:
    directory = tmp_cgroup.fs.cpuset_dir(tmp_cgroup.path)
    before = descriptors()
    for n in range(300):
        file, text = tmp_cgroup.harmless if n % 2 else ("cpuset.cpus", "0")
        rival.write(f"{directory}/{file}", text)
        tmp_cgroup.fs.write_cpus(tmp_cgroup.path, CPUSet([0]))
        if n % 7 == 0:
            writers.drain()
    writers.drain()
    assert descriptors() == before
    writers.close()
    writers.close()
    assert len(descriptors()) == len(before) - 1


def test_without_the_right_it_says_what_is_missing(tmp_cgroup: TmpCgroup) -> None:
    script = (
        "import os, sys; from enforcer.kernel.writers import *\n"
        "os.setuid(65534)\n"
        "try: WriterWatch(sys.argv[1])\n"
        "except CannotWorkHereError as error: print(error)"
    )
    command = [sys.executable, "-c", script, tmp_cgroup.fs.cpuset_root]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    assert tmp_cgroup.fs.cpuset_root in done.stdout
    assert "CAP_SYS_ADMIN" in done.stdout


def test_a_root_that_is_not_there_leaves_no_descriptor() -> None:
    before = descriptors()
    with pytest.raises(CannotWorkHereError, match="/sys/nobody.*No such file"):
        WriterWatch("/sys/nobody")
    assert descriptors() == before
