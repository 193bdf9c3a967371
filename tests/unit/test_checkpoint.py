"""The state file: what is written can be read, and nothing that happens to it stops us."""

from __future__ import annotations

import errno
import json
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from enforcer.checkpoint import KEPT_ASIDE, RETRY, Checkpointer, Loaded, load, save

BOOT = "b0072d32-0000-4000-8000-000000000001"
OTHER_BOOT = "b0072d32-0000-4000-8000-000000000002"
DOCUMENT = {"assignments": {"/kubepods/poda/c1": "2-3"}, "shared": "0-1", "since": 1.5, "name": "é\n\ud800"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "state.json"


def files(path: Path) -> list[str]:
    return sorted(one.name for one in path.parent.iterdir())


def test_what_is_saved_is_loaded(path: Path) -> None:
    assert save(path, DOCUMENT, BOOT) is None
    assert load(path, BOOT) == Loaded(DOCUMENT)
    assert files(path) == ["state.json"]
    assert path.stat().st_mode & 0o777 == 0o600


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.text(), json_values))
def test_any_document_of_json_values(path: Path, document: dict[str, Any]) -> None:
    assert save(path, document, BOOT) is None
    assert load(path, BOOT) == Loaded(document)


def test_a_missing_file_is_no_problem(path: Path) -> None:
    assert load(path, BOOT) == Loaded(None, None, None)


def test_a_later_save_replaces_an_earlier_one_and_a_temporary_left_by_a_kill(path: Path) -> None:
    save(path, {"n": 1}, BOOT)
    (path.parent / ".state.json.new").write_text("half a f")
    assert save(path, {"n": 2}, BOOT) is None
    assert load(path, BOOT).document == {"n": 2}
    assert files(path) == ["state.json"]


def edited(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    whole = json.loads(path.read_text())
    change(whole)
    path.write_text(json.dumps(whole))


UNUSABLE: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda p: p.write_text(""), "not JSON"),
    "cut": (lambda p: os.truncate(p, p.stat().st_size - 7), "not JSON"),
    "zeros": (lambda p: p.write_bytes(b"\0" * 400), "not JSON"),
    "not UTF-8": (lambda p: p.write_bytes(b'{"a": "\xff"}'), "not JSON"),
    "deep": (lambda p: p.write_text("[" * 100000), "not JSON"),
    "long number": (lambda p: p.write_text("9" * 10000), "not JSON"),
    "a list": (lambda p: p.write_text("[]"), "is not ours"),
    "the kubelet's": (lambda p: p.write_text('{"policyName":"none","checksum":1353318690}'), "is not ours"),
    "future": (lambda p: edited(p, lambda w: w.update(version=2)), "has version 2; this program reads version 1"),
    "no version": (lambda p: edited(p, lambda w: w.pop("version")), "has version None"),
    "edited": (lambda p: edited(p, lambda w: w["document"].update(shared="0")), "its checksum does not fit"),
    "other boot forged": (lambda p: edited(p, lambda w: w.update(boot_id=OTHER_BOOT)), "its checksum does not fit"),
    "no document": (lambda p: edited(p, lambda w: w.pop("document")), "its checksum does not fit"),
    "infinite": (lambda p: edited(p, lambda w: w.update(document={"a": float("inf")})), "its checksum does not fit"),
    "other boot": (lambda p: save(p, DOCUMENT, OTHER_BOOT), f"is of another boot ({OTHER_BOOT}"),
    "too large": (lambda p: os.truncate(p, 1 << 40), "are too many"),
    "a link": (lambda p: (p.unlink(), p.symlink_to("/etc/passwd")), "cannot be read"),
    "a folder": (lambda p: (p.unlink(), p.mkdir()), "not a regular file"),
    "a pipe": (lambda p: (p.unlink(), os.mkfifo(p)), "not a regular file"),
    "a stranger's": (lambda p: os.chown(p, 12345, -1), "it belongs to user 12345"),
}


@pytest.mark.parametrize(("spoil", "words"), UNUSABLE.values(), ids=UNUSABLE.keys())
def test_what_cannot_be_used_is_moved_aside_and_told(path: Path, spoil: Callable[[Path], object], words: str) -> None:
    if words.endswith("12345") and os.geteuid() != 0:
        pytest.skip("needs root")
    save(path, DOCUMENT, BOOT)
    spoil(path)
    loaded = load(path, BOOT)
    assert loaded.document is None
    assert loaded.moved_to == path.with_name("state.json.aside.1")
    assert loaded.problem is not None
    assert loaded.problem.startswith(f"state file {path} ")
    assert words in loaded.problem
    assert str(loaded.moved_to) in loaded.problem
    assert "\n" not in loaded.problem
    assert files(path) == ["state.json.aside.1"]
    assert load(path, BOOT) == Loaded()
    assert save(path, DOCUMENT, BOOT) is None
    assert load(path, BOOT).document == DOCUMENT


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary())
def test_any_bytes(path: Path, data: bytes) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    loaded = load(path, BOOT)
    assert loaded.document is None
    assert loaded.problem


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_one_byte_of_difference_is_never_taken_for_our_state(path: Path, data: st.DataObject) -> None:
    save(path, DOCUMENT, BOOT)
    whole = bytearray(path.read_bytes())
    where = data.draw(st.integers(0, len(whole) - 1))
    whole[where] ^= data.draw(st.integers(1, 255))
    path.write_bytes(whole)
    assert load(path, BOOT).document in (None, DOCUMENT)


def test_only_the_newest_few_are_kept_aside(path: Path) -> None:
    path.parent.mkdir()
    for number in range(KEPT_ASIDE + 2):
        path.write_text(f"junk {number}")
        load(path, BOOT)
    kept = {one.name: one.read_text() for one in path.parent.iterdir()}
    assert kept == {"state.json.aside.1": "junk 4", "state.json.aside.2": "junk 3", "state.json.aside.3": "junk 2"}


def test_a_file_that_cannot_be_moved_aside_stops_nothing(path: Path) -> None:
    path.parent.mkdir()
    (path.parent / "state.json.aside.3" / "in the way").mkdir(parents=True)
    (path.parent / "state.json.aside.2").write_text("")
    path.write_text("junk")
    loaded = load(path, BOOT)
    assert loaded.moved_to is None
    assert loaded.problem is not None
    assert "could not be moved aside" in loaded.problem
    assert save(path, DOCUMENT, BOOT) is None
    assert load(path, BOOT).document == DOCUMENT


@contextmanager
def tiny_files() -> Iterator[None]:
    """The kernel stops every write to a file at 64 bytes: a real write that ends half way.

    No fixture: pytest's own output, between a test and its teardown, may go to a file as well.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_write_that_ends_half_way(path: Path) -> None:
    save(path, {"n": 1}, BOOT)
    with tiny_files():
        problem = save(path, {"n": 2}, BOOT)
    assert problem is not None
    assert "File too large" in problem
    assert load(path, BOOT).document == {"n": 1}
    assert files(path) == ["state.json"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("step", ["fdopen", "replace"])
def test_a_full_disk(path: Path, monkeypatch: pytest.MonkeyPatch, step: str, code: int) -> None:
    save(path, {"n": 1}, BOOT)

    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(Path if step == "replace" else os, step, fail)
        problem = save(path, {"n": 2}, BOOT)
    assert problem is not None
    assert problem.startswith(f"state file {path} not written: {os.strerror(code)}; ")
    assert "\n" not in problem
    assert load(path, BOOT).document == {"n": 1}
    assert files(path) == ["state.json"]


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.EMFILE])
def test_a_folder_that_takes_no_file(path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    save(path, {"n": 1}, BOOT)
    really = os.open

    def refuse(name: Any, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_CREAT:
            raise OSError(code, os.strerror(code))
        return really(name, flags, mode)

    monkeypatch.setattr(os, "open", refuse)
    problem = save(path, {"n": 2}, BOOT)
    assert problem is not None
    assert os.strerror(code) in problem
    assert load(path, BOOT).document == {"n": 1}


def test_a_file_where_the_folder_should_be(path: Path) -> None:
    path.parent.write_text("")
    problem = save(path, DOCUMENT, BOOT)
    assert problem is not None
    assert "state.json not written: " in problem
    assert load(path, BOOT).document is None


@pytest.mark.parametrize("value", [float("inf"), float("nan"), {1}, b"x"])
def test_what_json_cannot_hold_is_told_and_changes_nothing(path: Path, value: object) -> None:
    save(path, {"n": 1}, BOOT)
    problem = save(path, {"n": value}, BOOT)
    assert problem is not None
    assert "what JSON cannot" in problem
    assert load(path, BOOT).document == {"n": 1}


class KilledError(BaseException):
    pass


@pytest.mark.parametrize("step", ["open", "fdopen", "replace"])
def test_a_kill_at_any_step_leaves_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    save(path, {"n": 1}, BOOT)

    def kill(*_: object, **__: object) -> None:
        raise KilledError

    with monkeypatch.context() as patch, pytest.raises(KilledError):
        patch.setattr(Path if step == "replace" else os, step, kill)
        save(path, {"n": 2}, BOOT)
    assert load(path, BOOT).document == {"n": 1}
    assert save(path, {"n": 3}, BOOT) is None
    assert load(path, BOOT).document == {"n": 3}
    assert files(path) == ["state.json"]


class TestCheckpointer:
    @pytest.fixture
    def writer(self, path: Path) -> Checkpointer:
        return Checkpointer(path, BOOT, interval=0.1)

    def test_the_first_offer_is_due_at_once(self, writer: Checkpointer, path: Path) -> None:
        assert writer.due is None
        assert writer.flush(0.0) is None
        assert not path.exists()
        assert writer.offer(lambda: {"n": 1}, 5.0) == 5.0
        assert writer.due == 5.0
        assert writer.flush(5.0) is None
        assert writer.due is None
        assert load(path, BOOT).document == {"n": 1}

    def test_at_most_one_write_in_an_interval_and_the_newest_counts(self, writer: Checkpointer, path: Path) -> None:
        writer.offer(lambda: {"n": 1}, 5.0)
        writer.flush(5.0)
        assert writer.offer(lambda: pytest.fail("an old offer was asked for"), 5.01) == 5.1
        assert writer.offer(lambda: {"n": 3}, 5.04) == 5.1
        writer.flush(5.05)
        assert load(path, BOOT).document == {"n": 1}
        writer.flush(5.1)
        assert load(path, BOOT).document == {"n": 3}
        assert writer.offer(lambda: {"n": 4}, 9.0) == 9.0

    def test_a_busy_loop_writes_ten_times_a_second(self, writer: Checkpointer) -> None:
        asked: list[float] = []
        for millisecond in range(1000):
            now = millisecond / 1000
            writer.offer(lambda now=now: asked.append(now) or {}, now)  # type: ignore[misc]
            writer.flush(now)
        assert len(asked) == 10

    def test_forced_at_once(self, writer: Checkpointer, path: Path) -> None:
        writer.offer(lambda: {"n": 1}, 5.0)
        writer.flush(5.0)
        writer.offer(lambda: {"n": 2}, 5.01)
        writer.flush(5.01, force=True)
        assert load(path, BOOT).document == {"n": 2}

    def test_a_failure_is_told_once_tried_again_and_its_end_told(self, writer: Checkpointer, path: Path) -> None:
        path.parent.write_text("in the way")
        writer.offer(lambda: {"n": 1}, 5.0)
        told = writer.flush(5.0)
        assert told is not None
        assert "not written" in told
        assert writer.problem == told
        assert writer.due == 5.0 + RETRY
        assert writer.flush(5.0 + RETRY) is None
        path.parent.unlink()
        assert writer.flush(5.5 + RETRY) is None
        assert writer.problem == told
        assert writer.flush(5.0 + 2 * RETRY) == f"state file {path} is written again"
        assert writer.problem is None
        assert writer.due is None
        assert load(path, BOOT).document == {"n": 1}
