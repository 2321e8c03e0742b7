"""Tiny reward models on disk, their scores by transformers, and what harms their servers while a run asks them."""

from __future__ import annotations

import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from dataflow.running.services.served_models import ServedModels
from tests.rigs.processes import below, command

SHAPE = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 96, "max_position_embeddings": 1024}
"""Heads are 32 wide, the least that vLLM's attention on CPU takes."""
WAIT_S = 200.0


def save_reward_model(tokenizer: Path, path: Path, kind: str = "classify", seed: int = 7) -> Path:
    """Writes a random Qwen2 with a head of one score, or a chat model.

    Args:
        tokenizer: directory of a model, whose tokenizer and configuration are taken.
        path: where to write it.
        kind: ``classify`` or ``chat``.
        seed: of its weights.
    """
    import torch
    from transformers import AutoConfig, Qwen2ForCausalLM, Qwen2ForSequenceClassification

    made: Any = Qwen2ForSequenceClassification if kind == "classify" else Qwen2ForCausalLM
    labels = {"num_labels": 1} if kind == "classify" else {}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made(AutoConfig.from_pretrained(tokenizer, **labels, **SHAPE)).save_pretrained(path)
    for file in tokenizer.iterdir():
        if "token" in file.name or file.suffix == ".jinja":
            shutil.copy(file, path)
    return path


def scores(path: Path, chats: Sequence[Sequence[dict[str, str]]]) -> list[float]:
    """Returns the scores of conversations by transformers itself, one at a time."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    found = []
    for chat in chats:
        ids = tokenizer.apply_chat_template(list(chat), tokenize=True, return_dict=True)["input_ids"]
        with torch.no_grad():
            found.append(float(model(torch.tensor([ids])).logits[0, 0]))
    return found


def servers(name: str, root: psutil.Process | None = None) -> dict[psutil.Process, int]:
    """Returns the processes that serve a model for a run, without their guards, and their ports."""
    found = {}
    for guard in below(root):
        words = command(guard)
        if "dataflow.system.guard" in words and name in words:
            found |= {child: int(words[words.index("--port") + 1]) for child in guard.children()[:1]}
    return found


def unread(port: int) -> bool:
    """Whether a request waits at a port whose server does not read it."""
    return any(row[3] == "01" and int(row[4].partition(":")[2], 16) > 0 for row in _sockets(port))


def _sockets(port: int) -> Iterator[list[str]]:
    """Yields the columns of /proc/net/tcp about sockets with this port at their own end."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        row = line.split()
        if int(row[1].partition(":")[2], 16) == port:
            yield row


class Harm:
    """Stops the servers of a model before the run's first request, and calls a function when each has got one.

    Args:
        name: of the model.
        act: gets the stopped servers.

    Attributes:
        done: set when the function has returned.
    """

    def __init__(self, name: str, act: Callable[[list[psutil.Process]], None]) -> None:
        self._model, self._act = name, act
        self.done = threading.Event()

    def arm(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Makes the next run of this process meet it."""
        ready = ServedModels.ready

        async def then_stop(served: ServedModels) -> None:
            await ready(served)
            there = servers(self._model)
            for server in there:
                server.send_signal(signal.SIGSTOP)
            threading.Thread(target=self._harm, args=[there], daemon=True).start()

        monkeypatch.setattr(ServedModels, "ready", then_stop)

    def _harm(self, there: dict[psutil.Process, int]) -> None:
        end = time.monotonic() + WAIT_S
        # The kernel tells nobody that bytes have come for a process that is stopped.
        while not all(unread(port) for port in there.values()):
            assert time.monotonic() < end, "no request came"
            time.sleep(0.01)
        self._act(list(there))
        self.done.set()
