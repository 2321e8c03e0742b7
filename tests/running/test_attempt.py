"""The end of an attempt: the error that ended it is raised, and the record is written, whatever else happens."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dataflow.errors import RunError, StageFailed
from dataflow.running import session
from dataflow.running.attempt import Attempt
from dataflow.running.record import Record
from dataflow.running.session import Session
from tests.rigs.logs import logged

LOST = RunError("the judge ended")


class Failing(Attempt):
    """An attempt whose training fails, and whose agent then fails in a way of its own."""

    def __init__(self, lose: Any) -> None:
        self.lose, self.closed = lose, False

    async def run(self, point: Any) -> Any:
        raise StageFailed("first")

    async def _stats(self) -> dict[str, Any]:
        if self.lose is None:
            raise ValueError("no number")
        self.lose()
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    async def close(self, under_way: BaseException | None) -> None:
        self.closed = True


@pytest.mark.parametrize(("ended_by", "raised"), [("agent", "first"), ("judge", "the judge ended")])
def test_an_attempt_that_fails_leaves_its_record_whatever_its_agents_say(
    ended_by: str, raised: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run: Any = Session.__new__(Session)
    vars(run).update(
        _served=None, inputs={}, directory=tmp_path, record=Record(tmp_path),
        progress=SimpleNamespace(stop=lambda: None, elapsed_s=1.0),
        config=SimpleNamespace(steps=1, policy=SimpleNamespace(auto=False)),
        expand=lambda first: SimpleNamespace(steps=1), _meta=lambda: {"status": "running", "started": 0.0},
    )  # fmt: skip

    attempt = Failing(None if ended_by == "agent" else lambda: run._lose(LOST))
    monkeypatch.setattr(session, "Attempt", lambda *_: attempt)
    with logged() as warnings, pytest.raises(RunError, match=raised):
        asyncio.run(run._attempt(None))
    assert ["no number" in line for line in warnings] == [True] * (ended_by == "agent")
    assert attempt.closed
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "failed"
    assert json.loads((tmp_path / "trace.json").read_text())
