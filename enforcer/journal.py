"""Talking to systemd's journal and service manager from a daemon."""

from __future__ import annotations

import logging
import os
import socket
import sys

log = logging.getLogger(__name__)


def sd_notify(text: str) -> None:
    """Tells systemd (sd_notify(3)); nothing happens where it does not listen."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        try:
            sock.connect("\0" + address[1:] if address.startswith("@") else address)
            sock.send(text.encode())
        except OSError as error:
            log.warning("systemd cannot be told %r: %s", text, error)


def set_up_logging(verbose: bool) -> None:
    """To standard error; under systemd the journal adds the time, and reads the level from a prefix (sd-daemon(3))."""
    journal = "JOURNAL_STREAM" in os.environ
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JournalFormatter() if journal else logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.DEBUG if verbose else logging.INFO, handlers=[handler])


class _JournalFormatter(logging.Formatter):
    _PRIORITY = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}

    def format(self, record: logging.LogRecord) -> str:
        priority = f"<{self._PRIORITY.get(record.levelno, 6)}>"
        return "\n".join(priority + line for line in super().format(record).splitlines())
