"""An agent: several turns with tools, and a judge that reads the whole conversation, each turn with its role.

prompts -> conversation: a turn -> a call -> the tool's answer -> the next turn ... -> responses
              ^          |                                                                 |
           weights       +-> old_log_prob, ref_log_prob -+      reward_request -> (judge) -+-> reward_collect
              |                                          v                                          |
              +-- sync_weights <- gather_weights <- actor_update <- advantage <---------------------+

A slow tool delays only its own conversation. The loss leaves the tools' answers out. The judge reads the conversation
as text; a reward function gets its messages as extra_info["raw_prompt"] and extra_info["conversation"]. Metrics:
tools/turns, tools/calls, tools/errors. The tiny model of the default run cannot write JSON calls; its turns end at
" =", and the calculator writes the number. A model that was trained with tools writes its calls itself:

dataflow run pipelines/agent.py policy=both+stream
dataflow run pipelines/agent.py model.path=DIR tools.format=auto engine.stop=[] engine.max_tokens=512 \
    tools.max_response_tokens=2048 data.train=train.parquet
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from dataflow.config.reward import RewardConfig
from dataflow.config.run import EngineConfig, RunConfig, TrainerConfig
from dataflow.config.tools import ToolsConfig
from dataflow.config.training import toy_trainer
from dataflow.graph import Pipeline
from dataflow.running.recipe import actor_stage, greedy_stages, recipe_pipeline, rollout_stages
from dataflow.running.services.hosting import pools_of, reward_host, rollout_host, trainer_host
from dataflow.stages.advantage import advantage_stage
from dataflow.stages.log_prob import log_prob_stages
from dataflow.stages.reward import reward_collect, reward_request, val_score
from dataflow.stages.samples import sample_stages
from dataflow.stages.sync import gather_weights, sync_weights
from dataflow.tools import ToolCall

OPEN = re.compile(r"([0-9]+(?: [-+*] [0-9]+)+) =\Z")


class Equation:
    """How the tiny model calls: a turn that ends in an equation without its right side calls the calculator."""

    def parse(self, text: str) -> list[ToolCall]:
        """Returns the call at the end of a turn, if there is one."""
        found = OPEN.search(text)
        return [ToolCall("calculator", {"expression": found[1]})] if found else []

    def frame(self, answers: Sequence[str]) -> str:
        """Returns only the number, without the chat template's frame."""
        return f" {answers[0]}"


class Config(RunConfig):
    """The defaults train a tiny Qwen2 on a laptop; see dataflow/config/run.py for every key."""

    trainer: TrainerConfig = Field(default_factory=toy_trainer)
    tools: ToolsConfig = Field(
        default_factory=lambda: ToolsConfig(
            path=str(Path(__file__).resolve()),  # for Equation; a file of your own may define tools as well
            names=["calculator"],
            format="Equation",
            max_response_tokens=48,
        )
    )
    engine: EngineConfig = Field(default_factory=lambda: EngineConfig(stop=["\u0120="]))  # " =" in the vocabulary
    reward: RewardConfig = Field(default_factory=lambda: RewardConfig(share_equal=False))


def pipeline(config: Config) -> Pipeline:
    """Returns the stages of one step with conversations, their engines and the resources they share."""
    pools = pools_of(config)
    trainer = trainer_host(config, pools)
    engine = rollout_host(config, pools.engine_gpus)
    agent = reward_host(config)
    converse, val_converse = rollout_stages(config)  # conversations, as tools are offered

    stages = [
        converse.bind(on=pools.sampling, engine=engine),
        reward_request.bind(agent=agent, extra_groups=config.extra_groups, group_filter=config.group_filter),
        *greedy_stages(config, val_converse, engine=engine, agent=agent, on=pools.sampling),
        *log_prob_stages(config.algorithm, trainer=trainer, on=pools.training),
        reward_collect.bind(agent=agent),
        advantage_stage(config.algorithm),
        actor_stage(config, trainer=trainer, on=pools.training),
        gather_weights.bind(on=pools.training, trainer=trainer),
        sync_weights.bind(on=pools.sampling, engine=engine),
    ]
    return recipe_pipeline(
        config,
        stages,
        validation=[val_converse.bind(on=pools.sampling, engine=engine), val_score.bind(agent=agent)],
        samples=sample_stages(config),
        resources=pools.resources,
    )
