"""The end of an attempt: the error that ended it is raised, and the record is written, whatever else happens."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dataflow.api import resume, run
from dataflow.batch import Batch
from dataflow.config.base import PipelineConfig
from dataflow.errors import DataError, RunError, ServiceLost, StageFailed
from dataflow.graph import Hosted, Pipeline, TaskInfo, stage
from dataflow.reward_agent import RewardAgent
from dataflow.rewards.ledger import Ledger
from dataflow.rewards.slots import Limits
from dataflow.running import session
from dataflow.running.attempt import Attempt
from dataflow.running.record import Record
from dataflow.running.saving.checkpoints import CheckpointStore
from dataflow.running.session import Session
from dataflow.stages.reward import reward_collect, reward_request
from tests.faults.rig import toy_run
from tests.rigs.logs import logged

LOST = RunError("the judge ended")


class Failing(Attempt):
    """An attempt whose training fails, or goes on until the judge is lost."""

    def __init__(self, lose: Any) -> None:
        self.lose, self.closed = lose, False

    async def run(self, point: Any) -> Any:
        if self.lose is None:
            raise StageFailed("first")
        self.lose()
        return await asyncio.get_running_loop().create_future()

    async def close(self, under_way: BaseException | None) -> None:
        self.closed = True


@pytest.mark.parametrize(("ended_by", "raised"), [("stage", "first"), ("judge", "the judge ended")])
def test_an_attempt_that_fails_leaves_its_record(
    ended_by: str, raised: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run: Any = Session.__new__(Session)
    vars(run).update(
        _served=None, directory=tmp_path, record=Record(tmp_path),
        progress=SimpleNamespace(stop=lambda: None, elapsed_s=1.0),
        config=SimpleNamespace(steps=1, policy=SimpleNamespace(auto=False)),
        _prepared=SimpleNamespace(inputs={}, expand=lambda first: SimpleNamespace(steps=1)),
        _meta=lambda: {"status": "running", "started": 0.0},
    )  # fmt: skip

    attempt = Failing(None if ended_by == "stage" else lambda: run._lose(LOST))
    monkeypatch.setattr(session, "Attempt", lambda *_: attempt)
    with pytest.raises(RunError, match=raised):
        asyncio.run(run._attempt(None))
    assert attempt.closed
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "failed"
    assert json.loads((tmp_path / "trace.json").read_text())


def test_a_run_whose_data_ends_it_in_its_midst_keeps_what_it_has(tmp_path: Path) -> None:
    @stage(writes="seen", on="gpu", role="trains")
    def train(numbers: list[int]) -> list[int]:
        return numbers

    def numbers(step: int) -> list[int]:
        if step == 3:
            raise DataError("row 7: its image is not there.")
        return [step]

    with pytest.raises(DataError, match="row 7"):
        run(
            Pipeline([train], ["numbers"], {"gpu": 1}),
            inputs={"numbers": numbers},
            steps=4,
            name="a",
            runs=str(tmp_path),
        )
    assert json.loads((tmp_path / "a" / "summary.json").read_text())["status"] == "failed"


def test_a_run_goes_back_when_a_service_dies_and_records_each_step_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    died: list[int] = []

    @stage(writes="seen", on="gpu", role="trains")
    def train(numbers: list[int], *, task: TaskInfo) -> list[int]:
        if task.step == 3 and not died:
            died.append(task.step)
            raise ServiceLost("the trainer died")
        task.log({"value": float(numbers[0])})
        return numbers

    monkeypatch.setattr(PipelineConfig, "recoveries", 1)
    keys: dict[str, Any] = {"steps": 4, "name": "a", "runs": str(tmp_path), "tracking": {"backends": ["tensorboard"]}}
    with logged() as warnings:
        done = run(Pipeline([train], ["numbers"], {"gpu": 1}), inputs={"numbers": lambda step: [step]}, **keys)
    assert "restart 1 of 1: the run resumes from its beginning, as it has no checkpoint" in warnings[0]
    assert [(row["step"], row["value"]) for row in done.metrics] == [(1, 1), (2, 2), (3, 3), (4, 4)]
    assert [span.task for span in done.trace.spans] == [f"train[{step}]" for step in (1, 2, 3, 4)]
    assert (done.summary["status"], done.summary["resumed"]) == ("finished", [0])


def test_auto_begins_then_begins_again_with_what_the_ledger_holds_then_goes_on(tmp_path: Path) -> None:
    asked, broken = list[str](), [True]

    async def score(solution_str: str, **_: Any) -> float:
        if broken and solution_str.startswith("2."):
            await asyncio.sleep(0.2)  # the ledger gets the answers before it
            raise ValueError("out of order")
        asked.append(solution_str)
        return 1.0

    @stage(writes="responses", on="gpu", role="samples")
    def draw(numbers: list[int], *, task: TaskInfo) -> Batch:
        texts = [f"{task.step}.{number}" for number in numbers]
        columns = {"data_source": ["d"] * 2, "ground_truth": ["1"] * 2, "response_text": texts}
        return Batch(numbers, {**columns, "extra_info": [{}, {}]})

    @stage(writes="seen", on="gpu", role="trains")
    def train(rewards: Batch) -> int:
        return len(rewards)

    def agent() -> RewardAgent:
        return RewardAgent(score, limits=Limits(1), ledger=Ledger(tmp_path / "rewards.sqlite"))

    host = Hosted("reward", agent, concurrent=True)
    stages = [draw, reward_request.bind(agent=host), reward_collect.bind(agent=host), train]
    pipeline = Pipeline(stages, ["numbers"], {"gpu": 1, "controller": 1, "reward": None})

    def begin(steps: int) -> Any:
        keys: dict[str, Any] = {"name": "a", "runs": str(tmp_path), "resume": "auto", "policy": "baseline"}
        return run(pipeline, inputs={"numbers": lambda step: [1, 2]}, steps=steps, **keys)

    with pytest.raises(StageFailed, match="out of order"):
        begin(2)
    broken.clear()
    assert begin(2).summary["rewards"]["cached"] == 2
    assert sorted(asked) == ["1.1", "1.2", "2.1", "2.2"]
    assert begin(2).summary["status"] == "finished"
    assert len(asked) == 4, "it was complete"


@pytest.mark.parametrize(("failing", "saved"), [("3.", [2]), ("1.", [])])
def test_a_run_whose_rewards_fail_for_good_saves_the_last_step(
    failing: str, saved: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, score = [True], toy_run.compute_score

    async def outage(solution_str: str, **more: Any) -> float:
        if broken and solution_str.startswith(failing):
            raise ValueError("the judge is gone")
        return await score(solution_str=solution_str, **more)

    monkeypatch.setattr(toy_run, "compute_score", outage)
    monkeypatch.setattr(toy_run, "HERE", tmp_path)
    (tmp_path / "toy.py").write_text("from tests.faults.rig.toy_run import inputs, pipeline\n")
    keys: dict[str, Any] = {"policy": "off-policy", "steps": 4, "groups": 4, "checkpoint": {"every": 9}}
    keys |= {"runs": str(tmp_path), "policy.order": "index"}
    with pytest.raises(StageFailed, match="the judge is gone"):
        run(tmp_path / "toy.py", **keys, name="broken")
    assert CheckpointStore(tmp_path / "broken" / "checkpoints").whole() == saved
    broken.clear()
    if saved:
        whole = run(tmp_path / "toy.py", **keys, name="whole")
        again = resume(tmp_path / "broken")
        assert again.summary["resumed"] == saved
        assert again.summary["weights_sha256"] == whole.summary["weights_sha256"]


def test_skipped_updates_are_told_once(tmp_path: Path) -> None:
    @stage(writes="seen", on="gpu", role="trains")
    def train(numbers: list[int], *, task: TaskInfo) -> list[int]:
        task.log({"actor/skipped_updates": float(task.step > 1)})
        return numbers

    with logged() as warnings:
        run(Pipeline([train], ["numbers"]), inputs={"numbers": lambda step: [step]}, steps=3, runs=str(tmp_path))
    assert [text.partition(",")[0] for text in warnings] == ["step 2: an update changed nothing"]
