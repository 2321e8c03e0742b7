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
from dataflow.files import decoded, no_file
from dataflow.rewards.gsm8k import extract

GSM8K = "openai/gsm8k"
GENERATED = "dataflow/problems"
LONGEST_ROW = 2**22
"""Maximum characters of a row: its text is tokenized as a whole, which takes 6 seconds per million characters."""

COLUMNS = ("data_source", "prompt", "reward_model")
"""Columns that a parquet file must have; ``extra_info`` is optional."""


_UNSEEN = ("videos", "audios")
"""verl's columns of what no engine can pass to a model yet."""

IMAGES = "images"
"""verl's column of a prompt's images, and that of the rows here."""


_FORMS = (
    "give a question and an answer ending in '#### N', or verl's columns: prompt (chat messages), data_source, "
    "reward_model (with ground_truth)"
)


def load_rows(path: Path, image_key: str = IMAGES) -> tuple[list[dict[str, Any]], list[str]]:
    """Reads a data file.

    Args:
        path: ``.jsonl`` with ``question`` and an ``answer`` ending in ``#### N``, or ``.parquet`` or ``.jsonl`` of
            verl's schema.
        image_key: the column of images.

    Returns:
        Rows of verl's schema, with images (:func:`dataflow.data.pictures.images_of`) if they have any; and a label of
            each for messages (file and line).

    Raises:
        DataError: the file is missing, of another kind or empty, or a row is invalid.
    """
    if path.suffix not in (".jsonl", ".parquet"):
        raise DataError(f"{path}: unknown kind of data file; give a .jsonl or a .parquet file.")
    if (why := no_file(path)) is not None:
        raise DataError(f"{path}: {why}; give a data file.")
    rows, labels = (_read_jsonl if path.suffix == ".jsonl" else _read_parquet)(path, image_key)
    if not rows:
        raise DataError(f"{path}: the file is empty.")
    return rows, labels


def _read_jsonl(path: Path, image_key: str) -> tuple[list[dict[str, Any]], list[str]]:
    problems, labels = [], []
    try:
        for number, line in _lines(path):
            if not line.strip():
                continue
            label = f"{path}, line {number}"
            problem = _parsed(line, label)
            if not isinstance(problem, dict):
                raise DataError(f"{label}: this is not a JSON object; {_FORMS}.")
            problems.append(problem)
            labels.append(label)
    except OSError as e:
        raise DataError(f"{path}: cannot be read ({first_line(e)}).") from e
    rows = [
        _own_row(problem, label, image_key, path.parent)
        if "prompt" in problem
        else _verl_row(problem, index, GSM8K, label)
        for index, (problem, label) in enumerate(zip(problems, labels, strict=True))
    ]
    return rows, labels


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the number and the text of each line; reads no line beyond the maximum length of a row."""
    with path.open("rb") as file:
        number = 0
        while line := file.readline(4 * LONGEST_ROW + 1):
            number += 1
            # Each line is decoded on its own, so that the message can name it.
            label = f"{path}, line {number}"
            try:
                text = decoded(line) if number == 1 else line.decode()
            except ValueError as e:
                why = "it is not UTF-8 text; save it as UTF-8" if isinstance(e, UnicodeDecodeError) else str(e)
                if len(line) <= 4 * LONGEST_ROW:
                    raise DataError(f"{label}: {why}.") from e
                text = ""
            if len(line) > 4 * LONGEST_ROW or len(text) > LONGEST_ROW:
                raise DataError(
                    f"{label}: the line is longer than {LONGEST_ROW} characters; shorten it or leave it out."
                )
            yield number, text


def _parsed(line: str, label: str) -> Any:
    """Returns the value of a line of JSON, parsed strictly by the standard (Python's parser accepts more).

    Raises:
        DataError: it is not JSON, or later steps could not write it or would misread it.
    """

    def constant(name: str) -> Any:
        raise DataError(f"{label}: this is not JSON ({name} is not a JSON number).")

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice = next(key for n, (key, _) in enumerate(pairs) if key in dict(pairs[:n]))
            raise DataError(f"{label}: the key {twice[:40]!r} is given twice; leave one.")
        return found

    try:
        return json.loads(line, parse_constant=constant, object_pairs_hook=once)
    except json.JSONDecodeError as e:
        raise DataError(f"{label}: this is not JSON ({e.msg} at column {e.colno}).") from e
    except RecursionError as e:
        raise DataError(f"{label}: the JSON nests too deep to be read.") from e
    except ValueError as e:
        raise DataError(f"{label}: it holds a number with too many digits to be read.") from e


def _check_text(text: str, label: str) -> None:
    if len(text) > LONGEST_ROW:
        raise DataError(
            f"{label}: a text has {len(text)} characters, more than {LONGEST_ROW}; shorten it or leave it out."
        )
    _check_unicode(text, label)
    if "\0" in text:
        raise DataError(f"{label}: character {text.index(chr(0)) + 1} of a text is NUL (\\u0000); leave it out.")


def _check_unicode(text: str, label: str) -> None:
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise DataError(
            f"{label}: character {e.start + 1} of a text is half a surrogate pair (\\u{ord(text[e.start]):04x}), "
            "which is not a Unicode character; write it as UTF-8 text."
        ) from e


def _check_texts(values: Any, label: str) -> None:
    """Checks the texts in a value, which the ledger and the files of samples store, at any depth."""
    ahead = [values]
    while ahead:
        value = ahead.pop()
        if isinstance(value, str):
            _check_unicode(value, label)
        elif isinstance(value, dict) or isinstance(value, Mapping):  # noqa: SIM101 - the first takes a tenth of the time
            ahead += [*value, *value.values()]
        elif isinstance(value, list | tuple):
            ahead += value


def _read_parquet(path: Path, image_key: str) -> tuple[list[dict[str, Any]], list[str]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
        names = file.schema_arrow.names
        missing = [name for name in COLUMNS if name not in names]
        if missing:
            raise DataError(
                f"{path}: there is no column {missing[0]!r}; verl's schema has data_source, prompt (chat "
                "messages), reward_model (with ground_truth) and extra_info."
            )
        columns = [*COLUMNS, *(name for name in ("extra_info", image_key, *_UNSEEN) if name in names)]
        rows = file.read(columns=columns).to_pylist()
    except (pa.ArrowException, OSError, ValueError) as e:
        raise DataError(f"{path}: this is not a readable parquet file ({first_line(e)}).") from e
    labels, home = [f"{path}, row {i + 1}" for i in range(len(rows))], path.parent
    return [_own_row(row, label, image_key, home) for row, label in zip(rows, labels, strict=True)], labels


def _own_row(row: Mapping[str, Any], label: str, image_key: str, home: Path) -> dict[str, Any]:
    """Returns a row of a file, checked, with only the columns that are read; ``images`` only if it has some."""
    _check_row(row, label)
    images = images_of(row, image_key, label, home)
    kept = {name: row[name] for name in (*COLUMNS, "extra_info") if name in row}
    return {**kept, IMAGES: images} if images else kept


def verl_rows(source: Sequence[Mapping[str, Any]], name: str) -> list[dict[str, Any]]:
    """Returns rows unchanged, and problems (``question``, ``answer``) converted to rows.

    Raises:
        DataError: a row is invalid; the message has ``name`` and its number.
    """
    rows = []
    for index, row in enumerate(source):
        label = f"{name}, row {index + 1}"
        if "prompt" in row:
            _check_row(row, label)
            rows.append(dict(row))
        else:
            rows.append(_verl_row(row, index, GENERATED, label))
    return rows


def _verl_row(problem: Mapping[str, Any], index: int, source: str, label: str) -> dict[str, Any]:
    """Returns a problem as a row, as verl's preprocessing of GSM8K does."""
    for key in ("question", "answer"):
        value = problem.get(key)
        if not isinstance(value, str) or not value.strip():
            raise DataError(f"{label}: the problem has no {key!r} as text; {_FORMS}.")
        _check_text(value, label)
    question, answer = problem["question"], problem["answer"]
    if "####" not in answer:
        raise DataError(f"{label}: the answer has no '####' before its final number (as in '#### 42').")
    truth = extract(f"####{answer.rsplit('####', 1)[1]}")
    if truth is None:
        raise DataError(f"{label}: the answer has no number behind its last '####' (as in '#### 42').")
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
    messages = isinstance(prompt, list) and prompt and all(isinstance(m, Mapping) for m in prompt)
    if not messages or any(not _is_message(m) for m in prompt):
        raise DataError(f"{label}: 'prompt' is not a list of chat messages with role and content.")
    for message in prompt:
        for value in (message["role"], message["content"]):
            if isinstance(value, str):
                _check_text(value, label)
    if not isinstance(model, Mapping) or model.get("ground_truth") is None:
        raise DataError(f"{label}: 'reward_model' has no 'ground_truth'.")
    if not isinstance(row.get("data_source"), str):
        raise DataError(f"{label}: 'data_source' is not text.")
    if not isinstance(row.get("extra_info"), Mapping | None):
        raise DataError(f"{label}: 'extra_info' is not a mapping of names to values.")
    _check_texts([row["data_source"], model["ground_truth"], row.get("extra_info")], label)


def _is_message(message: Mapping[str, Any]) -> bool:
    role = message.get("role")
    return isinstance(role, str) and role != "" and message.get("content") is not None


def first_line(error: Exception) -> str:
    """Returns the message of an error, in one line."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
