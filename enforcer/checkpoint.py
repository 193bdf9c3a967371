"""The state file: one small JSON document, renamed into place, versioned, checksummed, keyed by the boot id.

The kernel holds the truth; the file only keeps what the cgroup tree cannot say. So nothing here ever raises for what a
disk or a stranger does: a failed write is a result, and a file that cannot be used is moved aside.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

FORMAT: Final = "cpuset-enforcer state"
VERSION: Final = 1
KEPT_ASIDE: Final = 3
RETRY: Final = 1.0

# Far above what a node can fill: 1000 containers make about 300 KB.
_SIZE_LIMIT: Final = 64 << 20

Document = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Loaded:
    """What load() found. No document and no problem: there was no file, as on the first start after a boot.

    `problem` is a line for the log: what was wrong with the file and where it is now (`moved_to`).
    """

    document: dict[str, Any] | None = None
    problem: str | None = None
    moved_to: Path | None = None


def save(path: Path, document: Document, boot_id: str) -> str | None:
    """Replaces the file as a whole, mode 0600; a reader sees the old or the new one. None when done, else why not.

    On failure the old file stands and the temporary one is gone. Nothing is synced: what a power cut loses is of
    another boot and of no use, while an fsync on a disk takes up to 90 ms in the thread that pins (measured: 11 of 190
    containers were pinned late by it).
    """
    temporary = path.with_name(f".{path.name}.new")
    try:
        data = _encode(document, boot_id)
    except (TypeError, ValueError, RecursionError) as error:
        return f"state file {path} not written: the state holds what JSON cannot: {error}"
    try:
        _write_new(temporary, data)
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        return f"state file {path} not written: {error.strerror}; the file before it stands; free or fix {path.parent}"
    return None


def load(path: Path, boot_id: str) -> Loaded:
    """Reads the file back. What is torn, foreign, of a later version or another boot is moved aside; never raises."""
    try:
        return Loaded(_decode(_read(path), boot_id))
    except FileNotFoundError:
        return Loaded()
    except OSError as error:
        return _aside(path, f"cannot be read: {error.strerror}")
    except _UnusableError as error:
        return _aside(path, str(error))


def peek(path: Path, boot_id: str) -> dict[str, Any]:
    """The document of a file that stays as it is; raises OSError, or ValueError with what is wrong with it."""
    return _decode(_read(path), boot_id)


class Checkpointer:
    """Writes what is offered, at most once per `interval` seconds, always the newest. It owns no thread and no clock.

    offer() after each plan, flush() when its time has come; `due` is when that is, None when nothing waits. After a
    failure the next try is RETRY seconds later; `problem` is the standing failure.
    """

    def __init__(self, path: Path, boot_id: str, interval: float = 0.1) -> None:
        self._path = path
        self._boot_id = boot_id
        self._interval = interval
        self._pending: Callable[[], Document] | None = None
        self._not_before = float("-inf")
        self.problem: str | None = None

    @property
    def due(self) -> float | None:
        """The time from which flush() writes; None when nothing waits to be written."""
        return self._not_before if self._pending else None

    def offer(self, document: Callable[[], Document], now: float) -> float:
        """Takes what is to be written next, called only when it is written. Returns when flush() will write it."""
        self._pending = document
        self._not_before = max(self._not_before, now)
        return self._not_before

    def flush(self, now: float, *, force: bool = False) -> str | None:
        """Writes what waits, if it is due or forced. Returns a line for the log when the outcome changes."""
        if self._pending is None or (now < self._not_before and not force):
            return None
        problem = save(self._path, self._pending(), self._boot_id)
        before, self.problem = self.problem, problem
        self._not_before = now + (RETRY if problem else self._interval)
        if problem is None:
            self._pending = None
            return f"state file {self._path} is written again" if before else None
        return None if problem == before else problem


class _UnusableError(ValueError):
    """Why a file's content is of no use to us."""


def _encode(document: Document, boot_id: str) -> bytes:
    text = _text(document)
    head = {"format": FORMAT, "version": VERSION, "boot_id": boot_id, "checksum": _checksum(text, boot_id)}
    return b'%s, "document": %s}\n' % (json.dumps(head)[:-1].encode(), text)


def _text(document: Any) -> bytes:
    """The bytes that the checksum is over. Reading keeps the order of keys, so writing what was read gives the same."""
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()


def _checksum(text: bytes, boot_id: str) -> int:
    return zlib.crc32(text, zlib.crc32(f"{VERSION} {boot_id} ".encode()))


def _decode(data: bytes, boot_id: str) -> dict[str, Any]:
    try:
        whole = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _UnusableError(f"is torn or not ours: not JSON: {error}") from error
    if not isinstance(whole, dict) or whole.get("format") != FORMAT:
        raise _UnusableError("is not ours: it does not say that it is a state file of this program")
    version, document = whole.get("version"), whole.get("document")
    if version != VERSION:
        raise _UnusableError(f"has version {version!r}; this program reads version {VERSION}")
    written_in = whole.get("boot_id")
    if not isinstance(document, dict) or not _fits(whole.get("checksum"), document, str(written_in)):
        raise _UnusableError("is torn or was edited: its checksum does not fit its content")
    if written_in != boot_id:
        raise _UnusableError(f"is of another boot ({written_in}, this one is {boot_id}): its cgroups are gone")
    return document


def _fits(checksum: object, document: dict[str, Any], boot_id: str) -> bool:
    try:
        return checksum == _checksum(_text(document), boot_id)
    except (ValueError, RecursionError):
        return False


def _read(path: Path) -> bytes:
    # A pipe in the file's place must not block, nor a link lead elsewhere.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _check(os.fstat(descriptor))
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)


def _check(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise _UnusableError("is not a regular file")
    if status.st_uid not in (0, os.geteuid()):
        raise _UnusableError(f"is not ours: it belongs to user {status.st_uid}")
    if status.st_size > _SIZE_LIMIT:
        raise _UnusableError(f"is not ours: {status.st_size} bytes are too many")


def _write_new(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(data)


def _aside(path: Path, why: str) -> Loaded:
    """Moves a file to NAME.aside.1, those before it one number up; the oldest falls out."""
    places = [path.with_name(f"{path.name}.aside.{number}") for number in range(1, KEPT_ASIDE + 1)]
    line = f"state file {path} {why}; starting from what the cgroups say"
    try:
        for older, newer in zip(reversed(places), reversed(places[:-1]), strict=False):
            if _exists(newer):
                newer.replace(older)
        path.replace(places[0])
    except OSError as error:
        return Loaded(None, f"{line}; it could not be moved aside: {error.strerror}")
    return Loaded(None, f"{line}; it is kept as {places[0]}", places[0])


def _exists(path: Path) -> bool:
    return os.path.lexists(path)
