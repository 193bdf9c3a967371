"""How commands print: wrapped lines for a terminal, and our dataclasses as JSON."""

from __future__ import annotations

import json
import math
import os
import shutil
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from enforcer.core.cpuset import CPUSet
from enforcer.output import is_terminal, say


def jsonable(value: object) -> Any:
    """Dataclasses as objects, CPU sets as lists ("0-3"), times that are never as null."""
    if isinstance(value, CPUSet):
        return str(value)
    if isinstance(value, Enum):
        return value.name.lower() if isinstance(value.value, int) else value.value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if is_dataclass(value) and not isinstance(value, type):
        return {one.name: jsonable(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): jsonable(one) for key, one in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [jsonable(one) for one in value]
    return value


def print_json(value: object) -> None:
    """One JSON document on the standard output; raises as say()."""
    say(json.dumps(jsonable(value), indent=2))


def width() -> int:
    """Columns of the terminal, at least 40."""
    return max(40, shutil.get_terminal_size().columns)


def colour() -> bool:
    """Whether to use colour: on a terminal, unless NO_COLOR is set to something (no-color.org)."""
    return is_terminal() and not os.environ.get("NO_COLOR")


def wrapped(text: str, columns: int, first: str = "", rest: str | None = None) -> list[str]:
    """Lines of at most so many columns; `first` stands before the first, `rest` (as many blanks) before the others."""
    after = " " * len(first) if rest is None else rest
    lines = []
    for part in text.splitlines() or [""]:
        lines += textwrap.wrap(part, columns, initial_indent=first, subsequent_indent=after) or [first.rstrip()]
        first = after
    return lines


def table(rows: Sequence[Sequence[str]], indent: str = "") -> list[str]:
    """Rows of cells, each column as wide as its widest; the last one is not padded."""
    if not rows:
        return []
    sizes = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return [indent + "  ".join(f"{c:<{s}}" for c, s in zip(row, sizes, strict=True)).rstrip() for row in rows]
