"""Token ids from a process without torch are those of this process, and so are its errors."""

import json
import os
import shutil
import signal
import threading
from pathlib import Path

import numpy as np
import pytest

from dataflow.data.chats import ChatProcess, Chats, Refused
from dataflow.data.tokenize import load_chat_tokenizer, prompt_ids
from dataflow.errors import ModelError
from tests.rigs.processes import below, command

pytestmark = pytest.mark.heavy
CHATS = [[{"role": "user", "content": text}] for text in ("What is 3 + 4?", "é ✓", "")]
TOOL = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}


def lists(ids: list[np.ndarray]) -> list[list[int]]:
    return [each.tolist() for each in ids]


def test_ids_are_the_same_as_in_this_process(tiny_qwen: Path) -> None:
    here = Chats(load_chat_tokenizer(str(tiny_qwen)))
    tokenizer = load_chat_tokenizer(str(tiny_qwen))
    for some in (CHATS, CHATS[:1]):  # texts in ASCII are not normalized
        assert lists(here.ids(some)) == [prompt_ids(tokenizer, chat) for chat in some]
        assert lists(here.ids(some * 1500)) == lists(here.ids(some)) * 1500
    with ChatProcess(str(tiny_qwen)) as apart:
        assert apart.longest_token() == here.longest_token()
        assert lists(apart.ids(CHATS)) == lists(here.ids(CHATS))
        assert lists(apart.ids(CHATS, [TOOL])) == lists(here.ids(CHATS, [TOOL]))
        assert apart.ids([]) == []
        (process,) = [each for each in below() if "dataflow.data.chats" in command(each)]
        os.kill(process.pid, signal.SIGKILL)
        assert lists(apart.ids(CHATS)) == lists(here.ids(CHATS))  # in this process then


def test_a_refused_chat_is_named(tiny_qwen: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny_qwen, tmp_path / "model")
    (model / "chat_template.jinja").unlink(missing_ok=True)
    file = model / "tokenizer_config.json"
    template = "{% if 'é' in messages[0]['content'] %}{{ raise_exception('no accents.') }}{% endif %}x"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": template}))
    with ChatProcess(str(model)) as apart, pytest.raises(Refused) as caught:
        apart.ids(CHATS)
    assert (caught.value.at, caught.value.reason) == (1, "TemplateError: no accents")


def test_a_tokenizer_that_cannot_be_loaded_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with ChatProcess(str(tmp_path)) as apart, pytest.raises(ModelError, match="no tokenizer can be loaded"):
        apart.longest_token()


class Slow:
    """A tokenizer whose template refuses the first chat."""

    def __init__(self) -> None:
        self.rendered = 0

    def apply_chat_template(self, chats: list, tokenize: bool, **_: object) -> list[str]:
        if tokenize:
            raise ValueError("no")
        self.rendered += len(chats)
        return ["x"] * len(chats)


def test_a_refused_chat_does_not_wait_for_the_template_of_the_next_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, refused = Slow(), threading.Event()
    render = tokenizer.apply_chat_template

    def gated(chats: list, tokenize: bool, **keys: object) -> list[str]:
        if tokenize:
            refused.set()
        elif tokenizer.rendered >= 1024:  # of the next piece, whose template is slow
            assert refused.wait(30)
        return render(chats, tokenize, **keys)

    monkeypatch.setattr(tokenizer, "apply_chat_template", gated)
    with pytest.raises(Refused):
        Chats(tokenizer).ids(CHATS[:1] * 5000)
    assert tokenizer.rendered < 2048
