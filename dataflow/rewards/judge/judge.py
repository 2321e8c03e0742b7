"""Judge: an LLM behind the OpenAI chat API that grades a response against the reference answer.

One call of ``compute_score`` is one request: the agent retries, times out and limits the rate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dataflow.errors import ConfigError, counted
from dataflow.rewards.judge.client import Client, JudgeError, address_of
from dataflow.rewards.judge.rubric import Rubric, estimate, read
from dataflow.system.address import without_login
from dataflow.system.secrets import key_of

__all__ = ["BudgetSpent", "Judge", "JudgeError"]

_EXPLANATION = 2000  # characters


class BudgetSpent(JudgeError):
    """The judge has used up its budget; no further call is made."""

    fatal = True


class Judge:
    """A reward object for the RewardAgent; all its calls share one HTTP session.

    Args:
        url: of the server: ``http://host:port``, with or without ``/v1`` or ``/v1/chat/completions``; another path
            must end in ``/chat/completions``. A password in it (``https://user:password@host``) is sent as basic
            authentication.
        model: name of the model in the request.
        api_key_env: environment variable that holds the API key, if the server requires one.
        temperature: of the judge; None sends none.
        max_tokens_reply: of a reply, sent as ``max_tokens``; None uses the server's limit.
        options: further keys of the request body, which override those above.
        max_tokens: budget of this object, prompts and replies together; :class:`BudgetSpent` ends the run after it.
        max_cost: the same as a cost, in the currency of ``price_per_million``.
        price_per_million: of prompt tokens and of reply tokens.
        rubric: the prompt and the score, see :class:`~dataflow.rewards.judge.rubric.Rubric`.

    Raises:
        ConfigError: an argument is invalid.
    """

    def __init__(
        self,
        url: str,
        model: str = "judge",
        api_key_env: str | None = None,
        *,
        temperature: float | None = 0,
        max_tokens_reply: int | None = None,
        options: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
        max_cost: float | None = None,
        price_per_million: Sequence[float] | None = None,
        **rubric: Any,
    ) -> None:
        self._address = address_of(url)
        login = without_login(url)[1]  # which is a secret from here on
        key = key_of(api_key_env, "judge.api_key_env")
        if key and login:
            raise ConfigError("judge.api_key_env is given, and judge.url also holds a password; give one of the two.")
        self.client = Client(key)
        self._rubric = Rubric(**rubric)
        self._prices = price_per_million or (0.0, 0.0)
        if max_cost is not None and not any(self._prices):
            raise ConfigError(f"judge.max_cost={max_cost} needs prices; give judge.price_per_million=[PROMPT,REPLY].")
        self._limits = max_tokens, max_cost
        self._before: tuple[int, int, float] = (0, 0, 0.0)
        # Only replies count: a cancelled call is not seen.
        self._usage = dict.fromkeys(("prompt_tokens", "completion_tokens", "tokens_estimated", "calls"), 0)
        body = {"model": model, "temperature": temperature, "max_tokens": max_tokens_reply}
        self._body = {key: value for key, value in body.items() if value is not None} | dict(options or {})
        if taken := {"messages", "stream"}.intersection(self._body):
            raise ConfigError(f"judge.options may not contain '{min(taken)}': the judge sets it.")

    async def compute_score(
        self,
        data_source: str,
        solution_str: str,
        ground_truth: Any,
        extra_info: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Requests a score for a response.

        Returns:
            ``score``, ``explanation`` (the text of the reply) and, if the server states it, ``tokens``.

        Raises:
            JudgeError: there is no reply, an HTTP error, or not exactly one score within the range.
            BudgetSpent: the budget is used up.
        """
        self._check_budget()  # before the request, so that calls in flight are answered
        chat = self._rubric.chat(solution_str, ground_truth, extra_info)
        reply = read(await self.client.post(self._address, {**self._body, "messages": chat}))
        tokens = self._count(reply.usage, _length(chat), len(reply.thinking) + len(reply.text))
        try:
            score = self._rubric.score(reply)
        except JudgeError as error:
            # Asked again, a judge that draws nothing says the same.
            repeats = self._body.get("temperature") == 0 or self._body.get("seed") is not None
            error.retry = not repeats or reply.cut in ("error", "abort")
            raise
        text = reply.text if len(reply.text) <= _EXPLANATION else reply.text[: _EXPLANATION - 3] + "..."
        columns: dict[str, Any] = {"score": score, "explanation": text}
        return columns if tokens is None else {**columns, "tokens": tokens}

    def tokens(
        self, solution_str: str, ground_truth: Any = "", extra_info: Mapping[str, Any] | None = None, **_arguments: Any
    ) -> int:
        """Returns the estimated number of tokens for grading this response, prompt and reply together.

        A reply without a limit is taken to be as long as those so far.
        """
        calls, replies = self._usage["calls"], self._usage["completion_tokens"]
        limit = self._body.get("max_completion_tokens") or self._body.get("max_tokens")
        reply = limit or (-(-replies // calls) if calls else 64)
        return estimate(_length(self._rubric.chat(solution_str, ground_truth, extra_info))) + int(reply)

    def count_before(self, calls: int, tokens: int, reply_characters: int) -> None:
        """Counts replies of earlier processes of the run against the budget, but not into :meth:`usage`.

        ``tokens`` are those of prompts and replies together; the share of the replies is estimated from their length.
        """
        completion = min(tokens, estimate(reply_characters))
        self._before = (calls, tokens, self._price(tokens - completion, completion))

    def usage(self) -> dict[str, float]:
        """Returns the counts so far.

        Returns:
            ``tokens``; ``prompt_tokens`` and ``completion_tokens``, its parts; ``tokens_estimated``, how many of them
            the server does not state; ``cost``; ``calls``, the number of replies.
        """
        prompt, completion = self._usage["prompt_tokens"], self._usage["completion_tokens"]
        return {**self._usage, "tokens": prompt + completion, "cost": self._price(prompt, completion)}

    def _price(self, prompt: int, completion: int) -> float:
        return (prompt * self._prices[0] + completion * self._prices[1]) / 1e6

    def _check_budget(self) -> None:
        (calls, tokens, cost), own = self._before, self.usage()
        spent = (tokens + own["tokens"], round(cost + own["cost"], 6))
        for key, used, limit in zip(("judge.max_tokens", "judge.max_cost"), spent, self._limits, strict=True):
            if limit is not None and used >= limit:
                raise BudgetSpent(
                    f"the judge's budget is spent: {used:,} of {key}={limit} after "
                    f"{counted(calls + self._usage['calls'], 'call')}",
                    retry=False,
                    fix=f"raise {key}; a run that is resumed does not pay again for the answers in its ledger",
                )

    def _count(self, usage: Mapping[str, Any], prompt_characters: int, reply_characters: int) -> int | None:
        """Counts one reply; returns the tokens that the server states, or None if they had to be estimated."""
        names = ("prompt_tokens", "completion_tokens", "total_tokens")
        prompt, completion, total = (usage.get(name) or 0 for name in names)
        completion = max(completion, total - prompt)  # some servers exclude reasoning, but charge for it
        stated = prompt > 0
        if not stated:
            prompt, completion = estimate(prompt_characters), estimate(reply_characters)
            self._usage["tokens_estimated"] += prompt + completion
        self._usage["calls"] += 1
        self._usage["prompt_tokens"] += prompt
        self._usage["completion_tokens"] += completion
        return prompt + completion if stated else None

    async def close(self) -> None:
        """Closes the connections."""
        await self.client.close()


def _length(chat: Sequence[Mapping[str, str]]) -> int:
    return sum(len(turn["content"]) for turn in chat)
