"""Token ids of chats, by a tokenizer in this process or in one of its own.

transformers imports torch for its tokenizers, which use nothing of it: 3 of 4.5 s of CPU and 330 of 400 MB. A process
without torch loads one in 1.3 s, beside the other work of the run's own process, which then needs neither.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any

import numpy as np

from dataflow.data.tokenize import encoded, load_chat_tokenizer, prompt_ids, texts_of
from dataflow.errors import UserError
from dataflow.system.children import command

Chat = list[dict[str, Any]]
_TOGETHER = 1024  # chats that are tokenized in one call, which uses all cores
_RENDERED = 64  # chats whose template runs before it may be stopped
_SENT = 4096  # chats of one message to the process


class Refused(Exception):
    """The chat template refuses a chat.

    Attributes:
        at: index of the chat.
        reason: type and message of the error.
    """

    def __init__(self, at: int, reason: str) -> None:
        super().__init__(at, reason)
        self.at, self.reason = at, reason


class Chats:
    """Turns chats into token ids.

    Args:
        tokenizer: with a chat template.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def longest_token(self) -> int:
        """Returns the characters of the longest token."""
        return max(map(len, self._tokenizer.get_vocab()), default=1)

    def ids(self, chats: Sequence[Chat], schemas: Sequence[Mapping[str, Any]] | None = None) -> list[np.ndarray]:
        """Returns the token ids of each chat, int32; see :func:`~dataflow.data.tokenize.prompt_ids`.

        Raises:
            Refused: the chat template refuses a chat.
        """
        found: list[np.ndarray] = []
        starts = range(0, len(chats), _TOGETHER)
        ended = threading.Event()
        # The template of the next chats runs while the tokenizer works without Python.
        with ThreadPoolExecutor(1) as beside:
            try:
                ahead = beside.submit(self._texts, chats[:_TOGETHER], schemas, ended)
                for at in starts:
                    texts = ahead.result()
                    ahead = beside.submit(self._texts, chats[at + _TOGETHER : at + 2 * _TOGETHER], schemas, ended)
                    piece = chats[at : at + _TOGETHER]
                    try:
                        ids = encoded(self._tokenizer, texts, prompt_ids(self._tokenizer, piece[0], schemas))
                    except Exception:  # one chat that the template refuses, or a tokenizer that takes one at a time
                        ids = self._one_by_one(piece, schemas, at)
                    found += [np.array(each, dtype=np.int32) for each in ids]
            finally:
                ended.set()  # an interrupt or a refused chat does not wait for the template of 1,024 others
        return found

    def _texts(
        self, chats: Sequence[Chat], schemas: Sequence[Mapping[str, Any]] | None, ended: threading.Event
    ) -> list[str]:
        """Returns the chats as texts; none if the chat template refuses one, or the others are not needed any more.

        A chat template is a program that comes with the model; it may refuse roles and raise any exception.
        """
        found: list[str] = []
        try:
            for at in range(0, len(chats), _RENDERED):
                if ended.is_set():
                    return []
                found += texts_of(self._tokenizer, chats[at : at + _RENDERED], schemas)
        except Exception:
            return []
        return found

    def _one_by_one(
        self, chats: Sequence[Chat], schemas: Sequence[Mapping[str, Any]] | None, before: int
    ) -> list[list[int]]:
        """Returns the token ids of each chat, or finds the one that is refused, counted from ``before`` on."""
        found = []
        for at, chat in enumerate(chats, before):
            try:
                found.append(prompt_ids(self._tokenizer, chat, schemas))
            except Exception as error:
                first = (str(error).strip().splitlines() or [type(error).__name__])[0]
                raise Refused(at, f"{type(error).__name__}: {first.rstrip('.')}") from error
        return found


class ChatProcess:
    """The same as :class:`Chats`, in a process that does not import torch; a context manager.

    Args:
        path: of the model's directory. Its tokenizer is loaded while this process goes on.
        options: of its chat template.
    """

    def __init__(self, path: str, options: Mapping[str, Any] | None = None) -> None:
        self._path, self._options = path, options
        self._process = subprocess.Popen(
            command(__name__, path),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # what goes wrong is raised again in this process
            start_new_session=True,  # Ctrl-C in a terminal ends the run, which ends this process
        )
        self._here: Chats | None = None
        with contextlib.suppress(OSError):  # a process that has ended is noticed at the first question
            self._ask("options", options)

    def __enter__(self) -> ChatProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def longest_token(self) -> int:
        """Returns the characters of the longest token.

        Raises:
            ModelError, ConfigError: see :func:`~dataflow.data.tokenize.load_chat_tokenizer`.
        """
        if self._here is None:
            with contextlib.suppress(OSError, EOFError, pickle.UnpicklingError):
                self._ask("longest_token")
                return int(self._answer())
            # One that needs torch, or none that can be loaded: this process finds out which.
            self._here = Chats(load_chat_tokenizer(self._path, self._options))
        return self._here.longest_token()

    def ids(self, chats: Sequence[Chat], schemas: Sequence[Mapping[str, Any]] | None = None) -> list[np.ndarray]:
        """Returns the token ids of each chat; see :meth:`Chats.ids`."""
        if self._here is None:
            with contextlib.suppress(OSError, EOFError, pickle.UnpicklingError):
                return self._from_process(chats, schemas)
            self._here = Chats(load_chat_tokenizer(self._path, self._options))
        return self._here.ids(chats, schemas)

    def _from_process(self, chats: Sequence[Chat], schemas: Sequence[Mapping[str, Any]] | None) -> list[np.ndarray]:
        """Returns the token ids of each chat from the process, which works while more is sent and read."""
        found: list[np.ndarray] = []
        refused: Refused | None = None
        starts = range(0, len(chats), _SENT)
        with ThreadPoolExecutor(1) as sending:
            sent = sending.submit(self._send_all, chats, schemas)
            for at in starts:
                answer = self._answer()
                if isinstance(answer, Refused):
                    refused = refused or Refused(at + answer.at, answer.reason)
                else:
                    flat, lengths = answer
                    ends = np.cumsum(lengths)
                    found += [flat[end - n : end] for n, end in zip(lengths.tolist(), ends.tolist(), strict=True)]
            sent.result()
        if refused is not None:
            raise refused
        return found

    def _send_all(self, chats: Sequence[Chat], schemas: Sequence[Mapping[str, Any]] | None) -> None:
        try:
            for at in range(0, len(chats), _SENT):
                self._ask("ids", list(chats[at : at + _SENT]), schemas)
        except BaseException:  # a chat cannot be pickled
            self._process.kill()  # so that nothing waits for its answer
            raise

    def _ask(self, method: str, *arguments: Any) -> None:
        assert self._process.stdin is not None
        _send(self._process.stdin, (method, arguments))

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        return pickle.load(self._process.stdout)


def chats_of(path: str, options: Mapping[str, Any] | None = None) -> Chats | ChatProcess:
    """Returns what turns chats into ids: in a process of its own unless transformers is imported here already.

    Raises:
        ModelError, ConfigError: see :func:`~dataflow.data.tokenize.load_chat_tokenizer`.
    """
    return Chats(load_chat_tokenizer(path, options)) if "transformers" in sys.modules else ChatProcess(path, options)


def chats_ahead(path: str | None, options: Mapping[str, Any] | None = None) -> ChatProcess | None:
    """Starts the process of a model's tokenizer before there are chats, so that both are loaded at the same time.

    Args:
        path, options: of a :class:`ChatProcess`.

    Returns:
        The process; None if ``path`` is no directory (yet), or transformers is imported here already.
    """
    if path is None or "transformers" in sys.modules or not os.path.isdir(directory := os.path.expanduser(path)):
        return None
    return ChatProcess(directory, options)


def _send(stream: IO[bytes], value: Any) -> None:
    pickle.dump(value, stream)
    stream.flush()


def main(path: str) -> None:
    """Answers :class:`ChatProcess` until its pipe is closed; ends at once if the tokenizer cannot be loaded."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asked, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer
    sys.modules["torch"] = None  # type: ignore[assignment]  # so that transformers does not find it
    try:
        _, (options,) = pickle.load(asked)
        chats = Chats(load_chat_tokenizer(path, options))
    except (EOFError, UserError):
        return
    while True:
        try:
            method, arguments = pickle.load(asked)
        except EOFError:
            return
        try:
            found = getattr(chats, method)(*arguments)
        except Refused as error:
            found = error
        if method == "ids" and not isinstance(found, Refused):
            lengths = np.array(list(map(len, found)), dtype=np.int64)
            found = np.concatenate([np.zeros(0, dtype=np.int32), *found]), lengths
        _send(answers, found)


if __name__ == "__main__":
    # By its own name, so that what it pickles has not that of __main__.
    from dataflow.data import chats

    chats.main(sys.argv[1])
