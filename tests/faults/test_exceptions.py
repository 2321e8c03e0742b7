"""User code that raises unusual exceptions: not an Exception, one that cannot be read, or a group of them."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
from collections.abc import Callable
from typing import Any

import pytest

from dataflow.errors import DataflowError, RewardFailed
from dataflow.reward_agent import Retry, RewardAgent
from dataflow.rewards.user.worker import read_reply, reply_of
from dataflow.system.stopping import stopping
from tests.faults.rig.samples import run, samples

pytestmark = pytest.mark.timeout(60)


class Own(BaseException):
    """A kind of the user's that is no Exception."""


class Unreadable(Exception):
    """One whose every look raises."""

    def __str__(self) -> str:
        raise Own("no text")

    __repr__ = __str__

    def __getattr__(self, name: str) -> Any:
        raise KeyboardInterrupt(name)


class NoText(Exception):
    def __str__(self) -> Any:  # type: ignore[override]
        return 17


class Odd(str):
    """A str that is none where it is looked at."""

    def __len__(self) -> int:
        raise ValueError

    split = __len__  # type: ignore[assignment]


class OddText(Exception):
    def __str__(self) -> str:
        return Odd("odd words")


class Huge(Exception):
    def __str__(self) -> str:
        return "x" * 10_000_000


class Stuck(Exception):
    """One that cannot be pickled."""

    def __reduce__(self) -> Any:
        raise Own("not to be sent")


class NoDict(Exception):
    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise Own("no attributes")


class NoCause(Exception):
    @property
    def __cause__(self) -> Any:  # type: ignore[override]
        raise Own("no cause")


class Disguised(Exception):
    @property
    def __class__(self) -> Any:  # type: ignore[override]
        return KeyboardInterrupt


class NamelessKind(type):
    def __getattribute__(cls, name: str) -> Any:
        if name == "__mro__":
            raise Own(name)
        return super().__getattribute__(name)


class Nameless(Exception, metaclass=NamelessKind):
    pass


class HoldsItself(ExceptionGroup[Exception]):
    @property
    def exceptions(self) -> Any:
        return (self,)


class NoHeaders(Exception):
    status = 429

    class headers:
        @staticmethod
        def get(name: str) -> str:
            raise SystemExit(name)


class Incomparable(int):
    def __le__(self, other: Any) -> bool:
        raise Own("not to be compared")

    __lt__ = __gt__ = __ge__ = __le__


class OddNumbers(Exception):
    status = Incomparable(429)
    retry_after = Incomparable(3)


class TwoArguments(Exception):
    """One that can be pickled and not be read again."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


RAISED: list[tuple[Callable[[], BaseException], str]] = [
    (lambda: KeyboardInterrupt("stop"), "KeyboardInterrupt: stop"),
    (lambda: SystemExit(3), "SystemExit: 3"),
    (lambda: GeneratorExit(), "GeneratorExit"),
    (lambda: asyncio.CancelledError(), "CancelledError"),
    (lambda: Own("mine"), "Own: mine"),
    (lambda: Unreadable(), "Unreadable: its __str__ raised Own"),
    (lambda: NoText(), "NoText: its __str__ raised TypeError"),
    (lambda: OddText(), "OddText: odd words"),
    (lambda: Huge(), r"Huge: x{1900}"),
    (lambda: Stuck("s"), "Stuck: s"),
    (lambda: TwoArguments(1, 2), "TwoArguments: 1 and 2"),
    (lambda: NoDict(), "Unreadable: NoDict, which cannot be read"),
    (lambda: NoCause(), "Unreadable: NoCause, which cannot be read"),
    (lambda: Disguised(), "Unreadable: Disguised, which cannot be read"),
    (lambda: Nameless(), "Unreadable: Nameless, which cannot be read"),
    (lambda: HoldsItself("", [ValueError()]), "Unreadable: HoldsItself, which cannot be read"),
    (lambda: NoHeaders(), "NoHeaders"),
    (lambda: OddNumbers(), "OddNumbers"),
]
NAMES = [said.removeprefix("Unreadable: ").split(":")[0] for _, said in RAISED]
raising = pytest.mark.parametrize(("make", "said"), RAISED, ids=NAMES)


def sync_raise(make: Callable[[], BaseException]) -> None:
    raise make()


async def async_raise(make: Callable[[], BaseException]) -> None:
    await asyncio.sleep(0)
    raise make()


async def raise_in_a_task(make: Callable[[], BaseException]) -> None:
    """The loop itself lets SystemExit out of a task that user code starts."""
    await asyncio.gather(asyncio.create_task(async_raise(make)))


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
@pytest.mark.parametrize("raises", [sync_raise, async_raise, raise_in_a_task])
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


def test_a_signal_that_ended_an_earlier_command_makes_no_exception_a_signal() -> None:
    with pytest.raises(KeyboardInterrupt), stopping:
        os.kill(os.getpid(), signal.SIGINT)
    test_whatever_compute_score_raises_fails_that_sample_alone(
        sync_raise, Unreadable, "Unreadable: its __str__ raised Own"
    )


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


@pytest.mark.slow
@raising
@pytest.mark.parametrize(("where", "raises"), PLACES)
def test_errors_of_the_other_methods_are_reported(
    raises: Callable[..., Any], where: str, make: Callable[[], BaseException], said: str
) -> None:
    async def body() -> None:
        from dataflow.rewards.limits.limits import Limits

        agent = RewardAgent(Methods(where, raises, make), limits=Limits(tpm=1e6))
        agent.submit(1, samples(1, range(2)))
        if where in ("log", "usage", "close"):
            assert (await agent.collect(1))["score"].tolist() == [1.0] * 4
        else:
            with pytest.raises(RewardFailed, match=said):
                await agent.collect(1)
        if where == "usage":
            with pytest.raises(DataflowError, match=f"stats: '.*' raised {said}"):
                agent.stats()
        if where == "close":
            with pytest.raises(DataflowError, match=f"'.*' raised {said}"):
                await agent.close()
        await agent.close()

    run(body())


class Sly:
    """Something returned that raises when it is read as a number, or as a list of them."""

    shape = (1,)

    def item(self) -> Any:
        raise Own("no number")

    def __len__(self) -> int:
        raise SystemExit("no length")


@pytest.mark.parametrize("where", ["compute_score", "post_process_scores"])
def test_what_is_returned_may_raise_when_it_is_read(where: str) -> None:
    class Reward:
        def compute_score(self, **_keywords: Any) -> Any:
            return Sly() if where == "compute_score" else 1.0

    reward = Reward()
    if where == "post_process_scores":
        reward.post_process_scores = lambda scores: Sly()  # type: ignore[attr-defined]

    async def body() -> None:
        agent = RewardAgent(reward)
        agent.submit(1, samples(1, range(2)))
        with pytest.raises(RewardFailed, match=r"returned what cannot be read: (Own: no number|SystemExit: no length)"):
            await agent.collect(1)
        await agent.close()

    run(body())


@raising
def test_a_worker_process_sends_what_can_be_read(make: Callable[[], BaseException], said: str) -> None:
    async def body() -> None:  # as in a worker, where Ctrl-C is ignored, no KeyboardInterrupt is the user's
        reply = reply_of(None, make())
        assert len(reply) < 1_000_000
        _result, error = read_reply(reply)
        assert isinstance(error, Exception)
        pickle.dumps(error)

    run(body())


RETRIED: list[tuple[str, Callable[[], BaseException], bool]] = [
    ("around one", lambda: ExceptionGroup("calls", [ConnectionResetError("gone")]), True),
    (
        "nested",
        lambda: ExceptionGroup("a", [ExceptionGroup("b", [ConnectionResetError("gone")])]),
        True,
    ),
    ("mixed", lambda: ExceptionGroup("calls", [ConnectionResetError("gone"), ValueError("bad")]), False),
    ("of no Exception", lambda: BaseExceptionGroup("calls", [ConnectionResetError("gone"), Own("mine")]), False),
    ("from a cause", lambda: caused(RuntimeError("call"), ExceptionGroup("", [ConnectionResetError("gone")])), True),
    ("in a circle", lambda: circle(RuntimeError("round")), False),
]


def caused(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


def circle(error: BaseException) -> BaseException:
    return caused(error, caused(RuntimeError("other"), error))


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
