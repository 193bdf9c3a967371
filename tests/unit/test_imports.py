"""The rooms of the package and who may enter them (design §2), read from the syntax tree: nothing is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "enforcer"

# Low to high; a module may import its own room and every lower level.
LEVELS = (
    {"core"},
    {"kernel", "runtimes", "tracing", "config"},
    {"observe", "names", "apply", "audit", "checkpoint", "metrics", "exporter", "tally", "journal", "lock", "output"},
    {"reconcile", "guard", "units", "child", "figures"},
    {"sources"},
    {"agent"},
    {"service"},
    {
        "cli", "demo", "mimic", "status", "__main__", "record", "describe", "source", "labels", "layout", "simulate",
        "explain", "topology", "doctor", "completion",
    },
)
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
# Rooms of these levels do not know each other; what one needs of another is injected.
STRANGERS = {1}
# The package's own __init__ (its version) is open to everybody.
PACKAGE_ITSELF = "__init__"
# All that core may import: nothing that reads a clock, a file, the environment or chance.
PURE = {
    "__future__", "abc", "bisect", "collections", "dataclasses", "enum", "functools", "heapq", "itertools", "math",
    "operator", "re", "string", "types", "typing",
}  # fmt: skip
IMPURE_BUILTINS = {"open", "print", "input", "breakpoint", "eval", "exec", "__import__"}


def room_of(name: str) -> str:
    """"enforcer.core.cpuset" -> "core"; "enforcer" and "enforcer.__version__" -> the package itself."""
    room = [*name.split("."), PACKAGE_ITSELF][1]
    return PACKAGE_ITSELF if room.startswith("__") and room != "__main__" else room


def module_name(package: Path, file: Path) -> str:
    parts = [package.name, *file.relative_to(package).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(package: Path, file: Path) -> Iterator[tuple[int, str]]:
    """(line, full name) of each import anywhere in the file; `from a import b` gives a.b, as b may be a module."""
    base = [package.name, *file.relative_to(package).parent.parts]
    for node in ast.walk(ast.parse(file.read_text(), str(file))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            before = base[: len(base) - node.level + 1] if node.level else []
            source = ".".join([*before, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{source}.{alias.name}") for alias in node.names)


def complaint(package: str, importer: str, imported: str) -> str | None:
    """Why `importer` (a module) may not import `imported` (a full name); None when it may."""
    here = room_of(importer)
    top = imported.split(".")[0]
    if top != package:
        return f"core is pure: {top} is not among what it may import" if here == "core" and top not in PURE else None
    there = room_of(imported)
    if there in (here, PACKAGE_ITSELF):
        return None
    if here == PACKAGE_ITSELF:
        return "the package itself imports none of its rooms"
    for room in (here, there):
        if room not in LEVEL:
            return f"the room {room} stands on no level: give it one in this test"
    if LEVEL[there] > LEVEL[here]:
        return f"{there} stands higher than {here}"
    return f"{here} and {there} may not know each other" if LEVEL[there] == LEVEL[here] in STRANGERS else None


def impure_calls(file: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(file.read_text(), str(file))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in IMPURE_BUILTINS:
            yield node.lineno, node.func.id


def breaches(package: Path) -> list[str]:
    """Each breach as "file:line: what: why"."""
    found = []
    for file in sorted(package.rglob("*.py")):
        where = file.relative_to(package.parent)
        importer = module_name(package, file)
        for line, imported in imports(package, file):
            if why := complaint(package.name, importer, imported):
                found.append(f"{where}:{line}: {imported}: {why}")
        if room_of(importer) == "core":
            found += [f"{where}:{line}: {call}(): core is pure" for line, call in impure_calls(file)]
    return found


def test_rooms_are_entered_in_one_direction() -> None:
    assert breaches(PACKAGE) == []


def test_something_is_looked_at() -> None:
    seen = [name for file in PACKAGE.rglob("*.py") for _, name in imports(PACKAGE, file)]
    assert "enforcer.core.cpuset.CPUSet" in seen


# One made module each: where it stands, what it says, the words of the complaint.
WRONG = [
    ("core/a.py", "import os", "os"),
    ("core/a.py", "import os.path as p", "os"),
    ("core/a.py", "from time import monotonic", "time"),
    ("core/a.py", "def f() -> None:\n    import random", "random"),
    ("core/a.py", "import yaml", "yaml"),
    ("core/a.py", "def f(p: str) -> None:\n    open(p)", "open()"),
    ("core/a.py", "from enforcer.kernel import sysfs", "kernel stands higher than core"),
    ("core/a.py", "from ..kernel.sysfs import read", "kernel stands higher than core"),
    ("core/a.py", "from .. import kernel", "kernel stands higher than core"),
    ("core/a.py", "from enforcer import config", "config stands higher than core"),
    ("core/deep/a.py", "from ... import agent", "agent stands higher than core"),
    ("core/__init__.py", "from ..audit import report", "audit stands higher than core"),
    ("kernel/a.py", "from enforcer.runtimes import nri", "kernel and runtimes may not know each other"),
    ("runtimes/a.py", "import enforcer.tracing.tracer", "runtimes and tracing may not know each other"),
    ("tracing/a.py", "from .. import kernel", "tracing and kernel may not know each other"),
    ("kernel/a.py", "from enforcer import config", "kernel and config may not know each other"),
    ("config.py", "from enforcer.kernel import sysfs", "config and kernel may not know each other"),
    ("kernel/a.py", "from enforcer import observe", "observe stands higher than kernel"),
    ("observe.py", "from .agent import Agent", "agent stands higher than observe"),
    ("agent.py", "if TYPE_CHECKING:\n    from .cli import main", "cli stands higher than agent"),
    ("novel.py", "from enforcer.core import cpuset", "novel stands on no level"),
    ("agent.py", "from enforcer import novel", "novel stands on no level"),
    ("__init__.py", "from enforcer.core import cpuset", "imports none of its rooms"),
]  # fmt: skip
RIGHT = [
    ("core/a.py", "from __future__ import annotations\nimport re\nfrom .cpuset import CPUSet"),
    ("kernel/a.py", "import os, pyudev\nfrom ..core.cpuset import CPUSet\nfrom .sysfs import read"),
    ("observe.py", "from enforcer.kernel import sysfs\nfrom enforcer import names, __version__"),
    ("audit/a.py", "from ..checkpoint import load\nfrom ..config import Config"),
    ("cli.py", "from enforcer import agent, demo, __version__\nfrom .core import cpuset"),
    ("__main__.py", "from .cli import main"),
]


def made(tmp_path: Path, file: str, text: str) -> Path:
    path = tmp_path / "enforcer" / file
    path.parent.mkdir(parents=True)
    path.write_text(text + "\n")
    return tmp_path / "enforcer"


@pytest.mark.parametrize(("file", "text", "words"), WRONG)
def test_a_breach_is_found(tmp_path: Path, file: str, text: str, words: str) -> None:
    found = breaches(made(tmp_path, file, text))
    assert len(found) == 1
    assert words in found[0]
    assert f"enforcer/{file}:{text.count(chr(10)) + 1}: " in found[0]


@pytest.mark.parametrize(("file", "text"), RIGHT)
def test_what_is_allowed_is_no_breach(tmp_path: Path, file: str, text: str) -> None:
    assert breaches(made(tmp_path, file, text)) == []
