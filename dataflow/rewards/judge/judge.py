"""Judge: an LLM behind the OpenAI chat API that grades a response against the reference answer.

A reply counts only if it holds exactly one score within its range; all else is an error, never a score. Tries,
time-outs and rate limits are the agent's: one call of ``compute_score`` is one request.
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit
from zlib import crc32

from dataflow.errors import ConfigError, nearest
from dataflow.files import decoded
from dataflow.rewards.judge.chat import COMPLETIONS, JudgeError, JudgeTimeout, make_chat, short
from dataflow.rewards.limits.budget import Budget, BudgetSpent, estimate
from dataflow.system.redaction import keep_secret, redact, redact_reply

__all__ = ["BudgetSpent", "Judge", "JudgeError", "JudgeTimeout"]

RULES = {
    "strict": "The response is right only if it gives the reference answer on a line '#### <number>'.",
    "flexible": "The response is right if the last number in it is the reference answer.",
}
"""How the final answer is to be found, as the judge is told."""

_SPACE = r" \t\xa0\u2002-\u200d\u202f\u2060\u3000\ufeff"
_DRESS = rf"[{_SPACE}*_`'\"\u2018\u2019\u201c\u201d]*+"
SCORE_LINE = (
    rf"^[{_SPACE}>#\u2022-]*+{_DRESS}score{_DRESS}[:\uff1a]{_DRESS}"
    rf"([-+\u2212]?(?:\d++(?:[.\uff0e]\d++)?|[.\uff0e]\d++)){_DRESS}(?:[.\uff0e\u3002]{_DRESS})?$"
)
"""The line ``Score: <number>``, in any case: also emphasised, quoted or in a list as in markdown, with a full stop
behind it, or with full-width signs and other digits."""
PLACEHOLDERS = ("question", "reference", "response")

_ASK = (
    "You grade the response to a problem. {rule} "
    "Reply with one line, 'Score: 1' if it is right and 'Score: 0' if it is wrong."
)
_PROBLEM = """<reference>
{reference}
</reference>
<question>
{question}
</question>
<response>
{response}
</response>"""
_PARTS = _PROBLEM.replace("{question}", "{reference}").replace("{response}", "{reference}").split("{reference}")
_FLAGS = re.IGNORECASE | re.MULTILINE
_SCORE = re.compile(SCORE_LINE, _FLAGS)
_LINE_END = re.compile(r"\r\n?|[\x0b\x0c\x85\u2028\u2029]")
_ASCII = str.maketrans("\u2212\uff0e", "-.")  # what float does not read; it does read all digits
_PLACE = re.compile(r"\{\{([A-Za-z_]\w*)\}\}|\{([A-Za-z_]\w*)\}")
_EXPLANATION = 2000  # characters


class Template:
    """A text with places for ``{question}``, ``{reference}`` and ``{response}``.

    Other braces stand for themselves; ``{{name}}`` stands for ``{name}``. What is filled in is never read as a
    template again, whatever it holds.

    Args:
        text: the text, or the path of a file of it that ends in .txt or .md.
        key: where it was given, for messages.

    Raises:
        ConfigError: a placeholder of another name, or a file that cannot be read.

    >>> Template("Grade {response} as {{score}}, {1}.", "template").fill({"response": "{reference}"})
    'Grade {reference} as {score}, {1}.'
    """

    def __init__(self, text: str, key: str) -> None:
        if text.endswith((".txt", ".md")) and not {"\n", "{"}.intersection(text):
            text = _read_file(text, key)
        self._pieces: list[tuple[str, str | None]] = []
        done = 0
        for found in _PLACE.finditer(text):
            literal = text[done : found.start()] + (f"{{{found[1]}}}" if found[1] else "")
            self._pieces.append((literal, found[2]))
            done = found.end()
        self._pieces.append((text[done:], None))
        self.names = {name for _, name in self._pieces if name}
        self.length = sum(len(literal) for literal, _ in self._pieces)
        unknown = sorted(self.names.difference(PLACEHOLDERS))
        if unknown:
            hint = nearest(unknown[0], PLACEHOLDERS) if len(unknown) == 1 else ""
            known = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
            raise ConfigError(
                f"judge.{key}: unknown placeholder {', '.join(f'{{{name}}}' for name in unknown)}{hint.rstrip('?')}; "
                f"known are {known}; write {{{{{unknown[0]}}}}} for the braces themselves."
            )

    def fill(self, values: Mapping[str, str]) -> str:
        """Returns the text with the values in their places."""
        return "".join([literal if name is None else literal + values[name] for literal, name in self._pieces])


def _read_file(path: str, key: str) -> str:
    try:
        return decoded(Path(path).expanduser().read_bytes()).rstrip("\n")
    except (OSError, ValueError) as error:
        raise ConfigError(f"judge.{key}={path} cannot be read: {error}.") from error


class Judge:
    """A reward object for the RewardAgent; all its calls share one HTTP session.

    Args:
        url: of the server: ``http://host:port``, with or without ``/v1`` or ``/v1/chat/completions``; another path
            must end in ``/chat/completions``. Or a list of servers that all hold the same model. A password in it
            (``https://user:password@host``) is sent as basic authentication, and is no part of an endpoint's name.
        model: name that the request asks for.
        api_key_env: environment variable that holds the key, if the server wants one.
        timeout: seconds that one call may take; None leaves them to the agent.
        method: ``strict`` or ``flexible``, see :data:`RULES`; of the default prompt.
        template: the user message, see :class:`Template`; it must have ``{response}``.
        system: the system message, a template too; with a template of your own there is none by default.
        score_pattern: regular expression that must match the reply exactly once (in any case, ``^`` and ``$`` at
            each line) and whose one group is the score.
        score_range: lowest and highest score that the judge may give.
        normalize: whether that range is mapped to 0..1.
        client: ``aiohttp``, or ``openai`` for that package's client, at about eight times the CPU time.
        temperature: of the judge; None does not send any.
        max_tokens_reply: of a reply, sent as ``max_tokens``; None for the server's own limit.
        options: further keys of the request body; they win over the ones above.
        max_reply_bytes: a longer reply is refused without being read, and not asked for again.
        max_tokens: budget of this object, prompts and replies together; then :class:`BudgetSpent` ends the run.
        max_cost: the same as a cost in the currency of ``price_per_million``.
        price_per_million: of prompt tokens and of reply tokens.

    Raises:
        ConfigError: one of them cannot be.
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
        client: str = "aiohttp",
        temperature: float | None = 0,
        max_tokens_reply: int | None = None,
        options: Mapping[str, Any] | None = None,
        max_reply_bytes: int = 4 << 20,
        max_tokens: int | None = None,
        max_cost: float | None = None,
        price_per_million: Sequence[float] | None = None,
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
        for address, login in map(_without_login, given):
            self._given.append(address)
            logins.append(login)
        self._urls = _addresses(self._given)
        self.url = self._urls[0]
        self.timeout = timeout
        self._system, self._user = _prompt(template, system, method)
        self._pattern, self._low, self._high = _score_rule(score_pattern, score_range)
        self._width = self._high - self._low if normalize else 0.0
        body = {"model": model, "temperature": temperature, "max_tokens": max_tokens_reply}
        self._head, self._reply_tokens = _head({k: v for k, v in body.items() if v is not None}, options)
        self._budget = Budget(max_tokens, max_cost, price_per_million)
        key = _key(api_key_env)
        if key and any(logins):
            raise ConfigError(f"judge.api_key_env={api_key_env}: judge.url holds a password, too; give one of the two.")
        by_url = {address: login for address, login in zip(self._urls, logins, strict=True) if login}
        self._chat = make_chat(client, key, timeout, max_reply_bytes, by_url)

    async def compute_score(
        self,
        data_source: str,
        solution_str: str,
        ground_truth: str,
        extra_info: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Returns ``score``, ``explanation``, the judge's words, and ``tokens`` where the server says how many.

        Raises:
            JudgeError: no answer in time, an HTTP error, or a reply without exactly one score in its range.
            BudgetSpent: a budget was set and is used up.
        """
        self._budget.check()
        url = self._urls[self._place(solution_str)]
        values = {"question": question_of(extra_info), "reference": str(ground_truth), "response": str(solution_str)}
        chat = [{"role": "user", "content": self._user.fill(values)}]
        if self._system is not None:
            chat.insert(0, {"role": "system", "content": self._system.fill(values)})
        raw = await self._chat.ask(url, f"{self._head}{json.dumps(chat)}}}".encode())
        content, usage, cut = _read_reply(url, raw)
        said = content if isinstance(content, str) else ""
        tokens = self._budget.count(usage, sum(len(turn["content"]) for turn in chat), len(said))
        try:
            score = parse_score(content, self._pattern, self._low, self._high)
        except JudgeError as error:
            if cut:
                error.fix = "raise judge.max_tokens_reply: the reply was cut off at the limit"
            raise
        if self._width:
            score = (score - self._low) / self._width
        columns: dict[str, Any] = {"score": score, "explanation": _shortened(said)}
        return columns if tokens is None else {**columns, "tokens": tokens}

    def _place(self, response: str) -> int:
        if len(self._urls) == 1:
            return 0
        return crc32(str(response).encode(errors="surrogatepass")) % len(self._urls)

    @property
    def endpoints(self) -> list[str]:
        """The names that :meth:`endpoint` gives: the urls as they were given, but for passwords."""
        return list(self._given)

    def endpoint(self, solution_str: str, **_arguments: Any) -> str:
        """Returns the url, as it was given, of the server that grades this response: the same whenever it is asked."""
        return self._given[self._place(solution_str)]

    def tokens(
        self, solution_str: str, ground_truth: Any = "", extra_info: Mapping[str, Any] | None = None, **_arguments: Any
    ) -> int:
        """Returns an estimate of the tokens that grading this response takes, prompt and reply."""
        texts = {"question": question_of(extra_info), "reference": str(ground_truth), "response": str(solution_str)}
        templates = [self._user] if self._system is None else [self._user, self._system]
        asked = sum(template.length + sum(len(texts[name]) for name in template.names) for template in templates)
        return estimate(asked) + (self._reply_tokens or self._budget.reply_tokens())

    def usage(self) -> dict[str, float]:
        """See :meth:`dataflow.rewards.limits.budget.Budget.usage`."""
        return self._budget.usage()

    async def close(self) -> None:
        """Closes the connections."""
        await self._chat.close()


def _without_login(url: str) -> tuple[str, str]:
    """Returns an address without user name and password, and the header that stands for them, or nothing."""
    try:
        parts = urlsplit(url)
        user, password = parts.username, parts.password
    except (ValueError, AttributeError):  # it is no address, which is said later
        return url, ""
    if user is None and password is None:
        return url, ""
    login = f"{unquote(user or '')}:{unquote(password or '')}"
    encoded = base64.b64encode(login.encode()).decode()
    # Some take a key in place of the user name.
    for secret in (password or user, unquote(password or user or ""), encoded):
        keep_secret(secret)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl(), f"Basic {encoded}"


def _addresses(urls: list[str]) -> list[str]:
    """Returns the full addresses of the servers."""
    if not urls:
        raise ConfigError("judge.url=[] names no server; give http://host:port.")
    full = []
    for url in urls:
        try:
            parts = urlsplit(url)
            good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
            good = good and url.isascii() and url.isprintable() and " " not in url
        except (ValueError, AttributeError):
            good = False
        if not good:
            raise ConfigError(f"judge.url={redact(str(url))} is no address; give http://host:port.")
        if parts.query or parts.fragment:
            address = parts._replace(query="", fragment="").geturl()
            fix = "leave out what follows the path; a key goes into the variable that judge.api_key_env names"
            raise ConfigError(f"judge.url={address}?...: an address with a query cannot be asked; {fix}.")
        base = url.rstrip("/")
        full.append(base if base.endswith(COMPLETIONS) else f"{base.removesuffix('/v1')}/v1{COMPLETIONS}")
    if len(set(full)) != len(full):
        raise ConfigError(f"judge.url={urls} names a server twice; give each once.")
    return full


def _prompt(template: str | None, system: str | None, method: str) -> tuple[Template | None, Template]:
    user = Template(_PROBLEM if template is None else template, "template")
    if "response" not in user.names:
        raise ConfigError("judge.template has no {response}: the judge would not see what it grades.")
    if system is None and template is None:
        system = _ASK.format(rule=RULES[method])
    return (None if system is None else Template(system, "system")), user


def _score_rule(pattern: str, limits: Sequence[float]) -> tuple[re.Pattern[str], float, float]:
    try:
        compiled = re.compile(pattern, _FLAGS)
    except re.error as error:
        raise ConfigError(f"judge.score_pattern={pattern} is no regular expression: {error}.") from error
    if compiled.groups != 1:
        raise ConfigError(f"judge.score_pattern={pattern} has {compiled.groups} groups; give one, around the score.")
    if len(limits) != 2 or not -float("inf") < limits[0] < limits[1] < float("inf"):
        raise ConfigError(f"judge.score_range={limits}; give the lowest and the highest score.")
    return compiled, float(limits[0]), float(limits[1])


def _head(body: Mapping[str, Any], options: Mapping[str, Any] | None) -> tuple[str, int | None]:
    """Returns the request body up to its messages, and how long its reply may be, in tokens."""
    taken = {"messages", "stream"}.intersection(options or {})
    if taken:
        raise ConfigError(f"judge.options may not hold '{min(taken)}': the judge sets it itself.")
    whole = {**body, **(options or {})}
    try:
        text = json.dumps(whole, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"judge.options={options} cannot be sent as JSON: {error}.") from error
    limit = whole.get("max_completion_tokens") or whole.get("max_tokens")
    return f'{text[:-1]}, "messages": ', limit if isinstance(limit, int) else None


def _key(variable: str | None) -> str | None:
    if not variable:
        return None
    if not variable.isidentifier():
        keep_secret(variable)  # it may be the key itself
        raise ConfigError("judge.api_key_env takes the name of an environment variable that holds the key; set one.")
    key = os.environ.get(variable, "").strip()  # what comes out of a file ends with a line break
    keep_secret(key)
    if not key:
        raise ConfigError(f"judge.api_key_env={variable}: this environment variable is not set.")
    return key


def _read_reply(url: str, raw: bytes) -> tuple[Any, Any, bool]:
    """Returns the content, the usage and whether the reply was cut off at its limit."""
    try:
        answer = json.loads(raw)
        choice = answer["choices"][0]
        return choice["message"]["content"], answer.get("usage"), choice.get("finish_reason") == "length"
    except (ValueError, RecursionError) as error:
        text = short(f"{type(error).__name__}: {error}")
        failure = JudgeError(f"{url} sent broken JSON, {text}: '{_beginning(raw)}'")
    except (LookupError, TypeError, AttributeError):
        message = f"{url} answered without choices[0].message.content: {_beginning(raw)}"
        failure = JudgeError(message, fix="see that judge.url is an OpenAI-style chat server")
    raise failure  # not from the error, which holds the reply as it came


def _beginning(raw: bytes) -> str:
    return short(raw[:1000].decode(errors="replace"))


def _shortened(text: str) -> str:
    text = redact_reply(text[: 2 * _EXPLANATION])
    return text if len(text) <= _EXPLANATION else text[: _EXPLANATION - 3] + "..."


def question_of(extra_info: Mapping[str, Any] | None) -> str:
    """Returns the question: ``extra_info["question"]``, else the last user message of its ``raw_prompt``."""
    facts = extra_info or {}
    if facts.get("question"):
        return str(facts["question"])
    chat = facts.get("raw_prompt")
    turns: Sequence[Mapping[str, Any]] = () if chat is None else chat
    return next((str(turn["content"]) for turn in reversed(turns) if turn.get("role") == "user"), "")


def messages(question: str, reference: str, response: str, method: str = "strict") -> list[dict[str, str]]:
    """Returns the default chat that asks for a score."""
    problem = _PROBLEM.format(reference=reference, question=question, response=response)
    return [
        {"role": "system", "content": _ASK.format(rule=RULES[method])},
        {"role": "user", "content": problem},
    ]


def read_messages(chat: Sequence[Mapping[str, str]]) -> tuple[str, str, str, str]:
    """Returns question, reference, response and method of what :func:`messages` made.

    Raises:
        ValueError: it is another chat.
    """
    system, user = (next((m["content"] for m in chat if m.get("role") == role), "") for role in ("system", "user"))
    head, middle, last, tail = _PARTS
    reference, found, rest = user.removeprefix(head).partition(middle)
    # The response comes last: tags that a model writes into it are part of it.
    question, found_too, response = rest.partition(last)
    method = next((name for name, rule in RULES.items() if rule in system), None)
    whole = user.startswith(head) and found and found_too and response.endswith(tail)
    if not whole or method is None:
        raise ValueError("the chat holds no problem to grade")
    return question, reference, response.removesuffix(tail), method


def parse_score(content: Any, pattern: re.Pattern[str] = _SCORE, low: float = 0.0, high: float = 1.0) -> float:
    """Returns the number that the pattern finds in a reply.

    Raises:
        JudgeError: no match, several, or no number of low..high.

    >>> parse_score("The sum is right.\\n**Score:** 1")
    1.0
    """
    # Models and servers end lines as they like; patterns know of one way.
    text = _LINE_END.sub("\n", content).removeprefix("\ufeff") if isinstance(content, str) else ""
    found = pattern.findall(text)
    # Not "is": re forgets what it compiled, and so makes two of one pattern.
    ours = pattern == _SCORE
    what = "lines 'Score: <number>'" if ours else f"matches of judge.score_pattern={pattern.pattern}"
    quoted = f"'{short(str(content))}'"
    fix = None if ours else "see that judge.template asks for what judge.score_pattern finds"
    if len(found) != 1:
        raise JudgeError(f"the judge's reply has {len(found)} {what}, not one: {quoted}", fix=fix)
    try:
        score = float(found[0].translate(_ASCII))
    except ValueError as error:
        raise JudgeError(f"the judge's score '{short(found[0])}' is no number: {quoted}", fix=fix) from error
    if not low <= score <= high:
        raise JudgeError(f"the judge's score {score:g} is outside {low:g}..{high:g}: {quoted}", fix=fix)
    return score
