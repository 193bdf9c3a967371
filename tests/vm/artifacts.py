"""What a guest is made of: a kernel, a root disk with systemd, a static probe. Made once, cached outside the tree.

Every artifact's file name carries a hash of what it is made from, so a change of the inputs makes a new one.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from .apt import PrivateApt, checked, configured_mirror

SUITE: Final = "trixie"
KERNEL: Final = "linux-image-cloud-amd64"
IMAGE_PACKAGES: Final = (
    *("systemd", "systemd-sysv", "dbus", "udev", "kmod", "util-linux", "procps", "iproute2", "runc", "libbpf1"),
    *("python3", "python3-jeepney", "python3-pyudev", "python3-pyroute2", "python3-yaml"),
    *("python3-prometheus-client", "python3-pytest"),
)
# What slows a boot and does nothing for a test.
MASKED_UNITS: Final = (
    *("getty@tty1.service", "serial-getty@ttyS0.service", "serial-getty@ttyS1.service", "systemd-timesyncd.service"),
    *("apt-daily.timer", "apt-daily-upgrade.timer", "dpkg-db-backup.timer", "fstrim.timer", "e2scrub_all.timer"),
    *("e2scrub_reap.service", "systemd-networkd.service", "systemd-pcrphase.service", "systemd-hwdb-update.service"),
    *("systemd-update-utmp.service", "systemd-random-seed.service", "systemd-journal-flush.service"),
    *("systemd-journal-catalog-update.service", "ldconfig.service", "systemd-update-done.service"),
    *("systemd-logind.service", "systemd-user-sessions.service", "systemd-firstboot.service"),
)
KEEP_SECONDS: Final = 14 * 86400
# A kernel finds a partition by this id without an initramfs; names of NVMe disks change from boot to boot.
DISK_ID: Final = 0x766D0001
ROOT_PARTUUID: Final = f"{DISK_ID:08x}-01"

FILES: Final = Path(__file__).resolve().parent / "files"
REPOSITORY: Final = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Artifacts:
    """Where the artifacts are, or will be, below one cache folder."""

    cache: Path

    @property
    def kernel(self) -> Path:
        """The kernel as a bootable file; its release stands beside it in `<name>.release`."""
        return self.cache / f"vmlinuz-{_key(SUITE, KERNEL)}"

    @property
    def image(self) -> Path:
        """The root disk with systemd as PID 1: one ext4 partition."""
        return self.cache / f"systemd-{_key(SUITE, *IMAGE_PACKAGES, *MASKED_UNITS, *_texts('guest-job*'))}.img"

    @property
    def probe(self) -> Path:
        """The static program of the containers (files/probe.c)."""
        return self.cache / f"probe-{_key(*_texts('probe.c'))}"

    def touch(self) -> None:
        """Says that the artifacts are in use."""
        for file in (self.kernel, self.kernel.with_name(f"{self.kernel.name}.release"), self.image, self.probe):
            with contextlib.suppress(OSError):
                os.utime(file)

    def stale(self, now: float) -> list[Path]:
        """Files in the cache that nobody has used for a long time; other checkouts share the cache."""
        files = [file for file in self.cache.iterdir() if file.name != "lock"]
        return [file for file in files if now - file.stat().st_mtime > KEEP_SECONDS]


def default_cache() -> Path:
    """$XDG_CACHE_HOME/cpuset-enforcer-tests, else below /var/cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "/var/cache") / "cpuset-enforcer-tests"


def build_kernel(target: Path, work: Path) -> str:
    """The suite's newest cloud kernel, which has NVMe, ext4 and virtiofs built in; returns its release."""
    apt = PrivateApt(work / "apt", SUITE, configured_mirror())
    depends = apt.run("apt-cache", "depends", KERNEL).split()
    package = next(word for word in depends if word.startswith("linux-image-") and word != KERNEL)
    apt.unpack([package], work / "kernel")
    release = package.removeprefix("linux-image-")
    target.with_name(target.name + ".release").write_text(release + "\n")
    shutil.move(work / "kernel/boot" / f"vmlinuz-{release}", target)
    return release


def build_image(target: Path, work: Path) -> None:
    """A Debian root with systemd, runc and our package's dependencies; no loop mount, no boot loader."""
    root = work / "root"
    source = configured_mirror().line(SUITE)
    include = f"--include={','.join(IMAGE_PACKAGES)}"
    checked(["mmdebstrap", "--variant=minbase", include, SUITE, str(root), source])
    _adapt(root)
    _pack(root, work / "image")
    shutil.move(work / "image", target)


def build_probe(target: Path, work: Path) -> None:
    """The probe, linked statically so that it is the only file its container needs."""
    checked(["gcc", "-static", "-O1", "-s", "-Wall", "-o", str(work / "probe"), str(FILES / "probe.c")])
    shutil.move(work / "probe", target)


def make_disk(folder: Path, image: Path, *, spare_mib: int = 16) -> None:
    """An ext4 disk without partitions that holds the files of `folder`."""
    _truncate(image, _size_mib(folder) + spare_mib)
    checked(["mkfs.ext4", "-q", "-F", "-O", "^has_journal", "-m", "0", "-d", str(folder), str(image)])


def _adapt(root: Path) -> None:
    etc = root / "etc"
    shutil.copy(FILES / "guest-job", root / "usr/local/sbin/guest-job")
    shutil.copy(FILES / "guest-job.service", etc / "systemd/system/guest-job.service")
    wants = etc / "systemd/system/multi-user.target.wants"
    wants.mkdir(exist_ok=True)
    (wants / "guest-job.service").symlink_to("../guest-job.service")
    for unit in MASKED_UNITS:
        link = etc / "systemd/system" / unit
        link.unlink(missing_ok=True)
        link.symlink_to("/dev/null")
    (etc / "hostname").write_text("guest\n")
    (etc / "fstab").write_text("")
    (etc / "machine-id").write_text("0123456789abcdef0123456789abcdef\n")


def _pack(root: Path, image: Path) -> None:
    size = _size_mib(root) + 256
    _truncate(image, size + 1)
    with image.open("r+b") as disk:
        disk.write(_partition_table(size))
    command = ["mkfs.ext4", "-q", "-F", "-O", "^has_journal", "-m", "0", "-E", "offset=1048576"]
    checked([*command, "-d", str(root), str(image), f"{size}M"])


def _partition_table(size_mib: int) -> bytes:
    """A DOS partition table with one Linux partition from the first MiB on."""
    entry = struct.pack("<4xB3xII", 0x83, 2048, size_mib * 2048)
    return bytes(440) + struct.pack("<IH", DISK_ID, 0) + entry + bytes(48) + b"\x55\xaa"


def _truncate(file: Path, mib: int) -> None:
    with file.open("wb") as disk:
        disk.truncate(mib << 20)


def _size_mib(folder: Path) -> int:
    """A safe estimate of what the folder takes on ext4: whole blocks, a quarter on top."""
    blocks = sum(-(-path.lstat().st_size // 4096) + 1 for path in folder.rglob("*"))
    return (blocks * 4096 * 5 // 4 >> 20) + 1


def _texts(pattern: str) -> list[str]:
    return [file.read_text() for file in sorted(FILES.glob(pattern))]


def _key(*parts: str) -> str:
    """Of the inputs and of this file: how a thing is made is an input too."""
    recipe = Path(__file__).read_text()
    return hashlib.sha256("\0".join((recipe, *parts)).encode()).hexdigest()[:12]
