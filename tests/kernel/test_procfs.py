"""procfs on this machine's /proc, with processes of our own, and on made files for what this machine does not have."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from enforcer.core.cpuset import CPUSet
from enforcer.core.errors import EnforcerError
from enforcer.kernel import procfs

LOWEST = min(os.sched_getaffinity(0))
ODD_NAME = "a) b (c\n:d"

Asked = Callable[[int], object]
ALL_OF_A_PID: list[Asked] = [
    procfs.comm,
    procfs.exe_name,
    procfs.threads,
    procfs.cpus_allowed,
    procfs.uid,
    procfs.start_time,
    procfs.cgroups,
]


@pytest.fixture
def child() -> Iterator[int]:
    """A process with an odd name, on one CPU, that waits until it is ended."""
    code = (
        f"import os, sys; open('/proc/self/comm', 'w').write({ODD_NAME!r}); os.sched_setaffinity(0, [{LOWEST}]);"
        "print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.kill()


@pytest.fixture
def gone() -> int:
    """The pid of a process that has been and is no more."""
    with subprocess.Popen(["true"]) as process:
        process.wait()
    return process.pid


def made(root: Path, name: str, content: bytes) -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return root


def test_comm_is_raw(child: int) -> None:
    assert procfs.comm(child) == ODD_NAME


def test_comm_that_is_no_text_survives(tmp_path: Path) -> None:
    name = procfs.comm(7, made(tmp_path, "7/comm", b"caf\xe9\n"))
    assert name is not None
    assert os.fsencode(name) == b"caf\xe9"


def test_start_time_is_when_it_started(child: int) -> None:
    """Also behind a name that looks like the end of the name field."""
    started = procfs.start_time(child)
    assert started is not None
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")
    assert 0 <= age < 60
    own = procfs.start_time(os.getpid())
    assert own is not None and own <= started


def test_cpus_allowed_of_a_process(child: int) -> None:
    assert procfs.cpus_allowed(child) == CPUSet((LOWEST,))


def test_cpus_allowed_of_one_thread() -> None:
    pinned, release = threading.Event(), threading.Event()
    tids: list[int] = []

    def work() -> None:
        tids.append(threading.get_native_id())
        os.sched_setaffinity(0, [LOWEST])
        pinned.set()
        release.wait(10)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert pinned.wait(10)
        assert procfs.cpus_allowed(os.getpid(), tids[0]) == CPUSet((LOWEST,))
        assert procfs.cpus_allowed(os.getpid()) == CPUSet(os.sched_getaffinity(0))
        assert set(procfs.threads(os.getpid()) or ()) >= {os.getpid(), tids[0]}
    finally:
        release.set()
        thread.join()


def test_cpus_allowed_beyond_32_cpus(tmp_path: Path) -> None:
    status = b"Name:\tx\nUid:\t0\t0\t0\t0\nCpus_allowed:\t80,00000000,00000003\nCpus_allowed_list:\t0-1,71\n"
    root = made(tmp_path, "7/task/9/status", status)
    assert str(procfs.cpus_allowed(7, 9, root)) == "0-1,71"


def test_status_longer_than_one_read(tmp_path: Path) -> None:
    """A process may be in 65536 groups."""
    groups = b" ".join(b"%d" % n for n in range(100000, 107000))
    status = b"Name:\tx\nGroups:\t" + groups + b"\nCpus_allowed:\t3\n"
    assert str(procfs.cpus_allowed(7, root=made(tmp_path, "7/status", status))) == "0-1"


def test_status_without_the_line(tmp_path: Path) -> None:
    root = made(tmp_path, "7/status", b"Name:\tx\n")
    assert procfs.cpus_allowed(7, root=root) is None


def test_uid_of_ourselves() -> None:
    assert procfs.uid(os.getpid()) == os.geteuid()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
@pytest.mark.root
def test_uid_is_the_effective_one_also_when_not_dumpable() -> None:
    """A change of the effective uid makes a process not dumpable: most of /proc/<pid> then belongs to root."""
    code = "import os, sys; os.seteuid(12345); print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            assert Path(f"/proc/{process.pid}/status").stat().st_uid == 0
            assert procfs.uid(process.pid) == 12345
        finally:
            process.kill()


def test_exe_name(child: int) -> None:
    assert procfs.exe_name(child) == Path(sys.executable).resolve().name


@pytest.mark.parametrize(("target", "name"), [("/usr/bin/runc", "runc"), ("/tmp/x y (deleted)", "x y")])
def test_exe_name_of_a_replaced_program(target: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "exe").symlink_to(target)
    assert procfs.exe_name(7, tmp_path) == name


@pytest.mark.skipif(procfs.comm(2) != "kthreadd", reason="kernel threads are not seen from this pid namespace")
def test_kernel_thread_has_a_name_and_no_executable() -> None:
    assert procfs.exe_name(2) is None
    assert procfs.threads(2) == [2]
    assert procfs.cpus_allowed(2)


@pytest.mark.parametrize("ask", ALL_OF_A_PID)
def test_process_that_is_gone_is_none(ask: Asked, gone: int) -> None:
    assert ask(gone) is None


def test_thread_that_is_gone_is_none(gone: int) -> None:
    assert procfs.cpus_allowed(os.getpid(), gone) is None


@pytest.mark.parametrize("name", ["status", "stat", "comm"])
def test_process_that_goes_between_open_and_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """/proc answers ESRCH to a read through a descriptor of a process that has gone meanwhile."""
    process = subprocess.Popen(["sleep", "60"])
    real_open = os.open

    def open_then_end(path: str, flags: int) -> int:
        fd = real_open(path, flags)
        process.kill()
        process.wait()
        return fd

    ask: dict[str, Asked] = {"status": procfs.cpus_allowed, "stat": procfs.start_time, "comm": procfs.comm}
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", open_then_end)
        assert ask[name](process.pid) is None


def test_boot_id() -> None:
    assert procfs.boot_id() == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert len(procfs.boot_id()) == 36


def test_boot_id_without_procfs(tmp_path: Path) -> None:
    with pytest.raises(EnforcerError, match="random/boot_id: not there"):
        procfs.boot_id(tmp_path)


def test_mountinfo_of_this_machine() -> None:
    mounts = {mount.mount_point: mount for mount in procfs.read_mountinfo()}
    assert mounts["/proc"].fstype == "proc"
    assert mounts["/proc"].device == f"{os.major(dev := os.stat('/proc').st_dev)}:{os.minor(dev)}"  # noqa: PTH116
    assert "rw" in mounts["/sys"].options


def test_mountinfo_lines(tmp_path: Path) -> None:
    """proc(5): escapes, none or several optional fields, the root of a bind mount, bytes that are no text."""
    lines = (
        rb"""34 31 0:31 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 /kubepods/a\040b /mnt/tab\011nl\012bs\134\043 ro,relatime shared:1 master:2 - cgroup2 none rw,nsdelegate
36 35 0:33 / /mnt/\134040 rw - tmpfs caf"""
        + b"\xe9\r\x0b rw\n"
    )
    first, second, third = procfs.read_mountinfo(made(tmp_path, "self/mountinfo", lines))
    assert (first.mount_point, first.fstype) == ("/sys/fs/cgroup/cpu,cpuacct", "cgroup")
    assert (first.mount_id, first.parent_id, first.device) == (34, 31, "0:31")
    assert first.super_options == ("rw", "cpu", "cpuacct")
    assert (second.root, second.mount_point) == ("/kubepods/a b", "/mnt/tab\tnl\nbs\\#")
    assert (second.options, second.source, second.super_options) == (("ro", "relatime"), "none", ("rw", "nsdelegate"))
    assert third.mount_point == "/mnt/\\040"
    assert os.fsencode(third.source) == b"caf\xe9\r\x0b"


@pytest.mark.parametrize(
    "line", [b"garbage", b"x 1 0:1 / / rw - t s rw", b"1 1 0:1 / / - t s rw", b"1 1 0:1 / / rw - t"]
)
def test_mountinfo_that_is_not(line: bytes, tmp_path: Path) -> None:
    with pytest.raises(EnforcerError, match="self/mountinfo: not a line of mountinfo"):
        procfs.read_mountinfo(made(tmp_path, "self/mountinfo", line + b"\n"))


def test_mountinfo_without_procfs(tmp_path: Path) -> None:
    with pytest.raises(EnforcerError, match="self/mountinfo: cannot be read: No such file"):
        procfs.read_mountinfo(tmp_path)


def test_own_cgroups_are_those_of_this_pid() -> None:
    own = procfs.own_cgroups()
    assert own == procfs.cgroups(os.getpid())
    assert all(one.path.startswith("/") for one in own)
    assert sum(one.hierarchy == 0 for one in own) <= 1


def test_cgroup_lines(tmp_path: Path) -> None:
    """cri-containerd's systemd names have colons in them."""
    content = b"""9:name=systemd:/kubepods.slice/a:cri-containerd:b
4:cpu,cpuacct:/
0::/system.slice/x.service (deleted)
"""
    read = procfs.own_cgroups(made(tmp_path, "self/cgroup", content))
    assert read == [
        procfs.CgroupMembership(9, ("name=systemd",), "/kubepods.slice/a:cri-containerd:b"),
        procfs.CgroupMembership(4, ("cpu", "cpuacct"), "/"),
        procfs.CgroupMembership(0, (), "/system.slice/x.service (deleted)"),
    ]


@pytest.mark.parametrize("line", [b"garbage", b"1:cpu", b":cpu:/", b"x:cpu:/", b"1:cpu:no-slash"])
def test_cgroup_lines_that_are_not(line: bytes, tmp_path: Path) -> None:
    with pytest.raises(EnforcerError, match="self/cgroup: wanted hierarchy:controllers:path, found"):
        procfs.own_cgroups(made(tmp_path, "self/cgroup", line))


def test_own_cgroups_without_procfs(tmp_path: Path) -> None:
    with pytest.raises(EnforcerError, match="self/cgroup: not there"):
        procfs.own_cgroups(tmp_path)
