"""Exporter: serves /metrics from the agent's state file, in a process of its own.

A scrape costs the agent nothing: it reads no socket and renders nothing. A client that never reads, asks a byte at a
time or opens many connections can only keep others from scraping for a few seconds: who has been here longest goes when
somebody waits.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import socketserver
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, choose_encoder, generate_latest

from enforcer.checkpoint import peek
from enforcer.core.errors import CannotWorkHereError, ConfigError
from enforcer.metrics import StateCollector

log = logging.getLogger(__name__)

_CLIENT_SECONDS: Final = 5.0
_CLIENTS: Final = 8
# Who asks at once, as Prometheus does, has its answer by then.
_PATIENCE: Final = 0.25
_GOES: Final = 0.01
_WAITING: Final = 64
_PAGE: Final = b"<html><head><title>cpuset-enforcer</title></head><body><a href='/metrics'>metrics</a></body></html>\n"


def read_document(files: tuple[Path, ...], boot_id: str) -> tuple[dict[str, Any] | None, float | None]:
    """The newest of the state files as (document, age in seconds); (None, None) where there is none to read."""
    newest: tuple[float, Path] | None = None
    for file in files:
        try:
            newest = max(newest or (0.0, file), (file.stat().st_mtime, file))
        except OSError:
            continue
    if newest is None:
        return None, None
    age = max(0.0, time.time() - newest[0])
    try:
        return peek(newest[1], boot_id), age
    except (OSError, ValueError) as error:
        log.warning("%s cannot be used: %s", newest[1], error)
        return None, age


def parse_address(text: str) -> tuple[str, int]:
    """("127.0.0.1", 9967) of "127.0.0.1:9967", "[::1]:9967" or ":9967" (all addresses); raises ConfigError."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"metrics-listen = {text!r}: wanted HOST:PORT, such as 127.0.0.1:9967 or [::1]:9967")
    return host.strip("[]"), int(port)


class Exporter(ThreadingHTTPServer):
    """Serves until it is shut down. Raises CannotWorkHereError when the address is taken or not there."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = _WAITING

    def __init__(self, address: tuple[str, int], files: tuple[Path, ...], boot_id: str) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(StateCollector(lambda: read_document(files, boot_id)))
        self._places = threading.BoundedSemaphore(_CLIENTS)
        self._lock = threading.Lock()
        self._since: dict[socket.socket, float] = {}  # who has a place, the longest first
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        try:
            super().__init__(address, _Handler)
        except (OSError, OverflowError, TypeError, UnicodeError) as error:
            raise CannotWorkHereError(
                f"metrics cannot listen on {address[0]}:{address[1]}: {error}",
                hint="another process has the port, or the address is not this machine's; set metrics-listen",
            ) from error

    def server_bind(self) -> None:
        """Without a look at the DNS, which may keep a start for half a minute."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        """One thread for each client, up to a number; more wait in the kernel's queue until somebody's time is over."""
        while not self._places.acquire(timeout=self._turn_out_the_longest()):
            pass
        with self._lock:
            self._since[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Gives the place free, whatever has happened, also when no thread could be started."""
        with self._lock:
            had_a_place = self._since.pop(request, None) is not None
        super().shutdown_request(request)
        if had_a_place:
            self._places.release()

    def _turn_out_the_longest(self) -> float:
        """Where all places are taken and its time is over: its thread sees the end of its connection and gives the
        place free. How long to wait for a place now, in seconds."""
        with self._lock:
            if len(self._since) < _CLIENTS:
                return _PATIENCE
            longest, since = next(iter(self._since.items()))
            left = since + _PATIENCE - time.monotonic()
            if left > 0:
                return left
            with contextlib.suppress(OSError):
                longest.shutdown(socket.SHUT_RDWR)
            return _GOES

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no event."""


class _Handler(BaseHTTPRequestHandler):
    timeout = _CLIENT_SECONDS
    server: Exporter

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            self._answer(200, *self._metrics())
        elif path == "/":
            self._answer(200, "text/html; charset=utf-8", _PAGE)
        else:
            self._answer(404, "text/plain; charset=utf-8", b"there is /metrics only\n")

    def _metrics(self) -> tuple[str, bytes]:
        try:
            encode, content_type = choose_encoder(self.headers.get("Accept", ""))
        except (TypeError, ValueError):  # "version=x" in the header
            return CONTENT_TYPE_PLAIN_0_0_4, generate_latest(self.server.registry)
        return content_type, encode(self.server.registry)

    def _answer(self, code: int, content_type: str, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Scrapes are not logged."""
