"""CgroupFS on made trees of both versions: what it reads, what it writes, and what it says of a refusal."""

from __future__ import annotations

import os
from errno import EACCES, EBUSY, EINVAL, EIO, ENODEV, ENOENT, ERANGE, EROFS
from pathlib import Path
from typing import Any

import pytest

from enforcer.core.cpulimits import CPULimits, CPULimitsError
from enforcer.core.cpuset import EMPTY, CPUSet
from enforcer.core.errors import CPUSetSyntaxError, EnforcerError
from enforcer.kernel.cgroupfs import EnableStep, WriteResult, describe
from tests.fakefs.cgroup_tree import FakeCgroup, tree

ALL = CPUSet(range(8))
POD = "/kubepods/pod1"
C1 = "/kubepods/pod1/c1"

both = pytest.mark.parametrize("version", [1, 2])


def node(tmp_path: Path, version: int, pod: dict[str, Any] | None = None, **more: Any) -> FakeCgroup:
    """A node with one pod of two containers."""
    inner = {"c1": {"procs": [11]}, "c2": {"procs": [12]}}
    return tree(tmp_path, {"kubepods": {"pod1": inner if pod is None else pod}}, version, **more)


def cpus(text: str) -> CPUSet:
    return CPUSet.parse(text)


# reading


@both
def test_sets_and_nodes(tmp_path: Path, version: int) -> None:
    fs = node(tmp_path, version, {"cpus": "2-5", "mems": "1", "c1": {"cpus": "4-7"}}, nodes="0-1").fs
    assert fs.read_cpus(POD) == cpus("2-5")
    assert fs.read_cpus(C1) == cpus("4-7")
    assert fs.read_effective(C1) == cpus("4-5")
    assert fs.read_mems(POD) == "1"
    assert fs.read_effective_mems(C1) == "1"


def test_v2_a_set_of_its_own_is_not_needed(tmp_path: Path) -> None:
    fs = node(tmp_path, 2).fs
    assert fs.read_cpus(C1) == EMPTY
    assert fs.read_effective(C1) == ALL
    assert fs.read_mems(C1) == ""


@both
def test_what_has_gone_is_none_and_no_error(tmp_path: Path, version: int) -> None:
    fs = node(tmp_path, version).fs
    gone = "/kubepods/pod9/c"
    assert not fs.exists(gone)
    for read in (
        fs.children, fs.read_cpus, fs.read_effective, fs.read_mems, fs.read_effective_mems, fs.read_limits,
        fs.read_limits_texts, fs.owner_uid, fs.cgroup_id,
    ):  # fmt: skip
        assert read(gone) is None, read.__name__
    assert fs.procs(gone) == []
    assert fs.descendants(gone) == []
    assert fs.populated(gone) is False
    assert fs.copy_mems(gone).gone


def test_v1_a_directory_that_is_in_one_hierarchy_only(tmp_path: Path) -> None:
    fake = node(tmp_path, 1)
    fake.mkdir_cpuset(POD + "/new")
    assert fake.fs.read_limits(POD + "/new") is None
    assert fake.fs.read_cpus(POD + "/new") == EMPTY


@pytest.mark.parametrize(
    ("version", "files", "limits"),
    [
        (1, {"quota": 200000, "shares": 2048}, CPULimits(200000, 100000, 2048, None)),
        (1, {"quota": 10000, "period": 5000, "shares": 2048}, CPULimits(10000, 5000, 2048, None)),
        (1, {}, CPULimits(None, 100000, 1024, None)),
        (2, {"quota": 200000, "weight": 79}, CPULimits(200000, 100000, None, 79)),
        (2, {"max": "max 5000", "weight": 1}, CPULimits(None, 5000, None, 1)),
        (2, {}, CPULimits(None, 100000, None, 100)),
    ],
)
def test_limits(tmp_path: Path, version: int, files: dict[str, Any], limits: CPULimits) -> None:
    assert node(tmp_path, version, {"c1": files}).fs.read_limits(C1) == limits


def test_v2_limits_without_the_cpu_controller(tmp_path: Path) -> None:
    assert node(tmp_path, 2, {"subtree_control": "cpuset", "c1": {}}).fs.read_limits(C1) is None


def test_limits_that_no_kernel_writes_name_the_cgroup(tmp_path: Path) -> None:
    fs = node(tmp_path, 2, {"c1": {"max": "many"}}).fs
    with pytest.raises(CPULimitsError, match=f"{tmp_path}{C1}: cpu.max.*many"):
        fs.read_limits(C1)


def test_a_set_that_no_kernel_writes_names_the_file(tmp_path: Path) -> None:
    fs = node(tmp_path, 2).fs
    Path(fs.cpuset_dir(C1), "cpuset.cpus").write_text("0-x\n")
    with pytest.raises(CPUSetSyntaxError, match=f"{tmp_path}{C1}/cpuset.cpus: .*0-x"):
        fs.read_cpus(C1)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    fs = node(tmp_path, 2).fs
    file = Path(fs.cpuset_dir(C1), "cpuset.cpus")
    file.unlink()
    file.mkdir()
    with pytest.raises(EnforcerError, match=f"cannot read {file}: Is a directory"):
        fs.read_cpus(C1)


@both
def test_descendants_stand_before_their_parents(tmp_path: Path, version: int) -> None:
    fs = tree(tmp_path, {"a": {"b": {"c": {}, "d": {"e": {}}}, "f": {}}, "z": {}}, version).fs
    found = fs.descendants("/a")
    assert sorted(found) == ["/a/b", "/a/b/c", "/a/b/d", "/a/b/d/e", "/a/f"]
    assert all(found.index(one) < found.index(one.rpartition("/")[0]) for one in found if one.count("/") > 2)
    assert sorted(fs.descendants("/")) == ["/a", *sorted(found), "/z"]


@both
def test_a_long_list_of_processes_is_read_to_its_end(tmp_path: Path, version: int) -> None:
    pids = list(range(100_000, 103_000))
    assert node(tmp_path, version, {"c1": {"procs": pids}}).fs.procs(C1) == pids


@both
def test_populated_looks_below(tmp_path: Path, version: int) -> None:
    fs = node(tmp_path, version, {"c1": {"nested": {"procs": [7]}}, "c2": {}}).fs
    assert fs.populated(POD)
    assert fs.populated(C1)
    assert not fs.populated(POD + "/c2")
    assert fs.procs(C1) == []


def test_threaded_cgroups_answer_with_their_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fs = node(tmp_path, 2).fs
    Path(fs.cpuset_dir(C1), "cgroup.threads").write_text("5\n6\n")
    real = os.open

    def refuse(name: str, *args: Any) -> int:
        if str(name).endswith("cgroup.procs"):
            raise OSError(95, "Operation not supported")
        return real(name, *args)

    monkeypatch.setattr(os, "open", refuse)
    assert fs.procs(C1) == [5, 6]


@both
def test_owner_and_id(tmp_path: Path, version: int) -> None:
    owner = 1000 if os.geteuid() == 0 else os.geteuid()
    fs = node(tmp_path, version, {"c1": {"owner": owner}}).fs
    assert fs.owner_uid(POD) == os.geteuid()
    assert fs.owner_uid(C1) == owner
    assert fs.cgroup_id(C1) == os.stat(fs.cpuset_dir(C1)).st_ino


@both
def test_names_of_any_bytes(tmp_path: Path, version: int) -> None:
    name = os.fsdecode(b"pod-\xff")
    fake = tree(tmp_path, {"kubepods": {name: {"cpus": "1"}}}, version)
    assert fake.fs.children("/kubepods") == [name]
    assert fake.fs.write_cpus(f"/kubepods/{name}", cpus("2")).ok


def test_directories_and_paths(tmp_path: Path) -> None:
    fs = node(tmp_path, 1).fs
    assert fs.cpuset_dir("/") == f"{tmp_path}/cpuset"
    assert fs.path_of(fs.cpuset_dir(C1)) == fs.path_of(fs.cpu_dir(C1)) == C1
    assert fs.path_of(fs.cpu_dir("/")) == "/"
    assert fs.path_of(str(tmp_path)) is None
    assert fs.path_of(f"{tmp_path}/cpuset-of-another/x") is None


# writing


@both
def test_a_write_is_read_back(tmp_path: Path, version: int) -> None:
    fake = node(tmp_path, version)
    result = fake.fs.write_cpus(C1, cpus("2-3"))
    assert result == WriteResult(C1, cpus("2-3"), cpus("2-3"), cpus("2-3"), None, False, version)
    assert result.ok
    assert result.missing == EMPTY
    assert fake.fs.log == [(C1, "cpuset.cpus", "2-3")]
    assert describe(result) == f"{C1}: cpuset.cpus wanted 2-3, found 2-3"


@both
def test_an_empty_set_is_never_written(tmp_path: Path, version: int) -> None:
    fake = node(tmp_path, version)
    with pytest.raises(ValueError, match=f"{C1}: an empty set is never written"):
        fake.fs.write_cpus(C1, EMPTY)
    with pytest.raises(ValueError, match="an empty list is never written"):
        fake.fs.set_mems(C1, " \n")
    assert fake.fs.log == []


@pytest.mark.parametrize(
    ("path", "wanted", "code", "words"),
    [
        (C1, "6-7", EACCES, "wanted 6-7, found 0-3: refused (EACCES), the parent cgroup does not have all of it;"),
        (POD, "0-1", EBUSY, "wanted 0-1, found 0-3: refused (EBUSY), a cgroup below it has more; narrow those first"),
        (C1, "99", ERANGE, "refused (ERANGE), there can be no such CPU or node here; compare /sys/devices/system/cpu/"),
        (C1, "9", EINVAL, "refused (EINVAL), a CPU or node is offline, or a neighbour has it"),
    ],
)
def test_v1_refusals_in_words(tmp_path: Path, path: str, wanted: str, code: int, words: str) -> None:
    fs = node(tmp_path, 1, {"cpus": "0-3", "c1": {}}, possible="0-15").fs
    result = fs.write_cpus(path, cpus(wanted))
    assert (result.errno, result.gone, result.ok) == (code, False, False)
    assert result.found == result.effective == cpus("0-3")
    assert describe(result).startswith(f"{path}: cpuset.cpus wanted {wanted}, found 0-3")
    assert words in describe(result)


def test_v1_narrow_deepest_first_widen_from_the_top(tmp_path: Path) -> None:
    fs = node(tmp_path, 1, {"c1": {"kube-proxy": {"x": {}}}}).fs
    assert fs.write_cpus(C1, cpus("0-3")).errno == EBUSY
    for path in (*fs.descendants(C1), C1):
        assert fs.write_cpus(path, cpus("0-3")).ok
    assert fs.write_cpus(C1 + "/kube-proxy", cpus("0-5")).errno == EACCES
    for path in (C1, *reversed(fs.descendants(C1))):
        assert fs.write_cpus(path, cpus("0-5")).ok


def test_v2_a_write_that_has_no_effect_is_no_success(tmp_path: Path) -> None:
    fs = node(tmp_path, 2, {"cpus": "0-3", "c1": {}}).fs
    result = fs.write_cpus(C1, cpus("6-7"))
    assert result == WriteResult(C1, cpus("6-7"), cpus("6-7"), cpus("0-3"), None, False)
    assert not result.ok
    assert result.missing == cpus("6-7")
    assert "found 6-7, without effect: its tasks run on 0-3" in describe(result)


def test_v2_a_write_of_which_a_part_has_effect(tmp_path: Path) -> None:
    fs = node(tmp_path, 2, {"cpus": "0-3", "c1": {}}).fs
    result = fs.write_cpus(C1, cpus("3-4"))
    assert result.ok, "nothing runs outside the set"
    assert result.missing == cpus("4")
    assert "of which 4 cannot be used" in describe(result)


def test_v2_the_root_narrower_than_the_machine(tmp_path: Path) -> None:
    result = node(tmp_path, 2, online="0-3", possible="0-7").fs.write_cpus(C1, cpus("3-5"))
    assert result.ok
    assert result.effective == cpus("3")


@both
def test_gone_before_the_write(tmp_path: Path, version: int) -> None:
    fake = node(tmp_path, version)
    fake.vanish(C1)
    result = fake.fs.write_cpus(C1, cpus("1"))
    assert (result.gone, result.errno, result.found, result.ok) == (True, ENOENT, None, False)
    assert describe(result) == f"{C1}: has gone; nothing to do"


@both
def test_gone_between_open_and_write(tmp_path: Path, version: int) -> None:
    fake = node(tmp_path, version)
    fake.fs.vanish_at(2, C1)
    assert fake.fs.write_cpus(C1, cpus("1")).ok
    result = fake.fs.write_cpus(C1, cpus("2"))
    assert (result.gone, result.errno, result.ok) == (True, ENODEV, False)


@both
def test_gone_between_write_and_reading_back(tmp_path: Path, version: int) -> None:
    fake = node(tmp_path, version)
    fake.fs.at(1, lambda: fake.vanish(C1), after=True)
    result = fake.fs.write_cpus(C1, cpus("1"))
    assert (result.gone, result.ok, result.found) == (True, False, None)


@both
def test_another_writer_was_faster(tmp_path: Path, version: int) -> None:
    fake = node(tmp_path, version)
    fake.fs.at(1, lambda: fake.write(C1, "cpuset.cpus", "0-7"), after=True)
    result = fake.fs.write_cpus(C1, cpus("2-3"))
    assert (result.ok, result.found, result.errno) == (False, ALL, None)
    assert "wanted 2-3, found 0-7: another writer was faster" in describe(result)


@both
def test_refused_always_and_then_no_more(tmp_path: Path, version: int) -> None:
    fake = node(tmp_path, version)
    fake.fs.fail(EBUSY, C1, times=2)
    answers = [fake.fs.write_cpus(C1, cpus("2")).errno for _ in range(3)]
    assert answers == [EBUSY, EBUSY, None]
    assert fake.fs.write_cpus(POD + "/c2", cpus("3")).ok


@both
@pytest.mark.parametrize(("code", "words"), [(EROFS, "mounted read-only"), (EIO, "Input/output error")])
def test_other_refusals_in_words(tmp_path: Path, version: int, code: int, words: str) -> None:
    fake = node(tmp_path, version)
    fake.fs.fail(code)
    result = fake.fs.write_cpus(C1, cpus("2"))
    assert (result.errno, result.gone) == (code, False)
    assert words in describe(result)


def test_v2_cpuset_not_enabled_is_an_error_and_not_an_end(tmp_path: Path) -> None:
    fs = node(tmp_path, 2, {"subtree_control": "cpu", "c1": {}}).fs
    result = fs.write_cpus(C1, cpus("2"))
    assert (result.gone, result.errno, result.found) == (False, ENOENT, None)
    assert "wanted 2, found nothing: no such file: the cpuset controller is not enabled in" in describe(result)


# un-pinning


def test_v2_clear_without_tasks(tmp_path: Path) -> None:
    fake = node(tmp_path, 2, {"c1": {"cpus": "2-3"}})
    result = fake.fs.clear_cpus(C1, ALL)
    assert result.ok
    assert (result.wanted, result.found, result.effective) == (EMPTY, EMPTY, ALL)
    assert fake.fs.log == [(C1, "cpuset.cpus", "\n")]


def test_v2_clear_with_tasks_falls_back_to_all_possible_cpus(tmp_path: Path) -> None:
    fake = node(tmp_path, 2, {"c1": {"cpus": "2-3", "procs": [5]}}, possible="0-15")
    result = fake.fs.clear_cpus(C1, cpus("0-15"))
    assert result.ok
    assert (result.found, result.effective) == (cpus("0-15"), ALL)
    assert [text for _, _, text in fake.fs.log] == ["\n", "0-15"]


def test_v2_clear_with_tasks_on_a_kernel_that_takes_it(tmp_path: Path) -> None:
    fs = node(tmp_path, 2, {"c1": {"cpus": "2-3", "procs": [5]}}, modern=True).fs
    assert fs.clear_cpus(C1, ALL).found == EMPTY


def test_v1_clear_gives_the_parent_s_set(tmp_path: Path) -> None:
    fake = node(tmp_path, 1, {"cpus": "0-5", "c1": {"cpus": "2-3", "procs": [5]}})
    result = fake.fs.clear_cpus(C1, ALL)
    assert result.ok
    assert result.found == cpus("0-5")


@both
def test_clear_what_has_gone(tmp_path: Path, version: int) -> None:
    fs = node(tmp_path, version).fs
    assert fs.clear_cpus("/kubepods/pod9/c", ALL).gone


# nodes


def test_v1_a_fresh_cgroup_gets_its_parent_s_nodes_from_the_top(tmp_path: Path) -> None:
    fake = node(tmp_path, 1, nodes="0-1")
    for path in ("/a", "/a/b", "/a/b/c"):
        fake.mkdir(path)
    result = fake.fs.copy_mems("/a/b/c")
    assert result.ok
    assert [(path, text) for path, _, text in fake.fs.log] == [("/a", "0-1"), ("/a/b", "0-1"), ("/a/b/c", "0-1")]


@both
def test_nodes_that_are_there_stay(tmp_path: Path, version: int) -> None:
    fake = node(tmp_path, version, {"c1": {"mems": "1"}}, nodes="0-1")
    assert fake.fs.copy_mems(C1).ok
    assert fake.fs.read_mems(C1) == "1"
    assert fake.fs.log == []


@both
def test_set_nodes(tmp_path: Path, version: int) -> None:
    fs = node(tmp_path, version, nodes="0-3").fs
    result = fs.set_mems(C1, "0,1,2")
    assert result.ok
    assert result.found == "0-2", "as the kernel writes it"
    refused = fs.set_mems(C1, "7")
    assert (refused.errno, refused.ok) == (EINVAL, False)
    assert f"{C1}: cpuset.mems wanted 7, found 0-2: refused (EINVAL)" in describe(refused)


# enabling


def test_v2_cpuset_is_enabled_from_the_top_where_it_is_missing(tmp_path: Path) -> None:
    spec = {"kubepods": {"subtree_control": "cpu memory", "pod1": {"subtree_control": "cpu", "c1": {"procs": [3]}}}}
    fake = tree(tmp_path, spec, 2)
    assert fake.fs.read_cpus(C1) is None
    assert fake.fs.enable_cpuset(C1) == [EnableStep("/kubepods", None), EnableStep(POD, None)]
    assert fake.fs.log == [(level, "cgroup.subtree_control", "+cpuset") for level in ("/kubepods", POD)]
    assert fake.read("/kubepods", "cgroup.subtree_control").split() == ["cpu", "memory", "cpuset"], "none taken away"
    assert fake.fs.write_cpus(C1, cpus("2")).ok
    assert fake.fs.enable_cpuset(C1) == []


def test_v2_the_first_level_that_refuses_is_told_with_its_processes(tmp_path: Path) -> None:
    pod = {"subtree_control": "", "procs": [41, 42], "c1": {}}
    fs = tree(tmp_path, {"kubepods": {"subtree_control": "cpu", "pod1": pod}}, 2).fs
    steps = fs.enable_cpuset(C1)
    assert steps == [EnableStep("/kubepods", None), EnableStep(POD, EBUSY, (41, 42))]
    assert [path for path, _, _ in fs.log] == ["/kubepods"], "with threaded controllers only the kernel might take it"
    assert [step.ok for step in steps] == [True, False]
    assert describe(steps[0]) == "/kubepods: cpuset in cgroup.subtree_control: switched on"
    assert "refused (EBUSY), processes sit in this cgroup itself: 41, 42; move them" in describe(steps[1])


def test_v2_a_controller_that_is_not_delegated(tmp_path: Path) -> None:
    fake = node(tmp_path, 2)
    fake.file("/", "cgroup.subtree_control").write_text("cpu\n")
    fake.file("/", "cgroup.controllers").write_text("cpu io memory pids\n")
    (step,) = fake.fs.enable_cpuset(C1)
    assert step == EnableStep("/", ENOENT)
    assert "/: cpuset in cgroup.subtree_control: refused (ENOENT), cgroup.controllers here lacks" in describe(step)


def test_v2_enabled_and_taken_away_again_at_once(tmp_path: Path) -> None:
    fake = node(tmp_path, 2)
    for level in (POD, "/kubepods"):  # systemd does this at a reload (kubernetes#131567)
        fake.write(level, "cgroup.subtree_control", "-cpuset")
    fake.fs.at(1, lambda: fake.write("/kubepods", "cgroup.subtree_control", "-cpuset"), after=True)
    (step,) = fake.fs.enable_cpuset(C1)
    assert (step.path, step.ok) == ("/kubepods", False)
    assert fake.fs.read_cpus(C1) is None


def test_v2_many_processes_in_the_way_are_not_all_told() -> None:
    text = describe(EnableStep("/x", EBUSY, tuple(range(100, 200))))
    assert "100, 101" in text
    assert "109, ..." in text
    assert "110" not in text


def test_v1_has_nothing_to_enable(tmp_path: Path) -> None:
    fake = node(tmp_path, 1)
    assert fake.fs.enable_cpuset(C1) == []
    assert fake.fs.log == []
