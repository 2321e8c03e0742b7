"""Rubric: what a judge is asked, and how its reply becomes a score.

A reply is accepted only if it holds exactly one score within the range, behind its thinking; anything else is an error,
never a score.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataflow.errors import ConfigError, nearest
from dataflow.files import decoded
from dataflow.models.chat import calls_of, text_of
from dataflow.rewards.judge.client import JudgeError
from dataflow.system.http import short

PLACEHOLDERS = ("question", "reference", "response")

_INSTRUCTION = (
    "You grade the response to a problem. "
    "The response is right only if it gives the reference answer on a line '#### <number>'. "
    "Reply with one line, 'Score: 1' if it is right and 'Score: 0' if it is wrong."
)
_PROBLEM = (
    "<reference>\n{reference}\n</reference>\n<question>\n{question}\n</question>\n<response>\n{response}\n</response>"
)
# The response comes last, so tags within it belong to it.
_ASKED = re.compile(re.sub(r"\\{\w+\\}", "(.*?)", re.escape(_PROBLEM)), re.DOTALL)
_PLACE = re.compile(r"\{\{([A-Za-z_]\w*)\}\}|\{([A-Za-z_]\w*)\}")

_DRESS = r"[ \t*_`'\"]*+"
SCORE_LINE = (
    rf"^[ \t>#*_`'\"-]*+score{_DRESS}[:\uff1a]{_DRESS}([-+]?(?:\d++(?:\.\d++)?|\.\d++)){_DRESS}(?:\.{_DRESS})?$"
)
"""Matches the line ``Score: <number>`` in any case, also as markdown emphasis, quotation or list item, with a trailing
full stop, or a full-width colon."""
_THINK = r"(?:\w+:)?(?:think|thinking|thought|reasoning)"
_THINKING = re.compile(rf"\s*(?:<{_THINK}>|\[THINK\])", re.IGNORECASE)
_THOUGHT = re.compile(rf".*(?:</{_THINK}>|\[/THINK\])", re.IGNORECASE | re.DOTALL)
_CUT = ("length", "content_filter", "error", "abort")
"""Reasons to finish by which a reply is not complete."""


@dataclass(frozen=True)
class Reply:
    """What a chat server answered: ``text``, and the ``thinking`` that came in its place or before it.

    ``cut`` is the reason to finish, if it is one by which the reply is not complete.
    """

    text: str
    thinking: str
    cut: str
    usage: Mapping[str, Any]


def read(answer: Any) -> Reply:
    """Reads the JSON of a reply; raises a JudgeError if it holds no message.

    The server may separate the thinking, or leave it in the text, maybe without the tag that begins it, which many chat
    templates write into the prompt.
    """
    try:
        choice, usage = answer["choices"][0], answer.get("usage")
        message = choice["message"]
        text = message.get("content") or ""
        thinking = message.get("reasoning_content") or message.get("reasoning") or ""
        if isinstance(text, list):  # as Mistral sends it
            text = "\n".join(part["text"] for part in text if part.get("type") == "text")
    except (LookupError, TypeError, AttributeError):
        raise JudgeError(f"the judge answered without choices[0].message: {short(json.dumps(answer))}") from None
    if (end := _THOUGHT.match(text)) or _THINKING.match(text):
        at = end.end() if end else len(text)
        text, thinking = text[at:], thinking + text[:at]
    why = choice.get("finish_reason")
    return Reply(text.strip(), thinking, why if why in _CUT else "", usage or {})


class Rubric:
    """The prompt, and the rule by which its reply is a score.

    Args:
        template: the user message with ``{question}``, ``{reference}`` and ``{response}``, or the path of a .txt or .md
            file with it; must contain ``{response}``. Other braces are literal; ``{{name}}`` yields ``{name}``.
        system: the system message, also a template; by default there is none if ``template`` is given.
        score_pattern: regular expression that must match the reply exactly once, and whose only group is the score.
            Case is ignored; ``^`` and ``$`` match at each line. None for :data:`SCORE_LINE`.
        score_range: lowest and highest valid score.
        normalize: whether that range is mapped to 0..1.

    Raises:
        ConfigError: an argument is invalid.
    """

    def __init__(
        self,
        template: str | None = None,
        system: str | None = None,
        score_pattern: str | None = None,
        score_range: Sequence[float] = (0, 1),
        normalize: bool = True,
    ) -> None:
        if system is None and template is None:
            system = _INSTRUCTION
        self._turns = {"user": _PROBLEM if template is None else _template(template, "template")}
        if system is not None:
            self._turns = {"system": _template(system, "system"), **self._turns}
        if not any(place[2] == "response" for place in _PLACE.finditer(self._turns["user"])):
            raise ConfigError("judge.template has no {response}: the judge would not see what it grades.")
        self._own = score_pattern
        try:
            self._pattern = re.compile(score_pattern or SCORE_LINE, re.IGNORECASE | re.MULTILINE)
        except re.error as error:
            raise ConfigError(f"judge.score_pattern={score_pattern} is not a regular expression: {error}.") from error
        if (groups := self._pattern.groups) != 1:
            raise ConfigError(f"judge.score_pattern={score_pattern} has {groups} groups; give one, around the score.")
        self._low, self._high = map(float, score_range)
        if not -float("inf") < self._low < self._high < float("inf"):
            raise ConfigError(f"judge.score_range={score_range}; give the lowest and the highest score.")
        self._normalize = normalize

    def chat(self, solution: str, truth: Any, extra_info: Mapping[str, Any] | None) -> list[dict[str, str]]:
        """Returns the messages that ask for the score of a response; what is filled in is never read as a template."""
        values = {
            "question": question_of(extra_info),
            "reference": str(truth),
            "response": response_of(solution, extra_info),
        }

        def value(place: re.Match[str]) -> str:
            return f"{{{place[1]}}}" if place[1] else values[place[2]]

        return [{"role": role, "content": _PLACE.sub(value, text)} for role, text in self._turns.items()]

    def score(self, reply: Reply) -> float:
        """Returns the score in a reply; raises a JudgeError unless exactly one match is a number within the range.

        Of one that was cut off, only a whole first line counts: the rest might have changed the score.
        """
        lines, said = reply.text.splitlines(), f"'{short(reply.text)}'"
        if not reply.text and reply.thinking:
            said += f", after the thinking '{short(reply.thinking)}'"
        if reply.cut:
            lines = lines[:1] if len(lines) > 1 else []
            said += f", and it ended by '{reply.cut}'"
        fix = None if self._own is None else "see that judge.template asks for what judge.score_pattern finds"
        if reply.cut == "length":
            fix = "raise judge.max_tokens_reply: the reply was cut off at that limit, or at the server's"
        found = self._pattern.findall("\n".join(lines))
        if len(found) != 1:
            what = f"matches of judge.score_pattern={self._own}" if self._own else "lines 'Score: <number>'"
            raise JudgeError(f"the judge's reply has {len(found)} {what}, not one: {said}", fix=fix)
        try:
            score = float(found[0])
        except ValueError:
            raise JudgeError(f"the judge's score '{short(found[0])}' is not a number: {said}", fix=fix) from None
        if not self._low <= score <= self._high:
            limits = f"{self._low:g}..{self._high:g}"
            raise JudgeError(f"the judge's score {score:g} is outside {limits}: {said}", fix=fix)
        return (score - self._low) / (self._high - self._low) if self._normalize else score


def _template(text: str, key: str) -> str:
    """Returns the text of a template, read from its file if it names one."""
    if is_file(text):
        try:
            text = decoded(Path(text).expanduser().read_bytes()).rstrip("\n")
        except (OSError, ValueError) as error:
            raise ConfigError(f"judge.{key}={text} cannot be read: {error}.") from error
    names = {place[2] for place in _PLACE.finditer(text) if place[2]}
    if unknown := sorted(names.difference(PLACEHOLDERS)):
        hint = nearest(unknown[0], PLACEHOLDERS).rstrip("?")
        known = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
        raise ConfigError(
            f"judge.{key}: unknown placeholder {{{unknown[0]}}}{hint}; known are {known}; write {{{{{unknown[0]}}}}} "
            "for literal braces."
        )
    return text


def is_file(text: str) -> bool:
    """Whether the text of a template is the path of a file with it."""
    return text.endswith((".txt", ".md")) and not {"\n", "{"}.intersection(text)


def question_of(extra_info: Mapping[str, Any] | None) -> str:
    """Returns the question: ``extra_info["question"]``, else the last user message of its ``raw_prompt``.

    If the response is a conversation and the prompt has several messages, all of the prompt is the question.
    """
    facts = extra_info or {}
    if facts.get("question"):
        return str(facts["question"])
    chat = facts.get("raw_prompt")
    turns: Sequence[Mapping[str, Any]] = () if chat is None else chat
    if facts.get("conversation") and len(turns) > 1:
        return transcript(turns)
    return next((text_of(turn["content"]) for turn in reversed(turns) if turn.get("role") == "user"), "")


def response_of(solution: str, extra_info: Mapping[str, Any] | None) -> str:
    """Returns what the judge grades: the response, or all turns of a conversation, each with its role."""
    turns = (extra_info or {}).get("conversation")
    return transcript(turns) if turns is not None and len(turns) > 1 else str(solution)


def transcript(chat: Sequence[Mapping[str, Any]]) -> str:
    """Returns chat messages as text, each with its role, and a tool's with the tool's name.

    Tool calls that a message has beside its content follow that as JSON.

    >>> transcript([{"role": "assistant", "content": "1 + 1 ="}, {"role": "tool", "name": "add", "content": "2"}])
    'assistant: 1 + 1 =\\ntool add: 2'
    """
    lines = []
    for turn in chat:
        content, calls = turn.get("content"), [text_of(dict(call)) for call in calls_of(turn)]
        said = [*([] if content is None and calls else [text_of(content)]), *calls]
        lines.append(f"{' '.join(filter(None, (turn.get('role'), turn.get('name'))))}: " + "\n".join(said))
    return "\n".join(lines)


def messages(question: str, reference: str, response: str) -> list[dict[str, str]]:
    """Returns the default chat that requests a score."""
    return Rubric().chat(response, reference, {"question": question})


def read_messages(chat: Sequence[Mapping[str, str]]) -> tuple[str, str, str]:
    """Returns question, reference and response of a chat that :func:`messages` made; for the stand-in judge.

    Raises a ValueError if the chat has another form.
    """
    system, user = (next((m["content"] for m in chat if m.get("role") == role), "") for role in ("system", "user"))
    found = _ASKED.fullmatch(user)
    if found is None or system != _INSTRUCTION:
        raise ValueError("the chat holds no problem to grade")
    reference, question, response = found.groups()
    return question, reference, response


def estimate(characters: int) -> int:
    """Returns the estimated number of tokens of a text, given its length in characters.

    >>> estimate(9)
    3
    """
    return -(-characters // 4)
