"""Budget: what a judge's replies have used, and the end of its calls when that was enough.

It counts what comes back: a call that is cut off before its reply is not seen, though a provider may charge for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from dataflow.errors import ConfigError
from dataflow.rewards.judge.chat import JudgeError

CHARACTERS = 4
"""Characters of text that are taken for one token where nobody counted."""

_CACHE = "with reward.cache=runs/NAME/rewards.sqlite the next run asks for nothing that this one paid for"


class BudgetSpent(JudgeError):
    """The judge has used what it may use; no further call is made."""

    fatal = True


class Budget:
    """The use of one judge in one process, from its making on.

    Args:
        max_tokens: prompt and reply together; None for no limit.
        max_cost: in the currency of the prices; None for no limit.
        price_per_million: of prompt and of reply tokens.

    Raises:
        ConfigError: a limit that is not above 0, a cost without prices.
    """

    def __init__(
        self, max_tokens: int | None, max_cost: float | None, price_per_million: Sequence[float] | None
    ) -> None:
        for name, limit in (("max_tokens", max_tokens), ("max_cost", max_cost)):
            if limit is not None and not limit > 0:
                raise ConfigError(f"judge.{name}={limit}; give a number above 0, or null for no limit.")
        prices = [0.0, 0.0] if price_per_million is None else list(price_per_million)
        if len(prices) != 2 or not all(0 <= price < math.inf for price in prices):
            raise ConfigError(f"judge.price_per_million={price_per_million}; give the prices of prompt and reply.")
        if max_cost is not None and not any(prices):
            raise ConfigError(f"judge.max_cost={max_cost} needs prices; give judge.price_per_million=[PROMPT,REPLY].")
        self._max_tokens = max_tokens
        self._max_cost = max_cost
        self._prices = prices
        self.calls = 0
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.tokens_estimated = 0

    @property
    def tokens(self) -> int:
        """Prompt and reply together."""
        return self.prompt_tokens + self.completion_tokens

    @property
    def cost(self) -> float:
        """In the currency of the prices; 0 without any."""
        return (self.prompt_tokens * self._prices[0] + self.completion_tokens * self._prices[1]) / 1e6

    def check(self) -> None:
        """Call it before each request; those that are on their way are paid for and are not held up.

        Raises:
            BudgetSpent: nothing is left.
        """
        if self._max_tokens is not None and self.tokens >= self._max_tokens:
            raise self._spent(f"{self.tokens:,} of {self._max_tokens:,} tokens", "judge.max_tokens")
        if self._max_cost is not None and self.cost >= self._max_cost:
            raise self._spent(f"{self.cost:.6g} of a cost of {self._max_cost:g}", "judge.max_cost")

    def _spent(self, what: str, key: str) -> BudgetSpent:
        guess = f" ({self.tokens_estimated:,} tokens estimated)" if self.tokens_estimated else ""
        message = f"the judge's budget is spent: {what}{guess} after {self.calls:,} calls"
        return BudgetSpent(
            message,
            retry=False,
            fix=f"raise {key}; {_CACHE}",
        )

    def count(self, usage: Any, asked: int, replied: int) -> int | None:
        """Counts one reply.

        Args:
            usage: its ``usage``, whatever that is.
            asked: characters of the prompt.
            replied: characters of the reply.

        Returns:
            The tokens it used, None if the server does not say.
        """
        self.calls += 1
        prompt, completion, total = _read(usage)
        said = prompt > 0  # else there is no usage, or a server fills in zeros
        if said:
            # Some leave a model's thoughts out of the completion, but charge for them.
            completion = max(completion, total - prompt)
        else:
            prompt, completion = estimate(asked), estimate(replied)
            self.tokens_estimated += prompt + completion
        self.prompt_tokens += prompt
        self.completion_tokens += completion
        return prompt + completion if said else None

    def usage(self) -> dict[str, float]:
        """Returns ``tokens``, the ``prompt_tokens`` and ``completion_tokens`` in it, ``tokens_estimated``, the part
        of it that no server said, ``cost`` and ``calls``, the replies that were counted."""
        names = ("tokens", "prompt_tokens", "completion_tokens", "tokens_estimated", "cost", "calls")
        return {name: getattr(self, name) for name in names}

    def reply_tokens(self) -> int:
        """Returns what a reply takes on average so far; a guess before the first."""
        return math.ceil(self.completion_tokens / self.calls) if self.calls else 64


def _read(usage: Any) -> tuple[int, int, int]:
    said = usage if isinstance(usage, Mapping) else {}
    numbers = (said.get(name) for name in ("prompt_tokens", "completion_tokens", "total_tokens"))
    prompt, completion, total = (n if isinstance(n, int) and n > 0 else 0 for n in numbers)
    return prompt, completion, total


def estimate(characters: int) -> int:
    """Returns the tokens of a text of so many characters.

    >>> estimate(9)
    3
    """
    return -(-characters // CHARACTERS)
