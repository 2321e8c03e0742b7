"""Values and exceptions of user code that raise at every look: none ends the event loop, and none is a time-out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Any

import pytest

from dataflow.batch import Batch
from dataflow.errors import DataflowError
from dataflow.reward_agent import Limits, Retry, RewardAgent
from dataflow.usercode.copies import is_awaitable, is_coroutine


class NoLook:
    """Raises at every access to an attribute, its class included."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


class NoClass:
    @property
    def __class__(self) -> Any:  # type: ignore[override]
        raise SystemExit(3)


class NoItems(Mapping[str, Any]):
    """A mapping that cannot be read."""

    def __getitem__(self, key: str) -> Any:
        raise KeyboardInterrupt(key)

    def __iter__(self) -> Iterator[str]:
        raise SystemExit(4)

    def __len__(self) -> int:
        return 1


class NoFloat(Fraction):
    def __float__(self) -> float:
        raise KeyboardInterrupt


class NoRead(Exception):
    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


ODD = [NoLook, NoClass, NoItems, NoFloat]
LOOKS = pytest.mark.parametrize("kind", ODD)


def _run(reward: Any, *, stats: bool = False) -> list[float]:
    """Scores a sample without a time-out: a call whose end is lost would never end the test."""

    async def body() -> list[float]:
        loop, lost = asyncio.get_running_loop(), list[Any]()
        loop.set_exception_handler(lambda _loop, context: lost.append(context))
        retry = Retry(tries=1, timeout_s=None, deadline_s=None)
        agent = RewardAgent(reward, limits=Limits(tpm=1e6), retry=retry)
        try:
            async with asyncio.timeout(30):
                agent.submit(1, Batch([0], {"response_text": ["7"], "ground_truth": ["7"], "data_source": ["d"]}))
                scores: list[float] = (await agent.collect(1))["score"].tolist()
                if stats:
                    agent.stats()
                return scores
        finally:
            await agent.close()
            assert not lost
            assert [queue.running for queue in agent._limiter.queues.values()] == [0]

    return asyncio.run(body())


@LOOKS
@pytest.mark.parametrize("is_async", [False, True])
def test_a_result_that_cannot_be_read_is_a_failure(kind: Callable[[], Any], is_async: bool) -> None:
    def sync(**_arguments: Any) -> Any:
        return kind()

    async def later(**_arguments: Any) -> Any:
        return kind()

    with pytest.raises(DataflowError, match=r"'(sync|later)' returned .*; return a finite number"):
        _run(later if is_async else sync)


@LOOKS
def test_a_column_of_tokens_that_cannot_be_read(kind: Callable[[], Any]) -> None:
    def tokens(**_arguments: Any) -> Any:
        return {"score": 1.0, "tokens": kind()}

    if kind in (NoItems, NoFloat):  # no number of tokens, but a column
        assert _run(tokens) == [1.0]
        return
    with pytest.raises(DataflowError, match="'tokens' returned what cannot be read"):
        _run(tokens)


def _method(name: str, does: Callable[[], Any]) -> Any:
    def compute_score(self: Any, **_arguments: Any) -> float:
        if name == "retry_on":
            raise ValueError("once more")
        return 1.0

    def method(self: Any, *_positional: Any, **_arguments: Any) -> Any:
        return does()

    method.__name__ = name
    return type("Mine", (), {"compute_score": compute_score, name: method})()


METHODS = pytest.mark.parametrize("name", ["retry_on", "tokens", "usage", "close", "post_process_scores"])


@METHODS
@pytest.mark.parametrize("kind", [NoRead, KeyboardInterrupt, GeneratorExit])
def test_a_method_that_raises_what_cannot_be_read(name: str, kind: type[BaseException]) -> None:
    def fail() -> Any:
        raise kind

    with pytest.raises(DataflowError, match=rf"(retries|'{name}') raised .*{kind.__name__}") as caught:
        _run(_method(name, fail), stats=True)
    chain: BaseException | None = caught.value
    while chain is not None:
        assert not issubclass(type(chain), NoRead), "it would raise where the chain is shown"
        chain = chain.__cause__ or chain.__context__


@LOOKS
@pytest.mark.parametrize("name", ["tokens", "usage", "post_process_scores"])
def test_a_method_that_returns_what_cannot_be_read(name: str, kind: Callable[[], Any]) -> None:
    with pytest.raises(DataflowError, match=rf"'{name}' returned"):
        _run(_method(name, kind), stats=True)


def test_what_can_be_awaited() -> None:
    async def coroutine() -> None: ...

    made = coroutine()
    assert is_awaitable(made)
    assert is_coroutine(made)
    made.close()
    assert not any(is_awaitable(value) for value in (NoLook(), NoClass(), 1, None, (n for n in range(3))))
    assert not any(is_coroutine(value) for value in (NoLook(), NoClass(), 1, None))
