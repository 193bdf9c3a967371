"""CPUSet: the kernel's list and mask formats, set algebra, and hostile texts."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enforcer.core.cpuset import EMPTY, MAX_CPU, CPUSet, union
from enforcer.core.errors import CPUSetSyntaxError
from tests.unit.tables import table

ids = st.sets(st.integers(0, 5000), max_size=40)
sets = st.builds(CPUSet, ids)


@pytest.mark.parametrize("case", table("cpuset_parse"), ids=lambda case: case["id"])
def test_parse_table(case: dict[str, Any]) -> None:
    if case["expected"] is None:
        with pytest.raises(CPUSetSyntaxError):
            CPUSet.parse(case["text"])
    else:
        assert str(CPUSet.parse(case["text"])) == case["expected"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0-3\n", [0, 1, 2, 3]),  # what the kernel writes
        ("\n", []),  # an empty cpuset.cpus
        ("  1,3 \n", [1, 3]),
        ("0-6:1/2", [0, 2, 4, 6]),  # bitmap_parselist's "used/group"
        ("0-9:2/4", [0, 1, 4, 5, 8, 9]),
        ("2-2:1/1", [2]),
        (str(MAX_CPU), [MAX_CPU]),
        ("007", [7]),
    ],
)
def test_parse_reads_the_kernels_list_format(text: str, expected: list[int]) -> None:
    assert list(CPUSet.parse(text)) == expected


@pytest.mark.parametrize(
    "text",
    [
        "3-1",
        ",1",
        "1, 2",
        "1 2",
        "1--3",
        "0-3:2/1",
        "0-3:0/2",
        "0-3:1/0",
        "0-3:1",
        "3:1/2",
        "+1",
        "1.0",
        "0x1",
        "1_0",
        "\u0661",  # a digit, but not the kernel's
        "0-65536",
        "0-4000000000",
        "99999999999999999999",
        "all",
        "1\x00",
    ],
)
def test_parse_refuses_all_else(text: str) -> None:
    with pytest.raises(CPUSetSyntaxError):
        CPUSet.parse(text)


def test_syntax_errors_show_the_text_and_the_piece_and_stay_short() -> None:
    with pytest.raises(CPUSetSyntaxError, match=r"'0-3,x': 'x' is not a CPU id"):
        CPUSet.parse("0-3,x")
    with pytest.raises(CPUSetSyntaxError, match=r"the range 3-1 goes down"):
        CPUSet.parse("3-1")
    with pytest.raises(CPUSetSyntaxError) as raised:
        CPUSet.parse("\x1b[2J" + "9" * 10_000)
    assert len(str(raised.value)) < 250 and "\x1b" not in str(raised.value)


@pytest.mark.parametrize(
    ("cpus", "text"),
    [([], ""), ([0], "0"), ([1, 2], "1-2"), ([0, 2, 3, 4, 9], "0,2-4,9"), (range(1024, 1100), "1024-1099")],
)
def test_str_is_the_shortest_list(cpus: list[int], text: str) -> None:
    assert str(CPUSet(cpus)) == text


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("ff,00000001\n", "0,32-39"),
        ("00000000,00000000", ""),
        ("0", ""),
        ("0x3", "0-1"),
        ("F", "0-3"),
        ("1,00000000,80000000", "31,64"),
        ("1,2", "1,32"),  # words are numbers: a short one is filled up
    ],
)
def test_parse_mask(text: str, cpus: str) -> None:
    assert str(CPUSet.parse_mask(text)) == cpus


@pytest.mark.parametrize("text", ["", ",", "1,", "123456789", "g", "-1", "1 2", "0x", "1,0x2", "+1", "1,,2", "1" * 9])
def test_parse_mask_refuses_all_else(text: str) -> None:
    with pytest.raises(CPUSetSyntaxError):
        CPUSet.parse_mask(text)


def test_parse_mask_is_bounded() -> None:
    words = ["00000001"] + ["00000000"] * ((MAX_CPU + 1) // 32)
    with pytest.raises(CPUSetSyntaxError, match="goes above CPU 65535"):
        CPUSet.parse_mask(",".join(words))
    assert list(CPUSet.parse_mask(",".join(["80000000"] + words[2:]))) == [MAX_CPU]


def test_mask_text_has_commas_and_no_leading_zeros() -> None:
    assert CPUSet([0, 32]).to_mask_text() == "1,00000001"
    assert CPUSet([35]).to_mask_text() == "8,00000000"
    assert EMPTY.to_mask_text() == "0"


@pytest.mark.parametrize("cpu", [-1, MAX_CPU + 1])
def test_ids_out_of_bounds_are_refused(cpu: int) -> None:
    with pytest.raises(ValueError, match=f"CPU id {cpu} is not within 0-{MAX_CPU}"):
        CPUSet([cpu])


def test_a_negative_mask_is_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        CPUSet.from_mask(-1)


def test_immutable_hashable_and_unlike_other_types() -> None:
    cpus = CPUSet([1])
    with pytest.raises(AttributeError):
        cpus.mask = 3
    assert {cpus: "a"}[CPUSet.parse("1")] == "a"
    assert cpus != {1} and cpus != 2 and cpus != "1"
    assert repr(CPUSet([0, 1, 5])) == "CPUSet('0-1,5')"
    assert CPUSet.from_mask(0b110) == CPUSet([1, 2])


def test_first() -> None:
    assert CPUSet([9, 4]).first == 4
    with pytest.raises(ValueError, match="no first CPU"):
        _ = EMPTY.first


def test_union_of_many() -> None:
    assert union([CPUSet([1]), EMPTY, CPUSet([2, 1])]) == CPUSet([1, 2])
    assert union([]) == EMPTY and not EMPTY


@given(sets)
def test_texts_round_trip(cpus: CPUSet) -> None:
    assert CPUSet.parse(str(cpus)) == cpus
    assert CPUSet.parse(str(cpus) + "\n") == cpus
    assert CPUSet.parse_mask(cpus.to_mask_text()) == cpus
    assert CPUSet.from_mask(cpus.mask) == cpus
    assert pickle.loads(pickle.dumps(cpus)) == cpus


@given(st.lists(st.integers(0, 5000), max_size=20))
def test_order_and_repeats_in_a_list_do_not_matter(cpus: list[int]) -> None:
    assert CPUSet.parse(",".join(map(str, cpus))) == CPUSet(cpus)


@given(ids, ids, st.integers(-2, 5001))
def test_behaves_as_a_set(left: set[int], right: set[int], cpu: int) -> None:
    a, b = CPUSet(left), CPUSet(right)
    assert [set(a & b), set(a | b), set(a - b), set(a ^ b)] == [left & right, left | right, left - right, left ^ right]
    assert [a <= b, a < b, a >= b, a > b, a == b] == [
        left <= right, left < right, left >= right, left > right, left == right
    ]  # fmt: skip
    assert (a & b <= a, a - b < a, a | b >= b) == (True, bool(left & right), True)
    assert a.isdisjoint(b) is left.isdisjoint(right)
    assert (len(a), bool(a), list(a), cpu in a) == (len(left), bool(left), sorted(left), cpu in left)


@given(st.text(max_size=30) | st.text("0123456789,-:/ \n", max_size=30))
def test_any_text_is_a_set_or_a_syntax_error(text: str) -> None:
    for parse in (CPUSet.parse, CPUSet.parse_mask):
        try:
            found = parse(text)
        except CPUSetSyntaxError:
            continue
        assert CPUSet.parse(str(found)) == found
