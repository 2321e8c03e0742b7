"""The ledger: stores a run's reward requests and their answers in a file.

A run that is started again with the same name and file reuses the stored answers and requests only the others.

Invariants:

* An answer belongs to one request: run, step, group, sample and the hash of all that the reward gets. Another response
  for the same sample is another request.
* Callers never wait for the disk. One thread writes; a commit contains what arrived during the previous one and the
  following 20 ms, so a killed process loses at most that. Readers also see what is not written yet.
* A failure is stored with its story and is never an answer; nor is a score that cannot be trained on.
* An unreadable answer counts as absent and is requested again; a warning counts such answers.
* After a failed write every later call raises its error.
"""

from __future__ import annotations

import atexit
import json
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
from loguru import logger

from dataflow.errors import ConfigError, DataflowError, RunError, an
from dataflow.rewards.ledger.file import KINDS, Found, LedgerFile, Row, read_answer
from dataflow.rewards.ledger.key import Key, key_of
from dataflow.rewards.user.results import read_score

__all__ = ["Answer", "Key", "Ledger", "key_of"]

Step = int | str
_Item = tuple[str, list[Row]] | threading.Event | None

_DROPPED = "dropped"
_DEADLINE_S = 120.0
_GATHER_S = 0.02  # a commit takes more CPU time than ten answers
_FLAT = frozenset({str, int, float, bool, type(None)})


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a request.

    Attributes:
        score: as :func:`dataflow.rewards.user.results.read_score` returns it.
        extras: further columns. When read from the ledger, numpy scalars are Python numbers and tuples are lists.
        latency_s: duration of the request, in seconds.
        tries: number of tries, 1 or more.
    """

    score: float
    extras: dict[str, Any]
    latency_s: float
    tries: int


class Ledger:
    """The reward requests of one run and their answers; thread-safe.

    Several ledgers, also of other processes, may use one file. A record survives a killed process once it is committed,
    within milliseconds, and a power failure after the next :meth:`flush`. An open ledger is closed at interpreter exit.

    Args:
        path: of the sqlite file, on a local disk; it and its directories are created if missing.
        run: name of the run; requests of other runs are other requests.
        cache: whether to reuse the answers of all runs for the same key.
        own: whether the file is in the run's directory, see :class:`LedgerFile`.

    Raises:
        ConfigError: there is no run name, or the path is a directory, cannot be written, or is not a ledger of this
            or an older version.
    """

    def __init__(self, path: str | Path, run: str, *, cache: bool = False, own: bool = False) -> None:
        if not run:
            raise ConfigError(f"reward ledger {path}: the run has no name; give it one.")
        self.path = Path(path).expanduser().absolute()
        self._cache = cache
        self._file = LedgerFile(self.path, _text(run), own)
        self._queue: SimpleQueue[_Item] = SimpleQueue()
        self._unsaved: dict[Row, str] = {}
        self._unsaved_keys: dict[Key, str] = {}
        self._counts = dict.fromkeys((*KINDS, "reused", "unstored", "unreadable"), 0)
        self._lock, self._reading = threading.Lock(), threading.Lock()
        self._hurry = threading.Event()
        self._warned = 0  # unreadable answers that the warning has counted
        self._error: Exception | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._write, name="reward-ledger", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def submitted(self, step: Step, rows: Sequence[tuple[int, int, Key]]) -> dict[tuple[int, int], Answer]:
        """Records the requests of a step, and returns the answers that are stored already.

        Args:
            step: number or name.
            rows: (group, sample, key) of each request.

        Returns:
            The answers by (group, sample).

        Raises:
            RunError: the ledger cannot be read, or an earlier write failed.
            DataflowError: the ledger is closed.
        """
        self._check()
        step, now = _plain(step), time.time()
        self._put("submitted", [(step, int(group), int(sample), key, now) for group, sample, key in rows])
        # Unsaved answers first: those that are committed meanwhile are then found in the file.
        found = self._pending(step, rows)
        if len(found) < len(rows):
            with self._reading:
                found = self._kept(step, rows) | found
        with self._lock:
            self._counts["reused"] += len(found)
        return found

    def answered(self, step: Step, group: int, sample: int, key: Key, answer: Answer, failed_tries: str = "") -> None:
        """Records an answer, and why its earlier tries failed; does not wait for the disk.

        An answer whose extras JSON cannot represent is not stored, and a resumed run requests it again. Such answers
        are counted, and the first is logged.

        Raises:
            RunError: an earlier write failed.
            DataflowError: it is no score that a reward may return, or the ledger is closed.
        """
        self._check()
        try:
            score = read_score(answer.score)
        except ValueError as error:
            where = f"sample {sample} of group {group} of step {step}"
            raise DataflowError(
                f"reward ledger: score {error} of {where} is not an answer; record it with failed()."
            ) from error
        try:
            text = _encoded([score, answer.extras, float(answer.latency_s), int(answer.tries)])
        except (TypeError, ValueError, RecursionError) as error:
            self._unstored(answer, error)
            return
        step = _plain(step)
        self._unsaved[step, group, sample, key] = text
        if self._cache:
            self._unsaved_keys[key] = text
        self._put("answered", [(step, int(group), int(sample), key, time.time(), score, failed_tries or None, text)])

    def failed(self, step: Step, group: int, sample: int, key: Key, story: str, failed_tries: str = "") -> None:
        """Records how a request and its tries failed; a resumed run requests it again. Does not wait for the disk.

        Raises:
            RunError: an earlier write failed.
            DataflowError: the ledger is closed.
        """
        self._check()
        self._put("failed", [(_plain(step), int(group), int(sample), key, _text(story), failed_tries or None)])

    def collected(self, step: Step, groups: Sequence[int]) -> None:
        """Records that groups were collected; does not wait for the disk.

        Raises:
            RunError: an earlier write failed.
            DataflowError: the ledger is closed.
        """
        self._check()
        step, now = _plain(step), time.time()
        self._put("collected", [(step, int(group), now) for group in groups])

    def counts(self) -> dict[str, int]:
        """Returns the counts of this object.

        Returns:
            ``submitted``, ``answered`` and ``failed`` requests; ``collected`` groups; answers that were ``reused`` by
            :meth:`submitted`, could not be stored (``unstored``), could not be read (``unreadable``) or are not
            committed yet (``unsaved``).
        """
        return {**self._counts, "unsaved": len(self._unsaved)}

    def totals(self) -> dict[str, int]:
        """Returns ``submitted``, ``answered``, ``failed`` and ``collected`` of all the run's processes, from the file.

        An answered request does not count as failed. Reads all of the run's requests, so it is too slow for each step.

        Raises:
            RunError: the ledger cannot be read.
        """
        with self._reading:
            return self._file.totals()

    def spent(self) -> tuple[int, int, int]:
        """Returns what the run's answers in the file cost; see :meth:`LedgerFile.spent`.

        Raises:
            RunError: the ledger cannot be read.
        """
        with self._reading:
            return self._file.spent()

    def flush(self, deadline_s: float = _DEADLINE_S) -> None:
        """Waits until all earlier records are on disk.

        Raises:
            RunError: they could not be written, or not within ``deadline_s`` seconds.
            DataflowError: the ledger is closed.
        """
        self._check()
        done = threading.Event()
        with self._lock:
            self._send(done)
        self._hurry.set()
        if not done.wait(deadline_s):
            raise self._late(deadline_s)
        self._check()

    def close(self) -> None:
        """Flushes and ends the writer. Further calls have no effect.

        Raises:
            RunError: as in :meth:`flush`.
        """
        with self._lock:
            if self._closed:
                return
            self._send(None)
            self._closed = True
        self._hurry.set()
        atexit.unregister(self.close)
        if self._counts["unreadable"] > self._warned:
            self._warn_of_unreadable(self._counts["unreadable"])
        self._thread.join(_DEADLINE_S)
        if self._thread.is_alive():
            raise self._late(_DEADLINE_S)
        self._check()

    def _pending(self, step: Step, rows: Sequence[tuple[int, int, Key]]) -> dict[tuple[int, int], Answer]:
        """Returns the answers that are not committed yet."""
        found: dict[tuple[int, int], Answer] = {}
        if self._unsaved:
            for group, sample, key in rows:
                text = self._unsaved.get((step, group, sample, key)) or self._unsaved_keys.get(key)
                if text is not None:
                    found[group, sample] = Answer(*read_answer(text))
        return found

    def _kept(self, step: Step, rows: Sequence[tuple[int, int, Key]]) -> dict[tuple[int, int], Answer]:
        """Returns the answers in the file."""
        groups = [int(group) for group, _, _ in rows]
        wanted = set(rows)
        good, bad = self._file.of_step(step, min(groups), max(groups))
        keys = {key for _, _, key in rows}
        bad = [row for row in bad if row[2] in keys]
        found: dict[tuple[int, int], Answer] = {}
        for row in good:
            if row[:3] in wanted and (answer := self._read(row, bad)) is not None:
                found[row[:2]] = answer
        if self._cache and (missing := [row for row in rows if row[:2] not in found]):
            known, damaged = self._file.of_keys(key for _, _, key in missing)
            bad += damaged
            answers: dict[bytes, Answer] = {}
            for row in known:
                if row[2] not in answers and (answer := self._read(row, bad)) is not None:
                    answers[row[2]] = answer
            for group, sample, key in missing:
                if key in answers:
                    found[group, sample] = replace(answers[key], extras=dict(answers[key].extras))
        if bad:
            self._unreadable({(key, text) for _, _, key, text in bad})
        return found

    def _read(self, row: Found, bad: list[Found]) -> Answer | None:
        try:
            return Answer(*read_answer(bytes.fromhex(row[3])))
        except ValueError:
            bad.append(row)
            return None

    def _unreadable(self, rows: set[tuple[Key, str]]) -> None:
        """Counts unreadable answers and queues their removal, so that new ones can be stored."""
        with self._lock:
            first = not self._counts["unreadable"]
            self._counts["unreadable"] += len(rows)
            self._warned += len(rows) if first else 0
            self._send((_DROPPED, sorted(rows)))
        if first:
            self._warn_of_unreadable(len(rows))

    def _warn_of_unreadable(self, count: int) -> None:
        logger.warning(
            f"reward ledger {self.path}: unreadable answers, damaged or edited: {count}; they are requested again. "
            "Check what else writes into that file, and that its disk is in order."
        )

    def _put(self, kind: str, rows: list[Row]) -> None:
        with self._lock:
            self._send((kind, rows))
            self._counts[kind] += len(rows)

    def _send(self, item: _Item) -> None:
        """Queues an item for the writer. Requires the lock: nothing may follow the None that ends the writer."""
        if self._closed:
            raise DataflowError(f"reward ledger {self.path}: it is closed; close it after the last request.")
        self._queue.put(item)

    def _unstored(self, answer: Answer, error: Exception) -> None:
        with self._lock:
            self._counts["unstored"] += 1
            first = self._counts["unstored"] == 1
        if first:
            logger.warning(
                f"reward ledger {self.path}: an answer with the columns {', '.join(map(str, answer.extras))} is not "
                f"stored ({error}), so a resumed run requests it, and others like it, again; return numbers, strings, "
                "lists, and dicts with strings as keys."
            )

    def _check(self) -> None:
        if self._error is not None:
            raise RunError(str(self._error)) from self._error  # a new exception each time, as tracebacks would add up

    def _late(self, deadline_s: float) -> RunError:
        return RunError(
            f"reward ledger {self.path}: not written within {deadline_s:g} s; check what slows its disk down."
        )

    def _write(self) -> None:
        """Runs in the writer's thread: each commit contains what was queued since the last."""
        ended = False
        with closing(self._file):
            while not ended:
                batch = [self._queue.get()]
                self._hurry.wait(_GATHER_S)
                self._hurry.clear()
                batch += [self._queue.get() for _ in range(self._queue.qsize())]
                waiters = [item for item in batch if isinstance(item, threading.Event)]
                ended = None in batch
                try:
                    if self._error is None:
                        self._save([item for item in batch if isinstance(item, tuple)], sync=ended or bool(waiters))
                except Exception as error:  # later calls raise it
                    self._error = error
                for waiter in waiters:
                    waiter.set()

    def _save(self, batch: list[tuple[str, list[Row]]], sync: bool) -> None:
        rows: dict[str, list[Row]] = {kind: [] for kind in (*KINDS, _DROPPED)}
        for kind, some in batch:
            rows[kind] += some
        self._file.save(rows, sync, rows[_DROPPED])
        for row in rows["answered"]:
            self._unsaved.pop(row[:4], None)
            self._unsaved_keys.pop(row[3], None)


def _plain(step: Step) -> Step:
    return step if isinstance(step, str) else int(step)


def _text(text: str) -> str:
    """Returns a string without lone surrogates, which a broken reply may contain and sqlite rejects."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def _encoded(answer: list[Any]) -> str:
    """Returns the JSON text.

    Raises:
        TypeError, ValueError, RecursionError: JSON cannot represent it.
    """
    _check_keys(answer)
    return _JSON.encode(answer)


def _check_keys(parts: Any) -> None:
    """Raises TypeError for a key that JSON would silently convert to a string."""
    for part in parts:
        if type(part) in _FLAT:
            continue
        if isinstance(part, dict):
            if odd := [key for key in part if type(key) is not str and not isinstance(key, str)]:
                raise TypeError(f"a dict has the key {odd[0]!r}")
            _check_keys(part.values())
        elif isinstance(part, list | tuple):
            _check_keys(part)


def _number(value: Any) -> bool | int | float | str:
    number = value.item() if isinstance(value, np.generic) else value
    if not isinstance(number, bool | int | float | str):
        raise TypeError(f"JSON cannot represent {an(type(value).__name__)}")
    return number


_JSON = json.JSONEncoder(check_circular=False, default=_number)
