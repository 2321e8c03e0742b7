"""The ledger: a run's reward requests and their answers in an SQLite file, so that none is paid for twice.

A run that is started again takes the answers that its file has, and requests only the others.

Invariants:

* An answer belongs to one request: run, step, group, sample and :func:`key_of` all that determines it. The first
  answer is kept. A failure is stored with its story and is never an answer.
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
import os
import pickle
import sqlite3
import sys
import threading
import time
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from errno import EACCES
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from loguru import logger

from dataflow.errors import ConfigError, DataflowError, RunError, an
from dataflow.files import unmakable

Key = bytes
Step = int | str
Request = tuple[int, int, str]  # group, sample, key in hexadecimal

_OURS = 0x64664C67  # the application in the file's header
_BUSY_S, _DEADLINE_S = 60.0, 120.0
_GATHER_S = 0.02  # a commit takes more CPU time than ten answers

_SCHEMA = f"""
PRAGMA journal_mode = WAL;
PRAGMA application_id = {_OURS};
CREATE TABLE request (
    run TEXT, step, grp INTEGER, sample INTEGER, key TEXT, submitted REAL, answered REAL, score REAL, answer TEXT,
    story TEXT, failed_tries TEXT, PRIMARY KEY (run, step, grp, sample, key)
) WITHOUT ROWID;
CREATE INDEX answered ON request (key) WHERE score IS NOT NULL;
"""


def _insert(*columns: str) -> str:
    values = ", ".join(f"value ->> {index}" for index in range(4 + len(columns)))
    replaced = ", ".join(f"{column} = excluded.{column}" for column in columns)
    return (
        f"INSERT INTO request (run, step, grp, sample, key, {', '.join(columns)})"
        f" SELECT :run, {values} FROM json_each(:rows)"
        f" WHERE true ON CONFLICT DO UPDATE SET {replaced} WHERE request.score IS NULL"
    )


_WRITES = {
    "submitted": _insert("submitted"),
    "answered": _insert("answered", "score", "answer", "failed_tries", "story"),
    "failed": _insert("story", "failed_tries"),
}
_OF_STEP = (
    "SELECT json_group_array(json_array(grp, sample, key, answer)) FROM request"
    " WHERE run = ? AND step = ? AND grp BETWEEN ? AND ? AND score IS NOT NULL"
)
# The oldest comes last, and a dict keeps it.
_OF_KEYS = (
    "SELECT json_group_array(json_array(key, answer)) FROM (SELECT key, answer FROM request"
    " WHERE score IS NOT NULL AND key IN (SELECT value FROM json_each(?)) ORDER BY answered DESC)"
)
# What shares a call of another request costs nothing. An answer with NaN is no JSON to sqlite.
_SPENT = (
    "SELECT json_array(COUNT(*), TOTAL(json_extract(answer, '$[1].tokens')),"
    " TOTAL(LENGTH(json_extract(answer, '$[1].explanation')))) FROM request WHERE run = ? AND score IS NOT NULL"
    " AND json_valid(answer) AND json_extract(answer, '$[3]') > 0 AND json_extract(answer, '$[1].tokens') > 0"
)


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a request.

    Attributes:
        score: a finite number.
        extras: further columns. From the ledger, numpy scalars are Python numbers, tuples lists, keys of dicts texts.
        latency_s: duration of the request, in seconds.
        tries: number of tries; 0 if another request's call was shared.
    """

    score: float
    extras: dict[str, Any]
    latency_s: float
    tries: int


class Ledger:
    """The reward requests of one run and their answers; thread-safe. Several processes may use one file.

    Each call raises RunError if the file cannot be read or an earlier write failed, and DataflowError after the close.

    Args:
        path: of the file, on a local disk; it and its directories are created if missing.
        run: name of the run; requests of other runs are other requests.
        cache: whether to reuse the answers of all runs for the same key.
        own: whether the file is in the run's directory. Its requests are stored without the run's name, as the
            directory may be renamed or copied.

    Raises:
        ConfigError: there is no run name, or the file cannot be opened and written, or is not a ledger.
    """

    def __init__(self, path: str | Path, run: str, *, cache: bool = False, own: bool = False) -> None:
        if not run:
            raise ConfigError(f"reward ledger {path}: the run has no name; give it one.")
        self.path = Path(path).expanduser().absolute()
        self._run, self._cache = "" if own else run, cache
        with _errors(ConfigError, self.path, "it cannot be opened"):
            if not self.path.exists():
                _create(self.path)
            self._reader, self._writer = _open(self.path), _open(self.path)
            self._writer.execute("BEGIN IMMEDIATE")  # an error if the file cannot be written
            self._writer.execute("COMMIT")
        self._lock = threading.Lock()
        self._rows: dict[str, list[Sequence[Any]]] = {kind: [] for kind in _WRITES}  # of the next commit
        self._unsaved: dict[Any, str] = {}  # answers by request and, for the cache, by key
        self._unstored = False
        self._pool = ThreadPoolExecutor(1, "reward-ledger")  # the interpreter waits for it at its exit
        self._scheduled = self._closed = False
        self._flushing = threading.Event()
        self._error: RunError | None = None

    def submitted(self, step: Step, rows: Sequence[tuple[int, int, Key]]) -> dict[tuple[int, int], Answer]:
        """Records the requests of a step, and returns the answers that are known already.

        Args:
            step: number or name.
            rows: (group, sample, key) of each request.

        Returns:
            The answers by (group, sample).
        """
        step, now = _plain(step), time.time()
        asked = [(int(group), int(sample), key.hex()) for group, sample, key in rows]
        with self._lock:
            self._put("submitted", [(step, *request, now) for request in asked])
            known = self._known(step, asked)
        with _errors(RunError, self.path, "it cannot be read"):
            return {place: Answer(*json.loads(text)) for place, text in known.items()}

    def answered(self, step: Step, group: int, sample: int, key: Key, answer: Answer, failed_tries: str = "") -> None:
        """Records an answer, and why its earlier tries failed.

        An answer whose extras JSON cannot represent is not stored, and a resumed run requests it again. The first one
        is logged.
        """
        place, score = (_plain(step), int(group), int(sample), key.hex()), float(answer.score)
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
            if self._cache:
                self._unsaved[place[-1]] = text

    def failed(self, step: Step, group: int, sample: int, key: Key, story: str, failed_tries: str = "") -> None:
        """Records how a request and its tries failed; a resumed run requests it again."""
        row = (_plain(step), int(group), int(sample), key.hex(), _text(story), _text(failed_tries))
        with self._lock:
            self._put("failed", [row])

    def spent(self) -> tuple[int, int, int]:
        """Returns how many of the run's answers state their tokens, these tokens, and the characters of the replies."""
        calls, tokens, reply = self._query(_SPENT, self._run)
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

    def _known(self, step: Step, rows: Sequence[Request]) -> dict[tuple[int, int], str]:
        """Returns the texts of the answers that are in the file or not written yet."""
        if not rows:
            return {}
        groups = [group for group, _, _ in rows]
        found = self._query(_OF_STEP, self._run, step, min(groups), max(groups))
        kept: dict[Any, str] = {(step, *request): text for *request, text in found}
        if self._cache:
            kept |= self._query(_OF_KEYS, json.dumps([key for _, _, key in rows]))
        known = ChainMap(kept, self._unsaved)
        texts = {row[:2]: known.get((step, *row)) or known.get(row[2]) for row in rows}
        return {place: text for place, text in texts.items() if text}

    def _query(self, statement: str, *values: Any) -> list[Any]:
        with _errors(RunError, self.path, "it cannot be read"):
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
            with _errors(RunError, self.path, "it cannot be written"), self._writer as db:
                if not self.path.exists():  # sqlite would write into the removed file
                    raise FileNotFoundError("it was removed during the run")
                db.execute("BEGIN IMMEDIATE")
                for kind in (kind for kind in _WRITES if rows[kind]):
                    db.execute(_WRITES[kind], {"run": self._run, "rows": json.dumps(rows[kind])})
        except RunError as error:
            self._error = error
            return
        with self._lock:
            for row in rows["answered"]:
                self._unsaved.pop(tuple(row[:4]), None)
                self._unsaved.pop(row[3], None)


def check_file(path: Path) -> None:
    """Raises the ConfigError of a ledger at this absolute path, without creating or changing a file."""
    with _errors(ConfigError, path, "it cannot be opened"):
        if path.exists():
            _open(path).close()
            if not os.access(path, os.W_OK):
                raise PermissionError(EACCES, os.strerror(EACCES))
        elif (why := unmakable(path.parent)) is not None:
            raise ConfigError(f"reward ledger {path}: {why}")


def _create(path: Path) -> None:
    """Creates an empty ledger, in whole: two processes that switch one file to WAL would meet an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".", dir=path.parent) as aside:
        with closing(sqlite3.connect(Path(aside, "new"))) as db:
            db.executescript(_SCHEMA)
        with suppress(FileExistsError):
            os.link(Path(aside, "new"), path)


def _open(path: Path) -> sqlite3.Connection:
    if not path.is_file():
        raise ConfigError(f"reward ledger {path}: it is not a file; name a file.")
    db = sqlite3.connect(path, _BUSY_S, isolation_level=None, check_same_thread=False)
    try:
        (application,) = db.execute("PRAGMA application_id").fetchone()
        if application != _OURS:
            raise ConfigError(f"reward ledger {path}: it is another program's database; name another file.")
    except BaseException:
        db.close()
        raise
    return db


@contextmanager
def _errors(kind: type[DataflowError], path: Path, what: str) -> Iterator[None]:
    """Raises an error of the kind, with the path and the fix, for one of sqlite, the disk or JSON."""
    try:
        yield
    except (OSError, sqlite3.Error, ValueError) as error:
        fix = "make it writable, or move it away with its -wal and -shm"
        raise kind(f"reward ledger {path}: {what} ({error}); {fix}.") from error


def _plain(step: Step) -> Step:
    return step if isinstance(step, str) else int(step)


def _text(text: str) -> str | None:
    """Returns a text without what a broken reply may contain and sqlite cannot store; None if it is empty."""
    return text.replace("\0", "\\x00").encode("utf-8", "backslashreplace").decode() or None


def _number(value: Any) -> bool | int | float | str:
    number = value.item() if isinstance(value, np.generic) else value
    if not isinstance(number, bool | int | float | str):
        raise TypeError(f"JSON cannot represent {an(type(value).__name__)}")
    return number


# --- The key ---------------------------------------------------------------------------------------------------

_LEAVES = frozenset({str, int, float, bool, bytes, type(None)})


def key_of(arguments: Mapping[str, Any], scorer: str = "") -> Key:
    """Returns the key of a reward call: 16 bytes, a hash of all that determines its answer.

    Equal arguments have the same key in every process, and values or types that differ another. Dicts and sets count in
    any order, numpy scalars as Python numbers, tensors by type, shape and content, other objects by their pickle; if
    the pickles of equal objects differ, the answer is requested again, but never mixed up.

    Args:
        arguments: ``data_source``, ``solution_str``, ``ground_truth`` and ``extra_info`` (with ``raw_prompt``). Missing
            ones count as None, others are ignored.
        scorer: identifies what computes the score, such as a judge's model and prompt.

    Raises:
        DataflowError: an argument contains an object that cannot be pickled, such as a lock, an open file or a lambda.
    """
    get = arguments.get
    try:
        text = _pickled(
            _ordered((scorer, get("data_source"), get("solution_str"), get("ground_truth"), get("extra_info")))
        )
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


def _pickled(value: Any) -> memoryview:
    file = io.BytesIO()
    pickler = pickle.Pickler(file, 4)
    pickler.fast = True  # no memo: otherwise shared and equal strings would differ
    pickler.dump(value)
    return file.getbuffer()


def _ordered(value: Any) -> Any:
    """Returns a value that pickles to the same bytes for equal inputs."""
    kind = type(value)
    if kind in _LEAVES:
        return value
    if kind is dict:
        return {key: _ordered(value[key]) for key in sorted(value, key=repr)}
    if kind is list or kind is tuple:
        return kind([_ordered(part) for part in value])
    if kind is set or kind is frozenset:
        return _Standin, kind.__name__, sorted(bytes(_pickled(_ordered(part))) for part in value)
    if isinstance(value, np.generic) and type(value.item()) in _LEAVES:
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        return _Standin, str(value.dtype), value.shape, _ordered(value.tolist())
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):  # its pickle contains an address
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return _Standin, str(value.dtype), tuple(value.shape), data.numpy().tobytes()
    return value


class _Standin:
    """Begins what replaces a value whose pickle is not deterministic; no user's value contains this class."""
