"""A pipeline whose run takes a second: a model of one number, which is trained on the rewards of what it says.

It has the parts of a real run that a kill must not harm: weights that the engine copies, samples of stale weights,
requests of the reward agent with its ledger, mini-batches, checkpoints.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Annotated, Any

from dataflow import Batch, Carried, Hosted, Latest, Pipeline, RewardAgent, stage
from dataflow.config.base import PipelineConfig
from dataflow.graph import TaskInfo
from dataflow.rewards.ledger import Ledger
from dataflow.running.saving.checkpoints import checkpoint_store
from dataflow.stages.checkpoint import checkpoint_stages
from dataflow.stages.reward import reward_collect, reward_request
from dataflow.stages.update import TrainedGroups, staleness

GROUPS, SAMPLES = 4, 2
HERE = Path(os.environ.get("TOY_LOGS", "."))
"""Directory of the logs of what was asked and answered."""


class Model:
    """The trainer; its weight mixes all that it was trained on, in order."""

    rank = 0

    def __init__(self) -> None:
        self.weight = 1
        self._copy: int | None = None
        self._free = asyncio.Event()

    def update(self, numbers: list[int]) -> None:
        for number in numbers:
            self.weight = (31 * self.weight + number) % 1_000_003

    async def snapshot(self, wait: bool) -> bool:
        if self._copy is not None and not wait:
            return False
        while self._copy is not None:
            self._free.clear()
            await self._free.wait()
        self._copy = self.weight
        return True

    async def write(self, directory: str) -> None:
        Path(directory).mkdir()
        Path(directory, "weight").write_text(str(self._copy))
        await self.settle()

    async def settle(self) -> None:
        self._copy = None
        self._free.set()

    def load(self, directory: str) -> None:
        self.weight = int(Path(directory, "weight").read_text())

    def digest(self) -> str:
        return str(self.weight)


class Engine:
    """Samples by its copy of the weight."""

    def __init__(self) -> None:
        self.weight, self.version = 1, 0


def note(name: str, key: str) -> None:
    with (HERE / f"{name}.jsonl").open("a") as file:
        file.write(json.dumps(key) + "\n")


async def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    note("asked", solution_str)
    await asyncio.sleep(0)
    note("answered", solution_str)
    return float(solution_str.rpartition(" ")[2])


def agent(ledger: str) -> RewardAgent:
    return RewardAgent(compute_score, ledger=Ledger(ledger))


@stage(writes="responses", on="gpu", role="samples")
def draw(
    prompts: list[int], weights_version: Annotated[int | None, Carried], *, engine: Engine, task: TaskInfo
) -> Batch:
    rows = [(group, sample) for group in prompts for sample in range(SAMPLES)]
    texts = [f"{task.step}.{g}.{i}: {(engine.weight * (g + 7) + i + task.step) % 997}" for g, i in rows]
    columns = {name: [""] * len(rows) for name in ("data_source", "ground_truth")}
    extras: list[dict[str, Any]] = [{} for _row in rows]
    batch = Batch([group for group, _ in rows], {"response_text": texts, "extra_info": extras, **columns})
    batch.meta["weights_version"] = engine.version
    return batch


@stage(writes="actor", on="gpu", role="trains", splittable=True)
def train(actor: Latest | None, responses: Batch, rewards: Batch, *, trainer: Model, task: TaskInfo) -> TrainedGroups:
    batch = responses.merge(rewards)
    staleness(task, batch)
    trained = (actor or TrainedGroups()).then(task, batch, GROUPS)
    trainer.update([int(score) for score in batch["score"]])
    note("trained", f"{task.step} {batch.ids}")
    return trained


@stage(writes="weight", on="gpu", role="syncs")
def gather(actor: Any, *, trainer: Model) -> int:
    return trainer.weight


@stage(writes="weights_version", on="gpu", role="syncs", replays=True)
def sync(weight: int, *, engine: Engine, task: TaskInfo) -> int:
    engine.weight, engine.version = weight, task.step
    return task.step


def pipeline(config: PipelineConfig) -> Pipeline:
    trainer, engine = Hosted("trainer", Model, concurrent=True), Hosted("rollout", Engine)
    options = {"ledger": config.run_file("rewards.sqlite") or "rewards.sqlite"}
    host = Hosted("reward", agent, options, concurrent=True)
    stages = [
        draw.bind(engine=engine),
        reward_request.bind(agent=host),
        reward_collect.bind(agent=host),
        train.bind(trainer=trainer),
        gather.bind(trainer=trainer),
        sync.bind(engine=engine),
    ]
    if every := config.checkpoint.every:
        stages += checkpoint_stages(stages, every=every, store=checkpoint_store(config), steps=config.steps)
    return Pipeline(stages, inputs=["prompts"])


def inputs(config: PipelineConfig) -> dict[str, Any]:
    return {"prompts": lambda step: list(range(GROUPS))}
