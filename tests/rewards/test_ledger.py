"""The ledger: what it saves, what it returns, and its errors."""

from __future__ import annotations

import math
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dataflow.errors import DataflowError, RunError
from dataflow.rewards.ledger import Answer, Ledger, key_of
from tests.rigs.logs import logged

pytestmark = pytest.mark.timeout(60)

ANSWER, OTHER = Answer(0.1 + 0.2, {"explanation": "it is right", "tokens": 312}, 0.25, 2), Answer(-1.0, {}, 1.0, 1)
A, B = key_of({"solution_str": "a"}), key_of({"solution_str": "b"})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


def resumed(path: Path, step: Any, *rows: tuple[int, int, bytes]) -> Any:
    """What another process would get."""
    with closing(Ledger(path)) as ledger:
        return ledger.submitted(step, rows)


def one(path: Path, answer: Answer = ANSWER, step: int | str = 1, found: bytes = A) -> None:
    with closing(Ledger(path)) as ledger:
        assert ledger.submitted(step, [(0, 0, found)]) == {}
        ledger.answered(step, 0, 0, found, answer)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keeps every writer waiting."""
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("BEGIN IMMEDIATE")
        yield
        db.execute("ROLLBACK")


def test_a_resumed_run_gets_what_was_answered(path: Path) -> None:
    rows = [(group, sample, bytes([group, sample])) for group in range(3) for sample in range(2)]
    with closing(Ledger(path)) as ledger:
        assert ledger.submitted(1, rows) == {}
        ledger.answered(1, *rows[4], ANSWER)
        ledger.answered(1, *rows[1], OTHER)
    assert resumed(path, 1, *rows) == {(2, 0): ANSWER, (0, 1): OTHER}
    assert resumed(path, 1, *rows[1:4]) == {(0, 1): OTHER}


def test_an_answer_belongs_to_one_request_and_the_first_one_stays(path: Path) -> None:
    one(path)
    with closing(Ledger(path)) as ledger:
        ledger.answered(1, 0, 0, A, OTHER)
    assert resumed(path, 1, (0, 0, A)) == {(0, 0): ANSWER}
    for step, row in ((1, (0, 0, B)), (1, (0, 1, A)), (1, (1, 0, A)), (2, (0, 0, A)), ("1", (0, 0, A))):
        assert resumed(path, step, row) == {}


def test_what_is_not_written_yet_is_found(path: Path) -> None:
    with closing(Ledger(path)) as ledger:
        with locked(path):
            ledger.answered(1, 0, 0, A, ANSWER)
            assert ledger.submitted(1, [(0, 0, A), (0, 1, A)]) == {(0, 0): ANSWER}
            assert ledger.submitted(1, [(0, 0, B)]) == {}
            with pytest.raises(RunError, match=r"not written within 0\.1 s"):
                ledger.flush(deadline_s=0.1)
        ledger.flush()
        assert ledger.submitted(1, [(0, 0, A), (0, 1, A)]) == {(0, 0): ANSWER}


def totals_in(path: Path) -> tuple[int, int, int]:
    """Returns the number of requests, and how many have an answer and a failure."""
    with closing(sqlite3.connect(path)) as db:
        submitted, answered, failed = db.execute("SELECT COUNT(*), COUNT(score), COUNT(story) FROM request").fetchone()
    return submitted, answered, failed


def test_a_failure_is_no_answer(path: Path) -> None:
    story = "TimeoutError on each of 4 tries: half a reply \ud83d and \x00 of é"
    with closing(Ledger(path)) as ledger:
        ledger.submitted(1, [(0, 0, A), (0, 1, B)])
        ledger.failed(1, 0, 0, A, "reset", "time-out, 0.5 s")
        ledger.failed(1, 0, 1, B, story)
        ledger.flush()
        assert ledger.submitted(1, [(0, 0, A)]) == {}
        assert totals_in(path) == (2, 0, 2)
        ledger.answered(1, 0, 0, A, ANSWER)
        ledger.flush()
        ledger.failed(1, 0, 0, A, "a later one")
        ledger.flush()
        assert totals_in(path) == (2, 1, 1)
    assert resumed(path, 1, (0, 0, A), (0, 1, B)) == {(0, 0): ANSWER}
    with closing(sqlite3.connect(path)) as db:
        stories = db.execute("SELECT story FROM request ORDER BY sample").fetchall()
    assert stories == [(None,), ("TimeoutError on each of 4 tries: half a reply \\ud83d and \\x00 of é",)]


def test_extras_come_back_as_they_were(path: Path) -> None:
    extras = {
        "text": "quotes \" and ' and \\ é 漢 \ud83d \x00",
        "numbers": [1, 2.5, True, None, 10**30, 1e-300],
        "nested": {"a": {"b": [{}]}},
        "infinite": math.inf,
    }
    one(path, Answer(1 / 3, extras, 1e-9, 1))
    assert resumed(path, 1, (0, 0, A)) == {(0, 0): Answer(1 / 3, extras, 1e-9, 1)}
    odd = {"numpy": np.float32(0.5), "count": np.int64(3), "ok": np.bool_(True), "pair": (1, 2), "nan": math.nan}
    one(path, Answer(1.0, odd, 0.1, 1), step=2)
    back = resumed(path, 2, (0, 0, A))[0, 0].extras
    assert math.isnan(back.pop("nan"))
    assert back == {"numpy": 0.5, "count": 3, "ok": True, "pair": [1, 2]}
    assert [type(value) for value in back.values()] == [float, int, bool, list]


def test_extras_that_json_cannot_hold_are_counted_and_said_once(path: Path) -> None:
    circle: list[Any] = []
    circle.append(circle)
    odd: list[Any] = [object(), np.zeros(2), {(1,): 2}, circle, b"x", {1, 2}, 1j, np.complex64(1)]
    with logged() as said, closing(Ledger(path)) as ledger:
        for sample, value in enumerate(odd):
            ledger.answered(1, 0, sample, A, Answer(1.0, {"picture": value}, 0.1, 1))
        ledger.answered(1, 1, 0, A, ANSWER)
        rows = [(0, sample, A) for sample in range(len(odd))]
        assert ledger.submitted(1, [*rows, (1, 0, A)]) == {(1, 0): ANSWER}
    assert len(said) == 1
    assert "the columns picture is not stored (JSON cannot represent an object)" in said[0]


def test_close(path: Path) -> None:
    before = threading.active_count()
    ledger = Ledger(path)
    ledger.submitted(1, [(0, 0, A)])
    ledger.close()
    ledger.close()
    assert threading.active_count() == before
    assert [file.name for file in path.parent.iterdir()] == ["ledger.db"]
    for call in (
        lambda: ledger.submitted(1, [(0, 0, A)]),
        lambda: ledger.answered(1, 0, 0, A, ANSWER),
        lambda: ledger.failed(1, 0, 0, A, "reset"),
        lambda: ledger.flush(),
    ):
        with pytest.raises(DataflowError, match="it is closed"):
            call()


def test_what_a_run_spent_counts_each_call_once(path: Path) -> None:
    with closing(Ledger(path)) as ledger:
        assert ledger.spent() == (0, 0, 0)
        ledger.submitted(1, [(0, 0, A), (0, 1, A), (1, 0, B), (2, 0, bytes(16))])
        paid = Answer(1.0, {"explanation": "seven..", "tokens": 40}, 0.5, 1)
        ledger.answered(1, 0, 0, A, paid)
        ledger.answered(1, 0, 1, A, replace(paid, tries=0))  # shares the call of the first
        ledger.answered(1, 1, 0, B, paid)
        ledger.answered(1, 2, 0, bytes(16), OTHER)  # it states no tokens
        ledger.flush()
        assert ledger.spent() == (2, 80, 14)
