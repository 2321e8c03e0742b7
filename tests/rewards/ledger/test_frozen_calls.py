"""The record of calls that froze an agent: a damaged one loses only its entries, and never stops the agent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dataflow.rewards.ledger.frozen_calls import FrozenCalls
from dataflow.usercode.sentinel.sentinel import Kind
from tests.rigs.logs import logged

FACTS = {"kind": Kind.SCORE, "step": 1, "group": 0, "sample": 2, "key": "", "story": "it froze"}
GOOD = json.dumps(FACTS).encode()
BAD = [
    GOOD[:30],
    b"\0" * 40,
    b"\xff\xfe\xfd",
    b"[]",
    b"7",
    b"{}",
    b"[" * 100_000,
    json.dumps({**FACTS, "group": []}).encode(),
]


@pytest.mark.parametrize("bad", BAD, ids=[line[:12].decode("latin-1") for line in BAD])
def test_a_line_that_cannot_be_read_is_left_out_and_counted(tmp_path: Path, bad: bytes) -> None:
    path = tmp_path / "frozen.jsonl"
    path.write_bytes(b"\n" + GOOD + b"\n" + bad + b"\n\n" + GOOD.replace(b'"sample": 2', b'"sample": 3'))
    with logged() as said:
        frozen = FrozenCalls(path)
    assert [frozen.sample(1, 0, sample, None) for sample in (2, 3, 4)] == ["it froze", "it froze", ""]
    assert len(said) == 1
    assert f"unreadable lines in {path}, damaged or edited: 1;" in said[0]
