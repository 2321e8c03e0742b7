"""Rows of problems in verl's schema: reads GSM8K's JSONL or verl's parquet, checks each row.

A row has ``data_source``, ``prompt`` (chat messages), ``reward_model.ground_truth`` and ``extra_info``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dataflow.data.pictures import images_of
from dataflow.errors import DataError
from dataflow.files import no_file
from dataflow.rewards.gsm8k import extract

GSM8K = "openai/gsm8k"
GENERATED = "dataflow/problems"
IMAGES = "images"
"""verl's column of a prompt's images, and that of the rows here."""
_COLUMNS = ("data_source", "prompt", "reward_model")
"""Columns that a parquet file must have; ``extra_info`` is optional."""
_UNSEEN = ("videos", "audios")
"""verl's columns of what no engine can pass to a model yet."""
_FORMS = (
    "give a question and an answer ending in '#### N', or verl's columns: prompt (chat messages), data_source, "
    "reward_model (with ground_truth)"
)


def load_rows(path: Path, image_key: str = IMAGES) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns the rows of a data file in verl's schema, with any images, and a label of each (file and line).

    The file is ``.jsonl`` with ``question`` and an ``answer`` ending in ``#### N``, or ``.parquet`` or ``.jsonl`` of
    verl's schema.
    """
    if path.suffix not in (".jsonl", ".parquet"):
        raise DataError(f"{path}: unknown kind of data file; give a .jsonl or a .parquet file.")
    if (why := no_file(path)) is not None:
        raise DataError(f"{path}: {why}; give a data file.")
    found = list((_read_jsonl if path.suffix == ".jsonl" else _read_parquet)(path, image_key))
    if not found:
        raise DataError(f"{path}: the file is empty.")
    labels = [label for label, _row in found]
    return verl_rows([row for _label, row in found], labels, GSM8K, image_key, path.parent), labels


def _read_jsonl(path: Path, _image_key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    label = str(path)
    with path.open(encoding="utf-8-sig") as file:
        try:
            for number, line in enumerate(file, 1):
                label = f"{path}, line {number}"
                if line.strip():
                    yield label, dict(json.loads(line))
        except (TypeError, ValueError) as error:
            raise DataError(f"{label}: it is no line with a JSON object, in UTF-8 ({error}); {_FORMS}.") from error


def _read_parquet(path: Path, image_key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
        names = file.schema_arrow.names
        if missing := [name for name in _COLUMNS if name not in names]:
            raise DataError(
                f"{path}: there is no column {missing[0]!r}; verl's schema has data_source, prompt (chat "
                "messages), reward_model (with ground_truth) and extra_info."
            )
        columns = [name for name in (*_COLUMNS, "extra_info", image_key, *_UNSEEN) if name in names]
        rows = file.read(columns=columns).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: this is not a readable parquet file ({error}).") from error
    for number, row in enumerate(rows, 1):
        yield f"{path}, row {number}", row


def verl_rows(
    given: Sequence[Mapping[str, Any]],
    labels: Sequence[str],
    source: str = GENERATED,
    image_key: str = IMAGES,
    home: Path = Path(),
) -> list[dict[str, Any]]:
    """Returns rows, checked, with only the columns that are read; problems become rows as in verl's own script.

    ``given`` are rows of verl's schema, or problems (``question``, ``answer``), whose ``data_source`` is ``source``.
    """
    found = []
    for index, (row, label) in enumerate(zip(given, labels, strict=True)):
        if "prompt" not in row:
            found.append(_of_problem(row, index, source, label))
            continue
        _check_row(row, label)
        kept = {name: row[name] for name in (*_COLUMNS, "extra_info") if name in row}
        images = images_of(row, image_key, label, home)
        found.append({**kept, IMAGES: images} if images else kept)
    return found


def _of_problem(problem: Mapping[str, Any], index: int, source: str, label: str) -> dict[str, Any]:
    for key in ("question", "answer"):
        value = problem.get(key)
        if not isinstance(value, str) or not value.strip():
            raise DataError(f"{label}: the problem has no {key!r} as text; {_FORMS}.")
    question, answer = problem["question"], problem["answer"]
    truth = extract(f"####{answer.rpartition('####')[2]}") if "####" in answer else None
    if truth is None:
        raise DataError(f"{label}: the answer has no number behind a last '####' (as in '#### 42').")
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"index": index, "question": question, "answer": answer},
    }


def _check_row(row: Mapping[str, Any], label: str) -> None:
    for name in _UNSEEN:
        if row.get(name):
            raise DataError(
                f"{label}: the prompt has {name}, which the engines cannot pass to a model yet; leave out rows with "
                f"{name}."
            )
    prompt, model = row["prompt"], row.get("reward_model")
    if not isinstance(prompt, list) or not prompt or not all(map(_is_message, prompt)):
        raise DataError(f"{label}: 'prompt' is not a list of chat messages with role and content.")
    if not isinstance(model, Mapping) or model.get("ground_truth") is None:
        raise DataError(f"{label}: 'reward_model' has no 'ground_truth'.")
    if not isinstance(row.get("data_source"), str):
        raise DataError(f"{label}: 'data_source' is not text.")
    if not isinstance(row.get("extra_info"), Mapping | None):
        raise DataError(f"{label}: 'extra_info' is not a mapping of names to values.")


def _is_message(message: Any) -> bool:
    return isinstance(message, Mapping) and isinstance(message.get("role"), str) and message.get("content") is not None
