"""Standard output that is full or closed: every command says so, none with a traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    "words", [["--help"], ["--version"], ["simulate", "--help"], ["record", "-"], ["topology"], ["completion", "bash"]]
)
def test_no_room_for_what_a_command_prints(words: list[str]) -> None:
    command = [sys.executable, "-m", "enforcer", *words]
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, "Traceback" in ended.stderr) == (3, False), ended.stderr
    assert "standard output cannot be written: No space left on device" in ended.stderr


@pytest.mark.parametrize("words", [["record", "-"], ["status"], ["status", "--json"], ["simulate"], ["topology"]])
def test_closed_standard_output(words: list[str]) -> None:
    script = 'exec "$0" -m enforcer "$@" >&-'
    command = ["sh", "-c", script, sys.executable, *words]
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, "Traceback" in ended.stderr) == (3, False), ended.stderr
    assert "standard output is closed" in ended.stderr
