"""The parts of the guest harness that need no guest."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path

import pytest

from . import artifacts as artifacts_module
from . import guest as guest_module
from . import prepare as prepare_module
from .apt import PrepareError, configured_mirror
from .artifacts import Artifacts, make_disk
from .fleet import RESULT_LINE, InsideResult, inside_command, stage_share
from .guest import GuestError, GuestSpec, missing, qemu_command
from .prepare import prepare

SOURCES = """\
# the machine's own
Types: deb-src
URIs: http://sources.example/debian
Suites: bookworm
Components: main

Types: deb
# a snapshot once
URIs: http://security.example/debian-security
Suites: bookworm-security
Components: main

Enabled: no
Types: deb
URIs: http://disabled.example/debian
Suites: bookworm
Components: main

Types: deb deb-src
URIs: http://mirror.example/debian http://second.example/debian
Suites: bookworm bookworm-updates
Components: main contrib
Signed-By: /etc/apt/keyrings/ours.gpg
"""


def etc_apt(tmp_path: Path, *, sources: str = "", one_line: str = "") -> Path:
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list.d/debian.sources").write_text(sources)
    (tmp_path / "sources.list").write_text(one_line)
    return tmp_path


def test_mirror_is_the_enabled_source_of_the_machines_suite(tmp_path: Path) -> None:
    mirror = configured_mirror(etc_apt(tmp_path, sources=SOURCES), "bookworm")
    assert (
        mirror.line("trixie") == "deb [signed-by=/etc/apt/keyrings/ours.gpg] http://mirror.example/debian trixie main"
    )


def test_mirror_from_a_one_line_list(tmp_path: Path) -> None:
    text = (
        "# deb http://off.example/debian bookworm main\n"
        "deb http://mirror.example/security bookworm-security main\n"
        "deb [ arch=amd64 signed-by=/k.gpg ] http://mirror.example/debian bookworm main # ours\n"
    )
    mirror = configured_mirror(etc_apt(tmp_path, one_line=text), "bookworm")
    assert (mirror.uri, mirror.keyring) == ("http://mirror.example/debian", Path("/k.gpg"))


def test_no_mirror_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(PrepareError, match="no apt source for Debian forky main in .*sources.list"):
        configured_mirror(etc_apt(tmp_path, sources=SOURCES), "forky")


def test_artifacts_names_follow_their_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Artifacts(tmp_path)
    before = (made.kernel, made.image, made.probe)
    monkeypatch.setattr(artifacts_module, "IMAGE_PACKAGES", (*artifacts_module.IMAGE_PACKAGES, "hello"))
    assert made.image != before[1]
    assert (made.kernel, made.probe) == (before[0], before[2])


def test_prepare_builds_what_is_missing_and_removes_what_is_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Artifacts(tmp_path / "cache")
    built: list[str] = []

    def build(target: Path, work: Path) -> None:
        built.append(target.name)
        target.write_text("new")

    for name in ("build_kernel", "build_image", "build_probe"):
        monkeypatch.setattr(prepare_module, name, build)
    monkeypatch.setattr(prepare_module, "_check_machine", lambda: None)
    made.cache.mkdir()
    made.kernel.write_text("kept")
    for name, used in (("systemd-0123.img", 0), ("systemd-4567.img", time.time() - 86400)):
        (made.cache / name).write_text("of another checkout")
        os.utime(made.cache / name, (used, used))
    said: list[str] = []
    prepare(made, say=said.append)
    assert built == [made.probe.name + ".half", made.image.name + ".half"]
    left = {made.kernel.name, made.probe.name, made.image.name, "systemd-4567.img", "lock"}
    assert {file.name for file in made.cache.iterdir()} == left
    assert made.kernel.read_text() == "kept"
    assert any("systemd-0123.img" in line for line in said)


@pytest.mark.skipif(not shutil.which("mkfs.ext4"), reason="mkfs.ext4 is not installed (Debian: e2fsprogs)")
def test_disk_holds_the_folder(tmp_path: Path) -> None:
    (tmp_path / "from").mkdir()
    (tmp_path / "from/file").write_bytes(b"x" * 5_000_000)
    make_disk(tmp_path / "from", tmp_path / "disk")
    with (tmp_path / "disk").open("rb") as disk:
        disk.seek(1024 + 56)
        assert disk.read(2) == b"\x53\xef"  # ext4's magic number
    assert (tmp_path / "disk").stat().st_size > 5_000_000


def test_missing_says_what_and_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Artifacts(tmp_path)
    monkeypatch.setattr(guest_module, "QEMU", "no-such-emulator")
    assert missing("plain", made) == "no-such-emulator is not installed (Debian: qemu-system-x86)"
    monkeypatch.setattr(guest_module, "QEMU", "sh")
    monkeypatch.setattr(guest_module, "VIRTIOFSD", tmp_path / "virtiofsd")
    remedy = "(Debian: virtiofsd; Debian 12: qemu-system-common)"
    assert missing("plain", made) == f"{tmp_path}/virtiofsd is not there {remedy}"
    for file in (made.kernel, made.probe):
        file.touch()
    absent = missing("systemd", made)
    assert absent == f"no {made.image.name} in {tmp_path}: run `python -m tests.vm.prepare`"
    made.image.touch()
    assert missing("systemd", made) is None


def test_the_emulated_machine() -> None:
    command = " ".join(qemu_command(GuestSpec(kind="plain", append="isolcpus=3"), Path("/w"), Artifacts(Path("/c"))))
    assert "-smp 8,sockets=2,cores=2,threads=2" in command
    assert "node,nodeid=1,memdev=m1,cpus=4-7" in command
    assert "thread=single" in command
    assert command.endswith("isolcpus=3")


def test_a_result_line_is_read_back() -> None:
    line = RESULT_LINE + json.dumps({"id": "t.py::test_a[x y]", "outcome": "failed", "text": "1\n2"})
    assert InsideResult.from_line(line) == ("t.py::test_a[x y]", InsideResult("failed", "1\n2"))


def test_python_that_a_plain_guest_cannot_see_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/run/venv/bin/python")
    with pytest.raises(GuestError, match="cannot see /run/venv/bin/python"):
        inside_command("plain")


def test_share_holds_sources_rootfs_and_what_to_run(tmp_path: Path) -> None:
    made = Artifacts(tmp_path / "cache")
    made.cache.mkdir()
    made.probe.write_text("the probe")
    stage_share(tmp_path / "share", ["a.py::test_b"], made)
    share = tmp_path / "share"
    assert (share / "tests.txt").read_text() == "a.py::test_b\n"
    assert (share / "repo/enforcer/core/cpuset.py").exists()
    assert (share / "rootfs/pause").read_text() == "the probe"
    assert (share / "rootfs/probe").stat().st_mode & 0o111 == 0o111
