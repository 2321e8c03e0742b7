"""A damaged or edited ledger: never a wrong score, never a bare error of sqlite or JSON; lost answers are counted."""

from __future__ import annotations

import asyncio
import fcntl
import json
import math
import os
import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dataflow.batch import Batch
from dataflow.errors import ConfigError, DataflowError, RunError
from dataflow.reward_agent import RewardAgent
from dataflow.rewards.ledger import file as ledger_file
from dataflow.rewards.ledger.ledger import Answer, Ledger
from tests.rewards.ledger.ledger_rig import ANSWER, A, B, key
from tests.rigs.logs import logged

pytestmark = pytest.mark.timeout(60)

ROWS = [(group, sample, key(f"{group} {sample}")) for group in range(40) for sample in range(3)]
ANSWERS = {row[:2]: Answer((row[0] * 3 + row[1]) / 128, {"explanation": f"of {row[:2]}"}, 0.5, 1) for row in ROWS}
FLOAT32 = 3.5e38


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


def fill(path: Path, run: str = "run") -> None:
    with closing(Ledger(path, run)) as ledger:
        ledger.submitted(1, ROWS)
        for row in ROWS:
            ledger.answered(1, *row, ANSWERS[row[:2]])


def edit(path: Path, statement: str, *values: Any) -> None:
    with closing(sqlite3.connect(path)) as db, db:
        db.execute(statement, values)


def read(path: Path, run: str = "run", cache: bool = False) -> dict[Any, Answer]:
    with closing(Ledger(path, run, cache=cache)) as ledger:
        return ledger.submitted(1, ROWS)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "ledger.db"
    fill(path)
    return path.read_bytes()


# --- Single answers --------------------------------------------------------------------------------------------

BAD_TEXTS = [
    "[NaN, {}, 0.1, 1]",
    "[Infinity, {}, 0.1, 1]",
    "[1e300, {}, 0.1, 1]",
    "[1e999, {}, 0.1, 1]",
    '["0.5", {}, 0.1, 1]',
    "[true, {}, 0.1, 1]",
    "[null, {}, 0.1, 1]",
    "[[0.5], {}, 0.1, 1]",
    '[{"a": 1}, {}, 0.1, 1]',
    "[0.5, [], 0.1, 1]",
    '[0.5, {"responses": 1}, 0.1, 1]',
    '[0.5, {"score": 1}, 0.1, 1]',
    "[0.5, {}, NaN, 1]",
    '[0.5, {}, "0.1", 1]',
    "[0.5, {}, 0.1, 0]",
    "[0.5, {}, 0.1, 1.5]",
    "[0.5, {}, 0.1]",
    "[0.5, {}, 0.1, 1, 1]",
    '[0.5, {"expl',
    "0.5",
    "",
    "[" * 100_000,
    "[" + "1" * 5000 + ", {}, 0.1, 1]",
    b"\xff\xfe[0.5, {}, 0.1, 1]",
    b'[0.5, {"a": "\xc3"}, 0.1, 1]',
    None,
    17,
    0.5,
]


@pytest.mark.slow
@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("text", BAD_TEXTS, ids=lambda text: repr(text)[:30])
def test_what_is_no_answer_counts_as_absent(path: Path, text: Any, cache: bool) -> None:
    with closing(Ledger(path, "run")) as ledger:
        ledger.answered(1, 0, 0, A, ANSWER)
        ledger.answered(1, 0, 1, B, ANSWER)
    # Also of a ledger without checksums, as older ones are.
    edit(path, "UPDATE request SET answer = ?, checksum = NULL WHERE sample = 0", text)
    rows = [(0, 0, A), (0, 1, B)]
    with logged() as said, closing(Ledger(path, "new" if cache else "run", cache=cache)) as ledger:
        assert ledger.submitted(1, rows) == {(0, 1): ANSWER}
        assert ledger.counts()["unreadable"] == 1
        # The request is repeated, and the new answer is saved.
        ledger.answered(1, 0, 0, A, Answer(0.25, {}, 0.1, 1))
    assert len(said) == 1
    assert f"reward ledger {path}: unreadable answers, damaged or edited: 1; they" in said[0]
    assert "are requested again" in said[0]
    with logged() as said, closing(Ledger(path, "new" if cache else "run", cache=cache)) as ledger:
        assert ledger.submitted(1, rows)[0, 0].score == 0.25
    assert said == []


def test_an_edited_score_is_noticed_even_if_it_could_be_one(path: Path) -> None:
    fill(path)
    edit(path, "UPDATE request SET answer = replace(answer, '[0.0', '[0.7') WHERE grp = 0 AND sample = 0")
    edit(path, "UPDATE request SET checksum = 'none' WHERE grp = 1 AND sample = 0")
    edit(path, "UPDATE request SET checksum = 1.5 WHERE grp = 2 AND sample = 0")
    with logged() as said:
        found = read(path)
    assert found == {place: answer for place, answer in ANSWERS.items() if place not in ((0, 0), (1, 0), (2, 0))}
    assert len(said) == 1
    assert "edited: 3;" in said[0]


def test_an_answer_of_another_request_is_none(path: Path) -> None:
    fill(path)
    edit(path, "UPDATE request SET (answer, checksum) = (SELECT answer, checksum FROM request WHERE grp = 5)"
         " WHERE grp = 7 AND sample = 1")  # fmt: skip
    assert (7, 1) not in read(path)


def test_a_whole_answer_of_another_run_takes_the_place_of_a_damaged_one(path: Path) -> None:
    fill(path, "first")
    fill(path, "second")
    edit(path, "UPDATE request SET answer = 'torn' WHERE run = 1")
    assert read(path, "third", cache=True) == ANSWERS


def test_the_warning_counts_what_came_after_the_first_call(path: Path) -> None:
    fill(path)
    edit(path, "UPDATE request SET answer = 'torn'")
    with logged() as said, closing(Ledger(path, "run")) as ledger:
        for row in ROWS:
            assert ledger.submitted(1, [row]) == {}
    assert [line.split("edited: ")[1].split(";")[0] for line in said] == ["1", str(len(ROWS))]


def test_an_older_ledger_is_read_and_extended(path: Path) -> None:
    fill(path)
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("DROP INDEX answered")
        db.execute("ALTER TABLE request DROP COLUMN checksum")
    assert read(path) == ANSWERS
    with closing(Ledger(path, "run")) as ledger:
        ledger.answered(2, 0, 0, A, ANSWER)
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT COUNT(*), COUNT(checksum) FROM request").fetchone() == (len(ROWS) + 1, 1)


@pytest.mark.parametrize("score", [math.nan, math.inf, 1e300, -FLOAT32, "0.5", None])
def test_a_score_that_cannot_be_trained_on_is_not_journaled(path: Path, score: Any) -> None:
    with closing(Ledger(path, "run")) as ledger, pytest.raises(DataflowError, match="is not an answer"):
        ledger.answered(1, 0, 0, A, Answer(score, {}, 0.1, 1))


def test_collect_gets_no_number_that_the_function_did_not_return(path: Path) -> None:
    """The whole way: an agent, its ledger edited between two runs, and what is collected."""
    asked: list[str] = []

    async def grade(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> dict[str, Any]:
        asked.append(solution_str)
        return {"score": float(solution_str), "said": solution_str}

    texts = ["0.25", "0.5", "0.75", "1.0"]
    batch = Batch([0, 0, 1, 1], {"response_text": texts, "ground_truth": ["7"] * 4, "data_source": ["d"] * 4})

    async def body() -> list[float]:
        agent = RewardAgent(grade, ledger=Ledger(path, "run"))
        agent.submit(1, batch)
        rewards = await agent.collect(1)
        await agent.close()
        assert list(rewards["said"]) == texts
        return rewards["score"].tolist()  # type: ignore[no-any-return]

    right = [float(text) for text in texts]
    assert asyncio.run(body()) == right
    for bad in ("[NaN, {}, 0.1, 1]", "[1e300, {}, 0.1, 1]", "torn", '["text", {}, 0.1, 1]'):
        edit(path, "UPDATE request SET answer = ?, checksum = NULL WHERE sample = 1", bad)
        asked.clear()
        assert asyncio.run(body()) == right
        assert sorted(asked) == ["0.5", "1.0"]


# --- The file --------------------------------------------------------------------------------------------------


def check_damaged(path: Path) -> str:
    """Reads the rest as a resumed run does; returns the error if that is impossible."""
    said = ""
    try:
        ledger = Ledger(path, "run")
    except ConfigError as error:
        said = str(error)
    else:
        try:
            for place, answer in ledger.submitted(1, ROWS).items():
                assert answer == ANSWERS[place]
            ledger.answered(2, 0, 0, A, ANSWER)
            ledger.flush()
        except RunError as error:
            said = str(error)
        with suppress(RunError):  # the writer may have met the damage, too
            ledger.close()
    assert not said or f"reward ledger {path}: " in said
    return said


DAMAGE = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), min_size=1, max_size=40)


def flip(path: Path, whole: bytes, damage: list[tuple[float, int]]) -> None:
    content = bytearray(whole)
    for where, bits in damage:
        content[int(where * len(content))] ^= bits
    for file in path.parent.glob("ledger.db*"):
        file.unlink()
    path.write_bytes(content)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(DAMAGE)
def test_flipped_bytes(path: Path, whole: bytes, damage: list[tuple[float, int]]) -> None:
    flip(path, whole, damage)
    said = check_damaged(path)
    assert "make the file and its directory writable" not in said


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.floats(0, 100 / 16384, exclude_max=True), st.integers(1, 255)), min_size=1, max_size=3))
def test_flipped_bytes_of_the_header(path: Path, whole: bytes, damage: list[tuple[float, int]]) -> None:
    flip(path, whole, damage)
    said = check_damaged(path)
    assert "make the file and its directory writable" not in said


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.floats(0, 1))
def test_a_file_that_is_cut_off(path: Path, whole: bytes, share: float) -> None:
    flip(path, whole[: int(share * len(whole))], [])
    check_damaged(path)


def test_an_index_that_leads_to_other_rows(path: Path) -> None:
    """The index holds its own copy of each key; exchanged there, a key leads to the answer of another."""
    fill(path)
    with closing(sqlite3.connect(path)) as db:
        (root,) = db.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'answered'").fetchone()
        (size,) = db.execute("PRAGMA page_size").fetchone()
    content = bytearray(path.read_bytes())
    first, second = (row[2] for row in ROWS[:2])
    swapped = 0
    for page in range(len(content) // size):
        begin = page * size
        text = bytes(content[begin : begin + size])
        if page + 1 == root or b"explanation" not in text:
            a, b = text.find(first), text.find(second)
            if a >= 0 and b >= 0:
                content[begin + a : begin + a + 16], content[begin + b : begin + b + 16] = second, first
                swapped += 1
    assert swapped
    path.write_bytes(content)
    for cache in (False, True):
        with closing(Ledger(path, "other", cache=cache)) as ledger:
            for place, answer in ledger.submitted(1, ROWS).items():
                assert answer == ANSWERS[place]


def test_tables_that_are_not_ours(path: Path) -> None:
    fill(path)
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("ALTER TABLE request RENAME COLUMN story TO tale")
    said = check_damaged(path)
    assert "the file is damaged; move it away, with its -wal and -shm, or name another" in said


def test_no_file_at_all(tmp_path: Path) -> None:
    for where, fix in (
        (tmp_path, "it is a directory; name a file"),
        (Path("/dev/null"), "it is a device or a pipe; name a file"),
        (tmp_path / "a\0b", "it cannot be opened (embedded null byte)"),
        (tmp_path / ("x" * 300), "it cannot be opened"),
    ):
        with pytest.raises(ConfigError) as error:
            Ledger(where, "run")
        assert fix in str(error.value)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="it is a device or a pipe"):
        Ledger(tmp_path / "pipe", "run")


def test_the_wait_for_a_locked_ledger_is_limited(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_file, "_BUSY_S", 0.1)
    fill(path)
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("BEGIN EXCLUSIVE")
        with pytest.raises(ConfigError, match=r"locked\); another program keeps it locked; end that program"):
            Ledger(path, "run")
    handle = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="is kept locked by another program; end the program"):
            Ledger(path, "run")
    finally:
        os.close(handle)
    assert read(path) == ANSWERS


def test_a_file_that_is_cut_off_during_the_run(path: Path) -> None:
    fill(path)
    ledger = Ledger(path, "run")
    os.truncate(path, 0)
    said: list[str] = []
    calls: list[Callable[[], Any]] = [
        lambda: ledger.answered(1, 0, 0, A, ANSWER),
        ledger.flush,
        lambda: ledger.submitted(1, ROWS),
        ledger.close,
    ]
    for call in calls:
        with suppress(RunError):
            try:
                call()
            except RunError as error:
                said.append(str(error))
                raise
    assert said
    assert all(str(path) in text for text in said)


def test_the_text_of_an_answer_is_json_as_before(path: Path) -> None:
    with closing(Ledger(path, "run")) as ledger:
        ledger.answered(1, 0, 0, A, ANSWER)
    with closing(sqlite3.connect(path)) as db:
        (text,) = db.execute("SELECT answer FROM request").fetchone()
    assert json.loads(text) == [ANSWER.score, ANSWER.extras, ANSWER.latency_s, ANSWER.tries]
