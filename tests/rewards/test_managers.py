"""Managers: how each changes a reward, and how they are found and built."""

from __future__ import annotations

import asyncio
import inspect
import os
from pathlib import Path
from typing import Any

import pytest

from dataflow.errors import ConfigError
from dataflow.rewards.functions import build_reward, load_reward
from dataflow.rewards.managers import TokensUnknown, build_manager
from dataflow.usercode.load import is_async, name_of

pytestmark = pytest.mark.timeout(120)


class Full:
    """A reward with methods that the agent may ask for."""

    def compute_score(self, data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
        return float(ground_truth)

    def post_process_scores(self, scores: list[float]) -> list[float]:
        return [score / 2 for score in scores]

    def usage(self) -> dict[str, float]:
        return {"tokens": 5.0}

    def tokens(self, **arguments: Any) -> int:
        return len(arguments["solution_str"])


def plain(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> Any:
    return float(ground_truth)


async def late(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> Any:
    return {"score": float(ground_truth), "why": solution_str}


def late_in_the_end(**arguments: Any) -> Any:
    return late(**arguments)


def told(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> Any:
    return (float(ground_truth), "query", "explanation")


def ask(truth: Any = "1", text: str = "text", **extra: Any) -> dict[str, Any]:
    return {"data_source": "d", "solution_str": text, "ground_truth": truth, "extra_info": extra}


def score(manager: Any, **arguments: Any) -> Any:
    async def body() -> Any:
        result = manager.compute_score(**(arguments or ask()))
        return await result if inspect.isawaitable(result) else result

    return asyncio.run(body())


DAPO = {"overlong_buffer_len": 4, "max_response_length": 10, "overlong_penalty_factor": 0.5}


@pytest.mark.parametrize("reward", [plain, late, late_in_the_end, told, Full()])
def test_dapo_is_async_if_its_reward_is(reward: Any) -> None:
    manager = build_manager("dapo", reward, **DAPO)
    inner = getattr(reward, "compute_score", reward)
    assert is_async(manager.compute_score) == is_async(inner)
    assert name_of(manager.compute_score) == name_of(inner)
    result = score(manager, **ask(response_length=8))
    assert (result["acc"], result["score"]) == (1, 0.75)


def test_a_manager_forwards_the_public_attributes_of_its_reward() -> None:
    reward = Full()
    for name, options in (("naive", {}), ("dapo", DAPO), ("rate_limited", {})):
        manager = build_manager(name, reward, **options)
        assert manager.post_process_scores([4]) == [2]
        assert manager.usage() == {"tokens": 5}
        assert manager.tokens(**ask()) == 4
    assert not hasattr(build_manager("naive", plain), "post_process_scores")
    assert build_manager("dapo", build_manager("rate_limited", plain, max_rpm=3), **DAPO).limits["rpm"] == 3


@pytest.mark.parametrize(
    ("length", "penalty"),
    [(1, 0), (6, 0), (7, -0.125), (8, -0.25), (10, -0.5), (12, -0.75)],
)
def test_dapos_penalty(length: int, penalty: float) -> None:
    result = score(build_manager("dapo", plain, **DAPO), **ask(response_length=length))
    assert result == {"score": 1 + penalty, "acc": 1}
    result = score(build_manager("dapo", late, **DAPO, log=True), **ask(response_length=length))
    facts = {"overlong_reward": penalty, "overlong": penalty < 0}
    assert result == {"score": 1 + penalty, "acc": 1, "why": "text", **facts}


def test_dapo_without_a_length_stops_the_run() -> None:
    with pytest.raises(TokensUnknown, match=r"needs extra_info\['response_length'\]") as caught:
        score(build_manager("dapo", plain, **DAPO), **ask())
    assert caught.value.fatal


def test_rate_limited_declares_its_limits() -> None:
    manager = build_manager("rate_limited", plain)
    assert manager.limits == {"concurrency": 1, "rpm": None, "tpm": None, "timeout_s": 300}
    assert manager.tokens(**ask()) == 2000
    given = {"max_concurrent": 8, "max_rpm": 500, "max_tpm": 1e5, "estimated_tokens_per_request": 700, "timeout": 60}
    manager = build_manager("rate_limited", Full(), **given)
    assert manager.limits == {"concurrency": 8, "rpm": 500, "tpm": 1e5, "timeout_s": 60}
    assert manager.tokens(**ask()) == 700


FILE = """
import os
from dataflow.rewards.managers import Manager

def compute_score(data_source, solution_str, ground_truth, extra_info, add=0):
    return {"score": float(ground_truth) + add, "pid": os.getpid()}

async def later(data_source, solution_str, ground_truth, extra_info): return 1.0

class Reward:
    def __init__(self): self.closed = False
    def compute_score(self, data_source, solution_str, ground_truth, extra_info): return os.getpid()
    def post_process_scores(self, scores): return scores
    def usage(self): return {"seen": 1.0}
    async def close(self): self.closed = True

class Doubled(Manager):
    def __init__(self, reward, times: int = 2):
        super().__init__(reward)
        self.times = times
    def finish(self, result, arguments):
        return result * self.times

class Own:
    def __init__(self, compute_score): self.inner = compute_score
    async def compute_score(self, **arguments): return self.inner(**arguments) + 1

class Wrong:
    def __init__(self, compute_score): raise RuntimeError("no")

class Empty:
    def __init__(self, compute_score): pass

number = 3
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "mine.py"
    file.write_text(FILE)
    return str(file)


def test_remote_scores_in_other_processes(path: str) -> None:
    manager = build_manager("remote", build_reward(load_reward(path, reward_kwargs={"add": 2}), {"add": 2}), workers=1)
    assert manager.limits == {"concurrency": 1}
    assert is_async(manager.compute_score)
    assert name_of(manager.compute_score) == "compute_score"

    async def body() -> list[Any]:
        results = await asyncio.gather(*(manager.compute_score(**ask(truth)) for truth in range(5)))
        await manager.close()
        return results

    results = asyncio.run(body())
    assert [result["score"] for result in results] == [2, 3, 4, 5, 6]
    assert os.getpid() not in {result["pid"] for result in results}
    assert manager.usage() == {"workers_died": 0, "workers_killed": 0}


def test_remote_passes_on_the_reward_object_of_this_process(path: str) -> None:
    reward = build_reward(load_reward(path, "Reward"))
    manager = build_manager("dapo", build_manager("remote", reward, workers=1), **DAPO)

    async def body() -> Any:
        result = await manager.compute_score(**ask(response_length=1))
        await manager.close()
        return result

    assert asyncio.run(body())["score"] != os.getpid()
    assert reward.closed
    assert manager.post_process_scores([1]) == [1]
    assert manager.usage() == {"seen": 1, "workers_died": 0, "workers_killed": 0}
    assert manager.limits["concurrency"] == 1


def test_a_users_own_manager(path: str) -> None:
    assert score(build_manager("Doubled", plain, path)) == 2
    assert score(build_manager("Doubled", plain, path, times=5)) == 5
    assert score(build_manager("Own", plain, path)) == 2


def test_managers_that_cannot_be(path: str) -> None:
    later = build_reward(load_reward(path, "later"))
    wrong: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        (("dpao", plain), {}, "reward manager 'dpao' is unknown; did you mean 'dapo'?"),
        (("Doubld", plain, path), {}, "has no 'Doubld'; did you mean 'Doubled'?"),
        (("number", plain, path), {}, "reward manager 'number' is an int; give a class"),
        (("Wrong", plain, path), {}, "reward manager 'Wrong' cannot be built: RuntimeError: no (mine.py:"),
        (("Empty", plain, path), {}, "'Empty': its class has neither compute_score nor verl's run_single"),
        (("naive", plain), {"log": True}, "'log'; its options (reward.manager_kwargs) are none."),
        (("rate_limited", plain), {"max_rmp": 3}, "'max_rmp'; its options (reward.manager_kwargs) are max_concurrent,"),
        (("dapo", plain), {"max_response_length": 3}, "missing a required argument: 'overlong_buffer_len'"),
        (("dapo", plain), {**DAPO, "overlong_buffer_len": 11}, "overlong_buffer_len=11; give 1 to max_response_"),
        (("dapo", plain), {**DAPO, "overlong_penalty_factor": -1}, "overlong_penalty_factor=-1"),
        (("rate_limited", plain), {"max_concurrent": 0}, "max_concurrent=0; give a number above 0"),
        (("remote", later), {}, "'later' is async, which needs no process of its own"),
        (("remote", lambda **_: 0), {}, "cannot be built in another process"),
        (("remote", plain), {"workers": 0}, "workers=0"),
        (("naive", Full), {}, "cannot score; give a function or an object"),
    ]
    for arguments, options, message in wrong:
        with pytest.raises(ConfigError) as error:
            build_manager(*arguments, **options)
        assert message in str(error.value)
        assert "\n" not in str(error.value)
