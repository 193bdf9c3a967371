"""A D-Bus connection for a selectors loop: messages in and out over a non-blocking UNIX socket.

Messages are jeepney's; this module only moves them. Protocol: D-Bus specification.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any, Final

from jeepney import HeaderFields, Message, MessageType  # type: ignore[import-untyped]
from jeepney.auth import BEGIN, make_auth_external  # type: ignore[import-untyped]

from enforcer.core.errors import EnforcerError

# "Message Format" in the specification: a fixed part of 16 bytes, and never more than 128 MiB in all
_FIXED_PART: Final = 16
_LONGEST: Final = 1 << 27


class DBusError(EnforcerError):
    """No connection, no answer, or an answer that is an error."""


class ConnectionLost(Exception):
    """The peer has gone; `before` holds the messages that had come by then."""

    def __init__(self, reason: str, before: list[Message]) -> None:
        super().__init__(reason)
        self.before = before


class Connection:
    """An open and authenticated connection. Only call() ever waits."""

    def __init__(self, connected: socket.socket, received: bytes = b"") -> None:
        """`received`: what the peer has already sent behind the authentication."""
        connected.setblocking(False)
        self._socket = connected
        self._unsent = bytearray()
        self._received = bytearray(received)
        self._serial = 0
        self.unreadable = 0
        """Messages skipped because they could not be read; anyone on a bus may send us one."""

    @classmethod
    def open(cls, path: str, deadline: float) -> Connection:
        """Connects to a socket path and authenticates until `deadline` (CLOCK_MONOTONIC, s); raises DBusError."""
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            _set_timeout(connected, deadline)
            connected.connect(path)
            return cls(connected, _authenticate(connected, deadline))
        except OSError as problem:
            connected.close()
            raise DBusError(f"{path}: {problem.strerror or problem}") from problem

    def fileno(self) -> int:
        """The socket's descriptor; -1 when closed."""
        return self._socket.fileno()

    def wants_write(self) -> bool:
        """True while bytes wait for the socket to take them."""
        return bool(self._unsent)

    def send(self, message: Message) -> int:
        """Sends as much as the socket takes at once; returns the message's serial number. Never fails: see flush()."""
        self._serial += 1
        self._unsent += message.serialise(serial=self._serial)
        self.flush()
        return self._serial

    def flush(self) -> None:
        """Sends more of what waits. A broken connection shows in receive(), behind all that had come before."""
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent, socket.MSG_NOSIGNAL)]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()
            # makes the descriptor readable, so that a loop gets to receive()
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def receive(self) -> list[Message]:
        """All messages that are there; raises ConnectionLost at the end of the connection."""
        messages: list[Message] = []
        while True:
            try:
                data = self._socket.recv(65536)
            except BlockingIOError:
                return messages
            except OSError as problem:
                raise ConnectionLost(problem.strerror or str(problem), messages) from problem
            if not data:
                raise ConnectionLost("the peer closed the connection", messages)
            self._received += data
            try:
                messages.extend(self._complete())
            except ValueError as problem:
                raise ConnectionLost(str(problem), messages) from problem

    def _complete(self) -> Iterator[Message]:
        """The messages that are in the buffer as a whole."""
        while len(self._received) >= _FIXED_PART and len(self._received) >= (size := _size(self._received)):
            raw = bytes(self._received[:size])
            del self._received[:size]
            try:
                message = Message.from_buffer(raw)
            except (ValueError, LookupError, TypeError, struct.error):
                self.unreadable += 1
            else:
                yield message

    def call(self, message: Message, deadline: float) -> Message:
        """Sends and waits for the answer, an error among them; raises DBusError when none comes.

        Other messages that come meanwhile are dropped: for the time before a loop runs.
        """
        serial = self.send(message)
        while (left := deadline - time.monotonic()) > 0:
            poll = select.poll()
            poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._unsent else 0))
            poll.poll(left * 1000)
            self.flush()
            try:
                received = self.receive()
            except ConnectionLost as lost:
                raise DBusError(str(lost)) from lost
            for answer in received:
                if answer.header.fields.get(HeaderFields.reply_serial) == serial:
                    return answer
        raise DBusError(f"no answer to {message.header.fields.get(HeaderFields.member)} in time")

    def close(self) -> None:
        """Closes the socket; what waits is lost."""
        self._socket.close()


def error_of(answer: Message) -> tuple[str, str]:
    """Name and text of an error message; ("", "") for anything else."""
    if answer.header.message_type is not MessageType.error:
        return "", ""
    text = answer.body[0] if answer.body and isinstance(answer.body[0], str) else ""
    return answer.header.fields.get(HeaderFields.error_name, "error without a name"), text


def result_of(answer: Message) -> Any:
    """The first value of an answer, None when it has none; raises DBusError for an error."""
    name, text = error_of(answer)
    if name:
        raise DBusError(f"{name}: {text}")
    return answer.body[0] if answer.body else None


def _size(message: bytearray) -> int:
    """Bytes of the message that begins here; raises ValueError when it cannot be one."""
    order = {ord("l"): "<", ord("B"): ">"}.get(message[0])
    if order is None:
        raise ValueError(f"the peer does not speak D-Bus: its message begins with {bytes(message[:4])!r}")
    body, fields = (struct.unpack_from(f"{order}I", message, at)[0] for at in (4, 12))
    size: int = _FIXED_PART + -(-fields // 8) * 8 + body
    if size > _LONGEST:
        raise ValueError(f"the peer does not speak D-Bus: its message would have {size} bytes")
    return size


def _set_timeout(connected: socket.socket, deadline: float) -> None:
    # a timeout of zero would mean non-blocking
    connected.settimeout(max(0.001, deadline - time.monotonic()))


def _authenticate(connected: socket.socket, deadline: float) -> bytes:
    """SASL EXTERNAL: the kernel tells the peer who we are. Returns what came behind the peer's "OK".

    BEGIN goes with the first line, as systemd's own clients send it: systemd forgets a message that reaches it together
    with BEGIN (until the next one comes), and now BEGIN was read when it says OK.
    """
    connected.sendall(b"\0" + make_auth_external() + BEGIN)
    answer = b""
    while b"\r\n" not in answer:
        _set_timeout(connected, deadline)
        data = connected.recv(4096)
        if not data or len(answer) > 4096:
            raise ConnectionResetError("the peer broke off the authentication")
        answer += data
    line, _, rest = answer.partition(b"\r\n")
    if not line.startswith(b"OK "):
        raise PermissionError(f"the peer refused the authentication: {line!r}")
    return rest
