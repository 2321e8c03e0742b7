"""Records that are packed read as those that were added."""

import copy
import errno
import gc
import math
import operator
import os
import pickle
import tempfile
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataflow.columns import records
from dataflow.columns.block_file import BlockFile, Place
from dataflow.columns.records import Records
from dataflow.errors import RunError
from dataflow.timeline.spans import Level, Mark, Trace

_VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(0, 9), st.floats(allow_nan=False), st.text(max_size=3),
    st.lists(st.integers(), max_size=2),
)  # fmt: skip
_FACTS = st.dictionaries(st.sampled_from(["step", "group", "how", "endpoint", 7]), _VALUES, max_size=4)
_MARKS = st.lists(
    st.builds(Mark, st.text(max_size=2), st.just("reward"), st.floats(0, 9), _VALUES, _FACTS), max_size=40
)


def packed(marks: list[Mark]) -> Any:
    trace = Trace.growing({}, BlockFile(tempfile.gettempdir()))
    trace.add(*marks)
    return trace.marks


@given(_MARKS)
def test_reads_what_was_added(marks: list[Mark]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "_BLOCK", 4)
        found = packed(marks)
        assert len(found) == len(marks)
        assert list(found) == marks
        assert list(reversed(found)) == list(reversed(found)) == marks[::-1]
        assert [[*map(type, m.args.values())] for m in found] == [[*map(type, m.args.values())] for m in marks]
        assert [list(m.args) for m in found] == [list(m.args) for m in marks]
        for at in (slice(None), slice(-5, None), slice(0, 7), slice(1, None, 3), slice(9, 2), slice(None, None, -1)):
            assert found[at] == marks[at]
        assert [found[at] for at in range(-len(marks), len(marks))] == marks * 2
        assert found == marks
        assert pickle.loads(pickle.dumps(found)) == found
        assert found != [*marks, Mark("x", "reward", 0.0, 0.0)]


@given(st.lists(st.builds(Level, st.text(max_size=2), st.floats(0, 9), st.one_of(st.floats(0, 9), st.integers()))))
def test_records_without_facts_read_as_added(levels: list[Level]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "_BLOCK", 4)
        trace = Trace.growing({}, BlockFile(tempfile.gettempdir()))
        trace.add(*levels)
        found: Any = trace.levels
        assert found == levels
        assert [type(level.value) for level in found] == [type(level.value) for level in levels]
        assert copy.copy(found) + levels == pickle.loads(pickle.dumps(found)) + levels == levels * 2


def test_packed_levels_take_a_tenth_of_the_memory() -> None:
    levels = [Level("sampled", at / 7, float(at % 1024)) for at in range(5 * 2048)]
    blocks = Records(attrgetter("name", "at", "value"), Level, levels)._held[0]
    assert [isinstance(block, bytes) and len(block) < 14 * 2048 for block in blocks] == [True] * 4


def test_an_index_beyond_the_end_is_refused() -> None:
    with pytest.raises(IndexError):
        packed([Mark("reward", "reward", 0.0, 1.0)])[1]


@given(_MARKS, _MARKS)
def test_it_can_be_used_as_a_list_is(marks: list[Mark], others: list[Mark]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "_BLOCK", 4)
        found = packed(marks)
        assert isinstance(found, Sequence)
        assert found + others == found + packed(others) == marks + others
        assert others + found == others + marks
        for mark in [*marks, *others[:3]]:
            assert found.count(mark) == marks.count(mark)
            assert (mark in found) == (mark in marks)
            assert outcome(found.index, mark) == outcome(marks.index, mark)
            assert outcome(found.index, mark, 2) == outcome(marks.index, mark, 2)
            assert outcome(found.index, mark, -3, -1) == outcome(marks.index, mark, -3, -1)
        for copied in (copy.copy(found), copy.deepcopy(found)):
            copied += others
            assert copied == marks + others
            assert isinstance(copied, Records)
        found += found
        assert found == marks * 2
        assert (found == tuple(marks)) is (found == "x") is False


def outcome(function: Any, *arguments: Any) -> Any:
    """Returns what a call returns, or the kind of its error."""
    try:
        return function(*arguments)
    except Exception as error:
        return type(error)


def test_it_is_read_by_any_number_that_is_an_index_and_adds_only_lists() -> None:
    mark = Mark("reward", "reward", 0.0, 1.0)
    found = packed([mark])
    assert found[np.int64(0)] == mark
    with pytest.raises(TypeError):
        found["0"]
    for add in (lambda: operator.add(found, (mark,)), lambda: operator.add((mark,), found)):
        with pytest.raises(TypeError, match=r"unsupported operand|can only concatenate"):
            add()


def test_a_search_unpacks_each_block_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_BLOCK", 4)
    found = packed([Mark("reward", "reward", float(at), 9.0) for at in range(40)])
    read: list[int] = []
    unpacked = Records._unpacked
    monkeypatch.setattr(Records, "_unpacked", lambda self, at: read.append(at) or unpacked(self, at))
    assert found.index(found[-1]) == 39
    assert read == list(range(8 + 1))[: len(read)]


_SPLIT = attrgetter("name", "resource", "begin", "end", "args")
_MANY = [Mark("reward", "reward", float(at), at + 1.0, {"step": at}) for at in range(5 * 2048)]


def test_packed_records_leave_memory_for_a_file_that_no_listing_shows(tmp_path: Path) -> None:
    found = Records(_SPLIT, Mark, _MANY, BlockFile(tmp_path))
    assert [type(block) for block in found._held[0]] == [Place] * 4
    assert list(tmp_path.iterdir()) == []
    assert found == _MANY
    assert found[-5000:] == _MANY[-5000:]


def test_records_stay_in_memory_where_their_file_cannot_be_written(tmp_path: Path) -> None:
    found = Records(_SPLIT, Mark, _MANY, BlockFile(tmp_path / "missing"))
    assert [type(block) for block in found._held[0]] == [bytes] * 4
    assert found == _MANY


def test_a_disk_that_is_full_for_a_while_loses_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each write takes a part only, and some take none: the next ones are put where the last whole block ended."""
    real, calls = os.pwrite, iter(range(10**6))

    def nearly_full(file: int, data: bytes, offset: int) -> int:
        if next(calls) % 7 == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, data[: len(data) // 2 + 100], offset)

    monkeypatch.setattr(os, "pwrite", nearly_full)
    monkeypatch.setattr(records, "_BLOCK", 64)
    found = Records(_SPLIT, Mark, _MANY[:2048], BlockFile(tmp_path))
    assert {type(block) for block in found._held[0]} == {Place, bytes}
    assert found == _MANY[:2048]


def test_copies_of_records_in_a_file_grow_on_their_own(tmp_path: Path) -> None:
    found = Records(_SPLIT, Mark, _MANY, BlockFile(tmp_path))
    other = copy.copy(found)
    other.extend(_MANY)
    found.extend(_MANY[:3000])
    assert found == _MANY + _MANY[:3000]
    assert other == _MANY * 2
    assert pickle.loads(pickle.dumps(found)) == copy.deepcopy(found) == found


def test_a_file_that_lost_its_end_is_an_error_with_a_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Records(_SPLIT, Mark, _MANY, BlockFile(tmp_path))
    monkeypatch.setattr(os, "pread", lambda file, size, offset: b"")
    with pytest.raises(RunError, match=r"requests of earlier steps.* cannot be read \(its end is missing\); check the"):
        found[0]


def test_a_file_is_closed_with_the_last_records_in_it(tmp_path: Path) -> None:
    file = BlockFile(tmp_path)
    found = Records(_SPLIT, Mark, _MANY, file)
    number = file._file
    assert number is not None
    os.fstat(number)
    del file, found
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)


def test_facts_that_cannot_be_packed_are_kept() -> None:
    own: list[Mark] = [Mark("reward", "reward", 0.0, math.inf, {"of": lambda: None}) for _ in range(3 * 2048)]
    assert list(packed(own)) == own


def test_packed_requests_take_a_tenth_of_the_memory() -> None:
    marks = [
        Mark("reward", "reward", i / 7, i / 7 + 1.1, {"step": i // 320, "group": i % 64, "sample": i % 5})
        for i in range(5 * 2048)
    ]
    trace = packed(marks)
    blocks = Records(attrgetter("name", "resource", "begin", "end", "args"), Mark, marks)._held[0]
    assert len(trace) == len(marks)
    assert [isinstance(block, bytes) and len(block) < 40 * 2048 for block in blocks] == [True] * 4


def test_reading_while_more_are_appended_leaves_out_none() -> None:
    found = packed([Mark("reward", "reward", 0.0, 0.0)])
    reader, begins = iter(found), []
    for at in range(1, 9_000):
        if at <= 3_000:
            begins.append(next(reader).begin)
        found.append(Mark("reward", "reward", float(at), float(at)))
    begins += [mark.begin for mark in reader]
    assert begins == [float(at) for at in range(len(begins))]
    assert len(begins) > 3_000


class Refusal(Exception):
    """Can be pickled, but not read again."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(f"{code} {why}")


def test_facts_of_a_users_type_are_kept_as_they_are() -> None:
    error = Refusal(1, "x")
    own = [Mark("reward", "reward", 0.0, 1.0, {"error": error, "n": at}) for at in range(3 * 2048)]
    assert list(packed(own)) == own


def test_names_of_facts_that_are_equal_keep_their_types() -> None:
    names: list[Any] = [1, True, 1.0, "1"]
    found = packed([Mark("reward", "reward", 0.0, 1.0, {names[at % 4]: at}) for at in range(3 * 2048)])
    assert [type(*mark.args) for mark in found][:8] == [int, bool, float, str] * 2
