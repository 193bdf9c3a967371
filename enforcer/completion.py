"""completion: a script for bash (and zsh, by bashcompinit) made from the very parser of the command line.

No library: shtab would do the static part, but what a person wants completed is a pod's UID, and a node agent that
runs as root should not need one more package for a hundred lines.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from typing import Final

from enforcer.config import Config
from enforcer.core.errors import EnforcerError
from enforcer.output import say

SHELLS: Final = ("bash", "zsh")
NAMES: Final = "names"  # asked for by the script itself
_SUBJECTS: Final = ("SUBJECT", "POD")

_PLAIN: Final = re.compile(r"[\w.-]{1,128}", re.ASCII)

_TEMPLATE: Final = """\
# {prog} completion for {shell}; made by `{prog} completion {shell}`
{zsh}_{function}() {{
    local word="${{COMP_WORDS[COMP_CWORD]-}}" before="${{COMP_WORDS[COMP_CWORD-1]-}}" command= options= at
    for ((at = 1; at < COMP_CWORD; at++)); do
        case "${{COMP_WORDS[at]}}" in
            {names}) command="${{COMP_WORDS[at]}}"; break ;;
        esac
    done
    COMPREPLY=()
    case "$command $before" in
{values}
    esac
    case "$command" in
{commands}
    esac
    COMPREPLY=($(compgen -W "$options" -- "$word")) || :
}}
complete -o default -F _{function} {prog}
"""
_ZSH: Final = "autoload -Uz bashcompinit && bashcompinit\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `completion`."""
    parser.add_argument(
        "shell", choices=(*SHELLS, NAMES), help="the shell that the script is for; names: the pods and containers here"
    )


def main(arguments: argparse.Namespace, config: Config, parser: argparse.ArgumentParser) -> int:
    """Prints the script for the command line that `parser` reads, or the names that may follow on this node; 0."""
    say("\n".join(names(config)) if arguments.shell == NAMES else script(parser, arguments.shell).rstrip("\n"))
    return 0


def names(config: Config) -> list[str]:
    """UIDs of pods and ids of containers as `explain` takes them; nothing where there is nothing to read."""
    from enforcer.record import this_node

    try:
        view = this_node(config).view
    except EnforcerError:
        return []
    found = [name for pod, one in view.containers() for name in (pod.ref.uid, one.ref.id)]
    return sorted(name for name in set(found) if _PLAIN.fullmatch(name))


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """The completion script: options, commands, their options, and the values of those that have choices."""
    commands = dict(_commands(parser))
    values = [line for name, one in (("", parser), *commands.items()) for line in _values(name, one)]
    return _TEMPLATE.format(
        prog=parser.prog,
        shell=shell,
        zsh=_ZSH if shell == "zsh" else "",
        function=parser.prog.replace("-", "_"),
        names="|".join(commands),
        values="\n".join(values),
        commands="\n".join(_words(name, one) for name, one in (("", parser), *commands.items())),
    )


def _commands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in parser._actions:  # argparse has no public way to walk a parser
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.items()


def _words(name: str, parser: argparse.ArgumentParser) -> str:
    words = [option for action in parser._actions for option in action.option_strings]
    free = [action for action in parser._actions if not action.option_strings]
    words += [str(choice) for action in free for choice in action.choices or () if choice != NAMES]
    if any(action.metavar in _SUBJECTS for action in free):
        words.append(_here(parser))
    return f'        {shlex.quote(name)}) options="{" ".join(words)}" ;;'


def _here(parser: argparse.ArgumentParser) -> str:
    return f"$({parser.prog.split()[0]} completion {NAMES} 2>/dev/null)"


def _values(name: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    """After an option that takes a value: its choices or the names of this node; else the shell's own file names."""
    for action in parser._actions:
        if action.nargs == 0 or not action.option_strings:
            continue
        patterns = "|".join(shlex.quote(f"{name} {option}") for option in action.option_strings)
        words = " ".join(map(str, action.choices or ())) or (_here(parser) if action.metavar in _SUBJECTS else "")
        done = f'COMPREPLY=($(compgen -W "{words}" -- "$word")) || :; ' if words else ""
        yield f"        {patterns}) {done}return ;;"
