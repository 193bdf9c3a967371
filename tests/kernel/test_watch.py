"""Watcher on this machine's real cpuset hierarchy: nothing missed, nothing stale, limits told by name."""

from __future__ import annotations

import ctypes
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from errno import EMFILE, ENOSPC
from pathlib import Path

import pytest

from enforcer.core.errors import EnforcerError
from enforcer.kernel import watch
from enforcer.kernel.watch import Event, Kind, Watcher
from tests.kernel.conftest import TmpCgroup

pytestmark = pytest.mark.root


@pytest.fixture
def watcher() -> Iterator[Watcher]:
    with closing(Watcher()) as made:
        yield made


@pytest.fixture
def top(tmp_cgroup: TmpCgroup) -> str:
    """The directory of the test's own cgroup in the cpuset hierarchy."""
    return tmp_cgroup.fs.cpuset_dir(tmp_cgroup.path)


def queued(watcher: Watcher) -> bool:
    return bool(select.select([watcher], [], [], 0)[0])


@pytest.fixture
def harmless(tmp_cgroup: TmpCgroup) -> str:
    """The name of a file of every cgroup, to which `touch` writes."""
    return tmp_cgroup.harmless[0]


def touch(file: str) -> None:
    """Writes what changes nothing."""
    write(file, "max" if file.endswith(".depth") else "0")


def write(file: str, text: str) -> None:
    """As systemd and runc write: no O_TRUNC."""
    fd = os.open(file, os.O_WRONLY)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def rename(old: str, new: str) -> None:
    try:
        os.rename(old, new)
    except PermissionError:
        pytest.skip("cgroup v2 allows no renaming")


def kernel_watches(watcher: Watcher) -> int:
    """How many watches the kernel holds for it: what counts against max_user_watches."""
    return Path(f"/proc/self/fdinfo/{watcher.fileno()}").read_text().count("inotify wd:")


def test_a_cgroup_that_comes_and_goes_is_told_by_its_parent(watcher: Watcher, top: str) -> None:
    assert watcher.add(top)
    os.mkdir(top + "/pod")
    assert watcher.drain() == [Event(Kind.CREATED, top, "pod")]
    os.rmdir(top + "/pod")
    assert watcher.drain() == [Event(Kind.DELETED, top, "pod")]
    assert watcher.drain() == []


def test_a_write_is_told_once_though_it_was_many(watcher: Watcher, top: str) -> None:
    watcher.add(top)
    for _ in range(20):
        write(top + "/cpuset.cpus", "0")
        write(top + "/cpuset.mems", "0")
    assert watcher.drain() == [Event(Kind.MODIFIED, top, "cpuset.cpus"), Event(Kind.MODIFIED, top, "cpuset.mems")]


def test_own_reads_are_not_told(watcher: Watcher, top: str, tmp_cgroup: TmpCgroup) -> None:
    watcher.add(top)
    tmp_cgroup.fs.read_cpus(tmp_cgroup.path)
    tmp_cgroup.fs.children(tmp_cgroup.path)
    assert not queued(watcher)


def test_files_not_asked_for_are_not_told(top: str) -> None:
    with closing(Watcher(files={"cpuset.cpus"})) as watcher:
        watcher.add(top)
        write(top + "/cpuset.mems", "0")
        write(top + "/cpuset.cpus", "0")
        os.mkdir(top + "/pod")
        assert watcher.drain() == [Event(Kind.MODIFIED, top, "cpuset.cpus"), Event(Kind.CREATED, top, "pod")]


def test_a_directory_that_is_not_there_is_no_error(watcher: Watcher, top: str) -> None:
    assert watcher.add(top + "/nobody") is False
    assert watcher.add_and_list(top + "/nobody") is None
    assert watcher.add(top + "/cpuset.cpus") is False, "a file is no directory"
    assert len(watcher) == 0


def test_a_removed_directory_leaves_no_watch_behind(watcher: Watcher, top: str) -> None:
    # before kernel 7 its watch lives on, and counts, until it is ended by hand
    watcher.add(top)
    for n in range(50):
        os.mkdir(f"{top}/pod{n}")
        os.mkdir(f"{top}/pod{n}/c")
        watcher.add(f"{top}/pod{n}")
        watcher.add(f"{top}/pod{n}/c")
    assert len(watcher) == kernel_watches(watcher) == 101
    for n in range(50):
        os.rmdir(f"{top}/pod{n}/c")
        os.rmdir(f"{top}/pod{n}")
    kinds = [event.kind for event in watcher.drain()]
    assert kinds.count(Kind.DELETED) == 100
    watcher.drain()
    assert len(watcher) == kernel_watches(watcher) == 1


def test_children_are_forgotten_with_their_parent_when_only_its_removal_is_told(watcher: Watcher, top: str) -> None:
    os.makedirs(top + "/pod/c")
    watcher.add(top)
    watcher.add(top + "/pod/c")  # and not the pod: nobody will tell that c goes
    os.rmdir(top + "/pod/c")
    os.rmdir(top + "/pod")
    assert Event(Kind.DELETED, top, "pod") in watcher.drain()
    watcher.drain()
    assert len(watcher) == kernel_watches(watcher) == 1


def test_made_anew_before_the_drain_and_added_again_is_alive(watcher: Watcher, top: str, harmless: str) -> None:
    pod = top + "/pod"
    watcher.add(top)
    os.mkdir(pod)
    watcher.add(pod)
    watcher.drain()
    os.rmdir(pod)
    os.mkdir(pod)
    assert watcher.add(pod)  # a rescan came first; DELETE of the old one still waits in the queue
    assert watcher.drain() == [Event(Kind.DELETED, top, "pod"), Event(Kind.CREATED, top, "pod")]
    touch(pod + "/" + harmless)
    assert watcher.drain() == [Event(Kind.MODIFIED, pod, harmless)]
    assert kernel_watches(watcher) == 2


def test_made_anew_before_the_drain_and_not_added_again_is_alive(watcher: Watcher, top: str, harmless: str) -> None:
    pod = top + "/pod"
    watcher.add(top)
    os.mkdir(pod)
    os.mkdir(pod + "/c")
    watcher.add(pod)
    watcher.add(pod + "/c")
    watcher.drain()
    for _ in range(3):
        os.rmdir(pod + "/c")
        os.rmdir(pod)
        os.mkdir(pod)
        os.mkdir(pod + "/c")
    events = [event for event in watcher.drain() if event.path == top]
    assert events == [Event(Kind.DELETED, top, "pod"), Event(Kind.CREATED, top, "pod")], "the last of each, in order"
    touch(pod + "/c/" + harmless)
    assert watcher.drain() == [Event(Kind.MODIFIED, pod + "/c", harmless)]
    assert kernel_watches(watcher) == 3


def test_add_twice_is_one_watch(watcher: Watcher, top: str) -> None:
    assert watcher.add(top)
    assert watcher.add(top)
    os.mkdir(top + "/pod")
    assert watcher.drain() == [Event(Kind.CREATED, top, "pod")]
    assert kernel_watches(watcher) == len(watcher) == 1


def test_removed_watches_are_silent(watcher: Watcher, top: str, harmless: str) -> None:
    os.makedirs(top + "/pod/c")
    for path in (top, top + "/pod", top + "/pod/c"):
        watcher.add(path)
    touch(top + "/pod/c/" + harmless)  # waits in the queue when the watch ends
    watcher.remove(top + "/pod")
    touch(top + "/pod/" + harmless)
    assert watcher.drain() == []
    assert top in watcher
    assert top + "/pod" not in watcher
    assert top + "/pod/c" not in watcher
    assert kernel_watches(watcher) == 1


def test_a_renamed_directory_goes_and_comes(watcher: Watcher, top: str, harmless: str) -> None:
    watcher.add(top)
    os.mkdir(top + "/old")
    watcher.add(top + "/old")
    watcher.drain()
    rename(top + "/old", top + "/new")
    assert watcher.drain() == [Event(Kind.DELETED, top, "old"), Event(Kind.CREATED, top, "new")]
    assert watcher.add(top + "/new")
    touch(top + "/new/" + harmless)
    assert watcher.drain() == [Event(Kind.MODIFIED, top + "/new", harmless)]
    assert top + "/old" not in watcher


def test_a_renamed_directory_added_before_the_drain_keeps_its_watch(watcher: Watcher, top: str, harmless: str) -> None:
    watcher.add(top)
    os.mkdir(top + "/old")
    watcher.add(top + "/old")
    rename(top + "/old", top + "/new")
    assert watcher.add(top + "/new")
    watcher.drain()
    touch(top + "/new/" + harmless)
    assert watcher.drain() == [Event(Kind.MODIFIED, top + "/new", harmless)]


def test_names_of_any_bytes_come_and_go(watcher: Watcher, top: str) -> None:
    name = os.fsdecode(b"pod-\xff\xfe")
    watcher.add(top)
    os.mkdir(f"{top}/{name}")
    assert watcher.drain() == [Event(Kind.CREATED, top, name)]
    assert watcher.add(f"{top}/{name}")
    os.rmdir(f"{top}/{name}")
    assert watcher.drain() == [Event(Kind.DELETED, top, name)]


def test_watch_then_scan_misses_no_directory(watcher: Watcher, top: str) -> None:
    """Nested directories made and removed at full speed beside us: what stays is known in the end, by event or scan."""
    stay = {f"{top}/pod{n}/c{n}" for n in range(0, 300, 7)}

    def runtime() -> None:
        for n in range(300):
            os.mkdir(f"{top}/pod{n}")
            os.mkdir(f"{top}/pod{n}/c{n}")
            if n % 7:
                os.rmdir(f"{top}/pod{n}/c{n}")
                os.rmdir(f"{top}/pod{n}")

    known: set[str] = set()

    def look(path: str) -> None:
        names = watcher.add_and_list(path)
        if names is None:
            return
        known.add(path)
        for name in names:
            look(f"{path}/{name}")

    thread = threading.Thread(target=runtime)
    look(top)
    thread.start()
    deadline = time.monotonic() + 10
    while (thread.is_alive() or queued(watcher)) and time.monotonic() < deadline:
        select.select([watcher], [], [], 0.05)
        for event in watcher.drain():
            assert event.kind in (Kind.CREATED, Kind.DELETED)
            look(f"{event.path}/{event.name}")
    thread.join()
    assert stay <= known
    watcher.drain()
    watched = {path for path in known if path in watcher}
    assert watched == stay | {os.path.dirname(path) for path in stay} | {top}
    assert kernel_watches(watcher) == len(watcher) == len(watched)


def test_overflow_is_told_and_leaves_the_watcher_usable(watcher: Watcher, top: str, tmp_cgroup: TmpCgroup) -> None:
    harmless, text = tmp_cgroup.harmless
    limit = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    if limit > 50_000:
        pytest.skip(f"max_queued_events is {limit}: too many writes to fill the queue")
    watcher.add(top)
    os.mkdir(top + "/gone")
    watcher.add(top + "/gone")
    watcher.drain()
    pods = [top + "/a", top + "/b"]
    for pod in pods:
        os.mkdir(pod)
        watcher.add(pod)
    fds = [os.open(f"{pod}/{harmless}", os.O_WRONLY) for pod in pods]
    for n in range(limit + 10):  # in turn: the same event twice in a row is merged by the kernel
        os.write(fds[n & 1], text.encode())
    os.rmdir(top + "/gone")  # this one is lost
    for fd in fds:
        os.close(fd)
    events: list[Event] = []
    drains = 0
    while queued(watcher):
        started = len(events)
        events += watcher.drain()
        drains += 1
        assert len(events) - started < 2000, "a drain is bounded and merges"
    assert drains > 1, "one drain may not take all"
    assert [event for event in events if event.kind is Kind.OVERFLOW] == [Event(Kind.OVERFLOW, "", "")]
    assert Event(Kind.DELETED, top, "gone") not in events
    assert top + "/gone" in watcher
    assert sum(watcher.prune()) == 1
    watcher.drain()
    assert top + "/gone" not in watcher
    assert kernel_watches(watcher) == len(watcher) == 3
    os.mkdir(top + "/later")
    assert watcher.drain() == [Event(Kind.CREATED, top, "later")]


def test_thousands_of_watches_and_a_cheap_drain(watcher: Watcher, tmp_path: Path) -> None:
    paths = [str(tmp_path / f"d{n}") for n in range(3000)]
    for path in paths:
        os.mkdir(path)
    started = time.perf_counter()
    assert all(watcher.add(path) for path in paths)
    added = time.perf_counter() - started
    for path in paths:
        os.mkdir(path + "/c")
    started = time.perf_counter()
    events = watcher.drain()
    while queued(watcher):
        events += watcher.drain()
    drained = time.perf_counter() - started
    assert {event.path for event in events} == set(paths)
    assert added / 3000 < 200e-6, "an add costs some microseconds, whatever the number of watches"
    assert drained / 3000 < 100e-6, "an event costs some microseconds"


def test_an_unmounted_file_system_is_a_lost_watch(tmp_path: Path) -> None:
    """In a mount namespace of its own, so that this machine's mounts stay as they are."""
    script = (
        "import os, sys; from enforcer.kernel.watch import *; w = Watcher(); w.add(sys.argv[1]); "
        "os.system('umount ' + sys.argv[1]); print(w.drain() == [Event(Kind.LOST, sys.argv[1], '')], len(w))"
    )
    command = f'mount -t tmpfs none "{tmp_path}" && exec "{sys.executable}" -c "{script}" "{tmp_path}"'
    done = subprocess.run(
        ["unshare", "-m", "--propagation", "private", "sh", "-c", command],
        capture_output=True, text=True, timeout=20, cwd=Path(watch.__file__).parents[2], check=False,
    )  # fmt: skip
    if done.returncode and "unshare" in done.stderr:
        pytest.skip(f"no mount namespace to be had: {done.stderr.strip()}")
    assert done.stdout.split() == ["True", "0"], done.stderr


def test_the_end_of_a_watch_whose_parent_is_not_watched_is_lost(watcher: Watcher, tmp_path: Path) -> None:
    # tmpfs ends the watch at rmdir as kernfs does from kernel 7 on
    os.mkdir(tmp_path / "root")
    watcher.add(str(tmp_path / "root"))
    os.rmdir(tmp_path / "root")
    assert watcher.drain() == [Event(Kind.LOST, str(tmp_path / "root"), "")]
    assert len(watcher) == 0


def test_the_end_of_a_watch_whose_parent_is_watched_is_a_removal(watcher: Watcher, tmp_path: Path) -> None:
    pod = str(tmp_path / "pod")
    os.mkdir(pod)
    watcher.add(str(tmp_path))
    watcher.add(pod)
    os.rmdir(pod)
    assert watcher.drain() == [Event(Kind.DELETED, str(tmp_path), "pod")]
    os.mkdir(pod)
    watcher.add(pod)
    watcher.drain()
    os.rmdir(pod)
    os.mkdir(pod)
    assert watcher.drain() == [Event(Kind.DELETED, str(tmp_path), "pod"), Event(Kind.CREATED, str(tmp_path), "pod")]
    os.mkdir(pod + "/c")
    assert watcher.drain() == [Event(Kind.CREATED, pod, "c")], "the directory made anew has a live watch"


def test_limits_are_told_by_the_name_of_their_sysctl(watcher: Watcher, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        def __init__(self, code: int) -> None:
            self.code = code

        def __getattr__(self, name: str) -> object:
            def refuse(*_: object) -> int:
                ctypes.set_errno(self.code)
                return -1

            return refuse

    with monkeypatch.context() as patch:
        patch.setattr(watch, "_libc", Refusing(ENOSPC))
        with pytest.raises(EnforcerError, match=r"/sys/x: the limit fs\.inotify\.max_user_watches .*sysctl -w"):
            watcher.add("/sys/x")
        patch.setattr(watch, "_libc", Refusing(EMFILE))
        with pytest.raises(EnforcerError, match=r"inotify instance: the limit fs\.inotify\.max_user_instances"):
            Watcher()


def test_no_descriptor_is_left_after_close() -> None:
    before = os.listdir("/proc/self/fd")
    watcher = Watcher()
    watcher.close()
    watcher.close()
    assert os.listdir("/proc/self/fd") == before
