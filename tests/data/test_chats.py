"""Token ids from a process without torch are those of this process, and so are its errors."""

import json
import os
import shutil
import signal
import sys
import threading
from pathlib import Path

import numpy as np
import psutil
import pytest
import transformers

from dataflow.config.run import RunConfig
from dataflow.data.chats import ChatProcess, Chats, Refused, chats_ahead
from dataflow.data.prompts import load_prompts, read_problems
from dataflow.data.tokenize import load_chat_tokenizer, prompt_ids
from dataflow.errors import ConfigError, DataError, ModelError
from dataflow.running.preparing.check import make_all
from dataflow.running.preparing.prompts import Prompts
from dataflow.running.reporting.progress import Progress
from tests.rigs.processes import commanded, left
from tests.rigs.thinking import THOUGHT, thinking_model

pytestmark = pytest.mark.heavy
CHATS = [[{"role": "user", "content": text}] for text in ("What is 3 + 4?", "é ✓", "")]
TOOL = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}


def tokenizers() -> list[psutil.Process]:
    return commanded("dataflow.data.chats")


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
        (process,) = tokenizers()
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


@pytest.mark.timeout(60)
def test_a_chat_that_cannot_be_sent_to_the_process_is_tokenized_here(tiny_qwen: Path) -> None:
    with ChatProcess(str(tiny_qwen)) as apart:
        found = apart.ids([*CHATS, [{"role": "user", "content": threading.Lock()}]])
    assert len(found) == len(CHATS) + 1
    assert lists(found[:-1]) == lists(Chats(load_chat_tokenizer(str(tiny_qwen))).ids(CHATS))


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


def test_a_tokenizer_is_loaded_while_the_data_is_read(
    tiny_qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    assert chats_ahead(None) is None
    assert chats_ahead(str(tmp_path / "nowhere")) is None
    data = {"train_size": 40, "val_size": 10, "prompts": 8}
    config = RunConfig.model_validate({"model": {"path": str(tiny_qwen)}, "data": data})
    begun = chats_ahead(str(tiny_qwen))
    assert begun is not None
    with begun as chats:
        (process,) = tokenizers()
        train, val = load_prompts(config, *read_problems(config.data), chats=chats)
        assert tokenizers() == [process], "the caller's process goes on, and there is no other"
    assert left([process], 20) == []
    tokenizer = load_chat_tokenizer(str(tiny_qwen))
    for source in (train, val):
        batch = source.all()
        assert list(batch["prompt_ids"]) == [prompt_ids(tokenizer, chat) for chat in batch["raw_prompt"]]


def test_the_options_of_the_template_are_those_of_the_run(
    tiny_qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    thinking = thinking_model(tiny_qwen, tmp_path / "model")

    def ends(**given: object) -> set[bool]:
        """Returns whether the prompts end with an empty thought, those of the held-out problems among them."""
        data = {"train_size": 40, "val_size": 10, "prompts": 8, "apply_chat_template_kwargs": given}
        config = RunConfig.model_validate({"model": {"path": str(thinking)}, "data": data})
        sources = load_prompts(config, *read_problems(config.data))
        prompts = [ids for source in sources for ids in source.all()["prompt_ids"]]
        return {text.endswith(f"<|im_start|>assistant\n{THOUGHT}") for text in tokenizer.batch_decode(prompts)}

    tokenizer = load_chat_tokenizer(str(thinking))
    monkeypatch.delitem(sys.modules, "transformers")  # so that a process of its own is asked
    assert ends() == {False}
    assert ends(enable_thinking=False) == {True}
    monkeypatch.setitem(sys.modules, "transformers", transformers)
    assert ends(enable_thinking=False) == {True}
    assert ends(enable_thinkin=False) == {False}
    with pytest.raises(ConfigError, match=r"data\.apply_chat_template_kwargs\.tokenize: the run itself says how"):
        ends(tokenize=False)


def test_the_tokenizers_process_ends_with_the_checks(
    tiny_qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    (tmp_path / "train.jsonl").write_text('{"question": "1 + 1?"}\n')
    data = {"train": str(tmp_path / "train.jsonl")}
    config = RunConfig.model_validate({"model": {"path": str(tiny_qwen)}, "data": data})
    with Prompts(config, (), Progress(quiet=True)) as prompts:
        with pytest.raises(DataError, match=r"line 1: the problem has no 'answer'"):
            make_all(prompts.checks())
        (process,) = tokenizers()
    assert left([process], 20) == []
