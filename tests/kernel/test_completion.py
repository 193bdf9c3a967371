"""The completion script in a real bash, made from a real parser."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
from importlib import import_module
from pathlib import Path

import pytest

from enforcer import completion
from enforcer.config import Config

COMMANDS = ("explain", "simulate", "topology", "doctor", "record")


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="cpuset-enforcer")
    top.add_argument("--version", action="version", version="1")
    commands = top.add_subparsers()
    for name in COMMANDS:
        one = commands.add_parser(name)
        import_module(f"enforcer.{name}").add_arguments(one)
        one.add_argument("--mode", choices=["audit", "enforce"])
    completion.add_arguments(commands.add_parser("completion"))
    return top


@pytest.fixture
def shell(tmp_path: Path) -> Path:
    """A folder with the script, and a command that knows two pods."""
    bash = shutil.which("bash")
    assert bash, "bash is needed"
    (tmp_path / "script").write_text(completion.script(parser(), "bash"))
    command = tmp_path / "cpuset-enforcer"
    command.write_text(f"#!{bash}\n[ \"$*\" = 'completion names' ] && printf '%s\\n' 5a3e7f0c 77aa\n")
    command.chmod(0o755)
    return tmp_path


def completed(shell: Path, *words: str) -> list[str]:
    program = (
        'source "$0"; COMP_WORDS=("$@"); COMP_CWORD=$(($#-1)); _cpuset_enforcer; '
        '[ ${#COMPREPLY[@]} -eq 0 ] || printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "-euc", program, str(shell / "script"), "cpuset-enforcer", *words],
        capture_output=True, text=True, check=True, timeout=20,
        env={**os.environ, "PATH": f"{shell}:{os.environ['PATH']}"},
    )  # fmt: skip
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["ex"], ["explain"]),
        (["s"], ["simulate"]),
        (["--v"], ["--version"]),
        (["simulate", "--re"], ["--remove", "--reserved"]),
        (["simulate", "--mode", ""], ["audit", "enforce"]),
        (["simulate", "--json", "--mode", "e"], ["enforce"]),
        (["simulate", "--remove", "5"], ["5a3e7f0c"]),
        (["explain", "7"], ["77aa"]),
        (["completion", ""], ["-h", "--help", "bash", "zsh"]),
        (["topology", "--from", "/etc/"], []),
        (["simulate", "--reserved", ""], []),
        (["explain", "--nothing"], []),
    ],
)
def test_words_are_completed(shell: Path, words: list[str], expected: list[str]) -> None:
    assert completed(shell, *words) == expected


def test_every_command_and_option_is_there(shell: Path) -> None:
    assert {*COMMANDS, "completion"} <= set(completed(shell, ""))
    options = set(completed(shell, "simulate", "-"))
    assert {"--add", "--remove", "--options", "--reserved", "--from", "--node", "--json", "--afresh"} <= options


def test_zsh_gets_the_same_by_bashcompinit() -> None:
    bash, zsh = completion.script(parser(), "bash"), completion.script(parser(), "zsh")
    assert "bashcompinit" in zsh and "bashcompinit" not in bash
    assert zsh.splitlines()[2:] == bash.splitlines()[1:]


def test_names_are_safe_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are expanded by the shell, so nothing but letters, digits, dots, dashes and underscores gets there."""
    from enforcer import record
    from enforcer.describe import parse

    pods = [{"name": "db", "containers": [{"name": "main", "cpus": 1}]}]
    node = parse({"topology": {"cores": 4}, "pods": pods}, "n")
    monkeypatch.setattr(record, "this_node", lambda config: node)
    assert completion.names(Config()) == ["db", "main", "pause"]
    pod = next(node.view.pods())
    object.__setattr__(pod.ref, "uid", "$(reboot)")
    assert completion.names(Config()) == ["main", "pause"]
