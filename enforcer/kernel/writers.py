"""WriterWatch: who writes to cpuset files, by fanotify. It names the other manager when a set was changed behind us.

One mark covers the whole hierarchy, cgroups made later included, and costs nothing until somebody writes. It sees
writes through our own cgroup namespace only: another one has a file system object of its own.
"""

from __future__ import annotations

import ctypes
import os
import struct
import time
from collections import deque
from collections.abc import Container
from dataclasses import dataclass
from errno import EBADF, EINVAL, ENOSYS, EPERM
from typing import Final

from enforcer.core.errors import CannotWorkHereError

# <sys/fanotify.h>
_CLOEXEC: Final = 0x1
_NONBLOCK: Final = 0x2
_MARK_ADD: Final = 0x1
_MARK_FILESYSTEM: Final = 0x100
_MODIFY: Final = 0x2
_Q_OVERFLOW: Final = 0x4000
_AT_FDCWD: Final = -100

_EVENT: Final = struct.Struct("=IBBHQii")  # length, version, -, header length, mask, descriptor, pid
_BUFFER: Final = _EVENT.size * 128
_READS: Final = 64
_RING: Final = 512
# what a rival manager writes; attaching tasks and the like would push these out of the ring
FILES: Final = frozenset(("cpuset.cpus", "cpuset.mems", "cpuset.cpus.partition", "cgroup.subtree_control"))

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.fanotify_init.argtypes = (ctypes.c_uint, ctypes.c_uint)
_libc.fanotify_mark.argtypes = (ctypes.c_int, ctypes.c_uint, ctypes.c_uint64, ctypes.c_int, ctypes.c_char_p)


@dataclass(frozen=True, slots=True)
class Write:
    """One write. `path` is the cgroup's, below the mount; None when the writer reached the file by another mount.

    `comm` is None when the writer had exited before it could be looked up; `when` is monotonic seconds.
    """

    path: str | None
    file: str
    pid: int
    comm: str | None
    when: float
    inode: int

    @property
    def writer(self) -> str:
        """For a log line: "pid 123 (runc)"."""
        return f"pid {self.pid} ({self.comm or 'exited'})"


class WriterWatch:
    """Watches writes of other processes below one cgroup mount point.

    Raises CannotWorkHereError when fanotify is refused: it needs CAP_SYS_ADMIN.
    """

    def __init__(self, root: str, files: Container[str] = FILES, proc_root: str = "/proc") -> None:
        self._root = root.rstrip("/")
        self._files = files
        self._proc = proc_root
        self._own = os.getpid()
        self._ring: deque[Write] = deque(maxlen=_RING)
        self._new: deque[Write] = deque(maxlen=_RING)
        self.lost = 0  # queue overflows, and events whose file could not be opened or named any more
        self._fd = _open_group(root)

    def fileno(self) -> int:
        """Readable while events wait."""
        return self._fd

    def close(self) -> None:
        """Ends the watch; may be called twice."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def drain(self) -> list[Write]:
        """The writes since the last drain, in order, the newest 512 at most. Does not wait."""
        self._collect()
        new = list(self._new)
        self._new.clear()
        return new

    def who(self, path: str, since: float, file: str = "cpuset.cpus") -> str | None:
        """Who wrote last to this file, at or after `since` (monotonic seconds): "pid 123 (runc)"; None = not seen."""
        self._collect()
        inode = self._inode(path, file)
        for write in reversed(self._ring):
            if write.when < since:
                return None
            # by inode, as another mount namespace has other names for it; by name when it has gone meanwhile
            if write.file == file and (write.inode == inode or (inode is None and write.path == path)):
                return write.writer
        return None

    def _inode(self, path: str, file: str) -> int | None:
        try:
            return os.stat(f"{self._root}{path}/{file}").st_ino
        except OSError:
            return None

    def _collect(self) -> None:
        # To the end of the queue: a read also stops short before an event whose file cannot be opened any more.
        for _ in range(_READS):
            try:
                data = os.read(self._fd, _BUFFER)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (EBADF, EINVAL):
                    raise
                self.lost += 1  # the event's file has gone (ENODEV); the event is taken off the queue all the same
                continue
            for offset in range(0, len(data), _EVENT.size):
                self._take(*_EVENT.unpack_from(data, offset)[4:])

    def _take(self, mask: int, fd: int, pid: int) -> None:
        if mask & _Q_OVERFLOW or fd < 0:
            self.lost += 1
            return
        try:
            if pid != self._own:
                self._note(fd, pid)
        finally:
            os.close(fd)

    def _note(self, fd: int, pid: int) -> None:
        try:
            name = os.readlink(f"{self._proc}/self/fd/{fd}").removesuffix(" (deleted)")
        except OSError:  # ENAMETOOLONG: cgroups nested below PATH_MAX, which any container with a cgroup mount can make
            self.lost += 1
            return
        directory, _, file = name.rpartition("/")
        if file not in self._files:
            return
        below = directory.startswith(self._root + "/") or directory == self._root
        path = (directory[len(self._root) :] or "/") if below else None
        write = Write(path, file, pid, self._comm(pid), time.monotonic(), os.fstat(fd).st_ino)
        self._ring.append(write)
        self._new.append(write)

    def _comm(self, pid: int) -> str | None:
        try:
            fd = os.open(f"{self._proc}/{pid}/comm", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            return os.read(fd, 64).decode("utf-8", "replace").strip() or None
        except OSError:
            return None
        finally:
            os.close(fd)


def _open_group(root: str) -> int:
    fd: int = _libc.fanotify_init(_CLOEXEC | _NONBLOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_LARGEFILE)
    if fd < 0:
        raise _refused(root, ctypes.get_errno())
    if _libc.fanotify_mark(fd, _MARK_ADD | _MARK_FILESYSTEM, _MODIFY, _AT_FDCWD, os.fsencode(root)) < 0:
        code = ctypes.get_errno()
        os.close(fd)
        raise _refused(root, code)
    return fd


def _refused(root: str, code: int) -> CannotWorkHereError:
    hint = {
        EPERM: "it needs CAP_SYS_ADMIN",
        ENOSYS: "it needs a kernel with CONFIG_FANOTIFY",
        EINVAL: "it needs marks on whole file systems, Linux 4.20",
    }.get(code, "")
    return CannotWorkHereError(f"writers of {root} cannot be named, fanotify: {os.strerror(code)}", hint=hint)
