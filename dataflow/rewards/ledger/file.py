"""The ledger's sqlite file: creates, reads and writes it. The ledger queues what is to be written.

Invariants:

* Each query is one statement that returns one row. sqlite3 releases the GIL at each step of a statement and, beside
  busy reward threads, reacquires it only after milliseconds: reading row by row would take seconds.
* The first answer to a request is kept; no failure replaces it.
* An answer has a checksum of itself and its key. An answer that does not match, or that :func:`read_answer` rejects,
  counts as absent.
* sqlite's errors are converted: to ConfigError while the file is opened, to RunError afterwards.
"""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
import threading
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from errno import EACCES
from itertools import chain
from pathlib import Path
from typing import Any

from dataflow.errors import ConfigError, RunError
from dataflow.files import unmakable
from dataflow.rewards.user.results import read_number, read_result

Row = tuple[Any, ...]

_OURS, _LAYOUT = 0x64664C67, 1  # in the file's header: application and layout
_BUSY_S = 60.0
_ROWS, _KEYS = 2_000, 30_000  # per statement: sqlite accepts up to 32,766 values

_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS run (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, flushed REAL)",
    "CREATE TABLE IF NOT EXISTS request (run INTEGER, step, grp INTEGER, sample INTEGER, key BLOB, submitted REAL,"
    " answered REAL, score REAL, answer TEXT, story TEXT, checksum INTEGER, failed_tries TEXT,"
    " PRIMARY KEY (run, step, grp, sample, key)) WITHOUT ROWID",
    "CREATE INDEX IF NOT EXISTS answered ON request (key) WHERE score IS NOT NULL",
    "CREATE TABLE IF NOT EXISTS collected (run INTEGER, step, grp INTEGER, collected REAL,"
    " PRIMARY KEY (run, step, grp)) WITHOUT ROWID",
    f"PRAGMA application_id = {_OURS}",
    f"PRAGMA user_version = {_LAYOUT}",
)

# Equal samples share one call, so each key counts once. A damaged answer counts nothing.
_SPENT = (
    "SELECT COUNT(*), TOTAL(tokens), TOTAL(reply) FROM (SELECT MAX(json_extract(answer, '$[1].tokens')) AS tokens,"
    " MAX(LENGTH(json_extract(answer, '$[1].explanation'))) AS reply FROM request"
    " WHERE run = ? AND score IS NOT NULL AND json_valid(answer) GROUP BY key) WHERE tokens > 0"
)
_PLACE = "run, step, grp, sample, key"
_INSERTS = {
    "submitted": (f"request ({_PLACE}, submitted)", "NOTHING"),
    "answered": (
        f"request ({_PLACE}, answered, score, failed_tries, answer, checksum)",
        "UPDATE SET answered = excluded.answered, score = excluded.score, answer = excluded.answer,"
        " checksum = excluded.checksum, failed_tries = excluded.failed_tries, story = NULL WHERE request.score IS NULL",
    ),
    "failed": (
        f"request ({_PLACE}, story, failed_tries)",
        "UPDATE SET story = excluded.story, failed_tries = excluded.failed_tries WHERE request.score IS NULL",
    ),
    "collected": ("collected (run, step, grp, collected)", "NOTHING"),
}
KINDS = tuple(_INSERTS)

# In hexadecimal, so that a damaged row does not affect the others.
_FOUND = "hex(grp) || ' ' || hex(sample) || ' ' || hex(key) || ' ' || hex(checksum) || ' ' || hex(answer)"
_OF_STEP = (
    f"SELECT group_concat({_FOUND}, ',')"
    " FROM request WHERE run = ? AND step = ? AND grp BETWEEN ? AND ? AND score IS NOT NULL"
)
# Runs without the cache may have several answers for one key; the oldest is used.
_OF_KEYS = (
    f"SELECT group_concat({_FOUND}, ',') FROM"
    " (SELECT grp, sample, key, checksum, answer FROM request WHERE score IS NOT NULL AND key IN ({marks})"
    " ORDER BY answered)"
)
# Unless another process has replaced it meanwhile.
_DROP = (
    "UPDATE request SET answered = NULL, score = NULL, answer = NULL, checksum = NULL"
    " WHERE key = ? AND score IS NOT NULL AND hex(answer) = ?"
)
_TOTALS = (
    "SELECT COUNT(*), COUNT(score), COUNT(story), (SELECT COUNT(*) FROM collected WHERE run = :run)"
    " FROM request WHERE run = :run"
)

_MOVE = "move it away, with its -wal and -shm, or name another"
_ACCESS = ("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM")
_FIXES = {
    "SQLITE_NOTADB": "it is not an sqlite file; name another",
    "SQLITE_CORRUPT": f"the file is damaged; {_MOVE}",
    "SQLITE_FULL": "free some disk space",
    "SQLITE_IOERR": "check that its disk has space and is in order",
    **dict.fromkeys(("SQLITE_BUSY", "SQLITE_LOCKED"), "another program keeps it locked; end that program"),
    "SQLITE_NOMEM": "free some memory",
    **dict.fromkeys(_ACCESS, "make the file and its directory writable, or name another"),
}

Found = tuple[int, int, bytes, str]
"""Group, sample, key, and answer (JSON in hexadecimal)."""


def read_answer(text: str | bytes) -> tuple[float, dict[str, Any], float, int]:
    """Returns score, extras, seconds and tries of an answer, checked like the result of a reward function.

    Raises:
        ValueError: the text is not an answer.
    """
    try:
        score, extras, latency_s, tries = json.loads(text)
        if not isinstance(extras, dict) or "score" in extras or type(score) is bool:
            raise ValueError("no score and extras")
        score, extras = read_result({**extras, "score": score})
        latency_s = read_number(latency_s)
        if type(tries) is not int or tries < 1:
            raise ValueError("no number of tries")
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from error
    return score, extras, latency_s, tries


def _checksum(key: bytes, answer: bytes) -> int:
    return zlib.crc32(answer, zlib.crc32(key))


class LedgerFile:
    """One run's part of a ledger file. One thread may write while one other reads.

    Args:
        path: absolute; the file and its directories are created if missing.
        run: name of the run.
        own: whether the file is in the run's directory. Then the run that began the file is this one, whatever its
            name was: a directory can be renamed or copied.

    Raises:
        ConfigError: the file cannot be opened and written, or is not a ledger.
    """

    def __init__(self, path: Path, run: str, own: bool = False) -> None:
        self.path = path
        opened: list[sqlite3.Connection] = []
        try:
            _check_kind(path)
            path.parent.mkdir(parents=True, exist_ok=True)
            with _alone(path.parent):
                opened += [_connect(path), _connect(path)]
                _prepare(opened[0], path)
            self._writer, self._reader = opened
            if own:
                _rename(self._writer, run)
            self._run = _run_id(self._writer, run)
            self._inode = _inode(path)
        except BaseException as error:
            for db in opened:
                db.close()
            if isinstance(error, OSError | sqlite3.Error | ValueError):  # a path with a null character
                raise ConfigError(_message(path, "it cannot be opened", error)) from error
            raise

    def save(self, rows: Mapping[str, Sequence[Row]], sync: bool, dropped: Sequence[tuple[bytes, str]] = ()) -> None:
        """Writes rows in one commit.

        Args:
            rows: by kind: ``submitted`` (step, group, sample, key, time), ``answered`` (.., time, score, failed tries,
                JSON of the answer), ``failed`` (.., story, failed tries), ``collected`` (step, group, unix time).
            sync: whether to wait until this commit and all earlier ones are on disk.
            dropped: unreadable answers to be removed, so that new ones can be stored: key and text as returned by
                :meth:`of_step`.

        Raises:
            RunError: the rows cannot be written, or the file has been removed.
        """
        try:
            self._writer.execute(f"PRAGMA synchronous = {'FULL' if sync else 'NORMAL'}")
            with self._writer as db:
                db.execute("BEGIN IMMEDIATE")
                for key, answer in dropped:
                    db.execute(_DROP, (key, answer))
                for kind in KINDS:
                    self._insert(kind, rows[kind])
                if sync:  # an empty transaction would not be synced
                    db.execute("UPDATE run SET flushed = ? WHERE id = ?", (time.time(), self._run))
        except (OSError, sqlite3.Error) as error:
            raise RunError(_message(self.path, "it cannot be written", error)) from error
        # sqlite continues to write into a removed file.
        if _inode(self.path) != self._inode:
            raise RunError(f"reward ledger {self.path}: it was removed during the run; leave it there and run again.")

    def _insert(self, kind: str, rows: Sequence[Row]) -> None:
        into, conflict = _INSERTS[kind]
        if kind == "answered":
            rows = [(*row, _checksum(row[3], row[-1].encode())) for row in rows]
        for start in range(0, len(rows), _ROWS):
            part = rows[start : start + _ROWS]
            marks = ",".join([f"({self._run}{',?' * len(part[0])})"] * len(part))
            values = list(chain.from_iterable(part))
            self._writer.execute(f"INSERT INTO {into} VALUES {marks} ON CONFLICT DO {conflict}", values)

    def of_step(self, step: int | str, first: int, last: int) -> tuple[list[Found], list[Found]]:
        """Returns the answers of a step's groups ``first`` to ``last``, and those with a wrong checksum.

        Raises:
            RunError: the file cannot be read.
        """
        return _rows_of(self._query(_OF_STEP, (self._run, step, first, last))[0])

    def of_keys(self, keys: Iterable[bytes]) -> tuple[list[Found], list[Found]]:
        """Returns all runs' answers for some keys, oldest first, and those with a wrong checksum.

        Raises:
            RunError: the file cannot be read.
        """
        wanted, good, bad = list(set(keys)), [], []
        for start in range(0, len(wanted), _KEYS):
            part = wanted[start : start + _KEYS]
            found = _rows_of(self._query(_OF_KEYS.format(marks=",".join("?" * len(part))), part)[0])
            good += found[0]
            bad += found[1]
        return good, bad

    def totals(self) -> dict[str, int]:
        """Returns the numbers of the run's requests, by state, and of its collected groups.

        Raises:
            RunError: the file cannot be read.
        """
        return dict(zip(KINDS, self._query(_TOTALS, {"run": self._run}), strict=True))

    def spent(self) -> tuple[int, int, int]:
        """Returns how many of the run's answers state their tokens, these tokens, and the characters of the replies.

        Raises:
            RunError: the file cannot be read.
        """
        calls, tokens, reply = self._query(_SPENT, (self._run,))
        return int(calls), int(tokens), int(reply)

    def _query(self, statement: str, values: Any) -> Row:
        try:
            row: Row = self._reader.execute(statement, values).fetchone()
        except (OSError, sqlite3.Error) as error:
            raise RunError(_message(self.path, "it cannot be read", error)) from error
        return row

    def close(self) -> None:
        """Closes the file."""
        self._reader.close()
        self._writer.close()


def _rows_of(found: str | None) -> tuple[list[Found], list[Found]]:
    """Returns the intact rows, and the damaged rows with a known key."""
    good: list[Found] = []
    bad: list[Found] = []
    for line in (found or "").split(",") if found else ():
        group, sample, key, checksum, answer = line.split(" ")
        key_, text = bytes.fromhex(key), bytes.fromhex(answer)
        try:
            # Rows written by older versions have no checksum.
            whole = not checksum or int(bytes.fromhex(checksum)) == _checksum(key_, text)
            row = (int(bytes.fromhex(group)), int(bytes.fromhex(sample)), key_, answer)
        except ValueError:  # a column is not a number
            whole, row = False, (-1, -1, key_, answer)
        (good if whole else bad).append(row)
    return good, bad


def check_file(path: Path) -> None:
    """Checks that a ledger can be opened at a path, without creating or changing a file.

    Args:
        path: absolute.

    Raises:
        ConfigError: the file is not a ledger, or cannot be opened and written.
    """
    try:
        _check_kind(path)
        try:
            path.stat()  # unlike exists(), it raises if links lead in a circle
        except (FileNotFoundError, NotADirectoryError):
            if (why := unmakable(path.parent)) is not None:
                raise ConfigError(f"reward ledger {path}: {why}") from None
            return
        with closing(_connect(path)) as db:
            _check_ours(db, path)
        if not os.access(path, os.W_OK):
            raise PermissionError(EACCES, os.strerror(EACCES))
    except (OSError, sqlite3.Error, ValueError) as error:  # ValueError: a path with a null character
        raise ConfigError(_message(path, "it cannot be opened", error)) from error


def _check_kind(path: Path) -> None:
    if path.is_dir():
        raise ConfigError(f"reward ledger {path}: it is a directory; name a file.")
    if path.exists() and not path.is_file():
        raise ConfigError(f"reward ledger {path}: it is a device or a pipe; name a file.")


def _check_ours(db: sqlite3.Connection, path: Path) -> None:
    (application,) = db.execute("PRAGMA application_id").fetchone()
    (layout,) = db.execute("PRAGMA user_version").fetchone()
    (tables,) = db.execute("SELECT COUNT(*) FROM sqlite_schema").fetchone()
    if application != _OURS and (tables or layout):
        raise ConfigError(f"reward ledger {path}: it is another program's database; name another file.")
    if layout > _LAYOUT:
        newer = f"a newer version of dataflow wrote it (layout {layout}; this one supports {_LAYOUT})"
        raise ConfigError(f"reward ledger {path}: {newer}; update dataflow or name another file.")


def _connect(path: Path) -> sqlite3.Connection:
    # Statements differ by their number of rows, so a larger cache would only cost memory.
    return sqlite3.connect(path, _BUSY_S, isolation_level=None, check_same_thread=False, cached_statements=8)


def _inode(path: Path) -> int | None:
    try:
        return os.stat(path).st_ino
    except FileNotFoundError:
        return None


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Locks a directory while a ledger is opened: sqlite does not wait if two processes switch a file to WAL."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _wait_for(handle, directory)
        yield
    finally:
        os.close(handle)


def _wait_for(handle: int, directory: Path) -> None:
    """Waits for the lock in a thread, as flock has no time-out."""
    lock = threading.Thread(target=fcntl.flock, args=(handle, fcntl.LOCK_EX), daemon=True)
    lock.start()
    lock.join(_BUSY_S)
    if lock.is_alive():
        fix = "end the program that holds the lock (fuser -v lists those that have the directory open)"
        raise ConfigError(f"reward ledger: the directory {directory} is kept locked by another program; {fix}.")


def _prepare(db: sqlite3.Connection, path: Path) -> None:
    """Creates the tables, which also checks that the file can be written."""
    _check_ours(db, path)
    (mode,) = db.execute("PRAGMA journal_mode = WAL").fetchone()
    if mode != "wal":
        raise ConfigError(f"reward ledger {path}: its file system cannot share it; name a file on a local disk.")
    with db:
        db.execute("BEGIN IMMEDIATE")
        for statement in _SCHEMA:
            db.execute(statement)
        # Files of older versions, which can still use the file afterwards.
        known = {name for _, name, *_ in db.execute("PRAGMA table_info(request)")}
        for column in ("checksum INTEGER", "failed_tries TEXT"):
            if column.split()[0] not in known:
                db.execute(f"ALTER TABLE request ADD COLUMN {column}")


def _rename(db: sqlite3.Connection, run: str) -> None:
    """Gives the first run of a file this name, unless another one of the file, which reuses its answers, has it."""
    db.execute("UPDATE OR IGNORE run SET name = ? WHERE id = (SELECT MIN(id) FROM run)", (run,))


def _run_id(db: sqlite3.Connection, run: str) -> int:
    db.execute("INSERT INTO run (name) VALUES (?) ON CONFLICT DO NOTHING", (run,))
    row = db.execute("SELECT id FROM run WHERE name = ?", (run,)).fetchone()
    if row is None or type(row[0]) is not int:
        raise sqlite3.DatabaseError("the names of runs are lost")
    return row[0]


def _message(path: Path, what: str, error: Exception) -> str:
    return f"reward ledger {path}: {what} ({error}); {_fix_of(path, error)}."


def _fix_of(path: Path, error: Exception) -> str:
    if isinstance(error, PermissionError):
        return _FIXES["SQLITE_CANTOPEN"]
    if not isinstance(error, sqlite3.Error):
        return "make its directory writable, or name another"
    # Extended codes, such as SQLITE_READONLY_DIRECTORY, begin with the primary code.
    code = getattr(error, "sqlite_errorname", "")
    if code.startswith(_ACCESS) and path.is_file() and all(os.access(one, os.W_OK) for one in (path, path.parent)):
        # The permissions are fine, so the file's header or its companions forbid writing.
        return f"the file or its -wal or -shm is damaged or cannot be written; {_MOVE}"
    # Errors without a code, and wrong tables, count as damage.
    return next((text for name, text in _FIXES.items() if code.startswith(name)), _FIXES["SQLITE_CORRUPT"])
