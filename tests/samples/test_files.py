"""Files of samples: what is written is read again, whatever a reward returned."""

from __future__ import annotations

import math
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataflow.errors import DataError
from dataflow.samples.files import file_of, plain, read, steps_in, write

pytest.importorskip("pyarrow")


def test_columns_come_back_as_they_were(tmp_path: Path) -> None:
    path = file_of(tmp_path / "samples", "step", 12)
    columns: dict[str, Any] = {
        "step": [12, 12],
        "group": [3, 4],
        "sample": [0, 1],
        "score": [1, 0.5],
        "words": ["right", None],
        "mixed": [{"a": [1]}, "text"],
        "array": [np.arange(2), np.float32(1.5)],
        "flag": [True, None],
        "large": [2**70, 1],
        "empty": [None, None],
    }
    write(path, columns)
    assert [p.name for p in path.parent.iterdir()] == ["step_000012.parquet"], "nothing else is left"
    first, second = read(path)
    assert first == {
        "step": 12, "group": 3, "sample": 0, "score": 1.0, "words": "right", "mixed": '{"a": [1]}',
        "array": "[0, 1]", "flag": True, "large": float(2**70), "empty": None,
    }  # fmt: skip
    assert (second["words"], second["mixed"], second["array"]) == (None, "text", "1.5")
    assert read(path, [4]) == [second]


def test_steps_are_found_by_their_kind(tmp_path: Path) -> None:
    for kind, step in (("step", 2), ("step", 10), ("val", 0)):
        write(file_of(tmp_path, kind, step), {"group": [0]})  # type: ignore[arg-type]
    for other in ("step_٣", "step_000٣11", "step_7", "step_²", "step_x", "step_"):
        (tmp_path / f"{other}.parquet").write_bytes(b"of no step")
    (tmp_path / ".step_000011.parquet.77").write_bytes(b"half of a file")
    assert (steps_in(tmp_path, "step"), steps_in(tmp_path, "val")) == ([2, 10], [0])


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1 something else PAR1"])
def test_a_file_that_is_not_whole_is_one_sentence(tmp_path: Path, content: bytes) -> None:
    path = file_of(tmp_path, "step", 1)
    path.write_bytes(content)
    with pytest.raises(DataError, match="it is no whole parquet file"):
        read(path)
    with pytest.raises(DataError, match="there is no such file"):
        read(file_of(tmp_path, "step", 2))


@pytest.mark.parametrize(
    ("columns", "missing"),
    [
        ({"score": [1.0]}, "step"),
        ({"step": [1], "group": [0], "score": [1.0]}, "sample"),
        ({"step": [1], "group": [None], "sample": [0]}, "group"),
        ({"step": ["one"], "group": [0], "sample": [0]}, "step"),
    ],
)
def test_a_file_without_the_ids_of_samples_is_one_sentence(
    tmp_path: Path, columns: dict[str, Any], missing: str
) -> None:
    path = file_of(tmp_path, "step", 1)
    write(path, columns)
    with pytest.raises(DataError, match=f"it has no column '{missing}' of whole numbers, as samples do; remove it"):
        read(path)
    write(path, {name: [] for name in columns})
    assert read(path) == []


circle: list[Any] = []
circle.append(circle)
VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(st.characters()), st.binary(max_size=3),
    st.just(np.ones((2, 2))), st.just(np.int64(3)), st.just({(1, 2): object()}), st.just(circle), st.just(2**2000),
    st.dictionaries(st.text(max_size=2), st.floats(), max_size=2),
)  # fmt: skip


@given(st.lists(VALUES, max_size=6))
def test_any_column_can_be_written(values: list[Any]) -> None:
    import pyarrow

    found, kind = plain(values)
    back = pyarrow.array(found, kind).to_pylist()
    assert [value is None for value in back] == [value is None for value in values]
    if kind == "float64":
        numbers = [(a, b) for a, b in zip(values, back, strict=True) if a is not None]
        assert all(float(a) == b or math.isnan(b) for a, b in numbers)


@pytest.mark.slow
def test_without_pyarrow_the_command_says_what_installs_it(tmp_path: Path) -> None:
    write(file_of(tmp_path / "samples", "step", 1), {"group": [0]})
    code = textwrap.dedent("""
        import importlib.util, sys

        class Gone:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] == "pyarrow":
                    raise ModuleNotFoundError(f"No module named '{name}'", name=name)

        sys.meta_path.insert(0, Gone())
        found = importlib.util.find_spec
        importlib.util.find_spec = lambda name, *more: None if name == "pyarrow" else found(name, *more)
        from dataflow.cli import main
        sys.exit(main(["samples", sys.argv[1]]))
    """)
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2, ended.stderr
    assert "this needs pyarrow, which is not installed; pip install 'dataflow-rl[cpu]'" in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1
