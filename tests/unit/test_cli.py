"""The command line: what is said, where, and with which exit code."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest

from enforcer.cli import main
from enforcer.core.errors import CannotWorkHereError
from enforcer.output import say


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not root."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)


@pytest.mark.parametrize("arguments", [[], ["statsu"], ["run", "--mode", "enforced"], ["status", "--config"]])
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("usage: cpuset-enforcer")
    assert "cpuset-enforcer" in err.splitlines()[-1] and "error: " in err.splitlines()[-1]


@pytest.mark.parametrize("command", ["run", "status", "reset"])
def test_every_error_of_a_config_is_told(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.toml"
    config.write_text('mode = "enforced"\nreserved_cpu = "0"\n')
    assert main([command, "--config", str(config)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        f'cpuset-enforcer: {config}: mode = "enforced": allowed: "audit" or "enforce" (did you mean "enforce"?)',
        f'{config}: reserved_cpu = "0": unknown key; nearest: reserved-cpus (a CPU list such as "0-1" or "0,8")',
    ]


def test_a_config_that_is_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--config", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"cpuset-enforcer: {tmp_path}: cannot be read: Is a directory\n"


def test_enforce_without_root(nobody: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--mode", "enforce"]) == 3
    assert capsys.readouterr().err == (
        "cpuset-enforcer: mode enforce writes cpusets and must run as root\n  try sudo\n"
    )


@pytest.mark.parametrize("command", ["run", "status", "reset", "demo"])
def test_help_of_each_command_says_what_it_does(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    usage, about, *_ = capsys.readouterr().out.split("\n\n")
    assert usage.startswith(f"usage: cpuset-enforcer {command} ")
    assert about[0].isupper() and about.endswith(".")


def test_help_tells_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "0 all good, 1 findings, 2 wrong usage or config, 3 cannot work" in capsys.readouterr().out


def test_ctrl_c_is_no_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(path: object = None) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("enforcer.cli.load", interrupted)
    assert main(["status"]) == 130
    assert capsys.readouterr() == ("", "")


def test_a_full_disk_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(CannotWorkHereError, match="standard output cannot be written: No space left on device"):
            say("text")


def test_what_the_locale_cannot_write_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(kept, encoding="ascii"))
    say("caf\u00e9 \udcff")
    assert kept.getvalue() == b"caf\\xe9 \\udcff\n"


def test_a_reader_that_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as nobody:
        monkeypatch.setattr(sys, "stdout", nobody)
        with pytest.raises(BrokenPipeError):
            say("text")
        os.dup2(os.open(os.devnull, os.O_WRONLY), write)
