"""The command line. Exit codes: 0 good, 1 findings, 2 wrong usage or config, 3 cannot work here."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from enforcer import __version__, completion
from enforcer.apply import Applier
from enforcer.audit import plan_audit
from enforcer.child import die_with
from enforcer.config import DEFAULT_PATH, Config, Mode, load
from enforcer.core.errors import CannotWorkHereError, ConfigError, EnforcerError
from enforcer.core.unpin import plan_unpin
from enforcer.journal import set_up_logging
from enforcer.kernel import procfs
from enforcer.kernel.cgroupfs import CgroupFS, describe
from enforcer.kernel.sysfs import read_topology
from enforcer.lock import take_lock
from enforcer.observe import Observer
from enforcer.output import drop, is_terminal, no_room, say
from enforcer.service import AUDIT_FILE, STATE_FILE, Service, connect_units, load_state, policy_of

GOOD, FINDINGS, USAGE, CANNOT = range(4)
INTERRUPTED = 128 + signal.SIGINT
_SYSTEMD_ANSWERS = 10.0  # seconds
# Modules of the same names, loaded only when they are called: the agent need not carry them.
_QUESTIONS: Final = {
    "explain": "say why a pod or container has its CPUs or has none, or whose a CPU is",
    "simulate": "print what enforce would do, also with pods that come and go and other options; write nothing",
    "topology": "show the machine's sockets, NUMA nodes, L3 caches and cores, as a table and as a map",
    "record": "pack all that the plan reads of this node into one file, for simulate --from and bug reports",
    "doctor": "check what of this node will work and what will not, with the remedy",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; the exit code. Every error of ours is told in words."""
    words = sys.argv[1:] if argv is None else argv
    try:
        arguments = _parsed(words)
        command: Callable[[argparse.Namespace], int] = arguments.command
        return command(arguments)
    except ConfigError as error:
        return _told(error, USAGE)
    except EnforcerError as error:
        return _told(error, CANNOT)
    except BrokenPipeError:
        drop()
        return GOOD
    except KeyboardInterrupt:
        return INTERRUPTED


def _parsed(words: Sequence[str]) -> argparse.Namespace:
    """The arguments; --help and --version print and end the program in here."""
    try:
        try:
            return _parser(words).parse_args(words)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise no_room(error) from error


def _told(error: EnforcerError, code: int) -> int:
    print(f"cpuset-enforcer: {error.message}", file=sys.stderr)
    if error.hint:
        print(f"  {error.hint}", file=sys.stderr)
    return code


def _parser(words: Sequence[str] = ()) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cpuset-enforcer",
        description="Gives Guaranteed pods their own CPU cores and keeps all others off them.",
        epilog="Exit codes: 0 all good, 1 findings, 2 wrong usage or config, 3 cannot work here.",
    )
    parser.add_argument("--version", action="version", version=f"cpuset-enforcer {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = _command(commands, "run", "run the agent, in the foreground", _run)
    run.add_argument(
        "--mode", choices=[mode.value for mode in Mode],
        help="audit looks and logs, enforce writes cpusets; goes before the config's mode (default there: audit)",
    )  # fmt: skip
    run.add_argument("--verbose", action="store_true", help="log every write")
    status = _command(commands, "status", "show who has which CPUs now, and why", _status)
    status.add_argument("--json", action="store_true", help="print JSON, for programs")
    status.add_argument(
        "--no-color", "--no-colour", action="store_true", dest="plain", help="no colours; NO_COLOR=1 does the same"
    )
    reset = _command(commands, "reset", "give back every set that the agent wrote; it must be stopped", _reset)
    reset.add_argument("--json", action="store_true", help="print JSON, for programs")
    audit = _command(commands, "audit", "print what enforce mode would write now, as findings; writes nothing", _audit)
    plan_audit.add_arguments(audit)
    metrics = _command(commands, "metrics", "serve the agent's state to Prometheus; the agent starts it", _metrics)
    metrics.add_argument("--listen", metavar="HOST:PORT", help="goes before the config's metrics-listen")
    metrics.add_argument("--state-dir", type=Path, metavar="DIR", help="goes before the config's state-dir")
    metrics.add_argument("--parent", type=int, metavar="PID", help="end when this process does")
    about = "show the agent at work on this machine's real cgroups, without Kubernetes; removes all it made"
    demo = commands.add_parser("demo", help=about, description=_sentence(about))
    demo.add_argument("--json", action="store_true", help="print only the list of checks, as JSON")
    demo.set_defaults(command=_demo)
    _add_questions(parser, commands, words)
    return parser


def _add_questions(parser: argparse.ArgumentParser, commands: Any, words: Sequence[str]) -> None:
    for name, told in _QUESTIONS.items():
        question = _command(commands, name, told, partial(_ask, name))
        if name in words or "completion" in words:
            import_module(f"enforcer.{name}").add_arguments(question)
    script = _command(commands, "completion", "print a completion script for bash or zsh", partial(_complete, parser))
    completion.add_arguments(script)


def _ask(name: str, arguments: argparse.Namespace) -> int:
    return int(import_module(f"enforcer.{name}").main(arguments, _config(arguments)))


def _complete(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    return completion.main(arguments, _config(arguments), parser)


def _command(
    commands: Any, name: str, help_text: str, function: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=help_text, description=_sentence(help_text))
    parser.add_argument("--config", type=Path, metavar="FILE", help=f"the config, TOML (default: {DEFAULT_PATH})")
    parser.set_defaults(command=function)
    return parser


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _config(arguments: argparse.Namespace) -> Config:
    config = load(arguments.config)
    mode = getattr(arguments, "mode", None)
    return replace(config, mode=Mode(mode)) if mode else config


def _run(arguments: argparse.Namespace) -> int:
    config = _config(arguments)
    set_up_logging(arguments.verbose)
    # One that comes before the agent listens means the config that is being read just now.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if os.geteuid() != 0 and config.mode is Mode.ENFORCE:
        raise CannotWorkHereError("mode enforce writes cpusets and must run as root", hint="try sudo")
    with take_lock(config.state_dir):
        Service(config, lambda: _config(arguments)).run()
    return GOOD


def _observer(config: Config) -> Observer:
    observer = Observer(CgroupFS.discover(), read_topology(), time.monotonic, procfs.comm, roots=config.roots)
    for _ in observer.scan():
        pass
    return observer


def _status(arguments: argparse.Namespace) -> int:
    from enforcer.status import show

    config = _config(arguments)
    observer = _observer(config)
    colour = is_terminal() and not arguments.plain and not os.environ.get("NO_COLOR")
    width = shutil.get_terminal_size().columns
    text, well = show(observer, config, as_json=arguments.json, width=width, colour=colour)
    say(text)
    return GOOD if well else FINDINGS


def _reset(arguments: argparse.Namespace) -> int:
    from enforcer.status import NO_ROOT

    config = _config(arguments)
    with take_lock(config.state_dir):
        observer = _observer(config)
        failed, given_back = _give_back(config, observer)
    if arguments.json:
        say(json.dumps({"given_back": given_back, "failed": failed}))
    else:
        notes = [] if observer.view.slices else [NO_ROOT]
        say("\n".join([f"{given_back} cgroups got their CPUs back", *notes, *failed]))
    return FINDINGS if failed else GOOD


def _give_back(config: Config, observer: Observer) -> tuple[list[str], int]:
    """What could not be given back, in words, and how many sets were."""
    fs, machine = CgroupFS.discover(), read_topology()
    state, problem = load_state(config, procfs.boot_id())
    units = connect_units(fs, time.monotonic)
    applier = Applier(fs, machine.possible, time.sleep, units, dry=False)
    results = [o.result for o in applier.apply(plan_unpin(observer.view, state)) if o.result is not None]
    failed = [describe(result) for result in results if not (result.gone or result.errno is None)]
    if units is not None and not units.finish(_SYSTEMD_ANSWERS):
        failed.append("systemd did not answer in time: it may still write sets of ours (systemctl show -p AllowedCPUs)")
    if not failed:
        (config.state_dir / STATE_FILE).unlink(missing_ok=True)
    return ([problem] if problem else []) + failed, len(results) - len(failed)


def _audit(arguments: argparse.Namespace) -> int:
    from enforcer.status import read_agent

    return plan_audit.main(arguments, _config(arguments), policy_of, read_agent)


def _metrics(arguments: argparse.Namespace) -> int:
    from enforcer.exporter import Exporter, parse_address

    if arguments.parent:
        die_with(arguments.parent)
    # The agent's own call does not depend on a config that somebody is editing.
    config = Config() if arguments.listen and arguments.state_dir else _config(arguments)
    folder = arguments.state_dir or config.state_dir
    address = arguments.listen or config.metrics_listen
    if not address:
        raise ConfigError("metrics-listen is empty: no metrics are served", hint="set it, or give --listen HOST:PORT")
    set_up_logging(False)
    files = (folder / STATE_FILE, folder / AUDIT_FILE)
    with Exporter(parse_address(address), files, procfs.boot_id()) as server:
        server.serve_forever()
    return GOOD


def _demo(arguments: argparse.Namespace) -> int:
    from enforcer.demo import run_demo

    return run_demo(arguments)
