"""Watcher: inotify on directories, so that a cgroup that appears, goes or is written is known within a millisecond.

inotify(7), with what kernfs makes of it: before kernel 7 a removed cgroup sends nothing of its own and its watch lives
on and counts; hotplug and changed effective sets send nothing at all.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Container, Iterator
from dataclasses import dataclass
from enum import StrEnum
from errno import EACCES, EINVAL, EMFILE, ENODEV, ENOENT, ENOSPC, ENOTDIR
from typing import Final

from enforcer.core.errors import EnforcerError

# <sys/inotify.h>
_MODIFY: Final = 0x2
_MOVED_FROM: Final = 0x40
_MOVED_TO: Final = 0x80
_CREATE: Final = 0x100
_DELETE: Final = 0x200
_UNMOUNT: Final = 0x2000
_Q_OVERFLOW: Final = 0x4000
_IGNORED: Final = 0x8000
_ONLYDIR: Final = 0x1000000
_DONT_FOLLOW: Final = 0x2000000
_ISDIR: Final = 0x40000000
# OPEN, ACCESS and CLOSE would report our own reads.
_WANTED: Final = _CREATE | _DELETE | _MODIFY | _MOVED_FROM | _MOVED_TO | _ONLYDIR | _DONT_FOLLOW

_HEADER: Final = struct.Struct("=iIII")
_LARGEST: Final = _HEADER.size + 256
_BUFFER: Final = 64 * 1024
_STEP: Final = 100  # watches that prune() looks at before it lets go
_READS: Final = 8  # buffers (of about 1500 events) in one drain: a storm must not keep the loop from its other work

_libc: Final = ctypes.CDLL(None, use_errno=True)


class Kind(StrEnum):
    """What an event says. OVERFLOW and LOST mean: events are missing, look at everything again."""

    CREATED = "created"
    DELETED = "deleted"
    MODIFIED = "modified"
    OVERFLOW = "overflow"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Event:
    """Look here again. `path` is the watched directory; `name` the directory that came or went, or the file written."""

    kind: Kind
    path: str
    name: str


class Watcher:
    """One inotify instance; which directories are watched is the caller's decision.

    `files`: MODIFIED is reported for these file names only (default all); CREATED and DELETED are about directories.
    Raises EnforcerError when the instance, or a watch, is refused by a limit; the message names the sysctl.
    """

    def __init__(self, files: Container[str] | None = None) -> None:
        self._files = files
        self._path: dict[int, str] = {}
        self._wd: dict[str, int] = {}
        self._below: dict[str, set[str]] = {}  # a directory -> the watched ones directly in it
        self._fd: int = _libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        if self._fd < 0:
            raise _refused("an inotify instance", ctypes.get_errno())

    def fileno(self) -> int:
        """Readable while events wait."""
        return self._fd

    def close(self) -> None:
        """Ends all watches; may be called twice."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def __len__(self) -> int:
        return len(self._wd)

    def __contains__(self, path: str) -> bool:
        return path in self._wd

    def add(self, path: str) -> bool:
        """Watches a directory; False when it is not there. To do it again is harmless.

        A directory that was made anew under the same name gets a new watch: the kernel knows inodes, not names.
        """
        wd = _libc.inotify_add_watch(self._fd, os.fsencode(path), _WANTED)
        if wd < 0:
            code = ctypes.get_errno()
            if code not in (ENOENT, ENOTDIR, ENODEV):
                raise _refused(path, code)
            self.remove(path)
            return False
        if self._wd.get(path) != wd:
            self._forget(path)
            self._unmap(wd)  # the same directory under its name before a rename (v1)
            self._map(path, wd)
            self._recheck_below(path)
        return True

    def add_and_list(self, path: str) -> list[str] | None:
        """Watches, then scans, so that nothing is missed between the two: the names of the directories in there.

        One of them may be reported as CREATED as well. None when the directory is not there.
        """
        if not self.add(path):
            return None
        try:
            with os.scandir(path) as entries:
                return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        except OSError as error:
            if error.errno not in (ENOENT, ENODEV, ENOTDIR):
                raise _refused(path, error.errno or 0) from error
            self.remove(path)
            return None

    def remove(self, path: str) -> None:
        """Ends the watch on a directory and on those below it; no complaint when there is none."""
        for child in tuple(self._below.get(path, ())):
            self.remove(child)
        self._forget(path)

    def prune(self) -> Iterator[int]:
        """After an overflow: sets every watch right whose directory has gone or was made anew.

        Goes in steps, each answering how many have gone: thousands of watches take tens of milliseconds.
        """
        watched = tuple(self._wd)
        for start in range(0, len(watched), _STEP):
            yield sum(not self.add(path) for path in watched[start : start + _STEP] if path in self._wd)

    def drain(self) -> list[Event]:
        """What has happened since, the same (kind, path, name) once, where it came last. Does not wait.

        Watches on directories that went are ended, one on a directory made anew meanwhile is alive afterwards.
        At most some thousands of events are taken; then the descriptor stays readable.
        """
        events: dict[Event, None] = {}
        for _ in range(_READS):
            try:
                data = os.read(self._fd, _BUFFER)
            except BlockingIOError:
                break
            self._parse(data, events)
            if len(data) < _BUFFER - _LARGEST:
                break
        return list(events)

    def _parse(self, data: bytes, events: dict[Event, None]) -> None:
        offset = 0
        last: tuple[int, int, bytes] | None = None
        while offset < len(data):
            wd, mask, _cookie, length = _HEADER.unpack_from(data, offset)
            offset += _HEADER.size
            raw = data[offset : offset + length].rstrip(b"\0")
            offset += length
            if (wd, mask, raw) == last:
                continue
            last = (wd, mask, raw)
            event = self._event(wd, mask, raw)
            if event is not None:
                events.pop(event, None)
                events[event] = None

    def _event(self, wd: int, mask: int, raw: bytes) -> Event | None:
        if mask & _Q_OVERFLOW:  # comes with wd -1
            return Event(Kind.OVERFLOW, "", "")
        path = self._path.get(wd)
        if path is None:  # of a watch that was ended while the event waited
            return None
        if mask & (_IGNORED | _UNMOUNT):
            return self._ended(path, bool(mask & _UNMOUNT))
        name = os.fsdecode(raw)
        # A file renamed into place is how the kubelet and most programs write their own files.
        if mask & _MODIFY or (mask & _MOVED_TO and not mask & _ISDIR):
            return Event(Kind.MODIFIED, path, name) if self._files is None or name in self._files else None
        if not mask & _ISDIR:
            return None
        if mask & (_CREATE | _MOVED_TO):
            return Event(Kind.CREATED, path, name)
        self._went(f"{path}/{name}")
        return Event(Kind.DELETED, path, name)

    def _ended(self, path: str, unmounted: bool) -> Event | None:
        """The kernel ended a watch by itself (from 7.x on also at rmdir)."""
        self._forget(path)
        if unmounted or path.rpartition("/")[0] not in self._wd:
            return Event(Kind.LOST, path, "")
        self.add(path)  # there again? Then under the new watch; the parent's DELETED and CREATED tell the rest
        return None

    def _went(self, path: str) -> None:
        """After DELETE of a watched directory. It may be there again, with a watch that is already the new one's."""
        if path in self._wd:
            self.add(path)
        else:
            self._recheck_below(path)

    def _recheck_below(self, path: str) -> None:
        """Those in a directory made anew are others than before; their DELETE went to the watch that ended."""
        for child in tuple(self._below.get(path, ())):
            self.add(child)

    def _map(self, path: str, wd: int) -> None:
        self._path[wd] = path
        self._wd[path] = wd
        self._below.setdefault(path.rpartition("/")[0], set()).add(path)

    def _unmap(self, wd: int) -> None:
        path = self._path.pop(wd, None)
        if path is None:
            return
        del self._wd[path]
        parent = path.rpartition("/")[0]
        siblings = self._below[parent]
        siblings.discard(path)
        if not siblings:
            del self._below[parent]

    def _forget(self, path: str) -> None:
        wd = self._wd.get(path)
        if wd is None:
            return
        self._unmap(wd)
        # Fails (EINVAL) where the kernel has ended it already; before 7.x it must be ended or it counts for ever.
        _libc.inotify_rm_watch(self._fd, wd)


def _refused(what: str, code: int) -> EnforcerError:
    sysctl = {ENOSPC: "fs.inotify.max_user_watches", EMFILE: "fs.inotify.max_user_instances"}.get(code)
    if sysctl:
        hint = f"raise it: sysctl -w {sysctl}=..."
        return EnforcerError(f"cannot watch {what}: the limit {sysctl} is used up", hint=hint)
    hint = "run as root" if code == EACCES else "is this a cgroup directory?" if code == EINVAL else ""
    return EnforcerError(f"cannot watch {what}: {os.strerror(code)}", hint=hint)
