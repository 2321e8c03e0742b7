"""The ledger's sqlite file: how it is made, read and written. What waits to be written is the ledger's business.

Invariants:

* Each question to sqlite is one statement with one row for an answer. At each step of a statement sqlite3 hands over
  the GIL, and beside busy reward threads it gets it back only after milliseconds: a row each would take seconds.
* A request's first answer stays. No failure replaces it.
* An answer carries a checksum of itself and its key. What does not fit, and whatever else is no answer, counts as
  absent: only :func:`read_answer` turns what the file holds into values.
* sqlite's own errors never leave this file: ConfigError while it is opened, RunError from then on.
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

_OURS, _LAYOUT = 0x64664C67, 1  # in the file's header: whose it is, and in which layout
_BUSY_S = 60.0
_ROWS, _KEYS = 2_000, 30_000  # of one statement: sqlite takes up to 32,766 values

_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS run (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, flushed REAL)",
    "CREATE TABLE IF NOT EXISTS request (run INTEGER, step, grp INTEGER, sample INTEGER, key BLOB, submitted REAL,"
    " answered REAL, score REAL, answer TEXT, story TEXT, checksum INTEGER,"
    " PRIMARY KEY (run, step, grp, sample, key)) WITHOUT ROWID",
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
        f"request ({_PLACE}, answered, score, answer, checksum)",
        "UPDATE SET answered = excluded.answered, score = excluded.score, answer = excluded.answer,"
        " checksum = excluded.checksum, story = NULL WHERE request.score IS NULL",
    ),
    "failed": (f"request ({_PLACE}, story)", "UPDATE SET story = excluded.story WHERE request.score IS NULL"),
    "collected": ("collected (run, step, grp, collected)", "NOTHING"),
}
KINDS = tuple(_INSERTS)

# In hexadecimal: whatever a damaged row holds, the others can be read.
_FOUND = "hex(grp) || ' ' || hex(sample) || ' ' || hex(key) || ' ' || hex(checksum) || ' ' || hex(answer)"
_OF_STEP = (
    f"SELECT group_concat({_FOUND}, ',')"
    " FROM request WHERE run = ? AND step = ? AND grp BETWEEN ? AND ? AND score IS NOT NULL"
)
# Runs without the cache may have answers of their own for one key; the oldest counts, each time.
_OF_KEYS = (
    f"SELECT group_concat({_FOUND}, ',') FROM"
    " (SELECT grp, sample, key, checksum, answer FROM request WHERE score IS NOT NULL AND key IN ({marks})"
    " ORDER BY answered)"
)
# Not one that another process has put in its place meanwhile.
_DROP = (
    "UPDATE request SET answered = NULL, score = NULL, answer = NULL, checksum = NULL"
    " WHERE key = ? AND score IS NOT NULL AND hex(answer) = ?"
)
_TOTALS = (
    "SELECT COUNT(*), COUNT(score), COUNT(story), (SELECT COUNT(*) FROM collected WHERE run = :run)"
    " FROM request WHERE run = :run"
)

_MOVE = "move it away, with its -wal and -shm, or name another"
_FIXES = {
    "SQLITE_NOTADB": "it is no sqlite file; name another",
    "SQLITE_CORRUPT": f"the file is damaged; {_MOVE}",
    "SQLITE_FULL": "free some disk space",
    "SQLITE_IOERR": "see that its disk has space and is in order",
    "SQLITE_BUSY": "another program keeps it locked; end that program",
    "SQLITE_LOCKED": "another program keeps it locked; end that program",
    "SQLITE_NOMEM": "free some memory",
    "SQLITE_READONLY": "make the file and its directory writable, or name another",
    "SQLITE_CANTOPEN": "make the file and its directory writable, or name another",
    "SQLITE_PERM": "make the file and its directory writable, or name another",
}
_ACCESS = ("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM")

Found = tuple[int, int, bytes, str]
"""Group, sample, key and answer, a JSON text in hexadecimal."""


def read_answer(text: str | bytes) -> tuple[float, dict[str, Any], float, int]:
    """Returns score, extras, seconds and tries of an answer, checked as what a reward function returns.

    Raises:
        ValueError: it is no answer.
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
    """One run's part of a ledger file. One thread may write while others, one at a time, read.

    Args:
        path: absolute; the file and its directories are made if they are not there.
        run: name.

    Raises:
        ConfigError: the file cannot be opened and written, or is none of ours.
    """

    def __init__(self, path: Path, run: str) -> None:
        self.path = path
        opened: list[sqlite3.Connection] = []
        try:
            _check_kind(path)
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
            if isinstance(error, OSError | sqlite3.Error | ValueError):  # a path with a null character
                raise ConfigError(_message(path, "it cannot be opened", error)) from error
            raise

    def save(self, rows: Mapping[str, Sequence[Row]], sync: bool, dropped: Sequence[tuple[bytes, str]] = ()) -> None:
        """Writes rows, by their kind, in one commit.

        Args:
            rows: ``submitted`` (step, group, sample, key, time), ``answered`` (.., time, score, JSON text of the
                answer), ``failed`` (.., story), ``collected`` (step, group, time); times are of ``time.time()``.
            sync: also wait until the disk has this commit and all before.
            dropped: answers that cannot be read, by key and text as :meth:`of_step` returned it: without them there
                is room for new ones.

        Raises:
            RunError: they could not be written, or the file is no longer there.
        """
        try:
            self._writer.execute(f"PRAGMA synchronous = {'FULL' if sync else 'NORMAL'}")
            with self._writer as db:
                db.execute("BEGIN IMMEDIATE")
                for key, answer in dropped:
                    db.execute(_DROP, (key, answer))
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
        if kind == "answered":
            rows = [(*row, _checksum(row[3], row[-1].encode())) for row in rows]
        for start in range(0, len(rows), _ROWS):
            part = rows[start : start + _ROWS]
            marks = ",".join([f"({self._run}{',?' * len(part[0])})"] * len(part))
            values = list(chain.from_iterable(part))
            self._writer.execute(f"INSERT INTO {into} VALUES {marks} ON CONFLICT DO {conflict}", values)

    def of_step(self, step: int | str, first: int, last: int) -> tuple[list[Found], list[Found]]:
        """Returns the answers of a step's groups first to last, and those whose checksum does not fit.

        Raises:
            RunError: the file cannot be read.
        """
        return _rows_of(self._ask(_OF_STEP, (self._run, step, first, last))[0])

    def of_keys(self, keys: Iterable[bytes]) -> tuple[list[Found], list[Found]]:
        """Returns the answers that any run has for some keys, oldest first, and those whose checksum does not fit.

        Raises:
            RunError: the file cannot be read.
        """
        wanted, good, bad = list(set(keys)), [], []
        for start in range(0, len(wanted), _KEYS):
            part = wanted[start : start + _KEYS]
            found = _rows_of(self._ask(_OF_KEYS.format(marks=",".join("?" * len(part))), part)[0])
            good += found[0]
            bad += found[1]
        return good, bad

    def totals(self) -> dict[str, int]:
        """Returns how many requests of the run the file has, how many of them in which state, and collected groups.

        Raises:
            RunError: the file cannot be read.
        """
        return dict(zip(KINDS, self._ask(_TOTALS, {"run": self._run}), strict=True))

    def _ask(self, question: str, values: Any) -> Row:
        try:
            row: Row = self._reader.execute(question, values).fetchone()
        except (OSError, sqlite3.Error) as error:
            raise RunError(_message(self.path, "it cannot be read", error)) from error
        return row

    def close(self) -> None:
        """Closes the file."""
        self._reader.close()
        self._writer.close()


def _rows_of(found: str | None) -> tuple[list[Found], list[Found]]:
    """Returns the rows that are whole, and those that are not and whose key is known."""
    good: list[Found] = []
    bad: list[Found] = []
    for line in (found or "").split(",") if found else ():
        group, sample, key, checksum, answer = line.split(" ")
        key_, text = bytes.fromhex(key), bytes.fromhex(answer)
        try:
            # A ledger of an older dataflow has no checksums.
            whole = not checksum or int(bytes.fromhex(checksum)) == _checksum(key_, text)
            row = (int(bytes.fromhex(group)), int(bytes.fromhex(sample)), key_, answer)
        except ValueError:  # what stands there is no number
            whole, row = False, (-1, -1, key_, answer)
        (good if whole else bad).append(row)
    return good, bad


def check_file(path: Path) -> None:
    """Checks that a ledger can be opened at a path, without making or changing a file there.

    Args:
        path: absolute.

    Raises:
        ConfigError: it is no ledger, or it cannot be opened and written.
    """
    try:
        _check_kind(path)
        if not path.exists():
            if (why := unmakable(path.parent)) is not None:
                raise ConfigError(f"reward ledger {path}: {why}")
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
    (owner,) = db.execute("PRAGMA application_id").fetchone()
    (layout,) = db.execute("PRAGMA user_version").fetchone()
    (tables,) = db.execute("SELECT COUNT(*) FROM sqlite_schema").fetchone()
    if owner != _OURS and (tables or layout):
        raise ConfigError(f"reward ledger {path}: it is another program's database; name another file.")
    if layout > _LAYOUT:
        newer = f"a newer dataflow made it (layout {layout}, this one knows {_LAYOUT})"
        raise ConfigError(f"reward ledger {path}: {newer}; update dataflow or name another file.")


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
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _wait_for(handle, directory)
        yield
    finally:
        os.close(handle)


def _wait_for(handle: int, directory: Path) -> None:
    """Waits for the lock, in a thread: flock knows no time-out."""
    lock = threading.Thread(target=fcntl.flock, args=(handle, fcntl.LOCK_EX), daemon=True)
    lock.start()
    lock.join(_BUSY_S)
    if lock.is_alive():
        fix = "end the program that holds the lock (fuser -v lists those that have the directory open)"
        raise ConfigError(f"reward ledger: the directory {directory} is kept locked by another program; {fix}.")


def _prepare(db: sqlite3.Connection, path: Path) -> None:
    """Sets the file up, which also shows that it can be written."""
    _check_ours(db, path)
    (mode,) = db.execute("PRAGMA journal_mode = WAL").fetchone()
    if mode != "wal":
        raise ConfigError(f"reward ledger {path}: its file system cannot share it; name a file on a local disk.")
    with db:
        db.execute("BEGIN IMMEDIATE")
        for statement in _SCHEMA:
            db.execute(statement)
        # Those of an older dataflow, which can go on with the file as before.
        if "checksum" not in {name for _, name, *_ in db.execute("PRAGMA table_info(request)")}:
            db.execute("ALTER TABLE request ADD COLUMN checksum INTEGER")


def _run_id(db: sqlite3.Connection, run: str) -> int:
    db.execute("INSERT INTO run (name) VALUES (?) ON CONFLICT DO NOTHING", (run,))
    row = db.execute("SELECT id FROM run WHERE name = ?", (run,)).fetchone()
    if row is None or type(row[0]) is not int:
        raise sqlite3.DatabaseError("it loses the names of runs")
    return row[0]


def _message(path: Path, what: str, error: Exception) -> str:
    return f"reward ledger {path}: {what} ({error}); {_fix_of(path, error)}."


def _fix_of(path: Path, error: Exception) -> str:
    if isinstance(error, PermissionError):
        return _FIXES["SQLITE_CANTOPEN"]
    if not isinstance(error, sqlite3.Error):
        return "make its directory writable, or name another"
    # Longer codes, such as SQLITE_READONLY_DIRECTORY, begin with the plain one.
    code = getattr(error, "sqlite_errorname", "")
    if code.startswith(_ACCESS) and path.is_file() and all(os.access(one, os.W_OK) for one in (path, path.parent)):
        # The file says of itself that it is not to be written, or its companions are not.
        return f"the file or its -wal or -shm is damaged or cannot be written; {_MOVE}"
    # What sqlite has no code for, and tables that do not fit, are damage, too.
    return next((text for name, text in _FIXES.items() if code.startswith(name)), _FIXES["SQLITE_CORRUPT"])
