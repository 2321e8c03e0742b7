"""The ledger: a run's reward requests and their answers in an SQLite file, so that none is paid for twice.

A run that is started again takes the answers that its file has, and requests only the others.

Invariants:

* An answer belongs to one request: step, group, sample and :func:`key_of` all that determines it. The first answer is
  kept. A failure is stored with its story and is never an answer.
* Callers never wait for the disk: one thread writes, each time what arrived since its last commit and in the next
  20 ms. A killed process loses no more than that. Callers see also what is not written yet.
* After a failed write every later call raises its error.
* Each write and each query is one statement with one row. sqlite3 releases the GIL for each row and, beside busy reward
  threads, gets it back milliseconds later: row by row (``executemany``), a step's requests would take half a minute.
"""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import sqlite3
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from loguru import logger

from dataflow.errors import ConfigError, DataflowError, RunError, an

Key = bytes
Step = int | str

_BUSY_S, _DEADLINE_S = 60.0, 120.0
_GATHER_S = 0.02  # a commit takes more CPU time than ten answers

_SCHEMA = """
PRAGMA journal_mode = WAL;
CREATE TABLE IF NOT EXISTS request (
    step, grp INTEGER, sample INTEGER, key TEXT, submitted REAL, answered REAL, score REAL, answer TEXT, story TEXT,
    failed_tries TEXT, PRIMARY KEY (step, grp, sample, key)
) WITHOUT ROWID;
"""


def _insert(*columns: str) -> str:
    values = ", ".join(f"value ->> {index}" for index in range(4 + len(columns)))
    replaced = ", ".join(f"{column} = excluded.{column}" for column in columns)
    return (
        f"INSERT INTO request (step, grp, sample, key, {', '.join(columns)}) SELECT {values} FROM json_each(?)"
        f" WHERE true ON CONFLICT DO UPDATE SET {replaced} WHERE request.score IS NULL"
    )


_WRITES = {
    "submitted": _insert("submitted"),
    "answered": _insert("answered", "score", "answer", "failed_tries", "story"),
    "failed": _insert("story", "failed_tries"),
}
_OF_STEP = (
    "SELECT json_group_array(json_array(grp, sample, key, answer)) FROM request"
    " WHERE step = ? AND grp BETWEEN ? AND ? AND score IS NOT NULL"
)
# What shares a call of another request costs nothing. An answer with NaN is no JSON to sqlite.
_SPENT = (
    "SELECT json_array(COUNT(*), TOTAL(json_extract(answer, '$[1].tokens')),"
    " TOTAL(LENGTH(json_extract(answer, '$[1].explanation')))) FROM request WHERE score IS NOT NULL"
    " AND json_valid(answer) AND json_extract(answer, '$[3]') > 0 AND json_extract(answer, '$[1].tokens') > 0"
)


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a request.

    Attributes:
        extras: further columns. From the ledger, numpy scalars are Python numbers, tuples lists, keys of dicts texts.
        tries: number of tries; 0 if another request's call was shared.
    """

    score: float
    extras: dict[str, Any]
    latency_s: float
    tries: int


class Ledger:
    """The reward requests of one run and their answers; thread-safe.

    Each call raises RunError if the file cannot be read or an earlier write failed, and DataflowError after the close.

    Args:
        path: of the file, on a local disk; it and its directories are created if missing.

    Raises:
        ConfigError: the file cannot be opened and written, or is no ledger.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser().absolute()
        with self._errors(ConfigError, "it cannot be opened"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._writer, self._reader = self._open(), self._open()
            self._writer.executescript(_SCHEMA)
            self._writer.execute("BEGIN IMMEDIATE")  # an error if the file cannot be written
            self._writer.execute("COMMIT")
        self._lock = threading.Lock()
        self._rows: dict[str, list[Sequence[Any]]] = {kind: [] for kind in _WRITES}  # of the next commit
        self._unsaved: dict[tuple[Any, ...], str] = {}  # answers by request
        self._unstored = False
        self._pool = ThreadPoolExecutor(1, "reward-ledger")  # the interpreter waits for it at its exit
        self._scheduled = self._closed = False
        self._flushing = threading.Event()
        self._error: RunError | None = None

    def _open(self) -> sqlite3.Connection:
        return sqlite3.connect(self.path, _BUSY_S, isolation_level=None, check_same_thread=False)

    @contextmanager
    def _errors(self, kind: type[DataflowError], what: str) -> Iterator[None]:
        """Raises an error of the kind, with the path and the fix, for one of sqlite, the disk or JSON."""
        try:
            yield
        except (OSError, sqlite3.Error, ValueError) as error:
            fix = "make it writable, or move it away with its -wal and -shm"
            raise kind(f"reward ledger {self.path}: {what} ({error}); {fix}.") from error

    def submitted(self, step: Step, rows: Sequence[tuple[int, int, Key]]) -> dict[tuple[int, int], Answer]:
        """Records the requests of a step, each a row (group, sample, key).

        Returns the answers that are known already, by (group, sample).
        """
        if not rows:
            return {}
        places, now = [_place(step, *row) for row in rows], time.time()
        groups = [place[1] for place in places]
        with self._lock:
            self._put("submitted", [(*place, now) for place in places])
            kept = self._query(_OF_STEP, places[0][0], min(groups), max(groups))
            known = {(places[0][0], *request): text for *request, text in kept}
            texts = {place[1:3]: known.get(place) or self._unsaved.get(place) for place in places}
        with self._errors(RunError, "it cannot be read"):
            return {place: Answer(*json.loads(text)) for place, text in texts.items() if text}

    def answered(self, step: Step, group: int, sample: int, key: Key, answer: Answer, failed_tries: str = "") -> None:
        """Records an answer, and why its earlier tries failed.

        An answer whose extras JSON cannot represent is not stored, and a resumed run requests it again. The first one
        is logged.
        """
        place, score = _place(step, group, sample, key), float(answer.score)
        try:
            text = json.dumps([score, answer.extras, float(answer.latency_s), int(answer.tries)], default=_number)
        except (TypeError, ValueError, RecursionError) as error:
            if not self._unstored:
                logger.warning(
                    f"reward ledger {self.path}: an answer with the columns {', '.join(answer.extras)} is not stored "
                    f"({error}), so a resumed run requests it, and others like it, again; return numbers, strings, "
                    "lists, and dicts with strings as keys."
                )
            self._unstored = True
            return
        with self._lock:
            self._put("answered", [(*place, time.time(), score, text, _text(failed_tries), None)])
            self._unsaved[place] = text

    def failed(self, step: Step, group: int, sample: int, key: Key, story: str, failed_tries: str = "") -> None:
        """Records how a request and its tries failed; a resumed run requests it again."""
        with self._lock:
            self._put("failed", [(*_place(step, group, sample, key), _text(story), _text(failed_tries))])

    def spent(self) -> tuple[int, int, int]:
        """Returns how many of the answers state their tokens, these tokens, and the characters of the replies."""
        calls, tokens, reply = self._query(_SPENT)
        return int(calls), int(tokens), int(reply)

    def flush(self, deadline_s: float = _DEADLINE_S) -> None:
        """Waits until all earlier records are on disk; RunError if they are not within ``deadline_s`` seconds."""
        with self._lock:
            self._check()
            self._flushing.set()
            written = self._pool.submit(self._write)
        try:
            written.result(deadline_s)
        except TimeoutError:
            raise RunError(
                f"reward ledger {self.path}: not written within {deadline_s:g} s; check what slows its disk down."
            ) from None
        self._check()

    def close(self) -> None:
        """Flushes and closes the file. Further calls have no effect."""
        if self._closed:
            return
        try:
            self.flush()
        finally:
            self._closed = True
            self._pool.submit(self._writer.close)
            self._pool.shutdown()
            self._reader.close()

    def _query(self, statement: str, *values: Any) -> list[Any]:
        with self._errors(RunError, "it cannot be read"):
            rows: list[Any] = json.loads(self._reader.execute(statement, values).fetchone()[0])
        return rows

    def _put(self, kind: str, rows: Sequence[Sequence[Any]]) -> None:
        """Adds rows to the next commit. Requires the lock."""
        self._check()
        self._rows[kind] += rows
        if not self._scheduled:
            self._scheduled = True
            self._pool.submit(self._write)

    def _check(self) -> None:
        if self._error is not None:
            raise RunError(str(self._error)) from self._error  # a new exception each time, as tracebacks would add up
        if self._closed:
            raise DataflowError(f"reward ledger {self.path}: it is closed; close it after the last request.")

    def _write(self) -> None:
        """Commits what there is to write, in the pool's thread. Later calls raise its error."""
        self._flushing.wait(_GATHER_S)
        with self._lock:
            self._flushing.clear()
            rows, self._rows, self._scheduled = self._rows, {kind: [] for kind in _WRITES}, False
        if self._error is not None:
            return
        try:
            with self._errors(RunError, "it cannot be written"), self._writer as db:
                if not self.path.exists():  # sqlite would write into the removed file
                    raise FileNotFoundError("it was removed during the run")
                db.execute("BEGIN IMMEDIATE")
                for kind in (kind for kind in _WRITES if rows[kind]):
                    db.execute(_WRITES[kind], [json.dumps(rows[kind])])
        except RunError as error:
            self._error = error
            return
        with self._lock:
            for row in rows["answered"]:
                self._unsaved.pop(tuple(row[:4]), None)


def _place(step: Step, group: int, sample: int, key: Key) -> tuple[Step, int, int, str]:
    return step if isinstance(step, str) else int(step), int(group), int(sample), key.hex()


def _text(text: str) -> str | None:
    """Returns a text without what a broken reply may contain and sqlite cannot store; None if it is empty."""
    return text.replace("\0", "\\x00").encode("utf-8", "backslashreplace").decode() or None


def _number(value: Any) -> bool | int | float | str:
    number = value.item() if isinstance(value, np.generic) else value
    if not isinstance(number, bool | int | float | str):
        raise TypeError(f"JSON cannot represent {an(type(value).__name__)}")
    return number


def key_of(arguments: Mapping[str, Any], scorer: str = "") -> Key:
    """Returns the key of a reward call: 16 bytes, a hash of all that determines its answer.

    Arguments with equal JSON have the same key in every process. Dicts and sets count in any order, numpy scalars as
    Python numbers, arrays and tensors by type, shape and content, other objects by their pickle; if the pickles of
    equal objects differ, the answer is requested again, but never mixed up.

    Args:
        arguments: ``data_source``, ``solution_str``, ``ground_truth`` and ``extra_info`` (with ``raw_prompt``). Missing
            ones count as None, others are ignored.

    Raises:
        DataflowError: an argument contains an object that cannot be pickled, such as a lock, an open file or a lambda.
    """
    names = ("data_source", "solution_str", "ground_truth", "extra_info")
    try:
        text = json.dumps([scorer, *map(arguments.get, names)], sort_keys=True, default=_content).encode()
    except Exception as error:
        raise DataflowError(
            f"a request has no key, as its arguments cannot be pickled ({type(error).__name__}: {error}); keep such "
            "objects out of extra_info, or set reward.ledger=false and reward.share_equal=false"
        ) from error
    # For 2,048 bytes or more hashlib releases the GIL, which beside busy threads takes milliseconds to get back.
    digest = hashlib.sha256()
    for start in range(0, len(text), 2047):
        digest.update(text[start : start + 2047])
    return digest.digest()[:16]


def _content(value: Any) -> Any:
    """Returns what JSON can hold of a value that is none of its own, and what is equal for equal values."""
    if isinstance(value, np.generic):
        return value.item()
    kind = type(value).__name__
    if isinstance(value, set | frozenset):
        return kind, sorted(json.dumps(part, sort_keys=True, default=_content) for part in value)
    if isinstance(value, np.ndarray):
        content = value.tolist() if value.dtype.hasobject else value.tobytes().hex()
        return kind, str(value.dtype), value.shape, content
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):  # its pickle contains an address
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return kind, str(value.dtype), tuple(value.shape), data.numpy().tobytes().hex()
    file = io.BytesIO()
    pickler = pickle.Pickler(file, 4)
    pickler.fast = True  # no memo: otherwise shared and equal strings would differ
    pickler.dump(value)
    return kind, file.getvalue().hex()
