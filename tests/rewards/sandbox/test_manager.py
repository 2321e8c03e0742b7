"""The manager ``sandbox``: programs of responses become scores, and failures of the sandbox do not."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from dataflow.batch import Batch
from dataflow.config.reward import RewardConfig
from dataflow.errors import ConfigError, RewardFailed
from dataflow.rewards.managers import build_manager, scores_alone
from dataflow.rewards.naming import JUDGE, SERVED
from dataflow.rewards.sandbox.manager import Sandbox
from dataflow.running.services.agent import build_agent, check_reward
from tests.rewards.sandbox.service import serving

# Most start programs.
pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]

DOUBLE = {"inputs": ["1\n", "2\n", "3\n", "4\n"], "outputs": ["2", "4\n", "6", "8"]}
"""Test cases of a program that doubles a number."""
RIGHT, WRONG_AT_3 = "print(2 * int(input()))", "n = int(input())\nprint(2 * n if n < 3 else 0)"
DEFAULT = {"target": JUDGE, "kwargs": {"url": None}}


def fenced(code: str) -> str:
    return f"So:\n```python\n{code}\n```\n"


def score(response: str, truth: Any, **options: Any) -> dict[str, Any]:
    async def body() -> dict[str, Any]:
        manager = Sandbox(None, **options)
        try:
            async with asyncio.timeout(100):
                return await manager.compute_score("code", response, truth, {})
        finally:
            await manager.close()

    return asyncio.run(body())


@pytest.mark.parametrize(
    ("response", "truth", "options", "expected"),
    [
        (fenced(RIGHT), DOUBLE, {}, (1.0, 4, 4, "passed")),
        (fenced(RIGHT), json.dumps(DOUBLE), {"score": "all"}, (1.0, 4, 4, "passed")),
        (fenced(WRONG_AT_3), DOUBLE, {}, (0.5, 2, 4, "wrong_answer")),
        (fenced(WRONG_AT_3), DOUBLE, {"score": "all"}, (0.0, 2, 4, "wrong_answer")),
        (fenced(WRONG_AT_3), DOUBLE, {"max_cases": 2}, (1.0, 2, 2, "passed")),
        (fenced("1 / 0"), DOUBLE, {}, (0.0, 0, 4, "runtime_error")),
        ("no program", DOUBLE, {}, (0.0, 0, 4, "no_code")),
        (
            fenced("n = int(input())\nwhile n == 2: pass\nprint(2 * n)"),
            DOUBLE,
            {"timeout": 2, "max_concurrent": 4},
            (0.75, 3, 4, "timeout"),
        ),
        (
            fenced("def f(a, b):\n    return [a, str(b)]"),
            {"fn_name": "f", "inputs": ["1\n2", "[]\n{}"], "outputs": ['[1, "2"]', [[], "{}"]]},
            {},
            (1.0, 2, 2, "passed"),
        ),
        (
            fenced("def f(n): return n"),
            {"assert_case": ["assert f(1) == 1", "assert f(1) == 2"]},
            {},
            (0.5, 1, 2, "runtime_error"),
        ),
    ],
)
def test_scores(response: str, truth: Any, options: dict[str, Any], expected: tuple[Any, ...]) -> None:
    found = score(response, truth, **options)
    explanation = found.pop("explanation")
    assert tuple(found[name] for name in ("score", "passed", "cases", "status")) == expected
    assert len(found) == 4
    assert ("Error" in explanation) == (expected[-1] == "runtime_error")


def test_no_more_programs_at_a_time_than_allowed() -> None:
    running, most = 0, 0

    async def answer(_body: dict[str, Any]) -> Any:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        running -= 1
        return {"status": "Success", "run_result": {"status": "Finished", "return_code": 0, "stdout": "2"}}

    async def body(url: str) -> tuple[list[dict[str, Any]], dict[str, float]]:
        manager = Sandbox(url=url, max_concurrent=3)
        calls = (manager.compute_score("code", fenced("p"), DOUBLE) for _ in range(5))
        try:
            return await asyncio.gather(*calls), manager.usage()
        finally:
            await manager.close()

    with serving(answer) as (url, bodies):
        found, used = asyncio.run(body(url))
    assert most == 3
    assert [one["score"] for one in found] == [0.25] * 5
    assert used == {"programs": 20, "programs_timed_out": 0}
    assert len(bodies) == 20


def test_an_agent_scores_with_it_and_a_failing_service_fails_the_request() -> None:
    async def answer(body: dict[str, Any]) -> Any:
        return {"status": "SandboxError", "message": "no disk"} if "broken" in body["code"] else await good(body)

    async def good(body: dict[str, Any]) -> Any:
        shown = str(2 * int(body["stdin"]))
        return {"status": "Success", "run_result": {"status": "Finished", "return_code": 0, "stdout": shown}}

    async def body(url: str, code: str) -> Batch:
        options = RewardConfig(manager="sandbox", manager_kwargs={"url": url}, tries=2, backoff=0, max_failed_share=1)
        check_reward({"path": None}, DEFAULT, options)
        agent = build_agent(None, DEFAULT, options)
        columns: dict[str, Any] = {"response_text": [fenced(code)] * 2, "data_source": ["code"] * 2}
        try:
            agent.submit(1, Batch([0, 0], columns | {"ground_truth": [DOUBLE] * 2, "raw_prompt": [[]] * 2}))
            async with asyncio.timeout(60):
                return await agent.collect(1)
        finally:
            await agent.close()

    with serving(answer) as (url, bodies):
        rewards = asyncio.run(body(url, RIGHT))
        assert list(rewards["score"]) == [1, 1]
        assert list(rewards["status"]) == ["passed"] * 2
        before = len(bodies)
        with pytest.raises(RewardFailed, match="no disk"):
            asyncio.run(body(url, "broken"))
        assert len(bodies) > before + 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"timeout": 0}, "timeout=0; give a number from 1 to 16,777,216"),
        ({"max_concurrent": 2.5}, "max_concurrent=2.5; give a whole number from 1 to"),
        ({"score": "al"}, "score 'al' is unknown; give share or all"),
        ({"language": "cpp"}, "language=cpp on linux; without a service only python is run"),
        ({"url": "nowhere"}, "url=nowhere is not an address"),
    ],
)
def test_bad_options_are_refused_before_anything_starts(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_reward({"path": None}, DEFAULT, RewardConfig(manager="sandbox", manager_kwargs=options))


def test_a_function_or_a_model_beside_it_is_refused() -> None:
    assert scores_alone("sandbox")
    assert not scores_alone("naive")
    assert isinstance(build_manager("sandbox", None), Sandbox)
    custom = {"path": "reward.py", "name": "f", "reward_kwargs": {}}
    with pytest.raises(ConfigError, match=r"custom_reward_function\.path"):
        check_reward(custom, DEFAULT, RewardConfig(manager="sandbox"))
    with pytest.raises(ConfigError, match="scores alone"):
        check_reward({"path": None}, {"target": SERVED}, RewardConfig(manager="sandbox"))


@pytest.mark.heavy
def test_scores_are_those_of_verl() -> None:
    from verl.utils.reward_score.sandbox_fusion import compute_score

    function = {"fn_name": "f", "inputs": ["[3, 1]\n2", "[]\n0"], "outputs": ["[1, 3, 2]", "[0]"]}
    samples = [
        (fenced(WRONG_AT_3), DOUBLE),
        (fenced("print('a')"), {"inputs": ["", ""], "outputs": ["a\n\n", None]}),
        (fenced("class Solution:\n    def f(self, x: List[int], y): return sorted(x) + [y]"), function),
        (fenced("n = 1"), {"assert_case": ["assert n == 1", "assert n == 2", "assert n"]}),
        ("```\nprint(2 * int(input()))\n```", {"inputs": ["1\n"], "outputs": ["2"]}),
        ("nothing", DOUBLE),
    ]
    with serving() as (url, _):
        for response, truth in samples:
            theirs, _ = compute_score(f"{url}/run_code", None, 512, response, json.loads(json.dumps(truth)), True)
            assert score(response, truth, url=url)["score"] == theirs, response
