"""Debian packages of a suite that is not the machine's own, from the machine's own mirror, nothing installed."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


class PrepareError(Exception):
    """Something for the guests cannot be made; the message says what, where and what to do."""


@dataclass(frozen=True, slots=True)
class Mirror:
    """Where the machine gets Debian's main archive from: `uri` and the keyring that signs it."""

    uri: str
    keyring: Path = KEYRING

    def line(self, suite: str) -> str:
        """As a sources.list(5) line for `suite`."""
        return f"deb [signed-by={self.keyring}] {self.uri} {suite} main"


def configured_mirror(etc: Path = Path("/etc/apt"), codename: str | None = None) -> Mirror:
    """The mirror in this machine's apt configuration that carries the machine's own suite.

    Raises PrepareError when there is none, with the files looked at.
    """
    codename = codename or _codename()
    for suites, components, mirror in _entries(etc):
        if codename in suites and "main" in components:
            return mirror
    raise PrepareError(
        f"no apt source for Debian {codename} main in {etc}/sources.list or {etc}/sources.list.d; "
        "the guests' kernel and packages come from the machine's own Debian mirror"
    )


def _codename(os_release: Path = Path("/etc/os-release")) -> str:
    for line in os_release.read_text().splitlines():
        key, _, value = line.partition("=")
        if key == "VERSION_CODENAME":
            return value.strip('"')
    raise PrepareError(f"{os_release} has no VERSION_CODENAME: is this Debian?")


_Entry = tuple[list[str], list[str], Mirror]


def _entries(etc: Path) -> Iterator[_Entry]:
    folder = etc / "sources.list.d"
    for file in sorted(folder.glob("*.sources")):
        yield from _deb822(file.read_text())
    for file in (etc / "sources.list", *sorted(folder.glob("*.list"))):
        if file.exists():
            yield from _one_line(file.read_text())


def _deb822(text: str) -> Iterator[_Entry]:
    lines = (line for line in text.splitlines() if not line.startswith("#"))
    for stanza in "\n".join(lines).split("\n\n"):
        fields: dict[str, str] = {}
        for line in stanza.splitlines():
            key, colon, value = line.partition(":")
            if colon and not line[0].isspace():
                fields[key.lower()] = value.strip()
        if "deb" in fields.get("types", "").split() and fields.get("enabled", "yes") != "no" and fields.get("uris"):
            mirror = Mirror(fields["uris"].split()[0], _keyring(fields.get("signed-by", "")))
            yield fields.get("suites", "").split(), fields.get("components", "").split(), mirror


def _one_line(text: str) -> Iterator[_Entry]:
    for line in text.splitlines():
        kind, _, rest = line.split("#")[0].strip().partition(" ")
        options = ""
        if rest.lstrip().startswith("["):
            options, _, rest = rest.lstrip()[1:].partition("]")
        words = rest.split()
        if kind == "deb" and len(words) >= 3:
            signed = [word.partition("=")[2] for word in options.split() if word.startswith("signed-by=")]
            yield [words[1]], words[2:], Mirror(words[0], _keyring(*signed))


def _keyring(signed_by: str = "") -> Path:
    return Path(signed_by) if signed_by.startswith("/") else KEYRING


class PrivateApt:
    """apt with folders of its own below `root` for one suite: the machine's sources and lists stay as they are.

    The machine's apt.conf (proxies, for one) still counts.
    """

    def __init__(self, root: Path, suite: str, mirror: Mirror) -> None:
        self.root = root
        for folder in ("etc/sources.list.d", "etc/preferences.d", "state/lists/partial", "cache/archives/partial"):
            (root / folder).mkdir(parents=True, exist_ok=True)
        (root / "etc/sources.list").write_text(mirror.line(suite) + "\n")
        self.run("apt-get", "update")

    def run(self, command: str, *arguments: str, cwd: Path | None = None) -> str:
        """One apt command; returns its output, raises PrepareError with what it said."""
        options = {
            "Dir::Etc": self.root / "etc",
            "Dir::State": self.root / "state",
            "Dir::Cache": self.root / "cache",
            "Dir::State::status": "/dev/null",
            "APT::Sandbox::User": "root",
        }
        flags = [word for key, value in options.items() for word in ("-o", f"{key}={value}")]
        return checked([command, "-qq", *flags, *arguments], cwd=cwd)

    def unpack(self, packages: list[str], into: Path) -> None:
        """Downloads the packages and unpacks their files into a folder."""
        debs = self.root / "debs"
        debs.mkdir(exist_ok=True)
        self.run("apt-get", "download", *packages, cwd=debs)
        for deb in sorted(debs.glob("*.deb")):
            checked(["dpkg", "-x", str(deb), str(into)])


def checked(command: list[str], *, cwd: Path | None = None) -> str:
    """Runs a command; returns its standard output, raises PrepareError with the end of what it said."""
    environment = os.environ | {"LC_ALL": "C.UTF-8", "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"}
    try:
        done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise PrepareError(f"no {command[0]} on this machine") from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip()[-1500:]
        raise PrepareError(f"{' '.join(command)}: exit code {done.returncode}\n{said}")
    return done.stdout
