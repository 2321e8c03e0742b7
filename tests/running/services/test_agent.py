"""The agent of a run, from its configuration."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from dataflow.batch import Batch
from dataflow.config.reward import RewardConfig
from dataflow.errors import ConfigError
from dataflow.reward_agent import RewardAgent
from dataflow.rewards.naming import JUDGE, SERVED
from dataflow.running.services.agent import _frozen_exit, build_agent, check_reward, limits_of, retry_of
from dataflow.system.frozen import DEATH_REASON

pytestmark = pytest.mark.timeout(60)

COUNTING = """
calls = []

def compute_score(data_source, solution_str, ground_truth, extra_info, bonus=0.0):
    calls.append(solution_str)
    return {"score": float(solution_str) + bonus, "calls": len(calls)}

class Router:
    def __init__(self, reward_router_address):
        self.address = reward_router_address

    def compute_score(self, data_source, solution_str, ground_truth, extra_info):
        return {"score": 1.0, "address": self.address}
"""


def samples(*texts: str) -> Batch:
    n = len(texts)
    columns = {"response_text": list(texts), "data_source": ["d"] * n, "ground_truth": ["0"] * n}
    return Batch(list(range(n)), columns)


def run(body: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    async def limited() -> Any:
        async with asyncio.timeout(20):
            return await body()

    return asyncio.run(limited())


async def scores(agent: RewardAgent, *texts: str, step: int = 1) -> list[float]:
    agent.submit(step, samples(*texts))
    rewards = await agent.collect(step)
    return rewards["score"].tolist()  # type: ignore[no-any-return]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "reward.py"
    path.write_text(COUNTING)
    return path


def agent_of(file: Path, options: RewardConfig | None = None, name: str = "compute_score", **more: Any) -> RewardAgent:
    kwargs = more.pop("reward_kwargs", {})
    custom = {"path": str(file), "name": name, "reward_kwargs": kwargs}
    return build_agent(custom, {"target": "no:no"}, options, **more)


def test_what_the_configuration_leaves_open_the_reward_may_declare() -> None:
    declared = {"concurrency": 5, "rpm": 30, "tpm": None, "timeout_s": 9.0}
    limits = limits_of(RewardConfig(rpm=10), declared)
    assert (limits.concurrency, limits.rpm, limits.tpm) == (5, 10, None)
    assert retry_of(RewardConfig(), 9.0).timeout_s == 9.0
    assert retry_of(RewardConfig(timeout=4), 9.0).timeout_s == 4


@pytest.mark.parametrize(
    ("target", "keys", "message"),
    [
        (JUDGE, {"manager": "remote"}, "'compute_score' is async, .* take the manager 'naive'"),
        (JUDGE, {"manager": "rate_limited", "manager_kwargs": {"max_rpm": -1}}, "max_rpm=-1; give a number above 0"),
        ("Router", {"manager": "remote", "manager_kwargs": {"workers": 0}}, "workers=0; give 1 or more"),
    ],
)
def test_what_cannot_be_built_once_servers_run_is_refused_before(
    target: str, keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "reward.py").write_text(COUNTING.replace("def compute_score", "async def later", 1))
    path = None if target in (JUDGE, SERVED) else str(tmp_path / "reward.py")
    custom = {"path": path, "name": target if path else "compute_score", "reward_kwargs": {}}
    served = {"name": "rm", "url": None, "kind": "chat"} if target == SERVED else {"url": None}
    with pytest.raises(ConfigError, match=message):
        check_reward(custom, {"target": target, "kwargs": served}, RewardConfig(router_address="h:1", **keys))


def test_verls_further_keywords(file: Path) -> None:
    async def body() -> None:
        agent = agent_of(file, RewardConfig(router_address="host:1"), name="Router")
        agent.submit(1, samples("7"))
        assert (await agent.collect(1))["address"].tolist() == ["host:1"]
        await agent.close()

    run(body)
    with pytest.raises(ConfigError, match=r"reward\.router_address"):
        agent_of(file, RewardConfig(), name="Router")


def test_a_run_that_starts_again_pays_for_nothing_twice(file: Path, tmp_path: Path) -> None:
    async def asked(
        texts: tuple[str, ...], options: RewardConfig | None = None, **more: Any
    ) -> tuple[list[float], int]:
        agent = agent_of(file, options, ledger=str(tmp_path / "rewards.sqlite"), **more)
        found = await scores(agent, *texts)
        stats = agent.stats()
        await agent.close()
        return found, stats["scored"] - stats["cached"]

    assert run(lambda: asked(("1", "2", "3"))) == ([1, 2, 3], 3)
    assert run(lambda: asked(("1", "2", "3"))) == ([1, 2, 3], 0)
    assert run(lambda: asked(("1", "5", "3"))) == ([1, 5, 3], 1), "another response is another request"
    other = {"reward_kwargs": {"bonus": 1.0}}
    assert run(lambda: asked(("1", "2", "3"), **other)) == ([2, 3, 4], 3), "another way to score is another answer"
    assert run(lambda: asked(("1", "2"), RewardConfig(ledger=False))) == ([1, 2], 2)
    file.write_text(COUNTING + "\n# changed\n")
    assert run(lambda: asked(("1", "2", "3"))) == ([1, 2, 3], 3)


def test_a_frozen_agent_speaks_of_its_own_section_where_its_process_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = RewardConfig(frozen_after=3)
    assert _frozen_exit(options, None, "reward") is None, "the run's own process"
    monkeypatch.setenv(DEATH_REASON, str(tmp_path / "why"))
    main, style = (_frozen_exit(options, None, name) for name in ("reward", "style"))
    assert main is not None
    assert style is not None
    assert main.why.endswith("(reward.frozen_after); the log has the stacks; run it in processes of its own with "
                             "reward.manager=remote.")  # fmt: skip
    assert "for 3 s" in style.why
    assert "(style.frozen_after)" in style.why
    assert style.why.endswith("style.manager=remote.")
