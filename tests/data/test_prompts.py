"""Reading problems: GSM8K's JSONL, verl's parquet, generated ones; an invalid file or row gives one sentence."""

import copy
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from loguru import logger

from dataflow.config.run import RunConfig, TrainerConfig
from dataflow.config.tools import ToolsConfig
from dataflow.data.prompts import (
    PromptSource,
    load_prompts,
    read_problems,
)
from dataflow.data.rows import load_rows, verl_rows
from dataflow.data.tokenize import load_chat_tokenizer, prompt_ids, tokenizer_sha256, truncate
from dataflow.errors import ConfigError, DataError, ModelError
from dataflow.models.directory import Room
from dataflow.models.problems import generate
from dataflow.models.tiny import build_tokenizer
from dataflow.tools import toolbox_of

pytestmark = pytest.mark.heavy

GSM8K = Path(__file__).parents[2].parent / "shared" / "data" / "gsm8k"
GOOD = {"question": "What is 3 + 4?", "answer": "It is 3 + 4 = 7.\n#### 7"}


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def options(**changes):
    plain = {
        "image_key": "images",
        "max_prompt_length": 64,
        "truncation": "error",
        "filter_overlong_prompts": False,
        "shuffle": True,
        "apply_chat_template_kwargs": {},
    }
    return SimpleNamespace(**plain | changes)


def test_what_decides_a_batch_has_a_hash_and_what_does_not_has_none(tokenizer, tmp_path):
    rows = verl_rows(generate(20, 0, 0)[0], "problems")

    def digests(rows, limit=None, tokenizer=tokenizer, **changes):
        return PromptSource(rows, tokenizer, options(**changes), 0, 4).digests(limit)

    whole = digests(rows)
    assert digests(copy.deepcopy(rows), seed=7) == whole
    assert digests(rows[::-1])[0] != whole[0], "the order counts"
    assert digests(rows[:19]) != whole
    assert digests(rows[:19] + rows[:1], 19) == digests(rows, 19), "as many as are evaluated"
    truth = copy.deepcopy(rows)
    truth[3]["reward_model"]["ground_truth"] = "other"
    content, tokens = digests(truth)
    assert (content != whole[0], tokens == whole[1]) == (True, True)
    other = copy.deepcopy(tokenizer)
    other.chat_template = other.chat_template.replace("user", "User") + " "
    content, tokens = digests(rows, tokenizer=other)
    assert (content == whole[0], tokens != whole[1]) == (True, True)
    short = min(len(prompt_ids(tokenizer, row["prompt"])) for row in rows)
    filtered = digests(rows, max_prompt_length=short + 2, filter_overlong_prompts=True)
    assert filtered[0] != whole[0], "rows that are left out are none"


def test_the_tokenizers_files_have_a_hash(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    before = tokenizer_sha256(str(tmp_path))
    (tmp_path / "README.md").write_text("read me")
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    assert tokenizer_sha256(str(tmp_path)) == before
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert tokenizer_sha256(str(tmp_path)) != before


def source(tokenizer, count=20, prompts=4, seed=0, **changes):
    rows = verl_rows(generate(count, 0, 0)[0], "problems")
    return PromptSource(rows, tokenizer, options(**changes), seed, prompts, "problems")


def jsonl(path, *lines):
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return path


def questions(batch):
    return [chat[0]["content"] for chat in batch["raw_prompt"]]


def test_a_batch_has_a_group_per_prompt_and_the_contracts_columns(tokenizer):
    batch = source(tokenizer).batch(1)
    assert batch.groups.tolist() == [0, 1, 2, 3]
    assert set(batch.names) == {"raw_prompt", "prompt_ids", "data_source", "ground_truth", "extra_info"}
    for row in range(4):
        chat = batch["raw_prompt"][row]
        assert chat == [{"role": "user", "content": batch["extra_info"][row]["question"]}]
        ids = batch["prompt_ids"][row]
        assert isinstance(ids, list)
        assert tokenizer.decode(ids) == tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        assert batch["extra_info"][row]["answer"].endswith(f"#### {batch['ground_truth'][row]}")
        assert batch["data_source"][row] == "dataflow/problems"


def test_the_order_is_the_seeds_and_each_epoch_is_another_permutation(tokenizer):
    one, two, other = source(tokenizer), source(tokenizer), source(tokenizer, seed=1)
    steps = [questions(one.batch(step)) for step in range(1, 16)]

    assert steps == [questions(two.batch(step)) for step in range(1, 16)]
    assert steps != [questions(other.batch(step)) for step in range(1, 16)]
    epochs = [[q for step in steps[at : at + 5] for q in step] for at in (0, 5, 10)]
    assert all(len(set(epoch)) == 20 for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_a_batch_depends_on_its_step_alone(tokenizer):
    straight, jumping = source(tokenizer), source(tokenizer)
    steps = {step: questions(straight.batch(step)) for step in range(1, 14)}
    for step in (9, 9, 10, 3, 13, 1, 1, 2, 7):
        assert questions(jumping.batch(step)) == steps[step]
    jumping.all(3)
    assert questions(jumping.batch(8)) == steps[8]
    with pytest.raises(DataError, match="steps count from 1, there is no step 0"):
        jumping.batch(0)


def test_torchs_global_generator_is_neither_read_nor_moved(tokenizer):
    import torch

    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = source(tokenizer)
    one = [questions(first.batch(step)) for step in range(1, 8)]
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    again = source(tokenizer)
    assert [questions(again.batch(step)) for step in range(1, 8)] == one


def test_unshuffled_prompts_come_in_order_and_odd_last_rows_are_dropped(tokenizer):
    made = source(tokenizer, count=10, shuffle=False)
    whole = questions(made.all())
    assert len(made) == len(whole) == 10
    assert questions(made.batch(1)) + questions(made.batch(2)) == whole[:8]
    assert questions(made.batch(3)) == whole[:4]


def test_all_takes_the_first_rows_in_order(tokenizer):
    made = source(tokenizer)
    expected = [p["question"] for p in generate(20, 0, 0)[0]]
    assert questions(made.all(7)) == expected[:7]
    assert made.all(7).groups.tolist() == list(range(7))
    assert questions(made.all(1000)) == questions(made.all()) == expected


def test_reading_prints_nothing(tokenizer, capfd):
    source(tokenizer).batch(1)
    assert capfd.readouterr().out == ""


def test_fewer_rows_than_a_step_takes(tokenizer):
    with pytest.raises(DataError, match=r"^problems: 3 prompts are fewer than the 4 of a step"):
        source(tokenizer, count=3)


def test_a_long_prompt_is_an_error_with_its_line_and_the_fixes(tokenizer, tmp_path):
    file = jsonl(tmp_path / "x.jsonl", GOOD, "\n", {**GOOD, "question": "why " * 100})
    rows, labels = load_rows(file)
    with pytest.raises(DataError) as caught:
        PromptSource(rows, tokenizer, options(), 0, 1, str(file), labels)
    assert re.match(rf"{re.escape(str(file))}, line 3: the prompt has \d{{3}} tokens", str(caught.value))
    for part in ("max_prompt_length=64", "truncation=left|right|middle", "filter_overlong_prompts=true"):
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_truncation_cuts_as_verl_does(tokenizer, side):
    import torch
    from verl.utils.torch_functional import postprocess_data

    made = source(tokenizer, max_prompt_length=15, truncation=side)
    for chat, ids in zip(made.all()["raw_prompt"], made.all()["prompt_ids"], strict=True):
        whole = prompt_ids(tokenizer, chat)
        assert len(whole) > 15
        tensor = torch.tensor([whole])
        expected, _ = postprocess_data(tensor, torch.ones_like(tensor), max_length=15, pad_token_id=0, truncation=side)
        assert ids == expected[0].tolist()
    assert truncate([1, 2, 3], 1, side) in ([1], [3])


def test_long_prompts_are_left_out_and_counted(tokenizer):
    rows = verl_rows([GOOD, {**GOOD, "question": "why " * 100}, {**GOOD, "question": "And now?"}], "mine")
    said: list[str] = []
    sink = logger.add(said.append, format="{message}")
    made = PromptSource(rows, tokenizer, options(filter_overlong_prompts=True, shuffle=False), 0, 2, "mine")
    logger.remove(sink)
    assert said == ["mine: left out 1 of 3 prompts over 64 tokens\n"]
    assert len(made) == 2
    assert questions(made.all()) == questions(made.batch(1)) == ["What is 3 + 4?", "And now?"]
    short = options(filter_overlong_prompts=True, max_prompt_length=3)
    with pytest.raises(DataError, match=r"^mine: every prompt is longer than data.max_prompt_length=3"):
        PromptSource(rows, tokenizer, short, 0, 1, "mine")


def test_jsonl_becomes_verls_rows(tmp_path):
    other = {"question": "How much?", "answer": "#### 5 of 7\nNo:\n#### $1,200.50"}
    rows, labels = load_rows(jsonl(tmp_path / "train.jsonl", GOOD, "\n", other))
    assert rows[0] == {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "What is 3 + 4?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "7"},
        "extra_info": {"index": 0, "question": GOOD["question"], "answer": GOOD["answer"]},
    }
    assert rows[1]["reward_model"]["ground_truth"] == "1200.5"
    assert labels == [f"{tmp_path}/train.jsonl, line 1", f"{tmp_path}/train.jsonl, line 3"]


BAD_LINES = {
    "{'question': 1}\n": "this is not JSON",
    '{"question": "half\n': "this is not JSON",
    "[1, 2]\n": "this is not a JSON object",
    '{"answer": "#### 1"}\n': "the problem has no 'question'",
    '{"question": "1?"}\n': "the problem has no 'answer'",
    '{"question": " ", "answer": "#### 1"}\n': "the problem has no 'question'",
    '{"question": "1?", "answer": 1}\n': "the problem has no 'answer'",
    '{"question": "1?", "answer": "it is 1"}\n': "the answer has no '####'",
    '{"question": "1?", "answer": "#### one"}\n': "the answer has no number behind its last '####'",
}


@pytest.mark.parametrize("line", BAD_LINES)
def test_a_bad_line_is_named(line, tmp_path):
    file = jsonl(tmp_path / "x.jsonl", GOOD, line)
    with pytest.raises(DataError, match=f"^{re.escape(str(file))}, line 2: {re.escape(BAD_LINES[line])}") as e:
        load_rows(file)
    assert "\n" not in str(e.value)


def test_a_bad_file_is_named(tmp_path):
    (tmp_path / "bytes.jsonl").write_bytes(b'{"question": "\xff\xfe"}\n')
    (tmp_path / "empty.jsonl").write_text("\n\n")
    (tmp_path / "text.parquet").write_text("no parquet")
    (tmp_path / "x.csv").write_text("question,answer\n")
    (tmp_path / "folder.jsonl").mkdir()
    for name, message in {
        "none.jsonl": "there is no such file",
        "none.parquet": "there is no such file",
        "folder.jsonl": "it is a directory",
        "x.csv": "unknown kind of data file; give a .jsonl or a .parquet file",
        "bytes.jsonl": "it is not UTF-8 text",
        "empty.jsonl": "the file is empty",
        "text.parquet": "this is not a readable parquet file",
    }.items():
        with pytest.raises(DataError, match=f"^{re.escape(str(tmp_path / name))}(, line 1)?: {message}") as caught:
            load_rows(tmp_path / name)
        assert "\n" not in str(caught.value)


def parquet(path, *rows):
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "What is 3 + 4?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "7"},
    "extra_info": {"split": "train", "index": 0},
}


def test_verls_parquet_is_read_as_it_is(tokenizer, tmp_path):
    more = {**VERL, "extra_info": {"index": 1, "level": "hard"}}
    rows, labels = load_rows(parquet(tmp_path / "x.parquet", VERL, more))
    batch = PromptSource(rows, tokenizer, options(shuffle=False), 0, 2, "x", labels).batch(1)
    assert batch["raw_prompt"][0] == VERL["prompt"]
    assert list(batch["ground_truth"]) == ["7", "7"]
    assert list(batch["extra_info"]) == [{"split": "train", "index": 0}, {"index": 1, "level": "hard"}]
    assert tokenizer.decode(batch["prompt_ids"][0]).startswith("<|im_start|>system\nBe short.<|im_end|>")


def test_parquet_without_extra_info_or_with_numbers_as_truth_will_do(tokenizer, tmp_path):
    row = {k: v for k, v in VERL.items() if k not in ("extra_info", "ability")}
    row["reward_model"] = {"ground_truth": 7}
    rows, labels = load_rows(parquet(tmp_path / "x.parquet", row))
    batch = PromptSource(rows, tokenizer, options(), 0, 1, "x", labels).batch(1)
    assert (list(batch["ground_truth"]), list(batch["extra_info"])) == (["7"], [{}])


@pytest.mark.parametrize(
    ("truths", "given"),
    [
        (["7", "8"], ["7", "8"]),
        ([["7", "seven"], ["8"]], [["7", "seven"], ["8"]]),
        ([["7"], ["8"]], [["7"], ["8"]]),
        ([{"target": ["7"]}, {"other": 1.5}], [{"target": ["7"]}, {"other": 1.5}]),
        ([7, 8], ["7", "8"]),
    ],
)
def test_a_reference_of_several_answers_is_given_as_in_verl(truths, given, tokenizer, tmp_path):
    """As text it would be wrong without an error: "4" is in "['24']"."""
    rows, labels = load_rows(
        parquet(tmp_path / "x.parquet", *({**VERL, "reward_model": {"ground_truth": truth}} for truth in truths))
    )
    batch = PromptSource(rows, tokenizer, options(shuffle=False), 0, 2, "x", labels).batch(1)
    assert list(batch["ground_truth"]) == given


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": "What is 3 + 4?"}, "'prompt' is not a list of chat messages"),
        ({"prompt": []}, "'prompt' is not a list of chat messages"),
        ({"prompt": [{"role": "user", "content": None}]}, "'prompt' is not a list of chat messages"),
        ({"prompt": [{"text": "3?"}]}, "'prompt' is not a list of chat messages"),
        ({"prompt": [{"role": 5, "content": "3?"}]}, "'prompt' is not a list of chat messages"),
        ({"extra_info": "x"}, "'extra_info' is not a mapping"),
        ({"extra_info": [1]}, "'extra_info' is not a mapping"),
        ({"reward_model": {"style": "rule"}}, "'reward_model' has no 'ground_truth'"),
        ({"reward_model": None}, "'reward_model' has no 'ground_truth'"),
        ({"data_source": None}, "'data_source' is not text"),
    ],
)
def test_a_bad_parquet_row_is_named(change, message, tmp_path):
    file = parquet(tmp_path / "x.parquet", {**VERL, **change})
    with pytest.raises(DataError, match=f"^{re.escape(str(file))}, row 1: {message}"):
        load_rows(file)


@pytest.mark.parametrize("column", ["data_source", "prompt", "reward_model"])
def test_a_missing_parquet_column_is_named(column, tmp_path):
    file = parquet(tmp_path / "x.parquet", {k: v for k, v in VERL.items() if k != column})
    with pytest.raises(DataError, match=f"^{re.escape(str(file))}: there is no column '{column}'"):
        load_rows(file)


def test_an_empty_parquet_is_an_error(tmp_path):
    pq.write_table(pa.Table.from_pylist([VERL]).slice(0, 0), tmp_path / "x.parquet")
    with pytest.raises(DataError, match="the file is empty"):
        load_rows(tmp_path / "x.parquet")


MIXED = [5, 2.5, "5", 2**70, True, [1, "a", {"b": []}], {"a": 1}, {"b": {"c": {}}}]
"""References that no column of one type can hold."""


def test_several_files_are_one(tokenizer, tmp_path):
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for file, first in zip(files, (0, 3), strict=True):
        rows = [{"question": f"{n}?", "answer": f"#### {n}"} for n in range(first, first + 3)]
        file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    data = options(train=[str(file) for file in files], val=str(files[0]))
    train, val = read_problems(data)
    assert [row["reward_model"]["ground_truth"] for row in train.rows] == [str(n) for n in range(6)]
    assert (len(val.rows), train.name) == (3, f"{files[0]}, {files[1]}")
    assert str(files[1]) in train.labels[3] or "b.jsonl" in train.labels[3]
    with pytest.raises(DataError, match="nowhere"):
        read_problems(options(train=[str(files[0]), "nowhere.jsonl"], val=str(files[0])))


def test_each_row_keeps_its_own_values(tokenizer, tmp_path):
    rows = [
        {**VERL, "reward_model": {"ground_truth": truth}, "extra_info": {"n": truth, "": [truth]}} for truth in MIXED
    ]
    file = tmp_path / "mixed.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    data = options(train=str(file), val=str(file), val_size=100)
    train, _val = (PromptSource(part.rows, tokenizer, data, 0, len(MIXED), part.name) for part in read_problems(data))
    held = train.all()
    expected = [truth if isinstance(truth, list | dict) else str(truth) for truth in MIXED]
    assert list(held["ground_truth"]) == expected
    assert [repr(extra) for extra in held["extra_info"]] == [repr({"n": truth, "": [truth]}) for truth in MIXED]
    drawn = train.batch(1)
    assert sorted(map(repr, drawn["ground_truth"])) == sorted(map(repr, expected))
    drawn["extra_info"][0]["n"] = held["extra_info"][5][""][0][2]["b"] = "changed"
    again = train.all()
    assert list(again["ground_truth"]) == expected
    assert [repr(extra) for extra in again["extra_info"]] == [repr({"n": truth, "": [truth]}) for truth in MIXED]


HALF = "a\ud800"


@pytest.mark.parametrize(
    "change",
    [
        {"data_source": HALF},
        {"reward_model": {"ground_truth": HALF}},
        {"reward_model": {"ground_truth": [{"a": [HALF]}]}},
        {"extra_info": {"a": {"b": HALF}}},
        {"extra_info": {HALF: 1}},
    ],
)
def test_half_a_surrogate_pair_is_refused_anywhere(change, tmp_path):
    file = tmp_path / "x.jsonl"
    file.write_text(json.dumps({**VERL, **change}))
    with pytest.raises(DataError, match=r"line 1: character 2 of a text is half a surrogate pair \(\\ud800\)"):
        load_rows(file)


def test_load_prompts_generates_or_reads(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path / "model")
    data = options(train=None, val=None, prompts=8, train_size=40, val_size=10)
    model = SimpleNamespace(path=str(tmp_path / "model"))
    plain = {"extra_groups": 0, "tools": ToolsConfig(), "trainer": TrainerConfig(), "response_length": 8}
    config = SimpleNamespace(data=data, seed=3, model=model, **plain)
    train, val = load_prompts(config, *read_problems(config.data))
    assert (len(train), len(val), len(train.batch(1))) == (40, 10, 8)
    assert not set(questions(train.all())) & set(questions(val.all()))
    data.val = str(jsonl(tmp_path / "val.jsonl", GOOD))
    _, val = load_prompts(config, *read_problems(config.data))
    assert questions(val.all()) == ["What is 3 + 4?"]


DESCRIBING = (
    "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}<|im_end|>{% endif %}"
    "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
)


@pytest.mark.parametrize("how", ["error", "left", "filter"])
def test_with_tools_a_prompt_is_measured_and_cut_as_it_will_be_asked(tokenizer, tmp_path, how):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = DESCRIBING
    tokenizer.save_pretrained(tmp_path / "model")
    data = {"train_size": 40, "val_size": 10, "prompts": 8, "max_prompt_length": 1000, "shuffle": False}
    sections = {"model": {"path": str(tmp_path / "model")}, "tools": {"names": ["calculator"]}}
    sections["trainer"] = {"mini_batches": 1}

    def load(**more):
        config = RunConfig.model_validate({**sections, "data": {**data, **more}})
        box = toolbox_of(config)
        return load_prompts(config, *read_problems(config.data), box.schemas)[0], box

    whole, box = load()
    lengths = [len(ids) for ids in whole.all()["prompt_ids"]]
    bare = [len(prompt_ids(tokenizer, chat)) for chat in whole.all()["raw_prompt"]]
    limit = sorted(lengths)[len(lengths) // 2]
    assert max(bare) < limit < max(lengths), "without the tools all fit"
    if how == "error":
        with pytest.raises(DataError, match=rf"more than data\.max_prompt_length={limit} .*; raise it"):
            load(max_prompt_length=limit)
        return
    cut, _ = load(max_prompt_length=limit, truncation="left", filter_overlong_prompts=how == "filter")
    batch = cut.all()
    assert max(map(len, batch["prompt_ids"])) == limit
    assert len(cut) == (len([n for n in lengths if n <= limit]) if how == "filter" else 40)
    short = [length <= limit for length in lengths]
    assert how == "filter" or list(batch["prompt_truncated"]) == [not fits for fits in short]
    assert ("prompt_truncated" in batch) == (how != "filter")
    told = box.ready(batch, limit)
    assert list(told["prompt_ids"]) == list(batch["prompt_ids"]), "what was measured is what is asked"


def test_a_tokenizer_that_cannot_be_used_is_one_sentence(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path / "plain")
    (tmp_path / "plain" / "chat_template.jinja").unlink()
    with pytest.raises(ModelError, match="has no chat template"):
        load_chat_tokenizer(str(tmp_path / "plain"))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{}")
    (tmp_path / "broken" / "config.json").write_text('{"model_type": "qwen2"}')
    with pytest.raises(ModelError, match="no tokenizer can be loaded") as caught:
        load_chat_tokenizer(str(tmp_path / "broken"))
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(not GSM8K.is_dir(), reason="GSM8K is not beside this checkout")
def test_gsm8k_is_read_whole(tokenizer):
    rows, labels = load_rows(GSM8K / "test.jsonl")
    assert len(rows) == len(labels) == 1319
    made = PromptSource(rows, tokenizer, options(max_prompt_length=1024), 0, 32, "gsm8k", labels)
    assert len({q for step in range(1, 42) for q in questions(made.batch(step))}) == 41 * 32
    assert list(made.all(2)["ground_truth"]) == ["18", "3"]


def test_a_prompt_of_a_million_characters_is_refused_without_being_tokenized(tokenizer, tmp_path, monkeypatch):
    file = jsonl(tmp_path / "x.jsonl", GOOD, {**GOOD, "question": "many " * 200_000})
    rows, labels = load_rows(file)
    whole = type(tokenizer).apply_chat_template

    def render(self, chat, **options):
        assert len(chat[0]["content"]) < 1000, "it is tokenized"
        return whole(self, chat, **options)

    monkeypatch.setattr(type(tokenizer), "apply_chat_template", render)
    with pytest.raises(DataError, match=r"line 2: the prompt has over \d+ tokens, more than data.max_prompt_length="):
        PromptSource(rows, tokenizer, options(), 0, 1, "x", labels)
    assert len(PromptSource(rows, tokenizer, options(filter_overlong_prompts=True), 0, 1, "x", labels)) == 1


def test_a_prompt_and_its_response_fit_into_the_model(tokenizer, tmp_path):
    rows, labels = load_rows(jsonl(tmp_path / "x.jsonl", GOOD))
    long = len(prompt_ids(tokenizer, rows[0]["prompt"]))
    PromptSource(rows, tokenizer, options(), 0, 1, "x", labels, room=(Room(long + 5, None), 5))
    with pytest.raises(DataError, match=f"line 1: the prompt's {long} tokens and a response of up to 6 are more than"):
        PromptSource(rows, tokenizer, options(), 0, 1, "x", labels, room=(Room(long + 5, None), 6))
    with pytest.raises(ModelError, match="but the model has only 1 "):
        PromptSource(rows, tokenizer, options(), 0, 1, "x", labels, room=(Room(None, 1), 6))


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('no user') }}", "{% if %}", "{{ 1 / 0 }}", "{{ messages[9].x.y }}"]
)
def test_a_chat_template_that_fails_is_named(tokenizer, tmp_path, monkeypatch, template):
    rows, labels = load_rows(jsonl(tmp_path / "x.jsonl", GOOD))
    monkeypatch.setattr(tokenizer, "chat_template", template)
    with pytest.raises(DataError, match="line 1: the model's chat template cannot write this prompt") as caught:
        PromptSource(rows, tokenizer, options(), 0, 1, "x", labels)
    assert "\n" not in str(caught.value)


def test_a_prompt_that_fits_into_no_pass_of_the_trainer_is_named_before_the_run(tokenizer):
    prompts = source(tokenizer)
    prompts.check_pass(64 + 8, 8)
    words = r"max_tokens_per_gpu=60: problems, row \d+: the prompt's \d+ tokens and a response of up to 60 are more"
    with pytest.raises(ConfigError, match=words):
        prompts.check_pass(60, 60)
