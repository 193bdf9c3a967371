"""audit: what the agent would write now, as findings, without writing anything.

The same plan as in enforce mode, on the node as it is: where it would change on which CPUs something runs, the node is
not as it should be. By the agent's measure, that is: a kubelet of policy static leaves slices wide on cgroup v2.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Protocol

from enforcer.audit.kubelet import KubeletView, left_over_state, read_kubelet, static_policy_reason
from enforcer.config import Config
from enforcer.core.adopt import adopt, foreign_owners
from enforcer.core.cpuset import EMPTY, CPUSet
from enforcer.core.errors import CannotWorkHereError
from enforcer.core.kubepods import parse_path, shown
from enforcer.core.node import Group, NodeView
from enforcer.core.plan import Plan, Write, plan
from enforcer.core.policy import Policy
from enforcer.core.state import State, Unsatisfied
from enforcer.kernel import procfs
from enforcer.kernel.cgroupfs import CgroupFS
from enforcer.kernel.sysfs import Machine, read_topology
from enforcer.observe import Observer
from enforcer.output import say

GOOD: Final = 0
FINDINGS: Final = 1
SETTLE: Final = 1.0  # seconds; an agent or a kubelet at work needs less to finish what it has begun
_MOST_SETTLE: Final = 3600.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it should be. `check` is a short stable word: "cpuset", "unsatisfied", "controller",
    "unreadable". `found` and `wanted` are for a person; `pod` (UID) and `container` (id) are "" for a level above."""

    check: str
    path: str
    pod: str
    container: str
    found: str
    wanted: str
    why: str

    def to_json(self) -> dict[str, str]:
        """For programs."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Report:
    """What an audit found, and what else there is to know (`information`). `clean` is about the findings only."""

    findings: tuple[Finding, ...] = ()
    information: tuple[str, ...] = ()
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def clean(self) -> bool:
        """Nothing would be written, everybody has what it asks for, and everything could be read."""
        return not self.findings


class AgentWord(Protocol):
    """What is used of what an agent says beside its State."""

    @property
    def mode(self) -> str: ...
    @property
    def running(self) -> bool: ...
    @property
    def reserved(self) -> CPUSet: ...


PolicyOf = Callable[[Config, Machine, CPUSet, KubeletView], Policy]
ReadAgent = Callable[[Path, list[str]], tuple[State, AgentWord]]


# --- the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `audit`."""
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument(
        "--settle", type=_seconds, default=SETTLE, metavar="SECONDS",
        help="a finding counts when it is still there after so long (%(default)s; 0: what one look shows)",
    )  # fmt: skip


def main(arguments: argparse.Namespace, config: Config, policy_of: PolicyOf, read_agent: ReadAgent) -> int:
    """Audits this node: 0 clean, 1 findings. Raises CannotWorkHereError where it cannot, ConfigError for a config that
    does not fit the machine."""
    report = _look(config, policy_of, read_agent)
    if report.findings and arguments.settle:
        time.sleep(arguments.settle)
        report = lasting(report, _look(config, policy_of, read_agent))
    say(json.dumps(to_json(report), indent=2) if arguments.json else render(report))
    return GOOD if report.clean else FINDINGS


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= _MOST_SETTLE:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0 to {_MOST_SETTLE:g}")
    return value


def _look(config: Config, policy_of: PolicyOf, read_agent: ReadAgent) -> Report:
    """One look at this machine. It opens nothing for writing."""
    notes: list[str] = []
    machine, clock = read_topology(), time.monotonic
    recorded, agent = read_agent(config.state_dir, notes)
    observer = Observer(CgroupFS.discover(), machine, clock, procfs.comm, roots=config.roots)
    for _ in observer.scan():
        pass
    view = observer.view
    if not view.allowed:
        raise CannotWorkHereError(
            "there is no kubepods cgroup with CPUs here, nor any of the `roots` in the config",
            hint="is this a Kubernetes node, and does its kubelet run? " + _first(observer.problems),
        )
    kubelet = read_kubelet(config.kubelet_root, config.kubelet_config_path)
    policy = policy_of(config, machine, view.allowed, kubelet)
    notes += _of_kubelet(kubelet)
    if agent.mode and agent.running and agent.reserved != policy.reserved:
        notes.append(f"the agent reserves CPUs {agent.reserved}, by the config it would be {policy.reserved}")
    report = examine(view, recorded, policy, clock(), observer.problems)
    return replace(report, information=(*report.information, *notes))


def _first(problems: dict[str, str]) -> str:
    return next((f"({shown(path)} {text})" for path, text in problems.items()), "")


def _of_kubelet(kubelet: KubeletView) -> list[str]:
    reasons = [f"mode enforce would be refused: {reason}" for reason in [static_policy_reason(kubelet)] if reason]
    return [*reasons, *filter(None, [left_over_state(kubelet)]), *kubelet.problems]


# --- from the node to findings; pure


def examine(view: NodeView, recorded: State, policy: Policy, now: float, problems: dict[str, str]) -> Report:
    """What the agent's next plan says of the node; `recorded` as for adopt(), `problems` what could not be read."""
    state, _ = adopt(view, recorded, policy, now)
    made = plan(view, state, policy, now)
    unread = {path: text for path, text in problems.items() if _is_below(view, path)}
    found = [
        *_unsatisfied(view, made.state),
        *_cpusets(view, made),
        *(_controller(path) for path in made.enable),
        *(_finding("unreadable", path, "cannot be read", "to be read", text) for path, text in unread.items()),
    ]
    information = [
        *_pinned_by_others(made.state),
        *_other_manager(view, made.state, policy),
        *(f"{shown(path)}: {text}" for path, text in problems.items() if path not in unread),
    ]
    return Report(tuple(found), tuple(information), _figures(view, made.state, policy))


def lasting(first: Report, second: Report) -> Report:
    """The second look, of its findings only those that the first had, too: the others are somebody's work under way."""
    before = {(one.check, one.path) for one in first.findings}
    return replace(second, findings=tuple(one for one in second.findings if (one.check, one.path) in before))


def _unsatisfied(view: NodeView, state: State) -> Iterator[Finding]:
    for path, waiting in sorted(state.unsatisfied.items(), key=lambda pair: pair[1].since):
        container = view.find_container(path)
        found = _set_of(container.group) if container else ""
        yield _finding("unsatisfied", path, found, f"{waiting.asked} CPUs of its own", _why_not(waiting))


def _why_not(waiting: Unsatisfied) -> str:
    return f"has {waiting.has} of its own, {waiting.free} are free for it: {waiting.why}"


def _cpusets(view: NodeView, made: Plan) -> Iterator[Finding]:
    """One for each cgroup, though a hand-over may take two writes; the last one is what it shall have.

    On v2 a cgroup that inherits what the plan would write down for it is as it should be.
    """
    groups = {group.path: group for group in _groups(view)}
    for path, write in {write.path: write for write in made.writes}.items():
        group = groups.get(path) or Group(path, write.found, write.found)
        if write.cpus == group.effective and not group.configured:
            continue
        yield _finding("cpuset", path, _set_of(group), _wanted(write), _why(made.state, write))


def _groups(view: NodeView) -> Iterator[Group]:
    for one in view.slices.values():
        yield one.group
        for pod in one.pods.values():
            yield pod.group
            for container in pod.containers.values():
                yield from (container.group, *container.nested)


def _set_of(group: Group) -> str:
    own, may = group.cpus or EMPTY, group.effective
    if own == may:
        return f"CPUs {own}" if own else "no CPU"
    return f"CPUs {own or 'none set'}, runs on {may or 'no CPU'}"


def _wanted(write: Write) -> str:
    return f"CPUs {write.cpus}" if write.cpus is not None else "no set of its own"


def _why(state: State, write: Write) -> str:
    mine = state.assignments.get(write.path)
    return f"{write.why}: {mine.why}" if mine and mine.why else write.why


def _controller(path: str) -> Finding:
    why = "what is below has no cpuset of its own, so nothing there can be pinned or kept off"
    return _finding("controller", path, "no cpuset in cgroup.subtree_control", "cpuset there", why)


def _finding(check: str, path: str, found: str, wanted: str, why: str) -> Finding:
    name = parse_path(path)
    return Finding(check, path, shown(name.pod_uid or ""), shown(name.container_id or ""), found, wanted, why)


def _is_below(view: NodeView, path: str) -> bool:
    return any(path == one or path.startswith(f"{one}/") for one in view.slices)


def _pinned_by_others(state: State) -> Iterator[str]:
    for path, cpus in sorted(state.foreign.items()):
        yield f"{_who(path)} was given CPUs {cpus} by somebody else: left alone, and not given to others"


def _other_manager(view: NodeView, state: State, policy: Policy) -> Iterator[str]:
    if others := foreign_owners(view, state, policy):
        yield f"mode enforce would be refused: somebody else gives out whole CPUs on this node, as to {_who(others[0])}"


def _figures(view: NodeView, state: State, policy: Policy) -> dict[str, Any]:
    return {
        "cgroup_version": view.version,
        "pods": sum(1 for _ in view.pods()),
        "containers": sum(1 for _ in view.containers()),
        "allowed": str(view.allowed),
        "reserved": str(policy.reserved & view.allowed),
        "exclusive": str(state.exclusive),
        "shared": str(state.shared),
    }


# --- what is printed


def to_json(report: Report) -> dict[str, Any]:
    """For programs."""
    return {
        "clean": report.clean,
        "findings": [one.to_json() for one in report.findings],
        "information": list(report.information),
        **report.figures,
    }


def render(report: Report) -> str:
    """For a person: findings, what else there is to know, and the verdict as the last line."""
    lines = []
    for one in report.findings:
        lines.append(f"{one.check}: {_who(one.path)}: found {one.found}; wanted {one.wanted}")
        lines.append(f"    {one.why}")
    lines += [f"note: {text}" for text in report.information]
    return "\n".join([*lines, _verdict(report)])


def _verdict(report: Report) -> str:
    figures = report.figures
    looked_at = f"{figures['containers']} containers in {figures['pods']} pods"
    if report.clean:
        exclusive = f"exclusive CPUs {figures['exclusive'] or 'none'}"
        return f"clean: {looked_at}, {exclusive}, shared pool {figures['shared'] or 'none'}"
    number = len(report.findings)
    return f"{number} finding{'s' if number > 1 else ''}: {looked_at}; nothing was written"


def _who(path: str) -> str:
    name = parse_path(path)
    if name.pod_uid is None:
        return shown(path)
    return f"pod {shown(name.pod_uid)}" + (f" container {shown(name.container_id[:12])}" if name.container_id else "")
