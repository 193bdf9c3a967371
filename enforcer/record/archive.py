"""The file of a recorded node: gzip of two lines of JSON, a head with version and checksum, and the document.

Such files come from other people (bug reports), so everything in one is taken for hostile: it is unpacked to a bound,
its checksum is looked at before its content, and nothing in it ever names a file.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from enforcer.core.errors import ConfigError

FORMAT: Final = "cpuset-enforcer record"
VERSION: Final = 1

# A container takes about 400 bytes, 40 once packed: room for more than ten thousand of them.
MOST_PACKED: Final = 8 << 20
MOST_UNPACKED: Final = 16 << 20

_AGAIN: Final = "make it again: cpuset-enforcer record FILE"


def pack(document: Mapping[str, Any]) -> bytes:
    """The bytes of the file; the same document gives the same bytes. Raises ConfigError when it is too large."""
    body = json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
    head = {"format": FORMAT, "version": VERSION, "sha256": hashlib.sha256(body).hexdigest()}
    data = gzip.compress(json.dumps(head).encode() + b"\n" + body + b"\n", mtime=0)
    if len(body) + 1000 > MOST_UNPACKED or len(data) > MOST_PACKED:
        raise ConfigError(f"this node is too large to be recorded: {len(body)} bytes, at most {MOST_UNPACKED} are read")
    return data


def unpack(data: bytes, source: str) -> dict[str, Any]:
    """The document; `source` names the file in errors. Raises ConfigError, with what was wanted and found."""
    head_line, _, rest = _inflated(data, source).partition(b"\n")
    head = _parsed(head_line, f"{source}: the first line")
    if head.get("format") != FORMAT:
        raise ConfigError(f"{source}: not a recorded node: it does not say '{FORMAT}' at its head", hint=_AGAIN)
    if head.get("version") != VERSION:
        raise ConfigError(
            f"{source}: written in version {str(head.get('version'))[:20]} of the format; this program reads {VERSION}",
            hint="use the cpuset-enforcer of the node that it was recorded on",
        )
    body = rest.removesuffix(b"\n")
    if head.get("sha256") != hashlib.sha256(body).hexdigest():
        raise ConfigError(f"{source}: torn or edited: the checksum does not fit the content", hint=_AGAIN)
    return _parsed(body, source)


def write(path: Path, data: bytes) -> None:
    """Puts a new file in place as a whole, mode 0600; raises ConfigError.

    Only a regular file or nothing is replaced: a link is followed, and a device (/dev/null, /dev/stdout) stays one.
    """
    try:
        path = path.resolve()
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path}: not written: it is no regular file", hint="- is the standard output")
        if not path.name:
            raise ConfigError(f"{path}: not written: it is no name of a file")
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(f"{path}: not written: {error}") from error
    _replace(path, data)


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.new")
    try:
        temporary.unlink(missing_ok=True)
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(data)
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise ConfigError(f"{path}: not written: {error.strerror}") from error


def read(path: Path) -> bytes:
    """The file's bytes; raises ConfigError when it is not there, cannot be read or is too large."""
    try:
        # without O_NONBLOCK a pipe in the file's place would block for ever
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            data = file.read(MOST_PACKED + 1) or b""
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    if len(data) > MOST_PACKED:
        raise ConfigError(f"{path}: not a recorded node: more than {MOST_PACKED >> 20} MiB")
    return data


def _inflated(data: bytes, source: str) -> bytes:
    inflater = zlib.decompressobj(wbits=31)
    try:
        text = inflater.decompress(data, MOST_UNPACKED)
    except zlib.error as error:
        raise ConfigError(f"{source}: not a recorded node, or torn: not gzip ({error})", hint=_AGAIN) from error
    if inflater.eof and not inflater.unused_data:
        return text
    if inflater.unused_data:
        raise ConfigError(f"{source}: not a recorded node: something follows its end")
    if len(text) >= MOST_UNPACKED:
        raise ConfigError(f"{source}: not a recorded node: it unpacks to more than {MOST_UNPACKED >> 20} MiB")
    raise ConfigError(f"{source}: torn: it ends early", hint=_AGAIN)


def _parsed(text: bytes, source: str) -> dict[str, Any]:
    try:
        found = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source}: not a recorded node: not JSON: {str(error)[:200]}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{source}: not a recorded node: its top is no object")
    return found


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON's")
