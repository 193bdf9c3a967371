"""systemd over D-Bus: `AllowedCPUs` of slices and scopes, set at run time from the agent's single-threaded loop.

Why systemd must be told at all: it writes its own value into `cpuset.cpus` of a slice when the first scope starts
there, and of any unit when a property of it is set or after a reload. A file written behind its back does not last.

Methods, properties and signals: org.freedesktop.systemd1(5).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from jeepney import (  # type: ignore[import-untyped]
    DBusAddress,
    HeaderFields,
    MatchRule,
    Message,
    MessageFlag,
    MessageType,
    Properties,
    message_bus,
    new_method_call,
)

from enforcer.core.cpuset import CPUSet
from enforcer.core.errors import CannotWorkHereError
from enforcer.kernel.dbus import Connection, ConnectionLost, DBusError, error_of, result_of

SYSTEM_BUS: Final = "/run/dbus/system_bus_socket"
# systemd's own socket: works without a bus daemon, but sends every signal of every unit to whoever is connected
PRIVATE: Final = "/run/systemd/private"
ADDRESSES: Final = (SYSTEM_BUS, PRIVATE)

_SYSTEMD: Final = "org.freedesktop.systemd1"
_MANAGER: Final = DBusAddress("/org/freedesktop/systemd1", bus_name=_SYSTEMD, interface=f"{_SYSTEMD}.Manager")
# the root slice always exists: its object answers whether this systemd knows AllowedCPUs
_ROOT_SLICE: Final = DBusAddress(
    "/org/freedesktop/systemd1/unit/_2d_2eslice", bus_name=_SYSTEMD, interface=f"{_SYSTEMD}.Slice"
)
_NO_SUCH_UNIT: Final = f"{_SYSTEMD}.NoSuchUnit"
_MANAGER_AWAY: Final = frozenset(
    f"org.freedesktop.DBus.Error.{name}"
    for name in ("NoReply", "ServiceUnknown", "NameHasNoOwner", "Disconnected", "Timeout")
)


@dataclass(frozen=True, slots=True)
class Reply:
    """systemd's answer to one set_allowed_cpus(); `error` is the D-Bus error's name, "" when it was carried out."""

    unit: str
    cpus: CPUSet | None
    error: str = ""
    message: str = ""

    @property
    def ok(self) -> bool:
        """systemd took the value. It writes `cpuset.cpus` a moment after this answer, not before."""
        return not self.error

    @property
    def unit_gone(self) -> bool:
        """The unit does not exist (any more): normal, nothing to repeat."""
        return self.error == _NO_SUCH_UNIT

    @property
    def manager_away(self) -> bool:
        """systemd was not on the bus (it re-executes itself): the value was not taken, ask again later."""
        return self.error in _MANAGER_AWAY


@dataclass(frozen=True, slots=True)
class Reloading:
    """systemd begins (`active`) or has ended a daemon-reload; after its end it may write old values of its own."""

    active: bool


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The connection is gone and its descriptor closed: reconnect() later. What was in flight is pending again."""

    reason: str


Event = Reply | Reloading | Disconnected


def cpus_to_bytes(cpus: CPUSet | None) -> bytes:
    """`AllowedCPUs` on the wire: bit n of byte n // 8 is CPU n, no zero bytes at the end; None = b"" (reset)."""
    return cpus.mask.to_bytes((cpus.mask.bit_length() + 7) // 8, "little") if cpus else b""


def bytes_to_cpus(mask: bytes) -> CPUSet | None:
    """The reverse of cpus_to_bytes(); no bit set = None (the unit has no set of its own)."""
    return CPUSet.from_mask(int.from_bytes(mask, "little")) if any(mask) else None


class UnitProperties:
    """Sets `AllowedCPUs` of units (runtime only) without ever waiting; meant for a selectors loop.

    Each unit has at most one call outstanding. What is asked for meanwhile is coalesced to the newest value and sent
    when the answer is there, so a burst costs systemd two calls. Not safe for threads.
    """

    def __init__(self, connection: Connection, addresses: Sequence[str]) -> None:
        self._addresses = addresses
        self._pending: dict[str, CPUSet | None] = {}
        self._adopt(connection)

    def _adopt(self, connection: Connection) -> None:
        self._connection: Connection | None = connection
        self._sent: dict[int, tuple[str, CPUSet | None]] = {}
        self._busy: dict[str, int] = {}

    @classmethod
    def connect(cls, addresses: Sequence[str] = ADDRESSES, *, timeout: float = 5.0) -> UnitProperties:
        """Connects to the first of the socket paths that answers; waits at most `timeout` seconds for each.

        Raises CannotWorkHereError when systemd is not there or does not know AllowedCPUs (it does since 244).
        """
        return cls(_open_any(addresses, timeout, check=True), addresses)

    def reconnect(self, timeout: float = 0.2) -> None:
        """Connects anew and sends what is pending; when to try is the caller's business.

        Waits at most `timeout` seconds for each address; raises CannotWorkHereError when none answers.
        """
        self.close()
        self._adopt(_open_any(self._addresses, timeout, check=False))
        for unit in list(self._pending):
            self._send_next(unit)

    @property
    def connected(self) -> bool:
        """False from a Disconnected event to a reconnect() that worked."""
        return self._connection is not None

    def fileno(self) -> int:
        """The descriptor to register; -1 while not connected. It is another one after a reconnect()."""
        return self._connection.fileno() if self._connection else -1

    def wants_write(self) -> bool:
        """True while bytes wait for the socket: register for writing, too."""
        return bool(self._connection and self._connection.wants_write())

    def pending(self) -> Mapping[str, CPUSet | None]:
        """Values not sent yet, by unit: behind an outstanding call, or because there is no connection."""
        return dict(self._pending)

    def in_flight(self) -> Mapping[str, CPUSet | None]:
        """Values sent and not answered, by unit."""
        return dict(self._sent.values())

    def set_allowed_cpus(self, unit: str, cpus: CPUSet | None) -> None:
        """Asks for a unit's set; never waits. None takes it away: systemd then leaves `cpuset.cpus` as it is.

        Raises ValueError for an empty set. Everything else that may go wrong comes as a Reply or Disconnected.
        """
        if cpus is not None and not cpus:
            raise ValueError(f"{unit}: AllowedCPUs cannot be an empty set; None means no set of its own")
        self._pending[unit] = cpus
        if unit not in self._busy:
            self._send_next(unit)

    def on_readable(self) -> list[Event]:
        """To be called when the descriptor is readable: all that has come, in order."""
        if not self._connection:
            return []
        try:
            messages = self._connection.receive()
        except ConnectionLost as lost:
            return [*self._events(lost.before), self._lose(str(lost))]
        return self._events(messages)

    def on_writable(self) -> None:
        """To be called when the descriptor is writable and wants_write()."""
        if self._connection:
            self._connection.flush()

    def close(self) -> None:
        """Leaves; what was not answered is pending."""
        if self._connection:
            self._lose("closed")

    def _send_next(self, unit: str) -> None:
        if self._connection and unit in self._pending:
            cpus = self._pending.pop(unit)
            serial = self._connection.send(_set_properties(unit, cpus))
            self._sent[serial] = (unit, cpus)
            self._busy[unit] = serial

    def _events(self, messages: Iterable[Message]) -> list[Event]:
        return [event for message in messages if (event := self._event(message))]

    def _event(self, message: Message) -> Event | None:
        kind, fields = message.header.message_type, message.header.fields
        if kind in (MessageType.method_return, MessageType.error):
            return self._answered(fields.get(HeaderFields.reply_serial, 0), message)
        name = (fields.get(HeaderFields.interface), fields.get(HeaderFields.member))
        if kind is MessageType.signal and name == (_MANAGER.interface, "Reloading") and message.body:
            return Reloading(bool(message.body[0]))
        return None

    def _answered(self, serial: int, message: Message) -> Reply | None:
        if serial not in self._sent:
            return None
        unit, cpus = self._sent.pop(serial)
        del self._busy[unit]
        self._send_next(unit)
        return Reply(unit, cpus, *error_of(message))

    def _lose(self, reason: str) -> Disconnected:
        if self._connection:
            self._connection.close()
        self._connection = None
        # a newer wish stays the newest
        self._pending = dict(self._sent.values()) | self._pending
        self._sent, self._busy = {}, {}
        return Disconnected(reason)


def read_allowed_cpus(
    units: Iterable[str], addresses: Sequence[str] = ADDRESSES, *, timeout: float = 5.0
) -> dict[str, CPUSet | None]:
    """`AllowedCPUs` of units as systemd has them, None = no set; units that are not loaded are left out.

    Blocks, at most `timeout` seconds for each question: for audit and tests. Raises CannotWorkHereError as connect().
    """
    connection = _open_any(addresses, timeout, check=True)
    try:
        found = {unit: _read_one(connection, unit, timeout) for unit in units}
    except DBusError as problem:
        raise CannotWorkHereError(f"asking systemd for AllowedCPUs failed: {problem}") from problem
    finally:
        connection.close()
    return {unit: bytes_to_cpus(mask) for unit, mask in found.items() if mask is not None}


def _open_any(addresses: Sequence[str], timeout: float, *, check: bool) -> Connection:
    problems = []
    for address in addresses:
        try:
            return _open(address, time.monotonic() + timeout, check=check)
        except DBusError as problem:
            problems.append(str(problem))
    raise CannotWorkHereError(
        f"systemd does not answer over D-Bus: {'; '.join(problems)}",
        hint="needed only where systemd is PID 1; elsewhere cgroup files are enough",
    )


def _open(address: str, deadline: float, *, check: bool) -> Connection:
    connection = Connection.open(address, deadline)
    try:
        _introduce(connection, deadline)
        if check:
            _check_systemd(connection, deadline)
    except DBusError as problem:
        connection.close()
        raise DBusError(f"{address}: {problem}") from problem
    return connection


def _introduce(connection: Connection, deadline: float) -> None:
    """Hello on a bus, and the subscription to Reloading. systemd's private socket knows no Hello and says so."""
    hello = connection.call(message_bus.Hello(), deadline)
    if hello.header.message_type is MessageType.method_return:
        rule = MatchRule(type="signal", sender=_SYSTEMD, interface=_MANAGER.interface, member="Reloading")
        result_of(connection.call(message_bus.AddMatch(rule), deadline))
    subscribe = new_method_call(_MANAGER, "Subscribe")
    # systemd may be busy (in a reload, for one); nobody waits for this
    subscribe.header.flags = MessageFlag.no_reply_expected
    connection.send(subscribe)


def _check_systemd(connection: Connection, deadline: float) -> None:
    name, text = error_of(connection.call(Properties(_ROOT_SLICE).get("AllowedCPUs"), deadline))
    if name.endswith((".UnknownProperty", ".UnknownInterface")):
        raise DBusError(f"this systemd does not know AllowedCPUs ({text}); it does since version 244")
    if name:
        raise DBusError(f"{name}: {text}")


def _set_properties(unit: str, cpus: CPUSet | None) -> Message:
    properties = [("AllowedCPUs", ("ay", cpus_to_bytes(cpus)))]
    return new_method_call(_MANAGER, "SetUnitProperties", "sba(sv)", (unit, True, properties))


def _read_one(connection: Connection, unit: str, timeout: float) -> bytes | None:
    """The property's bytes; None for a unit that is not loaded."""
    deadline = time.monotonic() + timeout
    answer = connection.call(new_method_call(_MANAGER, "GetUnit", "s", (unit,)), deadline)
    if error_of(answer)[0] == _NO_SUCH_UNIT:
        return None
    interface = f"{_SYSTEMD}.{unit.rpartition('.')[2].capitalize()}"
    address = DBusAddress(result_of(answer), bus_name=_SYSTEMD, interface=interface)
    _signature, mask = result_of(connection.call(Properties(address).get("AllowedCPUs"), deadline))
    return bytes(mask)
