"""Judge: the client of an OpenAI-style chat server that grades a response against the reference answer."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dataflow.errors import ConfigError, nearest

if TYPE_CHECKING:
    import aiohttp

RULES = {
    "strict": "The response is right only if it gives the reference answer on a line '#### <number>'.",
    "flexible": "The response is right if the last number in it is the reference answer.",
}
"""How the final answer is to be found, as the judge is told."""

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
# The response comes last and greedily: tags that a model writes into it are part of it.
_FIELDS = re.compile(
    r"<reference>\n(?P<reference>.*?)\n</reference>\n<question>\n(?P<question>.*?)\n</question>\n"
    r"<response>\n(?P<response>.*)\n</response>",
    re.DOTALL,
)
_SCORE = re.compile(r"^[ \t]*score:[ \t]*([-+]?[0-9]+(?:\.[0-9]+)?)[ \t]*$", re.IGNORECASE | re.MULTILINE)


class JudgeError(Exception):
    """The judge did not answer, or not with a score."""

    fix = "see that the judge at judge.url is up and replies with one line 'Score: <0..1>'"


class Judge:
    """A reward object for the RewardAgent; all its calls share one HTTP session.

    Args:
        url: of the server: ``http://host:port``, with or without ``/v1`` or ``/v1/chat/completions``.
        model: name that the request asks for.
        api_key_env: environment variable that holds the key, if the server wants one.
        timeout: seconds that one call may take.
        method: ``strict`` or ``flexible``, see :data:`RULES`.

    Raises:
        ConfigError: a url that is none, an unknown method, an unset variable.
    """

    def __init__(
        self,
        url: str,
        model: str = "judge",
        api_key_env: str | None = None,
        timeout: float = 120.0,
        method: str = "strict",
    ) -> None:
        if not re.match(r"https?://[^/]", url):
            raise ConfigError(f"judge.url={url} is no address; give http://host:port.")
        if method not in RULES:
            hint = nearest(method, RULES) or f"; give {' or '.join(RULES)}."
            raise ConfigError(f"judge method '{method}' is unknown{hint}")
        if not timeout > 0:
            raise ConfigError(f"judge.timeout={timeout}; give seconds above 0.")
        base = url.rstrip("/").removesuffix("/chat/completions").removesuffix("/v1")
        self.url = f"{base}/v1/chat/completions"
        self.model = model
        self.timeout = timeout
        self.method = method
        self._headers: dict[str, str] = {}
        if api_key_env:
            key = os.environ.get(api_key_env)
            if not key:
                raise ConfigError(f"judge.api_key_env={api_key_env}: this environment variable is not set.")
            self._headers["Authorization"] = f"Bearer {key}"
        self._session: aiohttp.ClientSession | None = None

    async def compute_score(
        self,
        data_source: str,
        solution_str: str,
        ground_truth: str,
        extra_info: Mapping[str, Any] | None = None,
    ) -> float:
        """Returns the score that the judge gives, 0 to 1.

        Raises:
            JudgeError: no answer in time, an HTTP error, or a reply without exactly one score.
        """
        import aiohttp

        body = {
            "model": self.model,
            "temperature": 0,
            "messages": messages(question_of(extra_info), ground_truth, solution_str, self.method),
        }
        try:
            async with self._opened().post(self.url, json=body) as reply:
                text = await reply.text()
                if reply.status != 200:
                    raise JudgeError(f"{self.url} answered {reply.status}: {_short(text)}")
                answer = await reply.json(content_type=None)
        except TimeoutError as error:
            raise JudgeError(f"{self.url} did not answer within {self.timeout:g} s (judge.timeout)") from error
        except (aiohttp.ClientError, ValueError) as error:
            raise JudgeError(f"{self.url}: {type(error).__name__}: {_short(str(error))}") from error
        try:
            content = answer["choices"][0]["message"]["content"]
        except (LookupError, TypeError) as error:
            raise JudgeError(f"{self.url} answered without choices[0].message.content: {_short(text)}") from error
        return parse_score(content)

    def _opened(self) -> aiohttp.ClientSession:
        """Returns the session; made here because it belongs to the running loop."""
        import aiohttp

        if self._session is None or self._session.closed:
            self._session = aiohttp.ClientSession(
                # The agent bounds the calls. Idle connections go early: many servers drop theirs after 5 s,
                # and a request sent into a connection that is being dropped would be lost.
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0),
                timeout=aiohttp.ClientTimeout(total=self.timeout),
                headers=self._headers,
            )
        return self._session

    async def close(self) -> None:
        """Closes the connections."""
        if self._session is not None:
            await self._session.close()


def question_of(extra_info: Mapping[str, Any] | None) -> str:
    """Returns the question: ``extra_info["question"]``, else the last user message of its ``raw_prompt``."""
    facts = extra_info or {}
    if facts.get("question"):
        return str(facts["question"])
    chat = facts.get("raw_prompt")
    turns: Sequence[Mapping[str, Any]] = () if chat is None else chat
    return next((str(turn["content"]) for turn in reversed(turns) if turn.get("role") == "user"), "")


def messages(question: str, reference: str, response: str, method: str = "strict") -> list[dict[str, str]]:
    """Returns the chat that asks for a score."""
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
    found = _FIELDS.fullmatch(user)
    method = next((name for name, rule in RULES.items() if rule in system), None)
    if found is None or method is None:
        raise ValueError("the chat holds no problem to grade")
    return found["question"], found["reference"], found["response"], method


def parse_score(content: Any) -> float:
    """Returns the number of the reply's one line ``Score: <number>``.

    Raises:
        JudgeError: no such line, several, or a number outside 0..1.

    >>> parse_score("The sum is right.\\nScore: 1")
    1.0
    """
    found = _SCORE.findall(content) if isinstance(content, str) else []
    if len(found) != 1:
        raise JudgeError(f"the judge's reply has {len(found)} lines 'Score: <number>', not one: {_short(str(content))}")
    score = float(found[0])
    if not 0 <= score <= 1:
        raise JudgeError(f"the judge's score {score:g} is outside 0..1: {_short(str(content))}")
    return score


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 200 else line[:197] + "..."
