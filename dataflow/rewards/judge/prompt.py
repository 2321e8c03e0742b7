"""The judge's prompt: its templates, and the default chat, which the run's own judge reads back."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dataflow.errors import ConfigError, nearest
from dataflow.files import decoded
from dataflow.models.chat import calls_of, text_of

RULES = {
    "strict": "The response is right only if it gives the reference answer on a line '#### <number>'.",
    "flexible": "The response is right if the last number in it is the reference answer.",
}
"""The instruction for each method of finding the final answer."""

PLACEHOLDERS = ("question", "reference", "response")

_INSTRUCTION = (
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
_PLACE = re.compile(r"\{\{([A-Za-z_]\w*)\}\}|\{([A-Za-z_]\w*)\}")


class Template:
    """A text with the placeholders ``{question}``, ``{reference}`` and ``{response}``.

    Other braces are literal; ``{{name}}`` yields ``{name}``. Placeholders in the values are not expanded.

    Args:
        text: the text, or the path of a file that ends in .txt or .md.
        key: the configuration key, for messages.

    Raises:
        ConfigError: a placeholder is unknown, or the file cannot be read.

    >>> Template("Grade {response} as {{score}}, {1}.", "template").fill({"response": "{reference}"})
    'Grade {reference} as {score}, {1}.'
    """

    def __init__(self, text: str, key: str) -> None:
        if is_file(text):
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
                f"known are {known}; write {{{{{unknown[0]}}}}} for literal braces."
            )

    def fill(self, values: Mapping[str, str]) -> str:
        """Returns the text with its placeholders replaced by values."""
        return "".join([literal if name is None else literal + values[name] for literal, name in self._pieces])


def is_file(text: str) -> bool:
    """Whether the text of a template is the path of a file with it."""
    return text.endswith((".txt", ".md")) and not {"\n", "{"}.intersection(text)


def _read_file(path: str, key: str) -> str:
    try:
        return decoded(Path(path).expanduser().read_bytes()).rstrip("\n")
    except (OSError, ValueError) as error:
        raise ConfigError(f"judge.{key}={path} cannot be read: {error}.") from error


def prompt_of(template: str | None, system: str | None, method: str) -> tuple[Template | None, Template]:
    """Returns the templates of the system message, if there is one, and of the user message.

    Raises:
        ConfigError: a template is invalid.
    """
    user = Template(_PROBLEM if template is None else template, "template")
    if "response" not in user.names:
        raise ConfigError("judge.template has no {response}: the judge would not see what it grades.")
    if system is None and template is None:
        system = _INSTRUCTION.format(rule=RULES[method])
    return (None if system is None else Template(system, "system")), user


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
    """Returns what the judge grades: the response, or all turns of a conversation, each with its role.

    Args:
        solution: the response as text.
        extra_info: of the sample; ``conversation`` holds the chat messages that follow the prompt, if it has several
            turns.
    """
    turns = (extra_info or {}).get("conversation")
    return transcript(turns) if turns is not None and len(turns) > 1 else str(solution)


def transcript(chat: Sequence[Mapping[str, Any]]) -> str:
    """Returns chat messages as text, each with its role, and a tool's with the tool's name.

    Tool calls that a message has beside its content follow that as JSON.

    >>> transcript([{"role": "assistant", "content": "1 + 1 ="}, {"role": "tool", "name": "add", "content": "2"}])
    'assistant: 1 + 1 =\\ntool add: 2'
    """
    heads = [" ".join(filter(None, (turn.get("role"), turn.get("name")))) for turn in chat]
    return "\n".join(f"{head}: {_said(turn)}" for head, turn in zip(heads, chat, strict=True))


def _said(turn: Mapping[str, Any]) -> str:
    content = turn.get("content")
    calls = [text_of(dict(call)) for call in calls_of(turn)]
    return "\n".join([*([] if content is None and calls else [text_of(content)]), *calls])


def messages(question: str, reference: str, response: str, method: str = "strict") -> list[dict[str, str]]:
    """Returns the default chat that requests a score."""
    problem = _PROBLEM.format(reference=reference, question=question, response=response)
    return [
        {"role": "system", "content": _INSTRUCTION.format(rule=RULES[method])},
        {"role": "user", "content": problem},
    ]


def read_messages(chat: Sequence[Mapping[str, str]]) -> tuple[str, str, str, str]:
    """Returns question, reference, response and method of a chat that :func:`messages` made.

    Raises:
        ValueError: the chat has another form.
    """
    system, user = (next((m["content"] for m in chat if m.get("role") == role), "") for role in ("system", "user"))
    head, middle, last, tail = _PARTS
    reference, found, rest = user.removeprefix(head).partition(middle)
    # The response comes last, so tags within it belong to it.
    question, found_too, response = rest.partition(last)
    method = next((name for name, rule in RULES.items() if rule in system), None)
    whole = user.startswith(head) and found and found_too and response.endswith(tail)
    if not whole or method is None:
        raise ValueError("the chat holds no problem to grade")
    return question, reference, response.removesuffix(tail), method
