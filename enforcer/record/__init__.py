"""record: all that the plan reads of a node in one file, so that `simulate` and bug reports work off the node."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from enforcer.audit.kubelet import read_kubelet
from enforcer.config import Config
from enforcer.core.node import NodeView
from enforcer.core.state import State
from enforcer.kernel import procfs
from enforcer.kernel.cgroupfs import CgroupFS
from enforcer.kernel.sysfs import Machine, read_topology
from enforcer.observe import Observer
from enforcer.output import say, say_bytes
from enforcer.record import archive
from enforcer.record.document import Recorded, from_json, to_json
from enforcer.service import policy_of
from enforcer.status import AgentInfo, read_agent

__all__ = ["Recorded", "add_arguments", "load", "main", "save", "scanned", "this_node"]

_STDOUT = "-"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `record`."""
    parser.add_argument("file", metavar="FILE", help="where to write it; - is the standard output")
    parser.add_argument("--json", action="store_true", help="say what was written for programs")


def main(arguments: argparse.Namespace, config: Config) -> int:
    """Records this node; 0. Raises CannotWorkHereError or ConfigError."""
    node = this_node(config)
    data = archive.pack(to_json(node))
    if arguments.file == _STDOUT:
        say_bytes(data)
        return 0
    archive.write(Path(arguments.file), data)
    figures = _figures(node)
    if arguments.json:
        say(json.dumps({"file": arguments.file, "bytes": len(data), **figures}))
    else:
        told = ", ".join(f"{number} {name}" for name, number in figures.items())
        say(f"{arguments.file}: {told}, {len(data)} bytes; no environment, no command lines")
        say("It names pods by UID and containers by id. To look into it: zcat FILE | tail -n 1")
    return 0


def _figures(node: Recorded) -> dict[str, int]:
    return {
        "CPUs": len(node.machine.online),
        "pods": sum(1 for _ in node.view.pods()),
        "containers": sum(1 for _ in node.view.containers()),
    }


def save(node: Recorded, path: Path) -> None:
    """Writes the node to a file, mode 0600; raises ConfigError."""
    archive.write(path, archive.pack(to_json(node)))


def load(path: Path) -> Recorded:
    """Reads a recorded node back; raises ConfigError, whatever is in the file."""
    return from_json(archive.unpack(archive.read(path), str(path)), str(path))


def this_node(config: Config) -> Recorded:
    """This node as it is now. Raises CannotWorkHereError where there is nothing to read, ConfigError for a config that
    does not fit the machine."""
    fs, machine = CgroupFS.discover(), read_topology()
    notes: list[str] = []
    state, info = read_agent(config.state_dir, notes)
    node = scanned(fs, machine, config, time.monotonic, procfs.comm)
    return replace(node, state=state, info=replace(info, notes=()), notes=(*notes, *node.notes))


def scanned(
    fs: CgroupFS,
    machine: Machine,
    config: Config,
    clock: Callable[[], float],
    comm: Callable[[int], str | None],
) -> Recorded:
    """A node as its files show it, without an agent's word."""
    observer = Observer(fs, machine, clock, comm, roots=config.roots)
    for _ in observer.scan():
        pass
    kubelet = read_kubelet(config.kubelet_root, config.kubelet_config_path)
    policy = policy_of(config, machine, observer.view.allowed or machine.online, kubelet)
    return Recorded(
        view=observer.view,
        state=State(),
        policy=policy,
        machine=machine,
        now=clock(),
        info=AgentInfo(reserved=policy.reserved, strict=policy.strict, present=machine.present),
        processes=_processes(fs, observer.view),
        kubelet_policy=kubelet.policy or kubelet.state_policy,
        notes=tuple(f"{path}: {text}" for path, text in observer.problems.items()),
    )


def _processes(fs: CgroupFS, view: NodeView) -> dict[str, int]:
    return {c.group.path: len(fs.procs(c.group.path)) for _pod, c in view.containers()}
