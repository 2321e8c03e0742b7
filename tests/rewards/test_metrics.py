"""The agent's metrics reach Ray's, in the form that Prometheus reads."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from dataflow.batch import Batch

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    import ray

    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield ray
    ray.shutdown()


def test_counts_and_gauges_are_exported(ray: Any) -> None:
    class Desk:
        async def score(self) -> dict[str, Any]:
            from dataflow.reward_agent import RewardAgent
            from dataflow.rewards.metrics import RayMetrics, in_ray_worker

            async def right(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
                return 1.0

            assert in_ray_worker()
            metrics = RayMetrics("a-run")
            agent = RewardAgent(right, metrics=metrics)
            columns = {"response_text": ["x"] * 6, "data_source": ["d"] * 6, "ground_truth": ["1"] * 6}
            agent.submit(1, Batch([0, 0, 1, 1, 2, 2], columns))
            await agent.collect(1)
            metrics.report(agent.stats())
            return agent.stats()

    desk = ray.remote(Desk).options(num_cpus=0).remote()
    assert ray.get(desk.score.remote())["scored"] == 6
    port = ray.nodes()[0]["MetricsExportPort"]
    end = time.monotonic() + 60
    text = ""
    # Ray's workers report to the node's agent every few seconds; when is theirs to say.
    while "dataflow_reward_scored" not in text and time.monotonic() < end:
        time.sleep(1.0)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
    told = {line.partition("{")[0]: line for line in text.splitlines() if line.startswith("ray_dataflow_reward")}
    assert told["ray_dataflow_reward_scored_total"].endswith(" 6.0")
    assert told["ray_dataflow_reward_requested_total"].endswith(" 6.0")
    assert told["ray_dataflow_reward_running"].endswith(" 0.0")
    assert told["ray_dataflow_reward_limit"].endswith(" 64.0")
    assert 'run="a-run"' in told["ray_dataflow_reward_scored_total"]


def test_outside_of_ray_nothing_is_told() -> None:
    import sys

    from dataflow.rewards.metrics import in_ray_worker

    assert not in_ray_worker(), sys.modules.get("ray")
