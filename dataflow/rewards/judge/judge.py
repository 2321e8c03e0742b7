"""Judge: an LLM behind the OpenAI chat API that grades a response against the reference answer.

A reply is accepted only if it holds exactly one score within the range, behind its thinking; anything else is an error,
never a score, and is asked for again only if it may come out differently. One call of ``compute_score`` is one request:
the agent retries, times out and limits the rate.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from dataflow.errors import ConfigError, nearest
from dataflow.rewards.judge.address import addresses
from dataflow.rewards.judge.budget import Budget, BudgetSpent, estimate
from dataflow.rewards.judge.chat import Chat
from dataflow.rewards.judge.errors import JudgeError, JudgeTimeout
from dataflow.rewards.judge.prompt import RULES, prompt_of, question_of, response_of
from dataflow.rewards.judge.reply import BROKEN_OFF, LINE_END, Reply, read
from dataflow.rewards.limits.router import Router, Routing
from dataflow.system.address import without_login
from dataflow.system.http import short
from dataflow.system.secrets import key_of, redact_known

__all__ = ["BudgetSpent", "Judge", "JudgeError", "JudgeTimeout"]

_SPACE = r" \t\xa0\u2002-\u200d\u202f\u2060\u3000\ufeff"
_DRESS = rf"[{_SPACE}*_`'\"\u2018\u2019\u201c\u201d]*+"
SCORE_LINE = (
    rf"^[{_SPACE}>#\u2022-]*+{_DRESS}score{_DRESS}[:\uff1a]{_DRESS}"
    rf"([-+\u2212]?(?:\d++(?:[.\uff0e]\d++)?|[.\uff0e]\d++)){_DRESS}(?:[.\uff0e\u3002]{_DRESS})?$"
)
"""Matches the line ``Score: <number>`` in any case, also as markdown emphasis, quotation or list item, with a trailing
full stop, with full-width signs, and with any Unicode digits."""
_FLAGS = re.IGNORECASE | re.MULTILINE
_SCORE = re.compile(SCORE_LINE, _FLAGS)
_ASCII = str.maketrans("\u2212\uff0e", "-.")  # float() does not accept these; it does accept all digits
_EXPLANATION = 2000  # characters
_CUT_FIXES = dict.fromkeys(
    ("length", "max_tokens"), "raise judge.max_tokens_reply: the reply was truncated at that limit, or at the server's"
) | {"content_filter": "use a judge whose content filter lets the responses pass"}


class Judge:
    """A reward object for the RewardAgent; all its calls share one HTTP session.

    Args:
        url: of the server: ``http://host:port``, with or without ``/v1`` or ``/v1/chat/completions``; another path
            must end in ``/chat/completions``. Or a list of servers that all serve the same model. A password in it
            (``https://user:password@host``) is sent as basic authentication and left out of the endpoint's name.
        model: name of the model in the request.
        api_key_env: environment variable that holds the API key, if the server requires one.
        timeout: of one call, in seconds; None uses the agent's.
        method: ``strict`` or ``flexible``, see :data:`~dataflow.rewards.judge.prompt.RULES`; for the default prompt.
        template: the user message, see :class:`~dataflow.rewards.judge.prompt.Template`; must contain ``{response}``.
        system: the system message, also a template; by default there is none if ``template`` is given.
        score_pattern: regular expression that must match the reply exactly once, and whose only group is the score.
            Case is ignored; ``^`` and ``$`` match at each line.
        score_range: lowest and highest valid score.
        normalize: whether that range is mapped to 0..1.
        temperature: of the judge; None sends none.
        max_tokens_reply: of a reply, sent as ``max_tokens``; None uses the server's limit.
        options: further keys of the request body, which override those above.
        max_reply_bytes: a longer reply is an error and not retried.
        max_tokens: budget of this object, prompts and replies together; :class:`BudgetSpent` ends the run after it.
        max_cost: the same as a cost, in the currency of ``price_per_million``.
        price_per_million: of prompt tokens and of reply tokens.
        slots: calls in flight at one server; None for the agent's limits.
        routing: which server grades a response, see :class:`~dataflow.rewards.limits.router.Router`.
        what: what the servers are, for messages.

    Attributes:
        router: of the servers; None for a single one without ``slots``.
        chat: the connections to them.

    Raises:
        ConfigError: an argument is invalid.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        model: str = "judge",
        api_key_env: str | None = None,
        timeout: float | None = 120.0,
        method: str = "strict",
        *,
        template: str | None = None,
        system: str | None = None,
        score_pattern: str = SCORE_LINE,
        score_range: Sequence[float] = (0, 1),
        normalize: bool = True,
        temperature: float | None = 0,
        max_tokens_reply: int | None = None,
        options: Mapping[str, Any] | None = None,
        max_reply_bytes: int = 4 << 20,
        max_tokens: int | None = None,
        max_cost: float | None = None,
        price_per_million: Sequence[float] | None = None,
        slots: int | None = None,
        routing: Routing = "least",
        what: str = "the judge",
    ) -> None:
        if method not in RULES:
            hint = nearest(method, RULES) or f"; give {' or '.join(RULES)}."
            raise ConfigError(f"judge method '{method}' is unknown{hint}")
        sizes = {"timeout": timeout, "max_tokens_reply": max_tokens_reply, "max_reply_bytes": max_reply_bytes}
        for name, number in sizes.items():
            if number is not None and not number > 0:
                raise ConfigError(f"judge.{name}={number}; give a number above 0.")
        given = [url] if isinstance(url, str) else list(url)
        self._given, logins = [], []
        for address, login in map(without_login, given):
            self._given.append(address)
            logins.append(login)
        self._urls = addresses(self._given)
        self.url = self._urls[0]
        self._address = dict(zip(self._given, self._urls, strict=True))
        self.router: Router | None = None
        if len(self._urls) > 1 or slots is not None:
            self.router = Router(self._given, slots, routing, _prompt_of, what)
        self.timeout = timeout
        self._system, self._user = prompt_of(template, system, method)
        self._pattern, self._low, self._high = _score_rule(score_pattern, score_range)
        self._width = self._high - self._low if normalize else 0.0
        body = {"model": model, "temperature": temperature, "max_tokens": max_tokens_reply}
        self._head, self._reply_tokens, self._repeats = _head({k: v for k, v in body.items() if v is not None}, options)
        self._budget = Budget(max_tokens, max_cost, price_per_million)
        key = key_of(api_key_env, "judge.api_key_env")
        if key and any(logins):
            raise ConfigError("judge.api_key_env is given, and judge.url also holds a password; give one of the two.")
        by_url = {address: login for address, login in zip(self._urls, logins, strict=True) if login}
        self.chat = Chat(key, timeout, max_reply_bytes, by_url)

    async def compute_score(
        self,
        data_source: str,
        solution_str: str,
        ground_truth: str,
        extra_info: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Requests a score for a response.

        Returns:
            ``score``, ``explanation`` (the text of the reply) and, if the server states it, ``tokens``.

        Raises:
            JudgeError: there is no reply in time, an HTTP error, or not exactly one score within the range.
            BudgetSpent: the budget is used up.
        """
        self._budget.check()
        values = _values(solution_str, ground_truth, extra_info)
        chat = [{"role": "user", "content": self._user.fill(values)}]
        if self._system is not None:
            chat.insert(0, {"role": "system", "content": self._system.fill(values)})
        url, raw = await self._send(f"{self._head}{json.dumps(chat)}}}".encode())
        reply = read(url, raw, self._pattern)
        tokens = self._budget.count(reply.usage, sum(len(turn["content"]) for turn in chat), reply.characters)
        try:
            score = self._score(reply)
        except JudgeError as error:
            error.retry = not self._repeats or reply.cut in BROKEN_OFF
            error.fix = _CUT_FIXES.get(reply.cut, error.fix)
            raise
        if self._width:
            score = (score - self._low) / self._width
        columns: dict[str, Any] = {"score": score, "explanation": _shortened(reply.text or "")}
        return columns if tokens is None else {**columns, "tokens": tokens}

    def _score(self, reply: Reply) -> float:
        if reply.text is None:
            only = f", only {reply.instead}" if reply.instead else ""
            cut = f", and ended by '{reply.cut}'" if reply.cut else ""
            fix = "see what came in its place; if the judge thinks longer than it may, raise judge.max_tokens_reply"
            raise JudgeError(f"the judge's reply has no answer{only}{cut}", fix=fix if only else None)
        return parse_score(reply.text, self._pattern, self._low, self._high, reply.cut)

    async def _send(self, body: bytes) -> tuple[str, bytes]:
        """Returns the address of the server that was called, and its reply."""
        if self.router is None:
            return self.url, await self.chat.send(self.url, body)
        name = self.router.server()
        url = self._address[name]
        return url, await self.router.guarded(name, self.chat.send(url, body))

    @property
    def endpoints(self) -> list[str]:
        """The names of the servers: the urls as given, without passwords."""
        return list(self._given)

    def endpoint(self, **_arguments: Any) -> str:
        """Returns the name of the only server; of several ones the router chooses one when a call starts."""
        return self._given[0]

    def count_before(self, calls: int, tokens: int, reply_characters: int) -> None:
        """See :meth:`dataflow.rewards.judge.budget.Budget.count_before`."""
        self._budget.count_before(calls, tokens, reply_characters)

    def tokens(
        self, solution_str: str, ground_truth: Any = "", extra_info: Mapping[str, Any] | None = None, **_arguments: Any
    ) -> int:
        """Returns the estimated number of tokens for grading this response, prompt and reply together."""
        texts = _values(solution_str, ground_truth, extra_info)
        templates = [self._user] if self._system is None else [self._user, self._system]
        prompt = sum(template.length + sum(len(texts[name]) for name in template.names) for template in templates)
        return estimate(prompt) + (self._reply_tokens or self._budget.reply_tokens())

    def usage(self) -> dict[str, float]:
        """See :meth:`dataflow.rewards.judge.budget.Budget.usage`; with several servers also their router's counts."""
        return self._budget.usage() | ({} if self.router is None else self.router.counts)

    async def close(self) -> None:
        """Closes the connections."""
        await self.chat.close()


def _prompt_of(arguments: Mapping[str, Any]) -> str:
    return question_of(arguments.get("extra_info"))


def _values(solution: str, truth: Any, extra_info: Mapping[str, Any] | None) -> dict[str, str]:
    """Returns what the placeholders of the templates stand for."""
    response = response_of(solution, extra_info)
    return {"question": question_of(extra_info), "reference": str(truth), "response": response}


def _score_rule(pattern: str, limits: Sequence[float]) -> tuple[re.Pattern[str], float, float]:
    try:
        compiled = re.compile(pattern, _FLAGS)
    except re.error as error:
        raise ConfigError(f"judge.score_pattern={pattern} is not a regular expression: {error}.") from error
    if compiled.groups != 1:
        raise ConfigError(f"judge.score_pattern={pattern} has {compiled.groups} groups; give one, around the score.")
    if len(limits) != 2 or not -float("inf") < limits[0] < limits[1] < float("inf"):
        raise ConfigError(f"judge.score_range={limits}; give the lowest and the highest score.")
    return compiled, float(limits[0]), float(limits[1])


def _head(body: Mapping[str, Any], options: Mapping[str, Any] | None) -> tuple[str, int | None, bool]:
    """Returns the request body up to its messages, the limit of its reply, and whether a reply comes out the same."""
    taken = {"messages", "stream"}.intersection(options or {})
    if taken:
        raise ConfigError(f"judge.options may not contain '{min(taken)}': the judge sets it.")
    whole = {**body, **(options or {})}
    try:
        text = json.dumps(whole, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"judge.options={options} cannot be sent as JSON: {error}.") from error
    limit = whole.get("max_completion_tokens") or whole.get("max_tokens")
    repeats = whole.get("temperature") == 0 or whole.get("seed") is not None
    return f'{text[:-1]}, "messages": ', limit if isinstance(limit, int) else None, repeats


def _shortened(text: str) -> str:
    text = redact_known(text[: 2 * _EXPLANATION])
    return text if len(text) <= _EXPLANATION else text[: _EXPLANATION - 3] + "..."


def parse_score(
    content: str, pattern: re.Pattern[str] = _SCORE, low: float = 0.0, high: float = 1.0, cut: str = ""
) -> float:
    """Returns the score in a reply.

    Args:
        content: of the reply, without thinking.
        pattern: regular expression with one group.
        low, high: the valid range.
        cut: why the reply ended early, if it did. Then only a score in its first line counts, if that is complete:
            the rest of the reply might have changed it.

    Raises:
        JudgeError: there is not exactly one match, it is not a number within the range, or it may not be the last.

    >>> parse_score("The sum is right.\\n**Score:** 1")
    1.0
    """
    # Models and servers use any line ending; the pattern matches "\n" only.
    text = LINE_END.sub("\n", content).removeprefix("\ufeff")
    found = list(pattern.finditer(text))
    # Not "is": re.compile() may return another object for the same pattern.
    ours = pattern == _SCORE
    what = "lines 'Score: <number>'" if ours else f"matches of judge.score_pattern={pattern.pattern}"
    quoted = f"'{short(content)}'"
    fix = None if ours else "see that judge.template asks for what judge.score_pattern finds"
    if len(found) != 1:
        raise JudgeError(f"the judge's reply has {len(found)} {what}, not one: {quoted}", fix=fix)
    number = found[0][1] or ""
    before, after = text[: text.rfind("\n", 0, found[0].end()) + 1], text[found[0].end(1) :]
    if cut and (before.strip() or not after.strip(" \t.")):
        raise JudgeError(f"the judge's reply ended by '{cut}' before its score was sure: {quoted}", fix=fix)
    try:
        score = float(number.translate(_ASCII))
    except ValueError as error:
        raise JudgeError(f"the judge's score '{short(number)}' is not a number: {quoted}", fix=fix) from error
    if not low <= score <= high:
        raise JudgeError(f"the judge's score {score:g} is outside {low:g}..{high:g}: {quoted}", fix=fix)
    return score
