"""Exporter: serves /metrics from the agent's state file, in a process of its own.

A scrape costs the agent nothing: it reads no socket and renders nothing. A client that never reads, or opens many
connections, can only keep others from scraping for a few seconds.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from enforcer.core.errors import CannotWorkHereError, ConfigError
from enforcer.metrics import StateCollector

log = logging.getLogger(__name__)

_CLIENT_SECONDS: Final = 5.0
_CLIENTS: Final = 8
_PAGE: Final = b"<html><head><title>cpuset-enforcer</title></head><body><a href='/metrics'>metrics</a></body></html>\n"


def read_document(files: tuple[Path, ...]) -> tuple[dict[str, Any] | None, float | None]:
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
        document = json.loads(newest[1].read_bytes())["document"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        log.warning("%s cannot be read: %s", newest[1], error)
        return None, age
    return (document if isinstance(document, dict) else None), age


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
    request_queue_size = 16

    def __init__(self, address: tuple[str, int], files: tuple[Path, ...]) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(StateCollector(lambda: read_document(files)))
        self._places = threading.BoundedSemaphore(_CLIENTS)
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        try:
            super().__init__(address, _Handler)
        except (OSError, OverflowError) as error:
            raise CannotWorkHereError(
                f"metrics cannot listen on {address[0]}:{address[1]}: {error}",
                hint="another process has the port, or the address is not this machine's; set metrics-listen",
            ) from error

    def process_request(self, request: Any, client_address: Any) -> None:
        """One thread for each client, up to a number; more wait in the kernel's queue."""
        if not self._places.acquire(timeout=_CLIENT_SECONDS):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Gives the place free at the end, whatever happened."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no event."""


class _Handler(BaseHTTPRequestHandler):
    timeout = _CLIENT_SECONDS
    server: Exporter

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            encode, content_type = choose_encoder(self.headers.get("Accept", ""))
            self._answer(200, content_type, encode(self.server.registry))
        elif path == "/":
            self._answer(200, "text/html; charset=utf-8", _PAGE)
        else:
            self._answer(404, "text/plain; charset=utf-8", b"there is /metrics only\n")

    def _answer(self, code: int, content_type: str, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Scrapes are not logged."""
