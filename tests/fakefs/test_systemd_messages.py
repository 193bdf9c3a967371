"""What UnitProperties says to systemd and makes of its answers, with a scripted peer at the other end of a socket."""

from __future__ import annotations

import json
import re
import select
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jeepney import (
    DBusAddress,
    HeaderFields,
    Message,
    Parser,
    new_error,
    new_method_return,
    new_signal,
)

from enforcer.core.cpuset import CPUSet
from enforcer.core.errors import CannotWorkHereError
from enforcer.kernel.dbus import Connection
from enforcer.kernel.systemd import (
    Disconnected,
    Event,
    Reloading,
    Reply,
    UnitProperties,
    bytes_to_cpus,
    cpus_to_bytes,
    read_allowed_cpus,
)

TABLES = Path(__file__).parents[1] / "data/kubelet_tables.json"
MANAGER = DBusAddress(
    "/org/freedesktop/systemd1", bus_name="org.freedesktop.systemd1", interface="org.freedesktop.systemd1.Manager"
)
SLICE, SCOPE = "kubepods-burstable.slice", "cri-containerd-0a1b.scope"


def cpus(text: str) -> CPUSet:
    return CPUSet.parse(text)


def bits_table() -> list[Any]:
    rows = json.loads(TABLES.read_text())["tables"]["systemd_cpu_bits"]
    # Blanks and empty pieces are about the table's own text parser; a row without an answer only about that.
    texts = [(",".join(filter(None, row["text"].replace(" ", "").replace("\t", "").split(","))), row) for row in rows]
    return [pytest.param(text, row["expected"], id=row["id"]) for text, row in texts if row["expected"] is not None]


@pytest.mark.parametrize(("text", "expected"), bits_table())
def test_mask_is_what_the_runtimes_send(text: str, expected: list[int]) -> None:
    assert list(cpus_to_bytes(cpus(text))) == expected


@given(st.sets(st.integers(0, 1023), min_size=1))
def test_mask_reads_back(ids: set[int]) -> None:
    mask = cpus_to_bytes(CPUSet(ids))
    assert bytes_to_cpus(mask) == CPUSet(ids) == bytes_to_cpus(mask + b"\0\0")
    assert len(mask) == max(ids) // 8 + 1


def test_no_set_is_no_byte() -> None:
    assert cpus_to_bytes(None) == b""
    assert bytes_to_cpus(b"") is None
    assert bytes_to_cpus(b"\0\0") is None


class Peer:
    """systemd's end of the connection: reads calls, answers when told to."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self.socket.settimeout(5)
        self._parser = Parser()
        self._waiting: list[Message] = []

    def call(self) -> Message:
        while not self._waiting:
            self._waiting += self._parser.feed(self.socket.recv(65536))
        return self._waiting.pop(0)

    def asked(self) -> bool:
        """Is there a call that was not read yet?"""
        return bool(self._waiting or select.select([self.socket], [], [], 0.05)[0])

    def send(self, message: Message) -> None:
        self.socket.sendall(message.serialise(serial=7))

    def answer(self, call: Message) -> None:
        self.send(new_method_return(call))

    def refuse(self, call: Message, name: str, text: str) -> None:
        self.send(new_error(call, name, "s", (text,)))


@pytest.fixture
def ends() -> Iterator[tuple[UnitProperties, Peer]]:
    ours, theirs = socket.socketpair()
    units = UnitProperties(Connection(ours), ())
    yield units, Peer(theirs)
    units.close()
    theirs.close()


Ends = tuple[UnitProperties, Peer]


def value_in(call: Message) -> tuple[str, bytes]:
    """Unit and mask of a SetUnitProperties call, after a look at the rest of it."""
    fields = call.header.fields
    assert (fields[HeaderFields.member], fields[HeaderFields.signature]) == ("SetUnitProperties", "sba(sv)")
    unit, runtime, [(name, (signature, mask))] = call.body
    assert (runtime, name, signature) == (True, "AllowedCPUs", "ay")
    return unit, mask


def test_the_call_goes_to_the_manager_at_once(ends: Ends) -> None:
    units, peer = ends
    units.set_allowed_cpus(SLICE, cpus("0-3,32-33"))
    call = peer.call()
    fields = call.header.fields
    assert fields[HeaderFields.path] == "/org/freedesktop/systemd1"
    assert fields[HeaderFields.interface] == "org.freedesktop.systemd1.Manager"
    assert fields[HeaderFields.destination] == "org.freedesktop.systemd1"
    assert value_in(call) == (SLICE, bytes([15, 0, 0, 0, 3]))


def test_none_resets(ends: Ends) -> None:
    units, peer = ends
    units.set_allowed_cpus(SLICE, None)
    assert value_in(peer.call()) == (SLICE, b"")


def test_an_empty_set_is_refused(ends: Ends) -> None:
    units, peer = ends
    with pytest.raises(ValueError, match="cannot be an empty set"):
        units.set_allowed_cpus(SLICE, CPUSet())
    assert not peer.asked()


def test_reply_names_unit_and_value(ends: Ends) -> None:
    units, peer = ends
    units.set_allowed_cpus(SLICE, cpus("1"))
    assert units.in_flight() == {SLICE: cpus("1")}
    peer.answer(peer.call())
    assert units.on_readable() == [Reply(SLICE, cpus("1"))]
    assert units.in_flight() == {}


def test_burst_is_coalesced_to_the_newest_value(ends: Ends) -> None:
    units, peer = ends
    for last in range(1, 8):
        units.set_allowed_cpus(SLICE, CPUSet(range(last)))
    first = peer.call()
    assert not peer.asked()
    assert (units.in_flight(), units.pending()) == ({SLICE: cpus("0")}, {SLICE: cpus("0-6")})
    peer.answer(first)
    assert units.on_readable() == [Reply(SLICE, cpus("0"))]
    second = peer.call()
    assert value_in(second) == (SLICE, b"\x7f")
    peer.answer(second)
    assert units.on_readable() == [Reply(SLICE, cpus("0-6"))]
    assert not peer.asked()
    assert (units.in_flight(), units.pending()) == ({}, {})


def test_units_do_not_wait_for_each_other_and_answers_may_come_in_any_order(ends: Ends) -> None:
    units, peer = ends
    units.set_allowed_cpus(SLICE, cpus("0"))
    units.set_allowed_cpus(SCOPE, cpus("1"))
    first, second = peer.call(), peer.call()
    peer.answer(second)
    peer.answer(first)
    assert units.on_readable() == [Reply(SCOPE, cpus("1")), Reply(SLICE, cpus("0"))]


def test_same_value_again_is_sent_again(ends: Ends) -> None:
    """Somebody may have changed it since the call that is under way was carried out."""
    units, peer = ends
    units.set_allowed_cpus(SLICE, cpus("0"))
    units.set_allowed_cpus(SLICE, cpus("0"))
    peer.answer(peer.call())
    units.on_readable()
    assert value_in(peer.call()) == (SLICE, b"\x01")


def test_unit_that_has_gone(ends: Ends) -> None:
    units, peer = ends
    units.set_allowed_cpus(SCOPE, cpus("2-3"))
    peer.refuse(peer.call(), "org.freedesktop.systemd1.NoSuchUnit", f"Unit {SCOPE} not loaded.")
    [reply] = units.on_readable()
    assert isinstance(reply, Reply)
    assert (reply.ok, reply.unit_gone, reply.manager_away) == (False, True, False)
    assert reply.message == f"Unit {SCOPE} not loaded."
    assert (units.in_flight(), units.pending()) == ({}, {})


def test_systemd_away_from_the_bus(ends: Ends) -> None:
    units, peer = ends
    units.set_allowed_cpus(SCOPE, cpus("2-3"))
    peer.refuse(peer.call(), "org.freedesktop.DBus.Error.NoReply", "Message recipient disconnected")
    [reply] = units.on_readable()
    assert isinstance(reply, Reply)
    assert (reply.ok, reply.unit_gone, reply.manager_away) == (False, False, True)


def test_reloading_is_an_event(ends: Ends) -> None:
    units, peer = ends
    for active in (True, False):
        peer.send(new_signal(MANAGER, "Reloading", "b", (active,)))
    peer.send(new_signal(MANAGER, "UnitNew", "so", ("a.scope", "/a")))
    peer.send(new_signal(MANAGER, "Reloading"))
    assert units.on_readable() == [Reloading(True), Reloading(False)]


def test_messages_come_in_pieces(ends: Ends) -> None:
    units, peer = ends
    units.set_allowed_cpus(SLICE, cpus("5"))
    answer = new_method_return(peer.call()).serialise(serial=1)
    events: list[Event] = []
    for at in range(len(answer)):
        assert events == []
        peer.socket.sendall(answer[at : at + 1])
        events += units.on_readable()
    assert events == [Reply(SLICE, cpus("5"))]


def test_a_message_nobody_can_read_is_skipped(ends: Ends) -> None:
    """On a bus anyone may send us a signal; one with an unknown header field must not cost us the connection."""
    units, peer = ends
    units.set_allowed_cpus(SLICE, cpus("5"))
    good = new_method_return(peer.call()).serialise(serial=1)
    field = struct.pack("<BB2sI", 99, 1, b"u\0", 1)
    bad = struct.pack("<4BIII", ord("l"), 4, 0, 1, 0, 3, len(field)) + field
    peer.socket.sendall(bad + good)
    assert units.on_readable() == [Reply(SLICE, cpus("5"))]
    assert units.connected


def test_a_peer_that_is_no_dbus_is_left(ends: Ends) -> None:
    units, peer = ends
    peer.socket.sendall(b"HTTP/1.1 400 Bad Request\r\n")
    [event] = units.on_readable()
    assert isinstance(event, Disconnected)
    assert "does not speak D-Bus" in event.reason


def test_lost_connection_keeps_what_was_asked(ends: Ends) -> None:
    units, peer = ends
    units.set_allowed_cpus(SLICE, cpus("0"))
    units.set_allowed_cpus(SCOPE, cpus("1"))
    units.set_allowed_cpus(SCOPE, cpus("2"))
    call = peer.call()
    peer.answer(call)
    peer.socket.close()
    reply, lost = units.on_readable()
    assert reply == Reply(SLICE, cpus("0"))
    assert isinstance(lost, Disconnected)
    assert not units.connected
    assert units.fileno() == -1
    units.set_allowed_cpus(SLICE, cpus("3"))
    assert units.pending() == {SCOPE: cpus("2"), SLICE: cpus("3")}
    assert units.in_flight() == {}
    assert units.on_readable() == []


def test_sending_to_a_closed_peer_is_told_by_reading(ends: Ends) -> None:
    units, peer = ends
    peer.socket.close()
    units.set_allowed_cpus(SLICE, cpus("0"))
    assert select.select([units.fileno()], [], [], 0)[0]
    [event] = units.on_readable()
    assert isinstance(event, Disconnected)
    assert units.pending() == {SLICE: cpus("0")}


def test_a_full_socket_is_waited_for(ends: Ends) -> None:
    units, peer = ends
    names = [f"kubepods-pod{number}.slice" for number in range(3000)]
    for name in names:
        units.set_allowed_cpus(name, cpus("0-1023"))
    assert units.wants_write()
    heard = []
    while len(heard) < len(names):
        heard.append(value_in(peer.call())[0])
        units.on_writable()
    assert heard == names
    assert not units.wants_write()


class Daemon:
    """A bus daemon (or systemd's private socket) that listens at a path and answers the calls of connect()."""

    def __init__(self, path: Path, *, private: bool = False, allowed_cpus: tuple[str, Any] | str = ("ay", b"")) -> None:
        self.path, self.private, self.allowed_cpus = str(path), private, allowed_cpus
        self.calls: list[str] = []
        self.first_lines = b""
        self.welcome = b"OK 0123456789abcdef0123456789abcdef\r\n"
        self.served: list[Peer] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                peer = Peer(self._listener.accept()[0])
            except OSError:
                return
            self.first_lines = peer.socket.recv(1024)
            # systemd's own socket sends signals right behind
            early = new_signal(MANAGER, "UnitNew", "so", ("a.scope", "/a")).serialise(serial=1)
            peer.socket.sendall(self.welcome + (early if self.private else b""))
            self.served.append(peer)
            while self._one(peer) not in ("Get", "SetUnitProperties", ""):
                pass

    def _one(self, peer: Peer) -> str:
        try:
            call = peer.call()
        except OSError:
            return ""
        member = str(call.header.fields[HeaderFields.member])
        self.calls.append(member)
        if member == "Hello" and self.private:
            peer.refuse(call, "org.freedesktop.DBus.Error.UnknownObject", "Unknown object '/org/freedesktop/DBus'.")
        elif member == "Hello":
            peer.send(new_method_return(call, "s", (":1.5",)))
        elif member == "Get" and isinstance(self.allowed_cpus, str):
            peer.refuse(call, self.allowed_cpus, "no such thing")
        elif member == "Get":
            peer.send(new_method_return(call, "v", (self.allowed_cpus,)))
        elif member in ("AddMatch", "SetUnitProperties"):
            peer.answer(call)
        return member

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for peer in self.served:
            peer.socket.close()
        self._thread.join(5)


def test_connect_to_a_bus(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path / "bus")
    units = UnitProperties.connect([daemon.path])
    daemon.close()
    units.close()
    assert re.fullmatch(rb"\0AUTH EXTERNAL [0-9a-f]+\r\nBEGIN\r\n", daemon.first_lines)
    assert daemon.calls == ["Hello", "AddMatch", "Subscribe", "Get"]


def test_connect_to_systemds_own_socket(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path / "private", private=True)
    UnitProperties.connect([str(tmp_path / "absent"), daemon.path]).close()
    daemon.close()
    assert daemon.calls == ["Hello", "Subscribe", "Get"]


def test_no_systemd(tmp_path: Path) -> None:
    with pytest.raises(CannotWorkHereError) as caught:
        UnitProperties.connect([str(tmp_path / "bus"), str(tmp_path / "private")])
    assert f"{tmp_path}/bus: No such file or directory; {tmp_path}/private: No such" in caught.value.message


@pytest.mark.parametrize(
    ("error", "told"),
    [
        ("org.freedesktop.DBus.Error.UnknownProperty", "this systemd does not know AllowedCPUs"),
        ("org.freedesktop.DBus.Error.ServiceUnknown", "ServiceUnknown: no such thing"),
    ],
)
def test_a_bus_without_a_systemd_that_can_do_it(tmp_path: Path, error: str, told: str) -> None:
    daemon = Daemon(tmp_path / "bus", allowed_cpus=error)
    with pytest.raises(CannotWorkHereError, match=told):
        UnitProperties.connect([daemon.path])
    daemon.close()


def test_a_peer_that_refuses_us(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path / "bus")
    daemon.welcome = b"REJECTED ANONYMOUS\r\n"
    with pytest.raises(CannotWorkHereError, match="bus: the peer refused the authentication: b'REJECTED ANONYMOUS'"):
        UnitProperties.connect([daemon.path])
    daemon.close()


def test_a_silent_peer_costs_no_more_than_the_timeout(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "mute"))
        listener.listen()
        with pytest.raises(CannotWorkHereError, match="mute: timed out"):
            UnitProperties.connect([str(tmp_path / "mute")], timeout=0.1)


def test_reconnect_sends_what_is_pending(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path / "bus")
    units = UnitProperties.connect([daemon.path])
    daemon.close()
    units.set_allowed_cpus(SLICE, cpus("0-1"))
    [lost] = units.on_readable()
    assert isinstance(lost, Disconnected)
    with pytest.raises(CannotWorkHereError):
        units.reconnect()
    assert units.pending() == {SLICE: cpus("0-1")}
    again = Daemon(tmp_path / "bus2")
    (tmp_path / "bus").unlink()
    (tmp_path / "bus2").rename(tmp_path / "bus")
    units.reconnect(timeout=5)
    assert select.select([units.fileno()], [], [], 5)[0]
    assert units.on_readable() == [Reply(SLICE, cpus("0-1"))]
    again.close()
    units.close()


def test_reading_what_systemd_has_needs_an_answer_in_time(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path / "bus")
    with pytest.raises(
        CannotWorkHereError, match="asking systemd for AllowedCPUs failed: no answer to GetUnit in time"
    ):
        read_allowed_cpus([SLICE], [daemon.path], timeout=0.2)
    daemon.close()
