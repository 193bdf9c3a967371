"""record: a node in a file and back; whatever else is in such a file is told in words and does no harm."""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import random
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enforcer import record
from enforcer.config import Config
from enforcer.core.cpuset import CPUSet
from enforcer.core.errors import ConfigError
from enforcer.core.node import Group, NodeView, Phase
from enforcer.core.state import Held
from enforcer.describe import parse
from enforcer.record import Recorded, archive
from enforcer.record.document import from_json, to_json
from enforcer.source import enforced
from tests.unit.random_nodes import described

Document = dict[str, Any]


def some_node(seed: int = 3) -> Recorded:
    node = enforced(parse(described(random.Random(seed)), "a node"))
    held = {"/kubepods/podp0": (Held(CPUSet([1]), 3.0), Held(CPUSet([2]), 4.0, claim=True, until=9.0))}
    state = replace(node.state, held=held)
    for _pod, one in list(node.view.containers())[:1]:
        nested = (Group(f"{one.group.path}/inner", CPUSet([1]), CPUSet([1])),)
        newborn = replace(one, phase=Phase.BIRTH, born=4.0, limits_since=5.0, given=CPUSet([1]), nested=nested)
        node = replace(node, view=node.view.with_container(replace(newborn, populated=False)))
    conflicts = {"/kubepods/podp0": (CPUSet([1, 2]), 11)}
    info = replace(node.info, conflicts=conflicts, drift_repairs=13)
    return replace(node, state=state, info=info, now=77.5, kubelet_policy="none", notes=("a note",))


def document() -> Document:
    found: Document = json.loads(json.dumps(to_json(some_node())))
    return found


def packed(value: object, **head: object) -> bytes:
    """A file whose checksum fits, whatever its document is."""
    body = json.dumps(value).encode()
    first = {"format": archive.FORMAT, "version": archive.VERSION, "sha256": hashlib.sha256(body).hexdigest(), **head}
    return gzip.compress(json.dumps(first).encode() + b"\n" + body + b"\n")


def read(data: bytes) -> Recorded:
    return from_json(archive.unpack(data, "the file"), "the file")


def refused(data: bytes) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        read(data)
    assert "the file" in caught.value.message or "topology" in caught.value.message
    assert caught.value.message.isprintable() and len(caught.value.message) < 500
    return caught.value


# --- there and back


@pytest.mark.parametrize("seed", range(40))
def test_what_was_written_is_read(seed: int) -> None:
    node = some_node(seed)
    back = read(archive.pack(to_json(node)))
    assert to_json(back) == to_json(node)
    assert back.policy == node.policy
    assert back.view.slices == node.view.slices
    assert back.view.topology.rows() == node.view.topology.rows()
    assert back.state.assignments == node.state.assignments
    assert back.state.held == node.state.held
    assert back.info.conflicts == node.info.conflicts
    assert (back.now, back.kubelet_policy, back.notes) == (77.5, "none", ("a note",))
    assert back.machine.online == node.machine.online


def test_the_same_node_gives_the_same_bytes() -> None:
    assert archive.pack(to_json(some_node())) == archive.pack(to_json(some_node()))


def test_a_file_is_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "node.rec"
    path.write_bytes(b"old")
    path.chmod(0o644)
    record.save(some_node(), path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert to_json(record.load(path)) == document()
    assert os.listdir(tmp_path) == ["node.rec"], "nothing else is left"  # noqa: PTH208


def test_no_process_name_or_command_line_is_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "hunter2")
    text = json.dumps(document())
    assert "hunter2" not in text and "cmdline" not in text and "comm" not in text


def test_a_folder_cannot_be_written_over(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not written"):
        record.save(some_node(), tmp_path)


def test_a_device_or_a_pipe_is_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match="it is no regular file") as refusal:
        record.save(some_node(), pipe)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert "- is the standard output" in (refusal.value.hint or "")
    link = tmp_path / "null"
    link.symlink_to("/dev/null")
    with pytest.raises(ConfigError, match="it is no regular file"):
        record.save(some_node(), link)


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("file")
    record.save(some_node(), tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert to_json(record.load(tmp_path / "file")) == to_json(some_node())


@pytest.mark.parametrize("name", ["", ".", "..", "/", "a\0b", "loop"])
def test_what_is_no_name_of_a_file(name: str, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ConfigError, match="not written"):
        record.save(some_node(), tmp_path / name if name == "loop" else Path(name))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        record.load(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="cannot be read"):
        record.load(tmp_path)


def test_a_pipe_in_its_place_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError):
        record.load(tmp_path / "pipe")


# --- lenient in what it does not know


def test_keys_of_later_programs_are_passed_over() -> None:
    later = document()
    later["weather"] = "fine"
    later["policy"]["moon"] = True
    later["slices"][0]["colour"] = 1
    later["machine"]["clock"] = [1, 2]
    assert read(packed(later)).view.slices == some_node().view.slices


def test_an_unknown_option_is_noted() -> None:
    later = document()
    later["policy"]["options"]["by_moonlight"] = True
    assert any("by_moonlight" in note for note in read(packed(later)).notes)


def test_an_unknown_role_is_noted_and_unsure() -> None:
    later = document()
    pod = next(pod for one in later["slices"] for pod in one["pods"] if pod["cgroups"])
    pod["cgroups"][0]["role"] = "oracle"
    back = read(packed(later))
    one = back.view.find_container(pod["cgroups"][0]["path"])
    assert one is not None and one.role == "unsure"
    assert any("oracle" in note for note in back.notes)


def test_missing_parts_are_empty_parts() -> None:
    back = read(packed({"machine": {"rows": [[0, 0, 0, 0, 0], [1, 1, 0, 0, 0]]}}))
    assert back.view.slices == {} and back.machine.online == CPUSet([0, 1])
    assert isinstance(back.view, NodeView) and back.info.mode == ""


# --- torn, foreign, hostile


def test_another_version_is_named() -> None:
    error = refused(packed(document(), version=2))
    assert "version 2" in error.message and "reads 1" in error.message


def test_something_else_is_not_ours() -> None:
    assert "not a recorded node" in refused(packed(document(), format="holiday photos")).message
    assert "not gzip" in refused(b"PK\x03\x04 a zip archive").message
    assert "not gzip" in refused(json.dumps(document()).encode()).message
    assert "torn" in refused(b"").message


@given(st.integers(0, 3000), st.integers(1, 255))
def test_one_wrong_byte_or_a_torn_end_is_found(place: int, flip: int) -> None:
    data = bytearray(archive.pack(to_json(some_node())))
    cut = bytes(data[: place % len(data)])
    refused(cut)
    if place % len(data) > 10:  # the ten bytes of gzip's head do not count
        data[place % len(data)] ^= flip
        refused(bytes(data))


def test_an_edited_document_is_found() -> None:
    text = gzip.decompress(archive.pack(to_json(some_node()))).replace(b'"now":77.5', b'"now":78.5')
    assert "checksum" in refused(gzip.compress(text)).message


def test_a_bomb_is_not_unpacked() -> None:
    bomb = gzip.compress(b"\0" * (archive.MOST_UNPACKED * 20))
    assert len(bomb) < 1_000_000
    assert "unpacks to more than" in refused(bomb).message


def test_what_follows_the_end_is_refused() -> None:
    data = archive.pack(to_json(some_node()))
    assert "follows its end" in refused(data + data).message


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "big"
    with path.open("wb") as file:
        file.truncate(archive.MOST_PACKED + 5)
    with pytest.raises(ConfigError, match="more than 8 MiB"):
        record.load(path)


HOSTILE_PATHS = [
    "../../etc/passwd", "/kubepods/../../etc", "kubepods", "/a//b", "/a/./b", "", "/" + "x" * 5000, "/a\0b", 7,
]  # fmt: skip


@pytest.mark.parametrize("path", HOSTILE_PATHS)
def test_a_path_that_is_no_cgroup_is_refused(path: object) -> None:
    bad = document()
    bad["slices"][0]["path"] = path
    assert "path" in refused(packed(bad)).message


def test_no_path_is_ever_opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Reading and simulating a record opens that one file and nothing else."""
    from enforcer.simulate import simulate

    file = tmp_path / "node.rec"
    record.save(some_node(), file)
    opened: list[str] = []
    real = os.open

    def spy(name: Any, *rest: Any, **more: Any) -> int:
        opened.append(os.fspath(name))
        return real(name, *rest, **more)

    monkeypatch.setattr(os, "open", spy)
    simulate(record.load(file))
    assert opened == [str(file)]


def edits() -> list[tuple[str, Callable[[Document], object]]]:
    return [
        ("rows are numbers", lambda d: d["machine"].update(rows=7)),
        ("a row of texts", lambda d: d["machine"].update(rows=[["a"]])),
        ("a CPU twice", lambda d: d["machine"].update(rows=[[0, 0, 0, 0, 0], [0, 0, 0, 0, 0]])),
        ("a CPU far away", lambda d: d["machine"].update(rows=[[10**9, 0, 0, 0, 0]])),
        ("online without rows", lambda d: d["machine"].update(online="0-4000")),
        ("a set that is none", lambda d: d["machine"].update(online="0-")),
        ("a set too large", lambda d: d["slices"][0].update(effective="0-4000000000")),
        ("a version of cgroups", lambda d: d.update(cgroup_version=3)),
        ("slices are a text", lambda d: d.update(slices="all")),
        ("a slice is a number", lambda d: d.update(slices=[1])),
        ("a time is a text", lambda d: d.update(now="late")),
        ("a flag is a number", lambda d: d["policy"].update(strict=1)),
        ("an endless number", lambda d: d["policy"].update(drift_limit=10**30)),
        ("the state is a list", lambda d: d.update(state=[])),
        ("an owner without CPUs", lambda d: d["state"].update(assignments={"/x": {"pod": "/"}})),
        ("a count beyond all", lambda d: d["state"].update(
            assignments={"/x": {"pod": "/", "cpus": "1", "count": 1e999, "since": 1}})),
        ("a conflict of texts", lambda d: d["agent"].update(conflicts={"/x": "much"})),
        ("two slices of one path", lambda d: d["slices"].append(d["slices"][0])),
        ("a pod twice", lambda d: _with_pods(d)["pods"].append(_with_pods(d)["pods"][0])),
        ("a pod elsewhere", lambda d: _with_pods(d)["pods"][0].update(path="/elsewhere/pod1")),
        ("a period of nothing", lambda d: _with_pods(d)["pods"][0].update(limits={"quota": 1, "period": 0})),
        ("a uid that is none", lambda d: _with_pods(d)["pods"][0].update(uid=None)),
    ]  # fmt: skip


def _with_pods(d: Document) -> Document:
    return next(one for one in d["slices"] if one["pods"])


@pytest.mark.parametrize(("what", "edit"), edits(), ids=[what for what, _ in edits()])
def test_what_would_mislead_is_refused(what: str, edit: Callable[[Document], object]) -> None:
    bad = document()
    edit(bad)
    refused(packed(bad))


def test_not_even_json_numbers_are_believed() -> None:
    body = b'{"now": NaN}'
    head = {"format": archive.FORMAT, "version": 1, "sha256": hashlib.sha256(body).hexdigest()}
    refused(gzip.compress(json.dumps(head).encode() + b"\n" + body + b"\n"))


def test_deep_nesting_is_no_crash() -> None:
    body = b"[" * 200_000
    head = {"format": archive.FORMAT, "version": 1, "sha256": hashlib.sha256(body).hexdigest()}
    refused(gzip.compress(json.dumps(head).encode() + b"\n" + body + b"\n"))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(st.data())
def test_any_value_in_any_place_is_read_or_refused(data: st.DataObject) -> None:
    """A fuzz of the document: one value somewhere is replaced by any other."""
    bad = document()
    place: Any = bad
    while True:
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        inner = place[key]
        if not isinstance(inner, dict | list) or not inner or data.draw(st.booleans()):
            break
        place = inner
    place[key] = data.draw(json_values)
    try:
        node = read(packed(bad))
    except ConfigError as error:
        assert str(error).isprintable()
        return
    assert to_json(read(archive.pack(to_json(node)))) == to_json(node)


def test_escapes_do_not_reach_the_terminal() -> None:
    from enforcer.core.kubepods import shown
    from enforcer.explain import Telling
    from enforcer.labels import Found
    from enforcer.simulate import simulate, to_text
    from enforcer.source import explainer

    bad = document()
    bad["notes"] = ["\x1b[2Jgone"]
    for one in bad["state"]["assignments"].values():
        one["why"] = "\x1b]0;title\x07"
    for one in bad["slices"]:
        for number, pod in enumerate(one["pods"]):
            pod["uid"] = f"\x1b[31m{number}"
    node = read(packed(bad))
    text = "\n".join(to_text(simulate(node), 100, coloured=False))
    told = Telling(node, explainer(node))
    things = [Found(pod=p.group.path) for p in node.view.pods()] + [Found(cpu=cpu) for cpu in node.view.online]
    assert things
    text += "\n".join(line for one in things for line in told.text(one, 100))
    assert "\x1b" not in text and "\x07" not in text
    assert shown("\x1b") in text


# --- the command


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    record.add_arguments(parser)
    return parser.parse_args(words)


def test_the_command_says_what_it_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(record, "this_node", lambda config: some_node())
    file = tmp_path / "node.rec"
    assert record.main(arguments(str(file)), Config()) == 0
    told = capsys.readouterr().out
    assert str(file) in told and "containers" in told
    assert record.main(arguments(str(file), "--json"), Config()) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["bytes"] == file.stat().st_size
    assert figures["CPUs"] == len(some_node().machine.online)


def test_the_command_writes_to_a_pipe(
    monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    monkeypatch.setattr(record, "this_node", lambda config: some_node())
    assert record.main(arguments("-"), Config()) == 0
    assert to_json(read(capfdbinary.readouterr().out)) == document()
