"""Boots a guest by software emulation and runs one shell command in it as root.

A guest has 8 CPUs (2 sockets x 2 cores x 2 threads), a NUMA node for each socket, and cgroup v2 with a cpuset
controller. `plain`: this machine's own root, read-only, and a short script as PID 1. `systemd`: a Debian disk with
systemd as PID 1, thrown away afterwards.
"""

from __future__ import annotations

import os
import selectors
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Literal

from .artifacts import FILES, ROOT_PARTUUID, Artifacts, make_disk

Kind = Literal["plain", "systemd"]
KINDS: Final[tuple[Kind, ...]] = ("plain", "systemd")

QEMU: Final = "qemu-system-x86_64"
_VIRTIOFSDS: Final = (Path("/usr/libexec/virtiofsd"), Path("/usr/lib/qemu/virtiofsd"))
VIRTIOFSD: Final = next((file for file in _VIRTIOFSDS if file.exists()), _VIRTIOFSDS[0])
SHARE: Final = "/run/share"

# no audit, no slow checks; expedited grace periods because a cpuset write waits for several of them
_KERNEL_LINE: Final = (
    "console=ttyS0 panic=-1 quiet mitigations=off nokaslr audit=0 apparmor=0 nmi_watchdog=0 no_timer_check "
    "rcupdate.rcu_expedited=1 random.trust_cpu=on systemd.show_status=0"
)


class GuestError(Exception):
    """A guest did not do what it should; the message ends with what it last said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestSpec:
    """The machine to boot. `append` goes at the end of the kernel's command line."""

    kind: Kind
    sockets: int = 2
    cores: int = 2
    threads: int = 2
    memory_mib: int = 1024
    append: str = ""

    @property
    def cpus(self) -> int:
        """Logical CPUs of the whole machine."""
        return self.sockets * self.cores * self.threads


def missing(kind: Kind, artifacts: Artifacts) -> str | None:
    """Why a guest of this kind cannot boot here, in words and with the remedy; None when it can."""
    if not shutil.which(QEMU):
        return f"{QEMU} is not installed (Debian: qemu-system-x86)"
    if kind == "plain" and not VIRTIOFSD.exists():
        return f"{VIRTIOFSD} is not there (Debian: virtiofsd; Debian 12: qemu-system-common)"
    if kind == "plain" and os.geteuid() != 0:
        return "a plain guest sees this machine's root through virtiofsd, which needs root"
    needed = [artifacts.kernel, artifacts.probe] + ([artifacts.image] if kind == "systemd" else [])
    if absent := [file.name for file in needed if not file.exists()]:
        return f"no {', '.join(absent)} in {artifacts.cache}: run `python -m tests.vm.prepare`"
    return None


class Guest:
    """A running guest; a context manager. Made by `boot()`."""

    def __init__(self, qemu: subprocess.Popen[bytes], virtiofsd: subprocess.Popen[bytes] | None, work: Path) -> None:
        self._qemu, self._virtiofsd, self._work = qemu, virtiofsd, work
        self._started = time.monotonic()
        self._buffer = b""
        self.boot_seconds: float | None = None
        """From qemu's start to the command's; None until then."""
        self.exit_code: int | None = None
        """The command's; None until it has ended."""

    def lines(self, silence: float = 180) -> Iterator[str]:
        """What the command says, line by line as it comes, until the guest ends.

        Raises GuestError when nothing comes for `silence` seconds, or the guest ends before the command has.
        """
        while (line := self._next_line(silence)) is not None:
            if line.startswith("@@up "):
                self.boot_seconds = time.monotonic() - self._started
            elif line.startswith("@@exit "):
                self.exit_code = int(line.split()[1])
            else:
                yield line
        if self.exit_code is None:
            raise GuestError(f"the guest ended before its command did\n{self.console()}")

    def _next_line(self, silence: float) -> str | None:
        assert self._qemu.stdout
        deadline = time.monotonic() + silence
        with selectors.DefaultSelector() as selector:
            selector.register(self._qemu.stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise GuestError(f"the guest said nothing for {silence:.0f} s\n{self.console()}")
                if not (got := os.read(self._qemu.stdout.fileno(), 65536)):
                    return None
                self._buffer += got
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode(errors="replace").rstrip("\r")

    def console(self, size: int = 4000) -> str:
        """The end of the kernel's console and of qemu's own complaints."""
        files = (self._work / "qemu.err", self._work / "console")
        texts = [(file.name, file.read_text(errors="replace").strip()[-size:]) for file in files if file.exists()]
        return "\n".join(f"--- {name}\n{text}" for name, text in texts if text) or "(its console is empty)"

    def close(self) -> None:
        """Ends the guest, whatever it does, and removes its temporary files."""
        _end(self._qemu)
        if self._virtiofsd:
            _end(self._virtiofsd)
        shutil.rmtree(self._work, ignore_errors=True)

    def __enter__(self) -> Guest:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def boot(spec: GuestSpec, command: str, share: Path | None = None, *, artifacts: Artifacts) -> Guest:
    """Starts a guest that runs `command` with sh in /run/share, a copy of `share` that cannot be written.

    What the command leaves elsewhere is gone with the guest. Raises GuestError when the guest cannot start.
    """
    if reason := missing(spec.kind, artifacts):
        raise GuestError(reason)
    artifacts.touch()
    work = Path(tempfile.mkdtemp(prefix="cpuset-enforcer-guest."))
    daemon = None
    try:
        _stage(work, command, share)
        if spec.kind == "plain":
            daemon = _serve_root(work)
        with (work / "qemu.err").open("wb") as complaints:
            qemu = subprocess.Popen(
                _dying_with_us(qemu_command(spec, work, artifacts)),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=complaints,
            )
    except BaseException:
        if daemon:
            _end(daemon)
        shutil.rmtree(work, ignore_errors=True)
        raise
    return Guest(qemu, daemon, work)


def run(
    spec: GuestSpec, command: str, share: Path | None = None, *, artifacts: Artifacts, silence: float = 180
) -> tuple[int, str]:
    """Boots, runs the command to its end; returns its exit code and output. Raises GuestError."""
    with boot(spec, command, share, artifacts=artifacts) as guest:
        output = "\n".join(guest.lines(silence))
        assert guest.exit_code is not None
        return guest.exit_code, output


def qemu_command(spec: GuestSpec, work: Path, artifacts: Artifacts) -> list[str]:
    """The emulator's command line.

    thread=single: with qemu 7.2 several emulator threads crash guests that patch kernel text. vendor=GenuineIntel:
    the emulated AMD processor hides its hyper-threads from older kernels.
    """
    smp = f"{spec.cpus},sockets={spec.sockets},cores={spec.cores},threads={spec.threads}"
    command = [QEMU, "-machine", "q35", "-accel", "tcg,thread=single", "-cpu", "max,vendor=GenuineIntel", "-smp", smp]
    command += ["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-net", "none", "-monitor", "none"]
    command += ["-serial", f"file:{work}/console", "-serial", "stdio", "-kernel", str(artifacts.kernel)]
    command += _memory(spec)
    command += ["-device", "nvme,id=nvme,serial=guest"]
    if spec.kind == "systemd":
        command += [*_disk(1, artifacts.image, throw_away=True), *_disk(2, work / "share.img")]
        root = f"root=PARTUUID={ROOT_PARTUUID} rootwait rootfstype=ext4 rw"
    else:
        command += _disk(2, work / "share.img")
        command += ["-chardev", f"socket,id=fs,path={work}/fs", "-device", "vhost-user-fs-pci,chardev=fs,tag=hostroot"]
        root = f"root=hostroot rootfstype=virtiofs ro init={FILES}/guest-init"
    return [*command, "-append", f"{root} {_KERNEL_LINE} {spec.append}".strip()]


def _memory(spec: GuestSpec) -> list[str]:
    """A NUMA node for each socket. virtiofs needs memory that another process can map."""
    node_mib, node_cpus = spec.memory_mib // spec.sockets, spec.cpus // spec.sockets
    flags = ["-m", f"{node_mib * spec.sockets}M"]
    for node in range(spec.sockets):
        cpus = f"{node * node_cpus}-{(node + 1) * node_cpus - 1}"
        flags += ["-object", f"memory-backend-memfd,id=m{node},size={node_mib}M,share=on"]
        flags += ["-numa", f"node,nodeid={node},memdev=m{node},cpus={cpus}"]
    pairs = [(a, b) for a in range(spec.sockets) for b in range(spec.sockets) if a != b]
    return flags + [word for a, b in pairs for word in ("-numa", f"dist,src={a},dst={b},val=21")]


def _disk(namespace: int, file: Path, *, throw_away: bool = False) -> list[str]:
    drive = f"file={file},if=none,id=d{namespace},format=raw,cache=unsafe,snapshot={'on' if throw_away else 'off'}"
    return ["-drive", drive, "-device", f"nvme-ns,bus=nvme,drive=d{namespace},nsid={namespace}"]


def _stage(work: Path, command: str, share: Path | None) -> None:
    stage = work / "stage"
    if share:
        shutil.copytree(share, stage, symlinks=True)
    else:
        stage.mkdir()
    (stage / "job").write_text(command + "\n")
    make_disk(stage, work / "share.img")
    shutil.rmtree(stage)


def _serve_root(work: Path) -> subprocess.Popen[bytes]:
    socket = work / "fs"
    command = _dying_with_us([str(VIRTIOFSD), f"--socket-path={socket}", "-o", "source=/,cache=always,sandbox=chroot"])
    said = work / "virtiofsd.err"
    with said.open("wb") as complaints:
        daemon = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=complaints, stderr=complaints)
    deadline = time.monotonic() + 10
    while not socket.exists():
        if daemon.poll() is not None or time.monotonic() > deadline:
            _end(daemon)
            raise GuestError(f"virtiofsd does not serve: {said.read_text(errors='replace')[-1000:]}")
        time.sleep(0.02)
    return daemon


def _dying_with_us(command: list[str]) -> list[str]:
    """No emulator may outlive a test run that was killed."""
    return ["setpriv", "--pdeathsig", "KILL", "--", *command]


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout:
        process.stdout.close()


__all__ = ["KINDS", "SHARE", "Guest", "GuestError", "GuestSpec", "Kind", "boot", "missing", "qemu_command", "run"]
