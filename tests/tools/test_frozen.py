"""A tool that freezes its process: when that ends, and in which words."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dataflow.cluster.frozen import FrozenExit
from dataflow.cluster.process import DEATH_REASON
from dataflow.tools.calls import ToolCaller
from dataflow.tools.toolbox import Toolbox


@pytest.mark.parametrize(
    ("timeout", "frozen_after", "after_s"),
    [(10, None, 60), (90, None, 90), (None, None, 60), (10, 5, 5), (10, 0, None)],
)
@pytest.mark.parametrize("own", [True, False], ids=["in an engine's process", "in the run's"])
def test_a_call_may_take_its_time_out_and_a_minute(
    own: bool,
    timeout: float | None,
    frozen_after: float | None,
    after_s: float | None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    given: list[FrozenExit | None] = []

    class Caller(ToolCaller):
        def __init__(self, *arguments: object) -> None:
            given.append(arguments[2])  # type: ignore[arg-type]

        async def close(self) -> None:
            """Nothing was started."""

    monkeypatch.setattr("dataflow.tools.toolbox.ToolCaller", Caller)
    if own:
        monkeypatch.setenv(DEATH_REASON, str(tmp_path / "why"))

    async def body() -> None:
        async with Toolbox(names=("calculator",), timeout=timeout, frozen_after=frozen_after).open():
            pass

    asyncio.run(body())
    (found,) = given
    assert (found and found.after_s) == (after_s if own else None)
    if found is not None:
        assert found.why.startswith("a tool kept Python's lock, or blocked the event loop, for ")
        assert found.why.endswith("call it in a process of its own, with a time-out (subprocess).")
