"""explain: a container, a pod or a CPU asked about from the terminal, in words or JSON."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from typing import Any, Final

from enforcer import source
from enforcer.config import Config
from enforcer.core.errors import ConfigError
from enforcer.core.explain import Because, ContainerAnswer, CPUAnswer, Explainer, Verdict
from enforcer.core.kubepods import shown
from enforcer.core.state import Held
from enforcer.labels import Found, Labels, find, held_by, holding
from enforcer.layout import jsonable, print_json, width, wrapped
from enforcer.output import say
from enforcer.record import Recorded
from enforcer.status.model import Names, named

_MOST_LISTED: Final = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `explain`."""
    parser.add_argument(
        "subject", nargs="+", metavar="SUBJECT",
        help="CPU 5, or the beginning of a pod's UID or of a container's id, POD/CONTAINER, or a cgroup's path",
    )  # fmt: skip
    source.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def main(arguments: argparse.Namespace, config: Config) -> int:
    """Answers one question: 0, or 1 when what it is about is not as it should be. Raises ConfigError for an unknown or
    ambiguous name."""
    node = source.read(arguments, config)
    if arguments.described is not None:
        node = source.enforced(node)
    found = find(node.view, " ".join(arguments.subject))
    if found.cpu is not None and found.cpu not in node.machine.present:
        raise ConfigError(f"there is no CPU {found.cpu} on this node", hint=f"it has {named(node.machine.present)}")
    told = Telling(node, source.explainer(node))
    if arguments.json:
        print_json(told.json(found))
    else:
        say("\n".join(told.text(found, width())))
    return 1 if told.findings(found) else 0


class Telling:
    """The answers about one node, for a person or a program."""

    def __init__(self, node: Recorded, explainer: Explainer) -> None:
        self.node = node
        self.explainer = explainer
        self.names = Labels(node.view)

    def findings(self, found: Found) -> bool:
        """Whether something about it is not as it should be."""
        if found.cpu is not None:
            return bool(self.explainer.cpu(found.cpu).strangers)
        wanting = (Verdict.WAITING, Verdict.PARTLY)
        return any(one.verdict in wanting or one.amiss for one in self._answers(found))

    def _answers(self, found: Found) -> list[ContainerAnswer]:
        if found.container:
            return [self.explainer.container(found.container)]
        pod = self.node.view.find_pod(found.pod)
        return [self.explainer.container(path) for path in pod.containers] if pod else []

    # JSON

    def json(self, found: Found) -> dict[str, Any]:
        """One object; its `kind` is cpu, container or pod."""
        head = {"agent": {"mode": self.node.info.mode or None, "running": self.node.info.running}}
        if found.cpu is not None:
            return {**head, "kind": "cpu", **jsonable(self.explainer.cpu(found.cpu))}
        answers = jsonable(self._answers(found))
        if found.container:
            return {**head, "kind": "container", **answers[0]}
        holds = self.explainer.decided.held.get(found.pod, ())
        return {**head, "kind": "pod", "path": found.pod, "held": jsonable(holds), "containers": answers}

    # text

    def text(self, found: Found, columns: int) -> list[str]:
        """Lines of at most so many columns."""
        rows = [("", note) for note in self._heads()]
        if found.cpu is not None:
            rows += self._cpu(self.explainer.cpu(found.cpu))
        elif found.container:
            rows += self._container(self.explainer.container(found.container))
        else:
            rows += self._pod(found)
        lines, before = [], ""
        for label, text in rows:
            lines += _line("" if label == before else label, text, columns, inside=bool(label))
            before = label
        return lines

    def _heads(self) -> Iterator[str]:
        """What the answer stands on, unless that is an agent at work."""
        info = self.node.info
        if self.node.described:
            yield "a described node, as enforce leaves it"
        elif info.mode == "audit":
            yield "mode audit: nothing is written; this is what enforce would do"
        elif not info.mode:
            yield "no agent's word: this is what enforce would do on this node"
        elif not info.running:
            yield f"the agent (mode {info.mode}) is NOT running: this is what its next start would do"

    def _pod(self, found: Found) -> Iterator[tuple[str, str]]:
        pod = self.node.view.find_pod(found.pod)
        if pod is None:
            return
        yield "", f"{self.names.of(found.pod)}: {pod.ref.qos.capitalize()}, {len(pod.containers)} cgroups in it"
        yield "path", shown(found.pod)
        for one in self.explainer.decided.held.get(found.pod, ()):
            yield "held", _hold_words(one)
        for path in pod.containers:
            yield "", ""
            yield from self._container(self.explainer.container(path))

    def _container(self, one: ContainerAnswer) -> Iterator[tuple[str, str]]:
        yield "", f"{self.names.of(one.path)}: {_headline(one)}"
        yield "path", shown(one.path)
        yield "asks for", f"{one.asked} ({one.qos} pod)"
        yield "may run on", named(one.may_run)
        yield from self._reasons("because", one.because)
        if one.placement is not None:
            yield from (("these CPUs", str(step)) for step in one.placement.steps)
            yield "placed anew", _anew(one)
        yield from _listed("taken", [holding(h, self.names) for h in one.holders])
        if one.waiting is not None and self.explainer.policy.reserved:
            yield "reserved", f"{named(self.explainer.policy.reserved)}: never given out"
        yield from self._reasons("restart", one.after_restart)
        yield from self._reasons("amiss", one.amiss)
        for write in one.writes:
            yield "to be written", f"{write.found or 'none'} -> {write.cpus or 'inherit'} ({write.why})"

    def _reasons(self, label: str, reasons: Iterable[Because]) -> Iterator[tuple[str, str]]:
        return _listed(label, [reason(one, self.names) for one in reasons])

    def _cpu(self, one: CPUAnswer) -> Iterator[tuple[str, str]]:
        yield "", f"CPU {one.cpu}: {self._of(one)}"
        yield from self._reasons("because", one.because)
        if one.holder is not None and self._is_owner_here(one.holder.path):
            mine = self.explainer.container(one.holder.path)
            yield from self._reasons("its owner", mine.because)
            yield from (("these CPUs", str(s)) for s in (mine.placement.steps if mine.placement else ()))
        if one.online:
            yield "core", f"{one.places['core']}: {self._siblings(one)}"
            yield "NUMA node", f"{one.places['numa']} (socket {one.places['socket']}, L3 cache {one.places['l3']})"
            yield from self._who(one)

    def _is_owner_here(self, path: str) -> bool:
        """An agent's word may outlive a cgroup: where the kubepods root has gone, nothing is forgotten yet."""
        here = self.node.view.find_container(path) is not None
        return here and path in self.explainer.decided.assignments

    def _siblings(self, one: CPUAnswer) -> str:
        others = [cpu for cpu in one.siblings if cpu != one.cpu]
        if not others:
            return "it has no sibling thread"
        return "; ".join(f"sibling CPU {cpu}: {self._of(self.explainer.cpu(cpu))}" for cpu in others)

    def _of(self, one: CPUAnswer) -> str:
        """Whose it is, in a few words."""
        if one.holder is not None:
            return f"taken {held_by(one.holder, self.names)}"
        if not one.online:
            return "offline or not there"
        return "reserved" if one.reserved else "in the shared pool" if one.shared else "not for pods"

    def _who(self, one: CPUAnswer) -> Iterator[tuple[str, str]]:
        names = [self.names.of(path) for path in one.may_run if path not in one.strangers]
        yield from _listed("may run there", names or ["no container"])
        yield from _listed("must not, but may", [self.names.of(path) for path in one.strangers])
        yield "besides", "host services and kernel threads, which this agent does not confine"


def reason(one: Because, names: Names) -> str:
    """A reason as a sentence, with the name of whom it is about."""
    return f"{names.of(one.path)}: {one.text}" if one.path else one.text


def _headline(one: ContainerAnswer) -> str:
    own, would = named(one.own), "will get " if one.pending else ""
    return {
        Verdict.OWN: f"{would}{own} of its own",
        Verdict.PARTLY: f"{own} of its own, fewer than it asks for",
        Verdict.WAITING: "in the shared pool, waiting for CPUs of its own",
        Verdict.FOREIGN: "pinned by somebody else",
        Verdict.SANDBOX: f"a {one.role}, not a container",
        Verdict.SHARED: "in the shared pool",
    }[one.verdict]


def _anew(one: ContainerAnswer) -> str:
    place = one.placement
    if place is None or place.now is None:
        return "it could not be given these CPUs as things are now; it keeps what it has"
    if place.now == one.own:
        return f"the same again; CPUs {place.free} are free or its own"
    return f"{named(place.now)}; it keeps what it has, as CPUs {place.free} were not all free when it came or grew"


def _hold_words(one: Held) -> str:
    why = "claimed for its coming containers" if one.claim else "of a container that has gone; the next one gets them"
    return f"{named(one.cpus)}, {why}"


def _listed(label: str, rows: list[str]) -> Iterator[tuple[str, str]]:
    yield from ((label, row) for row in rows[:_MOST_LISTED])
    if len(rows) > _MOST_LISTED:
        yield label, f"and {len(rows) - _MOST_LISTED} more (--json has them all)"


def _line(label: str, text: str, columns: int, *, inside: bool) -> list[str]:
    return wrapped(text, columns, f"  {label:<18}" if inside else "")
