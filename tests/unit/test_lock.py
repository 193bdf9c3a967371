"""The lock of a state directory."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from enforcer.core.errors import CannotWorkHereError
from enforcer.lock import take_lock


def test_one_at_a_time(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "here"
    wrong = f"another cpuset-enforcer runs with the state directory {folder}"
    with take_lock(folder), pytest.raises(CannotWorkHereError, match=wrong):
        take_lock(folder)
    take_lock(folder).close()


@pytest.mark.parametrize("before", [None, 0o644])
def test_nobody_else_may_hold_it(tmp_path: Path, before: int | None) -> None:
    """Who may read the file may lock it, and keep the agent from starting."""
    lock = tmp_path / "lock"
    if before is not None:
        lock.touch(before)
    with take_lock(tmp_path):
        assert stat.S_IMODE(lock.stat().st_mode) == 0o600


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotWorkHereError, match="state directory .*/file/state: Not a directory"):
        take_lock(tmp_path / "file" / "state")
