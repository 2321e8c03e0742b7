"""The ledger's sqlite file: how it is made, read and written. What waits to be written is the ledger's business.

Invariants:

* Each question to sqlite is one statement with one row for an answer. At each step of a statement sqlite3 hands over
  the GIL, and beside busy reward threads it gets it back only after milliseconds: a row each would take seconds.
* A request's first answer stays. No failure replaces it.
* sqlite's own errors never leave this file: ConfigError while it is opened, RunError from then on.
"""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

from dataflow.errors import ConfigError, RunError

Row = tuple[Any, ...]

_OURS, _LAYOUT = 0x64664C67, 1  # in the file's header: whose it is, and in which layout
_BUSY_S = 60.0
_ROWS, _KEYS = 2_000, 30_000  # of one statement: sqlite takes up to 32,766 values

_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS run (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, flushed REAL)",
    "CREATE TABLE IF NOT EXISTS request (run INTEGER, step, grp INTEGER, sample INTEGER, key BLOB, submitted REAL,"
    " answered REAL, score REAL, answer TEXT, story TEXT, PRIMARY KEY (run, step, grp, sample, key)) WITHOUT ROWID",
    "CREATE INDEX IF NOT EXISTS answered ON request (key) WHERE score IS NOT NULL",
    "CREATE TABLE IF NOT EXISTS collected (run INTEGER, step, grp INTEGER, collected REAL,"
    " PRIMARY KEY (run, step, grp)) WITHOUT ROWID",
    f"PRAGMA application_id = {_OURS}",
    f"PRAGMA user_version = {_LAYOUT}",
)

_PLACE = "run, step, grp, sample, key"
_INSERTS = {
    "submitted": (f"request ({_PLACE}, submitted)", "NOTHING"),
    "answered": (
        f"request ({_PLACE}, answered, score, answer)",
        "UPDATE SET answered = excluded.answered, score = excluded.score, answer = excluded.answer, story = NULL"
        " WHERE request.score IS NULL",
    ),
    "failed": (f"request ({_PLACE}, story)", "UPDATE SET story = excluded.story WHERE request.score IS NULL"),
    "collected": ("collected (run, step, grp, collected)", "NOTHING"),
}
KINDS = tuple(_INSERTS)

# The answers are JSON texts, so what is put together here is one too.
_OF_STEP = (
    "SELECT '[' || group_concat('[' || grp || ',' || sample || ',\"' || hex(key) || '\",' || answer || ']') || ']'"
    " FROM request WHERE run = ? AND step = ? AND grp BETWEEN ? AND ? AND score IS NOT NULL"
)
# Runs without the cache may have answers of their own for one key; the oldest counts, each time.
_OF_KEYS = (
    "SELECT '[' || group_concat('[\"' || hex(key) || '\",' || answer || ']') || ']' FROM"
    " (SELECT key, answer, MIN(answered) FROM request WHERE score IS NOT NULL AND key IN ({marks}) GROUP BY key)"
)
_TOTALS = (
    "SELECT COUNT(*), COUNT(score), COUNT(story), (SELECT COUNT(*) FROM collected WHERE run = :run)"
    " FROM request WHERE run = :run"
)

_FIXES = {
    "SQLITE_NOTADB": "it is no sqlite file; name another",
    "SQLITE_CORRUPT": "the file is damaged; move it away or name another",
    "SQLITE_FULL": "free some disk space",
    "SQLITE_IOERR": "see that its disk has space and is in order",
    "SQLITE_BUSY": "another program keeps it locked; end that program",
    "SQLITE_READONLY": "make the file and its directory writable, or name another",
    "SQLITE_CANTOPEN": "make the file and its directory writable, or name another",
}


class LedgerFile:
    """One run's part of a ledger file. One thread may write while others, one at a time, read.

    Args:
        path: absolute; the file and its directories are made if they are not there.
        run: name.

    Raises:
        ConfigError: the file cannot be opened and written, or is none of ours.
    """

    def __init__(self, path: Path, run: str) -> None:
        self.path = path
        if path.is_dir():
            raise ConfigError(f"reward ledger {path}: it is a directory; name a file.")
        opened: list[sqlite3.Connection] = []
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with _alone(path.parent):
                opened += [_connect(path), _connect(path)]
                _prepare(opened[0], path)
            self._writer, self._reader = opened
            self._run = _run_id(self._writer, run)
            self._inode = _inode(path)
        except BaseException as error:
            for db in opened:
                db.close()
            if isinstance(error, OSError | sqlite3.Error):
                raise ConfigError(_message(path, "it cannot be opened", error)) from error
            raise

    def save(self, rows: Mapping[str, Sequence[Row]], sync: bool) -> None:
        """Writes rows, by their kind, in one commit.

        Args:
            rows: ``submitted`` (step, group, sample, key, time), ``answered`` (.., time, score, JSON text of the
                answer), ``failed`` (.., story), ``collected`` (step, group, time); times are of ``time.time()``.
            sync: also wait until the disk has this commit and all before.

        Raises:
            RunError: they could not be written, or the file is no longer there.
        """
        try:
            self._writer.execute(f"PRAGMA synchronous = {'FULL' if sync else 'NORMAL'}")
            with self._writer as db:
                db.execute("BEGIN IMMEDIATE")
                for kind in KINDS:
                    self._insert(kind, rows[kind])
                if sync:  # there must be something to commit
                    db.execute("UPDATE run SET flushed = ? WHERE id = ?", (time.time(), self._run))
        except (OSError, sqlite3.Error) as error:
            raise RunError(_message(self.path, "it cannot be written", error)) from error
        # sqlite writes on into a file that has been removed.
        if _inode(self.path) != self._inode:
            raise RunError(f"reward ledger {self.path}: it was removed during the run; leave it there and run again.")

    def _insert(self, kind: str, rows: Sequence[Row]) -> None:
        into, conflict = _INSERTS[kind]
        for start in range(0, len(rows), _ROWS):
            part = rows[start : start + _ROWS]
            marks = ",".join([f"({self._run}{',?' * len(part[0])})"] * len(part))
            values = list(chain.from_iterable(part))
            self._writer.execute(f"INSERT INTO {into} VALUES {marks} ON CONFLICT DO {conflict}", values)

    def of_step(self, step: int | str, first: int, last: int) -> dict[Row, list[Any]]:
        """Returns the answers of a step's groups first to last, as they were written, by (group, sample, key).

        Raises:
            RunError: the file cannot be read.
        """
        (found,) = self._ask(_OF_STEP, (self._run, step, first, last))
        return {(group, sample, bytes.fromhex(key)): answer for group, sample, key, answer in json.loads(found or "[]")}

    def of_keys(self, keys: Iterable[bytes]) -> dict[bytes, list[Any]]:
        """Returns the answers that any run has for some keys, as they were written, by key.

        Raises:
            RunError: the file cannot be read.
        """
        wanted, answers = list(set(keys)), {}
        for start in range(0, len(wanted), _KEYS):
            part = wanted[start : start + _KEYS]
            (found,) = self._ask(_OF_KEYS.format(marks=",".join("?" * len(part))), part)
            answers.update({bytes.fromhex(key): answer for key, answer in json.loads(found or "[]")})
        return answers

    def totals(self) -> dict[str, int]:
        """Returns how many requests of the run the file has, how many of them in which state, and collected groups.

        Raises:
            RunError: the file cannot be read.
        """
        return dict(zip(KINDS, self._ask(_TOTALS, {"run": self._run}), strict=True))

    def _ask(self, question: str, values: Any) -> Row:
        try:
            row: Row = self._reader.execute(question, values).fetchone()
        except sqlite3.Error as error:
            raise RunError(_message(self.path, "it cannot be read", error)) from error
        return row

    def close(self) -> None:
        """Closes the file."""
        self._reader.close()
        self._writer.close()


def _connect(path: Path) -> sqlite3.Connection:
    # Statements differ by their number of rows: keeping many would only cost memory.
    return sqlite3.connect(path, _BUSY_S, isolation_level=None, check_same_thread=False, cached_statements=8)


def _inode(path: Path) -> int | None:
    try:
        return os.stat(path).st_ino
    except FileNotFoundError:
        return None


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Lets one process after another open ledgers: sqlite does not wait where two switch a file to WAL at once."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _prepare(db: sqlite3.Connection, path: Path) -> None:
    """Sets the file up, which also shows that it can be written."""
    (owner,) = db.execute("PRAGMA application_id").fetchone()
    (layout,) = db.execute("PRAGMA user_version").fetchone()
    (tables,) = db.execute("SELECT COUNT(*) FROM sqlite_schema").fetchone()
    if owner != _OURS and (tables or layout):
        raise ConfigError(f"reward ledger {path}: it is another program's database; name another file.")
    if layout > _LAYOUT:
        newer = f"a newer dataflow made it (layout {layout}, this one knows {_LAYOUT})"
        raise ConfigError(f"reward ledger {path}: {newer}; update dataflow or name another file.")
    (mode,) = db.execute("PRAGMA journal_mode = WAL").fetchone()
    if mode != "wal":
        raise ConfigError(f"reward ledger {path}: its file system cannot share it; name a file on a local disk.")
    with db:
        db.execute("BEGIN IMMEDIATE")
        for statement in _SCHEMA:
            db.execute(statement)


def _run_id(db: sqlite3.Connection, run: str) -> int:
    db.execute("INSERT INTO run (name) VALUES (?) ON CONFLICT DO NOTHING", (run,))
    return int(db.execute("SELECT id FROM run WHERE name = ?", (run,)).fetchone()[0])


def _message(path: Path, what: str, error: Exception) -> str:
    # Longer codes, such as SQLITE_READONLY_DIRECTORY, begin with the plain one.
    code = getattr(error, "sqlite_errorname", "SQLITE_CANTOPEN")
    fix = next((text for name, text in _FIXES.items() if code.startswith(name)), "name another file")
    return f"reward ledger {path}: {what} ({error}); {fix}."
