"""Random lives of agents on one ledger: each request ends once, with its own score, and is paid for once."""

from __future__ import annotations

import asyncio
import math
import tempfile
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataflow.batch import Batch
from dataflow.errors import RewardFailed
from dataflow.reward_agent import Limits, Retry, RewardAgent
from dataflow.rewards.ledger import Ledger
from tests.rigs.virtual_time import run_virtual

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

RULES = ("fail", "score:-7", "drop_sample", "drop_group", "replace_group")
RETRY = Retry(tries=3, timeout_s=10.0, deadline_s=25.0, backoff_s=0.0, max_backoff_s=0.0)


class Refused(Exception):
    status, retry_after = 429, 3.0


class Service:
    """Scores a text by the number in it, after seconds and failures that depend on the text and the try."""

    def __init__(self, seed: int, share_equal: bool) -> None:
        self.seed, self.share_equal = seed, share_equal
        self.tries: Counter[Any] = Counter()
        self.paid: Counter[Any] = Counter()
        self.running = self.most = 0

    async def compute_score(self, solution_str: str, extra_info: dict[str, Any], **_: Any) -> dict[str, Any]:
        key = solution_str if self.share_equal else extra_info["at"]
        self.tries[key] += 1
        dice = Random(f"{self.seed} {key} {self.tries[key]}")
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(dice.uniform(0, 4))
            match dice.choices(("scores", "fails", "breaks", "refuses", "hangs"), (60, 8, 12, 12, 8))[0]:
                case "fails":
                    raise ValueError("no")
                case "breaks":
                    raise ConnectionResetError("gone")
                case "refuses":
                    raise Refused
                case "hangs":
                    await asyncio.sleep(1000)
        finally:
            self.running -= 1
        self.paid[key] += 1
        return {"score": float(solution_str), "note": solution_str}


class Step:
    """What a step asks for, and what was collected of it, over all lives."""

    def __init__(self, number: int, dice: Random, rule: str) -> None:
        self.number = number
        sizes = [dice.randint(1, 3) for _ in range(dice.randint(1, 5))]
        self.groups = {
            group: [f"{dice.choice([dice.randrange(4), 100 * number + 10 * group + at])}" for at in range(size)]
            for group, size in enumerate(sizes)
        }
        self.spare = min(dice.randint(0, 2), len(sizes) - 1) if rule == "replace_group" else 0
        self.left = dict(self.groups)
        self.failed = False

    @property
    def wanted(self) -> int:
        return 0 if self.failed else len(self.left) - self.spare

    def batch(self, share_equal: bool) -> Batch:
        rows = [(group, at, text) for group, texts in self.left.items() for at, text in enumerate(texts)]
        return Batch(
            [group for group, _at, _text in rows],
            {
                "response_text": [text for *_, text in rows],
                "data_source": ["d"] * len(rows),
                "ground_truth": ["t"] * len(rows),
                "extra_info": [{} if share_equal else {"at": (self.number, *row[:2])} for row in rows],
            },
        )

    async def collect(self, agent: RewardAgent, dice: Random, rule: str) -> None:
        """Collects all that is wanted in parts of random sizes, and compares them."""
        try:
            while self.wanted > 0:
                order: Any = dice.choice(["arrival", "index"])
                take = dice.randint(1, self.wanted)
                part = await agent.collect(self.number, take, order=order)
                assert len(part.ids) == take
                for group in part.ids:
                    texts, mine = self.left.pop(group), part.select([group])  # a KeyError: it is collected twice
                    kepts = mine["kept"].tolist() if "kept" in mine else [True] * len(mine)
                    for text, score, kept in zip(texts, mine["score"].tolist(), kepts, strict=True):
                        fixed = rule == "score:-7" and score == -7
                        assert score == float(text) or fixed if kept else math.isnan(score), "never another's, nor 0"
        except RewardFailed:
            assert rule in ("fail", "replace_group")
            self.failed = True


async def live(seed: int, rule: str, share_equal: bool, ledger: Path) -> None:
    dice = Random(seed)
    service, concurrency = Service(seed, share_equal), dice.choice([1, 3, 8])
    steps = [Step(number, dice, rule) for number in range(1, dice.randint(2, 5))]
    lives = dice.randint(1, 3)
    for life in range(lives):
        agent = RewardAgent(
            service,
            limits=Limits(concurrency),
            retry=RETRY,
            on_failure=rule,
            max_failed_share=1,
            ledger=Ledger(ledger),
            share_equal=share_equal,
        )
        asked = [step for step in steps if step.wanted > 0]
        for step in asked:
            agent.submit(step.number, step.batch(share_equal), extra_groups=step.spare)
        collecting = [asyncio.create_task(step.collect(agent, dice, rule)) for step in asked]
        if life < lives - 1:  # a kill
            await asyncio.sleep(dice.uniform(0, 30))
            for task in collecting:
                task.cancel()
        ends = await asyncio.gather(*collecting, return_exceptions=True)
        assert not [end for end in ends if isinstance(end, Exception)], ends
        await agent.close()
        stats = agent.stats()
        assert stats["requested"] == stats["scored"] + stats["failed"] + stats["cancelled"]
        assert (stats["running"], stats["waiting"], service.running) == (0, 0, 0)
    assert all(step.wanted <= 0 for step in steps)
    assert service.most <= concurrency
    assert max(service.paid.values(), default=0) <= 1


@pytest.mark.parametrize("share_equal", [False, True], ids=["alone", "shared"])
@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=12)
@given(seed=st.integers(0, 10**6))
def test_each_request_ends_once_and_is_paid_once(rule: str, share_equal: bool, seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_virtual(lambda: live(seed, rule, share_equal, Path(folder) / "ledger.db"))
