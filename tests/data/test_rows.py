"""Rows of problems: GSM8K's JSONL and verl's parquet; an invalid file or row gives one sentence."""

import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataflow.data.prompts import truth_of
from dataflow.data.rows import load_rows
from dataflow.errors import DataError

GSM8K = Path(__file__).parents[2].parent / "shared" / "data" / "gsm8k"
GOOD = {"question": "What is 3 + 4?", "answer": "It is 3 + 4 = 7.\n#### 7"}
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "What is 3 + 4?"}],
    "reward_model": {"style": "rule", "ground_truth": "7"},
    "extra_info": {"split": "train", "index": 0},
}


def jsonl(path, *lines):
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return path


def parquet(path, *rows):
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


def test_jsonl_becomes_verls_rows(tmp_path):
    other = {"question": "How much?", "answer": "#### 5 of 7\nNo:\n#### $1,200.50"}
    rows, labels = load_rows(jsonl(tmp_path / "train.jsonl", GOOD, "\n", other, VERL))
    assert rows[0] == {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "What is 3 + 4?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "7"},
        "extra_info": {"index": 0, "question": GOOD["question"], "answer": GOOD["answer"]},
    }
    assert rows[1]["reward_model"]["ground_truth"] == "1200.5"
    assert rows[2] == VERL
    assert labels == [f"{tmp_path}/train.jsonl, line {line}" for line in (1, 3, 4)]


@pytest.mark.skipif(not GSM8K.is_dir(), reason="GSM8K is not beside this checkout")
def test_gsm8k_is_read_whole():
    rows, labels = load_rows(GSM8K / "test.jsonl")
    assert len(rows) == len(labels) == 1319
    assert [truth_of(row) for row in rows[:2]] == ["18", "3"]


@pytest.mark.parametrize(
    ("line", "message"),
    {
        "{'question': 1}\n": "it is no line with a JSON object",
        "[1, 2]\n": "it is no line with a JSON object",
        '{"question": "1?", "answer": 1}\n': "the problem has no 'answer'",
        '{"question": "1?", "answer": "it is 1"}\n': "the answer has no number behind a last '####'",
    }.items(),
)
def test_a_bad_line_is_named(line, message, tmp_path):
    file = jsonl(tmp_path / "x.jsonl", GOOD, line)
    with pytest.raises(DataError, match=f"^{re.escape(str(file))}, line 2: {re.escape(message)}") as caught:
        load_rows(file)
    assert "\n" not in str(caught.value)


def test_a_bad_file_is_named(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n\n")
    (tmp_path / "text.parquet").write_text("no parquet")
    (tmp_path / "x.csv").write_text("question,answer\n")
    (tmp_path / "folder.jsonl").mkdir()
    pq.write_table(pa.Table.from_pylist([VERL]).slice(0, 0), tmp_path / "empty.parquet")
    parquet(tmp_path / "less.parquet", {k: v for k, v in VERL.items() if k != "prompt"})
    for name, message in {
        "none.jsonl": "there is no such file",
        "folder.jsonl": "it is a directory",
        "x.csv": "unknown kind of data file; give a .jsonl or a .parquet file",
        "empty.jsonl": "the file is empty",
        "empty.parquet": "the file is empty",
        "text.parquet": "this is not a readable parquet file",
        "less.parquet": "there is no column 'prompt'",
    }.items():
        with pytest.raises(DataError, match=f"^{re.escape(str(tmp_path / name))}: {message}") as caught:
            load_rows(tmp_path / name)
        assert "\n" not in str(caught.value)


def test_parquet_without_extra_info_will_do(tmp_path):
    row = {k: v for k, v in VERL.items() if k != "extra_info"}
    assert load_rows(parquet(tmp_path / "x.parquet", row)) == ([row], [f"{tmp_path}/x.parquet, row 1"])


@pytest.mark.parametrize(
    ("truths", "given"),
    [
        ([["7", "seven"], ["8"]], [["7", "seven"], ["8"]]),
        ([{"target": ["7"]}, {"other": 1.5}], [{"target": ["7"]}, {"other": 1.5}]),
        ([7, 8], ["7", "8"]),
    ],
)
def test_a_reference_of_several_answers_is_given_as_in_verl(truths, given, tmp_path):
    """As text it would be wrong without an error: "4" is in "['24']"."""
    rows = ({**VERL, "reward_model": {"ground_truth": truth}} for truth in truths)
    assert [truth_of(row) for row in load_rows(parquet(tmp_path / "x.parquet", *rows))[0]] == given


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": "What is 3 + 4?"}, "'prompt' is not a list of chat messages"),
        ({"prompt": [{"text": "3?"}]}, "'prompt' is not a list of chat messages"),
        ({"extra_info": [1]}, "'extra_info' is not a mapping"),
        ({"reward_model": {"style": "rule"}}, "'reward_model' has no 'ground_truth'"),
        ({"data_source": None}, "'data_source' is not text"),
        ({"videos": [{"path": "a.mp4"}]}, "the prompt has videos, which"),
    ],
)
def test_a_bad_row_is_named(change, message, tmp_path):
    file = parquet(tmp_path / "x.parquet", {**VERL, **change})
    with pytest.raises(DataError, match=f"^{re.escape(str(file))}, row 1: {message}"):
        load_rows(file)
