"""The prompts of a run: their order, columns, lengths, and hashes."""

import copy
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from loguru import logger

from dataflow.config.run import RunConfig
from dataflow.data.prompts import Problems, PromptSource, load_prompts, read_problems, truncate
from dataflow.data.rows import verl_rows
from dataflow.errors import ConfigError, DataError, ModelError
from dataflow.models.directory import Room
from dataflow.models.problems import generate
from dataflow.models.tiny import build_tokenizer
from dataflow.models.tokenizer import prompt_ids
from dataflow.tools import toolbox_of

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


def problems(given, name="problems"):
    labels = [f"{name}, row {at + 1}" for at in range(len(given))]
    return Problems(verl_rows(given, labels), labels, name)


def source(tokenizer, given=20, prompts=4, seed=0, **changes):
    data = {"max_prompt_length": 64, "truncation": "error", "filter_overlong_prompts": False, "shuffle": True}
    given = generate(given, 0, 0)[0] if isinstance(given, int) else given
    given = given if isinstance(given, Problems) else problems(given)
    return PromptSource(given, tokenizer, SimpleNamespace(**data | changes), seed, prompts)


def questions(batch):
    return [chat[0]["content"] for chat in batch["raw_prompt"]]


def test_a_batch_has_a_group_per_prompt_and_the_contracts_columns(tokenizer):
    batch = source(tokenizer).batch(1)
    assert batch.groups.tolist() == [0, 1, 2, 3]
    assert set(batch.names) == {"raw_prompt", "prompt_ids", "data_source", "ground_truth", "extra_info"}
    for row in range(4):
        chat = batch["raw_prompt"][row]
        assert chat == [{"role": "user", "content": batch["extra_info"][row]["question"]}]
        assert batch["prompt_ids"][row] == prompt_ids(tokenizer, chat)
        assert batch["extra_info"][row]["answer"].endswith(f"#### {batch['ground_truth'][row]}")
        assert batch["data_source"][row] == "dataflow/problems"


def test_the_order_is_verls_each_epoch_another_permutation_and_a_step_depends_on_its_number_alone(tokenizer):
    made = source(tokenizer, 10, seed=2**40 + 7)
    generator = torch.Generator().manual_seed(2**40 + 7)
    state = torch.get_rng_state()
    rows = [p["question"] for p in generate(10, 0, 0)[0]]
    epochs = [torch.randperm(10, generator=generator).tolist() for _ in range(3)]
    expected = [[rows[at] for at in epoch[begin : begin + 4]] for epoch in epochs for begin in (0, 4)]
    assert [questions(made.batch(step)) for step in range(1, 7)] == expected, "the odd last rows are dropped"
    for step in (5, 5, 2, 6, 1):
        assert questions(made.batch(step)) == expected[step - 1]
    assert torch.equal(torch.get_rng_state(), state)


def test_unshuffled_prompts_and_all_of_them_come_in_the_order_of_the_file(tokenizer):
    made = source(tokenizer, 10, shuffle=False)
    rows = [p["question"] for p in generate(10, 0, 0)[0]]
    assert questions(made.all()) == questions(made.all(1000)) == rows
    assert questions(made.all(7)) == rows[:7]
    assert [questions(made.batch(step)) for step in (1, 2, 3)] == [rows[:4], rows[4:8], rows[:4]]
    with pytest.raises(DataError, match=r"^problems: 3 prompts are fewer than the 4 of a step"):
        source(tokenizer, 3)


LONG = [
    {"question": "What is 3 + 4?", "answer": "#### 7"},
    {"question": "why " * 100, "answer": "#### 7"},
    {"question": "And now?", "answer": "#### 7"},
]


def test_a_long_prompt_is_an_error_with_its_label_and_the_fixes(tokenizer):
    with pytest.raises(DataError) as caught:
        source(tokenizer, LONG)
    assert re.match(r"problems, row 2: the prompt has \d{3} tokens, more than", str(caught.value))
    for part in ("max_prompt_length=64", "truncation=left|right|middle", "filter_overlong_prompts=true", "1 of 3"):
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_long_prompts_are_left_out_and_counted(tokenizer):
    said: list[str] = []
    sink = logger.add(said.append, format="{message}")
    made = source(tokenizer, LONG, 2, filter_overlong_prompts=True, shuffle=False)
    logger.remove(sink)
    assert said == ["problems: left out 1 of 3 prompts over 64 tokens\n"]
    assert questions(made.all()) == questions(made.batch(1)) == ["What is 3 + 4?", "And now?"]
    with pytest.raises(DataError, match=r"^problems: every prompt is longer than data.max_prompt_length=3"):
        source(tokenizer, LONG, filter_overlong_prompts=True, max_prompt_length=3)


@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_truncation_cuts_as_verl_does(tokenizer, side):
    from verl.utils.torch_functional import postprocess_data

    batch = source(tokenizer, max_prompt_length=15, truncation=side).all()
    assert list(batch["prompt_truncated"]) == [True] * 20
    for chat, ids in zip(batch["raw_prompt"], batch["prompt_ids"], strict=True):
        whole = torch.tensor([prompt_ids(tokenizer, chat)])
        expected, _ = postprocess_data(whole, torch.ones_like(whole), max_length=15, pad_token_id=0, truncation=side)
        assert ids == expected[0].tolist()
    assert truncate(np.array([1, 2, 3]), 1, side).tolist() in ([1], [3])


def test_a_prompt_and_its_response_fit_into_the_model_and_a_pass_of_the_trainer(tokenizer):
    made = source(tokenizer, LONG[:1], 1)
    long = made.longest
    made.check_fits(Room(long + 5, None), 5, long + 5)
    with pytest.raises(DataError, match=f"row 1: the prompt's {long} tokens and a response of up to 6 are more than"):
        made.check_fits(Room(long + 5, None), 6)
    with pytest.raises(ModelError, match="but the model has only 1 "):
        made.check_fits(Room(None, 1), 6)
    with pytest.raises(ConfigError, match=rf"^trainer.max_tokens_per_gpu=9: .* give at least {long + 6}\."):
        made.check_fits(Room(None, None), 6, 9)


def test_a_chat_that_the_template_refuses_is_named(tokenizer, monkeypatch):
    refuses = "{% if 'now' in messages[0].content %}{{ raise_exception('no user') }}{% endif %}x"
    monkeypatch.setattr(tokenizer, "chat_template", refuses)
    with pytest.raises(
        DataError, match=r"row 1: .* template cannot write this prompt, or one of the 2 after"
    ) as caught:
        source(tokenizer, LONG)
    assert "\n" not in str(caught.value)


def test_what_decides_a_batch_has_a_hash_and_what_does_not_has_none(tokenizer):
    given = problems(generate(20, 0, 0)[0])

    def digests(rows=given.rows, limit=None, tokenizer=tokenizer, **changes):
        part = given._replace(rows=rows, labels=given.labels[: len(rows)])
        return source(tokenizer, part, **changes).digests(limit)

    whole = digests()
    assert digests(copy.deepcopy(given.rows), seed=7) == whole
    assert digests(given.rows[::-1])[0] != whole[0], "the order counts"
    assert digests(given.rows[:19] + given.rows[:1], 19) == digests(limit=19) != whole, "as many as are evaluated"
    truth = copy.deepcopy(given.rows)
    truth[3]["reward_model"]["ground_truth"] = "other"
    content, tokens = digests(truth)
    assert (content != whole[0], tokens == whole[1]) == (True, True)
    other = copy.deepcopy(tokenizer)
    other.chat_template = other.chat_template.replace("user", "User") + " "
    content, tokens = digests(tokenizer=other)
    assert (content == whole[0], tokens != whole[1]) == (True, True)
    short = min(len(prompt_ids(tokenizer, row["prompt"])) for row in given.rows)
    assert digests(max_prompt_length=short + 2, filter_overlong_prompts=True)[0] != whole[0]


MIXED = [5, 2.5, "5", 2**70, True, [1, "a", {"b": []}], {"a": 1}, {"b": {"c": {}}}]
"""References that no column of one type can hold."""


def test_each_row_keeps_its_own_values_and_a_reader_changes_none(tokenizer, tmp_path):
    plain = {"data_source": "s", "prompt": [{"role": "user", "content": "?"}]}
    rows = [{**plain, "reward_model": {"ground_truth": t}, "extra_info": {"n": t, "": [t]}} for t in MIXED]
    (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows[:5]))
    (tmp_path / "b.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows[5:]))
    files = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    train, val = read_problems(SimpleNamespace(train=files, val=files[0], image_key="images"))
    assert (train.name, len(val.rows), train.labels[5]) == (", ".join(files), 5, f"{files[1]}, line 1")
    made = source(tokenizer, train, len(MIXED))
    expected = [truth if isinstance(truth, list | dict) else str(truth) for truth in MIXED]
    for batch in (made.all(), made.all()):
        assert list(batch["ground_truth"]) == expected
        assert [repr(extra) for extra in batch["extra_info"]] == [repr({"n": t, "": [t]}) for t in MIXED]
        batch["extra_info"][0]["n"] = batch["extra_info"][5][""][0][2]["b"] = "changed"


DESCRIBING = (
    "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}<|im_end|>{% endif %}"
    "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
)


def test_prompts_are_generated_and_measured_with_tools_as_they_will_be_asked(tokenizer, tmp_path):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = DESCRIBING
    tokenizer.save_pretrained(tmp_path / "model")
    data = {"train_size": 40, "val_size": 10, "prompts": 8, "max_prompt_length": 1000, "shuffle": False}
    sections = {"model": {"path": str(tmp_path / "model")}, "tools": {"names": ["calculator"]}}

    def load(**more):
        config = RunConfig.model_validate({**sections, "trainer": {"mini_batches": 1}, "data": {**data, **more}})
        return load_prompts(config, *read_problems(config.data), toolbox_of(config).schemas)

    train, val = load()
    assert (len(train), len(val), len(train.batch(1))) == (40, 10, 8)
    assert not set(questions(train.all())) & set(questions(val.all()))
    lengths = [len(ids) for ids in train.all()["prompt_ids"]]
    limit = sorted(lengths)[20]
    assert max(len(prompt_ids(tokenizer, chat)) for chat in train.all()["raw_prompt"]) < limit < max(lengths)
    with pytest.raises(DataError, match=rf"more than data\.max_prompt_length={limit} "):
        load(max_prompt_length=limit)
    batch = load(max_prompt_length=limit, truncation="left")[0].all()
    assert max(map(len, batch["prompt_ids"])) == limit
    assert list(batch["prompt_truncated"]) == [length > limit for length in lengths]
