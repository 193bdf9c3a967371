"""Which node a command is about: this one, a recorded one, or one that a person describes."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from enforcer import describe, record
from enforcer.config import Config
from enforcer.core.adopt import adopt
from enforcer.core.explain import Explainer
from enforcer.core.state import State
from enforcer.core.whatif import settled
from enforcer.record import Recorded


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--from and --node."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--from", type=Path, metavar="FILE", dest="recorded", help="a node that `record` packed")
    which.add_argument("--node", type=Path, metavar="FILE", dest="described", help="a node described in JSON")


def read(arguments: argparse.Namespace, config: Config) -> Recorded:
    """The node that the arguments name; raises ConfigError and CannotWorkHereError."""
    if arguments.recorded is not None:
        return record.load(arguments.recorded)
    if arguments.described is not None:
        return describe.load(arguments.described)
    return record.this_node(config)


def start_state(node: Recorded) -> State:
    """What enforce goes on from: a running agent's own state, else what it would adopt at its start."""
    if node.info.running:
        return node.state
    return adopt(node.view, node.state, node.policy, node.now)[0]


def enforced(node: Recorded) -> Recorded:
    """The node as one pass of enforce leaves it."""
    done = settled(node.view, start_state(node), node.policy, node.now)
    info = replace(node.info, mode="enforce", running=True)
    return replace(node, view=done.view, state=done.state, info=info)


def explainer(node: Recorded) -> Explainer:
    """Answers about that node."""
    return Explainer(
        view=node.view,
        state=start_state(node),
        policy=node.policy,
        now=node.now,
        isolated=node.machine.isolated,
        conflicts=node.info.conflicts,
        enforced=node.info.mode == "enforce",
    )
