"""User code that raises: exceptions, what is no Exception, and groups of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from dataflow.errors import DataflowError, RewardFailed
from dataflow.reward_agent import Retry, RewardAgent
from tests.faults.rig.samples import run, samples

pytestmark = pytest.mark.timeout(60)


class Own(BaseException):
    """A kind of the user's that is no Exception, as func_timeout's is."""


RAISED: list[tuple[Callable[[], BaseException], str]] = [
    (lambda: SystemExit(3), "SystemExit: 3"),
    (lambda: asyncio.CancelledError(), "CancelledError"),
    (lambda: Own("mine"), "Own: mine"),
    (lambda: ValueError("mine"), "ValueError: mine"),
]
NAMES = [said.split(":")[0] for _, said in RAISED]
raising = pytest.mark.parametrize(("make", "said"), RAISED, ids=NAMES)


def sync_raise(make: Callable[[], BaseException]) -> None:
    raise make()


async def async_raise(make: Callable[[], BaseException]) -> None:
    await asyncio.sleep(0)
    raise make()


def score_of_truth(bad: Callable[[], Any], ground_truth: str, extra_info: Any) -> Any:
    return bad() if extra_info["at"][1:] == (1, 1) else float(ground_truth)


def scored(raises: Callable[..., Any], make: Callable[[], BaseException]) -> Callable[..., Any]:
    if asyncio.iscoroutinefunction(raises):

        async def score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> Any:
            result = score_of_truth(lambda: raises(make), ground_truth, extra_info)
            return result if isinstance(result, float) else await result

        return score
    return lambda data_source, solution_str, ground_truth, extra_info: score_of_truth(
        lambda: raises(make), ground_truth, extra_info
    )


@raising
@pytest.mark.parametrize("raises", [sync_raise, async_raise])
def test_whatever_compute_score_raises_fails_that_sample_alone(
    raises: Callable[..., Any], make: Callable[[], BaseException], said: str
) -> None:
    async def body() -> None:
        for rule in ("drop_sample", "fail"):
            agent = RewardAgent(scored(raises, make), retry=Retry(tries=1), on_failure=rule, max_failed_share=1)
            agent.submit(1, samples(1, range(3)))
            if rule == "drop_sample":
                assert (await agent.collect(1))["kept"].tolist() == [True, True, True, False, True, True]
            else:
                with pytest.raises(RewardFailed, match=f"^sample 1 of group 1 of step 1: .* raised .*{said}"):
                    await agent.collect(1)
            await agent.close()

    run(body())


class Methods:
    """A reward object of which one method raises."""

    def __init__(self, where: str, raises: Callable[..., Any], make: Callable[[], BaseException]) -> None:
        def method(*_arguments: Any, **_keywords: Any) -> Any:
            return raises(make)

        self.where = where
        setattr(self, where, method)

    def compute_score(self, **_keywords: Any) -> float:
        if self.where == "retry_on":
            raise ValueError
        return 1.0


PLACES = [
    *[(where, sync_raise) for where in ("post_process_scores", "log", "usage", "retry_on", "tokens", "close")],
    *[(where, async_raise) for where in ("post_process_scores", "log", "close")],
]


@pytest.mark.parametrize(("where", "raises"), PLACES)
def test_errors_of_the_other_methods_are_reported(raises: Callable[..., Any], where: str) -> None:
    make, said = lambda: ValueError("mine"), "ValueError: mine"

    async def body() -> None:
        from dataflow.rewards.slots import Limits

        agent = RewardAgent(Methods(where, raises, make), limits=Limits(tpm=1e6))
        agent.submit(1, samples(1, range(2)))
        if where in ("log", "usage", "close"):
            assert (await agent.collect(1))["score"].tolist() == [1.0] * 4
        else:
            with pytest.raises(RewardFailed, match=said):
                await agent.collect(1)
        if where == "usage":
            with pytest.raises(DataflowError, match=f"'.*' raised {said}"):
                agent.stats()
        if where == "close":
            with pytest.raises(DataflowError, match=f"'.*' raised {said}"):
                await agent.close()
        await agent.close()

    run(body())


RETRIED: list[tuple[str, Callable[[], BaseException], bool]] = [
    ("around one", lambda: ExceptionGroup("calls", [ConnectionResetError("gone")]), True),
    ("mixed", lambda: ExceptionGroup("calls", [ConnectionResetError("gone"), ValueError("bad")]), False),
    ("from a cause", lambda: caused(RuntimeError("call"), ExceptionGroup("", [ConnectionResetError("gone")])), True),
]


def caused(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(("make", "again"), [row[1:] for row in RETRIED], ids=[row[0] for row in RETRIED])
@pytest.mark.parametrize("raises", [sync_raise, async_raise])
def test_a_group_is_tried_again_if_all_that_it_holds_may_pass(
    raises: Callable[..., Any], make: Callable[[], BaseException], again: bool
) -> None:
    async def body() -> None:
        agent = RewardAgent(scored(raises, make), retry=Retry(tries=2, backoff_s=0.0))
        agent.submit(1, samples(1, range(2)))
        with pytest.raises(RewardFailed) as failed:
            await agent.collect(1)
        if isinstance(make(), BaseExceptionGroup):
            assert "ConnectionResetError: gone" in str(failed.value)
        assert agent.stats()["retried"] == int(again)
        await agent.close()

    run(body())
