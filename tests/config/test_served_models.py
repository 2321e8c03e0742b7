"""Which agent has which reward model, and how many requests in flight."""

from __future__ import annotations

from typing import Any

from dataflow.config.reward import SourceConfig, asked_of, concurrency_of, model_of, source_of
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


def test_an_agent_with_a_judge_has_no_model_unless_it_says_so_and_a_function_may_ask_one() -> None:
    models: dict[str, Any] = {"models": {"rm": MODEL}}
    for other, named in (
        ({"judge": {"url": "http://h:1"}}, None),
        ({"custom_reward_function": {"path": "f.py"}}, "rm"),
    ):
        for reward, scorer in ((models, None), ({**models, "model": "rm"}, "rm")):
            found = TwoAgents.model_validate({"reward": reward, **other})
            source = source_of(found, "reward")
            assert model_of(found, source) == (None if named else scorer)
            assert asked_of(found, source) == named


def test_another_agents_model_is_not_the_default() -> None:
    found = config(style={"model": "rm"})
    assert model_of(found, source_of(found, "reward")) is None
    assert model_of(found, source_of(found, "style")) == "rm"


def test_requests_in_flight_fill_the_servers_unless_given() -> None:
    found, given = config(), config(concurrency=4)
    assert concurrency_of(found, source_of(found, "reward")) == 16
    assert concurrency_of(found, source_of(found, "style")) == 64
    assert concurrency_of(given, source_of(given, "reward")) == 4
