"""Budget: counts the tokens of a judge's replies and stops its calls at a limit.

Only replies count: a call that is cancelled before its reply is not seen, although a provider may charge for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from dataflow.errors import ConfigError, counted
from dataflow.rewards.judge.errors import JudgeError
from dataflow.usercode.numeric import count_of

CHARACTERS = 4
"""Characters of text that count as one token in estimates."""

_RESUMED = "a run that is resumed does not pay again for the answers in its ledger"


class BudgetSpent(JudgeError):
    """The judge has used up its budget; no further call is made."""

    fatal = True


class Budget:
    """The tokens that one judge object has used.

    Args:
        max_tokens: prompts and replies together; None for no limit.
        max_cost: in the currency of the prices; None for no limit.
        price_per_million: of prompt tokens and of reply tokens.

    Raises:
        ConfigError: a limit is not above 0, or there is a maximum cost without prices.
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
        self._calls_before = self._tokens_before = 0
        self._cost_before = 0.0

    @property
    def tokens(self) -> int:
        """Tokens of prompts and replies together."""
        return self.prompt_tokens + self.completion_tokens

    @property
    def cost(self) -> float:
        """Cost so far, in the currency of the prices; 0 without prices."""
        return self._priced(self.prompt_tokens, self.completion_tokens)

    def _priced(self, prompt: int, completion: int) -> float:
        return (prompt * self._prices[0] + completion * self._prices[1]) / 1e6

    def check(self) -> None:
        """Raises if the budget is used up; called before each request.

        Requests in flight when it is used up count, too, so it can be exceeded by as many calls as were in flight.

        Raises:
            BudgetSpent: the budget is used up.
        """
        tokens, cost = self._tokens_before + self.tokens, self._cost_before + self.cost
        if self._max_tokens is not None and tokens >= self._max_tokens:
            raise self._spent(f"{tokens:,} of {self._max_tokens:,} tokens", "judge.max_tokens")
        if self._max_cost is not None and cost >= self._max_cost:
            raise self._spent(f"{cost:.6g} of a cost of {self._max_cost:g}", "judge.max_cost")

    def _spent(self, what: str, key: str) -> BudgetSpent:
        guess = f" ({self.tokens_estimated:,} tokens estimated)" if self.tokens_estimated else ""
        message = f"the judge's budget is spent: {what}{guess} after {counted(self._calls_before + self.calls, 'call')}"
        return BudgetSpent(
            message,
            retry=False,
            fix=f"raise {key}; {_RESUMED}",
        )

    def count(self, usage: Any, prompt_characters: int, reply_characters: int) -> int | None:
        """Counts one reply.

        Args:
            usage: the field ``usage`` of the reply, unchecked.
            prompt_characters: length of the prompt.
            reply_characters: length of the reply.

        Returns:
            The tokens it used; None if the server does not state them.
        """
        self.calls += 1
        prompt, completion, total = _read(usage)
        stated = prompt > 0  # else there is no usage, or the server fills in zeros
        if stated:
            # Some servers exclude reasoning from the completion, but charge for it.
            completion = max(completion, total - prompt)
        else:
            prompt, completion = estimate(prompt_characters), estimate(reply_characters)
            self.tokens_estimated += prompt + completion
        self.prompt_tokens += prompt
        self.completion_tokens += completion
        return prompt + completion if stated else None

    def count_before(self, calls: int, tokens: int, reply_characters: int) -> None:
        """Counts replies of an earlier process of the run against the limits, but not into :meth:`usage`.

        Their tokens are known only as a sum; those of the replies are estimated.

        Args:
            calls: number of replies.
            tokens: of prompts and replies together.
            reply_characters: length of the replies together.
        """
        completion = min(tokens, estimate(reply_characters))
        self._calls_before += calls
        self._tokens_before += tokens
        self._cost_before += self._priced(tokens - completion, completion)

    def usage(self) -> dict[str, float]:
        """Returns the counts so far.

        Returns:
            ``tokens``; ``prompt_tokens`` and ``completion_tokens``, its parts; ``tokens_estimated``, how many of them
            are estimates; ``cost``; ``calls``, the number of replies.
        """
        names = ("tokens", "prompt_tokens", "completion_tokens", "tokens_estimated", "cost", "calls")
        return {name: getattr(self, name) for name in names}

    def reply_tokens(self) -> int:
        """Returns the mean number of tokens of a reply so far; a guess before the first."""
        return math.ceil(self.completion_tokens / self.calls) if self.calls else 64


def _read(usage: Any) -> tuple[int, int, int]:
    fields = usage if isinstance(usage, Mapping) else {}
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    prompt, completion, total = (count_of(fields.get(name)) or 0 for name in names)
    return prompt, completion, total


def estimate(characters: int) -> int:
    """Returns the estimated number of tokens of a text, given its length in characters.

    >>> estimate(9)
    3
    """
    return -(-characters // CHARACTERS)
