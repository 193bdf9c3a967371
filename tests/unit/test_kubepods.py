"""The grammar of cgroup names: real paths, the kubelet's own names, and hostile ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from enforcer.core.kubepods import (
    CgroupNameError,
    Kind,
    Parsed,
    QoSClass,
    cgroupfs_path,
    classify,
    is_root_candidate,
    outside_container,
    parse_path,
    parts_of_cgroupfs,
    parts_of_systemd,
    pod_parts,
    shown,
    slice_path,
    systemd_name,
    systemd_path,
    unit_name,
)

DATA = Path(__file__).parent.parent / "data"
PATHS: list[dict[str, Any]] = json.loads((DATA / "cgroup_paths.json").read_text())["paths"]
NAMES: list[dict[str, Any]] = json.loads((DATA / "kubelet_tables.json").read_text())["tables"]["cgroup_names"]

ID = "0123456789abcdef" * 4
ID2 = "fedcba9876543210" * 4
UID = "c794387a-65b6-4a30-aad3-5e0ef496345a"
STATIC_UID = "0123456789abcdef0123456789abcdef"
KINDS = {
    "container": {Kind.CONTAINER},
    "sandbox-or-container": {Kind.CONTAINER, Kind.SANDBOX},
    "inside-container": {Kind.INSIDE_CONTAINER},
    "pod": {Kind.POD},
    "qos": {Kind.ROOT, Kind.QOS},
    "conmon": {Kind.CONMON},
    "not-kubernetes": {Kind.OTHER},
}
# Debatable rows of the data that are read otherwise here, by what is wrong with the path.
OWN_READINGS = {
    # a level that no kubelet makes: what is below is not taken for a pod, so it can never be given cores
    "/kubepods/test/": Parsed(Kind.OTHER),
    # a runtime's scope whose pod is out of sight
    "/../crio-": Parsed(Kind.OTHER),
    # Kata's own side, not a container
    "/kata_overhead/": Parsed(Kind.VM, container_id="081717d726c1301c4e091f1de253dfa9b978dc5f10a46f387a9e1d985d92e210"),
    # a static pod's manifest may set any UID, so an odd one names a pod all the same
    "kubepods-burstable-pod123.slice": Parsed(
        Kind.CONTAINER,
        QoSClass.BURSTABLE,
        "123",
        "424a3f019d5523d41f94b0b0d80d64832adf9811a02c7c8076200a8f876a7505",
        "containerd",
    ),
}


def own_reading(path: str) -> Parsed | None:
    return next((reading for part, reading in OWN_READINGS.items() if part in path), None)


@pytest.mark.parametrize("row", PATHS, ids=range(len(PATHS)))
def test_real_paths_are_read_right(row: dict[str, Any]) -> None:
    found, own, expected = parse_path(row["path"]), own_reading(row["path"]), row["expected"]
    if own is not None:
        assert row["debatable"]
        assert found == own
        return
    assert found.kind in KINDS[expected["kind"]]
    assert (found.qos, found.pod_uid) == (expected["qos"], expected["pod_uid"])
    assert (found.container_id, found.runtime) == (expected["container_id"], expected["runtime"])


def test_each_own_reading_is_of_one_path() -> None:
    assert len([row for row in PATHS if own_reading(row["path"])]) == len(OWN_READINGS)


# One debatable row has a bare id right below kubepods: nobody's container in the data, docker's here.
OUTSIDE = [r for r in PATHS if r["expected"]["kind"] == "not-kubernetes" and not r["path"].startswith("/kubepods/")]


@pytest.mark.parametrize("row", OUTSIDE, ids=range(len(OUTSIDE)))
def test_containers_outside_kubernetes_are_named(row: dict[str, Any]) -> None:
    other = row.get("other_container")
    assert outside_container(row["path"]) == (other and (other["runtime"], other["container_id"]))


@pytest.mark.parametrize("row", PATHS, ids=range(len(PATHS)))
def test_the_same_path_reads_the_same_in_other_clothes(row: dict[str, Any]) -> None:
    path = row["path"].removesuffix(" (deleted)")
    expected = parse_path(path)
    for form in (path + "/", path + " (deleted)", "/sys/fs/cgroup/cpuset" + path, path.replace("/", "//")):
        if path.startswith("/"):
            assert parse_path(form) == expected, form
    assert parse_path(path.encode()) == expected


GUARANTEED_SLICE = f"/kubepods.slice/kubepods-pod{UID.replace('-', '_')}.slice"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (f"cri-containerd-{ID}.scope", (Kind.CONTAINER, ID, "containerd")),
        (f"crio-{ID}.scope", (Kind.CONTAINER, ID, "cri-o")),
        (f"docker-{ID}.scope", (Kind.CONTAINER, ID, "docker")),
        (f"libpod-{ID}.scope", (Kind.CONTAINER, ID, "podman")),
        (ID, (Kind.CONTAINER, ID, None)),
        (f"crio-{ID}", (Kind.SANDBOX, ID, "cri-o")),
        (f"crio-conmon-{ID}.scope", (Kind.CONMON, ID, "cri-o")),
        (f"libpod-conmon-{ID}.scope", (Kind.CONMON, ID, "podman")),
        ("conmon", (Kind.CONMON, None, "podman")),
        (f"kata_{ID}", (Kind.VM, ID, None)),
        (f"kata_cri-containerd:{ID}", (Kind.VM, ID, None)),
        ("kata_", (Kind.VM, None, None)),
        (ID + "1", (Kind.OTHER, None, None)),
        (ID.upper(), (Kind.OTHER, None, None)),
        (ID + "\n", (Kind.OTHER, None, None)),
        (f"crio-{ID}.scope\n", (Kind.OTHER, None, None)),
        (f"other-{ID}.scope", (Kind.OTHER, None, None)),
        ("kubepods.slice", (Kind.OTHER, None, None)),
        ("init.scope", (Kind.OTHER, None, None)),
    ],
)
def test_names_below_a_pod_slice(name: str, expected: tuple[Kind, str | None, str | None]) -> None:
    found = parse_path(f"{GUARANTEED_SLICE}/{name}")
    assert (found.kind, found.container_id, found.runtime) == expected
    assert (found.qos, found.pod_uid) == (QoSClass.GUARANTEED, UID)


def test_crio_names_its_containers_without_scope_under_cgroupfs() -> None:
    assert parse_path(f"/kubepods/pod{UID}/crio-{ID}").kind is Kind.CONTAINER


def test_one_crio_container_has_one_container_and_its_conmon() -> None:
    kinds = [parse_path(f"{GUARANTEED_SLICE}/{n}-{ID}.scope").kind for n in ("crio", "crio-conmon")]
    assert kinds == [Kind.CONTAINER, Kind.CONMON]


@pytest.mark.parametrize("inner", ["init.scope", f"crio-{ID2}.scope", f"kubepods/pod{UID}/{ID2}", "a/b/c"])
@pytest.mark.parametrize("outer", [f"cri-containerd-{ID}.scope", f"crio-{ID}", f"crio-conmon-{ID}.scope", f"kata_{ID}"])
def test_what_is_below_a_leaf_belongs_to_it(outer: str, inner: str) -> None:
    leaf = parse_path(f"{GUARANTEED_SLICE}/{outer}")
    found = parse_path(f"{GUARANTEED_SLICE}/{outer}/{inner}")
    assert found == Parsed(Kind.INSIDE_CONTAINER, QoSClass.GUARANTEED, UID, ID, leaf.runtime)


@pytest.mark.parametrize(
    "path",
    [
        f"/kubepods.slice/kubepods-burstable.slice/kubepods-pod{UID.replace('-', '_')}.slice",
        f"/kubepods.slice/kubepods-burstable.slice/kubepods-besteffort-pod{UID.replace('-', '_')}.slice",
        f"/kubepods.slice/kubepods-burstable-pod{UID.replace('-', '_')}.slice",
        "/kubepods/burstable/besteffort",
        "/kubepods/burstable/kubepods",
        f"/kubepods/test/pod{UID}",
        f"/pod{UID}",
        "/burstable",
        "/kubepods/pod",
        f"/kubepods/pod{UID}\n",
        "/kubepods.slice\n",
        "/xkubepods.slice",
        "/kubepods.scope",
        "/kubepods-.slice",
    ],
)
def test_names_that_contradict_their_place_are_other(path: str) -> None:
    assert parse_path(path).kind is Kind.OTHER
    assert parse_path(f"{path}/{ID}").kind is Kind.OTHER


def test_unknown_names_below_an_unknown_name_of_a_pod_stay_other() -> None:
    found = parse_path(f"/kubepods/pod{UID}/foo/kubepods/pod{UID}/{ID}")
    assert found == Parsed(Kind.OTHER, QoSClass.GUARANTEED, UID)


@pytest.mark.parametrize(
    "root", ["/pods.slice/pods-kubepods.slice", "/pods.slice.slice/pods.slice-kubepods.slice.slice"]
)
def test_cgroup_roots_in_systemd_form(root: str) -> None:
    prefix = root.rpartition("/")[2].removesuffix(".slice").removesuffix(".slice")
    pod = f"{root}/{prefix}-burstable.slice/{prefix}-burstable-pod{STATIC_UID}.slice"
    assert parse_path(root) == Parsed(Kind.ROOT)
    assert parse_path(pod) == Parsed(Kind.POD, QoSClass.BURSTABLE, STATIC_UID)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/kubepods", True),
        ("/kubepods/", True),
        ("/kubepods.slice", True),
        ("/kubelet/kubepods", True),
        ("/kubelet.slice/kubelet-kubepods.slice", True),
        ("/", False),
        ("", False),
        ("/kubelet", False),
        ("/kubepods.slice/kubepods-burstable.slice", False),
        ("/kubelet.slice/kubelet-kubepods-burstable.slice", False),
        ("/foo-kubepods.slice", False),
        (f"/docker/{ID}/kubepods", False),
        ("/system.slice/kubepods.slice", False),
        ("/user.slice/user-1000.slice/user@1000.service/kubepods.slice", False),
        (f"{GUARANTEED_SLICE}/cri-containerd-{ID}.scope/kubepods", False),
        ("/../kubepods", False),
        ("/kubelet/x/kubepods", False),
        ("/kubepods\n", False),
    ],
)
def test_only_the_top_of_the_hierarchy_can_be_a_root(path: str, expected: bool) -> None:
    assert is_root_candidate(path) is expected


@pytest.mark.parametrize("row", [row["path"] for row in PATHS])
def test_every_root_candidate_is_read_as_root(row: str) -> None:
    assert not is_root_candidate(row) or parse_path(row).kind is Kind.ROOT


@pytest.mark.parametrize(
    ("path", "unit"),
    [
        ("/kubepods.slice", "kubepods.slice"),
        (GUARANTEED_SLICE, GUARANTEED_SLICE.rpartition("/")[2]),
        (f"{GUARANTEED_SLICE}/cri-containerd-{ID}.scope", f"cri-containerd-{ID}.scope"),
        ("/init.scope", "init.scope"),
        ("/system.slice/system-getty.slice/getty@tty1.service", "getty@tty1.service"),
        ("/user.slice/user-1000.slice/user@1000.service", "user@1000.service"),
        (r"/system.slice/system-systemd\x2dcoredump.slice", r"system-systemd\x2dcoredump.slice"),
        ("/_cpu.slice/_cpu.service", "cpu.service"),
        # another manager's units, whose names PID 1 has for others
        (f"{GUARANTEED_SLICE}/cri-containerd-{ID}.scope/init.scope", None),
        (f"/system.slice/docker-{ID}.scope/kubepods.slice", None),
        (f"/docker/{ID}/kubepods.slice", None),
        ("/user.slice/user-1000.slice/user@1000.service/app.slice", None),
        ("/user.slice/user-1000.slice/user@1000.service/kubepods.slice/kubepods-podx.slice", None),
        ("/system.slice/foo.service/bar.service", None),
        # directories that systemd cannot have made
        ("/kubepods-podx.slice", None),
        ("/kubepods.slice/foo.slice", None),
        (f"/kubepods-podx.slice:cri-containerd:{ID}", None),
        ("/a b.slice", None),
        ("/a\n.slice", None),
        ("/a--b.slice", None),
        (".slice", None),
        (f"/kubepods/pod{UID}", None),
        ("/", None),
    ],
)
def test_units_of_the_host(path: str, unit: str | None) -> None:
    assert unit_name(path) == unit


@pytest.mark.parametrize("row", NAMES, ids=[row["id"] for row in NAMES])
def test_names_as_the_kubelet_has_them(row: dict[str, Any]) -> None:
    parts = row["parts"]
    ways = {
        "systemd_path": systemd_path(parts),
        "systemd_base": systemd_name(parts),
        "cgroupfs_path": cgroupfs_path(parts),
    }
    tried = row.keys() & ways.keys()
    for way in tried:
        assert ways[way] == row[way]
    if "parse_systemd" in row:
        assert parts_of_systemd(row["parse_systemd"]) == parts
    assert tried or "parse_systemd" in row


@pytest.mark.parametrize("part", ["", "a/b", "a_b"])
def test_names_that_could_not_be_read_back_are_refused(part: str) -> None:
    for make in (systemd_name, systemd_path, cgroupfs_path):
        with pytest.raises(CgroupNameError, match="neither '/' nor '_'"):
            make(["kubepods", part])


def test_slice_paths() -> None:
    assert slice_path("-.slice") == "/"
    assert slice_path("a-b-c.slice") == "/a.slice/a-b.slice/a-b-c.slice"
    assert slice_path("a.service") is None
    assert slice_path("a-.slice") is None


PARTS = st.lists(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9.-]{0,20}", fullmatch=True), max_size=5)
UIDS = st.one_of(st.uuids().map(str), st.uuids().map(lambda uid: uid.hex))


@given(PARTS)
def test_names_come_back(parts: list[str]) -> None:
    assert parts_of_cgroupfs(cgroupfs_path(parts)) == parts
    if not parts or not parts[-1].endswith(".slice"):
        assert parts_of_systemd(systemd_path(parts)) == parts


@given(st.sampled_from([[], ["kubelet"], ["a-b", "c"]]), st.sampled_from(QoSClass), UIDS, st.booleans())
def test_a_pod_of_the_kubelet_is_read_as_made(root: list[str], qos: QoSClass, uid: str, systemd: bool) -> None:
    path = (systemd_path if systemd else cgroupfs_path)(pod_parts(root, qos, uid))
    assert parse_path(path) == Parsed(Kind.POD, qos, uid)
    assert parse_path(f"{path}/{ID}") == Parsed(Kind.CONTAINER, qos, uid, ID)
    assert unit_name(path) == (path.rpartition("/")[2] if systemd else None)


WORDS = st.sampled_from(
    ["kubepods", "burstable", "pod", ".slice", ".scope", "-", "_", ":", "/", "..", "\n", "\udc80", ID, UID, "crio-"]
)
TEXTS = st.one_of(st.text(max_size=255), st.lists(WORDS, max_size=20).map("".join))


@given(st.sampled_from(Kind), st.sampled_from([None, *QoSClass]), TEXTS, st.booleans())
@example(Kind.POD, QoSClass.GUARANTEED, "a" * 255, True)
@example(Kind.ROOT, None, "", False)
def test_classify_takes_any_name(parent: Kind, qos: QoSClass | None, name: str, systemd: bool) -> None:
    found = classify(parent, qos, name, pod_uid=UID, systemd=systemd)
    if parent in (Kind.CONTAINER, Kind.SANDBOX, Kind.CONMON, Kind.INSIDE_CONTAINER):
        assert found.kind is Kind.INSIDE_CONTAINER
    if found.kind is Kind.CONTAINER and parent is not Kind.OTHER:
        assert parent is Kind.POD
    if found.kind is Kind.POD and parent is Kind.QOS:
        assert found.qos is (qos or QoSClass.GUARANTEED)


@given(st.one_of(TEXTS, st.binary(max_size=300)))
def test_parse_takes_any_text_and_bytes(path: str | bytes) -> None:
    found = parse_path(path)
    assert found.kind is not Kind.POD or found.pod_uid
    if isinstance(path, str):
        assert not is_root_candidate(path) or found.kind is Kind.ROOT
        unit = unit_name(path)
        assert unit is None or unit.endswith((".slice", ".scope", ".service"))
        outside_container(path)


@given(st.one_of(TEXTS, st.binary(max_size=300)), st.integers(8, 300))
def test_shown_names_fit_a_log_line(name: str | bytes, limit: int) -> None:
    text = shown(name, limit)
    assert len(text) <= limit
    assert text.isascii() and (not text or text.isprintable())


def test_shown_names_keep_what_can_be_read() -> None:
    assert shown(f"cri-containerd-{ID}.scope") == f"cri-containerd-{ID}.scope"
    assert shown(r"system-systemd\x2dcoredump.slice") == r"system-systemd\x2dcoredump.slice"
    assert shown("a\nb\x1b[31m\u202e\U0001f600") == r"a\x0ab\x1b[31m\u202e\U0001f600"
    assert shown(b"caf\xe9") == r"caf\xe9"
    assert shown("0123456789" * 3, 15) == "012345...456789"
