"""What a run's configuration says of its reward models to the planner: which agent has which, and how many requests."""

from __future__ import annotations

from typing import Any

import pytest

from dataflow.config.reward import SourceConfig, concurrency_of, model_of, source_of
from dataflow.config.run import RunConfig

MODEL = {"path": "models/rm", "replicas": 2, "max_num_seqs": 8}


class TwoAgents(RunConfig):
    style: SourceConfig = SourceConfig()


def config(style: dict[str, Any] | None = None, **reward: Any) -> TwoAgents:
    return TwoAgents.model_validate({"reward": {"models": {"rm": MODEL}, **reward}, "style": style or {}})


def test_the_only_model_is_that_of_the_agent_reward() -> None:
    found = config()
    assert model_of(found, source_of(found, "reward")) == "rm"
    assert model_of(found, source_of(found, "style")) is None


@pytest.mark.parametrize("other", [{"judge": {"url": "http://h:1"}}, {"custom_reward_function": {"path": "f.py"}}])
def test_an_agent_with_a_judge_or_a_function_has_no_model_unless_it_says_so(other: dict[str, Any]) -> None:
    found = TwoAgents.model_validate({"reward": {"models": {"rm": MODEL}}, **other})
    assert model_of(found, source_of(found, "reward")) is None
    said = TwoAgents.model_validate({"reward": {"models": {"rm": MODEL}, "model": "rm"}, **other})
    assert model_of(said, source_of(said, "reward")) == "rm"


def test_another_agents_model_is_not_the_default() -> None:
    found = config(style={"model": "rm"})
    assert model_of(found, source_of(found, "reward")) is None
    assert model_of(found, source_of(found, "style")) == "rm"


def test_requests_in_flight_fill_the_servers_unless_given() -> None:
    found, given = config(), config(concurrency=4)
    assert concurrency_of(found, source_of(found, "reward")) == 16
    assert concurrency_of(found, source_of(found, "style")) == 64
    assert concurrency_of(given, source_of(given, "reward")) == 4


def test_a_trace_says_what_serves() -> None:
    found = config()
    found.reward.models["rm"].url = ["http://me:secret@127.0.0.1:8000/v1", "http://127.0.0.1:8001"]
    job = found.job()
    servers = ["http://127.0.0.1:8000/v1", "http://127.0.0.1:8001"]
    facts = {"replicas": 2, "slots": 8, "placement": "own", "gpus": 1, "servers": servers}
    assert job["models"] == {"rm": facts}
    assert job["gpus"] == 1
    assert (job["model"], job["concurrency"], job["concurrency_given"]) == ("rm", 16, False)
    assert "model" not in job["agents"]["style"]
