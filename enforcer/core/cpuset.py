"""CPUSet: an immutable set of CPU ids on one integer bit mask, in the kernel's list and mask formats."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Final

from enforcer.core.errors import CPUSetSyntaxError

# Above any kernel's CONFIG_NR_CPUS (8192 on x86, 16384 proposed): a hostile "0-4000000000" must not eat the memory.
MAX_CPU: Final = 65535

# list format of the kernel's bitmap_parselist(): "a", "a-b", "a-b:used/group", and nothing between commas
_RANGE: Final = re.compile(r"(\d{1,6})(?:-(\d{1,6})(?::(\d{1,6})/(\d{1,6}))?)?", re.ASCII)
_HEX: Final = re.compile(r"[0-9a-fA-F]{1,8}", re.ASCII)


class CPUSet:
    """An immutable set of CPU ids.

    `mask` is the whole value: bit n set = CPU n is in. Set algebra is integer algebra, so the operations cost tens
    of nanoseconds whatever the machine's size. Equal sets are equal and hash alike; sets order by inclusion (`<=`).
    """

    __slots__ = ("mask",)
    mask: int

    def __init__(self, cpus: Iterable[int] = ()) -> None:
        """From CPU ids, in any order; raises ValueError for a negative id or one above MAX_CPU."""
        mask = 0
        for cpu in cpus:
            if not 0 <= cpu <= MAX_CPU:
                raise ValueError(f"CPU id {cpu} is not within 0-{MAX_CPU}")
            mask |= 1 << cpu
        object.__setattr__(self, "mask", mask)

    @classmethod
    def from_mask(cls, mask: int) -> CPUSet:
        """From an integer whose bit n stands for CPU n."""
        if mask < 0:
            raise ValueError("a CPU mask cannot be negative")
        made = object.__new__(cls)
        object.__setattr__(made, "mask", mask)
        return made

    @classmethod
    def parse(cls, text: str) -> CPUSet:
        """From the kernel's list format ("0-3,8", cpuset(7) "List format"); white space around it is dropped.

        "" is the empty set. Pieces may overlap and stand in any order, as the kernel accepts them; a range that goes
        down, an empty piece or anything else raises CPUSetSyntaxError.
        """
        return cls.from_mask(_parse_list(text.strip()))

    @classmethod
    def parse_mask(cls, text: str) -> CPUSet:
        """From the kernel's mask format: hexadecimal words of 32 bits with commas, highest first ("ff,00000001")."""
        words = text.strip().removeprefix("0x").split(",")
        for word in words:
            if not _HEX.fullmatch(word):
                raise CPUSetSyntaxError(f"CPU mask {_shown(text)}: {_shown(word)} is not a hexadecimal word of 32 bits")
        mask = int("".join(word.zfill(8) for word in words), 16)
        if mask.bit_length() > MAX_CPU + 1:
            raise CPUSetSyntaxError(f"CPU mask {_shown(text)} goes above CPU {MAX_CPU}")
        return cls.from_mask(mask)

    def to_mask_text(self) -> str:
        """In the kernel's mask format, without leading zeros in the first word ("ff,00000001")."""
        digits = f"{self.mask:x}"
        digits = digits.zfill(-(-len(digits) // 8) * 8)
        words = [digits[i : i + 8] for i in range(0, len(digits), 8)]
        words[0] = words[0].lstrip("0") or "0"
        return ",".join(words)

    def __str__(self) -> str:
        """In the kernel's list format, shortest form ("0-3,8"); "" for the empty set."""
        return _list_text(self.mask)

    def __repr__(self) -> str:
        return f"CPUSet({str(self)!r})"

    def __iter__(self) -> Iterator[int]:
        mask = self.mask
        while mask:
            low = mask & -mask
            yield low.bit_length() - 1
            mask ^= low

    def __len__(self) -> int:
        return self.mask.bit_count()

    def __bool__(self) -> bool:
        return self.mask != 0

    def __contains__(self, cpu: int) -> bool:
        return cpu >= 0 and bool(self.mask >> cpu & 1)

    def __eq__(self, other: object) -> bool:
        return self.mask == other.mask if isinstance(other, CPUSet) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.mask)

    def __and__(self, other: CPUSet) -> CPUSet:
        return CPUSet.from_mask(self.mask & other.mask)

    def __or__(self, other: CPUSet) -> CPUSet:
        return CPUSet.from_mask(self.mask | other.mask)

    def __sub__(self, other: CPUSet) -> CPUSet:
        return CPUSet.from_mask(self.mask & ~other.mask)

    def __xor__(self, other: CPUSet) -> CPUSet:
        return CPUSet.from_mask(self.mask ^ other.mask)

    def __le__(self, other: CPUSet) -> bool:
        return not self.mask & ~other.mask

    def __lt__(self, other: CPUSet) -> bool:
        return self.mask != other.mask and self <= other

    def __ge__(self, other: CPUSet) -> bool:
        return other <= self

    def __gt__(self, other: CPUSet) -> bool:
        return other < self

    def isdisjoint(self, other: CPUSet) -> bool:
        """True when no CPU is in both."""
        return not self.mask & other.mask

    @property
    def first(self) -> int:
        """The lowest CPU id; raises ValueError for the empty set."""
        if not self.mask:
            raise ValueError("the empty CPU set has no first CPU")
        return (self.mask & -self.mask).bit_length() - 1

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"CPUSet is immutable: cannot set {name}")

    def __reduce__(self) -> tuple[object, tuple[int]]:
        return CPUSet.from_mask, (self.mask,)


EMPTY: Final = CPUSet()


def union(sets: Iterable[CPUSet]) -> CPUSet:
    """All CPUs of all the sets."""
    mask = 0
    for one in sets:
        mask |= one.mask
    return CPUSet.from_mask(mask)


# A node has few different sets and reads and writes each of them very often.
@lru_cache(maxsize=1024)
def _parse_list(text: str) -> int:
    mask = 0
    for piece in text.split(",") if text else ():
        mask |= _parse_range(piece, text)
    return mask


@lru_cache(maxsize=1024)
def _list_text(mask: int) -> str:
    pieces = []
    base = 0
    while mask:
        zeros = (mask & -mask).bit_length() - 1
        mask >>= zeros
        base += zeros
        run = (~mask & (mask + 1)).bit_length() - 1
        pieces.append(str(base) if run == 1 else f"{base}-{base + run - 1}")
        mask >>= run
        base += run
    return ",".join(pieces)


def _parse_range(piece: str, text: str) -> int:
    match = _RANGE.fullmatch(piece)
    if not match:
        raise CPUSetSyntaxError(f"CPU list {_shown(text)}: {_shown(piece)} is not a CPU id or a range of them")
    first = int(match[1])
    last = int(match[2]) if match[2] else first
    if last < first:
        raise CPUSetSyntaxError(f"CPU list {_shown(text)}: the range {piece} goes down")
    if last > MAX_CPU:
        raise CPUSetSyntaxError(f"CPU list {_shown(text)}: CPU {last} is above {MAX_CPU}")
    if not match[3]:
        return (1 << last + 1) - (1 << first)
    return _every(first, last, int(match[3]), int(match[4]), text)


def _every(first: int, last: int, used: int, group: int, text: str) -> int:
    """The kernel's "a-b:used/group": the first `used` ids of every `group` ids."""
    if not 0 < used <= group:
        raise CPUSetSyntaxError(f"CPU list {_shown(text)}: in :{used}/{group} the first must be 1 to the second")
    mask = 0
    for start in range(first, last + 1, group):
        mask |= (1 << min(start + used, last + 1)) - (1 << start)
    return mask


def _shown(text: str) -> str:
    """A text of unknown origin, fit for a log line."""
    return repr(text if len(text) <= 60 else text[:57] + "...")
